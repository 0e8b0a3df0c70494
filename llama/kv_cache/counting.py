"""The base of kinds that count how far each row was written, because the place of a position depends on it."""

from collections.abc import Mapping, Sequence
from operator import add
from typing import Self

import torch
from torch import Tensor

from llama.args import ModelArgs, Refused
from llama.kv_cache.contract import KVCache
from llama.rope import RopeTable
from llama.rows import Rows


class CountingCache(KVCache):
    """A kind that drops or rounds some positions, so that a text cannot continue from every position."""

    def __init__(self, args: ModelArgs, layer: int = 0, rope: RopeTable | None = None) -> None:
        super().__init__(args, layer, rope)
        self._ends: list[int] = []  # of each row

    def free(self) -> None:
        super().free()
        self._ends = []

    def repeat_first_row(self, rows: int) -> None:
        super().repeat_first_row(rows)
        self._ends = self._ends[:1] * rows

    def select_rows(self, rows: Sequence[int]) -> None:
        ends = [self._ends[row] for row in rows]
        self._move(rows, ends)
        self._ends = ends

    def join(self, other: Self, rows: int, length: int) -> None:
        super().join(other, rows, length)
        self._ends[rows:] = other._ends[:1]

    def state(self, rows: int | None = None, length: int | None = None) -> dict[str, Tensor]:
        """Return the stored tensors, and the position behind each row's last token as `ends`, (rows,)."""
        ends = torch.tensor(self._ends[:rows], dtype=torch.int64, device="cpu")
        return {**super().state(rows, max(self._ends[:rows], default=0)), "ends": ends}

    def restore(self, state: Mapping[str, Tensor], rows: int, length: int) -> None:
        ends = state["ends"].flatten().tolist() if "ends" in state else []
        if len(ends) != rows or not all(isinstance(end, int) and end >= length for end in ends):
            raise ValueError(f"ends={ends} must be the ends of {rows} rows, each at least {length}")
        super().restore({name: tensor for name, tensor in state.items() if name != "ends"}, rows, max(ends))
        self._ends = ends

    def truncate(self, position: int) -> bool:
        return all(self._refusal(row, position, end) is None for row, end in enumerate(self._ends))

    def _refusal(self, row: int, start: int, end: int) -> str | None:
        """Return why a row with the end `end` cannot continue at `start` <= `end`; None if it can."""
        raise NotImplementedError

    def _refuse_what_is_gone(self, starts: Sequence[int]) -> None:
        """Raise Refused for a start that leaves a gap, or that needs positions that were dropped."""
        for row, start in enumerate(starts):
            end = self._ends[row] if row < len(self._ends) else 0
            if start > end:
                raise Refused(
                    f"the cache holds {end} positions of row {row}, so position {start} would leave a gap; "
                    "feed the positions before it first"
                )
            why = None if row >= len(self._ends) else self._refusal(row, start, end)
            if why is not None:
                raise Refused(why)

    def prepare(self, rows: Rows, like: Tensor) -> None:
        self._refuse_what_is_gone(rows.starts)
        super().prepare(rows, like)

    def record(self, rows: Rows) -> None:
        self._ends[: len(rows.starts)] = map(add, rows.starts, rows.lengths)

    @property
    def ends(self) -> list[int]:
        return self._ends
