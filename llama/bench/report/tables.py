"""The tables of a report: one for each kind of figures that it has, and those of what follows from them.

Knows nothing of presets, of Markdown, HTML or of how anything was measured.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from llama.bench.cell import Cell
from llama.bench.report.cells import CellView, cell_views, in_table_order, kind_names
from llama.bench.report.columns import (
    NOT_JUDGED,
    NOT_MEASURED,
    NOT_OBSERVED,
    TABLE_COLUMNS,
    Table,
    column,
    view,
    written,
)
from llama.bench.report.derived import crossovers, growth, saved, step_pairs
from llama.bench.report.peak import peak_sentence, peak_words
from llama.bench.report.tasks import means, note_on, scores_of
from llama.bench.schema import KEYS, NO_ROOM, REPEATED, Report, Row, cell_of, rows_of
from llama.bench.statistics import percent_more, values_of, with_ends
from llama.costs import MB, size
from llama.quality.intervals import LEAST_SAMPLES, mean_interval

MARKS = {"violated": "VIOLATED", "noisy": "NOISY"}

# Figures with a table of their own, the result first; turns and steps in both modes have columns for their ways.
TITLES = {
    "quality": "Bytes, time and quality",
    "cell": "Every cell",
    "step": "Bytes and time by context",
    "task": "Scores of tasks",
    "prompts": "Prompts that begin alike",
    "disk": "A session on disk",
    "agreement": "Rounded weights beside float32",
}
SAVED_COLUMNS = ("cell", "less_work", "times_faster", "steps_faster", "more_bytes", "bound_on", "bound_off", "n")
STEP_COLUMNS = ("batch_size", "context", "on", "off", "times_faster", "n")
GROWTH_COLUMNS = ("batch_size", "generated", "on_s", "off_s", "times_faster", "n")
PAPER_COLUMNS = ("cache_bytes", "of_full", "perplexity", "more_perplexity", "mean_kl", "top1_agreement", "score",
                 "difference")  # fmt: skip
QUALITY_COLUMNS = ("top1_agreement", "mean_kl", "perplexity", "greedy_text")
PREDICTED = "~"  # before bytes that were not measured
FIRST = {"static": "", "on": "", "off": " "}  # kinds that come before the others


def figure_tables(report: Report) -> list[Table]:
    """Return a table for each kind of figures, the result first."""
    timed = any(row["kv_caching"] is False for row in rows_of(report, "step"))  # which has a table of pairs
    found = [*turn_tables(report)]
    for figures in (one for one in TITLES if not (timed and one == "step")):
        rows = rows_of(report, figures)
        if figures == "cell":  # those of merged reports may be of other figures alone
            rows = [row for row in rows if row.get("seconds") or row["error"] or "setup" not in row]
            has_others = any(found) or any(row["figures"] in TITLES.keys() - {"cell"} for row in report["rows"])
            rows = [] if has_others and not any(row.get("seconds") for row in rows) else rows
        found.append(_figure_table(report, figures, rows + (means(rows) if figures == "task" else [])))
    lead, *others = [table for table in found if table] or [Table("")]
    stored = [kind_names(report)[row["cell"]] for row in report["rows"] if row.get("cache_bytes") is not None]
    return [replace(lead, notes=[*lead.notes, *share_note(stored)]), *others] if lead else []


def paper_tables(report: Report) -> list[Table]:
    """Return the figures of quality against bytes, for a paper."""
    quality = _figure_table(report, "quality", rows_of(report, "quality"), PAPER_COLUMNS)
    tasks = rows_of(report, "task")
    of_tasks = _figure_table(report, "task", tasks + means(tasks), (*PAPER_COLUMNS, "n"))
    return [table for table in (quality, of_tasks) if table]


def _figure_table(report: Report, figures: str, rows: list[Row], wanted: Collection[str] = TABLE_COLUMNS) -> Table:
    """Return rows of one kind of figures: what names them and varies, and then the wanted columns with values."""
    shown = [named(report, row) for row in rows]
    shown = [{**row, **with_intervals(row)} if "kls" in row else row for row in shown]
    fields = [name for name in Cell.__dataclass_fields__ if name not in ("kv_cache", "kv_caching", "threads")]
    names = [name for name in [*fields, "setup"] if len({repr(row.get(name)) for row in shown}) > 1]
    if len({(row["kind"], row["code"]) for row in shown}) == len({row["kind"] for row in shown}):
        names = [name for name in names if name != "code"]  # the kind tells it
    names += ["path"] * (len({row["path"] for row in shown if row.get("path")}) > 1)
    names += [name for name in KEYS[figures] if name not in (*names, "kv_caching")]
    others = (*names, "path", "setup", "kind", "name", "kv_caching", "n")
    measured = [name for name in TABLE_COLUMNS if name in wanted and name not in others]
    measured = [name for name in measured if any(row.get(name) is not None for row in shown)]
    if all("setup" not in row and row["kind"] in FIRST for row in shown):  # one kind
        measured = [name for name in measured if name not in ("of_full", "time_of_full")]
        if figures == "cell":
            shown = [{**row, "kind": on_or_off(row["kind"] != "off")} for row in shown]

    def place(row: Mapping[str, Any]) -> list[str]:
        values = (row.get(name) for name in names)
        keys = [f"{value:012}" if isinstance(value, int) else str(value) for value in values]
        return [*keys, FIRST.get(row["kind"], row["kind"])]

    notes: dict[str, Callable[[Report], Iterator[str]]] = {"quality": _kind_notes, "cell": _cell_notes}
    notes |= {"step": _step_notes, "task": lambda _: iter([note_on(rows)] if rows else [])}
    said = list(notes[figures](report)) if figures in notes else []
    has_no_room = any(one.endswith(NO_ROOM) for one in report["failures"])
    if has_no_room and any(NOT_MEASURED in row.values() for row in shown):
        said.append(f"{NOT_MEASURED}: {NO_ROOM}; {how_measured(report)}")
        said.append(f"{PREDICTED} and predicted: bytes that follow from the model's sizes")
    return view(TITLES[figures], [*names, "kind", *measured, *["n"] * ("n" in wanted)], sorted(shown, key=place), said)


def named(report: Report, row: Row) -> dict[str, Any]:
    """Return a row with the fields of its cell, and the columns that follow from others."""
    cell, counts = cell_of(report, row), [len(row[name]) for name in REPEATED & row.keys() if values_of(row, name)]
    is_on = row.get("kv_caching", cell.kv_caching)
    shown: dict[str, Any] = {**cell.as_json(), "n": max(counts, default=1), **row, "text": cell.text}
    if row.get("cache_bytes") is None and row.get("predicted_cache_bytes") is not None:
        shown |= {"cache_bytes": NOT_MEASURED, "n": 0}
    shown["kind"] = kind_names(report)[row["cell"]] if is_on else "off"
    if "setup" in row:
        setups = (row["setup"], *row.get("also", []))
        shown["setup"] = ", ".join(str(setup + 1) for setup in setups if setup is not None)
    if row["figures"] == "cell":
        shown["n"] = repetitions(cell, row)
        shown["seconds"] = row.get("seconds") or (row["error"] or NOT_MEASURED).partition(":")[0]
        peak = next((one for one in rows_of(report, "memory", row["cell"]) if one["name"] == "peak"), None)
        if peak is not None and not row.get("seconds"):
            shown["cache_bytes"] = NOT_MEASURED
            shown["tensor_peak_bytes"] = PREDICTED + column("tensor_peak_bytes").write(peak["predicted_bytes"])
    if "judged" in row and row["figures"] == "quality":
        shown |= _quality_of(row)
    return {**shown, **scores_of(row), "n": len(row["scores"])} if row["figures"] == "task" else shown


def _quality_of(row: Row) -> dict[str, Any]:
    if not row["judged"]:
        return dict.fromkeys(QUALITY_COLUMNS, NOT_JUDGED)
    token, made = row.get("divergence_token"), row.get("greedy_tokens")
    text = None if made is None else f"same {made} tokens"
    if token is not None:
        text = f"differs at token {token}, margin {row['margin']:.2g}"
    more = with_ends(row, "nlls_minus_full", percent_more)[0] if "nlls_minus_full" in row else None
    shown = {"more_perplexity": more, "perplexity": math.exp(row["nll"]) if row["nll"] < 700 else math.inf}
    return {**shown, "greedy_text": text}


def repetitions(cell: Cell, row: Row) -> str:
    """Return the number of repetitions of a cell and of the steps in all of them."""
    later = sum(map(len, row.get("step_seconds", [])))
    what = "later tokens" if cell.speculate else "steps"
    return str(len(row.get("seconds", []))) + (f" ({later} {what})" if later else "")


def _cell_notes(report: Report) -> Iterator[str]:
    yield from (f"{one.label} {one.outcome}" for one in in_table_order(cell_views(report)) if one.row.get("error"))


def _step_notes(report: Report) -> Iterator[str]:
    for row in rows_of(report, "step"):
        stored, predicted = row.get("cache_bytes"), row.get("predicted_cache_bytes")
        if None not in (stored, predicted) and stored != predicted:
            yield (
                f"{kind_names(report)[row['cell']]} does not store what its predicted_bytes says: {stored:,} bytes at "
                f"{row['context']:,}, predicted {predicted:,}"
            )


def with_intervals(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the divergence and the perplexities of a judged row with their 95 % intervals, as text."""
    found = {}
    more = ("more_perplexity", "nlls_minus_full", percent_more)
    for name, blocks, of in (("mean_kl", "kls", float), ("perplexity", "nlls", math.exp), more):
        ends = mean_interval(tuple(row.get(blocks) or ())) if row["judged"] else None
        if ends is not None and ends[0] < ends[1] < 700:
            low, high = (column(name).write(of(end)) for end in ends)
            found[name] = f"{written(row, name)} ({low} to {high})"
    return found


