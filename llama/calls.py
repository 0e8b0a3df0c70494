"""What a call of a model may ask for, checked before anything is computed or written.

Knows positions, limits and what a cache is for; does not know how anything is computed.
"""

import os
from typing import Any, Protocol

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.kv_cache import Cache, check_lossless
from llama.rows import Rows
from llama.runner import Runner


class Called(Protocol):
    """What the checks ask of a model. `process`: the id of the one that made it."""

    process: int

    @property
    def args(self) -> ModelArgs: ...
    @property
    def share(self) -> ModelArgs: ...
    @property
    def kv_caching(self) -> bool: ...
    @property
    def exact(self) -> bool: ...
    @property
    def runner(self) -> Runner[Any] | None: ...


def check_call(model: Called, tokens: Tensor, rows: Rows, cache: Cache | None, logits: str) -> None:
    """Raise ValueError for rows that the tokens, the limits or the cache do not allow, and for unknown `logits`."""
    if tokens.shape != (len(rows.starts), rows.width):
        raise ValueError(
            f"tokens are {tuple(tokens.shape)}, and start_pos says {len(rows.starts)} rows of {rows.width}; make the "
            "Rows for these tokens"
        )
    furthest = max(rows.starts)
    if cache is None:
        if furthest > 0:
            raise ValueError(
                f"start_pos={furthest} needs the KV cache, which is off: feed the whole prefix at start_pos=0"
            )
    elif not model.kv_caching:
        raise ValueError("a cache was given, but kv_caching is off: set model.kv_caching = True, or leave it out")
    elif furthest == 0:
        check_fits(model, cache)
    elif cache.source is None and cache.empty:
        raise ValueError(
            f"start_pos={furthest} with an empty KV cache: feed the positions before it first (a new cache is empty, "
            "and setting kv_cache, kv_caching = False, free_cache and .to() drop the model's own)"
        )
    model.args.check_room(len(rows.starts), 0 if cache is not None and cache.bound else rows.end)
    if logits not in ("all", "last"):
        raise ValueError(f"logits={logits!r} must be 'all' or 'last'")
    if torch.compiler.is_compiling():  # into a graph goes the plain path
        if model.runner is not None and model.runner.exact:
            raise ValueError(
                "exact mode computes by native code here, which no graph can hold; do not compile the model"
            )
    elif model.process != os.getpid() and torch.get_num_threads() > 1:  # threads do not live on in a forked process
        raise RuntimeError(
            "this process was forked from the one that made the model, and a fork does not copy PyTorch's threads: "
            "computing would wait for them for ever; call torch.set_num_threads(1) here first, or start processes "
            "by spawn"
        )


def check_fits(model: Called, cache: Cache) -> None:
    """Raise ValueError where a text of this model cannot be held by the cache."""
    args, layers = model.share, cache.layers
    if len(layers) != args.n_layers or len(set(map(id, layers))) < len(layers):
        raise ValueError(
            f"the cache has {len(set(map(id, layers)))} layers of its own, and the model {args.n_layers}; make one by "
            "model.new_cache()"
        )
    wanted = (args.n_kv_heads, args.head_dim)
    for held in ((layer.args.n_kv_heads, layer.args.head_dim) for layer in layers):
        if held != wanted:
            raise ValueError(
                f"the cache is for {held[0]} KV heads of {held[1]} numbers, and the model has {wanted[0]} of "
                f"{wanted[1]}; make one by model.new_cache()"
            )
    if model.exact:
        check_lossless(layers)
