"""The operations that a forward is made of: matrix products, attention, the norm, SiLU; and the plain way to do them.

The model calls them by the names in `Ops`, and `model.use` puts others in their place; exact mode is such a set. Every
product and every attention goes through here, cached or not, so both modes of the cache run the same kernels. Knows
tensors and positions; does not know modules, or whether keys came out of a cache.
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


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T for x (..., in_features) and weight (out_features, in_features)."""
    if _onednn_serves(x, weight):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
        return product
    return F.linear(x, weight)


def onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T by oneDNN's own operator, which is there where HAS_ONEDNN says so."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return product


def _onednn_serves(x: Tensor, weight: Tensor) -> bool:
    # PyTorch hands float32 products on a CPU to MKL, which reaches a half to a third of oneDNN's speed on an AMD
    # machine, at one row and at many (docs/log.md). oneDNN's operator has no gradient, and under
    # forward-mode differentiation (an open level of dual numbers) it would give zeros without a word. PyTorch's own
    # compiler takes it with constant weights alone.
    return (
        x.dtype == torch.float32 == weight.dtype
        and x.device.type == "cpu"
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and forward_ad._current_level < 0
        and HAS_ONEDNN
        and not torch.compiler.is_compiling()
    )


def sum_linear(x: Tensor, weight: Tensor, ranks: Ranks) -> Tensor:
    """Return x @ weight.T, where every rank has its share of the columns of both."""
    product = linear(x, weight)
    return product if ranks.size == 1 else ranks.sum(product)


_Attend = TypeVar("_Attend", bound=Callable[..., Tensor])


def softmax_attention(attend: _Attend) -> _Attend:
    """Mark a function as one that computes what `attend` below does, so that `attention_weights` gives its weights."""
    attend.is_softmax_attention = True  # type: ignore[attr-defined]
    return attend


ScoreMod = Callable[[Tensor, Tensor, Tensor, int], Tensor]


