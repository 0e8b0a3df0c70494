"""A report as text: a cell for the terminal, tables in Markdown, figures in CSV."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from llama.bench.report.cells import CellView, cell_views
from llama.bench.report.columns import NOT_MEASURED, NOT_OBSERVED, Table, column
from llama.bench.report.contents import NOISY, alarms, byline, deaths, is_noisy, report_sections, title
from llama.bench.report.derived import fits, growth
from llama.bench.report.tables import check_mark, check_words, ledger_table, on_or_off, result_tables, work_lines
from llama.bench.schema import KEYS, REPEATED, Report
from llama.bench.statistics import Spread, spread
from llama.costs import MB, table


def cell_text(report: Report, index: int) -> str:
    """Return one cell for the terminal: what was asked for and measured, memory, work and validity."""
    view = cell_views(report)[index]
    cell, row, ledger = view.cell, view.row, ledger_table(view)
    first = [
        f"Batch size: {cell.batch_size}",
        f"Input length: {cell.input_len} tokens",
        f"Output length: {cell.output_len} tokens",
    ]
    blocks = [first]
    if any(check["status"] == "noisy" for check in view.checks):
        first.insert(0, NOISY)
    if row.get("seconds"):
        first += [
            f"Inference time: {view.median('seconds'):.2f} seconds",
            f"Tokens per second: {row['tokens_per_second']:.2f}",
            f"Model weights memory usage: {_megabytes(row.get('weights_bytes'))}",
            f"Peak memory usage: {_megabytes(view.median('tensor_peak_bytes'))}",
        ]
        # The text of the first row; control characters that could steer a terminal are shown as escapes.
        text = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in row.get("text", ""))
        blocks += [["=== Sample Output ===", text], _more_figures(view, report["environment"].get("threads"))]
        blocks += [_aligned(ledger) if ledger else [f"Memory ledger: {NOT_MEASURED}"], work_lines(view)]
    else:
        first.append(f"This cell: {view.fate}")
    checks = [f"  {check_mark(check):<{len(NOT_OBSERVED)}}  {check_words(check)}" for check in view.checks]
    blocks += [["Validity", *checks]] if checks else []
    notes = row.get("notes", [])
    blocks += [["Notes", *(f"  {note}" for note in notes)]] if notes else []
    return "\n\n".join("\n".join(lines) for lines in blocks) + "\n"


def _megabytes(nbytes: float | None, missing: str = NOT_MEASURED) -> str:
    return missing if nbytes is None else f"{nbytes / MB:.2f} MB"


def _more_figures(view: CellView, threads: int | None) -> list[str]:
    cell, row, count = view.cell, view.row, len(view.row["seconds"])
    kind = cell.kv_cache if view.is_ours else "its own"
    kind = f"on ({kind})" if cell.kv_caching else "off"
    return [
        "Peak memory: the bytes in tensors",
        f"Peak resident memory of the process: {_megabytes(view.median('resident_peak_bytes'))}",
        f"KV cache: {kind}, {_megabytes(row.get('cache_bytes'), 'bytes ' + NOT_OBSERVED)}",
        f"Engine: {cell.engine} ({view.path}), {cell.model} in {cell.dtype} on {cell.device}"
        + (f", threads: {threads}" if threads and cell.device == "cpu" else ""),
        f"Repetitions: {count} ({'times are medians' if count > 1 else 'a single one: no spread'})",
        f"Inference time: {_timed(spread(row, 'seconds'), 1, 2, 'seconds')}",
        f"Time to first token: {_timed(spread(row, 'first_token_seconds'), 1, 3, 'seconds')}",
        f"Time per output token: {_timed(spread(row, 'step_seconds'), 1e3, 2, 'ms')}",
        f"Prefill: {column('prefill_tokens_per_second').write(row.get('prefill_tokens_per_second'))} tokens/s "
        "(batch size x input length / median time to first token)",
        f"Decode: {column('decode_tokens_per_second').write(row.get('decode_tokens_per_second'))} tokens/s "
        "(batch size x (output length - 1) / median time after the first token)",
    ]


def _timed(figure: Spread | None, scale: float, digits: int, unit: str) -> str:
    if figure is None:
        return NOT_MEASURED
    middle, low, high = (f"{value * scale:.{digits}f}" for value in (figure["median"], figure["p10"], figure["p90"]))
    between = f"p10 {low}, p90 {high}, " if figure["n"] > 1 else ""
    return f"{middle} {unit} ({between}n = {figure['n']})"


def _aligned(shown: Table) -> list[str]:
    lines = [shown.heads, *shown.rows]
    widths = [max(map(len, texts)) for texts in zip(*lines, strict=True)]
    rows = [
        "  "
        + "  ".join(
            f"{text:{'<' if i == 0 else '>'}{width}}" for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return [shown.title, *(row.rstrip() for row in rows), *(f"  {note}" for note in shown.notes)]


def table_markdown(report: Report) -> str:
    """Return the tables for the terminal in Markdown; those that were measured under load say so first."""
    first = [f"{NOISY}\n"] if is_noisy(report) else []
    return "\n".join([*first, *map(markdown, result_tables(report))])


def report_markdown(report: Report) -> str:
    """Return the whole report, what follows from the figures first."""
    lines = [f"**{mark}** {_safe(line)}" for mark, line in alarms(report)] + [f"**{_safe(x)}**" for x in deaths(report)]
    parts = [f"# {title(report)}", " · ".join(map(_safe, byline(report))), *lines, *map(_safe, report["reading"])]
    for section in (one for one in report_sections(report) if one.tables):
        parts += [f"## {_safe(section.name)}", *map(markdown, section.tables)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def alarms_text(report: Report) -> list[str]:
    """Return what a reader must not miss, for the terminal: violations, noise, and cells without figures."""
    return [f"{mark} {line}" for mark, line in alarms(report)] + deaths(report)


def markdown(shown: Table) -> str:
    """Return one table, with its notes below."""
    if not shown.heads:
        return f"**{_safe(shown.title)}**\n\n{_listed(shown.notes)}" if shown.title else _listed(shown.notes)
    rows = [[_safe(text) for text in row] for row in shown.rows]
    drawn = table(f"**{_safe(shown.title)}**", [_safe(head) for head in shown.heads], rows)
    return f"{drawn}\n{_listed(shown.notes)}" if shown.notes else drawn


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {_safe(line)}" for line in lines) + "\n"


def _safe(text: str) -> str:
    """Return a text that can neither end a cell of a table nor begin a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def report_csv(report: Report) -> str:
    """Return the rows as CSV, with what their cell asked for, then growth and fits.

    Repeated columns are written as median, p10, p90 and n. A missing measurement is an empty field.
    """
    views = {view.index: view for view in cell_views(report)}
    whole = {"noisy": "yes" if is_noisy(report) else "", "threads": report["environment"].get("threads")}
    rows = []
    for row in (one for one in report["rows"] if one["figures"] in KEYS and one["figures"] not in ("check", "memory")):
        view = views[row["cell"]]
        violated = sum(check["status"] == "violated" for check in view.checks)
        rows.append({"figures": "", **whole, **_flat(view.cell.as_json()), "violated_checks": violated, **_flat(row)})
    rows += [{**whole, **_flat(row)} for row in (*growth(report), *fits(report))]
    out = io.StringIO()
    writer = csv.DictWriter(
        out, list(dict.fromkeys(name for row in rows for name in row)), restval="", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as single values: of repeated figures their spread; ids, texts and notes are left out."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        figure = spread(row, name) if name in REPEATED else value  # type: ignore[arg-type]
        if isinstance(figure, dict):
            flat |= {f"{name}_{key}": figure[key] for key in ("median", "p10", "p90", "n")}
        elif name == "kv_caching" and isinstance(value, bool):
            flat[name] = on_or_off(value)
        elif not isinstance(figure, list) and name not in ("text", "cell", "threads"):
            flat[name] = figure
    return flat
