"""Changes to the answer of the exercise as text: mistakes.txt, and right solutions of another shape, right.txt.

    #### NAME -> MISTAKE MISTAKE        what the grader must find; nothing behind the arrow: nothing
    --- llama/model.py
    @@                                  old lines (" " and "-"), which must occur once, become new lines (" " and "+")

They are written as a student would write them.

forms/NAME.txt has answers to the exercise NAME, and changes to each:

    #### NAME
    def ...                             the functions that the exercise removed, in its order, with helpers before them
    @@ -> MISTAKE                       what the grader must find, and lines as above; "" is right
    ...                                 between two places of a change

Every set of right changes that go together is a right variant, and each wrong change is made in one of these.
"""

import ast
import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from course.exercises import Exercise
from course.holes import cut


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
    parts = (part.partition("\n") for part in _parts("--- ", body))
    changes = [(file, *_lines(hunk)) for file, _, hunks in parts for hunk in _parts("@@\n", hunks)]
    return Plant(name, frozenset(found.split()), tuple(changes))


def _lines(hunk: str) -> tuple[str, str]:
    """Return the old lines of a hunk and the new ones."""
    lines = hunk.splitlines(keepends=True)
    old, new = ("".join(line[1:] for line in lines if line[0] in marks) for marks in (" -", " +"))
    return old, new


class Variant(NamedTuple):
    """A submission: its name, the mistake that must be found or "", and its functions."""

    name: str
    found: str
    code: str

    def source(self, exercise: Exercise, text: str) -> str:
        """Return the text of the exercise's file, filled in."""
        parts = [""]
        removed = [hole for hole in exercise.holes if hole.number is None]
        todo = [hole for hole in exercise.holes if hole.number is not None]
        names = {hole.function.rpartition(".")[2] for hole in todo}
        for node in ast.parse(self.code).body:
            parts[-1] += f"{ast.get_source_segment(self.code, node)}\n"
            if node.name in names:
                parts.append("")
        filled = [replace(hole, replace=lambda *_, part=part: part) for hole, part in zip(todo, parts, strict=False)]
        return cut(exercise.holes[0].file, text, (*removed, *filled))


def variants(exercise: str) -> list[Variant]:
    """Return all variants of the answers to an exercise."""
    text = (Path(__file__).parent / "forms" / f"{exercise}.txt").read_text("utf-8")
    return [variant for form in _parts("#### ", text) for variant in _variants(form)]


def _variants(form: str) -> list[Variant]:
    head, *hunks = re.split(r"^@@ -> ?", form, flags=re.MULTILINE)
    name, _, code = head.partition("\n")
    right, wrong = [Variant(name, "", code)], []
    for number, hunk in enumerate(hunks):
        found, _, lines = hunk.partition("\n")
        places = [[each.removesuffix("\n") for each in _lines(place)] for place in lines.split("...\n")]
        made = []
        for variant in right:
            code = variant.code
            if all(code.count(old) == 1 for old, _ in places):
                for old, new in places:
                    code = code.replace(old, new)
                made.append(Variant(f"{variant.name}, {number}", found, code))
        assert made, f"{name} does not have these lines once:\n{hunk}"
        if found:
            wrong.append(made[number % len(made)])
        else:
            right += made
    return right + wrong


def _parts(mark: str, text: str) -> list[str]:
    return re.split(f"^{mark}", text, flags=re.MULTILINE)[1:]
