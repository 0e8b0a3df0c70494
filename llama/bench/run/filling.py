"""Caches filled without a forward: what they hold, and how long a step takes behind it, hangs on lengths alone.

Feeding a long text would cost minutes of arithmetic that says nothing about a cache. Knows models and positions.
"""

import torch

from llama.bench.schema import CacheSize
from llama.model import Transformer
from llama.rows import Rows

CHUNK = 512  # positions that are written at a time: a kind may return copies of all that a call's queries see


def fill_prompt(model: Transformer, length: int, *, reserved: int) -> None:
    """Fill emptied caches, which have room for `reserved` positions, with a prompt of `length` positions.

    It is written in chunks: in one call, some kinds take more memory than they hold in the end. A kind that then holds
    other bytes than it predicts may drop keys where a prompt ends, so it is given the prompt once more, in one call.
    """
    expected = predicted_bytes(model, reserved if model.caches[0].preallocates else length)
    for chunk in (CHUNK, length):
        model.reserve_cache(1, reserved)
        fill_caches(model, 0, length, chunk=chunk)
        if held_bytes(model) == expected:
            return


def cache_size(model: Transformer, length: int) -> CacheSize:
    """Return the bytes that the caches of all layers hold, beside those predicted for a row of `length` positions."""
    return {"length": length, "predicted": predicted_bytes(model, length), "measured": held_bytes(model)}


def held_bytes(model: Transformer) -> int:
    return sum(cache.nbytes for cache in model.caches)


def predicted_bytes(model: Transformer, length: int) -> int:
    """Return what the kind predicts that the caches of all layers hold of one row of `length` positions."""
    itemsize = model.norm.weight.itemsize  # a matrix may be in int8, what the cache is given is not
    return sum(cache.predicted_bytes(rows=1, length=length, itemsize=itemsize) for cache in model.caches)


@torch.inference_mode()
def fill_caches(model: Transformer, start: int, end: int, *, chunk: int = CHUNK) -> None:
    """Write random keys and values into one row of every layer's cache, from position `start` up to `end`.

    Positions before `start` must be there. A call writes `chunk` of them. A kind that weighs its keys is told that all
    drew the same attention.
    """
    weight, stream = model.norm.weight, torch.Generator().manual_seed(start)
    for begin in range(start, end, chunk):
        seqlen = min(chunk, end - begin)
        for cache in model.caches:
            shape = (2, 1, seqlen, cache.args.n_kv_heads, cache.args.head_dim)
            new = torch.randn(shape, generator=stream).to(weight)
            keys, _ = cache.update(Rows.at([begin], [seqlen]), new[0], new[1])
            if cache.weighs:
                cache.weigh(torch.ones(1, keys.shape[2], keys.shape[1], dtype=torch.float32, device=weight.device))
