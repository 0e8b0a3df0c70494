"""What the preset `report` shows beside its table: texts in both modes, the lines of code, and the published tables.

The code is read from the sources, so it is always the one that ran.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

from llama.bench.report.cells import CellView, cell_views
from llama.bench.report.columns import NOT_MEASURED, Table, megabytes
from llama.bench.report.peak import is_peak_predicted, peak_bytes, stored_bytes
from llama.bench.schema import TEXTS, Report, Row, peaks_of, rows_of
from llama.costs import MB, RELEASED, peak_memory

# Peaks in MB for Llama 3.2 1B in fp16 on a GPU, 256 tokens in and 32 out, by batch size.
SOURCE = "reports of two students of the course EE 508 (University of Southern California, spring 2025)"
PUBLISHED = {True: {1: 3071.57, 8: 4495.0, 16: 6133.0}, False: {1: 3230.0, 8: 5755.0, 16: 8641.0}}
PUBLISHED_SECONDS = "1.03 to 8.14 s with the cache and 3.96 to 52.8 s without"
PUBLISHED_INPUT = 263  # tokens that those scripts feed: decoding and encoding turns BOS into seven ordinary tokens
MODES = (True, False)
_MODEL = replace(RELEASED["llama-3.2-1b"], tied_head=False)  # its .pth file has a head of its own


def text_table(report: Report) -> Table:
    """Return the prompts with both continuations, side by side, and where they differ; or why there are none."""
    rows = rows_of(report, "text")
    why = [one.removeprefix(f"{TEXTS}: ") for one in report["failures"] if one.startswith(f"{TEXTS}: ")]
    if why and not rows:
        return Table("", notes=[f"No text was made: {why[0].rstrip('.')}."])
    shown = [[row["prompt"], row["cached_text"], row["uncached_text"], _difference(row)] for row in rows]
    notes = ["both continue greedily: the most likely token each time"]
    return Table("The same texts", ["prompt", "with the cache", "without", "difference"], shown, notes)


def _difference(row: Row) -> str:
    if row["equal"]:
        return f"identical, {row['tokens']} tokens"
    pairs = zip(row["cached_text"], row["uncached_text"], strict=False)
    at = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
    return "other tokens" if at is None else f"from character {at + 1} on"


def code_tables() -> list[Table]:
    """Return the statements of the sources that differ between the two modes."""
    branch = _statement("model.py", ast.If, lambda one: ast.unparse(one.test) == "self.kv_caching" and bool(one.orelse))
    fed = _statement("generation.py", ast.Assign, lambda one: "self.cache is None" in ast.unparse(one.value))
    return [
        Table("llama/model.py, Attention.forward: the keys and values that are attended to", code=branch),
        Table("llama/generation.py, the decode loop: the position from which a step feeds the text", code=fed),
    ]


def _statement(file: str, kind: type[Any], wanted: Callable[[Any], bool]) -> str:
    """Return the statements of a kind in a source that are wanted; "" if they are not there, as in an exercise."""
    text = resources.files("llama").joinpath(file).read_text("utf-8")
    found = [one for one in ast.walk(ast.parse(text)) if isinstance(one, kind) and wanted(one)]
    lines = [line[one.col_offset :] for one in found for line in text.splitlines()[one.lineno - 1 : one.end_lineno]]
    return "\n".join(lines)


def published_table(report: Report) -> Table:
    """Return the published peaks beside one's own, with the logits of the last position and of all positions."""
    peaks = peaks_of(report)
    views = {(one.cell.batch_size, one.cell.kv_caching): one for one in cell_views(report)}
    heads = ["batch size", "KV cache", "published peak, MB", "computed for it, MB", "of these logits, MB"]
    heads += ["own peak, MB", "own peak with all logits, MB"]
    rows = [_published_row(*key, views.get(key), peak) for key, peak in peaks.items()]
    return Table("Peaks of memory beside the published ones", heads, rows, _why(views, peaks) if peaks else [])


def _published_row(batch: int, on: bool, view: CellView | None, peak: Row) -> list[str]:
    theirs = peak_memory(
        _MODEL, rows=batch, input_len=PUBLISHED_INPUT, output_len=32, kv_caching=on, itemsize=2, all_logits=True
    )
    logits = theirs.logits + theirs.narrow_logits + theirs.previous_logits
    published = f"{PUBLISHED[on][batch]:,.2f}".removesuffix(".00") if batch in PUBLISHED[on] else NOT_MEASURED
    mine = NOT_MEASURED
    if view is not None and view.has_peak:
        mine = f"{'~' * is_peak_predicted(view)}{peak_bytes(view) / MB:,.2f}"
    mode, every = "on" if on else "off", f"{'~' * (peak['measured_bytes'] is None)}{stored_bytes(peak) / MB:,.2f}"
    return [str(batch), mode, published, f"{theirs.total / MB:,.0f}", f"{logits / MB:,.0f}", mine, every]


def _why(views: Mapping[tuple[int, bool], CellView], peaks: Mapping[tuple[int, bool], Row]) -> list[str]:
    """Return why the published memory goes the other way, with the difference here."""
    notes = [
        f"published: {SOURCE}, Llama 3.2 1B in fp16 with a head of its own; computed: its peak in code with the logits "
        f"of all positions, {PUBLISHED_INPUT} tokens in (such scripts decode and encode the prompt) and 32 out",
        f"~: computed; times, batch 1 to 16: published on a GPU {PUBLISHED_SECONDS}",
        "the published column goes the other way, less memory with the cache, because of the logits: without the cache "
        "each step computes those of all positions again, beside those of the step before",
    ]
    batch = min(batch for batch, _ in peaks)
    pair = [views[batch, on] for on in MODES if (batch, on) in views and views[batch, on].has_peak]
    if len(pair) == 2:
        last = _more(peak_bytes(pair[0]) - peak_bytes(pair[1]))
        every = _more(stored_bytes(peaks[batch, True]) - stored_bytes(peaks[batch, False]))
        computed = any(map(is_peak_predicted, pair)) or any(peaks[batch, on]["measured_bytes"] is None for on in MODES)
        notes.append(
            f"{'computed' if computed else 'measured'} here at batch {batch}: with the logits of the last position the "
            f"cache takes {last} than no cache; with those of all positions {every}"
        )
    return notes


def _more(nbytes: int) -> str:
    return f"{megabytes(abs(nbytes))} MB {'more' if nbytes >= 0 else 'less'}"
