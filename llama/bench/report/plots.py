"""A report as pictures. The only file that knows matplotlib; it keeps no state there, and opens no window.

Blue is with the cache and vermilion without, everywhere: two colours of Okabe and Ito's palette, which stay apart for
colour-blind eyes (https://jfly.uni-koeln.de/color/).
"""

import io
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, LogLocator, NullLocator

from llama.bench.report.caches import context_of_size, held_at, step_at
from llama.bench.report.chat import Column, chats_of, columns
from llama.bench.report.tables import (
    DISTURBED,
    disturbances,
    fit_name,
    groups,
    least_to_most,
    median,
    on_or_off,
    pairs,
    runner,
    slope_words,
    stands_apart,
    summary_of,
)
from llama.bench.schema import Caches, CellRecord, Crossover, Fit, Report, Spread, StepTimes, Sweep
from llama.bench.statistics import percentiles
from llama.costs import MB, size

COLORS = {True: "#0072B2", False: "#D55E00"}
MODES = {True: "with the cache", False: "without"}
WAY_COLORS = {"kept": COLORS[True], "anew": "#009E73", "off": COLORS[False]}
_LEDGER = ["#AEB6C2", "#009E73", "#F0E442", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#4D4D4D"]
_REST = "#ECEFF3"
_REST_NAME = "beyond the ledger"
_INK, _FAINT, _GRID = "#1F2933", "#5B6875", "#E3E7EC"
_WIDTH = 9.0  # inches; at 100 dots an inch what a page of 900 px shows
_LABEL: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 10, "color": _INK}
_EDGE: dict[str, Any] = {"edgecolor": _FAINT, "lw": 0.6}
_STYLE: dict[Any, Any] = {
    **{f"axes.spines.{side}": False for side in ("top", "right")},
    **{"axes.edgecolor": _FAINT, "axes.labelcolor": _INK, "axes.labelsize": 11, "axes.titlesize": 11},
    **{"axes.titlecolor": _INK, "xtick.color": _INK, "ytick.color": _INK},
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": _GRID, "grid.linewidth": 0.8},
    **{"legend.facecolor": "white", "legend.edgecolor": "none", "legend.framealpha": 0.9, "legend.fontsize": 10},
    "text.parse_math": False,  # no dollar sign in a name begins a formula
}


def figures(report: Report) -> dict[str, Figure]:
    """Return the pictures that the report has figures for, by name, in reading order."""
    sweep = report["sweep"]
    of_table = {"time": _time, "memory": _memory, "steps": _steps, "crossover": _crossover}
    of_sweep = {"speedup": _speedup, "cache": _cache, "context": _context, "batch": _batch}
    caches, chat = report.get("caches"), report.get("chat")
    of_chat = {"chat_time": _chat_time, "chat_bytes": _chat_bytes}
    of_caches = {"cache_quality": _cache_quality, "cache_time": _cache_time}
    with matplotlib.rc_context(_STYLE):
        if caches is not None:
            drawn = {name: draw(caches) for name, draw in of_caches.items()}
        elif chat is not None:
            drawn = {name: draw(report) for name, draw in of_chat.items()}
        elif sweep is None:
            drawn = {name: draw(report) for name, draw in of_table.items()}
        else:
            drawn = {name: draw(sweep) for name, draw in of_sweep.items()}
    found = {name: figure for name, figure in drawn.items() if figure is not None}
    for figure in found.values() if disturbances(report) else ():
        # Across the picture, so that it is there too where only a part of it is shown.
        words = DISTURBED.replace(", ", "\n")
        figure.text(0.5, 0.45, words, ha="center", va="center", rotation=20, fontsize=32, color="#B00020", alpha=0.3)
    return {name: _settled(figure) for name, figure in found.items()}


def _settled(figure: Figure) -> Figure:
    """Return the figure with everything put in its place for good.

    Laid out anew, drawings would differ a little, and the solver's last digits differ from run to run: they are cut.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for ax in figure.axes:
        left, bottom, width, height = (round(value, 4) for value in ax.get_position().bounds)
        ax.set_position((left, bottom, width, height))
    return figure


def as_svg(figure: Figure) -> str:
    """Return the picture as SVG; the same picture gives the same text."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "llama", "svg.fonttype": "path"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def heading(figure: Figure) -> str:
    """Return the heading over the picture, which says what it shows."""
    return " ".join(figure.texts[0].get_text().split())


