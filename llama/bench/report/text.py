"""A report as text: a cell for the terminal, tables in Markdown, figures in CSV."""

import csv
import io
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from llama.bench.cell import FULL
from llama.bench.report.cells import cell_views
from llama.bench.report.columns import Column, Table, column, written
from llama.bench.report.contents import (
    NOISY,
    alarms,
    byline,
    cell_table,
    check_lines,
    is_noisy,
    left_out,
    machine_line,
    noise,
    report_sections,
    title,
)
from llama.bench.report.derived import growth
from llama.bench.report.sentences import headline
from llama.bench.report.tables import figure_tables, on_or_off, paper_tables, repetitions, saved_tables
from llama.bench.schema import KEYS, REPEATED, Report
from llama.bench.statistics import spread
from llama.costs import MB, table

LATEX = {char: f"\\{char}" for char in "&%$#_{}"} | {
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"},
}
CELL_COLUMNS = (
    *("seconds", "first_token_seconds", "step_seconds", "prefill_tokens_per_second", "decode_tokens_per_second"),
    *("tensor_peak_bytes", "resident_peak_bytes", "cache_bytes", "token_forwards"),
)


def cell_text(report: Report, index: int) -> str:
    """Return one cell for the terminal: what was asked for and measured, its text, and its part of the report."""
    view = cell_views(report)[index]
    cell, row = view.cell, view.row
    lines = [NOISY] if any(check["status"] == "noisy" for check in view.checks) else []
    lines += [f"Batch size: {cell.batch_size}", f"Input length: {cell.input_len} tokens"]
    lines.append(f"Output length: {cell.output_len} tokens")
    if row.get("seconds"):
        lines += [row["error"]] if row.get("error") else []  # a repetition, or the other mode
        # The text of the first row; control characters that could steer a terminal are shown as escapes.
        text = "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in row.get("text", ""))
        count = report["environment"].get("threads") if cell.device == "cpu" else None
        threads = f", threads: {count}" if count else ""
        kind = cell.kv_cache if view.is_ours or cell.kv_cache != FULL else "its own"
        names = [*CELL_COLUMNS, *("proposed", "accepted") * bool(cell.speculate)]
        in_megabytes = Column("", scale=1 / MB, form=".2f", unit=" MB").write
        lines += [
            f"Inference time: {view.median('seconds'):.2f} seconds",
            f"Tokens per second: {row['tokens_per_second']:.2f}",
            f"Model weights memory usage: {in_megabytes(row.get('weights_bytes'))}",
            f"Peak memory usage: {in_megabytes(view.median('tensor_peak_bytes'))}",
            *(("", "=== Sample Output ===", text, "") if cell.text is not None else ()),  # not of random ids
            f"KV cache: {f'on ({kind})' if cell.kv_caching else 'off'}",
            f"Engine: {cell.engine} ({view.path}), {cell.model} in {cell.dtype} on {cell.device}{threads}",
            *(f"{column(name).head}: {written(view.row, name)}" for name in names),
            f"n: {repetitions(cell, row)}; in brackets: p10 and p90",
        ]
    below = [cell_table(view), Table("Validity", notes=check_lines(view)), Table("Notes", notes=row.get("notes", []))]
    return "\n".join([*lines, "", *(markdown(table) for table in below if table)])


def table_markdown(report: Report) -> str:
    """Return the tables for the terminal in Markdown, and the line about the machine behind them."""
    shown = [*figure_tables(report), *saved_tables(report)]
    return "\n".join([*map(markdown, shown), f"{machine_line(report)}\n"])


