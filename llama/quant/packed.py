"""Quantised matrices: codes of 4 to 8 bits, in the layout that is fastest to multiply with, and their scales.

A weight is `scale * code + zero`. Neighbouring weights of an output, a span, share a scale and a zero; see `Format`.
The weights of a .gguf file are stored unchanged (`quantize="stored"`). Float weights in 8 bits: a span has 240 steps
from its smallest weight to its largest, or 127 steps on either side of 0, whichever is more accurate. The first is
exact for weights from a file of 4 bits in such spans (240 is 16 times 15), the second for one of 8 bits; others are off
by at most 1/480 of their span's range, plus the rounding of float16. Float weights in 4 bits: 15 steps from the
smallest weight to the largest. Knows torch only. `llama/fast/native/products.h` reads the same bytes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 32  # weights of an output whose codes are contiguous
SUPERBLOCK = 256  # weights of an output that share the factor of their nested scales; ggml's word
PANEL = 16  # outputs of a panel: their groups alternate, so that one CPU vector has the same weights of each
_ROWS = 128  # outputs that are dequantised at a time: they fit into a CPU's inner cache


@dataclass(frozen=True)
class Format:
    """The format of a packed matrix.

    bits: the bits of a code.
    span: the number of weights that share a scale.
    offset: the code of 0, if no zeros are stored.
    nested: True if scales and zeros are integers of 8 bits, times a float16 for every 256 weights; else they are
        float16.
    """

    bits: int
    span: int = GROUP
    offset: int | None = None
    nested: bool = False


INT8, INT4 = Format(8), Format(4)


class Parts(NamedTuple):
    """Some outputs of a matrix: codes as `pack_codes` returns them; scales and zeros, (outputs, spans).

    scale_units, zero_units: the factors of nested scales and zeros, (outputs, columns / 256). Zeros are None if the
    format has an offset.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    scale_units: Tensor | None = None
    zero_units: Tensor | None = None


