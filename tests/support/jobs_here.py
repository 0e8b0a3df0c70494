"""The jobs of a benchmark, done in this process, which takes milliseconds, and with ceilings that nothing reaches."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama.bench.cell import Cell
from llama.bench.presets import Session
from llama.bench.run import worker
from llama.bench.run.directory import new_run_directory, resumed_run_directory
from llama.bench.schema import Report
from llama.cli.progress import seconds_bar

# Beyond what the tiny model reaches anywhere, so that it raises neither.
CEILINGS = {"read_bytes_per_second": 1e15, "read_by": "sum", "flops_per_second": 1e15, "flops_by": "linear"}
CEILINGS |= {"dtype": "fp32"}


class Here:
    """Stands where `run_job` does, and lists what it did, as `label` names it. `fail` may raise before a job."""

    def __init__(self, label: Callable[[str, Cell], str]) -> None:
        self.label = label
        self.done: list[str] = []

    def fail(self, kind: str, cell: Cell) -> None: ...

    def __call__(self, kind: str, cell: Cell, *, waiting: Any = None, **job: Any) -> dict[str, Any]:
        self.fail(kind, cell)
        self.done.append(self.label(kind, cell))
        done: dict[str, Any] = json.loads(json.dumps(worker.JOBS[kind](cell, **job)))
        return done


def session_of(report: Report, out: Path, *, minutes: float, resume: bool = False) -> Session:
    """Return a run of a preset's report under `out`, or the newest one there, which goes on."""
    directory = resumed_run_directory(out, report) if resume else new_run_directory(out, report)
    return Session(directory, time.monotonic() + 60 * minutes, seconds_bar())
