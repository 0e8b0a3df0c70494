"""int8 weights: the layout, how a matrix is brought into it, and drop-in layers that hold it.

Every 32 neighbouring weights of an output share a scale and a zero in float16, `weight = scale * code + zero`, with
codes from 0 to 255: 1.125 bytes a weight. A group takes whichever loses less: 240 steps from its smallest weight to its
largest, or 127 steps to either side of 0. The first is exact for weights that come from a file with 4 bits a weight in
such groups (240 is 16 times 15), the second for one with 8; others are off by 1/480 of their group's span at most, and
by what float16 rounds off. Nothing is kept in a wider dtype; the layers widen some outputs at a time as they multiply.
Knows torch only. `llama/fast/native/products.h` reads the same bytes.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama.ops import linear

GROUP = 32  # weights that share a scale and a zero
LANES = 16  # outputs whose groups stand side by side, so that one vector of a CPU holds four weights of each
_ROWS = 128  # outputs that are brought into int8, or widened, at a time: what stays in a CPU's nearer cache


class Int8Weight(nn.Module):
    """A matrix (out_features, in_features) in int8; a tied head and its embedding share one.

    codes are (panels, groups, 8, 16, 4), a panel being 16 outputs; scales and zeros (panels, groups, 16). Where
    out_features is no multiple of 16, the last panel is filled up.
    """

    stored_as = "int8"

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        if in_features % GROUP:
            raise ValueError(
                f"int8 weights come in groups of {GROUP}, and a layer of this model has {in_features} inputs; "
                "leave quantize out"
            )
        self.shape = torch.Size((out_features, in_features))
        panels, groups = -(-out_features // LANES), in_features // GROUP
        self.codes = _blank((panels, groups, GROUP // 4, LANES, 4), torch.uint8)
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
        if start % LANES or (len(weight) % LANES and start + len(weight) != self.shape[0]):
            raise ValueError(f"outputs {start} to {start + len(weight)} do not end with a panel of {LANES}")
        weight = F.pad(weight.float(), (0, 0, 0, -len(weight) % LANES))
        groups = weight.view(len(weight), -1, GROUP)
        codes, scale, zero = _nearest(groups)
        fours = codes.view(-1, LANES, groups.shape[1], GROUP // 4, 4)
        panels = slice(start // LANES, start // LANES + len(fours))
        self.codes[panels] = fours.permute(0, 2, 3, 1, 4)
        self.scales[panels] = scale.view(-1, LANES, groups.shape[1]).transpose(1, 2)
        self.zeros[panels] = zero.view(-1, LANES, groups.shape[1]).transpose(1, 2)

    def rows(self, start: int, stop: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weights of outputs `start` to `stop`, (stop - start, in_features)."""
        first, last = start // LANES, -(-stop // LANES)
        codes = self.codes[first:last].permute(0, 3, 1, 2, 4).flatten(3)  # (panels, 16, groups, 32)
        scales, zeros = (part[first:last].transpose(1, 2)[..., None].float() for part in (self.scales, self.zeros))
        wide = torch.addcmul(zeros, codes.float(), scales).flatten(0, 1).flatten(1)
        return wide[start - first * LANES : stop - first * LANES].to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Int8Weight":
        """Move, but keep the dtypes: a cast of the model is one of its activations."""

        def moved(part: Tensor) -> Tensor:
            there = fn(part)
            return there if there.dtype == part.dtype else part.to(there.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of some outputs at a time, each start a multiple of 16."""
        return ((start, min(start + _ROWS, self.shape[0])) for start in range(0, self.shape[0], _ROWS))


class Int8Linear(nn.Module):
    """x @ weight.T for an Int8Weight, widened some outputs at a time: what defines int8's result, not its speed."""

    def __init__(self, weight: Int8Weight) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        parts = [linear(input, self.weight.rows(start, stop, input.dtype)) for start, stop in self.weight.blocks()]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class Int8Embedding(nn.Module):
    """A vector of an Int8Weight for each token, in the dtype of the model's activations."""

    def __init__(self, weight: Int8Weight, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = weight, dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Int8Embedding":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        return self

    def forward(self, input: Tensor) -> Tensor:
        panels, lanes = input // LANES, input % LANES
        codes = self.weight.codes[panels, :, :, lanes].flatten(-2)  # (bsz, seqlen, groups, 32)
        scales, zeros = (part[panels, :, lanes][..., None].float() for part in (self.weight.scales, self.weight.zeros))
        return torch.addcmul(zeros, codes.float(), scales).flatten(-2).to(self.dtype)


def quantize_layers(model: nn.Module, dtype: torch.dtype) -> None:
    """Put int8 layers, still unfilled, in the place of all linear layers and embeddings; those that share stay so."""
    made: dict[Tensor, Int8Weight] = {}
    for owner in list(model.modules()):
        for name, layer in owner.named_children():
            if not isinstance(layer, nn.Linear | nn.Embedding):
                continue
            if layer.weight not in made:
                made[layer.weight] = Int8Weight(*layer.weight.shape)
            weight = made[layer.weight]
            setattr(owner, name, Int8Linear(weight) if isinstance(layer, nn.Linear) else Int8Embedding(weight, dtype))


def int8_weights(model: nn.Module) -> dict[str, Int8Weight]:
    """Return the int8 matrices by their names; one that two layers share is here once, under the first's."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Int8Weight)}


def weights_of(model: nn.Module) -> dict[str, nn.Parameter | Int8Weight]:
    """Return all weights by their names, an int8 matrix as one; one that two layers share is here once."""
    matrices = int8_weights(model)
    floats = {name: weight for name, weight in model.named_parameters() if name.rpartition(".")[0] not in matrices}
    return {**floats, **matrices}


def _nearest(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes (..., 32), scales (..., 1) and zeros (..., 1) for groups of weights (..., 32)."""
    low, high = groups.aminmax(dim=-1, keepdim=True)
    even = torch.maximum(high, -low) / 127
    found = []
    for scale, zero in (((high - low) / 240, low), (even, -128 * even.half().float())):
        scale, zero = scale.half(), zero.half()
        codes = (groups - zero.float()).div_(scale.float().clamp(min=2.0**-24)).round_().clamp_(0, 255)
        lost = torch.addcmul(zero.float(), codes, scale.float()).sub_(groups).square_().sum(-1, keepdim=True)
        found.append((lost, codes.to(torch.uint8), scale, zero))
    first, second = found
    better = second[0] < first[0]
    codes, scale, zero = (torch.where(better, ours, theirs) for ours, theirs in zip(second[1:], first[1:], strict=True))
    return codes, scale, zero


def _blank(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    # Parameters, so that they are counted, saved and moved as weights are; there is no gradient in whole numbers.
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
