"""Put each historic bug back into a copy of the repository, and check that the test that it names catches it.

    python tests/historic_bugs/run.py          all of them
    python tests/historic_bugs/run.py 01 14    these two

A bug is caught if its test passes on the current tree and, with the patch, fails on an assertion. A copy that does not
import, or a test that ends in another error, is invalid. Prints a line for each bug and the count, and exits with 1
unless all are caught.

To add one: make the mistake in llama/, save `git diff llama` under the next number with a few lines of prose and a line
"Caught by: tests/test_x.py::test_y" above it, and undo it. If the code has changed, make the patch again like that.

Knows patches, copies and processes; child.py runs tests in a copy.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from compileall import compile_dir
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from py_compile import PycInvalidationMode
from queue import SimpleQueue
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
COPIED = ("llama", "tests", "inference.py", "benchmark_inference.py", "pyproject.toml")  # what the tests need
AT_ONCE = 2
LIMIT_S = 300  # of one process; the tests of all bugs together take about 15 s, that of one bug about 2
# What the package and most of the tests import of others, and take longest to: each process has it already.
LIBRARIES = (
    *("torch", "hypothesis", "tiktoken", "safetensors.torch", "gguf", "transformers.models.llama.modeling_llama"),
    *("matplotlib.figure", "starlette.applications", "uvicorn", "prometheus_client"),
)


@dataclass(frozen=True)
class Bug:
    """A patch, and the description above it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def number(self) -> str:
        return self.name.partition("-")[0]

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def test(self) -> str:
        """The name of the test that must catch it; without [parameters], all of its cases."""
        found = re.findall(r"^Caught by: (tests/\S+\.py::\S.*)$", self.text, flags=re.MULTILINE)
        if len(found) != 1:
            raise ValueError(f"{self.path.name}: needs one line 'Caught by: tests/test_x.py::test_y', has {len(found)}")
        return str(found[0])

    @property
    def files(self) -> set[str]:
        """The files that it changes."""
        return set(re.findall(r"^(?:---|\+\+\+) [ab]/(.+)$", self.text, flags=re.MULTILINE))


@dataclass(frozen=True)
class Verdict:
    caught: bool
    words: str


def bugs_in(folder: Path) -> list[Bug]:
    return [Bug(path) for path in sorted(folder.glob("*.patch"))]


