"""Tiny Llama models, functions that read them, attention weights by loops, and caches full of NaN.

Nothing here uses llama/checkpoint, llama/rope or llama/ops, so that a mistake there cannot be made twice.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from llama import testing
from llama.args import ModelArgs
from llama.kv_cache import Cache, ConcatCache, StaticCache
from llama.model import Transformer
from llama.rows import Rows

# Logits of about 3 with roundings of 1e-16 were measured to stay within 3e-12 of each other; a wrong formula does not.
FP64_TOLERANCE = 1e-10


def fp32_tolerance(logits: Tensor, args: ModelArgs, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest difference of logits by rounding alone.

    A sum of n products has an error of about eps * sqrt(n) of its size, each layer adds one, and softmax and norm can
    magnify it. Over 150 drawn models, the distance to transformers was at most a tenth of this.
    """
    widest = max(args.dim, args.n_heads * args.head_dim, args.ffn_dim)
    return 32 * torch.finfo(dtype).eps * math.sqrt(widest) * args.n_layers * float(logits.abs().max())


def tiny_args(**changes: Any) -> ModelArgs:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 40, "multiple_of": 16}
    return ModelArgs(**{**sizes, "max_seq_len": 24, "rope_theta": 10000.0, **changes})


def tiny_model(args: ModelArgs | None = None, *, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    """Return a model whose weights, norms included, are large enough that each affects the logits."""
    args = tiny_args(**changes) if args is None else replace(args, **changes)
    return testing.tiny_model(args, dtype).requires_grad_(True)


def some_tokens(rows: int, length: int, *, vocab_size: int = 40, seed: int = 0) -> Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def bits(tensor: Tensor) -> Tensor:
    """Return the tensor as bytes, in which nan equals nan and -0 differs from 0."""
    return tensor.detach().contiguous().view(torch.uint8)


@dataclass
class Watch:
    """The width, the starts and the cache bytes of every forward of a model."""

    widths: list[int] = field(default_factory=list)
    starts: list[Any] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)


@contextmanager
def watched(model: Transformer) -> Iterator[Watch]:
    """Record the forwards of `model`, so that a test of the cache cannot pass without one."""
    watch = Watch()

    def before(_: nn.Module, given: tuple[Any, ...]) -> None:
        watch.widths.append(given[0].shape[1])
        start_pos = given[1] if len(given) > 1 else 0
        watch.starts.append(list(start_pos.starts) if isinstance(start_pos, Rows) else start_pos)

    def after(fed: Transformer, _: object, named: dict[str, Any], __: object) -> None:
        watch.nbytes.append(nbytes_of(named.get("cache") or fed.cache))

    hooks = model.register_forward_pre_hook(before), model.register_forward_hook(after, with_kwargs=True)
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def fed_in_pieces(model: Transformer, tokens: Tensor, cuts: Sequence[int]) -> Tensor:
    """Return the logits of a text that the model reads in calls from 0 and from `cuts` on, through its own cache."""
    model.free_cache()
    edges = [0, *cuts, tokens.shape[1]]
    return torch.cat([model(tokens[:, start:end], start) for start, end in pairwise(edges)], dim=1)


@contextmanager
def failing(module: nn.Module, error: type[BaseException], *, after: int = 0) -> Iterator[None]:
    """Raise an error before a module computes, each time after the first `after` ones."""
    left = after

    def fail(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise error

    hook = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def weights_by_loops(
    xq: Tensor,
    keys: Tensor,
    starts: list[int],
    *,
    orders: list[list[int]] | None = None,
    visible: Tensor | None = None,
    change: Callable[[float, int, int], float] = lambda score, *_: score,
) -> Tensor:
    """Return attention weights in float64, (rows, n_heads, seqlen, kv_len), one query at a time.

    `orders`: the positions of each row's keys, by default 0, 1, 2, ... `visible`: a mask of the result's shape, by
    default the past. `change` maps a score, its head and the distance from key to query to a new score.
    """
    rows, seqlen, n_heads, head_dim = xq.shape
    per_group, kv_len = n_heads // keys.shape[2], keys.shape[1]
    weights = torch.zeros(rows, n_heads, seqlen, kv_len, dtype=torch.float64)
    for row, head, i in product(range(rows), range(n_heads), range(seqlen)):
        far = [starts[row] + i - at for at in (orders[row] if orders else range(kv_len))]
        seen = [j for j in range(kv_len) if (far[j] >= 0 if visible is None else visible[row, head, i, j])]
        query, of_head = xq[row, i, head].double(), keys[row, :, head // per_group].double()
        scores = [change(float(query @ of_head[j]) / math.sqrt(head_dim), head, far[j]) for j in seen]
        shares = [math.exp(score - max(scores)) for score in scores]
        weights[row, head, i, seen] = torch.tensor(shares, dtype=torch.float64) / sum(shares)
    return weights


def cache_nbytes(model: Transformer) -> int:
    """Return the bytes of the model's own cache, see `nbytes_of`."""
    return nbytes_of(model.cache)


def nbytes_of(cache: Cache | None) -> int:
    """Return the bytes of all tensors that a cache stores, not its own count."""
    stored = [vars(layer).items() for layer in ([] if cache is None else cache.layers)]
    return sum(held.nbytes for layer in stored for name, held in layer if name[0] != "_" and isinstance(held, Tensor))


def kv_nbytes(args: ModelArgs, rows: int, length: int, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of all layers, for `rows` x `length` positions."""
    return args.n_layers * rows * length * args.n_kv_heads * args.head_dim * 2 * dtype.itemsize


class PoisonedCache(StaticCache, kind="poisoned"):
    """The static cache with NaN in all unwritten positions, so that reading them shows."""

    def _allocate(self, *of: Any) -> Tensor:
        return super()._allocate(*of).fill_(torch.nan)


class PoisonedConcatCache(ConcatCache, kind="poisoned_concat"):
    """The concatenating cache with NaN in the positions that shorter rows have not reached."""

    @staticmethod
    def _resized(held: Tensor, end: int, like: Tensor) -> Tensor:
        grown = ConcatCache._resized(held, end, like)
        grown[:, held.shape[1] :] = torch.nan
        return grown
