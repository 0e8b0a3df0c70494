"""A report of the preset `chat` as tables and sentences: turns, prompts that begin alike, and sessions on disk.

Knows nothing of Markdown, HTML or how anything was measured.
"""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

from llama.bench.report.tables import (
    NOT_OBSERVED,
    Section,
    Table,
    environment_table,
    in_words,
    validity_table,
)
from llama.bench.schema import CellRecord, ChatPlan, Chats, OnDisk, Report, Way
from llama.bench.statistics import percentiles
from llama.costs import MB, size

DEFINITIONS = (
    ("kept", "the cache goes on from turn to turn: only what is new is fed"),
    ("anew", "every turn begins with an empty cache and feeds the whole text, as a program without sessions does"),
    ("off", "no cache: the first token costs what it costs anew, and every further token as much again"),
    (
        "time to first token",
        "from the call with the turn's text until its first new token is on the host; the answers that follow are "
        "those of the text, fed without a clock",
    ),
    ("bytes held", "in the tensors of the cache at the turn's first token, with the room that was taken beforehand"),
    ("shared", "what all prompts begin with is fed once, for all rows"),
    (
        "saved, loaded",
        "a session's file is written, and read into a new session, just behind one another: no disk is waited for",
    ),
    ("fed anew", "the same text is fed to an empty session"),
)


class Column(NamedTuple):
    """A way of an engine through the conversation: who computes, how it is with the cache, and what was seen."""

    who: str
    ours: bool
    way: Way

    @property
    def name(self) -> str:
        return f"{self.who}, {self.way['name']}"

    def seconds(self, turn: int) -> float:
        """Return the median time to the first token of a turn, which may be counted from the end, as -1."""
        return median(self.way["seconds"][turn])


def chat_sections(report: Report) -> list[Section]:
    """Return the whole report behind its head, in reading order."""
    notes = [f"{who(record)}: {line}" for record in report["cells"] for line in record["notes"]]
    found = [
        Section("A conversation, turn by turn", conversation_tables(report), ("chat_time", "chat_bytes")),
        Section("Prompts that begin alike, and sessions on disk", other_tables(report)),
        Section("Validity", [validity_table(report), notes]),
        Section("Where and how", [environment_table(report)]),
        Section("What the words mean", [[f"{name}: {meaning}" for name, meaning in DEFINITIONS]]),
    ]
    return [Section(one.name, [part for part in one.parts if part], one.pictures) for one in found]


def chat_tables(report: Report) -> list[Table]:
    """Return the tables of times and bytes; what was fed stands in the validity block, too."""
    return [table for table in (*conversation_tables(report)[:2], *other_tables(report)) if table]


def chats_of(report: Report) -> Chats:
    chats = report["chat"]
    assert chats is not None
    return chats


def who(record: CellRecord) -> str:
    """Return what computes in a cell: a path of ours, or another engine."""
    cell = record["cell"]
    kind = f" {cell['quantize']}" if cell["quantize"] else ""
    return str(record["path"] if cell["engine"] == "llama" else cell["engine"] + kind)


def columns(report: Report) -> list[Column]:
    """Return the ways through the conversation that were measured, in the order of the cells."""
    return [Column(who(cell), cell["cell"]["engine"] == "llama", way) for cell, way in _ways(report, prompts=False)]


def _ways(report: Report, *, prompts: bool) -> Iterator[tuple[CellRecord, Way]]:
    for cell, record in zip(report["cells"], chats_of(report)["records"], strict=True):
        if (cell["cell"]["batch_size"] > 1) == prompts:
            yield from ((cell, way) for way in record["ways"])


def conversation_tables(report: Report) -> list[Table]:
    """Return the times, and the bytes, of every turn: a row a turn, a column a way."""
    plan, found = chats_of(report)["plan"], columns(report)
    if not found:
        return []
    counts = sorted({len(times) for column in found for times in column.way["seconds"]})
    note = f"medians, n = {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))}"
    heads = ["turn", "tokens before it", "new tokens"]
    times = [[*row, *(f"{column.seconds(turn):.3f}" for column in found)] for turn, row in enumerate(_turns(plan))]
    holding = [column for column in found if column.way["name"] != "off"]
    held = [[*row, *(_megabytes(column.way["cache_bytes"][turn]) for column in holding)]
            for turn, row in enumerate(_turns(plan))]  # fmt: skip
    fed = [[*row, *(f"{column.way['fed'][turn]:,}" for column in found)] for turn, row in enumerate(_turns(plan))]
    return [
        Table("Time to first token, s", [*heads, *(column.name for column in found)], times, [note]),
        Table("Bytes held, MB", [*heads, *(column.name for column in holding)], held if holding else []),
        Table("Tokens fed", [*heads, *(column.name for column in found)], fed),
    ]


