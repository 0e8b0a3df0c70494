"""A real generation, with the cache and without, as plain values: what each step was fed, read, wrote, held and took.

One run feeds a cache that notes what each step's newest token finds in it. Two more, one of each mode, are timed, with
a cache that notes nothing and with none. All go by the plain modules, of which the cache sees every step. Knows models
and caches; does not know how a recording is shown.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal, Self, Unpack

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.costs import forward_flops, kv_bytes, step_bytes
from llama.generation import Generation
from llama.host.cores import LEAST_SECONDS, OtherLoad, disturbs
from llama.kv_cache import Attended, Cache, KVCache
from llama.kv_cache.paged import BLOCK, PagedCache
from llama.kv_cache.quantized import GROUP, QuantizedCache
from llama.model import Transformer
from llama.ops import Scoring, attention_weights, check_attention
from llama.quant.layers import weights_of
from llama.request import Options, Step
from llama.rows import Rows
from llama.streaming import TextCodec, encode_prompt

LIKELY = 5  # of the most likely next tokens
MOST_STEPS = 512  # of which one looks at each; without a cache, they take minutes
LEVELS = 255  # an attention weight w is kept as round(LEVELS * w), in 8 bits


@dataclass(frozen=True)
class Work:
    """What one mode did in a step: `fed` tokens from position `start` on, and what that took.

    bytes_held: of the caches of all layers. bytes_read: the weights, once, and what comes out of the cache.
    """

    start: int
    fed: int
    flops: int
    bytes_read: int
    bytes_held: int
    ms: float


@dataclass(frozen=True)
class Candidate:
    """A token that the model found likely, by its own probabilities: before temperature, top-p and the like."""

    text: str
    probability: float
    chosen: bool


@dataclass(frozen=True)
class Moment:
    """One step of a generation, in both modes.

    seen: for each layer the positions that the newest token looked at, in ascending order; those that the step was not
    fed came out of the cache. attention: for each layer the weights that it gave them, n_heads x len(seen), in 8 bits.
    """

    on: Work
    off: Work
    seen: tuple[tuple[int, ...], ...]
    attention: tuple[bytes, ...]
    likely: tuple[Candidate, ...]


@dataclass(frozen=True)
class Layout:
    """How the caches hold positions: in `bits` bits once a group of `group` is full, in blocks of `block`; 0: not so.

    position_bytes: what a position takes in a layer, once its group is full; newest_bytes: before that, as it came.
    reserved: for how many positions there was room from the first step on; 0: they grow, or hold no more than so many.
    """

    kind: str
    position_bytes: int
    newest_bytes: int
    bits: int
    group: int
    block: int
    reserved: int

    def parts(self, positions: int) -> list[tuple[int, int]]:
        """Return how many of so many positions take how many bytes each in a layer: full groups, and what is newer."""
        newest = positions % self.group if self.group else 0
        parts = (positions - newest, self.position_bytes), (newest, self.newest_bytes)
        return [(count, nbytes) for count, nbytes in parts if count]


@dataclass(frozen=True)
class Recording:
    """A generation that was watched. `texts` and `texts_off` are the tokens of the whole text in the two modes."""

    args: ModelArgs
    layout: Layout
    where: str
    itemsize: int
    prompt_len: int
    texts: tuple[str, ...]
    texts_off: tuple[str, ...]
    moments: tuple[Moment, ...]
    notes: tuple[str, ...]


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
    """Generate from a prompt, a text or its ids, three times alike, and return what happened.

    `options` as in `model.generate`, as far as they choose tokens or the kind of cache; the seed is 1 unless another is
    given, so that the runs draw alike. `progress` is called at every step of every run. The model is unchanged, and may
    do other work meanwhile. Raises ValueError as `generate` does, where several processes share the model, and where
    `attend` of its operations is not marked as softmax attention: its weights would not be those that are shown.
    """
    _check(model, options)
    plain = copy(model)  # of the same modules
    plain.runner = None
    empty = plain.new_cache(options.get("kv_cache"))
    ids = encode_prompt(tokenizer, prompt)
    length, cut = _steps_to_show(model, empty, len(ids), max_gen_len)
    options["seed"] = 1 if options.get("seed") is None else options["seed"]

    def run(model: Transformer | _Watched, *, kv_caching: bool) -> _Run:
        run = _Run(progress)
        mode: Options = {**options, "kv_caching": kv_caching, "on_step": run}
        result = model.generate(tokenizer, [ids], length, stop=stop, **mode)[0]
        run.began.append(time.perf_counter())
        run.ids = [*ids, *result["ids"]]
        return run

    seen: list[_Seen] = []
    shown = run(_Watched(plain, seen), kv_caching=True)
    load = OtherLoad()
    load.start()
    on, off = run(plain, kv_caching=True), run(plain, kv_caching=False)
    others = load.stop()
    costs = _Costs.of(plain, _layout(empty.layers[0], model.dtype.itemsize, seen[0].room))
    busy = _busy(others, off.began[-1] - on.began[0])
    notes = [*_differences(shown, on, off, lossless=all(layer.lossless for layer in empty.layers)), *busy, *cut]
    steps = zip(seen, on.works(costs, seen), off.works(costs), strict=False)  # the shortest, should they differ
    return Recording(
        args=model.args,
        layout=costs.layout,
        where=f"{str(model.dtype).removeprefix('torch.')} on {model.device}",
        itemsize=costs.itemsize,
        prompt_len=len(ids),
        texts=_pieces(tokenizer, shown.ids),
        texts_off=_pieces(tokenizer, off.ids),
        moments=tuple(
            Moment(work, other, tuple(what.positions), tuple(what.attention), _likely(tokenizer, what, shown.ids))
            for what, work, other in steps
        ),
        notes=tuple(notes),
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
    """Return how many steps are shown at most, and where that is less than was asked for, why."""
    most, why, limit = MOST_STEPS, "more cannot be looked at on a page", model.args.max_seq_len
    if empty.bound is not None and limit - prompt_len < most:
        most, why = limit - prompt_len, f"without the cache a text ends at max_seq_len={limit}"
        if most < 1:
            raise ValueError(f"the prompt has {prompt_len} tokens, and {why}, which a recording shows, too; shorten it")
    if max_gen_len <= most:
        return max_gen_len, []
    return most, [f"Of up to {max_gen_len} steps the first {most} are shown: {why}."]


def _busy(others: float | None, seconds: float) -> list[str]:
    """Say that others, who kept so many cores busy, disturbed the times."""
    if others is None or seconds < LEAST_SECONDS or not disturbs(others, os.cpu_count() or 1):
        return []
    return [
        f"Other work kept {others:.1f} cores busy while the times were taken; alone, they may be many times shorter."
    ]


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class _Seen:
    """What was seen of one step, layer by layer; and the likely next tokens, as ids with their probabilities."""

    end: int = 0  # the position behind the newest token
    positions: list[tuple[int, ...]] = field(default_factory=list)
    attention: list[bytes] = field(default_factory=list)
    likely: list[tuple[int, float]] = field(default_factory=list)
    bytes_held: int = 0
    room: int = 0


@dataclass(frozen=True)
class _Costs:
    """What a step costs by the model's sizes; `matrices` are the bytes of each where they are quantised."""

    args: ModelArgs
    itemsize: int
    layout: Layout
    matrices: Mapping[str, int] | None

    @classmethod
    def of(cls, model: Transformer, layout: Layout) -> "_Costs":
        matrices = None
        if model.execution.weights is not None:
            weights = weights_of(model).items()
            matrices = {name: one.nbytes for name, one in weights if not isinstance(one, Tensor) or one.ndim > 1}
        return cls(model.args, model.dtype.itemsize, layout, matrices)

    def work(self, start: int, fed: int, *, cached: int, bytes_held: int, ms: float) -> Work:
        """Return what it costs to feed these tokens where the newest one finds `cached` positions, its own too."""
        before = max(cached - fed, 0)
        weights = step_bytes(self.args, rows=fed, context=0, itemsize=self.itemsize, quantize=self.matrices)
        return Work(
            start=start,
            fed=fed,
            flops=forward_flops(self.args, seqlen=fed, start_pos=before),
            bytes_read=weights + self.args.n_layers * sum(map(math.prod, self.layout.parts(before))),
            bytes_held=bytes_held,
            ms=ms,
        )


