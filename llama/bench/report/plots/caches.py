"""Pictures of kinds of cache: what each saves in bytes, beside what it costs in quality and in time."""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llama.bench.report.caches import context_of_size, held_at, is_judged, step_at, text_end
from llama.bench.report.plots.canvas import Look, new_figure
from llama.bench.report.tables import least_to_most
from llama.bench.schema import Caches
from llama.cli.palette import CACHE, PAPER
from llama.costs import MB


class _Kind(NamedTuple):
    """A point of a picture of kinds: x is MB."""

    name: str
    x: float
    y: float
    lossless: bool


def draw_cache_quality(caches: Caches, look: Look) -> Figure | None:
    """Draw how often each kind finds the full cache's most likely token against the bytes that it holds in that text.

    Kinds that are not judged have no point, and are named below.
    """
    at, points, others = text_end(caches), [], []
    for one in caches["kinds"]:
        quality = one["quality"]
        if quality is None or (held := held_at(quality["bytes"], at)) is None:
            continue
        if is_judged(caches, one, at):
            points.append(_Kind(one["kind"], held / MB, 100 * quality["top1_agreement"], one["lossless"] is True))
        else:
            others.append(one["kind"])
    if not points:
        return None
    full = caches["kinds"][0]["kind"]
    agreed = least_to_most([one.y for one in points], ".3g", "%")
    heading = f"Memory against quality: {_fewer(points)} agree with {full} on {agreed} of the tokens"
    unjudged = f"; not judged, as no bytes are saved at that length: {', '.join(others)}" if others else ""
    figure, ax = _kinds_figure(look, heading, at, points, unjudged)
    ax.set_ylabel(f"same most likely token as {full}, %")
    return figure


def draw_cache_time(caches: Caches, look: Look) -> Figure | None:
    """Draw each kind's time per token against the bytes that it holds."""
    at = context_of_size(caches)
    points = [
        _Kind(one["kind"], held / MB, 1e3 * step["seconds"]["median"], one["lossless"] is True)
        for one in caches["kinds"]
        if (held := held_at(one["bytes"], at)) is not None and (step := step_at(one, at)) is not None
    ]
    if not points:
        return None
    took = least_to_most([one.y for one in points], ".3g", " ms")
    figure, ax = _kinds_figure(look, f"Memory against time: {_fewer(points)} take {took} a token", at, points)
    ax.set_ylim(bottom=0)
    ax.set_ylabel(f"time per token at {at:,} tokens, ms, median")
    return figure


def _fewer(points: Sequence[_Kind]) -> str:
    return f"kinds that hold {least_to_most([one.x for one in points], ',.3g', ' MB')}"


def _kinds_figure(
    look: Look, heading: str, context: int, points: Sequence[_Kind], more: str = ""
) -> tuple[Figure, Axes]:
    """Return a figure with a named point for each kind; those that lie on one another share their words."""
    below = f"one row of {context:,} tokens; hollow: a kind that does not keep all it is given{more}"
    figure, (ax,) = new_figure(look, heading, below, heights=[3.2 if look.narrow else 3.8], legend=0)
    for one in points:
        face = CACHE.light if one.lossless else PAPER.light
        ax.plot(one.x, one.y, "o", ms=9, mec=CACHE.light, mfc=face, mew=1.8, clip_on=False)
    ax.set_xlim(0, 1.25 * max(one.x for one in points))
    ax.margins(y=0.15)
    ax.set_xlabel(f"bytes held at {context:,} tokens, MB (2^20 bytes)")
    for names, x, y in _together(points):
        right = x < (0.5 if look.narrow else 0.7) * ax.get_xlim()[1]
        words = "\n".join(textwrap.wrap(names, 24 if look.narrow else 48))
        side: dict[str, Any] = {"xytext": (9 if right else -9, 5), "ha": "left" if right else "right"}
        name = ax.annotate(words, (x, y), textcoords="offset points", **side)
        name.set_in_layout(False)  # a long one must not take the room of the points
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
