"""The functions that a decode step on a GPU is made of: one token a row, without the host.

A CUDA graph repeats what was recorded, so nothing here may depend on a number that the host reads: positions are a
tensor, and keys past a row's own position are masked, not cut off. `PYTORCH` runs on any device, in any dtype;
`compiled` makes fewer kernels of the same functions. The modules of model.py define the results.
Knows tensors, not modules, graphs or sampling.
Shapes: h is (rows, dim); positions (rows,) int64; keys and values (at least rows, slots, n_kv_heads, head_dim).
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.ops import linear, rms_norm
from llama.rope import apply_rotary_emb


class GraphOps(NamedTuple):
    """One implementation of the three functions that make logits of tokens, and tokens of logits."""

    name: str
    layer: Callable[..., Tensor]
    head: Callable[..., Tensor]
    advance: Callable[..., None]


def decode_layer(
    h: Tensor,
    weights: Mapping[str, Tensor],
    eps: tuple[float, float],
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """Return the output of a layer, (rows, dim), and write its keys and values at `positions`.

    weights: those of a TransformerBlock, by name. eps: of its attention_norm and its ffn_norm. cos, sin: (at least
    slots, 1, head_dim), as RopeTable has them.
    """
    normed = rms_norm(h, weights["attention_norm.weight"], eps[0])
    products = (linear(normed, weights[f"attention.{name}.weight"]) for name in ("wq", "wk", "wv"))
    xq, xk, xv = (product.view(len(h), 1, -1, keys.shape[-1]) for product in products)
    xq, xk = apply_rotary_emb(xq, xk, (cos[positions][:, None], sin[positions][:, None]))
    rows = torch.arange(len(h), device=h.device)
    keys[rows, positions], values[rows, positions] = xk[:, 0], xv[:, 0]
    seen = torch.arange(keys.shape[1], device=keys.device) <= positions[:, None]  # (rows, slots)
    # 0 * nan would be nan, so what no query may see is zero.
    keys, values = (kept[: len(h)].masked_fill(~seen[..., None, None], 0).transpose(1, 2) for kept in (keys, values))
    q = xq[:, 0, :, None]  # (rows, n_heads, 1, head_dim)
    gqa = q.shape[1] != keys.shape[1]
    output = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[:, None, None], enable_gqa=gqa)
    h = h + linear(output.flatten(1), weights["attention.wo.weight"])
    normed = rms_norm(h, weights["ffn_norm.weight"], eps[1])
    gate, up = (linear(normed, weights[f"feed_forward.{name}.weight"]) for name in ("w1", "w3"))
    return h + linear(F.silu(gate) * up, weights["feed_forward.w2.weight"])


def head(h: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Return the logits, (rows, vocab), in float32 or wider."""
    logits = linear(rms_norm(h, norm_weight, eps), weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def advance(logits: Tensor, tokens: Tensor, positions: Tensor, chosen: Tensor) -> None:
    """Choose every row's most likely token, the first of equals, and step on as `step_on` does."""
    step_on(if_finite(logits, logits.argmax(-1)), tokens, positions, chosen)


def if_finite(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the chosen ids, (rows,), with -1 for each row that has a logit which is not finite."""
    return ids.where(logits.sum(-1).isfinite(), -1)


def step_on(ids: Tensor, tokens: Tensor, positions: Tensor, chosen: Tensor) -> None:
    """Store the ids in `chosen`, move each position by one, and write the ids into the texts there, all in place.

    tokens: the texts, (rows, slots). A row at the end of its text stays there.
    """
    chosen.copy_(ids)
    positions.add_(1).clamp_(max=tokens.shape[1] - 1)
    tokens.scatter_(1, positions[:, None], ids.clamp(min=0)[:, None])


PYTORCH = GraphOps("plain", decode_layer, head, advance)


_COUNT = count()


class Compiled:
    """A function compiled by torch.compile: for the sizes of its first call, then for all sizes that vary.

    After calls with two lengths, a third length needs no compilation.
    """

    def __init__(self, function: Any, backend: str | Callable[..., Any]) -> None:
        self._made_of = function, backend

    @cached_property
    def _call(self) -> Callable[..., Any]:  # compiled by the first call, which raises if this Python cannot compile
        function, backend = self._made_of
        # PyTorch records by a code's name and file which sizes vary; a new name keeps models apart.
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
    """Return the functions of `PYTORCH`, each compiled by torch.compile."""
    functions: dict[str, Any] = {name: Compiled(getattr(PYTORCH, name), backend) for name in GraphOps._fields[1:]}
    return GraphOps("compiled", **functions)
