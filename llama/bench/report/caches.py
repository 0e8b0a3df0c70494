"""A report of the preset `caches` as tables and sentences: bytes, time and quality of every kind, side by side.

Knows nothing of Markdown, HTML or how anything was measured.
"""

import math
from collections.abc import Sequence

from llama.bench.report.tables import NOT_MEASURED, Section, Table, environment_table, in_words, megabytes
from llama.bench.schema import Caches, CacheSize, KindRecord, Report, StepTimes

NOT_JUDGED = "not judged"

DEFINITIONS = (
    ("kind", "the name of a kind of cache, with its parameters; static keeps all keys and values as they come"),
    ("bytes held", "in the tensors of the cache of one row, over all layers, at a context, scales and tails too"),
    ("bytes per token", "bytes held over the context"),
    ("predicted", "worked out by the kind from the model's sizes alone"),
    ("time per token", "a step of one row at a context; the median, and in brackets where 10 % and 90 % lie"),
    ("path", "what executed the forwards, as was seen: plain, or a faster one"),
    ("mean KL", "of what the kind makes the model expect, from what the full cache does, in nats, over all positions"),
    ("top-1 agreement", "the share of positions at which both find the same token the most likely"),
    ("perplexity", "of the text, fed token by token behind a prompt, so that the cache is read for every token"),
    ("greedy text parts", "the first most likely token that is another than the full cache's, and the gap there of the "
                          "latter's two largest logits: a small one is a near tie"),
    ("needles", "secrets found in a long text, of those that were hidden: a quarter apart in depth"),
)  # fmt: skip


def cache_sections(report: Report) -> list[Section]:
    """Return the whole report behind its head, in reading order."""
    found = [
        Section("Memory against quality and time", [], ("cache_quality", "cache_time")),
        Section("Kinds of cache", cache_tables(report)),
        Section("Where and how", [environment_table(report)]),
        Section("What the words mean", [[f"{name}: {meaning}" for name, meaning in DEFINITIONS]]),
    ]
    return [one for one in found if one.parts or one.pictures]


def cache_tables(report: Report) -> list[Table]:
    """Return a row for each kind in a table of its bytes, one of its times, and one of its quality."""
    caches = report["caches"]
    assert caches is not None
    return [_bytes_table(caches), _times_table(caches), _quality_table(report, caches)]


def context_of_size(caches: Caches) -> int:
    """Return at which context the bytes per token are told: 2,048, or the longest below it."""
    return max((context for context in caches["contexts"] if context <= 2048), default=caches["contexts"][0])


def held_at(sizes: Sequence[CacheSize], length: int) -> int | None:
    """Return the bytes that a kind holds at a length, where they were measured."""
    return next((one["measured"] for one in sizes if one["length"] == length), None)


def text_end(caches: Caches, *, greedy: bool = False) -> int:
    """Return how many positions of the scored text, or of the greedy one, were fed."""
    plan = caches["plan"]
    return 0 if plan is None else plan["prompt_len"] + plan["greedy_tokens" if greedy else "tokens"] - 1


def share_at(caches: Caches, record: KindRecord, length: int) -> float | None:
    """Return the bytes that a kind held at the end of a text of its quality, over those of the full cache there."""
    own, full = record["quality"], caches["kinds"][0]["quality"]
    held = None if own is None else held_at(own["bytes"], length)
    whole = None if full is None else held_at(full["bytes"], length)
    return None if held is None or whole is None else held / whole


def is_judged(caches: Caches, record: KindRecord, length: int) -> bool:
    """Tell whether the quality on a text of `length` is the price of the bytes that a kind saves.

    It is not where a kind that saves bytes on other texts had saved none at the end of this one: it had hardly dropped
    or compressed anything. The quality of a kind that never saves any is its own.
    """
    full, share = caches["kinds"][0], share_at(caches, record, length)
    whole = {one["length"]: one["measured"] for one in full["bytes"]}
    saves = record["saves"] or any(one["measured"] < whole.get(one["length"], 0) for one in record["bytes"])
    return record["lossless"] is True or not saves or (share is not None and share < 1)


def step_at(record: KindRecord, context: int) -> StepTimes | None:
    return next((one for one in record["steps"] if one["context"] == context), None)


def _bytes_table(caches: Caches) -> Table:
    at, contexts = context_of_size(caches), caches["contexts"]
    full = held_at(caches["kinds"][0]["bytes"], at)
    rows = []
    for record in caches["kinds"]:
        held = held_at(record["bytes"], at)
        predicted = next((one["predicted"] for one in record["bytes"] if one["length"] == at), None)
        ratio = NOT_MEASURED if held is None or full is None else f"{held / full:.2f}"
        rows.append([record["kind"], _whole(held, at), _whole(predicted, at), ratio,
                     *(megabytes(held_at(record["bytes"], context)) for context in contexts)])  # fmt: skip
    heads = ["kind", f"bytes per token at {at:,}", "predicted", f"of {caches['kinds'][0]['kind']}"]
    notes = [words for record in caches["kinds"] if (words := _off_prediction(record))]
    return Table("Bytes", [*heads, *(f"held at {context:,}" for context in contexts)], rows, notes)


