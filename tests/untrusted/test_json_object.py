"""Untrusted JSON means one thing to every reader, or is refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama.untrusted.json_object import parse_object

_texts = st.text(st.characters(exclude_categories=["Cs"]))
_numbers = st.one_of(st.integers(-(10**60), 10**60), st.floats(allow_nan=False, allow_infinity=False))
_values = st.recursive(
    st.one_of(st.none(), st.booleans(), _numbers, _texts),
    lambda inner: st.lists(inner) | st.dictionaries(_texts, inner),
    max_leaves=12,
)


@settings(max_examples=12)
@given(st.dictionaries(_texts, _values), st.booleans())
def test_valid_json_is_read_as_by_pythons_reader(content: object, escaped: bool) -> None:
    text = json.dumps(content, ensure_ascii=escaped).encode("utf-8")
    assert parse_object(text) == content


def test_reasons_are_named() -> None:
    for text, reason in (
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "repeats the key 'b'"),
        (b'{"a": [NaN]}', "NaN is not a number"),
        (b'{"a": -1e400}', "-1e400 is beyond the numbers of float64"),
        (b'{"a": 1' + b"0" * 4300 + b"}", "value has 4301 digits"),
        (b'{"\\udc00": 1}', "is half of a surrogate pair"),
        (b'{"a": ' + b"[" * 500_000, "nested too deeply; the limit is 200 levels"),
        (b'{"a": ' * 201 + b"1" + b"}" * 201, "nested too deeply; the limit is 200 levels"),
        (b'{"a": [7, ' + b"[" * 199 + b"]" * 199 + b"]}", "nested too deeply; the limit is 200 levels"),
        (b"7", "an object in braces, not a int"),
        (b'{"a": "\xc3"}', "byte 7 is not UTF-8"),
        (b"[" * ((3 << 18) + 1), r"'\[' 786,433 times"),
    ):
        with pytest.raises(ValueError, match=reason):
            parse_object(text)


def test_200_levels_are_accepted_also_around_characters_of_two_halves() -> None:
    text = b'{"a": ' + b"[" * 199 + b'"\\ud83d\\ude00"' + b"]" * 199 + b"}"
    assert json.dumps(parse_object(text)).encode() == text


def test_long_numbers_in_texts_and_whole_characters_of_two_halves_are_accepted() -> None:
    content = {"a": "9" * 5000, "b": 10**63, "c": "😀"}
    assert parse_object(json.dumps(content).encode()) == content
