"""The single door to attention kernels: who may look at whom follows from positions, and grouped heads share keys.

Knows tensors and positions; does not know whether keys came out of a cache.
Shapes: bsz rows, seqlen queries, kv_len keys; n_heads is a multiple of n_kv_heads (grouped-query attention,
https://arxiv.org/abs/2305.13245).
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    xq: Tensor,
    keys: Tensor,
    values: Tensor,
    start_pos: int | Sequence[int],
    key_positions: Tensor | None = None,
) -> Tensor:
    """Let every query look at the keys at or before its own position; return (bsz, seqlen, n_heads, head_dim).

    xq is (bsz, seqlen, n_heads, head_dim), and its query i stands at start_pos + i. keys and values are
    (bsz, kv_len, n_kv_heads, head_dim), and key j stands at j, or at key_positions[j], (kv_len,) or (bsz, kv_len);
    with key_positions, all of them must be finite, also where nobody looks.
    """
    if isinstance(start_pos, int):
        return _attend_in_step(xq, keys, values, start_pos, key_positions)
    # Rows at different positions are attended one by one, each over its own keys, so that a row gives what it gives
    # alone.
    rows = []
    for row, pos in enumerate(start_pos):
        one = slice(row, row + 1)
        places = key_positions if key_positions is None or key_positions.ndim == 1 else key_positions[row]
        rows.append(_attend_in_step(xq[one], keys[one], values[one], pos, places))
    return torch.cat(rows)


def _attend_in_step(xq: Tensor, keys: Tensor, values: Tensor, start_pos: int, key_positions: Tensor | None) -> Tensor:
    """Attend where all rows stand at the same position."""
    seqlen = xq.shape[1]
    end = start_pos + seqlen
    mask, causal = None, False
    if key_positions is not None:
        mask = _mask(start_pos, seqlen, key_positions)
    else:  # what lies past the end is never read: a mask would multiply it by zero, and 0 * nan is nan
        keys, values = keys[:, :end], values[:, :end]
        if seqlen > 1 and start_pos > 0:  # is_causal would align the first query with the first key
            mask = _mask(start_pos, seqlen, torch.arange(end, device=xq.device))
        elif seqlen > 1:
            causal = True
    output = F.scaled_dot_product_attention(
        xq.transpose(1, 2),  # (bsz, n_heads, seqlen, head_dim)
        keys.transpose(1, 2),  # (bsz, n_kv_heads, kv_len, head_dim)
        values.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=xq.shape[2] != keys.shape[2],
    )
    return output.transpose(1, 2)


def _mask(start_pos: int, seqlen: int, key_positions: Tensor) -> Tensor:
    """Return True where a query may look at a key: (seqlen, kv_len), or (bsz, 1, seqlen, kv_len)."""
    query_positions = start_pos + torch.arange(seqlen, device=key_positions.device)
    mask = key_positions[..., None, :] <= query_positions[:, None]
    return mask if mask.ndim == 2 else mask[:, None]
