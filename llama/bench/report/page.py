"""A report as one page of HTML that needs nothing else: no script, no font, no picture from outside.

Knows nothing of how the figures were measured or drawn.
"""

import base64
from collections.abc import Sequence
from html import escape
from itertools import groupby

from llama.bench.report.plots import as_svg, figures, heading
from llama.bench.report.tables import Section, Table, byline, deaths, sections, title, violations
from llama.bench.schema import Report

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
@media print { body { font-size: 11pt; } main { max-width: none; padding: 0; } h2, h3 { break-after: avoid; }
  figure, tr { break-inside: avoid; } figure, .scroll { overflow: visible; } figure img { min-width: 0; }
  table { font-size: 7.5pt; } th, td { padding: .25rem .3rem; }
  details:not([open])::details-content { content-visibility: visible; block-size: auto; } }
"""


def page(report: Report) -> str:
    """Return the report as one HTML page, complete in itself."""
    drawn = {name: _picture(heading(figure), as_svg(figure)) for name, figure in figures(report).items()}
    shown = [one for one in sections(report) if one.parts or drawn.keys() & set(one.pictures)]
    body = [_head(report)]
    for parent, group in groupby(shown, key=lambda one: one.parent):
        parts = [_details(section) if parent else _section(section, drawn) for section in group]
        body.append(_wrapped(parent, parts) if parent else "\n".join(parts))
    name = escape(": ".join([title(report), *byline(report)[:1]]))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _head(report: Report) -> str:
    alarms = [f"<p><b>VIOLATED</b> {escape(line)}</p>" for line in violations(report)]
    alarms += [f"<p>{escape(line)}</p>" for line in deaths(report)]
    alarm = f'<div class="alarm">{"".join(alarms)}</div>' if alarms else ""
    lead = "".join(f"<p>{escape(sentence)}</p>" for sentence in report["reading"])
    below = escape(" · ".join(byline(report)))
    return f'<h1>{escape(title(report))}</h1>\n<p class="byline">{below}</p>\n{alarm}\n<div class="lead">{lead}</div>'


def _section(section: Section, drawn: dict[str, str]) -> str:
    """Return a section; tables beside pictures repeat their figures, so they are folded."""
    pictures = [drawn[name] for name in section.pictures if name in drawn]
    tables = [
        _details(Section(part.title, [part])) if pictures and isinstance(part, Table) else _part(part)
        for part in section.parts
    ]
    return _wrapped(section.name, [*pictures, *tables])


def _wrapped(name: str, parts: Sequence[str]) -> str:
    return "\n".join([f"<section>\n<h2>{escape(name)}</h2>", *parts, "</section>"])


def _details(section: Section) -> str:
    return f"<details><summary>{escape(section.name)}</summary>\n{''.join(map(_part, section.parts))}\n</details>"


def _picture(alt: str, svg: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<figure><img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}"></figure>'


def _part(part: Table | Sequence[str]) -> str:
    if not isinstance(part, Table):
        return f"<ul>{''.join(f'<li>{_marked(line)}</li>' for line in part)}</ul>"
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in part.heads)
    rows = "\n".join(f"<tr>{''.join(f'<td>{_marked(text)}</td>' for text in row)}</tr>" for row in part.rows)
    table = f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    kind = "scroll wide" if len(part.heads) > 11 else "scroll facts" if len(part.heads) == 2 else "scroll"
    return f'<h3>{escape(part.title)}</h3>\n<div class="{kind}">{table}</div>{_part(part.notes) if part.notes else ""}'


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
