"""Caches filled without a forward: what they hold, and how long a step takes behind it, hangs on lengths alone.

Feeding a long text would cost minutes of arithmetic that says nothing about a cache. Knows models and positions.
"""

import torch
from torch import Tensor

from llama.bench.schema import CacheSize
from llama.kv_cache import Attended, Cache
from llama.model import Transformer
from llama.ops import Scoring
from llama.rows import Rows

CHUNK = 512  # positions that are written at a time: a kind may return copies of all that a call's queries see


def filled_cache(model: Transformer, length: int, *, reserved: int) -> Cache:
    """Return a cache that has room for `reserved` positions and is filled with a prompt of `length` positions.

    It is written in chunks: in one call, some kinds take more memory than they hold in the end. A kind that then holds
    other bytes than it predicts may drop keys where a prompt ends, so it is given the prompt once more, in one call.
    """
    for chunk in (CHUNK, length):
        cache = model.new_cache(rows=1, length=reserved)
        expected = predicted_bytes(model, cache, length, reserved=reserved)
        fill_cache(model, cache, length, chunk=chunk)
        if cache.nbytes == expected:
            break
    return cache


def cache_size(model: Transformer, cache: Cache, length: int) -> CacheSize:
    """Return the bytes that a cache holds, beside those predicted for a row of `length` positions."""
    return {"length": length, "predicted": predicted_bytes(model, cache, length), "measured": cache.nbytes}


def predicted_bytes(model: Transformer, cache: Cache, length: int, *, reserved: int = 0) -> int:
    """Return what the kinds predict that the cache holds of one row of `length` positions, with room for all or more.

    `reserved`: for how many there is room, where it is more.
    """
    itemsize = model.dtype.itemsize  # a matrix may be in int8, what the cache is given is not
    room = (1, max(length, reserved))
    return cache.predicted_bytes(prompts=[length], ends=[length], reserved=room, itemsize=itemsize)


@torch.inference_mode()
def fill_cache(model: Transformer, cache: Cache, length: int, *, chunk: int = CHUNK) -> None:
    """Write random keys and values into one row of every layer, `length` positions from 0 on, `chunk` of them a call.

    A kind that observes attention sees that of random queries.
    """
    like, stream = model.norm.weight, torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=stream).to(like)

    for begin in range(0, length, chunk):
        seqlen = min(chunk, length - begin)
        rows = Rows.at([begin], [seqlen], prompt_ends=begin + seqlen == length)
        for block, layer in zip(model.blocks, cache.layers, strict=True):
            new = random(2, 1, seqlen, layer.args.n_kv_heads, layer.args.head_dim)
            keys, values = layer.update(rows, new[0], new[1])
            if layer.observes:
                x, xq = random(1, seqlen, layer.args.dim), random(1, seqlen, layer.args.n_heads, layer.args.head_dim)
                visible = layer.visible(rows, xq)
                scoring = Scoring(layer.layer, layer.key_positions(), model.ops.score_mod)
                layer.observe(Attended(block.attention, rows, x, xq, keys, values, visible, scoring))
