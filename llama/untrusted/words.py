"""Text from strangers in messages of ours: nothing of it acts on a terminal, and no message is long.

Knows nothing of what the text says.
"""

from collections.abc import Collection
from heapq import nsmallest

_MOST_CHARACTERS = 999
_MOST_NAMES = 10
_MOST_OF_A_NAME = 80


def printable(text: str, limit: int = _MOST_CHARACTERS) -> str:
    r"""Return the text in one line of at most `limit` characters that act on nothing, its middle left out if need be.

    What `str.isprintable` denies is written as \x1b or \u202e: control characters, newlines, what turns the direction
    of writing, halves of characters. The end stays, because messages end with the remedy. Applied twice it changes
    nothing more.
    """
    cut = without_middle(text, limit)  # before escaping, too: a text may be long
    if not cut.isprintable():
        cut = "".join(letter if letter.isprintable() else _escaped(letter) for letter in cut)
    return without_middle(cut, limit)


def some_of(names: Collection[str], most: int = _MOST_NAMES) -> str:
    """Return the first names in their order, each cut, and how many more there are: "a, b and 4,312 more"."""
    first = ", ".join(without_middle(name, _MOST_OF_A_NAME) for name in nsmallest(most, names))
    return f"{first} and {len(names) - most:,} more" if len(names) > most else first


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def without_middle(text: str, limit: int) -> str:
    """Return the text with no more than `limit` characters: what begins it and, half as long, what ends it."""
    if len(text) <= limit:
        return text
    mark = " ... "
    end = (limit - len(mark)) // 3
    return f"{text[: limit - len(mark) - end]}{mark}{text[len(text) - end :]}"
