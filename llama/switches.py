"""The settings of a model (cache, exact mode, operations), the caches that it makes, and the checks of a call.

A setting applies to all later calls. A call is checked before anything is computed or written. Knows that layers have
an attention with a flag; does not know what a layer computes.
"""

import functools
import logging
import os
import threading
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol, Self, cast
from uuid import uuid4

import torch
from torch import Tensor, nn

from llama.args import ModelArgs
from llama.host.cores import FreeCores, choose_once
from llama.kv_cache import Cache, cache_kind, check_lossless
from llama.kv_cache.cache import Source
from llama.ops import Ops
from llama.ranks import Ranks
from llama.rope import RopeTable
from llama.rows import Rows
from llama.stepper import Execution, Left, Runner

logger = logging.getLogger(__name__)


class Fork:
    """Whether this process was forked from one that had a model, and so lacks the threads that PyTorch may have."""

    happened: ClassVar[bool] = False

    @staticmethod
    @functools.cache
    def watch() -> None:
        """Set `happened` in processes that are forked from now on."""
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=partial(setattr, Fork, "happened", True))


class Flagged(Protocol):
    """An attention, as far as it is used here."""

    kv_caching: bool


class OwnCache(threading.local):
    """The cache that a model has for calls without a `cache`: one per thread. Copies of a model begin without one."""

    cache: Cache | None = None


class Weights:
    """The identity of a model's weights. A deep copy of it is another one; a pickle restores the same.

    Changes in place are not detected.
    """

    def __init__(self) -> None:
        self.token = uuid4()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Weights) and self.token == other.token

    def __hash__(self) -> int:
        return hash(self.token)

    def __deepcopy__(self, _: dict[int, Any]) -> "Weights":
        return Weights()


