"""A cache as native code reads and writes it in place: what it is told of the layers' buffers, and when again.

What a kind's `update` does before it writes is done here, by the kind's own methods: what it refuses, and the room that
it takes. Knows the kinds that are served; the native forward knows addresses and sizes only.
"""

from collections.abc import Iterable, Sequence
from ctypes import Array
from dataclasses import dataclass
from operator import add, is_
from typing import cast

import torch
from torch import Tensor

from llama.fast.fingerprint import TensorFacts
from llama.fast.native_description import NativeModel, check_tensor
from llama.fast.native_library import LayerCache
from llama.fast.supported import Unsupported, check_attributes
from llama.kv_cache import Cache, Int4Cache, Int8Cache, KVCache, PagedCache, StaticCache
from llama.kv_cache.counting import CountingCache
from llama.kv_cache.names import read_kind
from llama.kv_cache.paged import BLOCK
from llama.kv_cache.quantized import GROUP, QuantizedCache
from llama.rope import RopeTable
from llama.rows import Rows

# The kinds that are served, and what `native/forward.cpp` calls them; without a cache it is told 0.
KINDS: dict[type[KVCache], int] = {StaticCache: 1, Int8Cache: 2, Int4Cache: 3, PagedCache: 4}
_NAMES = {kind: frozenset(dir(kind)) for kind in KINDS}  # of methods and settings


@dataclass(frozen=True)
class Taken:
    """Room for a call in every layer of a cache: `kind`, `slots` and `layers` as native code is told of them.

    buffers: the memory at these addresses, which lives as long as this.
    """

    kind: int
    slots: int
    layers: Array[LayerCache]
    buffers: list[Tensor]


