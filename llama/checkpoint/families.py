"""The families of models that are built like Llama: how they differ, and the names of sizes and tensors in files.

Reads no file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llama.args import ModelArgs


@dataclass(frozen=True)
class Family:
    """How the models of a family differ from Llama's.

    name: the `model_type` in config.json, and the architecture in a .gguf file.
    in_gguf: False if .gguf files call these models llama.
    half_split: whether a .gguf file has Hugging Face's order of rows, see half_split.py.
    defaults: the values of missing keys of config.json that differ from Llama's.
    """

    name: str
    attention_bias: bool = False
    qk_norm: bool = False
    in_gguf: bool = True
    half_split: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
LLAMA, MISTRAL, QWEN2, QWEN3 = (
    Family("llama"),
    Family(
        "mistral",
        in_gguf=False,
        defaults={"sliding_window": 4096, "max_position_embeddings": 131072, "num_key_value_heads": 8},
    ),
    Family("qwen2", attention_bias=True, half_split=True, defaults=_QWEN),
    Family("qwen3", qk_norm=True, half_split=True, defaults={**_QWEN, "head_dim": 128}),
)
FAMILIES = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
GGUF_FAMILIES = {family.name: family for family in FAMILIES.values() if family.in_gguf}

# Our name of a size -> the key in config.json, and in a .gguf file behind the architecture's name.
SIZES = {
    "vocab_size": ("vocab_size", "vocab_size"),
    "max_seq_len": ("max_position_embeddings", "context_length"),
    "dim": ("hidden_size", "embedding_length"),
    "ffn_dim": ("intermediate_size", "feed_forward_length"),
    "n_layers": ("num_hidden_layers", "block_count"),
    "n_heads": ("num_attention_heads", "attention.head_count"),
    "n_kv_heads": ("num_key_value_heads", "attention.head_count_kv"),
    "head_dim": ("head_dim", "attention.key_length"),
    "norm_eps": ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
}

# Our name -> the name in Hugging Face's files, and in a .gguf file.
_NAMES = {
    "tok_embeddings.weight": ("model.embed_tokens.weight", "token_embd.weight"),
    "layers.{}.attention.wq.weight": ("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight"),
    "layers.{}.attention.wk.weight": ("model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight"),
    "layers.{}.attention.wv.weight": ("model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight"),
    "layers.{}.attention.wo.weight": ("model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight"),
    "layers.{}.feed_forward.w1.weight": ("model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight"),
    "layers.{}.feed_forward.w2.weight": ("model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight"),
    "layers.{}.feed_forward.w3.weight": ("model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight"),
    "layers.{}.attention_norm.weight": ("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"),
    "layers.{}.ffn_norm.weight": ("model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"),
    "norm.weight": ("model.norm.weight", "output_norm.weight"),
    "output.weight": ("lm_head.weight", "output.weight"),
    "layers.{}.attention.wq.bias": ("model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias"),
    "layers.{}.attention.wk.bias": ("model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias"),
    "layers.{}.attention.wv.bias": ("model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias"),
    "layers.{}.attention.q_norm.weight": ("model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight"),
    "layers.{}.attention.k_norm.weight": ("model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight"),
}


def huggingface_names(args: ModelArgs) -> dict[str, str]:
    """Return the names of a model's tensors in Hugging Face's files, by ours."""
    return {ours: theirs for ours, theirs, _ in _names(args)}


def gguf_names(args: ModelArgs) -> dict[str, str]:
    """Return the names of a model's tensors in a .gguf file, by ours."""
    return {ours: theirs for ours, _, theirs in _names(args)}


def _names(args: ModelArgs) -> Iterator[tuple[str, str, str]]:
    absent = (".bias",) * (not args.attention_bias) + ("q_norm.weight", "k_norm.weight") * (not args.qk_norm)
    for i in range(args.n_layers):
        for ours, (in_huggingface, in_gguf) in _NAMES.items():
            if not ours.endswith(absent):
                yield ours.format(i), in_huggingface.format(i), in_gguf.format(i)


def family_of(args: ModelArgs) -> Family:
    """Return the family that can express the model in other formats. Raises ValueError if there is none."""
    if args.rope_theta is None:
        raise ValueError("rope_theta=None: other formats have no model without RoPE; save its state_dict()")
    switches = (args.attention_bias, args.qk_norm)
    for family in GGUF_FAMILIES.values():
        if (family.attention_bias, family.qk_norm) == switches:
            return family
    raise ValueError("other formats have no model with both attention_bias and qk_norm; keep it in Meta's format")
