"""One layer's attention in one call, for kinds of cache that observe it. Results are computed on request.

Knows tensors and positions; does not know kinds of cache.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llama.ops import Scoring, attention_weights, check_attention
from llama.rows import Rows

BLOCK = 256  # queries


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """The argument of `KVCache.observe`.

    module: the layer's `Attention`.
    rows: the rows of the call.
    x: the layer's normed input, (bsz, seqlen, dim).
    xq: the queries after RoPE, (bsz, seqlen, n_heads, head_dim).
    keys, values: the result of `update`, (bsz, kv_len, n_kv_heads, head_dim).
    visible: the result of `visible`.
    scoring: what the scores depend on besides queries and keys.
    """

    module: Any
    rows: Rows
    x: Tensor
    xq: Tensor
    keys: Tensor
    values: Tensor
    visible: Tensor | None
    scoring: Scoring

    def row(self, row: int) -> "Attended":
        """Return one row without its padding.

        If `visible` is None, keys behind the row's end are left out; otherwise all keys stay.
        """
        one, length, kv_len = slice(row, row + 1), self.rows.lengths[row], self.keys.shape[1]
        visible, positions = self.visible, self.scoring.key_positions
        if visible is None:
            kv_len = min(kv_len, self.rows.starts[row] + length)
        else:
            visible = (visible if visible.ndim == 2 else visible[one])[..., :length, :]
        if positions is not None:
            positions = (positions if positions.ndim == 1 else positions[one])[..., :kv_len]
        return replace(
            self,
            rows=replace(self.rows.row(row), width=length),
            x=self.x[one, :length],
            xq=self.xq[one, :length],
            keys=self.keys[one, :kv_len],
            values=self.values[one, :kv_len],
            visible=visible,
            scoring=self.scoring._replace(key_positions=positions),
        )

    def at_keys(self, columns: Tensor) -> "Attended":
        """Return one row with those keys alone that `columns`, bool (kv_len,), names. `visible` must not be None."""
        assert self.visible is not None
        positions = self.scoring.key_positions
        return replace(
            self,
            keys=self.keys[:, columns],
            values=self.values[:, columns],
            visible=self.visible[..., columns],
            scoring=self.scoring._replace(key_positions=None if positions is None else positions[..., columns]),
        )

    def queries_before_rope(self) -> Tensor:
        """Return the queries before RoPE, (bsz, seqlen, n_heads, head_dim)."""
        queries: Tensor = self.module.q_norm(self.module.wq(self.x).unflatten(-1, (-1, self.xq.shape[-1])))
        return queries

    def attention(self, last: int) -> Tensor:
        """Return the attention weights of a row's last `last` queries, (n_heads, last, kv_len), in float32 or wider.

        If the row has fewer queries, the result has all of them. The weights come from an explicit softmax, with the
        model's `score_mod`; those of a query sum to 1. Raises ValueError for several rows or a padded one (call `row`
        first), for `last` below 1, and for a model whose attention is not known to be a softmax.
        """
        width = self.rows.width
        if self.rows.lengths != (width,) or last < 1:
            raise ValueError(
                f"attention({last}) of rows of {width} tokens, {self.rows.lengths} without padding: take "
                "attended.row(i) first, and ask for 1 or more queries"
            )
        last = min(last, width)
        check_attention(
            self.module.ops,
            "this kind of cache reads the attention weights of its keys",
            "choose another kind of cache",
        )
        visible = None if self.visible is None else self.visible[..., -last:, :]
        start = self.rows.starts[0] + width - last
        return attention_weights(self.xq[:, -last:], self.keys, start, visible, self.scoring)[0]

    def received(self) -> Tensor:
        """Return the attention that each key of a row receives from all its queries, (n_heads, kv_len).

        It is the sum over the queries of `attention`, computed for 256 of them at a time.
        """
        width = self.rows.width
        total = self.attention(1)[:, 0] * 0
        for begin in range(0, width, BLOCK):
            end = min(begin + BLOCK, width)
            rows = replace(self.rows, width=end, lengths=(end,))
            visible = None if self.visible is None else self.visible[..., :end, :]
            own = replace(self, rows=rows, xq=self.xq[:, :end], visible=visible).attention(end - begin).sum(1)
            total[:, : own.shape[1]] += own
        return total

    def output_norms(self) -> Tensor:
        """Return the L1 norm of each value's product with its query head's part of `wo`, (n_heads, kv_len).

        The product is what the value adds to the layer's output if its key receives all attention.
        """
        weight, wide = self.module.wo.weight, torch.promote_types(self.values.dtype, torch.float32)
        heads, kv_len, width = self.xq.shape[2], *self.values.shape[1::2]
        packed = not isinstance(weight, Tensor)  # then some outputs are unpacked at a time
        blocks = (weight.rows(*block, self.values.dtype) for block in weight.blocks()) if packed else (weight,)
        values = self.values[0].transpose(0, 1).to(wide)  # (n_kv_heads, kv_len, head_dim)
        norms = torch.zeros(heads, kv_len, dtype=wide, device=values.device)
        for block in blocks:
            for head, part in enumerate(block.to(wide).split(width, dim=1)):
                norms[head] += (values[head * len(values) // heads] @ part.T).abs().sum(-1)
        return norms
