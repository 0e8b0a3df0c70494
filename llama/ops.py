"""The operations of a forward: matrix products, attention, the norm and SiLU, with their plain implementations.

The model calls them by the names in `Ops`, and `model.use` replaces them; exact mode is another set of them. Every
product and every attention is computed here, cached or not, so both modes of the cache run the same kernels. Knows
tensors and positions; does not know modules, or whether keys come from a cache.
Shapes: bsz rows, seqlen queries, kv_len keys; n_heads is a multiple of n_kv_heads (grouped-query attention,
https://arxiv.org/abs/2305.13245).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from llama.ranks import Ranks
from llama.rows import Rows

HAS_ONEDNN: bool = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # type: ignore[no-untyped-call]


def widest(x: Tensor) -> Tensor:
    """Return x in float64, or in float32 on a device that has no float64 (MPS)."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T for x (..., in_features) and weight (out_features, in_features)."""
    # PyTorch computes float32 products on a CPU by MKL, which reaches a half to a third of oneDNN's speed on an AMD
    # machine, with one row or many (docs/log.md). oneDNN's operator has no gradient, returns zeros under forward-mode
    # differentiation (an open level of dual numbers), and compiles only with constant weights.
    if (
        x.dtype == torch.float32 == weight.dtype
        and x.device.type == "cpu"
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and forward_ad._current_level < 0
        and HAS_ONEDNN
        and not torch.compiler.is_compiling()
    ):
        return onednn_linear(x, weight)
    return F.linear(x, weight)


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T by oneDNN's own operator, which exists if HAS_ONEDNN is True."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def sum_linear(x: Tensor, weight: Tensor, ranks: Ranks) -> Tensor:
    """Return x @ weight.T; every rank has its part of the columns of both."""
    product = linear(x, weight)
    return product if ranks.size == 1 else ranks.sum(product)


_Attend = TypeVar("_Attend", bound=Callable[..., Tensor])


def softmax_attention(attend: _Attend) -> _Attend:
    """Declare a function equivalent to `attend`, so that `attention_weights` applies to it."""
    attend.is_softmax_attention = True  # type: ignore[attr-defined]
    return attend


ScoreMod = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class Scoring(NamedTuple):
    """The values besides queries and keys that attention's scores may depend on.

    layer: the number of the layer, as the model was built.
    key_positions: the positions of the keys, (kv_len,), (bsz, kv_len) or (bsz, n_kv_heads, kv_len); None for
        0 .. kv_len - 1.
    score_mod: see `Ops`.
    """

    layer: int = 0
    key_positions: Tensor | None = None
    score_mod: ScoreMod | None = None


UNCHANGED = Scoring()


@softmax_attention
def attend(
    xq: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    visible: Tensor | None = None,
    scoring: Scoring = UNCHANGED,
) -> Tensor:
    """Attend from every query to the keys at or before its position; return (bsz, seqlen, n_heads, head_dim).

    xq is (bsz, seqlen, n_heads, head_dim); query i of a row has the position start + i. keys and values are (bsz,
    kv_len, n_kv_heads, head_dim); key j has the position j. Or `visible`, of bool, has the keys that each query sees:
    (seqlen, kv_len), (bsz, seqlen, kv_len) or, if heads see different keys, (bsz, n_kv_heads or n_heads, seqlen,
    kv_len). Then all keys and values must be finite, even those that no query sees. With a `scoring.score_mod` all
    scores are in memory at once, (bsz, n_heads, seqlen, kv_len) in float32 or wider.
    """
    if rows.start is not None:
        return _attend_in_step(xq, keys, values, rows.start, visible, scoring)
    # Rows with different starts are computed one by one, each over its own keys, to have the bits that they have alone.
    outputs, positions = [], scoring.key_positions
    for row, start in enumerate(rows.starts):
        one = slice(row, row + 1)
        seen = visible if visible is None or visible.ndim == 2 else visible[one]
        own = scoring if positions is None or positions.ndim == 1 else scoring._replace(key_positions=positions[one])
        outputs.append(_attend_in_step(xq[one], keys[one], values[one], start, seen, own))
    return torch.cat(outputs)


