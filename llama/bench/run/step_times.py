"""The time of one step by context, batch and mode, and the bytes of a cache by length.

A step makes one token per row at a context of n tokens: with the cache it feeds the newest, without it all n. A cached
step can stand at any position that was fed before, so one prefill of the longest context serves all of them.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from llama.bench.schema import Row
from llama.costs import kv_bytes
from llama.kv_cache import Attended, Cache, ScoredCache
from llama.model import Transformer
from llama.ops import Scoring
from llama.rows import Rows
from llama.texts.digest import digest_of_text
from llama.texts.origin import weights_digest

LEAST, MOST, ENOUGH = 3, 9, 0.3  # repetitions, at least and at most, and the seconds that are enough of them
CHUNK = 512  # positions that are written in a call: a kind may return copies of everything that a call's queries see
LONG = 2**20  # positions of a text at which every kind that saves bytes does so
FED_AT_ONCE = 2048  # tokens of a prompt that are fed in a call: a kind may compute the attention of all its queries


@torch.inference_mode()
def step_times(
    model: Transformer,
    batch_size: int,
    contexts: Sequence[int],
    *,
    kv_caching: bool,
    logits: Literal["last", "all"] = "last",
) -> list[Row]:
    """Time a step at every context, each after a warm-up of its own shape, and return a row for each."""
    stream = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.args.vocab_size, (batch_size, max(contexts)), generator=stream).to(model.device)
    switched = model.with_kv_caching(kv_caching)
    cache = model.new_cache(rows=batch_size, length=max(contexts)) if kv_caching else None
    if kv_caching:
        switched(tokens, 0, cache=cache, logits="last")
    rows: list[Row] = []
    for context in sorted(contexts, reverse=True):  # a cache that grows evicts positions behind the one that is fed
        start = context - 1 if kv_caching else 0
        step = partial(_step, switched, tokens[:, start:context], start, cache=cache, logits=logits)
        row: Row = {"figures": "step", "batch_size": batch_size, "context": context, "kv_caching": kv_caching}
        rows.append({**row, "step_seconds": _repeat(step, model)})
    return rows[::-1]


def _more(seconds: list[float], model: Transformer) -> bool:
    more = len(seconds) < LEAST or (len(seconds) < MOST and sum(seconds) < ENOUGH)
    # Clocks differ, and all ranks go on together.
    return bool(model.ranks.decide(torch.tensor([more], dtype=torch.uint8, device=model.device)))


def _step(model: Transformer, fed: Tensor, start: int, **options: Any) -> None:
    model(fed, start, **options)[:, -1].argmax(-1).tolist()  # on the host, as in the loop


def _repeat(work: Callable[[], object], model: Transformer) -> list[float]:
    work()
    seconds: list[float] = []
    while _more(seconds, model):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return seconds


def context_lengths(longest: int) -> list[int]:
    """Return context lengths up to `longest`, closer together where the cache begins to pay.

    At a context of one token both modes do the same, so it is returned only if it is the longest.
    """
    steps = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192]
    octaves = [256 * 2**n for n in range(20)]
    return [*(length for length in steps + octaves if length < longest), longest]


# ---- caches of a given length ----------------------------------------------------------------------------------------


def bytes_of(model: Transformer, cache: Cache, prompt: int, length: int, *, reserved: int | None = None) -> Row:
    """Return the bytes of a cache of one row that was fed a prompt and then single tokens up to `length`.

    `reserved`: the positions that memory is reserved for, if not `length`.
    """
    itemsize, rows = model.dtype.itemsize, (1, reserved or length)  # of keys and values; a matrix may be in int8
    predicted = cache.predicted_bytes(prompts=[prompt], ends=[length], reserved=rows, itemsize=itemsize)
    return {"cache_bytes": cache.nbytes, "predicted_cache_bytes": predicted}


def size_of(model: Transformer, cache: Cache, prompt: int, fed: int) -> Row:
    """Return the bytes of a cache, and whether it has dropped or compressed something of what was fed."""
    judged = all(layer.lossless for layer in cache.layers) or not saves(model, cache)
    return {**bytes_of(model, cache, prompt, fed), "judged": judged or cache.nbytes < full_bytes(model, fed)}


def inputs_digest(model: Transformer, inputs: object) -> str:
    """Return a digest of the weights and of what is fed: two rows of quality are comparable if theirs are equal."""
    return digest_of_text(f"{weights_digest(model)} {inputs!r}")


def saves(model: Transformer, cache: Cache) -> bool:
    """Return whether a kind predicts fewer bytes for a very long text than the full cache."""
    predicted = cache.predicted_bytes(prompts=[LONG], ends=[LONG], reserved=(0, 0), itemsize=model.dtype.itemsize)
    return predicted < full_bytes(model, LONG)


def full_bytes(model: Transformer, length: int) -> int:
    """Return the bytes of all keys and values of one row as they come."""
    own, itemsize = model.share, model.dtype.itemsize
    return len(model.blocks) * kv_bytes(1, own.n_kv_heads, own.head_dim, positions=length, itemsize=itemsize)


@torch.inference_mode()
def filled_cache(model: Transformer, length: int, ids: Sequence[int], *, reserved: int) -> Cache:
    """Return a cache of one row with `length` positions, and memory for `reserved` of them.

    Random keys and values are written without a forward: bytes and times depend on lengths alone. A kind that keeps the
    highest scores gets random scores. Another kind that observes attention, or that stores other bytes than predicted,
    is fed a real prompt: the text of `ids`, again and again.
    """
    cache = model.new_cache(rows=1, length=reserved)
    if not any(layer.observes and not isinstance(layer, ScoredCache) for layer in cache.layers):
        _write_random(model, cache, length)
        stored = bytes_of(model, cache, length, length, reserved=reserved)
        if stored["cache_bytes"] == stored["predicted_cache_bytes"]:
            return cache
        cache = model.new_cache(rows=1, length=reserved)
    text = torch.tensor(ids, device=model.device).repeat(-(-length // len(ids)))[None, :length]
    cached = model.with_kv_caching(True)
    for begin in range(0, length, FED_AT_ONCE):
        seqlen = min(FED_AT_ONCE, length - begin)
        rows = Rows.at([begin], [seqlen], prompt_ends=begin + seqlen == length)
        cached(text[:, begin : begin + seqlen], rows, cache=cache, logits="last")
    return cache


def _write_random(model: Transformer, cache: Cache, length: int) -> None:
    """Write random keys and values into one row of every layer, CHUNK positions a call."""
    like, stream = model.norm.weight, torch.Generator().manual_seed(0)
    for begin in range(0, length, CHUNK):
        seqlen = min(CHUNK, length - begin)
        rows = Rows.at([begin], [seqlen], prompt_ends=begin + seqlen == length)
        for layer in cache.layers:
            new = torch.randn((2, 1, seqlen, layer.args.n_kv_heads, layer.args.head_dim), generator=stream).to(like)
            keys, values = layer.update(rows, new[0], new[1])
            if isinstance(layer, ScoredCache):
                _score_at_random(layer, rows, keys, values)


def _score_at_random(layer: ScoredCache, rows: Rows, keys: Tensor, values: Tensor) -> None:
    """Let a kind drop keys as if its scores were random; they may depend on what only a forward has."""
    nothing = keys[:, :1].expand(-1, rows.width, -1, -1)
    scoring = Scoring(layer.layer, layer.key_positions())
    seen = Attended(None, rows, nothing, nothing, keys, values, layer.visible(rows, nothing), scoring)
    stream = torch.Generator().manual_seed(layer.layer)
    layer.score = lambda attended: torch.rand(attended.keys.shape[2:0:-1], generator=stream).to(keys.device)  # type: ignore[method-assign]
    layer.observe(seen)
    del layer.score
