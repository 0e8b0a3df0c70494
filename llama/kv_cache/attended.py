"""One layer's attention in one call, as a kind of cache may look at it. Nothing is computed unless it is asked for.

Knows tensors and positions; does not know kinds of cache.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from llama.ops import Scoring, attention_weights, check_attention
from llama.rows import Rows


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """What a kind of cache is given by `KVCache.observe`.

    module: the layer's `Attention`. rows: those of the call. x: its input, (bsz, seqlen, dim), normed. xq: its queries
    as RoPE has rotated them, (bsz, seqlen, n_heads, head_dim). keys, values: what `update` returned, (bsz, kv_len,
    n_kv_heads, head_dim). visible: what `visible` returned. scoring: what the scores depend on besides.
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
        """Return one row alone, without the tokens that pad it, and without keys that lie past its end.

        Keys are cut where they stand at 0, 1, 2, ...; where `visible` says what a query sees, all of them stay.
        """
        one, length, visible, stand = (
            slice(row, row + 1),
            self.rows.lengths[row],
            self.visible,
            self.scoring.key_positions,
        )
        kv_len = self.keys.shape[1]
        if visible is None:
            kv_len = min(kv_len, self.rows.starts[row] + length)
        else:
            visible = (visible if visible.ndim == 2 else visible[one])[..., :length, :]
        if stand is not None:
            stand = (stand if stand.ndim == 1 else stand[one])[..., :kv_len]
        return replace(
            self,
            rows=replace(self.rows.row(row), width=length),
            x=self.x[one, :length],
            xq=self.xq[one, :length],
            keys=self.keys[one, :kv_len],
            values=self.values[one, :kv_len],
            visible=visible,
            scoring=self.scoring._replace(key_positions=stand),
        )

    def queries_before_rope(self) -> Tensor:
        """Return the queries as they are before RoPE, (bsz, seqlen, n_heads, head_dim)."""
        queries: Tensor = self.module.q_norm(self.module.wq(self.x).unflatten(-1, (-1, self.xq.shape[-1])))
        return queries

    def attention(self, last: int) -> Tensor:
        """Return how the last `last` queries of a row weigh its keys, (n_heads, last, kv_len), in float32 or wider.

        The weights are those of an explicit softmax, with the model's `score_mod`; a query gives all keys together 1.
        Raises ValueError for several rows, or one that is padded: take `row` first. Raises it, too, for more queries
        than there are, and where the model's operations have an attention that is not known to be a softmax.
        """
        width = self.rows.width
        if self.rows.lengths != (width,) or not 0 < last <= width:
            raise ValueError(
                f"attention({last}) of rows of {width} tokens, of which {self.rows.lengths} are real: take "
                "attended.row(i) first, and ask for 1 to as many queries as it has tokens"
            )
        check_attention(
            self.module.ops,
            "this kind of cache reads the attention weights of its keys",
            "choose another kind of cache",
        )
        visible = None if self.visible is None else self.visible[..., -last:, :]
        start = self.rows.starts[0] + width - last
        return attention_weights(self.xq[:, -last:], self.keys, start, visible, self.scoring)[0]