def _attend_in_step(
    xq: Tensor, keys: Tensor, values: Tensor, start_pos: int, visible: Tensor | None, scoring: Scoring
) -> Tensor:
    """Attend for rows that all start at `start_pos`."""
    if scoring.score_mod is not None:
        return _attend_by_weights(xq, keys, values, start_pos, visible, scoring)
    seqlen = xq.shape[1]
    end = start_pos + seqlen
    mask, causal = None, False
    if visible is not None:
        mask = _by_head(visible, xq.shape[2])
    else:  # keys past the end are cut off: a mask would multiply them by zero, and 0 * nan is nan
        keys, values = keys[:, :end], values[:, :end]
        if seqlen > 1 and start_pos > 0:  # is_causal would align the first query with the first key
            if xq.is_cuda:
                return _attend_behind_past(xq, keys, values)
            mask = _mask(start_pos, seqlen, xq.device)
        elif seqlen > 1:
            causal = True
    with without_cudnn(xq.device):
        output = F.scaled_dot_product_attention(
            xq.transpose(1, 2),  # (bsz, n_heads, seqlen, head_dim)
            keys.transpose(1, 2),  # (bsz, n_kv_heads, kv_len, head_dim)
            values.transpose(1, 2),
            attn_mask=mask,
            is_causal=causal,
            enable_gqa=xq.shape[2] != keys.shape[2],
        )
    return output.transpose(1, 2)


