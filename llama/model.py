"""The Llama architecture: token ids and positions in, logits out, with or without a KV cache.

A model is weights. Past keys and values belong to a text and are in a cache, an argument of each call. Knows tensors
and ids; does not know text, files, sampling or faster ways to run a step.
Shapes: bsz rows, seqlen tokens per row, dim the width, vocab the size of the vocabulary.
Source: Touvron et al., https://arxiv.org/abs/2302.13971; the names are those of Meta's checkpoints.
"""

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor, nn

from llama.args import ModelArgs
from llama.generation import Generation
from llama.kv_cache import Attended, Cache, KVCache
from llama.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from llama.ops import PLAIN, Ops, Scoring, last_real
from llama.ranks import current_ranks
from llama.rope import RopeTable, apply_rotary_emb
from llama.rows import Rows
from llama.stepper import Runner
from llama.switches import Switches, check_call

__all__ = ["Attention", "FeedForward", "ModelArgs", "RMSNorm", "Transformer", "TransformerBlock"]


class RMSNorm(nn.Module):
    """Scale every vector to a root mean square of 1, and multiply each number by a learned weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.ops: Ops = PLAIN

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention over the tokens of a call and, if `kv_caching` is on, over the cached ones."""

    def __init__(self, args: ModelArgs, layer: int = 0) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = args.head_dim
        queries, keys = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
        self.wq = ColumnParallelLinear(args.dim, queries, bias=args.attention_bias)
        self.wk = ColumnParallelLinear(args.dim, keys, least=args.head_dim, bias=args.attention_bias)
        self.wv = ColumnParallelLinear(args.dim, keys, least=args.head_dim, bias=args.attention_bias)
        self.wo = RowParallelLinear(queries, args.dim)
        self.q_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else nn.Identity()
        self.kv_caching = args.kv_caching
        self.ops: Ops = PLAIN

    def forward(self, x: Tensor, rows: Rows, freqs_cis: tuple[Tensor, Tensor], cache: KVCache) -> Tensor:
        """Return attention of x, (bsz, seqlen, dim), in the same shape. `cache`: this layer's, None if off."""
        xq = self.wq(x).unflatten(-1, (-1, self.head_dim))  # (bsz, seqlen, n_heads, head_dim)
        xk = self.wk(x).unflatten(-1, (-1, self.head_dim))  # (bsz, seqlen, n_kv_heads, head_dim)
        xv = self.wv(x).unflatten(-1, (-1, self.head_dim))
        xq, xk = self.q_norm(xq), self.k_norm(xk)
        xq, rotated = apply_rotary_emb(xq, xk, freqs_cis)

        if self.kv_caching:
            keys, values = cache.update(rows, xk if cache.unrotated else rotated, xv)
            visible = cache.visible(rows, xq)
            scoring = Scoring(self.layer, cache.key_positions(), self.ops.score_mod)
            if cache.observes:
                cache.observe(Attended(self, rows, x, xq, keys, values, visible, scoring))
        else:
            keys, values, visible = rotated, xv, None
            scoring = Scoring(self.layer, None, self.ops.score_mod)

        output = self.ops.attend(xq, keys, values, rows, visible, scoring)
        out: Tensor = self.wo(output.flatten(-2))
        return out


class FeedForward(nn.Module):
    """The gated MLP (SwiGLU, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.w1 = ColumnParallelLinear(args.dim, args.ffn_dim)
        self.w2 = RowParallelLinear(args.ffn_dim, args.dim)
        self.w3 = ColumnParallelLinear(args.dim, args.ffn_dim)
        self.ops: Ops = PLAIN

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(self.ops.silu(self.w1(x)) * self.w3(x))
        return out


class TransformerBlock(nn.Module):
    """One layer: attention, then the MLP, each applied to the norm of its input and added to the input."""

    def __init__(self, args: ModelArgs, layer: int = 0) -> None:
        super().__init__()
        self.attention = Attention(args, layer)
        self.feed_forward = FeedForward(args)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, x: Tensor, rows: Rows, freqs_cis: tuple[Tensor, Tensor], cache: KVCache) -> Tensor:
        h = x + self.attention(self.attention_norm(x), rows, freqs_cis, cache)
        out: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class Transformer(Switches, Generation):
    """A Llama model. `kv_caching` switches the cache of all layers on or off, at any time between two calls."""

    norm: RMSNorm
    runner: "Runner[Transformer] | None"

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        if args.vocab_size < 1:
            raise ValueError(f"vocab_size={args.vocab_size} must be the tokenizer's number of tokens, at least 1")
        self.args = args
        self.ranks = current_ranks()
        self.tok_embeddings = VocabParallelEmbedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args, layer) for layer in range(args.n_layers))
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = ColumnParallelLinear(args.dim, args.vocab_size, gather_output=True)
        if args.tied_head:
            self.output.weight = self.tok_embeddings.weight
        self.rope = RopeTable.of(args)
        self.ops = PLAIN
        self.kv_cache = args.kv_cache

    @property
    def params(self) -> ModelArgs:
        """`args`, under the name that Meta's llama3 has for it."""
        return self.args

    @property
    def blocks(self) -> list[TransformerBlock]:
        """The layers as a list, with their type."""
        return cast(list[TransformerBlock], list(self.layers))

    def forward(
        self,
        tokens: Tensor,
        start_pos: int | Sequence[int] | Tensor | Rows = 0,
        *,
        cache: Cache | None = None,
        logits: Literal["all", "last"] = "all",
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the logits for the token after each token, (bsz, seqlen, vocab), in float32 or wider.

        tokens: (bsz, seqlen) int64. start_pos: the position of the first column, an int or one per row. cache: the
        cache to read and extend, by default the model's own for this thread; None with `kv_caching` off. It must
        contain the positions before `start_pos`. logits: "last" computes the last token's only, (bsz, 1, vocab).
        lengths: the number of tokens per row without padding on the right; "last" is the last of these, and the logits
        of padding mean nothing. A `Rows` for
        `start_pos` has all of that. Raises ValueError for a call that the limits or the cache do not allow, and
        RuntimeError during another call with the same cache.
        """
        rows = Rows.of(tokens, start_pos, lengths)
        if cache is None and self.kv_caching:
            cache = self.own_cache()
        check_call(self, tokens, rows, cache, logits)
        if torch.compiler.is_compiling():  # a compiled graph contains the plain path
            return self._plain(tokens, rows, cache, logits)

        def computed() -> Tensor:
            done = None if self.runner is None else self.runner(self, tokens, rows, cache, logits=logits)
            return self._plain(tokens, rows, cache, logits) if done is None else done

        return computed() if cache is None else cache.feed(self.source, rows.starts, computed)

    def _plain(self, tokens: Tensor, rows: Rows, cache: Cache | None, logits: str) -> Tensor:
        """Return the logits, computed by the modules."""
        h = self.tok_embeddings(tokens)
        caches = [None] * len(self.layers) if cache is None else cache.layers
        angles: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # a kind of cache may renumber positions
        for layer, held in zip(self.layers, caches, strict=True):
            starts = held.rope_starts(rows) if held is not None and held.has_rope_starts else rows.starts
            if starts not in angles:
                angles[starts] = self.rope.at(starts, rows.width, tokens.device)
            h = layer(h, rows, angles[starts], held)
        if logits == "last" and rows.width > 1:
            h = last_real(h, rows.lengths)
        scores: Tensor = self.output(self.norm(h))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))
