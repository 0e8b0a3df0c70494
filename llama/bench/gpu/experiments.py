"""What is asked of a GPU that nobody has measured yet: six experiments, cheapest first, each for a process of its own.

An experiment says whether what it looked for holds, in a line what it saw, and its figures as a table. Which of them
are run, and how long they may take, is known to `scripts/gpu_report.py`. The rule that two of them decide stands in
docs/log.md.
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
from llama.bench.gpu.kernels import filled_buffers, model_for, profile_step, step_row, ways_of
from llama.bench.presets import BATCHES
from llama.fast.graph_ops import GraphOps
from llama.fast.graph_runner import DecodeBuffers, Replay, cached
from llama.host.machine import wait_for
from llama.kv_cache import Cache
from llama.model import Transformer
from llama.ops import without_cudnn

CHECKING = 90.0  # seconds, within the limit of the experiment: what is compiled for the first time takes most of them
REPLAYS = 2000
LENGTHS = 32
RULE = 1.2  # times as fast as the compiled step at batch 1 have the fused kernels to be, or they go
SLOW = 3.0  # times the median: a step that takes longer has waited for something
VARIANTS: dict[str, dict[str, Any]] = {  # of names of triton_kernels; of a Tile, the fields that are others
    "as they are": {},
    "attention split from 64 slots on": {"MIN_SLOTS": 64},
    "w2 by 4 x 8192": {"LONG": {"depth": 8192, "warps": 32}},
    "wq, wk and wv by 4 x 1024": {"NARROW": {"depth": 1024, "warps": 4}},
    "wo, w1, w3 and the head by 16 x 512": {"WIDE": {"columns": 16, "depth": 512}},
}
OUTCOMES = {True: "passed", False: "**FAILED**", None: "not run"}


class Found(TypedDict):
    """What an experiment found. `passed` is None where there is nothing to find here."""

    passed: bool | None
    words: str
    heads: list[str]
    rows: list[list[str]]
    figures: dict[str, float]


def checks(cell: Cell) -> Found:
    """Hold all paths and kernels beside the plain ones."""
    found = run_checks(cell, seconds=CHECKING)
    failed = [check["name"] for check in found if check["passed"] is False]
    unknown = sum(check["passed"] is None for check in found)
    words = f"{len(failed)} of {len(found)} failed: {failed[0]}" if failed else f"all {len(found) - unknown} hold"
    words += f"; for {unknown} no time was left, run them again: what was compiled is kept" if unknown else ""
    rows = [[check["name"], OUTCOMES[check["passed"]], check["detail"]] for check in found]
    return _found(not failed, words, ["check", "outcome", "detail"], rows)


@torch.inference_mode()
def early_launch(cell: Cell) -> Found:
    """Replay steps whose kernels begin before the one before has ended, beside steps whose kernels wait."""
    model = model_for(cell)
    fused = ways_of(model).get("fused")
    if fused is None or not _launches_early(model.device):
        return _found(None, "no fused kernels here, or none that begin early")
    from llama.fast import triton_kernels

    steps = []
    for early in (True, False):
        with _changed(triton_kernels, EARLY=early):
            steps.append(_noting(model, cell, fused))
    return same_bits(*steps)


def same_bits(ours: tuple[DecodeBuffers, torch.Tensor, Replay], theirs: tuple[Any, torch.Tensor, Replay]) -> Found:
    """Replay both, in turn, and compare ids and logits to the bit; the host looks once, at the end."""
    apart = []
    for _ in range(REPLAYS):
        for _, _, replay in (ours, theirs):
            replay()
        logits = ours[1].view(torch.int32) != theirs[1].view(torch.int32)
        apart.append(logits.any() | (ours[0].chosen != theirs[0].chosen).any())
    steps = torch.stack(apart).nonzero()[:, 0].tolist()
    words = f"{len(steps)} of {REPLAYS} steps differ" + (f", the first is step {steps[0]}" if steps else "")
    return _found(not steps, words, figures={"differing": float(len(steps))})


def profiled(cell: Cell) -> Found:
    """Time every kernel of a step, of each way to make one, beside the bytes that it must read."""
    model = model_for(cell)
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    for way, ops in ways_of(model).items():
        kernels, gaps = profile_step(model, cell, ops)
        figures[f"{way}, kernels"] = sum(row["count"] for row in kernels)
        figures[f"{way}, us"] = sum(row["microseconds"] for row in kernels)
        figures[f"{way}, us of gaps"] = 0.0 if gaps is None else gaps["median"] * gaps["n"]
        for row in kernels:
            rate = "" if not row["bytes"] else f"{row['bytes'] / max(row['microseconds'], 1e-9) / 1e3:.0f}"
            rows.append([way, row["name"][:80], str(row["count"]), f"{row['microseconds']:.1f}", rate])
    words = "; ".join(f"{name} {figure:.0f}" for name, figure in figures.items())
    return _found(True, words, ["way", "kernel", "calls", "us", "GB/s"], rows, figures)


def tiles(cell: Cell) -> Found:
    """Time the step of fused kernels with other tiles and splits."""
    model = model_for(cell)
    fused = ways_of(model).get("fused")
    if fused is None:
        return _found(None, "no fused kernels here")
    from llama.fast import triton_kernels

    figures = {}
    for name, variant in VARIANTS.items():
        values = {
            key: getattr(triton_kernels, key)._replace(**value) if isinstance(value, dict) else value
            for key, value in variant.items()
        }
        with _changed(triton_kernels, **values):
            figures[name] = 1e3 * step_row(model, cell, fused)["seconds"]["median"]
    best = min(figures, key=figures.__getitem__)
    rows = [[name, f"{figure:.3f}"] for name, figure in figures.items()]
    return _found(True, f"{best}: {figures[best]:.3f} ms", ["tiles", "ms"], rows, figures)


def ways(cell: Cell) -> Found:
    """Time steps of every way, at every batch of the table: what the rule of docs/log.md asks."""
    model = model_for(cell)
    rows: list[list[str]] = []
    figures: dict[str, float] = {}
    for batch in BATCHES:
        for way, ops in ways_of(model).items():
            if batch > (ops.most_rows or batch):
                continue
            row = step_row(model, cell.but(batch_size=batch), ops)
            seconds = row["seconds"]["median"]
            figures[f"{way} at batch {batch}"] = 1e3 * seconds
            rate = f"{row['bytes'] / seconds / 1e9:.0f}"
            rows.append([way, str(batch), f"{1e3 * seconds:.3f}", rate, f"{row['record_seconds']:.1f}"])
    words = "; ".join(f"{name} {figure:.3f} ms" for name, figure in figures.items())
    return _found(True, words, ["way", "batch", "ms", "GB/s", "to compile and record, s"], rows, figures)


@torch.inference_mode()
def new_lengths(cell: Cell) -> Found:
    """Time the plain path's steps at lengths that nobody has met, as it is and with cuDNN in reach."""
    model = model_for(cell)
    figures: dict[str, float] = {}
    cache = model.new_cache("static", rows=1, length=cell.input_len + 2 * LENGTHS + 1)
    ids = torch.zeros((1, cell.input_len), dtype=torch.int64, device=model.device)
    model(ids, 0, cache=cache, logits="last")
    model(ids[:, :1], cell.input_len, cache=cache, logits="last")
    begin = cell.input_len + 1
    for name, reach in (("as it is", without_cudnn), ("with cuDNN in reach", lambda _: nullcontext())):
        with _changed(plain_ops, without_cudnn=reach):
            times = [_seconds(model, ids[:, :1], position, cache) for position in range(begin, begin + LENGTHS)]
        begin += LENGTHS
        figures |= {f"{name}, median": 1e3 * median(times), f"{name}, longest": 1e3 * max(times)}
    passed = figures["as it is, longest"] <= SLOW * figures["as it is, median"] or model.device.type == "cpu"
    words = "; ".join(f"{name} {figure:.2f} ms" for name, figure in figures.items())
    return _found(passed, words, figures=figures)


