"""llama.cpp's format: one .gguf file with sizes, vocabulary and weights, often quantised.

The gguf package dequantises; untrusted/gguf_header.py reads the header, and rejects types that are unknown. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
import mmap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama.args import LinearScaling, ModelArgs, RopeScaling, YarnScaling
from llama.checkpoint.assemble import (
    NO_SETTINGS,
    Checkpoint,
    Stored,
    Weight,
    assemble,
    make_args,
    read_tokenizer,
    require_values,
)
from llama.checkpoint.families import GGUF_FAMILIES, SIZES, Family, gguf_names
from llama.checkpoint.half_split import in_our_order
from llama.quant.gguf_types import KINDS
from llama.rope import rope_frequencies, scale_frequencies
from llama.tokenizer import MissingTokenizer, Tokenizer
from llama.untrusted.errors import CheckpointError, refusing
from llama.untrusted.gguf_header import TensorInfo, read_gguf_header

ROPE_DIVISORS = "rope_freqs.weight"

# Keys that change what a model computes, with the supported values. Other keys are ignored.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "general.architecture": tuple(GGUF_FAMILIES),
    "split.count": (0, 1, None),
}
# The same, for keys that begin with the name of the architecture.
_SUPPORTED_SIZES: dict[str, tuple[object, ...]] = {
    "expert_count": (0, None),
    "attention.causal": (True, None),
    "attention.scale": (0, None),
    "attention.clamp_kqv": (0, None),
    "attention.max_alibi_bias": (0, None),
    "embedding_scale": (0, 1, None),
    "residual_scale": (0, 1, None),
    "logit_scale": (0, 1, None),
    "rope.scale_linear": (0, 1, None),
    "rope.scaling.type": ("none", "linear", "yarn", None),
    "rope.scaling.yarn_ext_factor": (1, -1, None),
    "rope.scaling.yarn_attn_factor": (1, None),
    "rope.scaling.yarn_beta_fast": (32, None),  # llama.cpp reads these two only for other architectures
    "rope.scaling.yarn_beta_slow": (1, None),
    **NO_SETTINGS,
}

_REQUIRED = (
    *("embedding_length", "feed_forward_length", "block_count", "attention.head_count", "context_length"),
    "attention.layer_norm_rms_epsilon",
)
_BASE = 10000.0  # llama.cpp's rope_freq_base_train, if the file has none

# The arrays that are read; others are skipped.
_ARRAYS = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges"))


def open_gguf(path: Path, *, tokenizer_path: Path | None = None) -> Checkpoint:
    """Return the checkpoint in a .gguf file. `tokenizer_path`: a tokenizer that replaces the file's own."""
    header = read_gguf_header(path, arrays=_ARRAYS)
    require_values(path, header.metadata, _SUPPORTED)
    family = GGUF_FAMILIES[header.metadata["general.architecture"]]
    sizes = {
        key.removeprefix(f"{family.name}."): _decimal(value) if isinstance(value, float) else value
        for key, value in header.metadata.items()
        if key.startswith(f"{family.name}.")
    }
    require_values(path, sizes, _SUPPORTED_SIZES)
    args = _args(path, sizes, family, header.metadata.get("tokenizer.ggml.tokens"))
    names = gguf_names(args)
    with refusing(path, "contains no tokenizer that can be used"):
        if tokenizer_path:
            tokenizer = read_tokenizer(path.parent, "", tokenizer_path)
        elif header.metadata.get("tokenizer.ggml.model", "no_vocab") == "no_vocab":
            tokenizer = MissingTokenizer(f"{path} lacks tokenizer.ggml.model (the vocabulary)")
        else:
            tokenizer = Tokenizer.from_gguf(header.metadata)
    tensors = {name: _weight(header.data, info) for name, info in header.tensors.items()}
    divisors = tensors.pop(ROPE_DIVISORS, None)
    if divisors is not None:
        args = replace(args, rope_scaling=_divided(path, args, divisors))
    if family.half_split:
        for ours, theirs in names.items():
            if theirs in tensors:
                tensors[theirs] = in_our_order(ours, tensors[theirs], args.head_dim)
    return assemble(
        path,
        args=args,
        tokenizer=tokenizer,
        tensors=tensors,
        names=names,
        says_tied=None,
        window=_window(path, sizes),
        family=family.name,
        assumed=[] if "rope.freq_base" in sizes else [f"rope.freq_base={_BASE} (llama.cpp)"],
    )


def _window(path: Path, sizes: Mapping[str, Any]) -> int | None:
    window = sizes.get("attention.sliding_window", 0)
    if type(window) is not int or window < 0:
        raise CheckpointError(path, f"attention.sliding_window={window!r} must be a whole number from 0 on")
    return window or None


