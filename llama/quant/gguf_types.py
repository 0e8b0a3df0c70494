"""The types of numbers in a .gguf file: their blocks, with codes and scales as in `llama.quant.packed`.

The gguf package dequantises. Source: the structs of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llama.quant.packed import Format, Parts, pack_codes
from llama.untrusted.gguf_sizes import FILE_BLOCKS


@dataclass(frozen=True)
class Kind:
    """How numbers of one type are stored.

    dtype: None for quantised types. These have a `format` of `llama.quant.packed`, and `parts`, which returns the codes
    and scales of blocks (rows, blocks, size in bytes).
    """

    name: str
    dtype: torch.dtype | None = None
    format: Format | None = None
    parts: Callable[[Tensor], Parts] | None = None

    @property
    def block(self) -> int:
        """Numbers in a block."""
        return FILE_BLOCKS[self.name][0]

    @property
    def size(self) -> int:
        """Bytes of a block."""
        return FILE_BLOCKS[self.name][1]


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at a byte of every block, (rows, blocks)."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0]


def _nibbles(blocks: Tensor, at: int) -> Tensor:
    """Return 16 bytes of every block as words of codes: the low nibbles are the first 16, as in `pack_codes`."""
    return torch.unflatten(blocks[..., at : at + 16], -1, (4, 4))


def _q4_0(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks, 2), _halves(blocks, 0))


def _q4_1(blocks: Tensor) -> Parts:
    return Parts(_nibbles(blocks, 4), _halves(blocks, 0), _halves(blocks, 2))


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Return the words of 5-bit codes: 4 bytes from `at` on have the fifth bits, the next 16 the others."""
    low = blocks[..., at + 4 : at + 20]
    fifth = blocks[..., at : at + 4, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device) & 1
    return pack_codes(torch.cat((low & 15, low >> 4), dim=-1) | fifth.flatten(-2) << 4, 5)


def _q5_0(blocks: Tensor) -> Parts:
    return Parts(_fifth_bits(blocks, 2), _halves(blocks, 0))


def _q5_1(blocks: Tensor) -> Parts:
    return Parts(_fifth_bits(blocks, 4), _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Tensor) -> Parts:
    codes = blocks[..., 2:] ^ 128  # from signed bytes to codes with an offset of 128
    return Parts(torch.unflatten(codes, -1, (8, 4)), _halves(blocks, 0))


def _nested(blocks: Tensor, codes: Tensor) -> Parts:
    """Return the parts of blocks that begin with two float16, and then 8 scales and 8 minimums of 6 bits."""
    packed = torch.unflatten(blocks[..., 4:16], -1, (3, 4))
    first, second, third = packed.unbind(-2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    least = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    scales, least = (part.view(torch.int8).flatten(1) for part in (scales, least))
    return Parts(codes.flatten(1, 2), scales, least, _halves(blocks, 0), -_halves(blocks, 2))


def _q4_k(blocks: Tensor) -> Parts:
    low = torch.unflatten(blocks[..., 16:], -1, (4, 32))  # (rows, blocks, 4, 32): a byte has codes of two spans
    return _nested(blocks, pack_codes(torch.stack((low & 15, low >> 4), dim=-2).flatten(-3, -2), 4))


def _q5_k(blocks: Tensor) -> Parts:
    low, high = torch.unflatten(blocks[..., 48:], -1, (4, 32)), blocks[..., 16:48]
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = high[..., None, :] >> shifts[:, None] & 1  # (rows, blocks, spans, 32)
    return _nested(blocks, pack_codes(torch.stack((low & 15, low >> 4), dim=-2).flatten(-3, -2) | fifth << 4, 5))


def _q6_k(blocks: Tensor) -> Parts:
    # Each half of a block's weights has 64 bytes of low bits and 32 bytes of high bits.
    low = torch.unflatten(blocks[..., :128], -1, (2, 64))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = torch.unflatten(blocks[..., 128:192], -1, (2, 1, 32)) >> shifts[:, None] & 3
    codes = torch.unflatten(torch.cat((low & 15, low >> 4), dim=-1), -1, (4, 32)) | high << 4
    scales = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return Parts(pack_codes(codes.flatten(2, 3), 6).flatten(1, 2), scales, scale_units=_halves(blocks, 208))


KINDS = {
    "F32": Kind("F32", dtype=torch.float32),
    "F16": Kind("F16", dtype=torch.float16),
    "Q4_0": Kind("Q4_0", format=Format(4, offset=8), parts=_q4_0),
    "Q4_1": Kind("Q4_1", format=Format(4), parts=_q4_1),
    "Q5_0": Kind("Q5_0", format=Format(5, offset=16), parts=_q5_0),
    "Q5_1": Kind("Q5_1", format=Format(5), parts=_q5_1),
    "Q8_0": Kind("Q8_0", format=Format(8, offset=128), parts=_q8_0),
    "Q4_K": Kind("Q4_K", format=Format(4, nested=True), parts=_q4_k),
    "Q5_K": Kind("Q5_K", format=Format(5, nested=True), parts=_q5_k),
    "Q6_K": Kind("Q6_K", format=Format(6, span=16, offset=32, nested=True), parts=_q6_k),
    "BF16": Kind("BF16", dtype=torch.bfloat16),
}
