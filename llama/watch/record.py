"""Record a real generation, with the cache and without: tokens, bytes, FLOPs, attention and time of every step.

One run uses a cache that records the attention of each step's newest token. Two more runs, one with the cache and one
without, are timed. All use the plain modules. Knows models and caches; does not know how a recording is shown.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, Literal, Self, Unpack

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.costs import forward_flops, kv_bytes, step_bytes
from llama.generation import Generation
from llama.host.cores import LEAST_SECONDS, OtherLoad, is_busy
from llama.kv_cache import Attended, Cache, KVCache
from llama.kv_cache.paged import BLOCK, PagedCache
from llama.kv_cache.quantized import QuantizedCache
from llama.model import Transformer
from llama.ops import Scoring, attention_weights, check_attention
from llama.quant.layers import weights_of
from llama.request import Options, Step
from llama.rows import Rows
from llama.speculation import EveryGuess, accepted
from llama.streaming import TextCodec, encode_prompt

LIKELY = 5  # the number of most likely next tokens of a step
MOST_STEPS = 512  # of a recording; without a cache, they take minutes
LEVELS = 254  # an attention weight w is stored as 1 + round(LEVELS * w), in 8 bits; 0: the head has no such key


@dataclass(frozen=True)
class StepWork:
    """One step in one mode: `fed` tokens from position `start` on, and their costs.

    bytes_read: the weights, once, and the cached keys and values.
    bytes_held: the bytes of the caches of all layers.
    steps: more than 1 if these are the costs of several steps: of those that make the tokens of one call with a guess.
    """

    start: int
    fed: int
    flops: int
    bytes_read: int
    bytes_held: int
    ms: float
    steps: int = 1


@dataclass(frozen=True)
class Candidate:
    """A likely next token and its probability before temperature, top-p and the like."""

    text: str
    probability: float
    chosen: bool


@dataclass(frozen=True)
class Moment:
    """One step of a generation, in both modes. With the cache, it may feed a guess behind the newest token.

    seen: for each layer the positions that the newest token attends to, ascending. Positions before the fed tokens are
        cached. In the place of the newest token stands the last guessed one that was right.
    attention: for each layer the weights of these positions, n_heads x len(seen), in 8 bits.
    likely: the most likely next tokens.
    guess: the guessed tokens that were fed, as text.
    right: how many of them were right.
    """

    on: StepWork
    off: StepWork
    seen: tuple[tuple[int, ...], ...]
    attention: tuple[bytes, ...]
    likely: tuple[Candidate, ...]
    guess: tuple[str, ...] = ()
    right: int = 0

    @property
    def wrong(self) -> int:
        """The number of guessed tokens that were rejected. They are cached, until others are written over them."""
        return len(self.guess) - self.right

    @property
    def cached(self) -> int:
        """The most positions that the newest token attends to in a layer, its own included."""
        return max(map(len, self.seen))


@dataclass(frozen=True)
class CacheLayout:
    """How the caches store positions. Zero means that a cache has no groups, window or blocks.

    position_bytes: the bytes of a position of a full group in a layer.
    newest_bytes: the bytes of a newer position.
    bits: the bits of a number in a full group, the mean of keys and values.
    group: the positions of a full group.
    window: the newest positions, which stay in full precision.
    block: the positions of a block.
    reserved: the positions allocated from the first step on; 0 for a cache that grows or has a fixed size.
    """

    kind: str
    position_bytes: int
    newest_bytes: int
    bits: float
    group: int
    window: int
    block: int
    reserved: int

    def parts(self, positions: int) -> list[tuple[int, int]]:
        """Return (count, bytes of each in a layer) of the positions in full groups and of the newer ones."""
        full = max(positions - self.window, 0)
        newest = positions - full // self.group * self.group if self.group else 0
        parts = (positions - newest, self.position_bytes), (newest, self.newest_bytes)
        return [(count, nbytes) for count, nbytes in parts if count]


@dataclass(frozen=True)
class Recording:
    """A recorded generation.

    texts, texts_off: the tokens of the text in the two modes, decoded.
    prompt_seen: for each token of the prompt the positions that it attends to in any layer; empty if all up to its own.
    """

    args: ModelArgs
    layout: CacheLayout
    where: str
    itemsize: int
    prompt_len: int
    texts: tuple[str, ...]
    texts_off: tuple[str, ...]
    moments: tuple[Moment, ...]
    notes: tuple[str, ...]
    prompt_seen: tuple[tuple[int, ...], ...] = ()


def record(
    model: Transformer,
    tokenizer: TextCodec,
    prompt: str | Sequence[int],
    max_gen_len: int = 64,
    *,
    stop: str | Sequence[str] = (),
    progress: Callable[[], None] = lambda: None,
    **options: Unpack[Options],
) -> Recording:
    """Generate from a prompt, a text or its ids, three times, and return the recording.

    `options` are those of `model.generate` that choose tokens or the kind of cache; the default seed is 1, so that the
    runs draw the same tokens. `progress` is called at every step of every run. The model does not change, and other
    threads may use it. Raises ValueError as `generate` does, if several processes share the model, and if `attend` of
    its operations is not marked as softmax attention: the weights shown would be wrong.
    """
    _check(model, options)
    plain = copy(model)  # with the same modules
    plain.runner = None
    empty = plain.new_cache(options.get("kv_cache"))
    ids = encode_prompt(tokenizer, prompt)
    length, cut = _steps_to_show(model, empty, len(ids), max_gen_len)
    options["seed"] = 1 if options.get("seed") is None else options["seed"]
    speculate = options.pop("speculate", None)
    # Every guess is fed, so that the timed run makes the same calls.
    guessing = speculate if speculate is None or isinstance(speculate, EveryGuess) else EveryGuess(speculate)

    def run(model: Transformer | _Watched, *, kv_caching: bool) -> _Run:
        run = _Run(progress)
        mode: Options = {**options, "kv_caching": kv_caching, "on_step": run}
        mode["speculate"] = guessing if kv_caching else None
        result = model.generate(tokenizer, [ids], length, stop=stop, **mode)[0]
        run.began.append(time.perf_counter())
        run.ids = [*ids, *result["ids"]]
        return run

    calls: list[list[_Seen]] = []
    shown = run(_Watched(plain, calls), kv_caching=True)
    guesses = shown.guesses()
    seen = [call[right] for call, (_, right) in zip(calls, guesses, strict=True)]
    load = OtherLoad()
    load.start()
    on, off = run(plain, kv_caching=True), run(plain, kv_caching=False)
    others = load.stop()
    layout = _layout(empty.layers[0], model.dtype.itemsize, seen[0].reserved)
    busy = _busy(others, off.began[-1] - on.began[0])
    every = ["Every guess is fed here. A generation feeds those that make more tokens a second."] if guessing else []
    notes = [*every, *_differences(shown, on, off, lossless=all(layer.lossless for layer in empty.layers)), *busy, *cut]
    uncached = _together(off.works(plain, layout, [_Seen()] * len(off.steps)), [1 + right for _, right in guesses])
    steps = zip(seen, on.works(plain, layout, seen), uncached, guesses, strict=False)  # the shortest, if runs differ
    return Recording(
        args=model.args,
        layout=layout,
        where=f"{str(model.dtype).removeprefix('torch.')} on {model.device}",
        itemsize=model.dtype.itemsize,
        prompt_len=len(ids),
        texts=_pieces(tokenizer, shown.ids),
        texts_off=_pieces(tokenizer, off.ids),
        moments=tuple(
            Moment(
                *(cached, uncached, tuple(what.positions), tuple(what.attention)),
                _likely(tokenizer, what, shown.ids),
                tuple(map(tokenizer.decode, [[id] for id in guess])),
                right,
            )
            for what, cached, uncached, (guess, right) in steps
        ),
        notes=tuple(notes),
        prompt_seen=_unless_causal(calls[0][0].prompt),
    )


def _check(model: Transformer, options: Options) -> None:
    if model.ranks.size > 1:
        raise ValueError(f"{model.ranks.size} processes share this model, and each sees a part; watch it in one")
    idle = options.keys() & {"echo", "logprobs", "share_prefix", "prefix", "on_step", "kv_caching"}
    for layer in model.blocks:
        check_attention(layer.attention.ops, "a recording shows attention weights", "model.use(llama.ops.PLAIN)")
    if idle:
        raise ValueError(f"a recording is of one text, from its beginning, in both modes; leave out {min(idle)}")


def _steps_to_show(model: Transformer, empty: Cache, prompt_len: int, max_gen_len: int) -> tuple[int, list[str]]:
    """Return the number of steps to record, and a note if that is less than `max_gen_len`."""
    most, why, limit = MOST_STEPS, "a page shows no more", model.args.max_seq_len
    if empty.bound is not None and limit - prompt_len < most:
        most, why = limit - prompt_len, f"without the cache a text ends at max_seq_len={limit}"
        if most < 1:
            raise ValueError(f"the prompt has {prompt_len} tokens, and {why}; give a shorter prompt")
    if max_gen_len <= most:
        return max_gen_len, []
    return most, [f"Of up to {max_gen_len} steps the first {most} are shown: {why}."]


def _busy(others: float | None, seconds: float) -> list[str]:
    """Return a note if other work kept so many cores busy that the times are useless."""
    if others is None or seconds < LEAST_SECONDS or not is_busy(others, os.cpu_count() or 1):
        return []
    return [
        f"Other work kept {others:.1f} cores busy during the timed runs; on an idle machine they may be much faster."
    ]


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class _Seen:
    """One step of the recorded run: by layer the attention, and the likely next ids with their probabilities."""

    end: int = 0  # the position after the newest token
    positions: list[tuple[int, ...]] = field(default_factory=list)
    attention: list[bytes] = field(default_factory=list)
    likely: list[tuple[int, float]] = field(default_factory=list)
    bytes_held: int = 0
    reserved: int = 0
    prompt: Tensor | None = None  # of the first call: which positions each query sees in any layer


@dataclass
class _Run:
    """The (start, end) of each step of a generation, its tokens, and when it began; called as `on_step`."""

    progress: Callable[[], None]
    steps: list[tuple[int, int]] = field(default_factory=list)
    fed: list[list[int]] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def __call__(self, step: Step) -> None:
        self.steps.append((step.prev_pos[0], step.cur_pos[0]))
        self.fed.append(step.ids[0])
        self.progress()
        self.began.append(time.perf_counter())

    def guesses(self) -> list[tuple[list[int], int]]:
        """Return the guess that each step was fed behind the newest token, and how many of its tokens were right."""
        found: list[tuple[list[int], int]] = [([], 0)]  # the first step feeds the prompt
        for (start, _), fed in zip(self.steps[1:], self.fed[1:], strict=True):
            guess = fed[1:] if start else []  # without the cache, the whole text is fed
            found.append((guess, accepted(guess, self.ids[start + 1 :])))
        return found

    def works(self, model: Transformer, layout: CacheLayout, seen: Sequence[_Seen]) -> Iterator[StepWork]:
        """Yield the costs of every step; `seen` is what the newest token reads, its own position included.

        Stops with the shorter of the two: a run that draws other tokens may have fewer steps.
        """
        args, itemsize, matrices = model.args, model.dtype.itemsize, None
        if model.execution.weights is not None:
            weights = weights_of(model).items()
            matrices = {name: one.nbytes for name, one in weights if not isinstance(one, Tensor) or one.ndim > 1}
        times = [1000 * (end - begin) for begin, end in pairwise(self.began)]
        for (start, end), ms, one, (guess, right) in zip(self.steps, times, seen, self.guesses(), strict=False):
            fed = end - start
            before = max(max(map(len, one.positions), default=0) - fed + len(guess) - right, 0)
            read = step_bytes(args, rows=fed, context=0, itemsize=itemsize, quantize=matrices)
            read += args.n_layers * sum(map(math.prod, layout.parts(before)))
            flops = forward_flops(args, seqlen=fed, start_pos=before, scored=1 + len(guess))
            yield StepWork(start, fed, flops, read, one.bytes_held, ms)


_SUMMED = ("fed", "flops", "bytes_read", "ms")


def _together(works: Iterator[StepWork], counts: Sequence[int]) -> Iterator[StepWork]:
    """Yield the costs of the next steps together, as many as each of `counts` says."""
    for count in counts:
        own = list(islice(works, count))
        if own:
            fed, flops, read, ms = (sum(getattr(one, name) for one in own) for name in _SUMMED)
            yield StepWork(own[0].start, fed, flops, read, own[-1].bytes_held, ms, len(own))


# ---- recording attention ---------------------------------------------------------------------------------------------


class _Recorded(KVCache):
    """Mixed into a kind of cache: records the positions and weights of the attention of the newest queries."""

    _recording: list[list[_Seen]]

    def observe(self, attended: Attended) -> None:
        newest, width = self._recording[-1], attended.xq.shape[1]
        if len(self._recording) == 1:
            own, before = sees(attended.visible, attended.scoring.key_positions, width), newest[0].prompt
            newest[0].prompt = own if before is None else own | before
        for place, step in enumerate(newest, width - len(newest)):
            step.end = attended.rows.end - width + place + 1
            query, visible = attended.xq[:1, place : place + 1], attended.visible
            visible = None if visible is None else visible[..., place : place + 1, :]
            positions, weights = look(query, attended.keys[:1], step.end, visible, attended.scoring)
            step.positions.append(positions)
            step.attention.append(weights)
        super().observe(attended)


class _Watched(Generation):
    """A model with recorded caches: the protocol `llama.generation.LanguageModel`."""

    def __init__(self, model: Transformer, seen: list[list[_Seen]]) -> None:
        self._model, self._seen = model, seen
        self.args, self.device, self.kv_caching = model.args, model.device, model.kv_caching

    def with_kv_caching(self, value: bool) -> Self:
        return type(self)(self._model.with_kv_caching(value), self._seen)

    def new_cache(self, kind: str | None = None, *, rows: int = 0, length: int = 0) -> Cache:
        cache = self._model.new_cache(kind)
        made = Cache([self._recorded(layer) for layer in cache.layers], cache.kind)
        made.reserve(rows, length)
        return made

    def _recorded(self, layer: KVCache) -> KVCache:
        """Return an empty cache of the same kind and layer that records attention."""
        kind: Any = type(f"Recorded{type(layer).__name__}", (_Recorded, type(layer)), {})
        made: _Recorded = kind(layer.args, layer.layer, layer.rope)
        made._recording = self._seen
        return made

    def __call__(
        self, tokens: Tensor, start_pos: Rows, *, cache: Cache | None, logits: Literal["all", "last"]
    ) -> Tensor:
        assert cache is not None
        newest = [_Seen() for _ in range(tokens.shape[1] if logits == "all" else 1)]  # all of a verified guess
        self._seen.append(newest)
        made: Tensor = self._model(tokens, start_pos, cache=cache, logits=logits)
        tops = made[0].softmax(-1).topk(min(LIKELY, made.shape[-1]))
        for step, ids, probabilities in zip(newest, tops.indices.tolist(), tops.values.tolist(), strict=True):
            step.likely = list(zip(ids, probabilities, strict=True))
            step.bytes_held, step.reserved = cache.nbytes, cache.layers[0].slots or 0
        return made


def look(
    query: Tensor, keys: Tensor, end: int, visible: Tensor | None, scoring: Scoring
) -> tuple[tuple[int, ...], bytes]:
    """Return the positions visible to a query, (1, 1, n_heads, head_dim), in any head, and n_heads weights of each.

    `keys` are (1, kv_len, n_kv_heads, head_dim), `visible` and `scoring` as in `llama.ops.attend`; the query's position
    is end - 1. The weights are those of an explicit softmax in float32 or wider, in 8 bits; see LEVELS.
    """
    positions = scoring.key_positions
    place = torch.arange(keys.shape[1], device=keys.device) if positions is None else positions
    place = place.reshape(-1, keys.shape[1])  # by KV head, or 1 for all
    shown = place < end if visible is None else visible.reshape(-1, *visible.shape[-2:])[:, -1]  # by head, or 1
    weights = attention_weights(query, keys, end - 1, shown[None, :, None], scoring)[0, :, 0]  # (n_heads, kv_len)
    by_head, own = (part.repeat_interleave(len(weights) // len(part), dim=0) for part in (place, shown))
    seen = torch.unique(by_head[own])
    columns = torch.searchsorted(seen, by_head.contiguous()).clamp(max=len(seen) - 1)
    stored = ((weights * LEVELS).round() + 1) * own
    levels = stored.new_zeros(len(weights), len(seen)).scatter_add(1, columns, stored).to(torch.uint8).cpu()
    return tuple(seen.tolist()), bytes(levels.flatten().tolist())


def sees(visible: Tensor | None, positions: Tensor | None, end: int) -> Tensor:
    """Return which of the positions 0 .. end - 1 each query of a prompt sees in any head, as bool (end, end).

    `visible` and `positions` are those of a call with one row, as `KVCache.visible` and `key_positions` return them.
    """
    if visible is None:
        return torch.ones(end, end, dtype=torch.bool).tril()
    shown, kv_len = visible.reshape(-1, *visible.shape[-2:]), visible.shape[-1]  # by head, or 1 for all
    place = torch.arange(kv_len, device=shown.device) if positions is None else positions
    place = place.reshape(-1, kv_len).clamp(0, end - 1)  # a hidden key may have any position
    heads = max(len(shown), len(place))
    shown, place = (part.repeat_interleave(heads // len(part), dim=0) for part in (shown, place))
    counts = torch.zeros(shown.shape[1], end, dtype=torch.int32, device=shown.device)
    for sees_key, at in zip(shown, place, strict=True):  # one head at a time: all of them are large
        counts.index_add_(1, at, sees_key.int())
    return counts.cpu() > 0


def _unless_causal(mask: Tensor | None) -> tuple[tuple[int, ...], ...]:
    """Return the positions that each query sees; () if these are all positions up to its own."""
    if mask is None or mask.equal(torch.ones_like(mask).tril()):
        return ()
    return tuple(tuple(row.nonzero()[:, 0].tolist()) for row in mask)


# ---- plain values ----------------------------------------------------------------------------------------------------


def _layout(cache: KVCache, itemsize: int, reserved: int) -> CacheLayout:
    args, grouped = cache.args, cache if isinstance(cache, QuantizedCache) else None
    return CacheLayout(
        kind=args.kv_cache,
        position_bytes=cache.position_bytes(itemsize),
        newest_bytes=kv_bytes(1, args.n_kv_heads, args.head_dim, positions=1, itemsize=itemsize),
        bits=(grouped.key_bits + grouped.value_bits) / 2 if grouped else 0,
        group=grouped.group if grouped else 0,
        window=grouped.window if grouped else 0,
        block=BLOCK if isinstance(cache, PagedCache) else 0,
        reserved=reserved if cache.preallocates else 0,
    )


def _pieces(tokenizer: TextCodec, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the text that each token completes; "" for a token that ends within a character."""
    text = tokenizer.stream()
    return tuple(text.feed(id) for id in ids)


def _likely(tokenizer: TextCodec, seen: _Seen, ids: Sequence[int]) -> tuple[Candidate, ...]:
    """Return the likely tokens of a step; the one that was drawn is `chosen`."""
    chosen = ids[seen.end] if seen.end < len(ids) else None
    made = []
    for id, probability in seen.likely:
        text = tokenizer.stream()
        made.append(Candidate(text.feed(id) + text.flush(), probability, id == chosen))
    return tuple(made)


def _differences(shown: _Run, on: _Run, off: _Run, *, lossless: bool) -> list[str]:
    """Return notes on the first tokens at which the runs differ."""
    rounding = "two tokens were nearly equally likely, and rounding decided"
    why = rounding if lossless else "this kind of cache drops or rounds what it stores"
    runs = {"timed run with the cache made another text than the one shown": on,
            f"run without the cache made another text: {why}": off}  # fmt: skip
    first = {words: _first_difference(shown.ids, run.ids) for words, run in runs.items()}
    return [f"From token {token} on the {words}." for words, token in first.items() if token is not None]


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the number of the first different token, counted from 1, or None if the two are equal."""
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return 1 + next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
