"""What follows from the numbers of a report: fits, the growth of the speed-up, and sentences.

Knows numbers only; each function says nothing where what it needs was not measured.
"""

import math
import statistics
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal

from llama.bench.report.tables import (
    fit_name,
    least_to_most,
    our_paths,
    pairs,
    path_words,
    slope_words,
    stands_apart,
    summary_of,
)
from llama.bench.schema import CellRecord, Crossover, Fit, Growth, Report, RooflineShares, StepTimes
from llama.bench.statistics import percentiles
from llama.costs import size

LEAST_LENGTHS = 3  # that a straight line takes: it goes through any two


def findings(report: Report) -> list[str]:
    """Return what a reader should take from a report, in sentences."""
    ours = [pair for pair in pairs(report) if pair[0]["cell"]["engine"] == "llama"]
    return [
        *(sentence for on, off in ours for sentence in [_time(on, off), *_memory(on, off)]),
        *_crossover(report["crossovers"]),
        *_same_text(report),
        *_growth(report),
        *_fits(report),
    ]


def _time(on: CellRecord, off: CellRecord) -> str:
    cached, uncached = (summary_of(record)["seconds"]["median"] for record in (on, off))
    path = f", on the {path_words(on)}," if stands_apart(on) else ""
    sentence = (
        f"At batch {on['cell']['batch_size']}{path} the cache turns {uncached:.2f} s into {cached:.2f} s, "
        f"{times_less(uncached / cached)} time"
    )
    if on["work"] and off["work"]:
        sentence += f" for {off['work']['token_forwards'] / on['work']['token_forwards']:.1f}x fewer tokens fed"
    if on["limits"] and off["limits"]:
        sentence += (
            f"; a step with it is bound by {on['limits']['bound_by']} ({_shares(on['limits'])}), "
            f"one without by {off['limits']['bound_by']} ({_shares(off['limits'])})"
        )
    return sentence + "."


def times_less(factor: float) -> str:
    """Return the text of a factor of time saved, whichever way it goes."""
    return f"{factor:.1f}x less" if factor >= 1 else f"{1 / factor:.1f}x more"


def all_less(factors: Sequence[float]) -> str:
    """Return what `times_less` says of all of them, from where to where."""
    low, high = min(factors), max(factors)
    if low < 1 <= high:
        return f"from {times_less(low)} to {times_less(high)}"
    words = least_to_most([factor if low >= 1 else 1 / factor for factor in factors], ".1f", "x")
    return f"{words} {'less' if low >= 1 else 'more'}"


def _shares(limits: RooflineShares) -> str:
    shares = limits["step_bandwidth_share"], limits["step_flops_share"]
    return f"{shares[0]:.0%} of this machine's bandwidth, {shares[1]:.0%} of its arithmetic"


def _memory(on: CellRecord, off: CellRecord) -> list[str]:
    if on["ledger"] is None or off["ledger"] is None or on["cache_bytes"] is None:
        return []
    peaks = [ledger["measured_peak"] or ledger["predicted_peak"] for ledger in (on["ledger"], off["ledger"])]
    sentence = (
        f"There the cache holds {size(on['cache_bytes'])}, and the tensors' peak is {size(peaks[0])} with it and "
        f"{size(peaks[1])} without: {size(abs(peaks[0] - peaks[1]))} {'more' if peaks[0] >= peaks[1] else 'less'}"
    )
    if on["cell"]["logits"] == "all":
        logits = next(line["predicted"] for line in off["ledger"]["lines"] if line["name"] == "logits")
        sentence += f"; what makes the difference is not the cache but the logits of all positions, {size(logits)}"
    return [sentence + "."]


def _crossover(crossovers: Sequence[Crossover]) -> list[str]:
    found: dict[str, list[str]] = {}
    for crossover in crossovers:
        longest = max(step["context"] for step in crossover["steps"])
        pays = f"from a context of {crossover['context']}" if crossover["context"] else f"nowhere up to {longest}"
        found.setdefault(pays, []).append(str(crossover["batch_size"]))
    words = [f"{pays} at batch {' and '.join(batches)}" for pays, batches in found.items()]
    return [f"A step is faster with the cache {', '.join(words)}."] if words else []


def _same_text(report: Report) -> list[str]:
    """Say once whether both modes made the same tokens; where they part stands in the comparisons."""
    ours = [comparison for comparison in report["comparisons"] if comparison["engine"] == "llama"]
    sentences = []
    for path in dict.fromkeys(comparison["path"] for comparison in ours):
        own = [comparison for comparison in ours if comparison["path"] == path]
        where = "" if path == "plain" else f" on the {our_paths(report)[path]}"
        apart = ", ".join(str(comparison["batch_size"]) for comparison in own if not comparison["equal"])
        sentences.append(
            f"The two modes made different tokens{where} at batch {apart}; "
            "the comparison says where, and by what margin."
            if apart
            else f"Both modes made the same tokens{where}, all {sum(one['tokens'] for one in own)} of them."
        )
    return sentences


