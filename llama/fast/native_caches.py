"""The caches that native code reads and writes where they lie: what it is told of each kind's buffers, and when anew.

What a kind's `update` does before it writes is done here, by the kind's own methods: what it refuses, and the room that
it takes. Knows the kinds that are served; the native forward knows addresses and sizes only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from llama.fast.fingerprint import TensorFacts
from llama.fast.native_description import NativeModel, check_tensor
from llama.fast.supported import Unsupported
from llama.kv_cache import KVCache, StaticCache
from llama.kv_cache.quantized import GROUP, SCALES, Int4Cache, Int8Cache, QuantizedCache, value_parts
from llama.limits import check_room

# What `native/forward.cpp` calls them.
KINDS: dict[type[KVCache] | None, int] = {None: 0, StaticCache: 1, Int8Cache: 2, Int4Cache: 3}


@dataclass(frozen=True)
class Call:
    """The rows of a call: their starts, how many tokens of each are real, and how many of those the cache keeps.

    width: tokens of a row, with those that pad it. look: whether other code may have run since the call before.
    """

    starts: Sequence[int]
    lengths: Sequence[int]
    kept: Sequence[int]
    width: int
    look: bool

    @property
    def rows(self) -> int:
        return len(self.starts)


@dataclass(frozen=True)
class Taken:
    """Room in every layer's cache: `kind` and `slots` as native code is told of them."""

    kind: int
    slots: int


class NativeCaches:
    """Of which model the layers were told the addresses of their caches' buffers, and of which buffers."""

    def __init__(self) -> None:
        self._told: NativeModel | None = None
        self._facts: TensorFacts | None = None
        self._slots = 0

    def take(self, described: NativeModel, call: Call) -> Taken:
        """Make room in every layer's cache for what a call will write. Raises Unsupported, and what `update` does."""
        kind = type(described.caches[0])
        if kind is StaticCache:
            slots = self._take_static(described, cast(list[StaticCache], described.caches), call)
        else:
            slots = self._take_groups(described, cast(list[QuantizedCache], described.caches), call)
        return Taken(KINDS[kind], slots)

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
        first._refuse_what_is_gone([start if kept else 0 for start, kept in zip(call.starts, call.kept, strict=True)])
        length = max(call.starts) + call.width
        check_room(call.rows, length, first.args)
        groups = -(-length // GROUP)
        if not (self._holds(described, look=call.look) and _has_groups(first, call.rows, groups)):
            like = _like(described)
            for cache in caches:
                cache._take(call.rows, groups, like=like)
            self._tell(described, _shapes_of_groups(first, like))
        written = [start + kept for start, kept in zip(call.starts, call.kept, strict=True)]
        for cache in caches:
            cache._ends[: call.rows] = written
        return self._slots

    def _holds(self, described: NativeModel, *, look: bool) -> bool:
        """Tell whether the layers know where their caches' buffers lie; without a `look`, those are still there."""
        if self._told is not described or self._facts is None:
            return False
        return not look or self._facts.hold(_buffers(described))

    def _tell(self, described: NativeModel, shapes: dict[str, tuple[Sequence[int], torch.dtype]]) -> None:
        """Tell every layer where the buffers of its cache lie, which must be of these shapes and dtypes."""
        self._told = self._facts = None
        for layer, cache in zip(described.layers, described.caches, strict=True):
            for name, (shape, dtype) in shapes.items():
                setattr(layer, name, check_tensor(cache.get_buffer(name), shape, dtype))
        self._told, self._facts = described, TensorFacts(cast(list[Tensor], _buffers(described)))
        self._slots = next(iter(shapes.values()))[0][1]


def _buffers(described: NativeModel) -> list[Tensor | None]:
    return [buffer for cache in described.caches for buffer in cache._buffers.values()]


def _like(described: NativeModel) -> Tensor:
    """Return what keys of the model are like."""
    sizes = described.sizes
    return torch.empty((1, 1, sizes.kv_heads, sizes.head_dim), dtype=described.dtype, device="cpu")


def _has_groups(cache: QuantizedCache, rows: int, groups: int) -> bool:
    codes = cache._buffers["key_codes"]
    return codes is not None and codes.shape[0] >= rows and codes.shape[1] >= groups


def _shapes_of_groups(cache: QuantizedCache, like: Tensor) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Return what the class says of its buffers, for as many rows and groups as there are, (rows, groups, ...)."""
    rows, groups = cache.get_buffer("key_codes").shape[:2]
    heads, width = like.shape[2:]
    codes = (rows, groups, heads, GROUP, width * cache.bits // 8)
    shared = {"key": (rows, groups, heads, 1, width), "value": (rows, groups, heads, GROUP, value_parts(width))}
    shapes: dict[str, tuple[Sequence[int], torch.dtype]] = {}
    for side, scales in shared.items():
        shapes |= {f"{side}_codes": (codes, torch.uint8)}
        shapes |= {f"{side}_{part}": (scales, SCALES) for part in ("scale", "zero")}
        shapes |= {f"{side}s": ((rows, GROUP, heads, width), like.dtype)}
    return shapes
