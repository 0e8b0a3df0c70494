"""Three experiments for the first day with a GPU, cheapest first, each a job for a process of its own.

An experiment returns whether it passed, a line of words, and its figures as a table. `scripts/gpu_report.py` runs them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any, TypedDict

import torch

from llama import ops as plain_ops
from llama.bench.cell import Cell
from llama.bench.gpu.checks import run_checks
from llama.bench.gpu.kernels import model_for, step_row, ways_of
from llama.host.machine import wait_for
from llama.kv_cache import Cache
from llama.model import Transformer
from llama.ops import without_cudnn

CHECKING = 90.0  # seconds, within the limit of the experiment: what is compiled for the first time takes most of them
LENGTHS = 32
BATCHES = (1, 8, 16)  # of the table
SLOW = 3.0  # times the median: a step that takes longer has waited for something
OUTCOMES = {True: "passed", False: "**FAILED**", None: "not run"}


class Found(TypedDict):
    """What an experiment found. `passed` is None if there is nothing to find here."""

    passed: bool | None
    words: str
    heads: list[str]
    rows: list[list[str]]
    figures: dict[str, float]


def checks(cell: Cell) -> Found:
    """Compare all paths and kernels with the plain ones."""
    found = run_checks(cell, seconds=CHECKING)
    failed = [check["name"] for check in found if check["passed"] is False]
    unknown = sum(check["passed"] is None for check in found)
    words = f"{len(failed)} of {len(found)} failed: {failed[0]}" if failed else f"all {len(found) - unknown} hold"
    words += f"; for {unknown} no time was left, run them again: what was compiled is kept" if unknown else ""
    rows = [[check["name"], OUTCOMES[check["passed"]], check["detail"]] for check in found]
    return _found(not failed, words, ["check", "outcome", "detail"], rows)


def ways(cell: Cell) -> Found:
    """Time steps of each set of kernels, at every batch of the table."""
    model = model_for(cell)
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    for batch in BATCHES:
        for way, ops in ways_of(model).items():
            row = step_row(model, cell.but(batch_size=batch), ops)
            seconds = row["seconds"]["median"]
            figures[f"{way} at batch {batch}"] = 1e3 * seconds
            rate = f"{row['bytes'] / seconds / 1e9:.0f}"
            rows.append([way, str(batch), f"{1e3 * seconds:.3f}", rate, f"{row['record_seconds']:.1f}"])
    words = "; ".join(f"{name} {figure:.3f} ms" for name, figure in figures.items())
    return _found(True, words, ["way", "batch", "ms", "GB/s", "to compile and record, s"], rows, figures)


@torch.inference_mode()
def new_lengths(cell: Cell) -> Found:
    """Time the plain path's steps at new lengths, as it is and with cuDNN enabled."""
    model = model_for(cell)
    figures: dict[str, float] = {}
    cache = model.new_cache("static", rows=1, length=cell.input_len + 2 * LENGTHS + 1)
    ids = torch.zeros((1, cell.input_len), dtype=torch.int64, device=model.device)
    model(ids, 0, cache=cache, logits="last")
    model(ids[:, :1], cell.input_len, cache=cache, logits="last")
    begin = cell.input_len + 1
    for name, enabled in (("as it is", without_cudnn), ("with cuDNN", lambda _: nullcontext())):
        with _changed(plain_ops, without_cudnn=enabled):
            times = [_seconds(model, ids[:, :1], position, cache) for position in range(begin, begin + LENGTHS)]
        begin += LENGTHS
        figures |= {f"{name}, median": 1e3 * median(times), f"{name}, longest": 1e3 * max(times)}
    passed = figures["as it is, longest"] <= SLOW * figures["as it is, median"] or model.device.type == "cpu"
    words = "; ".join(f"{name} {figure:.2f} ms" for name, figure in figures.items())
    return _found(passed, words, figures=figures)


EXPERIMENTS: dict[str, Callable[[Cell], Found]] = {
    "gpu checks": checks,
    "gpu ways": ways,
    "gpu lengths": new_lengths,
}


def _found(
    passed: bool | None,
    words: str,
    heads: Sequence[str] = (),
    rows: Sequence[list[str]] = (),
    figures: dict[str, float] | None = None,
) -> Found:
    return {"passed": passed, "words": words, "heads": [*heads], "rows": [*rows], "figures": figures or {}}


def _seconds(model: Transformer, ids: torch.Tensor, position: int, cache: Cache) -> float:
    wait_for(model.device)
    began = time.perf_counter()
    model(ids, position, cache=cache, logits="last")
    wait_for(model.device)
    return time.perf_counter() - began


@contextmanager
def _changed(module: Any, **values: Any) -> Iterator[None]:
    """Give names of a module other values until the end."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
