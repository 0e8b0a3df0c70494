"""Malicious bytes as a data.pkl, and as a whole .pth file.

An accepted file must give what torch reads record by record, without a mapping. A refusal must have a message.
"""

import io
import os
import pickletools
import tempfile
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

from llama.checkpoint.assemble import same_bits
from llama.checkpoint.meta import read_pth
from llama.untrusted.errors import CheckpointError


def run(data: bytes) -> None:
    """Read the bytes as the data.pkl of an archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(ARCHIVES[0])) as opened, zipfile.ZipFile(buffer, "w") as made:
        for name in opened.namelist():
            made.writestr(name, data if name.endswith("/data.pkl") else opened.read(name))
    run_archive(buffer.getvalue())


def run_archive(data: bytes) -> None:
    """Read the bytes as a .pth file."""
    path = Path(tempfile.gettempdir()) / f"fuzzed-{os.getpid()}.pth"
    path.write_bytes(data)
    try:
        tensors = read_pth(path)
    except CheckpointError as error:
        _check_refusal(str(error))
        return
    theirs = torch.load(path, map_location="cpu", weights_only=True)
    assert list(tensors) == list(theirs)
    assert all(same_bits(tensor, theirs[name].detach()) for name, tensor in tensors.items())


def _check_refusal(message: str) -> None:
    assert message.isprintable(), message
    assert len(message) < 1000, message


# ---- nearly valid pickles --------------------------------------------------------------------------------------------


def saved(content: object) -> bytes:
    """Return the archive that torch.save makes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def pickle_of(archive: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return opened.read(f"{opened.namelist()[0].partition('/')[0]}/data.pkl")


def operations(data: bytes) -> list[bytes]:
    """Cut a pickle into its operations."""
    places = [at for _, _, at in pickletools.genops(data)] + [len(data)]
    return [data[start:end] for start, end in pairwise(places)]


def contents() -> list[object]:
    """Return what the valid archives hold from which the others are made."""
    torch.manual_seed(0)
    flat = torch.randn(24)
    linear = torch.nn.Linear(3, 2)
    return [
        {"norm.weight": torch.randn(3), "output.weight": torch.randn(2, 3).bfloat16()},
        {"a": flat[:8].view(2, 4), "b": flat[8:20], "c": torch.ones(2, 1, 3).half()},
        linear.state_dict(),
        dict(linear.named_parameters()),
        {"tok_embeddings.weight": flat, "output.weight": flat},
        {},
    ]


ARCHIVES = [saved(content) for content in contents()]
PICKLES = [operations(pickle_of(archive)) for archive in ARCHIVES]
# One of each operation that there is, and arguments at the edges of what they may be.
_EDGES = [0, 1, 127, 255, 256, 65535, (1 << 31) - 1, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1]
POOL = sorted(
    {operation for pickled in PICKLES for operation in pickled}
    | {info.code.encode("latin-1") for info in pickletools.opcodes}
    | {
        code + (edge % (1 << 8 * width)).to_bytes(width, "little")
        for code, width in [(b"K", 1), (b"M", 2), (b"J", 4), (b"q", 1), (b"r", 4), (b"h", 1), (b"j", 4)]
        for edge in _EDGES
    }
    | {b"\x8a\x08" + edge.to_bytes(8, "little") for edge in _EDGES}
    | {b"X" + edge.to_bytes(8, "little")[:4] + b"x" for edge in _EDGES}
    | {b"ctorch\n%s\n" % name for name in (b"LongStorage", b"FloatTensor", b"HalfStorage", b"FloatStorage")}
    | {b"ccollections\nOrderedDict\n)R", b"}X\x09\0\0\0_metadataNs", b"cos\nsystem\n"}
)


class Edit(NamedTuple):
    """A change of a list of operations, or of bytes, at a place: what becomes of it, and what is put there."""

    how: str
    at: int
    other: int


HOWS = ("delete", "double", "swap", "insert", "replace", "flip", "cut")


def edited(items: list[bytes], edits: list[Edit]) -> bytes:
    items = list(items)
    for how, at, other in edits:
        at %= len(items) + 1
        if how == "delete":
            del items[at : at + 1 + other % 3]
        elif how == "double":
            items[at:at] = items[at : at + 1 + other % 8]
        elif how == "swap" and at < len(items):
            place = other % len(items)
            items[at], items[place] = items[place], items[at]
        elif how == "insert":
            items.insert(at, POOL[other % len(POOL)])
        elif how == "replace":
            items[at : at + 1] = [POOL[other % len(POOL)]]
        elif how == "flip" and at < len(items):
            changed = bytearray(items[at])
            changed[other % len(changed)] ^= 1 << other % 8
            items[at] = bytes(changed)
        elif how == "cut" and not other % 16:  # seldom: little can be found behind it
            del items[at:]
    return b"".join(items)


def strategy() -> st.SearchStrategy[bytes]:
    """Return pickles that are valid but for a few changed operations."""
    places = st.integers(0, 1 << 16)
    edits = st.lists(st.builds(Edit, st.sampled_from(HOWS), places, places), max_size=6)
    return st.builds(edited, st.sampled_from(PICKLES), edits)


def archive_strategy() -> st.SearchStrategy[bytes]:
    """Return archives that are valid but for a few changed bytes, most of them in the headers and the directory."""
    places = st.integers(0, 1 << 16)
    edits = st.lists(st.builds(Edit, st.sampled_from(HOWS), places, places), max_size=4)
    return st.builds(edited, st.sampled_from(ARCHIVES).map(fields), edits)


def fields(archive: bytes) -> list[bytes]:
    """Cut an archive where a header begins, and these into pieces of two bytes, which all their numbers are made of."""
    cuts = sorted({0, len(archive), *(at for at in range(len(archive)) if archive[at : at + 2] == b"PK")})
    pieces: list[bytes] = []
    for start, end in pairwise(cuts):
        head = min(end, start + 66)
        pieces += [archive[at : min(at + 2, head)] for at in range(start, head, 2)]
        pieces += [archive[head:end]] if head < end else []
    return pieces


PARSERS = {"pickle": run, "pth": run_archive}
MUTATORS: dict[str, Any] = {}
STRATEGIES = {"pickle": strategy(), "pth": archive_strategy()}


def seeds(name: str) -> list[bytes]:
    return list(map(b"".join, PICKLES)) if name == "pickle" else ARCHIVES
