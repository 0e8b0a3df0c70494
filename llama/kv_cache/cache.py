"""All layers of a cache: the keys and values of one text, or of the rows of a batch.

A cache is a value of its own: `model.new_cache` makes it, `model(tokens, start_pos, cache=cache)` feeds it.
Knows the contract of the kinds; does not know models, files or generation.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from threading import Lock, RLock
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from llama.args import ModelArgs, Refused
from llama.kv_cache.contract import KVCache
from llama.kv_cache.names import kinds_by_layer
from llama.locked import locked
from llama.rope import RopeTable

Fed = TypeVar("Fed")
TAKEN = (
    "this cache is in the middle of another call; wait for it, or give each text a cache of its own: "
    "model.new_cache(), or cache.copy()"
)


class Source(NamedTuple):
    """Identify what computed the contents of a cache, as far as it decides their numbers.

    weights: equal for all models with the same weights.
    exact: False, or a name of what decides exact mode's bits.
    """

    weights: object
    exact: bool | str
    dtype: torch.dtype
    device: torch.device


class Cache:
    """The KVCache of every layer, in `layers`, first layer first.

    A cache serves one call at a time. A second call during the first one raises RuntimeError, in any thread. Two
    threads that take turns on one cache mix their texts, and this class cannot detect that: use one cache per text.

    kind: the name that the cache was made by.
    bound: the most positions that it stores; None if there is no limit.
    whole_prompt: whether a prompt must be fed in one call, see `KVCache`.
    source: the source of its keys and values; None before the first call.
    failed_at: the first position that a change which did not end, such as a failed call, may have written; or None.
    """

    def __init__(self, layers: Sequence[KVCache], kind: str) -> None:
        self.layers, self.kind = list(layers), kind
        bounds = [layer.bound for layer in self.layers if layer.bound is not None]
        self.bound = max(bounds) if len(bounds) == len(self.layers) else None
        self.whole_prompt = any(layer.whole_prompt for layer in self.layers)
        self.source: Source | None = None
        self.failed_at: int | None = None
        self._call = Lock()
        self._turn = RLock()  # shared by copies that share memory

    @staticmethod
    def of(args: ModelArgs, kind: str, rope: RopeTable | None = None) -> "Cache":
        """Return an empty cache of the named kind, one for all layers or one by layer. Raises ValueError.

        `llama.kv_cache.names` has the grammar; `cache_kind` must have run a FILE.py.
        """
        rope, kinds = rope or RopeTable.of(args), kinds_by_layer(kind, args.n_layers)
        args_of = {own: replace(args, kv_cache=own) for own in set(kinds)}
        return Cache([KVCache.of(args_of[own], layer, rope) for layer, own in enumerate(kinds)], kind)

    # ---- memory ------------------------------------------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """Whether no memory is allocated."""
        return not self.layers[0].held()

    @property
    def nbytes(self) -> int:
        """The bytes that are stored now. Memory that copies share counts in each copy."""
        return sum(layer.nbytes for layer in self.layers)

    def predicted_bytes(
        self, *, prompts: Sequence[int], ends: Sequence[int], reserved: tuple[int, int], itemsize: int
    ) -> int:
        """Return the sum over all layers of `KVCache.predicted_bytes`."""
        return sum(
            layer.predicted_bytes(prompts=prompts, ends=ends, reserved=reserved, itemsize=itemsize)
            for layer in self.layers
        )

    def text_bytes(self, *, prompt: int, end: int, itemsize: int) -> int:
        """Return the sum over all layers of `KVCache.text_bytes`."""
        return sum(layer.text_bytes(prompt=prompt, end=end, itemsize=itemsize) for layer in self.layers)

    def position_bytes(self, itemsize: int) -> int:
        """Return the bytes that one position of one row takes in all layers."""
        return sum(layer.position_bytes(itemsize) for layer in self.layers)

    def check_name(self) -> None:
        """Raise ValueError unless `kind`, which a file stores, names the kind of every layer."""
        for layer, kind in zip(self.layers, kinds_by_layer(self.kind, len(self.layers)), strict=True):
            if type(layer) is not KVCache.named(kind) or layer.args.kv_cache != kind:
                raise ValueError(
                    f"the session's cache is named {self.kind!r}, but layer {layer.layer} has another kind, "
                    f"{layer.user_name()}; make it by model.session(tokenizer, kv_cache=NAME), from a class that is "
                    "registered: class Mine(KVCache, kind=NAME)"
                )

    def reserve(self, rows: int, length: int) -> None:
        """Drop what is stored; kinds that preallocate allocate `rows` x `length` in the next call."""
        with self._changing():
            for layer in self.layers:
                layer.reserve(rows, length)
            self.source = None
        self.failed_at = None

    def free(self) -> None:
        """Free all memory until the next call."""
        self.reserve(0, 0)

    # ---- rows and positions ------------------------------------------------------------------------------------------

    def copy(self) -> "Cache":
        """Return an independent cache with the same contents. Some kinds share memory until one is written."""
        return self._part(lambda layer: layer.copy())

    def sibling(self, length: int = 0) -> "Cache":
        """Return an empty cache of the same kind and settings, for a text of `length` positions that will `join`.

        If the kind shares memory, the text is stored in that of this cache, and the calls of both run one at a time.
        """
        with locked(self._turn):
            made = Cache([layer.sibling() for layer in self.layers], self.kind)
        if any(layer.shares_memory for layer in self.layers):
            made._turn = self._turn
        for layer in made.layers:
            if layer.preallocates and length:
                layer.reserve(1, length)
        return made

    def row_copy(self, row: int, length: int) -> "Cache":
        """Return a cache of one row, which has the first `length` positions of a row of this one."""
        return self._part(lambda layer: layer.row_copy(row, length))

    def _part(self, part: Callable[[KVCache], KVCache]) -> "Cache":
        """Return a cache of a part of each layer. After a call that did not end, it rejects what this one rejects."""
        with locked(self._call, TAKEN), locked(self._turn):
            made = Cache([part(layer) for layer in self.layers], self.kind)
            made.source, made.failed_at = self.source, self.failed_at
        if any(layer.shares_memory for layer in self.layers):
            made._turn = self._turn
        return made

    def check_joins(self) -> None:
        """Raise ValueError if texts cannot join others in a cache of this kind."""
        for layer in self.layers:
            layer.check_joins()

    def join(self, other: "Cache", rows: int, length: int) -> None:
        """Move row 0 of `other`, a text of `length` positions, behind the first `rows` rows, and free `other`.

        Later rows are dropped. Raises RuntimeError during a call of one of the caches. Raises ValueError, before
        anything is written, if the kind cannot join rows, if the kinds, sizes, sources or pools differ, and after a
        call that did not end. If a layer has no memory for the row, both caches stay as they are, except if the kind
        allocates in `join`, as those do that drop keys.
        """
        with locked(self._call, TAKEN), locked(self._turn), locked(other._call, TAKEN):
            self._check_join(other, rows, length)
            for layer, joining in zip(self.layers, other.layers, strict=True):
                layer.prepare_join(joining, rows, length)
            with self._changing(), other._changing():
                for layer, joining in zip(self.layers, other.layers, strict=True):
                    layer.join(joining, rows, length)
                self.source = other.source
        other.free()

    def _check_join(self, other: "Cache", rows: int, length: int) -> None:
        ours, theirs = ([(type(one), one.args, one.layer) for one in each.layers] for each in (self, other))
        if ours != theirs or other.source is None:
            raise ValueError(
                f"a cache of kv_cache={other.kind!r} cannot join one of {self.kind!r}: they differ in their kinds or "
                "sizes, or no text was fed; make it by sibling(), and feed it"
            )
        other._check(other.source)
        self._check(other.source)
        for layer, joining in zip(self.layers, other.layers, strict=True):
            layer.check_join(joining, rows, length)

    def truncate(self, position: int) -> bool:
        """Return True if feeding can continue at `position` as if nothing behind it had been fed.

        Kinds that drop or round positions may return False. After a call that did not end, return True only up to
        `failed_at`, and only if all layers have `keeps_past`. If the result is False, feed again from `last_start`.
        """
        if self.failed_at is not None and not (
            position <= self.failed_at and all(layer.keeps_past for layer in self.layers)
        ):
            return False
        goes_on = all(layer.truncate(position) for layer in self.layers)
        if goes_on and position:
            self.failed_at = None
        return goes_on

    def last_start(self, position: int) -> int:
        """Return the last position, at most `position`, where `truncate` returns True; 0 if there is none."""
        return next((start for start in range(position, 0, -1) if self.truncate(start)), 0)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Move row `rows[i]` to row i; drop the rows that are not named. Raises ValueError for a row named twice."""
        if len(set(rows)) < len(rows):
            raise ValueError(f"rows={list(rows)} names a row twice; repeat_first_row copies a row")
        with self._changing():
            for layer in self.layers:
                layer.select_rows(rows)

    def repeat_first_row(self, rows: int) -> None:
        """Copy row 0 into each of `rows` rows."""
        with self._changing():
            for layer in self.layers:
                layer.repeat_first_row(rows)

    def state(self, rows: int | None = None, length: int | None = None) -> list[dict[str, Tensor]]:
        """Return each layer's `KVCache.state`."""
        return [layer.state(rows, length) for layer in self.layers]

    def restore(self, layers: Sequence[Mapping[str, Tensor]], rows: int, length: int, source: Source) -> None:
        """Replace the contents by `state(rows, length)` of a cache of the same kind and sizes. Raises ValueError."""
        with self._changing():
            for layer, state in zip(self.layers, layers, strict=True):
                layer.restore(state, rows, length)
            self.source = source
        self.failed_at = None

    # ---- calls -------------------------------------------------------------------------------------------------------

    def feed(self, source: Source, starts: Sequence[int], compute: Callable[[], Fed]) -> Fed:
        """Return `compute()`, a call of `source` that feeds the rows from `starts` on; the cache is locked meanwhile.

        If all rows start at 0, old contents do not matter. Raises RuntimeError during another call, and ValueError if
        the contents come from another source, or from a call that did not end: then a text must begin at 0.
        """
        with locked(self._call, TAKEN), locked(self._turn):
            if any(starts):
                self._check(source)
            else:
                self._begin()
            before, self.failed_at = self.failed_at, min(starts)
            try:
                result = compute()
            except Refused:
                if len({layer.args.kv_cache for layer in self.layers}) == 1:
                    self.failed_at = before  # the first layer refused, so none has written
                raise
            self.source, self.failed_at = source, None
        return result

    def _begin(self) -> None:
        """Drop what a call that did not end may have left."""
        if self.failed_at is None:
            return
        reserved = max(layer.reserved for layer in self.layers)  # `reserve` itself may have stopped between two layers
        for layer in self.layers:
            if not layer.keeps_past:
                layer.reserve(*reserved)

    def _check(self, source: Source) -> None:
        """Raise ValueError unless `source` can continue the contents."""
        if self.failed_at is not None:
            raise ValueError(
                "the last call that changed this cache did not end, so its contents are not those of one text; feed "
                "the text again from start_pos=0"
            )
        if self.source is not None and self.source != source:
            raise ValueError(_another(self.source, source))

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Let no call continue the contents if the code under `with` does not end."""
        before, self.failed_at = self.failed_at, 0
        yield
        self.failed_at = before

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_call", "_turn")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _call=Lock(), _turn=RLock())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Cache":
        """Return a copy with memory of its own, which continues with the same model, or its copy if `memo` has one."""
        shared: list[object] = [one for layer in self.layers for one in (layer.args, layer.rope)]
        shared += [] if self.source is None else [self.source.weights]
        made = object.__new__(type(self))
        made.__setstate__(deepcopy(self.__getstate__(), {id(one): memo.get(id(one), one) for one in shared}))
        return made


def _another(before: Source, now: Source) -> str:
    """Return the message for a call that continues the contents of another source."""
    if before.weights != now.weights:
        return (
            "this cache was fed by another model, whose keys and values differ; feed the text again from start_pos=0, "
            "or give each model a cache of its own"
        )
    then, here = [f"{one.dtype} on {one.device}{', exact' if one.exact else ''}" for one in (before, now)]
    return (
        f"the contents of this cache were computed in another way ({then}) than the model computes now ({here}); feed "
        "the text again from start_pos=0"
    )