def share_note(kinds: Iterable[str]) -> list[str]:
    """Return the note on shares as a list: empty unless a kind has one, such as snapkv:0.25."""
    named = next((kind for kind in kinds if re.search(r":(0?\.\d+|1\.0*)($|[@;+])", kind)), None)
    words = "is one of the keys of the prompt. Some kinds also drop keys of the tokens that follow, others store all of"
    note = f"A share, as in {named}, {words} these: equal shares are not equal bytes. Compare kinds by their bytes."
    return [] if named is None else [note]


def _kind_notes(report: Report) -> Iterator[str]:
    rows = [row for row in rows_of(report, "quality") if "judged" in row]
    if len({(row["tokens"], row["context"]) for row in rows}) == 1:
        row, text = rows[0], report["plan"].get("text", "a text")
        few = "" if len(row.get("kls", [])) >= LEAST_SAMPLES else " Too few for an interval."
        yield (
            f"Quality: the last {row['tokens']:,} of the first {row['context']:,} tokens of {text}, fed one by one, "
            f"against the model without a cache.{few} Bytes and time are those of the last steps."
        )
    if not all(row["judged"] for row in rows):
        yield (
            f"{NOT_JUDGED}: at that length the kind has dropped or compressed nothing, so the text does not show what "
            "its savings cost; give a longer --prompt_len, or a kind that stores less."
        )
    views, names = cell_views(report), kind_names(report)
    widened = [names[one.index] for one in views if one.row.get("quantized") and one.path.startswith("plain")]
    if widened:
        yield (
            f"On the plain path a quantised cache is widened as a whole at every step ({', '.join(widened)}): this "
            "takes time that the full cache does not need."
        )
    if len({one.path for one in views if one.path}) > 1:
        yield "Times on different paths compare the paths, not the kinds."


