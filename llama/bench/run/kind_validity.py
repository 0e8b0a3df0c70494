"""Did a kind of cache do what its name says? Judged by what the cache stores and returns, not by what it reports."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llama.bench.run.validity import check
from llama.bench.schema import Row
from llama.kv_cache import Cache, KVCache, ScoredCache
from llama.kv_cache.contract import read_by_last
from llama.model import Transformer
from llama.rows import Rows

CHECKS = ("bytes", "dropped", "rounded", "sees a key")
CLOSE = 1e-2  # of the largest number: what is stored as given comes back within it, in 16 bits too


@dataclass(frozen=True)
class Read:
    """What the next token reads in layer 0, for each KV head."""

    seen: Tensor  # (n_kv_heads, kv_len)
    positions: Tensor  # (n_kv_heads, kv_len)
    errors: tuple[float, float]  # the largest of keys and of values, as a part of the largest number that was given


@torch.inference_mode()
def judge_kind(
    model: Transformer, cache: Cache, ids: Sequence[int], *, prompt: int, predicted: int, quantized: bool
) -> list[Row]:
    """Return the checks of a cache that was fed `ids`, one row, of which the first `prompt` are a prompt.

    predicted: the bytes that the kind predicts. quantized: it stores keys and values in fewer bits than the model's.
    """
    stored = cache.nbytes  # before a copy that may share memory is written
    as_predicted = check("bytes", stored == predicted, f"{stored:,} stored, {predicted:,} predicted")
    read = read_next(model, cache.layers[0], ids)
    return [as_predicted, _dropped(cache, read, prompt, len(ids)), _rounded(read, quantized), _sees(read, len(ids))]


def read_next(model: Transformer, layer: KVCache, ids: Sequence[int]) -> Read:
    """Return what a token after `ids` reads in layer 0. RoPE rotates pairs of numbers, so their norms are compared."""
    block, args, fed = model.blocks[0], layer.args, len(ids)
    tokens = torch.tensor([[*ids, ids[-1]]], device=model.device)
    x = block.attention_norm(model.tok_embeddings(tokens))
    xk, xv = (torch.unflatten(own(x), -1, (-1, args.head_dim)) for own in (block.attention.wk, block.attention.wv))
    xk = block.attention.k_norm(xk)
    rows, queries = Rows.at([fed], [1]), torch.ones(1, 1, args.n_heads, args.head_dim).to(xk)
    copy = layer.copy()
    keys, values = copy.update(rows, xk[:, -1:], xv[:, -1:])
    seen, places = read_by_last(copy, rows, queries, keys.shape[1])
    errors = []
    for given, back in ((_pairs(xk), _pairs(keys)), (xv, values)):
        given, back = given[0].transpose(0, 1), back[0].transpose(0, 1)  # (n_kv_heads, positions, ...)
        wanted = given.take_along_dim(places.clamp(max=fed)[..., None], dim=1)
        errors.append(float(((back - wanted).abs().amax(-1) * seen).max() / given.abs().max()))
    return Read(seen, places, (errors[0], errors[1]))


def _pairs(keys: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(torch.unflatten(keys.float(), -1, (-1, 2)), dim=-1)
    return norms


def _dropped(cache: Cache, read: Read, prompt: int, fed: int) -> Row:
    """Did every layer and head drop what it should? A cache that stores all keys must let a token read all of them."""
    counts = read.seen.sum(1) - 1  # without the new token itself
    words = f"{int(counts.min()):,} to {int(counts.max()):,} of {fed:,} keys are read in layer 0"
    scored = [layer for layer in cache.layers if isinstance(layer, ScoredCache)]
    if scored:
        whole = [layer.layer for layer in scored if not layer.keeps_its_budget([prompt])]
        wrong = f"; layers {', '.join(map(str, whole))} do not store what their budget says" if whole else ""
        return check("dropped", not whole, words + wrong)
    lossless = all(layer.lossless for layer in cache.layers)
    return check("dropped", int(counts.min()) == fed if lossless else None, words)


def _rounded(read: Read, quantized: bool) -> Row:
    """Do keys and values come back as they were given, and changed if the kind rounds them? Each side on its own."""
    sides = dict(zip(("keys", "values"), read.errors, strict=True))
    words = ", ".join(f"{side} differ by {error:.1g} of the largest" for side, error in sides.items())
    if quantized:
        return check("rounded", all(1e-6 < error < 1 for error in sides.values()), words)
    return check("rounded", all(error < CLOSE for error in sides.values()), words)


def _sees(read: Read, fed: int) -> Row:
    """Does every query see a key, its own?"""
    own = (read.positions == fed) & read.seen
    words = f"in {int(own.any(1).sum())} of {len(own)} heads of layer 0 a token reads itself"
    return check("sees a key", bool(own.any(1).all()), words)
