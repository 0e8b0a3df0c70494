"""Every column of a table, declared once: its head with the unit, how a value is written, and what it means.

A column has the name that it has in a row (llama/bench/schema.py), and in the CSV. MB is 2^20 bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llama.bench.statistics import spread
from llama.costs import MB

NOT_MEASURED, NOT_OBSERVED, NOT_JUDGED = "not measured", "not observed", "not judged"
NO_DIFFERENCE, TOO_FEW = "no difference shown", "too few samples"
CANNOT_JUDGE = "the task cannot judge"


@dataclass(frozen=True)
class Column:
    """How a column is written.

    head: its name and unit.
    meaning: what a figure in it counts or measures.
    scale: the factor from a value to the unit of the head.
    form, unit: the format of a number, and what follows it.
    missing: the text for None.
    truth: the texts for False and True.
    """

    head: str
    meaning: str = ""
    scale: float = 1
    form: str = ","
    unit: str = ""
    missing: str = NOT_MEASURED
    truth: tuple[str, str] = ("no", "yes")

    def write(self, value: Any) -> str:
        """Return a value as text; a spread of several values as its median, with p10 and p90 in brackets."""
        if value is None:
            return self.missing
        if isinstance(value, bool):
            return self.truth[value]
        if isinstance(value, dict):
            median, low, high = (self.write(value[key]) for key in ("median", "p10", "p90"))
            return median if value["n"] == 1 else f"{median} ({low}-{high})"
        if isinstance(value, int | float):
            return format(value if self.scale == 1 else value * self.scale, self.form) + self.unit
        return str(value)


TABLE_COLUMNS = {
    "seconds": Column(
        "time, s", "the whole job: from the call with the prompts until the last token of all rows is on the host",
        form=".2f",
    ),
    "first_token_seconds": Column(
        "time to first token, s", "from the same call until the first token of all rows is on the host",
        form=".3f",
    ),
    "step_seconds": Column(
        "time per output token, ms", "a later step, which makes one token for every row; with guesses the mean",
        1e3, ".1f",
    ),
    "prefill_tokens_per_second": Column(
        "prefill tokens/s", "batch size x input length / median time to first token", form=".1f"
    ),
    "decode_tokens_per_second": Column(
        "decode tokens/s", "batch size x (output length - 1) / median time after the first token",
        form=".1f",
    ),
    "tensor_peak_bytes": Column(
        "peak of tensors, MB", "the most bytes in tensors, as CUDA or a trace of PyTorch's CPU allocator counts them",
        1 / MB, ".2f",
    ),
    "resident_peak_bytes": Column(
        "peak resident, MB", "the most memory of the process in RAM: tensors, code, and what libraries keep",
        1 / MB, ".2f",
    ),
    "cache_bytes": Column(
        "KV cache, MB", "the bytes in the cache's tensors at the last step", 1 / MB, ".2f", missing=NOT_OBSERVED
    ),
    "predicted_cache_bytes": Column("predicted, MB", "computed from the model's sizes alone", 1 / MB, ".2f"),
    "predicted_bytes": Column("predicted, MB", "", 1 / MB, ".2f"),
    "measured_bytes": Column("measured, MB", "", 1 / MB, ".2f"),
    "residual_bytes": Column("residual, MB", "measured - predicted", 1 / MB, ".2f"),
    "file_bytes": Column("file, MB", "", 1 / MB, ".1f"),
    "name": Column("memory"),
    "counts": Column("at the peak", missing=""),
    "kind": Column("KV cache", "its kind, or off"),
    "token_forwards": Column("work, token-forwards", "tokens fed through the model, over all rows and steps"),
    "proposed": Column("guessed tokens fed", "by --speculate, over all rows and calls", missing="none"),
    "accepted": Column("of them right", "guessed tokens that the model would have made, too", missing="none"),
    "path": Column("path", "what executed the forwards, as was seen: plain, exact, native, CUDA graphs, or a peer"),
    "less_work": Column("less work", "token-forwards without the cache over those with it", form=".1f", unit="x"),
    "times_faster": Column(
        "times faster", "the median time without the cache over that with it; in brackets its range, if that is wide",
        form=".1f", unit="x",
    ),
    "steps_faster": Column("times faster per output token", form=".1f", unit="x"),
    "more_bytes": Column("more memory at the peak, MB", "", 1 / MB, "+.1f"),
    "bound_on": Column("bound by, cache on", "the limit that the middle step comes near", missing=NOT_OBSERVED),
    "bound_off": Column("bound by, cache off", missing=NOT_OBSERVED),
    "on": Column("cache on, ms", "", 1e3, ".1f"),
    "off": Column("cache off, ms", "", 1e3, ".1f"),
    "on_s": Column("cache on, s", form=".2f"),
    "off_s": Column("cache off, s", form=".2f"),
    "pays_from": Column("a cached step is faster from", "p90 with the cache lies below p10 without"),
    "context": Column("context"),
    "greedy_text": Column("greedy text"),
    "of_full": Column(
        "of full cache", "the bytes over those of the full cache, which stores everything",
        form=".2f",
    ),
    "time_of_full": Column(
        "time / static's", "the median time over that of the full cache on the same setup", form=".2f", missing="-"
    ),
    "setup": Column("setup", "the machine, CPU, commit, threads and versions that measured it, by number"),
    "top1_agreement": Column(
        "same top-1, %", "positions at which the most likely token is that of the model without a cache", 100, ".2f"
    ),
    "mean_kl": Column(
        "mean KL, nats", "the divergence from the prediction of the model without a cache, with its 95 % interval",
        form=".2g",
    ),
    "perplexity": Column(
        "perplexity", "of the text, fed token by token so that each reads the cache, with its 95 % interval", form=".3f"
    ),
    "more_perplexity": Column(
        "perplexity above full, %", "above that of the full cache, with its 95 % interval, paired by block of the text",
        form="+.2f", missing="-",
    ),
    "task": Column("task"),
    "score": Column("score, %", "the mean over the samples, with its 95 % interval; the question follows the prompt"),
    "difference": Column(
        "minus full, %", "the score minus that of the full cache, which stores everything, with a 95 % interval, "
        "paired by sample",
    ),
    "lost": Column("lost", "the samples that have a lower score than with the full cache"),
    "answer_len": Column("answer, tokens", "the mean length of the answers", form=".1f"),
    "score_question_seen": Column(
        "score, question seen, %", "with the question in the prompt: a kind that compresses it sees the question"
    ),
    "difference_question_seen": Column("minus full, question seen, %"),
    "lost_question_seen": Column("lost, question seen"),
    "answer_len_question_seen": Column("answer, question seen, tokens", form=".1f"),
    "tokens": Column("tokens", "compared, scored or saved"),
    "tokens_fed": Column("tokens fed", "as was seen going through the model"),
    "save_seconds": Column("saved, s", "a session's file is written", form=".3f"),
    "load_seconds": Column("loaded, s", "the file is read into a new session just after it was written", form=".3f"),
    "feed_seconds": Column("fed again, s", "the same text is fed to an empty session", form=".3f"),
    "n": Column("n", "the repetitions, and the steps in all of them, that the figures of a row come from"),
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A table of texts, whose first column names the row, with notes below it.

    Without heads it is code, or a list of notes. A table without rows, and a list without notes or code, is left out of
    a report.
    """

    title: str
    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    code: str = ""

    def __bool__(self) -> bool:
        return bool(self.rows if self.heads else self.notes or self.code)


