"""The Llama architecture: token ids at positions in, logits out, with or without a KV cache.

Knows tensors and ids; does not know text, files, sampling or how a step is made fast.
Shapes: bsz rows, seqlen tokens fed, dim the width, vocab the vocabulary.
Source: Touvron et al., https://arxiv.org/abs/2302.13971; the names are those of Meta's checkpoints.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Literal, cast

import torch
from torch import Tensor, nn

from llama.args import ModelArgs
from llama.generation import Generation
from llama.kv_cache import KVCache, check_lossless, use_kind
from llama.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from llama.ops import PLAIN, Ops, Scoring, attention_mass, check_attention, last_real
from llama.ownership import Ownership
from llama.ranks import current_ranks
from llama.rope import RopeTable, apply_rotary_emb
from llama.rows import Rows
from llama.runner import Execution, Runner
from llama.session import Sessions

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
        self.cache = KVCache.of(args.share(current_ranks().size))  # holds no memory before it is used
        self.kv_caching = args.kv_caching
        self.ops: Ops = PLAIN
        self.fed_by: Ownership | None = None  # that of the model that was fed last: models may share a layer

    def forward(self, x: Tensor, rows: Rows, freqs_cis: tuple[Tensor, Tensor]) -> Tensor:
        """Map (bsz, seqlen, dim) to the same shape."""
        xq = self.wq(x).unflatten(-1, (-1, self.head_dim))  # (bsz, seqlen, n_heads, head_dim)
        xk = self.wk(x).unflatten(-1, (-1, self.head_dim))  # (bsz, seqlen, n_kv_heads, head_dim)
        xv = self.wv(x).unflatten(-1, (-1, self.head_dim))
        xq, xk = self.q_norm(xq), self.k_norm(xk)
        xq, rotated = apply_rotary_emb(xq, xk, freqs_cis)

        if self.kv_caching:
            if self.cache.weighs:
                reader = f"kv_cache={self.cache.args.kv_cache!r} reads the attention weights of its keys"
                check_attention(self.ops, reader, "choose another kind of cache")
            keys, values = self.cache.update(rows, xk if self.cache.unrotated else rotated, xv)
            visible = self.cache.visible(rows, xq)
            # The positions before `weigh`, in which a kind may drop keys.
            scoring = Scoring(self.layer, self.cache.key_positions(), self.ops.score_mod)
            if self.cache.weighs:
                self.cache.weigh(attention_mass(xq, keys, rows, visible, scoring))
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

    def forward(self, x: Tensor, rows: Rows, freqs_cis: tuple[Tensor, Tensor]) -> Tensor:
        h = x + self.attention(self.attention_norm(x), rows, freqs_cis)
        out: Tensor = h + self.feed_forward(self.ffn_norm(h))
        return out


class Transformer(nn.Module, Generation, Sessions):
    """A Llama model. `kv_caching` switches the cache of all its layers, at any time between two calls."""

    layers: nn.ModuleList
    ops: Ops
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
        self.ownership = Ownership()
        self.ops = PLAIN
        for cache in self.caches:
            cache.rope = self.rope

    def bound(self, kv_cache: str | None = None) -> int | None:
        cache = self.first_attention.cache
        return cache.bound if kv_cache is None else use_kind([cache], kv_cache, exact=self.exact)[0].bound

    @property
    def params(self) -> ModelArgs:
        """The sizes and limits, under the name that programs written for Meta's llama3 read."""
        return self.args

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """That of the activations, which int8 weights do not have."""
        return self.norm.weight.dtype

    @property
    def blocks(self) -> list[TransformerBlock]:
        """The layers, by their type."""
        return cast(list[TransformerBlock], list(self.layers))

    @property
    def caches(self) -> list[KVCache]:
        """The cache of every layer, first layer first."""
        return [layer.attention.cache for layer in self.blocks]

    @caches.setter
    def caches(self, value: list[KVCache]) -> None:
        with self.ownership.changing():
            self._check_kinds(value)
            self.put_back(value)

    def put_back(self, caches: list[KVCache]) -> None:
        """Give the layers the caches that they had before, whatever their kinds."""
        with self.ownership.changing():
            for layer, cache in zip(self.blocks, caches, strict=True):
                layer.attention.cache = cache
            self._tell_caches()

    @property
    def kv_caching(self) -> bool:
        """Whether past keys and values are kept. Setting it to False frees them."""
        return self.first_attention.kv_caching

    @kv_caching.setter
    def kv_caching(self, value: bool) -> None:
        if not isinstance(value, bool):
            raise ValueError(f"kv_caching={value!r} must be True or False")
        with self.ownership.changing():
            for layer in self.blocks:
                layer.attention.kv_caching = value
            if not value:
                self.free_cache()
                if self.runner is not None:
                    self.runner.free_cache()

    @property
    def kv_cache(self) -> str:
        """The kind of the cache, NAME or NAME:PARAMS. Setting it puts an empty one of another kind into every layer."""
        return self.first_attention.cache.args.kv_cache

    @kv_cache.setter
    def kv_cache(self, value: str) -> None:
        self.caches = use_kind(self.caches, value, exact=self.exact)

    @property
    def exact(self) -> bool:
        """Whether the bits of a position's logits depend on nothing but the tokens up to it, inference alone.

        Not on the cache being on or off, on how a text is cut into calls, or on the rows beside it. Setting it to True
        compares the model with itself, which empties the cache, and raises ValueError where a bit differs. Where a
        runner serves the model, it is what is compared, and what it cannot serve raises ValueError from then on.
        """
        return self.ops.exact or (self.runner is not None and self.runner.exact is True)

    @exact.setter
    def exact(self, value: bool) -> None:
        from llama.exact.switch import set_exact  # the one import that is deferred: plain models need none of it

        set_exact(self, value)

    @property
    def execution(self) -> Execution:
        """How forwards are executed now."""
        kinds = {str(module.stored_as) for module in self.modules() if hasattr(module, "stored_as")}
        bits = min((vars(module).get("activations", 16) for module in self.modules()), default=16)
        name = str(self.ops) if self.runner is None else self.runner.name
        return Execution(name, min(kinds, default=None), bits, self.exact)

    def use(self, ops: Ops) -> None:
        """Do every operation of the model in this way."""
        with self.ownership.changing():
            for module in self.modules():
                if hasattr(module, "ops"):
                    module.ops = ops  # type: ignore[assignment]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Transformer":
        exact = self.exact
        if exact:
            self.exact = False
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if exact:  # on another device or in another dtype it has to be shown anew
            self.exact = True
        return self

    def reserve_cache(self, rows: int, length: int) -> None:
        """Start with empty caches that will take room for exactly `rows` x `length` positions when first written."""
        with self.ownership.changing():
            self._tell_caches()
            for cache in self.caches:
                cache.reserve(rows, length)

    def free_cache(self) -> None:
        """Hold no cache memory until the next cached call; a GPU's fast step keeps what its graphs write into."""
        with self.ownership.changing():
            for cache in self.caches:
                cache.free()

    def forward(
        self,
        tokens: Tensor,
        start_pos: int | Sequence[int] | Tensor | Rows = 0,
        *,
        logits: Literal["all", "last"] = "all",
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Return the logits that follow each token, (bsz, seqlen, vocab), in float32 or wider.

        `tokens` is (bsz, seqlen) int64, and its first column stands at `start_pos`, an int or one per row. With the
        cache on, positions before `start_pos` must have been fed by earlier calls. `logits="last"` gives those of the
        last token only, (bsz, 1, vocab); where rows are padded on the right, `lengths` says how many tokens of each
        are real, and its own last one is taken. A `Rows` in the place of `start_pos` says all of that. Raises
        ValueError on what the limits or the cache do not allow.
        """
        rows = Rows.of(tokens, start_pos, lengths)
        compiling = torch.compiler.is_compiling()  # into a graph goes the plain path
        if compiling and self.runner is not None and self.runner.exact:
            raise ValueError(
                "exact mode computes by native code here, which no graph can hold; do not compile the model"
            )
        begins, on = rows.start == 0, self.kv_caching
        with nullcontext() if compiling else self.ownership.call(shared=lambda: not self.kv_caching, begins=begins):
            if on:
                self._take_caches(begins=begins)
            self.check_rows(rows, logits)
            runner = None if compiling else self.runner
            done = None if runner is None else runner(self, tokens, rows, logits=logits)
            return self._plain(tokens, rows, logits) if done is None else done

    def check_rows(self, rows: Rows, logits: str) -> None:
        """Raise ValueError for rows that the limits or the cache do not allow, and for unknown `logits`."""
        cache, on, furthest = self.first_attention.cache, self.kv_caching, max(rows.starts)
        self.args.check_room(len(rows.starts), 0 if on and cache.bound else rows.end)
        if furthest > 0 and not on:
            raise ValueError(
                f"start_pos={furthest} needs the KV cache, which is off: feed the whole prefix at start_pos=0"
            )
        if furthest > 0 and cache.nbytes == 0:
            raise ValueError(
                f"start_pos={furthest} with an empty KV cache: feed the positions before it first "
                "(generate, free_cache, switching off and asking for exact mode empty the cache)"
            )
        if logits not in ("all", "last"):
            raise ValueError(f"logits={logits!r} must be 'all' or 'last'")

    def _plain(self, tokens: Tensor, rows: Rows, logits: str) -> Tensor:
        """Compute what `forward` returns, by the modules."""
        freqs_cis = self.rope.at(self.first_attention.cache.rope_starts(rows), rows.width, tokens.device)
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, rows, freqs_cis)
        if logits == "last":
            h = last_real(h, rows.lengths)
        scores: Tensor = self.output(self.norm(h))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    @property
    def first_attention(self) -> Attention:
        """The layer that is asked where all agree: every step asks, and a list of all layers would cost more."""
        return cast(TransformerBlock, self.layers[0]).attention

    def _take_caches(self, *, begins: bool) -> None:
        """Give caches that lack them this model's angles: new ones, and those of layers that two models share.

        Raises RuntimeError in the middle of a text where another model has fed the layers since.
        """
        caches = [one.cache for one in _attentions(self.layers)] if begins else []
        if len(set(map(id, caches))) < len(caches):
            raise ValueError(
                "two layers share one cache, and would write over each other's keys; give each a cache of its own "
                "(copy.deepcopy of the layer), or switch the cache off"
            )
        if begins:
            self._check_kinds(caches)
        ends = _attentions((self.layers[0], self.layers[-1]))  # all layers would cost more
        if all(one.fed_by is self.ownership and one.cache.rope is self.rope for one in ends):
            return
        others = [one.fed_by for one in ends if one.fed_by is not self.ownership]
        if not begins and any(owner is not None and owner.fed for owner in others):
            raise RuntimeError(
                "another model, which shares layers with this one, has fed them since this text was begun; feed it "
                "again from start_pos=0, or, where the caches hold it again, set model.caches = model.caches"
            )
        self._tell_caches()

    def _check_kinds(self, caches: Sequence[KVCache]) -> None:
        """Refuse kinds of cache that cannot serve one text together, or cannot serve exact mode."""
        kinds = {(type(cache), cache.args.kv_cache, cache.bound) for cache in caches}
        if len(kinds) > 1 and any(kind.rope_starts is not KVCache.rope_starts for kind, _, _ in kinds):
            names = ", ".join(sorted(f"{name} ({kind.__name__})" for kind, name, _ in kinds))
            raise ValueError(
                f"the caches of the layers are {names}, which rotate queries by different positions, and the model "
                "rotates a query alike in all layers; use one kind and one size in all layers"
            )
        if self.exact:
            check_lossless(caches)

    def _tell_caches(self) -> None:
        self.ownership.fed = True
        for attention in _attentions(self.layers):
            attention.fed_by, attention.cache.rope = self.ownership, self.rope


def _attentions(layers: Iterable[nn.Module]) -> list[Attention]:
    """Return the attentions that have a cache: a layer of one's own may have none."""
    found = (getattr(layer, "attention", None) for layer in layers)
    return [cast(Attention, one) for one in found if hasattr(one, "cache")]
