"""Read the directory of a zip archive as torch.save writes it: the position of each record.

Nothing is extracted, decompressed or copied. The directory and the record's own header must agree on a record. Anything
that zip readers are known to interpret differently is rejected: compression, encryption, comments, data before or
behind the archive. Records may overlap: `pth` rejects tensors that do.
Source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3 and 4.5.3.
"""

import mmap
from dataclasses import dataclass
from struct import Struct

from llama.untrusted.pickle_reader import quoted

MAX_RECORDS = 1 << 13
_MAX_NAME = 1 << 9
_MAX_EXTRA = 1 << 8
_LATER_16, _LATER_32 = (1 << 16) - 1, (1 << 32) - 1  # the number is elsewhere, in 64 bits

_HAS_DESCRIPTOR = 1 << 3  # sizes are behind the record
_IS_UTF8 = 1 << 11
_IS_FOLDER = 1 << 4  # of the DOS attributes, which some readers use

# 4.3.7, 4.3.12, 4.3.16, 4.3.14, 4.3.15
_LOCAL = Struct("<4s2xHH8xIIHH")
_ENTRY = Struct("<4s4xHH8xIIHHHH2xII")
_END = Struct("<4sHHHHIIH")
_END_64 = Struct("<4sQ4xIIQQQQ")
_LOCATOR = Struct("<4sIQI")
_FIELD = Struct("<HH")
_SIGNATURES = {
    _LOCAL: b"PK\3\4",
    _ENTRY: b"PK\1\2",
    _END: b"PK\5\6",
    _END_64: b"PK\6\6",
    _LOCATOR: b"PK\6\7",
}
_CALLED = {_LOCAL: "header of a record", _ENTRY: "entry of its directory", _END_64: "end in 64 bits"}


@dataclass(frozen=True, slots=True)
class Record:
    """The position of a record: its first byte in the file, and its number of bytes."""

    start: int
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


def read_records(data: mmap.mmap | bytes) -> dict[str, Record]:
    """Return the records of the archive by their names, without their common folder.

    Raises only ValueError, if any part differs from what torch.save writes.
    """
    first, end, count = _directory(data)
    if count > MAX_RECORDS:
        raise ValueError(f"the archive has {count} records; the limit is {MAX_RECORDS}")
    records: dict[str, Record] = {}
    folders = set()
    at = first
    for _ in range(count):
        raw, record, at = _entry(data, at, first, end)
        folder, _, name = raw.partition("/")
        folders.add(folder)
        if len(folders) > 1 or not name or ".." in name.split("/"):
            raise ValueError(f"the archive contains {quoted(raw)}, a path outside its one folder")
        if name in records:
            raise ValueError(f"the archive repeats a name, {quoted(raw)}")
        records[name] = record
    if at != end:
        raise ValueError(f"the archive's directory has more records than its count of {count}")
    return records


def _is(data: mmap.mmap | bytes, layout: Struct, at: int, end: int) -> bool:
    """Return whether this structure is at `at` and ends by `end`."""
    return 0 <= at <= end - layout.size and data[at : at + 4] == _SIGNATURES[layout]


def _unpack(data: mmap.mmap | bytes, layout: Struct, at: int, end: int) -> tuple[int, ...]:
    """Return the numbers of the structure at `at`, which must end by `end`."""
    if not _is(data, layout, at, end):
        raise ValueError(f"the archive has no {_CALLED[layout]} at byte {at}: it is damaged")
    return layout.unpack_from(data, at)[1:]


