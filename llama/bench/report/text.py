"""A report as text: a cell for the terminal, tables in Markdown, figures in CSV.

Knows nothing of how they were measured.
"""

import csv
import io
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from llama.bench.cell import rounding_of
from llama.bench.report.contents import report_sections, result_tables
from llama.bench.report.tables import (
    NOISY,
    NOT_MEASURED,
    NOT_OBSERVED,
    Table,
    agreements,
    alarms,
    byline,
    deaths,
    disturbances,
    fate,
    fit_name,
    ledger_table,
    median,
    megabytes,
    on_or_off,
    point_mark,
    point_words,
    rate,
    title,
    work_lines,
)
from llama.bench.schema import Caches, CellRecord, Chats, KindRecord, Report, Spread, StepTimes, Summary, Sweep
from llama.bench.statistics import percentiles
from llama.costs import table


def cell_text(record: CellRecord, threads: int | None = None) -> str:
    """Return one cell for the terminal: what was asked for and came of it, memory, work and validity.

    `threads` are those that computed.
    """
    cell, summary, ledger = record["cell"], record["summary"], ledger_table(record)
    first = [
        f"Batch size: {cell['batch_size']}",
        f"Input length: {cell['input_len']} tokens",
        f"Output length: {cell['output_len']} tokens",
    ]
    blocks = [first]
    if any(point["status"] == "disturbed" for point in record["points"]):
        first.insert(0, NOISY)
    if summary is None:
        first.append(f"This cell: {fate(record)}")
    else:
        first += [
            f"Inference time: {summary['seconds']['median']:.2f} seconds",
            f"Tokens per second: {summary['tokens_per_second']:.2f}",
            f"Model weights memory usage: {megabytes(record['weights_bytes'])}",
            f"Peak memory usage: {megabytes(median(summary['peak_bytes']))}",
        ]
        # The text of the first row; what could steer a terminal is shown as an escape instead.
        text = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in record["text"])
        blocks += [["=== Sample Output ===", text], _more_figures(record, summary, threads)]
        blocks += [_aligned(ledger) if ledger else [f"Memory ledger: {NOT_MEASURED}"], work_lines(record)]
    points = [f"  {point_mark(point):<{len(NOT_OBSERVED)}}  {point_words(point)}" for point in record["points"]]
    blocks += [["Validity", *points]] if points else []
    blocks += [["Notes", *(f"  {note}" for note in record["notes"])]] if record["notes"] else []
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def _more_figures(record: CellRecord, summary: Summary, threads: int | None) -> list[str]:
    cell, count = record["cell"], summary["seconds"]["n"]
    kind = cell["kv_cache"] if cell["engine"] == "llama" else "its own"
    kind = f"on ({kind})" if cell["kv_caching"] else "off"
    return [
        "Peak memory: the bytes in tensors",
        f"Peak resident memory of the process: {megabytes(median(summary['resident_bytes']))}",
        *(_cuda_lines(record) if cell["device"].startswith("cuda") else []),
        f"KV cache: {kind}, {megabytes(record['cache_bytes'], 'bytes ' + NOT_OBSERVED)}",
        f"Engine: {cell['engine']} ({record['path']}), {cell['model']} in {cell['dtype']} on {cell['device']}"
        + (f", threads: {threads}" if threads and cell["device"] == "cpu" else ""),
        f"Repetitions: {count} ({'times are medians' if count > 1 else 'a single one: no spread'})",
        f"Inference time: {_timed(summary['seconds'], 1, 2, 'seconds')}",
        f"Time to first token: {_timed(summary['first_token_seconds'], 1, 3, 'seconds')}",
        f"Time per output token: {_timed(summary['step_seconds'], 1e3, 2, 'ms')}",
        f"Prefill: {rate(summary['prefill_tokens_per_second'])} tokens/s "
        "(batch size x input length / median time to first token)",
        f"Decode: {rate(summary['decode_tokens_per_second'])} tokens/s "
        "(batch size x (output length - 1) / median time after the first token)",
    ]


def _timed(figure: Spread | None, scale: float, digits: int, unit: str) -> str:
    if figure is None:
        return NOT_MEASURED
    middle, low, high = (f"{figure[key] * scale:.{digits}f}" for key in ("median", "p10", "p90"))
    between = f"p10 {low}, p90 {high}, " if figure["n"] > 1 else ""
    return f"{middle} {unit} ({between}n = {figure['n']})"


def _cuda_lines(record: CellRecord) -> list[str]:
    samples = record["samples"]
    reserved = [one["peak_reserved_bytes"] for one in samples if one["peak_reserved_bytes"] is not None]
    device = [one["device_bytes"] for one in samples if one["device_bytes"] is not None]
    return [
        f"Peak memory reserved by the allocator: {megabytes(max(reserved, default=None))}",
        f"Taken of the device since before the model: {megabytes(max(device, default=None))}",
    ]


