"""Whole reports, made by hand: what a run of the benchmark on the demo model looks like, without running it.

The figures are of the right size, and drawn from seeded noise where a real run has some.
"""

import random
import statistics
from collections.abc import Sequence
from typing import Any

from llama.bench.cell import Cell
from llama.bench.schema import (
    CellRecord,
    Comparison,
    Crossover,
    Ledger,
    Line,
    Point,
    Report,
    Sample,
    Spread,
    StepTimes,
    Sweep,
)
from llama.costs import token_forwards

MB = 2**20
WEIGHTS = 538_060_032  # SmolLM2-135M in float32, the head tied
CACHE_PER_TOKEN = 46_080  # 2 x 30 layers x 3 KV heads x 64 x 4 bytes
PREFILL = {1: 0.21, 8: 1.62, 16: 3.21}  # seconds of the first token
CACHED_STEP = {1: 0.0255, 8: 0.0348, 16: 0.0578}
SENTENCES = [
    "With the cache the same job takes 6.9 to 23.2 times less time, for 30.3 times less work: at batch 1 the step is "
    "bound by memory bandwidth, so most of the saved work was never what cost the time.",
    "The cache itself takes 12.7 MB at batch 1 and 202.5 MB at batch 16; it makes the peak larger, not smaller.",
    "On this machine a cached step is the faster one from a context of 16 tokens on, at every batch size measured.",
]


def spread(values: Sequence[float]) -> Spread:
    ordered = sorted(values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.9))
    return {"n": len(ordered), "median": statistics.median(ordered), "p10": low, "p90": high}


def noisy(value: float, n: int, seed: str) -> list[float]:
    noise = random.Random(seed)
    return [value * (1 + abs(noise.gauss(0, 0.02))) for _ in range(n)]


def cell_record(*, n: int = 3, path: str = "plain", **asked: Any) -> CellRecord:
    """Return the record of a cell with `n` repetitions; `asked` are fields of `Cell`."""
    cell = Cell(**({"threads": 2} | asked))
    samples = [_sample(cell, f"{cell.name} {path} {i}") for i in range(n)]
    seconds, first = (spread([sample[key] for sample in samples]) for key in ("seconds", "first_token_seconds"))
    steps = [step for sample in samples for step in sample["step_seconds"]]
    after = statistics.median(sum(sample["step_seconds"]) for sample in samples)
    on = cell.kv_caching
    cache_bytes = cell.batch_size * cell.total_len * CACHE_PER_TOKEN if on else 0
    memory = ledger(cell, cache_bytes, samples[0]["peak_resident_bytes"] or 0)
    samples[0]["peak_allocated_bytes"] = memory["measured_peak"]  # traced in the first repetition alone
    forwards = token_forwards(input_len=cell.input_len, output_len=cell.output_len, kv_caching=on) * cell.batch_size
    return {
        "cell": cell.as_json(),
        "path": path,
        "samples": samples,
        "summary": {
            "seconds": seconds,
            "first_token_seconds": first,
            "step_seconds": spread(steps) if steps else None,
            "peak_bytes": spread([peak for one in samples if (peak := one["peak_allocated_bytes"]) is not None]),
            "resident_bytes": spread([peak for one in samples if (peak := one["peak_resident_bytes"]) is not None]),
            "tokens_per_second": cell.batch_size * cell.output_len / seconds["median"],
            "prefill_tokens_per_second": cell.batch_size * cell.input_len / first["median"],
            "decode_tokens_per_second": cell.batch_size * (cell.output_len - 1) / after if steps else None,
        },
        "weights_bytes": WEIGHTS,
        "cache_bytes": cache_bytes,
        "ids": [[28, 198, 57] for _ in range(cell.batch_size)],
        "text": " the sea, and the old man said:\n\n\u201cIt is late.\u201d He looked at the boats, one by one.",
        "points": points(cell),
        "notes": ["random token ids as prompts, of exactly the length asked for"],
        "ledger": memory,
        "work": {
            "token_forwards": forwards,
            "flops": forwards * 270_000_000,
            "bytes": cell.output_len * WEIGHTS + cache_bytes,
            "prefill_flops": cell.batch_size * cell.input_len * 270_000_000,
            "step_flops": cell.batch_size * (1 if on else cell.input_len + 16) * 270_000_000,
            "step_bytes": WEIGHTS + cache_bytes,
        },
        "limits": {
            "prefill_flops_share": 0.71,
            "step_flops_share": 0.02 * cell.batch_size if on else 0.7,
            "step_bandwidth_share": 0.83 if on else 0.11,
            "bound_by": "memory bandwidth" if on else "arithmetic",
        },
        "error": None,
    }


