"""Starts a process for each measurement and waits for it; see `llama.bench.run.worker` for what it does.

Under torchrun rank 0 decides what is measured, and tells the others of each job; the processes that all of them start
for it then share the model. Knows processes and files of JSON, not what is in them.
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
from llama.cli import console
from llama.host.files import cache_dir
from llama.ranks.torchrun import default_timeout, job_store, world_rank, world_size

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])


class JobDied(RuntimeError):
    """The process ended without a result; the message says how, and its last words."""


class Followers:
    """The other ranks of a torchrun, which do as rank 0 does; there are none without torchrun."""

    def __init__(self) -> None:
        self._timeout = default_timeout()
        self._store = job_store(self._timeout) if world_size() > 1 else None
        self._told = 0

    def tell(self, job: dict[str, Any]) -> str:
        """Let all of them start the same job, and return its number."""
        self._told += 1
        if self._store is not None:
            self._store.set(f"bench/{self._told}", json.dumps(job))
        return str(self._told)

    def follow(self) -> int:
        """On another rank: do what rank 0 tells until it has no more, and return the exit code."""
        assert self._store is not None
        while True:
            self._told += 1
            key = f"bench/{self._told}"
            while not self._store.check([key]):
                time.sleep(0.05)
            job = json.loads(self._store.get(key))
            if not job:
                return 0
            try:
                _run(job, str(self._told), waiting=lambda: None)
            except (ValueError, JobDied) as error:
                console.say(f"rank {world_rank()}: {error}")
            self._store.set(f"{key}/{world_rank()}", "")

    def wait(self) -> None:
        """Wait until all of them have ended the job that they were told last."""
        if self._store is None:
            return
        keys = [f"bench/{self._told}/{rank}" for rank in range(1, world_size())]
        until = time.monotonic() + self._timeout
        while not self._store.check(keys):
            if time.monotonic() > until:
                raise JobDied(f"another rank has not ended its part after {self._timeout:g} s")
            time.sleep(0.05)

    def dismiss(self) -> None:
        """Tell them that there is nothing more to do."""
        self.tell({})


@cache
def followers() -> Followers:
    return Followers()


def run_job(kind: str, cell: Cell, *, waiting: Callable[[], None] = lambda: None, **job: Any) -> dict[str, Any]:
    """Do one job in a process of its own and return its result; `waiting` is called twice a second meanwhile.

    Raises ValueError for what the job refused, and JobDied.
    """
    told = {"kind": kind, "cell": cell.as_json(), **job}
    if kind == "machine":  # needs no model, and is asked of rank 0's machine alone
        return _run(told, "0", waiting)
    try:
        return _run(told, followers().tell(told), waiting)
    finally:
        followers().wait()


def _run(job: dict[str, Any], number: str, waiting: Callable[[], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="llama-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job), "utf-8")
        # -P: a folder named llama where the user happens to stand is not this package
        files = [str(folder / "job.json"), str(folder / "result.json")]
        words = [sys.executable, "-P", "-m", "llama.bench.run.worker", *files]
        with (folder / "said").open("w+", errors="replace") as said:
            # The pipe is never written to: its end tells the process that we are gone, however we went.
            process = subprocess.Popen(
                words, env=_environment(folder, number), stdin=subprocess.PIPE, stdout=said, stderr=said
            )
            try:
                while process.poll() is None:
                    waiting()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=0.5)
            finally:
                process.kill()  # where waiting was interrupted
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
    """Return our environment, in which the process finds this very package, and leaves its files in `folder`.

    The job's number keeps its ranks from meeting those of another.
    """
    paths = [_PACKAGE_PARENT, os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "TMPDIR": str(folder), "LLAMA_JOB": number}
    with suppress(RuntimeError):  # or each job would compile anew; a user without a home has no such folder
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
