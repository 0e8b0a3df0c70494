"""Compares two reports, A and B: the ratio of each figure, its bootstrap interval, and whether it shows a difference.

Knows no files. Figures with samples are times and peaks of memory, of which less is better, and scores of tasks, of
which more is better. Figures that follow from them, such as tokens per second, are left out.
"""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from llama.bench.report.columns import NO_DIFFERENCE, NOT_JUDGED, Table, column
from llama.bench.report.tasks import minus_full, with_interval
from llama.bench.schema import KEYS, REPEATED, Report, Row, cell_of, check_setups, differing
from llama.bench.statistics import samples_of
from llama.quality.intervals import mean_interval, ratio_interval

FACTS = ("cpu", "cpu_capability", "cores", "threads", "gpu", "torch")  # of the environment
SAMPLED = REPEATED - {"other_load_cores", "proposed", "accepted"}
SCORES = {"score", "score_question_seen"}  # means of samples
SINGLE = SCORES | {"cache_bytes", "file_bytes", "token_forwards", "nll", "mean_kl", "top1_agreement"}
SAME, BETTER, WORSE, ALLOWED = NO_DIFFERENCE, "better", "worse", "worse, allowed"


class Figure(NamedTuple):
    """One figure of two reports.

    name, column: what was measured, and its column in a row.
    a, b: the samples of each report, one a repetition; empty if the report lacks the figure.
    ratio: the median of B over that of A; None if one is missing or A's is 0.
    interval: the ends of the 95 % interval of the ratio, or of a score of its mean difference; None with few samples.
    minus_a: of a score, how much higher that of B is for each sample of the task; empty if their samples differ.
    """

    name: str
    column: str
    a: list[float]
    b: list[float]
    ratio: float | None
    interval: tuple[float, float] | None
    minus_a: Sequence[float] | None = None

    def verdict(self, allow: float) -> str:
        """Return what the figure shows; `allow` is the percentage by which it may become worse."""
        if not (self.a and self.b):
            return f"only in {'A' if self.a else 'B'}"
        if self.interval is None:
            return NOT_JUDGED
        more_is_better = self.minus_a is not None
        if more_is_better and not any([*self.a, *self.b]):  # a task that no sample passes shows nothing
            return NOT_JUDGED
        (low, high), equal = self.interval, 0 if more_is_better else 1
        if low <= equal <= high:
            return SAME
        if (low > equal) == more_is_better:
            return BETTER
        return WORSE if self.ratio is None or abs(self.ratio - 1) > allow / 100 else ALLOWED


def figures(a: Report, b: Report) -> list[Figure]:
    """Return every measured figure of two reports. Raises ValueError if no figure is in both."""
    in_a, in_b = _samples(a), _samples(b)
    if not in_a.keys() & in_b.keys():
        raise ValueError("A and B have no figure in common; give two results that measured the same cells")
    found = []
    for key in dict.fromkeys([*in_a, *in_b]):
        *_, name, column_name = key
        (row, one), (other_row, other) = in_a.get(key, ({}, [])), in_b.get(key, ({}, []))
        ratio = median(other) / median(one) if one and other and median(one) else None
        more = _minus(column_name, other_row, row)
        interval = ratio_interval(one, other) if more is None else mean_interval(tuple(more))
        found.append(Figure(name, column_name, one, other, ratio, interval, more))
    return found


def _minus(score: str, b: Row, a: Row) -> list[float] | None:
    """Return by how much each sample scores higher in B than in A; None for other columns than scores.

    It is empty if a row lacks its samples, or if they or the weights differ.
    """
    if score not in SCORES:
        return None
    same = "scores" in b and "scores" in a and b.get("digest") == a.get("digest") is not None
    return minus_full(b, a).get(score.replace("score", "minus_full"), []) if same else []


def _samples(report: Report) -> dict[tuple[Any, ...], tuple[Row, list[float]]]:
    """Return the row and the samples of every measured figure, by what identifies it; the key ends in its names.

    Raises TypeError for a value that is not a number.
    """
    found: dict[tuple[Any, ...], tuple[Row, list[float]]] = {}
    for row in report["rows"]:
        for name in (name for name in row if name in SAMPLED | SINGLE):
            if values := samples_of(row, name):
                found[*_identity(report, row), name] = row, values
    return found


def _identity(report: Report, row: Row) -> tuple[Any, ...]:
    """Return the row's cell without what `differences` compares, the row's keys, and their name."""
    keys = {name: row.get(name) for name in KEYS[row["figures"]]}
    cell = cell_of(report, row).but(model="", tokenizer_path=None, device="", dtype="fp32", threads=None, code=None)
    cell = cell.but(**{name: keys.pop(name) for name in vars(cell).keys() & keys})
    sizes = [f"{cell.input_len} + {cell.output_len} tokens"] if row["figures"] == "cell" else []
    name = ", ".join([row["figures"], cell.name, *sizes, *(f"{key} {value}" for key, value in keys.items())])
    return cell, *keys.values(), name


def differences(a: Report, b: Report) -> list[str]:
    """Return a phrase for each difference in hardware, torch, device, dtype, model, preset and text.

    A report has no digest of the weights; the model is known by its name, its kind of weights and its sizes.
    """

    def setup(report: Report) -> dict[str, Any]:
        check_setups(report)
        model = dict(report["model"] or {})
        model |= model.pop("sizes", {})
        # The kind of cache is that of the job that ran last.
        facts = {f"model {name}": model[name] for name in model if name not in ("kv_cache", "kv_caching")}
        facts |= {name: report["environment"].get(name) for name in FACTS}
        facts |= {name: sorted({cell[name] for cell in report["cells"]}) for name in ("device", "dtype")}
        facts["code of the kinds and engines"] = sorted({str(cell.get("code")) for cell in report["cells"]})
        return {"preset": report["preset"], "text": report["plan"].get("text"), **facts}

    one, other = setup(a), setup(b)
    return [f"{name} is {one.get(name)!r} in A and {other.get(name)!r} in B" for name in differing(one, other)]


def comparison_table(title: str, found: list[Figure], allow: float) -> Table:
    """Return figures as a table, each with its medians, ratio, interval, samples and verdict."""
    rows, notes = [], list[str]()
    for one in found:
        shown, counted = column(one.column), f"{len(one.a)}, {len(one.b)}"
        medians = [shown.write(median(side)) if side else "-" for side in (one.a, one.b)]
        ratio = "-" if one.ratio is None else f"{one.ratio:.3f}"
        ends = "-" if one.interval is None else "{:.3f} to {:.3f}".format(*one.interval)
        if one.minus_a is not None:
            medians = [with_interval(side) if side else "-" for side in (one.a, one.b)]
        if one.minus_a:
            ends, counted = f"B - A: {with_interval(one.minus_a, '+')}", f"{len(one.minus_a)} pairs"
            notes.append(
                "B - A: the difference of the scores in percentage points, sample by sample, with its 95 % interval"
            )
        elif one.minus_a is not None and one.a and one.b:
            notes.append(
                "a score without B - A: the samples or the weights differ or are unknown, so its means are not judged"
            )
        rows.append([one.name, shown.head, *medians, ratio, ends, counted, one.verdict(allow)])
    heads = ["figure", "column", "A", "B", "B / A", "95 % interval", "n", "verdict"]
    return Table(title, heads, rows, list(dict.fromkeys(notes)))
