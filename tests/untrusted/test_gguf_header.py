"""The header of a .gguf file: values as they were written, only the requested arrays, and llama.cpp's rules."""

import struct
import tracemalloc
from pathlib import Path

import pytest
from checkpoints import config_of, meta_weights, random_model, write_gguf
from forge import BOOL, STRING, U8, U16, array, header, number, tensor, text
from tables import table
from untrusted.malformed.cases import DATA, GGUF_FILES

from llama.checkpoint import open_checkpoint
from llama.untrusted.gguf_header import Unread, parse_header


@table("what, source, data, refusal", GGUF_FILES)
def test_invalid_headers_are_refused(what: str, source: str, data: bytes, refusal: str) -> None:
    for arrays in (None, ()):
        with pytest.raises((ValueError, struct.error)):
            parse_header(data, arrays=arrays)


def test_arrays_that_are_not_requested_are_skipped() -> None:
    data = header(
        array(U8, 2, b"ab", key=b"bytes"),
        array(STRING, 2, text(b"x") + text("é".encode()), key=b"texts"),
        array(BOOL, 2, b"\0\1", key=b"flags"),
        number(b"k", 7),
        tensors=(tensor(),),
    )
    found = parse_header(data + DATA, arrays=("texts",)).metadata
    assert found == {"bytes": Unread(2), "texts": ["x", "é"], "flags": Unread(2), "k": 7}
    assert parse_header(data + DATA).metadata == {
        "bytes": [97, 98],
        "texts": ["x", "é"],
        "flags": [False, True],
        "k": 7,
    }
    none = parse_header(data + DATA, arrays=()).metadata
    assert none == {"bytes": Unread(2), "texts": Unread(2), "flags": Unread(2), "k": 7}


def test_an_array_that_is_not_requested_takes_no_memory_and_the_file_loads(tmp_path: Path) -> None:
    model = random_model(config_of())
    path = write_gguf(tmp_path / "model.gguf", meta_weights(model), model.config)
    raw = path.read_bytes()
    count = 30_000_000  # of two bytes: a whole number of alignments, as is what stands before them
    pair = array(U16, count, key=b"unneeded")
    assert len(pair) % 32 == 0
    n_tensors, n_pairs = struct.unpack_from("<QQ", raw, 8)
    with path.open("wb") as file:
        file.write(raw[:8] + struct.pack("<QQ", n_tensors, n_pairs + 1) + pair)
        file.seek(2 * count, 1)
        file.write(raw[24:])
    tracemalloc.start()
    checkpoint = open_checkpoint(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert checkpoint.args.dim == model.config.hidden_size
    assert peak < 8 << 20


def test_totals_are_bounded_not_only_single_counts() -> None:
    half = 600_000
    texts = [array(STRING, half, bytes(8 * half), key=key) for key in (b"a", b"b")]
    for arrays in (None, ()):
        with pytest.raises(ValueError, match="more strings than the limit"):
            parse_header(header(*texts), arrays=arrays)
    numbers = [array(U8, half, bytes(half), key=key) for key in (b"a", b"b")]
    with pytest.raises(ValueError, match="more numbers than the limit"):
        parse_header(header(*numbers))
    assert parse_header(header(*numbers) + bytes(64), arrays=()).metadata == {"a": Unread(half), "b": Unread(half)}
    long = [array(STRING, 9, text(bytes(1 << 20)) * 9, key=key) for key in (b"a", b"b")]
    with pytest.raises(ValueError, match="is over a limit"):
        parse_header(header(*long))
    assert parse_header(header(*long), arrays=()).metadata == {"a": Unread(9), "b": Unread(9)}


@pytest.mark.parametrize("size", [64, 100])  # bytes behind the last tensor are allowed, as in llama.cpp
def test_tensors_lie_side_by_side_in_the_order_of_the_table(size: int) -> None:
    data = header(number(b"general.alignment", 32), tensors=(tensor(b"a"), tensor(b"b", offset=32)))
    data += bytes(-len(data) % 32)
    found = parse_header(data + bytes(size)).tensors.values()
    assert [info.start - len(data) for info in found] == [0, 32]
    with pytest.raises(ValueError, match="b ends at byte"):
        parse_header(data + bytes(63))


def test_a_truth_value_is_0_or_1_also_in_an_array() -> None:
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        parse_header(header(array(BOOL, 3, b"\0\1\2")))