def as_png(figure: Figure) -> bytes:
    """Return the picture as PNG, 1350 px wide; the same picture gives the same bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    return out.getvalue()


def _time(report: Report) -> Figure | None:
    """Draw the time of the whole job, the modes side by side, and over each pair how many times less it takes."""
    grouped = groups(report)
    if not grouped:
        return None
    crowded, upright = len(grouped) > 5, len(grouped) > 9  # upright: words that would run into each other
    heading = "Time of the whole job, with the cache and without"
    figure, (ax,) = _figure(heading, _job(report), below_axis=2.0 if upright else 0.0)
    for place, group in enumerate(grouped):
        for record, side in zip(group, _sides(len(group)), strict=True):
            _draw_bar(ax, place + side, record, fontsize=8 if crowded else 10, upright=upright)
        both = [(_seconds(on), _seconds(off)) for on, off in pairs(report) if on in group and off in group]
        if len(both) == 1 and not upright:
            top = max(_seconds(record)["p90"] for record in group)
            factor = _LABEL | {"fontsize": 10 if crowded else 13, "weight": "bold"}
            ax.annotate(f"{both[0][1]['median'] / both[0][0]['median']:.1f}x", (place, top), (0, 22), **factor)
    _log_y([ax], "time of the whole job, seconds")
    spreads = [_seconds(record) for group in grouped for record in group]
    lowest, highest = min(one["p10"] for one in spreads) / 2, max(one["p90"] for one in spreads)
    ax.set_ylim(lowest, highest * (highest / lowest) ** 0.3)
    ax.set_xlim(-0.7, len(grouped) - 0.3)
    names = [_group_name(group[0], grouped) for group in grouped]
    ax.set_xticks(range(len(grouped)), [name.replace("\n", ", ") for name in names] if upright else names)
    if upright:
        ax.tick_params("x", rotation=90, labelsize=9)
    _mode_legend(ax, loc="upper left", ncols=2)
    return figure


def _sides(count: int) -> list[float]:
    """Return where so many bars of a group stand around its middle."""
    return [0.4 * (i - (count - 1) / 2) for i in range(count)]


def _draw_bar(ax: Axes, place: float, record: CellRecord, *, fontsize: float, upright: bool) -> None:
    seconds, color = _seconds(record), COLORS[record["cell"]["kv_caching"]]
    ax.bar(place, seconds["median"], 0.36, color=color, yerr=_bars([seconds]), capsize=4, ecolor=_INK)
    look = _LABEL | {"fontsize": fontsize, "rotation": 90 if upright else 0}
    ax.annotate(f"{seconds['median']:.3g} s", (place, seconds["p90"]), (0, 4), **look)


def _group_name(record: CellRecord, grouped: Sequence[Sequence[CellRecord]]) -> str:
    """Return the words under a group of cells; the engine only where there is more than one."""
    engines = {group[0]["cell"]["engine"] for group in grouped}
    cell = record["cell"]
    below = [cell["engine"]] if len(engines) > 1 else []
    below += [runner(record)] if stands_apart(record) else []
    below += [f"{cell['quantize']}"] if cell["quantize"] else []
    below += [f"{cell['activations']}-bit act."] if cell["activations"] != 16 else []
    below += ["all logits"] if record["cell"]["logits"] == "all" else []
    return "\n".join([f"batch {record['cell']['batch_size']}", *below])


def _memory(report: Report) -> Figure | None:
    """Draw each cell's peak as a bar of the ledger's lines, and of what they leave unexplained."""
    grouped = [kept for group in groups(report) if (kept := [one for one in group if one["ledger"] is not None])]
    if not grouped:
        return None
    places = [2.5 * place + 2.5 * side for place, group in enumerate(grouped) for side in _sides(len(group))]
    records = [record for group in grouped for record in group]
    figure, (ax,) = _figure("What the memory is made of at its peak, with the cache on and off", _job(report))
    tops = _draw_stacks(ax, places, records)
    for place, record, top in zip(places, records, tops, strict=True):
        peak = median(summary_of(record)["peak_bytes"])
        words = f"{top:,.0f}\npredicted" if peak is None else f"{peak / MB:,.0f}"
        ax.annotate(words, (place, top), (0, 4), **_LABEL)
    ax.set_xticks(places, [on_or_off(record["cell"]["kv_caching"]) for record in records])
    for tick, record in zip(ax.get_xticklabels(), records, strict=True):
        tick.set(color=COLORS[record["cell"]["kv_caching"]], weight="bold")
    names = ax.secondary_xaxis(-0.06)
    names.set_xticks([2.5 * place for place in range(len(grouped))], [_group_name(one[0], grouped) for one in grouped])
    names.tick_params(length=0, labelsize=9 if len(grouped) > 6 else 10, colors=_INK)
    names.spines["bottom"].set_visible(False)
    ax.set_ylim(0, max(tops) * 1.1)
    ax.yaxis.set_major_formatter(FuncFormatter(_plain))
    ax.set(ylabel="peak memory, MB (2^20 bytes)")
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=10)
    return figure


def _draw_stacks(ax: Axes, places: Sequence[float], records: Sequence[CellRecord]) -> list[float]:
    """Draw a bar per cell, each line of the ledger in its colour, and return the heights in MB."""
    stacks = [_parts(record) for record in records]
    names = list(dict.fromkeys(name for stack in stacks for name in stack))
    named = [name for name in names if name != _REST_NAME]
    colors = dict(zip(named, _LEDGER * len(named), strict=False))
    tops = [0.0] * len(records)
    for name in [*named, *(name for name in names if name not in named)]:
        heights = [stack.get(name, 0.0) / MB for stack in stacks]
        ax.bar(places, heights, 0.86, tops, color=colors.get(name, _REST), label=name, **_EDGE)
        tops = [top + height for top, height in zip(tops, heights, strict=True)]
    return tops


def _parts(record: CellRecord) -> dict[str, float]:
    """Return the bytes of each line that is there at the peak, measured where they were, and of the rest."""
    ledger = record["ledger"]
    assert ledger is not None
    parts: dict[str, float] = {}
    for line in ledger["lines"]:
        nbytes = line["predicted"] if line["measured"] is None else line["measured"]
        if line["counts"] and nbytes > 0:
            name = "activations" if line["name"].endswith(" activations") else line["name"]  # of whichever step
            parts[name] = parts.get(name, 0.0) + nbytes
    rest = (median(summary_of(record)["peak_bytes"]) or 0.0) - sum(parts.values())
    return parts | ({_REST_NAME: rest} if rest > 0 else {})


def _steps(report: Report) -> Figure | None:
    """Draw the time of every step along the generation, a panel per pair of cells."""
    both = [pair for pair in pairs(report) if all(_step_medians(record) for record in pair)]
    if not both:
        return None
    on, off = (least_to_most([_growth(_step_medians(pair[side])) for pair in both], ".2f", "x") for side in (0, 1))
    heading = f"Without the cache a step grows {off} along the generation, with it {on}"
    below = f"{_job(report)}; growth: last quarter over first".replace("bars from p10 to p90", "faint: each run")
    figure, axes = _figure(heading, below, panels=len(both), share=True)
    for ax, pair in zip(axes, both, strict=True):
        for record in pair:
            _draw_steps(ax, record)
        ax.set_title(_group_name(pair[0], both).replace("\n", ", "))
        ax.set(xlabel="output token")
    _log_y(axes, "time of the step, ms")
    _mode_legend(figure, loc="outside lower center", ncols=2)
    return figure


def _draw_steps(ax: Axes, record: CellRecord) -> None:
    color = COLORS[record["cell"]["kv_caching"]]
    middle = _step_medians(record)
    tokens = range(2, len(middle) + 2)  # the first token is the prefill's
    for sample in record["samples"]:
        times = [1e3 * seconds for seconds in sample["step_seconds"]]
        ax.plot(range(2, len(times) + 2), times, color=color, lw=0.8, alpha=0.3)
    ax.plot(tokens, [1e3 * s for s in middle], color=color, lw=2.2, label=MODES[record["cell"]["kv_caching"]])


def _step_medians(record: CellRecord) -> list[float]:
    steps = [sample["step_seconds"] for sample in record["samples"]]
    return [statistics.median(times) for times in zip(*steps, strict=False)]


def _growth(times: Sequence[float]) -> float:
    """Return how the last quarter of the steps compares with the first."""
    quarter = max(1, len(times) // 4)
    return statistics.median(times[-quarter:]) / statistics.median(times[:quarter])


def _crossover(report: Report) -> Figure | None:
    """Draw the time of a step against the context in both modes, a panel per batch size, and where they cross."""
    crossovers = [one for one in report["crossovers"] if one["steps"]]
    if not crossovers:
        return None
    below = f"{_job(report, lengths=False)}; {_counted(s['seconds'] for one in crossovers for s in one['steps'])}"
    figure, axes = _figure(_crossover_title(crossovers), below, panels=len(crossovers), share=True)
    for ax, one in zip(axes, crossovers, strict=True):
        _draw_contexts(ax, one["steps"])
        _mark_crossover(ax, one)
        ax.set_title(f"batch {one['batch_size']}")
    _log_y(axes, "time of a step, ms")
    _mode_legend(figure, loc="outside lower center", ncols=2)
    return figure


def _crossover_title(crossovers: Sequence[Crossover]) -> str:
    found = [one["context"] for one in crossovers if one["context"] is not None]
    if not found:
        return "The cache does not pay at any context that was tried"
    never = [str(one["batch_size"]) for one in crossovers if one["context"] is None]
    but = f", not at batch {', '.join(never)}" if never else ""
    return f"The cache pays from a context of {least_to_most(found)} tokens on{but}"


def _mark_crossover(ax: Axes, crossover: Crossover) -> None:
    if crossover["context"] is None:
        ax.text(0.03, 0.97, "no crossover", transform=ax.transAxes, va="top", color=_FAINT, fontsize=10)
        return
    ax.axvline(crossover["context"], color=_INK, lw=1.2, ls=(0, (4, 3)))
    contexts = [step["context"] for step in crossover["steps"]]
    right = crossover["context"] ** 2 > min(contexts) * max(contexts)  # of the middle of the axis
    aside: dict[str, Any] = {"ha": "right" if right else "left", "va": "top", "xycoords": ("data", "axes fraction")}
    words = f"pays from\n{crossover['context']} tokens"
    ax.annotate(words, (crossover["context"], 0.98), (-5 if right else 5, 0), **_LABEL | aside)


def _draw_contexts(ax: Axes, steps: Sequence[StepTimes]) -> None:
    """Draw step times against the context, both axes in logarithms; the bars reach from p10 to p90."""
    for kv_caching in (True, False):
        own = sorted((one for one in steps if one["kv_caching"] == kv_caching), key=lambda one: one["context"])
        spreads = [_changed(one["seconds"], lambda seconds: 1e3 * seconds) for one in own]
        _line(ax, [one["context"] for one in own], spreads, kv_caching)
    _log_x(ax, "context, tokens", [one["context"] for one in steps], base=2, apart=2.0)


def _speedup(sweep: Sweep) -> Figure | None:
    """Draw times of both modes, and their ratio, against the number of generated tokens."""
    growth = sorted(sweep["growth"], key=lambda one: one["generated"])
    if not growth:
        return None
    first, last = growth[0], growth[-1]
    heading = f"The cache saves {first['speedup']:.1f}x at {first['generated']} generated tokens"
    heading += f", {last['speedup']:.1f}x at {last['generated']}" if len(growth) > 1 else ""
    figure, (left, right) = _figure(heading, _counted(one["cached_seconds"] for one in growth), panels=2)
    lengths = [one["generated"] for one in growth]
    _line(left, lengths, [one["cached_seconds"] for one in growth], True)
    _line(left, lengths, [one["uncached_seconds"] for one in growth], False)
    _log_y([left], "time of the whole job, s")
    right.plot(lengths, [one["speedup"] for one in growth], color=_INK, marker="o", lw=2)
    for one in growth:
        place = (one["generated"], one["speedup"])
        right.annotate(f"{one['speedup']:.1f}x", place, (-5, 4), **_LABEL | {"ha": "right"})
    right.set_ylim(0, 1.15 * max(1.0, *(one["speedup"] for one in growth)))
    right.margins(x=0.2)
    right.axhline(1, color=_FAINT, lw=1, ls=(0, (4, 3)))
    right.set(ylabel="times faster with the cache")
    for ax in (left, right):
        _log_x(ax, "generated tokens", lengths)
    left.legend(loc="upper left")
    return figure


def _cache(sweep: Sweep) -> Figure | None:
    """Draw the bytes of the cache against its length: the prediction as a line, the measured sizes as points."""
    sizes = sorted(sweep["cache"], key=lambda one: one["length"])
    if not sizes:
        return None
    apart = max(abs(one["measured"] - one["predicted"]) / max(one["predicted"], 1) for one in sizes)
    held = "as predicted, to the byte" if apart == 0 else f"within {apart:.1%} of the prediction"
    each = sizes[-1]["measured"] / sizes[-1]["length"]
    heading = f"Every token takes {each / 1024:.1f} KB of the KV cache, {held}"
    figure, (ax,) = _figure(heading, "one row of tokens; KB is 2^10 bytes, MB 2^20")
    lengths = [one["length"] for one in sizes]
    ax.plot(lengths, [one["predicted"] for one in sizes], color=_FAINT, lw=2, label="predicted from the model's sizes")
    measured = [one["measured"] for one in sizes]
    ax.plot(lengths, measured, "o", color=COLORS[True], ms=8, label="measured, bytes of the tensors")
    for one in sizes:
        place = (one["length"], one["measured"])
        ax.annotate(size(one["measured"]), place, (9, -4), **_LABEL | {"ha": "left", "va": "top"})
    _log_x(ax, "length, tokens", lengths, base=2)
    ax.set_yscale("log", base=2)
    ax.set_ylabel("bytes of the KV cache (log scale)")
    ax.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.8)
    ax.set_ylim(measured[0] / 1.8, measured[-1] * 1.5)
    _ticks(ax.yaxis, LogLocator(base=4), lambda value, _: size(int(value)))
    ax.legend(loc="upper left")
    return figure


def _context(sweep: Sweep) -> Figure | None:
    """Draw the time per token against the context in both modes, with the fitted lines."""
    steps = sweep["contexts"]
    if not steps:
        return None
    fits = [fit for fit in sweep["fits"] if fit["of"] == "token"]  # those of whole texts: in the table
    grown = [f"context^{fit['exponent']:.2f} {MODES[fit['kv_caching']]}" for fit in fits]
    heading = "Time per token grows as " + ", ".join(grown) if grown else "Time per token as the context grows"
    figure, (ax,) = _figure(heading, _counted(one["seconds"] for one in steps) + "; exponents of the longer half")
    _draw_contexts(ax, steps)
    for fit in fits:
        _draw_fit(ax, fit, sorted({one["context"] for one in steps}))
    _log_y([ax], "time per token, ms")
    ax.legend(loc="upper left")
    return figure


def _draw_fit(ax: Axes, fit: Fit, contexts: Sequence[int]) -> None:
    times = {context: 1e3 * (fit["base"] + fit["slope"] * context) for context in contexts}
    shown = {context: time for context, time in times.items() if time > 0}  # a logarithm has no place for the others
    line = f"{fit['base'] * 1e3:.3g} ms + {slope_words(fit['slope'])} us per 1000 tokens"
    label = f"{fit_name(fit)}: {line}; exponent {fit['exponent']:.2f}"
    ax.plot([*shown], [*shown.values()], color=COLORS[fit["kv_caching"]], lw=1.4, ls=(0, (2, 2)), label=label)


def _batch(sweep: Sweep) -> Figure | None:
    """Draw the tokens a second that all rows make together against the batch size, in both modes."""
    steps = sorted(sweep["batches"], key=lambda one: one["batch_size"])
    if not steps:
        return None
    figure, (ax,) = _figure(_batch_title(steps), _counted(one["seconds"] for one in steps))
    for kv_caching in (True, False):
        own = [one for one in steps if one["kv_caching"] == kv_caching]
        spreads = [_per_second(one) for one in own]
        _line(ax, [one["batch_size"] for one in own], spreads, kv_caching)
        for one, figures in zip(own, spreads, strict=True):
            ax.annotate(f"{figures['median']:.3g}", (one["batch_size"], figures["median"]), (0, 8), **_LABEL)
    _log_x(ax, "batch size", [one["batch_size"] for one in steps], base=2)
    _log_y([ax], "decode tokens/s, all rows")
    ax.margins(y=0.15)
    ax.legend(loc="best")
    return figure


def _batch_title(steps: Sequence[StepTimes]) -> str:
    said = []
    for kv_caching in (True, False):
        own = [one for one in steps if one["kv_caching"] == kv_caching]
        if own:
            gain = _per_second(own[-1])["median"] / _per_second(own[0])["median"]
            said.append(f"{gain:.1f}x {MODES[kv_caching]}")
    return f"From batch {steps[0]['batch_size']} to {steps[-1]['batch_size']} the tokens/s grow {', '.join(said)}"


def _per_second(step: StepTimes) -> Spread:
    return _changed(step["seconds"], lambda seconds: step["batch_size"] / seconds)


def _cache_quality(caches: Caches) -> Figure | None:
    """Draw how often each kind finds the full cache's most likely token against the bytes that it holds."""
    at = context_of_size(caches)
    points = [
        _Kind(one["kind"], held / MB, 100 * one["quality"]["top1_agreement"], one["lossless"] is True)
        for one in caches["kinds"]
        if (held := held_at(one, at)) is not None and one["quality"] is not None
    ]
    if not points:
        return None
    figure, ax = _kinds_figure("Memory against quality, by kind of cache", at, points)
    ax.set_ylabel(f"same most likely token as {caches['kinds'][0]['kind']}, %")
    return figure