@dataclass
class _Run:
    """A generation as `on_step` sees it: what each step was fed, from where to where, when it began, what was held."""

    progress: Callable[[], None]
    steps: list[tuple[int, int]] = field(default_factory=list)
    began: list[float] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def __call__(self, step: Step) -> None:
        self.steps.append((step.prev_pos[0], step.cur_pos[0]))
        self.held.append(0 if step.cache is None else step.cache.nbytes)
        self.progress()
        self.began.append(time.perf_counter())

    def works(self, costs: _Costs, seen: Sequence[_Seen] | None = None) -> Iterator[Work]:
        """Yield what every step did; with the cache on, `seen` says what it found there."""
        for number, ((start, end), held) in enumerate(zip(self.steps, self.held, strict=True)):
            ms = (self.began[number + 1] - self.began[number]) * 1000
            cached = 0 if seen is None else max(map(len, seen[number].positions))
            held = held if seen is None else seen[number].bytes_held
            yield costs.work(start, end - start, cached=cached, bytes_held=held, ms=ms)


# ---- what the cache sees ---------------------------------------------------------------------------------------------


class _Recorded(KVCache):
    """Mixed into a kind of cache: it notes which positions the newest query looks at, and how it weighs them."""

    _recording: list[_Seen]

    def observe(self, attended: Attended) -> None:
        step, end = self._recording[-1], attended.rows.end
        step.end = end
        positions, weights = look(attended.xq[:1, -1:], attended.keys[:1], end, attended.visible, attended.scoring)
        step.positions.append(positions)
        step.attention.append(weights)
        super().observe(attended)