EXPERIMENTS: dict[str, Callable[[Cell], Found]] = {
    "gpu checks": checks,
    "gpu early launch": early_launch,
    "gpu kernels": profiled,
    "gpu tiles": tiles,
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


def _noting(model: Transformer, cell: Cell, ops: GraphOps) -> tuple[DecodeBuffers, torch.Tensor, Replay]:
    """Return rows after the cell's prompt, where each step leaves its logits, and a replay of the next step."""
    buffers = filled_buffers(model, cell.batch_size, cell.input_len, REPLAYS)
    wide = torch.promote_types(model.dtype, torch.float32)
    logits = torch.zeros((buffers.rows, model.args.vocab_size), dtype=wide, device=model.device)

    def step() -> None:
        h = cached(model, buffers, ops)
        made, best, at = ops.head(h, model.norm.weight, model.norm.eps, model.output.weight)
        logits.copy_(made)
        ops.advance(best, at, buffers.tokens, buffers.positions, buffers.chosen)

    return buffers, logits, buffers.recorded(step, buffers.slots - 1)


def _launches_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _seconds(model: Transformer, ids: torch.Tensor, position: int, cache: Cache) -> float:
    wait_for(model.device)
    began = time.perf_counter()
    model(ids, position, cache=cache, logits="last")
    wait_for(model.device)
    return time.perf_counter() - began


@contextmanager
def _changed(module: Any, **values: Any) -> Iterator[None]:
    """Give names of a module other values for a while."""
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
