"""The parts of a report of any preset, in reading order: title, alarms, tables, the line on the machine, and sections.

The large numbers and the sentences are those of `sentences`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llama.bench.report import hand_in, tables
from llama.bench.report.cells import CellView, cell_views
from llama.bench.report.columns import TABLE_COLUMNS, Table
from llama.bench.report.derived import scatter
from llama.bench.schema import NO_ROOM, Report, rows_of

NOISY = "NOISY, measured under load"

TITLES = {
    "table": "With and without KV cache",
    "caches": "Kinds of KV cache: bytes, time and quality",
    "merged": "Results of many runs",
    "chat": "A conversation with its KV cache kept, prompts that begin alike, and sessions on disk",
    "report": "What the KV cache saves and costs on this machine",
}
TERMS = [
    "in brackets: p10 and p90, the values below which 10 % and 90 % of the repetitions lie; a single value has none",
    "MB: 2^20 bytes",
    "cache off: nearly every step has a length that no step had before, so it runs without a warm-up of its shape",
]
CHAT_TERMS = [
    "kept: the cache stays from turn to turn, and only new tokens are fed",
    "rebuilt: every turn begins with an empty cache and feeds the whole text, as a program without sessions does",
    "off: no cache; the first token costs as much as rebuilt, and every further token as much again",
    "the answers are those of the text, fed without a clock",
    "bytes of the KV cache: at the turn's first token, with the memory that was reserved ahead",
    "shared: the beginning of all prompts is fed once, for all rows",
]


@dataclass(frozen=True)
class Section:
    """A part of a report: tables, and names of pictures up to a dash. A page folds it, open at first if `is_open`."""

    name: str
    tables: Sequence[Table]
    pictures: Sequence[str] = ()
    is_open: bool = False


def report_sections(report: Report) -> list[Section]:
    """Return the report behind its first table and its sentences, in reading order, without empty tables."""
    views = [view for view in cell_views(report) if view.row.get("seconds") and "setup" not in view.row]
    noted = [f"{one.label}: {note}" for one in cell_views(report) for note in one.row.get("notes", []) if not views]
    lead, *others = tables.figure_tables(report) or [Table("")]
    of_hand_in = [hand_in.text_table(report), hand_in.published_table(report)]
    code = hand_in.code_tables() if report["preset"] == "report" else []
    found = [
        Section("What was measured", others, ("quality",), is_open=True),
        Section("Time and memory", tables.saved_tables(report), ("time", "memory"), is_open=True),
        Section("Four texts, with the cache and without", of_hand_in[:1], is_open=True),
        Section("The lines of code that differ", code, is_open=True),
        Section("Beside the published tables", of_hand_in[1:], is_open=True),
        Section("Where the cache begins to pay", tables.step_tables(report), ("speedup", "steps")),
        Section("Memory and work of each cell", [_details(view) for view in views]),
        Section("Noise, and what was not measured", [Table("", notes=[*noise(report), *left_out(report)])]),
        Section("Validity", [tables.validity_table(report), Table("", notes=noted)]),
        Section("Where and how", [tables.setups_table(report), tables.environment_table(report)]),
    ]
    shown = [table for table in (lead, *(one for section in found for one in section.tables)) if table]
    heads = {head for table in shown for head in table.heads}
    terms = CHAT_TERMS if rows_of(report, "turn") else []
    words = [f"{one.head}: {one.meaning}" for one in TABLE_COLUMNS.values() if one.meaning and one.head in heads]
    found.append(Section("What the words mean", [Table("", notes=[*terms, *words, *TERMS])]))
    return [replace(one, tables=[table for table in one.tables if table]) for one in found]


def cell_table(view: CellView) -> Table:
    """Return the memory ledger of a cell, with its work below, or why it has none."""
    ledger = tables.ledger_table(view)
    known = [ledger.title, *ledger.notes, *tables.work_lines(view)] if view.row.get("seconds") else [view.outcome]
    return replace(ledger, title=view.label, notes=known)


def check_lines(view: CellView) -> list[str]:
    """Return the checks of a cell, a line each."""
    return [f"{tables.check_mark(check)}: {tables.check_words(check)}" for check in view.checks]


def _details(view: CellView) -> Table:
    has_text = view.cell.text is not None and "text" in view.row  # not that behind random ids
    shown, text = cell_table(view), [f"text of the first row: {view.row['text']!a}"] if has_text else []
    return replace(shown, notes=[*shown.notes, *check_lines(view), *view.row.get("notes", []), *text])


def title(report: Report) -> str:
    """Return the first line of the report."""
    return TITLES.get(report["preset"], "A KV cache benchmark")


def machine_line(report: Report) -> str:
    """Return the one line about the machine: whether it was busy, and how far times scatter.

    The scatter of a busy machine is that of times beside other work, and no bound of those without it.
    """
    views, off_by = cell_views(report), math.sqrt(scatter(report))
    seen = {check["status"] for view in views for check in view.checks if check["name"] == "other work"}
    state = "busy" if is_noisy(report) else "idle" if seen == {"ok"} else ""
    where = f"Measured on {'an' if state == 'idle' else 'a'} {state} machine"
    measured = [row for row in report["rows"] if row.get("path")]
    unknown = "The load of the machine was not observed" if measured else "No cell was measured"
    words = [where if state else unknown]
    if state == "busy":
        loads = [load for view in views for load in view.row.get("other_load_cores") or () if load is not None]
        cores = report["environment"].get("cores")
        words[0] += f", beside other work on up to {max(loads):.2f} of {cores} cores" if loads and cores else ""
        words[0] += ": the times are not those of an idle one"
    elif off_by > 1.05:
        words[0] += f": times may be off by {f'{off_by - 1:.0%}' if off_by < 2 else f'a factor of {off_by:.1f}'}"
    words += ["memory and tokens are exact"] * bool(measured)
    words += ["some figures were not measured"] * bool(left_out(report))
    return f"{'; '.join(words)}."


def is_noisy(report: Report) -> bool:
    """Return True if a cell was measured under load."""
    return any(check["status"] == "noisy" for check in rows_of(report, "check"))


def byline(report: Report) -> list[str]:
    """Return the model, the machine and the date, as far as they are known."""
    model, facts = report["model"], report["environment"]
    names = [] if model is None else [f"{model['name']} ({model['weights']})"]
    machine = [one["name"] if isinstance(one, dict) else one for one in (facts.get("gpu"), facts.get("cpu")) if one]
    threads = facts.get("threads")
    if machine and not facts.get("gpu") and threads:
        machine[-1] += f", {threads} thread{'s' * (threads > 1)}"
    return [*names, *machine, report["started"][:16].replace("T", " ")]


def alarms(report: Report) -> list[tuple[str, str]]:
    """Return what a reader must see before any figure, each as a mark and a sentence: violations, and dead cells."""
    views, mark = cell_views(report), tables.MARKS["violated"]
    seen = [(view, check) for view in views for check in view.checks if check["status"] == "violated"]
    found = [(mark, f"{view.label}: {tables.check_words(check)}") for view, check in seen]
    return [*found, *(("", f"{view.label} {view.outcome}") for view in views if view.row.get("error"))]


def noise(report: Report) -> list[str]:
    """Return what other work did to the times, in one sentence if it met several cells."""
    views, mark = cell_views(report), tables.MARKS["noisy"]
    seen = [(view.label, check) for view in views for check in view.checks if check["status"] == "noisy"]
    if len(seen) > 1:
        names = ", ".join([*(name for name, _ in seen[:8]), *["..."] * (len(seen) > 8)])
        which = "all cells" if len(seen) == len(views) else f"{len(seen)} of {len(views)} cells ({names})"
        return [f"{mark} other work changed the times of {which}; bytes and tokens are not affected"]
    return [f"{mark} {name}: {tables.check_words(check)}" for name, check in seen]


def left_out(report: Report) -> list[str]:
    """Return a sentence for all that had no room in the budget, and for all else that was not measured."""
    left = [name for name, _, why in (one.rpartition(": ") for one in report["failures"]) if why == NO_ROOM]
    others = [f"not measured: {one}" for one in report["failures"] if not one.endswith(f": {NO_ROOM}")]
    return [*others, *([f"{NO_ROOM} for {'; '.join(left)}; {tables.how_measured(report)}"] if left else [])]