def _args(path: Path, sizes: Mapping[str, Any], family: Family, tokens: object) -> ModelArgs:
    missing = [f"{family.name}.{key}" for key in _REQUIRED if sizes.get(key) is None]
    if missing:
        raise CheckpointError(path, f"lacks {', '.join(missing)}")
    if isinstance(tokens, list):
        sizes = {"vocab_size": len(tokens), **sizes}
    args = make_args(
        path,
        **{ours: sizes.get(key) for ours, (_, key) in SIZES.items()},
        rope_theta=sizes.get("rope.freq_base", _BASE),
        rope_scaling=_rope_scaling(path, sizes),
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if sizes.get(key, args.head_dim) != args.head_dim:
            raise CheckpointError(path, f"{key}={sizes[key]} is not supported; it must be head_dim={args.head_dim}")
    return args


def _rope_scaling(path: Path, sizes: Mapping[str, Any]) -> LinearScaling | YarnScaling | None:
    """Return the RoPE scaling of the file's keys as llama.cpp reads them: a factor without a type is linear."""
    kind, factor = sizes.get("rope.scaling.type", "linear"), sizes.get("rope.scaling.factor") or 1.0
    attention = sizes.get("rope.scaling.attn_factor") or 1.0
    with refusing(path, f"has invalid RoPE scaling of type {kind}"):
        if kind == "yarn":
            return YarnScaling(
                factor,
                sizes.get("rope.scaling.original_context_length", sizes["context_length"]),
                attention_factor=attention * YarnScaling.sharpened(factor),
            )
        rule = LinearScaling(factor if kind == "linear" else 1.0, attention)
        return None if rule == LinearScaling(1.0) else rule


def _decimal(value: float) -> float:
    """Return the shortest decimal of a float32, such as 1e-05, so that the args equal those of the other formats."""
    with np.errstate(over="ignore"):  # make_args rejects infinity
        return float(str(np.float32(value)))


def _weight(data: mmap.mmap | bytes, info: TensorInfo) -> Weight:
    kind = KINDS[info.kind]
    whole = torch.frombuffer(data, dtype=torch.uint8, count=info.nbytes, offset=info.start)
    if kind.dtype is not None:
        return Weight.mapped(whole.view(kind.dtype).view(info.shape))
    assert kind.format is not None
    assert kind.parts is not None
    packed = Weight.mapped(whole.view(*info.shape[:-1], -1))

    def blocks(start: int, stop: int) -> Tensor:
        return torch.unflatten(packed.rows(start, stop), -1, (-1, kind.size))

    return Weight(
        info.shape,
        lambda start, stop: _dequantize(packed.rows(start, stop), kind.name),
        Stored(kind.name, kind.format, blocks, kind.parts),
        drop=packed.drop,
    )


def _dequantize(blocks: Tensor, kind: str) -> Tensor:
    from gguf.constants import GGMLQuantizationType  # here, because the package is slow to import
    from gguf.quants import dequantize

    # As one row: the package loops over groups of 16 rows, which takes twice as long for rows of a few hundred numbers.
    row = blocks.numpy().reshape(1, -1)
    with np.errstate(all="ignore"):  # infinite scales are reported elsewhere
        return torch.from_numpy(dequantize(row, GGMLQuantizationType[kind])).view(*blocks.shape[:-1], -1)


def _divided(path: Path, args: ModelArgs, weight: Weight) -> RopeScaling | tuple[float, ...] | None:
    """Return the scaling rule that gives the file's divisors, one per frequency, or the divisors if no rule does."""
    if args.rope_scaling is not None:
        raise CheckpointError(path, f"has {ROPE_DIVISORS} and another RoPE scaling, which are not supported together")
    if weight.shape != (args.head_dim // 2,):
        raise CheckpointError(path, f"{ROPE_DIVISORS} has shape {weight.shape} and must have ({args.head_dim // 2},)")
    divisors = weight.rows(0, args.head_dim // 2).float()
    factor = float(divisors.max())
    if not (math.isfinite(factor) and float(divisors.min()) > 0):
        raise CheckpointError(path, f"{ROPE_DIVISORS} must contain finite numbers above 0")
    if torch.equal(divisors, torch.ones_like(divisors)):
        return None
    freqs = rope_frequencies(args.head_dim, args.rope_theta)
    rule = RopeScaling(factor)
    # Both sides were rounded to float32, and the blend multiplies an error by up to the factor.
    if torch.allclose(freqs / scale_frequencies(freqs, rule), divisors, rtol=1e-5 * max(1, factor), atol=0):
        return rule
    return tuple(divisors.tolist())
