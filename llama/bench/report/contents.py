"""The parts of a report of any preset, in reading order: title, warnings, failures, and sections."""

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
    """A part of a report: its tables, and the names of its pictures. A page folds tables if `folded`."""

    name: str
    tables: Sequence[Table]
    pictures: Sequence[str] = ()
    folded: bool = True


def report_sections(report: Report) -> list[Section]:
    """Return the report after its head, in reading order, without empty tables."""
    has_details = report["preset"] not in ("caches", "chat")
    views = cell_views(report)
    noted = [f"{name_of(view, report)}: {note}" for view in views for note in view.row.get("notes", [])]
    notes = Table("", notes=[] if has_details else noted)
    steps = "How it grows" if report["preset"] == "sweep" else "Where the cache begins to pay"
    found = [
        Section("Kinds of cache", tables.cache_tables(report), ("kinds", "pareto")),
        Section("A conversation, turn by turn", tables.turn_tables(report), folded=False),
        Section("Prompts that begin alike, and sessions on disk", tables.prompt_tables(report), folded=False),
        Section("The table", tables.cell_tables(report), folded=False),
        Section("Time and memory", [], ("time", "memory")),
        Section(steps, tables.step_tables(report), ("speedup", "steps")),
        Section("Memory, work and text of each cell", [_details(view) for view in views if has_details]),
        Section("Validity", [tables.validity_table(report), notes], folded=False),
        Section("Where and how", [tables.environment_table(report)], folded=False),
    ]
    heads = {head for section in found for table in section.tables if table for head in table.heads}
    terms = CHAT_TERMS if report["preset"] == "chat" else []
    words = [f"{one.head}: {one.meaning}" for one in TABLE_COLUMNS.values() if one.meaning and one.head in heads]
    found.append(Section("What the words mean", [Table("", notes=[*terms, *words, *TERMS])], folded=False))
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


def warnings(report: Report) -> list[tuple[str, str]]:
    """Return what a reader must not miss, each as a mark and a sentence: every violation, and all noise in one."""
    views, found = cell_views(report), []
    for status, mark in tables.MARKS.items():
        seen = [(name_of(view, report), check) for view in views for check in view.checks if check["status"] == status]
        if status == "noisy" and len(seen) > 1:
            names = ", ".join(name for name, _ in seen)
            which = "all cells" if len(seen) == len(views) else f"{len(seen)} of {len(views)} cells ({names})"
            found.append((mark, f"other work changed the times of {which}; bytes and tokens are not affected"))
        else:
            found += [(mark, f"{name}: {tables.check_words(check)}") for name, check in seen]
    return found


def name_of(view: CellView, report: Report) -> str:
    """Return what the report calls a cell: of kinds of cache, the kind as its tables and its jobs name it."""
    return view.cell.kv_cache if report["preset"] == "caches" else view.label


def failures(report: Report) -> list[str]:
    """Return a sentence for each cell that died or was refused, and for all else that was not measured."""
    cells = [f"{name_of(view, report)} {view.outcome}" for view in cell_views(report) if view.row.get("error")]
    left_out = [name for name, _, why in (one.rpartition(": ") for one in report["failures"]) if why == NO_ROOM]
    others = [f"not measured: {one}" for one in report["failures"] if not one.endswith(f": {NO_ROOM}")]
    return [*cells, *others, *([f"{NO_ROOM} for {'; '.join(left_out)}"] if left_out else [])]
