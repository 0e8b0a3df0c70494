"""Read the header of a .safetensors file, and check it against the size of the file before any tensor is read.

The file has the length of the header in 8 bytes, the header in JSON, and the bytes of the tensors.
Source: https://huggingface.co/docs/safetensors, section Format.
"""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

from llama.untrusted.json_object import MOST_OF, parse_object
from llama.untrusted.words import printable

_MOST_SIDES = 16
_MOST_NUMBERS = 1 << 60  # an empty tensor counts without its empty sides: libraries have strides of 64 bits


@dataclass(frozen=True)
class Span:
    """A tensor in a file: the name of its dtype, its shape, and its bytes, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """A checked header: the metadata, the tensors in the order of their bytes, and the file's first byte of tensors."""

    metadata: dict[str, str]
    tensors: dict[str, Span]
    data: int


def read_header(
    file: BinaryIO | mmap.mmap,
    size: int,
    *,
    dtypes: Mapping[str, int],
    header_limit: int = 8 << 20,  # bytes; 512 layers of tensors with long names take 1 MB, and the format allows 100 MB
    tensor_limit: int = 1 << 14,
    most_of: Mapping[str, int] = MOST_OF,
) -> Header:
    """Return the header of a file of `size` bytes, read from its first byte; the next byte is the first tensor's.

    `dtypes` maps the allowed dtypes to the bytes of a number; `most_of` is that of `parse_object`. Raises ValueError if
    the header or the number of tensors exceeds its limit, and unless the tensors, which may be empty, fill the rest of
    the file without overlap or gap.
    """
    length, longest = int.from_bytes(file.read(8), "little"), max(min(size - 8, header_limit), 0)
    if size < 8 or length > longest:
        raise ValueError(
            f"its header has {length} bytes, and the limit is {longest}: it is truncated, or no .safetensors file; "
            "copy it again"
        )
    entries = parse_object(file.read(length), most_of=most_of)
    metadata = entries.pop("__metadata__", {})
    if type(metadata) is not dict or not all(type(value) is str for value in metadata.values()):
        raise ValueError("__metadata__ must map names to texts")
    if len(entries) > tensor_limit:
        raise ValueError(f"{len(entries)} tensors are more than the limit of {tensor_limit}")
    spans = [(name, _span(name, entry, dtypes)) for name, entry in entries.items()]
    spans.sort(key=lambda item: (item[1].begin, item[1].end))
    _check_side_by_side(spans, size - 8 - length)
    return Header(metadata, dict(spans), 8 + length)


def _span(name: str, entry: Any, dtypes: Mapping[str, int]) -> Span:
    """Return a tensor's entry if there are as many bytes between its offsets as its shape and dtype need."""
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{printable(name, 80)} must have a dtype, a shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in dtypes:
        raise ValueError(f"{printable(name, 80)} is {printable(str(dtype), 80)}; supported: {', '.join(dtypes)}")
    for numbers in (shape, offsets):
        if type(numbers) is not list or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{printable(name, 80)} has {numbers!r:.80} where whole numbers from 0 on must be")
    if len(shape) > _MOST_SIDES or prod(side or 1 for side in shape) >= _MOST_NUMBERS:
        raise ValueError(
            f"{printable(name, 80)} has the shape {shape!r:.80}; the limits are {_MOST_SIDES} dimensions and "
            f"{_MOST_NUMBERS} numbers"
        )
    nbytes = prod(shape) * dtypes[dtype]
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise ValueError(
            f"{printable(name, 80)} of shape {shape!r:.80} needs {nbytes} bytes, which is not the number between "
            f"{offsets!r:.80}"
        )
    return Span(dtype, tuple(shape), *offsets)


def _check_side_by_side(spans: list[tuple[str, Span]], size: int) -> None:
    """Raise ValueError unless the spans, in order of their bytes, fill `size` bytes without overlap or gap."""
    end = 0
    for name, span in spans:
        if span.begin != end:
            raise ValueError(
                f"{printable(name, 80)} begins at byte {span.begin} and must begin at {end}: there is an overlap or gap"
            )
        end = span.end
    if end != size:
        raise ValueError(
            f"its tensors need {end} bytes, and {size} follow the header: it is truncated, or longer than it was; "
            "copy it again"
        )
