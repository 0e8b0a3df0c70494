"""What a decode step is made of when only the device knows the positions: one token a row, no host in between.

A CUDA graph repeats what was recorded, so nothing here may depend on a number that the host reads: positions are a
tensor, and keys past a row's own are masked, not cut off. `PYTORCH` does it with PyTorch on any device, in any dtype;
`compiled` makes fewer kernels of them; `triton_kernels` has the same in Triton, for what its `refusal` allows.
Plain twins, which are the definitions: the modules of model.py. Knows tensors, not modules, graphs or sampling.
Shapes: h is (rows, dim); positions (rows,) int64; keys and values (at least rows, slots, n_kv_heads, head_dim).
"""

from collections.abc import Callable
from functools import cached_property
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.ops import linear, rms_norm
from llama.rope import apply_rotary_emb


class Qkv(Protocol):
    """Norm, the three products, the rotation by position: return q, (rows, n_heads, head_dim), and write the cache."""

    def __call__(
        self,
        h: Tensor,
        norm_weight: Tensor,
        eps: float,
        wq: Tensor,
        wk: Tensor,
        wv: Tensor,
        cos: Tensor,  # (at least slots, 1, head_dim), as RopeTable has them
        sin: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
    ) -> Tensor: ...


class AttendProject(Protocol):
    """Return h + attention(q) @ wo.T, over the keys at or before each row's position."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, wo: Tensor, h: Tensor) -> Tensor: ...


class Gate(Protocol):
    """Return silu(n @ w1.T) * (n @ w3.T) for the normed n of h."""

    def __call__(self, h: Tensor, norm_weight: Tensor, eps: float, w1: Tensor, w3: Tensor) -> Tensor: ...


class Project(Protocol):
    """Return h + x @ weight.T."""

    def __call__(self, x: Tensor, weight: Tensor, h: Tensor) -> Tensor: ...


class Head(Protocol):
    """Return the logits, (rows, vocab) float32 or wider, and of each tile of them the largest and its id.

    The largest, (rows, tiles), is nan where a logit of the tile is not finite.
    """

    def __call__(self, h: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


class Advance(Protocol):
    """Take every row's likeliest token, -1 where a logit is not finite, and step on by one position, all in place.

    best, at: what Head returns. tokens: (rows, width), the texts. chosen: (rows,) int64. A row that stands at the end
    of its text stays there.
    """

    def __call__(self, best: Tensor, at: Tensor, tokens: Tensor, positions: Tensor, chosen: Tensor) -> None: ...


class GraphOps(NamedTuple):
    """One way to do all of them, for at most `most_rows` rows, or any number."""

    name: str
    qkv: Qkv
    attend_project: AttendProject
    gate: Gate
    project: Project
    head: Head
    advance: Advance
    most_rows: int | None = None


def qkv(
    h: Tensor,
    norm_weight: Tensor,
    eps: float,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    normed = rms_norm(h, norm_weight, eps)
    xq, xk, xv = (linear(normed, w).view(len(h), 1, -1, keys.shape[-1]) for w in (wq, wk, wv))
    xq, xk = apply_rotary_emb(xq, xk, (cos[positions][:, None], sin[positions][:, None]))
    rows = torch.arange(len(h), device=h.device)
    keys[rows, positions], values[rows, positions] = xk[:, 0], xv[:, 0]
    return xq[:, 0]


def attend_project(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, wo: Tensor, h: Tensor) -> Tensor:
    seen = torch.arange(keys.shape[1], device=keys.device) <= positions[:, None]  # (rows, slots)
    # 0 * nan would be nan, so what no query may see is zero
    keys, values = (kept[: len(q)].masked_fill(~seen[..., None, None], 0).transpose(1, 2) for kept in (keys, values))
    gqa = q.shape[1] != keys.shape[1]
    output = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=seen[:, None, None], enable_gqa=gqa)
    return project(output.flatten(1), wo, h)  # (rows, n_heads, 1, head_dim) before


def gate(h: Tensor, norm_weight: Tensor, eps: float, w1: Tensor, w3: Tensor) -> Tensor:
    normed = rms_norm(h, norm_weight, eps)
    return F.silu(linear(normed, w1)) * linear(normed, w3)


def project(x: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    return h + linear(x, weight)


def head(h: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = linear(rms_norm(h, norm_weight, eps), weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    at = logits.argmax(-1, keepdim=True)  # the first of equals; here one tile is all of them
    finite = logits.sum(-1, keepdim=True).isfinite()
    return logits, logits.gather(-1, at).where(finite, torch.nan), at


def advance(best: Tensor, at: Tensor, tokens: Tensor, positions: Tensor, chosen: Tensor) -> None:
    likeliest = at.gather(1, best.argmax(-1, keepdim=True))[:, 0]  # tiles stand in order: the first of equals
    step_on(likeliest.where(~best.isnan().any(-1), -1), tokens, positions, chosen)


def step_on(ids: Tensor, tokens: Tensor, positions: Tensor, chosen: Tensor) -> None:
    """Note the ids that were chosen, (rows,), and write them behind each row's position, which moves there."""
    chosen.copy_(ids)
    positions.add_(1).clamp_(max=tokens.shape[1] - 1)
    tokens.scatter_(1, positions[:, None], ids.clamp(min=0)[:, None])


FUNCTIONS = ("qkv", "attend_project", "gate", "project", "head", "advance")
PYTORCH = GraphOps("plain", qkv, attend_project, gate, project, head, advance)


_COUNT = count()


class Compiled:
    """A function as torch.compile makes it: for the sizes that it meets first, then for all that differ as those did.

    So one that was shown two lengths is not compiled for a third.
    """

    def __init__(self, function: Any, backend: str | Callable[..., Any]) -> None:
        self._made_of = function, backend

    @cached_property
    def _call(self) -> Callable[..., Any]:  # made by the first call: where this Python cannot compile, that raises
        function, backend = self._made_of
        # PyTorch notes by a code's name and place which sizes vary, and models have nothing in common.
        name = f"{function.__name__}_{next(_COUNT)}"
        own = FunctionType(function.__code__.replace(co_name=name), function.__globals__, name)
        # With this a product of one row becomes a kernel of its own, which keeps memory busier than a library's
        # (https://github.com/meta-pytorch/gpt-fast).
        options: dict[str, Any] | None = {"coordinate_descent_tuning": True} if backend == "inductor" else None
        compiled: Callable[..., Any] = torch.compile(own, backend=backend, fullgraph=True, options=options)
        return compiled

    def __call__(self, *given: Any) -> Any:
        return self._call(*given)

    def __reduce__(self) -> tuple[type["Compiled"], tuple[Any, ...]]:
        return Compiled, self._made_of


def compiled(backend: str | Callable[..., Any]) -> GraphOps:
    """Return PyTorch's own kernels, fused by torch.compile within each function."""
    functions: dict[str, Any] = {name: Compiled(getattr(PYTORCH, name), backend) for name in FUNCTIONS}
    return GraphOps("compiled", **functions)