def _sample(cell: Cell, seed: str) -> Sample:
    rows = cell.batch_size
    prefill = PREFILL.get(rows, 0.21 * rows) * cell.input_len / 256
    step = CACHED_STEP.get(rows, 0.0255 + 0.002 * rows)
    grown = [prefill * (1.05 + 0.004 * i) for i in range(1, cell.output_len)]
    steps = [step * (1 + 0.0005 * i) for i in range(1, cell.output_len)] if cell.kv_caching else grown
    steps = [noisy(seconds, 1, f"{seed} {i}")[0] for i, seconds in enumerate(steps)]
    first = noisy(prefill, 1, seed)[0]
    held = rows * cell.total_len * CACHE_PER_TOKEN if cell.kv_caching else 0
    resident = 231 * MB + WEIGHTS + held + rows * (9 if cell.kv_caching else 11) * MB
    return {
        "seconds": first + sum(steps),
        "first_token_seconds": first,
        "step_seconds": steps,
        "peak_resident_bytes": int(noisy(resident, 1, seed)[0]),
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "device_bytes": None,
        "other_load_cores": 0.1,
    }


def points(cell: Cell) -> list[Point]:
    asked = "on" if cell.kv_caching else "off"
    widths = "1" if cell.kv_caching else f"{cell.input_len + 1} to {cell.total_len - 1}"
    return [
        {"name": "cache", "status": "ok", "detail": f"asked for {asked}; {widths} tokens a row fed per step"},
        {"name": "tokens", "status": "ok", "detail": f"{cell.batch_size} x {cell.input_len} in, all fed as worked out"},
        {"name": "no overflow", "status": "ok", "detail": f"{cell.total_len - 1} positions fed, the limit is 8192"},
        {"name": "no early end", "status": "ok", "detail": f"0 rows ended before {cell.output_len} tokens"},
        {"name": "warm-up", "status": "ok", "detail": "a prefill and a step before the clock was started"},
        {"name": "statistics reset", "status": "not observed", "detail": "this system's peak cannot be reset"},
        {"name": "same sampler", "status": "ok", "detail": "greedy: every token seen was the most likely one"},
    ]


def ledger(cell: Cell, cache_bytes: int, resident: int) -> Ledger:
    rows, on = cell.batch_size, cell.kv_caching
    logits, activations = rows * 49152 * 4, rows * cell.input_len * (7 if on else 8) * 2048
    peak = WEIGHTS + cache_bytes + activations

    def line(name: str, predicted: int, measured: int | None, counts: bool = True, note: str = "") -> Line:
        return {"name": name, "predicted": predicted, "measured": measured, "counts": counts, "note": note}

    moment = "prefill" if on else "last step"
    return {
        "moment": f"in a layer of the {moment}",
        "lines": [
            line("weights", WEIGHTS, WEIGHTS),
            line("tied head", 0, 0, note="is the embedding; on its own it would take 108.0 MB"),
            line("KV cache", cache_bytes, cache_bytes),
            line("logits", logits, logits, counts=False),
            line(f"{moment} activations", activations, activations + 40_000),
            line("workspace", 0, None),
        ],
        "predicted_peak": peak,
        "measured_peak": peak + 40_000,
        "measured_by": "tensors as PyTorch's profiler counts them",
        "residual": 40_000,
        "resident_before_model": 231 * MB,
        "resident_peak": resident,
        "resident_residual": resident - 231 * MB - peak,
    }


def dead_record(**asked: Any) -> CellRecord:
    """Return the record of a cell whose process died before its first repetition."""
    record = cell_record(**asked)
    dead = "died: its process was killed (signal 9), most likely for want of memory"
    record |= {"samples": [], "summary": None, "weights_bytes": None, "cache_bytes": None, "ids": [], "text": ""}
    record |= {"points": [], "notes": [], "ledger": None, "work": None, "limits": None, "error": dead}
    return record


def step_times(rows: int, contexts: Sequence[int], *, n: int = 5) -> list[StepTimes]:
    """Return step times in both modes: a line with the cache, a slight curve without."""
    steps: list[StepTimes] = []
    for on in (True, False):
        for context in contexts:
            cached = 0.0245 + 0.0004 * rows + rows * context * 6e-7
            uncached = 0.0235 + rows * context * 7.6e-4 + rows * context**2 * 6e-8
            values = noisy(cached if on else uncached, n, f"{rows} {context} {on}")
            steps.append({"batch_size": rows, "context": context, "kv_caching": on, "seconds": spread(values)})
    return steps


