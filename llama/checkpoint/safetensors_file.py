"""A .safetensors file of weights: its header, checked before any data is read, and its tensors in the mapped file.

Knows no names of a model. The file is opened once, so that what was checked is what is mapped; the `safetensors`
package reads the header itself, and stores every entry before it checks the first.
"""

from collections.abc import Callable, Collection
from pathlib import Path

import torch

from llama.checkpoint.base import Weight
from llama.untrusted.errors import refusing
from llama.untrusted.mapped import MappedFile
from llama.untrusted.safetensors_header import Header, Readable, read_header
from llama.untrusted.words import printable

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_safetensors(path: Path, check: Callable[[Collection[str]], None]) -> dict[str, Weight]:
    """Return the weights by name, still in the file. Raises CheckpointError.

    `check(names)` may raise it, too, before any weight is made.
    """
    mapped = MappedFile(path)
    with refusing(path, "is not a .safetensors file that can be used"):
        header = weights_header(mapped.data, len(mapped.data))
        check(header.tensors.keys())
        return {
            name: Weight.mapped(mapped, header.data + span.begin, span.shape, DTYPES[span.dtype])
            for name, span in header.tensors.items()
        }


def weights_header(file: Readable, size: int) -> Header:
    """Return the header as `read_header` does; raise ValueError for a tensor not of `DTYPES`, or an empty one."""
    header = read_header(file, size, dtypes={name: dtype.itemsize for name, dtype in DTYPES.items()})
    for name, span in header.tensors.items():
        if span.begin == span.end:
            raise ValueError(f"{printable(name, 80)} of shape {list(span.shape)!r:.80} is empty, and no weight may be")
    return header
