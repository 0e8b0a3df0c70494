"""A cache as native code reads and writes it in place: the addresses of the layers' buffers.

A kind prepares its own memory and describes it, see `KVCache.native_layout`. Knows the contract, and which classes
native code serves; the native forward knows addresses and sizes only.
"""

from collections.abc import Iterator, Sequence
from ctypes import Array
from dataclasses import dataclass
from itertools import pairwise
from operator import is_
from typing import cast

import torch
from torch import Tensor

from llama.fast.fingerprint import TensorLayout
from llama.fast.native_model import check_tensor
from llama.fast.native_structs import Groups, LayerCache, NativeModel
from llama.fast.supported import Unsupported, check_attributes
from llama.kv_cache import Cache, KVCache, NativeLayout, ScoredCache, StaticCache
from llama.kv_cache.names import read_kind
from llama.rope import RopeTable
from llama.rows import Rows


def _of_this_library(kind: type[KVCache]) -> Iterator[type[KVCache]]:
    """Yield the subclasses of a kind, in the order of their definition."""
    for one in kind.__subclasses__():
        if one.__module__.startswith("llama."):
            yield one
            yield from _of_this_library(one)


# The kinds that are served, and their numbers in `native/call.h`. ScoredCache stands for subclasses: `served_as`.
KINDS = {
    kind: kind.native
    for kind in sorted(_of_this_library(KVCache), key=lambda kind: kind.native)
    if "native" in vars(kind)
}
_NAMES = {kind: frozenset(dir(kind)) for kind in KINDS}  # of methods and settings
# What a subclass of ScoredCache may define: which positions are kept, as a prompt ends, and what describes the kind.
_OF_METHODS = {
    *("score", "budget", "choose", "configure", "kept_of", "every_step", "adds_up"),
    *("lossless", "whole_prompt", "form", "default", "observes", "has_rope_starts"),
    *(name for name in _NAMES[ScoredCache] if name.startswith("__") and not callable(getattr(ScoredCache, name))),
    "__annotate_func__",  # Python 3.14 stores a class's annotations as a function
}
_OF_STORAGE = {*_NAMES[ScoredCache], *KVCache.__annotations__, *ScoredCache.__annotations__} - _OF_METHODS


@dataclass(frozen=True)
class CacheRoom:
    """Memory for a call in every layer of a cache: all but `buffers` is passed to native code.

    buffers: the memory at the layers' addresses, which stays allocated as long as this object.
    pages: how many a step over a `QuestCache` reads.
    """

    kind: int
    slots: int
    layers: Array[LayerCache]
    groups: Groups
    buffers: list[Tensor]
    bases: Tensor | None
    pages: int


class NativeCache:
    """The addresses of one cache's buffers, which are written again whenever a layer has another layout."""

    def __init__(self) -> None:
        self._layout: TensorLayout | None = None
        self._layouts: list[NativeLayout | None] = []
        self._sizes: tuple[int, ...] = ()  # of the model
        self._names: Sequence[str] = ()
        self._slots = 0
        self._layers = (LayerCache * 0)()
        self._index: list[Tensor] = []  # tables or runs, at the layers' addresses
        self._bases: Tensor | None = None

    def reserve(self, model: NativeModel, cache: Cache, rows: Rows) -> CacheRoom:
        """Allocate in every layer what a call will write. Raises Unsupported, and the errors of `update`."""
        layers, kind = cache.layers, served_as(type(cache.layers[0]))
        assert kind is not None  # see `check_cache`
        if layers[0].observes and (rows.width > 1 or 0 in rows.starts or rows.prompt_ends):
            raise _observes(layers[0])
        if any(layer.ends != layers[0].ends for layer in layers):
            raise Unsupported("the layers' caches were written up to different positions")
        like = torch.empty((1, 1, model.kv_heads, model.head_dim), dtype=model.dtype, device="cpu")
        for layer in layers:
            layer.prepare(rows, like)
        layouts = [layer.native_layout(like) for layer in layers]
        if issubclass(kind, StaticCache) and len({layout and layout.slots for layout in layouts}) > 1:
            longest = max(layout.slots for layout in layouts if layout)  # an earlier call has grown some layers
            for layer in layers:
                cast(StaticCache, layer).room(len(rows.starts), longest, like=like)
            layouts = [layer.native_layout(like) for layer in layers]
        first = layouts[0]
        if first is None or None in layouts:
            raise _observes(layers[0])
        if not (layouts == self._layouts and self._unchanged(model, layers)):
            self._write(model, layers, cast(list[NativeLayout], layouts))
        for layer in layers:
            layer.record(rows)
        buffers = [*cast(list[Tensor], self._buffers(layers)), *self._index]
        groups = Groups(*first.groups)
        return CacheRoom(KINDS[kind], self._slots, self._layers, groups, buffers, self._bases, first.pages)

    def moved(self, cache: Cache, room: CacheRoom) -> bool:
        """Return True if the cache has other buffers than `room`: another text of its pool may replace them."""
        return not all(map(is_, self._buffers(cache.layers), room.buffers))

    def _unchanged(self, model: NativeModel, caches: Sequence[KVCache]) -> bool:
        """Return True if the addresses are those of the buffers, for a model of these sizes."""
        known = self._layout is not None and self._sizes == _sizes(model)
        return known and cast(TensorLayout, self._layout).same(self._buffers(caches))

    def _write(self, model: NativeModel, caches: Sequence[KVCache], layouts: list[NativeLayout]) -> None:
        """Write the addresses of each layer's buffers, after checks of all that native code relies on."""
        first = layouts[0]
        for name in ("bases", "groups", "pages") if first.table else ("slots", "bases", "groups", "pages"):
            if any(getattr(layout, name) != getattr(first, name) for layout in layouts):
                raise Unsupported(f"the layers' caches differ in their {name}")
        self._layout, self._names, self._index = None, list(first.buffers), []
        self._slots = max(layout.slots for layout in layouts)
        self._layers = (LayerCache * len(caches))()  # a new array: an earlier call may still read the old one
        before: NativeLayout | None = None
        for layer, cache, layout in zip(self._layers, caches, layouts, strict=True):
            for name, (shape, dtype) in layout.buffers.items():
                setattr(layer, name, check_tensor(getattr(cache, name), shape, dtype))
            most = next(iter(layout.buffers.values()))[0][0]
            if layout.table:
                if before is None or layout.table != before.table:  # all layers may have one table
                    padded = [[*row, *[0] * (self._slots - len(row))] for row in layout.table]
                    self._index.append(torch.tensor(padded, dtype=torch.int32, device="cpu"))
                if not all(0 <= block < most for row in layout.table for block in row):
                    raise Unsupported("a table names a block that is not in the pool")
                layer.table = self._index[-1].data_ptr()
            elif layout.runs:
                _check_runs(layout, model.kv_heads)
                self._index.append(torch.tensor(layout.runs, dtype=torch.int64, device="cpu"))
                layer.runs = self._index[-1].data_ptr()
            before = layout
        self._bases = torch.tensor(first.bases, dtype=torch.int64, device="cpu") if first.bases else None
        self._sizes, self._layouts = _sizes(model), list(layouts)
        self._layout = TensorLayout(cast(list[Tensor], self._buffers(caches)))  # last: if it is set, all is

    def _buffers(self, caches: Sequence[KVCache]) -> list[Tensor | None]:
        return [vars(cache).get(name) for cache in caches for name in self._names]


