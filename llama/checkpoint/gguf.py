"""llama.cpp's format: one .gguf file with sizes, vocabulary and weights, often quantised.

Knows the format's words for a model's sizes, and who dequantises.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama.args import LinearScaling, ModelArgs, RopeScaling, YarnScaling
from llama.checkpoint.base import (
    Checkpoint,
    Stored,
    Weight,
    assemble,
    make_args,
    read_tokenizer,
    refuse_others,
    refuse_strangers,
)
from llama.checkpoint.families import GGUF_FAMILIES, Family, gguf_names
from llama.checkpoint.half_split import in_our_order
from llama.quant.gguf_types import KINDS
from llama.rope import rope_frequencies, scale_frequencies
from llama.tokenizer import Tokenizer
from llama.untrusted.errors import CheckpointError, refusing
from llama.untrusted.gguf_header import TensorInfo, header_of
from llama.untrusted.mapped import MappedFile

ROPE_DIVISORS = "rope_freqs.weight"

# Keys that change what a model computes, with the values under which it is the model that we build. Others pass.
_MUST_BE: dict[str, tuple[object, ...]] = {
    "general.architecture": tuple(GGUF_FAMILIES),
    "split.count": (0, 1, None),
}
# Of these the names begin with the architecture's.
_SIZES_MUST_BE: dict[str, tuple[object, ...]] = {
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
    "rope.scaling.yarn_beta_fast": (32, None),  # llama.cpp reads these two of other architectures alone
    "rope.scaling.yarn_beta_slow": (1, None),
}

# What is read of a vocabulary. Other arrays stay unread.
_ARRAYS = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "scores", "token_type", "merges"))


def open_gguf(path: Path, *, tokenizer_path: Path | None = None) -> Checkpoint:
    """Open a .gguf file of a Llama model. `tokenizer_path`: a tokenizer to take instead of the file's own."""
    mapped = MappedFile(path)
    header = header_of(mapped, arrays=_ARRAYS)
    refuse_others(path, header.metadata, _MUST_BE)
    family = GGUF_FAMILIES[header.metadata["general.architecture"]]
    sizes = _Sizes(path, header.metadata, family.name)
    args = _args(sizes, family)
    names = gguf_names(args)
    refuse_strangers(path, known=names.values(), found=header.tensors)
    tokenizer = read_tokenizer(tokenizer_path) if tokenizer_path else _tokenizer(path, header.metadata)
    with refusing(path, "cannot be mapped"):
        tensors = {name: _weight(mapped, info) for name, info in header.tensors.items()}
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
        window=sizes.window(),
        family=family.name,
    )