def _growth(report: Report) -> list[str]:
    growth = report["sweep"]["growth"] if report["sweep"] else []
    if not growth:
        return []
    words = ", ".join(f"{times_less(entry['speedup'])} over {entry['generated']}" for entry in growth)
    return [f"Time with the cache against without: {words} tokens."]


def _fits(report: Report) -> list[str]:
    sweep = report["sweep"]
    if sweep is None or not sweep["contexts"]:
        return []
    lengths = len({step["context"] for step in sweep["contexts"]})
    if not sweep["fits"]:
        return [f"How the time grows was not fitted: a line takes {LEAST_LENGTHS} contexts, and there are {lengths}."]
    words = "; ".join(f"{fit_name(fit)} as context^{fit['exponent']:.2f}" for fit in sweep["fits"])
    tokens = [fit_words(fit) for fit in sweep["fits"] if fit["of"] == "token"]
    return [*tokens, f"Over the longer half of the contexts the time grows, for {words}."]


def fit_words(fit: Fit) -> str:
    """Return the sentence about a fitted line, and beside it the slope that the bytes of the cache predict."""
    line = f"{fit['base'] * 1e3:.2f} ms + {slope_words(fit['slope'])} us per 1000 tokens of context"
    words = f"{fit_name(fit).capitalize()} takes {line} (R^2 {fit['r_squared']:.3f}, {fit['lengths']} contexts)"
    predicted = fit["predicted_slope"]
    if predicted is not None:
        words += f"; reading their keys and values at the measured bandwidth would take {slope_words(predicted)} us, "
        words += f"so the slope is {fit['slope'] / predicted:.2f}x what the bytes predict"
    return words + "."


def growth(on: CellRecord, off: CellRecord, lengths: Sequence[int]) -> list[Growth]:
    """Return the speed-up of the first so many tokens: a longer generation begins with exactly the shorter one."""
    found: list[Growth] = []
    for generated in (length for length in lengths if length <= on["cell"]["output_len"]):
        cached, uncached = (
            percentiles(
                [one["first_token_seconds"] + sum(one["step_seconds"][: generated - 1]) for one in cell["samples"]]
            )
            for cell in (on, off)
        )
        speedup = uncached["median"] / cached["median"]
        found.append(Growth(generated=generated, cached_seconds=cached, uncached_seconds=uncached, speedup=speedup))
    return found


def fits(steps: Sequence[StepTimes], *, predicted_slope: float | None = None) -> list[Fit]:
    """Fit how the time per token, and of a whole text of that length, grows with the context, in both modes.

    Nothing is fitted to fewer than 3 lengths. `predicted_slope` is that of a token with the cache.
    """
    found = []
    for kv_caching in (True, False):
        times = sorted((s["context"], s["seconds"]["median"]) for s in steps if s["kv_caching"] == kv_caching)
        if len(times) < LEAST_LENGTHS:
            continue
        found.append(fit("token", kv_caching, times, predicted_slope=predicted_slope if kv_caching else None))
        found.append(fit("text", kv_caching, _whole(times)))
    return found


def _whole(times: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the time to make a text of each length token by token, from the time of a token at each length."""
    first = times[0][0] * times[0][1]
    areas = [(b - a) * (t + u) / 2 for (a, t), (b, u) in pairwise(times)]
    return [(context, total) for (context, _), total in zip(times, accumulate(areas, initial=first), strict=True)]


def fit(
    of: Literal["token", "text"],
    kv_caching: bool,
    times: Sequence[tuple[int, float]],
    *,
    predicted_slope: float | None = None,
) -> Fit:
    """Fit seconds = base + slope x context by least squares, and the exponent on the longer half of the contexts.

    R^2 is the share of the times' variance that the line explains: all of it where there is none.
    """
    longer = times[len(times) // 2 - 1 :] if len(times) > 3 else times
    contexts, seconds = zip(*times, strict=True)
    line = statistics.linear_regression(contexts, seconds)
    power = statistics.linear_regression([math.log(x) for x, _ in longer], [math.log(t) for _, t in longer])
    return {
        "of": of,
        "kv_caching": kv_caching,
        "base": line.intercept,
        "slope": line.slope,
        "exponent": power.slope,
        "lengths": len(times),
        "r_squared": statistics.correlation(contexts, seconds) ** 2 if len(set(seconds)) > 1 else 1.0,
        "predicted_slope": predicted_slope,
    }