def _cache_time(caches: Caches) -> Figure | None:
    """Draw each kind's time per token against the bytes that it holds."""
    at = context_of_size(caches)
    points = [
        _Kind(one["kind"], held / MB, 1e3 * step["seconds"]["median"], one["lossless"] is True)
        for one in caches["kinds"]
        if (held := held_at(one, at)) is not None and (step := step_at(one, at)) is not None
    ]
    if not points:
        return None
    figure, ax = _kinds_figure("Memory against time per token, by kind of cache", at, points)
    ax.set_ylim(bottom=0)
    ax.set_ylabel(f"time per token at {at:,} tokens, ms, median")
    return figure


def _chat_time(report: Report) -> Figure | None:
    """Draw the time to the first token of each turn, a line for each way of each engine."""
    found = columns(report)
    if not found:
        return None
    counted = _counted(percentiles(times) for column in found for times in column.way["seconds"])
    figure, ax = _turns_figure("Time to first token, turn by turn", report, f"; {counted}")
    for column, look in zip(found, _looks(found), strict=True):
        spreads = [percentiles(times) for times in column.way["seconds"]]
        medians = [one["median"] for one in spreads]
        ax.errorbar(range(1, len(medians) + 1), medians, yerr=_bars(spreads), label=column.name, **look)
    _log_y([ax], "time to first token, seconds")
    figure.legend(loc="outside right center", frameon=False, fontsize=10)
    return figure


