"""The operations that a forward is made of, and the plain way to do them; `llama.exact` has another.

The model calls them by these names and knows nothing of how they are done. Knows tensors only.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.attend import attend
from llama.linear import linear
from llama.ranks import Ranks


class Attend(Protocol):
    """What `llama.attend.attend` does."""

    def __call__(
        self,
        xq: Tensor,
        keys: Tensor,
        values: Tensor,
        start_pos: int | Sequence[int],
        key_positions: Tensor | None = None,
    ) -> Tensor: ...


class Linear(Protocol):
    """What `whole_linear` does; exact mode computes the outputs in so many pieces."""

    def __call__(self, x: Tensor, weight: Tensor, pieces: int) -> Tensor: ...


class SumLinear(Protocol):
    """What `sum_linear` does; exact mode computes each sum from so many pieces a rank."""

    def __call__(self, x: Tensor, weight: Tensor, pieces: int, ranks: Ranks) -> Tensor: ...


class RMSNorm(Protocol):
    """What `rms_norm` does."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class Silu(Protocol):
    """x * sigmoid(x), element by element."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


class Ops(NamedTuple):
    """One way to do all of them; research code may make its own, PLAIN._replace(name="mine", attend=mine)."""

    name: str
    linear: Linear
    sum_linear: SumLinear
    attend: Attend
    rms_norm: RMSNorm
    silu: Silu


def whole_linear(x: Tensor, weight: Tensor, pieces: int) -> Tensor:
    """Return x @ weight.T for x (..., in_features) and weight (out_features, in_features)."""
    return linear(x, weight)


def sum_linear(x: Tensor, weight: Tensor, pieces: int, ranks: Ranks) -> Tensor:
    """Return x @ weight.T, where every rank has its share of the columns of both."""
    return ranks.sum(linear(x, weight))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale every vector of x, (..., dim), to a root mean square of one, then each number by its weight, (dim,)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # 16-bit squares overflow or vanish
    norm = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return norm.type_as(x) * weight


PLAIN = Ops("plain", whole_linear, sum_linear, attend, rms_norm, F.silu)
