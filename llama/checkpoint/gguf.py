"""llama.cpp's format: one .gguf file with sizes, vocabulary and weights, often quantised.

Knows the format's bytes, its words for a model's sizes, and who dequantises.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is read here and not by the `gguf`
package, whose reader hangs on a file of 49 bytes.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama.args import LinearScaling, ModelArgs, RopeScaling, YarnScaling
from llama.checkpoint.base import (
    Checkpoint,
    CheckpointError,
    Stored,
    Weight,
    assemble,
    make_args,
    read_tokenizer,
    refuse_others,
    refusing,
)
from llama.checkpoint.families import GGUF_FAMILIES, Family, gguf_names
from llama.checkpoint.gguf_types import KINDS
from llama.checkpoint.half_split import in_our_order
from llama.checkpoint.mapped import MappedFile
from llama.rope import rope_frequencies, scale_frequencies
from llama.tokenizer import Tokenizer

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


# Far above every real file, and low enough that refusing a hostile one takes little time and memory.
_MAX_HEADER = 128 << 20
_MAX_COUNT = 1 << 16
_MAX_ARRAY = 1 << 22
_MAX_STRING = 1 << 20
_MAX_NAME = 64

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is: its type, its shape (rows first, as in torch), its first byte in the file and how many."""

    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """What a file says of itself: metadata as plain values, and where each tensor is."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def open_gguf(path: Path, *, tokenizer_path: Path | None = None) -> Checkpoint:
    """Open a .gguf file of a Llama model. `tokenizer_path`: a tokenizer to take instead of the file's own."""
    header = read_header(path)
    refuse_others(path, header.metadata, _MUST_BE)
    family = GGUF_FAMILIES[header.metadata["general.architecture"]]
    sizes = _Sizes(path, header.metadata, family.name)
    args = _args(sizes, family)
    tokenizer = read_tokenizer(tokenizer_path) if tokenizer_path else _tokenizer(path, header.metadata)
    mapped = MappedFile(path)
    with refusing(path, "cannot be mapped"):
        tensors = {name: _weight(mapped, info) for name, info in header.tensors.items()}
    divisors = tensors.pop(ROPE_DIVISORS, None)
    if divisors is not None:
        args = replace(args, rope_scaling=_divided(path, args, divisors))
    names = gguf_names(args)
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
    kind = next(kind for kind in KINDS.values() if kind.name == info.kind)
    if kind.dtype is not None:
        return mapped.weight(info.start, info.shape, kind.dtype)
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


class _Cursor:
    """Reads the header from front to back and never past its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.end = min(len(data), _MAX_HEADER)
        self.at = 0

    def take(self, count: int) -> bytes:
        if count > self.end - self.at:
            raise ValueError(f"{count} bytes are needed at byte {self.at} and {self.end - self.at} are left")
        self.at += count
        return self.data[self.at - count : self.at]

    def numbers(self, code: str, count: int = 1) -> list[Any]:
        layout = f"<{count}{code}"
        return list(struct.unpack(layout, self.take(struct.calcsize(layout))))

    def count(self, what: str, limit: int) -> int:
        (count,) = self.numbers("Q")
        if count > limit:
            raise ValueError(f"{count} {what} are more than the limit of {limit}")
        return int(count)

    def string(self, limit: int = _MAX_STRING) -> str:
        return self.take(self.count("bytes of text", limit)).decode("utf-8")

    def value(self) -> Any:
        (kind,) = self.numbers("I")
        return self.array() if kind == _ARRAY else self.items(kind, 1)[0]

    def array(self) -> list[Any]:
        (kind,) = self.numbers("I")
        return self.items(kind, self.count("values in an array", _MAX_ARRAY))

    def items(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"a value of type {kind} is not supported here")
        return self.numbers(_SCALARS[kind], count)


def read_header(path: Path) -> Header:
    """Read and check all but the weights: every tensor is known to lie in the file, apart from every other."""
    with (
        refusing(path, "is not a .gguf file that can be used"),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        return _read(_Cursor(data), len(data))


def _read(cursor: _Cursor, file_size: int) -> Header:
    if cursor.take(4) != b"GGUF":
        raise ValueError("it does not start with GGUF")
    (version,) = cursor.numbers("I")
    if version not in (2, 3):
        raise ValueError(f"version {version}; 2 and 3 are read, in little-endian order")
    n_tensors = cursor.count("tensors", _MAX_COUNT)
    n_pairs = cursor.count("pairs of metadata", _MAX_COUNT)
    metadata: dict[str, Any] = {}
    for _ in range(n_pairs):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"repeats the key {key!r}")
        metadata[key] = cursor.value()
    tensors: dict[str, TensorInfo] = {}
    for _ in range(n_tensors):
        name = cursor.string(_MAX_NAME)
        if name in tensors:
            raise ValueError(f"repeats the tensor {name!r}")
        tensors[name] = _read_tensor_info(cursor, name)
    return Header(metadata, _place(tensors, metadata, cursor.at, file_size))


def _read_tensor_info(cursor: _Cursor, name: str) -> TensorInfo:
    """Read one entry of the table; `start` still counts from the end of the header."""
    (n_dims,) = cursor.numbers("I")
    if not 1 <= n_dims <= 4:
        raise ValueError(f"{name} has {n_dims} dimensions")
    dims = cursor.numbers("Q", n_dims)
    (number,) = cursor.numbers("I")
    (start,) = cursor.numbers("Q")
    if number not in KINDS:
        raise ValueError(f"{name} is {_kind_name(number)}; {_kinds()} are read")
    kind = KINDS[number]
    if 0 in dims or dims[0] % kind.block or (kind.dtype is None and n_dims == 1):
        raise ValueError(f"{name} of type {kind.name} has dimensions {dims}")
    return TensorInfo(kind.name, tuple(reversed(dims)), start, math.prod(dims) // kind.block * kind.size)


def _place(
    tensors: Mapping[str, TensorInfo], metadata: Mapping[str, Any], header_size: int, file_size: int
) -> dict[str, TensorInfo]:
    """Return the table with offsets from the start of the file, once it is sure that they hold what they claim."""
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment not in (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        raise ValueError(f"general.alignment={alignment!r} must be a power of two from 8 to 4096")
    base = end = -(-header_size // alignment) * alignment
    placed = {}
    for name, info in sorted(tensors.items(), key=lambda item: item[1].start):
        start = base + info.start
        if info.start % alignment or start < end:
            raise ValueError(f"{name} at offset {info.start} is not aligned, or overlaps another tensor")
        end = start + info.nbytes
        if end > file_size:
            raise ValueError(f"{name} ends at byte {end} and the file at {file_size}: it is truncated")
        placed[name] = TensorInfo(info.kind, info.shape, start, info.nbytes)
    return placed


def _kinds() -> str:
    return ", ".join(kind.name for kind in KINDS.values())


def _kind_name(number: int) -> str:
    from gguf.constants import GGMLQuantizationType

    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return f"of an unknown type ({number})"
