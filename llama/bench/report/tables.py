"""The tables of a report: their rows and columns.

Knows nothing of Markdown, HTML or of how anything was measured.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from llama.bench.cell import Cell
from llama.bench.report.cells import CellView, cell_views, in_table_order, kind_names
from llama.bench.report.columns import (
    NOT_JUDGED,
    NOT_MEASURED,
    NOT_OBSERVED,
    Table,
    column,
    view,
    written,
)
from llama.bench.report.derived import crossovers, growth, saved, step_pairs
from llama.bench.report.peak import peak_sentence, peak_words
from llama.bench.report.tasks import mean_interval, task_table
from llama.bench.schema import Report, Row, cell_of, measured_rows, rows_of
from llama.bench.statistics import LEAST_SAMPLES
from llama.costs import MB, size

MARKS = {"violated": "VIOLATED", "noisy": "NOISY"}

REPORT_COLUMNS = ("seconds", "first_token_seconds", "tensor_peak_bytes", "cache_bytes", "token_forwards", "n")
CELL_COLUMNS = (
    *("seconds", "first_token_seconds", "step_seconds", "prefill_tokens_per_second", "decode_tokens_per_second"),
    *("tensor_peak_bytes", "resident_peak_bytes", "cache_bytes", "token_forwards", "n"),
)
GUESS_COLUMNS = ("proposed", "accepted")
SAVED_COLUMNS = ("cell", "less_work", "times_faster", "steps_faster", "more_bytes", "bound_on", "bound_off", "n")
STEP_COLUMNS = ("batch_size", "context", "on", "off", "times_faster", "n")
GROWTH_COLUMNS = ("batch_size", "generated", "on_s", "off_s", "times_faster", "n")
QUALITY_COLUMNS = ("top1_agreement", "mean_kl", "perplexity", "greedy_text")
KIND_COLUMNS = ("kind", "path", "cache_bytes", "of_full", "step_seconds", *QUALITY_COLUMNS)
PROMPT_COLUMNS = ("computed_by", "beginning", "first_token_seconds", "tokens_fed", "cache_bytes", "n")
DISK_COLUMNS = ("computed_by", "tokens", "file_bytes", "save_seconds", "load_seconds", "feed_seconds", "n")


def result_tables(report: Report) -> list[Table]:
    """Return the tables that a terminal shows."""
    found = [*cache_tables(report), *turn_tables(report), *prompt_tables(report), *cell_tables(report)]
    return [table for table in found if table]


def cell_tables(report: Report) -> list[Table]:
    """Return the with/without table, a row for each cell, and what compares the cells."""
    if report["preset"] in ("caches", "chat", "merged"):
        return []
    views = in_table_order(cell_views(report))
    cells, paths = [one.cell.as_json() for one in views], {one.path for one in views if one.path}
    always = {"batch_size", "kv_caching", "threads"}
    varying = [key for key in Cell.__dataclass_fields__ if key not in always and len({cell[key] for cell in cells}) > 1]
    agreed = {cell_of(report, row).rounding: row["top1_agreement"] for row in rows_of(report, "agreement")}
    names = ["batch_size", "kv_caching", "threads", *varying, *["path"] * (len(paths) > 1)]
    names += [*["top1_as_fp32"] * bool(agreed), *CELL_COLUMNS]
    names[-1:-1] = GUESS_COLUMNS * any(one.cell.speculate for one in views)
    names = [*names[:2], *REPORT_COLUMNS] if report["preset"] == "report" else names
    rows: list[dict[str, Any]] = []
    for one, cell in zip(views, cells, strict=True):
        share = agreed.get(one.cell.rounding)
        rounded = NOT_MEASURED if share is None else f"{share:.2%}"
        own = {"top1_as_fp32": "not rounded" if cell["quantize"] is None else rounded, "n": repetitions(one)}
        row = {**cell, **one.row, **own, "threads": report["environment"].get("threads")}
        if within := one.row.get("within"):
            row["seconds_range"] = one.median("seconds") / within, one.median("seconds") * within
        rows.append(row if row.get("seconds") else {**row, "seconds": one.outcome.partition(":")[0]})
    notes = [f"{one.label} {one.outcome}" for one in views if one.row.get("error")]
    if any(one.is_predicted for one in views):
        notes.append(
            "~ and predicted: the budget was too small to measure the cell. Its times follow from the measured speed "
            "of one row, their range from how much measured times vary, its bytes from the model's sizes."
        )
    highest = [words for words in [peak_sentence(report)] if words]
    saves = view("What the cache saves", SAVED_COLUMNS, saved(report), highest)
    return [view("Every cell", names, rows, notes), saves, _engines_table(report)]


def repetitions(one: CellView) -> str:
    """Return the number of repetitions of a cell and of the steps in all of them."""
    if one.is_predicted:
        return "predicted"
    later = sum(map(len, one.row.get("step_seconds", [])))
    what = "later tokens" if one.cell.speculate else "steps"
    return str(len(one.row.get("seconds", []))) + (f" ({later} {what})" if later else "")


def _engines_table(report: Report) -> Table:
    views = [one for one in in_table_order(cell_views(report)) if one.is_measured]
    ours = {(one.cell.workload, one.path): one.row["tokens_per_second"] for one in reversed(views) if one.is_ours}
    paths, rows = list(dict.fromkeys(one.path for one in views if one.is_ours)), []
    for one in (one for one in views if paths and not one.is_ours):
        rates = [ours.get((one.cell.workload, path)) for path in paths]
        theirs = one.row["tokens_per_second"]
        rows.append([one.label, *(NOT_MEASURED if rate is None else f"{rate / theirs:.2f}x" for rate in rates)])
    note = "their time over ours, same batch size and mode: above 1 ours is faster; weights are as named"
    return Table("How many times faster ours is, by path", ["than", *paths], rows, [note])


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


def check_mark(check: Row) -> str:
    """Return the status of a check, in capitals if a reader must not miss it."""
    return str(MARKS.get(check["status"], check["status"]))


def check_words(check: Row) -> str:
    """Return the name of a check and what was seen."""
    return f"{check['name']}: {check['detail']}" if check.get("detail") else str(check["name"])


def validity_table(report: Report) -> Table:
    """Return a row for each check and a column for each cell; of kinds of cache a row for each kind."""
    views = [one for one in in_table_order(cell_views(report)) if one.checks and report["preset"] != "merged"]
    names = dict.fromkeys(check["name"] for one in views for check in one.checks)
    seen = [{check["name"]: check_mark(check) for check in one.checks} for one in views]
    if report["preset"] == "caches":
        kinds = kind_names(report)
        marks = [[kinds[one.index], *map(checks.get, names)] for one, checks in zip(views, seen, strict=True)]
        rows = [[mark or NOT_OBSERVED for mark in row] for row in marks]
        return Table("Did each kind act?", ["kind", *names], rows)
    rows = [[name, *(checks.get(name, NOT_OBSERVED) for checks in seen)] for name in names]
    return Table("What was seen in each cell", ["check", *(one.label for one in views)], rows)


def step_tables(report: Report) -> list[Table]:
    """Return how the speed-up of a table grows, from which context the cache pays, and the times of steps."""
    timed, found = step_pairs(report), crossovers(report)
    path = "".join(f", {path}" for path in {row.get("path", "plain") for row in timed} - {"plain"})
    return [
        view("Speed-up against generation length", GROWTH_COLUMNS, growth(report)),
        view(f"Where the cache begins to pay{path}", ("batch_size", "pays_from"), found),
        view("Time of a step", STEP_COLUMNS, timed if found else []),
    ]


def cache_tables(report: Report) -> list[Table]:
    """Return a row for each kind of cache at one length, one for each context, and the scores of tasks."""
    if report["preset"] != "caches":
        return []
    names = kind_names(report)
    steps = [{**row, "kind": names[row["cell"]]} for row in rows_of(report, "step")]
    known = {row["kind"]: _as_text(row) for row in kind_rows(report)}
    kinds: list[dict[str, Any]] = [known.get(kind, {"kind": kind}) for kind in names]  # not measured: an empty row
    notes = [
        f"{row['kind']} does not store what its predicted_bytes says: {row['cache_bytes']:,} bytes at "
        f"{row['context']:,}, predicted {row['predicted_cache_bytes']:,}"
        for row in steps
        if not row.get("predicted") and row["cache_bytes"] != row["predicted_cache_bytes"]
    ]
    at = f" at {report['plan']['length']:,} tokens" if known else ""
    steps += [{"kind": kind} for kind in names if kind not in {row["kind"] for row in steps}]
    steps = [{**row, "path": "predicted"} if row.get("predicted") else row for row in steps]
    columns = ("kind", "context", "cache_bytes", "predicted_cache_bytes", "step_seconds", "path")
    return [
        view(f"Bytes, time and quality{at}", KIND_COLUMNS, kinds, list(_kind_notes(report))),
        view("Bytes and time by context", columns, steps, notes),
        task_table(report),
    ]


def kind_rows(report: Report) -> list[dict[str, Any]]:
    """Return a row for each kind of cache with all figures of one length; figures that are not judged say so.

    A predicted row has bytes alone. `of_full` is their share of the full cache's bytes, which are predicted if
    `full_predicted`.
    """
    full = next(iter(rows_of(report, "quality", 0)), None)
    found, names = [], kind_names(report)
    for row in sorted(rows_of(report, "quality"), key=lambda row: row["cell"]):
        shown: dict[str, Any] = {**row, "kind": names[row["cell"]], "cache_bytes": _stored_bytes(row)}
        shown["of_full"] = None if full is None else _stored_bytes(row) / _stored_bytes(full)
        shown["full_predicted"] = full is not None and bool(full.get("predicted"))
        found.append(shown | ({"judged": False} if row.get("predicted") else _quality_of(row)))
    return found


def _stored_bytes(row: Row) -> int:
    return int(row["predicted_cache_bytes" if row.get("predicted") else "cache_bytes"])


def _quality_of(row: Row) -> dict[str, Any]:
    """Return the columns of the quality of a kind that was measured."""
    if not row["judged"]:
        return {"judged": False, **dict.fromkeys(QUALITY_COLUMNS, NOT_JUDGED)}
    token, written = row.get("divergence_token"), row.get("greedy_tokens")
    text = None if written is None else f"same {written} tokens"
    if token is not None:
        text = f"differs at token {token}, margin {row['margin']:.2g}"
    return {"judged": True, "perplexity": math.exp(row["nll"]) if row["nll"] < 700 else math.inf, "greedy_text": text}


def _as_text(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `kind_rows` for a table, in which "~" marks predicted bytes and what is compared with them."""
    marked = ["cache_bytes"] * bool(row.get("predicted")) + ["of_full"] * (row["full_predicted"] or "predicted" in row)
    path = {"path": "predicted"} if row.get("predicted") else {}
    return {**row, **with_intervals(row), **{name: f"~{written(row, name)}" for name in marked}, **path}


