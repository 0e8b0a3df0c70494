"""A paged cache: blocks of positions from one pool, allocated as a text grows, and shared by texts with one prefix.

Source: Kwon et al., PagedAttention, https://arxiv.org/abs/2309.06180.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
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

    shares: the number of rows, of all caches, that use each block.
    spare: the blocks that no row uses; the last one is taken next.
    stale: whether a deleted cache is still counted: Python may delete a cache in any thread, even in one with the lock.
    changing: whether a change is under way, or did not end.
    """

    def __init__(self, cache: "PagedCache") -> None:
        self.shares: list[int] = []
        self.spare: list[int] = []
        self.caches: WeakSet[PagedCache] = WeakSet((cache,))
        self.stale = self.changing = False
        self.lock = Lock()  # copies of a cache may be written, freed and copied in different threads

    def users(self) -> list["PagedCache"]:
        """Return the caches that use the pool; a cache that was freed has another one."""
        return [cache for cache in self.caches if cache.pool is self]

    def give_back(self, table: list[int]) -> None:
        """Return a row's blocks to the pool. The caller has the lock."""
        for block in table:
            self.shares[block] -= 1
            if not self.shares[block]:
                self.spare.append(block)

    def begin_change(self) -> None:
        """Set `changing`; before that, mend the pool if it must be. The caller has the lock, and resets `changing`."""
        if self.stale or self.changing:
            self.stale, self.changing = False, True
            self.count()
        self.changing = True

    def count(self) -> None:
        """Give all caches the largest memory, a copy of the others, and count the shares by their tables."""
        caches = self.users()
        largest = max(caches, key=lambda cache: 0 if cache.keys is None else len(cache.keys))
        for cache in caches:
            cache.keys, cache.values = largest.keys, largest.values
        used = Counter(block for cache in caches for table in cache.tables for block in table)
        self.shares = [used[block] for block in range(0 if largest.keys is None else len(largest.keys))]
        self.spare = [block for block in reversed(range(len(self.shares))) if not self.shares[block]]


