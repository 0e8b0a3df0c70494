"""A report as one page of HTML that is complete in itself: no script, no font, no picture from outside.

Only a recorded generation has a script, which runs in a sandboxed frame.
"""

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib import resources

from llama.bench.report.columns import Table
from llama.bench.report.contents import byline, failures, report_sections, title, warnings
from llama.bench.report.plots.canvas import as_svg, heading
from llama.bench.report.plots.pictures import figures
from llama.bench.schema import Report
from llama.host import palette


def report_page(report: Report, steps: str | None = None) -> str:
    """Return the report as one HTML page; `steps` is the page of a recorded generation to put into it."""
    drawn = _pictures(report)
    body = [_head(report)]
    for section in report_sections(report):
        pictures = [drawn[name] for name in section.pictures if name in drawn]
        tables = [_table(table, folded=section.folded) for table in section.tables]
        body += [_wrapped(section.name, [*pictures, *tables])] if pictures or section.tables else []
    if steps is not None:
        # In a frame, whose script cannot reach anything outside it.
        frame = '<iframe title="A generation, step by step" sandbox="allow-scripts" srcdoc="'
        body.append(_wrapped("Step by step", [f'{frame}{escape(steps)}"></iframe>']))
    style = palette.css() + resources.files(__package__).joinpath("page.css").read_text("utf-8")
    name = escape(": ".join([title(report), *byline(report)[:1]]))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _head(report: Report) -> str:
    lines = [f"<p><b>{mark}</b> {escape(line)}</p>" for mark, line in warnings(report)]
    lines += [f"<p>{escape(line)}</p>" for line in failures(report)]
    alarm = f'<div class="alarm">{"".join(lines)}</div>' if lines else ""
    lead = "".join(f"<p>{escape(sentence)}</p>" for sentence in report["reading"])
    below = escape(" · ".join(byline(report)))
    return f'<h1>{escape(title(report))}</h1>\n<p class="byline">{below}</p>\n{alarm}\n<div class="lead">{lead}</div>'


def _wrapped(name: str, parts: Sequence[str]) -> str:
    return "\n".join([f"<section>\n<h2>{escape(name)}</h2>", *parts, "</section>"])


def _pictures(report: Report) -> dict[str, str]:
    """Return every picture by its name; on a narrow page it scrolls."""
    drawn = {}
    for name, figure in figures(report).items():
        named = f'<svg role="img" aria-label="{escape(heading(figure))}"'
        drawn[name] = f"<figure>\n{as_svg(figure, salt=name).replace('<svg', named, 1)}\n</figure>"
    return drawn


def _table(table: Table, *, folded: bool) -> str:
    if folded:
        shown = _table(replace(table, title=""), folded=False)
        return f"<details><summary>{escape(table.title)}</summary>\n{shown}\n</details>"
    notes = f"<ul>{''.join(f'<li>{_marked(line)}</li>' for line in table.notes)}</ul>" if table.notes else ""
    above = f"<h3>{escape(table.title)}</h3>\n" if table.title else ""
    if not table.heads:
        return above + notes
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in table.heads)
    rows = "\n".join(f"<tr>{''.join(f'<td>{_marked(text)}</td>' for text in row)}</tr>" for row in table.rows)
    kind = "scroll wide" if len(table.heads) > 11 else "scroll facts" if len(table.heads) == 2 else "scroll"
    drawn = f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    return f'{above}<div class="{kind}">{drawn}</div>{notes}'


def _marked(text: str) -> str:
    """Return a cell's text, escaped; on, off and violations in their colours, a spread small beneath its median."""
    if text in ("on", "off"):
        return f'<span class="{text}">{text}</span>'
    if text.startswith(("VIOLATED", "NOISY", "died", "refused")):
        return f'<span class="bad">{escape(text)}</span>'
    if text.startswith(("not ", "~", "predicted")):
        return f'<span class="muted">{escape(text)}</span>'
    figure, bracket, rest = text.partition(" (")
    if bracket and rest.endswith(")") and figure.replace(".", "").isdigit():
        return f"{escape(figure)}<small>{escape(rest[:-1])}</small>"
    return escape(text)