def apply(patch: Path, tree: Path, *, check_only: bool = False) -> str:
    """Apply a patch to a tree, completely or not at all, and return git's error, or "".

    The tree need not be a repository. If it is inside one, git must not find it: it would skip files silently.
    """
    alone = {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent), "GIT_CONFIG_GLOBAL": os.devnull}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    options = ["--check"] if check_only else []
    done = subprocess.run(
        ["git", "apply", *options, str(patch.resolve())],
        cwd=tree,
        env=kept | alone | {"GIT_CONFIG_NOSYSTEM": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stderr.strip().replace("\n", "; ") or "git apply failed"


class Server:
    """A process that has imported the libraries and forks for each copy; it runs child.py, one job at a time.

    Without plugins of pytest, which would rewrite those of hypothesis each time, in a second.
    """

    def __init__(self, libraries: Sequence[str]) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(FOLDER / "child.py"), *libraries],
            env=kept | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, job: dict[str, Any]) -> int:
        """Return the exit code of the forked process; raise RuntimeError if child.py itself has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())
        except (BrokenPipeError, ValueError):  # no line
            raise RuntimeError("child.py has ended; its output is above") from None

    def close(self) -> None:
        with suppress(BrokenPipeError):
            self._process.communicate()


@contextmanager
def _servers(libraries: Sequence[str]) -> Iterator[Callable[..., dict[str, Any]]]:
    """Yield `_try` on a free server, and end all servers at the end."""
    free: SimpleQueue[Server] = SimpleQueue()
    everyone = [Server(libraries) for _ in range(AT_ONCE)]
    for one in everyone:
        free.put(one)

    def try_on_a_free_one(tree: Path, patch: Path | None, tests: list[str]) -> dict[str, Any]:
        server = free.get()
        try:
            return _try(server, tree, patch, tests)
        finally:
            free.put(server)

    try:
        yield try_on_a_free_one
    finally:
        for one in everyone:
            one.close()


def judge(root: Path, bugs: Sequence[Bug], libraries: Sequence[str]) -> Iterator[Verdict]:
    """Yield the verdict on each bug, in order; the tests of the unchanged tree run beside those of the first bugs."""
    scratch = tempfile.TemporaryDirectory(prefix="historic-bugs-")
    with scratch as folder, _servers(libraries) as run, ThreadPoolExecutor(AT_ONCE) as pool:
        tree = Path(folder, "as-it-is")  # all copies are made from it, even if files are edited meanwhile
        _copy(root, tree)
        # By the hashes of the sources, so that a patched file, which may be as old and as long, is compiled again.
        compile_dir(tree / "llama", quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        try:
            plain = pool.submit(run, tree, None, sorted({bug.test for bug in bugs}))
            runs = [pool.submit(run, tree, bug.path, [bug.test]) for bug in bugs]
            for bug, patched in zip(bugs, runs, strict=True):
                yield _verdict(bug, plain.result(), patched.result())
        finally:
            pool.shutdown(cancel_futures=True)


def _copy(root: Path, into: Path) -> None:
    into.mkdir()
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, into / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (root / name).is_file():
            shutil.copy(root / name, into / name)


def _try(
    server: "Server", tree: Path, patch: Path | None, tests: list[str], *, limit: int = LIMIT_S, **how: bool
) -> dict[str, Any]:
    """Return the results of the tests on a patched copy of the tree, or {"trouble": reason}; `how` goes to child.py."""
    with tempfile.TemporaryDirectory(prefix="historic-bug-") as folder:
        copy, report = Path(folder, "copy").resolve(), Path(folder, "report.json")
        shutil.copytree(tree, copy)
        if patch is not None and (refusal := apply(patch, copy)):
            return {"trouble": f"the patch does not apply: {refusal}"}
        printed = Path(folder, "printed")
        names = {"copy": copy, "printed": printed, "report": report, "scratch": Path(folder, "tmp")}
        job = {"limit": limit, "tests": tests, **how}
        code = server.run(job | {name: str(path) for name, path in names.items()})
        if code == -signal.SIGALRM:
            return {"trouble": f"the test was not done after {limit} s"}
        if not report.exists():
            said = printed.read_text(encoding="utf-8", errors="replace")[-500:] if printed.exists() else ""
            return {"trouble": f"the test's process died with exit code {code}: {said}"}
        found: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
        return found


def _verdict(bug: Bug, plain: dict[str, Any], patched: dict[str, Any]) -> Verdict:
    if plain["trouble"]:
        return Verdict(False, f"INVALID: on the tree as it is, {plain['trouble']}")
    before, after = (_endings(bug.test, run) for run in (plain, patched))
    if not before:
        return Verdict(False, f"INVALID: there is no test {bug.test}")
    if before != {"passed"}:
        return Verdict(False, f"INVALID: without the bug, {bug.test} {_listed(before - {'passed'})}")
    if patched["trouble"]:
        return Verdict(False, f"INVALID: {patched['trouble']}")
    if after == {"passed"}:
        return Verdict(False, f"NOT CAUGHT: {bug.test} passes with the bug")
    if after - {"passed"} != {"failed on an assertion"}:
        return Verdict(False, f"INVALID: {bug.test} {_listed(after - {'passed'}) or 'was not run'}")
    return Verdict(True, f"caught by {bug.test.removeprefix('tests/')}")


def _endings(test: str, run: dict[str, Any]) -> set[str]:
    """Return the results of the cases of a test."""
    return {how for case, how in run.get("endings", {}).items() if case == test or case.startswith(f"{test}[")}


def _listed(endings: set[str]) -> str:
    return ", and ".join(sorted(endings))


def _chosen(bugs: list[Bug], numbers: list[str]) -> list[Bug]:
    """Return the bugs with these numbers, or all; raise ValueError for an unknown number or without git."""
    if unknown := set(numbers) - {bug.number for bug in bugs}:
        raise ValueError(f"no bug has the number {', '.join(sorted(unknown))}; the last is {bugs[-1].number}")
    if shutil.which("git") is None:
        raise ValueError("git is needed to apply the patches; install it")
    chosen = [bug for bug in bugs if not numbers or bug.number in numbers]
    for bug in chosen:
        _ = bug.test  # raises if it names no test
    return chosen


def main(
    arguments: Sequence[str] | None = None,
    *,
    root: Path = ROOT,
    folder: Path = FOLDER,
    libraries: Sequence[str] = LIBRARIES,
) -> int:
    parser = argparse.ArgumentParser(description="See whether the tests catch each historic bug of docs/known-bugs.md.")
    parser.add_argument("numbers", nargs="*", metavar="NN", help="of the bugs to try; all, where none is given")
    numbers = parser.parse_args(arguments).numbers
    try:
        chosen = _chosen(bugs_in(folder), numbers)
    except ValueError as error:
        parser.error(str(error))
    begun, caught = time.monotonic(), 0
    for bug, verdict in zip(chosen, judge(root, chosen, libraries), strict=True):
        print(f"{bug.name}: {verdict.words}", flush=True)
        caught += verdict.caught
    print(f"{caught} of {len(chosen)} caught in {time.monotonic() - begun:.0f} s")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