class _Tables:
    """The layers' tables of blocks as native code reads them, and for which calls they go on to serve."""

    def __init__(self, caches: Sequence[PagedCache], layers: Iterable[LayerCache]) -> None:
        self.width = max((len(table) for cache in caches for table in cache.tables), default=0)
        self._held: list[Tensor] = []
        self._alike = all(cache.tables == caches[0].tables for cache in caches)
        self._tables = [list(table) for table in caches[0].tables] if caches and self._alike else []
        for layer, cache in zip(layers, caches, strict=True):
            if not (self._alike and self._held):
                padded = [[*table, *[0] * (self.width - len(table))] for table in cache.tables]
                self._held.append(torch.tensor(padded, dtype=torch.int32, device="cpu"))
                low, high = self._held[-1].aminmax()
                if cache.keys is None or not 0 <= int(low) <= int(high) < len(cache.keys):
                    raise Unsupported("a table names a block that is not in the pool")
            layer.table = self._held[-1].data_ptr()

    def serve(self, caches: Sequence[PagedCache], rows: Rows) -> bool:
        """Tell whether every row has the blocks that the call writes into, and no other row has them."""
        if len(self._tables) < len(rows.starts) or not all(cache.tables == self._tables for cache in caches):
            return False
        written: set[int] = set()
        for table, start, length in zip(self._tables, rows.starts, rows.lengths, strict=False):
            end = -(-(start + length) // BLOCK)
            if end > len(table):
                return False
            written.update(table[start // BLOCK : end])
        return all(cache.pool.shares[block] == 1 for cache in caches for block in written)


class NativeCaches:
    """Where the buffers of every layer of one cache lie: what native code was told, and of which buffers."""

    def __init__(self) -> None:
        self._facts: TensorFacts | None = None
        self._told: tuple[int, ...] = ()  # of which sizes of a model
        self._names: Sequence[str] = ()
        self._slots = 0
        self._layers = (LayerCache * 0)()
        self._tables = _Tables([], [])

    def take(self, described: NativeModel, cache: Cache, rows: Rows, *, whole: bool) -> Taken:
        """Make room in every layer for what a call will write. Raises Unsupported, and what `update` does.

        whole: whether the logits of all tokens are asked for, those that pad a row, too.
        """
        layers, kind = cache.layers, type(cache.layers[0])
        if kind is StaticCache:
            self._take_static(described, cast(list[StaticCache], layers), rows, whole=whole)
        elif kind is PagedCache:
            self._take_blocks(described, cast(list[PagedCache], layers), rows, whole=whole)
        else:
            self._take_groups(described, cast(list[QuantizedCache], layers), rows)
        return Taken(KINDS[kind], self._slots, self._layers, cast(list[Tensor], self._buffers(layers)))

    def moved(self, cache: Cache, taken: Taken) -> bool:
        """Tell whether the cache has other buffers than those that were taken, as another text of its pool may."""
        return not all(map(is_, self._buffers(cache.layers), taken.buffers))

    def _take_static(self, described: NativeModel, caches: list[StaticCache], rows: Rows, *, whole: bool) -> None:
        bsz, length = len(rows.starts), rows.end if whole else max(map(add, rows.starts, rows.lengths))
        if self._holds(described, caches) and caches[0].fits(bsz, length):
            return
        like = _like(described)
        rooms = [cache.room(bsz, length, like=like) for cache in caches]
        shape = (*rooms[0][0].shape[:2], *like.shape[2:])
        self._tell(described, caches, {"keys": (shape, like.dtype), "values": (shape, like.dtype)})

    def _take_groups(self, described: NativeModel, caches: list[QuantizedCache], rows: Rows) -> None:
        first, bsz = caches[0], len(rows.starts)
        if any(cache._ends != first._ends for cache in caches):
            raise Unsupported("the layers' caches were written up to different positions")
        first._refuse_what_is_gone(rows.starts)
        first.args.check_room(bsz, rows.end)
        groups = -(-rows.end // GROUP)
        if not (self._holds(described, caches) and _has_groups(first, bsz, groups)):
            like = _like(described)
            for cache in caches:
                cache._take(bsz, groups, like=like)
            assert first.key_codes is not None
            held_rows, held = first.key_codes.shape[:2]
            self._tell(described, caches, first.sizes(held_rows, held, like))
        for cache in caches:
            cache._note_ends(rows.starts, rows.lengths)

    def _take_blocks(self, described: NativeModel, caches: list[PagedCache], rows: Rows, *, whole: bool) -> None:
        if whole and any(length < rows.width for length in rows.lengths):
            raise Unsupported("the logits of tokens are asked for that a paged cache does not keep")
        if self._holds(described, caches) and self._tables.serve(caches, rows):
            return
        caches[0].args.check_room(len(rows.starts), rows.end)
        like = _like(described)
        for cache in caches:
            cache._take(rows.starts, rows.lengths, like=like)
        shape = (BLOCK, *like.shape[2:])
        self._tell(described, caches, dict.fromkeys(("keys", "values"), (shape, like.dtype)), own_length=True)
        self._tables = _Tables(caches, self._layers)
        self._slots = self._tables.width

    def _holds(self, described: NativeModel, caches: Sequence[KVCache]) -> bool:
        """Tell whether it is known where the buffers lie, for a model of these sizes."""
        known = self._facts is not None and self._told == _of(described)
        return known and cast(TensorFacts, self._facts).hold(self._buffers(caches))

    def _tell(
        self,
        described: NativeModel,
        caches: Sequence[KVCache],
        shapes: dict[str, tuple[Sequence[int], torch.dtype]],
        *,
        own_length: bool = False,
    ) -> None:
        """Note where the buffers of every layer lie, which must be of these shapes and dtypes.

        With `own_length` every layer's have a length of their own, and `shapes` are without it.
        """
        self._facts, self._names = None, list(shapes)
        self._layers = (LayerCache * len(caches))()  # a new one: an earlier call's stays as it was
        for layer, cache in zip(self._layers, caches, strict=True):
            for name, (shape, dtype) in shapes.items():
                length = cast(Tensor, cache.keys).shape[:1] if own_length else ()
                setattr(layer, name, check_tensor(getattr(cache, name), (*length, *shape), dtype))
        self._told, self._facts = _of(described), TensorFacts(cast(list[Tensor], self._buffers(caches)))
        self._slots = next(iter(shapes.values()))[0][1]

    def _buffers(self, caches: Sequence[KVCache]) -> list[Tensor | None]:
        return [vars(cache).get(name) for cache in caches for name in self._names]


def check_cache(described: NativeModel, cache: Cache, rope: RopeTable) -> None:
    """Raise Unsupported unless native code computes what the cache's own methods would, for a model of these angles."""
    sizes, first = described.sizes, cache.layers[0]
    for layer in cache.layers:
        if type(layer) not in KINDS:
            raise Unsupported(_without_step(layer))
        if type(layer) is not type(first) or layer.args.kv_cache != first.args.kv_cache:
            raise Unsupported("the layers' caches are of different kinds")
        if (layer.args.n_kv_heads, layer.args.head_dim) != (sizes.kv_heads, sizes.head_dim):
            raise Unsupported("layers, or their caches, differ in their heads")
        if layer.unrotated and layer.rope is not rope:
            raise Unsupported("a layer's cache has other angles than the model")
        if not _NAMES[type(layer)].isdisjoint(vars(layer)):
            check_attributes(layer)
    if len(cache.layers) != sizes.layer_count:
        raise Unsupported(f"the cache has {len(cache.layers)} layers, and the model {sizes.layer_count}")


def _without_step(cache: KVCache) -> str:
    """Return the refusal of a cache, named as it was asked for unless it is of another kind."""
    names = {kind: name for name, kind in KVCache.kinds.items()}
    asked = cache.args.kv_cache
    name = f"kv_cache={asked!r}" if read_kind(asked).name == names.get(type(cache)) else type(cache).__name__
    return f"{name} has no fast step; these kinds have one: {', '.join(names[kind] for kind in KINDS)}"


def steps_left(cache: Cache, starts: Sequence[int], taken: Taken) -> int:
    """Return the number of steps that can follow a step at `starts` in the allocated memory, one token a row each.

    Holds if the same rows are fed and no other code changes the cache.
    """
    kind = type(cache.layers[0])
    if kind is PagedCache:  # up to where the first row comes to the end of its block
        return min(-(start + 1) % BLOCK for start in starts)
    return taken.slots * (GROUP if issubclass(kind, QuantizedCache) else 1) - max(starts) - 1


def ends_noted(cache: Cache) -> list[list[int]]:
    """Return the lists in which the layers note how far each row was written, for who goes on without `take`."""
    return [layer._ends for layer in cache.layers if isinstance(layer, CountingCache)]


def _of(described: NativeModel) -> tuple[int, ...]:
    sizes = described.sizes
    return sizes.bfloat16, sizes.kv_heads, sizes.head_dim, sizes.layer_count


def _like(described: NativeModel) -> Tensor:
    """Return what keys of the model are like."""
    sizes = described.sizes
    return torch.empty((1, 1, sizes.kv_heads, sizes.head_dim), dtype=described.dtype, device="cpu")


def _has_groups(cache: QuantizedCache, rows: int, groups: int) -> bool:
    codes = cache.key_codes
    return codes is not None and codes.shape[0] >= rows and codes.shape[1] >= groups