def _chat_bytes(report: Report) -> Figure | None:
    """Draw what the cache holds at the first token of each turn, of each way that has one."""
    found = [one for one in columns(report) if one.way["name"] != "off" and None not in one.way["cache_bytes"]]
    if not found:
        return None
    figure, ax = _turns_figure("What the cache holds, turn by turn", report)
    for column, look in zip(found, _looks(found), strict=True):
        held = [(nbytes or 0) / MB for nbytes in column.way["cache_bytes"]]
        ax.plot(range(1, len(held) + 1), held, label=column.name, **look)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("bytes held, MB (2^20 bytes)")
    figure.legend(loc="outside right center", frameon=False, fontsize=10)
    return figure


def _turns_figure(heading: str, report: Report, counted: str = "") -> tuple[Figure, Axes]:
    turns = chats_of(report)["plan"]["turns"]
    name = report["model"]["name"] if report["model"] is not None else ""
    cells = [record["cell"] for record in report["cells"]]
    job = ", ".join([name, *sorted({f"{cell['dtype']} on {cell['device']}" for cell in cells})])
    below = f"{job}; {turns[0]['history']:,} to {turns[-1]['history']:,} tokens stand before a turn"
    figure, (ax,) = _figure(heading, below + counted)
    ax.set_xlabel("turn")
    ax.set_xticks(range(1, len(turns) + 1))
    return figure, ax