class _Watched(Generation):
    """A model whose caches are recorded: what the loop needs of it, see `llama.generation.LanguageModel`."""

    def __init__(self, model: Transformer, seen: list[_Seen]) -> None:
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
        """Return an empty cache of the same kind, for the same layer, that notes what it sees."""
        kind: Any = type(f"Recorded{type(layer).__name__}", (_Recorded, type(layer)), {})
        made: _Recorded = kind(layer.args, layer.layer, layer.rope)
        made._recording = self._seen
        return made

    def __call__(
        self, tokens: Tensor, start_pos: Rows, *, cache: Cache | None, logits: Literal["all", "last"]
    ) -> Tensor:
        assert cache is not None
        self._seen.append(_Seen())
        made: Tensor = self._model(tokens, start_pos, cache=cache, logits=logits)
        top = made[0, -1].softmax(-1).topk(min(LIKELY, made.shape[-1]))
        self._seen[-1].likely = list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        self._seen[-1].bytes_held, self._seen[-1].room = cache.nbytes, cache.layers[0].slots or 0
        return made


def look(
    query: Tensor, keys: Tensor, end: int, visible: Tensor | None, scoring: Scoring
) -> tuple[tuple[int, ...], bytes]:
    """Return which positions a query, (1, 1, n_heads, head_dim), looks at by any head, and n_heads weights in 8 bits.

    `keys` are (1, kv_len, n_kv_heads, head_dim), `visible` and `scoring` as in `llama.ops.attend`; the query stands at
    end - 1. The weights are of an explicit softmax in float32 or wider.
    """
    device, kv_len, positions = keys.device, keys.shape[1], scoring.key_positions
    stand = torch.arange(kv_len, device=device) if positions is None else positions.reshape(-1, kv_len)[0]
    shown = (stand < end)[None] if visible is None else visible.reshape(-1, *visible.shape[-2:])[:, -1]  # by head, or 1
    index = shown.any(0).nonzero()[:, 0]
    index = index[stand[index].argsort()]
    scoring = scoring._replace(key_positions=stand[index])
    weights = attention_weights(query, keys[:, index], end - 1, shown[None, :, None, index], scoring)[0, :, 0]
    levels = (weights * LEVELS).round().to(torch.uint8).cpu()
    return tuple(stand[index].tolist()), bytes(levels.flatten().tolist())


# ---- what was seen, in plain values ----------------------------------------------------------------------------------


def _layout(cache: KVCache, itemsize: int, room: int) -> Layout:
    args, grouped = cache.args, isinstance(cache, QuantizedCache)
    return Layout(
        kind=args.kv_cache,
        position_bytes=cache.position_bytes(itemsize),
        newest_bytes=kv_bytes(1, args.n_kv_heads, args.head_dim, positions=1, itemsize=itemsize),
        bits=cache.bits if isinstance(cache, QuantizedCache) else 0,
        group=GROUP if grouped else 0,
        block=BLOCK if isinstance(cache, PagedCache) else 0,
        reserved=room if cache.preallocates else 0,
    )


def _pieces(tokenizer: TextCodec, ids: Sequence[int]) -> tuple[str, ...]:
    """Return the text that each token completes; "" for one that leaves a character half done."""
    text = tokenizer.stream()
    return tuple(text.feed(id) for id in ids)


def _likely(tokenizer: TextCodec, seen: _Seen, ids: Sequence[int]) -> tuple[Candidate, ...]:
    """Return the likely tokens of a step, of which the text has taken one, if it went on."""
    chosen = ids[seen.end] if seen.end < len(ids) else None
    made = []
    for id, probability in seen.likely:
        text = tokenizer.stream()
        made.append(Candidate(text.feed(id) + text.flush(), probability, id == chosen))
    return tuple(made)


def _differences(shown: _Run, on: _Run, off: _Run, *, lossless: bool) -> list[str]:
    """Say where the runs did not make the same text."""
    notes = []
    where = _first_difference(shown.ids, on.ids)
    if where is not None:
        notes.append(f"From token {where} on the run that was timed made another text than the one that is shown.")
    where = _first_difference(shown.ids, off.ids)
    if where is not None:
        why = (
            "two tokens were nearly as likely, and rounding decided"
            if lossless
            else "this kind of cache does not give back all that it was given"
        )
        notes.append(f"From token {where} on the run without the cache makes another text: {why}.")
    return notes


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the number of the first token, from 1 on, that the two do not share; None: they are alike."""
    if one == other:
        return None
    pairs = zip(one, other, strict=False)
    return 1 + next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
