"""Tiny Llama models, caches full of nan, and an independent answer: transformers' Llama.

Nothing here uses llama/checkpoint, llama/rope or llama/ops, so that a mistake there cannot be made twice.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from llama import testing
from llama.args import ModelArgs, RopeScaling
from llama.kv_cache import Cache, ConcatCache, StaticCache
from llama.model import Transformer
from llama.rows import Rows

# Logits of about 3 with roundings of 1e-16 were measured to stay within 3e-12 of each other; a wrong formula does not.
FP64_TOLERANCE = 1e-10


def fp32_tolerance(logits: Tensor, args: ModelArgs, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest difference of logits by rounding alone.

    A sum of n products has an error of about eps * sqrt(n) of its size, each layer adds one, and softmax and norm can
    magnify it. Over 150 drawn models, the distance to transformers was at most a tenth of this.
    """
    widest = max(args.dim, args.n_heads * args.head_dim, args.ffn_dim)
    return 32 * torch.finfo(dtype).eps * math.sqrt(widest) * args.n_layers * float(logits.abs().max())


def tiny_args(**changes: Any) -> ModelArgs:
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 40, "multiple_of": 16}
    return ModelArgs(**{**sizes, "max_seq_len": 24, "rope_theta": 10000.0, **changes})


def tiny_model(args: ModelArgs | None = None, *, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    """Return a model whose weights, norms included, are large enough that each affects the logits."""
    return testing.tiny_model(args or tiny_args(**changes), dtype).requires_grad_(True)


def some_tokens(rows: int, length: int, *, vocab_size: int = 40, seed: int = 0) -> Tensor:
    return torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


def bits(tensor: Tensor) -> Tensor:
    """Return the tensor as bytes, in which nan equals nan and -0 differs from 0."""
    return tensor.detach().contiguous().view(torch.uint8)


@dataclass
class Watch:
    """The width, the starts and the cache bytes of every forward of a model."""

    widths: list[int] = field(default_factory=list)
    starts: list[Any] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)


@contextmanager
def watched(model: Transformer) -> Iterator[Watch]:
    """Record the forwards of `model`, so that a test of the cache cannot pass without one."""
    watch = Watch()

    def before(_: nn.Module, given: tuple[Any, ...]) -> None:
        watch.widths.append(given[0].shape[1])
        start_pos = given[1] if len(given) > 1 else 0
        watch.starts.append(list(start_pos.starts) if isinstance(start_pos, Rows) else start_pos)

    def after(fed: Transformer, _: object, named: dict[str, Any], __: object) -> None:
        watch.nbytes.append(nbytes_of(named.get("cache") or fed.cache))

    hooks = model.register_forward_pre_hook(before), model.register_forward_hook(after, with_kwargs=True)
    try:
        yield watch
    finally:
        for hook in hooks:
            hook.remove()


def fed_in_pieces(model: Transformer, tokens: Tensor, cuts: Sequence[int]) -> Tensor:
    """Return the logits of a text that the model reads in calls from 0 and from `cuts` on, through its own cache."""
    model.free_cache()
    edges = [0, *cuts, tokens.shape[1]]
    return torch.cat([model(tokens[:, start:end], start) for start, end in pairwise(edges)], dim=1)


