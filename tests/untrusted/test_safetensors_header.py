"""A .safetensors header is returned if its tensors fill the file exactly, and is otherwise refused with a reason."""

from io import BytesIO
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tables import table
from untrusted.malformed.cases import SAFETENSORS, bytes_of, entry, safetensors

from llama.untrusted.safetensors_header import Header, Span, read_header

DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def header_of(content: bytes, **limits: Any) -> Header:
    return read_header(BytesIO(content), len(content), dtypes=DTYPES, **limits)


def test_metadata_and_tensors_are_returned_in_the_order_of_their_bytes() -> None:
    entries = {
        "b": entry([3], 4, 10, dtype="F16"),
        "__metadata__": {"é": "\x1b"},
        "none": entry([7, 0], 4, 4, dtype="F64"),
        "a": entry([], 0, 4),
    }
    content = safetensors(entries, bytes(10))
    file = BytesIO(content)
    header = read_header(file, len(content), dtypes=DTYPES)
    assert header.metadata == {"é": "\x1b"}
    assert list(header.tensors.items()) == [
        ("a", Span("F32", (), 0, 4)),
        ("none", Span("F64", (7, 0), 4, 4)),
        ("b", Span("F16", (3,), 4, 10)),
    ]
    assert file.tell() == header.data == len(content) - 10


ACCEPTED = {  # names that no model has, and empty tensors: what a caller may refuse
    *("with escapes in a name", "with a NUL in a name", "with 10,000 unknown tensors", "with an empty tensor"),
}


@table("what", SAFETENSORS)
def test_malformed_headers_give_a_printable_reason_and_no_tensor(what: str) -> None:
    content = bytes_of(SAFETENSORS[what][1])
    if what in ACCEPTED:
        assert header_of(content).tensors
        return
    with pytest.raises(ValueError, match=r".") as caught:
        header_of(content)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_limits_are_named_in_the_reason() -> None:
    header = {f"{i}": entry([1], 4 * i, 4 * i + 4) for i in range((1 << 14) + 1)}
    content = safetensors(header, bytes(4 * len(header)))
    with pytest.raises(ValueError, match="16385 tensors are more than the limit of 16384"):
        header_of(content)
    assert len(header_of(content, tensor_limit=16385).tensors) == 16385
    braces = safetensors({"__metadata__": {"text": "{" * (1 << 17)}})
    with pytest.raises(ValueError, match=r"'{' 131,074 times, and the limit is 65,536"):
        header_of(braces)
    assert len(header_of(braces, most_of={}).metadata["text"]) == 1 << 17
    with pytest.raises(ValueError, match=r"its header has 131\d+ bytes, and the limit is 1000"):
        header_of(braces, header_limit=1000)


@table("shape", [[0, 1 << 60], [1 << 30, 0, 1 << 30], [0] * 17])
def test_an_empty_tensor_whose_strides_exceed_64_bits_is_refused(shape: list[int]) -> None:
    with pytest.raises(ValueError, match="the limits are 16 dimensions and 1152921504606846976 numbers"):
        header_of(safetensors({"a": entry(shape, 0, 0)}))


@given(st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_tensors_may_stand_in_any_order_and_any_change_of_a_border_is_refused(shapes: list[list[int]], dice) -> None:  # type: ignore[no-untyped-def]
    header, end = {}, 0
    for i, shape in enumerate(shapes):
        size = 2 * int(torch.Size(shape).numel())
        header[str(i)] = entry(shape, end, end + size, dtype="F16")
        end += size
    entries = list(header.items())
    dice.shuffle(entries)
    assert list(header_of(safetensors(dict(entries), bytes(end))).tensors) == list(header)
    name = dice.choice(entries)[0]
    begin, stop = header[name]["data_offsets"]
    header[name]["data_offsets"] = dice.choice([[begin + 2, stop + 2], [begin, stop + 2], [begin + 2, stop]])
    with pytest.raises(ValueError, match=r"gap|between|truncated"):
        header_of(safetensors(header, bytes(end)))
