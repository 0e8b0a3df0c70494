"""Read the header of a .gguf file: metadata as plain values, and the position of each tensor.

The `gguf` package is not used: its reader hangs on a file of 49 bytes. The memory for a header is bounded: the total
counts of strings, numbers and tensors have limits, and arrays that are not requested are skipped.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and what llama.cpp rejects.
"""

import math
import mmap
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama.untrusted.errors import refusing
from llama.untrusted.files import mapped
from llama.untrusted.gguf_sizes import FILE_BLOCKS, FLOATS, NAMES
from llama.untrusted.words import printable

# Far above every real file, and low enough that rejecting a malicious one takes little time and memory.
_MOST_BYTES = 128 << 20
_MOST_TENSORS = 1 << 14
_MOST_PAIRS = 1 << 14
_MOST_STRINGS = 1 << 20  # in total; the largest vocabularies have 0.8 million, with merges
_MOST_NUMBERS = 1 << 20  # in all values that are returned
_MOST_TEXT = 16 << 20  # bytes of all strings that are returned
_LONGEST_STRING = 1 << 20
_LONGEST_NAME = 64

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_ENTRIES = [struct.Struct(f"<{n_dims}QIQ") for n_dims in range(1, 5)]  # dimensions, type, offset


@dataclass(frozen=True)
class TensorInfo:
    """A tensor in the file: its type, its shape (rows first, as in torch), its first byte, and its number of bytes."""

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Unread:
    """An array that was skipped, and its number of values. It is equal to no value of another type."""

    count: int


@dataclass(frozen=True)
class GgufHeader:
    """A checked header: metadata as plain values, the position of each tensor, and the bytes of the whole file."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: mmap.mmap | bytes


def read_gguf_header(path: Path, *, arrays: Collection[str] | None = None) -> GgufHeader:
    """Return the checked header of a file, whose tensors lie side by side without gaps.

    `arrays`: the keys whose arrays are returned; others are `Unread`. None: all. Raises CheckpointError.
    """
    with refusing(path, "is not a .gguf file that can be used"):
        return parse_header(mapped(path), arrays=arrays)


def parse_header(data: mmap.mmap | bytes, *, arrays: Collection[str] | None = None) -> GgufHeader:
    """Return the header as `read_gguf_header` does, from the bytes of a file. Raises ValueError or struct.error."""
    cursor = _Cursor(data)
    if cursor.take(4) != b"GGUF":
        raise ValueError("it does not start with GGUF")
    (version,) = cursor.unpack(_U32)
    if version not in (2, 3):
        raise ValueError(f"version {version} is not supported; supported: 2 and 3, little-endian")
    n_tensors = cursor.count("tensors", _MOST_TENSORS)
    n_pairs = cursor.count("pairs of metadata", _MOST_PAIRS)
    metadata: dict[str, Any] = {}
    for _ in range(n_pairs):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"repeats the key {key!r:.80}")
        metadata[key] = cursor.value(wanted=arrays is None or key in arrays)
    tensors: dict[str, TensorInfo] = {}
    for _ in range(n_tensors):
        name = cursor.string(_LONGEST_NAME)
        if name in tensors:
            raise ValueError(f"repeats the tensor {printable(name)}")
        tensors[name] = _read_tensor_info(cursor, name)
    return GgufHeader(metadata, _place(tensors, metadata, cursor.at, len(data)), data)


class _Cursor:
    """Reads the header from front to back, never past its end, with limits for the total of what it returns."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data = data
        self.end = min(len(data), _MOST_BYTES)
        self.at = 0
        self.strings_left, self.numbers_left, self.text_left = _MOST_STRINGS, _MOST_NUMBERS, _MOST_TEXT

    def step(self, count: int) -> int:
        """Skip `count` bytes and return the position of the first."""
        if count > self.end - self.at:
            raise ValueError(f"{count} bytes are needed at byte {self.at} and {self.end - self.at} are left")
        self.at += count
        return self.at - count

    def take(self, count: int) -> bytes:
        return self.data[self.step(count) : self.at]

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        return layout.unpack_from(self.data, self.step(layout.size))

    def count(self, what: str, limit: int) -> int:
        (count,) = self.unpack(_U64)
        if count > limit:
            raise ValueError(f"{count} {what} are more than the limit of {limit}")
        return int(count)

    def string(self, longest: int = _LONGEST_STRING) -> str:
        return self.strings(1, longest)[0]

    def strings(self, count: int, longest: int = _LONGEST_STRING, *, wanted: bool = True) -> list[str]:
        """Return `count` strings, or skip them and return [] if they are not wanted."""
        self.strings_left -= count
        if self.strings_left < 0:
            raise ValueError(f"it has more strings than the limit of {_MOST_STRINGS}")
        found = []
        data, begin = self.data, self.at
        end = min(self.end, begin + 8 * count + self.text_left) if wanted else self.end
        for _ in range(count):
            (length,) = _U64.unpack_from(data, self.at)
            start = self.at + 8
            self.at = start + length
            if length > longest or self.at > end:
                raise ValueError(f"a string of {length} bytes at byte {start} is over a limit")
            if wanted:
                found.append(data[start : self.at].decode("utf-8"))
        if wanted:
            self.text_left -= self.at - begin - 8 * count
        return found

    def value(self, *, wanted: bool) -> Any:
        (kind,) = self.unpack(_U32)
        if kind != _ARRAY:
            return self.items(kind, 1)[0]
        (kind,), (count,) = self.unpack(_U32), self.unpack(_U64)
        found = self.items(kind, count, wanted=wanted)
        return found if wanted else Unread(count)

    def items(self, kind: int, count: int, *, wanted: bool = True) -> list[Any]:
        """Return `count` values of a type, or skip them and return [] if they are not wanted."""
        if kind == _STRING:
            return self.strings(count, wanted=wanted)
        if kind not in _SCALARS:
            raise ValueError(f"a value of type {kind} is not supported")
        start = self.step(count * struct.calcsize(f"<{_SCALARS[kind]}"))
        if not wanted:
            return []
        self.numbers_left -= count
        if self.numbers_left < 0:
            raise ValueError(f"it has more numbers than the limit of {_MOST_NUMBERS}")
        if kind == _BOOL and self.data[start : self.at].strip(b"\0\1"):
            raise ValueError(f"a bool before byte {self.at} is neither 0 nor 1")
        return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self.data, start))


