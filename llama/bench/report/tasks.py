"""The scores of tasks: a row for each task, length and kind of cache, compared with the full cache sample by sample."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from llama.bench.report.columns import CANNOT_JUDGE, NO_DIFFERENCE, NOT_JUDGED, TOO_FEW, least_to_most
from llama.bench.schema import Row
from llama.quality.intervals import LEAST_SAMPLES, mean_interval

WAYS = {"": "minus_full", "_question_seen": "minus_full_question_seen"}  # and the column of the differences
MOST_LOST = 8  # numbers of samples that are listed


def means(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of all tasks of RULER together, of each kind and length at which all kinds have several tasks."""
    found = []
    for context, setup in dict.fromkeys((row["context"], row.get("setup")) for row in rows):
        of_kind: dict[int, list[Row]] = {}
        for row in rows:
            if (
                (row["context"], row.get("setup")) == (context, setup)
                and context
                and not row["task"].startswith("needle")
            ):
                of_kind.setdefault(row["cell"], []).append(row)
        names = [[row["task"] for row in own] for own in of_kind.values()]
        if names and len(names[0]) > 1 and names.count(names[0]) == len(names):
            found += [_mean(own) for own in of_kind.values()]
    return found


def _mean(rows: Sequence[Row]) -> Row:
    """Return the rows of one kind at one length as one row, whose samples are those of all tasks."""
    mean: Row = {
        **rows[0],
        "task": f"the {len(rows)} tasks of RULER",
        "cache_bytes": int(fmean(row["cache_bytes"] for row in rows)),
    }
    mean["judged"] = all(row["judged"] for row in rows)
    mean.pop("minus_full", None)
    for name in (f"{column}{way}" for way in WAYS for column in ("scores", "answer_lens", "minus_full")):
        if all(name in row for row in rows):
            mean[name] = [value for row in rows for value in row[name]]
    return mean


def minus_full(row: Row, full: Row | None) -> dict[str, list[float]]:
    """Return by how much the score of each sample differs from that of the full cache, a row of the same samples.

    It is empty for the full cache itself, without one, and with other numbers of samples.
    """
    if full is None or full is row or len(full["scores"]) != len(row["scores"]):
        return {}
    pairs = {way: zip(row[f"scores{way}"], full[f"scores{way}"], strict=True) for way in WAYS}
    return {WAYS[way]: [one - other for one, other in pair] for way, pair in pairs.items()}


def scores_of(row: Row) -> dict[str, Any]:
    """Return a row as text: scores and differences with intervals, samples that lost, mean lengths of the answers."""
    shown: dict[str, Any] = {}
    for way in WAYS:
        more, names = row.get(WAYS[way]), [f"{name}{way}" for name in ("score", "difference", "lost")]
        compared = ["-", "-"] if more is None else [_difference(more, row[f"scores{way}"]), _lost(more)]
        figures = [with_interval(row[f"scores{way}"]), *compared]
        shown |= zip(names, figures if row["judged"] else [NOT_JUDGED] * 3, strict=True)
        shown[f"answer_len{way}"] = fmean(row[f"answer_lens{way}"])
    return shown | ({"context": "as in the file"} if row["context"] is None else {})


def _difference(more: Sequence[float], scores: Sequence[float]) -> str:
    if scores == more:  # the full cache scores 0 in every sample
        return CANNOT_JUDGE
    ends = mean_interval(tuple(more))
    if ends is None:
        return f"{with_interval(more, '+')} ({TOO_FEW})"
    return NO_DIFFERENCE if ends[0] <= 0 <= ends[1] else with_interval(more, "+")


def _lost(more: Sequence[float]) -> str:
    lost = [str(number) for number, value in enumerate(more) if value < 0]
    rest = f" and {len(lost) - MOST_LOST} more" if len(lost) > MOST_LOST else ""
    return f"{len(lost)}: {', '.join(lost[:MOST_LOST])}{rest}" if lost else "0"


def with_interval(values: Sequence[float], sign: str = "") -> str:
    """Return the mean in percent, with its interval if there are enough values and they differ."""
    mean, low, high = (f"{100 * one:{sign}.1f}" for one in (fmean(values), *(mean_interval(tuple(values)) or (0, 0))))
    return mean if low == high else f"{mean} ({low} to {high})"


def note_on(rows: Sequence[Row]) -> str:
    counts = [len(row["scores"]) for row in rows]
    few = f"; a mean of fewer than {LEAST_SAMPLES} has no interval" if min(counts) < LEAST_SAMPLES else ""
    return (
        f"{least_to_most(counts)} samples a row{few}. {NO_DIFFERENCE}: the interval of the difference contains 0. "
        f"{CANNOT_JUDGE}: the full cache itself scores 0 in every sample. "
        f"{NOT_JUDGED}: the kind has dropped or compressed nothing of such a prompt. Samples count from 0."
    )
