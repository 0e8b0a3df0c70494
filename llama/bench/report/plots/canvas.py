"""The paper that every picture is drawn on: its sizes, its axes, the marks that pictures share, and PNG and SVG.

Knows no figure of any report. All colours are those of `llama.cli.palette`; matplotlib keeps no state, and opens no
window.
"""

import io
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Annotation
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, LogLocator, NullLocator

from llama.bench.report.tables import least_to_most
from llama.bench.schema import Spread
from llama.cli.palette import ANEW, CACHE, FACTOR, FAINT, GRID, INK, PAPER, variables

COLORS = {True: CACHE.light, False: ANEW.light}
MODES = {True: "with the cache", False: "without"}
DASHES = (0, (4, 3))
_PAPER = {"boxstyle": "square,pad=0.1", "facecolor": PAPER.light, "edgecolor": "none"}  # no grid through words


@dataclass(frozen=True)
class Look:
    """For whom a picture is drawn: a wide column or a telephone's; `headed`: by itself, with its heading in it."""

    narrow: bool = False
    headed: bool = True

    @property
    def width(self) -> float:
        """Inches; at 100 dots an inch what a page of 900 px shows, or one of 360."""
        return 3.7 if self.narrow else 9.0

    @property
    def small(self) -> float:
        """The size of the words in a picture, in points: on a screen they are never below 11 px."""
        return 9.0 if self.narrow else 10.0

    def style(self) -> dict[Any, Any]:
        """Return matplotlib's settings."""
        return {
            **{f"axes.spines.{side}": False for side in ("top", "right")},
            **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), FAINT.light),
            **dict.fromkeys(("axes.labelcolor", "axes.titlecolor", "text.color", "legend.labelcolor"), INK.light),
            **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), INK.light),
            **dict.fromkeys(("font.size", "axes.labelsize", "legend.fontsize"), self.small),
            **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), self.small),
            **{"axes.titlesize": self.small, "axes.titleweight": "bold", "axes.titlelocation": "left"},
            **{"axes.facecolor": PAPER.light, "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True},
            **{
                "grid.color": GRID.light,
                "grid.linewidth": 0.8,
                "legend.frameon": False,
                "legend.borderpad": 0.2,
                "legend.handlelength": 1.6,
            },
            "text.parse_math": False,  # no dollar sign in a name begins a formula
        }


WIDE = Look()


def new_figure(
    look: Look,
    heading: str,
    below: str,
    *,
    heights: Sequence[float],
    across: int = 3,
    legend: int = 1,
    **grid: Any,
) -> tuple[Figure, list[Axes]]:
    """Return a figure with its heading, `below` in small words under it, and empty panels of so many inches in height.

    Wide, they stand side by side, up to `across` in a row; narrow, one under another. `legend`: lines to keep free over
    them. `grid` goes to subplots.
    """
    heads, words = _balanced(heading, 30 if look.narrow else 74), textwrap.wrap(below, 46 if look.narrow else 112)
    columns = 1 if look.narrow else min(len(heights), across)
    rows = [max(heights[place : place + columns]) for place in range(0, len(heights), columns)]
    head = 0.3 + 0.25 * len(heads) + 0.17 * len(words) if look.headed else 0.05  # inches
    tall = head + 0.23 * legend + sum(rows)
    figure = Figure(figsize=(look.width, tall), facecolor=PAPER.light)
    under = (head + 0.23 * legend) / tall
    figure.set_layout_engine("constrained", rect=(0.005, 0.01, 0.99, 0.99 - under), w_pad=0.06, h_pad=0.06)
    top: dict[str, Any] = {"va": "top", "x": 0.09 / look.width, "visible": look.headed}
    figure.text(s="\n".join(heads), y=1 - 0.1 / tall, fontsize=14, weight="bold", linespacing=1.2, **top)
    figure.text(s="\n".join(words), y=1 - (0.16 + 0.25 * len(heads)) / tall, color=FAINT.light, fontsize=10, **top)
    axes = list(figure.subplots(len(rows), columns, squeeze=False, height_ratios=rows, **grid).flat)
    for ax in axes[len(heights) :]:
        ax.remove()
    return figure, axes[: len(heights)]


