"""The parts that all pictures share: sizes, axes and marks, and the output as PNG and SVG.

Knows no figure of any report. All colours are those of `llama.host.palette`.
"""

import io
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, Locator, LogLocator, NullLocator

from llama.bench.report.columns import least_to_most, two_digits
from llama.bench.statistics import Spread
from llama.host.palette import ALARM, CACHE, FACTOR, GRID, INK, MUTED, PAPER, RECOMPUTED, variables

COLORS = {"on": CACHE.light, "off": RECOMPUTED.light}
MODES = {"on": "with the cache", "off": "without"}
MARKERS = {"on": "o", "off": "s"}
DASHES = (0, (4, 3))
_PAPER = {"boxstyle": "square,pad=0.1", "facecolor": PAPER.light, "edgecolor": "none"}  # no grid through words


WIDTH = 9.0  # inches; a page shows an inch in 80 to 100 px
SMALL = 10.0  # points of the words: on such a page at least 11 px
STYLE: dict[Any, Any] = {  # matplotlib's settings
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED.light),
    **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "text.color", "legend.labelcolor"), INK.light),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), INK.light),
    **dict.fromkeys(("font.size", "axes.labelsize", "legend.fontsize", "axes.titlesize"), SMALL),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), SMALL),
    **{"axes.titleweight": "bold", "axes.titlelocation": "left", "axes.facecolor": PAPER.light},
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "grid.color": GRID.light},
    **{"grid.linewidth": 0.8, "legend.borderpad": 0.2, "legend.handlelength": 1.6},
    "text.parse_math": False,  # a dollar sign in a name does not begin a formula
}


