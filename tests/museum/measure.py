"""What opening an exhibit takes: CPU time, memory, and the error; for a process of its own, which is warm.

Knows nothing of tests.
"""

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from museum.exhibits import EXHIBITS, write_originals

from llama.checkpoint import open_checkpoint

MIB = 1 << 20
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Visit:
    """error: the name of its class, "" where the exhibit was accepted. seconds: of CPU, the best of three.

    memory: bytes by which the process grew at its peak, None where the system does not say. size: bytes of the
    exhibit's files. parsed: those of them that are no holes.
    """

    name: str
    error: str
    message: str
    seconds: float
    memory: int | None
    size: int
    parsed: int


def visits() -> Iterator[Visit]:
    """Open every exhibit, after the valid checkpoints that they are made of, for which all code is loaded."""
    with gallery() as folder:
        for original in ("meta", "huggingface", "huggingface-one", "model.gguf"):
            open_checkpoint(folder / original)
        gc.collect()
        gc.freeze()  # what all the libraries hold need not be looked through again and again
        for name in EXHIBITS:
            with shown(name, folder) as path:
                yield visit(name, path, open_checkpoint)


@contextmanager
def gallery() -> Iterator[Path]:
    """Make a folder of valid checkpoints, in which exhibits can be made, for as long as the block runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_originals(folder)
        yield folder


@contextmanager
def shown(name: str, gallery: Path) -> Iterator[Path]:
    """Write an exhibit and give its path, and delete it after the block."""
    here = Path.cwd()
    folder = gallery / "exhibit"
    folder.mkdir()
    try:
        yield EXHIBITS[name].make(folder)
    finally:
        os.chdir(here)
        shutil.rmtree(folder)


def visit(name: str, path: Path, opened: Callable[[Path], object]) -> Visit:
    size, parsed = _sizes(path)
    seconds, memory, error, message = [], None, "", ""
    for _ in range(3):
        gc.collect()
        before = restart_peak()
        start = time.process_time()
        try:
            opened(path)
        except Exception as caught:
            error, message = type(caught).__name__, str(caught)
        seconds.append(time.process_time() - start)
        if before is not None:
            memory = max(memory or 0, peak_memory() - before)
    return Visit(name, error, message, min(seconds), memory, size, parsed)


def restart_peak() -> int | None:
    """Let the peak of this process's memory begin anew and return what it has now, None where that cannot be done."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _memory("VmRSS")
    except OSError:
        return None


def peak_memory() -> int:
    return _memory("VmHWM")


def _memory(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


def _sizes(path: Path) -> tuple[int, int]:
    files = [path] if not path.is_dir() else [file for file in path.iterdir() if file.is_file()]
    found = [file.stat() for file in files]
    # Where a system does not know of holes, all is counted.
    return sum(f.st_size for f in found), sum(min(f.st_size, getattr(f, "st_blocks", f.st_size) * 512) for f in found)
