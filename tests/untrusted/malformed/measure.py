"""Measure what opening a malformed checkpoint takes: CPU time, memory, and the error; in a warm process of its own."""

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge import small_gguf
from untrusted.malformed.cases import CASES, SLOW, write_originals

from llama.checkpoint import open_checkpoint
from llama.tokenizer import Tokenizer

MIB = 1 << 20
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Result:
    """What opening a case took.

    error: the name of its class; "" if the file was accepted.
    seconds: CPU time, the best of at most three attempts.
    memory: bytes by which the process grew at its peak; None if the system does not report it.
    size: bytes of the files.
    limit: the most seconds that a file may take of which so many bytes are not in holes. It is some six times what the
        slowest cases take on a slow machine: the check is for time that grows faster than the file does.
    """

    name: str
    error: str
    message: str
    seconds: float
    memory: int | None
    size: int
    limit: float


def results(*, slow: bool) -> Iterator[Result]:
    """Open the slow cases or the others, after the valid checkpoints, so that all code is loaded."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        write_originals(Path(name))
        for original in ("meta", "huggingface", "huggingface-one", "model.gguf"):
            open_checkpoint(Path(name, original))
        Tokenizer.from_gguf(small_gguf())
        gc.collect()
        gc.freeze()  # later collections skip the objects of the libraries
        for case in [case for case in CASES if (case in SLOW) == slow]:
            folder = Path(name, "malformed")
            folder.mkdir()
            yield measured(case, CASES[case].make(folder))
            os.chdir(here)
            shutil.rmtree(folder)


def measured(name: str, made: Path | dict[str, Any]) -> Result:
    size, parsed = _sizes(made) if isinstance(made, Path) else (0, 0)
    limit = 1 + 0.1 * parsed / MIB
    seconds, memory, error, message = [], None, "", ""
    for _ in range(3):  # other work on the machine only adds time
        gc.collect()
        before = restart_peak()
        start = time.process_time()
        try:
            _ = open_checkpoint(made) if isinstance(made, Path) else Tokenizer.from_gguf(made)
        except Exception as caught:
            error, message = type(caught).__name__, str(caught)
        seconds.append(time.process_time() - start)
        if before is not None:
            memory = max(memory or 0, _memory("VmHWM") - before)
        if min(seconds) <= limit:
            break
    return Result(name, error, message, min(seconds), memory, size, limit)


def restart_peak() -> int | None:
    """Reset the peak of this process's memory and return its memory; None if the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _memory("VmRSS")
    except OSError:
        return None


def _memory(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


def _sizes(path: Path) -> tuple[int, int]:
    files = [path] if not path.is_dir() else [file for file in path.iterdir() if file.is_file()]
    found = [file.stat() for file in files]
    # All bytes count on a system that does not report holes.
    return sum(f.st_size for f in found), sum(min(f.st_size, getattr(f, "st_blocks", f.st_size) * 512) for f in found)