def column(name: str) -> Column:
    """Return a declared column, or one with the name as its head."""
    return TABLE_COLUMNS.get(name, Column(name.replace("_", " "), missing="none"))


def written(row: Mapping[str, Any], name: str) -> str:
    """Return the figure of a row in a column as text, with its range if the row has one (`NAME_range`)."""
    shown = column(name)
    value = spread(row, name) if isinstance(row.get(name), list) else row.get(name)  # type: ignore[arg-type]
    ends = row.get(f"{name}_range")
    return shown.write(value) + (f" ({shown.write(ends[0])}-{shown.write(ends[1])})" if ends else "")


def view(title: str, names: Sequence[str], rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> Table:
    """Return rows as a table of the named columns."""
    return Table(
        title, [column(name).head for name in names], [[written(row, name) for name in names] for row in rows], notes
    )


def least_to_most(values: Sequence[float], form: str = "") -> str:
    """Return the range of values as text, or the single value if all are written alike."""
    low, high = (f"{value:{form}}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def two_digits(value: float) -> str:
    """Return a number with two digits, or as a whole number from 100 on: 0.012, 5.4, 150; never 1.5e+02."""
    return f"{value:.2g}" if value < 99.5 else f"{value:,.0f}"


def megabytes(nbytes: float) -> str:
    """Return bytes in MB, without a fraction from 10 MB on."""
    return f"{nbytes / MB:,.0f}" if nbytes >= 10 * MB else f"{nbytes / MB:.2g}"
