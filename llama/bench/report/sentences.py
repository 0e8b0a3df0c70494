"""The numbers and sentences at the head of a report.

They say how wide a ratio is, and omit what was not measured.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from llama.bench.cell import FULL
from llama.bench.report.cells import cell_views
from llama.bench.report.columns import NOT_JUDGED, least_to_most, megabytes, two_digits
from llama.bench.report.derived import crossovers, growth, saved
from llama.bench.report.peak import peak_words
from llama.bench.report.tables import comparison_words, named, ways_of
from llama.bench.schema import Report, Row, cell_of, cell_row, rows_of
from llama.bench.schema import pairs as pairs_of
from llama.bench.statistics import median_of
from llama.costs import MB

_MOST_KINDS = 4  # lossy kinds of cache that have a sentence each


def findings(report: Report) -> list[str]:
    """Return the sentences of a report; figures that were not measured have none."""
    if report["preset"] == "report":
        return list(_hand_in(report))
    found = [_pair(report, row) for row in saved(report) if row["on_view"].is_ours and row["times_faster"]]
    found += [_with_guesses(report, on, plain) for on, plain in pairs_of(report) if cell_of(report, on).speculate]
    found += [f"{words}." for words in [crossover_words(report)] if words]
    if rows := growth(report):
        words = listed([f"{faster(row['times_faster'])} at {row['generated']}" for row in rows])
        batch = rows[0]["batch_size"]
        found.append(f"Time until the first tokens are generated at batch {batch}, with the cache: {words} tokens.")
    return [*found, *_kinds(report), *_turns(report)]


def headline(report: Report) -> list[tuple[str, str]]:
    """Return up to three large numbers, each with the words below it: what the cache does to time, memory and tokens.

    Of the largest measured pair, of the smallest kind that was judged, or of the last turn of a conversation.
    """
    if report["preset"] == "merged":  # a pair may be of two setups
        return []
    row = _lead_pair(report)
    if row is None:
        return _headline_of_kinds(report) or _headline_of_turns(report)
    on, off, ends, more = row["on_view"], row["off_view"], row["times_faster_range"], row["more_bytes"]
    factor = (range_faster(ends) if ends else faster(row["times_faster"])).replace(" times", "x")
    times = f"{in_seconds(on.median('seconds'))} instead of {in_seconds(off.median('seconds'))}"
    found = [(factor, f"batch {row['batch_size']} with the cache: {times}")]
    if more is not None:
        found.append((f"{'+' if more >= 0 else '-'}{megabytes(abs(more))} MB", "memory at the peak, with the cache"))
    if same := rows_of(report, "comparison", on.index) or rows_of(report, "text"):
        equal, tokens = all(one["equal"] for one in same), sum(one["tokens"] for one in same)
        found.append((f"same {tokens} tokens" if equal else f"other tokens, of {tokens}", "with the cache and without"))
    return found


def _lead_pair(report: Report) -> dict[str, Any] | None:
    """Return the largest pair of ours, on the plain path if it ran."""
    rows = [row for row in saved(report) if row["on_view"].is_ours and row["times_faster"]]
    return max(rows, key=lambda row: row["batch_size"], default=None)


def kind_rows(report: Report) -> list[dict[str, Any]]:
    """Return the quality of each kind of cache in the order of the cells, with its name."""
    rows = sorted((row for row in rows_of(report, "quality") if "judged" in row), key=lambda row: row["cell"])
    return [named(report, row) for row in rows]


def _headline_of_kinds(report: Report) -> list[tuple[str, str]]:
    rows = [row for row in kind_rows(report) if row.get("of_full") is not None and row["judged"]]
    row = min(rows, key=lambda row: row["of_full"], default=None)
    if row is None:
        return []
    return [
        (f"{row['of_full']:.2f} of the bytes", f"{row['kind']} against {FULL}, at {row['context']:,} tokens"),
        (f"{positions(row).partition(' positions')[0]} same", "most likely token at the scored positions"),
        (f"{row['mean_kl']:.2g} nats", "mean KL divergence"),
    ]


def _headline_of_turns(report: Report) -> list[tuple[str, str]]:
    views, found = cell_views(report), list[tuple[str, str]]()
    last = {way: rows[-1] for (_, way), rows in reversed(ways_of(report).items()) if views[rows[-1]["cell"]].is_ours}
    if (kept := last.get("kept")) is None:
        return []
    for way, words in (("rebuilt", "than with the cache rebuilt"), ("off", "than without a cache")):
        if way in last:
            factor = median_of(last[way], "first_token_seconds") / median_of(kept, "first_token_seconds")
            found.append((faster(factor).replace(" times", "x"), f"first token of turn {kept['turn'] + 1}, {words}"))
    return [*found, (f"{megabytes(kept['cache_bytes'])} MB", "of cache are kept")]


def faster(factor: float, ends: tuple[float, float] | None = None) -> str:
    """Return a ratio of times as words, and its range if that is wide: 24 times faster, 6 times faster (3 to 12)."""
    words = f"{two_digits(max(factor, 1 / factor))} times {'faster' if factor >= 1 else 'slower'}"
    if ends is None:
        return words
    low, high = ends if factor >= 1 else (1 / ends[1], 1 / ends[0])
    return f"{words} ({two_digits(low)} to {two_digits(high)})"


def range_faster(factors: Sequence[float]) -> str:
    """Return a range of such ratios: 8.1 to 24 times faster."""
    low, high = min(factors), max(factors)
    if low < 1 < high:
        return f"{faster(low)} to {faster(high)}"
    ends = dict.fromkeys(two_digits(one) for one in sorted(max(one, 1 / one) for one in (low, high)))
    return f"{' to '.join(ends)} times {'faster' if high > 1 else 'slower'}"


def listed(names: Sequence[str]) -> str:
    """Return names as an enumeration: 1, 8 and 16."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def crossover_words(report: Report) -> str:
    """Return from which context a step is faster with the cache; nothing if no steps were timed."""
    found = crossovers(report)
    pays = [one["context"] for one in found if one["context"]]
    never = ", ".join(str(one["batch_size"]) for one in found if not one["context"])
    if not pays:
        return "A step is not faster with the cache at any context that was tried" if found else ""
    rule = "p90 with it below p10 without"
    words = f"A step is faster with the cache from a context of {least_to_most(pays)} tokens on ({rule})"
    return f"{words}, not at batch {never}" if never else words


