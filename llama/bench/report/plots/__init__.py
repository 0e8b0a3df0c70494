"""A report as pictures, a file for each family. The only folder that knows matplotlib."""

from collections.abc import Callable
from functools import partial

import matplotlib
from matplotlib.figure import Figure

from llama.bench.report.plots.caches import draw_cache_quality, draw_cache_time
from llama.bench.report.plots.canvas import WIDE, Look, as_png, as_svg, heading, settled, small_words
from llama.bench.report.plots.chat import draw_chat_bytes, draw_chat_time
from llama.bench.report.plots.sweep import draw_batch, draw_cache, draw_context, draw_speedup
from llama.bench.report.plots.table import draw_crossover, draw_memory, draw_peers, draw_steps, draw_time
from llama.bench.report.tables import NOISY, disturbances
from llama.bench.schema import Report
from llama.cli.palette import ALARM

_WITHOUT_TIMES = {"memory", "cache", "cache_quality", "chat_bytes"}  # bytes and quality do not depend on other work

__all__ = ["Look", "as_png", "as_svg", "figures", "heading", "small_words"]


def figures(report: Report, look: Look = WIDE) -> dict[str, Figure]:
    """Return the pictures that the report has figures for, by name, in reading order."""
    with matplotlib.rc_context(look.style()):
        drawn = {name: draw(look) for name, draw in _painters(report).items()}
        found = {name: figure for name, figure in drawn.items() if figure is not None}
        for figure in [found[name] for name in found.keys() - _WITHOUT_TIMES] if disturbances(report) else ():
            # Across the picture, so that it is there too where only a part of it is shown.
            words, large = NOISY.replace(", ", "\n"), 14 if look.narrow else 32
            figure.text(
                0.5, 0.45, words, ha="center", va="center", rotation=20, fontsize=large, color=ALARM.light, alpha=0.3
            )
        return {name: settled(figure) for name, figure in found.items()}


def _painters(report: Report) -> dict[str, Callable[[Look], Figure | None]]:
    """Return who draws what, in reading order: a report of before does not have every field."""
    if (caches := report.get("caches")) is not None:
        return {"cache_quality": partial(draw_cache_quality, caches), "cache_time": partial(draw_cache_time, caches)}
    if report.get("chat") is not None:
        return {"chat_time": partial(draw_chat_time, report), "chat_bytes": partial(draw_chat_bytes, report)}
    if (sweep := report["sweep"]) is not None:
        of_sweep = {"speedup": draw_speedup, "cache": draw_cache, "context": draw_context, "batch": draw_batch}
        return {name: partial(draw, sweep) for name, draw in of_sweep.items()}
    of_table = {"time": draw_time, "memory": draw_memory, "steps": draw_steps, "peers": draw_peers}
    of_table["crossover"] = draw_crossover
    return {name: partial(draw, report) for name, draw in of_table.items()}
