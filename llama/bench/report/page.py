"""A report as one page of HTML that needs nothing else: no script, no font, no picture from outside.

Knows nothing of how the figures were measured or drawn.
"""

import base64
from collections.abc import Sequence
from html import escape

from llama.bench.report.plots import as_svg, figures
from llama.bench.report.tables import (
    DEFINITIONS,
    NOT_MEASURED,
    Grid,
    byline,
    comparison_line,
    crossover_grids,
    deaths,
    environment_grid,
    fate,
    label,
    ledger_grid,
    megabytes,
    point_mark,
    point_words,
    remarks,
    sweep_grids,
    table_grids,
    title,
    validity_grid,
    violations,
    work_lines,
)
from llama.bench.schema import CellRecord, Report

# What a picture shows, for those who cannot see it.
_ALT = {
    "time": "Bars: time of the whole job with and without the KV cache, for each batch size",
    "memory": "Stacked bars: what the peak memory is made of, with and without the KV cache, for each batch size",
    "steps": "Lines: time of every step along the generation, with and without the KV cache",
    "crossover": "Lines: time of a step against the context, with and without the KV cache, and where they cross",
    "speedup": "Lines: time of the job, and how many times faster the cache makes it, against generated tokens",
    "cache": "Line and points: predicted and measured bytes of the KV cache against its length",
    "context": "Lines: time per token against the context, with and without the KV cache, with fitted lines",
    "batch": "Lines: tokens per second against the batch size, with and without the KV cache",
}

_STYLE = """
:root { --ink: #1f2933; --faint: #5b6875; --line: #e3e7ec; --soft: #f5f7f9; --paper: #fff; --on: #0072b2;
  --off: #b84e00; --bad: #b00020; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaee; --faint: #a3afbb; --line: #36404b; --soft: #20272f;
  --paper: #161b21; --on: #56b4e9; --off: #f0883e; --bad: #ff7b86; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: clamp(1.6rem, 5vw, 2.2rem); line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.3rem; margin: 2.8rem 0 .8rem; padding-top: 1.2rem; border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.6rem 0 .5rem; }
.byline { color: var(--faint); margin: 0 0 1.6rem; font-size: .95rem; }
.lead p { font-size: 1.12rem; margin: .7rem 0; max-width: 46em; }
.alarm { border-left: 4px solid var(--bad); background: var(--soft); color: var(--bad); padding: .7rem 1rem;
  margin: 1.2rem 0; border-radius: 0 6px 6px 0; }
.alarm p { margin: .2rem 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .6rem 0 .4rem; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { padding: .42rem .55rem; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); }
th { font-weight: 600; color: var(--faint); vertical-align: bottom; line-height: 1.25; border-bottom-width: 2px; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: nowrap; }
td small { display: block; color: var(--faint); white-space: nowrap; }
.wide table { font-size: .78rem; } .wide th, .wide td { padding: .4rem .28rem; }
.facts table { table-layout: fixed; } .facts th:first-child { width: 34%; }
.facts th, .facts td { text-align: left; overflow-wrap: anywhere; white-space: normal; }
th:first-child { white-space: normal; }
.on, .off, .bad { font-weight: 700; } .on { color: var(--on); } .off { color: var(--off); } .bad { color: var(--bad); }
.faint { color: var(--faint); }
ul { margin: .4rem 0; padding-left: 1.2rem; } li { margin: .15rem 0; overflow-wrap: anywhere; }
.notes { color: var(--faint); font-size: .88rem; }
figure { margin: 1.4rem 0; background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: .6rem;
  overflow-x: auto; }
figure img { display: block; width: 100%; min-width: 600px; height: auto; }
details { border: 1px solid var(--line); border-radius: 8px; margin: .6rem 0; padding: 0 1rem; }
summary { cursor: pointer; padding: .65rem 0; font-weight: 600; } details[open] { padding-bottom: .9rem; }
summary span { font-weight: 400; color: var(--faint); font-size: .9rem; }
pre { background: var(--soft); border-radius: 6px; padding: .8rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere;
  font: .85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
dl { display: grid; grid-template-columns: minmax(9em, 14em) 1fr; gap: .35rem 1rem; font-size: .92rem; }
dt { font-weight: 600; } dd { margin: 0; }
@media (max-width: 560px) { dl { display: block; } dd { margin: 0 0 .6rem; } main { padding-top: 1.4rem; } }
@media print { body { font-size: 11pt; } main { max-width: none; padding: 0; } h2, h3 { break-after: avoid; }
  figure, tr { break-inside: avoid; } figure, .scroll { overflow: visible; } figure img { min-width: 0; }
  table { font-size: 7.5pt; } th, td { padding: .25rem .3rem; }
  details:not([open])::details-content { content-visibility: visible; block-size: auto; } }
"""


