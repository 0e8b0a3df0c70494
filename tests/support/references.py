"""The independent answer: transformers' Llama, its names and its order of rows.

Importing this file does not import transformers, which takes seconds: only a call that compares with it does. Nothing
here uses llama/checkpoint, llama/rope or llama/ops, so that a mistake there cannot be made twice.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llama.args import ModelArgs, RopeScaling
from llama.model import Transformer

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM


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


def hf_config(args: ModelArgs) -> "LlamaConfig":
    from transformers import LlamaConfig

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


def hf_llama(model: Transformer) -> "LlamaForCausalLM":
    """Make transformers' Llama with the weights of `model`."""
    from transformers import LlamaForCausalLM

    hf = LlamaForCausalLM(hf_config(model.args)).to(model.norm.weight.dtype).eval()
    missing, unexpected = hf.load_state_dict(hf_tensors(model.state_dict(), model.args), strict=True)
    assert not missing
    assert not unexpected
    if model.args.rope_theta is None:  # theirs always rotates
        hf.model.rotary_emb.inv_freq.zero_()
    return in_float64(hf)  # type: ignore[no-any-return]
