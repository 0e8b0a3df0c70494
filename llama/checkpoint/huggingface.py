"""Hugging Face's format: config.json, tokenizer.json, and weights in one or several .safetensors files.

Knows the names of `LlamaForCausalLM`, its config in the words of transformers 4 and 5, and its half-split RoPE layout.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from llama.args import ModelArgs, RopeScaling
from llama.checkpoint.base import (
    Checkpoint,
    CheckpointError,
    Weight,
    assemble,
    make_args,
    need_file,
    numbered,
    read_json,
    read_tokenizer,
    refuse_others,
    refusing,
)

NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.{}.attention.wq.weight": "model.layers.{}.self_attn.q_proj.weight",
    "layers.{}.attention.wk.weight": "model.layers.{}.self_attn.k_proj.weight",
    "layers.{}.attention.wv.weight": "model.layers.{}.self_attn.v_proj.weight",
    "layers.{}.attention.wo.weight": "model.layers.{}.self_attn.o_proj.weight",
    "layers.{}.feed_forward.w1.weight": "model.layers.{}.mlp.gate_proj.weight",
    "layers.{}.feed_forward.w2.weight": "model.layers.{}.mlp.down_proj.weight",
    "layers.{}.feed_forward.w3.weight": "model.layers.{}.mlp.up_proj.weight",
    "layers.{}.attention_norm.weight": "model.layers.{}.input_layernorm.weight",
    "layers.{}.ffn_norm.weight": "model.layers.{}.post_attention_layernorm.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
HALF_SPLIT = (".self_attn.q_proj.weight", ".self_attn.k_proj.weight")
_DROPPED = ".rotary_emb.inv_freq"  # a table that old files carry; ours is made from rope_theta
_DTYPES = ("F64", "F32", "F16", "BF16")

# Keys that change what a model computes, with the values under which it is the model that we build. Others pass.
_MUST_BE: dict[str, tuple[object, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logits_scaling": (1, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "num_local_experts": (0, 1, None),
    "num_experts": (0, 1, None),
}


def open_huggingface(directory: Path, *, tokenizer_path: Path | None = None) -> Checkpoint:
    """Open a directory as `save_pretrained` writes it. `tokenizer_path`: where its tokenizer is, if not beside."""
    config_path = need_file(directory, "config.json", "the sizes of the model")
    config = read_json(config_path)
    args = _args(config_path, config)
    tensors: dict[str, Weight] = {}
    for path, names in _shards(directory).items():
        tensors |= {
            name: _in_our_layout(name, tensor, args.head_dim)
            for name, tensor in _read_shard(path, names).items()
            if not name.endswith(_DROPPED)
        }
    tokenizer = read_tokenizer(tokenizer_path or need_file(directory, "tokenizer.json", "the vocabulary"))
    return assemble(
        directory,
        args=args,
        tokenizer=tokenizer,
        tensors=tensors,
        names=numbered(NAMES, args.n_layers),
        says_tied=config.get("tie_word_embeddings"),
    )


def _args(path: Path, config: Mapping[str, Any]) -> ModelArgs:
    refuse_others(path, config, _MUST_BE)
    if config.get("tie_word_embeddings") not in (True, False, None):
        raise CheckpointError(path, f"tie_word_embeddings={config['tie_word_embeddings']!r} must be true or false")
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    lacking = [key for key in needed if config.get(key) is None]
    if lacking:
        raise CheckpointError(path, f"lacks {', '.join(lacking)}")
    rope = _rope_parameters(path, config)
    # What is left out has the default of transformers' LlamaConfig.
    return make_args(
        path,
        dim=config["hidden_size"],
        ffn_dim=config["intermediate_size"],
        n_layers=config["num_hidden_layers"],
        n_heads=config["num_attention_heads"],
        n_kv_heads=config.get("num_key_value_heads"),
        head_dim=config.get("head_dim"),
        vocab_size=config["vocab_size"],
        norm_eps=config.get("rms_norm_eps", 1e-6),
        max_seq_len=config.get("max_position_embeddings", 2048),
        rope_theta=rope.get("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(path, rope),
    )


def _rope_parameters(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers 5 keeps in rope_parameters, and 4 in rope_theta and rope_scaling."""
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if not isinstance(old, dict) or not isinstance(new, dict) or (old and new):
        raise CheckpointError(path, "needs one of rope_parameters and rope_scaling, in braces")
    theta = {} if config.get("rope_theta") is None else {"rope_theta": config["rope_theta"]}
    return theta | old | new


def _rope_scaling(path: Path, rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor") not in (1, None):
        raise CheckpointError(path, f"partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported")
    if kind == "default":
        return None
    if kind != "llama3":
        raise CheckpointError(path, f"RoPE scaling of type {kind!r} is not supported; default and llama3 are")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    values = [rope.get(key) for key in keys]
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        raise CheckpointError(path, f"RoPE scaling of type llama3 needs {', '.join(keys)} as numbers")
    with refusing(path, "holds RoPE scaling that makes no sense"):
        return RopeScaling(*values)  # type: ignore[arg-type]


def _shards(directory: Path) -> dict[Path, set[str] | None]:
    """Return the weight files, each with the names that the index gives it (None: there is no index)."""
    single, index_path = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file() or not index_path.is_file():
        return {need_file(directory, single.name, "the weights, or its .index.json with several files"): None}
    weight_map = read_json(index_path, limit=16 << 20).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index_path, "lacks weight_map")
    shards: dict[Path, set[str] | None] = {}
    for file_name in dict.fromkeys(map(str, weight_map.values())):
        # A plain name cannot lead out of the directory. (Where the entry is a link, as in the hub's cache, the
        # owner of the directory put it there.)
        if PurePosixPath(file_name).name != file_name or set(file_name) & set("\\:\0"):
            raise CheckpointError(index_path, f"names {file_name!r}, which is not the plain name of a file")
        if not file_name.endswith(".safetensors"):
            raise CheckpointError(index_path, f"names {file_name!r}, which is not a .safetensors file")
        path = need_file(directory, file_name, "named by model.safetensors.index.json")
        shards[path] = {name for name, where in weight_map.items() if where == file_name}
    return shards


def _read_shard(path: Path, indexed: set[str] | None) -> dict[str, Tensor]:
    """Return the file's tensors, as views of the mapped file."""
    with refusing(path, "is not a .safetensors file that can be used"), safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if indexed is not None and indexed != names:
            raise ValueError(f"it and the index do not both place here: {', '.join(sorted(indexed ^ names))}")
        for name in names:
            dtype = file.get_slice(name).get_dtype()
            if dtype not in _DTYPES:
                raise ValueError(f"{name} is {dtype}; {', '.join(_DTYPES)} are read")
        return {name: file.get_tensor(name) for name in sorted(names)}


def _in_our_layout(name: str, tensor: Tensor, head_dim: int) -> Weight:
    if not name.endswith(HALF_SPLIT):
        return Weight.of(tensor)
    return Weight(tuple(tensor.shape), lambda start, stop: tensor[half_split_rows(start, stop, head_dim)])


def half_split_rows(start: int, stop: int, head_dim: int) -> Tensor:
    """Return where the rows start..stop-1 of ours are in a file of theirs.

    Of a head, we keep the two rows of each RoPE pair side by side, they keep all first rows and then all second ones.
    """
    row = torch.arange(start, stop)
    place = row % head_dim
    return row - place + place % 2 * (head_dim // 2) + place // 2
