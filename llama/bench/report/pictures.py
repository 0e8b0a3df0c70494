"""The pictures of a report, by matplotlib's own layout. A report without figures for a picture does not have it.

All colours are those of `llama.host.palette`.
"""

import base64
import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import mul
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from llama.bench.report.cells import cell_views, groups, in_table_order, kind_names
from llama.bench.report.columns import megabytes, two_digits
from llama.bench.report.contents import NOISY, is_noisy
from llama.bench.report.derived import by_bytes, crossovers, growth, saved, scatter, seconds_of, step_groups
from llama.bench.report.peak import PARTS, is_peak_predicted, peak_bytes, peak_parts, peak_words
from llama.bench.report.sentences import crossover_words, faster, in_seconds, range_faster
from llama.bench.report.tables import on_or_off
from llama.bench.schema import Report, Row
from llama.bench.statistics import Spread, percent_more, with_ends
from llama.costs import MB
from llama.host import palette

LIGHT = {name: one.light for name, one in palette.variables().items()}
COLORS = {"on": LIGHT["cache"], "off": LIGHT["recomputed"]}
MODES = {"on": "with the cache", "off": "without"}
MARKERS = {"on": "o", "off": "s"}
OF_PARTS = ("weights", "cache", "logits", "activations", "workspace", "unnamed")
PART_COLORS = {part: LIGHT[name] for part, name in zip(PARTS, OF_PARTS, strict=True)}
OF_LINES = ("cache", "recomputed", "written", "activations", "logits", "attention", "ink", "muted")
LINE_COLORS = [LIGHT[name] for name in OF_LINES]
LINE_MARKERS = "os^DvPX"  # 8 colours and 7 markers are 56 different lines
METADATA = {  # that would differ from run to run, or name matplotlib's version
    "png": ["Software"], "svg": ["Date", "Creator", "Format", "Type"], "pdf": ["CreationDate", "Creator", "Producer"],
}  # fmt: skip
WIDTH, SMALL = 9.0, 10.0  # inches, and points of the words
STYLE: dict[Any, Any] = {  # matplotlib's settings
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), palette.MUTED.light),
    **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "text.color", "xtick.labelcolor"), palette.INK.light),
    **dict.fromkeys(("font.size", "axes.labelsize", "legend.fontsize", "xtick.labelsize", "ytick.labelsize"), SMALL),
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": palette.GRID.light},
    "text.parse_math": False,  # a dollar sign in a name does not begin a formula
}


def figures(report: Report) -> dict[str, Figure]:
    """Return the pictures that the report has figures for, by name, in reading order."""
    painters: dict[str, Callable[[Report], Figure | None]] = {"time": draw_time, "memory": draw_memory}
    painters |= {"speedup": draw_speedup, "steps": draw_steps}
    if report["preset"] == "merged":  # as many cells as there are
        painters = {}
    for number, rows in enumerate(by_bytes(report), 1):
        painters[f"quality-{number}"] = partial(draw_quality, rows=rows)
    with matplotlib.rc_context(STYLE):
        return {name: figure for name, draw in painters.items() if (figure := draw(report)) is not None}


def as_file(figure: Figure, form: str = "svg") -> bytes:
    """Return the picture as a file: png, svg or pdf. The same picture gives the same bytes."""
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "llama", "pdf.fonttype": 42}):  # 42: text that can be copied
        figure.savefig(out, format=form, dpi=150, metadata=dict.fromkeys(METADATA[form]))
    return out.getvalue()


def as_image(figure: Figure) -> str:
    """Return the picture as the address of an image that is complete in itself."""
    return f"data:image/svg+xml;base64,{base64.b64encode(as_file(figure)).decode()}"


def heading(figure: Figure) -> str:
    """Return the heading of a picture."""
    return " ".join(figure.get_suptitle().split())