@contextmanager
def failing(model: Transformer, after: int, error: type[BaseException]) -> Iterator[None]:
    """Raise an error in the forward after `after` others, when the first layer has written its keys and values."""
    left = after

    def fail(*_: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise error

    hook = model.layers[1].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def weights_by_loops(
    xq: Tensor,
    keys: Tensor,
    starts: list[int],
    *,
    orders: list[list[int]] | None = None,
    visible: Tensor | None = None,
    change: Callable[[float, int, int], float] = lambda score, *_: score,
) -> Tensor:
    """Return attention weights in float64, (rows, n_heads, seqlen, kv_len), one query at a time.

    `orders`: the positions of each row's keys, by default 0, 1, 2, ... `visible`: a mask of the result's shape, by
    default the past. `change` maps a score, its head and the distance from key to query to a new score.
    """
    rows, seqlen, n_heads, head_dim = xq.shape
    per_group, kv_len = n_heads // keys.shape[2], keys.shape[1]
    weights = torch.zeros(rows, n_heads, seqlen, kv_len, dtype=torch.float64)
    for row, head, i in product(range(rows), range(n_heads), range(seqlen)):
        far = [starts[row] + i - at for at in (orders[row] if orders else range(kv_len))]
        seen = [j for j in range(kv_len) if (far[j] >= 0 if visible is None else visible[row, head, i, j])]
        query, of_head = xq[row, i, head].double(), keys[row, :, head // per_group].double()
        scores = [change(float(query @ of_head[j]) / math.sqrt(head_dim), head, far[j]) for j in seen]
        shares = [math.exp(score - max(scores)) for score in scores]
        weights[row, head, i, seen] = torch.tensor(shares, dtype=torch.float64) / sum(shares)
    return weights


def cache_nbytes(model: Transformer) -> int:
    """Return the bytes of the model's own cache, see `nbytes_of`."""
    return nbytes_of(model.cache)


def nbytes_of(cache: Cache | None) -> int:
    """Return the bytes of all tensors that a cache stores, not its own count."""
    stored = [vars(layer).items() for layer in ([] if cache is None else cache.layers)]
    return sum(held.nbytes for layer in stored for name, held in layer if name[0] != "_" and isinstance(held, Tensor))


def kv_nbytes(args: ModelArgs, rows: int, length: int, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of all layers, for `rows` x `length` positions."""
    return args.n_layers * rows * length * args.n_kv_heads * args.head_dim * 2 * dtype.itemsize


def in_float64(hf: Any) -> Any:
    """Return a model of transformers whose norms have lost their cast to float32.

    The cast would hide differences below 1e-7 in a float64 model. Our norm has none: cached and uncached logits
    could not agree to 1e-10 otherwise. In float32 the two are the same.
    """
    for module in hf.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_rms_norm, module)
    return hf


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))


def hf_config(args: ModelArgs) -> LlamaConfig:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": args.rope_theta or 1.0}
    if isinstance(args.rope_scaling, RopeScaling):
        scaling = args.rope_scaling
        rope |= {"rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor}
        rope |= {"high_freq_factor": scaling.high_freq_factor}
        rope |= {"original_max_position_embeddings": scaling.original_max_seq_len}
    return LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=args.ffn_dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        rms_norm_eps=args.norm_eps,
        max_position_embeddings=max(args.max_seq_len, 131072),
        rope_parameters=rope,
        tie_word_embeddings=args.tied_head,
        attn_implementation="sdpa",  # eager attention casts its softmax to float32
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


HF_LAYER_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def hf_tensors(tensors: Mapping[str, Tensor], args: ModelArgs) -> dict[str, Tensor]:
    """Return weights (or their gradients) under transformers' names and in its order of rows."""
    hf = {
        "model.embed_tokens.weight": tensors["tok_embeddings.weight"],
        "model.norm.weight": tensors["norm.weight"],
        "lm_head.weight": tensors["tok_embeddings.weight" if args.tied_head else "output.weight"],
    }
    for layer in range(args.n_layers):
        for ours, theirs in HF_LAYER_NAMES.items():
            weight = tensors[f"layers.{layer}.{ours}.weight"]
            if ours in ("attention.wq", "attention.wk"):
                weight = _half_split(weight, args.head_dim)
            hf[f"model.layers.{layer}.{theirs}.weight"] = weight
    return hf


def _half_split(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows: Meta pairs rows 2i and 2i + 1, transformers rows i and i + head_dim / 2."""
    one_head = [*range(0, head_dim, 2), *range(1, head_dim, 2)]
    return weight[[start + row for start in range(0, len(weight), head_dim) for row in one_head]]


def hf_llama(model: Transformer) -> LlamaForCausalLM:
    """Make transformers' Llama with the weights of `model`."""
    hf = LlamaForCausalLM(hf_config(model.args)).to(model.norm.weight.dtype).eval()
    missing, unexpected = hf.load_state_dict(hf_tensors(model.state_dict(), model.args), strict=True)
    assert not missing
    assert not unexpected
    if model.args.rope_theta is None:  # theirs always rotates
        hf.model.rotary_emb.inv_freq.zero_()
    return in_float64(hf)  # type: ignore[no-any-return]


class PoisonedCache(StaticCache, kind="poisoned"):
    """The static cache with NaN in all unwritten positions, so that reading them shows."""

    def _allocate(self, *of: Any) -> Tensor:
        return super()._allocate(*of).fill_(torch.nan)


class PoisonedConcatCache(ConcatCache, kind="poisoned_concat"):
    """The concatenating cache with NaN in the positions that shorter rows have not reached."""

    @staticmethod
    def _resized(held: Tensor, end: int, like: Tensor) -> Tensor:
        grown = ConcatCache._resized(held, end, like)
        grown[:, held.shape[1] :] = torch.nan
        return grown
