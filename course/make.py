"""Make an exercise from the current sources: python -m course.make OUT [--exercise NAME].

OUT gets the parts of the package that the two scripts need, without the answer (course/exercises.py), and files of
course/kit/: the task, the report's template, and stand-ins for folders that contain the answer. No source is copied
into course/, so an exercise is always up to date.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from course.exercises import CACHE, Exercise, named
from course.holes import Hole, cut

ROOT = Path(__file__).resolve().parents[1]
KIT = ROOT / "course" / "kit"
# The scripts that the student starts, and those that they start.
SCRIPTS = (
    "inference.py",
    "benchmark_inference.py",
    "llama/bench/run/worker.py",
    "llama/untrusted/template_child.py",
)

# Folders that would compute the answer without the student's code.
LEFT_OUT = ("llama/fast/", "llama/exact/")


def make(out: Path, exercise: Exercise = CACHE, *, root: Path = ROOT, holes: tuple[Hole, ...] | None = None) -> None:
    """Make an exercise in `out`, which must be empty or missing; with `holes=()` it is the answer.

    Raises ValueError if `out` has files, and AnchorLost if the sources have changed.
    """
    holes = exercise.holes if holes is None else holes
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already; name a folder that is empty or new")
    every = {path.relative_to(KIT).as_posix(): path for path in KIT.rglob("*") if _is_source(path)}
    kit = {file: path for file, path in every.items() if file.startswith(exercise.kit)}
    texts = {file: (root / file).read_text("utf-8") for file in _needed(root, kit, exercise.more)}
    made = {file: cut(file, text, holes) for file, text in texts.items()}
    if lost := {hole.file for hole in holes} - set(made):
        raise ValueError(f"the scripts no longer need {', '.join(sorted(lost))}; bring course/ up to date")
    made |= {file: path.read_text("utf-8") for file, path in kit.items()}
    made["TASK.md"] = exercise.task.read_text("utf-8")
    made["requirements.txt"] = "".join(f"{line}\n" for line in _requirements(root))
    for file, text in made.items():
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        (out / file).write_text(text, encoding="utf-8")


def _needed(root: Path, replaced: dict[str, Path], more: tuple[str, ...]) -> set[str]:
    """Return the scripts and `more`, our modules that these import except stand-ins, and data files beside them."""
    seen: set[str] = set()
    left = [*SCRIPTS, *more]
    while left:
        file = left.pop()
        if file not in seen and (file in replaced or not file.startswith(LEFT_OUT)):
            seen.add(file)
            left += [home for name in _imported(replaced.get(file, root / file)) for home in _homes(root, name)]
    needed = seen - set(replaced)
    folders = {(root / file).parent for file in needed} - {root}
    beside = {path for folder in folders for path in folder.iterdir() if _is_source(path) and path.suffix != ".py"}
    return needed | {path.relative_to(root).as_posix() for path in beside}


def _imported(file: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports; `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _homes(root: Path, name: str) -> Iterator[str]:
    """Yield our files that importing a dotted name runs: those of its packages, and of the module."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        stem = "/".join(parts[:end])
        yield from (file for file in (f"{stem}.py", f"{stem}/__init__.py") if (root / file).is_file())


def _is_source(path: Path) -> bool:
    return path.is_file() and "__pycache__" not in path.parts


def _requirements(root: Path) -> list[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return [str(line) for line in project["dependencies"]]


def main(*out: str, exercise: str = "cache") -> int:
    """Make an exercise on the KV cache.

    Args:
        out: The folder to make, empty or new.
        exercise: cache, truncate, int8, eviction or lookup.
    """
    if len(out) != 1:
        raise ValueError("give the one folder to make: python -m course.make OUT")
    make(Path(out[0]), named(exercise))
    print(f"{out[0]} contains the exercise; a student begins with {Path(out[0]) / 'TASK.md'}")
    return 0


if __name__ == "__main__":
    from llama import cli

    cli.main(main)