def _figure(
    report: Report, words: str, tall: float, columns: int = 1, job: str = "", **grid: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure with its heading, empty panels side by side, and small words on what was measured below."""
    figure = Figure((WIDTH, tall), facecolor=palette.PAPER.light)
    lines = textwrap.wrap(words, 78)
    figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=14, weight="bold")
    cells = report["cells"]
    below = [report["model"]["name"]] if report["model"] is not None else []
    below += [job] if job else sorted({f"{cell['input_len']} tokens in, {cell['output_len']} out" for cell in cells})
    below += sorted({f"{cell['dtype']} on {cell['device']}" for cell in cells})
    figure.text(0.01, 0.01, textwrap.shorten(", ".join(below), 110), color=palette.MUTED.light)
    lowest = 0.5 / tall  # of the height: that line, and a legend
    figure.set_layout_engine("constrained", rect=(0, lowest, 1, 1 - lowest))
    return figure, list(figure.subplots(1, columns, squeeze=False, **grid).flat)


def _legend(figure: Figure, ax: Axes) -> None:
    """Write the legend of a panel in one line, between the panels and the small words."""
    handles, _ = ax.get_legend_handles_labels()
    lowest = 0.2 / figure.get_figheight()
    figure.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, lowest), ncols=len(handles))


def _mark(report: Report, *axes: Axes) -> None:
    """Write a warning across panels that show times, if these were measured under load."""
    for ax in axes if is_noisy(report) else ():
        words = ax.text(0.5, 0.5, NOISY.replace(", ", "\n"), transform=ax.transAxes, ha="center", va="center")
        words.set(rotation=20, fontsize=16 if len(axes) < 3 else 12, color=palette.ALARM.light, alpha=0.35)


def _log_ticks(axis: Axis) -> None:
    """Write few plain numbers at an axis with a log scale, on which everything is drawn."""
    low, high = axis.get_view_interval()
    subs = {100: (1.0,), 10: (1.0, 2.0, 5.0), 2.5: (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)}
    fit = next((LogLocator(subs=some) for least, some in subs.items() if high / low > least), MaxNLocator(4))
    axis.set_major_locator(fit)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def error_bars(spreads: Sequence[Spread]) -> list[list[float]]:
    down = [max(0.0, one["median"] - one["p10"]) for one in spreads]
    return [down, [max(0.0, one["p90"] - one["median"]) for one in spreads]]


def _draw_factors(ax: Axes, rows: Mapping[int, Mapping[str, Any]]) -> None:
    """Draw how many times faster a row is as a bar from zero at its place, with its range if that is wide."""
    bars = ax.barh([*rows], [row["times_faster"] for row in rows.values()], 0.4, color=palette.FACTOR.light)
    ends = [row.get("times_faster_range") for row in rows.values()]
    said = ["" if one is None else f" ({two_digits(one[0])}-{two_digits(one[1])})" for one in ends]
    labels = [f"{two_digits(row['times_faster'])}x{end}" for row, end in zip(rows.values(), said, strict=True)]
    ax.bar_label(bars, labels, padding=3, weight="bold")
    ax.axvline(1, color=palette.MUTED.light, lw=1, ls="--")
    ax.set_xlabel("times faster with the cache")
    ax.margins(x=0.9 if any(ends) else 0.3)


def _draw_modes(ax: Axes, name: str, rows: Sequence[Mapping[str, Any]], keys: Mapping[str, str], scale: float) -> None:
    """Draw the times of both modes, in the columns `keys`, against the column `name`, both on log scales."""
    for mode, said in MODES.items():
        own = [(row[name], row[keys[mode]]) for row in rows if row.get(keys[mode])]
        spreads: list[Any] = [{key: scale * one[key] for key in ("median", "p10", "p90")} for _, one in own]
        ax.errorbar([at for at, _ in own], [one["median"] for one in spreads], error_bars(spreads),
                    color=COLORS[mode], marker=MARKERS[mode], ms=5, lw=2, capsize=3, label=said)  # fmt: skip
    ax.set(xscale="log", yscale="log")
    _log_ticks(ax.xaxis)
    _log_ticks(ax.yaxis)


def draw_time(report: Report) -> Figure | None:
    """Draw the time of the whole job in both modes, a row for each pair, and beside it how many times faster it is."""
    grouped, rows, scattered = groups(report), saved(report), scatter(report)
    if not grouped:
        return None
    words = f"{range_faster([row['times_faster'] for row in rows])} with the KV cache" if rows else "Time of the job"
    figure, (left, right) = _figure(report, words, 2.2 + 0.45 * len(grouped), 2, width_ratios=[3, 2], sharey=True)
    for place, group in enumerate(grouped):
        timed = [(one, on_or_off(view.cell.kv_caching)) for view in group if (one := seconds_of(view, scattered))]
        for one, mode in timed:  # the words of the faster one stand at its left
            look: dict[str, Any] = {"color": COLORS[mode], "marker": MARKERS[mode], "capsize": 3}
            left.errorbar(one["median"], place, xerr=error_bars([one]), **look)
            side = "right" if len(timed) > 1 and one is min(timed, key=lambda each: each[0]["median"])[0] else "left"
            at, aside = (one["p10"], -6) if side == "right" else (one["p90"], 6)
            left.annotate(in_seconds(one["median"]), (at, place), (aside, 0), textcoords="offset points",
                          ha=side, va="center")  # fmt: skip
    left.set_yticks(range(len(grouped)), [group[0].pair_label for group in grouped])
    left.set(ylim=(len(grouped) - 0.5, -0.6), xscale="log", xlabel="time of the whole job, s (log scale)")
    left.margins(x=0.3)
    _log_ticks(left.xaxis)
    for mode, said in MODES.items():
        left.plot([], [], MARKERS[mode], color=COLORS[mode], label=said)
    _legend(figure, left)
    of_pair = {row["on_view"].index: row for row in rows if row["times_faster"]}
    own = {place: of_pair[group[0].index] for place, group in enumerate(grouped) if group[0].index in of_pair}
    _draw_factors(right, own)
    _mark(report, left, right)
    return figure


def draw_memory(report: Report) -> Figure | None:
    """Draw the peak of each cell as a bar of its parts, under the sentence that names the largest one."""
    views = [view for view in in_table_order(cell_views(report)) if view.has_peak]
    if not any(view.is_measured for view in views):
        return None
    top = max(views, key=peak_bytes)
    figure, (ax,) = _figure(report, f"Highest peak, {top.label}: {peak_words(top)}", 1.8 + 0.4 * len(views))
    ends, stacks = [0.0] * len(views), [peak_parts(view) for view in views]
    for part in (part for part in PARTS if any(part in stack for stack in stacks)):
        widths = [stack.get(part, 0) / MB for stack in stacks]
        bars = ax.barh(range(len(views)), widths, 0.6, ends, color=PART_COLORS[part], label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    said = [f"{megabytes(peak_bytes(view))}{' predicted' * is_peak_predicted(view)}" for view in views]
    ax.bar_label(bars, said, padding=4)
    ax.set_yticks(range(len(views)), [view.label for view in views])
    ax.set(ylim=(len(views) - 0.5, -0.5), xlim=(0, 1.2 * max(ends)), xlabel="memory at the peak, MB (2^20 bytes)")
    _legend(figure, ax)
    return figure


def draw_steps(report: Report) -> Figure | None:
    """Draw the time of a step in both modes by context, a panel for each batch size."""
    panels = step_groups(report)
    if not panels:
        return None
    figure, axes = _figure(report, crossover_words(report), 4.2, len(panels), sharey=True)
    for ax, rows, pays in zip(axes, panels, crossovers(report), strict=True):
        _draw_modes(ax, "context", rows, {"on": "on", "off": "off"}, 1e3)
        if pays["context"]:
            ax.axvline(pays["context"], color=palette.INK.light, lw=1.2, ls="--")
        ax.set_xlabel("context, tokens (log scale)")
        ax.set_title(f"batch {rows[0]['batch_size']}" + ("" if pays["context"] else ", no crossover"), fontsize=SMALL)
    axes[0].set_ylabel("time of a step, ms (log scale)")
    _legend(figure, axes[0])
    _mark(report, *axes)
    return figure


def draw_speedup(report: Report) -> Figure | None:
    """Draw times of both modes against the number of generated tokens, and beside them how many times faster it is."""
    rows = growth(report)
    if not rows:
        return None
    words = [f"{faster(row['times_faster'])} at {row['generated']}" for row in (rows[0], rows[-1])]
    head = f"Batch {rows[0]['batch_size']} with the cache: {' and '.join(words)} generated tokens"
    figure, (left, right) = _figure(report, head, 4.2, 2, width_ratios=[3, 2])
    _draw_modes(left, "generated", rows, {"on": "on_s", "off": "off_s"}, 1.0)
    left.set(xlabel="generated tokens (log scale)", ylabel="time of the whole job, s (log scale)")
    _draw_factors(right, dict(enumerate(rows)))
    right.set_yticks(range(len(rows)), [str(row["generated"]) for row in rows])
    right.set(ylim=(len(rows) - 0.5, -0.5), ylabel="generated tokens")
    _legend(figure, left)
    _mark(report, left, right)
    return figure


# Quality against bytes and time: what is at the axes, the samples, their scale, and up to where a log axis is linear.
PANELS: dict[str, list[tuple[str, str, str, Callable[[float], float], float | None]]] = {
    "quality": [("of_full", "perplexity above the full cache's, %", "nlls_minus_full", percent_more, 1.0),
                ("of_full", "mean KL, nats", "kls", float, 1e-3),
                ("time_of_full", "mean KL, nats", "kls", float, 1e-3)],
    "task": [("of_full", "score, %", "scores", partial(mul, 100), None),
             ("of_full", "score, question seen, %", "scores_question_seen", partial(mul, 100), None)],
}  # fmt: skip


def draw_quality(report: Report, rows: Sequence[Row]) -> Figure:
    """Draw quality against bytes and time: kinds over their ratios as lines, and `rows[0]`, the full cache, as one."""
    full, lines = rows[0], dict[str, list[Row]]()
    for row in sorted(rows[1:], key=lambda row: row["of_full"]):
        name = re.sub(r"^([^@;]+):(0?\.\d+|1)$", r"\1", kind_names(report)[row["cell"]])  # a ratio
        lines.setdefault(name, []).append(row)
    panels = [panel for panel in PANELS[full["figures"]] if any(row.get(panel[0]) for row in rows[1:])]
    _, _, last, of, _ = panels[1]
    names = sorted(lines, key=lambda name: with_ends(lines[name][-1], last, of)[0], reverse=True)
    what, long = full.get("task", "a text"), full["context"] and f" of {full['context']:,} tokens"
    words = f"Quality against bytes: {len(lines)} kinds of cache on {what}{long or ''}"
    job = f"the full cache has {megabytes(full['cache_bytes'])} MB; bars: 95 % intervals"
    figure, axes = _figure(report, words, max(4.2, 1.6 + 0.28 * len(lines)), len(panels), job)
    for ax, (at, label, column, of, linear) in zip(axes, panels, strict=True):
        ax.axhline(with_ends(full, column, of)[0], color=palette.MUTED.light, lw=1.2, ls="--", label="full cache")
        for number, name in enumerate(names):
            own = [row for row in lines[name] if row.get(at)]
            points = [with_ends(row, column, of) for row in own]
            bars = [[max(0.0, y - low) for y, low, _ in points], [max(0.0, high - y) for y, _, high in points]]
            look: dict[str, Any] = {"color": LINE_COLORS[number % 8], "marker": LINE_MARKERS[number % 7], "ms": 5}
            ax.errorbar([row[at] for row in own], [y for y, *_ in points], bars, label=name, lw=1.2,
                        ls="-" if at == "of_full" else "", capsize=2, elinewidth=0.8, **look)  # fmt: skip
        ax.set(xlabel=f"{'bytes' if at == 'of_full' else 'time'} / full cache's", ylabel=label)
        if linear is not None:
            ax.set_yscale("symlog", linthresh=linear)
        ax.set_xlim(0, 1.05 * max(row.get(at) or 0 for row in rows))
        ax.yaxis.set_major_formatter("{x:g}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", title="highest first")
    _mark(report, *axes[2:])
    return figure