class PagedCache(KVCache, kind="paged"):
    """A table of blocks for each row: position p is in block table[p // BLOCK], slot p % BLOCK.

    keys and values are the pool, (blocks, BLOCK, n_kv_heads, head_dim). It grows by an eighth when no block is free, so
    that it is seldom copied; `paged:BLOCKS` limits it. A block that several rows use is copied before one of them
    writes into it. A step that needs a block takes those of 16 steps, for all rows. A row that leaves returns its
    blocks. PyTorch's attention needs contiguous keys, so the plain path copies the blocks of every row at every step;
    native code reads them in place.
    A copy shares the pool and all blocks until one of the two writes.
    """

    shares_memory = True
    keeps_past = True
    native = 3

    def __init__(self, args: ModelArgs, layer: int = 0, rope: RopeTable | None = None) -> None:
        super().__init__(args, layer, rope)
        self.tables: list[list[int]] = []
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
        with locked(self.pool.lock):
            self.pool.stale = self.pool.stale or bool(self.tables)
            vars(self).update(dict.fromkeys(self.held()), reserved=(0, 0), tables=[], pool=Pool(self))

    def copy(self) -> Self:
        if type(self) is not PagedCache:  # a subclass may have other contents
            return super().copy()
        other = object.__new__(type(self))  # fast: no table of angles is made
        with locked(self.pool.lock):
            self.pool.begin_change()
            vars(other).update(vars(self), tables=[list(table) for table in self.tables])
            for block in chain.from_iterable(other.tables):
                self.pool.shares[block] += 1
            self.pool.caches.add(other)
            self.pool.changing = False
        return other

    def __del__(self) -> None:
        if "pool" in vars(self) and self.tables:  # __init__ may have failed
            self.tables, self.pool.stale = [], True

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "pool"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.pool = Pool(self)  # of its own
        self.pool.count()

    def repeat_first_row(self, rows: int) -> None:
        """Share the blocks of row 0 with each of `rows` rows."""
        with locked(self.pool.lock):
            self.pool.begin_change()
            for row in range(1, len(self.tables)):
                self.pool.give_back(self.tables[row])
            self.tables = [list(self.tables[0]) for _ in range(rows)]
            for block in self.tables[0]:
                self.pool.shares[block] += rows - 1
            self.pool.changing = False

    def select_rows(self, rows: Sequence[int]) -> None:
        with locked(self.pool.lock):
            self.pool.begin_change()
            for row in set(range(len(self.tables))).difference(rows):
                self.pool.give_back(self.tables[row])
            self.tables = [self.tables[row] for row in rows]
            self.pool.changing = False

    def sibling(self) -> Self:
        """Return an empty cache of the same pool. Its blocks may move the memory of all caches of the pool."""
        made = super().sibling()
        with locked(self.pool.lock):
            made.pool, made.keys, made.values = self.pool, self.keys, self.values
            self.pool.caches.add(made)
        return made

    def row_copy(self, row: int, length: int) -> Self:
        """Return a cache of one row, which shares the blocks until one of the two writes into them."""
        made = self.sibling()
        with locked(self.pool.lock):
            self.pool.begin_change()
            made.tables = [self.tables[row][: -(-length // BLOCK)]]
            for block in made.tables[0]:
                self.pool.shares[block] += 1
            self.pool.changing = False
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
        with locked(self.pool.lock):
            self.pool.begin_change()
            for table in self.tables[rows:]:
                self.pool.give_back(table)
            self.tables[rows:] = other.tables[:1]
            del other.tables[0]
            self.pool.changing = False

    def state(self, rows: int | None = None, length: int | None = None) -> dict[str, Tensor]:
        """Return keys and values in order of position, (rows, length, n_kv_heads, head_dim)."""
        length = max(map(len, self.tables[:rows]), default=0) * BLOCK if length is None else length
        if self.keys is None or self.values is None or not length:
            return {}
        rows = len(self.tables) if rows is None else rows
        return {
            "keys": self._gathered(self.keys, length, rows),
            "values": self._gathered(self.values, length, rows),
        }

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
            used = len(self.pool.shares) - len(self.pool.spare)
            ahead = self._ahead(rows.starts, used) if full and rows.width == 1 else rows.lengths
            self._take(rows.starts, ahead, like)

    def _ahead(self, starts: Sequence[int], used: int) -> list[int]:
        """Return for how many positions of each row a step takes blocks, if `used` blocks are in use.

        They are those of the next 16 steps: rows fill their blocks in different steps, and a reservation in each of
        them would take 8 % of the time of a step of 16 rows. A pool near its limit gives no block before it is needed.
        """
        scarce = self.most_blocks is not None and self.most_blocks - used < 2 * len(starts)
        return [1 if scarce else min(BLOCK, self.args.max_seq_len - start) for start in starts]

    def _has_blocks(self, rows: Rows) -> bool:
        """Return True if every row has the blocks that a call writes, and shares none of them."""
        if self.pool.stale or self.pool.changing or len(self.tables) < len(rows.starts):
            return False
        for table, start, length in zip(self.tables, rows.starts, rows.lengths, strict=False):
            end = -(-(start + length) // BLOCK)
            if end > len(table) or any(self.pool.shares[block] != 1 for block in table[start // BLOCK : end]):
                return False
        return True

    def native_layout(self, like: Tensor) -> NativeLayout | None:
        assert self.keys is not None
        table = [list(row) for row in self.tables]
        return NativeLayout(self.sizes(len(self.keys), BLOCK, like), max(map(len, table)), table)

    def steps_left(self, starts: Sequence[int]) -> int:
        """Return the number of steps up to the first block that is not allocated, or that other rows use."""
        ends = []
        for table, start in zip(self.tables, starts, strict=False):
            end = start // BLOCK + 1
            follows = end < len(table) and self.pool.shares[table[end]] == 1
            ends.append((end + follows) * BLOCK - start - 1)
        return min(ends)

    def _take(self, starts: Sequence[int], real: Sequence[int], like: Tensor) -> None:
        """Take blocks for the positions that each row writes, copying shared ones. If it raises, none was taken."""
        with locked(self.pool.lock):
            self.pool.begin_change()
            self.tables += [[] for _ in range(len(starts) - len(self.tables))]
            needed: list[tuple[int, int]] = []  # (row, place in its table) of each block that has to be taken
            left = list(self.pool.shares)  # shares, after the copies that are counted so far
            for row, (start, count) in enumerate(zip(starts, real, strict=True)):
                table, end = self.tables[row], -(-(start + count) // BLOCK)
                for place in range(start // BLOCK, min(end, len(table))):
                    if left[table[place]] > 1:
                        left[table[place]] -= 1
                        needed.append((row, place))
                needed += [(row, place) for place in range(len(table), end)]
            self._add_blocks(len(needed) - len(self.pool.spare), like)
            for row, place in needed:
                self._take_one(row, place)
            self.pool.changing = False

    def _take_one(self, row: int, place: int) -> None:
        assert self.keys is not None
        assert self.values is not None
        block, table = self.pool.spare.pop(), self.tables[row]
        self.pool.shares[block] = 1
        if place == len(table):
            table.append(block)
            return
        shared = table[place]  # copied on the first write
        self.keys[block], self.values[block] = self.keys[shared], self.values[shared]
        self.pool.shares[shared] -= 1
        table[place] = block

    def _add_blocks(self, more: int, like: Tensor) -> None:
        """Enlarge the pool by at least `more` blocks. Raises Refused past its limit."""
        held = 0 if self.keys is None else self.keys.shape[0]
        if more <= 0:
            return
        if self.most_blocks is not None and held + more > self.most_blocks:
            raise Refused(
                f"kv_cache={self.args.kv_cache!r}: {held + more} blocks of {BLOCK} positions are needed, and the pool "
                f"may have {self.most_blocks}; take a larger pool, fewer rows or shorter texts"
            )
        size = self._enlarged(held, held + more)
        self._enlarge(self.sizes(size, BLOCK, like), like.device)
        for cache in self.pool.users():
            cache.keys, cache.values = self.keys, self.values
        self.pool.shares += [0] * (size - held)
        self.pool.spare[:0] = range(size - 1, held - 1, -1)

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
        return torch.tensor(slots, dtype=torch.int64, device=device), torch.tensor(
            kept, dtype=torch.int64, device=device
        )

    def _gathered(self, pool: Tensor, length: int, rows: int) -> Tensor:
        """Return the first `length` positions of each row, (rows, length, n_kv_heads, head_dim)."""
        blocks = -(-length // BLOCK)
        tables = [[*table[:blocks], *[0] * (blocks - len(table))] for table in self.tables[:rows]]
        return pool[torch.tensor(tables, device=pool.device)].flatten(1, 2)[:, :length]