def comparison(**changed: Any) -> Comparison:
    """Return the comparison of both modes of our plain path; `changed` are fields of it."""
    same: Any = {"engine": "llama", "path": "plain", "batch_size": 1, "tokens": 32, "equal": True, "divergence": None}
    return {**same, **changed}


def crossover(rows: int, *, context: int | None = 16) -> Crossover:
    return {"batch_size": rows, "context": context, "steps": step_times(rows, (1, 4, 16, 64, 256, 1024))}


def table_report(cells: Sequence[CellRecord] | None = None, **changed: Any) -> Report:
    """Return the report of `--preset table`: batch 1, 8 and 16, on and off; `changed` are fields of the report."""
    squares = [(rows, on) for rows in (1, 8, 16) for on in (True, False)]
    made = [cell_record(batch_size=rows, kv_caching=on, n=3 if on else 2) for rows, on in squares]
    report: Report = {
        "schema": "llama-kv/benchmark/1",
        "preset": "table",
        "command": "python benchmark_inference.py --preset table --budget 15",
        "started": "2025-11-21T14:46:03+01:00",
        "budget_minutes": 15.0,
        "model": {
            "name": "demo",
            "weights": "SmolLM2-135M-Instruct, GGUF",
            "parameters": 134_515_008,
            "sizes": {"dim": 576, "n_layers": 30, "n_heads": 9, "n_kv_heads": 3, "vocab_size": 49152},
        },
        "environment": {
            "python": "3.12.3",
            "torch": "2.13.0+cpu",
            "cpu": "AMD EPYC 7R13 Processor",
            "cores": 2,
            "threads": 2,
            "memory_bytes": 16 * 1024 * MB,
            "gpu": None,
            "commit": "69e24ba1d3c4",
            "dirty": False,
            "peers": {"transformers": "5.23.0"},
        },
        "ceilings": {
            "read_bytes_per_second": 2.6e10,
            "read_by": "sum, threads: 2",
            "flops_per_second": 3.3e11,
            "flops_by": "linear, 1024 x 1024 x 1024",
            "dtype": "fp32",
        },
        "cells": list(made if cells is None else cells),
        "comparisons": [comparison(batch_size=rows, tokens=32 * rows) for rows in (1, 8, 16)],
        "crossovers": [crossover(1), crossover(8, context=4), crossover(16, context=4)],
        "sweep": None,
        "reading": list(SENTENCES),
        "failures": [],
    }
    return {**report, **changed}  # type: ignore[typeddict-item]


def line(of: str, kv_caching: bool, **figures: float) -> Any:
    """Return a fitted line."""
    known = {"of": of, "kv_caching": kv_caching, "lengths": 8, "r_squared": 0.997, "predicted_slope": None}
    return {**known, **figures}


def sweep() -> Sweep:
    growth: Sweep = {"growth": [], "cache": [], "contexts": [], "batches": [], "fits": []}
    for made in (10, 20, 50, 100, 200):
        on = spread(noisy(0.05 + 0.0255 * made, 3, f"on {made}"))
        off = spread(noisy(0.05 + 0.057 * made + 0.00043 * made**2, 3, f"off {made}"))
        speedup = off["median"] / on["median"]
        growth["growth"].append({"generated": made, "cached_seconds": on, "uncached_seconds": off, "speedup": speedup})
    for length in (128, 256, 512, 1024, 2048, 4096, 8192):
        nbytes = length * CACHE_PER_TOKEN
        growth["cache"].append({"length": length, "predicted": nbytes, "measured": nbytes})
    growth["contexts"] = step_times(1, (16, 32, 64, 128, 256, 512, 1024, 2048))
    growth["batches"] = [step for rows in (1, 2, 4, 8, 16) for step in step_times(rows, (256,))]
    growth["fits"] = [
        line("token", True, base=0.0251, slope=6.2e-7, exponent=0.02) | {"predicted_slope": 1.77e-6},
        line("text", True, base=-0.009, slope=0.0259, exponent=1.01),
        line("token", False, base=0.0102, slope=8.8e-4, exponent=1.06),
        line("text", False, base=-128.0, slope=0.86, exponent=2.02),
    ]
    return growth


def sweep_report() -> Report:
    """Return the report of `--preset sweep`."""
    longest = [cell_record(output_len=200, kv_caching=on) for on in (True, False)]
    return table_report(
        longest,
        preset="sweep",
        command="python benchmark_inference.py --preset sweep",
        comparisons=[comparison(tokens=200)],
        crossovers=[],
        sweep=sweep(),
        reading=["The cache saves more the longer the text: 2.0 times at 10 generated tokens, 5.6 times at 200."],
    )
