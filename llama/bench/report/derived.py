"""Rows that follow from the rows of a report: what the cache saves, where it pays, how times grow.

Nothing here is stored in a report; tables, CSV, sentences and plots compute it from the same rows.
"""

import math
from typing import Any

from llama.bench.cell import FULL
from llama.bench.report.cells import CellView, groups
from llama.bench.report.tasks import means
from llama.bench.schema import Report, Row, cell_of, is_measured, pairs, rows_of
from llama.bench.statistics import LEAST_REPETITIONS, WIDE, Spread, percentiles, spread

_LENGTHS = (10, 20, 50, 100, 200)  # lengths at which the speed-up of a whole generation is read
LEAST_LENGTHS = 3  # of a cell of few tokens, the growth says no more than the pair itself

Derived = dict[str, Any]


def scatter(report: Report) -> float:
    """Return how many times longer a time was at one moment than at another: the largest p90 over p10.

    Of the repetitions of each cell, and of the steps with the cache, which all do about the same work.
    """
    rows = [(cell_of(report, row).kv_caching, row) for row in rows_of(report, "cell") if is_measured(row)]
    timed = [(row, name) for on, row in rows for name in ("seconds", "step_seconds")[: 1 + on]]
    timed += [(row, "step_seconds") for row in rows_of(report, "step") if row["kv_caching"]]
    found = [one["p90"] / one["p10"] for one in (spread(row, name) for row, name in timed) if one and one["p10"] > 0]
    return max(found, default=1.0)


def seconds_of(view: CellView, scattered: float) -> Spread | None:
    """Return the time of a cell with the range in which it is expected again.

    That is p10 to p90 of enough repetitions. Of fewer it is as wide as the report's `scatter`.
    """
    found = spread(view.row, "seconds")
    if found is None or found["n"] >= LEAST_REPETITIONS:
        return found
    off_by = math.sqrt(scattered)
    low, high = found["median"] / off_by, found["median"] * off_by
    return {**found, "p10": min(low, found["p10"]), "p90": max(high, found["p90"])}


def ratio_range(slow: Spread, fast: Spread) -> tuple[float, float] | None:
    """Return the range of a ratio of two times, whose errors are independent; None if it is not WIDE."""
    factor = slow["median"] / fast["median"]
    low = math.hypot(math.log(slow["median"] / slow["p10"]), math.log(fast["p90"] / fast["median"]))
    high = math.hypot(math.log(slow["p90"] / slow["median"]), math.log(fast["median"] / fast["p10"]))
    return (factor / math.exp(low), factor * math.exp(high)) if low + high > math.log(WIDE) else None


def counts(*spreads: Spread | None) -> str:
    """Return how many values the spreads with the cache and without have: "3 on, 2 off"."""
    return ", ".join(f"{one['n']} {mode}" for one, mode in zip(spreads, ("on", "off"), strict=True) if one)


def saved(report: Report) -> list[Derived]:
    """Return what the cache saves and costs in each pair of cells."""
    found, scattered = [], scatter(report)
    for on, off in (group for group in groups(report) if len(group) == 2):
        row: Derived = {"figures": "saved", "on_view": on, "off_view": off}
        row |= {"cell": on.pair_label, "batch_size": on.cell.batch_size}
        for name, column in (("times_faster", "seconds"), ("steps_faster", "step_seconds")):
            fast, slow = on.median(column), off.median(column)
            row[name] = slow / fast if fast and slow else None
        times = seconds_of(on, scattered), seconds_of(off, scattered)
        row["times_faster_range"] = ratio_range(times[1], times[0]) if times[0] and times[1] else None
        peaks = on.median("tensor_peak_bytes"), off.median("tensor_peak_bytes")
        row["more_bytes"] = None if peaks[0] is None or peaks[1] is None else peaks[0] - peaks[1]
        fed = on.row.get("token_forwards"), off.row.get("token_forwards")
        row["less_work"] = None if fed[0] is None or fed[1] is None else fed[1] / fed[0]
        row |= {"bound_on": on.row.get("bound_by"), "bound_off": off.row.get("bound_by")}
        row["n"] = counts(spread(on.row, "seconds"), spread(off.row, "seconds"))
        found.append(row)
    return found


