"""Change the library in one random place at a time, and count how many of the changes its tests notice.

    python scripts/mutate.py --count 40 --seed 1 --slow core kv_cache
    python scripts/mutate.py --count 40 --seed 1 llama/kv_cache/scored.py

A mutant is a copy of the repository with one comparison, operator, constant, condition or call statement changed. The
tests of its room run on it until one fails, those with the name of its file first. --slow adds slow tests, after the
others. The share that fails ("killed") is a figure to compare between two versions of the tests: some mutants change no
promised behaviour, so it stays below 100 %. Prints a line for each mutant and a line for each room or file.
"""

import argparse
import ast
import copy
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Room: the files that are changed, and the tests that run on them, in this order: what survives runs all of them.
ROOMS: dict[str, tuple[str, str]] = {
    "core": (
        "llama/args.py llama/rope.py llama/ops.py llama/layers.py llama/rows.py llama/switches.py llama/model.py "
        "llama/batch.py llama/generation.py llama/streaming.py llama/texts/session.py",
        "tests/test_[abglmops]*.py tests/test_rope.py tests/kv_cache tests/verify/test_certificate.py",
    ),
    "kv_cache": (
        "llama/kv_cache",
        "tests/kv_cache/test_[!ek]*.py tests/kv_cache/test_kvpress.py tests/kv_cache tests/test_generation.py "
        "tests/texts/test_session.py",
    ),
    "sampling": (
        "llama/sampling.py llama/request.py",
        "tests/test_sampling.py tests/test_generation.py tests/test_api.py tests/kv_cache/test_paged.py "
        "tests/kv_cache/test_kinds.py",
    ),
    "checkpoint": (
        "llama/checkpoint llama/untrusted",
        "tests/checkpoint tests/untrusted",
    ),
    "texts": (
        "llama/texts/scheduler.py llama/texts/text_caches.py llama/texts/many.py llama/speculation.py",
        "tests/test_speculation.py tests/texts tests/test_paths.py",
    ),
    "bench": ("llama/bench", "tests/bench"),
    "cli": ("llama/cli", "tests/cli"),
}
LIMIT_S = 3600  # of the tests on the repository as it is
TIMES = 4  # a mutant whose tests take so many times as long as these is killed: it never ends

_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult},
    **{ast.Div: ast.Mult, ast.Mod: ast.Mult},
}


@dataclass(frozen=True)
class Mutant:
    """One change: the file, its line, the text before and after, and the whole file after."""

    file: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before!r:.60} -> {self.after!r:.60}"


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a file. Annotations, docstrings and the words of errors stay as they are."""
    lines = source.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line.encode()))
    data = source.encode()
    for node in _nodes(ast.parse(source)):
        for changed in _changes(node):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            begin = offsets[node.lineno - 1] + node.col_offset
            end = offsets[node.end_lineno - 1] + node.end_col_offset
            after = ast.unparse(changed)
            mutated = (data[:begin] + after.encode() + data[end:]).decode()
            yield Mutant(file, node.lineno, data[begin:end].decode(), after, mutated)


def _nodes(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield what may be changed: not annotations, `raise`, decorators, imports or string constants."""
    if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "type_params"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child)


def _changes(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
    """Yield what stands in the node's place in each of its mutants."""
    new = copy.copy(node)
    if isinstance(new, ast.Compare) and len(new.ops) == 1:
        new.ops = [_COMPARED[type(new.ops[0])]()]
        yield new
    elif isinstance(new, ast.BinOp) and type(new.op) in _COMPUTED:
        new.op = _COMPUTED[type(new.op)]()
        yield new
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield new
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not | ast.USub):
        yield new.operand
    elif isinstance(new, ast.Constant) and isinstance(new.value, bool | int):
        yield ast.Constant(not new.value if isinstance(new.value, bool) else new.value + 1)
    elif isinstance(new, ast.IfExp):
        new.test = ast.UnaryOp(ast.Not(), new.test)
        yield new
    elif isinstance(new, ast.Expr) and isinstance(new.value, ast.Call):
        yield ast.Pass()


