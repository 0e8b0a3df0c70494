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
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from llama.ops import linear, rms_norm
from llama.rope import apply_rotary_emb


class GraphOps(NamedTuple):
    """One implementation of the functions that make logits of tokens, and tokens of logits; `layer` calls `attend`."""

    name: str
    attend: Callable[..., Tensor]
    layer: Callable[..., Tensor]
    head: Callable[..., Tensor]
    advance: Callable[..., None]


def decode_layer(
    attend: Callable[..., Tensor],
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

    attend: `attend_masked` or `attend_flash`. weights: those of a TransformerBlock, by name. eps: of its
    attention_norm and its ffn_norm. cos, sin: (at least slots, 1, head_dim), as RopeTable has them.
    """
    normed = rms_norm(h, weights["attention_norm.weight"], eps[0])
    products = (linear(normed, weights[f"attention.{name}.weight"]) for name in ("wq", "wk", "wv"))
    xq, xk, xv = (product.view(len(h), 1, -1, keys.shape[-1]) for product in products)
    xq, xk = apply_rotary_emb(xq, xk, (cos[positions][:, None], sin[positions][:, None]))
    rows = torch.arange(len(h), device=h.device)
    keys[rows, positions], values[rows, positions] = xk[:, 0], xv[:, 0]
    output = attend(xq[:, 0], keys[: len(h)], values[: len(h)], positions)
    h = h + linear(output.flatten(1), weights["attention.wo.weight"])
    normed = rms_norm(h, weights["ffn_norm.weight"], eps[1])
    gate, up = (linear(normed, weights[f"feed_forward.{name}.weight"]) for name in ("w1", "w3"))
    return h + linear(F.silu(gate) * up, weights["feed_forward.w2.weight"])


def attend_masked(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Attend from q, (rows, n_heads, head_dim), to each row's keys up to its position; return the shape of q."""
    seen = torch.arange(keys.shape[1], device=keys.device) <= positions[:, None]  # (rows, slots)
    # 0 * nan would be nan, so what no query may see is zero.
    keys, values = (kept.masked_fill(~seen[..., None, None], 0).transpose(1, 2) for kept in (keys, values))
    gqa = q.shape[1] != keys.shape[1]
    q, mask = q[:, :, None], seen[:, None, None]  # one query a row: (rows, n_heads, 1, head_dim), (rows, 1, 1, slots)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=gqa)[:, :, 0]


def attend_flash(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Return what `attend_masked` returns, in 16 bits on a GPU; keys past a row's position are not read."""
    rows, slots = keys.shape[:2]
    # The operator that torch.nn.attention.varlen calls, whose function has no `seqused_k` in PyTorch 2.10.
    first = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
    packed = (q, keys.flatten(0, 1), values.flatten(0, 1), first, first * slots, 1, slots)
    used = (positions + 1).to(torch.int32)
    output: Tensor = torch.ops.aten._flash_attention_forward(*packed, 0.0, False, False, seqused_k=used)[0]
    return output


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


PYTORCH = GraphOps("plain", attend_masked, decode_layer, head, advance)
FLASH = PYTORCH._replace(name="plain flash", attend=attend_flash)


def plain_ops(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[GraphOps]:
    """Return the functions that may run there without a compiler, the faster ones first."""
    q = torch.empty((1, 1, 1, head_dim), dtype=dtype, device=device)
    flash = head_dim % 8 == 0 and q.is_cuda and can_use_flash_attention(SDPAParams(q, q, q, None, 0.0, False, True))
    return [FLASH, PYTORCH] if flash else [PYTORCH]


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
        # With the first, a product of one row becomes a kernel of its own, which keeps memory busier than a library's
        # (https://github.com/meta-pytorch/gpt-fast); with the second, kernels that can run side by side become one.
        tuned = {"coordinate_descent_tuning": True, "combo_kernels": True}
        options: dict[str, Any] | None = tuned if backend == "inductor" else None
        compiled: Callable[..., Any] = torch.compile(own, backend=backend, fullgraph=True, options=options)
        return compiled

    def __call__(self, *given: Any) -> Any:
        return self._call(*given)

    def __reduce__(self) -> tuple[type["Compiled"], tuple[Any, ...]]:
        return Compiled, self._made_of


def compiled(backend: str | Callable[..., Any], ops: GraphOps = PYTORCH) -> GraphOps:
    """Return the functions of `ops`, each compiled by torch.compile, `attend` as a part of `layer`."""
    layer, head, advance = (Compiled(function, backend) for function in (ops.layer, ops.head, ops.advance))
    return GraphOps(ops.name.replace("plain", "compiled"), ops.attend, layer, head, advance)
