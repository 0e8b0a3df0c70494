"""The jobs of a benchmark, done in this process, which takes milliseconds, and with ceilings that nothing reaches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama.bench import comparisons, plan, presets
from llama.bench.cell import Cell
from llama.bench.plan import Run
from llama.bench.presets import Group
from llama.bench.report.files import RESULTS, keep_steps, write_json
from llama.bench.run import step_times, worker
from llama.bench.run.directory import new_run, resumed_run
from llama.bench.schema import Report

# Beyond what the tiny model reaches anywhere, so that it raises neither.
CEILINGS = {"read_bytes_per_second": 1e15, "read_by": "sum", "flops_per_second": 1e15, "flops_by": "linear"}
CEILINGS |= {"dtype": "fp32"}


class Here:
    """Replaces `run_job`, and lists the jobs that it did, as `label` names them. `fail` may return an error."""

    def __init__(self, label: Callable[[str, Cell], str]) -> None:
        self.label = label
        self.done: list[str] = []
        self.fail: Callable[[str, Cell], BaseException | None] = lambda kind, cell: None

    def __call__(self, kind: str, cell: Cell, *, waiting: Any = None, **job: Any) -> dict[str, Any]:
        if waiting is not None:
            waiting()
        if error := self.fail(kind, cell):
            raise error
        self.done.append(self.label(kind, cell))
        done: dict[str, Any] = json.loads(json.dumps(worker.JOBS[kind](cell, **job)))
        return done


def jobs_here(monkeypatch: pytest.MonkeyPatch, label: Callable[[str, Cell], str]) -> Here:
    """Do all jobs in this process, of two batch sizes."""
    here = Here(label)
    for module in (comparisons, plan):
        monkeypatch.setattr(module, "run_job", here)
    monkeypatch.setattr(worker, "ceilings", lambda *_, **__: CEILINGS)
    monkeypatch.setattr(presets, "BATCHES", (1, 2))
    monkeypatch.setattr(step_times, "MOST", step_times.LEAST)
    return here


def run_of(planned: tuple[Report, list[Group]], out: Path, *, resume: bool = False, repetitions: int = 1) -> Run:
    """Return a run of a preset's report under `out`, or of the newest one there, which continues."""
    folder, report = (resumed_run if resume else new_run)(out, planned[0])

    def save(page: str | None) -> None:
        write_json(report, folder / RESULTS)
        if page is not None:
            keep_steps(folder, page)

    return Run(report, planned[1], repetitions=repetitions, save=save)