def _aligned(shown: Table) -> list[str]:
    lines = [list(shown.heads), *map(list, shown.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [
        "  ".join([line[0].ljust(widths[0]), *(text.rjust(w) for text, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    return [shown.title, *(f"  {row.rstrip()}" for row in rows), *(f"  {note}" for note in shown.notes)]


def table_markdown(report: Report) -> str:
    """Return the with/without table, the faster paths in tables of their own, and what cache and paths save.

    One that was disturbed says so first.
    """
    first = [f"{NOISY}\n"] if disturbances(report) else []
    return "\n".join([*first, *map(markdown, result_tables(report))])


def report_markdown(report: Report) -> str:
    """Return the whole report, what follows from the figures first."""
    lines = [f"**{mark}** {_safe(line)}" for mark, line in alarms(report)] + [f"**{_safe(x)}**" for x in deaths(report)]
    parts = [f"# {title(report)}", " · ".join(map(_safe, byline(report))), *lines, *map(_safe, report["reading"])]
    shown = [one for one in report_sections(report) if one.parts]
    for parent, group in groupby(shown, key=lambda one: one.parent):
        parts += [f"## {_safe(parent)}"] if parent else []
        for section in group:
            parts += [f"##{'#' * bool(parent)} {_safe(section.name)}"]
            parts += [markdown(part) if isinstance(part, Table) else _listed(part) for part in section.parts]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def alarms_text(report: Report) -> list[str]:
    """Return what a reader must not miss, for the terminal: violations, and what has no figures."""
    return [f"{mark} {line}" for mark, line in alarms(report)] + deaths(report)


def markdown(shown: Table) -> str:
    """Return one table, with its notes under it."""
    rows = [[_safe(text) for text in row] for row in shown.rows]
    drawn = table(f"**{_safe(shown.title)}**", [_safe(head) for head in shown.heads], rows)
    return f"{drawn}\n{_listed(shown.notes)}" if shown.notes else drawn


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {_safe(line)}" for line in lines) + "\n"


def _safe(text: str) -> str:
    """Return a text that can neither end a cell of a table nor begin a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def report_csv(report: Report) -> str:
    """Return the figures as CSV: a row per cell, per step time and per part of a sweep, told apart by `figures`.

    A figure that was not measured is an empty field.
    """
    disturbed = "yes" if disturbances(report) else ""  # other figures of the report are no better than its cells
    caches, chat = report.get("caches"), report.get("chat")  # whose cells have rows of their own
    if caches is not None:
        rows = _cache_rows(caches)
    else:
        agreed = agreements(report)
        cells = [
            _cell_row(record) | {"top1_agreement": agreed.get(rounding_of(record["cell"]))}
            for record in report["cells"]
        ]
        rows = cells if chat is None else _chat_rows(report, chat)
    rows += [_step_row("crossover", step) for one in report["crossovers"] for step in one["steps"]]
    rows += _sweep_rows(report["sweep"]) if report["sweep"] is not None else []
    whole = {"disturbed": disturbed, "threads": report["environment"].get("threads")}
    rows = [{"figures": row["figures"], **whole, **row} for row in rows]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _cell_row(record: CellRecord) -> dict[str, Any]:
    cell, summary, work, ledger = record["cell"], record["summary"], record["work"], record["ledger"]
    asked = (
        "batch_size",
        "input_len",
        "output_len",
        "engine",
        "fast",
        "quantize",
        "activations",
        "model",
        "kv_cache",
        "logits",
    )
    row: dict[str, Any] = {"figures": "cell", "kv_caching": on_or_off(cell["kv_caching"]), "path": record["path"]}
    row |= {key: cell[key] for key in (*asked, "device", "dtype")}
    if summary is not None:
        row |= _spread_row("time", "s", summary["seconds"])
        row |= _spread_row("first_token", "s", summary["first_token_seconds"])
        row |= _spread_row("step", "s", summary["step_seconds"])
        row |= _spread_row("tensor_peak", "bytes", summary["peak_bytes"])
        row |= _spread_row("resident_peak", "bytes", summary["resident_bytes"])
        row |= {key: rate for key, rate in summary.items() if key.endswith("tokens_per_second")}
    row |= {key: record[key] for key in ("weights_bytes", "cache_bytes", "error")}
    row["predicted_tensor_peak_bytes"] = None if ledger is None else ledger["predicted_peak"]
    row |= {} if work is None else {"token_forwards": work["token_forwards"], "flops": work["flops"]}
    seen = [point["status"] for point in record["points"]]
    return row | {"violated_points": seen.count("violated"), "disturbed": "yes" if "disturbed" in seen else ""}


def _spread_row(name: str, unit: str, figure: Spread | None) -> dict[str, Any]:
    if figure is None:
        return {}
    values = {f"{name}_{key}_{unit}": figure[key] for key in ("median", "p10", "p90")}
    return {f"{name}_n": figure["n"], **values}


def _step_row(figures: str, step: StepTimes) -> dict[str, Any]:
    row = {"figures": figures, "kv_caching": on_or_off(step["kv_caching"]), "batch_size": step["batch_size"]}
    return row | {"context_tokens": step["context"]} | _spread_row("step", "s", step["seconds"])


def _cache_rows(caches: Caches) -> list[dict[str, Any]]:
    """Return a row of each kind's quality, and one of its bytes and step time at each context."""
    rows: list[dict[str, Any]] = []
    for record in caches["kinds"]:
        rows.append({"figures": "kind", "kv_cache": record["kind"], **_quality_row(record)})
        for held in record["bytes"]:
            sizes = {"cache_bytes": held["measured"], "predicted_cache_bytes": held["predicted"]}
            length = {"context_tokens": held["length"]}
            rows.append({"figures": "kind by context", "kv_cache": record["kind"], **length, **sizes})
            times = [step for step in record["steps"] if step["context"] == held["length"]]
            rows[-1] |= {"path": record["path"]} | (_spread_row("step", "s", times[0]["seconds"]) if times else {})
    return rows


def _chat_rows(report: Report, chat: Chats) -> list[dict[str, Any]]:
    """Return a row for each turn of each way, one for each way of the prompts, and one for each session on disk."""
    rows: list[dict[str, Any]] = []
    for cell, record in zip(report["cells"], chat["records"], strict=True):
        plan, is_conversation = chat["plan"], cell["cell"]["batch_size"] == 1
        turns: list[dict[str, Any]] = [{"shared": plan["shared"], "own": plan["own"]}]
        if is_conversation:
            turns = [{"turn": place, **turn} for place, turn in enumerate(plan["turns"], 1)]
        asked = {
            key: cell["cell"][key]
            for key in ("batch_size", "engine", "fast", "quantize", "activations", "model", "kv_cache")
        }
        own = {"figures": "turn" if is_conversation else "prompts", "path": record["path"], **asked}
        for way in record["ways"]:
            for place, turn in enumerate(turns):
                seen = {"tokens_fed": way["fed"][place], "cache_bytes": way["cache_bytes"][place]}
                times = _spread_row("first_token", "s", percentiles(way["seconds"][place]))
                rows.append({**own, "way": way["name"], **turn, **seen, **times})
        if (disk := record["disk"]) is not None:
            rows.append({**own, "figures": "disk", "history": disk["tokens"], "file_bytes": disk["file_bytes"]})
            for name, seconds in (("save", disk["save_seconds"]), ("load", disk["load_seconds"]),
                                  ("feed", disk["feed_seconds"])):  # fmt: skip
                rows[-1] |= _spread_row(name, "s", percentiles(seconds))
    return rows


def _quality_row(record: KindRecord) -> dict[str, Any]:
    quality = record["quality"]
    row: dict[str, Any] = {"lossless": record["lossless"], "error": record["error"]}
    if quality is None:
        return row
    plain = ("path", "tokens", "mean_kl", "top1_agreement", "reference_nll", "nll", "greedy_tokens")
    row |= {name: value for name, value in quality.items() if name in plain}
    row |= {f"cache_bytes_{one['length']}": one["measured"] for one in quality["bytes"]}
    if quality["parting"] is not None:
        row |= {f"parting_{name}": quality["parting"][name] for name in ("token", "margin")}
    needles = {f"needles_{one['length']}": one["found"] / one["tries"] for one in quality["needles"]}
    return row | needles


def _sweep_rows(sweep: Sweep) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for one in sweep["growth"]:
        for mode, seconds in (("on", one["cached_seconds"]), ("off", one["uncached_seconds"])):
            row = {"figures": "generation length", "kv_caching": mode, "generated_tokens": one["generated"]}
            rows.append(row | _spread_row("time", "s", seconds) | {"speedup": one["speedup"]})
    for length in sweep["cache"]:
        sizes = {"cache_bytes": length["measured"], "predicted_cache_bytes": length["predicted"]}
        rows.append({"figures": "cache size", "length_tokens": length["length"], **sizes})
    rows += [_step_row("context", step) for step in sweep["contexts"]]
    rows += [_step_row("batch", step) for step in sweep["batches"]]
    for fit in sweep["fits"]:
        line = {"base_s": fit["base"], "slope_s_per_token": fit["slope"], "exponent": fit["exponent"]}
        beside = {"predicted_slope_s_per_token": fit["predicted_slope"], "r_squared": fit["r_squared"]}
        rows.append({"figures": f"fit: {fit_name(fit)}", **line, **beside})
    return rows
