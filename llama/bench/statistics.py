"""Many values of one figure as a spread, and the figures of a cell that follow from its repetitions."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypedDict

from llama.bench.cell import Cell
from llama.bench.schema import Row
from llama.host.machine import Ceilings
from llama.quality.intervals import mean_interval

LEAST_REPETITIONS = 3  # that show how a time varies: of two, either may be the noisy one
WIDE = 1.5  # a ratio whose range ends at more than so many times its beginning is shown with it


class Spread(TypedDict):
    """`n` values, and the values below which 10 %, 50 %, 90 % and 99 % of them lie."""

    n: int
    median: float
    p10: float
    p90: float
    p99: float


def percentiles(values: Sequence[float]) -> Spread:
    """Return the median and the 10th, 90th and 99th percentile, interpolated between values."""
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [*values] * 99
    return {"n": len(values), "median": statistics.median(values), "p10": cuts[9], "p90": cuts[89], "p99": cuts[98]}


def values_of(row: Row, column: str) -> list[float]:
    """Return the values of a repeated column; steps are pooled over all repetitions."""
    values = row.get(column) or []
    assert isinstance(values, list)
    return [one for each in values for one in (each if isinstance(each, list) else [each]) if one is not None]


def samples_of(row: Row, column: str) -> list[float]:
    """Return the samples of a figure, one for each repetition: of a cell's steps, which are alike, their median."""
    values = row[column] if isinstance(row[column], list) else [row[column]]
    known = [one for one in values if one not in (None, [])]
    return [statistics.median(one) if isinstance(one, list) else one + 0 for one in known]


def with_ends(row: Row, column: str, of: Callable[[float], float]) -> list[float]:
    """Return `of` the mean of the samples in a column, and `of` the ends of its interval; of 0 without the column."""
    samples = tuple(row.get(column, [0.0]))
    mean = statistics.fmean(samples)
    return [of(one) for one in (mean, *(mean_interval(samples) or (mean, mean)))]


def percent_more(nats: float) -> float:
    """Return by how many percent a perplexity is higher if the log-likelihood is lower by so many nats."""
    return 100 * math.expm1(min(nats, 99))


def spread(row: Row, column: str) -> Spread | None:
    """Return the spread of a repeated column, or None if it was not measured."""
    values = values_of(row, column)
    return percentiles(values) if values else None


def median_of(row: Row, column: str) -> float:
    """Return the median of a repeated column that was measured."""
    return statistics.median(values_of(row, column))


def best_ceilings(a: Ceilings | None, b: Ceilings) -> Ceilings:
    """Return the higher ceiling of each kind."""
    best: Ceilings = {**(a or b)}
    if b["read_bytes_per_second"] > best["read_bytes_per_second"]:
        best |= {"read_bytes_per_second": b["read_bytes_per_second"], "read_by": b["read_by"]}
    if b["flops_per_second"] > best["flops_per_second"]:
        best |= {"flops_per_second": b["flops_per_second"], "flops_by": b["flops_by"]}
    return best


def reached(cell: Cell, row: Row) -> Ceilings:
    """Return the rates that a measured cell itself reached, in its median prefill and step."""
    prefill, step = _prefill_and_step(row)
    flops = {"prefill": row["prefill_flops"] / prefill, "step": row["step_flops"] / step}
    best = max(flops, key=lambda phase: flops[phase])
    return {
        "read_bytes_per_second": row["step_read_bytes"] / step,
        "read_by": f"the step of {cell.name}",
        "flops_per_second": flops[best],
        "flops_by": f"the {best} of {cell.name}",
        "dtype": cell.dtype,
    }


def rates(cell: Cell, row: Row) -> Row:
    """Return the tokens per second of a cell, from the medians of its repetitions."""
    rows, steps = cell.batch_size, row["step_seconds"]
    later = statistics.median(math.fsum(each) for each in steps)  # the same on every Python: 3.12 changed sum
    return {
        "tokens_per_second": rows * cell.output_len / median_of(row, "seconds"),
        "prefill_tokens_per_second": rows * cell.input_len / median_of(row, "first_token_seconds"),
        "decode_tokens_per_second": rows * (cell.output_len - 1) / later if later else None,
    }


def roofline_shares(cell: Cell, row: Row, ceilings: Ceilings | None) -> Row:
    """Return the shares of the machine's ceilings that a cell used, and what limited its middle step.

    The rates of the cell itself count as ceilings, so no share is above 1; a share of 1 is the best rate measured.
    """
    prefill, step = _prefill_and_step(row)
    best = best_ceilings(ceilings, reached(cell, row))
    flops_share = row["step_flops"] / step / best["flops_per_second"]
    bytes_share = row["step_read_bytes"] / step / best["read_bytes_per_second"]
    return {
        "prefill_flops_share": row["prefill_flops"] / prefill / best["flops_per_second"],
        "step_flops_share": flops_share,
        "step_bandwidth_share": bytes_share,
        "bound_by": bound_by(flops_share=flops_share, bytes_share=bytes_share),
    }


def _prefill_and_step(row: Row) -> tuple[float, float]:
    """Return the median seconds of the prefill and of a step; with one output token, the prefill is the step."""
    prefill = median_of(row, "first_token_seconds")
    return prefill, median_of(row, "step_seconds") if values_of(row, "step_seconds") else prefill


def bound_by(*, flops_share: float, bytes_share: float) -> str:
    """Name the ceiling that a step uses at least half of; below half of both, small operations or slow kernels cost."""
    if max(flops_share, bytes_share) < 0.5:
        return "neither ceiling"
    return "arithmetic" if flops_share > bytes_share else "memory bandwidth"
