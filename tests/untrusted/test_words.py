"""Untrusted text is printable and short in messages."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tables import table

from llama.untrusted.errors import CheckpointError
from llama.untrusted.words import printable, some_of


@given(st.text(st.characters(), max_size=3000))
def test_any_text_becomes_one_short_printable_line(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert len(shown) < 1000
    assert printable(shown) == shown
    shown.encode("utf-8")


@table(
    "text, shown",
    [
        ("naïve 😀 モデル", "naïve 😀 モデル"),
        ("\x1b[2J\x07\0\n\x9b", "\\x1b[2J\\x07\\x00\\n\\x9b"),
        ("a\u202eb\u2066c\u2028d\u2029", "a\\u202eb\\u2066c\\u2028d\\u2029"),
        ("\ud800", "\\ud800"),
        ("C:\\new", "C:\\new"),  # a backslash of the text stays one
    ],
)
def test_only_unprintable_characters_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_long_text_loses_its_middle_and_keeps_its_end() -> None:
    shown = printable("begin" + "x" * 10**7 + "; use --this")
    assert shown.startswith("begin")
    assert shown.endswith("; use --this")
    assert len(shown) == 999
    assert printable("\n" * 500, 20) == "\\n\\n\\n\\n\\n ... \\n\\n\\n"[:10] + " ... " + "\\n\\n\\n"[-5:]


def test_ten_names_and_how_many_more() -> None:
    assert some_of([]) == ""
    assert some_of(["b", "a"]) == "a, b"
    names = [f"{i:04}" for i in range(4322)]
    assert some_of(names) == ", ".join(names[:10]) + " and 4,312 more"
    assert some_of(names, 2) == "0000, 0001 and 4,320 more"
    assert len(some_of(["x" * 10**6])) == 80


def test_the_path_of_a_refusal_is_printable_too() -> None:
    assert str(CheckpointError(Path("\x1b[2J"), "is no checkpoint")) == "\\x1b[2J: is no checkpoint"
