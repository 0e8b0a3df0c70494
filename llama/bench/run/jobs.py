"""Starts a process for each job of `llama.bench.run.worker` and waits for it.

Under torchrun rank 0 decides what is measured and sends each job to the other ranks; the processes that all of them
start for it share the model.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from llama.bench.cell import Cell
from llama.host import console
from llama.host.files import cache_dir
from llama.ranks.torchrun import default_timeout, job_store, world_rank, world_size

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])


class JobDied(RuntimeError):
    """The process ended without a result; the message says how, with its last line of output."""


class Followers:
    """The other ranks of a torchrun; without torchrun there are none."""

    def __init__(self) -> None:
        self._timeout = default_timeout()
        self._store = job_store(self._timeout) if world_size() > 1 else None
        self._sent = 0

    def send(self, job: dict[str, Any]) -> str:
        """Send a job to all of them, and return its number; no job ends the loop of `follow`."""
        self._sent += 1
        if self._store is not None:
            self._store.set(f"bench/{self._sent}", json.dumps(job))
        return str(self._sent)

    def follow(self) -> int:
        """On another rank: do the jobs of rank 0 until there are no more, and return the exit code."""
        assert self._store is not None
        while True:
            self._sent += 1
            key = f"bench/{self._sent}"
            while not self._store.check([key]):
                time.sleep(0.05)
            job = json.loads(self._store.get(key))
            if not job:
                return 0
            try:
                _run(job, str(self._sent), waiting=lambda: None)
            except (ValueError, JobDied) as error:
                console.say(f"rank {world_rank()}: {error}")
            self._store.set(f"{key}/{world_rank()}", "")

    def wait(self) -> None:
        """Wait until all of them have ended the last job."""
        if self._store is None:
            return
        keys = [f"bench/{self._sent}/{rank}" for rank in range(1, world_size())]
        until = time.monotonic() + self._timeout
        while not self._store.check(keys):
            if time.monotonic() > until:
                raise JobDied(f"another rank has not ended its part after {self._timeout:g} s")
            time.sleep(0.05)


@cache
def followers() -> Followers:
    return Followers()


def run_job(kind: str, cell: Cell, *, waiting: Callable[[], None] = lambda: None, **options: Any) -> dict[str, Any]:
    """Do one job in a process of its own and return its result; `waiting` is called twice a second meanwhile.

    Raises ValueError with the message of a ValueError of the job, JobDied, and what `waiting` raises.
    """
    job = {"kind": kind, "cell": cell.as_json(), **options}
    if kind == "machine":  # needs no model, and only rank 0 asks for it
        return _run(job, "0", waiting)
    try:
        return _run(job, followers().send(job), waiting)
    finally:
        followers().wait()


def _run(job: dict[str, Any], number: str, waiting: Callable[[], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="llama-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job), "utf-8")
        # -P: a folder named llama in the current directory is not this package
        files = [str(folder / "job.json"), str(folder / "result.json")]
        words = [sys.executable, "-P", "-m", "llama.bench.run.worker", *files]
        with (folder / "said").open("w+", errors="replace") as said:
            # Nothing is written into the pipe: the process ends when this end of it is closed.
            process = subprocess.Popen(
                words, env=_environment(folder, number), stdin=subprocess.PIPE, stdout=said, stderr=said
            )
            try:
                while process.poll() is None:
                    waiting()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=0.5)
            finally:
                process.kill()  # if waiting was interrupted
                process.communicate()
            said.seek(0)
            last_words = said.read()
        if process.returncode != 0:
            raise JobDied(_how_it_died(process.returncode, last_words))
        result = json.loads((folder / "result.json").read_text("utf-8"))
    if "refused" in result:
        raise ValueError(result["refused"])
    done: dict[str, Any] = result["done"]
    return done


def _environment(folder: Path, number: str) -> dict[str, str]:
    """Return the environment of a process that imports this package and leaves its temporary files in `folder`.

    The number of the job separates its ranks from those of another job.
    """
    paths = [_PACKAGE_PARENT, os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "TMPDIR": str(folder), "LLAMA_JOB": number}
    own["KINETO_LOG_LEVEL"] = os.environ.get("KINETO_LOG_LEVEL", "99")  # or PyTorch's profiler prints "USDT:" lines
    with suppress(RuntimeError):  # or each job compiles again; a user without a home has no such folder
        own["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(cache_dir() / "inductor")
    return {**os.environ, **own}


def _how_it_died(code: int, last_words: str) -> str:
    lines = [line for line in last_words.splitlines() if line.strip()]
    if code < 0:
        how = f"its process was ended by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += ", as a machine does that runs out of memory"
    else:
        how = f"its process ended with exit code {code}"
    return f"{how}: {lines[-1].strip()}" if lines else how
