"""Pictures of a conversation, turn by turn: the time to the first token, and what the cache holds."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from llama.bench.report.chat import Column, chats_of, columns
from llama.bench.report.findings import all_less
from llama.bench.report.plots.canvas import Look, bars, counted, legend, log_y, new_figure
from llama.bench.report.tables import least_to_most
from llama.bench.schema import Report
from llama.bench.statistics import percentiles
from llama.cli.palette import ANEW, CACHE, REFILLED
from llama.costs import MB

WAY_COLORS = {"kept": CACHE.light, "anew": REFILLED.light, "off": ANEW.light}


def draw_chat_time(report: Report, look: Look) -> Figure | None:
    """Draw the time to the first token of each turn, a line for each way of each engine."""
    found = columns(report)
    if not found:
        return None
    count = counted(percentiles(times) for column in found for times in column.way["seconds"])
    figure, ax = _turns_figure(look, _time_heading(found), report, len(found), f"; {count}")
    for column, mark in zip(found, _marks(found), strict=True):
        spreads = [percentiles(times) for times in column.way["seconds"]]
        medians = [one["median"] for one in spreads]
        ax.errorbar(range(1, len(medians) + 1), medians, yerr=bars(spreads), label=column.name, **mark)
    log_y([ax], "time to first token, s")
    legend(figure, ncols=1 if look.narrow else 3)
    return figure


def _time_heading(found: Sequence[Column]) -> str:
    """Say what keeping the cache saves at the last turn, against making it anew, of who does both."""
    kept, anew = ({one.who: one.seconds(-1) for one in found if one.way["name"] == way} for way in ("kept", "anew"))
    saved = [anew[who] / seconds for who, seconds in kept.items() if who in anew]
    if not saved:
        return "Time to first token, turn by turn"
    return f"With the cache kept, the last turn's first token takes {all_less(saved)} time than anew"


def draw_chat_bytes(report: Report, look: Look) -> Figure | None:
    """Draw what the cache holds at the first token of each turn, of each way that has one."""
    found = [one for one in columns(report) if one.way["name"] != "off" and None not in one.way["cache_bytes"]]
    if not found:
        return None
    held = [[(nbytes or 0) / MB for nbytes in column.way["cache_bytes"]] for column in found]
    heading = f"The cache holds {least_to_most([each[-1] for each in held], ',.0f', ' MB')} at the last turn"
    figure, ax = _turns_figure(look, heading, report, len(found))
    for column, each, mark in zip(found, held, _marks(found), strict=True):
        ax.plot(range(1, len(each) + 1), each, label=column.name, **mark)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("bytes held, MB (2^20 bytes)")
    legend(figure, ncols=1 if look.narrow else 3)
    return figure


def _turns_figure(look: Look, heading: str, report: Report, ways: int, count: str = "") -> tuple[Figure, Axes]:
    turns = chats_of(report)["plan"]["turns"]
    name = report["model"]["name"] if report["model"] is not None else ""
    cells = [record["cell"] for record in report["cells"]]
    job = ", ".join([name, *sorted({f"{cell['dtype']} on {cell['device']}" for cell in cells})])
    below = f"{job}; {turns[0]['history']:,} to {turns[-1]['history']:,} tokens stand before a turn"
    figure, (ax,) = new_figure(
        look, heading, below + count, heights=[3.6], legend=ways if look.narrow else -(-ways // 3)
    )
    ax.set_xlabel("turn")
    ax.set_xticks(range(1, len(turns) + 1))
    return figure, ax


def _marks(found: Sequence[Column]) -> list[dict[str, Any]]:
    """Return how each line looks: its colour says what becomes of the cache, its stroke and point who computes."""
    strokes = [("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ((0, (5, 1)), "v"), ((0, (1, 3)), "P")]
    own = dict(zip(dict.fromkeys(one.who for one in found), strokes * len(found), strict=False))
    return [
        {"color": WAY_COLORS[one.way["name"]], "ls": own[one.who][0], "marker": own[one.who][1], "ms": 4.5, "lw": 1.8}
        for one in found
    ]
