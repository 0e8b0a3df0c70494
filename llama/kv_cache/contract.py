"""The contract of a kind of cache: keys and values of past tokens, for one attention layer of one text or batch.

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
from dataclasses import replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.kv_cache.attended import Attended
from llama.kv_cache.names import cache_kind, read_kind
from llama.rope import RopeTable, rotate
from llama.rows import Rows


class KVCache:
    """The contract: store new keys and values at their positions, return all that attention may look at.

    What a kind says of itself:
        lossless: what it returns are the very keys and values that it was given, none left out.
        unrotated: it is given keys before RoPE, and rotates what it returns by itself.
        preallocates: its first update takes room for all that `reserve` was asked for.
        shares_memory: its copies may share memory with it, and so compute in turn, in whatever threads.
        bound: how many positions it holds at most; None: as many as a text has.

    Every tensor that is an attribute without an underscore is stored memory: it is counted, freed, copied and saved.
    `layer` is the number of the layer, of `args.n_layers`; `rope` has the model's angles, for kinds that rotate keys.
    `reserved` are the rows and the length that `reserve` was asked for; zeros once the memory was given back.
    """

    kinds: ClassVar[dict[str, type["KVCache"]]] = {}
    lossless: ClassVar[bool] = True
    unrotated: ClassVar[bool] = False
    preallocates: ClassVar[bool] = False
    shares_memory: ClassVar[bool] = False
    observes: ClassVar[bool] = False  # found out: whether it has an `observe` of its own
    counts_places: ClassVar[bool] = False  # whether it has a rope_starts of its own
    bound: int | None = None
    keys: Tensor | None
    values: Tensor | None

    def __init_subclass__(cls, kind: str | None = None) -> None:
        super().__init_subclass__()
        cls.observes = cls.observe is not KVCache.observe
        cls.counts_places = cls.rope_starts is not KVCache.rope_starts
        if kind is None:
            return
        taken = KVCache.kinds.get(kind, cls)
        if taken.__qualname__ != cls.__qualname__:  # the same class made again, as notebooks do, replaces itself
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
        """Make the cache of one layer that `args.kv_cache` names, NAME or NAME:PARAMS. Raises ValueError."""
        return KVCache.named(args.kv_cache)(args, layer, rope)

    @staticmethod
    def named(text: str) -> type["KVCache"]:
        """Return the kind that is named, NAME or NAME:PARAMS; raise ValueError where there is none of this name."""
        name = read_kind(text).name
        if name not in KVCache.kinds:
            known = ", ".join(sorted(KVCache.kinds))
            raise ValueError(f"kv_cache={text!r} is not a known kind of cache; known are: {known}")
        return KVCache.kinds[name]

    def configure(self, params: str) -> None:
        """Take what stands behind the colon of NAME:PARAMS, "" where nothing does. Raises ValueError."""
        if params:
            raise ValueError(f"kv_cache={self.args.kv_cache!r}: this kind takes no parameters; leave out :{params}")

    # ---- what attention asks -----------------------------------------------------------------------------------------

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        """Store xk and xv of the rows, and return all keys and values up to the furthest of them.

        xk and xv are (bsz, seqlen, n_kv_heads, head_dim), and stand at each row's start and behind it. What is returned
        is (bsz, kv_len, n_kv_heads, head_dim); past a row's own end it is undefined and must not be read. Raises
        ValueError, with nothing written, on what `check` refuses.
        """
        raise NotImplementedError

    def key_positions(self) -> Tensor | None:
        """Return where the keys of the last update stand, (kv_len,) or (bsz, kv_len); None: at 0 .. kv_len - 1.

        Keys and values whose positions are given must be finite, also where no query may look yet: they are masked.
        """
        return None

    def visible(self, rows: Rows, xq: Tensor) -> Tensor | None:
        """Return which keys of the last update each query may see, of bool.

        (seqlen, kv_len), (bsz, seqlen, kv_len), or, where heads see different keys, (bsz, n_kv_heads or n_heads,
        seqlen, kv_len). xq is (bsz, seqlen, n_heads, head_dim); query i of a row stands at the row's start + i. None:
        all keys at or before it, which stand at 0 .. kv_len - 1. A kind that drops keys says here from which position
        on a query of a chunk may look. All that the update returned must then be finite.
        """
        positions = self.key_positions()
        if positions is None:
            return None
        return positions[..., None, :] <= query_positions(rows, positions.device)

    def rope_starts(self, rows: Rows) -> tuple[int, ...]:
        """Return the positions by which RoPE rotates each row's first query, the others follow.

        They are the rows' own starts, or, for a kind that is `unrotated`, those that it counts itself.
        """
        return rows.starts

    def observe(self, attended: Attended) -> None:
        """Look at the attention of this call, and drop keys if that is what the kind does; right after `visible`.

        Asked only of kinds that define it. What `update` returned is attended to afterwards, and must stay as it is.
        Tokens that pad a row should count for nothing.
        """

    # ---- memory ------------------------------------------------------------------------------------------------------

    def position_bytes(self, itemsize: int) -> int:
        """Return the bytes that one position of a row takes in a layer, where the model's numbers take `itemsize` each.

        A kind that holds keys and values in another way than as they come tells so here; memory is predicted from it.
        """
        return 2 * self.args.n_kv_heads * self.args.head_dim * itemsize

    def predicted_bytes(
        self, *, prompts: Sequence[int], ends: Sequence[int], reserved: tuple[int, int], itemsize: int
    ) -> int:
        """Return what it would hold, whatever it holds now, once rows were fed their prompts and then token by token.

        prompts: how many tokens each row's prompt has; all are fed in one call. ends: how many tokens of each row are
        fed in the end; then it leaves the batch. reserved: what `reserve` was asked for, (0, 0) where it was not.
        itemsize: of the model's numbers. By default: as many positions as the longest row has, for each row.
        """
        return len(prompts) * max(ends) * self.position_bytes(itemsize)

    def reserve(self, rows: int, length: int) -> None:
        """Drop what is held; a kind that `preallocates` takes room for `rows` x `length` on its next update."""
        self.free()
        self.reserved = (rows, length)

    def free(self) -> None:
        """Hold no memory until the next update."""
        for name in self.held():
            setattr(self, name, None)
        self.reserved = (0, 0)

    def held(self) -> dict[str, Tensor]:
        """Return the tensors that are stored now, by the names of their attributes."""
        return {name: held for name, held in vars(self).items() if isinstance(held, Tensor) and name[0] != "_"}

    @property
    def nbytes(self) -> int:
        """The bytes that the cache holds now."""
        return sum(held.nbytes for held in self.held().values())

    @property
    def slots(self) -> int | None:
        """For how many positions of a row there is room now; None where that is not a fixed number."""
        return None if self.keys is None or self.key_positions() is not None else self.keys.shape[1]

    # ---- texts that last ---------------------------------------------------------------------------------------------

    def repeat_first_row(self, rows: int) -> None:
        """Let each of `rows` rows hold what row 0 holds."""
        for name, held in self.held().items():
            if held.shape[0] < rows:
                setattr(self, name, held[:1].expand(rows, *held.shape[1:]).clone())
            else:
                held[1:rows] = held[:1]

    def select_rows(self, rows: Sequence[int]) -> None:
        """Let row i hold what row `rows[i]` holds; what the others held is given up. No row is named twice."""
        stays = next((place for place, row in enumerate(rows) if place != row), len(rows))
        for held in self.held().values():
            held[stays : len(rows)] = held[list(rows[stays:])]

    def truncate(self, position: int) -> bool:
        """Return True if feeding can continue at `position` as if nothing behind it had been fed."""
        return True

    def copy(self) -> Self:
        """Return a cache of the same kind that holds the same: in memory of its own, or shared until one is written."""
        return deepcopy(self, {id(shared): shared for shared in (self.args, self.rope)})

    def state(self, rows: int | None = None, length: int | None = None) -> dict[str, Tensor]:
        """Return what is held as tensors by name, from which `restore` goes on; they may be the very ones that it has.

        With `rows` and `length` no more than so many rows of a text of `length` positions need, where the kind can
        tell: room that was never written stays out. A kind that remembers more than its tensors adds it here as a
        tensor, a count of each row as int64, and takes it back in `restore`.
        """
        return {name: held[:rows] for name, held in self.held().items()}

    def restore(self, state: Mapping[str, Tensor], rows: int, length: int) -> None:
        """Hold, in place of what is held, what `state(rows, length)` of a cache of the same kind and sizes gave.

        The tensors belong to this cache then. Raises ValueError where they cannot be what such a cache gave; free it.
        """
        self.free()
        names = {name for name, value in vars(self).items() if value is None and name[0] != "_"}
        if state.keys() - names:
            raise ValueError(f"the cache holds {sorted(names)}, but is given {sorted(state)}")
        for name, tensor in state.items():
            setattr(self, name, tensor)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check(self, rows: Rows, xk: Tensor, xv: Tensor) -> None:
        """Raise ValueError for a write that must not happen.

        Limits are checked where memory is taken, by `args.check_room`: a model has checked them before it asks a cache.
        """
        wanted = (len(rows.starts), rows.width, self.args.n_kv_heads, self.args.head_dim)
        if xk.shape != wanted or xv.shape != wanted:
            raise ValueError(
                f"the KV cache takes keys and values of shape {wanted}, not {tuple(xk.shape)} and {tuple(xv.shape)}"
            )
        held = xk if self.keys is None else self.keys
        for new in (xk, xv):
            if new.dtype != held.dtype or new.device != held.device:
                raise ValueError(
                    f"the KV cache holds {held.dtype} on {held.device}, so it cannot take {new.dtype} on "
                    f"{new.device}; move the model as a whole, or free the cache first"
                )
        if torch.is_grad_enabled() and (xk.requires_grad or xv.requires_grad):
            raise ValueError(
                "gradients cannot flow through the KV cache: set kv_caching=False to train, "
                "or run the model under torch.inference_mode()"
            )

    def rotated(self, keys: Tensor, places: Tensor, furthest: int) -> Tensor:
        """Return keys, (bsz, kv_len, n_kv_heads, head_dim), as RoPE rotates them by `places`, (..., kv_len).

        For kinds that are `unrotated`; `furthest` is not below any place.
        """
        cos, sin = self.rope.up_to(furthest + 1, keys.device)
        if keys.dtype not in (torch.float32, torch.float64):
            return rotate(keys, (cos[places], sin[places]))
        turns = torch.complex(cos[: furthest + 1, :, ::2], sin[: furthest + 1, :, 1::2])  # a sixth of the time
        pairs = torch.view_as_complex(keys.view(*keys.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns[places]).flatten(-2).type_as(keys)

    def _in_order(self, state: Mapping[str, Tensor], rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a state that has nothing but those of all positions, in their order."""
        shape = (rows, length, self.args.n_kv_heads, self.args.head_dim)
        dtype = state["keys"].dtype if "keys" in state else None
        check_state(state, dict.fromkeys(("keys", "values"), (shape, dtype)))
        return state["keys"], state["values"]

    def _enlarge(self, sizes: dict[str, tuple[Sequence[int], torch.dtype]], device: torch.device) -> None:
        """Move buffers into larger ones, of these shapes and dtypes by name; where memory is out, none has moved."""
        made = {name: self._allocate(shape, dtype, device) for name, (shape, dtype) in sizes.items()}
        for name, new in made.items():
            old = getattr(self, name)
            if old is not None:
                new[: old.shape[0], : old.shape[1]] = old
            setattr(self, name, new)

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.inference_mode(False):  # or the buffer could not be written outside inference mode
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def _write(self, rows: Rows, xk: Tensor, xv: Tensor) -> None:
        """Copy xk and xv into the buffers, which must have the room."""
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
    """Return where the queries of a call stand, (seqlen, 1), or (bsz, seqlen, 1) if rows start apart."""
    starts = torch.tensor(rows.starts if rows.start is None else rows.start, device="cpu").to(device, non_blocking=True)
    return starts[..., None, None] + torch.arange(rows.width, device=device)[:, None]


