"""Run a submission's probe in a copy, in a process session with limits, and end all its processes afterwards.

This prevents accidents: loops, forks, floods of output, deleted files. It does not prevent attacks: the submission runs
as the user, with network and files (docs/course.md has a command for a container). Knows files and processes; does not
know what the probe does.
"""

import ctypes
import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PROBE = Path(__file__).with_name("probe.py")
LEFT_OUT = (".venv", "venv", ".git", "results", "__pycache__", ".ipynb_checkpoints")
KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "SYSTEMROOT")  # variables of our environment
POLL_S = 0.1
FACTS_LIMIT = 16_000_000  # bytes; those of the real package are half a million
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, of Linux's prctl.h


@dataclass(frozen=True)
class Limits:
    """The limits of one submission. Memory is address space, of which PyTorch reserves more than it uses."""

    seconds: float = 60.0
    memory_bytes: int = 8 * 2**30
    file_bytes: int = 64 * 2**20
    printed_bytes: int = 2**20
    processes: int = 64
    tree_bytes: int = 100 * 2**20
    tree_files: int = 2000

    def __post_init__(self) -> None:
        if not 0 < self.seconds < 1e6:
            raise ValueError(f"seconds={self.seconds} must be above 0, and less than a million")

    def of_the_process(self) -> dict[str, int]:
        """Return the limits that the kernel enforces, by their names in `resource`."""
        return {
            "RLIMIT_CPU": int(self.seconds) + 1,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_CORE": 0,
        }


@dataclass(frozen=True)
class Outcome:
    """The result of a run: facts, or the reason why there are none; and the end of the output."""

    facts: dict[str, Any] | None = None
    reason: str = ""
    printed: str = ""


def run(submission: Path, limits: Limits, *arguments: str) -> Outcome:
    """Run the probe on a copy of a submission; `arguments` are its further ones."""
    try:
        with tempfile.TemporaryDirectory(prefix="course-", ignore_cleanup_errors=True) as scratch:
            return _run(submission, Path(scratch).resolve(), limits, arguments)
    except (OSError, RecursionError) as error:  # RecursionError: deeply nested folders
        return Outcome(reason=f"its files cannot be copied, or their copy not removed: {error}")


