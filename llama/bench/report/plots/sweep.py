"""Pictures of a sweep: what the cache saves as the text grows, its bytes, and time by context and by batch size."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from llama.bench.report.plots.canvas import (
    COLORS,
    MODES,
    Look,
    changed,
    counted,
    draw_factors,
    draw_line,
    legend,
    log_x,
    log_y,
    mode_legend,
    new_figure,
    row_heights,
    ticks,
)
from llama.bench.report.plots.table import draw_contexts
from llama.bench.report.tables import slope_words
from llama.bench.schema import Fit, Spread, StepTimes, Sweep
from llama.cli.palette import CACHE, FAINT
from llama.costs import size


def draw_speedup(sweep: Sweep, look: Look) -> Figure | None:
    """Draw times of both modes against the number of generated tokens, and their ratio as bars."""
    growth = sorted(sweep["growth"], key=lambda one: one["generated"])
    if not growth:
        return None
    first, last = growth[0], growth[-1]
    heading = f"The cache saves {first['speedup']:.1f}x at {first['generated']} generated tokens"
    heading += f", {last['speedup']:.1f}x at {last['generated']}" if len(growth) > 1 else ""
    below = counted(one["cached_seconds"] for one in growth)
    heights = [2.9 if look.narrow else 3.6, *row_heights(len(growth))]
    figure, (left, right) = new_figure(look, heading, below, heights=heights)
    lengths = [one["generated"] for one in growth]
    draw_line(left, lengths, [one["cached_seconds"] for one in growth], True)
    draw_line(left, lengths, [one["uncached_seconds"] for one in growth], False)
    log_y([left], "time of the whole job, s")
    log_x(left, "generated tokens", lengths)
    names = [f"{one['generated']} generated tokens" for one in growth]
    draw_factors(right, names, [one["speedup"] for one in growth], "times less time with the cache")
    mode_legend(figure)
    return figure


def draw_cache(sweep: Sweep, look: Look) -> Figure | None:
    """Draw the bytes of the cache against its length: the prediction as a line, the measured sizes as points."""
    sizes = sorted(sweep["cache"], key=lambda one: one["length"])
    if not sizes:
        return None
    apart = max(abs(one["measured"] - one["predicted"]) / max(one["predicted"], 1) for one in sizes)
    held = "as predicted, to the byte" if apart == 0 else f"within {apart:.1%} of the prediction"
    each = sizes[-1]["measured"] / sizes[-1]["length"]
    heading = f"Every token takes {each / 1024:.1f} KB of the KV cache, {held}"
    below, lines = "one row of tokens; KB is 2^10 bytes, MB 2^20", 2 if look.narrow else 1
    figure, (ax,) = new_figure(look, heading, below, heights=[3.4], legend=lines)
    lengths = [one["length"] for one in sizes]
    ax.plot(
        lengths, [one["predicted"] for one in sizes], color=FAINT.light, lw=2, label="predicted from the model's sizes"
    )
    measured = [one["measured"] for one in sizes]
    ax.plot(lengths, measured, "o", color=CACHE.light, ms=8, label="measured, bytes of the tensors")
    for one in sizes:
        place = (one["length"], one["measured"])
        ax.annotate(size(one["measured"]), place, (8, -3), textcoords="offset points", va="top")
    log_x(ax, "length, tokens", lengths, base=2, apart=4.0 if look.narrow else 1.0)
    ax.set_yscale("log", base=2)
    ax.set_ylabel("bytes of the KV cache (log scale)")
    ax.set_xlim(lengths[0] / 1.3, lengths[-1] * (4.0 if look.narrow else 1.8))
    ax.set_ylim(measured[0] / 2.2, measured[-1] * 1.5)
    ticks(ax.yaxis, LogLocator(base=4), lambda value, _: size(int(value)))
    legend(figure, ncols=2 // lines)
    return figure


def draw_context(sweep: Sweep, look: Look) -> Figure | None:
    """Draw the time per token against the context in both modes, with the fitted lines."""
    steps = sweep["contexts"]
    if not steps:
        return None
    fits = [fit for fit in sweep["fits"] if fit["of"] == "token"]  # those of whole texts: in the table
    grown = [f"context^{fit['exponent']:.2f} {MODES[fit['kv_caching']]}" for fit in fits]
    heading = "Time per token grows as " + ", ".join(grown) if grown else "Time per token as the context grows"
    below = counted(one["seconds"] for one in steps) + "; exponents of the longer half"
    lines = len({one["kv_caching"] for one in steps}) + len(fits)
    figure, (ax,) = new_figure(look, heading, below, heights=[3.4], legend=lines)
    draw_contexts(ax, steps, apart=4.0 if look.narrow else 2.0)
    for fit in fits:
        _draw_fit(ax, fit, sorted({one["context"] for one in steps}))
    log_y([ax], "time per token, ms")
    legend(figure)
    return figure


def _draw_fit(ax: Axes, fit: Fit, contexts: Sequence[int]) -> None:
    times = {context: 1e3 * (fit["base"] + fit["slope"] * context) for context in contexts}
    shown = {context: time for context, time in times.items() if time > 0}  # a logarithm has no place for the others
    line = f"{fit['base'] * 1e3:.3g} ms + {slope_words(fit['slope'])} us/1000 tokens"
    label = f"fit, {'with' if fit['kv_caching'] else 'without'}: {line}"
    ax.plot([*shown], [*shown.values()], color=COLORS[fit["kv_caching"]], lw=1.4, ls=(0, (2, 2)), label=label)


def draw_batch(sweep: Sweep, look: Look) -> Figure | None:
    """Draw the tokens a second that all rows make together against the batch size, in both modes."""
    steps = sorted(sweep["batches"], key=lambda one: one["batch_size"])
    if not steps:
        return None
    below = counted(one["seconds"] for one in steps)
    figure, (ax,) = new_figure(look, _batch_title(steps), below, heights=[3.4])
    for kv_caching in (True, False):
        own = [one for one in steps if one["kv_caching"] == kv_caching]
        spreads = [_per_second(one) for one in own]
        draw_line(ax, [one["batch_size"] for one in own], spreads, kv_caching)
        for one, figures in zip(own, spreads, strict=True):
            ax.annotate(f"{figures['median']:.3g}", (one["batch_size"], figures["p90"]), (0, 7), ha="center",
                        textcoords="offset points")  # fmt: skip
    log_x(ax, "batch size", [one["batch_size"] for one in steps], base=2)
    log_y([ax], "decode tokens/s, all rows")
    ax.margins(x=0.08, y=0.15)
    mode_legend(figure)
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
    return changed(step["seconds"], lambda seconds: step["batch_size"] / seconds)
