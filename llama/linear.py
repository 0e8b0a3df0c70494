"""The single door to matrix products: which kernel multiplies activations by a weight.

Knows tensors only. Every linear layer of the model goes through here, cached or not, so both modes run the same kernel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

_HAS_ONEDNN: bool = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T for x (..., in_features) and weight (out_features, in_features)."""
    if _onednn_serves(x, weight):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return product
    return F.linear(x, weight)


def _onednn_serves(x: Tensor, weight: Tensor) -> bool:
    # PyTorch hands float32 products on a CPU to MKL, which reaches a half to a third of oneDNN's speed on an AMD
    # machine, at one row and at many (docs/log.md). oneDNN's operator has no gradient, and under
    # forward-mode differentiation (an open level of dual numbers) it would give zeros without a word.
    return (
        x.dtype == torch.float32 == weight.dtype
        and x.device.type == "cpu"
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and forward_ad._current_level < 0
        and _HAS_ONEDNN
    )
