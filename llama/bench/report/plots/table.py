"""Pictures of a with/without table: times, the peak and what rules it, steps, peers, where the cache begins to pay."""

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from llama.bench.report.findings import all_less
from llama.bench.report.peak import PARTS, peak_bytes, peak_parts
from llama.bench.report.plots.canvas import (
    COLORS,
    DASHES,
    Look,
    bars,
    changed,
    counted,
    draw_factors,
    draw_line,
    draw_rows,
    legend,
    log_x,
    log_y,
    mode_legend,
    new_figure,
    plain,
    row_heights,
    ticks,
)
from llama.bench.report.tables import (
    group_name,
    groups,
    least_to_most,
    on_or_off,
    pairs,
    peak_lines,
    peers,
    summary_of,
)
from llama.bench.schema import CellRecord, Crossover, Report, Spread, StepTimes
from llama.cli.palette import ACTIVATIONS, CACHE, FAINT, GRID, INK, LOGITS, PAPER, UNNAMED, WEIGHTS, WORKSPACE
from llama.costs import MB

PART_COLORS = dict(zip(PARTS, (WEIGHTS, CACHE, LOGITS, ACTIVATIONS, WORKSPACE, UNNAMED), strict=True))


def draw_time(report: Report, look: Look) -> Figure | None:
    """Draw the time of the whole job in both modes, a row a pair, and beside it how many times less the cache takes."""
    grouped = groups(report)
    if not grouped:
        return None
    both = {id(on): _seconds(off)["median"] / _seconds(on)["median"] for on, off in pairs(report)}
    factors = [next((both[id(one)] for one in group if id(one) in both), None) for group in grouped]
    names = [group_name(group[0], grouped) for group in grouped]
    heights = row_heights(len(grouped), len(both) if look.narrow else len(grouped))[: 2 if both else 1]
    ratios = None if look.narrow else [3, 2][: len(heights)]
    figure, axes = new_figure(look, _saved([*both.values()]), _job(report), heights=heights, width_ratios=ratios)
    draw_rows(axes[0], names, range(len(names)))
    for place, group in enumerate(grouped):
        _draw_times(axes[0], place, sorted(group, key=lambda one: _seconds(one)["median"]))
    axes[0].set_xscale("log")
    spreads = [_seconds(record) for group in grouped for record in group]
    lowest, highest = min(one["p10"] for one in spreads), max(one["p90"] for one in spreads)
    room = (highest / lowest) ** 0.24 * 1.5  # for the words at both ends
    axes[0].set_xlim(lowest / room, highest * room)
    ticks(axes[0].xaxis, _decades(highest / lowest, look), plain)
    axes[0].set_xlabel("time of the whole job, s (log scale)")
    if both:
        shown = [place for place, factor in enumerate(factors) if factor is not None or not look.narrow]
        named = [names[place] if look.narrow else "" for place in shown]
        draw_factors(axes[1], named, [factors[place] for place in shown], "times less time with the cache")
    mode_legend(figure)
    return figure


def _saved(factors: Sequence[float]) -> str:
    """Return the heading over times: what the cache saves, from where to where."""
    return f"With the cache the same job takes {all_less(factors)} time" if factors else "Time of the whole job"


def _draw_times(ax: Axes, place: int, records: Sequence[CellRecord]) -> None:
    """Draw a point for each record, its time written at the outer side, and a line between two."""
    spreads = [_seconds(record) for record in records]
    ax.plot([one["median"] for one in spreads], [place] * len(spreads), color=GRID.light, lw=4, zorder=1)
    for i, (record, one) in enumerate(zip(records, spreads, strict=True)):
        on = record["cell"]["kv_caching"]
        ax.errorbar(
            one["median"], place, xerr=bars([one]), color=COLORS[on], marker="o" if on else "s", ms=6, capsize=3
        )
        left = i == 0 and len(records) > 1
        ax.annotate(f"{one['median']:.3g} s", (one["p10"] if left else one["p90"], place), (-7 if left else 7, 0),
                    textcoords="offset points", va="center", ha="right" if left else "left")  # fmt: skip


def _decades(span: float, look: Look) -> LogLocator:
    return LogLocator(subs=(1.0,) if span > (30 if look.narrow else 3000) else (1.0, 2.0, 5.0), numticks=20)


