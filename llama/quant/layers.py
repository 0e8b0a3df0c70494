"""Layers of packed weights, and their use in the place of a model's linear layers and embeddings.

The layers dequantise some outputs at a time as they multiply, and store nothing in a wider dtype. They define the
results of native code, which computes from the packed bytes. Knows torch and `packed.py` only.
"""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from llama.ops import linear
from llama.quant.packed import GROUP, INT4, INT8, Format, PackedWeight


class PackedLinear(nn.Module):
    """x @ weight.T + bias for a PackedWeight, dequantised some outputs at a time.

    activations: 8 rounds x to integers of 8 bits first, with a scale for every 32 inputs. With 16 nothing is rounded
    here; native code rounds to 16 bits, with a scale for every vector. Raises ValueError if x requires a gradient:
    rounding has no useful one.
    """

    def __init__(self, weight: PackedWeight, activations: int = 16, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight, self.activations, self.bias = weight, activations, bias

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and input.requires_grad:
            raise ValueError(
                f"a model with {self.weight.stored_as} weights cannot be trained: load it without quantize, or call it "
                "in torch.inference_mode()"
            )
        if self.activations == 8:
            input = in_8_bits(input)
        parts = [linear(input, self.weight.rows(start, stop, input.dtype)) for start, stop in self.weight.blocks()]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return out if self.bias is None else out + self.bias


class PackedEmbedding(nn.Module):
    """An embedding of a PackedWeight, in the dtype of the model's activations."""

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = weight, dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedEmbedding":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        return self

    def forward(self, input: Tensor) -> Tensor:
        return self.weight.at(input, self.dtype)


def in_8_bits(x: Tensor) -> Tensor:
    """Return x (..., columns) rounded to 8 bits with a scale for every 32 columns. Source: llama.cpp's Q8_0."""
    spans = torch.unflatten(x.float(), -1, (-1, GROUP))
    most = spans.abs().amax(dim=-1, keepdim=True).clamp(min=1e-36)  # its inverse must be finite
    return ((spans * (127 / most)).round() * (most / 127)).flatten(-2).to(x.dtype)


def quantize_layers(
    model: nn.Module,
    dtype: torch.dtype,
    quantize: str = "int8",
    stored: Callable[[str], Format | None] | None = None,
    activations: int = 16,
) -> None:
    """Replace linear layers and embeddings by packed layers; layers that share a weight still share it.

    dtype: of the activations. quantize: "int8", "int4" or "stored". stored: returns for each matrix by its name its
    format, or None if it stays unquantised. The matrices are not filled yet. activations: their bits in products.
    """
    if hasattr(model, "identity"):
        model.identity = deepcopy(model.identity)  # another one: caches of the old weights are no longer valid
    made: dict[Tensor, PackedWeight | None] = {}
    for prefix, owner in list(model.named_modules()):
        for name, layer in owner.named_children():
            if not isinstance(layer, nn.Linear | nn.Embedding):
                continue
            if layer.weight not in made:
                whole = ".".join(filter(None, (prefix, name, "weight")))
                in_4_bits = quantize == "int4" and whole.startswith("layers.")  # not the embedding, nor the head
                kept = stored(whole) if stored is not None else INT4 if in_4_bits else INT8
                rows, columns = layer.weight.shape
                made[layer.weight] = None if kept is None else PackedWeight(rows, columns, kept, quantize)
            weight = made[layer.weight]
            if weight is None:
                continue
            if isinstance(layer, nn.Linear):
                setattr(owner, name, PackedLinear(weight, activations, layer.bias))
            else:
                setattr(owner, name, PackedEmbedding(weight, dtype))


def quantized_weights(model: nn.Module) -> dict[str, PackedWeight]:
    """Return the quantised matrices by name; a matrix that two layers share occurs once, with the first name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedWeight)}


def weights_of(model: nn.Module) -> dict[str, nn.Parameter | PackedWeight]:
    """Return all weights by name; a quantised matrix is one weight, and a shared weight occurs once."""
    matrices = quantized_weights(model)
    floats = {name: weight for name, weight in model.named_parameters() if name.rpartition(".")[0] not in matrices}
    return {**floats, **matrices}