def _read_tensor_info(cursor: _Cursor, name: str) -> TensorInfo:
    """Return one entry of the table, whose `start` is relative to the end of the header."""
    (n_dims,) = cursor.unpack(_U32)
    if not 1 <= n_dims <= 4:
        raise ValueError(f"{printable(name)} has {n_dims} dimensions")
    *dims, number, start = cursor.unpack(_ENTRIES[n_dims - 1])
    if number not in NAMES:
        raise ValueError(f"{printable(name)} is {_kind_name(number)}; supported: {', '.join(NAMES.values())}")
    kind = NAMES[number]
    block, size = FILE_BLOCKS[kind]
    if 0 in dims or dims[0] % block or (kind not in FLOATS and n_dims == 1):
        raise ValueError(f"{printable(name)} of type {kind} has dimensions {dims}")
    return TensorInfo(kind, tuple(reversed(dims)), start, math.prod(dims) // block * size)


def _place(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, Any], header_size: int, file_size: int
) -> dict[str, TensorInfo]:
    """Return the table with offsets from the start of the file, after checking them.

    As in llama.cpp, every tensor begins at the aligned end of the one before it in the table. So no tensors overlap,
    and there are no gaps. Bytes behind the last tensor are padding and allowed.
    """
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment not in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        raise ValueError(f"general.alignment={alignment!r:.80} must be a power of two from 8 to 4096")
    base = end = -(-header_size // alignment) * alignment
    placed = {}
    for name, info in tensors.items():
        if base + info.start != end:
            raise ValueError(
                f"{printable(name)} is at offset {info.start} and must be at {end - base}, the end of the previous "
                "tensor: they overlap, or there is a gap"
            )
        placed[name] = TensorInfo(info.kind, info.shape, end, info.nbytes)
        end += info.nbytes
        if end > file_size:
            raise ValueError(f"{printable(name)} ends at byte {end}, and the file at {file_size}: it is truncated")
        end = -(-end // alignment) * alignment
    return placed


def _kind_name(number: int) -> str:
    from gguf.constants import GGMLQuantizationType  # here, because the package is slow to import

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return f"of an unknown type ({number})"
