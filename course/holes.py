"""The places that the exercise removes from the sources: found by syntax, and replaced by a TODO.

Knows Python's syntax and the places of the answer. A place that is not found exactly once is an error, so that no
exercise is made from sources that have changed. Does not know files.
"""

import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass


class AnchorLost(ValueError):
    """A place of the exercise is not in the sources; the message names the place and the file."""


@dataclass(frozen=True)
class Hole:
    """A place in a file: how to find its statement in a function, its replacement, and the text for the student.

    number: the number of the TODO, or None if the lines are only removed. function: "Class.name" or "name".
    """

    file: str
    function: str
    find: Callable[[ast.FunctionDef], list[ast.stmt]]
    replace: Callable[[str, ast.stmt, str], str]
    number: int | None = None
    words: str = ""

    @property
    def message(self) -> str:
        """The message of the error that an unfilled hole raises."""
        return f"TODO {self.number} in {self.file}, {self.function}: see TASK.md"


def cut(file: str, text: str, holes: tuple[Hole, ...]) -> str:
    """Return the text of a file with its holes. Raises AnchorLost."""
    for hole in holes:
        if hole.file == file:
            text = _cut(text, hole)
    return text


def _cut(text: str, hole: Hole) -> str:
    found = [stmt for function in _functions(ast.parse(text), hole.function) for stmt in hole.find(function)]
    if len(found) != 1:
        raise AnchorLost(
            f"{hole.file}: {hole.function} has {len(found)} places for the exercise where it should have one; "
            "bring course/holes.py up to date with the sources"
        )
    place, lines = found[0], text.splitlines(keepends=True)
    assert place.end_lineno is not None
    first = min([place.lineno, *(d.lineno for d in getattr(place, "decorator_list", []))]) - 1
    new = textwrap.indent(hole.replace(text, place, _todo(hole)), " " * place.col_offset)
    while not new and not lines[first - 1].strip():  # remove the empty line above, too
        first -= 1
    return "".join([*lines[:first], new, *lines[place.end_lineno :]])


def _functions(node: ast.AST, name: str) -> Iterator[ast.FunctionDef]:
    head, _, rest = name.partition(".")
    for child in ast.iter_child_nodes(node):
        if rest and isinstance(child, ast.ClassDef) and child.name == head:
            yield from _functions(child, rest)
        elif not rest and isinstance(child, ast.FunctionDef) and child.name == head:
            yield child


def _todo(hole: Hole) -> str:
    lines = textwrap.wrap(f"TODO {hole.number} (TASK.md): {hole.words}", 100)
    return "".join(f"# {line}\n" for line in lines) + f'raise NotImplementedError("{hole.message}")\n'


# ---- finding and replacing lines -------------------------------------------------------------------------------------


def _branches(function: ast.FunctionDef) -> list[ast.stmt]:
    """Return the `if` statements on the switch that have an else."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.If) and _is_switch(node.test)]
    return [node for node in found if node.orelse]


def _choices(function: ast.FunctionDef) -> list[ast.stmt]:
    """Return the assignments of a value that depends on whether there is a cache."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    return [node for node in found if isinstance(node.value, ast.IfExp) and _is_choice(node.value.test)]


def whole(function: ast.FunctionDef) -> list[ast.stmt]:
    return [function]


def _is_switch(test: ast.expr) -> bool:
    return isinstance(test, ast.Attribute) and test.attr == "kv_caching"


def _is_choice(test: ast.expr) -> bool:
    return ast.unparse(test) == "self.cache is None"


def _keep_off(text: str, place: ast.stmt, todo: str) -> str:
    """Return the place with its code for the switch off, and the TODO for the switch on."""
    if isinstance(place, ast.If):
        test, off = _source(text, place.test), "\n".join(_source(text, stmt) for stmt in place.orelse)
    else:
        assert isinstance(place, ast.Assign)
        assert isinstance(place.value, ast.IfExp)
        test, off = "self.cache is not None", f"{_source(text, place.targets[0])} = {_source(text, place.value.body)}"
    todo, off = textwrap.indent(todo, "    "), textwrap.indent(off, "    ")
    return f"if {test}:\n{todo}else:\n{off}\n"


def keep_signature(text: str, place: ast.stmt, todo: str) -> str:
    """Return the place with its signature and docstring, and the TODO for the rest."""
    assert isinstance(place, ast.FunctionDef)
    lines = textwrap.dedent(" " * place.col_offset + _source(text, place)).splitlines(keepends=True)
    body = place.body[0 if ast.get_docstring(place) is None else 1]
    return "".join(lines[: body.lineno - place.lineno]) + textwrap.indent(todo, "    ")


def leave_out(text: str, place: ast.stmt, todo: str) -> str:
    return ""


def _source(text: str, node: ast.AST) -> str:
    source = ast.get_source_segment(text, node)
    assert source is not None
    return source


STATIC, CONTRACT = "llama/kv_cache/static.py", "llama/kv_cache/contract.py"
HOLES = (
    Hole(
        "llama/model.py",
        "Attention.forward",
        _branches,
        _keep_off,
        1,
        "the cache is on. Give it the new keys and values, and let the queries look at all that it returns.",
    ),
    Hole(
        "llama/generation.py",
        "PlainStepper._decode",
        _choices,
        _keep_off,
        2,
        "the cache is on. From which position on does each row have to be fed? Where does it stand (batch.cur_pos)?",
    ),
    Hole(
        STATIC,
        "StaticCache.update",
        whole,
        keep_signature,
        3,
        "take memory on first use, write xk and xv where they belong, and return all keys and values up to there.",
    ),
    *(Hole(STATIC, f"StaticCache.{name}", whole, leave_out) for name in ("prepare", "room", "fits")),
    *(Hole(CONTRACT, f"KVCache.{name}", whole, leave_out) for name in ("_write", "_grow", "_enlarge")),
)
