"""The caches that native code reads and writes where they lie: what it is told of each kind's buffers, and when anew.

What a kind's `update` does before it writes is done here, by the kind's own methods: what it refuses, and the room that
it takes. Knows the kinds that are served; the native forward knows addresses and sizes only.
"""

from collections.abc import Iterable, Sequence
from ctypes import Array
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from llama.fast.fingerprint import TensorFacts
from llama.fast.native_description import NativeModel, check_tensor
from llama.fast.native_library import LayerCache
from llama.fast.supported import Unsupported
from llama.kv_cache import KVCache, PagedCache, StaticCache
from llama.kv_cache.counting import CountingCache
from llama.kv_cache.paged import BLOCK
from llama.kv_cache.quantized import GROUP, Int4Cache, Int8Cache, QuantizedCache

# What `native/forward.cpp` calls them.
KINDS: dict[type[KVCache] | None, int] = {None: 0, StaticCache: 1, Int8Cache: 2, Int4Cache: 3, PagedCache: 4}


@dataclass(frozen=True)
class Call:
    """The rows of a call: their starts, how many tokens of each are real, and how many of those the cache keeps.

    places: which row of the cache each is. width: tokens of a row, with those that pad it. all: whether the logits of
    all tokens are asked for. look: whether other code may have run since the call before.
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    kept: Sequence[int]
    places: Sequence[int]
    width: int
    all: bool
    look: bool

    @property
    def rows(self) -> int:
        return len(self.starts)

    def only(self, rows: Sequence[int]) -> "Call":
        """Return the call with these rows alone."""
        starts, lengths, kept, places = (
            [part[row] for row in rows] for part in (self.starts, self.lengths, self.kept, self.places)
        )
        return replace(self, starts=starts, lengths=lengths, kept=kept, places=places)


@dataclass(frozen=True)
class Taken:
    """Room in every layer's cache: `kind`, `slots` and `layers` as native code is told of them.

    live: the rows of which the cache holds something; the others have ended, and nothing of theirs can be read.
    """

    kind: int
    slots: int
    layers: Array[LayerCache]
    live: Sequence[int]


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
                if not 0 <= int(low) <= int(high) < cache.get_buffer("keys").shape[0]:
                    raise Unsupported("a table names a block that is not in the pool")
            layer.table = self._held[-1].data_ptr()

    def serve(self, caches: Sequence[PagedCache], call: Call) -> bool:
        """Tell whether every row has the blocks that the call writes into, and no other row has them."""
        if not self._tables or len(self._tables) < call.rows:
            return False
        if call.look and not all(cache.tables == self._tables for cache in caches):
            return False
        written: set[int] = set()
        for table, start, kept in zip(self._tables, call.starts, call.kept, strict=False):
            end = -(-(start + kept) // BLOCK) if kept else 0
            if end > len(table) or (table and not kept):  # or the row has just ended, and gives its blocks back
                return False
            written.update(table[start // BLOCK : end])
        looked = caches if call.look else caches[:1]
        return all(cache.pool.shares[block] == 1 for cache in looked for block in written)


class NativeCaches:
    """Where the buffers of every layer's cache lie, of which model's caches that was told, and of which buffers."""

    def __init__(self) -> None:
        self._told: NativeModel | None = None
        self._facts: TensorFacts | None = None
        self._slots = 0
        self._layers = (LayerCache * 0)()
        self._tables = _Tables([], [])

    def take(self, described: NativeModel, call: Call) -> Taken:
        """Make room in every layer's cache for what a call will write. Raises Unsupported, and what `update` does."""
        kind = type(described.caches[0])
        if kind is StaticCache:
            slots = self._take_static(described, cast(list[StaticCache], described.caches), call)
        elif kind is PagedCache:
            slots = self._take_blocks(described, cast(list[PagedCache], described.caches), call)
        else:
            slots = self._take_groups(described, cast(list[QuantizedCache], described.caches), call)
        gone = kind is PagedCache and not all(call.kept)
        live = [row for row, kept in enumerate(call.kept) if kept] if gone else range(call.rows)
        return Taken(KINDS[kind], slots, self._layers, live)

    def _take_static(self, described: NativeModel, caches: list[StaticCache], call: Call) -> int:
        length = max(map(sum, zip(call.starts, call.lengths, strict=True)))
        if self._holds(described, look=call.look) and caches[0].fits(call.rows, length):
            return self._slots
        like = _like(described)
        rooms = [cache.room(call.rows, length, like=like) for cache in caches]
        shape = (*rooms[0][0].shape[:2], *like.shape[2:])
        self._tell(described, {"keys": (shape, like.dtype), "values": (shape, like.dtype)})
        return self._slots

    def _take_groups(self, described: NativeModel, caches: list[QuantizedCache], call: Call) -> int:
        first = caches[0]
        ends = first._ends
        if any(cache._ends != ends for cache in caches):
            raise Unsupported("the layers' caches were written up to different positions")
        first._refuse_what_is_gone(call.starts, call.kept)
        length = max(call.starts) + call.width
        first.args.check_room(call.rows, length)
        groups = -(-length // GROUP)
        if not (self._holds(described, look=call.look) and _has_groups(first, call.rows, groups)):
            like = _like(described)
            for cache in caches:
                cache._take(call.rows, groups, like=like)
            rows, held = first.get_buffer("key_codes").shape[:2]
            self._tell(described, first.sizes(rows, held, like))
        for cache in caches:
            cache._note_ends(call.starts, call.kept)
        return self._slots

    def _take_blocks(self, described: NativeModel, caches: list[PagedCache], call: Call) -> int:
        if call.all and any(kept < length for kept, length in zip(call.kept, call.lengths, strict=True)):
            raise Unsupported("the logits of tokens are asked for that a paged cache does not keep")
        if not any(call.kept):
            raise Unsupported("every row has ended")
        if self._holds(described, look=call.look) and self._tables.serve(caches, call):
            return self._slots
        caches[0].args.check_room(call.rows, max(call.starts) + call.width)
        like = _like(described)
        for cache in caches:
            cache._take(call.starts, call.kept, like=like)
        shape = (BLOCK, *like.shape[2:])
        self._tell(described, dict.fromkeys(("keys", "values"), (shape, like.dtype)), own_length=True)
        self._tables = _Tables(caches, self._layers)
        self._slots = self._tables.width
        return self._slots

    def _holds(self, described: NativeModel, *, look: bool) -> bool:
        """Tell whether it is known where the caches' buffers lie; without a `look`, they still lie there."""
        if self._told is not described or self._facts is None:
            return False
        return not look or self._facts.hold(_buffers(described))

    def _tell(
        self,
        described: NativeModel,
        shapes: dict[str, tuple[Sequence[int], torch.dtype]],
        *,
        own_length: bool = False,
    ) -> None:
        """Note where the buffers of every layer's cache lie, which must be of these shapes and dtypes.

        With `own_length` every layer's have a length of their own, and `shapes` are without it.
        """
        self._told = self._facts = None
        self._layers = (LayerCache * len(described.caches))()  # a new one: calls under way may read the one before
        for layer, cache in zip(self._layers, described.caches, strict=True):
            for name, (shape, dtype) in shapes.items():
                buffer = cache.get_buffer(name)
                length = cache.get_buffer("keys").shape[:1] if own_length else ()
                setattr(layer, name, check_tensor(buffer, (*length, *shape), dtype))
        self._told, self._facts = described, TensorFacts(cast(list[Tensor], _buffers(described)))
        self._slots = next(iter(shapes.values()))[0][1]


def steps_left(caches: Sequence[KVCache], call: Call, taken: Taken) -> int:
    """Return how many steps more, each a token on, may follow a step without asking for room again.

    As long as the same rows are live, and nobody else changes the caches.
    """
    if isinstance(caches[0], PagedCache):  # up to where the first row comes to the end of its block
        return min(-(start + 1) % BLOCK for start, kept in zip(call.starts, call.kept, strict=True) if kept)
    return taken.slots * (GROUP if isinstance(caches[0], QuantizedCache) else 1) - max(call.starts) - 1


def ends_noted(caches: Sequence[KVCache]) -> list[list[int]]:
    """Return the lists in which caches note how far each row was written, for who goes on without `take`."""
    return [cache._ends for cache in caches if isinstance(cache, CountingCache)]


def _buffers(described: NativeModel) -> list[Tensor | None]:
    return [buffer for cache in described.caches for buffer in cache._buffers.values()]


def _like(described: NativeModel) -> Tensor:
    """Return what keys of the model are like."""
    sizes = described.sizes
    return torch.empty((1, 1, sizes.kv_heads, sizes.head_dim), dtype=described.dtype, device="cpu")


def _has_groups(cache: QuantizedCache, rows: int, groups: int) -> bool:
    codes = cache._buffers["key_codes"]
    return codes is not None and codes.shape[0] >= rows and codes.shape[1] >= groups
