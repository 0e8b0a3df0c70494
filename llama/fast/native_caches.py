"""A cache as native code reads and writes it in place: the addresses of the layers' buffers.

The checks and allocations of a kind's `update` are done here, by the kind's own methods. Knows the kinds that native
code serves; the native forward knows addresses and sizes only.
"""

from collections.abc import Iterable, Sequence
from ctypes import Array
from dataclasses import dataclass
from itertools import accumulate
from operator import add, is_, sub
from typing import cast

import torch
from torch import Tensor

from llama.fast.fingerprint import TensorLayout
from llama.fast.native_description import check_tensor
from llama.fast.native_structs import Groups, LayerCache, NativeModel
from llama.fast.supported import Unsupported, check_attributes
from llama.kv_cache import (
    Cache,
    Int4Cache,
    Int8Cache,
    KiviCache,
    KVCache,
    PagedCache,
    QuestCache,
    RotatedCache,
    ScoredCache,
    StaticCache,
)
from llama.kv_cache.counting import CountingCache
from llama.kv_cache.names import read_kind
from llama.kv_cache.paged import BLOCK
from llama.kv_cache.quantized import QuantizedCache
from llama.kv_cache.quest import PAGE
from llama.rope import RopeTable
from llama.rows import Rows

# The kinds that are served, and their numbers in `native/forward.cpp`. ScoredCache stands for subclasses: `served_as`.
KINDS: dict[type[KVCache], int] = {
    StaticCache: 1,
    Int8Cache: 2,
    Int4Cache: 2,
    RotatedCache: 2,
    KiviCache: 2,
    PagedCache: 3,
    ScoredCache: 4,
    QuestCache: 5,
}
_NAMES = {kind: frozenset(dir(kind)) for kind in KINDS}  # of methods and settings
# What a subclass of ScoredCache may define: which positions are kept, as a prompt ends, and what describes the kind.
_OF_METHODS = {
    *("score", "budget", "choose", "configure", "kept_of", "every_step", "adds_up"),
    *("lossless", "whole_prompt", "form", "default", "observes", "has_rope_starts"),
    *(name for name in _NAMES[ScoredCache] if name.startswith("__") and not callable(getattr(ScoredCache, name))),
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


class _Tables:
    """The layers' block tables as native code reads them; for later calls too, if all layers have the same tables."""

    def __init__(self, caches: Sequence[PagedCache], layers: Iterable[LayerCache]) -> None:
        self.width = max((len(table) for cache in caches for table in cache.tables), default=0)
        self._memory: list[Tensor] = []
        alike = all(cache.tables == caches[0].tables for cache in caches)
        self._tables = [list(table) for table in caches[0].tables] if caches and alike else []
        for layer, cache in zip(layers, caches, strict=True):
            if not (alike and self._memory):
                padded = [[*table, *[0] * (self.width - len(table))] for table in cache.tables]
                self._memory.append(torch.tensor(padded, dtype=torch.int32, device="cpu"))
                low, high = self._memory[-1].aminmax()
                if cache.keys is None or not 0 <= int(low) <= int(high) < len(cache.keys):
                    raise Unsupported("a table names a block that is not in the pool")
            layer.table = self._memory[-1].data_ptr()

    def serve(self, caches: Sequence[PagedCache], rows: Rows) -> bool:
        """Return True if every row has the blocks that the call writes, and shares none of them."""
        whole = all(cache.tables == self._tables and not cache.pool.changing for cache in caches)
        if len(self._tables) < len(rows.starts) or not whole:
            return False
        written: set[int] = set()
        for table, start, length in zip(self._tables, rows.starts, rows.lengths, strict=False):
            end = -(-(start + length) // BLOCK)
            if end > len(table):
                return False
            written.update(table[start // BLOCK : end])
        return all(cache.pool.shares[block] == 1 for cache in caches for block in written)


class _Runs:
    """Where the runs of kept keys of every layer begin, and the position of each row's first slot."""

    def __init__(self, caches: Sequence[ScoredCache], layers: Iterable[LayerCache]) -> None:
        self._counts = [[list(row) for row in cache._counts] for cache in caches]
        bases = list(caches[0]._bases) if caches else []
        self.bases, self.memory = torch.tensor(bases, dtype=torch.int64, device="cpu"), list[Tensor]()
        for layer, cache, counts in zip(layers, caches, self._counts, strict=True):
            ends = list(accumulate((count for row in counts for count in row), initial=0))
            whole = len(counts) == len(bases) and ends[-1] == len(cast(Tensor, cache.kept_keys))
            if not whole or not all(
                len(row) == cache.args.n_kv_heads and 0 <= min(row) <= max(row) <= base
                for row, base in zip(counts, bases, strict=True)
            ):
                raise Unsupported("the counts of a layer's kept keys are not those of its keys")
            self.memory.append(torch.tensor(ends, dtype=torch.int64, device="cpu"))
            layer.runs = self.memory[-1].data_ptr()

    def same(self, caches: Sequence[ScoredCache]) -> bool:
        """Return True if the caches have the same runs, and the same bases."""
        return self._counts == [cache._counts for cache in caches] and self.bases.tolist() == caches[0]._bases


class NativeCache:
    """The addresses of one cache's buffers, which are written again whenever a buffer has moved."""

    def __init__(self) -> None:
        self._layout: TensorLayout | None = None
        self._sizes: tuple[int, ...] = ()  # of the model
        self._groups: tuple[int, ...] = ()  # see `Groups`; () for kinds without groups
        self._names: Sequence[str] = ()
        self._slots = self._pages = 0
        self._layers = (LayerCache * 0)()
        self._tables, self._runs = _Tables([], []), _Runs([], [])

    def reserve(self, model: NativeModel, cache: Cache, rows: Rows, *, whole: bool) -> CacheRoom:
        """Allocate in every layer what a call will write. Raises Unsupported, and the errors of `update`.

        whole: whether the logits of all tokens are computed, also those of padding.
        """
        layers, kind = cache.layers, served_as(type(cache.layers[0]))
        assert kind is not None  # see `check_cache`
        if issubclass(kind, StaticCache):
            self._reserve_static(model, cast(list[StaticCache], layers), rows, whole=whole)
        elif kind is PagedCache:
            self._reserve_blocks(model, cast(list[PagedCache], layers), rows, whole=whole)
        elif kind is ScoredCache:
            self._reserve_behind(model, cast(list[ScoredCache], layers), rows)
        else:
            self._reserve_groups(model, cast(list[QuantizedCache], layers), rows)
        buffers, bases = cast(list[Tensor], self._buffers(layers)), self._runs.bases if kind is ScoredCache else None
        held = [*buffers, *self._runs.memory]
        return CacheRoom(KINDS[kind], self._slots, self._layers, Groups(*self._groups), held, bases, self._pages)

    def moved(self, cache: Cache, room: CacheRoom) -> bool:
        """Return True if the cache has other buffers than `room`: another text of its pool may replace them."""
        return not all(map(is_, self._buffers(cache.layers), room.buffers))

    def _reserve_static(self, model: NativeModel, caches: list[StaticCache], rows: Rows, *, whole: bool) -> None:
        first, bsz = caches[0], len(rows.starts)
        length = rows.end if whole else max(map(add, rows.starts, rows.lengths))
        if not (self._unchanged(model, caches) and first.fits(bsz, length)):
            like = _like(model)
            held = [cache.room(bsz, length, like=like)[0].shape[:2] for cache in caches]
            rows_held, length_held = map(max, zip(*held, strict=True))
            for cache, size in zip(caches, held, strict=True):
                if size != (rows_held, length_held):  # an earlier call stopped when some layers had grown
                    cache._enlarge(cache.sizes(rows_held, length_held, like), like.device)
            self._write(model, caches, [first.sizes(rows_held, length_held, like)] * len(caches))
        if isinstance(first, QuestCache):
            if len({cache.positions for cache in cast(list[QuestCache], caches)}) > 1:
                raise Unsupported("the layers' caches read different numbers of positions")
            self._pages = min(first.positions // PAGE, -(-self._slots // PAGE))

    def _reserve_groups(self, model: NativeModel, caches: list[QuantizedCache], rows: Rows) -> None:
        first, bsz = caches[0], len(rows.starts)
        if any(cache._ends != first._ends for cache in caches):
            raise Unsupported("the layers' caches were written up to different positions")
        groups = _groups(first)
        if any(_groups(cache) != groups for cache in caches):
            raise Unsupported("the layers' caches quantise differently")
        first._refuse_what_is_gone(rows.starts)
        first.args.check_room(bsz, rows.end)
        codes = first.key_codes
        fits = codes is not None and codes.shape[0] >= bsz and cast(int, first.slots) >= rows.end
        if not (fits and self._groups == groups and self._unchanged(model, caches)):
            like = _like(model)
            for cache in caches:
                cache._take(bsz, rows.end, like=like)
            assert first.key_codes is not None
            rows_held, groups_held = first.key_codes.shape[:2]
            self._write(model, caches, [first.sizes(rows_held, groups_held, like)] * len(caches))
            self._groups = groups
        for cache in caches:
            cache._note_ends(rows.starts, rows.lengths)

    def _reserve_blocks(self, model: NativeModel, caches: list[PagedCache], rows: Rows, *, whole: bool) -> None:
        if whole and any(length < rows.width for length in rows.lengths):
            raise Unsupported("a paged cache does not store padding, and the logits of padding were asked for")
        if self._unchanged(model, caches) and self._tables.serve(caches, rows):
            return
        caches[0].args.check_room(len(rows.starts), rows.end)
        like = _like(model)
        for cache in caches:
            cache._take(rows.starts, rows.lengths, like=like)
        pools = [(len(cast(Tensor, cache.keys)), BLOCK, *like.shape[2:]) for cache in caches]
        self._write(model, caches, [dict.fromkeys(("keys", "values"), (shape, like.dtype)) for shape in pools])
        tables = _Tables(caches, self._layers)
        self._slots = tables.width
        self._tables = tables  # last: if it is set, all is

    def _reserve_behind(self, model: NativeModel, caches: list[ScoredCache], rows: Rows) -> None:
        first, bsz = caches[0], len(rows.starts)
        step = rows.width == 1 and 0 not in rows.starts and not rows.prompt_ends
        if not step or any(cache.kept_keys is None for cache in caches):
            raise Unsupported(
                f"kv_cache={first.args.kv_cache!r} observes the attention of a prompt",
                instead="the plain path runs prompts, and native code the steps after them",
            )
        if any((cache._ends, cache._bases) != (first._ends, first._bases) for cache in caches):
            raise Unsupported("the layers' caches were written up to, or compressed at, different positions")
        first._refuse_what_is_gone(rows.starts)
        first.args.check_room(bsz, rows.end)
        behind, held = first._behind(rows), (0, 0) if first.keys is None else first.keys.shape
        fits = held[0] >= bsz and held[1] >= behind.end
        if not (fits and self._unchanged(model, caches) and self._runs.same(caches)):
            like = _like(model)
            for cache in caches:
                cache._take(bsz, behind.end, like=like)
            rows_held, length = cast(Tensor, first.keys).shape[:2]
            behind_sizes = first.sizes(rows_held, length, like)
            kept = [(len(cast(Tensor, cache.kept_keys)), model.head_dim) for cache in caches]
            names = ("kept_keys", "kept_values")
            self._write(model, caches, [behind_sizes | dict.fromkeys(names, (shape, like.dtype)) for shape in kept])
            self._runs = _Runs(caches, self._layers)
        for cache in caches:
            cache._note_ends(rows.starts, rows.lengths)
            cache._note_call(behind)

    def _unchanged(self, model: NativeModel, caches: Sequence[KVCache]) -> bool:
        """Return True if the addresses are those of the buffers, for a model of these sizes."""
        known = self._layout is not None and self._sizes == _sizes(model)
        return known and cast(TensorLayout, self._layout).same(self._buffers(caches))

    def _write(
        self,
        model: NativeModel,
        caches: Sequence[KVCache],
        sizes: Sequence[dict[str, tuple[Sequence[int], torch.dtype]]],
    ) -> None:
        """Write the addresses of each layer's buffers, which must have these shapes and dtypes."""
        self._layout, self._names = None, list(sizes[0])
        self._tables, self._runs = _Tables([], []), _Runs([], [])  # not of the new array
        self._layers = (LayerCache * len(caches))()  # a new array: an earlier call may still read the old one
        for layer, cache, own in zip(self._layers, caches, sizes, strict=True):
            for name, (shape, dtype) in own.items():
                setattr(layer, name, check_tensor(getattr(cache, name), shape, dtype))
        self._sizes, self._slots = _sizes(model), next(iter(sizes[0].values()))[0][1]
        self._layout = TensorLayout(cast(list[Tensor], self._buffers(caches)))  # last: if it is set, all is

    def _buffers(self, caches: Sequence[KVCache]) -> list[Tensor | None]:
        return [vars(cache).get(name) for cache in caches for name in self._names]


def served_as(kind: type[KVCache]) -> type[KVCache] | None:
    """Return the class in KINDS that stores and returns what this one does; None if there is none."""
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


def steps_left(cache: Cache, starts: Sequence[int]) -> int:
    """Return the number of steps that can follow a step at `starts` in the allocated memory, one token a row each.

    Holds if the same rows are fed and no other code changes the cache.
    """
    first = cache.layers[0]
    if isinstance(first, PagedCache):  # up to the end of the first block that is full
        return min(-(start + 1) % BLOCK for start in starts)
    if isinstance(first, ScoredCache):
        left: int = cast(Tensor, first.keys).shape[1] - max(map(sub, starts, first._bases)) - 1
        return left
    slots = first.slots
    assert slots is not None
    return slots - max(starts) - 1


def stored_ends(cache: Cache) -> list[list[int]]:
    """Return the lists in which the layers store the end of each row; a step without `reserve` updates them."""
    return [layer._ends for layer in cache.layers if isinstance(layer, CountingCache)]


def _groups(cache: QuantizedCache) -> tuple[int, ...]:
    """Return the fields of `Groups`."""
    bits, sizes = (cache.key_bits, cache.value_bits), (cache.group, cache.window, cache.sinks, cache.value_parts)
    return *bits, *sizes, cache.unrotated, cache.rotates_values


def _sizes(model: NativeModel) -> tuple[int, ...]:
    return model.bfloat16, model.kv_heads, model.head_dim, model.layer_count


def _like(model: NativeModel) -> Tensor:
    """Return an empty tensor with the shape and dtype of the model's keys for one token."""
    return torch.empty((1, 1, model.kv_heads, model.head_dim), dtype=model.dtype, device="cpu")
