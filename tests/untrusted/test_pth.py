"""A .pth archive is read by its directory, which must agree with the headers of the records."""

import io
import re
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fuzz import fuzz_pickle
from fuzz.fuzz_pickle import same_bits, saved
from tables import table

from llama.checkpoint import CheckpointError
from llama.checkpoint.assemble import Weight
from llama.untrusted.mapped import MappedFile
from llama.untrusted.pth import read_pth_header
from llama.untrusted.zip_reader import MAX_RECORDS, read_records

CONTENT = {"norm.weight": torch.arange(5).bfloat16(), "output.weight": torch.arange(12).view(4, 3) / 7}
ARCHIVE = saved(CONTENT)


def refusal(data: bytes, tmp_path: Path) -> str:
    path = tmp_path / "malicious.pth"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        read_pth_header(MappedFile(path))
    assert caught.value.path == path
    assert type(caught.value.__cause__) is ValueError
    assert caught.value.reason.startswith("is not a .pth file that can be used: ")
    return caught.value.reason


# ---- archives that are read ------------------------------------------------------------------------------------------


def test_the_records_are_those_that_zipfile_finds() -> None:
    for archive in fuzz_pickle.ARCHIVES:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            theirs = {info.filename.partition("/")[2]: opened.read(info) for info in opened.infolist()}
        ours = read_records(archive)
        assert {name: archive[record.start : record.end] for name, record in ours.items()} == theirs


def test_the_end_record_may_leave_every_number_to_the_one_of_64_bits() -> None:
    later = struct.pack("<4H2L", *[0xFFFF] * 4, *[0xFFFFFFFF] * 2)
    assert read_records(ARCHIVE[:-18] + later + ARCHIVE[-2:]) == read_records(ARCHIVE)