def _turns(plan: ChatPlan) -> list[list[str]]:
    return [[str(place), f"{turn['history']:,}", str(turn["new"])] for place, turn in enumerate(plan["turns"], 1)]


def _megabytes(held: int | None) -> str:
    return NOT_OBSERVED if held is None else f"{held / MB:.1f}"


def other_tables(report: Report) -> list[Table]:
    """Return the table of prompts that begin alike, and that of sessions on disk."""
    plan = chats_of(report)["plan"]
    title = f"{plan['rows']} prompts of {plan['own']} tokens behind {plan['shared']:,} that they share"
    rows = [
        [who(cell), way["name"], in_words(percentiles(way["seconds"][0])), f"{sum(way['fed']):,}",
         _megabytes(way["cache_bytes"][0]), str(len(way["seconds"][0]))]
        for cell, way in _ways(report, prompts=True)
    ]  # fmt: skip
    heads = ["path", "their beginning", "time to the first tokens, s", "tokens fed", "bytes held, MB", "n"]
    kept = [[name, *_disk(disk)] for name, disk in disks(report)]
    return [
        Table(title, heads, rows),
        Table("A session on disk", ["path", "tokens", "file", "saved, s", "loaded, s", "fed anew, s", "n"], kept),
    ]


def disks(report: Report) -> list[tuple[str, OnDisk]]:
    """Return what was measured of sessions on disk, by path."""
    both = zip(report["cells"], chats_of(report)["records"], strict=True)
    return [(who(cell), record["disk"]) for cell, record in both if record["disk"] is not None]


def _disk(disk: OnDisk) -> list[str]:
    times = (disk["save_seconds"], disk["load_seconds"], disk["feed_seconds"])
    spreads = [in_words(percentiles(each), digits=3) for each in times]
    return [f"{disk['tokens']:,}", size(disk["file_bytes"]), *spreads, str(len(times[0]))]


def chat_findings(report: Report) -> list[str]:
    """Return what a reader should take from it, in sentences."""
    found = columns(report)
    kept = [column for column in found if column.way["name"] == "kept"]
    ours = [column for column in kept if column.ours]
    return [
        *(_turn_sentence(chats_of(report)["plan"], one, found) for one in ours),
        *(_peer_sentence(one, ours) for one in kept if ours and not one.ours),
        *_prompt_sentences(report),
        *(_disk_sentence(name, disk) for name, disk in disks(report)),
    ]


def _turn_sentence(plan: ChatPlan, kept: Column, found: Sequence[Column]) -> str:
    last, seconds = plan["turns"][-1], kept.seconds(-1)
    others = {str(one.way["name"]): one.seconds(-1) for one in found if one.who == kept.who and one is not kept}
    words = {"anew": "where it is made anew", "off": "without a cache"}
    against = [f", {others[name] / seconds:.1f}x sooner than {words[name]} ({others[name]:.2f} s)"
               for name in words if name in others]  # fmt: skip
    return (
        f"On the path {kept.who}, with the cache kept, turn {len(plan['turns'])}, {last['new']} tokens behind "
        f"{last['history']:,}, has its first token after {seconds:.3f} s{''.join(against)}."
    )


def _peer_sentence(peer: Column, ours: Sequence[Column]) -> str:
    ratios = ", ".join(f"{peer.seconds(-1) / one.seconds(-1):.2f}x the time of {one.who}" for one in ours)
    return f"{peer.who}, with its cache kept, takes {peer.seconds(-1):.3f} s for the same turn: {ratios}."


def _prompt_sentences(report: Report) -> Iterator[str]:
    plan = chats_of(report)["plan"]
    found: dict[str, dict[str, Way]] = {}
    for cell, way in _ways(report, prompts=True):
        found.setdefault(who(cell), {})[way["name"]] = way
    for path, ways in found.items():
        once, each = ways["shared"], ways["not shared"]
        fewer, less = each["fed"][0] / once["fed"][0], median(each["seconds"][0]) / median(once["seconds"][0])
        yield (
            f"On the path {path}, {plan['rows']} prompts behind {plan['shared']:,} shared tokens have their first "
            f"tokens {less:.1f}x sooner where what they share is fed once, for {fewer:.1f}x fewer tokens fed."
        )


def _disk_sentence(path: str, disk: OnDisk) -> str:
    load, feed = median(disk["load_seconds"]), median(disk["feed_seconds"])
    return (
        f"On the path {path}, a session of {disk['tokens']:,} tokens is loaded in {load:.3f} s, {feed / load:.1f}x "
        f"sooner than its text is fed anew ({feed:.2f} s)."
    )