def _pair(report: Report, row: dict[str, Any]) -> str:
    """Return the sentence of one pair: 24 times faster, 188 MB more memory, the same 512 tokens."""
    on, off, more = row["on_view"], row["off_view"], row["more_bytes"]
    parts = [faster(row["times_faster"], row["times_faster_range"])]
    if more is not None and abs(more) > 0.05 * MB:
        parts.append(f"{megabytes(abs(more))} MB {'more' if more >= 0 else 'less'} memory")
        logits = off.line("logits") if on.cell.logits == "all" else None
        if logits is not None:
            parts[-1] += f" (without it {megabytes(logits['predicted_bytes'])} MB are logits of all positions)"
    parts += [comparison_words(found) for found in rows_of(report, "comparison", on.index)]
    times = f"{in_seconds(on.median('seconds'))} instead of {in_seconds(off.median('seconds'))}"
    path = f" ({on.path})" if on.is_fast else ""
    return f"Batch {row['batch_size']} with the KV cache{path}: {', '.join(parts)} ({times})."


def _with_guesses(report: Report, on: Row, plain: Row) -> str:
    """Return the sentence of a cell with guesses: 2.1 times faster, 90 of 97 guessed tokens right, the same text."""
    cell, (fast, slow) = cell_of(report, on), (median_of(row, "seconds") for row in (on, plain))
    right = f"{median_of(on, 'accepted'):g} of {median_of(on, 'proposed'):g} guessed tokens right"
    parts = [faster(slow / fast), right, *map(comparison_words, rows_of(report, "comparison", on["cell"]))]
    times = f"{in_seconds(fast)} instead of {in_seconds(slow)}"
    return f"Batch {cell.batch_size} with guesses by {cell.speculate} ({on['path']}): {', '.join(parts)} ({times})."