def page(report: Report) -> str:
    """Return the report as one HTML page, complete in itself."""
    plots = {name: _picture(name, as_svg(figure)) for name, figure in figures(report).items()}
    body = "\n".join(part for part in [_top(report), *_results(report, plots), *_evidence(report)] if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(': '.join([title(report), *byline(report)[:1]]))}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _top(report: Report) -> str:
    alarms = [f"<p><b>VIOLATED</b> {escape(line)}</p>" for line in violations(report)]
    alarms += [f"<p>{escape(line)}</p>" for line in deaths(report)]
    alarm = f'<div class="alarm">{"".join(alarms)}</div>' if alarms else ""
    lead = "".join(f"<p>{escape(sentence)}</p>" for sentence in report["reading"])
    byline_ = escape(" · ".join(byline(report)))
    return f'<h1>{escape(title(report))}</h1>\n<p class="byline">{byline_}</p>\n{alarm}\n<div class="lead">{lead}</div>'


def _results(report: Report, plots: dict[str, str]) -> list[str]:
    """Return tables and pictures of what was measured, in reading order."""
    sweep = report["sweep"]
    tables = [_table(grid) for grid in table_grids(report)]
    crossing = [plots["crossover"]] if "crossover" in plots else []
    crossing += [_folded(grid) for grid in crossover_grids(report)]
    swept = [plots[name] for name in ("speedup", "cache", "context", "batch") if name in plots]
    swept += [_folded(grid) for grid in sweep_grids(sweep)] if sweep is not None else []
    return [
        _section("The sweep", swept),
        _section("The table", tables),
        _section("Time and memory", [plots[name] for name in ("time", "memory", "steps") if name in plots]),
        _section("Where the cache begins to pay", crossing),
    ]


def _evidence(report: Report) -> list[str]:
    """Return what lets a reader trust the figures, or not."""
    validity = validity_grid(report)
    definitions = "".join(f"<dt>{escape(name)}</dt><dd>{escape(meaning)}</dd>" for name, meaning in DEFINITIONS)
    facts = f'<div class="facts">{_table(environment_grid(report))}</div>'
    return [
        _section("Memory, work and text of each cell", [_details(record) for record in report["cells"]]),
        _section("Validity", [_table(validity) if validity else "", _list(remarks(report), kind="notes")]),
        _section("Are the texts the same?", [_list([comparison_line(one) for one in report["comparisons"]])]),
        _section("Where and how", [facts, f"<h3>Command</h3><pre>{escape(report['command'])}</pre>"]),
        _section("What the words mean", [f"<dl>{definitions}</dl>"]),
    ]


def _section(name: str, parts: Sequence[str]) -> str:
    shown = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(name)}</h2>\n{shown}\n</section>" if shown else ""


def _picture(name: str, svg: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<figure><img alt="{escape(_ALT[name])}" src="data:image/svg+xml;base64,{data}"></figure>'


def _details(record: CellRecord) -> str:
    """Return what is known of one cell alone, folded up."""
    ledger, summary = ledger_grid(record), record["summary"]
    peak = None if summary is None or summary["peak_bytes"] is None else summary["peak_bytes"]["median"]
    parts = [
        _table(ledger) if ledger else f"<p>Memory ledger: {NOT_MEASURED}</p>",
        _list(work_lines(record), "Work and limits"),
    ]
    parts += [_points(record), _list(record["notes"], "Notes")]
    parts += [f"<h3>Text of the first row</h3><pre>{escape(record['text'])}</pre>" if record["text"] else ""]
    shown = fate(record).partition(":")[0] if summary is None else f"peak {megabytes(peak)}"
    head = f"<summary>{escape(label(record))} <span>{escape(shown)}</span></summary>"
    return f"<details>{head}\n{''.join(parts)}\n</details>"


def _points(record: CellRecord) -> str:
    lines = (f"<li>{_marked(point_mark(one))} &ensp;{escape(point_words(one))}</li>" for one in record["points"])
    return f"<h3>Validity</h3><ul>{''.join(lines)}</ul>" if record["points"] else ""


def _table(grid: Grid, *, titled: bool = True) -> str:
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in grid.heads)
    rows = "\n".join(f"<tr>{''.join(f'<td>{_marked(text)}</td>' for text in row)}</tr>" for row in grid.rows)
    table = f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    head = f"<h3>{escape(grid.title)}</h3>\n" if titled else ""
    kind = "scroll wide" if len(grid.heads) > 11 else "scroll"
    return f'{head}<div class="{kind}">{table}</div>{_list(grid.notes, kind="notes")}'


def _folded(grid: Grid) -> str:
    """Return a table that repeats a picture's figures: there to be opened."""
    return f"<details><summary>{escape(grid.title)}</summary>\n{_table(grid, titled=False)}\n</details>"


def _list(lines: Sequence[str], name: str = "", kind: str = "") -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    head = f"<h3>{escape(name)}</h3>" if name else ""
    return f'{head}<ul class="{kind}">{items}</ul>' if items else ""


def _marked(text: str) -> str:
    """Return a cell's text, escaped; on, off and violations in their colours, a spread small beneath its median."""
    if text in ("on", "off"):
        return f'<span class="{text}">{text}</span>'
    if text.startswith(("VIOLATED", "died", "refused")):
        return f'<span class="bad">{escape(text)}</span>'
    if text.startswith("not "):
        return f'<span class="faint">{escape(text)}</span>'
    figure, bracket, rest = text.partition(" (")
    if bracket and rest.endswith(")") and figure.replace(".", "").isdigit():
        return f"{escape(figure)}<small>{escape(rest[:-1])}</small>"
    return escape(text)
