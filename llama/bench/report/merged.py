"""The tables of merged reports: one for each kind of figures with a row for each cell, and the setups."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llama.bench.cell import Cell
from llama.bench.report.columns import NOT_JUDGED, TABLE_COLUMNS, Table, view
from llama.bench.report.tables import QUALITY_COLUMNS, share_note, with_intervals
from llama.bench.report.tasks import note_on, scores_of
from llama.bench.schema import KEYS, REPEATED, Report, Row, cell_of
from llama.bench.statistics import values_of

# Columns that name a row. A row's own keys replace the fields of its cell, such as the context of a step.
NAMED = ("model", "kind", "context", "batch_size")
IN_NAMES = {"model", "kv_cache", "kv_caching", "input_len", "batch_size"}
TITLES = {"cell": "Generation", "step": "Steps", "quality": "Quality", "task": "Scores of tasks"}
FIRST = {"static": "", "off": " "}  # kinds that come before the others
# Declared columns of merged rows that stay in the CSV.
LEFT = {"first_token_seconds", "prefill_tokens_per_second", "decode_tokens_per_second", "name", "n", *NAMED}


def merged_tables(report: Report) -> list[Table]:
    """Return a table for each kind of figures, of a merged report alone."""
    found: dict[str, list[Row]] = {}
    for row in report["rows"] if report["preset"] == "merged" else []:
        if row["figures"] != "check" and (row["figures"] != "cell" or row.get("seconds")):
            found.setdefault(row["figures"], []).append(row)
    return [_table(report, figures, rows) for figures, rows in found.items()]


def _table(report: Report, figures: str, rows: Sequence[Row]) -> Table:
    """Return rows of one kind of figures, in the order of model, context and batch, so that kinds are together."""
    shown = [_named(cell_of(report, row), row) for row in rows]
    named = [*NAMED, *(key for key in KEYS[figures] if key not in {*NAMED, *IN_NAMES})]
    fields = [name for name in Cell.__dataclass_fields__ if name not in {*named, *IN_NAMES}]
    named += [name for name in fields if len({repr(row[name]) for row in shown}) > 1]
    if len({(row["kind"], row["code"]) for row in shown}) == len({row["kind"] for row in shown}):
        named = [name for name in named if name != "code"]  # the kind tells it
    left = {*named, *IN_NAMES, *LEFT, *({"setup"} if len(report["plan"]["setups"]) < 2 else {})}
    measured = [name for name in TABLE_COLUMNS if name not in left]
    measured = [name for name in measured if any(row.get(name) is not None for row in shown)]
    order = [*(name for name in named if name != "kind"), "kind"]

    def place(row: Mapping[str, Any]) -> list[str]:
        values = (FIRST.get(row[name], row[name]) if name == "kind" else row[name] for name in order)
        return [f"{value:012}" if isinstance(value, int) else str(value) for value in values]

    notes = [note_on(rows)] if figures == "task" else []
    notes += share_note(row["kind"] for row in shown if row.get("cache_bytes") is not None)
    return view(TITLES.get(figures, figures), [*named, *measured, "n"], sorted(shown, key=place), notes)


def _named(cell: Cell, row: Row) -> dict[str, Any]:
    """Return a row with the fields of its cell, and the columns that follow from others."""
    kind = cell.kv_cache if row.get("kv_caching", cell.kv_caching) else "off"
    named = {**cell.as_json(), "kind": kind, "context": cell.input_len, **row}
    named["setup"] = ", ".join(str(setup + 1) for setup in (row["setup"], *row.get("also", [])) if setup is not None)
    if (nll := row.get("nll")) is not None:
        named["perplexity"] = math.exp(nll) if nll < 700 else math.inf
    named |= with_intervals(named)
    if row.get("judged") is False:
        named |= {name: NOT_JUDGED for name in QUALITY_COLUMNS if named.get(name) is not None}
    if row["figures"] == "task":
        return {**named, **scores_of(row), "n": len(row["scores"])}
    named["n"] = max((len(row[name]) for name in REPEATED & row.keys() if values_of(row, name)), default=1)
    return named