def files_of(patterns: str) -> list[str]:
    """Return the Python files that exist of a room's list: files, folders and patterns, in its order."""
    found = chain.from_iterable(
        sorted((ROOT / word).rglob("*.py")) if (ROOT / word).is_dir() else sorted(ROOT.glob(word))
        for word in patterns.split()
    )
    return list(dict.fromkeys(path.relative_to(ROOT).as_posix() for path in found))


def tried(name: str) -> tuple[list[str], list[str]]:
    """Return the files that are changed, and the tests that run on them, for a room or for one file of a room.

    Raises ValueError for another name.
    """
    room = name if name in ROOMS else next((room for room in ROOMS if name in files_of(ROOMS[room][0])), None)
    if room is None:
        raise ValueError(f"{name} is neither a room nor a file of one; the rooms are {', '.join(ROOMS)}")
    files, tests = map(files_of, ROOMS[room])
    return files if name == room else [name], [file for file in tests if Path(file).name.startswith("test_")]


def drawn(name: str, count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of a room or a file, each as likely as every other; the same for a seed and sources."""
    every = [mutant for file in tried(name)[0] for mutant in mutants_of(file, (ROOT / file).read_text("utf-8"))]
    return random.Random(f"{name} {seed}").sample(every, min(count, len(every)))


def verdicts(mutants: Sequence[Mutant], tests: list[str], processes: int, *, slow: bool = False) -> Iterator[str]:
    """Yield for each mutant which test noticed it; "" for one that survived.

    Raises RuntimeError if a test fails on the repository as it is.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(processes) as pool:
        tree = Path(folder, "tree")
        _copy(tree)
        begun = time.monotonic()
        if failed := _failed(tree, tests, LIMIT_S, slow):
            raise RuntimeError(f"without any change, {failed}")
        limit = TIMES * (time.monotonic() - begun)

        def judge(mutant: Mutant) -> str:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                changed = shutil.copytree(tree, Path(scratch, "copy"))
                (changed / mutant.file).write_text(mutant.source, encoding="utf-8")
                stem = f"test_{Path(mutant.file).stem}"
                return _failed(
                    changed, sorted(tests, key=lambda file: not Path(file).stem.startswith(stem)), limit, slow
                )

        yield from pool.map(judge, mutants)


def _failed(tree: Path, tests: list[str], limit: float, slow: bool) -> str:
    """Return the first test that fails in a tree, or how the process ended; "" if all pass. Slow tests come last."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
    for marks in [["-m", "not slow"], *[["-m", "slow"]] * slow]:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", *marks, *tests]
        environment = kept | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no end after {limit:.0f} s"
        if done.returncode not in (0, 5):  # 5: no test has these marks
            found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
            return found[1] if found else f"exit code {done.returncode}"
    return ""


def _copy(tree: Path) -> None:
    """Copy what git knows of the repository, as it stands."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in listed.splitlines():
        if (ROOT / name).is_file() and not name.startswith("docs/results"):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="ROOM|FILE", help=f"{', '.join(ROOMS)}, or a file; default: all")
    parser.add_argument("--count", type=int, default=40, help="mutants of each room or file")
    parser.add_argument("--seed", type=int, default=1, help="which mutants are drawn")
    parser.add_argument("--slow", action="store_true", help="run the slow tests, too")
    parser.add_argument("--processes", type=int, default=2, help="mutants that are tried at once")
    given = parser.parse_args()
    names = given.names or list(ROOMS)
    try:
        tests_of = {name: tried(name)[1] for name in names}
    except ValueError as error:
        parser.error(str(error))
    for name, tests in tests_of.items():
        begun, killed, mutants = time.monotonic(), 0, drawn(name, given.count, given.seed)
        for mutant, how in zip(mutants, verdicts(mutants, tests, given.processes, slow=given.slow), strict=True):
            killed += bool(how)
            print(f"{mutant}: {f'killed: {how:.120}' if how else 'SURVIVED'}", flush=True)
        print(f"{name}: {killed} of {len(mutants)} killed in {time.monotonic() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
