"""Starts a process for each measurement and waits for it; see `llama.bench.worker` for what it does.

Knows processes and files of JSON, not what is in them.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama.bench.cell import Cell

_PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


class JobDied(RuntimeError):
    """The process ended without a result; the message says how, and its last words."""


def run_job(kind: str, cell: Cell, *, waiting: Callable[[], None] = lambda: None, **job: Any) -> dict[str, Any]:
    """Do one job in a process of its own and return its result; `waiting` is called twice a second meanwhile.

    Raises ValueError for what the job refused, and JobDied.
    """
    with tempfile.TemporaryDirectory(prefix="llama-bench-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({"kind": kind, "cell": cell.as_json(), **job}), "utf-8")
        # -P: a folder named llama where the user happens to stand is not this package
        files = [str(folder / "job.json"), str(folder / "result.json")]
        words = [sys.executable, "-P", "-m", "llama.bench.worker", *files]
        with (folder / "said").open("w+", errors="replace") as said:
            # The pipe is never written to: its end tells the process that we are gone, however we went.
            process = subprocess.Popen(words, env=_environment(folder), stdin=subprocess.PIPE, stdout=said, stderr=said)
            try:
                _wait(process, waiting)
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


def _environment(folder: Path) -> dict[str, str]:
    """Return our environment, in which the process finds this very package, and leaves its files in `folder`."""
    paths = [_PACKAGE_PARENT, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path), "TMPDIR": str(folder)}


def _wait(process: "subprocess.Popen[bytes]", waiting: Callable[[], None]) -> None:
    while True:
        try:
            process.wait(timeout=0.5)
            return
        except subprocess.TimeoutExpired:
            waiting()


def _how_it_died(code: int, last_words: str) -> str:
    lines = [line for line in last_words.splitlines() if line.strip()]
    if code < 0:
        how = f"its process was ended by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += ", as a machine does that runs out of memory"
    else:
        how = f"its process ended with exit code {code}"
    return f"{how}: {lines[-1].strip()}" if lines else how
