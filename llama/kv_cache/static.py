"""The static cache: memory that is allocated once and written in place."""

from collections.abc import Sequence

from torch import Tensor

from llama.kv_cache.contract import KVCache, NativeLayout, doubled
from llama.rows import Rows


class StaticCache(KVCache, kind="static"):
    """Buffers that are allocated once and written in place: (rows, length, n_kv_heads, head_dim).

    `reserve` sets their size; a write that needs more, up to the limits, moves them into larger ones. Positions that
    were not written have undefined contents, and positions behind the end of a row may have those of an earlier text.
    """

    preallocates = True
    keeps_past = True
    native = 1

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        self.check(rows, xk, xv)
        bsz, end = len(rows.starts), rows.end
        self.prepare(rows, like=xk)
        assert self.keys is not None
        assert self.values is not None
        self._write(rows, xk, xv)
        return self.keys[:bsz, :end], self.values[:bsz, :end]

    def prepare(self, rows: Rows, like: Tensor) -> None:
        bsz, end = len(rows.starts), rows.end
        if not self.fits(bsz, end):
            self.args.check_room(bsz, end)
            self._grow(bsz, end, like, most=self.args.max_seq_len, reserved=self.reserved[1])

    def native_layout(self, like: Tensor) -> NativeLayout | None:
        assert self.keys is not None
        rows, length = self.keys.shape[:2]
        return NativeLayout(self.sizes(rows, length, like), length)

    def predicted_bytes(
        self, *, prompts: Sequence[int], ends: Sequence[int], reserved: tuple[int, int], itemsize: int
    ) -> int:
        rows, length = max(len(prompts), reserved[0]), max(*prompts, reserved[1])
        return rows * doubled(length, max(ends), self.args.max_seq_len) * self.position_bytes(itemsize)

    def written(self, name: str, length: int) -> int:
        return length

    def room(self, rows: int, length: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the whole buffers, at least `rows` x `length`, for callers that write into them."""
        self._grow(rows, length, like, most=length, reserved=self.reserved[1])
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def fits(self, rows: int, length: int) -> bool:
        """Return True if the buffers have at least `rows` x `length` positions."""
        return self.keys is not None and self.keys.shape[0] >= rows and self.keys.shape[1] >= length
