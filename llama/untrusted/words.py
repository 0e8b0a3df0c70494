"""Untrusted text in messages: one short line without control characters."""

from collections.abc import Collection
from heapq import nsmallest

_MOST_CHARACTERS = 999
_MOST_NAMES = 10
_MOST_OF_A_NAME = 80


def printable(text: str, limit: int = _MOST_CHARACTERS) -> str:
    r"""Return the text as one printable line of at most `limit` characters, without its middle if it is longer.

    Characters that are not `str.isprintable` are escaped, such as \x1b or \u202e: control characters, newlines, marks
    of the direction of writing, surrogates. The end stays, because messages end with the remedy. Idempotent.
    """
    cut = without_middle(text, limit)  # also before escaping: a text may be long
    if not cut.isprintable():
        cut = "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in cut)
    return without_middle(cut, limit)


def some_of(names: Collection[str], most: int = _MOST_NAMES) -> str:
    """Return the first names in sorted order, each cut, and the number of others: "a, b and 4,312 more"."""
    first = ", ".join(without_middle(name, _MOST_OF_A_NAME) for name in nsmallest(most, names))
    return f"{first} and {len(names) - most:,} more" if len(names) > most else first


def without_middle(text: str, limit: int) -> str:
    """Return at most `limit` characters of the text: its beginning and, half as long, its end."""
    if len(text) <= limit:
        return text
    mark = " ... "
    end = (limit - len(mark)) // 3
    return f"{text[: limit - len(mark) - end]}{mark}{text[len(text) - end :]}"
