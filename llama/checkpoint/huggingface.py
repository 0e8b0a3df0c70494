"""Hugging Face's format: config.json, tokenizer.json, and weights in one or several .safetensors files.

Reads the config.json of transformers 4 and 5; the `safetensors` package reads and checks the weights.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from llama.args import LinearScaling, ModelArgs, RopeScaling, Scaling, YarnScaling
from llama.checkpoint.assemble import (
    NO_SETTINGS,
    Checkpoint,
    Weight,
    assemble,
    make_args,
    need_file,
    read_config,
    read_tokenizer,
    require_values,
    weights_of_file,
)
from llama.checkpoint.families import FAMILIES, SIZES, Family, huggingface_names
from llama.checkpoint.half_split import in_our_order
from llama.untrusted.errors import CheckpointError, refusing
from llama.untrusted.files import check_regular
from llama.untrusted.words import some_of

_MOST_TENSORS = 1 << 14
_IGNORED = ".rotary_emb.inv_freq"  # a table in old files; ours is computed from rope_theta
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MAX_INDEX = 4 << 20  # bytes; an index of 512 layers with long names has 1 MB

# Keys that change what a model computes, with the supported values. Other keys are ignored.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "model_type": tuple(FAMILIES),
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "compression_config": (None,),
    "partial_rotary_factor": (1, None),
    "use_mrope": (False, None),
    "attention_multiplier": (None,),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "logits_scaling": (1, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "num_local_experts": (0, 1, None),
    "num_experts": (0, 1, None),
    **NO_SETTINGS,
}

# The values of missing keys in transformers' LlamaConfig; `Family.defaults` has those that differ. A missing head_dim,
# num_key_value_heads or tie_word_embeddings follows from the other keys.
_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_BASE = 10000.0  # RotaryEmbeddingConfigMixin.default_theta


def open_huggingface(directory: Path, *, tokenizer_path: Path | None = None) -> Checkpoint:
    """Return the checkpoint in a directory of `save_pretrained`. `tokenizer_path` replaces its tokenizer."""
    config_path = need_file(directory, "config.json", "the sizes of the model")
    config = read_config(config_path)
    family = _family(config_path, config)
    args, config, assumed = _args(config_path, config, family)
    names = huggingface_names(args)
    ours = {theirs: ours for ours, theirs in names.items()}
    tensors: dict[str, Weight] = {}
    for path, indexed in _shards(directory).items():
        tensors |= {
            name: in_our_order(ours.get(name, name), weight, args.head_dim)
            for name, weight in read_shard(path, indexed).items()
            if not name.endswith(_IGNORED)
        }
    # Old directories have SentencePiece's tokenizer.model, and no other.
    is_old = (directory / "tokenizer.model").is_file() and not (directory / "tokenizer.json").exists()
    tokenizer = read_tokenizer(directory, "tokenizer.model" if is_old else "tokenizer.json", tokenizer_path)
    return assemble(
        directory,
        args=args,
        tokenizer=tokenizer,
        tensors=tensors,
        names=names,
        says_tied=config.get("tie_word_embeddings"),
        window=_window(config_path, config),
        family=family.name,
        assumed=[f"{key}={value} (transformers)" for key, value in assumed.items()],
    )


def _family(path: Path, config: Mapping[str, Any]) -> Family:
    require_values(path, config, _SUPPORTED)
    return FAMILIES[config["model_type"]]


def _window(path: Path, config: Mapping[str, Any]) -> int | None:
    """Return the number of positions that a query sees in the layers with a sliding window; None: all see all."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and set(map(str, kinds)) <= {_FULL, _SLIDING}):
        raise CheckpointError(path, f"layer_types={kinds!r:.80} is not supported; supported: {_FULL}, {_SLIDING}")
    slides = window is not None and config.get("use_sliding_window", True) is not False
    if kinds is not None:
        slides = slides and _SLIDING in kinds
    elif "max_window_layers" in config:  # Qwen: the first layers see all positions
        slides = slides and _whole(path, config, "max_window_layers") < config["num_hidden_layers"]
    return _whole(path, config, "sliding_window") if slides else None


