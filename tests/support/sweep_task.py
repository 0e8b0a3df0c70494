"""llama-kv sweep with cells that cost nothing: python sweep_task.py WORDS, with SWEEP_LOG and SWEEP_GATE.

Each cell waits until the file SWEEP_GATE is there, has the figures of a synthetic report, and leaves two lines in the
log: that it began, and that it is done.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench_reports import cell_rows

from llama import cli
from llama.bench import sweep
from llama.bench.cell import Cell
from llama.bench.schema import Report, new_report
from llama.bench.sweep import OFF, Point
from llama.cli import submit
from llama.cli import sweep as command

SETUP = {"machine": "a", "cpu": "EPYC", "cores": 2, "threads": 1, "commit": "c", "dirty": False, "gpu": None}


def report_of(point: Point, setup: dict[str, Any] = SETUP, *, n: int = 3) -> Report:
    """Return the synthetic report of a cell of a sweep."""
    kind = {"kv_caching": False} if point.kind == OFF else {"kv_cache": point.kind}
    cell = Cell(model=point.model, input_len=point.context, batch_size=point.batch, output_len=4, **kind)  # type: ignore[arg-type]
    report = new_report("cell", [cell])
    report["environment"], report["rows"] = dict(setup), cell_rows(0, cell, n=n)
    return report


def measured(point: Point, **_: Any) -> Report:
    """Replace `llama.bench.sweep.measure`."""
    _log(f"began {point.id}")
    while not Path(os.environ["SWEEP_GATE"]).exists():
        time.sleep(0.05)
    time.sleep(0.02)
    return report_of(point)


def _log(line: str) -> None:
    with Path(os.environ["SWEEP_LOG"]).open("a") as log:
        log.write(f"{line} {os.getpid()} {os.environ.get('SLURMD_NODENAME')}\n")


def write_json(report: Report, path: Path, *, real: Any) -> None:
    """Write a cell's file, and then the line that it is done."""
    real(report, path)
    _log(f"done {path.stem}")


def as_task(words: list[str]) -> Any:
    """Replace `llama.cli.submit._command`."""
    from submitit.helpers import CommandFunction

    return CommandFunction([sys.executable, __file__, *words])


if __name__ == "__main__":
    sweep.measure = measured
    sweep.write_json = partial(write_json, real=sweep.write_json)  # type: ignore[assignment]
    submit._command, submit.LOOK_EVERY, sweep.LOOK_EVERY = as_task, 0.2, 0.1
    sys.exit(cli.run(command.main, sys.argv[1:]))
