"""The functions that forwards on a GPU are made of: calls of one token a row, and of several.

A CUDA graph repeats what was recorded, so nothing in a call may depend on a number that the host reads: positions are a
tensor, and keys past a row's own position are masked, not cut off. `PYTORCH` runs on any device, in any dtype. The
modules of model.py define the results. Knows tensors, not modules, graphs or sampling.
Shapes: a call feeds `width` tokens of each row, and `tokens` is rows * width. h is (tokens, dim); positions (rows,
width) int64; keys and values (rows, slots, n_kv_heads, head_dim); cos and sin of each token (tokens, 1, head_dim).
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from llama.ops import linear, rms_norm
from llama.rope import rotate

PART = 512  # logits of a part in `if_finite`; vocabularies of 128,256 tokens have parts of 256

Norm = Callable[[Tensor, Tensor, float], Tensor]
# Takes the keys and values of a call's tokens, (rows, width, n_kv_heads, head_dim), and returns those to attend to.
Store = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Attention(NamedTuple):
    """Attention from the tokens of a call to the keys up to each token's position.

    prepare: returns values that all layers of a call share, from the positions and the number of slots.
    attend: attends in one layer, given the result of `prepare`.
    by_text: the time of `attend` depends on the texts' positions, not on the number of slots.
    """

    prepare: Callable[[Tensor, int], tuple[Tensor, ...]]
    attend: Callable[[Tensor, Tensor, Tensor, tuple[Tensor, ...]], Tensor]
    by_text: bool = False


class LayerWeights(NamedTuple):
    """The parameters of a TransformerBlock, and the eps of its norms, by name."""

    tensors: Mapping[str, Tensor]
    eps: Mapping[str, float]

    def norm(self, norm: Norm, x: Tensor, name: str) -> Tensor:
        """Return x after the norm of this name, or x itself if the block has no such norm."""
        weight = self.tensors.get(f"{name}.weight")
        return x if weight is None else norm(x.flatten(0, -2), weight, self.eps[name]).view_as(x)


class Shared(NamedTuple):
    """The values that all layers of a call share. prepared: the result of attention's `prepare`."""

    positions: Tensor
    cos_sin: tuple[Tensor, Tensor]
    prepared: tuple[Tensor, ...]


