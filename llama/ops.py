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
        return onednn_linear(x, weight)
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
    return ranks.sum(linear(x, weight))


_Attend = TypeVar("_Attend", bound=Callable[..., Tensor])


def softmax_attention(attend: _Attend) -> _Attend:
    """Mark a function as one that computes what `attend` below does, so that `attention_mass` gives its weights."""
    attend.is_softmax_attention = True  # type: ignore[attr-defined]
    return attend


@softmax_attention
def attend(
    xq: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    visible: Tensor | None = None,
) -> Tensor:
    """Let every query look at the keys at or before its own position; return (bsz, seqlen, n_heads, head_dim).

    xq is (bsz, seqlen, n_heads, head_dim), and query i of a row stands at the row's start + i. keys and values are
    (bsz, kv_len, n_kv_heads, head_dim), and key j stands at j. Or `visible` says which keys a query sees, (seqlen,
    kv_len) or (bsz, seqlen, kv_len) of bool; all of them must then be finite, also where no query looks.
    """
    if rows.start is not None:
        return _attend_in_step(xq, keys, values, rows.start, visible)
    # Rows at different positions are attended one by one, each over its own keys, so that a row gives what it gives
    # alone.
    outputs = []
    for row, start in enumerate(rows.starts):
        one = slice(row, row + 1)
        seen = visible if visible is None or visible.ndim == 2 else visible[one]
        outputs.append(_attend_in_step(xq[one], keys[one], values[one], start, seen))
    return torch.cat(outputs)


def _attend_in_step(xq: Tensor, keys: Tensor, values: Tensor, start_pos: int, visible: Tensor | None) -> Tensor:
    """Attend where all rows stand at the same position."""
    seqlen = xq.shape[1]
    end = start_pos + seqlen
    mask, causal = None, False
    if visible is not None:
        mask = visible if visible.ndim == 2 else visible[:, None]
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


def attention_mass(xq: Tensor, keys: Tensor, rows: Rows, visible: Tensor | None) -> Tensor:
    """Return how much attention every key draws, (bsz, n_kv_heads, kv_len), in float32 or wider.

    Of an explicit softmax, summed over the queries and over the heads that share the key. Of each row the first
    queries count that are kept; the others pad it, and may see anything. The rest as in `attend`.
    """
    if rows.start is None:
        each = [slice(row, row + 1) for row in range(len(rows.starts))]
        seen = [visible if visible is None or visible.ndim == 2 else visible[row] for row in each]
        parts = zip(each, seen, strict=True)
        return torch.cat([attention_mass(xq[row], keys[row], rows.row(row.start), mask) for row, mask in parts])
    seqlen, kv_len = xq.shape[1], keys.shape[1]
    if visible is None:  # what lies past the end is not read
        drawn = attention_mass(xq, keys[:, : rows.end], rows, _mask(rows.start, seqlen, xq.device))
        return F.pad(drawn, (0, kv_len - rows.end))
    wide = torch.promote_types(xq.dtype, torch.float32)
    shared = xq.shape[2] // keys.shape[2]
    queries = xq.to(wide).reshape(*xq.shape[:2], -1, shared, xq.shape[-1])
    queries = queries.permute(0, 2, 3, 1, 4)  # (bsz, n_kv_heads, shared, seqlen, head_dim)
    scores = queries @ keys.to(wide).permute(0, 2, 3, 1)[:, :, None] / xq.shape[-1] ** 0.5
    hidden = ~(visible if visible.ndim == 2 else visible[:, None, None])
    shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)  # (bsz, n_kv_heads, shared, seqlen, kv_len)
    pads = torch.arange(seqlen, device=xq.device) >= torch.tensor(rows.kept, device=xq.device)[:, None]
    mass: Tensor = shares.masked_fill(pads[:, None, None, :, None], 0).sum((2, 3))
    return mass


def check_attention(ops: "Ops", reader: str, remedy: str) -> None:
    """Raise ValueError unless `attention_mass` gives the weights of these operations' attention.

    `reader` is a clause that says what needs them.
    """
    if not hasattr(ops.attend, "is_softmax_attention"):
        raise ValueError(
            f"attend={getattr(ops.attend, '__name__', ops.attend)} of the operations {ops.name!r} is not marked as "
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

    An `attend` that computes something else than softmax attention goes with no cache that `weighs`, and with no
    recording; one that computes the same is marked with `softmax_attention`.
    """

    name: str
    linear: Callable[[Tensor, Tensor], Tensor]
    sum_linear: Callable[[Tensor, Tensor, Ranks], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, Rows, Tensor | None], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    silu: Callable[[Tensor], Tensor]  # x * sigmoid(x), element by element
    exact: bool = False  # whether exact mode made them; leave it out of your own


PLAIN = Ops("plain", linear, sum_linear, attend, rms_norm, F.silu)
