"""The contract of a kind of cache: the keys and values of past tokens, for one attention layer of one text or batch.

Knows tensors and positions. Does not know masks, sampling, or how many tokens were generated: the position is an
argument of every call, so there is nothing to reset between prompts.
Shapes: xk and xv are (bsz, seqlen, n_kv_heads, head_dim).

To add a kind, subclass KVCache in a file of your own and choose it by name (docs/kv_cache_kinds.md):

    class Mine(KVCache, kind="mine"):
        def update(self, rows, xk, xv): ...

    model = Transformer(ModelArgs(..., kv_cache="mine"))        # or "mine.py:mine", or "mine:PARAMS"
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from llama.args import ModelArgs, Refused
from llama.kv_cache.attended import Attended
from llama.kv_cache.names import read_kind
from llama.rope import RopeTable, rotate
from llama.rows import Rows


class NativeLayout(NamedTuple):
    """What native code reads of one layer's cache; see `KVCache.native_layout`.

    buffers: the shape and dtype that each tensor must have, by the name of its attribute.
    slots: the size of a row in `buffers`: positions, groups, or blocks in its table.
    table: the blocks of each row, of a kind with a pool of blocks.
    bases: the position of each row's first token in `keys`, of a kind that compresses prompts.
    runs: where the kept keys of each row and KV head begin, and the end of the last ones, of such a kind.
    groups: the fields of `Groups` in llama/fast/native_structs.py, of a quantised kind.
    pages: how many pages a step reads, of a kind that chooses them.
    """

    buffers: Mapping[str, tuple[Sequence[int], torch.dtype]]
    slots: int
    table: Sequence[Sequence[int]] = ()
    bases: Sequence[int] = ()
    runs: Sequence[int] = ()
    groups: tuple[int, ...] = ()
    pages: int = 0


class KVCache:
    """The contract: store new keys and values at their positions, and return all that attention may read.

    You write       update
    You may write   configure, visible, key_positions, observe; truncate, predicted_bytes; the class attributes below
    Others call     reserve, free, copy, sibling, check_joins, check_join, join, row_copy, select_rows,
                    repeat_first_row, state, restore; native code: prepare, record
    Given           check, prepare, rotated; args, layer, rope, reserved

    Class attributes describe a kind:
        lossless: `update` returns exactly the keys and values that were stored, and drops none.
        unrotated: `update` gets keys before RoPE, and rotates the keys that it returns.
        preallocates: the first update allocates memory for all that `reserve` was called with.
        shares_memory: copies may share memory with the original, so their calls run one at a time.
        bound: the most positions that it stores; None if there is no limit.
        whole_prompt: a prompt must be fed in one call, because its cut into calls changes what is stored, or because
            more than `text_bytes` would be stored before its end.
        keeps_past: an `update` that stopped anywhere has left the positions before its starts as they were.
        form, default: what PARAMS looks like, and its value if it is left out; for `llama-kv kinds`.
        native: the number of what this class stores in llama/fast/native/call.h, not for subclasses; 0: it has none.

    `llama.testing.check_cache_kind` checks a kind against all of this; a new claim about every kind is added there.
    Every tensor attribute without a leading underscore is stored memory: it is counted, freed, copied and saved.
    `layer` is the layer's number, out of `args.n_layers`. `rope` has the model's angles, for kinds that rotate keys.
    `reserved` is the (rows, length) of the last `reserve`; (0, 0) after `free`. A text that joins adds its length.
    """

    kinds: ClassVar[dict[str, type["KVCache"]]] = {}
    lossless: ClassVar[bool] = True
    unrotated: ClassVar[bool] = False
    preallocates: ClassVar[bool] = False
    shares_memory: ClassVar[bool] = False
    observes: ClassVar[bool] = False  # set for a class that defines or inherits `observe`
    has_rope_starts: ClassVar[bool] = False  # set for a class that defines or inherits `rope_starts`
    whole_prompt: ClassVar[bool] = False
    keeps_past: ClassVar[bool] = False
    form: ClassVar[str] = ""
    default: ClassVar[str] = ""
    native: ClassVar[int] = 0
    bound: int | None = None
    keys: Tensor | None
    values: Tensor | None

    def __init_subclass__(cls, kind: str | None = None) -> None:
        super().__init_subclass__()
        cls.observes = cls.observe is not KVCache.observe
        cls.has_rope_starts = cls.rope_starts is not KVCache.rope_starts
        if kind is None:
            return
        taken = KVCache.kinds.get(kind, cls)
        if taken.__qualname__ != cls.__qualname__:  # a notebook that runs a class again replaces the class
            raise ValueError(f"kind={kind!r} is taken by {taken.__qualname__}; choose another name")
        KVCache.kinds[kind] = cls

    def __init__(self, args: ModelArgs, layer: int = 0, rope: RopeTable | None = None) -> None:
        self.args, self.layer = args, layer
        self.rope = RopeTable.of(args) if rope is None else rope
        self.reserved = (0, 0)
        self.keys = self.values = None
        self.configure(read_kind(args.kv_cache).params)

    @staticmethod
    def of(args: ModelArgs, layer: int = 0, rope: RopeTable | None = None) -> "KVCache":
        """Return an empty cache for one layer, of the kind `args.kv_cache`, NAME or NAME:PARAMS. Raises ValueError."""
        return KVCache.named(args.kv_cache)(args, layer, rope)

    @staticmethod
    def named(text: str) -> type["KVCache"]:
        """Return the class of the kind NAME or NAME:PARAMS. Raises ValueError for an unknown NAME."""
        name = read_kind(text).name
        if name not in KVCache.kinds:
            known = ", ".join(sorted(KVCache.kinds))
            raise ValueError(f"kv_cache={text!r} is not a known kind of cache; known are: {known}")
        return KVCache.kinds[name]

    @classmethod
    def user_name(cls) -> str:
        """Return the name by which users choose this kind, or the name of the class if it is not registered."""
        return next((name for name, kind in KVCache.kinds.items() if kind is cls), cls.__name__)

    def configure(self, params: str) -> None:
        """Read the PARAMS of NAME:PARAMS; "" if there are none. Raises ValueError."""
        if params:
            raise ValueError(f"kv_cache={self.args.kv_cache!r}: this kind takes no parameters; leave out :{params}")

    # ---- what attention calls ----------------------------------------------------------------------------------------

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        """Store xk and xv, the first of each row at the row's start, and return all keys and values that are stored.

        The result is (bsz, kv_len, n_kv_heads, head_dim), up to the end of the furthest row. Past its own end a row is
        undefined and must not be read. Raises Refused, a ValueError, before anything is written, if `check` does.
        """
        raise NotImplementedError

    def key_positions(self) -> Tensor | None:
        """Return the positions of the keys of the last update; None for 0 .. kv_len - 1.

        The shape is (kv_len,), (bsz, kv_len) or, if heads have different keys, (bsz, n_kv_heads, kv_len).

        If you return positions, all keys and values must be finite, even those that no query may see: they are masked,
        and 0 x NaN is NaN.
        """
        return None

    def visible(self, rows: Rows, xq: Tensor) -> Tensor | None:
        """Return which keys of the last update each query may see, as bool.

        The shape is (seqlen, kv_len), (bsz, seqlen, kv_len) or, if heads see different keys, (bsz, n_kv_heads or
        n_heads, seqlen, kv_len). xq is (bsz, seqlen, n_heads, head_dim); query i of a row has the position start + i.
        None means every key at or before the query's position, with keys at 0 .. kv_len - 1. With a result that is not
        None, all keys and values that `update` returned must be finite.
        """
        positions = self.key_positions()
        if positions is None:
            return None
        return positions[..., None, :] <= query_positions(rows, positions.device)

    def rope_starts(self, rows: Rows) -> tuple[int, ...]:
        """Return the position by which RoPE rotates each row's first query; the row's other queries follow it.

        By default the rows' starts. An `unrotated` kind that renumbers its keys returns its own numbers.
        """
        return rows.starts

    def observe(self, attended: Attended) -> None:
        """Read the attention of this call, and drop keys if the kind does so.

        Called right after `visible`, and only if the kind defines it. Attention reads the tensors that `update`
        returned afterwards, so do not write into them. Padding must not count.
        """

    # ---- memory ------------------------------------------------------------------------------------------------------

    def position_bytes(self, itemsize: int) -> int:
        """Return the bytes that one position of one row takes in this layer. `itemsize` is the model's, per number."""
        return 2 * self.args.n_kv_heads * self.args.head_dim * itemsize

    def predicted_bytes(
        self, *, prompts: Sequence[int], ends: Sequence[int], reserved: tuple[int, int], itemsize: int
    ) -> int:
        """Return the bytes that are stored after the rows were fed their prompts and then token by token.

        prompts: the tokens of each row's prompt; all prompts are fed in one call. ends: the tokens of each row when it
        leaves the batch. reserved: the arguments of `reserve`, (0, 0) if it was not called. itemsize: of the model's
        numbers. The default is the length of the longest row, for each row.
        """
        return len(prompts) * max(ends) * self.position_bytes(itemsize)

    def text_bytes(self, *, prompt: int, end: int, itemsize: int) -> int:
        """Return the most bytes that a text with this prompt and end adds to a cache of several texts."""
        return self.predicted_bytes(prompts=[prompt], ends=[end], reserved=(1, end), itemsize=itemsize)

    def reserve(self, rows: int, length: int) -> None:
        """Drop what is stored; a kind that `preallocates` allocates `rows` x `length` in its next update."""
        self.free()
        self.reserved = (rows, length)

    def free(self) -> None:
        """Free all memory until the next update."""
        vars(self).update(dict.fromkeys(self.held()), reserved=(0, 0))

    def held(self) -> dict[str, Tensor]:
        """Return the stored tensors by the names of their attributes."""
        return {name: held for name, held in vars(self).items() if isinstance(held, Tensor) and name[0] != "_"}

    @property
    def nbytes(self) -> int:
        """The bytes that are stored now."""
        return sum(held.nbytes for held in self.held().values())

    @property
    def slots(self) -> int | None:
        """The positions of a row for which memory is allocated; None if that is not one number for all rows."""
        return None if self.keys is None or self.key_positions() is not None else self.keys.shape[1]

    # ---- what `update` does before and after it writes; native code calls it, too ------------------------------------

    def prepare(self, rows: Rows, like: Tensor) -> None:
        """Allocate what a call writes, for keys in the dtype and on the device of `like`.

        `update` calls this before it writes; a second call for the same rows changes nothing. Raises Refused for rows
        that cannot be stored.
        """
        self.args.check_room(len(rows.starts), rows.end)

    def record(self, rows: Rows) -> None:
        """Note that the tokens of a call are stored; for kinds that count them."""

    def native_layout(self, like: Tensor) -> NativeLayout | None:
        """Return what native code reads after `prepare`; None if it cannot compute a call in this state."""
        return None

    @property
    def ends(self) -> list[int] | None:
        """The position behind each row's last token, a list that native steps update; None if the kind counts none."""
        return None

    def steps_left(self, starts: Sequence[int]) -> int:
        """Return how many steps, of one token a row, can follow a step at `starts` in the memory that is allocated."""
        return 0 if self.slots is None else self.slots - max(starts) - 1

    # ---- rows and positions ------------------------------------------------------------------------------------------

    @torch.inference_mode()  # a kind may store tensors that were made in it, which can be written nowhere else
    def repeat_first_row(self, rows: int) -> None:
        """Copy row 0 into each of `rows` rows."""
        made = {}
        for name, held in self.held().items():
            if held.shape[0] < rows:
                made[name] = self._allocate((rows, *held.shape[1:]), held.dtype, held.device)
                made[name][:] = held[:1]
            else:
                held[1:rows] = held[:1]
        vars(self).update(made)

    def select_rows(self, rows: Sequence[int]) -> None:
        """Move row `rows[i]` to row i; drop the rows that are not named. No row is named twice; any order is allowed.

        A row that stays where it is takes no time, so put the last rows into the places of those that leave:
        [0, 15, 2, 3, ...].
        """
        self._move(rows, [None] * len(rows))

    @torch.inference_mode()  # as above
    def _move(self, rows: Sequence[int], sizes: Sequence[int | None]) -> None:
        """Move rows, of each so many positions; None: all that memory is allocated for."""
        moves = [(place, row, size) for place, (row, size) in enumerate(zip(rows, sizes, strict=True)) if place != row]
        early = {
            row: {name: part.clone() for name, part in self._written(row, size).items()}
            for place, row, size in moves
            if row < place  # overwritten before it is read
        }
        for place, row, size in moves:
            moved = early[row] if row < place else self._written(row, size)
            for name, part in self._written(place, size).items():
                part.copy_(moved[name])

    def _written(self, row: int, length: int | None) -> dict[str, Tensor]:
        """Return the part of each stored tensor that a row of `length` positions uses; None: all of the row."""
        parts = {name: held[row] for name, held in self.held().items()}
        if length is None or self.written("keys", length) is None:
            return parts
        return {name: part[: self.written(name, length)] for name, part in parts.items()}

    def sibling(self) -> Self:
        """Return an empty cache of the same kind and settings, for a text that may `join` this one."""
        return type(self)(self.args, self.layer, self.rope)

    def check_joins(self) -> None:
        """Raise ValueError if texts cannot join others in a cache of this kind."""
        if type(self).join is KVCache.join and self.written("keys", 1) is None:
            raise ValueError(
                f"kv_cache={self.args.kv_cache!r}: a text cannot join others in a cache of this kind, which does not "
                "state what a text has written; override `written` or `join`, or choose another kind, such as static "
                "or paged"
            )

    def check_join(self, other: Self, rows: int, length: int) -> None:
        """Raise ValueError unless row 0 of `other`, a text of `length` positions, can become row `rows` of this one.

        `other` has the kind, layer and sizes of this one.
        """
        self.check_joins()
        name = f"kv_cache={self.args.kv_cache!r}"
        if not other._has_row(0, length) or (rows and not self._has_row(rows - 1, 0)):
            raise ValueError(
                f"{name}: a text of {length} positions cannot become row {rows}: it has other positions, or there are "
                "fewer rows; join behind the last row, with the positions that were fed"
            )
        self.args.check_room(rows + 1, length if self.bound is None else 0)

    def _has_row(self, row: int, length: int) -> bool:
        """Return True if `row` can have `length` positions, by its memory, or by its end if the kind counts it."""
        if self.ends is not None:
            return row < len(self.ends) and length in (0, self.ends[row])
        return self.keys is not None and row < len(self.keys) and length <= self.keys.shape[1]

    def prepare_join(self, other: Self, rows: int, length: int) -> None:
        """Allocate what `join` writes, in all layers before the first one joins. Positions of other rows stay.

        Rows are as long as the longest that was reserved, so that no step enlarges them. A kind that only overrides
        `join` allocates there.
        """
        if self.written("keys", 1) is None:
            return
        assert other.like is not None
        self.reserved = self.reserved[0], max(self.reserved[1], other.reserved[1])
        length = max(length, min(self.reserved[1], self.args.max_seq_len))
        self.prepare(Rows((0,) * (rows + 1), length, (length,) * (rows + 1)), other.like)

    @torch.inference_mode()  # as above
    def join(self, other: Self, rows: int, length: int) -> None:
        """Move row 0 of `other`, a text of `length` positions, to row `rows`; drop the rows from there on.

        Called after `check_join` and `prepare_join`; then `other` is freed.
        """
        moved = other._written(0, length)
        for name, part in self._written(rows, length).items():
            part.copy_(moved[name])

    def row_copy(self, row: int, length: int) -> Self:
        """Return a cache of one row: the first `length` positions of a row. Of lossless kinds that can join."""
        made = self.sibling()
        made.restore({name: part[None].clone() for name, part in self._written(row, length).items()}, 1, length)
        return made

    def truncate(self, position: int) -> bool:
        """Return True if feeding can continue at `position` as if nothing behind it had been fed."""
        return True

    def copy(self) -> Self:
        """Return a cache with the same contents, in memory of its own, or in shared memory until one is written."""
        return deepcopy(self, {id(shared): shared for shared in (self.args, self.rope)})

    def state(self, rows: int | None = None, length: int | None = None) -> dict[str, Tensor]:
        """Return all contents as tensors by name, for `restore`; the tensors may be the cache's own.

        `rows` and `length` limit the result to so many rows of a text of `length` positions, so that unused capacity is
        left out. A kind with contents besides its tensors adds them as tensors, for example a count per row as int64.
        """
        state = {name: held[:rows] for name, held in self.held().items()}
        if length is None or self.written("keys", length) is None:
            return state
        return {name: tensor[:, : self.written(name, length)] for name, tensor in state.items()}

    def restore(self, state: Mapping[str, Tensor], rows: int, length: int) -> None:
        """Replace the contents by `state(rows, length)` of a cache of the same kind and sizes.

        The cache owns the tensors afterwards. Raises ValueError if no such cache can have this state; then call `free`.
        """
        self.free()
        names = {name for name, value in vars(self).items() if value is None and name[0] != "_"}
        if self.written("keys", length) is not None:
            self._check_state(state, rows, length)
        elif state.keys() - names:
            raise ValueError(f"the state of a cache has {sorted(state)}, but this kind stores {sorted(names)}")
        vars(self).update(state)

    def written(self, name: str, length: int) -> int | None:
        """Return how many entries of a tensor's second dimension a text of `length` positions uses; None if all.

        `state` saves so many, and `restore` requires so many.
        """
        return None

    def sizes(self, rows: int, length: int, like: Tensor) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        """Return every buffer's shape and dtype by name, for keys in the dtype of `like`."""
        shape = (rows, length, self.args.n_kv_heads, self.args.head_dim)
        return dict.fromkeys(("keys", "values"), (shape, like.dtype))

    # ---- for kinds to call -------------------------------------------------------------------------------------------

    @property
    def like(self) -> Tensor | None:
        """A tensor of the dtype and on the device that new keys and values must have; None if nothing is stored."""
        return self.keys

    def check(self, rows: Rows, xk: Tensor, xv: Tensor) -> None:
        """Raise Refused for keys and values that must not be written.

        The limits of rows and positions are checked where memory is allocated, by `args.check_room`.
        """
        refused = ValueError if self.layer else Refused  # the layers before have written
        wanted = (len(rows.starts), rows.width, self.args.n_kv_heads, self.args.head_dim)
        if xk.shape != wanted or xv.shape != wanted:
            raise refused(
                f"the KV cache takes keys and values of shape {wanted}, not {tuple(xk.shape)} and {tuple(xv.shape)}"
            )
        held = xk if self.like is None else self.like
        for new in (xk, xv):
            if new.dtype != held.dtype or new.device != held.device:
                raise refused(
                    f"the KV cache holds {held.dtype} on {held.device}, so it cannot take {new.dtype} on "
                    f"{new.device}; move the model as a whole, or free the cache first"
                )
        if torch.is_grad_enabled() and (xk.requires_grad or xv.requires_grad):
            raise refused(
                "gradients cannot flow through the KV cache: set kv_caching=False to train, "
                "or run the model under torch.inference_mode()"
            )

    def rotated(self, keys: Tensor, places: Tensor, furthest: int) -> Tensor:
        """Return keys, (bsz, kv_len, n_kv_heads, head_dim), rotated by RoPE at the positions `places`, (..., kv_len).

        For kinds that are `unrotated`. No place may exceed `furthest`.
        """
        cos, sin = self.rope.up_to(furthest + 1, keys.device)
        if keys.dtype not in (torch.float32, torch.float64):
            return rotate(keys, (cos[places], sin[places]))
        turns = torch.complex(cos[: furthest + 1, :, ::2], sin[: furthest + 1, :, 1::2])  # takes a sixth of the time
        pairs = torch.view_as_complex(keys.view(*keys.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[places]).flatten(-2).type_as(keys)

    def _check_state(self, state: Mapping[str, Tensor], rows: int, length: int) -> None:
        """Raise ValueError unless a state has exactly the buffers of `sizes`, as far as they are `written`."""
        dtype = state["keys"].dtype if "keys" in state else None
        like = torch.empty((1, 1, self.args.n_kv_heads, self.args.head_dim), dtype=dtype, device="meta")
        sizes = self.sizes(rows, length, like).items()
        wanted = {name: ((rows, self.written(name, length), *shape[2:]), dtype) for name, (shape, dtype) in sizes}
        found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
        for name in sorted(found.keys() | wanted.keys()):
            if found.get(name) != wanted.get(name):
                has, should = found.get(name, "absent"), wanted.get(name, "absent")
                raise ValueError(f"{name} of a cache should be {should}, but is {has}")

    def _grow(self, rows: int, size: int, like: Tensor, *, most: int, reserved: int, of: str = "keys") -> None:
        """Allocate buffers in which the tensor `of` is at least `rows` x `size`, and the first time `reserved`.

        A size that grows beyond `reserved` doubles, up to `most`: otherwise every step would copy the text.
        """
        stored = getattr(self, of)
        stored_rows, stored_size = (0, 0) if stored is None else stored.shape[:2]
        if stored_rows >= rows and stored_size >= size:
            return
        if 0 < stored_size < size > reserved:
            size = max(size, min(2 * stored_size, most))
        sizes = self.sizes(max(rows, stored_rows, self.reserved[0]), max(size, stored_size, reserved), like)
        self._enlarge(sizes, like.device)

    def _enlarge(self, sizes: dict[str, tuple[Sequence[int], torch.dtype]], device: torch.device) -> None:
        """Move the named buffers into larger ones of these shapes and dtypes, all at once. An error moves none."""
        made = {name: self._allocate(shape, dtype, device) for name, (shape, dtype) in sizes.items()}
        for name, new in made.items():
            old = getattr(self, name)
            if old is not None:
                new[: old.shape[0], : old.shape[1]] = old
        vars(self).update(made)

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.inference_mode(False):  # or the buffer could not be written outside inference mode
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def _write(self, rows: Rows, xk: Tensor, xv: Tensor) -> None:
        """Copy xk and xv into the buffers, which must be large enough."""
        assert self.keys is not None
        assert self.values is not None
        bsz = len(rows.starts)
        if rows.start is not None:
            self.keys[:bsz, rows.start : rows.end] = xk
            self.values[:bsz, rows.start : rows.end] = xv
            return
        each = torch.arange(bsz, device=xk.device)[:, None]
        starts = torch.tensor(rows.starts, device="cpu").to(xk.device, non_blocking=True)
        positions = starts[:, None] + torch.arange(rows.width, device=xk.device)
        self.keys[each, positions] = xk
        self.values[each, positions] = xv


def query_positions(rows: Rows, device: torch.device) -> Tensor:
    """Return the positions of the queries of a call, (seqlen, 1), or (bsz, seqlen, 1) if the rows' starts differ."""
    starts = torch.tensor(rows.starts if rows.start is None else rows.start, device="cpu").to(device, non_blocking=True)
    return starts[..., None, None] + torch.arange(rows.width, device=device)[:, None]


def read_by_last(cache: KVCache, rows: Rows, xq: Tensor, kv_len: int, row: int = 0) -> tuple[Tensor, Tensor]:
    """Return which of the kv_len keys of the last update a row's last token reads, and their positions.

    Both are (n_kv_heads, kv_len), bool and int64. Of query heads that see different keys the first one counts.
    """
    heads, visible, places = cache.args.n_kv_heads, cache.visible(rows, xq), cache.key_positions()
    places = torch.arange(kv_len, device=xq.device) if places is None else places
    places = (places if places.ndim == 1 else places[row]).expand(heads, kv_len).long()
    if visible is None:
        return places < rows.starts[row] + rows.lengths[row], places
    seen = visible if visible.ndim == 2 else visible[row]
    seen = (seen[None] if seen.ndim == 2 else seen)[:, -1]  # by head, or 1
    return seen[:: max(len(seen) // heads, 1)].expand(heads, -1), places


def doubled(held: int, needed: int, most: int) -> int:
    """Return the size of a buffer of `held` that doubles, up to `most`, until `needed` fits."""
    while held < needed:
        held *= 2
    return max(min(held, most), needed)


def last_call(prompts: Sequence[int], ends: Sequence[int]) -> tuple[int, int]:
    """Return the number of rows in the last call of `predicted_bytes`, and the end of the furthest of them."""
    steps = [end - prompt for prompt, end in zip(prompts, ends, strict=True)]
    last = [end for end, count in zip(ends, steps, strict=True) if count == max(steps)]
    return len(last), max(last)


def check_lossless(caches: Sequence[KVCache], what: str = "exact mode") -> None:
    """Raise ValueError if a cache is lossy: exact mode and speculation need all keys and values to the bit."""
    for cache in caches:
        if not cache.lossless:
            raise ValueError(
                f"{what} needs a lossless cache, and kv_cache={cache.args.kv_cache!r} drops or rounds keys and "
                "values; choose static, concat or paged"
            )