class GraphOps(NamedTuple):
    """One implementation of the functions that make logits of tokens, and tokens of logits.

    attention, norm, rotate, gate: the operations of `layer` besides products.
    prompts: whether calls of several tokens a row are computed too; if not, the plain path runs them.
    step: a layer of a call of one token a row with the cache; None for `cached_layer`.
    head, advance: replace `head` and `advance` below.
    nucleus: replaces sorting in `llama.sampling.choose`; None to sort.
    """

    name: str
    attention: Attention
    norm: Norm
    rotate: Callable[[Tensor, tuple[Tensor, Tensor]], Tensor]
    gate: Callable[[Tensor, Tensor], Tensor]
    head: Callable[[Tensor, Tensor, float, Tensor], Tensor]
    advance: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    prompts: bool = False
    step: Callable[[Tensor, LayerWeights, Shared, Tensor, Tensor], Tensor] | None = None
    nucleus: Callable[[Tensor, float | Tensor, float | Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


def shared_by_layers(attention: Attention | None, positions: Tensor, slots: int, cos: Tensor, sin: Tensor) -> Shared:
    """Return the values that all layers of a call share. cos, sin: (at least slots, 1, head_dim), of RopeTable."""
    places = positions.flatten()
    prepared = () if attention is None else attention.prepare(positions, slots)
    return Shared(positions, (cos[places], sin[places]), prepared)


def layer(ops: GraphOps, h: Tensor, weights: LayerWeights, shared: Shared, store: Store) -> Tensor:
    """Return the output of a layer, (tokens, dim)."""
    tensors, head_dim = weights.tensors, shared.cos_sin[0].shape[-1]
    normed = weights.norm(ops.norm, h, "attention_norm")
    made = []
    for name in ("wq", "wk", "wv"):
        product, bias = linear(normed, tensors[f"attention.{name}.weight"]), tensors.get(f"attention.{name}.bias")
        product = product if bias is None else product + bias
        made.append(product.view(len(h), -1, head_dim))
    xq, xk = (weights.norm(ops.norm, x, f"attention.{name}_norm") for x, name in zip(made[:2], "qk", strict=True))
    xq, xk = ops.rotate(xq, shared.cos_sin), ops.rotate(xk, shared.cos_sin)
    keys, values = store(*(x.view(*shared.positions.shape, -1, head_dim) for x in (xk, made[2])))
    output = ops.attention.attend(xq, keys, values, shared.prepared)
    h = h + linear(output.flatten(1), tensors["attention.wo.weight"])
    normed = weights.norm(ops.norm, h, "ffn_norm")
    gate, up = (linear(normed, tensors[f"feed_forward.{name}.weight"]) for name in ("w1", "w3"))
    return h + linear(ops.gate(gate, up), tensors["feed_forward.w2.weight"])


def cached_layer(
    ops: GraphOps, h: Tensor, weights: LayerWeights, shared: Shared, keys: Tensor, values: Tensor
) -> Tensor:
    """Return the output of a layer, (tokens, dim), and write its keys and values at the positions."""

    def store(xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(len(xk), device=xk.device)[:, None]
        keys[rows, shared.positions], values[rows, shared.positions] = xk, xv
        return keys[: len(xk)], values[: len(xk)]

    return layer(ops, h, weights, shared, store)


def fresh(xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a call alone: the cache is off, or has no earlier ones."""
    return xk, xv


def prepare_mask(positions: Tensor, slots: int) -> tuple[Tensor, ...]:
    """Return which slots each token sees, (rows, width, slots) of bool."""
    return (torch.arange(slots, device=positions.device) <= positions[..., None],)


def attend_masked(q: Tensor, keys: Tensor, values: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
    """Attend from q, (tokens, n_heads, head_dim), to each token's keys up to its position; return the shape of q."""
    (seen,) = prepared
    # 0 * nan would be nan, so what no query of a row may see is zero.
    keys, values = (kept.masked_fill(~seen[:, -1, :, None, None], 0).transpose(1, 2) for kept in (keys, values))
    gqa = q.shape[1] != keys.shape[1]
    q = q.view(*seen.shape[:2], *q.shape[1:]).transpose(1, 2)  # (rows, n_heads, width, head_dim)
    output = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[:, None], enable_gqa=gqa)
    return output.transpose(1, 2).flatten(0, 1)


def prepare_flash(positions: Tensor, slots: int) -> tuple[Tensor, ...]:
    """Return where the queries and the keys of each row begin, (rows + 1,), and the keys it sees, (rows,), int32."""
    rows, width = positions.shape
    first = torch.arange(rows + 1, dtype=torch.int32, device=positions.device)
    return first * width, first * slots, (positions[:, -1] + 1).to(torch.int32)


def attend_flash(q: Tensor, keys: Tensor, values: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
    """Return what `attend_masked` returns, in 16 bits on a GPU; keys past a row's last position are not read."""
    first, offsets, used = prepared
    width = len(q) // len(keys)
    # The operator that torch.nn.attention.varlen calls, whose function has no `seqused_k` in PyTorch 2.10. Its causal
    # mask lets the last query of a row see the last key that is used.
    packed = (q, keys.flatten(0, 1), values.flatten(0, 1), first, offsets, width, keys.shape[1])
    output: Tensor = torch.ops.aten._flash_attention_forward(*packed, 0.0, width > 1, False, seqused_k=used)[0]
    return output


def gate(x: Tensor, up: Tensor) -> Tensor:
    """Return silu(x) * up."""
    return F.silu(x) * up


def head(h: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Return the logits, (rows, vocab), in float32 or wider."""
    logits = linear(rms_norm(h, norm_weight, eps), weight)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def advance(logits: Tensor, tokens: Tensor, positions: Tensor, chosen: Tensor) -> None:
    """Choose every row's most likely token, the first of equals, and step on as `step_on` does."""
    step_on(if_finite(logits, logits.argmax(-1)), tokens, positions, chosen)


def if_finite(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the chosen ids, (rows,), with -1 for each row that has a logit which is not finite."""
    # A GPU reduces each part in a block, and a whole row in one only.
    parts = logits.view(len(logits), -1, math.gcd(PART, logits.shape[-1]))
    return ids.where(parts.sum(-1).sum(-1).isfinite(), -1)


def step_on(ids: Tensor, tokens: Tensor, positions: Tensor, chosen: Tensor) -> None:
    """Store the ids in `chosen`, move each position by one, and write the ids into the texts there, all in place.

    tokens: the texts, (rows, slots). A row at the end of its text stays there.
    """
    chosen.copy_(ids)
    positions.add_(1).clamp_(max=tokens.shape[1] - 1)
    tokens.scatter_(1, positions[:, None], ids.clamp(min=0)[:, None])


MASKED = Attention(prepare_mask, attend_masked)
FLASH = Attention(prepare_flash, attend_flash, by_text=True)
PYTORCH = GraphOps("plain", MASKED, rms_norm, rotate, gate, head, advance)


def plain_ops(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[GraphOps]:
    """Return the sets of PyTorch's own functions that may run there, the faster one first."""
    q = torch.empty((1, 1, 1, head_dim), dtype=dtype, device=device)
    flash = head_dim % 8 == 0 and q.is_cuda and can_use_flash_attention(SDPAParams(q, q, q, None, 0.0, False, True))
    return [PYTORCH._replace(name="plain flash", attention=FLASH, prompts=True), PYTORCH] if flash else [PYTORCH]