def with_intervals(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the divergence and the perplexity of a judged row with their 95 % intervals, as text."""
    found = {}
    for name, blocks, of in (("mean_kl", "kls", float), ("perplexity", "nlls", math.exp)):
        ends = mean_interval(tuple(row.get(blocks) or ())) if row.get("judged") else None
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
    if any(row.get("predicted") for row in rows_of(report, "quality")):
        yield "~ and predicted: the budget was too small to measure the kind. Its bytes follow from the model's sizes."
    for row in measured_rows(report, "quality")[:1]:
        few = "" if len(row.get("kls", [])) >= LEAST_SAMPLES else " Too few for an interval."
        yield (
            f"Quality: the last {row['tokens']:,} of the first {row['context']:,} tokens of {report['plan']['text']}, "
            f"fed one by one, against the model without a cache.{few} Bytes and time are those of the last steps."
        )
    yield from share_note(kind_names(report))
    if not all(row["judged"] for row in measured_rows(report, "quality")):
        yield (
            f"{NOT_JUDGED}: at that length the kind has dropped or compressed nothing, so the text does not show what "
            "its savings cost; give a larger --budget, or a kind that stores less."
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


def ways_of(report: Report) -> dict[tuple[str, str], list[Row]]:
    """Return the turns of each way of feeding the conversation, by (engine or path, way)."""
    found: dict[tuple[str, str], list[Row]] = {}
    views = cell_views(report)
    turns = rows_of(report, "turn") if report["preset"] == "chat" else []
    for row in sorted(turns, key=lambda row: (row["cell"], row["turn"])):
        found.setdefault((views[row["cell"]].runs_on, row["way"]), []).append(row)
    return found


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


def prompt_tables(report: Report) -> list[Table]:
    """Return the table of prompts that begin alike, and the table of sessions on disk."""
    if report["preset"] != "chat":
        return []
    plan, views = report["plan"], cell_views(report)
    rows: list[dict[str, Any]] = []
    for row in (*rows_of(report, "prompts"), *rows_of(report, "disk")):
        n = len(row.get("first_token_seconds") or row["save_seconds"])
        rows.append({**row, "computed_by": views[row["cell"]].runs_on, "beginning": row.get("way"), "n": n})
    prompts, disks = ([row for row in rows if row["figures"] == figures] for figures in ("prompts", "disk"))
    title = f"{plan['rows']} prompts that share {plan['shared']:,} tokens, each with {plan['own']} of its own"
    return [view(title, PROMPT_COLUMNS, prompts), view("A session on disk", DISK_COLUMNS, disks)]


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
