"""How large a rounding error of the logits may be, decided only by the error of the uncached path against float64.

So a large error of the cached run cannot widen its own tolerance. Knows errors as tensors, and the sizes of a model.
"""

import math

import torch
from torch import Tensor

from llama.model import Transformer

# The bound of a position is TOLERANCE_FACTOR (by the bytes of a number) times the error of U there, or times the
# median error of the run if that is larger: an error may be small by chance. A multiple of the largest error would be
# steadier but weak: in bf16 the demo's first token, whose activations are huge, has 5 times the usual error and would
# excuse all others. The largest error of any pass in units of max(|U - R|, median) (docs/log.md): in fp32 7.5 among 250
# tiny models and 2.4 on the demo, in bf16 2.2 and 1.9, in fp16 3.5 and 2.5. Stale, shifted, dropped or misplaced keys
# make a million in fp32 and 66 in bf16.
TOLERANCE_FACTOR = {8: 32.0, 4: 32.0, 2: 8.0}
# The limit of U's own error, in eps x sqrt(widest layer) x layers x largest logit; 1.4 is the most that was seen. In 16
# bits that limits little, because one token may be off by ten times the spread of its logits over the vocabulary. So
# the median error of a run is limited to SPREAD times that spread; 0.15 was the most.
CEILING, SPREAD = 32.0, 0.5
# Native code rounds the inputs of quantised products to 16 bits, with one scale a row.
ACTIVATION_EPS = 2.0**-15
# A position is decided if its two largest logits differ by more than so many bounds: either may be off by one.
DECIDED = 2.0
FLOAT64_TOLERANCE = 1e-9  # for cached against uncached in float64; at most 5.1e-11 was seen


def bound_of(errors: Tensor, itemsize: int) -> Tensor:
    """Return the largest rounding error allowed at each position, from the errors of the uncached path, both (n,).

    `itemsize` is the bytes of a number of the model.
    """
    finite = errors.isfinite()
    usual = errors[finite].median().nan_to_num()
    bound = TOLERANCE_FACTOR[itemsize] * errors.where(finite, usual).clamp(min=usual)
    return bound.clamp(min=FLOAT64_TOLERANCE)


def ceiling_of(model: Transformer, largest: float) -> float:
    """Return the largest error allowed on the uncached path, for logits up to `largest`."""
    args = model.args
    widest = max(args.dim, args.n_heads * args.head_dim, args.ffn_dim)
    eps = torch.finfo(model.norm.weight.dtype).eps
    if model.runner is not None and model.execution.weights is not None:
        eps = max(eps, ACTIVATION_EPS)
    return CEILING * eps * math.sqrt(widest) * args.n_layers * largest
