"""Rows for the tensors of a test that are written to a cache or attended."""

from collections.abc import Sequence

from torch import Tensor

from llama.kv_cache import KVCache
from llama.rows import Rows


def rows_of(start_pos: int | Sequence[int], x: Tensor, *, lengths: Sequence[int] | None = None) -> Rows:
    """Return the rows of x, (bsz, seqlen, ...)."""
    bsz, seqlen = x.shape[:2]
    starts = [start_pos] * bsz if isinstance(start_pos, int) else start_pos
    return Rows.at(starts, [seqlen] * bsz if lengths is None else lengths, width=seqlen)


def write(
    cache: KVCache,
    start_pos: int | Sequence[int],
    xk: Tensor,
    xv: Tensor,
    *,
    lengths: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what the cache returns when it is given these keys and values from `start_pos` on."""
    return cache.update(rows_of(start_pos, xk, lengths=lengths), xk, xv)
