"""Changes to the answer of the exercise as text: mistakes.txt, and right solutions of another shape, right.txt.

    #### NAME -> MISTAKE MISTAKE        what the grader must find; nothing behind the arrow: nothing
    --- llama/model.py
    @@                                  old lines (" " and "-"), which must occur once, become new lines (" " and "+")

They are written as a student would write them.
"""

import re
from pathlib import Path
from typing import NamedTuple


class Plant(NamedTuple):
    """A change: its name, the mistakes that must be found, and (file, old, new) for each place."""

    name: str
    found: frozenset[str] = frozenset()
    changes: tuple[tuple[str, str, str], ...] = ()

    def put_into(self, tree: Path) -> None:
        for file, old, new in self.changes:
            text = (tree / file).read_text("utf-8")
            assert text.count(old) == 1, f"{self.name}: {file} has these lines {text.count(old)} times:\n{old}"
            (tree / file).write_text(text.replace(old, new), encoding="utf-8")


def plants(file: str) -> list[Plant]:
    """Return the changes in a file of this folder."""
    return [_plant(entry) for entry in _parts("#### ", Path(__file__).with_name(file).read_text("utf-8"))]


def _plant(entry: str) -> Plant:
    title, _, body = entry.partition("\n")
    name, _, found = title.partition(" ->")
    changes = []
    for part in _parts("--- ", body):
        file, _, hunks = part.partition("\n")
        for hunk in _parts("@@\n", hunks):
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in marks) for marks in (" -", " +"))
            changes.append((file, old, new))
    return Plant(name, frozenset(found.split()), tuple(changes))


def _parts(mark: str, text: str) -> list[str]:
    return re.split(f"^{mark}", text, flags=re.MULTILINE)[1:]
