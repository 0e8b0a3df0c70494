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
    """What `llama.linear.linear` does."""

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor: ...


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
    attend: Attend
    rms_norm: RMSNorm
    silu: Silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale every vector of x, (..., dim), to a root mean square of one, then each number by its weight, (dim,)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # 16-bit squares overflow or vanish
    norm = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return norm.type_as(x) * weight


PLAIN = Ops("plain", linear, attend, rms_norm, F.silu)
