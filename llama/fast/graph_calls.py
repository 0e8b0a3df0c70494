"""The calls of a model on a GPU, made of the functions in graph_ops.py: on buffers that a graph is bound to, or not.

A call on buffers is a step, a prompt or a whole prefix. Its one branch is what a layer attends to: the cache, or the
keys of the call alone. Knows models, buffers and caches; does not know graphs, texts or sampling.
"""

from typing import Literal

import torch
from torch import Tensor

from llama.fast.graph_buffers import DecodeBuffers
from llama.fast.graph_ops import GraphOps, LayerWeights, Shared, Store, cached_layer, fresh, layer, shared_by_layers
from llama.kv_cache import Cache, KVCache
from llama.model import Transformer
from llama.ops import last_real
from llama.rows import Rows


def next_logits(model: Transformer, buffers: DecodeBuffers, ops: GraphOps, width: int = 1) -> Tensor:
    """Feed `width` tokens of every row; return the logits after each row's newest token, (rows, vocab).

    A width of 1 is the newest token, with the cache. Otherwise the tokens from `starts` on are fed; those behind the
    newest one are padding. With the switch off they begin at position 0, and there is no cache to read or write.
    """
    ids, shared = fed_tokens(buffers, ops, width)
    h: Tensor = model.tok_embeddings(ids.flatten())
    for number, weights in enumerate(buffers.weights):
        h = next_layer(buffers, ops, number, h, weights, shared)
    if width > 1:
        last = (buffers.positions - buffers.starts).clamp(max=width - 1)  # rows that have ended may be longer
        h = h.view(buffers.rows, width, -1)[torch.arange(buffers.rows, device=h.device), last]
    return ops.head(h, model.norm.weight, model.norm.eps, model.output.weight)


def fed_tokens(buffers: DecodeBuffers, ops: GraphOps, width: int) -> tuple[Tensor, Shared]:
    """Return the ids of the tokens that a call feeds, (rows, width), and the values that all layers share."""
    device = buffers.tokens.device
    newest, first = buffers.positions[:, None], buffers.starts[:, None]
    positions = newest if width == 1 else first + torch.arange(width, device=device)
    attention = None if width == 1 and ops.step is not None else ops.attention
    slots = width if buffers.cache is None else buffers.slots
    # Padding repeats the newest token: tokens of earlier texts may give NaN, which times a weight of 0 is NaN.
    ids = buffers.tokens.gather(1, positions.minimum(newest))
    return ids, shared_by_layers(attention, positions, slots, *buffers.cos_sin)


def next_layer(
    buffers: DecodeBuffers, ops: GraphOps, number: int, h: Tensor, weights: LayerWeights, shared: Shared
) -> Tensor:
    """Return the output of a layer in a call on the buffers, with the cache or without it."""
    if buffers.cache is None:
        return layer(ops, h, weights, shared, fresh)
    if shared.positions.shape[1] == 1 and ops.step is not None:
        return ops.step(h, weights, shared, *buffers.keys_values[number])
    return cached_layer(ops, h, weights, shared, *buffers.keys_values[number])


def prompt_logits(
    model: Transformer,
    weights: list[LayerWeights],
    ops: GraphOps,
    tokens: Tensor,
    rows: Rows,
    cache: Cache | None,
    *,
    logits: Literal["all", "last"],
) -> Tensor:
    """Feed whole prompts unrecorded, with a cache of static layers or without one; return what the model does."""
    bsz, width = tokens.shape
    shared = shared_by_prompts(model, ops, bsz, width)
    h: Tensor = model.tok_embeddings(tokens.flatten())
    for number, own in enumerate(weights):
        h = layer(ops, h, own, shared, fresh if cache is None else _stored(cache.layers[number], rows))
    if logits == "last":
        h = last_real(h.view(bsz, width, -1), rows.lengths).flatten(0, 1)
    scores: Tensor = ops.head(h, model.norm.weight, model.norm.eps, model.output.weight)
    return scores.view(bsz, -1, scores.shape[-1])


def _stored(cache: KVCache, rows: Rows) -> Store:
    """Return a function that writes whole prompts to one layer of a cache; they attend to no other keys."""

    def store(xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        cache.update(rows, xk, xv)
        return xk, xv

    return store


def shared_by_prompts(model: Transformer, ops: GraphOps, bsz: int, width: int) -> Shared:
    """Return the values that all layers of a call of whole prompts share."""
    positions = torch.arange(width, device=model.device).repeat(bsz, 1)
    return shared_by_layers(ops.attention, positions, width, *model.rope.up_to(width, model.device))