def in_seconds(seconds: float) -> str:
    """Return seconds as text, with three digits or in whole seconds."""
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def positions(row: dict[str, Any]) -> str:
    """Return at how many positions the most likely token is the same: 29 of 32 positions."""
    return f"{round(row['top1_agreement'] * row['tokens']):,} of {row['tokens']:,} positions"


def _kinds(report: Report) -> Iterator[str]:
    """Yield a sentence for each lossy kind; of many kinds, the table and the pictures show more."""
    known = [row for row in kind_rows(report) if row.get("of_full") is not None]
    rows = [row for row in known if not cell_row(report, row["cell"]).get("lossless")]
    for row in rows if len(rows) <= _MOST_KINDS else ():
        words = f"{row['kind']} stores {row['of_full']:.2f} of the bytes of {FULL} at {row['context']:,} tokens"
        if row["judged"]:
            words += f" and has the same most likely token at {positions(row)}"
            yield f"{words}; the mean KL divergence is {row['mean_kl']:.2g} nats."
        else:
            yield f"{words}; its quality is {NOT_JUDGED}: it has dropped or compressed nothing there."


def _hand_in(report: Report) -> Iterator[str]:
    """Yield three sentences with this machine's figures: on time, on memory, and on when not to cache."""
    rows, row = [row for row in saved(report) if row["times_faster"]], _lead_pair(report)
    if row is None:
        return
    on, off = row["on_view"], row["off_view"]
    times = f"{in_seconds(on.median('seconds'))} instead of {in_seconds(off.median('seconds'))}"
    words = f"Time: at batch {row['batch_size']} the job is {faster(row['times_faster'], row['times_faster_range'])} "
    words += (
        f"with the cache, {times}: {on.row['token_forwards']:,} instead of {off.row['token_forwards']:,} tokens go "
    )
    words += f"through the model, {row['less_work']:.0f} times less work"
    less = row["times_faster"] < row["less_work"]
    yield f"{words}, but each step must read all weights, for one token or for many." if less else f"{words}."
    costs = [(one["batch_size"], one["more_bytes"]) for one in rows if one["more_bytes"] is not None]
    position = on.row["cache_bytes"] // (on.cell.batch_size * on.cell.total_len)
    costs_words = [
        f"{megabytes(abs(more))} MB {'higher' if more >= 0 else 'lower'} at batch {batch}" for batch, more in costs
    ]
    peak = f"with the cache the peak is {listed(costs_words)}. The cache" if costs else "the cache"
    yield f"Memory: {peak} stores {position:,} bytes for each token of each row. {peak_words(on)}."
    firsts = [in_seconds(one.median("first_token_seconds")) for one in (on, off)]
    yield (
        f"When not to cache: if the keys and values are not read again. The first token takes {firsts[0]} with the "
        f"cache and {firsts[1]} without, so one new token, scoring a known text and training gain nothing; and if "
        "memory is short and time is not."
    )


def _turns(report: Report) -> Iterator[str]:
    views = cell_views(report)
    last = {way: (rows[-1], median_of(rows[-1], "first_token_seconds")) for way, rows in ways_of(report).items()}
    kept = {who: seconds for (who, way), (_, seconds) in last.items() if way == "kept"}
    ours = [who for (who, way), (row, _) in last.items() if way == "kept" and views[row["cell"]].is_ours]
    for who, seconds in kept.items():
        row, said = last[who, "kept"][0], [in_seconds(seconds)]
        if who not in ours:
            said += [f"{seconds / kept[our]:.2f} times the time of {our}" for our in ours]
        for way, words in (("rebuilt", "with the cache rebuilt"), ("off", "without a cache")):
            if (who, way) in last:
                other = last[who, way][1]
                said.append(f"{faster(other / seconds)} than {words} ({in_seconds(other)})")
        turn = f"Turn {row['turn'] + 1} ({who}), {row['new']} tokens after {row['history']:,}"
        yield f"{turn}, with the cache kept: first token after {', '.join(said)}."