def rewritten(archive: bytes, folder: str = "archive", *, lacking: tuple[str, ...] = (), big: bool = False) -> bytes:
    """Return the archive as Python's zipfile writes it: nothing is aligned, and sizes stand in the headers."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as opened, zipfile.ZipFile(buffer, "w") as made:
        for info in opened.infolist():
            name = info.filename.partition("/")[2]
            if name not in lacking:
                with made.open(f"{folder}/{name}", "w", force_zip64=big) as record:
                    record.write(opened.read(info))
    return buffer.getvalue()


@pytest.mark.parametrize("folder", ["archive", "modèle 1", "x" * 200])
@pytest.mark.parametrize("big", [False, True])
def test_an_archive_of_another_writer_is_read_to_the_bit(tmp_path: Path, folder: str, big: bool) -> None:
    path = tmp_path / "rewritten.pth"
    path.write_bytes(rewritten(ARCHIVE, folder, big=big))
    assert any(place.start % place.dtype.itemsize for place in read_pth_header(MappedFile(path)).values())
    assert all(same_bits(tensor, CONTENT[name]) for name, tensor in fuzz_pickle.loaded(path).items())


def test_an_archive_of_an_old_torch_has_fewer_records(tmp_path: Path) -> None:
    path = tmp_path / "old.pth"
    path.write_bytes(
        rewritten(ARCHIVE, lacking=("byteorder", ".format_version", ".storage_alignment", ".data/serialization_id"))
    )
    assert {name for name in read_records(path.read_bytes()) if "data/" not in name} == {"data.pkl", "version"}
    assert all(same_bits(tensor, CONTENT[name]) for name, tensor in fuzz_pickle.loaded(path).items())


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system with holes in files")
def test_records_of_more_than_4_gigabytes_are_found(tmp_path: Path) -> None:
    """Sizes and places of 64 bits. The file is a hole with headers around it."""
    path = tmp_path / "large.pth"
    large = torch.empty(5 << 28)  # its memory is never touched
    with torch.serialization.skip_data():
        torch.save({"a": large, "b": torch.ones(3)}, path)
    assert path.stat().st_size > 5 << 30
    places = read_pth_header(MappedFile(path))
    with zipfile.ZipFile(path) as archive:
        first, second = (archive.getinfo(f"large/data/{key}").header_offset for key in "01")
    assert places["a"].end - places["a"].start == 5 << 30
    assert first < places["a"].start < places["a"].end < second < places["b"].start
    assert not places["b"].start % 64


def test_rows_of_a_large_mapping_are_dropped_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "dropped.pth"
    torch.save({"a": torch.arange(100_000.0).view(1000, 100)}, path)
    (place,) = read_pth_header(MappedFile(path)).values()
    weight = Weight.mapped(MappedFile(path), place.start, place.shape, place.dtype)
    for _ in range(2):
        assert torch.equal(weight.rows(10, 990).flatten(), torch.arange(1000.0, 99_000))
        weight.drop()


# ---- archives that are not -------------------------------------------------------------------------------------------

END = len(ARCHIVE) - 22
LOCATOR = END - 20
END_64 = LOCATOR - 56
DIRECTORY = int.from_bytes(ARCHIVE[END + 16 : END + 20], "little")
DATA_0 = ARCHIVE.index(b"archive/data/0")
ENTRY = ARCHIVE.index(b"archive/data/0", DIRECTORY) - 46  # of data/0 in the directory
HEADER = DATA_0 - 30


def put(at: int, layout: str, *values: int) -> Callable[[bytes], bytes]:
    def change(archive: bytes) -> bytes:
        new = struct.pack(f"<{layout}", *values)
        return archive[:at] + new + archive[at + len(new) :]

    return change


DAMAGED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "no zip": (lambda a: b"x" * 100, "not a zip archive"),
    "something behind": (lambda a: a + b"x", "not a zip archive"),
    "something before": (lambda a: b"x" + a, "the archive's two end records disagree"),
    "something before another writer's": (lambda a: b"x" + rewritten(a), "is not where its end record says"),
    "a comment": (put(END + 20, "H", 5), "the archive's directory is not where its end record says"),
    "two disks": (lambda a: ended(a[:END_64], disk=1), "the archive's directory is not where its end record says"),
    "fewer here": (lambda a: put(8 - 22, "H", 1)(a), "the archive's two end records disagree"),
    "more records than there are": (
        lambda a: ended(a[:END_64], count=9),
        "has no entry of its directory at byte .*: it is damaged",
    ),
    "fewer records than there are": (
        lambda a: ended(a[:END_64], count=7),
        "has more records than its count of 7",
    ),
    "8193 records": (lambda a: ended(a[:END_64], count=MAX_RECORDS + 1), "has 8193 records; the limit is 8192"),
    "a directory that starts earlier": (
        lambda a: ended(a[:END_64], first=DIRECTORY - 1, length=END_64 - DIRECTORY),
        "is not where its end record says",
    ),
    "a directory that is shorter": (lambda a: ended(a[:END_64], length=5), "is not where its end record says"),
    "no end in 64 bits": (put(END_64, "I", 0), "has no end in 64 bits at byte .*: it is damaged"),
    "an end in 64 bits elsewhere": (put(LOCATOR + 8, "Q", 0), "the archive's two end records disagree"),
    "an end in 64 bits on another disk": (put(LOCATOR + 4, "I", 1), "the archive's two end records disagree"),
    "an end in 64 bits of two disks": (put(LOCATOR + 16, "I", 2), "the archive's two end records disagree"),
    "a longer end in 64 bits": (put(END_64 + 4, "Q", 45), "the archive's two end records disagree"),
    "another count in 64 bits": (put(END_64 + 32, "Q", 9), "the archive's two end records disagree"),
    "another place in 64 bits": (put(END_64 + 48, "Q", DIRECTORY - 46), "the archive's two end records disagree"),
    "a record that is encrypted": (put(ENTRY + 8, "H", 0x0809), "is compressed or encrypted"),
    "a record that is compressed": (put(ENTRY + 10, "H", 8), "is compressed or encrypted"),
    "a record packed to less": (put(ENTRY + 20, "I", 5), "is compressed or encrypted"),
    "a folder for DOS": (put(ENTRY + 38, "I", 0x10), "is compressed or encrypted, or a folder"),
    "a comment of a record": (put(ENTRY + 32, "H", 1), "differs from what torch.save writes"),
    "a record on another disk": (put(ENTRY + 34, "H", 1), "differs from what torch.save writes"),
    "a name past the end": (put(ENTRY + 28, "H", 500), "differs from what torch.save writes"),
    "extra fields past the end": (put(ENTRY + 30, "H", 60000), "differs from what torch.save writes"),
    "a record behind the end": (
        put(ENTRY + 42, "I", 1 << 31),
        "has no header of a record at byte 2147483648: it is damaged",
    ),
    "a record where another is": (put(ENTRY + 42, "I", 0), "and its header at byte 0 disagree"),
    "a record without a header": (put(HEADER, "I", 0), "has no header of a record at byte"),
    "another name in the header": (put(DATA_0 + 13, "B", ord("7")), "and its header at byte .* disagree"),
    "a longer name in the header": (put(HEADER + 26, "H", 15), "and its header at byte .* disagree"),
    "a header that says compressed": (put(HEADER + 8, "H", 8), "and its header at byte .* disagree"),
    "a header that says encrypted": (put(HEADER + 6, "H", 0x0809), "and its header at byte .* disagree"),
    "a header of another size": (put(HEADER + 18, "II", 9, 9), "and its header at byte .* disagree"),
    "a record that reaches into the directory": (put(HEADER + 28, "H", 60000), "data/0' ends at byte .* must end by"),
    "a record without its size": (put(ENTRY + 20, "II", 0xFFFFFFFF, 0xFFFFFFFF), "has no size or position of"),
    "a size that stands nowhere": (lambda a: with_extra(a, b""), "has no size or position of"),
    "half a field": (lambda a: with_extra(a, b"\1\0\x10"), "has no size or position of"),
    "a size of 64 bits twice": (
        lambda a: with_extra(a, struct.pack("<HHQ", 1, 8, 10) * 2),
        "has no size or position of",
    ),
    "a size of 64 bits that wraps": (
        lambda a: with_extra(a, struct.pack("<HHQQ", 1, 16, (1 << 64) - 1, (1 << 64) - 1)),
        "data/0' ends at byte .* must end by",
    ),
    "a record twice": (lambda a: named(["version", "version"]), "repeats a name, 'archive/version'"),
    "two folders": (lambda a: named(["version", "../other/version"]), "'archive/../other/version', a path outside"),
    "another folder": (lambda a: named(["version"], ["other/data.pkl"]), "'other/data.pkl', a path outside"),
    "no folder": (lambda a: named([], ["data.pkl"]), "'data.pkl', a path outside its one folder"),
    "a name that acts on a terminal": (
        lambda a: named(["data.pkl", "\x1b[2J"]),
        r"contains '\\x1b\[2J', which torch.save does not",
    ),
    "no pickle": (lambda a: named(["version"]), "the archive has no data.pkl; save a dict"),
    "a pickle of 5 MB": (
        lambda a: named(["data.pkl"], size=5 << 20),
        "data.pkl has 5242880 bytes; the limit is 4194304",
    ),
    "big-endian numbers": (lambda a: a.replace(b"Zlittle", b"Zbigbig"), "the byte order is not little-endian"),
    "an order that begins as ours": (
        lambda a: rewritten(ARCHIVE, lacking=("byteorder",)) and named(["byteorder", "data.pkl"], size=7, fill=b"l"),
        "the byte order is not little-endian",
    ),
    "no record for a tensor": (
        lambda a: rewritten(a, lacking=("data/1",)),
        "output.weight needs a record of 48 bytes, .* none",
    ),
    "a record of another size": (
        lambda a: a.replace(b"K\x0ct", b"K\x0dt"),
        "output.weight needs a record of 52 bytes, and there is one of 48",
    ),
    "a record for no tensor": (lambda a: extended(a, "data/7"), "the archive's record 'data/7' belongs to no tensor"),
}


def ended(body: bytes, *, count: int = 8, first: int = DIRECTORY, length: int | None = None, disk: int = 0) -> bytes:
    """Return records and a directory with an end of 32 bits only, which says this."""
    length = len(body) - first if length is None else length
    return body + struct.pack("<4s4H2IH", b"PK\5\6", disk, 0, count, count, length, first, 0)


def with_extra(archive: bytes, extra: bytes) -> bytes:
    """Return the archive with a directory that leaves the size of data/0 to these extra fields."""
    at = ENTRY + 46 + len("archive/data/0")
    changed = put(ENTRY + 20, "II", 0xFFFFFFFF, 0xFFFFFFFF)(put(ENTRY + 30, "H", len(extra))(archive))
    return ended(changed[:at] + extra + changed[at:END_64])


def named(names: list[str], others: list[str] | None = None, *, size: int = 1, fill: bytes = b"x") -> bytes:
    """Return an archive of records of so many bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name in [f"archive/{name}" for name in names] + (others or []):
            made.fp.seek(0, io.SEEK_END)
            made.NameToInfo.pop(name, None)  # no warning that a name is there twice
            made.writestr(name, fill * size)
    return buffer.getvalue()


