"""Triton kernels of one decode step: one token per row, each row at a position of its own that only the GPU knows.

A step reads every weight once and computes next to nothing with it, so what counts is that the memory is never idle:
few kernels, wide loads, enough of them under way. Nothing here waits for the host, and no size or grid depends on a
number on the device, so a step can be recorded in a CUDA graph. Nothing is tuned either: recording is quick, and equal
shapes give equal bits. Where the hardware can, a kernel begins while the one before it still runs: it loads its first
weights, which no kernel writes, and then waits (programmatic dependent launch). Every program of every kernel waits
before it reads or writes anything else, so a kernel that has ended implies that all before it have.

Knows tensors and positions; does not know the model, the cache's class, graphs, or how to differentiate.
Plain twins, which are the definitions, in llama/model.py: `qkv` is RMSNorm and the first half of Attention up to
cache.update; `attend_project` the other half, and the sum in TransformerBlock; `gate` is RMSNorm and FeedForward but
for w2, which with the other sum is `project`; `head` is norm and output of Transformer. `advance` is argmax and what
generation does with it. One thing is done in another order: the root mean square divides the product, not its input.
Sources: split attention, Dao et al., "Flash-Decoding for long-context inference", 2023; softmax in one pass, Milakov
and Gimelshein, https://arxiv.org/abs/1805.02867; griddepcontrol, NVIDIA, PTX ISA 7.8.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (a kernel's parameters are Triton's, and Triton is not typed)

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """What a program takes of a product in one step: `columns` of the output, `slices` * `depth` terms of each sum."""

    rows: int
    columns: int
    slices: int
    depth: int
    warps: int
    stages: int = 1  # steps whose x is under way, where tensor cores multiply
    registers: int | None = None  # of a thread, at most

    @property
    def constants(self) -> dict[str, int]:
        return {"ROWS": self.rows, "COLUMNS": self.columns, "SLICES": self.slices, "DEPTH": self.depth}

    @property
    def options(self) -> dict[str, int | None]:
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


MAX_ROWS = 16  # a tensor core multiplies 16 rows at once, and fewer for the same price
# To keep its memory busy, a GPU of 132 processors and 3 to 5 TB/s needs about 30 KiB under way on each. A program has
# two steps' weights under way, in registers: of 16 KiB and more each in 16 bits, one program or two to a processor.
# One row: multiplied and summed by the ordinary cores. Threads lie along the sum, eight 16-bit weights of a column to a
# thread: so no weight crosses shared memory, and the sum is met once, at the end. What ptxas makes of them is tested:
# no spills, weights loaded before the wait, and of two steps all before the first product.
NARROW = Tile(rows=1, columns=4, slices=1, depth=2048, warps=8)
LONG = Tile(rows=1, columns=4, slices=1, depth=4096, warps=16)  # for w2
# Fewer programs: for the vocabulary, whose tiles `advance` reads, for two weights at once, and for wo, where each
# program reads all partial sums of the attention once more.
WIDE = Tile(rows=1, columns=8, slices=1, depth=2048, warps=8)
# Several rows: tensor cores. Each warp sums a slice of its own, or it would wait for its last product most of the time.
# 2048 outputs make 128 programs; those of wq, wk and wv are more than processors, so two must fit on one.
NARROW_ROWS = Tile(rows=MAX_ROWS, columns=16, slices=8, depth=64, warps=8, registers=128)
LONG_ROWS = NARROW_ROWS._replace(stages=2)  # for w2, whose programs take many steps, one to a processor
WIDE_ROWS = Tile(rows=MAX_ROWS, columns=32, slices=8, depth=64, warps=8)

# Attention is split until there is a program for nearly each processor. More would help no one, and each split is read
# again by every program of wo; a split of fewer slots than this ends before it has well begun.
PROGRAMS = 128
MAX_SPLITS = 8
MIN_SLOTS = 256
KEY_BYTES = 16384  # of a chunk of keys; three such, with their values, fit twice into the memory of a processor
CHUNK = tl.constexpr(2048)  # tiles of logits that `advance` looks at in one step
EARLY = True  # whether kernels may begin before the one before has ended, where the hardware can


def refusal(rows: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why the kernels do not support this, or None where they do."""
    if not 1 <= rows <= MAX_ROWS:
        return f"the fused kernels take 1 to {MAX_ROWS} rows, not {rows}: feed fewer rows, or use another step"
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return (
            f"the fused kernels take float16, bfloat16 or float32, not {dtype}: convert the model, or use another step"
        )
    if dtype == torch.float16 and rows > 1:  # unnormed numbers, rounded for tensor cores, may pass its range
        return f"the fused kernels take one row in float16, not {rows}: take bfloat16, or use another step"
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"the fused kernels run on CUDA GPUs, not on {device}: move the model, or use another step"
    return None


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
    """Norm h, (rows, dim); return its rotated queries, (rows, n_heads, head_dim), and store its keys and values.

    They go to [row, positions[row]] of the cache's buffers, each (at least rows, slots, n_kv_heads, head_dim), and
    nothing else there is touched. positions is (rows,) int64; cos and sin, (length, 1, head_dim) float32, are
    `RopeTable.up_to`'s, and reach further than any position: what is on the device cannot be checked here.
    """
    rows, dim = h.shape
    n_kv_heads, head_dim = keys.shape[2:]
    queries, shared = wq.shape[0], n_kv_heads * head_dim
    _check(h=h, norm_weight=norm_weight, wq=wq, wk=wk, wv=wv)
    _check_cache(h, positions, keys, values)
    agree = norm_weight.shape == (dim,) and wq.shape == (queries, dim) and wk.shape == wv.shape == (shared, dim)
    if not agree or queries % head_dim or head_dim % 2:
        _refuse_sizes("h, norm_weight, wq, wk, wv and keys", h, norm_weight, wq, wk, wv, keys)
    for table in (cos, sin):
        if table.dtype != torch.float32 or table.shape[1:] != (1, head_dim) or not table.is_contiguous():
            raise ValueError(
                f"cos and sin must be contiguous (length, 1, {head_dim}) float32, as RopeTable.up_to gives them, "
                f"not {tuple(table.shape)} {table.dtype}"
            )
    q = h.new_empty(rows, queries // head_dim, head_dim)
    tile = NARROW if rows == 1 else NARROW_ROWS
    grid = (triton.cdiv(queries, tile.columns) + 2 * triton.cdiv(shared, tile.columns),)
    sizes = (eps, dim, queries, shared, head_dim)
    with torch.cuda.device(h.get_device()):
        _qkv[grid](
            *(h, norm_weight, wq, wk, wv, cos, sin, positions, keys, values, q),
            *(rows, *keys.stride()[:3], *sizes),
            **tile.constants,
            **tile.options,
            **_launch(h),
        )
    return q


@triton.jit
def _qkv(
    h,  # (n_rows, DIM)
    norm_weight,  # (DIM,)
    wq,  # (QUERIES, DIM)
    wk,  # (SHARED, DIM)
    wv,  # (SHARED, DIM)
    cos,  # (length, HEAD_DIM)
    sin,
    positions,  # (n_rows,)
    keys,  # (n_rows, slots, SHARED / HEAD_DIM, HEAD_DIM), in steps of by_row, by_slot, by_head and 1
    values,  # the same
    q,  # (n_rows, QUERIES)
    n_rows,
    by_row,
    by_slot,
    by_head,
    EPS: tl.constexpr,
    DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Make a tile of columns of one of the three. A pair that is rotated lies in one tile: its first number is even."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tiles_q, tiles_k = tl.cdiv(QUERIES, COLUMNS), tl.cdiv(SHARED, COLUMNS)
    tile = tl.program_id(0)
    of_q = tile < tiles_q
    of_k = (tile >= tiles_q) & (tile < tiles_q + tiles_k)
    of_v = tile >= tiles_q + tiles_k
    tile -= tl.where(of_q, 0, tl.where(of_k, tiles_q, tiles_q + tiles_k))
    weight = tl.where(of_q, wq, tl.where(of_k, wk, wv))
    column = tile * COLUMNS + tl.arange(0, COLUMNS)  # (COLUMNS,)
    valid = column < tl.where(of_q, QUERIES, SHARED)
    source = weight + column.to(tl.int64) * DIM
    y = _product(h, norm_weight, EPS, source, valid, n_rows, DIM, ROWS, COLUMNS, SLICES, DEPTH, PDL)

    row, column = tl.arange(0, ROWS)[:, None], column[None, :]
    valid = (row < n_rows) & valid[None, :]  # (ROWS, COLUMNS)
    position = tl.load(positions + row, row < n_rows, 0)
    angle = position * HEAD_DIM + column % HEAD_DIM
    first, second = tl.split(tl.reshape(y, (ROWS, COLUMNS // 2, 2)))
    swapped = tl.reshape(tl.join(second, first), (ROWS, COLUMNS))
    rotated = y * tl.load(cos + angle, valid, 0.0) + swapped * tl.load(sin + angle, valid, 0.0)
    slot = row.to(tl.int64) * by_row + position * by_slot + column // HEAD_DIM * by_head + column % HEAD_DIM
    tl.store(q + row * QUERIES + column, rotated, valid & of_q)
    tl.store(keys + slot, rotated, valid & of_k)
    tl.store(values + slot, y, valid & of_v)


def attend_project(q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, wo: Tensor, h: Tensor) -> Tensor:
    """Let q, (rows, n_heads, head_dim), look at the keys 0 .. positions[row]; return h + attention @ wo.T, as h.

    keys and values are the cache's buffers, (at least rows, slots, n_kv_heads, head_dim); wo is (dim, n_heads *
    head_dim), h (rows, dim). What lies past a row's position is never read.
    """
    rows, n_heads, head_dim = q.shape
    slots, n_kv_heads = keys.shape[1:3]
    _check(q=q, wo=wo, h=h)
    _check_cache(q, positions, keys, values)
    agree = keys.shape[3] == head_dim and wo.shape == (h.shape[-1], n_heads * head_dim) and len(h) == rows
    if not agree or n_heads % n_kv_heads:
        _refuse_sizes("q, keys, wo and h", q, keys, wo, h)
    splits, width = _splits(rows, n_kv_heads, slots), max(16, triton.next_power_of_2(head_dim))
    sums = q.new_empty(rows, splits, n_heads, head_dim, dtype=torch.float32)
    weights = q.new_empty(rows, splits, n_heads, dtype=torch.float32)
    group = n_heads // n_kv_heads
    chunk = max(16, min(64, KEY_BYTES // (width * q.element_size())))
    sizes = (n_heads, group, max(16, triton.next_power_of_2(group)), head_dim, width, chunk, head_dim**-0.5)
    out = torch.empty_like(h)
    tile = (WIDE if rows == 1 else NARROW_ROWS)._replace(depth=width)
    tile = tile._replace(slices=max(1, WIDE.depth // width))
    with torch.cuda.device(q.get_device()):
        _attend[(rows * n_kv_heads * splits,)](
            *(q, keys, values, positions, sums, weights, *keys.stride()[:3], splits, *sizes),
            **_launch(q),
        )
        _combine[(triton.cdiv(h.shape[-1], tile.columns),)](
            *(sums, weights, wo, h, out, rows, h.shape[-1], splits, n_heads, head_dim),
            **tile.constants,
            **tile.options,
            **_launch(q),
        )
    return out


@triton.jit
def _attend(
    q,  # (rows, HEADS, HEAD_DIM)
    keys,  # (rows, slots, HEADS / GROUP, HEAD_DIM), in steps of by_row, by_slot, by_head and 1
    values,  # the same
    positions,  # (rows,)
    sums,  # (rows, SPLITS, HEADS, HEAD_DIM)
    weights,  # (rows, SPLITS, HEADS)
    by_row,
    by_slot,
    by_head,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SCALE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend to one split of a row's filled slots, for all heads that share these keys.

    Leaves what the heads see in this split alone, and the logarithm of what it weighs: -inf and zeros without keys.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split = tl.program_id(0) % SPLITS
    shared = tl.program_id(0) // SPLITS % (HEADS // GROUP)
    row = (tl.program_id(0) // SPLITS // (HEADS // GROUP)).to(tl.int64)
    end = (tl.load(positions + row) + 1).to(tl.int32)
    share = tl.cdiv(tl.cdiv(end, SPLITS), KEYS) * KEYS  # splits begin where chunks do
    begin = split * share
    end = tl.minimum(end, begin + share)

    query = tl.arange(0, QUERIES)  # of the heads that share the keys
    key = tl.arange(0, KEYS)[:, None]
    across = tl.arange(0, WIDTH)[None, :]
    head = shared * GROUP + query[:, None]
    asked = (query[:, None] < GROUP) & (across < HEAD_DIM)
    asks = tl.load(q + (row * HEADS + head) * HEAD_DIM + across, asked, 0.0)  # (QUERIES, WIDTH)
    keys += row * by_row + shared * by_head + across
    values += row * by_row + shared * by_head + across

    peak = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    mixed = tl.zeros((QUERIES, WIDTH), tl.float32)
    for first in range(begin, end, KEYS):
        slot = (first + key).to(tl.int64)
        there = (slot < end) & (across < HEAD_DIM)
        k = tl.load(keys + slot * by_slot, there, 0.0)
        scores = tl.dot(asks, tl.trans(k), input_precision="ieee") * SCALE
        scores = tl.where(first + tl.trans(key) < end, scores, float("-inf"))  # (QUERIES, KEYS)
        higher = tl.maximum(peak, tl.max(scores, 1))
        shares = tl.exp(scores - higher[:, None])
        fading = tl.exp(peak - higher)  # what came before was scaled by a lower peak
        total = total * fading + tl.sum(shares, 1)
        v = tl.load(values + slot * by_slot, there, 0.0)
        mixed = tl.dot(shares.to(v.dtype), v, mixed * fading[:, None], input_precision="ieee")
        peak = higher
    total = tl.where(begin < end, total, 1.0)  # without keys: 0 / 1, and -inf + log(1)
    place = (row * SPLITS + split) * HEADS + head
    tl.store(sums + place * HEAD_DIM + across, mixed / total[:, None], asked)
    tl.store(weights + place, (peak + tl.log(total))[:, None], query[:, None] < GROUP)


@triton.jit
def _combine(
    sums,  # (n_rows, SPLITS, HEADS, HEAD_DIM)
    weights,  # (n_rows, SPLITS, HEADS)
    wo,  # (n_columns, HEADS * HEAD_DIM)
    h,  # (n_rows, n_columns)
    out,  # the same
    n_rows,
    n_columns,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Make a tile of h + attention @ wo.T. A slice is a head, so a split weighs the same in all of a slice."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)[None, :, None]
    head, across = tl.arange(0, SLICES)[:, None, None], tl.arange(0, DEPTH)[None, None, :]
    source = wo + (column.to(tl.int64) * (HEADS * HEAD_DIM))[None, :, None] + head * HEAD_DIM + across
    valid = (column < n_columns)[None, :, None] & (across < HEAD_DIM)  # (1, COLUMNS, DEPTH)
    tile = tl.load(source, valid & (head < HEADS), 0.0)  # (SLICES, COLUMNS, DEPTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = _zeros(ROWS, COLUMNS, SLICES, DEPTH)
    for first in range(0, HEADS, SLICES):
        ahead = tl.load(source + (first + SLICES) * HEAD_DIM, valid & (first + SLICES + head < HEADS), 0.0)
        there = (row < n_rows) & (first + head < HEADS)  # (SLICES, ROWS, 1)
        place = row * (SPLITS * HEADS) + first + head
        peak = tl.full((SLICES, ROWS, 1), float("-inf"), tl.float32)
        whole = tl.zeros((SLICES, ROWS, 1), tl.float32)
        mixed = tl.zeros((SLICES, ROWS, DEPTH), tl.float32)
        for split in tl.static_range(SPLITS):  # the first has keys
            weight = tl.load(weights + place + split * HEADS, there, 0.0)
            part = tl.load(sums + (place + split * HEADS) * HEAD_DIM + across, there & (across < HEAD_DIM), 0.0)
            higher = tl.maximum(peak, weight)
            share, fading = tl.exp(weight - higher), tl.exp(peak - higher)
            whole = whole * fading + share
            mixed = mixed * fading + share * part
            peak = higher
        total = _add(total, mixed / whole, tile, ROWS)
        tile = ahead
    _store_sum(out, h, _summed(total, ROWS), column, n_rows, n_columns, ROWS)


def gate(h: Tensor, norm_weight: Tensor, eps: float, w1: Tensor, w3: Tensor) -> Tensor:
    """Norm h, (rows, dim); return silu(n @ w1.T) * (n @ w3.T), (rows, ffn_dim), for w1 and w3, (ffn_dim, dim)."""
    rows, dim = h.shape
    _check(h=h, norm_weight=norm_weight, w1=w1, w3=w3)
    if norm_weight.shape != (dim,) or w1.shape != w3.shape or w1.shape[1:] != (dim,):
        _refuse_sizes("h, norm_weight, w1 and w3", h, norm_weight, w1, w3)
    out = h.new_empty(rows, len(w1))
    tile = WIDE if rows == 1 else WIDE_ROWS
    with torch.cuda.device(h.get_device()):
        _gate[(triton.cdiv(2 * len(w1), tile.columns),)](
            *(h, norm_weight, w1, w3, out, rows, len(w1), eps, dim), **tile.constants, **tile.options, **_launch(h)
        )
    return out


@triton.jit
def _gate(
    h,  # (n_rows, DIM)
    norm_weight,  # (DIM,)
    w1,  # (n_columns, DIM)
    w3,  # the same
    out,  # (n_rows, n_columns)
    n_rows,
    n_columns,
    EPS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Make a tile whose columns come from w1 and w3 in turn, and half as many columns of it."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.arange(0, COLUMNS)
    column = tl.program_id(0) * (COLUMNS // 2) + pair // 2
    source = tl.where(pair % 2 == 0, w1, w3) + column.to(tl.int64) * DIM
    y = _product(h, norm_weight, EPS, source, column < n_columns, n_rows, DIM, ROWS, COLUMNS, SLICES, DEPTH, PDL)
    gates, ups = tl.split(tl.reshape(y, (ROWS, COLUMNS // 2, 2)))
    row = tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2))[None, :]
    tl.store(out + row * n_columns + column, gates * tl.sigmoid(gates) * ups, (row < n_rows) & (column < n_columns))


def project(x: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    """Return h + x @ weight.T, as h, (rows, dim), for x (rows, ffn_dim) and weight (dim, ffn_dim)."""
    rows, depth = x.shape
    _check(x=x, weight=weight, h=h)
    if weight.shape != (h.shape[-1], depth) or h.shape != (rows, len(weight)):
        _refuse_sizes("x, weight and h", x, weight, h)
    out = torch.empty_like(h)
    tile = LONG if rows == 1 else LONG_ROWS
    with torch.cuda.device(x.get_device()):
        _project[(triton.cdiv(len(weight), tile.columns),)](
            *(x, weight, h, out, rows, len(weight), depth), **tile.constants, **tile.options, **_launch(x)
        )
    return out


@triton.jit
def _project(
    x,  # (n_rows, DIM)
    weight,  # (n_columns, DIM)
    h,  # (n_rows, n_columns)
    out,  # the same
    n_rows,
    n_columns,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    source = weight + column.to(tl.int64) * DIM
    y = _product(x, None, 0.0, source, column < n_columns, n_rows, DIM, ROWS, COLUMNS, SLICES, DEPTH, PDL)
    _store_sum(out, h, y, column, n_rows, n_columns, ROWS)


def head(h: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Norm h, (rows, dim); return its logits for weight (vocab, dim), and the largest of every tile of them.

    Logits are (rows, vocab) float32, from sums that were not rounded to 16 bits. The others are (rows, tiles): the
    largest logit, float32, and its id, int32, the lowest of equals; where a logit is not finite the tile's largest is
    nan, and the id means nothing.
    """
    rows, dim = h.shape
    _check(h=h, norm_weight=norm_weight, weight=weight)
    if norm_weight.shape != (dim,) or weight.shape[1:] != (dim,):
        _refuse_sizes("h, norm_weight and weight", h, norm_weight, weight)
    tile = WIDE if rows == 1 else WIDE_ROWS
    tiles = triton.cdiv(len(weight), tile.columns)
    logits = h.new_empty(rows, len(weight), dtype=torch.float32)
    best = h.new_empty(rows, tiles, dtype=torch.float32)
    at = h.new_empty(rows, tiles, dtype=torch.int32)
    with torch.cuda.device(h.get_device()):
        _head[(tiles,)](
            *(h, norm_weight, weight, logits, best, at, rows, len(weight), eps, dim),
            **tile.constants,
            **tile.options,
            **_launch(h),
        )
    return logits, best, at


@triton.jit
def _head(
    h,  # (n_rows, DIM)
    norm_weight,  # (DIM,)
    weight,  # (vocab, DIM)
    logits,  # (n_rows, vocab)
    best,  # (n_rows, tiles)
    at,  # the same
    n_rows,
    vocab,
    EPS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    source = weight + column.to(tl.int64) * DIM
    y = _product(h, norm_weight, EPS, source, column < vocab, n_rows, DIM, ROWS, COLUMNS, SLICES, DEPTH, PDL)
    row, column = tl.arange(0, ROWS), column[None, :]
    valid = (row[:, None] < n_rows) & (column < vocab)
    tl.store(logits + row[:, None] * vocab + column, y, valid)
    y = tl.where(column < vocab, y, float("-inf"))
    largest = tl.max(y, 1)  # (ROWS,)
    first = tl.min(tl.where(y == largest[:, None], column, vocab), 1)
    strange = tl.max(((column < vocab) & ~(tl.abs(y) < float("inf"))).to(tl.int32), 1)
    place = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(best + place, tl.where(strange > 0, float("nan"), largest), row < n_rows)
    tl.store(at + place, first, row < n_rows)


def advance(best: Tensor, at: Tensor, tokens: Tensor, positions: Tensor, chosen: Tensor) -> None:
    """Choose every row's most likely id, and write it after the row's position, where the row then stands; in place.

    best and at, (rows, tiles), are `head`'s; tokens is (rows, width), positions and chosen (rows,), all int64. chosen
    gets the id, the lowest of equals, or -1 where a logit was not finite, for which tokens gets 0. A row that stands at
    the end stays there, and its last token is overwritten.
    """
    rows, width = tokens.shape
    if best.shape != at.shape or len(best) != rows or positions.shape != (rows,) or chosen.shape != (rows,):
        _refuse_sizes("best, at, tokens, positions and chosen", best, at, tokens, positions, chosen)
    wanted = (torch.float32, torch.int32, torch.int64, torch.int64, torch.int64)
    operands = (best, at, tokens, positions, chosen)
    if tuple(each.dtype for each in operands) != wanted or not all(each.is_contiguous() for each in operands):
        raise ValueError(
            "best, at, tokens, positions and chosen must be contiguous float32, int32, int64, int64 and int64, "
            f"not {', '.join(str(each.dtype) for each in operands)} with steps {[each.stride() for each in operands]}"
        )
    if problem := refusal(rows, best.dtype, best.device):
        raise ValueError(problem)
    with torch.cuda.device(best.get_device()):
        _advance[(rows,)](best, at, tokens, positions, chosen, width, best.shape[1], num_warps=8, **_launch(best))


@triton.jit
def _advance(
    best,  # (rows, TILES)
    at,  # the same
    tokens,  # (rows, width)
    positions,  # (rows,)
    chosen,  # the same
    width,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Advance one row. Of equal logits the first seen stays, and ids grow from tile to tile."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    buffers = tl.arange(0, CHUNK)
    largest = tl.full((CHUNK,), float("-inf"), tl.float32)
    which = tl.full((CHUNK,), 2**31 - 1, tl.int32)
    strange = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, TILES, CHUNK):
        there = first + buffers < TILES
        new = tl.load(best + row * TILES + first + buffers, there, float("-inf"))
        new_at = tl.load(at + row * TILES + first + buffers, there, 2**31 - 1)
        which = tl.where(new > largest, new_at, which)
        largest = tl.where(new > largest, new, largest)
        strange += (new != new).to(tl.int32)
    token = tl.min(tl.where(largest == tl.max(largest, 0), which, 2**31 - 1), 0).to(tl.int64)
    token = tl.where(tl.max(strange, 0) > 0, -1, token)
    position = tl.minimum(tl.load(positions + row) + 1, width - 1)
    tl.store(chosen + row, token)
    tl.store(positions + row, position)
    tl.store(tokens + row * width + position, tl.maximum(token, 0))


# What the kernels share.


@triton.jit
def _product(
    x,  # (n_rows, DIM)
    norm_weight,  # (DIM,), or None
    EPS: tl.constexpr,
    source,  # (COLUMNS,), where the rows of the weight begin that make these columns
    valid,  # (COLUMNS,), whether there are such
    n_rows,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLICES: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """Return a tile of x, normed or as it is, times the weight's transpose, (ROWS, COLUMNS) float32.

    The next weights are under way while the last ones are multiplied, and the first before x is there. EPS is a
    constant because Triton passes numbers as float32.
    """
    STEP: tl.constexpr = SLICES * DEPTH
    row = tl.arange(0, ROWS)[None, :, None]
    term = tl.arange(0, SLICES)[:, None, None] * DEPTH + tl.arange(0, DEPTH)[None, None, :]  # (SLICES, 1, DEPTH)
    source, valid = source[None, :, None], valid[None, :, None]
    tile = tl.load(source + term, valid & (term < DIM), 0.0)  # (SLICES, COLUMNS, DEPTH)
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = _zeros(ROWS, COLUMNS, SLICES, DEPTH)
    squares = tl.zeros((SLICES, ROWS, DEPTH), tl.float32)
    for first in range(0, DIM, STEP):
        now, later = first + term, first + STEP + term
        ahead = tl.load(source + later, valid & (later < DIM), 0.0)
        wide = tl.load(x + row * DIM + now, (row < n_rows) & (now < DIM), 0.0).to(tl.float32)
        if norm_weight is not None:
            squares += wide * wide
            wide *= tl.load(norm_weight + now, now < DIM, 0.0).to(tl.float32)
        total = _add(total, wide, tile, ROWS)
        tile = ahead
    y = _summed(total, ROWS)
    if norm_weight is not None:
        y *= tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / DIM + EPS)[:, None]
    return y


@triton.jit
def _zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLICES: tl.constexpr, DEPTH: tl.constexpr):
    """Return the sums before the first step: one per thread and column, or per slice, row and column."""
    if ROWS == 1:
        return tl.zeros((SLICES, COLUMNS, DEPTH), tl.float32)
    else:  # noqa: RET505  (Triton compiles what follows a return)
        return tl.zeros((SLICES, ROWS, COLUMNS), tl.float32)


@triton.jit
def _add(
    total,
    wide,  # (SLICES, ROWS, DEPTH) float32
    tile,  # (SLICES, COLUMNS, DEPTH)
    ROWS: tl.constexpr,
):
    """Add the products of one step; tensor cores take them rounded to the weight's type."""
    if ROWS == 1:
        return total + wide * tile.to(tl.float32)
    else:  # noqa: RET505
        return tl.dot(wide.to(tile.dtype), tl.permute(tile, (0, 2, 1)), total, input_precision="ieee")


@triton.jit
def _summed(total, ROWS: tl.constexpr):
    """Return the whole sums, (ROWS, COLUMNS)."""
    if ROWS == 1:
        return tl.sum(tl.sum(total, 2), 0)[None, :]
    else:  # noqa: RET505
        return tl.sum(total, 0)


@triton.jit
def _store_sum(out, h, y, column, n_rows, n_columns, ROWS: tl.constexpr):
    """Store h + y, rounded once."""
    row, column = tl.arange(0, ROWS)[:, None], column[None, :]
    there = (row < n_rows) & (column < n_columns)
    tl.store(
        out + row * n_columns + column, tl.load(h + row * n_columns + column, there, 0.0).to(tl.float32) + y, there
    )


def _splits(rows: int, n_kv_heads: int, slots: int) -> int:
    """Return into how many parts to split a row's slots."""
    return max(1, min(MAX_SPLITS, PROGRAMS // (rows * n_kv_heads), slots // MIN_SLOTS))


def _launch(x: Tensor) -> dict[str, Any]:
    """Return whether a kernel may begin before the last one ended: from Hopper on."""
    cuda = EARLY and x.is_cuda and torch.version.hip is None
    early = cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if early else {"PDL": False}


def _check(**operands: Tensor) -> None:
    """Refuse what the kernels would get wrong without a word. The first operand has the rows."""
    operand = next(iter(operands.values()))
    if problem := refusal(len(operand), operand.dtype, operand.device):
        raise ValueError(problem)
    if any((other.dtype, other.device) != (operand.dtype, operand.device) for other in operands.values()):
        problem = "take operands of one dtype on one device"
    elif not all(other.is_contiguous() for other in operands.values()):
        problem = "take contiguous operands"
    elif torch.is_grad_enabled() and any(other.requires_grad for other in operands.values()):
        problem = "have no gradient: run the model under torch.inference_mode()"
    else:
        return
    given = ", ".join(
        f"{name} {other.dtype} on {other.device} in steps of {other.stride()}" for name, other in operands.items()
    )
    raise ValueError(f"the fused kernels {problem} (given {given})")


def _check_cache(like: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
    """Refuse buffers and positions that the kernels would misread."""
    rows = len(like)
    if any((kept.dtype, kept.device) != (like.dtype, like.device) for kept in (keys, values)):
        raise ValueError(
            f"the fused kernels take a cache of {like.dtype} on {like.device}, not {keys.dtype}, {values.dtype}"
        )
    if keys.shape != values.shape or keys.stride() != values.stride() or keys.stride(-1) != 1 or len(keys) < rows:
        raise ValueError(
            f"keys and values must be alike, (at least {rows}, slots, n_kv_heads, head_dim), a head's numbers side by "
            f"side, not {tuple(keys.shape)} and {tuple(values.shape)} in steps of {keys.stride()} and {values.stride()}"
        )
    if positions.shape != (rows,) or positions.dtype != torch.int64 or positions.device != like.device:
        raise ValueError(
            f"positions must be ({rows},) int64 on {like.device}, "
            f"not {tuple(positions.shape)} {positions.dtype} on {positions.device}"
        )


def _refuse_sizes(names: str, *operands: Tensor) -> None:
    raise ValueError(f"the sizes of {names} do not agree: {', '.join(str(tuple(each.shape)) for each in operands)}")
