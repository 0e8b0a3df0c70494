"""The pictures of all presets. A function that draws one returns None if the report has no figures for it."""

import statistics
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from llama.bench.report.cells import CellView, groups, kind_names
from llama.bench.report.columns import NOT_JUDGED, NOT_MEASURED, megabytes
from llama.bench.report.contents import NOISY, is_noisy
from llama.bench.report.derived import crossovers, growth, saved, scatter, seconds_of, step_groups, unbeaten
from llama.bench.report.peak import PARTS, is_peak_predicted, peak_bytes, peak_parts, peak_sentence
from llama.bench.report.plots import canvas
from llama.bench.report.sentences import (
    crossover_words,
    faster,
    in_seconds,
    listed,
    positions,
    range_faster,
    share_of_full,
)
from llama.bench.report.tables import kind_rows, on_or_off
from llama.bench.schema import Report
from llama.bench.statistics import Spread
from llama.costs import MB
from llama.host import palette

SHADES = (palette.WEIGHTS, palette.CACHE, palette.LOGITS, palette.ACTIVATIONS, palette.WORKSPACE, palette.UNNAMED)
PART_COLORS = dict(zip(PARTS, SHADES, strict=True))


def figures(report: Report) -> dict[str, Figure]:
    """Return the pictures that the report has figures for, by name, in reading order."""
    painters = {"time": draw_time, "memory": draw_memory, "steps": draw_steps, "speedup": draw_speedup}
    painters |= {"kinds": draw_kinds, "pareto": draw_pareto}
    painters = {} if report["preset"] == "merged" else painters  # as many cells as there are
    with matplotlib.rc_context(canvas.STYLE):
        found = {name: figure for name, draw in painters.items() if (figure := draw(report)) is not None}
        for figure in found.values() if is_noisy(report) else ():
            canvas.mark_noisy(figure, NOISY)
        return {name: canvas.laid_out(figure) for name, figure in found.items()}


def draw_time(report: Report) -> Figure | None:
    """Draw the time of the whole job in both modes, a row for each pair, and beside it how many times faster it is."""
    grouped, rows = groups(report), saved(report)
    if not grouped:
        return None
    factors = {row["on_view"].index: row["times_faster"] for row in rows}
    ranges_of = {row["on_view"].index: row["times_faster_range"] for row in rows}
    names = [group[0].pair_label for group in grouped]
    measured = [row for row in rows if not row["predicted"]]
    words = "Time of the whole job"
    if measured:
        words = f"{range_faster([row['times_faster'] for row in measured])} with the KV cache"
    if 0 < len(measured) < len(rows):
        batches = listed(list(dict.fromkeys(str(row["batch_size"]) for row in measured)))
        words += f" at batch {batches}, which was measured"
    heights = [canvas.row_height(len(grouped))] * (2 if factors else 1)
    ratios, times = [3, 2] if factors else None, range(len(heights))
    figure, axes = canvas.new_figure(words, _job(report, grouped), heights=heights, times=times, width_ratios=ratios)
    canvas.draw_rows(axes[0], names, range(len(names)))
    scattered = scatter(report)
    timed = [[(view, _seconds(view, scattered)) for view in group] for group in grouped]
    for place, group in enumerate(timed):
        _draw_times(axes[0], place, sorted(group, key=lambda one: one[1]["median"]))
    spreads = [one for group in timed for _, one in group]
    lowest, highest = min(one["p10"] for one in spreads), max(one["p90"] for one in spreads)
    room = (highest / lowest) ** 0.24 * 1.5  # for the words at both ends
    axes[0].set(xscale="log", xlim=(lowest / room, highest * room), xlabel="time of the whole job, s (log scale)")
    is_wide = highest / lowest > 120
    canvas.ticks(axes[0].xaxis, LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0), numticks=20))
    if factors:
        views, unnamed = [group[0] for group in grouped], [""] * len(names)  # their names stand in the first panel
        predicted = [view.is_predicted for view in views]
        ranges = [ranges_of.get(view.index) for view in views]
        canvas.draw_factors(axes[1], unnamed, [factors.get(view.index) for view in views], predicted, ranges)
    canvas.mode_legend(figure)
    return figure


def _seconds(view: CellView, scattered: float = 1.0) -> Spread:
    found = seconds_of(view, scattered)
    assert found is not None
    return found