def _off_prediction(record: KindRecord) -> str:
    """Say where a kind holds other bytes than it predicts."""
    off = [one for one in record["bytes"] if one["measured"] != one["predicted"]]
    each = "; ".join(f"{one['measured']:,} bytes at {one['length']:,}, predicted {one['predicted']:,}" for one in off)
    return f"{record['kind']} does not hold what its predicted_bytes says: {each}" if off else ""


def _whole(held: int | None, context: int) -> str:
    return NOT_MEASURED if held is None else f"{held / context:,.0f}"


def _times_table(caches: Caches) -> Table:
    rows, notes = [], []
    for record in caches["kinds"]:
        steps = [step_at(record, context) for context in caches["contexts"]]
        times = [in_words(None if one is None else one["seconds"], scale=1e3, digits=1) for one in steps]
        rows.append([record["kind"], record["path"] or NOT_MEASURED, *times])
    slow = [one["kind"] for one in caches["kinds"] if one["widens"] and one["path"].startswith("plain")]
    if slow:
        notes.append(
            f"On the plain path every step widens all that is stored in fewer bits, of {', '.join(slow)}: this takes "
            "time that the full cache does not take, whatever is saved."
        )
    if len({one["path"] for one in caches["kinds"] if one["path"]}) > 1:
        notes.append("Times on different paths tell of the paths, not of the kinds.")
    heads = [f"ms at {context:,}" for context in caches["contexts"]]
    return Table("Time per token", ["kind", "path", *heads], rows, notes)


def _quality_table(report: Report, caches: Caches) -> Table:
    plan = caches["plan"]
    lengths = [] if plan is None else plan["needle_lengths"]
    rows = [[record["kind"], *_quality(caches, record, lengths)] for record in caches["kinds"]]
    after = f"of {caches['kinds'][0]['kind']} after {text_end(caches):,}"
    heads = ["kind", "path", after, "mean KL, nats", "top-1 agreement", "perplexity", "greedy text parts"]
    notes = [] if plan is None else [_how(report, caches)]
    if any(NOT_JUDGED in row for row in rows):
        notes.append(
            f"{NOT_JUDGED}: at the end of that text the kind held no fewer bytes than {caches['kinds'][0]['kind']}, so "
            "the text does not show what its savings cost; give a larger --budget, or a kind that holds less"
        )
    return Table("Quality", [*heads, *(f"needles at {length:,}" for length in lengths)], rows, notes)


def _quality(caches: Caches, record: KindRecord, lengths: Sequence[int]) -> list[str]:
    quality, end = record["quality"], text_end(caches)
    if quality is None:
        return [NOT_MEASURED] * (6 + len(lengths))
    share, parts, greedy = share_at(caches, record, end), quality["parting"], quality["greedy_tokens"]
    found = {one["length"]: f"{one['found']} of {one['tries']}" for one in quality["needles"]}
    parting = f"not in {greedy}" if parts is None else f"at token {parts['token']}, margin {parts['margin']:.2g}"
    figures = [
        (f"{quality['mean_kl']:.2g}", end),
        (f"{quality['top1_agreement']:.2%}", end),
        (f"{perplexity(quality['nll']):.3f}", end),
        (parting, text_end(caches, greedy=True)),
        *((found.get(length, NOT_MEASURED), length) for length in lengths),
    ]
    judged = (words if is_judged(caches, record, length) else NOT_JUDGED for words, length in figures)
    return [quality["path"], NOT_MEASURED if share is None else f"{share:.2f}", *judged]


def perplexity(nll: float) -> float:
    """Return exp(nll), infinity where that is no number."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def _how(report: Report, caches: Caches) -> str:
    plan, full = caches["plan"], caches["kinds"][0]
    assert plan is not None
    words = f"{plan['tokens']:,} tokens of {caches['text']}, one by one behind a prompt of {plan['prompt_len']}"
    if plan["tokens"] < 2048:
        words += f", fewer than 2,048 for the budget of {report['budget_minutes']:g} minutes or the model's limit"
    if full["quality"] is not None:
        words += f"; perplexity of the full cache {perplexity(full['quality']['reference_nll']):.3f}"
    return words


def cache_findings(caches: Caches) -> list[str]:
    """Return what a reader should take from it: of every kind that changes something, what it saves and costs."""
    at, end, full, sentences = context_of_size(caches), text_end(caches), caches["kinds"][0], []
    for record in caches["kinds"][1:]:
        held, whole, quality = held_at(record["bytes"], at), held_at(full["bytes"], at), record["quality"]
        share = share_at(caches, record, end)
        if held is None or whole is None or quality is None or share is None or record["lossless"]:
            continue
        if not is_judged(caches, record, end):
            sentences.append(
                f"{record['kind']} holds {held / whole:.2f} of the bytes of {full['kind']} at {at:,} tokens; its "
                f"quality is {NOT_JUDGED}: after the {end:,} tokens of the scored text it held {share:.2f} of them."
            )
            continue
        sentences.append(
            f"{record['kind']} holds {share:.2f} of the bytes of {full['kind']} after the {end:,} tokens of the scored "
            f"text, in which it finds the same most likely token at {quality['top1_agreement']:.2%} of "
            f"{quality['tokens']:,} positions, with a mean KL of {quality['mean_kl']:.2g} nats."
        )
    return sentences