def _balanced(words: str, width: int) -> list[str]:
    """Return the words in lines of about one length."""
    count = len(textwrap.wrap(words, width))
    return textwrap.wrap(words, min(width, -(-len(words) // count) + 8))


def heading(figure: Figure) -> str:
    """Return the heading of the picture, which says what it shows."""
    return " ".join(figure.texts[0].get_text().split())


def small_words(figure: Figure) -> str:
    """Return what stands under the heading: the job, and the count."""
    return " ".join(figure.texts[1].get_text().split())


def settled(figure: Figure) -> Figure:
    """Return the figure with everything put in its place for good.

    Laid out anew, drawings would differ a little, and the solver's last digits differ from run to run: they are cut.
    """
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
    """Return the picture as an `<svg>` to stand in a page: text is text, and colours are the variables of the palette.

    The same picture gives the same text; `salt` keeps the names of its clips apart from those of others on the page.
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


def row_heights(*counts: float) -> list[float]:
    """Return how high panels of so many rows are, in inches."""
    return [0.75 + 0.5 * count for count in counts]


def draw_rows(ax: Axes, names: Sequence[str], places: Sequence[float]) -> list[Annotation]:
    """Make a panel of horizontal rows, each with its name over its left end, and return the names."""
    ax.set_ylim(max(places) + 0.5, min(places) - 0.75)
    ax.set_yticks([])
    ax.grid(visible=True, axis="x")
    ax.spines["left"].set_visible(False)
    return [
        ax.annotate(name, (0, place - 0.38), (2, 0), xycoords=("axes fraction", "data"), bbox=_PAPER, va="center",
                    textcoords="offset points")
        for name, place in zip(names, places, strict=True) if name
    ]  # fmt: skip


def draw_factors(ax: Axes, names: Sequence[str], factors: Sequence[float | None], what: str) -> None:
    """Draw ratios as bars from zero on a linear axis, the factor written at each; at the dashed line both are equal.

    Where there is no ratio, or no name, its place stays free.
    """
    draw_rows(ax, names, range(len(names)))
    known = {place: factor for place, factor in enumerate(factors) if factor is not None}
    ax.axvline(1, color=FAINT.light, lw=1, ls=DASHES, zorder=0.9)
    ax.barh([*known], [*known.values()], 0.36, color=FACTOR.light)
    most = max([1.0, *known.values()])
    for place, factor in known.items():
        ax.annotate(f"{factor:.{1 if most >= 5 else 2}f}x", (factor, place), (4, 0), textcoords="offset points",
                    va="center", weight="bold", bbox=_PAPER)  # fmt: skip
    ax.set_xlim(0, 1.22 * most)
    ax.set_xlabel(what)


def draw_line(ax: Axes, places: Sequence[float], spreads: Sequence[Spread], kv_caching: bool) -> None:
    """Draw medians as a line with points, with bars from p10 to p90."""
    if not places:
        return
    medians = [one["median"] for one in spreads]
    color = COLORS[kv_caching]
    ax.errorbar(places, medians, yerr=bars(spreads), color=color, ecolor=color, marker="o" if kv_caching else "s",
                ms=5, lw=2, capsize=3, label=MODES[kv_caching])  # fmt: skip


def bars(spreads: Sequence[Spread]) -> list[list[float]]:
    """Return how far down to p10 and up to p90, as matplotlib wants its bars."""
    down = [max(0.0, one["median"] - one["p10"]) for one in spreads]
    return [down, [max(0.0, one["p90"] - one["median"]) for one in spreads]]


def changed(figure: Spread, change: Callable[[float], float]) -> Spread:
    """Return a spread in another unit; p10 and p90 change places where less becomes more."""
    low, middle, high = sorted(map(change, (figure["p10"], figure["median"], figure["p90"])))
    return {"n": figure["n"], "median": middle, "p10": low, "p90": high}


def counted(spreads: Iterable[Spread]) -> str:
    """Return the small words about the counts behind figures, and what the bars are where there are any."""
    counts = {one["n"] for one in spreads}
    return ("" if max(counts) == 1 else "medians, bars from p10 to p90, ") + f"n = {least_to_most(counts)}"


def plain(value: float, _: object = None) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:g}"


def log_x(ax: Axes, name: str, values: Iterable[int], *, base: int = 10, apart: float = 1.0) -> None:
    """Name a logarithmic axis and its values, leaving out those that are not `apart` times the one before: for room."""
    kept: list[int] = []
    for value in sorted(set(values)):
        if not kept or value >= apart * kept[-1]:
            kept.append(value)
    ax.set_xscale("log", base=base)
    ax.set_xlabel(f"{name} (log scale)")
    ticks(ax.xaxis, FixedLocator(kept), lambda value, _: f"{value:.0f}")


def log_y(axes: Sequence[Axes], name: str) -> None:
    """Name the logarithmic axis of one panel, or of all that share it once in a row: 1, 2 and 5 of each decade."""
    axes[0].set_yscale("log")
    ticks(axes[0].yaxis, LogLocator(subs=(1.0, 2.0, 5.0), numticks=20), plain)
    for ax in axes:
        spec = ax.get_subplotspec()
        if spec is not None and spec.is_first_col():
            ax.set_ylabel(f"{name} (log scale)")


def ticks(axis: Axis, places: Locator, words: Callable[[float, object], str]) -> None:
    axis.set_major_locator(places)
    axis.set_major_formatter(FuncFormatter(words))
    axis.set_minor_locator(NullLocator())


def legend(figure: Figure, **look: Any) -> None:
    """Put the legend over the panels, in the room that was kept for it."""
    engine = figure.get_layout_engine()
    assert engine is not None
    _, bottom, _, height = engine.get()["rect"]
    place = 0.06 / figure.get_figwidth(), bottom + height
    figure.legend(loc="lower left", bbox_to_anchor=place, borderaxespad=0, **look)


def mode_legend(figure: Figure) -> None:
    """Say over the panels which colour is which mode."""
    legend(figure, handles=[Patch(color=COLORS[mode], label=MODES[mode]) for mode in (True, False)], ncols=2)
