"""Write a .gguf file piece by piece: the type of each tensor and its bytes.

The gguf package writes the header and rounds to quantised types. Tensors that already have the wanted type are copied.
No tensor is in memory as a whole.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama.args import LinearScaling, ModelArgs, RopeScaling, Scaling, YarnScaling
from llama.checkpoint.base import Checkpoint, Weight
from llama.checkpoint.families import family_of, gguf_names
from llama.checkpoint.gguf import ROPE_DIVISORS
from llama.checkpoint.half_split import in_half_split_order
from llama.costs import file_bytes
from llama.rope import rope_frequencies, scaled_frequencies
from llama.untrusted.errors import CheckpointError
from llama.untrusted.gguf_header import GgufHeader, TensorInfo, read_gguf_header
from llama.untrusted.gguf_sizes import FILE_BLOCKS

# The types that can be written, with their numbers in llama.cpp's enum llama_ftype.
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "BF16": 32}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ENDS = ("tok_embeddings.weight", "output.weight")  # 8 bits in a file of 4 bits, as with quantize="int4"
_QUANTIZATION_VERSION = 2  # of ggml's blocks
_COPY_BYTES = 1 << 20  # per read
# Keys of the source file that do not describe the new one.
_NOT_COPIED = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")


@dataclass(frozen=True)
class Part:
    """A tensor of the new file: its name and type there, its shape, and an iterator over pieces of its bytes.

    copied: whether the bytes are copied from the source file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Tensor]]
    copied: bool = False

    @property
    def nbytes(self) -> int:
        return file_bytes(prod(self.shape), self.kind)


def planned_of(checkpoint: Checkpoint, kind: str) -> tuple[list[Part], dict[str, Any]]:
    """Return the tensors of a file of this type, see `planned`, and the metadata that comes from the checkpoint.

    A .gguf file gives its tokenizer and its description; another format gives only its name.
    """
    path = checkpoint.path
    header = read_gguf_header(path) if path.is_file() else None
    parts = planned(checkpoint.args, checkpoint.tensors, kind, path=path, header=header)
    if header is None:
        return parts, {"general.name": path.resolve().name}
    return parts, {key: value for key, value in header.metadata.items() if _is_copied(key, value)}


def planned(
    args: ModelArgs,
    tensors: Mapping[str, Weight],
    kind: str,
    *,
    path: Path | None = None,
    header: GgufHeader | None = None,
) -> list[Part]:
    """Return the tensors of a file with matrices of this type and vectors in F32.

    In a file of 4 bits the embedding and the head have 8 (Q8_0); a matrix whose rows are not whole blocks is F16. A
    tied head is left out. `path` and `header`: the .gguf file of `tensors`, if they come from one: tensors that
    already have the wanted type are copied.
    """
    parts = []
    divisors = _rope_divisors(args)
    if divisors is not None:
        parts.append(_encoded(ROPE_DIVISORS, "F32", Weight.of(divisors), path))
    half_split = family_of(args).half_split
    for ours, name in gguf_names(args).items():
        if ours == "output.weight" and args.tied_head:
            continue
        weight = in_half_split_order(ours, tensors[ours], args.head_dim) if half_split else tensors[ours]
        wanted = _kind_of(ours, weight.shape, kind)
        info = None if header is None else header.tensors.get(name)
        if path is not None and info is not None and info.kind == wanted:
            parts.append(_copied(name, info, path))
        else:
            parts.append(_encoded(name, wanted, weight, path))
    return parts