def served_as(kind: type[KVCache]) -> type[KVCache] | None:
    """Return the class in KINDS whose native code also serves `kind`, or None."""
    if kind in KINDS or not issubclass(kind, ScoredCache) or kind.every_step:
        return kind if kind in KINDS else None
    own = {name for base in kind.__mro__[: kind.__mro__.index(ScoredCache)] for name in vars(base)}
    return None if own & _OF_STORAGE else ScoredCache


def check_cache(model: NativeModel, cache: Cache, rope: RopeTable) -> None:
    """Raise Unsupported unless native code computes what the cache's own methods would, for a model of these angles."""
    first, kinds = cache.layers[0], {kind: served_as(kind) for kind in set(map(type, cache.layers))}
    for layer in cache.layers:
        served = kinds[type(layer)]
        if served is None:
            raise Unsupported(_unknown(layer))
        if type(layer) is not type(first) or layer.args.kv_cache != first.args.kv_cache:
            raise Unsupported("the layers' caches are of different kinds")
        if (layer.args.n_kv_heads, layer.args.head_dim) != (model.kv_heads, model.head_dim):
            raise Unsupported("layers, or their caches, differ in their heads")
        if layer.unrotated and layer.rope is not rope:
            raise Unsupported("a layer's cache has other angles than the model")
        if not _NAMES[served].isdisjoint(vars(layer)):
            check_attributes(layer)
    if len(cache.layers) != model.layer_count:
        raise Unsupported(f"the cache has {len(cache.layers)} layers, and the model {model.layer_count}")


def _unknown(cache: KVCache) -> str:
    """Return the error message for a kind that is not served, by the name that was asked for if that is its own."""
    names = {kind: name for name, kind in KVCache.kinds.items()}
    asked = cache.args.kv_cache
    name = f"kv_cache={asked!r}" if read_kind(asked).name == names.get(type(cache)) else cache.user_name()
    served = [names[kind] for kind in KINDS if kind in names]
    served += sorted(name for kind, name in names.items() if kind not in KINDS and served_as(kind) is not None)
    return f"{name} has no fast step; these kinds have one: {', '.join(served)}"


def stored_ends(cache: Cache) -> list[list[int]]:
    """Return the lists in which the layers store the end of each row; a step without `reserve` updates them."""
    return [layer.ends for layer in cache.layers if layer.ends is not None]


def _observes(cache: KVCache) -> Unsupported:
    return Unsupported(
        f"kv_cache={cache.args.kv_cache!r} observes the attention of a prompt",
        instead="the plain path runs prompts, and native code the steps after them",
    )


def _check_runs(layout: NativeLayout, heads: int) -> None:
    """Raise Unsupported unless each row and head has a run, all runs are those of the keys, and none is too long."""
    counts = [end - begin for begin, end in pairwise(layout.runs)]
    whole = len(counts) == len(layout.bases) * heads and layout.runs[-1] == layout.buffers["kept_keys"][0][0]
    if not whole or not all(0 <= count <= layout.bases[i // heads] for i, count in enumerate(counts)):
        raise Unsupported("the counts of a layer's kept keys are not those of its keys")


def _sizes(model: NativeModel) -> tuple[int, ...]:
    return model.bfloat16, model.kv_heads, model.head_dim, model.layer_count
