"""Caches filled without a forward: what they hold, and how long a step takes behind it, hangs on lengths alone.

Feeding a long text would cost minutes of arithmetic that says nothing about a cache. Knows models and positions.
"""

import torch

from llama.model import Transformer

CHUNK = 512  # positions that are written at a time: a kind may return copies of all that a call's queries see


@torch.inference_mode()
def fill_caches(model: Transformer, start: int, end: int) -> None:
    """Write random keys and values into one row of every layer's cache, from position `start` up to `end`.

    Positions before `start` must be there. A kind that weighs its keys is told that all drew the same attention.
    """
    weight, stream = model.norm.weight, torch.Generator().manual_seed(start)
    model.batch_rows.lengths, model.batch_rows.rope = None, model.rope
    for begin in range(start, end, CHUNK):
        seqlen = min(CHUNK, end - begin)
        for cache in model.caches:
            shape = (2, 1, seqlen, cache.args.n_kv_heads, cache.args.head_dim)
            new = torch.randn(shape, generator=stream).to(weight)
            keys, _ = cache.update(begin, new[0], new[1])
            if cache.weighs:
                cache.weigh(torch.ones(1, keys.shape[2], keys.shape[1], dtype=torch.float32, device=weight.device))
