"""The Llama architecture: token ids at positions in, logits out, with or without a KV cache.

A model is weights. Past keys and values belong to a text, in a cache that is given to each call. Knows tensors and ids;
does not know text, files, sampling or how a step is made fast.
Shapes: bsz rows, seqlen tokens fed, dim the width, vocab the vocabulary.
Source: Touvron et al., https://arxiv.org/abs/2302.13971; the names are those of Meta's checkpoints.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal, cast

import torch
from torch import Tensor, nn

from llama.args import ModelArgs
from llama.generation import Generation
from llama.kv_cache import Attended, Cache, KVCache
from llama.kv_cache.cache import Source
from llama.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from llama.ops import PLAIN, Ops, Scoring, last_real
from llama.ranks import current_ranks
from llama.rope import RopeTable, apply_rotary_emb
from llama.rows import Rows
from llama.session import Sessions
from llama.stepper import Runner
from llama.switches import Switches, check_call

__all__ = ["Attention", "FeedForward", "ModelArgs", "RMSNorm", "Transformer", "TransformerBlock"]


class RMSNorm(nn.Module):
    """Scale every vector to a root mean square of one, then each of its numbers by a learned weight."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.ops: Ops = PLAIN

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention over what is fed, and over the past where the cache is on."""

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
        """Map (bsz, seqlen, dim) to the same shape. `cache` is this layer's; with the switch off it is not used."""
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
    """The gated MLP (SwiGLU, https://arxiv.org/abs/2002.05202), the same for every token."""

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
    """One layer: attention, then the MLP, each on normed input and added to it."""

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


class Transformer(Switches, Generation, Sessions):
    """A Llama model. `kv_caching` switches the cache of all its layers, at any time between two calls."""

    runner: "Runner[Transformer] | None"

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        if args.vocab_size < 1:
            raise ValueError(f"vocab_size={args.vocab_size}: a model needs to know how many tokens there are")
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
        """The sizes and limits, under the name that programs written for Meta's llama3 read."""
        return self.args

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def source(self) -> Source:
        weight, exact = self.norm.weight, self.ops.exact and "plain"
        if self.runner is not None and self.runner.exact:
            exact = self.runner.code
        return Source(self.identity, exact, weight.dtype, weight.device)

    @property
    def blocks(self) -> list[TransformerBlock]:
        """The layers, by their type."""
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
        """Return the logits that follow each token, (bsz, seqlen, vocab), in float32 or wider.

        `tokens` is (bsz, seqlen) int64, and its first column stands at `start_pos`, an int or one per row. With the
        switch on, `cache` is what is fed, by default the one that the model keeps for this thread; positions before
        `start_pos` must have been fed to it by earlier calls. `logits="last"` gives those of the last token only,
        (bsz, 1, vocab); where rows are padded on the right, `lengths` says how many tokens of each are real, and its
        own last one is taken. A `Rows` in the place of `start_pos` says all of that. Raises ValueError on what the
        limits or the cache do not allow, and RuntimeError where another call with this cache is under way.
        """
        rows = start_pos if isinstance(start_pos, Rows) and lengths is None else Rows.of(tokens, start_pos, lengths)
        if cache is None and self.kv_caching:
            cache = self.own_cache()
        check_call(self, tokens, rows, cache, logits)
        if torch.compiler.is_compiling():  # into a graph goes the plain path
            return self._plain(tokens, rows, cache, logits)
        with nullcontext() if cache is None else cache.feeding(self.source, begins=rows.start == 0):
            done = None if self.runner is None else self.runner(self, tokens, rows, cache, logits=logits)
            return self._plain(tokens, rows, cache, logits) if done is None else done

    def _plain(self, tokens: Tensor, rows: Rows, cache: Cache | None, logits: str) -> Tensor:
        """Compute what `forward` returns, by the modules."""
        h = self.tok_embeddings(tokens)
        caches = [None] * len(self.layers) if cache is None else cache.layers
        angles: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}  # kinds may count positions in their own ways
        for layer, held in zip(self.layers, caches, strict=True):
            starts = held.rope_starts(rows) if held is not None and held.counts_places else rows.starts
            if starts not in angles:
                angles[starts] = self.rope.at(starts, rows.width, tokens.device)
            h = layer(h, rows, angles[starts], held)
        if logits == "last" and rows.width > 1:
            h = last_real(h, rows.lengths)
        scores: Tensor = self.output(self.norm(h))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))