def _run(submission: Path, scratch: Path, limits: Limits, arguments: tuple[str, ...]) -> Outcome:
    tree, home, facts = scratch / "tree", scratch / "home", scratch / "private" / "facts.json"
    if refusal := _copy(submission, tree, limits):
        return Outcome(reason=refusal)
    for folder in (tree, home, facts.parent):
        folder.mkdir(exist_ok=True)
    before, signature = digests(tree), secrets.token_hex(16)
    with _everything_ended_afterwards() as started:
        process = subprocess.Popen(
            [sys.executable, "-P", str(PROBE), str(tree), str(facts), json.dumps(limits.of_the_process()), *arguments],
            cwd=tree,
            env=_environment(home),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            reason, printed = _watch(process, signature, limits, started)
        finally:
            _end_session(process)
            assert process.stdout is not None
            process.stdout.close()
    reason = reason or _changes(before, tree) or _changes(before, submission, what="the originals of its files")
    if reason:
        return Outcome(reason=reason, printed=printed)
    return read_facts(facts, tree, signature, process.returncode, printed)


def _environment(home: Path) -> dict[str, str]:
    """Return the environment of the submission: our PATH and language, and folders of its own."""
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    own = dict.fromkeys(("HOME", "TMPDIR", "TMP", "TEMP", "XDG_CACHE_HOME"), str(home))
    quiet = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return kept | own | quiet


def _copy(submission: Path, tree: Path, limits: Limits) -> str:
    """Copy the regular files, up to the limits; return the reason if that fails, else ""."""
    if not (submission / "llama").is_dir():
        return "there is no folder llama in it: hand in the folder that course.make made"
    files = size = 0
    for folder, names, leaves in os.walk(submission):
        names[:] = [name for name in names if name not in LEFT_OUT and not Path(folder, name).is_symlink()]
        for leaf in leaves:
            path = Path(folder, leaf)
            if not _is_plain(path):
                continue
            files, size = files + 1, size + path.stat().st_size
            if files > limits.tree_files or size > limits.tree_bytes:
                most = f"{limits.tree_files:,} files or {limits.tree_bytes // 2**20} MB"
                return f"it has more than {most}: hand it in without environments and results"
            target = tree / path.relative_to(submission)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return ""


def digests(tree: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a tree by its name, without compiled Python files."""
    paths = (path for path in sorted(tree.rglob("*")) if "__pycache__" not in path.parts and path.is_file())
    return {path.relative_to(tree).as_posix(): _digest(path) for path in paths}


def _digest(path: Path) -> str:
    """Return the SHA-256 of a regular file, or "" if it cannot be read; a pipe or device may have no end."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if _is_plain(path) else ""
    except OSError:
        return ""


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _changes(before: dict[str, str], tree: Path, what: str = "its own files") -> str:
    changed = sorted(file for file, digest in before.items() if digest != _digest(tree / file))
    return f"it deleted or changed {len(changed)} of {what}, {changed[0]} first" if changed else ""


def _watch(
    process: subprocess.Popen[bytes], signature: str, limits: Limits, started: Callable[[], set[int]]
) -> tuple[str, str]:
    """Wait for the end; return the reason if a limit ended it, else "", and the end of the output."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.write(f"{signature}\n".encode())
        process.stdin.close()
    printed, end = bytearray(), time.monotonic() + limits.seconds
    reader = threading.Thread(target=_collect, args=(process.stdout, printed, limits.printed_bytes), daemon=True)
    reader.start()
    reason = ""
    while not reason:
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            break
        reason = _flood(len(printed), limits)
        if time.monotonic() > end:
            reason = f"it was not done after {limits.seconds:g} s: does something loop?"
        elif len(started()) > limits.processes:
            reason = f"it started more than {limits.processes} processes"
    _end_session(process)
    reader.join(1.0)  # a child that left the session may keep the pipe open
    return _flood(len(printed), limits) or reason, bytes(printed[-2000:]).decode("utf-8", errors="replace")


def _flood(printed: int, limits: Limits) -> str:
    return f"it printed more than {limits.printed_bytes / 2**20:g} MB" if printed > limits.printed_bytes else ""


def _collect(stream: IO[bytes], printed: bytearray, limit: int) -> None:
    """Collect the output up to the limit."""
    with suppress(OSError, ValueError):  # it was closed
        while len(printed) <= limit and (read := os.read(stream.fileno(), 65536)):
            printed += read


def read_facts(facts: Path, tree: Path, signature: str, code: int, printed: str) -> Outcome:
    """Return the facts, if our probe wrote them about this tree."""
    if not _is_plain(facts):
        return Outcome(reason=_why(code, printed), printed=printed)
    try:
        with facts.open("rb") as file:
            found = json.loads(file.read(FACTS_LIMIT))
    except (OSError, ValueError, RecursionError):
        return Outcome(reason="its results cannot be read", printed=printed)
    if not isinstance(found, dict) or found.get("signature") != signature:
        return Outcome(reason="its results are not those of the grader's probe", printed=printed)
    if found.get("home") != str(tree):
        return Outcome(reason="its folder llama has no package to import", printed=printed)
    return Outcome(facts=found, printed=printed)


def _why(code: int, printed: str) -> str:
    """Return the reason why there are no results."""
    if code == -getattr(signal, "SIGXCPU", 0):
        return "it took more CPU time than it may"
    if code < 0:
        names = {kind.value: kind.name for kind in signal.Signals}
        return f"it was ended by {names.get(-code, f'signal {-code}')}"
    last = printed.strip().splitlines()[-1:] or ["nothing was said"]
    return f"it ended with exit code {code} before it was tried: {last[0][:200]}"


# ---- ending all processes --------------------------------------------------------------------------------------------


@contextmanager
def _everything_ended_afterwards() -> Iterator[Callable[[], set[int]]]:
    """At the end of the block, kill all processes that descendants of this process have started; on Linux only.

    Yields a function that returns their ids. This process is their subreaper, so that orphans become its children.
    """
    before = _descendants()

    def started() -> set[int]:
        return _descendants() - before

    _adopt_orphans(True)
    try:
        yield started
    finally:
        for _ in range(100):
            strays = started()
            for pid in strays:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            for pid in strays:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if not strays:
                break
            time.sleep(0.01)
        _adopt_orphans(False)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _adopt_orphans(on: bool) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SUBREAPER, int(on), 0, 0, 0)


def _descendants() -> set[int]:
    parents = _parents()
    found, new = set[int](), {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


def _parents() -> dict[int, int]:
    """Return the parent of every process; {} without /proc."""
    parents: dict[int, int] = {}
    with suppress(FileNotFoundError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])  # a name may contain any character
    return parents
