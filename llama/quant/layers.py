"""Drop-in layers that hold packed weights, and the change of a model's linear layers and embeddings into these.

Nothing is kept in a wider dtype: the layers widen some outputs at a time as they multiply. They define the result,
which native code computes from the packed bytes. Knows torch and `packed.py` only.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from llama.ops import linear
from llama.quant.packed import GROUP, INT4, INT8, Format, PackedWeight, QuantizedWeight


class PackedLinear(nn.Module):
    """x @ weight.T + bias for a QuantizedWeight, widened some outputs at a time: what defines the result.

    activations: 8 rounds x to whole numbers of 8 bits first, those of every 32 inputs with a scale of their own. With
    16 nothing is rounded here; native code rounds to 16 bits, with a scale for every vector. Raises ValueError where a
    gradient would have to pass: that of a rounding says nothing.
    """

    def __init__(self, weight: QuantizedWeight, activations: int = 16, bias: nn.Parameter | None = None) -> None:
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
    """A vector of a QuantizedWeight for each token, in the dtype of the model's activations."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.dtype = weight, dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedEmbedding":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        return self

    def forward(self, input: Tensor) -> Tensor:
        return self.weight.at(input, self.dtype)


def in_8_bits(x: Tensor) -> Tensor:
    """Return x (..., columns) as 8 bits and a scale for every 32 columns give it. Source: llama.cpp's Q8_0."""
    spans = torch.unflatten(x.float(), -1, (-1, GROUP))
    most = spans.abs().amax(dim=-1, keepdim=True).clamp(min=1e-36)  # so that its inverse is no infinity
    return ((spans * (127 / most)).round() * (most / 127)).flatten(-2).to(x.dtype)


def format_of(name: str, quantize: str) -> Format:
    """Return how a matrix is packed with "int8" or "int4", where the embedding and the head have 8 bits, too."""
    return INT4 if quantize == "int4" and name.startswith("layers.") else INT8


def quantize_layers(
    model: nn.Module,
    dtype: torch.dtype,
    quantize: str = "int8",
    stored: Callable[[str], Format | QuantizedWeight | None] | None = None,
    activations: int = 16,
) -> None:
    """Put packed layers in the place of linear layers and embeddings; those that share stay so.

    `quantize` is "int8", "int4" or "stored", for which `stored` returns the format of every matrix by its name, or the
    matrix itself, or None for one that stays as it is. Where there is a format, the matrix is still to be filled.
    `dtype` is that of the activations; `activations`: how many bits they have in products.
    """
    if hasattr(model, "identity"):
        model.identity = object()  # type: ignore[assignment]  # a cache that the weights of before fed is not gone on with
    made: dict[Tensor, QuantizedWeight | None] = {}
    for prefix, owner in list(model.named_modules()):
        for name, layer in owner.named_children():
            if not isinstance(layer, nn.Linear | nn.Embedding):
                continue
            if layer.weight not in made:
                whole = ".".join(filter(None, (prefix, name, "weight")))
                kept = format_of(whole, quantize) if stored is None else stored(whole)
                rows, columns = layer.weight.shape
                made[layer.weight] = PackedWeight(rows, columns, kept, quantize) if isinstance(kept, Format) else kept
            weight = made[layer.weight]
            if weight is None:
                continue
            if isinstance(layer, nn.Linear):
                setattr(owner, name, PackedLinear(weight, activations, layer.bias))
            else:
                setattr(owner, name, PackedEmbedding(weight, dtype))


def quantized_weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Return the quantised matrices by their names; one that two layers share is here once, under the first's."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantizedWeight)}


def weights_of(model: nn.Module) -> dict[str, nn.Parameter | QuantizedWeight]:
    """Return all weights by their names, a quantised matrix as one; one that two layers share is here once."""
    matrices = quantized_weights(model)
    floats = {name: weight for name, weight in model.named_parameters() if name.rpartition(".")[0] not in matrices}
    return {**floats, **matrices}
