"""A paged cache: blocks of positions from one pool, allocated as a text grows, and shared by texts with one prefix.

Source: Kwon et al., PagedAttention, https://arxiv.org/abs/2309.06180.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from threading import Lock
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import Tensor

from llama.args import ModelArgs, Refused
from llama.kv_cache.contract import KVCache, NativeLayout
from llama.locked import locked
from llama.rope import RopeTable
from llama.rows import Rows

BLOCK = 16  # positions


class Pool:
    """The blocks of one layer, which the caches of several texts may share.

    Nothing is counted: a block is free if no table of a cache has it.

    growing: whether a change of the memory is under way, or did not end: some caches then have the old one.
    """

    def __init__(self, cache: "PagedCache") -> None:
        self.caches: WeakSet[PagedCache] = WeakSet((cache,))
        self.growing = False
        self.lock = Lock()  # copies of a cache may be written, freed and copied in different threads

    def users(self) -> list["PagedCache"]:
        """Return the caches that use the pool; a cache that was freed has another one."""
        return [cache for cache in self.caches if cache.pool is self]

    def share(self, keys: Tensor | None, values: Tensor | None) -> None:
        """Set the memory of all caches. The caller has the lock."""
        self.growing = True
        for cache in self.users():
            vars(cache).update(keys=keys, values=values)
        self.growing = False

    def used(self) -> Counter[int]:
        """Return the number of rows that use each block, of all caches. The caller has the lock."""
        return Counter(block for cache in self.users() for table in cache.tables for block in table)


class PagedCache(KVCache, kind="paged"):
    """A table of blocks for each row: position p is in block table[p // BLOCK], slot p % BLOCK.

    keys and values are the pool, (blocks, BLOCK, n_kv_heads, head_dim). It grows by an eighth when no block is free, so
    that it is seldom copied; `paged:BLOCKS` limits it. Rows may have their first blocks in common; a block that
    several rows use is copied before one of them writes into it. A step that needs a block takes those of 16 steps, for
    all rows. PyTorch's attention needs contiguous keys, so the plain path copies the blocks of every row at every step;
    native code reads them in place.
    A copy shares the pool and all blocks until one of the two writes.

    shared: how many of each row's blocks other rows may have, too.
    """

    shares_memory = True
    keeps_past = True
    native = 3

    def __init__(self, args: ModelArgs, layer: int = 0, rope: RopeTable | None = None) -> None:
        super().__init__(args, layer, rope)
        self.tables: list[list[int]] = []
        self.shared: list[int] = []
        self.pool = Pool(self)

    def configure(self, params: str) -> None:
        if params and not (params.isascii() and params.isdigit() and int(params) > 0):
            raise ValueError(
                f"kv_cache={self.args.kv_cache!r}: give the most blocks of {BLOCK} positions, such as paged:512, "
                "or no parameter"
            )
        self.most_blocks = int(params) if params else None

    def predicted_bytes(
        self, *, prompts: Sequence[int], ends: Sequence[int], reserved: tuple[int, int], itemsize: int
    ) -> int:
        tables, step = [-(-prompt // BLOCK) for prompt in prompts], 0
        blocks = self._enlarged(0, sum(tables))
        while rows := [row for row, prompt in enumerate(prompts) if prompt + step < ends[row]]:  # the others have left
            starts, used = [prompts[row] + step for row in rows], sum(tables[row] for row in rows)
            if any(start == tables[row] * BLOCK for row, start in zip(rows, starts, strict=True)):
                for row, start, count in zip(rows, starts, self._ahead(starts, used), strict=True):
                    tables[row] = max(tables[row], -(-(start + count) // BLOCK))
                used = sum(tables[row] for row in rows)
                blocks = blocks if used <= blocks else self._enlarged(blocks, used)
            step = min(min(tables[row] * BLOCK, ends[row]) - prompts[row] for row in rows)
        return blocks * BLOCK * self.position_bytes(itemsize)

    def text_bytes(self, *, prompt: int, end: int, itemsize: int) -> int:
        """Return the bytes of the text's blocks and of one ahead. The pool may grow by an eighth more, to its limit."""
        return (-(-end // BLOCK) + 1) * BLOCK * self.position_bytes(itemsize)

    @property
    def slots(self) -> None:
        return None

    def free(self) -> None:
        with locked(self.pool.lock):  # a pool that grows would give its memory to a cache that has left it
            vars(self).update(dict.fromkeys(self.held()), reserved=(0, 0), tables=[], shared=[], pool=Pool(self))

    def copy(self) -> Self:
        if type(self) is not PagedCache:  # a subclass may have other contents
            return super().copy()
        other = object.__new__(type(self))  # fast: no table of angles is made
        with locked(self.pool.lock):
            self.shared = [*map(len, self.tables)]
            vars(other).update(vars(self), tables=[[*table] for table in self.tables], shared=[*self.shared])
            self.pool.caches.add(other)
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "pool"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.pool = Pool(self)  # of its own

    def repeat_first_row(self, rows: int) -> None:
        """Share the blocks of row 0 with each of `rows` rows."""
        self._set([self.tables[0]] * rows, [len(self.tables[0])] * rows)

    def select_rows(self, rows: Sequence[int]) -> None:
        self._set([self.tables[row] for row in rows], [self.shared[row] for row in rows])

    def _set(self, tables: Sequence[list[int]], shared: Sequence[int]) -> None:
        """Replace the tables at once. A block that no table has any more is free."""
        with locked(self.pool.lock):
            vars(self).update(tables=[[*table] for table in tables], shared=[*shared])

    def sibling(self) -> Self:
        """Return an empty cache of the same pool. Its blocks may move the memory of all caches of the pool."""
        made = super().sibling()
        with locked(self.pool.lock):
            made.pool, made.keys, made.values = self.pool, self.keys, self.values
            self.pool.caches.add(made)
        return made

    def row_copy(self, row: int, length: int) -> Self:
        """Return a cache of one row, which shares the blocks until one of the two writes into them."""
        made, blocks = self.sibling(), -(-length // BLOCK)
        self.shared[row] = max(self.shared[row], blocks)
        made._set([self.tables[row][:blocks]], [blocks])
        return made

    def check_join(self, other: Self, rows: int, length: int) -> None:
        if other.pool is not self.pool:
            raise ValueError("a text in another pool of blocks cannot join; make its cache by sibling() or copy()")
        super().check_join(other, rows, length)

    def _has_row(self, row: int, length: int) -> bool:
        return row < len(self.tables) and length <= len(self.tables[row]) * BLOCK

    def prepare_join(self, other: Self, rows: int, length: int) -> None:
        """Allocate nothing: the blocks are in the pool."""

    def join(self, other: Self, rows: int, length: int) -> None:
        """Move the table of row 0 of `other`; no key or value is copied."""
        table, shared = other.tables[0], other.shared[0]
        other._set([], [])  # first: an interrupt leaves no block in two tables
        self._set([*self.tables[:rows], table], [*self.shared[:rows], shared])

    def state(self, rows: int | None = None, length: int | None = None) -> dict[str, Tensor]:
        """Return keys and values in order of position, (rows, length, n_kv_heads, head_dim)."""
        length = max(map(len, self.tables[:rows]), default=0) * BLOCK if length is None else length
        rows = len(self.tables) if rows is None else rows
        return {name: self._gathered(held, length, rows) for name, held in self.held().items() if length}

    def written(self, name: str, length: int) -> int:
        return length

    def restore(self, state: Mapping[str, Tensor], rows: int, length: int) -> None:
        self._check_state(state, rows, length)
        keys, values = state["keys"], state["values"]
        self.free()
        starts, lengths = [0] * rows, [length] * rows
        self._take(starts, lengths, like=keys)
        slots, _ = self._slots(starts, lengths, length, keys.device)
        for pool, held in (("keys", keys), ("values", values)):
            getattr(self, pool).flatten(0, 1)[slots] = held.flatten(0, 1)

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        self.check(rows, xk, xv)
        self.prepare(rows, xk)
        bsz, width = len(rows.starts), rows.width
        assert self.keys is not None
        assert self.values is not None
        slots, kept = self._slots(rows.starts, rows.lengths, width, xk.device)
        for pool, new in ((self.keys, xk), (self.values, xv)):
            pool.flatten(0, 1)[slots] = new.flatten(0, 1)[kept]
        keys, values = self._gathered(self.keys, rows.end, bsz), self._gathered(self.values, rows.end, bsz)
        for row, (start, count) in enumerate(zip(rows.starts, rows.lengths, strict=True)):
            if count < width:  # padding is not stored, but must be finite under the mask
                keys[row, start : start + width], values[row, start : start + width] = xk[row], xv[row]
        return keys, values

    def prepare(self, rows: Rows, like: Tensor) -> None:
        """Take the blocks that the rows write; padding is not stored. If a step needs one, see `_ahead`."""
        super().prepare(rows, like)
        if not self._has_blocks(rows):
            full = any(start == len(table) * BLOCK for start, table in zip(rows.starts, self.tables, strict=False))
            self._take(rows.starts, rows.lengths, like, ahead=full and rows.width == 1)

    def _ahead(self, starts: Sequence[int], used: int) -> list[int]:
        """Return for how many positions of each row a step takes blocks, if `used` blocks are in use.

        They are those of the next 16 steps: rows fill their blocks in different steps, and a reservation in each of
        them would take 8 % of the time of a step of 16 rows. A pool near its limit gives no block before it is needed.
        """
        scarce = self.most_blocks is not None and self.most_blocks - used < 2 * len(starts)
        return [1 if scarce else min(BLOCK, self.args.max_seq_len - start) for start in starts]

    def _has_blocks(self, rows: Rows) -> bool:
        """Return True if every row has the blocks that a call writes, and shares none of them."""
        each = zip(self.tables, self.shared, rows.starts, rows.lengths, strict=False)
        return (
            not self.pool.growing
            and len(self.tables) >= len(rows.starts)
            and all(
                start + length <= len(table) * BLOCK and shared <= start // BLOCK
                for table, shared, start, length in each
            )
        )

    def native_layout(self, like: Tensor) -> NativeLayout | None:
        assert self.keys is not None
        table = [list(row) for row in self.tables]
        return NativeLayout(self.sizes(len(self.keys), BLOCK, like), max(map(len, table)), table)

    def steps_left(self, starts: Sequence[int]) -> int:
        """Return the number of steps up to the first block that is not allocated."""
        return min(len(table) * BLOCK - start - 1 for table, start in zip(self.tables, starts, strict=False))

    def _take(self, starts: Sequence[int], lengths: Sequence[int], like: Tensor, *, ahead: bool = False) -> None:
        """Take blocks for the positions that each row writes, copying shared ones. If it raises, none was taken.

        A row that writes into shared blocks drops those behind the call: no later call reads them.
        """
        with locked(self.pool.lock):
            if self.pool.growing:
                largest = max(self.pool.users(), key=lambda cache: 0 if cache.keys is None else len(cache.keys))
                self.pool.share(largest.keys, largest.values)
            used, missing = self.pool.used(), len(starts) - len(self.tables)
            tables = [[*table] for table in self.tables] + [[] for _ in range(missing)]
            shared = [*self.shared, *[0] * missing]
            needed: list[tuple[int, int]] = []  # (row, place in its table) of each block that has to be taken
            lengths = self._ahead(starts, len(used)) if ahead else lengths
            for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                table, first, end = tables[row], start // BLOCK, -(-(start + length) // BLOCK)
                if shared[row] > end:
                    used.subtract(table[end:])
                    del table[end:]
                for place in range(first, min(shared[row], end)):
                    if used[table[place]] > 1:
                        used[table[place]] -= 1
                        needed.append((row, place))
                shared[row] = min(shared[row], first)
                needed += [(row, place) for place in range(len(table), end)]
            free = self._free_blocks(used, len(needed), like)
            assert self.keys is not None
            assert self.values is not None
            for row, place in needed:
                table, block = tables[row], free.pop()
                if place == len(table):
                    table.append(block)
                else:  # copied on the first write
                    self.keys[block], self.values[block] = self.keys[table[place]], self.values[table[place]]
                    table[place] = block
            vars(self).update(tables=tables, shared=shared)

    def _free_blocks(self, used: Counter[int], needed: int, like: Tensor) -> list[int]:
        """Return the free blocks, the lowest last, at least `needed`. Raises Refused past the pool's limit."""
        held = 0 if self.keys is None else self.keys.shape[0]
        free = [block for block in reversed(range(held)) if not used[block]]
        if (more := needed - len(free)) <= 0:
            return free
        if self.most_blocks is not None and held + more > self.most_blocks:
            raise Refused(
                f"kv_cache={self.args.kv_cache!r}: {held + more} blocks of {BLOCK} positions are needed, and the pool "
                f"may have {self.most_blocks}; take a larger pool, fewer rows or shorter texts"
            )
        size = self._enlarged(held, held + more)
        self.pool.growing = True
        self._enlarge(self.sizes(size, BLOCK, like), like.device)
        self.pool.share(self.keys, self.values)
        return [*range(size - 1, held - 1, -1), *free]

    def _enlarged(self, blocks: int, needed: int) -> int:
        """Return the new size of a pool of `blocks` when `needed` are needed."""
        size = max(needed, blocks + blocks // 8)
        return size if self.most_blocks is None else min(size, self.most_blocks)

    def _slots(
        self, starts: Sequence[int], real: Sequence[int], seqlen: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the slot in the pool of each token that is not padding, and its index among all rows' tokens."""
        slots: list[int] = []
        kept: list[int] = []
        for row, (start, count) in enumerate(zip(starts, real, strict=True)):
            kept += range(row * seqlen, row * seqlen + count)
            while count:
                first = self.tables[row][start // BLOCK] * BLOCK + start % BLOCK
                some = min(count, BLOCK - start % BLOCK)
                slots += range(first, first + some)
                start, count = start + some, count - some
        index = partial(torch.tensor, dtype=torch.int64, device=device)
        return index(slots), index(kept)

    def _gathered(self, pool: Tensor, length: int, rows: int) -> Tensor:
        """Return the first `length` positions of each row, (rows, length, n_kv_heads, head_dim)."""
        blocks = -(-length // BLOCK)
        tables = [[*table[:blocks], *[0] * (blocks - len(table))] for table in self.tables[:rows]]
        return pool[torch.tensor(tables, device=pool.device)].flatten(1, 2)[:, :length]