def write_gguf(
    path: Path,
    args: ModelArgs,
    parts: Sequence[Part],
    metadata: Mapping[str, Any],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the file, with `metadata` such as the tokenizer beside the sizes.

    `progress(done, total)` is called after each piece with the bytes of the tensors. Raises CheckpointError for numbers
    outside the range of the type; the caller deletes the incomplete file.
    """
    _write_header(path, args, parts, metadata)
    total, done = sum(part.nbytes for part in parts), 0
    with path.open("ab") as file:
        for part in parts:
            file.write(bytes(-file.tell() % 32))  # every tensor begins at a multiple of the format's alignment
            for piece in part.pieces():
                file.write(piece.numpy().data)
                done += piece.nbytes
                if progress is not None:
                    progress(done, total)
        file.write(bytes(-file.tell() % 32))


def _is_copied(key: str, value: Any) -> bool:
    describes = key.startswith("general.") and key not in _NOT_COPIED and isinstance(value, str)
    return describes or key.startswith("tokenizer.")


def _kind_of(name: str, shape: tuple[int, ...], wanted: str) -> str:
    if len(shape) == 1:
        return "F32"  # llama.cpp needs norms in F32
    kind = "Q8_0" if wanted.startswith("Q4") and name in _ENDS else wanted
    return "F16" if shape[-1] % FILE_BLOCKS[kind][0] else kind


def _copied(name: str, info: TensorInfo, path: Path) -> Part:
    def pieces() -> Iterator[Tensor]:
        with path.open("rb") as file:
            file.seek(info.start)
            for begin in range(0, info.nbytes, _COPY_BYTES):
                piece = file.read(min(_COPY_BYTES, info.nbytes - begin))
                yield torch.frombuffer(bytearray(piece), dtype=torch.uint8)

    return Part(name, info.kind, info.shape, pieces, copied=True)


def _encoded(name: str, kind: str, weight: Weight, path: Path | None) -> Part:
    def pieces() -> Iterator[Tensor]:
        for start, stop in weight.blocks():
            rows = weight.rows(start, stop).detach().cpu()
            _check_numbers(rows, name, kind, path)
            yield _bytes(rows, kind)

    return Part(name, kind, weight.shape, pieces)


def _bytes(rows: Tensor, kind: str) -> Tensor:
    if kind in _FLOATS:
        return rows.to(_FLOATS[kind]).contiguous().view(torch.uint8).flatten()
    from gguf.constants import GGMLQuantizationType  # here, because the package is slow to import
    from gguf.quants import quantize

    with np.errstate(all="ignore"):  # a block of numbers too small for a scale becomes zeros
        return torch.from_numpy(quantize(rows.float().numpy(), GGMLQuantizationType[kind])).flatten()


def _check_numbers(rows: Tensor, name: str, kind: str, path: Path | None) -> None:
    """Reject numbers outside the type: NaN, infinity, and anything beyond float16, the dtype of the scales."""
    if kind in ("F32", "BF16"):
        return
    most, limit = float(rows.abs().max()), torch.finfo(torch.float16).max
    if not most <= limit:  # also true for NaN
        raise CheckpointError(
            path or Path(name), f"{name} contains {most:g}, and {kind} has numbers up to {limit:g}; choose bf16 or f32"
        )


def _rope_divisors(args: ModelArgs) -> Tensor | None:
    if isinstance(args.rope_scaling, tuple):
        return torch.tensor(args.rope_scaling, dtype=torch.float32)
    if not isinstance(args.rope_scaling, RopeScaling):
        return None  # no scaling, or a rule that has its own keys
    return rope_frequencies(args.head_dim, args.rope_theta) / scaled_frequencies(args)


def _write_header(path: Path, args: ModelArgs, parts: Sequence[Part], metadata: Mapping[str, Any]) -> None:
    from gguf import GGUFWriter
    from gguf.constants import GGMLQuantizationType

    writer = GGUFWriter(path, family_of(args).name)
    try:
        _add_sizes(writer, args)
        _add_scaling(writer, args.rope_scaling)
        _add_type(writer, parts)
        for key, value in metadata.items():
            _add_value(writer, key, value)
        for part in parts:
            kind = GGMLQuantizationType[part.kind]
            writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), part.nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _add_sizes(writer: Any, args: ModelArgs) -> None:
    writer.add_vocab_size(args.vocab_size)
    writer.add_context_length(args.max_seq_len)
    writer.add_embedding_length(args.dim)
    writer.add_feed_forward_length(args.ffn_dim)
    writer.add_block_count(args.n_layers)
    writer.add_head_count(args.n_heads)
    writer.add_head_count_kv(args.n_kv_heads)
    writer.add_key_length(args.head_dim)
    writer.add_value_length(args.head_dim)
    writer.add_rope_dimension_count(args.head_dim)
    writer.add_rope_freq_base(args.rope_theta)
    writer.add_layer_norm_rms_eps(args.norm_eps)


def _add_scaling(writer: Any, rule: Scaling | tuple[float, ...] | None) -> None:
    from gguf.constants import RopeScalingType

    if isinstance(rule, LinearScaling):
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rule.factor)
        writer.add_rope_scaling_attn_factors(rule.attention_factor)
    elif isinstance(rule, YarnScaling):
        if (rule.beta_fast, rule.beta_slow, rule.truncate) != (32, 1, True):
            raise ValueError(
                f"llama.cpp only has YaRN with beta_fast=32, beta_slow=1 and truncate=True, not {rule}; write a "
                "Hugging Face folder instead"
            )
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rule.factor)
        writer.add_rope_scaling_orig_ctx_len(rule.original_max_seq_len)
        writer.add_rope_scaling_attn_factors(rule.attention_factor / YarnScaling.sharpened(rule.factor))


def _add_type(writer: Any, parts: Sequence[Part]) -> None:
    """Add the type of most numbers of the file: llama.cpp displays it."""
    counts: Counter[str] = Counter()
    for part in parts:
        counts[part.kind] += prod(part.shape)
    ((most, _),) = counts.most_common(1)
    writer.add_file_type(FILE_TYPES[most])
    if most not in _FLOATS:
        writer.add_quantization_version(_QUANTIZATION_VERSION)


def _add_value(writer: Any, key: str, value: Any) -> None:
    """Add a value with the type that llama.cpp expects: whole numbers as uint32."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_int32 if value < 0 else writer.add_uint32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