def draw_peers(report: Report, look: Look) -> Figure | None:
    """Draw how many times faster each of our paths is than each other engine, a panel a path."""
    paths, found = peers(report)
    known = {path: [(name, factors[place]) for name, factors in found] for place, path in enumerate(paths)}
    held = {path: [(name, factor) for name, factor in rows if factor is not None] for path, rows in known.items()}
    held = {path: rows for path, rows in held.items() if rows}
    if not held:
        return None
    every = [factor for rows in held.values() for _, factor in rows]
    heading = f"Ours makes {least_to_most(every, '.2f', 'x')} the tokens per second of the others"
    heights = row_heights(*map(len, held.values()))
    figure, axes = new_figure(look, heading, _job(report), heights=heights, across=2, legend=0)
    for ax, (path, rows) in zip(axes, held.items(), strict=True):
        draw_factors(ax, [name for name, _ in rows], [factor for _, factor in rows], "times as many tokens per second")
        ax.set_title(f"our {path}")
    return figure


def draw_memory(report: Report, look: Look) -> Figure | None:
    """Draw each cell's peak as a bar of what it is made of, under the sentence that says what rules it."""
    grouped = [kept for group in groups(report) if (kept := [one for one in group if one["ledger"] is not None])]
    if not grouped:
        return None
    records = [record for group in grouped for record in group]
    places = [
        place + 0.3 * i for place, (i, _) in enumerate((i, one) for i, group in enumerate(grouped) for one in group)
    ]
    heading = peak_lines(report)[0].rstrip(".")
    lines = 2 if look.narrow else 1
    figure, (ax,) = new_figure(
        look, heading, _job(report, count=False), heights=row_heights(places[-1] + 1), legend=lines
    )
    names = [f"{group_name(one, grouped)}, cache {on_or_off(one['cell']['kv_caching'])}" for one in records]
    for words, record in zip(draw_rows(ax, names, places), records, strict=True):
        words.set(color=COLORS[record["cell"]["kv_caching"]], weight="bold")
    _draw_stacks(ax, places, records)
    ax.xaxis.set_major_formatter(FuncFormatter(plain))
    ax.set_xlabel("memory at the peak, MB (2^20 bytes)")
    legend(figure, ncols=-(-len(ax.containers) // lines))
    return figure


def _draw_stacks(ax: Axes, places: Sequence[float], records: Sequence[CellRecord]) -> None:
    """Draw a bar per cell, each part of its peak in its colour, and write the whole at its end."""
    stacks, ends = [], [0.0] * len(records)
    for record in records:
        assert record["ledger"] is not None
        stacks.append(peak_parts(record["ledger"]))
    for part in (part for part in PARTS if any(part in stack for stack in stacks)):
        widths = [stack.get(part, 0) / MB for stack in stacks]
        ax.barh(places, widths, 0.42, ends, color=PART_COLORS[part].light, label=part, edgecolor=PAPER.light, lw=0.8)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, record, end in zip(places, records, ends, strict=True):
        assert record["ledger"] is not None
        told = " predicted" if record["ledger"]["measured_peak"] is None else ""
        ax.annotate(f"{plain(peak_bytes(record['ledger']) / MB)}{told}", (end, place), (4, 0),
                    textcoords="offset points", va="center")  # fmt: skip
    ax.set_xlim(0, 1.12 * max(ends))


def draw_steps(report: Report, look: Look) -> Figure | None:
    """Draw the time of every step along the generation, a panel per pair of cells."""
    both = [pair for pair in pairs(report) if all(_step_medians(record) for record in pair)]
    if not both:
        return None
    on, off = (least_to_most([_growth(_step_medians(pair[side])) for pair in both], ".2f", "x") for side in (0, 1))
    heading = f"Without the cache a step grows {off} along the generation, with it {on}"
    below = f"{_job(report)}; growth: last quarter over first".replace("bars from p10 to p90", "faint: each run")
    heights = [1.7 if look.narrow else 2.9] * len(both)
    figure, axes = new_figure(look, heading, below, heights=heights, sharey=True, sharex=look.narrow)
    for ax, pair in zip(axes, both, strict=True):
        for record in pair:
            _draw_steps(ax, record)
        ax.set_title(group_name(pair[0], both))
        ax.label_outer()
    for ax in axes[-1:] if look.narrow else axes[-3:]:
        ax.set_xlabel("output token")
    log_y(axes, "step, ms" if look.narrow else "time of the step, ms")
    mode_legend(figure)
    return figure


def _draw_steps(ax: Axes, record: CellRecord) -> None:
    color = COLORS[record["cell"]["kv_caching"]]
    middle = _step_medians(record)
    tokens = range(2, len(middle) + 2)  # the first token is the prefill's
    for sample in record["samples"]:
        times = [1e3 * seconds for seconds in sample["step_seconds"]]
        ax.plot(range(2, len(times) + 2), times, color=color, lw=0.8, alpha=0.3)
    dashes = "-" if record["cell"]["kv_caching"] else (0, (5, 1))
    ax.plot(tokens, [1e3 * s for s in middle], color=color, lw=2.2, ls=dashes)


def _step_medians(record: CellRecord) -> list[float]:
    steps = [sample["step_seconds"] for sample in record["samples"]]
    return [statistics.median(times) for times in zip(*steps, strict=False)]


def _growth(times: Sequence[float]) -> float:
    """Return how the last quarter of the steps compares with the first."""
    quarter = max(1, len(times) // 4)
    return statistics.median(times[-quarter:]) / statistics.median(times[:quarter])


def draw_crossover(report: Report, look: Look) -> Figure | None:
    """Draw the time of a step against the context in both modes, a panel per batch size, and where they cross."""
    crossovers = [one for one in report["crossovers"] if one["steps"]]
    if not crossovers:
        return None
    count = counted(step["seconds"] for one in crossovers for step in one["steps"])
    below = f"{_job(report, lengths=False, count=False)}; {count}"
    heights = [2.3 if look.narrow else 3.6] * len(crossovers)
    figure, axes = new_figure(look, _crossover_title(crossovers), below, heights=heights, sharey=True)
    for ax, one in zip(axes, crossovers, strict=True):
        draw_contexts(ax, one["steps"], apart=4.0)
        _mark_crossover(ax, one)
        ax.set_title(f"batch {one['batch_size']}")
    log_y(axes, "step, ms" if look.narrow else "time of a step, ms")
    mode_legend(figure)
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
        ax.text(0.03, 0.97, "no crossover", transform=ax.transAxes, va="top", color=FAINT.light)
        return
    ax.axvline(crossover["context"], color=INK.light, lw=1.2, ls=DASHES)
    contexts = [step["context"] for step in crossover["steps"]]
    right = crossover["context"] ** 2 > min(contexts) * max(contexts)  # of the middle of the axis
    words = f"pays from {crossover['context']} tokens"
    ax.annotate(words, (crossover["context"], 0.98), (-5 if right else 5, 0), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="right" if right else "left", va="top")  # fmt: skip


def draw_contexts(ax: Axes, steps: Sequence[StepTimes], *, apart: float = 2.0) -> None:
    """Draw step times against the context, both axes in logarithms; the bars reach from p10 to p90."""
    for kv_caching in (True, False):
        own = sorted((one for one in steps if one["kv_caching"] == kv_caching), key=lambda one: one["context"])
        spreads = [changed(one["seconds"], lambda seconds: 1e3 * seconds) for one in own]
        draw_line(ax, [one["context"] for one in own], spreads, kv_caching)
    log_x(ax, "context, tokens", [one["context"] for one in steps], base=2, apart=apart)


def _seconds(record: CellRecord) -> Spread:
    return summary_of(record)["seconds"]


def _job(report: Report, *, lengths: bool = True, count: bool = True) -> str:
    """Return the small words under a heading: model, lengths, precision and device, and the count."""
    records = [record for group in groups(report) for record in group]
    cells = [record["cell"] for record in records]
    words = [report["model"]["name"]] if report["model"] is not None else []
    if lengths:
        words += sorted({f"{cell['input_len']} tokens in, {cell['output_len']} out" for cell in cells})
    words += sorted({f"{cell['dtype']} on {cell['device']}" for cell in cells})
    return ", ".join(words) + (f"; {counted(map(_seconds, records))}" if count and records else "")