def _whole(path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config[key]
    if type(value) is not int or value < 0:
        raise CheckpointError(path, f"{key}={value!r} must be a whole number")
    return value


def _args(path: Path, config: Mapping[str, Any], family: Family) -> tuple[ModelArgs, dict[str, Any], dict[str, Any]]:
    """Return the sizes, the config with the defaults of missing keys, and these defaults."""
    if type(config.get("tie_word_embeddings")) not in (bool, NoneType):
        raise CheckpointError(path, f"tie_word_embeddings={config['tie_word_embeddings']!r} must be true or false")
    required = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [key for key in required if config.get(key) is None]
    if missing:
        raise CheckpointError(path, f"lacks {', '.join(missing)}")
    rope = _rope_parameters(path, config)
    assumed = {key: value for key, value in {**_DEFAULTS, **family.defaults}.items() if key not in config}
    if "rope_theta" not in rope:
        assumed["rope_theta"] = _BASE
    config, rope = {**assumed, **config}, {"rope_theta": _BASE, **rope}
    args = make_args(
        path,
        **{ours: config.get(key) for ours, (key, _) in SIZES.items()},
        rope_theta=rope["rope_theta"],
        rope_scaling=_rope_scaling(path, rope, config),
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
    )
    return args, config, assumed


def _rope_parameters(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return RoPE's keys: rope_parameters of transformers 5, rope_theta and rope_scaling of transformers 4."""
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    if not isinstance(old, dict) or not isinstance(new, dict) or (old and new):
        raise CheckpointError(path, "needs one of rope_parameters and rope_scaling, in braces")
    theta = {} if config.get("rope_theta") is None else {"rope_theta": config["rope_theta"]}
    for key, value in (old | new).items():
        if isinstance(value, dict) or key.endswith("_attention"):  # one set of keys per kind of layer
            raise CheckpointError(
                path, f"RoPE has {key}={value!r:.80}, and this library has one RoPE for all layers; load another model"
            )
    return theta | old | new


def _rope_scaling(path: Path, rope: Mapping[str, Any], config: Mapping[str, Any]) -> Scaling | None:
    kind = rope.get("rope_type", rope.get("type"))
    if rope.get("type", kind) != kind:  # transformers 4 and 5 do not agree which one applies
        raise CheckpointError(path, f"RoPE scaling has rope_type={kind!r} and type={rope['type']!r}; remove one")
    if kind is None and "factor" in rope:  # transformers 4 rejects it, and transformers 5 ignores the factor
        raise CheckpointError(path, f"RoPE scaling has factor={rope['factor']!r} and no rope_type; add its type")
    if rope.get("partial_rotary_factor") not in (1, None):
        raise CheckpointError(path, f"partial_rotary_factor={rope['partial_rotary_factor']!r} is not supported")
    if kind in ("default", None):
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise CheckpointError(
            path, f"RoPE scaling of type {kind!r} is not supported; supported: default, linear, llama3, yarn"
        )
    with refusing(path, f"has invalid RoPE scaling of type {kind}"):
        if kind == "llama3":
            keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return RopeScaling(*(_number(rope, key) for key in keys))  # type: ignore[arg-type]
        return LinearScaling(_number(rope, "factor")) if kind == "linear" else _yarn(rope, config)


def _yarn(rope: Mapping[str, Any], config: Mapping[str, Any]) -> YarnScaling:
    """Return YaRN's numbers with the defaults of transformers. DeepSeek's attention factor is a quotient."""
    trained = _number({**config, **rope}, "original_max_position_embeddings", config.get("max_position_embeddings"))
    factor = _number(rope, "factor")
    attention: Any = rope.get("attention_factor")
    if attention is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        above, below = (YarnScaling.sharpened(factor, _number(rope, key)) for key in ("mscale", "mscale_all_dim"))
        attention = above / below
    return YarnScaling(
        factor,
        trained,  # type: ignore[arg-type]
        beta_fast=_number(rope, "beta_fast", 32),
        beta_slow=_number(rope, "beta_slow", 1),
        attention_factor=attention,
        truncate=rope.get("truncate", True),
    )


def _number(values: Mapping[str, Any], key: str, default: object = None) -> float:
    value = default if values.get(key) is None else values[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key}={value!r} must be a number")
    return value


def _shards(directory: Path) -> dict[Path, set[str] | None]:
    """Return the weight files, each with its tensor names in the index (None: there is no index)."""
    single, index_path = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists() or not index_path.exists():
        return {need_file(directory, single.name, "the weights, or its .index.json with several files"): None}
    shards = shards_of(index_path, read_config(index_path, limit=_MAX_INDEX))
    return {need_file(directory, file, f"named by {index_path.name}"): names for file, names in shards.items()}


def shards_of(path: Path, index: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the tensor names of each file in an index that was read from `path`; all file names are plain."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(path, "lacks weight_map")
    shards: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        # A plain name cannot leave the directory. It may be a link, as in the hub's cache: the owner made it.
        if type(file) is not str or set(file) & set("/\\:\0"):
            raise CheckpointError(path, f"names {file!r:.80}, which is not the plain name of a file")
        if not file.endswith(".safetensors"):
            raise CheckpointError(path, f"names {file!r:.80}, which is not a .safetensors file")
        shards.setdefault(file, set()).add(name)
    return shards


def read_shard(path: Path, indexed: set[str] | None) -> dict[str, Weight]:
    """Return the weights of a file by name, mapped from it.

    indexed: the names that the index has for the file (None: there is no index).
    """
    from safetensors import safe_open

    with refusing(path, "is not a .safetensors file that can be used"):
        check_regular(os.stat(path).st_mode)
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            if len(names) > _MOST_TENSORS:
                raise ValueError(f"{len(names)} tensors are more than the limit of {_MOST_TENSORS}")
            tensors = {name: file.get_tensor(name) for name in names}
        if indexed is not None and indexed != tensors.keys():
            odd = indexed.symmetric_difference(tensors)
            raise CheckpointError(path, f"the file and the index disagree about {some_of(odd)}")
        return {name: Weight.mapped(tensor) for name, tensor in weights_of_file(path, tensors).items()}