class Switches(nn.Module):
    """The settings of a model.

    identity: the Weights; equal for models that share them.
    """

    args: ModelArgs
    ranks: Ranks
    layers: nn.ModuleList
    norm: Any  # the last norm; its weight has the device and dtype of the model
    rope: RopeTable
    ops: Ops
    runner: Runner[Any] | None

    def __init__(self) -> None:
        super().__init__()
        self.identity = Weights()
        Fork.watch()
        self._own = OwnCache()

    @property
    def share(self) -> ModelArgs:
        """The sizes of this rank's part of the model, with the layers that it has now."""
        args = self.args if self.ranks.size == 1 else self.args.share(self.ranks.size)
        return args if args.n_layers == len(self.layers) else replace(args, n_layers=len(self.layers))

    @property
    def device(self) -> torch.device:
        device: torch.device = self.norm.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the activations; int8 weights have another one."""
        dtype: torch.dtype = self.norm.weight.dtype
        return dtype

    @property
    def kv_caching(self) -> bool:
        """Whether keys and values are cached. Setting it to False drops the model's own cache, in every thread."""
        return cast(Flagged, self.layers[0].attention).kv_caching

    @kv_caching.setter
    def kv_caching(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise ValueError(f"kv_caching={value!r} must be True or False")
        for layer in self.layers:
            cast(Flagged, layer.attention).kv_caching = value
        if not value:
            self._own = OwnCache()

    def with_kv_caching(self, value: bool) -> Self:
        """Return this model if its `kv_caching` is `value`, else a twin with that value.

        A twin has the same weights, hooks and operations in other modules, so that both can compute at the same time.
        Attributes that are assigned to a module later may not appear in the twin. Its `original` is this model.
        """
        if value == self.kv_caching:
            return self
        twin = copy(self)
        twin.__dict__["original"] = self  # not a submodule
        twin._modules = dict(self._modules)
        twin.layers = copy(self.layers)
        twin.layers._modules = {name: _switched(layer, value) for name, layer in self.layers._modules.items()}
        return twin

    @property
    def kv_cache(self) -> str:
        """The kind of cache that `new_cache` makes. Setting it drops the model's own cache, in every thread."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, value: str) -> None:
        self._kv_cache = self.new_cache(value).kind
        self._own = OwnCache()

    @property
    def exact(self) -> bool:
        """Whether the bits of a position's logits depend only on the tokens up to it, in inference.

        They do not depend on `kv_caching`, on how a text is cut into calls, or on other rows. Setting it to True
        compares the model with itself, and raises ValueError if a bit differs. If the model has a runner, the runner is
        compared, and calls that it cannot serve raise ValueError from then on.
        """
        return self.ops.exact or (self.runner is not None and self.runner.exact is True)

    @exact.setter
    def exact(self, value: bool) -> None:
        from llama.exact.switch import set_exact  # deferred: plain models do not need it

        set_exact(self, value)

    @property
    def execution(self) -> Execution:
        """How forwards are executed, with the model's kind of cache if the cache is on."""
        return self.execution_with(self.kv_cache if self.kv_caching else None)

    def execution_with(self, kind: str | None) -> Execution:
        """Return how forwards with a kind of cache are executed; None: without a cache."""
        kinds = {str(module.stored_as) for module in self.modules() if hasattr(module, "stored_as")}
        bits = min((vars(module).get("activations", 16) for module in self.modules()), default=16)
        left: Left = "none"
        if (runner := self.runner) is not None and not self.exact:
            left = runner.left(self, None if kind is None else self.new_cache(kind))
        if runner is None or left == "all":
            return Execution(str(self.ops), min(kinds, default=None), bits, self.exact)
        return Execution(runner.name, min(kinds, default=None), bits, self.exact, left == "prompts")

    def use(self, ops: Ops) -> None:
        """Set the operations of all modules."""
        for module in self.modules():
            if hasattr(module, "ops"):
                module.ops = ops  # type: ignore[assignment]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        exact = self.exact
        if exact:
            self.exact = False
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._own = OwnCache()
        if exact:  # compare again on the new device or in the new dtype
            self.exact = True
        return self

    # ---- caches ------------------------------------------------------------------------------------------------------

    def new_cache(
        self, kind: str | None = None, *, rows: int = 0, length: int = 0, max_seq_len: int | None = None
    ) -> Cache:
        """Return an empty cache for a text or a batch. `kind` and `max_seq_len` are by default the model's.

        Kinds that preallocate allocate `rows` x `length` positions in the first call. Raises ValueError for an unknown
        kind, and for a lossy one in exact mode.
        """
        args = self.share
        args = args if max_seq_len is None else replace(args, max_seq_len=max_seq_len)
        cache = Cache.of(args, self.kv_cache if kind is None else cache_kind(kind), self.rope)
        if self.exact:
            check_lossless(cache.layers)
        cache.reserve(rows, length)
        return cache

    @property
    def cache(self) -> Cache | None:
        """The model's own cache for this thread, which calls without a `cache` use; None before the first of them."""
        return self._own.cache

    def free_cache(self) -> None:
        """Drop the model's own cache for this thread."""
        self._own.cache = None

    @property
    def source(self) -> Source:
        """The weights, exact mode, dtype and device that compute keys and values, to compare with `cache.source`."""
        weight, exact = self.norm.weight, self.ops.exact and "plain"
        if self.runner is not None and self.runner.exact:
            exact = self.runner.code
        return Source(self.identity, exact, weight.dtype, weight.device)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_own", "original")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Fork.watch()
        super().__setstate__({**state, "_own": OwnCache()})  # type: ignore[no-untyped-call]

    def own_cache(self) -> Cache:
        """Return the model's own cache for this thread; make it if there is none."""
        if self._own.cache is None:
            self._own.cache = self.new_cache()
        return self._own.cache


def _switched(layer: nn.Module, kv_caching: bool) -> nn.Module:
    """Return a shallow copy of a layer with the flag set, or the layer itself if it has no attention."""
    if not hasattr(layer, "attention"):
        return layer
    made = copy(layer)
    made._modules = dict(layer._modules)
    made.attention = attention = copy(cast(nn.Module, layer.attention))
    cast(Flagged, attention).kv_caching = kv_caching
    return made


# ---- checks of a call ------------------------------------------------------------------------------------------------


def check_call(model: Switches, tokens: Tensor, rows: Rows, cache: Cache | None, logits: str) -> None:
    """Raise ValueError for rows that the tokens, the limits or the cache do not allow, and for unknown `logits`."""
    if tokens.shape != (len(rows.starts), rows.width):
        raise ValueError(
            f"tokens are {tuple(tokens.shape)}, but start_pos has {len(rows.starts)} rows of {rows.width}; make the "
            "Rows for these tokens"
        )
    furthest = max(rows.starts)
    if cache is not None and not model.kv_caching:
        raise ValueError("a cache was given, but kv_caching is off: set model.kv_caching = True, or leave it out")
    if cache is None:
        if furthest > 0:
            raise ValueError(
                f"start_pos={furthest} needs the KV cache, which is off: feed the whole prefix at start_pos=0"
            )
    elif furthest > 0 and cache.source is None and cache.empty:
        raise ValueError(
            f"start_pos={furthest} with an empty KV cache: feed the positions before it first (a new cache is empty, "
            "and setting kv_cache, kv_caching = False, free_cache and .to() drop the model's own)"
        )
    else:
        check_fits(model, cache)
    model.args.check_room(len(rows.starts), 0 if cache is not None and cache.bound else rows.end)
    if logits not in ("all", "last"):
        raise ValueError(f"logits={logits!r} must be 'all' or 'last'")
    if torch.compiler.is_compiling():  # a compiled graph contains the plain path
        if model.runner is not None and model.runner.exact:
            raise ValueError(
                "exact mode uses native code here, which cannot be compiled into a graph; do not compile the model"
            )
    elif Fork.happened and torch.get_num_threads() > 1:
        raise RuntimeError(
            "this process was forked from one that had a model, and a fork does not copy PyTorch's threads: "
            "computing would wait for them for ever; call torch.set_num_threads(1) here first, or start processes "
            "by spawn"
        )
    elif not FreeCores.chosen and model.device.type == "cpu":  # the first call of a model that `load` did not make
        choose_once(logger.warning)


def check_fits(model: Switches, cache: Cache) -> None:
    """Raise ValueError if the cache has other sizes than the model."""
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
