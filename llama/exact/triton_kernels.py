"""Batch-invariant Triton kernels: exact mode on CUDA.

A library chooses its tiles, and how it splits a sum, by the shape of the whole call, so a token's last bits depend on
how many others are fed with it. Here one program computes each sum, in tiles of one size, in order; no sum is split and
nothing is tuned. Triton specializes programs for the number 1, for multiples of 16 and for aligned addresses, and
another program may sum in another order; so values that differ between calls are excluded (`do_not_specialize`).
Assumed: a GPU computes all rows of a tile alike, and adding zero times a number changes nothing. The price is speed,
most of all for one token after a long past. Operations on single numbers (silu, sums, rotations) need no kernel.

linear, attend and rms_norm in llama/ops.py define the results. Knows tensors and positions; does not know the model.
Source of the idea: He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines, 2025. Softmax in one
pass: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (a kernel's parameters are Triton's, and Triton is not typed)

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.rows import Rows

# A product's tile, and the depth of a step of its sum. 16 is Triton's smallest size.
ROWS = tl.constexpr(16)
COLUMNS = tl.constexpr(64)
DEPTH = tl.constexpr(64)
# A tile of attention. A block of queries lies within one chunk of keys, so all its queries use the same chunks.
QUERIES = tl.constexpr(16)
KEYS = tl.constexpr(64)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T for x (..., in_features) and weight (out_features, in_features), without gradients."""
    _check(x=x, weight=weight)
    out_features, in_features = weight.shape
    if x.shape[-1] != in_features:
        raise ValueError(f"x is {tuple(x.shape)}, and weight {tuple(weight.shape)}: their last sizes must agree")
    flat = x.reshape(-1, in_features).contiguous()
    out = x.new_empty(flat.shape[0], out_features)
    # One axis for all tiles, here and below: a grid's other axes end at 65535.
    tiles = triton.cdiv(flat.shape[0], ROWS.value) * triton.cdiv(out_features, COLUMNS.value)
    with torch.cuda.device(x.get_device()):
        _linear[(tiles,)](flat, weight.contiguous(), out, flat.shape[0], out_features, in_features, _wide(x))
    return out.view(*x.shape[:-1], out_features)


