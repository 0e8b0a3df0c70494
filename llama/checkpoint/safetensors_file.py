"""A .safetensors file of weights: a header that is checked before any data is read, and the tensors in the mapped file.

The `safetensors` package is not used: it stores every entry of the header before it checks the first one. The file is
opened once, so that the checked bytes are the mapped ones.
"""

from collections.abc import Callable, Collection
from pathlib import Path

import torch

from llama.checkpoint.base import Weight
from llama.untrusted.errors import refusing
from llama.untrusted.mapped import MappedFile
from llama.untrusted.safetensors_header import Header, Readable, read_header
from llama.untrusted.words import printable

WEIGHT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_safetensors(path: Path, check: Callable[[Collection[str]], None]) -> dict[str, Weight]:
    """Return the weights by name, still in the file, after `check(names)`; both may raise CheckpointError."""
    mapped = MappedFile(path)
    with refusing(path, "is not a .safetensors file that can be used"):
        header = weights_header(mapped.data, len(mapped.data))
        check(header.tensors.keys())
        return {
            name: Weight.mapped(mapped, header.data + span.begin, span.shape, WEIGHT_DTYPES[span.dtype])
            for name, span in header.tensors.items()
        }


def weights_header(file: Readable, size: int) -> Header:
    """Return the header as `read_header` does. Raises ValueError for a dtype not in `WEIGHT_DTYPES`, or no numbers."""
    header = read_header(file, size, dtypes={name: dtype.itemsize for name, dtype in WEIGHT_DTYPES.items()})
    for name, span in header.tensors.items():
        if span.begin == span.end:
            raise ValueError(f"{printable(name, 80)} of shape {list(span.shape)!r:.80} is empty, and no weight may be")
    return header