def new_figure(
    heading: str, below: str, *, heights: Sequence[float], times: Sequence[int], legend: bool = True, **grid: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure with its heading, `below` in small words under it, and empty panels of these heights in inches.

    Up to three panels stand side by side. `times` are the panels that show times; `legend` reserves a line above all
    panels. `grid` goes to subplots.
    """
    heads, words = _balanced(heading, 74), textwrap.wrap(below, 112)
    columns = min(len(heights), 3)
    rows = [max(heights[place : place + columns]) for place in range(0, len(heights), columns)]
    head = 0.3 + 0.25 * len(heads) + 0.17 * len(words)  # inches
    tall = head + 0.23 * legend + sum(rows)
    figure = Figure(figsize=(WIDTH, tall), facecolor=PAPER.light)
    under = (head + 0.23 * legend) / tall
    figure.set_layout_engine("constrained", rect=(0.005, 0.01, 0.99, 0.99 - under), w_pad=0.06, h_pad=0.06)
    top: dict[str, Any] = {"va": "top", "x": 0.09 / WIDTH}
    figure.text(s="\n".join(heads), y=1 - 0.1 / tall, fontsize=14, weight="bold", linespacing=1.2, **top)
    figure.text(s="\n".join(words), y=1 - (0.16 + 0.25 * len(heads)) / tall, color=MUTED.light, fontsize=10, **top)
    axes = list(figure.subplots(len(rows), columns, squeeze=False, height_ratios=rows, **grid).flat)
    for ax in axes[len(heights) :]:
        ax.remove()
    for place in times:
        axes[place].set_label("times")
    return figure, axes[: len(heights)]


def _balanced(words: str, width: int) -> list[str]:
    """Return the words in lines of about the same length."""
    count = len(textwrap.wrap(words, width))
    return textwrap.wrap(words, min(width, -(-len(words) // count) + 8))


def heading(figure: Figure) -> str:
    """Return the heading of a picture."""
    return " ".join(figure.texts[0].get_text().split())


def mark_noisy(figure: Figure, words: str) -> None:
    """Write a warning across every panel that shows times."""
    for ax in (ax for ax in figure.axes if ax.get_label() == "times"):
        size = 14 if len(figure.axes) > 2 else 20
        said = ax.text(0.5, 0.5, words.replace(", ", "\n"), transform=ax.transAxes, ha="center", va="center",
                       rotation=20, fontsize=size, color=ALARM.light, alpha=0.35)  # fmt: skip
        said.set_in_layout(False)


def laid_out(figure: Figure) -> Figure:
    """Return the figure with its layout fixed: laid out again, the last digits would differ from run to run."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for ax in figure.axes:
        left, bottom, width, height = (round(value, 4) for value in ax.get_position().bounds)
        ax.set_position((left, bottom, width, height))
    return figure


def as_png(figure: Figure) -> bytes:
    """Return the picture as PNG, 1350 px wide; the same picture gives the same bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150, metadata={"Software": None})
    return out.getvalue()


def as_svg(figure: Figure, *, salt: str = "llama") -> str:
    """Return the picture as an `<svg>` for a page: text stays text, and colours are the variables of the palette.

    The same picture gives the same text; `salt` separates the names of its clips from those of others on the page.
    """
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    whole = out.getvalue()
    drawn = re.sub(r"<defs>\s*<style.*?</defs>", "", whole[whole.index("<g id=") : whole.rindex("</svg>")], flags=re.S)
    for found, instead in (
        (r' id="\w+_\d+"| id="(?:matplotlib\.|legend_)\w+"| transform="rotate\(-0 [^"]*"', ""),  # names of groups
        (r" font-family: [^;\"]*;?", ""),  # the page's own
        (r"xlink:href", "href"),
        (r"\s*\n\s*", "\n"),
    ):
        drawn = re.sub(found, instead, drawn)
    shades = {one.light.lower(): name for name, one in variables().items()}
    drawn = re.sub(r"(: )(#[0-9a-f]{6})\b", lambda color: f"{color[1]}var(--{shades[color[2]]})", drawn)
    box = re.search(r' viewBox="[^"]*"', whole)
    assert box is not None
    return f"<svg{box[0]}>\n{drawn.strip()}\n</svg>"


def row_height(count: float) -> float:
    """Return the height of a panel of so many rows, in inches."""
    return 0.75 + 0.5 * count


def draw_rows(ax: Axes, names: Sequence[str], places: Sequence[float]) -> list[Annotation]:
    """Make a panel of horizontal rows, each with its name above its left end, and return the names."""
    ax.set_ylim(max(places) + 0.5, min(places) - 0.75)
    ax.set_yticks([])
    ax.grid(visible=True, axis="x")
    ax.spines["left"].set_visible(False)
    return [
        ax.annotate(name, (0, place - 0.38), (2, 0), xycoords=("axes fraction", "data"), bbox=_PAPER, va="center",
                    textcoords="offset points")
        for name, place in zip(names, places, strict=True) if name
    ]  # fmt: skip


def draw_bars(
    ax: Axes, names: Sequence[str], values: Sequence[float | None], axis: str, form: str, *, unit: str = "",
    color: str = FACTOR.light, missing: str = "", predicted: Sequence[bool] = (),
    ranges: Sequence[tuple[float, float] | None] = (),
) -> None:  # fmt: skip
    """Draw values as bars from zero with the value at each end, or `missing`; predicted bars are hollow.

    A value with a range is written with it, behind a line from end to end.
    """
    draw_rows(ax, names, range(len(names)))
    most = 0.0
    for place, value in enumerate(values):
        hollow = bool(predicted) and predicted[place]
        look: dict[str, Any] = (
            {"facecolor": PAPER.light, "edgecolor": color, "ls": "--"} if hollow else {"color": color}
        )
        said = missing if value is None else f"{'~' * hollow}{value:{form}}{unit}"
        if value is not None:
            ax.barh(place, value, 0.36, **look)
        end, ends = value or 0, ranges[place] if ranges else None
        if ends is not None:
            ax.plot(ends, [place, place], color=INK.light, lw=1.5)
            end, said = ends[1], f"{said} ({two_digits(ends[0])}-{two_digits(ends[1])})"
        ax.annotate(said, (end, place), (4, 0), textcoords="offset points", va="center", weight="bold", bbox=_PAPER)
        most = max(most, (1.7 if ends else 1.22) * end)
    ax.set_xlim(0, most or 1)
    ax.set_xlabel(axis)


def draw_factors(
    ax: Axes, names: Sequence[str], factors: Sequence[float | None], predicted: Sequence[bool] = (),
    ranges: Sequence[tuple[float, float] | None] = (),
) -> None:  # fmt: skip
    """Draw how many times faster the cache makes each row as bars; at the dashed line both modes are equal."""
    form = ".1f" if max([1.0, *filter(None, factors)]) >= 5 else ".2f"
    draw_bars(ax, names, factors, "times faster with the cache", form, unit="x", predicted=predicted, ranges=ranges)
    ax.axvline(1, color=MUTED.light, lw=1, ls=DASHES, zorder=0.9)
    ax.set_xlim(0, max(ax.get_xlim()[1], 1.22))


def draw_modes(ax: Axes, places: Sequence[float], rows: Sequence[Mapping[str, Any]], *, scale: float = 1.0) -> None:
    """Draw the spreads of both modes in the rows: medians as a line with points, with bars from p10 to p90."""
    for mode in MODES:
        own = [(place, row[mode]) for place, row in zip(places, rows, strict=True) if row.get(mode)]
        spreads: list[Any] = [{key: scale * one[key] for key in ("median", "p10", "p90")} for _, one in own]
        ax.errorbar([place for place, _ in own], [one["median"] for one in spreads], yerr=error_bars(spreads),
                    color=COLORS[mode], marker=MARKERS[mode], ms=5, lw=2, capsize=3)  # fmt: skip


def error_bars(spreads: Sequence[Spread]) -> list[list[float]]:
    """Return the distances down to p10 and up to p90, as matplotlib expects them."""
    down = [max(0.0, one["median"] - one["p10"]) for one in spreads]
    return [down, [max(0.0, one["p90"] - one["median"]) for one in spreads]]


def counted(spreads: Iterable[Spread]) -> str:
    """Return the words under a heading about the counts of figures, and about the bars if there are any."""
    counts = [one["n"] for one in spreads]
    return ("" if max(counts) == 1 else "medians, bars from p10 to p90, ") + f"n = {least_to_most(counts)}"


def log_x(ax: Axes, name: str, values: Iterable[int], *, factor: float = 1.0) -> None:
    """Name a logarithmic axis and its values, without those below `factor` times the one before."""
    kept: list[int] = []
    for value in sorted(set(values)):
        if not kept or value >= factor * kept[-1]:
            kept.append(value)
    ax.set_xscale("log", base=2)
    ax.set_xlabel(f"{name} (log scale)")
    ticks(ax.xaxis, FixedLocator(kept))


def log_y(axes: Sequence[Axes], name: str) -> None:
    """Name the logarithmic axis of a panel, or of all that share it once in a row: 1, 2 and 5 of each decade."""
    axes[0].set_yscale("log")
    ticks(axes[0].yaxis, LogLocator(subs=(1.0, 2.0, 5.0), numticks=20))
    for ax in axes:
        spec = ax.get_subplotspec()
        if spec is not None and spec.is_first_col():
            ax.set_ylabel(f"{name} (log scale)")


def ticks(axis: Axis, places: Locator) -> None:
    """Set the ticks of an axis."""
    axis.set_major_locator(places)
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_locator(NullLocator())


def legend(figure: Figure, **look: Any) -> None:
    """Put the legend above the panels, where `new_figure` has reserved lines for it."""
    engine = figure.get_layout_engine()
    assert engine is not None
    _, bottom, _, height = engine.get()["rect"]
    place = 0.06 / figure.get_figwidth(), bottom + height
    figure.legend(loc="lower left", bbox_to_anchor=place, borderaxespad=0, **look)


def mode_legend(figure: Figure) -> None:
    """Say above the panels which colour is which mode."""
    legend(figure, handles=[Patch(color=COLORS[mode], label=words) for mode, words in MODES.items()], ncols=2)
