"""The concatenating cache, as most teaching code has it."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from llama.args import Refused
from llama.kv_cache.contract import KVCache, last_call
from llama.rows import Rows


class ConcatCache(KVCache, kind="concat"):
    """Grows by concatenation: every step copies all keys and values."""

    keeps_past = True

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        self.check(rows, xk, xv)
        self.prepare(rows, xk)
        bsz = len(rows.starts)
        self._check_gap(max(rows.starts), rows=bsz)
        if self.keys is not None and self.keys.shape[0] < bsz:
            self.free()  # more rows than before: a new batch, from position 0
        if rows.start is not None:
            keys = xk if self.keys is None else torch.cat((self.keys[:bsz, : rows.start], xk), dim=1)
            values = xv if self.values is None else torch.cat((self.values[:bsz, : rows.start], xv), dim=1)
            self.keys, self.values = keys, values
        else:
            self.keys, self.values = self._resized(self.keys, rows.end, xk), self._resized(self.values, rows.end, xv)
            self._write(rows, xk, xv)
        return self.keys, self.values

    def predicted_bytes(
        self, *, prompts: Sequence[int], ends: Sequence[int], reserved: tuple[int, int], itemsize: int
    ) -> int:
        rows, length = last_call(prompts, ends)
        return rows * length * self.position_bytes(itemsize)

    def prepare_join(self, other: Self, rows: int, length: int) -> None:
        held_rows, held = (0, 0) if self.keys is None else self.keys.shape[:2]
        assert other.keys is not None
        self._enlarge(self.sizes(max(rows + 1, held_rows), max(length, held), other.keys), other.keys.device)

    def written(self, name: str, length: int) -> int:
        return length

    def _check_gap(self, furthest: int, *, rows: int) -> None:
        held_rows, held = (0, 0) if self.keys is None else self.keys.shape[:2]
        if furthest > 0 and (furthest > held or rows > held_rows):
            raise Refused(
                f"the concat cache holds {held_rows} rows of {held} positions, "
                f"so {rows} rows at position {furthest} would leave a gap"
            )

    @staticmethod
    def _resized(held: Tensor | None, end: int, like: Tensor) -> Tensor:
        """Return a copy of `held` with exactly `end` positions for the rows of `like`."""
        assert held is not None  # rows with different starts continue a text
        missing = like.new_empty((len(like), max(end - held.shape[1], 0), *like.shape[2:]))
        return torch.cat((held[: len(like), :end], missing), dim=1)