@triton.jit(do_not_specialize=["n_rows"], do_not_specialize_on_alignment=["x", "out"])
def _linear(
    x,  # (n_rows, in_features)
    weight,  # (out_features, in_features)
    out,  # (n_rows, out_features)
    n_rows,
    out_features,
    in_features,
    WIDE: tl.constexpr,
):
    """Compute one tile of the product. Tiles of the same columns follow each other, and so share their weights."""
    tiles_down = tl.cdiv(n_rows, ROWS)
    row = (tl.program_id(0) % tiles_down).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    column = (tl.program_id(0) // tiles_down).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)[None, :]  # (1, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), WIDE)
    for first in range(0, in_features, DEPTH):
        across, down = first + tl.arange(0, DEPTH)[None, :], first + tl.arange(0, DEPTH)[:, None]
        left = tl.load(x + row * in_features + across, (row < n_rows) & (across < in_features), 0.0)
        right = tl.load(weight + column * in_features + down, (column < out_features) & (down < in_features), 0.0)
        total = tl.dot(left, right, total, input_precision="ieee", out_dtype=WIDE)
    tl.store(out + row * out_features + column, total, (row < n_rows) & (column < out_features))


def attend(xq: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """Return attention to the keys at or before each query's position, (bsz, seqlen, n_heads, head_dim).

    xq: (bsz, seqlen, n_heads, head_dim); query i of a row is at the row's start + i. keys, values: (bsz, kv_len,
    n_kv_heads, head_dim); key j is at j. Keys behind a row's last query are never read.
    """
    _check(xq=xq, keys=keys, values=values)
    bsz, seqlen, n_heads, head_dim = xq.shape
    kv_len, n_kv_heads = keys.shape[1:3]
    starts = rows.starts
    if keys.shape != values.shape or keys.shape != (bsz, kv_len, n_kv_heads, head_dim) or n_heads % n_kv_heads:
        shapes = f"xq {tuple(xq.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}"
        raise ValueError(f"rows, head_dim, or heads that are to share keys do not agree: {shapes}")
    if len(starts) != bsz or not all(0 <= start <= kv_len - seqlen for start in starts):
        raise ValueError(f"start_pos={list(starts)} must be one per row (of {bsz}), from 0 to {kv_len} keys - {seqlen}")
    keys, values = (kept if kept.stride(-1) == 1 else kept.contiguous() for kept in (keys, values))
    steps = (*keys.stride()[:3], *values.stride()[:3])
    sizes = (n_heads, n_heads // n_kv_heads, head_dim, max(16, triton.next_power_of_2(head_dim)), head_dim**-0.5)
    blocks = max((triton.cdiv(start % QUERIES.value + seqlen, QUERIES.value) for start in starts), default=0)
    at = torch.tensor(starts, dtype=torch.int32, device=xq.device)
    xq = xq.contiguous()
    out = torch.empty_like(xq)
    grid = (blocks * n_heads * bsz,)
    with torch.cuda.device(xq.get_device()):
        # One stage: several chunks of wide heads in float32 do not fit into the shared memory of a small GPU.
        _attend[grid](xq, keys, values, out, at, seqlen, blocks, *steps, *sizes, _wide(xq), num_stages=1)
    return out


@triton.jit(
    do_not_specialize=["seqlen", "blocks", "key_row", "key_step", "key_head", "value_row", "value_step", "value_head"],
    do_not_specialize_on_alignment=["xq", "keys", "values", "out", "starts"],
)
def _attend(
    xq,  # (bsz, seqlen, HEADS, HEAD_DIM)
    keys,  # (bsz, kv_len, HEADS / GROUP, HEAD_DIM), in steps of key_row, key_step, key_head and 1
    values,  # the same shape, in steps of their own
    out,  # as xq
    starts,  # (bsz,)
    seqlen,
    blocks,
    key_row: tl.int64,
    key_step: tl.int64,
    key_head: tl.int64,
    value_row: tl.int64,
    value_step: tl.int64,
    value_head: tl.int64,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attend for one block of queries of one head in one row.

    A block begins at a multiple of QUERIES in every call, so a query always has the same place in the same block and
    the same chunks. Each chunk has a key that all queries of the block may see: no maximum is -inf.
    """
    block = tl.program_id(0) % blocks
    head = tl.program_id(0) // blocks % HEADS
    row = (tl.program_id(0) // blocks // HEADS).to(tl.int64)
    start = tl.load(starts + row)
    end = start + seqlen
    begin = (start // QUERIES + block) * QUERIES

    query = begin + tl.arange(0, QUERIES)[:, None]  # (QUERIES, 1), positions
    key = tl.arange(0, KEYS)[:, None]  # (KEYS, 1), positions within a chunk
    across = tl.arange(0, WIDTH)[None, :]  # (1, WIDTH)
    place = ((row * seqlen + query - start) * HEADS + head) * HEAD_DIM + across  # (QUERIES, WIDTH)
    fed = (query >= start) & (query < end) & (across < HEAD_DIM)
    keys += row * key_row + head // GROUP * key_head + across
    values += row * value_row + head // GROUP * value_head + across

    q = tl.load(xq + place, fed, 0.0)
    peak = tl.full((QUERIES,), float("-inf"), WIDE)
    total = tl.zeros((QUERIES,), WIDE)
    mixed = tl.zeros((QUERIES, WIDTH), WIDE)
    for first in range(0, begin + QUERIES, KEYS):
        there = (first + key < end) & (across < HEAD_DIM)
        k = tl.load(keys + (first + key) * key_step, there, 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee", out_dtype=WIDE) * SCALE
        scores = tl.where(first + tl.trans(key) <= query, scores, float("-inf"))  # (QUERIES, KEYS)
        higher = tl.maximum(peak, tl.max(scores, 1))
        shares = tl.exp(scores - higher[:, None])
        fading = tl.exp(peak - higher)  # earlier chunks were scaled by a lower peak
        total = total * fading + tl.sum(shares, 1)
        v = tl.load(values + (first + key) * value_step, there, 0.0)
        mixed = tl.dot(shares.to(v.dtype), v, mixed * fading[:, None], input_precision="ieee", out_dtype=WIDE)
        peak = higher
    tl.store(out + place, mixed / total[:, None], fed)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return vectors (..., dim) scaled to a root mean square of one, times weight, (dim,)."""
    _check(x=x, weight=weight)
    dim = x.shape[-1]
    if weight.shape != (dim,):
        raise ValueError(f"x is {tuple(x.shape)}, and weight {tuple(weight.shape)}: their last sizes must agree")
    flat = x.reshape(-1, dim).contiguous()
    out = torch.empty_like(flat)
    with torch.cuda.device(x.get_device()):
        _rms_norm[(flat.shape[0],)](flat, weight.contiguous(), out, eps, dim, triton.next_power_of_2(dim), _wide(x))
    return out.view(x.shape)


@triton.jit(do_not_specialize_on_alignment=["x", "out"])
def _rms_norm(x, weight, out, EPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Norm one vector. EPS is a constant because Triton passes numbers as float32."""
    place = tl.arange(0, WIDTH)
    inside = place < DIM
    begin = tl.program_id(0).to(tl.int64) * DIM
    wide = tl.load(x + begin + place, inside, 0.0).to(WIDE)  # 16-bit squares overflow or vanish
    norm = wide * tl.rsqrt(tl.sum(wide * wide, 0) / DIM + EPS)
    tl.store(out + begin + place, norm.to(x.dtype.element_ty) * tl.load(weight + place, inside, 0.0), inside)


def _wide(x: Tensor) -> tl.dtype:
    """Return the dtype of sums."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _check(**operands: Tensor) -> None:
    """Raise ValueError for operands that the kernels would compute wrongly. Nothing is moved or cast."""
    operand = next(iter(operands.values()))
    if any((other.dtype, other.device) != (operand.dtype, operand.device) for other in operands.values()):
        problem = "take operands of one dtype on one device"
    elif operand.device.type != "cuda" and not triton.knobs.runtime.interpret:
        problem = "run on CUDA GPUs, and nowhere else are they needed"
    elif operand.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        problem = "take float16, bfloat16, float32 or float64"
    elif torch.is_grad_enabled() and any(other.requires_grad for other in operands.values()):
        problem = "have no gradient: run the model under torch.inference_mode()"
    else:
        return
    given = ", ".join(f"{name} {other.dtype} on {other.device}" for name, other in operands.items())
    raise ValueError(f"exact mode's kernels {problem} (given {given})")