class _Sizes:
    """The metadata whose names begin with the architecture's, by the rest of their names."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str) -> None:
        self.path, self.architecture = path, architecture
        self.metadata = metadata
        refuse_others(path, metadata, {f"{architecture}.{key}": allowed for key, allowed in _SIZES_MUST_BE.items()})

    def __call__(self, key: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        return _decimal(value) if isinstance(value, float) else value

    def window(self) -> int | None:
        window = self("attention.sliding_window", 0)
        if type(window) is not int or window < 0:
            raise CheckpointError(self.path, f"{self.architecture}.attention.sliding_window={window!r} is no length")
        return window or None

    def need(self, *keys: str) -> None:
        lacking = [f"{self.architecture}.{key}" for key in keys if self(key) is None]
        if lacking:
            raise CheckpointError(self.path, f"lacks {', '.join(lacking)}")


def _args(sizes: _Sizes, family: Family) -> ModelArgs:
    sizes.need("embedding_length", "feed_forward_length", "block_count", "attention.head_count", "context_length")
    sizes.need("attention.layer_norm_rms_epsilon")
    tokens = sizes.metadata.get("tokenizer.ggml.tokens")
    args = make_args(
        sizes.path,
        dim=sizes("embedding_length"),
        ffn_dim=sizes("feed_forward_length"),
        n_layers=sizes("block_count"),
        n_heads=sizes("attention.head_count"),
        n_kv_heads=sizes("attention.head_count_kv"),
        head_dim=sizes("attention.key_length"),
        vocab_size=sizes("vocab_size", len(tokens) if isinstance(tokens, list) else None),
        norm_eps=sizes("attention.layer_norm_rms_epsilon"),
        max_seq_len=sizes("context_length"),
        rope_theta=sizes("rope.freq_base", 10000.0),
        rope_scaling=_rope_scaling(sizes),
        attention_bias=family.attention_bias,
        qk_norm=family.qk_norm,
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        if sizes(key, args.head_dim) != args.head_dim:
            raise CheckpointError(
                sizes.path, f"{family.name}.{key}={sizes(key)} is not supported: heads have {args.head_dim}"
            )
    return args


def _rope_scaling(sizes: _Sizes) -> LinearScaling | YarnScaling | None:
    """Return the rule that the keys of the file name, by which llama.cpp reads them; a factor alone is linear."""
    kind, factor = sizes("rope.scaling.type", "linear"), sizes("rope.scaling.factor") or 1.0
    attention = sizes("rope.scaling.attn_factor") or 1.0
    with refusing(sizes.path, f"holds RoPE scaling of type {kind} that makes no sense"):
        if kind == "yarn":
            return YarnScaling(
                factor,
                sizes("rope.scaling.original_context_length", sizes("context_length")),
                attention_factor=attention * YarnScaling.sharpened(factor),
            )
        rule = LinearScaling(factor if kind == "linear" else 1.0, attention)
        return None if rule == LinearScaling(1.0) else rule


def _tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    with refusing(path, "holds no tokenizer that can be used"):
        return Tokenizer.from_gguf(metadata)


def _decimal(value: float) -> float:
    """Return 1e-05 for the float32 nearest to it, so that the args are those of the other formats."""
    return float(str(np.float32(value)))


def _weight(mapped: MappedFile, info: TensorInfo) -> Weight:
    kind = KINDS[info.kind]
    if kind.dtype is not None:
        return Weight.mapped(mapped, info.start, info.shape, kind.dtype)
    rows = mapped.bytes(info.start, info.nbytes).view(*info.shape[:-1], -1)
    stored = None
    if kind.format is not None and kind.parts is not None and rows.ndim == 2:
        stored = Stored(kind.name, kind.format, torch.unflatten(rows, 1, (-1, kind.size)), kind.parts)
    return Weight(
        info.shape,
        lambda start, stop: _dequantize(rows[start:stop], kind.name),
        stored,
        drop=lambda: mapped.drop(info.start, info.nbytes),
    )


def _dequantize(blocks: Tensor, kind: str) -> Tensor:
    from gguf.constants import GGMLQuantizationType  # here, because the package is slow to import
    from gguf.quants import dequantize

    with np.errstate(all="ignore"):  # infinite scales are the file's affair
        return torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[kind]))


def _divided(path: Path, args: ModelArgs, weight: Weight) -> RopeScaling | tuple[float, ...] | None:
    """Return the rule behind the file's divisors, one per frequency, or the divisors where no rule gives them."""
    if args.rope_scaling is not None:
        raise CheckpointError(path, f"has {ROPE_DIVISORS} and another RoPE scaling, which are not supported together")
    if weight.shape != (args.head_dim // 2,):
        raise CheckpointError(path, f"{ROPE_DIVISORS} is {weight.shape} and must be ({args.head_dim // 2},)")
    divisors = weight.rows(0, args.head_dim // 2).float()
    factor = float(divisors.max())
    if not (math.isfinite(factor) and float(divisors.min()) > 0):
        raise CheckpointError(path, f"{ROPE_DIVISORS} must hold finite numbers above 0")
    if torch.equal(divisors, torch.ones_like(divisors)):
        return None
    freqs = rope_frequencies(args.head_dim, args.rope_theta)
    rule = RopeScaling(factor)
    # Both sides are rounded to float32 on the way, and the blend multiplies an error by up to the factor.
    if torch.allclose(freqs / scale_frequencies(freqs, **vars(rule)), divisors, rtol=1e-5 * max(1, factor), atol=0):
        return rule
    return tuple(divisors.tolist())