def _attend_behind_past(xq: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attend for queries whose last one has the position of the last key, without memory for all scores if possible.

    Flash attention supports this mask by name. So does the kernel for float32 and old GPUs, but without heads that
    share keys.
    """
    from torch.nn.attention.bias import causal_lower_right  # imports PyTorch's compiler, which doubles a start

    q, k, v = (each.transpose(1, 2) for each in (xq, keys, values))  # (bsz, n_heads or n_kv_heads, ..., head_dim)
    shared = q.shape[1] // k.shape[1]
    if shared > 1 and not can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, True)):
        k, v = (each.repeat_interleave(shared, dim=1) for each in (k, v))
    mask = causal_lower_right(q.shape[2], k.shape[2])
    with without_cudnn(xq.device):
        output = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])
    return output.transpose(1, 2)


def without_cudnn(device: torch.device) -> AbstractContextManager[None]:
    """Return a context without cuDNN attention on CUDA: cuDNN builds a plan for every new length.

    A plan takes 23 to 37 ms (https://github.com/huggingface/transformers/issues/48163), and each token of a text is a
    new length. torch.compile cannot trace the switch, so compiled code skips it.
    """
    on_gpu = device.type == "cuda" and not torch.compiler.is_compiling()
    reachable = on_gpu and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return _cudnn_off() if reachable else nullcontext()  # a thread that switched it off switches it on again


@contextmanager
def _cudnn_off() -> Iterator[None]:
    # `sdpa_kernel` reads and writes five flags, which takes 14 times as long at every attention (docs/log.md).
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def _mask(start_pos: int, seqlen: int, device: torch.device) -> Tensor:
    """Return the keys that each query sees, (seqlen, start_pos + seqlen), of bool; key j has the position j."""
    positions = torch.arange(start_pos + seqlen, device=device)
    return positions <= positions[start_pos:, None]


def _by_head(visible: Tensor, n_heads: int) -> Tensor:
    """Return `visible` so that it broadcasts to scores, (bsz, n_heads, seqlen, kv_len)."""
    if visible.ndim < 4:
        return visible if visible.ndim == 2 else visible[:, None]
    if n_heads % visible.shape[1]:
        raise ValueError(
            f"visible is {tuple(visible.shape)}; its second axis must have the model's KV heads, or its {n_heads} heads"
        )
    return visible.repeat_interleave(n_heads // visible.shape[1], dim=1)


def attention_weights(
    xq: Tensor, keys: Tensor, start_pos: int, visible: Tensor | None, scoring: Scoring = UNCHANGED
) -> Tensor:
    """Return the weights of an explicit softmax, (bsz, n_heads, seqlen, kv_len), in float32 or wider.

    All rows start at `start_pos`. If `visible` is None, kv_len ends with the last query: keys past it are not read. A
    query that sees no key has weights of 0. The other arguments are those of `attend`.
    """
    queries_at = start_pos + torch.arange(xq.shape[1], device=xq.device)[:, None]  # (seqlen, 1)
    positions = scoring.key_positions
    positions = torch.arange(keys.shape[1], device=xq.device) if positions is None else positions
    if visible is None:
        keys, positions = keys[:, : start_pos + xq.shape[1]], positions[..., : start_pos + xq.shape[1]]
        visible = positions[..., None, :] <= queries_at
    wide = torch.promote_types(xq.dtype, torch.float32)
    queries = torch.unflatten(xq.to(wide), 2, (keys.shape[2], -1))
    queries = queries.permute(0, 2, 3, 1, 4)  # (bsz, n_kv_heads, shared, seqlen, head_dim)
    scores = queries @ keys.to(wide).permute(0, 2, 3, 1)[:, :, None] / xq.shape[-1] ** 0.5
    scores = scores.flatten(1, 2)  # (bsz, n_heads, seqlen, kv_len)
    if scoring.score_mod is not None:
        key_positions = positions.long().reshape(-1, 1, 1, positions.shape[-1])
        if positions.ndim == 3:  # (bsz, n_kv_heads, kv_len)
            key_positions = _by_head(positions.long()[:, :, None], xq.shape[2])
        changed = scoring.score_mod(scores, queries_at[None, None], key_positions, scoring.layer)
        scores = _checked(changed, scores, scoring.score_mod)
    hidden = ~_by_head(visible, xq.shape[2])
    weights: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
    return weights


def _checked(changed: Tensor, scores: Tensor, score_mod: ScoreMod) -> Tensor:
    """Return the scores of a score_mod in the dtype of `scores`. Raises ValueError unless they have the same shape."""
    shape = getattr(changed, "shape", None)
    if shape != scores.shape:
        found = type(changed).__name__ if shape is None else tuple(shape)
        raise ValueError(
            f"score_mod={_called(score_mod)} returned {found}; it must return a tensor of the shape of the scores, "
            f"{tuple(scores.shape)}"
        )
    return changed.to(scores.dtype)


def _attend_by_weights(
    xq: Tensor, keys: Tensor, values: Tensor, start_pos: int, visible: Tensor | None, scoring: Scoring
) -> Tensor:
    """Return what `_attend_in_step` returns, by the weights of an explicit softmax."""
    weights = attention_weights(xq, keys, start_pos, visible, scoring)
    weights = torch.unflatten(weights, 1, (keys.shape[2], -1))  # (bsz, n_kv_heads, shared, seqlen, kv_len)
    values = values[:, : weights.shape[-1]].to(weights.dtype).transpose(1, 2)  # (bsz, n_kv_heads, kv_len, head_dim)
    output: Tensor = (weights @ values[:, :, None]).flatten(1, 2)  # (bsz, n_heads, seqlen, head_dim)
    return output.transpose(1, 2).to(xq.dtype)


def _called(function: Callable[..., Tensor]) -> object:
    return getattr(function, "__name__", function)


def check_attention(ops: "Ops", reader: str, remedy: str) -> None:
    """Raise ValueError unless `attention_weights` has the weights of these operations' attention.

    `reader`, a clause, and `remedy` are parts of the message.
    """
    if not hasattr(ops.attend, "is_softmax_attention"):
        raise ValueError(
            f"attend={_called(ops.attend)} of the operations {ops.name!r} is not marked as "
            f"softmax attention, and {reader}, which are computed for softmax attention only; {remedy}, or mark the "
            "function with llama.ops.softmax_attention if it computes what llama.ops.attend does"
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale every vector of x, (..., dim), to a root mean square of one, then each number by its weight, (dim,)."""
    # F.rms_norm computes in float32 or wider, because 16-bit squares overflow or vanish. The weight is multiplied
    # separately: models were trained with 16-bit results that are rounded before and after it.
    return F.rms_norm(x, x.shape[-1:], eps=eps) * weight


def last_real(h: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return each row's last real vector, (bsz, 1, dim)."""
    if len(set(lengths)) == 1:
        return h[:, lengths[0] - 1 : lengths[0]]
    ends = torch.tensor(lengths, device=h.device) - 1
    return h[torch.arange(h.shape[0], device=h.device), ends][:, None]


class Ops(NamedTuple):
    """A set of operations; research code may make its own: PLAIN._replace(name="mine", attend=mine).

    An `attend` that is not marked with `softmax_attention` cannot be used with a kind of cache that reads attention
    weights, nor recorded.

    score_mod changes attention's scores before the mask and the softmax: `score_mod(scores, query_positions,
    key_positions, layer)` returns the new ones. scores are (bsz, n_heads, seqlen, kv_len), in float32 or wider, already
    divided by sqrt(head_dim). The positions are int64 and broadcast to them, (1, 1, seqlen, 1) and (1 or bsz, 1, 1,
    kv_len). layer is an int. The results for keys that a query may not see are ignored. If ranks share the model,
    n_heads are those of the rank. The name is that of PyTorch's FlexAttention, which calls it for one score at a time.
    """

    name: str
    linear: Callable[[Tensor, Tensor], Tensor]
    sum_linear: Callable[[Tensor, Tensor, Ranks], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, Rows, Tensor | None, Scoring], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    silu: Callable[[Tensor], Tensor]  # x * sigmoid(x), element by element
    exact: bool = False  # True only for the operations of exact mode
    score_mod: ScoreMod | None = None

    def __str__(self) -> str:
        return self.name if self.score_mod is None else f"{self.name} with score_mod={_called(self.score_mod)}"


PLAIN = Ops("plain", linear, sum_linear, attend, rms_norm, F.silu)
