"""Show a recording as one HTML page that loads no font, picture or script from outside.

All texts and numbers are made here, escaped, and embedded as JSON; watch_page.js shows them. mistakes.json has what
mistakes of a cache do to a text of the demo model (scripts/record_mistakes.py). Knows recordings, not models.
"""

import base64
import hashlib
import json
import math
import operator
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from itertools import accumulate
from string import Template
from typing import Any

from llama.host import palette
from llama.untrusted.words import printable
from llama.watch.record import Moment, Recording, StepWork

MOST_ATTENTION = 1_200_000  # bytes of attention weights; the page says what is left out
COUNTERS = {  # and the fields of a StepWork
    "tokens fed": "fed", "FLOPs": "flops", "bytes read": "bytes_read", "bytes cached": "bytes_held", "time": "ms",
}  # fmt: skip


def page(recording: Recording, *, model: str = "a Llama model") -> str:
    """Return the recording as one HTML page; `model` is the name to show."""
    style, script = palette.css() + _file("watch_page.css"), _file("watch_page.js")
    prompt = printable("".join(recording.texts[: recording.prompt_len]), 60)
    return Template(_file("watch_page.html")).substitute(
        policy=f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'",
        style=style,
        script=script,
        title=escape(f"The KV cache at work: {prompt}"),
        byline=escape(_byline(recording, prompt, model)),
        notes="".join(f"<li>{escape(note)}</li>" for note in [*recording.notes, *_left_out(recording)]),
        data=_json(recording),
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    """Return the source expression of a content security policy that allows only this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _byline(recording: Recording, prompt: str, model: str) -> str:
    args, layout, steps = recording.args, recording.layout, _counted(len(recording.moments), "step")
    return (
        f"{printable(model, 80)}: {args.n_layers} layers, {args.n_heads} heads, {args.n_kv_heads} KV heads, "
        f"{recording.where}. Cache: {printable(layout.kind, 80)}. {steps} after “{prompt}”"
    )


# ---- the texts and numbers of a step ---------------------------------------------------------------------------------


def sentence(number: int, moment: Moment) -> str:
    """Return a description of a step; steps are counted from 1."""
    on, off = moment.on, moment.off
    if on.fed == off.fed:
        return (
            f"Step {number}: {_counted(on.fed)} fed, the whole prompt. The cache is empty, so both modes compute all "
            "of it. The cache stores the result, which is not computed again."
        )
    first = on.fed - moment.wrong
    read = _counted(moment.cached - first, "position")
    fed, steps = f"{_counted(on.fed)} fed, {read} read from the cache.", ""
    if moment.guess:
        made = _counted(1 + moment.right)
        fed = (
            f"1 token and a guess of {len(moment.guess)} fed: {moment.right} right, {moment.wrong} rejected. One call "
        )
        fed += f"makes {made}, with {read} read from the cache."
        steps = f" in {_counted(off.steps, 'step')}"
    return f"Step {number}: {fed} Without it: {_counted(off.fed)} computed{steps}, {off.fed - first} of them again."


def formulas(recording: Recording, work: StepWork, cached: int, guessed: int = 0, wrong: int = 0) -> list[str]:
    """Return for each of the COUNTERS of a step its formula with this model's numbers.

    `cached`: the number of positions that the newest token reads, its own included; 0 with the cache off. `guessed`:
    how many tokens of a guess were fed, of which so many were `wrong`.
    """
    args, layout = recording.args, recording.layout
    if work.steps > 1:
        values = (getattr(work, name) for name in list(COUNTERS.values())[:3])
        sums = [f"the sum of {work.steps} steps = {value:,}" for value in values]
        return [*sums, "no cache = 0", "measured, the sum of these steps"]
    heads = (2 * args.n_heads + 2 * args.n_kv_heads) * args.head_dim
    weights = args.n_layers * args.dim * (heads + 3 * args.ffn_dim)
    before = _read(work, cached, wrong)
    pairs = work.fed * before + work.fed * (work.fed + 1) // 2
    flops = (
        f"2 x {weights:,} weights of the layers x {_counted(work.fed)} + 4 x {args.n_layers} layers x {args.n_heads} "
        f"heads x {args.head_dim} numbers x {pairs:,} pairs of query and key + 2 x {args.dim} x {args.vocab_size:,} "
        f"for the logits{f' x {_counted(1 + guessed)}' if guessed else ''} = {work.flops:,}"
    )
    from_cache = _cache_bytes(recording, before)
    terms = [
        f" + {args.n_layers} layers x {_counted(count, 'position')} x {nbytes:,}"
        for count, nbytes in layout.parts(before)
    ]
    read = f"{work.bytes_read - from_cache:,} of weights, each once{''.join(terms)}"
    fed = f"{_counted(work.fed)} from position {work.start} on = {work.fed}"
    made = [
        fed,
        flops,
        f"{read} = {work.bytes_read:,}",
        _held(recording, work, cached and cached + wrong),
        "measured, in a run without hooks",
    ]
    return [formula.replace(" x ", " \u00d7 ") for formula in made]


def _read(work: StepWork, cached: int, wrong: int) -> int:
    """Return the number of positions that a step reads from the cache; the arguments are those of `formulas`."""
    return max(cached - work.fed + wrong, 0)


def _cache_bytes(recording: Recording, positions: int) -> int:
    return recording.args.n_layers * sum(map(math.prod, recording.layout.parts(positions)))


def _held(recording: Recording, work: StepWork, cached: int) -> str:
    """Return the formula of the bytes of the caches; the number is the measured one if the formula gives another."""
    args, positions = recording.args, max(recording.layout.reserved, cached)
    if not cached:
        return "no cache = 0"
    full = args.n_layers * recording.layout.newest_bytes * positions
    whole = (
        f"2 x {args.n_layers} layers x {args.n_kv_heads} KV heads x {args.head_dim} numbers x {recording.itemsize} "
        f"bytes x {positions} positions = {full:,}"
    )
    if work.bytes_held == full:
        return whole
    return f"without quantisation or eviction {whole}; measured on these caches = {work.bytes_held:,}"


def bytes_words(recording: Recording, number: int, moment: Moment) -> str:
    """Return what the two bars of bytes mean in a step."""
    on, off, read = moment.on, moment.off, _read(moment.on, moment.cached, moment.wrong)
    from_cache = _cache_bytes(recording, read)
    weights = on.bytes_read - from_cache
    often = "in both modes" if off.steps == 1 else f"once with the cache, {off.steps} times without it"
    what = "Nothing is read from the cache. After it"
    if read:
        what = f"With the cache it also reads {amount(2, from_cache)}, the keys and values of "
        more = 100 * from_cache / weights
        what += f"{_counted(read, 'position')}: {more:{',.0f' if more >= 10 else '.2g'}} % more bytes. For this"
    weight, held = amount(2, weights), amount(3, on.bytes_held)
    return f"Step {number} reads the weights, {weight}, {often}. {what}, the cache occupies {held} of memory."


# ---- questions to predict --------------------------------------------------------------------------------------------

TOKENS, BYTES = 0, 2  # counters, by which the numbers of a question are shown


def questions(recording: Recording) -> list[dict[str, Any]]:
    """Return questions on the last of the first nine steps that continues a text without a guess; [] if none does."""
    steps = [number for number, one in enumerate(recording.moments[:9], 1) if one.on.start and not one.guess]
    return list(_questions(recording, steps[-1])) if steps else []


def _question(words: str, counter: int, answer: int, others: Sequence[int], why: str) -> dict[str, Any]:
    """Return a question with its choices in order; they are values of a counter."""
    choices = {amount(counter, value): value for value in (*others, answer)}  # two values may have one text
    texts = sorted(choices, key=choices.__getitem__)
    return {"words": words, "choices": texts, "answer": texts.index(amount(counter, answer)), "why": why}


def _questions(recording: Recording, step: int) -> Iterator[dict[str, Any]]:
    args, moment, itemsize = recording.args, recording.moments[step - 1], recording.itemsize
    end, read = moment.on.start + 1, _read(moment.on, moment.cached, 0)
    words = f"How many tokens will step {step} feed with the cache?"
    kept = "the keys and values of all earlier tokens" if read + 1 == end else "what this kind keeps of earlier tokens"
    why = f"The cache has {kept}. Without it, all {end} tokens are fed."
    yield _question(words, TOKENS, 1, (recording.prompt_len, end), why)
    if read + 1 == end and not recording.layout.group:  # this kind neither drops positions nor packs groups of them
        words = f"How many of the {_counted(read, 'position')} in the cache will step {step} change?"
        why = "A token never looks ahead, so what was computed for an old token does not depend on a new one. The step "
        yield _question(words, TOKENS, 0, (1, read), f"{why}only adds a key and a value to each layer.")
    token = args.n_layers * recording.layout.newest_bytes
    words = (
        f"How many bytes are the keys and values of a new token? There are {args.n_layers} layers, {args.n_heads} "
        f"query heads, and {args.n_kv_heads} KV heads of {args.head_dim} numbers. A new number takes {itemsize} bytes."
    )
    why = (
        f"2 x {args.n_layers} layers x {args.n_kv_heads} KV heads x {args.head_dim} numbers x {itemsize} bytes = "
        f"{token:,} bytes = {amount(BYTES, token)}. The 2 stands for keys and values. Query heads store nothing."
    ).replace(" x ", " \u00d7 ")
    others = token // 2, token // args.n_layers, token * args.n_heads // args.n_kv_heads
    yield _question(words, BYTES, token, others, why)
    cached = _cache_bytes(recording, read)
    weights = moment.on.bytes_read - cached
    why = (
        f"All weights, {amount(BYTES, weights)}, and {amount(BYTES, cached)} of cached keys and values. Every step "
        "reads the weights, with the cache or without it. The cache saves arithmetic."
    )
    words = f"How many bytes will step {step} read with the cache?"
    yield _question(words, BYTES, moment.on.bytes_read, (cached, weights * end, token), why)
    pairs = end * (end + 1) // 2
    words = f"How many pairs of query and key will step {step} compute in each head without the cache?"
    why = (
        f"Token {end} has {end} pairs, and each token before it has one less: 1 + 2 + ... + {end} = {pairs:,}. "
        f"With the cache only the newest row is computed: {moment.cached:,}."
    )
    yield _question(words, TOKENS, pairs, (end, end * end), why)


def _counted(count: int, what: str = "token") -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def amount(counter: int, value: float) -> str:
    """Return a value of one of the COUNTERS as short text: "270 M", "513.1 MB" (MB is 2^20 bytes), "26.1 ms"."""
    if counter == 0:
        return f"{value:,.0f}"
    if counter == 4:
        return f"{value:,.1f} ms" if value < 1000 else f"{value / 1000:,.2f} s"
    base, units = (1000, ("", " k", " M", " G", " T")) if counter == 1 else (1024, (" B", " kB", " MB", " GB", " TB"))
    unit = 0
    while value >= base and unit < len(units) - 1:
        value, unit = value / base, unit + 1
    return f"{value:,.0f}{units[unit]}" if unit == 0 or value >= 100 else f"{value:,.1f}{units[unit]}"


# ---- the data of watch_page.js ---------------------------------------------------------------------------------------


def _json(recording: Recording) -> str:
    """Return the data as JSON, escaped so that it cannot end the script element that contains it."""
    text = json.dumps(_data(recording), ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(recording: Recording) -> dict[str, Any]:
    layers, first = kept_attention(recording)
    values = operator.attrgetter(*COUNTERS.values())
    sides = [one.on for one in recording.moments], [one.off for one in recording.moments]
    sums = [list(accumulate(map(values, side), _added)) for side in sides]
    ends = list(accumulate(one.on.fed - one.wrong for one in recording.moments))  # of the text
    return {
        "layers": recording.args.n_layers,
        "heads": recording.args.n_heads,
        "prompt": recording.prompt_len,
        "bits": 8 * recording.itemsize,
        "layout": {name: getattr(recording.layout, name) for name in ("bits", "group", "window", "block", "reserved")},
        "texts": [[printable(text) for text in texts] for texts in (recording.texts, recording.texts_off)],
        "attended": layers,
        "counters": list(COUNTERS),
        "steps": [
            {
                "words": sentence(number, moment),
                "fed": [[moment.on.start, moment.on.fed - moment.wrong], [0, ends[number - 1]]],
                "rejected": [printable(text) for text in moment.guess[moment.right :]],
                "seen": _ranges(moment.seen[:1] if len(set(moment.seen)) == 1 else moment.seen),
                "counters": [
                    _counters(
                        moment.on,
                        sums[0][number - 1],
                        formulas(recording, moment.on, moment.cached, len(moment.guess), moment.wrong),
                    ),
                    _counters(moment.off, sums[1][number - 1], formulas(recording, moment.off, 0)),
                ],
                "bytes": bytes_words(recording, number, moment),
                "wasted": int(sums[1][number - 1][0] - ends[number - 1]),
                "likely": [[printable(one.text), round(one.probability, 4), one.chosen] for one in moment.likely],
                "attention": _packed(moment, layers) if number > first else None,
            }
            for number, moment in enumerate(recording.moments, 1)
        ],
        "rows": _rows(recording),
        "questions": questions(recording),
        "broken": json.loads(_file("mistakes.json")),
        "most": [max(ends) for ends in zip(*(side[-1] for side in sums), strict=True)],
    }


def _added(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the values so far: sums, except for the cached bytes, whose value is the newest."""
    return [b if place == 3 else a + b for place, (a, b) in enumerate(zip(one, other, strict=True))]


def _counters(work: StepWork, so_far: Sequence[float], words: Sequence[str]) -> list[list[Any]]:
    """Return for each counter (this step as text, so far as text, so far as a number, formula)."""
    return [
        [amount(place, getattr(work, name)), amount(place, total), round(total, 3), formula]
        for place, (name, total, formula) in enumerate(zip(COUNTERS.values(), so_far, words, strict=True))
    ]


def _ranges(seen: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Return the runs of positions of each list as [first, end]."""
    made = []
    for positions in seen:
        runs: list[list[int]] = []
        for position in positions:
            if runs and runs[-1][1] == position:
                runs[-1][1] = position + 1
            else:
                runs.append([position, position + 1])
        made.append(runs)
    return made


def _rows(recording: Recording) -> list[list[list[int]]]:
    """Return for each position that was fed the runs of the positions that it attends to in any layer."""
    causal = [[[0, row + 1]] for row in range(recording.prompt_len)]
    made = [*_ranges(recording.prompt_seen)] if recording.prompt_seen else causal
    for moment in recording.moments[1:]:
        seen = sorted(set().union(*set(moment.seen)))
        rows = range(moment.on.start, moment.on.start + moment.on.fed - moment.wrong)
        made += _ranges([[position for position in seen if position <= row] for row in rows])
    return made


def kept_attention(recording: Recording) -> tuple[list[int], int]:
    """Return the layers whose attention weights fit the page, and the number of first steps without weights."""
    moments, n_layers = recording.moments, recording.args.n_layers
    for every in range(1, n_layers + 1):
        layers = list(range(0, n_layers, every))
        if sum(len(moment.attention[layer]) for moment in moments for layer in layers) <= MOST_ATTENTION:
            return layers, 0
    sizes = accumulate(len(moment.attention[0]) for moment in reversed(moments))
    return [0], len(moments) - sum(1 for size in sizes if size <= MOST_ATTENTION)


def _left_out(recording: Recording) -> list[str]:
    """Return a note on the layers and steps whose attention weights the page leaves out."""
    layers, first = kept_attention(recording)
    if len(layers) == recording.args.n_layers and not first:
        return []
    which = f"one layer in {layers[1]}" if len(layers) > 1 else "the first layer"
    steps = f" from step {first + 1} on" if first else ""
    return [f"This run is too long for a page with all attention weights: it has those of {which}{steps}."]


def _packed(moment: Moment, layers: Sequence[int]) -> str:
    return base64.b64encode(b"".join(moment.attention[layer] for layer in layers)).decode()