def doubled(held: int, needed: int, most: int) -> int:
    """Return the size of a buffer that grows by doubling, up to `most`, as a text is fed token by token."""
    while held < needed:
        held *= 2
    return max(min(held, most), needed)


def last_call(prompts: Sequence[int], ends: Sequence[int]) -> tuple[int, int]:
    """Return how many rows the last call has that `predicted_bytes` speaks of, and where the furthest of them ends."""
    steps = [end - prompt for prompt, end in zip(prompts, ends, strict=True)]
    last = [end for end, count in zip(ends, steps, strict=True) if count == max(steps)]
    return len(last), max(last)


def check_state(state: Mapping[str, Tensor], sizes: Mapping[str, tuple[Sequence[int], torch.dtype | None]]) -> None:
    """Raise ValueError where the tensors of a state are not, by name, of these shapes and dtypes."""
    found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in state.items()}
    wanted = {name: (tuple(shape), dtype) for name, (shape, dtype) in sizes.items()}
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            has, should = found.get(name, "absent"), wanted.get(name, "absent")
            raise ValueError(f"{name} of a cache should be {should}, but is {has}")


def use_kind(caches: Sequence[KVCache], text: str, *, exact: bool) -> list[KVCache]:
    """Return empty caches of the kind that is named, FILE.py:NAME too, one in place of each. Raises ValueError."""
    kind = cache_kind(text)
    made = [KVCache.of(replace(cache.args, kv_cache=kind)) for cache in caches]
    if exact:
        check_lossless(made)
    return made


def check_lossless(caches: Sequence[KVCache]) -> None:
    """Raise ValueError where a cache gives back something else than what it was given."""
    for cache in caches:
        if not cache.lossless:
            raise ValueError(
                f"exact mode promises the bits of the model without a cache, and kv_cache={cache.args.kv_cache!r} does "
                "not keep all it is given; choose static, concat or paged"
            )
