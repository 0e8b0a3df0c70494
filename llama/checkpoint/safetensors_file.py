"""A .safetensors file: its header, checked before a byte of data is read, and its tensors in the mapped file.

Knows the format's bytes and no names of a model. The file is opened once, so that what was checked is what is mapped;
the `safetensors` package reads the header for itself, and keeps every entry of it before it looks at the first.
Source: https://huggingface.co/docs/safetensors, section Format.
"""

import mmap
from collections.abc import Callable, Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from llama.checkpoint.base import Weight, refusing
from llama.checkpoint.mapped import MappedFile
from llama.json_files import parse_object
from llama.words import printable

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Far above every real file: the format itself allows 100 MB. 512 layers of tensors with long names take 1 MB.
_LONGEST_HEADER = 8 << 20
_MOST_TENSORS = 1 << 14
_MOST_SIDES = 8

Spans = dict[str, tuple[torch.dtype, list[int], int]]  # a tensor's dtype, shape, and first byte after the header


def read_safetensors(path: Path, check: Callable[[Collection[str]], None]) -> dict[str, Weight]:
    """Return the file's tensors by name, still in it. Raises CheckpointError.

    `check(names)` may raise it, too, before anything is made of the tensors.
    """
    mapped = MappedFile(path)
    with refusing(path, "is not a .safetensors file that can be used"):
        spans, data = parse_header(mapped.data)
        check(spans.keys())
        return {name: mapped.weight(data + begin, tuple(shape), dtype) for name, (dtype, shape, begin) in spans.items()}


def parse_header(mapped: mmap.mmap | bytes) -> tuple[Spans, int]:
    """Return what the header of a whole file says of its tensors, and at which byte their data begin.

    Raises ValueError unless tensors of `DTYPES`, none of them empty, fill the file side by side to its end.
    """
    length = int.from_bytes(mapped[:8], "little")
    if len(mapped) < 8 or length > min(len(mapped) - 8, _LONGEST_HEADER):
        raise ValueError(f"its header has {length} bytes, which is over the limit of {_LONGEST_HEADER} or its own end")
    header = parse_object(mapped[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    if type(metadata) is not dict or not all(type(text) is str for text in metadata.values()):
        raise ValueError("__metadata__ must hold texts by name")
    if len(header) > _MOST_TENSORS:
        raise ValueError(f"{len(header)} tensors are more than the limit of {_MOST_TENSORS}")
    sizes = {name: _size(name, entry) for name, entry in header.items()}
    _check_side_by_side(header, sizes, len(mapped) - 8 - length)
    return {
        name: (DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"][0]) for name, entry in header.items()
    }, 8 + length


def _size(name: str, entry: Any) -> int:
    """Return how many bytes a tensor takes, once its entry is known to be one, with as many between its offsets."""
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{printable(name, 80)} must have a dtype, a shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in DTYPES:
        raise ValueError(f"{printable(name, 80)} is {printable(str(dtype), 80)}; {', '.join(DTYPES)} are read")
    for numbers in (shape, offsets):
        if type(numbers) is not list or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{printable(name, 80)} has {numbers!r:.80} where whole numbers from 0 on must be")
    nbytes = prod(shape) * DTYPES[dtype].itemsize if len(shape) <= _MOST_SIDES else 0
    if nbytes == 0:
        raise ValueError(
            f"{printable(name, 80)} of shape {shape!r:.80} is empty, or has more than {_MOST_SIDES} dimensions"
        )
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise ValueError(
            f"{printable(name, 80)} of shape {shape} takes {nbytes} bytes, which is not between {offsets!r:.80}"
        )
    return nbytes


def _check_side_by_side(header: Mapping[str, Any], sizes: Mapping[str, int], data_size: int) -> None:
    """Refuse tensors that overlap, or leave a byte of the data to none of them."""
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
        begin = entry["data_offsets"][0]
        if begin != end:
            raise ValueError(
                f"{printable(name, 80)} begins at byte {begin} and must at {end}: they overlap, or leave a hole"
            )
        end = begin + sizes[name]
    if end != data_size:
        raise ValueError(f"its tensors end at byte {end} and its data at {data_size}: it is truncated, or longer")
