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
from llama.checkpoint.assemble import Weight
from llama.checkpoint.families import SIZES, family_of, gguf_names
from llama.checkpoint.gguf import ROPE_DIVISORS
from llama.checkpoint.half_split import in_half_split_order
from llama.costs import file_bytes
from llama.rope import rope_frequencies, scaled_frequencies
from llama.untrusted.gguf_sizes import FILE_BLOCKS

FILE_TYPES = ("F32", "F16", "Q4_0", "Q4_1", "Q8_0", "BF16")  # the types that can be written
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ENDS = ("tok_embeddings.weight", "output.weight")  # 8 bits in a file of 4 bits, as with quantize="int4"


@dataclass(frozen=True)
class Part:
    """A tensor of the new file: its name and type there, and the weight with its rows in the order of the file."""

    name: str
    kind: str
    weight: Weight

    @property
    def nbytes(self) -> int:
        return file_bytes(prod(self.weight.shape), self.kind)

    def pieces(self) -> Iterator[Tensor]:
        """Yield the bytes of the tensor in blocks of rows; blocks that have the type in their file are copied."""
        stored = self.weight.stored
        for start, stop in self.weight.blocks():
            if stored is not None and stored.kind == self.kind:
                yield stored.rows(start, stop).contiguous()
            else:
                rows = self.weight.rows(start, stop).detach().cpu()
                _check_numbers(rows, self.name, self.kind)
                yield _bytes(rows, self.kind)


def planned(args: ModelArgs, tensors: Mapping[str, Weight], kind: str) -> list[Part]:
    """Return the tensors of a file with matrices of this type and vectors in F32.

    In a file of 4 bits the embedding and the head have 8 (Q8_0); a matrix whose rows are not whole blocks is F16. A
    tied head is left out.
    """
    parts = []
    divisors = _rope_divisors(args)
    if divisors is not None:
        parts.append(Part(ROPE_DIVISORS, "F32", Weight.of(divisors)))
    half_split = family_of(args).half_split
    for ours, name in gguf_names(args).items():
        if ours == "output.weight" and args.tied_head:
            continue
        weight = in_half_split_order(ours, tensors[ours], args.head_dim) if half_split else tensors[ours]
        parts.append(Part(name, _kind_of(ours, weight.shape, kind), weight))
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

    `progress(done, total)` is called after each piece with the bytes of the tensors. Raises ValueError for numbers
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


def _kind_of(name: str, shape: tuple[int, ...], wanted: str) -> str:
    if len(shape) == 1:
        return "F32"  # llama.cpp needs norms in F32
    kind = "Q8_0" if wanted.startswith("Q4") and name in _ENDS else wanted
    return "F16" if shape[-1] % FILE_BLOCKS[kind][0] else kind


def _bytes(rows: Tensor, kind: str) -> Tensor:
    if kind in _FLOATS:
        return rows.to(_FLOATS[kind]).contiguous().view(torch.uint8).flatten()
    from gguf.constants import GGMLQuantizationType  # here, because the package is slow to import
    from gguf.quants import quantize

    with np.errstate(all="ignore"):  # a block of numbers too small for a scale becomes zeros
        return torch.from_numpy(quantize(rows.float().numpy(), GGMLQuantizationType[kind])).flatten()


def _check_numbers(rows: Tensor, name: str, kind: str) -> None:
    """Reject numbers outside the type: NaN, infinity, and anything beyond float16, the dtype of the scales."""
    if kind in ("F32", "BF16"):
        return
    most, limit = float(rows.abs().max()), torch.finfo(torch.float16).max
    if not most <= limit:  # also true for NaN
        raise ValueError(f"{name} contains {most:g}, and {kind} has numbers up to {limit:g}; choose bf16 or f32")


def _rope_divisors(args: ModelArgs) -> Tensor | None:
    if isinstance(args.rope_scaling, tuple):
        return torch.tensor(args.rope_scaling, dtype=torch.float32)
    if not isinstance(args.rope_scaling, RopeScaling):
        return None  # no scaling, or a rule that has its own keys
    return rope_frequencies(args.head_dim, args.rope_theta) / scaled_frequencies(args)


def _write_header(path: Path, args: ModelArgs, parts: Sequence[Part], metadata: Mapping[str, Any]) -> None:
    from gguf import GGUFWriter
    from gguf.constants import GGML_QUANT_VERSION, GGMLQuantizationType, LlamaFileType

    architecture = family_of(args).name
    own = {f"{architecture}.{key}": value for key, value in (_sizes(args) | _scaling(args.rope_scaling)).items()}
    [(most, _)] = Counter(part.kind for part in parts if len(part.weight.shape) > 1).most_common(1)
    own["general.file_type"] = int(LlamaFileType[("ALL_" if most == "F32" else "MOSTLY_") + most])
    if most not in _FLOATS:
        own["general.quantization_version"] = GGML_QUANT_VERSION
    writer = GGUFWriter(path, architecture)
    try:
        for key, value in (own | dict(metadata)).items():
            _add_value(writer, key, value)
        for part in parts:
            kind = GGMLQuantizationType[part.kind]
            writer.add_tensor_info(part.name, part.weight.shape, np.dtype(np.float32), part.nbytes, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _sizes(args: ModelArgs) -> dict[str, Any]:
    return {
        **{key: getattr(args, ours) for ours, (_, key) in SIZES.items()},
        "attention.layer_norm_rms_epsilon": float(args.norm_eps),
        "attention.value_length": args.head_dim,
        "rope.dimension_count": args.head_dim,
        "rope.freq_base": float(args.rope_theta or 0),  # family_of rejects None
    }


def _scaling(rule: Scaling | tuple[float, ...] | None) -> dict[str, Any]:
    if isinstance(rule, LinearScaling):
        return {
            "rope.scaling.type": "linear",
            "rope.scaling.factor": float(rule.factor),
            "rope.scaling.attn_factor": float(rule.attention_factor),
        }
    if not isinstance(rule, YarnScaling):
        return {}  # no rule, or divisors
    if (rule.beta_fast, rule.beta_slow, rule.truncate) != (32, 1, True):
        raise ValueError(
            f"llama.cpp only has YaRN with beta_fast=32, beta_slow=1 and truncate=True, not {rule}; write a "
            "Hugging Face folder instead"
        )
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rule.factor),
        "rope.scaling.original_context_length": rule.original_max_seq_len,
        "rope.scaling.attn_factor": rule.attention_factor / YarnScaling.sharpened(rule.factor),
    }


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