def _directory(data: mmap.mmap | bytes) -> tuple[int, int, int]:
    """Return the first byte of the directory, its end, and its number of records."""
    at = len(data) - _END.size
    if not _is(data, _END, at, len(data)):
        raise ValueError("not a zip archive (truncated, with something behind it, or saved by a torch older than 1.6)")
    disk, disk_of_directory, here, count, length, first, comment = _unpack(data, _END, at, len(data))
    locator = at - _LOCATOR.size
    if _is(data, _LOCATOR, locator, at):
        narrow = (disk, disk_of_directory, here, count, length, first)
        at = locator - _END_64.size
        *place, disks = _unpack(data, _LOCATOR, locator, len(data))
        rest, *wide = _unpack(data, _END_64, at, locator)
        limits = (_LATER_16, _LATER_16, _LATER_16, _LATER_16, _LATER_32, _LATER_32)
        agree = all(a in (b, limit) for a, b, limit in zip(narrow, wide, limits, strict=True))
        if place != [0, at] or disks != 1 or rest != _END_64.size - 12 or not agree:
            raise ValueError("the archive's two end records disagree")
        disk, disk_of_directory, here, count, length, first = wide
    if disk or disk_of_directory or here != count or comment or first + length != at:
        raise ValueError("the archive's directory is not where its end record says")
    return first, at, count


def _entry(data: mmap.mmap | bytes, at: int, first: int, end: int) -> tuple[str, Record, int]:
    """Return the name and the record of the directory's entry at `at`, and the beginning of the next entry.

    The directory has the bytes from `first` to `end`; the record must end before it.
    """
    flags, method, packed, size, len_name, len_extra, len_comment, disk, attributes, header = _unpack(
        data, _ENTRY, at, end
    )
    extra_at = at + _ENTRY.size + len_name
    next_at = extra_at + len_extra
    if len_name > _MAX_NAME or len_extra > _MAX_EXTRA or len_comment or disk or next_at > end:
        raise ValueError(f"the archive's directory at byte {at} differs from what torch.save writes")
    raw = data[at + _ENTRY.size : extra_at]
    name = raw.decode(errors="backslashreplace")
    numbers = _in_64_bits(data[extra_at:next_at], size, packed, header)
    if numbers is None:
        raise ValueError(f"the archive's directory has no size or position of {quoted(name)}, or two")
    size, packed, header = numbers
    if method or size != packed or flags & ~(_HAS_DESCRIPTOR | _IS_UTF8) or attributes & _IS_FOLDER:
        raise ValueError(f"{quoted(name)} is compressed or encrypted, or a folder; save it with torch.save alone")
    record = Record(_start(data, header, first, raw, flags, size), size)
    if record.end > first:
        raise ValueError(f"the archive's record {quoted(name)} ends at byte {record.end} and must end by {first}")
    return name, record, next_at


def _in_64_bits(extra: bytes, *numbers: int) -> list[int] | None:
    """Return the numbers, with those that are marked as being in extra field 1; None if the field has other numbers."""
    found = []
    while extra:
        kind, length = _FIELD.unpack_from(extra) if len(extra) >= _FIELD.size else (0, 0)
        if kind == 1:
            found.append(extra[_FIELD.size : _FIELD.size + length])
        extra = extra[_FIELD.size + length :]
    wide = b"".join(found)
    if len(found) > 1 or len(wide) != 8 * numbers.count(_LATER_32):
        return None
    stored = iter(Struct(f"<{len(wide) // 8}Q").unpack(wide))
    return [next(stored) if number == _LATER_32 else number for number in numbers]


def _start(data: mmap.mmap | bytes, header: int, first: int, name: bytes, flags: int, size: int) -> int:
    """Return the first byte of the record, behind a header that agrees with the directory."""
    own_flags, method, packed, own_size, len_name, len_extra = _unpack(data, _LOCAL, header, first)
    start = header + _LOCAL.size + len_name
    sizes = {min(size, _LATER_32), _LATER_32} | ({0} if flags & _HAS_DESCRIPTOR else set())
    same = own_flags == flags and not method and sizes >= {packed, own_size} and len_name == len(name)
    if not same or data[start - len_name : start] != name:
        raise ValueError(f"the archive's directory and its header at byte {header} disagree")
    return start + len_extra
