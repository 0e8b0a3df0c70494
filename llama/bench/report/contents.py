"""What a report consists of, in reading order, whatever its preset: title, warnings, and sections."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from llama.bench.report import tables
from llama.bench.report.cells import CellView, cell_views
from llama.bench.report.columns import TABLE_COLUMNS, Table
from llama.bench.schema import Report, rows_of

NOISY, NO_ROOM = "NOISY, measured under load", "no room in the budget"

TITLES = {
    "table": "With and without KV cache",
    "sweep": "What the KV cache saves as batch and length grow",
    "caches": "Kinds of KV cache: bytes, time and quality",
    "chat": "A conversation with its KV cache kept, prompts that begin alike, and sessions on disk",
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
    """A part of a report: tables, the names of its pictures, and whether a page folds its tables."""

    name: str
    tables: Sequence[Table]
    pictures: Sequence[str] = ()
    folded: bool = True


def report_sections(report: Report) -> list[Section]:
    """Return the report after its head, in reading order, without empty tables."""
    has_details = report["preset"] not in ("caches", "chat")
    views = cell_views(report)
    noted = [] if has_details else views
    notes = [f"{name_of(view, report)}: {note}" for view in noted for note in view.row.get("notes", [])]
    steps = "How it grows" if report["preset"] == "sweep" else "Where the cache begins to pay"
    found = [
        Section("Kinds of cache", tables.cache_tables(report), ("kinds", "pareto")),
        Section("A conversation, turn by turn", tables.turn_tables(report), folded=False),
        Section("Prompts that begin alike, and sessions on disk", tables.prompt_tables(report), folded=False),
        Section("The table", tables.cell_tables(report), folded=False),
        Section("Time and memory", [], ("time", "memory")),
        Section(steps, tables.step_tables(report), ("speedup", "steps")),
        Section("Memory, work and text of each cell", [_details(view) for view in views if has_details]),
        Section("Validity", [tables.validity_table(report), Table("", notes=notes)], folded=False),
        Section("Where and how", [tables.environment_table(report)], folded=False),
    ]
    heads = {head for section in found for table in section.tables if table for head in table.heads}
    words = CHAT_TERMS if report["preset"] == "chat" else []
    words = [
        *words,
        *(f"{one.head}: {one.meaning}" for one in TABLE_COLUMNS.values() if one.meaning and one.head in heads),
    ]
    found.append(Section("What the words mean", [Table("", notes=[*words, *TERMS])], folded=False))
    return [replace(one, tables=[table for table in one.tables if table]) for one in found]


def cell_table(view: CellView) -> Table:
    """Return the memory ledger of a cell, with its work below, or why it has none."""
    ledger = tables.ledger_table(view)
    known = [ledger.title, *ledger.notes, *tables.work_lines(view)] if view.row.get("seconds") else [view.fate]
    return replace(ledger, title=view.label, notes=known)


def check_lines(view: CellView) -> list[str]:
    """Return the checks of a cell, a line each."""
    return [f"{tables.check_mark(check)}: {tables.check_words(check)}" for check in view.checks]


def _details(view: CellView) -> Table:
    shown, text = cell_table(view), [f"text of the first row: {view.row['text']!a}"] if "text" in view.row else []
    return replace(shown, notes=[*shown.notes, *check_lines(view), *view.row.get("notes", []), *text])


def title(report: Report) -> str:
    """Return the first line of the report, with a warning if its times are not reliable."""
    about = TITLES.get(report["preset"], "A KV cache benchmark")
    return f"{about}: {NOISY}" if is_noisy(report) else about


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
    """Return what a reader must not miss, each as a mark and a sentence: every violation, and all noise in one."""
    views = cell_views(report)
    found = {
        status: [(view, check) for view in views for check in view.checks if check["status"] == status]
        for status in tables.MARKS
    }
    said = {status: [f"{name_of(view, report)}: {tables.check_words(check)}" for view, check in found[status]]
            for status in found}  # fmt: skip
    if len(noisy := [name_of(view, report) for view, _ in found["noisy"]]) > 1:
        which = "all cells" if len(noisy) == len(views) else f"{len(noisy)} of {len(views)} cells ({', '.join(noisy)})"
        said["noisy"] = [f"other work changed the times of {which}; bytes and tokens are not affected"]
    return [(mark, sentence) for status, mark in tables.MARKS.items() for sentence in said[status]]


def name_of(view: CellView, report: Report) -> str:
    """Return what the report calls a cell: of kinds of cache, the kind as its tables and its jobs name it."""
    return view.cell.kv_cache if report["preset"] == "caches" else view.label


def deaths(report: Report) -> list[str]:
    """Return the cells that died or were refused, and what else was not measured."""
    cells = [f"{name_of(view, report)} {view.fate}" for view in cell_views(report) if view.row.get("error")]
    left_out = [name for name, _, why in (one.rpartition(": ") for one in report["failures"]) if why == NO_ROOM]
    others = [f"not measured: {one}" for one in report["failures"] if not one.endswith(f": {NO_ROOM}")]
    return [*cells, *others, *([f"{NO_ROOM} for {'; '.join(left_out)}"] if left_out else [])]
