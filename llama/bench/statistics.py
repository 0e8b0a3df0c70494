"""Many values of one figure as a spread, and the figures of a cell out of its repetitions."""

import statistics
from collections.abc import Sequence

from llama.bench.cell import Cell
from llama.bench.schema import RooflineShares, Sample, Spread, Summary, Work
from llama.host.machine import Ceilings


def percentiles(values: Sequence[float]) -> Spread:
    """Return the median and the 10th and 90th percentile, interpolated between values."""
    tenths = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [*values] * 9
    return {"n": len(values), "median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}


def summarise(cell: Cell, samples: Sequence[Sample]) -> Summary:
    """Return a cell's figures. Steps are pooled over all repetitions; rates are those of the medians."""
    seconds = percentiles([sample["seconds"] for sample in samples])
    first = percentiles([sample["first_token_seconds"] for sample in samples])
    steps = [step for sample in samples for step in sample["step_seconds"]]
    after = statistics.median(sum(sample["step_seconds"]) for sample in samples)
    peaks = [peak for sample in samples if (peak := sample["peak_allocated_bytes"]) is not None]
    resident = [peak for sample in samples if (peak := sample["peak_resident_bytes"]) is not None]
    rows = cell.batch_size
    return {
        "seconds": seconds,
        "first_token_seconds": first,
        "step_seconds": percentiles(steps) if steps else None,
        "peak_bytes": percentiles(peaks) if peaks else None,
        "resident_bytes": percentiles(resident) if resident else None,
        "tokens_per_second": rows * cell.output_len / seconds["median"],
        "prefill_tokens_per_second": rows * cell.input_len / first["median"],
        "decode_tokens_per_second": rows * (cell.output_len - 1) / after if steps else None,
    }


def reached(cell: Cell, work: Work, summary: Summary) -> Ceilings:
    """Return the rates that a cell itself reached, in its median prefill and step."""
    prefill, step = _seconds(summary)
    flops = {"prefill": work["prefill_flops"] / prefill, "step": work["step_flops"] / step}
    best = max(flops, key=lambda phase: flops[phase])
    return {
        "read_bytes_per_second": work["step_bytes"] / step,
        "read_by": f"the step of {cell.name}",
        "flops_per_second": flops[best],
        "flops_by": f"the {best} of {cell.name}",
        "dtype": cell.dtype,
    }


def best_ceilings(a: Ceilings | None, b: Ceilings) -> Ceilings:
    """Return the higher ceiling of each kind."""
    best: Ceilings = {**(a or b)}
    if b["read_bytes_per_second"] > best["read_bytes_per_second"]:
        best |= {"read_bytes_per_second": b["read_bytes_per_second"], "read_by": b["read_by"]}
    if b["flops_per_second"] > best["flops_per_second"]:
        best |= {"flops_per_second": b["flops_per_second"], "flops_by": b["flops_by"]}
    return best


def roofline_shares(cell: Cell, work: Work, summary: Summary, ceilings: Ceilings) -> RooflineShares:
    """Return how much of the machine's ceilings a cell used, and what held its middle step back.

    What the cell itself reached counts as a ceiling, so that no share passes 1; one that is 1 is the best seen.
    """
    prefill, step = _seconds(summary)
    best = best_ceilings(ceilings, reached(cell, work, summary))
    flops_share = work["step_flops"] / step / best["flops_per_second"]
    bytes_share = work["step_bytes"] / step / best["read_bytes_per_second"]
    return {
        "prefill_flops_share": work["prefill_flops"] / prefill / best["flops_per_second"],
        "step_flops_share": flops_share,
        "step_bandwidth_share": bytes_share,
        "bound_by": bound_by(flops_share=flops_share, bytes_share=bytes_share),
    }


def _seconds(summary: Summary) -> tuple[float, float]:
    """Return the median seconds of the prefill and of a step; of a single token the prefill is the step."""
    prefill = summary["first_token_seconds"]["median"]
    return prefill, summary["step_seconds"]["median"] if summary["step_seconds"] else prefill


def bound_by(*, flops_share: float, bytes_share: float) -> str:
    """Name the ceiling that a step uses at least half of, or neither: then small operations or slow kernels cost."""
    if max(flops_share, bytes_share) < 0.5:
        return "neither ceiling"
    return "arithmetic" if flops_share > bytes_share else "memory bandwidth"
