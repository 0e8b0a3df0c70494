"""The concatenating cache, as most teaching code has it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from llama.kv_cache.contract import KVCache
from llama.limits import check_room


class ConcatCache(KVCache, kind="concat"):
    """Grows by concatenation, as most teaching code does: every step copies all keys and values once more."""

    def update(self, start_pos: int | Sequence[int], xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        ends = self.check(start_pos, xk, xv)
        check_room(len(ends), max(ends), self.args)
        self._refuse_gap(start_pos, rows=len(ends))
        if self.keys is not None and self.keys.shape[0] < len(ends):
            self.free()  # more rows than before can only be a new batch, from position 0 on
        if isinstance(start_pos, int):
            self.keys = xk if self.keys is None else torch.cat((self.keys[: len(ends), :start_pos], xk), dim=1)
            self.values = xv if self.values is None else torch.cat((self.values[: len(ends), :start_pos], xv), dim=1)
        else:
            self.keys, self.values = self._room(self.keys, ends, xk), self._room(self.values, ends, xv)
            self._write(start_pos, xk, xv)
        return self.keys[:, : max(ends)], self.values[:, : max(ends)]

    def state(self, rows: int | None = None, length: int | None = None) -> dict[str, Tensor]:
        return {name: buffer[:, :length] for name, buffer in super().state(rows).items()}

    def restore(self, state: Mapping[str, Tensor], rows: int, length: int) -> None:
        self._in_order(state, rows, length)
        super().restore(state, rows, length)

    def _refuse_gap(self, start_pos: int | Sequence[int], *, rows: int) -> None:
        furthest = start_pos if isinstance(start_pos, int) else max(start_pos)
        held_rows, held = (0, 0) if self.keys is None else self.keys.shape[:2]
        if furthest > 0 and (furthest > held or rows > held_rows):
            raise ValueError(
                f"the concat cache holds {held_rows} rows of {held} positions, "
                f"so {rows} rows at position {furthest} would leave a gap"
            )

    @staticmethod
    def _room(held: Tensor | None, ends: list[int], like: Tensor) -> Tensor:
        """Return a copy of what is held, with as many positions as the furthest row needs."""
        shape = (len(ends), max(ends), *like.shape[2:])
        if held is None:
            return like.new_empty(shape)
        missing = max(max(ends) - held.shape[1], 0)
        return torch.cat((held[: len(ends)], like.new_empty((len(ends), missing, *like.shape[2:]))), dim=1)