class Scoring(NamedTuple):
    """What attention's scores may depend on besides queries and keys.

    layer: the number of the layer, as the model was built. key_positions: where the keys stand, (kv_len,) or (bsz,
    kv_len); None: at 0 .. kv_len - 1. score_mod: that of the operations, see `Ops`.
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
    """Let every query look at the keys at or before its own position; return (bsz, seqlen, n_heads, head_dim).

    xq is (bsz, seqlen, n_heads, head_dim), and query i of a row stands at the row's start + i. keys and values are
    (bsz, kv_len, n_kv_heads, head_dim), and key j stands at j. Or `visible` says, as bool, which keys a query sees:
    (seqlen, kv_len), (bsz, seqlen, kv_len), or, where heads see different keys, (bsz, n_kv_heads or n_heads, seqlen,
    kv_len). All keys and values must then be finite, also those that no query sees. With a `scoring.score_mod` all
    scores are in memory at once, (bsz, n_heads, seqlen, kv_len) in float32 or wider.
    """
    if rows.start is not None:
        return _attend_in_step(xq, keys, values, rows.start, visible, scoring)
    # Rows at different positions are attended one by one, each over its own keys, so that a row gives what it gives
    # alone.
    each = _row_by_row(rows, visible, scoring)
    return torch.cat([_attend_in_step(xq[one], keys[one], values[one], *rest) for one, rest in each])


def _row_by_row(
    rows: Rows, visible: Tensor | None, scoring: Scoring
) -> Iterator[tuple[slice, tuple[int, Tensor | None, Scoring]]]:
    """Yield for each row its slice, and its start, `visible` and `scoring`."""
    stand = scoring.key_positions
    for row, start in enumerate(rows.starts):
        one = slice(row, row + 1)
        seen = visible if visible is None or visible.ndim == 2 else visible[one]
        own = scoring if stand is None or stand.ndim == 1 else scoring._replace(key_positions=stand[one])
        yield one, (start, seen, own)


def _attend_in_step(
    xq: Tensor, keys: Tensor, values: Tensor, start_pos: int, visible: Tensor | None, scoring: Scoring
) -> Tensor:
    """Attend where all rows stand at the same position."""
    if scoring.score_mod is not None:
        return _attend_by_weights(xq, keys, values, start_pos, visible, scoring)
    seqlen = xq.shape[1]
    end = start_pos + seqlen
    mask, causal = None, False
    if visible is not None:
        mask = _by_head(visible, xq.shape[2])
    else:  # what lies past the end is never read: a mask would multiply it by zero, and 0 * nan is nan
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
    """Attend where the last query stands at the last key, and take no memory for scores where a kernel can do without.

    Flash attention takes no mask, but knows this shape of one; so does the kernel for float32 and old GPUs, which
    does not know heads that share keys.
    """
    from torch.nn.attention.bias import causal_lower_right  # with it comes PyTorch's compiler, which doubles a start

    q, k, v = (each.transpose(1, 2) for each in (xq, keys, values))  # (bsz, n_heads or n_kv_heads, ..., head_dim)
    shared = q.shape[1] // k.shape[1]
    if shared > 1 and not can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, False, True)):
        k, v = (each.repeat_interleave(shared, dim=1) for each in (k, v))
    mask = causal_lower_right(q.shape[2], k.shape[2])
    with without_cudnn(xq.device):
        output = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])
    return output.transpose(1, 2)


def without_cudnn(device: torch.device) -> AbstractContextManager[None]:
    """Keep attention on CUDA from cuDNN, which makes a plan for every new length; what is compiled, is so around this.

    23 to 37 ms a plan have been seen (https://github.com/huggingface/transformers/issues/48163), which a text meets
    at each of its tokens.
    """
    on_gpu = device.type == "cuda" and not torch.compiler.is_compiling()
    reachable = on_gpu and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return _cudnn_off() if reachable else nullcontext()  # another thread that has it off puts it back itself


@contextmanager
def _cudnn_off() -> Iterator[None]:
    # The flag alone: `sdpa_kernel` reads and writes all five, 14 times the time at every attention (docs/log.md).
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def _mask(start_pos: int, seqlen: int, device: torch.device) -> Tensor:
    """Return True where a query may look at a key that stands at its index: (seqlen, start_pos + seqlen)."""
    positions = torch.arange(start_pos + seqlen, device=device)
    return positions <= positions[start_pos:, None]


def _by_head(visible: Tensor, n_heads: int) -> Tensor:
    """Return `visible`, with any axes, as it broadcasts to scores, (bsz, n_heads, seqlen, kv_len)."""
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

    All rows start at `start_pos`. Where `visible` is None, kv_len ends with the last query: what lies past it is not
    read. A query that may see nothing has weights of 0. The rest as in `attend`.
    """
    asked = start_pos + torch.arange(xq.shape[1], device=xq.device)[:, None]  # (seqlen, 1)
    stand = scoring.key_positions
    stand = torch.arange(keys.shape[1], device=xq.device) if stand is None else stand
    if visible is None:
        keys, stand = keys[:, : start_pos + xq.shape[1]], stand[..., : start_pos + xq.shape[1]]
        visible = stand[..., None, :] <= asked
    wide = torch.promote_types(xq.dtype, torch.float32)
    queries = torch.unflatten(xq.to(wide), 2, (keys.shape[2], -1))
    queries = queries.permute(0, 2, 3, 1, 4)  # (bsz, n_kv_heads, shared, seqlen, head_dim)
    scores = queries @ keys.to(wide).permute(0, 2, 3, 1)[:, :, None] / xq.shape[-1] ** 0.5
    scores = scores.flatten(1, 2)  # (bsz, n_heads, seqlen, kv_len)
    if scoring.score_mod is not None:
        places = asked[None, None], stand.long().reshape(-1, 1, 1, stand.shape[-1])
        scores = _checked(scoring.score_mod(scores, *places, scoring.layer), scores, scoring.score_mod)
    hidden = ~_by_head(visible, xq.shape[2])
    weights: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
    return weights


def _checked(changed: Tensor, scores: Tensor, score_mod: ScoreMod) -> Tensor:
    """Return changed scores in the dtype of `scores`. Raises ValueError unless they have the same shape."""
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
    """Attend as `_attend_in_step` does, by the weights of an explicit softmax."""
    weights = attention_weights(xq, keys, start_pos, visible, scoring)
    weights = torch.unflatten(weights, 1, (keys.shape[2], -1))  # (bsz, n_kv_heads, shared, seqlen, kv_len)
    values = values[:, : weights.shape[-1]].to(weights.dtype).transpose(1, 2)  # (bsz, n_kv_heads, kv_len, head_dim)
    output: Tensor = (weights @ values[:, :, None]).flatten(1, 2)  # (bsz, n_heads, seqlen, head_dim)
    return output.transpose(1, 2).to(xq.dtype)


def _called(function: Callable[..., Tensor]) -> object:
    return getattr(function, "__name__", function)


def check_attention(ops: "Ops", reader: str, remedy: str) -> None:
    """Raise ValueError unless `attention_weights` gives the weights of these operations' attention.

    `reader` is a clause that says what needs them.
    """
    if not hasattr(ops.attend, "is_softmax_attention"):
        raise ValueError(
            f"attend={_called(ops.attend)} of the operations {ops.name!r} is not marked as "
            f"softmax attention, and {reader}, which are computed for softmax attention only; {remedy}, or mark the "
            "function with llama.ops.softmax_attention if it computes what llama.ops.attend does"
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale every vector of x, (..., dim), to a root mean square of one, then each number by its weight, (dim,)."""
    # Normed in float32 or wider, for 16-bit squares overflow or vanish, and rounded before it is weighed. Were the
    # weight given, too, 16-bit results would be rounded once, unlike those that models were trained with.
    return F.rms_norm(x, x.shape[-1:], eps=eps) * weight


def last_real(h: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return each row's last real vector, (bsz, 1, dim)."""
    if len(set(lengths)) == 1:
        return h[:, lengths[0] - 1 : lengths[0]]
    ends = torch.tensor(lengths, device=h.device) - 1
    return h[torch.arange(h.shape[0], device=h.device), ends][:, None]


class Ops(NamedTuple):
    """One way to do all of them; research code may make its own, PLAIN._replace(name="mine", attend=mine).

    An `attend` that computes something else than softmax attention goes with no kind of cache that reads weights, and
    with no recording; one that computes the same is marked with `softmax_attention`.

    score_mod changes attention's scores before the mask and the softmax: `score_mod(scores, query_positions,
    key_positions, layer)` returns the new ones. scores are (bsz, n_heads, seqlen, kv_len), in float32 or wider, already
    divided by sqrt(head_dim). The positions are int64 and broadcast to them, (1, 1, seqlen, 1) and (1 or bsz, 1, 1,
    kv_len). layer is an int. Its result for keys that a query may not see is ignored. If ranks share the model,
    n_heads are those of the rank. The name is that of PyTorch's FlexAttention, which calls it for one score at a time.
    """

    name: str
    linear: Callable[[Tensor, Tensor], Tensor]
    sum_linear: Callable[[Tensor, Tensor, Ranks], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, Rows, Tensor | None, Scoring], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    silu: Callable[[Tensor], Tensor]  # x * sigmoid(x), element by element
    exact: bool = False  # whether exact mode made them; leave it out of your own
    score_mod: ScoreMod | None = None

    def __str__(self) -> str:
        return self.name if self.score_mod is None else f"{self.name} with score_mod={_called(self.score_mod)}"


PLAIN = Ops("plain", linear, sum_linear, attend, rms_norm, F.silu)
