"""Make the exercise from the current sources: python -m course.make OUT.

OUT gets the parts of the package that the two scripts need, without the KV cache (course/holes.py), and the files of
course/kit/: the task, the report's template, and stand-ins for folders that contain the answer. No source is copied
into course/, so an exercise is always up to date.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from course.holes import HOLES, Hole, cut

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


def make(out: Path, *, root: Path = ROOT, holes: tuple[Hole, ...] = HOLES) -> None:
    """Make the exercise in `out`, which must be empty or missing; without holes it is the answer.

    Raises ValueError if `out` has files, and AnchorLost if the sources have changed.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} is there already; name a folder that is empty or new")
    kit = {path.relative_to(KIT).as_posix(): path for path in KIT.rglob("*") if _is_source(path)}
    texts = {file: (root / file).read_text("utf-8") for file in _needed(root, kit)}
    made = {file: cut(file, text, holes) for file, text in texts.items()}
    if lost := {hole.file for hole in holes} - set(made):
        raise ValueError(f"the scripts no longer need {', '.join(sorted(lost))}; bring course/ up to date")
    made |= {file: path.read_text("utf-8") for file, path in kit.items()}
    made["requirements.txt"] = "".join(f"{line}\n" for line in _requirements(root))
    for file, text in made.items():
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        (out / file).write_text(text, encoding="utf-8")


def _needed(root: Path, replaced: dict[str, Path]) -> set[str]:
    """Return the scripts, our modules that they import except the kit's stand-ins, and data files beside these."""
    seen: set[str] = set()
    left = list(SCRIPTS)
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


def main(*out: str) -> int:
    """Make the exercise on the KV cache.

    Args:
        out: The folder to make, empty or new.
    """
    if len(out) != 1:
        raise ValueError("give the one folder to make: python -m course.make OUT")
    make(Path(out[0]))
    print(f"{out[0]} contains the exercise; a student begins with {Path(out[0]) / 'TASK.md'}")
    return 0


if __name__ == "__main__":
    from llama import cli

    cli.main(main)