def turn_tables(report: Report) -> list[Table]:
    """Return the times and bytes of a conversation: a row for each turn, a column for each way."""
    found, titles = [], {"first_token_seconds": "Time to first token, s", "cache_bytes": "Bytes of the KV cache, MB"}
    for name, title in titles.items():
        shown = {f"{who}, {way}": rows for (who, way), rows in ways_of(report).items() if rows[-1].get(name)}
        figures = [[written(row, name).partition(" (")[0] for row in rows] for rows in shown.values()]
        turns = [
            [str(row["turn"] + 1), f"{row['history']:,}", str(row["new"])] for row in next(iter(shown.values()), [])
        ]
        rows = [[*turn, *own] for turn, own in zip(turns, zip(*figures, strict=True), strict=True)]
        found.append(Table(title, ["turn", "tokens before it", "new tokens", *shown], rows))
    return found


def ways_of(report: Report) -> dict[tuple[str, str], list[Row]]:
    """Return the turns of each way of feeding the conversation, by (engine or path, way)."""
    found: dict[tuple[str, str], list[Row]] = {}
    views = cell_views(report)
    for row in sorted(rows_of(report, "turn"), key=lambda row: (row["cell"], row["turn"])):
        found.setdefault((views[row["cell"]].runs_on, row["way"]), []).append(row)
    return found


# ---- what follows ----------------------------------------------------------------------------------------------------