def _looks(found: Sequence[Column]) -> list[dict[str, Any]]:
    """Return how each line looks: its colour says what becomes of the cache, its stroke and point who computes."""
    strokes = [("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (5, 1)), "v"), ((0, (1, 3)), "P")]
    own = dict(zip(dict.fromkeys(one.who for one in found), strokes * len(found), strict=False))
    return [
        {"color": WAY_COLORS[one.way["name"]], "ls": own[one.who][0], "marker": own[one.who][1], "ms": 4.5, "lw": 1.8}
        for one in found
    ]


class _Kind(NamedTuple):
    """A point of a picture of kinds: x is MB."""

    name: str
    x: float
    y: float
    lossless: bool


def _kinds_figure(heading: str, context: int, points: Sequence[_Kind]) -> tuple[Figure, Axes]:
    """Return a figure with a named point for each kind; those that lie on one another share their words."""
    below = f"one row of {context:,} tokens; hollow: a kind that does not keep all it is given"
    figure, (ax,) = _figure(heading, below)
    for one in points:
        face = COLORS[True] if one.lossless else "white"
        ax.plot(one.x, one.y, "o", ms=9, mec=COLORS[True], mfc=face, mew=1.8, clip_on=False)
    ax.set_xlim(0, 1.25 * max(one.x for one in points))
    ax.margins(y=0.15)
    ax.set_xlabel(f"bytes held at {context:,} tokens, MB (2^20 bytes)")
    for names, x, y in _together(points):
        right = x < 0.7 * ax.get_xlim()[1]
        ax.annotate(names, (x, y), (9 if right else -9, 5), **_LABEL | {"ha": "left" if right else "right"})
    return figure, ax


def _together(points: Sequence[_Kind]) -> list[tuple[str, float, float]]:
    """Return names and places; points that words could not tell apart have their names in one."""
    width = 1.25 * max(one.x for one in points) or 1.0
    height = max(one.y for one in points) - min(one.y for one in points) or 1.0
    groups: list[list[_Kind]] = []
    for one in sorted(points, key=lambda point: (point.x, point.y)):
        near = [
            group for group in groups
            if abs(group[0].x - one.x) < 0.15 * width and abs(group[0].y - one.y) < 0.05 * height
        ]  # fmt: skip
        if near:
            near[0].append(one)
        else:
            groups.append([one])
    return [(", ".join(one.name for one in group), group[-1].x, group[-1].y) for group in groups]


def _figure(
    heading: str, below: str, *, panels: int = 1, share: bool = False, below_axis: float = 0.0
) -> tuple[Figure, list[Axes]]:
    """Return a figure with its heading and empty panels, up to three in a row; `share` gives them one y axis.

    `below_axis` are inches for long words there.
    """
    count = len(textwrap.wrap(heading, 74))
    lines = textwrap.wrap(heading, min(74, -(-len(heading) // count) + 8))  # of about one length
    columns = min(panels, 3)
    rows = -(-panels // columns)
    head = 0.32 + 0.25 * len(lines)  # inches
    height = head + (4.0 if rows == 1 else 3.1 * rows) + below_axis
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    figure.set_layout_engine("constrained", rect=(0.005, 0.01, 0.99, 1 - (head + 0.12) / height), w_pad=0.06)
    figure.text(
        0.012, 1 - 0.1 / height, "\n".join(lines), fontsize=14, weight="bold", va="top", color=_INK,
        linespacing=1.2,
    )  # fmt: skip
    figure.text(0.012, 1 - (head + 0.02) / height, below, fontsize=10, va="bottom", color=_FAINT)
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share)
    axes = list(grid.flat)
    for ax in axes[panels:]:
        ax.remove()
    return figure, axes[:panels]


def _line(ax: Axes, places: Sequence[float], spreads: Sequence[Spread], kv_caching: bool) -> None:
    """Draw medians as a line with points, with bars from p10 to p90."""
    if not places:
        return
    medians = [one["median"] for one in spreads]
    color = COLORS[kv_caching]
    ax.errorbar(places, medians, yerr=_bars(spreads), color=color, ecolor=color, marker="o", ms=5.5, lw=2, capsize=3,
                label=MODES[kv_caching])  # fmt: skip


def _bars(spreads: Sequence[Spread]) -> list[list[float]]:
    """Return how far down to p10 and up to p90, as matplotlib wants its bars."""
    down = [max(0.0, one["median"] - one["p10"]) for one in spreads]
    return [down, [max(0.0, one["p90"] - one["median"]) for one in spreads]]


def _changed(figure: Spread, change: Callable[[float], float]) -> Spread:
    """Return a spread in another unit; p10 and p90 change places where less becomes more."""
    low, middle, high = sorted(map(change, (figure["p10"], figure["median"], figure["p90"])))
    return {"n": figure["n"], "median": middle, "p10": low, "p90": high}


def _seconds(record: CellRecord) -> Spread:
    return summary_of(record)["seconds"]


def _job(report: Report, *, lengths: bool = True) -> str:
    """Return the small words under a heading: model, lengths, precision and device, and the count."""
    records = [record for group in groups(report) for record in group]
    cells = [record["cell"] for record in records]
    words = [report["model"]["name"]] if report["model"] is not None else []
    if not cells:
        return ", ".join(words)
    if lengths:
        words += sorted({f"{cell['input_len']} tokens in, {cell['output_len']} out" for cell in cells})
    words += sorted({f"{cell['dtype']} on {cell['device']}" for cell in cells})
    return ", ".join(words) + (f"; {_counted(map(_seconds, records))}" if lengths else "")


def _counted(spreads: Iterable[Spread]) -> str:
    counts = {one["n"] for one in spreads}
    bars = "" if max(counts) == 1 else "medians, bars from p10 to p90, "
    return f"{bars}n = {least_to_most(counts)}"


def _plain(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:g}"


def _log_x(ax: Axes, name: str, values: Iterable[int], *, base: int = 10, apart: float = 1.0) -> None:
    """Name a logarithmic axis and its values, leaving out those that are not `apart` times the one before: for room."""
    kept: list[int] = []
    for value in sorted(set(values)):
        if not kept or value >= apart * kept[-1]:
            kept.append(value)
    ax.set_xscale("log", base=base)
    ax.set_xlabel(f"{name} (log scale)")
    _ticks(ax.xaxis, FixedLocator(kept), lambda value, _: f"{value:.0f}")


def _log_y(axes: Sequence[Axes], name: str) -> None:
    """Name the logarithmic axis of one panel, or of all that share it once in a row: 1, 2 and 5 of each decade."""
    axes[0].set_yscale("log")
    _ticks(axes[0].yaxis, LogLocator(subs=(1.0, 2.0, 5.0), numticks=20), _plain)
    for ax in axes[::3]:
        ax.set_ylabel(f"{name} (log scale)")


def _ticks(axis: Axis, places: Locator, words: Callable[[float, object], str]) -> None:
    axis.set_major_locator(places)
    axis.set_major_formatter(FuncFormatter(words))
    axis.set_minor_locator(NullLocator())


def _mode_legend(ax: Axes | Figure, **where: Any) -> None:
    ax.legend(handles=[Patch(color=COLORS[mode], label=MODES[mode]) for mode in (True, False)], **where)
