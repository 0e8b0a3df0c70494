"""How far rounding may take logits: decided by the error that the uncached path makes against float64, and no other.

So a large error of the cached run cannot absolve itself. Knows errors as tensors, and the sizes of a model.
"""

import math

import torch
from torch import Tensor

from llama.model import Transformer

# A place's bound is TOLERANCE_FACTOR (by the bytes of a number) times the error of U there, or times the median over
# the run's places where that is more: an error may be small by chance. A multiple of the largest would be steadier but
# weak: in bf16 the demo's first token, whose activations are huge, is off by 5 times what is usual, and would excuse
# all others. The largest error of any way in these units (docs/log.md): in fp32 7.5 among 250 tiny models and 2.4 on
# the demo, in bf16 2.2 and 1.9, in fp16 3.5 and 2.5. Stale, shifted, dropped or misplaced keys make a million in fp32,
# 66 in bf16.
TOLERANCE_FACTOR = {8: 32.0, 4: 32.0, 2: 8.0}
# What the error of U itself may be, whatever the cached run does: in eps x sqrt(widest layer) x layers x largest logit,
# where 1.4 is the most that was seen. In 16 bits that limits nothing: a token on whose activations much depends may be
# off by ten times the spread of its logits over the vocabulary. The median of a run was 0.15 of the spread at most.
CEILING, SPREAD = 32.0, 0.5
# Native code rounds what it multiplies by quantised weights to 16 bits, with one scale a row.
ACTIVATION_EPS = 2.0**-15
FLOAT64_TOLERANCE = 1e-9  # for cached against uncached in float64; at most 6e-13 was seen


def bound_of(errors: Tensor, itemsize: int) -> Tensor:
    """Return what rounding may do to the logits at each place, (places,), from the errors of the uncached path there.

    `itemsize` is that of the model's numbers.
    """
    finite = errors.isfinite()
    usual = errors[finite].median().nan_to_num()
    bound = TOLERANCE_FACTOR[itemsize] * errors.where(finite, usual).clamp(min=usual)
    return bound.clamp(min=FLOAT64_TOLERANCE)


def ceiling_of(model: Transformer, largest: float) -> float:
    """Return what the error of the uncached path may be at most, for logits up to `largest`."""
    args = model.args
    widest = max(args.dim, args.n_heads * args.head_dim, args.ffn_dim)
    eps = torch.finfo(model.norm.weight.dtype).eps
    if model.runner is not None and model.execution.weights is not None:
        eps = max(eps, ACTIVATION_EPS)
    return CEILING * eps * math.sqrt(widest) * args.n_layers * largest