def saved_tables(report: Report) -> list[Table]:
    """Return what the cache saves in each pair of cells, and how much faster ours is than peers."""
    highest = [words for words in [peak_sentence(report)] if words]
    found = [view("What the cache saves", SAVED_COLUMNS, saved(report), highest), _engines_table(report)]
    return [table for table in found if table]


def _engines_table(report: Report) -> Table:
    views = [one for one in in_table_order(cell_views(report)) if one.row.get("tokens_per_second")]
    ours = {_work_on(one, one.path): one.row["tokens_per_second"] for one in reversed(views) if one.is_ours}
    paths, rows = list(dict.fromkeys(one.path for one in views if one.is_ours)), []
    for one in (one for one in views if paths and not one.is_ours):
        rates = [ours.get(_work_on(one, path)) for path in paths]
        theirs = one.row["tokens_per_second"]
        rows.append([one.label, *(NOT_MEASURED if rate is None else f"{rate / theirs:.2f}x" for rate in rates)])
    note = "their time over ours, same batch size and mode: above 1 ours is faster; weights are as named"
    return Table("How many times faster ours is, by path", ["than", *paths], rows, [note])


def _work_on(one: CellView, path: str) -> tuple[Any, ...]:
    return one.cell.workload, path, one.row.get("setup")


def step_tables(report: Report) -> list[Table]:
    """Return how the speed-up of a table grows, from which context the cache pays, and the times of steps."""
    timed, found = step_pairs(report), crossovers(report)
    path = "".join(f", {path}" for path in {row.get("path", "plain") for row in timed} - {"plain"})
    return [
        view("Speed-up against generation length", GROWTH_COLUMNS, growth(report)),
        view(f"Where the cache begins to pay{path}", ("batch_size", "pays_from"), found),
        view("Time of a step", STEP_COLUMNS, timed if found else []),
    ]


def ledger_table(one: CellView) -> Table:
    """Return predicted against measured memory, line by line; no lines if the engine does not show its tensors."""
    peak, resident = one.line("peak"), one.line("resident")
    if peak is None:
        return Table(f"Memory ledger: {NOT_MEASURED}")
    rows: list[dict[str, Any]] = []
    for line in (line for line in one.memory if line is not resident):
        measured = line.get("measured_bytes")
        residual = None if measured is None else measured - line["predicted_bytes"]
        rows.append({**line, "residual_bytes": residual})
    noted = [line for line in one.memory if line.get("note") and line is not peak]
    notes = [f"{peak_words(one)}.", *(f"{line['name']}: {line['note']}" for line in noted)]
    if peak.get("measured_bytes") is not None:
        notes.append(f"Measured peak: {peak.get('note', '')}")
    if resident is not None and (most := resident.get("measured_bytes")) is not None:
        before = resident["before_bytes"]
        shown = [f"{nbytes / MB:.2f} MB" for nbytes in (most, before, most - before - peak["predicted_bytes"])]
        notes.append(
            f"Resident memory of the process: {shown[0]} at most, {shown[1]} before the model was there; beyond that "
            f"and the prediction: {shown[2]}"
        )
    names = ("name", "predicted_bytes", "measured_bytes", "residual_bytes", "counts")
    return view(f"Memory ledger, peak at: {peak['moment']}", names, rows, notes)


def work_lines(one: CellView) -> list[str]:
    """Return the work of the job, and how near the machine came to its best rates."""
    row = one.row
    if row.get("flops") is None:
        fed = row.get("token_forwards")
        return [f"Work: {NOT_MEASURED if fed is None else f'{fed:,} token-forwards'}"]
    lines = [
        f"Work: {row['token_forwards']:,} token-forwards, {_flops(row['flops'])}, {size(row['read_bytes'])} to read",
        f"Work of the prefill: {_flops(row['prefill_flops'])}",
        f"Work of the middle step: {_flops(row['step_flops'])}, {size(row['step_read_bytes'])} to read",
    ]
    if row.get("bound_by") is None:
        return [*lines, f"Limits: {NOT_MEASURED}"]
    shares = row["prefill_flops_share"], row["step_flops_share"], row["step_bandwidth_share"]
    own = "; the best rate that was seen is this cell's own" if 1.0 in shares else ""
    prefill, step, read = (f"{share:.1%}" for share in shares)
    return [
        *lines,
        f"The prefill reaches {prefill} of the best matrix rate that was seen",
        f"The middle step reaches {step} of that rate and {read} of the best read bandwidth{own}",
        f"The middle step is bound by: {row['bound_by']}",
    ]