class PackedWeight(nn.Module):
    """A quantised matrix (out_features, in_features) in the layout that is fastest to multiply with.

    A tied head and its embedding share one. stored_as: the name of the weights in `Execution`. Parts are parameters, so
    that they are counted, saved and moved like weights; a cast of the model changes its activations, and not these.

    A panel is 16 outputs. codes: (panels, groups, bits, 16, 4), bytes; scales, zeros: (panels, spans, 16); units:
    (panels, columns / 256, 16). If out_features is not a multiple of 16, the last panel is padded.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    zeros: nn.Parameter | None
    scale_units: nn.Parameter | None
    zero_units: nn.Parameter | None

    def __init__(self, out_features: int, in_features: int, format: Format = INT8, stored_as: str = "int8") -> None:
        super().__init__()
        self.shape, self.format, self.stored_as = torch.Size((out_features, in_features)), format, stored_as
        together = SUPERBLOCK if format.nested else GROUP
        if in_features % together:
            raise ValueError(
                f"{stored_as} weights come in groups of {together}, and a layer of this model has {in_features} "
                "inputs; leave quantize out"
            )
        sizes = part_sizes(out_features, in_features, format)
        for name in Parts._fields:
            self.register_parameter(name, _blank(*sizes[name]) if name in sizes else None)

    @torch.no_grad()
    def fill(self, start: int, weight: Tensor) -> None:
        """Quantise float weights to INT8 or INT4 and store them as the outputs from `start` on, whole panels only."""
        assert self.format in (INT8, INT4)
        spans = weight.float().view(len(weight), -1, GROUP)
        codes, scales, zeros = (_nearest if self.format == INT8 else _spanned)(spans)
        self.take(start, Parts(pack_codes(codes, self.format.bits), scales[..., 0], zeros[..., 0]))

    @torch.no_grad()
    def take(self, start: int, parts: Parts) -> None:
        """Store the parts of the outputs from `start` on, whole panels only. Raises ValueError."""
        count = len(parts.codes)
        if start % PANEL or (count % PANEL and start + count != self.shape[0]):
            raise ValueError(f"outputs {start} to {start + count} do not end with a panel of {PANEL}")
        panels = slice(start // PANEL, -(-(start + count) // PANEL))
        for held, part in zip(self._held(), parts, strict=True):
            assert (held is None) == (part is None), "the parts are of another format"
            if held is None or part is None:
                continue
            if part.dtype == torch.uint8:  # copies words, not bytes
                held, part = (bytes.view(torch.int32)[..., 0] for bytes in (held, part.clone()))
            padded = F.pad(part, (0, 0) * (part.ndim - 1) + (0, -count % PANEL))
            held[panels] = torch.unflatten(padded, 0, (-1, PANEL)).movedim(1, -1)

    def parts(self, start: int, stop: int) -> Parts:
        """Return the parts of outputs `start` to `stop`."""
        first, last = start // PANEL, -(-stop // PANEL)
        wanted = slice(start - first * PANEL, stop - first * PANEL)
        codes, *others = self._held()
        found: list[Any] = [None if part is None else part[first:last].mT.flatten(0, 1)[wanted] for part in others]
        return Parts(codes[first:last].movedim(3, 1).flatten(0, 1)[wanted], *found)

    def parts_at(self, ids: Tensor) -> Parts:
        """Return the parts of the outputs `ids`, (n,)."""
        panels, lanes = ids // PANEL, ids % PANEL
        codes, *others = self._held()
        found: list[Any] = [None if part is None else part[panels, :, lanes] for part in others]
        return Parts(codes[panels, :, :, lanes], *found)

    def _held(self) -> Parts:
        return Parts(self.codes, self.scales, self.zeros, self.scale_units, self.zero_units)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parameters())

    def rows(self, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights of outputs `start` to `stop`, (stop - start, in_features)."""
        return _widened(self.parts(start, stop), self.format, dtype)

    def at(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weights of the outputs `ids`, (*ids.shape, in_features)."""
        return _widened(self.parts_at(ids.flatten()), self.format, dtype).view(*ids.shape, -1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedWeight":
        def moved(part: Tensor) -> Tensor:
            there = fn(part)
            return there if there.dtype == part.dtype else part.to(there.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def blocks(self, most: int = _ROWS) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of at most `most` outputs, but at least 16; each start is a multiple of 16."""
        step = max(PANEL, most // PANEL * PANEL)
        return ((start, min(start + step, self.shape[0])) for start in range(0, self.shape[0], step))


def part_sizes(out_features: int, in_features: int, format: Format) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of every part of a matrix of this format, by name."""
    panels, has_zeros = -(-out_features // PANEL), format.offset is None
    share = (panels, in_features // format.span, PANEL), torch.int8 if format.nested else torch.float16
    unit = (panels, in_features // SUPERBLOCK, PANEL), torch.float16
    parts = {
        "codes": ((panels, in_features // GROUP, format.bits, PANEL, 4), torch.uint8),
        "scales": share,
        "zeros": share if has_zeros else None,
        "scale_units": unit if format.nested else None,
        "zero_units": unit if format.nested and has_zeros else None,
    }
    return {name: size for name, size in parts.items() if size is not None}


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Return codes (outputs, groups, 32) as the words of a packed matrix, (outputs, groups, bits, 4), in bytes.

    With 8 bits, a word has four codes. With fewer bits, the first four words have the lower 4 bits of all codes: word i
    those of the weights from 4i on, and in its upper halves those from 16 + 4i on. The other bits follow. With 5 bits,
    one word: the fifth bit of weight 4i + b is bit i of byte b. With 6 bits, a word for every 16 weights: the two bits
    of weight 4i + b begin at bit 2i of byte b.
    """
    fours = torch.unflatten(codes, -1, (8, 4))
    if bits == 8:
        return fours
    low = fours & 15
    words = [low[..., :4, :] | low[..., 4:, :] << 4]
    if bits > 4:
        high = torch.unflatten((fours >> 4), -2, (bits - 4, -1))  # (outputs, groups, words, fours of a word, 4)
        at = (bits - 4) * torch.arange(high.shape[-2], dtype=torch.uint8, device=codes.device)
        words.append((high << at[:, None]).sum(dim=-2, dtype=torch.uint8))
    return torch.cat(words, dim=-2)


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """Return the codes, (..., groups, 32), that `pack_codes` packed into words (..., groups, bits, 4)."""
    if bits == 8:
        return words.flatten(-2)
    codes = torch.cat((words[..., :4, :] & 15, words[..., :4, :] >> 4), dim=-2)
    if bits > 4:
        at = torch.arange(0, 8, bits - 4, dtype=torch.uint8, device=words.device)
        high = words[..., 4:, None, :] >> at[:, None] & (1 << bits - 4) - 1
        codes = codes | high.flatten(-3, -2) << 4
    return codes.flatten(-2)


def _widened(parts: Parts, format: Format, dtype: torch.dtype) -> Tensor:
    """Return the weights (outputs, in_features) of some parts."""
    span, offset = format.span, format.offset
    scale = _whole(parts.scales, parts.scale_units, span)[..., None]
    zero = _whole(parts.zeros, parts.zero_units, span)[..., None] if offset is None else -offset * scale
    spans = torch.unflatten(unpack_codes(parts.codes, format.bits).flatten(-2), -1, (-1, span))
    return torch.addcmul(zero, spans.float(), scale).flatten(-2).to(dtype)


def _whole(shares: Tensor | None, units: Tensor | None, span: int) -> Tensor:
    """Return scales or zeros (..., spans) in float32."""
    assert shares is not None
    if units is None:
        return shares.float()
    return (torch.unflatten(shares, -1, (-1, SUPERBLOCK // span)).float() * units[..., None].float()).flatten(-2)


def _spanned(spans: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (..., 32) of 4 bits, scales (..., 1) and zeros (..., 1) for spans of weights (..., 32)."""
    low, high = spans.aminmax(dim=-1, keepdim=True)
    scale, zero = ((high - low) / 15).half(), low.half()
    return _codes(spans, scale, zero, 15), scale, zero


def _codes(spans: Tensor, scale: Tensor, zero: Tensor, most: int) -> Tensor:
    steps = (spans - zero.float()).div_(scale.float().clamp(min=2.0**-24))
    return steps.round_().clamp_(0, most).to(torch.uint8)


def _nearest(spans: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (..., 32) of 8 bits, scales (..., 1) and zeros (..., 1) for spans of weights (..., 32)."""
    low, high = spans.aminmax(dim=-1, keepdim=True)
    even = torch.maximum(high, -low) / 127
    found = []
    for scale, zero in (((high - low) / 240, low), (even, -128 * even.half().float())):
        scale, zero = scale.half(), zero.half()
        codes = _codes(spans, scale, zero, 255)
        lost = torch.addcmul(zero.float(), codes.float(), scale.float()).sub_(spans).square_().sum(-1, keepdim=True)
        found.append((lost, codes, scale, zero))
    first, second = found
    better = second[0] < first[0]
    codes, scale, zero = (torch.where(better, ours, theirs) for ours, theirs in zip(second[1:], first[1:], strict=True))
    return codes, scale, zero


def _blank(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    # Parameters, so that they are counted, saved and moved as weights are; there is no gradient in whole numbers.
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