def _draw_times(ax: Axes, place: int, views: Sequence[tuple[CellView, Spread]]) -> None:
    """Draw a point for each cell, hollow if predicted, its time at the outer side, and a line between two."""
    ax.plot([one["median"] for _, one in views], [place] * len(views), color=palette.GRID.light, lw=4, zorder=1)
    for i, (view, one) in enumerate(views):
        mode = on_or_off(view.cell.kv_caching)
        face = palette.PAPER.light if view.is_predicted else canvas.COLORS[mode]
        look: dict[str, Any] = {"color": canvas.COLORS[mode], "mfc": face, "marker": canvas.MARKERS[mode], "ms": 6}
        ax.errorbar(one["median"], place, xerr=canvas.error_bars([one]), capsize=3, **look)
        left, words = i == 0 and len(views) > 1, f"{'~' * view.is_predicted}{in_seconds(one['median'])}"
        ax.annotate(words, (one["p10"] if left else one["p90"], place), (-7 if left else 7, 0),
                    textcoords="offset points", va="center", ha="right" if left else "left")  # fmt: skip


def draw_memory(report: Report) -> Figure | None:
    """Draw the peak of each cell as a bar of its parts, under the sentence that names the largest one."""
    grouped = [own for group in groups(report) if (own := [view for view in group if view.has_peak])]
    if not grouped:
        return None
    views = [view for group in grouped for view in group]
    places = [place + 0.3 * n for place, n in enumerate(n for n, group in enumerate(grouped) for _ in group)]
    heights = [canvas.row_height(places[-1] + 1)]
    figure, (ax,) = canvas.new_figure(peak_sentence(report), _job(report), heights=heights, times=())
    for name, view in zip(canvas.draw_rows(ax, [view.label for view in views], places), views, strict=True):
        name.set(color=canvas.COLORS[on_or_off(view.cell.kv_caching)], weight="bold")
    ends = [0.0] * len(views)
    stacks = [peak_parts(view) for view in views]
    for part in (part for part in PARTS if any(part in stack for stack in stacks)):
        widths = [stack.get(part, 0) / MB for stack in stacks]
        ax.barh(
            places, widths, 0.42, ends, color=PART_COLORS[part].light, label=part, edgecolor=palette.PAPER.light, lw=0.8
        )
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, view, end in zip(places, views, ends, strict=True):
        predicted = " predicted" if is_peak_predicted(view) else ""
        ax.annotate(
            f"{megabytes(peak_bytes(view))}{predicted}", (end, place), (4, 0), textcoords="offset points", va="center"
        )
    ax.set_xlim(0, 1.15 * max(ends))
    ax.set_xlabel("memory at the peak, MB (2^20 bytes)")
    canvas.legend(figure, ncols=len(ax.containers))
    return figure


def draw_speedup(report: Report) -> Figure | None:
    """Draw times of both modes against the number of generated tokens, and their ratio as bars."""
    rows = growth(report)
    if not rows:
        return None
    words = [f"{faster(row['times_faster'])} at {row['generated']}" for row in (rows[0], rows[-1])]
    head = f"With the cache {' and '.join(words)} generated tokens"
    below = f"{_job(report)}, batch {rows[0]['batch_size']}; {canvas.counted(row['on_s'] for row in rows)}"
    figure, (left, right) = canvas.new_figure(head, below, heights=[3.6, canvas.row_height(len(rows))], times=(0, 1))
    lengths = [row["generated"] for row in rows]
    canvas.draw_modes(left, lengths, [{"on": row["on_s"], "off": row["off_s"]} for row in rows])
    canvas.log_y([left], "time of the whole job, s")
    canvas.log_x(left, "generated tokens", lengths)
    canvas.draw_factors(
        right, [f"{length} generated tokens" for length in lengths], [row["times_faster"] for row in rows]
    )
    canvas.mode_legend(figure)
    return figure


def draw_steps(report: Report) -> Figure | None:
    """Draw the time of a step in both modes by context, a panel for each batch size."""
    panels = step_groups(report)
    if not panels:
        return None
    timed = [row[mode] for rows in panels for row in rows for mode in canvas.MODES if row.get(mode)]
    below = f"{_job(report)}; {canvas.counted(timed)}"
    heights, places = [3.6] * len(panels), range(len(panels))
    figure, axes = canvas.new_figure(crossover_words(report), below, heights=heights, times=places, sharey=True)
    for ax, rows in zip(axes, panels, strict=True):
        contexts = [row["context"] for row in rows]
        canvas.draw_modes(ax, contexts, rows, scale=1e3)
        canvas.log_x(ax, "context, tokens", contexts, factor=4.0)
        ax.set_title(f"batch {rows[0]['batch_size']}")
    for ax, one in zip(axes, crossovers(report), strict=False):
        if one["context"]:
            ax.axvline(one["context"], color=palette.INK.light, lw=1.2, ls=canvas.DASHES)
        else:
            ax.text(0.03, 0.97, "no crossover", transform=ax.transAxes, va="top", color=palette.MUTED.light)
    canvas.log_y(axes, "time of a step, ms")
    canvas.mode_legend(figure)
    return figure


