"""Weights of 8 or 4 bits: the layout, how a matrix is brought into it, and drop-in layers that hold it.

Every 32 neighbouring weights of an output share a scale and a zero in float16, `weight = scale * code + zero`, with
codes of 8 bits, 1.125 bytes a weight with their share of the scales, or of 4, 0.625 bytes. What a .gguf file holds in
such groups is kept to the bit (`quantize="stored"`). Of float weights a group of 8 bits takes whichever loses less: 240
steps from its smallest weight to its largest, or 127 steps to either side of 0. The first is exact for weights that
come from a file with 4 bits a weight in such groups (240 is 16 times 15), the second for one with 8; others are off by
1/480 of their group's span at most, and by what float16 rounds off. One of 4 bits takes 15 steps from its smallest
weight to its largest. Nothing is kept in a wider dtype; the layers widen some outputs at a time as they multiply.
Knows torch only. `llama/fast/native/products.h` reads the same bytes.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama.ops import linear

GROUP = 32  # weights that share a scale and a zero
LANES = 16  # outputs whose groups stand side by side, so that one vector of a CPU holds the same weights of each
_ROWS = 128  # outputs that are quantised, or widened, at a time: what stays in a CPU's nearer cache
# The order of every 8 weights in 4 bits: two masks then give a CPU the pairs that they give it of 8 bits.
_ORDER = (0, 1, 4, 5, 2, 3, 6, 7)


class PackedWeight(nn.Module):
    """A matrix (out_features, in_features) of 8 or 4 bits; a tied head and its embedding share one.

    codes are (panels, groups, bits, 16, 4), bytes, a panel being 16 outputs; scales and zeros (panels, groups, 16).
    Where out_features is no multiple of 16, the last panel is filled up. stored_as: how the model's weights are called.
    """

    def __init__(self, out_features: int, in_features: int, bits: int = 8, stored_as: str = "int8") -> None:
        super().__init__()
        self.stored_as = stored_as
        if in_features % GROUP:
            raise ValueError(
                f"int{bits} weights come in groups of {GROUP}, and a layer of this model has {in_features} inputs; "
                "leave quantize out"
            )
        self.shape, self.bits = torch.Size((out_features, in_features)), bits
        panels, groups = -(-out_features // LANES), in_features // GROUP
        self.codes = _blank((panels, groups, bits, LANES, 4), torch.uint8)
        self.scales = _blank((panels, groups, LANES), torch.float16)
        self.zeros = _blank((panels, groups, LANES), torch.float16)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes

    @torch.no_grad()
    def fill(self, start: int, weight: Tensor) -> None:
        """Take the float weights of the outputs from `start` on, a multiple of 16; all 16 of a panel at once."""
        groups = weight.float().view(len(weight), -1, GROUP)
        self.take(start, *(_nearest if self.bits == 8 else _spanned)(groups))

    @torch.no_grad()
    def take(self, start: int, codes: Tensor, scales: Tensor, zeros: Tensor) -> None:
        """Take codes (outputs, groups, 32), and scales and zeros (outputs, groups, 1), as they are; else as `fill`."""
        count, groups = codes.shape[:2]
        if start % LANES or (count % LANES and start + count != self.shape[0]):
            raise ValueError(f"outputs {start} to {start + count} do not end with a panel of {LANES}")
        codes, scales, zeros = (F.pad(part, (0, 0, 0, 0, 0, -count % LANES)) for part in (codes, scales, zeros))
        if self.bits == 4:
            pairs = codes.view(*codes.shape[:2], GROUP // 8, 8)[..., _ORDER].view(*codes.shape[:2], GROUP // 8, 4, 2)
            codes = pairs[..., 0] | pairs[..., 1] << 4
        fours = codes.reshape(-1, LANES, groups, self.bits, 4)
        panels = slice(start // LANES, start // LANES + len(fours))
        self.codes[panels] = fours.permute(0, 2, 3, 1, 4)
        self.scales[panels] = scales.view(-1, LANES, groups).transpose(1, 2)
        self.zeros[panels] = zeros.view(-1, LANES, groups).transpose(1, 2)

    def rows(self, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights of outputs `start` to `stop`, (stop - start, in_features)."""
        first, last = start // LANES, -(-stop // LANES)
        codes = self.codes[first:last].permute(0, 3, 1, 2, 4).flatten(0, 1)  # (16 x panels, groups, bits, 4)
        scales, zeros = (part[first:last].transpose(1, 2).flatten(0, 1) for part in (self.scales, self.zeros))
        return self._widened(codes, scales, zeros, dtype)[start - first * LANES : stop - first * LANES]

    def at(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weights of the outputs `ids`, (*ids.shape, in_features)."""
        panels, lanes = ids // LANES, ids % LANES
        parts = self.codes[panels, :, :, lanes], self.scales[panels, :, lanes], self.zeros[panels, :, lanes]
        return self._widened(*parts, dtype)

    def _widened(self, codes: Tensor, scales: Tensor, zeros: Tensor, dtype: torch.dtype) -> Tensor:
        """Return weights (..., in_features) of codes (..., groups, bits, 4), and scales and zeros (..., groups)."""
        if self.bits == 4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)[..., _ORDER]
        wide = torch.addcmul(zeros[..., None].float(), codes.flatten(-2).float(), scales[..., None].float())
        return wide.flatten(-2).to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedWeight":
        """Move, but keep the dtypes: a cast of the model is one of its activations."""

        def moved(part: Tensor) -> Tensor:
            there = fn(part)
            return there if there.dtype == part.dtype else part.to(there.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of some outputs at a time, each start a multiple of 16."""
        return ((start, min(start + _ROWS, self.shape[0])) for start in range(0, self.shape[0], _ROWS))


class PackedLinear(nn.Module):
    """x @ weight.T for a PackedWeight, widened some outputs at a time: what defines the result, not its speed."""

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        parts = [linear(input, self.weight.rows(start, stop, input.dtype)) for start, stop in self.weight.blocks()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class PackedEmbedding(nn.Module):
    """A vector of a PackedWeight for each token, in the dtype of the model's activations."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = weight, dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedEmbedding":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        return self

    def forward(self, input: Tensor) -> Tensor:
        return self.weight.at(input, self.dtype)


def bits_of(name: str, quantize: str) -> int:
    """Return how many bits a matrix of the model gets in "int8" or "int4", where the embedding and the head have 8."""
    return 4 if quantize == "int4" and name.startswith("layers.") else 8


def quantize_layers(
    model: nn.Module, dtype: torch.dtype, quantize: str = "int8", stored: Mapping[str, int | None] | None = None
) -> None:
    """Put packed layers, still unfilled, in the place of linear layers and embeddings; those that share stay so.

    `quantize` is "int8", "int4" or "stored", for which `stored` has the bits of every matrix by its name, None for one
    that stays as it is. `dtype` is that of the activations.
    """
    made: dict[Tensor, PackedWeight | None] = {}
    for prefix, owner in list(model.named_modules()):
        for name, layer in owner.named_children():
            if not isinstance(layer, nn.Linear | nn.Embedding):
                continue
            if layer.weight not in made:
                whole = ".".join(filter(None, (prefix, name, "weight")))
                bits = bits_of(whole, quantize) if stored is None else stored[whole]
                rows, columns = layer.weight.shape
                made[layer.weight] = None if bits is None else PackedWeight(rows, columns, bits, quantize)
            weight = made[layer.weight]
            if weight is not None:
                is_linear = isinstance(layer, nn.Linear)
                setattr(owner, name, PackedLinear(weight) if is_linear else PackedEmbedding(weight, dtype))


def packed_weights(model: nn.Module) -> dict[str, PackedWeight]:
    """Return the packed matrices by their names; one that two layers share is here once, under the first's."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedWeight)}


def weights_of(model: nn.Module) -> dict[str, nn.Parameter | PackedWeight]:
    """Return all weights by their names, a packed matrix as one; one that two layers share is here once."""
    matrices = packed_weights(model)
    floats = {name: weight for name, weight in model.named_parameters() if name.rpartition(".")[0] not in matrices}
    return {**floats, **matrices}


def _spanned(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (..., 32) of 4 bits, scales (..., 1) and zeros (..., 1) for groups of weights (..., 32)."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale, zero = ((high - low) / 15).half(), low.half()
    return _codes(groups, scale, zero, 15), scale, zero


def _codes(groups: Tensor, scale: Tensor, zero: Tensor, most: int) -> Tensor:
    steps = (groups - zero.float()).div_(scale.float().clamp(min=2.0**-24))
    return steps.round_().clamp_(0, most).to(torch.uint8)


def _nearest(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (..., 32) of 8 bits, scales (..., 1) and zeros (..., 1) for groups of weights (..., 32)."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    even = torch.maximum(high, -low) / 127
    found = []
    for scale, zero in (((high - low) / 240, low), (even, -128 * even.half().float())):
        scale, zero = scale.half(), zero.half()
        codes = _codes(groups, scale, zero, 255)
        lost = torch.addcmul(zero.float(), codes.float(), scale.float()).sub_(groups).square_().sum(-1, keepdim=True)
        found.append((lost, codes, scale, zero))
    first, second = found
    better = second[0] < first[0]
    codes, scale, zero = (torch.where(better, ours, theirs) for ours, theirs in zip(second[1:], first[1:], strict=True))
    return codes, scale, zero


def _blank(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    # Parameters, so that they are counted, saved and moved as weights are; there is no gradient in whole numbers.
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
