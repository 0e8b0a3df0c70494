"""A report as one page of HTML that is complete in itself: no script, no font, no picture from outside.

Only a recorded generation has a script, which runs in a sandboxed frame.
"""

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from llama.bench.report.columns import Table
from llama.bench.report.contents import alarms, byline, machine_line, report_sections, title
from llama.bench.report.pictures import as_image, heading
from llama.bench.report.sentences import headline
from llama.bench.report.tables import figure_tables
from llama.bench.schema import Report
from llama.host import palette

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def report_page(report: Report, figures: Mapping[str, "Figure"], steps: str | None = None) -> str:
    """Return the report as one HTML page with its pictures; `steps` is the page of a recorded generation in it."""
    drawn = {name: _picture(figure) for name, figure in figures.items()}
    body = [
        _head(report),
        *map(_table, figure_tables(report)[:1]),
        f'<p class="machine">{escape(machine_line(report))}</p>',
    ]
    body.append(f'<div class="lead">{"".join(f"<p>{escape(sentence)}</p>" for sentence in report["reading"])}</div>')
    for section in report_sections(report):
        pictures = [drawn[name] for name in drawn if name.partition("-")[0] in section.pictures]
        parts = [*pictures, *map(_table, section.tables)]
        body += [_folded(section.name, parts, is_open=section.is_open)] if parts else []
    if steps is not None:
        # In a frame, whose script cannot reach anything outside it.
        frame = '<iframe title="A generation, step by step" sandbox="allow-scripts" srcdoc="'
        body.append(_folded("Step by step", [f'{frame}{escape(steps)}"></iframe>'], is_open=False))
    style = palette.css() + resources.files(__package__).joinpath("report_page.css").read_text("utf-8")
    name = escape(": ".join([title(report), *byline(report)[:1]]))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{name}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _head(report: Report) -> str:
    lines = [f"<p><b>{mark}</b> {escape(line)}</p>" for mark, line in alarms(report)]
    alarm = f'<div class="alarm">{"".join(lines)}</div>\n' if lines else ""
    numbers = "".join(f"<p><b>{escape(number)}</b>{escape(words)}</p>" for number, words in headline(report))
    below = escape(" · ".join(byline(report)))
    return f"""<h1>{escape(title(report))}</h1>
<p class="byline">{below}</p>
{alarm}<div class="numbers">{numbers}</div>"""


def _folded(name: str, parts: Sequence[str], *, is_open: bool) -> str:
    return "\n".join(
        [f"<details{' open' * is_open}>\n<summary><h2>{escape(name)}</h2></summary>", *parts, "</details>"]
    )


def _picture(figure: "Figure") -> str:
    """Return a picture for the page; on a narrow one it scrolls."""
    label = escape(heading(figure))
    return f'<figure tabindex="0" aria-label="{label}"><img alt="{label}" src="{as_image(figure)}"></figure>'


def _table(table: Table) -> str:
    reached = f'tabindex="0" role="region" aria-label="{escape(table.title or "table")}"'  # to scroll it by keys
    notes = f"<ul>{''.join(f'<li>{_marked(line)}</li>' for line in table.notes)}</ul>" if table.notes else ""
    notes += f'<div class="scroll" {reached}><pre>{escape(table.code)}</pre></div>' if table.code else ""
    above = f"<h3>{escape(table.title)}</h3>\n" if table.title else ""
    if not table.heads:
        return above + notes
    heads = "".join(f'<th scope="col">{escape(head)}</th>' for head in table.heads)
    rows = "\n".join(f"<tr>{''.join(f'<td>{_marked(text)}</td>' for text in row)}</tr>" for row in table.rows)
    kind = "scroll wide" if len(table.heads) > 11 else "scroll facts" if len(table.heads) == 2 else "scroll"
    kind += " prose" * any(len(text) > 60 for row in table.rows for text in row[:-1])
    drawn = f"<table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    return f'{above}<div class="{kind}" {reached}>{drawn}</div>{notes}'


def _marked(text: str) -> str:
    """Return a cell's text, escaped; on, off and violations in their colours, a spread small beneath its median."""
    if text in ("on", "off"):
        return f'<span class="{text}">{text}</span>'
    if text.startswith(("VIOLATED", "NOISY", "died", "refused")):
        return f'<span class="bad">{escape(text)}</span>'
    figure, bracket, rest = text.partition(" (")
    if bracket and rest.endswith(")") and figure.strip("~x").replace(".", "").isdigit():
        figure = f"{escape(figure)}<small>{escape(rest[:-1])}</small>"
    else:
        figure = escape(text)
    return f'<span class="muted">{figure}</span>' if text.startswith(("not ", "~")) else figure