def report_markdown(report: Report, pictures: Collection[str] = ()) -> str:
    """Return the whole report, the result first; `pictures` are the names of those in the folder plots/."""
    parts = [f"# {title(report)}", " · ".join(map(_safe, byline(report)))]
    parts += [f"**{mark}** {_safe(line)}" if mark else f"**{_safe(line)}**" for mark, line in alarms(report)]
    parts += [" · ".join(f"**{_safe(number)}** ({_safe(words)})" for number, words in headline(report))]
    parts += [*map(markdown, figure_tables(report)[:1]), _safe(machine_line(report)), *map(_safe, report["reading"])]
    parts = [part for part in parts if part]
    if report["preset"] == "report":
        parts += ["## In my own words", "(Replace this line.)"]
    for section in report_sections(report):
        shown = [f"![{name}](plots/{name}.png)" for name in pictures if name.partition("-")[0] in section.pictures]
        shown += map(markdown, section.tables)
        parts += [f"## {_safe(section.name)}", *shown] if shown else []
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def warnings_text(report: Report) -> list[str]:
    """Return what a reader must not miss, for the terminal: violations, dead cells, noise, and what was left out."""
    return [*(f"{mark} {line}".strip() for mark, line in alarms(report)), *noise(report), *left_out(report)]


def markdown(shown: Table) -> str:
    """Return one table, with its notes below, or the code or the notes that stand in its place."""
    if shown.code:
        return f"{_safe(shown.title)}:\n\n```python\n{shown.code}\n```\n"
    if not shown.heads:
        return f"**{_safe(shown.title)}**\n\n{_listed(shown.notes)}" if shown.title else _listed(shown.notes)
    rows = [[_safe(text) for text in row] for row in shown.rows]
    drawn = table(f"**{_safe(shown.title)}**", [_safe(head) for head in shown.heads], rows)
    return f"{drawn}\n{_listed(shown.notes)}" if shown.notes else drawn


def report_latex(report: Report) -> str:
    """Return the figures of quality against bytes as tables of LaTeX, for the package booktabs; "" without any."""
    made = []
    for shown in paper_tables(report):
        lines = [" & ".join(map(_latex, row)) + r" \\" for row in [shown.heads, *shown.rows]]
        begin = rf"\begin{{tabular}}{{{'l' * len(shown.heads)}}}"
        made.append("\n".join([f"% {_latex(shown.title)}", begin, r"\toprule", lines[0], r"\midrule", *lines[1:],
                               r"\bottomrule", r"\end{tabular}", ""]))  # fmt: skip
    head = [f"% {' '.join(line.split())}" for line in ["needs booktabs", report["command"], *byline(report)]]
    return "\n".join([*head, *made]) if made else ""


def _latex(text: str) -> str:
    """Return a text whose characters all stand for themselves in LaTeX; the minus of a number is one."""
    shown = "".join(LATEX.get(char, char) for char in " ".join(text.split()))
    return re.sub(r"(^|\(|to )-(?=\d)", r"\1$-$", shown)


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {_safe(line)}" for line in lines) + "\n"


def _safe(text: str) -> str:
    """Return a text that can neither end a cell of a table nor begin a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def report_csv(report: Report) -> str:
    """Return the rows as CSV, with what their cell asked for, then the growth.

    Repeated columns are written as median, p10, p90, p99 and n. A missing measurement is an empty field.
    """
    views = cell_views(report)
    whole = {"noisy": "yes" if is_noisy(report) else "", "threads": report["environment"].get("threads")}
    rows = []
    for row in (one for one in report["rows"] if one["figures"] in KEYS and one["figures"] not in ("check", "memory")):
        view = views[row["cell"]]
        violated = sum(check["status"] == "violated" for check in view.checks)
        rows.append({"figures": "", **whole, **_flat(view.cell.as_json()), "violated_checks": violated, **_flat(row)})
    rows += [{**whole, **_flat(row)} for row in growth(report)]
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
            flat |= {f"{name}_{key}": figure[key] for key in ("median", "p10", "p90", "p99", "n")}
        elif name == "kv_caching" and isinstance(value, bool):
            flat[name] = on_or_off(value)
        elif not isinstance(figure, list) and name not in ("text", "cell", "threads"):
            flat[name] = figure
    return flat