def draw_kinds(report: Report) -> Figure | None:
    """Draw bytes, time and quality of every kind of cache at one length, a row for each kind, all bars from zero."""
    rows = kind_rows(report)
    measured = [row for row in rows if not row.get("predicted")]
    if not measured:
        return None
    compared, words = [row for row in measured if row["of_full"] is not None], "Bytes, time and quality by kind"
    if compared:
        least = min(compared, key=lambda row: row["of_full"])
        words = f"{least['kind']} stores {share_of_full(least, kind_names(report)[0], '.2g')}"
        words += f" and differs at {positions(least, other=True)}" if least["judged"] else ""
    heights, names = [canvas.row_height(len(rows))] * 3, [row["kind"] for row in rows]
    scored = f"the last {measured[0]['tokens']:,} positions against the model without a cache"
    below = f"one row of {rows[0]['context']:,} tokens; MB is 2^20 bytes; top-1: {scored}"
    figure, axes = canvas.new_figure(words, below, heights=heights, times=(1,), legend=False)
    stored, predicted = [row["cache_bytes"] / MB for row in rows], [bool(row.get("predicted")) for row in rows]
    seconds = [1e3 * statistics.median(row["step_seconds"]) if row.get("step_seconds") else None for row in rows]
    other = [100 * (1 - row["top1_agreement"]) if row["judged"] else None for row in rows]
    canvas.draw_bars(axes[0], names, stored, "KV cache, MB", ".3g", color=palette.CACHE.light, predicted=predicted)
    canvas.draw_bars(axes[1], names, seconds, "time per token, ms", ".3g", missing=NOT_MEASURED)
    canvas.draw_bars(
        axes[2], names, other, "other top-1 token, %", ".2f", color=palette.RECOMPUTED.light, missing=NOT_JUDGED
    )
    return figure


def draw_pareto(report: Report) -> Figure | None:
    """Draw each kind's share of other top-1 tokens against its bytes and its time, and the kinds that none beats."""
    rows = [row for row in kind_rows(report) if row["judged"] and row.get("step_seconds")]
    if len(rows) < 3:
        return None
    other = [100 * (1 - row["top1_agreement"]) for row in rows]
    panels = (("KV cache, MB", [row["cache_bytes"] / MB for row in rows]),
              ("time per token, ms", [1e3 * statistics.median(row["step_seconds"]) for row in rows]))  # fmt: skip
    best = [rows[place]["kind"] for place in unbeaten(panels[0][1], other)]
    words = f"Of {len(rows)} kinds, none beats {', '.join(best)} in both bytes and agreement"
    tall = max(3.6, 0.8 + 0.24 * len(rows))
    below = f"one row of {rows[0]['context']:,} tokens; lower and further left is better; line: kinds that none beats"
    figure, axes = canvas.new_figure(words, below, heights=[tall] * 2, times=(1,), legend=False, sharey=True)
    for ax, (name, values) in zip(axes, panels, strict=True):
        ax.set_yscale("symlog", linthresh=0.1)
        ax.scatter(values, other, s=26, color=palette.CACHE.light, zorder=3)
        front = unbeaten(values, other)
        ax.plot([values[place] for place in front], [other[place] for place in front], color=palette.MUTED.light, lw=1)
        ax.set(xlabel=name, xlim=(0, 1.08 * max(values)), ylim=(-0.02, 2.5 * max(0.1, *other)))
        ax.yaxis.set_major_formatter("{x:g}")
    axes[0].set_ylabel("other top-1 token, % (log scale)")
    # Names stand in a column at the right, in the order of the points, each with a line to its point.
    thin: dict[str, Any] = {"arrowstyle": "-", "color": palette.GRID.light, "lw": 0.8, "shrinkA": 1, "shrinkB": 3}
    order = sorted(range(len(rows)), key=lambda place: (-other[place], panels[1][1][place]))
    for number, place in enumerate(order):
        at = 1 - (number + 0.5) / len(order)
        ends = (panels[1][1][place], other[place]), (1.05, at)
        axes[1].annotate("", *ends, textcoords="axes fraction", arrowprops=thin)
        axes[1].text(1.06, at, rows[place]["kind"], transform=axes[1].transAxes, va="center")
    return figure


def _job(report: Report, grouped: Sequence[Sequence[CellView]] = ()) -> str:
    """Return the small words of a picture: model, lengths, precision and device, and the counts of `grouped`."""
    cells = report["cells"]
    words = [report["model"]["name"]] if report["model"] is not None else []
    words += sorted({f"{cell['input_len']} tokens in, {cell['output_len']} out" for cell in cells})
    words += sorted({f"{cell['dtype']} on {cell['device']}" for cell in cells})
    measured = [_seconds(view) for group in grouped for view in group if view.is_measured]
    hollow = "; hollow: predicted" if any(view.is_predicted for group in grouped for view in group) else ""
    return ", ".join(words) + (f"; {canvas.counted(measured)}" if measured else "") + hollow
