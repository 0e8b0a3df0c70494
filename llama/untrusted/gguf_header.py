"""The header of a .gguf file: metadata as plain values, and where each tensor lies.

Knows the format's bytes and none of its keys but the alignment. It is read here and not by the `gguf` package, whose
reader hangs on a file of 49 bytes. What a header makes us keep is bounded: strings, numbers and tensors each by a
count in total, and arrays that nobody asked for are stepped over.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and what llama.cpp refuses.
"""

import math
import mmap
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llama.untrusted.errors import refusing
from llama.untrusted.gguf_sizes import FILE_BLOCKS, FLOATS, NAMES
from llama.untrusted.mapped import MappedFile
from llama.untrusted.words import printable

# Far above every real file, and low enough that refusing a hostile one takes little time and memory.
_MOST_BYTES = 128 << 20
_MOST_TENSORS = 1 << 14
_MOST_PAIRS = 1 << 14
_MOST_STRINGS = 1 << 20  # in all: the largest vocabularies have 0.8 million, merges included
_MOST_NUMBERS = 1 << 20  # in all arrays that are kept
_MOST_TEXT = 16 << 20  # bytes of all strings that are kept
_LONGEST_STRING = 1 << 20
_LONGEST_NAME = 64

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_ENTRIES = [struct.Struct(f"<{n_dims}QIQ") for n_dims in range(1, 5)]  # dimensions, type, offset


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is: its type, its shape (rows first, as in torch), its first byte in the file and how many."""

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Unread:
    """An array that nobody asked for: how many values it has. It equals no value, so nothing takes it for one."""

    count: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself: metadata as plain values, and where each tensor is."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path, *, arrays: Collection[str] | None = None) -> Header:
    """Read and check all but the weights: the tensors are known to fill the file side by side, up to its end.

    `arrays`: the keys whose arrays are wanted, others are left `Unread`; None: all are. Raises CheckpointError.
    """
    return header_of(MappedFile(path), arrays=arrays)


def header_of(mapped: MappedFile, *, arrays: Collection[str] | None = None) -> Header:
    """Do as `read_header` with a file that is mapped already."""
    with refusing(mapped.path, "is not a .gguf file that can be used"):
        return parse_header(mapped.data, arrays=arrays)


def parse_header(data: mmap.mmap | bytes, *, arrays: Collection[str] | None = None) -> Header:
    """Do as `read_header` with the bytes of a whole file. Raises ValueError, or struct.error, for what is wrong."""
    cursor = _Cursor(data)
    if cursor.take(4) != b"GGUF":
        raise ValueError("it does not start with GGUF")
    (version,) = cursor.unpack(_U32)
    if version not in (2, 3):
        raise ValueError(f"version {version}; 2 and 3 are read, in little-endian order")
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
    return Header(metadata, _place(tensors, metadata, cursor.at, len(data)))


class _Cursor:
    """Reads the header from front to back, never past its end, and never keeps more than the limits in total."""

    def __init__(self, data: mmap.mmap | bytes) -> None:
        self.data = data
        self.end = min(len(data), _MOST_BYTES)
        self.at = 0
        self.strings_left, self.numbers_left, self.text_left = _MOST_STRINGS, _MOST_NUMBERS, _MOST_TEXT

    def step(self, count: int) -> int:
        """Go over so many bytes and return where they begin."""
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
        """Read so many strings; [] where they are not wanted, which are stepped over."""
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
                raise ValueError(f"a string of {length} bytes at byte {start} is over the limit, or leaves the header")
            if wanted:
                found.append(data[start : self.at].decode("utf-8"))
        if wanted:
            self.text_left -= self.at - begin - 8 * count
        return found

    def value(self, *, wanted: bool) -> Any:
        (kind,) = self.unpack(_U32)
        return self.array(wanted=wanted) if kind == _ARRAY else self.items(kind, 1)[0]

    def array(self, *, wanted: bool) -> list[Any] | Unread:
        (kind,), (count,) = self.unpack(_U32), self.unpack(_U64)
        if wanted and kind != _STRING:
            self.numbers_left -= count
            if self.numbers_left < 0:
                raise ValueError(f"its arrays hold more numbers than the limit of {_MOST_NUMBERS}")
        if wanted:
            return self.items(kind, count)
        if kind == _STRING:
            self.strings(count, wanted=False)
        else:
            self.step(count * struct.calcsize(f"<{self.code(kind)}"))
        return Unread(count)

    def items(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self.strings(count)
        layout = f"<{count}{self.code(kind)}"
        self.step(struct.calcsize(layout))
        found = struct.unpack_from(layout, self.data, self.at - struct.calcsize(layout))
        if kind == _BOOL and self.data[self.at - count : self.at].strip(b"\0\1"):
            raise ValueError(f"a truth value before byte {self.at} is neither 0 nor 1")
        return list(found)

    def code(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"a value of type {kind} is not supported here")
        return _SCALARS[kind]


def _read_tensor_info(cursor: _Cursor, name: str) -> TensorInfo:
    """Read one entry of the table; `start` still counts from the end of the header."""
    (n_dims,) = cursor.unpack(_U32)
    if not 1 <= n_dims <= 4:
        raise ValueError(f"{printable(name)} has {n_dims} dimensions")
    *dims, number, start = cursor.unpack(_ENTRIES[n_dims - 1])
    if number not in NAMES:
        raise ValueError(f"{printable(name)} is {_kind_name(number)}; {_kinds()} are read")
    kind = NAMES[number]
    block, size = FILE_BLOCKS[kind]
    if 0 in dims or dims[0] % block or (kind not in FLOATS and n_dims == 1):
        raise ValueError(f"{printable(name)} of type {kind} has dimensions {dims}")
    return TensorInfo(kind, tuple(reversed(dims)), start, math.prod(dims) // block * size)


def _place(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, Any], header_size: int, file_size: int
) -> dict[str, TensorInfo]:
    """Return the table with offsets from the start of the file, once it is sure that they hold what they claim.

    As llama.cpp has it: every tensor begins where the one before it in the table ends, up to the alignment. So none
    overlap, and no hole hides anything. What follows the last one is padding and let pass.
    """
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment not in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        raise ValueError(f"general.alignment={alignment!r:.80} must be a power of two from 8 to 4096")
    base = end = -(-header_size // alignment) * alignment
    placed = {}
    for name, info in tensors.items():
        if base + info.start != end:
            raise ValueError(
                f"{printable(name)} is at offset {info.start} and must be at {end - base}, where the tensor before it "
                "ends: they overlap, or leave a hole"
            )
        placed[name] = TensorInfo(info.kind, info.shape, end, info.nbytes)
        end += info.nbytes
        if end > file_size:
            raise ValueError(f"{printable(name)} ends at byte {end} and the file at {file_size}: it is truncated")
        end = -(-end // alignment) * alignment
    return placed


def _kinds() -> str:
    return ", ".join(NAMES.values())


def _kind_name(number: int) -> str:
    from gguf.constants import GGMLQuantizationType  # here, because the package is slow to import

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return f"of an unknown type ({number})"
