"""The one format of the benchmark: a report is a head and rows, whatever its preset.

A job returns rows, `merge` puts them into the report, and tables, CSV, page and plots are views of them. Times are
seconds, sizes bytes, shares 0 to 1; the number of a token, a row or a turn counts from 0. None, or a missing column,
stands for what was not measured. docs/benchmark_json.md lists which row has which columns.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NotRequired, TypedDict

from llama.bench.cell import Cell
from llama.host.machine import Ceilings

SCHEMA = "llama-kv/benchmark/5"
TEXTS = "the four texts"  # of a report: begins the line of `failures` on them
NO_ROOM = "no room in the budget"  # ends the line of `failures` on what the budget left out

Status = Literal["ok", "violated", "noisy", "not observed"]

# The columns that identify a row among those with the same figures and cell.
KEYS: dict[str, tuple[str, ...]] = {
    "cell": (),  # one cell: its times and memory over all repetitions, its work, its text
    "check": ("name",),  # one check of a cell
    "memory": ("name",),  # one line of a cell's memory ledger
    "step": ("batch_size", "context", "kv_caching"),  # a step at one context: its time, the bytes of the cache
    "comparison": (),  # the tokens with the cache, or with guesses, against those without
    "peak": ("batch_size", "kv_caching"),  # the peak if the logits of all positions are computed
    "text": ("prompt",),  # a prompt continued with the cache and without
    "agreement": (),  # the most likely tokens of rounded weights against those of float32
    "quality": ("context",),  # a kind of cache against the full one at one length of a text
    "task": ("task", "context"),  # the scores of a task's samples, at one length
    "turn": ("way", "turn"),  # a turn of a conversation
    "prompts": ("way",),  # prompts that begin alike
    "disk": (),  # a session saved and loaded
}
# Columns with a value for each repetition: `merge` appends to them.
REPEATED = {
    *("seconds", "first_token_seconds", "step_seconds", "save_seconds", "load_seconds", "feed_seconds"),
    *("tensor_peak_bytes", "resident_peak_bytes", "other_load_cores", "proposed", "accepted"),
}


# One row: `figures`, `cell`, and columns that depend on `figures`; docs/benchmark_json.md lists them all.
Row = dict[str, Any]


class Report(TypedDict):
    """A run of the benchmark. `cells` are what was asked for, `plan` what the preset measures beside them.

    `done` counts the repetitions of each job by its name. `reading` is what follows from the figures, in sentences;
    `failures` is what was not measured, and why. `files` has the digests of the files beside the results, as they
    were written.
    """

    schema: str
    preset: str
    command: str
    started: str
    budget_minutes: float | None
    cells: list[dict[str, Any]]
    plan: dict[str, Any]
    done: dict[str, int]
    model: dict[str, Any] | None
    environment: dict[str, Any]
    ceilings: Ceilings | None
    reading: list[str]
    failures: list[str]
    files: NotRequired[dict[str, list[str]]]
    rows: list[Row]


def new_report(
    preset: str,
    cells: Sequence[Cell],
    *,
    command: str = "",
    budget_minutes: float | None = None,
    plan: dict[str, Any] | None = None,
) -> Report:
    """Return a report that begins now and has a row for each cell, without figures."""
    return {
        "schema": SCHEMA,
        "preset": preset,
        "command": command,
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "budget_minutes": budget_minutes,
        "cells": [cell.as_json() for cell in cells],
        "plan": plan or {},
        "done": {},
        "model": None,
        "environment": {},
        "ceilings": None,
        "reading": [],
        "failures": [],
        "rows": [{"figures": "cell", "cell": index, "error": None, "notes": []} for index in range(len(cells))],
    }


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the values in which two environments, or other facts, differ."""
    return [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]


def check_setups(report: Report) -> None:
    """Raise ValueError for a merged report of several setups, because its rows are not those of one environment."""
    if (count := len(report["plan"].get("setups", []))) > 1:
        raise ValueError(f"a result is merged from {count} setups; give the results that it was made of")


def rows_of(report: Report, figures: str, cell: int | None = None) -> list[Row]:
    """Return the rows of some figures, of all cells or of one."""
    return [row for row in report["rows"] if row["figures"] == figures and cell in (None, row["cell"])]


def peaks_of(report: Report) -> dict[tuple[int, bool], Row]:
    """Return the peaks with the logits of all positions, by batch size and mode, the smallest batch first."""
    return {(row["batch_size"], row["kv_caching"]): row for row in sorted(rows_of(report, "peak"), key=_by_batch)}


def _by_batch(row: Row) -> tuple[int, bool]:
    return row["batch_size"], not row["kv_caching"]


def cell_row(report: Report, cell: int) -> Row:
    """Return the row of figures of a cell."""
    return rows_of(report, "cell", cell)[0]


def cell_of(report: Report, row: Row) -> Cell:
    """Return the cell that a row belongs to."""
    return Cell(**report["cells"][row["cell"]])


def is_measured(row: Row) -> bool:
    """Return whether a row of a cell has times that were measured."""
    return bool(row.get("seconds"))


def merge(report: Report, rows: Iterable[Row], cell: int | None = None) -> None:
    """Put rows into a report, as rows of `cell` if it is given.

    A row that is there already gets the new repetition. Of two checks the violated one stays, and of two lines of a
    ledger the one with a measurement.
    """

    def key_of(row: Row) -> tuple[Any, ...]:
        return row["figures"], row["cell"], *(row.get(name) for name in KEYS[row["figures"]])

    places = {key_of(row): place for place, row in enumerate(report["rows"])}
    for new in rows:
        row: Row = new if cell is None else {**new, "cell": cell}
        place = places.setdefault(key_of(row), len(report["rows"]))
        if place == len(report["rows"]):
            report["rows"].append(row)
        else:
            report["rows"][place] = _merged(report["rows"][place], row)


def _merged(old: Row, new: Row) -> Row:
    if old["figures"] == "check":
        return old if old["status"] == "violated" else new
    if old["figures"] == "memory":
        return old if old.get("measured_bytes") is not None else new
    merged: dict[str, Any] = {**old, **new}
    for name in REPEATED & old.keys() & new.keys():
        merged[name] = [*old[name], *new[name]]
    if old.get("error"):  # another job of the cell died
        merged["error"] = old["error"]
    if "notes" in merged:
        changed = "seconds" in old and old.get("ids") != new.get("ids")
        found = [*old.get("notes", []), *new.get("notes", []), *["repetitions made different tokens"] * changed]
        merged["notes"] = list(dict.fromkeys(found))
    return merged


def pairs(report: Report) -> Iterator[tuple[Row, Row]]:
    """Yield the row of each measured cell with the cache on, and that of its `other` cell on the same path."""
    measured = {(cell_of(report, row), row["path"]): row for row in rows_of(report, "cell") if is_measured(row)}
    for (cell, path), row in measured.items():
        if cell.kv_caching and (without := measured.get((cell.other, path))) is not None:
            yield row, without