def step_pairs(report: Report) -> list[Derived]:
    """Return the time of a step with the cache and without at each batch size and context."""
    found: dict[tuple[int, int, int], Derived] = {}
    for row in rows_of(report, "step"):
        key = row["cell"], row["batch_size"], row["context"]
        both = found.setdefault(key, {"figures": "steps", "cell": key[0], "batch_size": key[1], "context": key[2]})
        both["on" if row["kv_caching"] else "off"] = spread(row, "step_seconds")
        if path := row.get("path"):
            both["path"] = path
    for both in found.values():
        on, off = both.get("on"), both.get("off")
        both["times_faster"] = off["median"] / on["median"] if on and off else None
        both["n"] = counts(on, off)
    return [found[key] for key in sorted(found)]


def step_groups(report: Report) -> list[list[Derived]]:
    """Return the steps of each batch size by context, if they were timed in both modes."""
    timed = [row for row in step_pairs(report) if row.get("on") or row.get("off")]
    batches = dict.fromkeys(row["batch_size"] for row in timed) if any(row.get("off") for row in timed) else ()
    return [[row for row in timed if row["batch_size"] == size] for size in batches]


def crossovers(report: Report) -> list[Derived]:
    """Return for each batch size of a table the context from which a step with the cache is faster, or None.

    That is the shortest one from which, at every length that was tried, p90 with the cache lies below p10 without.
    """
    found: list[Derived] = []
    for rows in step_groups(report):
        pays = None
        for row in reversed(rows):
            if not row.get("on") or not row.get("off") or row["on"]["p90"] >= row["off"]["p10"]:
                break
            pays = row["context"]
        said = f"{pays} tokens" if pays else f"not up to {rows[-1]['context']} tokens"
        found.append({"batch_size": rows[0]["batch_size"], "context": pays, "pays_from": said})
    return found


def growth(report: Report) -> list[Derived]:
    """Return the speed-up of our first pair in a table by the tokens that are generated, if these are many.

    A longer generation begins with exactly the shorter one.
    """
    found: list[Derived] = []
    for on, off in pairs(report):
        cell = cell_of(report, on)
        lengths = [length for length in _LENGTHS if length <= cell.output_len]
        if cell.engine != "llama" or cell.speculate or len(lengths) < LEAST_LENGTHS:
            continue
        for length in lengths:
            both = _first(on, length), _first(off, length)
            faster = both[1]["median"] / both[0]["median"]
            found.append({"figures": "growth", "batch_size": cell.batch_size, "generated": length, "on_s": both[0],
                          "off_s": both[1], "times_faster": faster, "n": counts(*both)})  # fmt: skip
        break
    return found


def _first(row: Row, length: int) -> Spread:
    """Return the seconds of the first tokens of a cell over its repetitions."""
    both = zip(row["first_token_seconds"], row["step_seconds"], strict=True)
    return percentiles([math.fsum([first, *later[: length - 1]]) for first, later in both])


def by_bytes(report: Report) -> list[list[Row]]:
    """Return the rows of kinds that have a full cache beside them, which comes first: a list for each text or task.

    All tasks of RULER at one length are one list.
    """
    whole = means(rows_of(report, "task"))
    lengths = {row["context"] for row in whole}
    tasks = (
        row for row in rows_of(report, "task") if row["task"].startswith("needle") or row["context"] not in lengths
    )
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in [*rows_of(report, "quality"), *whole, *tasks]:
        if row.get("of_full") and row["judged"] and row.keys() & {"kls", "scores"}:
            cell = cell_of(report, row).but(kv_cache=FULL, code=None)
            found.setdefault(
                (cell, *(row.get(name) for name in ("figures", "context", "task", "digest", "tokens"))), []
            ).append(row)
    pairs = [([row for row in rows if cell_of(report, row).kv_cache == FULL], rows) for rows in found.values()]
    groups = [[*full[:1], *(row for row in rows if row not in full)] for full, rows in pairs if full]
    return [rows for rows in groups if len(rows) > 1]