def _flops(count: float) -> str:
    for unit, scale in (("TFLOP", 1e12), ("GFLOP", 1e9)):
        if count >= scale:
            return f"{count / scale:,.2f} {unit}"
    return f"{count / 1e6:,.2f} MFLOP"


def how_measured(report: Report) -> str:
    """Return how to measure what the budget left out."""
    flag = "minutes" if report["command"].startswith("llama-kv report") else "budget"
    whose = "the command of that run" if report["preset"] == "merged" else "the same command"
    return f"{whose} with --resume and --{flag} 0 measures it"


def check_mark(check: Row) -> str:
    """Return the status of a check, in capitals if a reader must not miss it."""
    return str(MARKS.get(check["status"], check["status"]))


def check_words(check: Row) -> str:
    """Return the name of a check and what was seen."""
    return f"{check['name']}: {check['detail']}" if check.get("detail") else str(check["name"])


def validity_table(report: Report) -> Table:
    """Return a row for each cell and a column for each check."""
    views = [one for one in in_table_order(cell_views(report)) if one.checks]
    names = list(dict.fromkeys(check["name"] for one in views for check in one.checks))
    seen = [{check["name"]: check_mark(check) for check in one.checks} for one in views]
    rows = [[one.label, *(own.get(name, NOT_OBSERVED) for name in names)] for one, own in zip(views, seen, strict=True)]
    return Table("What was seen in each cell", ["cell", *names], rows)


def on_or_off(kv_caching: bool) -> str:
    return "on" if kv_caching else "off"


def comparison_words(row: Row) -> str:
    """State that the tokens with the cache equal those without it, or where they diverge."""
    if row["equal"]:
        return f"the same {row['tokens']} tokens"
    if row.get("divergence_token") is None:
        return "other tokens"
    words = (
        f"other tokens from token {row['divergence_token']} of row {row['divergence_row']} on "
        f"({row['cached_id']} with it, {row['uncached_id']} without)"
    )
    margin = row.get("margin")
    return words if margin is None else f"{words}, where the two largest logits differ by {margin:.2g}"


def environment_table(report: Report) -> Table:
    """Return where the figures come from: command, machine, versions, model and measured ceilings, a row each."""
    rows = [["command", report["command"]], ["started", report["started"]]]
    if report["budget_minutes"] is not None:
        rows.append(["budget", f"{report['budget_minutes']:g} minutes"])
    whole = [cell["kv_cache"] for cell in report["cells"]]
    if from_files := [kind for kind, name in zip(whole, kind_names(report), strict=True) if kind != name]:
        rows.append(["kinds from files", ", ".join(dict.fromkeys(from_files))])
    rows += [[f"model {name}".removesuffix(" name"), value] for name, value in _named(report["model"] or {})]
    rows += _named(report["environment"])
    if (ceilings := report["ceilings"]) is not None:
        read = f"{ceilings['read_bytes_per_second'] / 1e9:.1f} GB/s (10^9 bytes), by {ceilings['read_by']}"
        flops = f"{_flops(ceilings['flops_per_second'])}/s in {ceilings['dtype']}, by {ceilings['flops_by']}"
        rows += [["best read bandwidth that was seen", read], ["best matrix rate that was seen", flops]]
    return Table("Machine, versions and model", ["what", "value"], rows)


def setups_table(report: Report) -> Table:
    """Return in what the setups of a merged report differ, a row each."""
    setups = report["plan"].get("setups", [])
    if len(setups) < 2:
        return Table("")
    rows = [[str(number), *map(_words, setup.values())] for number, setup in enumerate(setups, 1)]
    return Table("Setups", ["setup", *(name.replace("_", " ") for name in setups[0])], rows)


def _named(values: dict[str, Any]) -> list[list[str]]:
    """Return (name, value) as text of each value that is not None: no underscores, and sizes with a unit."""
    rows = []
    for key, value in values.items():
        name = str(key).replace("_", " ")
        if name.endswith(" bytes") and isinstance(value, int):
            rows.append([name.removesuffix(" bytes"), size(value)])
        elif value is not None:
            rows.append([name, _words(value)])
    return rows


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(" ".join(pair) for pair in _named(value)) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(map(_words, value))
    return column("").write(value)