def extended(archive: bytes, name: str) -> bytes:
    buffer = io.BytesIO(rewritten(archive))
    with zipfile.ZipFile(buffer, "a") as made:
        made.writestr(f"archive/{name}", b"unused")
    return buffer.getvalue()


@table("what", DAMAGED)
def test_an_ambiguous_archive_is_refused(tmp_path: Path, what: str) -> None:
    change, reason = DAMAGED[what]
    message = refusal(change(ARCHIVE), tmp_path)
    assert re.search(reason, message), message
    assert message.isprintable()


def test_every_cut_is_refused() -> None:
    for end in range(len(ARCHIVE)):
        with pytest.raises(ValueError, match="archive") as caught:
            read_records(ARCHIVE[:end])
        assert type(caught.value) is ValueError


def test_tensors_may_not_overlap_unless_they_are_a_tied_head(tmp_path: Path) -> None:
    path = tmp_path / "shared.pth"
    flat = torch.arange(12.0)
    torch.save({"tok_embeddings.weight": flat, "output.weight": flat}, path)
    assert len(read_pth_header(MappedFile(path))) == 2
    torch.save({"tok_embeddings.weight": flat, "norm.weight": flat}, path)
    with pytest.raises(CheckpointError, match=r"tok_embeddings\.weight overlap"):
        read_pth_header(MappedFile(path))
    torch.save({"tok_embeddings.weight": flat, "output.weight": flat[:6]}, path)
    with pytest.raises(CheckpointError, match="overlap"):
        read_pth_header(MappedFile(path))
    torch.save({"a": flat[:4], "b": flat[4:7], "c": flat[9:]}, path)
    assert [place.shape for place in read_pth_header(MappedFile(path)).values()] == [(4,), (3,), (3,)]
