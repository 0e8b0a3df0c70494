"""Triton kernels for a Hopper GPU: attention of one token and products of few rows for steps, and parts of prompts.

A step reads each weight once, so its time is that of reading them and of the gaps between kernels. Weights are the left
operand of a product, and rows, padded to 16, the right one: Hopper's wgmma fixes the size of the left one at 64 only.
They compile for other GPUs from compute capability 8.0 on, too, with fewer stages if shared memory is small.
No sum is split between programs, so every replay has the same bits.
`cached_layer` and `head` in llama/fast/graph_ops.py define the results. Knows tensors, not modules.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (a kernel's parameters are Triton's, and Triton is not typed)

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from llama.fast.graph_ops import FLASH, GraphOps, LayerWeights, Shared
from llama.fast.graph_sampling import advance, nucleus
from llama.ops import linear

PADDED = tl.constexpr(16)  # rows of a product, or queries of a key: the smallest size of a tensor core's operand
# Up to ONE_SPLIT slots, one program reads all slots of a head: a second launch costs as much as splits save. Longer
# buffers are divided into at most MOST_SPLITS parts of SPLIT slots or more.
ONE_SPLIT, SPLIT, MOST_SPLITS = 1024, 512, tl.constexpr(64)
BLOCK = 64  # slots that are loaded at a time
HEAD_DIMS = (16, 32, 64, 128)
GATED = 1024  # numbers of a program of `gate`
WEIGHTS = 9  # of a layer without the following, of which it has all of a tuple or none
BIASES = tuple(f"attention.{name}.bias" for name in ("wq", "wk", "wv"))
HEAD_NORMS = ("attention.q_norm.weight", "attention.k_norm.weight")


class Tile(NamedTuple):
    """How a program of `product` computes its outputs.

    block_out: the number of outputs of a program.
    block_k: the number of inputs that are loaded at a time, of each part.
    parts: the inputs are divided into so many parts, each summed by warps of its own: a chain of dependent `mma.sync`
        would be slower than memory.
    """

    block_out: int
    block_k: int
    parts: int
    num_stages: int
    num_warps: int


# For 132 processors and a dim of 2048 (Llama 3.2 1B), the fastest of five candidates each on an H200 (docs/log.md).
# With 64 outputs a program, w1 and w3 make 128 programs and run wgmma; wo and w2 need 16 outputs for as many programs.
TILES = {
    "wqkv": Tile(32, 64, 4, 4, 4),
    "wo": Tile(16, 64, 4, 5, 4),
    "w1w3": Tile(64, 64, 1, 6, 4),
    "w2": Tile(16, 128, 4, 5, 4),
    "head": Tile(64, 64, 1, 5, 4),
}


def attend_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    norms: Sequence[tuple[Tensor, float]] = (),
) -> Tensor:
    """Return attention of one new token a row, (rows, n_heads, head_dim), and write its key and value at `positions`.

    q: (rows, n_heads, head_dim), before RoPE.
    k, v: (rows, n_kv_heads, head_dim), before RoPE; up to 16 queries a key.
    cos, sin: (rows, 1, head_dim), at the positions.
    norms: the weights, (head_dim,), and the eps of the norms of queries and keys before RoPE.
    q, k and v may be slices of one product. No slot at or behind a row's position is read.
    """
    rows, n_heads, head_dim = q.shape
    n_kv_heads, slots = k.shape[1], keys.shape[1]
    # By the size of the buffers, which the host knows: a recorded graph cannot change it.
    splits = 1 if slots <= ONE_SPLIT else min(-(-slots // SPLIT), MOST_SPLITS.value)
    out = torch.empty((rows, n_heads, head_dim), dtype=q.dtype, device=q.device)
    mixed = sums = out
    if splits > 1:
        mixed = torch.empty((rows, n_heads, splits, head_dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((rows, n_heads, splits), dtype=torch.float32, device=q.device)
    steps = q.stride(0), k.stride(0), v.stride(0), *keys.stride()[:2], *values.stride()[:2]
    (q_norm, q_eps), (k_norm, k_eps) = norms or ((None, 0.0), (None, 0.0))
    sizes = n_heads // n_kv_heads, head_dim, head_dim**-0.5, splits > 1, BLOCK, len(norms) > 0, q_eps, k_eps
    given = q, k, v, cos, sin, positions, keys, values, mixed, sums, q_norm, k_norm, splits
    _attend[(splits, n_kv_heads, rows)](*given, *steps, *sizes, num_warps=4, num_stages=3)
    if splits > 1:
        _combine[(rows * n_heads,)](mixed, sums, out, splits, head_dim, num_warps=4)
    return out


@triton.jit(do_not_specialize=["splits"])
def _attend(
    q,  # (rows, heads, HEAD_DIM), in steps of q_row, HEAD_DIM and 1
    k,
    v,
    cos,  # (rows, HEAD_DIM)
    sin,
    positions,  # (rows,)
    keys,  # (rows, slots, heads / GROUP, HEAD_DIM), in steps of key_row, key_slot, HEAD_DIM and 1
    values,
    mixed,  # (rows, heads, splits, HEAD_DIM)
    sums,  # (rows, heads, splits): the logarithm of each split's sum of exponentials, to base 2
    q_norm,  # (HEAD_DIM,)
    k_norm,
    splits,
    q_row,
    k_row,
    v_row,
    key_row,
    key_slot,
    value_row,
    value_slot,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    DIVIDED: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
    Q_EPS: tl.constexpr,
    K_EPS: tl.constexpr,
):
    """Attend for the queries of one key head of one row, to one split of the slots before the row's position.

    The first split has the new key, in registers, and stores it: no program reads what another one writes. The splits
    of a row are equally long; some are empty near the start of a text, and their sum is 2 ** -inf.
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    position = tl.load(positions + row).to(tl.int32)
    query, across = tl.arange(0, PADDED), tl.arange(0, HEAD_DIM)
    turn = tl.load(cos + row * HEAD_DIM + across), tl.load(sin + row * HEAD_DIM + across)
    place = (head * GROUP + query)[:, None] * HEAD_DIM
    turned = _rotated(q + row * q_row + place, across[None, :], turn, (query < GROUP)[:, None], q_norm, NORMED, Q_EPS)
    new_key = _rotated(k + row * k_row + head * HEAD_DIM, across, turn, across >= 0, k_norm, NORMED, K_EPS)
    new_value = tl.load(v + row * v_row + head * HEAD_DIM + across)
    keys += row * key_row + head * HEAD_DIM + across
    values += row * value_row + head * HEAD_DIM + across
    if split == 0:
        tl.store(keys + position * key_slot, new_key)
        tl.store(values + position * value_slot, new_value)

    to_base_2: tl.constexpr = SCALE * 1.4426950408889634
    own = tl.sum(turned.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * to_base_2
    peak = tl.where(split == 0, own, float("-inf"))  # (PADDED,)
    total = tl.where(split == 0, 1.0, tl.zeros_like(own))
    weighted = tl.where(split == 0, new_value.to(tl.float32)[None, :], tl.zeros((PADDED, HEAD_DIM), tl.float32))
    size = tl.cdiv(tl.cdiv(position, BLOCK), splits) * BLOCK
    end = tl.minimum(split * size + size, position)
    for first in range(split * size, end, BLOCK):
        slot = (first + tl.arange(0, BLOCK))[:, None]
        old_keys = tl.load(keys[None, :] + slot * key_slot, slot < end, 0.0)
        scores = tl.dot(turned, tl.trans(old_keys), input_precision="ieee") * to_base_2
        scores = tl.where(tl.trans(slot < end), scores, float("-inf"))  # (PADDED, BLOCK)
        higher = tl.maximum(peak, tl.max(scores, 1))
        shares, fading = tl.exp2(scores - higher[:, None]), tl.exp2(peak - higher)
        total = total * fading + tl.sum(shares, 1)
        old_values = tl.load(values[None, :] + slot * value_slot, slot < end, 0.0)
        weighted = tl.dot(shares.to(old_values.dtype), old_values, weighted * fading[:, None], input_precision="ieee")
        peak = higher
    here = (row * tl.num_programs(1) * GROUP + head * GROUP + query) * splits + split
    total = tl.where(total == 0, 1.0, total)  # an empty split: its peak is -inf
    tl.store(mixed + here[:, None] * HEAD_DIM + across, weighted / total[:, None], (query < GROUP)[:, None])
    if DIVIDED:
        tl.store(sums + here, peak + tl.log2(total), query < GROUP)


@triton.jit
def _rotated(x, across, turn, there, weight, NORMED: tl.constexpr, EPS: tl.constexpr):
    """Return the numbers at `x + across`, of which each pair is rotated, in their dtype, after a norm if NORMED."""
    number = tl.load(x + across, there, 0.0)
    swapped = tl.load(x + (across ^ 1), there, 0.0)
    if NORMED:
        wide = number.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, -1, keep_dims=True) / wide.shape[-1] + EPS)
        number = (wide * scale).to(number.dtype) * tl.load(weight + across)
        swapped = (swapped.to(tl.float32) * scale).to(number.dtype) * tl.load(weight + (across ^ 1))
    return (number.to(tl.float32) * turn[0] + swapped.to(tl.float32) * turn[1]).to(number.dtype)


@triton.jit(do_not_specialize=["splits"])
def _combine(mixed, sums, out, splits, HEAD_DIM: tl.constexpr):
    """Write the average of one head's splits, weighted by their sums."""
    head = tl.program_id(0).to(tl.int64)
    split, across = tl.arange(0, MOST_SPLITS), tl.arange(0, HEAD_DIM)
    logs = tl.load(sums + head * splits + split, split < splits, float("-inf"))
    shares = tl.exp2(logs - tl.max(logs, 0))  # the first split is never empty
    place = (head * splits + split)[:, None] * HEAD_DIM + across[None, :]
    results = tl.load(mixed + place, (split < splits)[:, None], 0.0)
    tl.store(out + head * HEAD_DIM + across, tl.sum(shares[:, None] * results, 0) / tl.sum(shares, 0))


def product(
    x: Tensor,
    *weights: Tensor,
    tile: Tile,
    biases: Sequence[Tensor] = (),
    residual: Tensor | None = None,
    gated: bool = False,
    widened: bool = False,
) -> Tensor:
    """Return products, (rows, out_features), in the dtype of x; those of more than 16 rows by PyTorch.

    x: (rows, in_features).
    weights: one to three, (out_features, in_features). Their products lie side by side, and `tile.block_out` divides
        the sizes of all but the last.
    biases: of each weight, (out_features,), are added; () adds none.
    gated: return silu(x @ weights[0].T) * (x @ weights[1].T).
    residual: (rows, out_features), is added.
    widened: return the rounded numbers in float32.
    """
    rows, in_features = x.shape
    if rows > PADDED.value:
        made = [linear(x, weight) for weight in weights]
        made = [out + bias for out, bias in zip(made, biases, strict=True)] if biases else made
        out = F.silu(made[0]) * made[1] if gated else torch.cat(made, 1) if len(made) > 1 else made[0]
        out = out if residual is None else residual + out
        return out.float() if widened else out
    sizes = [len(weight) for weight in weights[: 1 if gated else 3]]
    out = torch.empty((rows, sum(sizes)), dtype=torch.float32 if widened else x.dtype, device=x.device)
    first, second, third = (*weights, *weights[:1] * 2)[:3]
    starts = sum(sizes[:1]), sum(sizes[:2]), sum(sizes)
    added = (*biases, None, None, None)[:3]
    given = x, first, second, third, *added, residual, out, rows, *starts, in_features, gated, residual is not None
    # A program has all stages but one in shared memory; for wgmma, of which Hopper has enough, all of them.
    stage = x.element_size() * tile.block_k * tile.parts * (tile.block_out * (1 + gated) + PADDED.value)
    options = {"num_stages": min(tile.num_stages, 1 + shared_memory(x.device) // stage), "num_warps": tile.num_warps}
    tiling = tile.block_out, tile.block_k, tile.parts, len(biases) > 0
    _product[(-(-starts[-1] // tile.block_out),)](*given, *tiling, **options)
    return out


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have; without a GPU, those of Hopper."""
    if device.type != "cuda":
        return 227 << 10
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # not in PyTorch's stubs


@triton.jit
def _product(
    x,  # (n_rows, K)
    first,  # (FIRST, K)
    second,  # (SECOND - FIRST, K); (FIRST, K) if GATED
    third,  # (OUT - SECOND, K)
    first_bias,  # (FIRST,)
    second_bias,
    third_bias,
    residual,  # (n_rows, OUT)
    out,  # (n_rows, OUT)
    n_rows,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    OUT: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Compute BLOCK_OUT outputs of all rows."""
    begin = tl.program_id(0) * BLOCK_OUT
    column, row = begin + tl.arange(0, BLOCK_OUT), tl.arange(0, PADDED)
    weight = first
    if begin >= FIRST:
        weight = second - FIRST * K
    if begin >= SECOND:
        weight = third - SECOND * K
    wanted = tl.minimum(column, OUT - 1)
    LENGTH: tl.constexpr = K // PARTS
    if PARTS == 1:
        across, down = tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_K)[:, None]
        left, right = wanted[:, None] * K + across, row[None, :] * K + down
        fed = (row < n_rows)[None, :]
        total = tl.zeros((BLOCK_OUT, PADDED), tl.float32)
    else:
        across, down = tl.arange(0, BLOCK_K)[None, None, :], tl.arange(0, BLOCK_K)[None, :, None]
        part = tl.arange(0, PARTS)[:, None, None] * LENGTH
        left, right = wanted[None, :, None] * K + part + across, row[None, None, :] * K + part + down
        fed = (row < n_rows)[None, None, :]
        total = tl.zeros((PARTS, BLOCK_OUT, PADDED), tl.float32)
    other = total
    for k in range(0, LENGTH, BLOCK_K):
        inputs = tl.load(x + right + k, fed & (k + down < LENGTH), 0.0)
        loaded = tl.load(weight + left + k, k + across < LENGTH, 0.0)
        total = tl.dot(loaded, inputs, total, input_precision="ieee")
        if GATED:
            loaded = tl.load(second + left + k, k + across < LENGTH, 0.0)
            other = tl.dot(loaded, inputs, other, input_precision="ieee")
    if PARTS > 1:
        total, other = tl.sum(total, 0), tl.sum(other, 0)
    place, there = row[None, :] * OUT + column[:, None], (row < n_rows)[None, :] & (column < OUT)[:, None]
    if GATED:
        total = total / (1 + tl.exp(-total)) * other
    if BIASED:
        bias = first_bias
        if begin >= FIRST:
            bias = second_bias - FIRST
        if begin >= SECOND:
            bias = third_bias - SECOND
        total = (total.to(x.dtype.element_ty) + tl.load(bias + wanted)[:, None]).to(tl.float32)
    if ADDED:
        total += tl.load(residual + place, there, 0.0).to(tl.float32)
    tl.store(out + place, total.to(x.dtype.element_ty), there)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return what `llama.ops.rms_norm` returns, by one kernel."""
    out = torch.empty_like(x)
    dim = x.shape[1]
    _norm[(len(x),)](x, weight, out, eps, dim, 1 << (dim - 1).bit_length(), num_warps=8)
    return out


@triton.jit
def _norm(x, weight, out, EPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    place = tl.arange(0, WIDTH)
    begin = tl.program_id(0).to(tl.int64) * DIM
    number = tl.load(x + begin + place, place < DIM, 0.0)
    wide = number.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / DIM + EPS)).to(number.dtype)
    tl.store(out + begin + place, normed * tl.load(weight + place, place < DIM, 0.0), place < DIM)


def triton_step(h: Tensor, weights: LayerWeights, shared: Shared, keys: Tensor, values: Tensor) -> Tensor:
    """Return what `cached_layer` returns for one token a row, by 7 kernels, or 8 with more than ONE_SPLIT slots."""
    tensors, eps, head_dim = weights.tensors, weights.eps, keys.shape[-1]
    wq, wk, wv, wo = (tensors[f"attention.{name}.weight"] for name in ("wq", "wk", "wv", "wo"))
    w1, w2, w3 = (tensors[f"feed_forward.{name}.weight"] for name in ("w1", "w2", "w3"))
    normed = norm(h, tensors["attention_norm.weight"], eps["attention_norm"])
    biases = [tensors[name] for name in BIASES if name in tensors]
    products = product(normed, wq, wk, wv, tile=TILES["wqkv"], biases=biases)
    q, k, v = torch.split(products.view(len(h), -1, head_dim), [len(w) // head_dim for w in (wq, wk, wv)], 1)
    norms = [(tensors[name], eps[name.removesuffix(".weight")]) for name in HEAD_NORMS if name in tensors]
    output = attend_step(q, k, v, *shared.cos_sin, shared.positions[:, 0], keys, values, norms)
    h = product(output.flatten(1), wo, tile=TILES["wo"], residual=h)
    normed = norm(h, tensors["ffn_norm.weight"], eps["ffn_norm"])
    gated = product(normed, w1, w3, tile=TILES["w1w3"], gated=True)
    return product(gated, w2, tile=TILES["w2"], residual=h)


def triton_head(h: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Return the logits, (rows, vocab), in float32."""
    return product(norm(h, norm_weight, eps), weight, tile=TILES["head"], widened=True)


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Return what `llama.rope.rotate` returns for x, (tokens, heads, head_dim), by one kernel."""
    out = torch.empty_like(x)
    size, head_dim = x[0].numel(), x.shape[-1]
    _rotate[(len(x),)](x, out, *cos_sin, size, head_dim, 1 << (size - 1).bit_length())
    return out


@triton.jit
def _rotate(x, out, cos, sin, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    token, across = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    angle = token * HEAD_DIM + across % HEAD_DIM
    turn = tl.load(cos + angle), tl.load(sin + angle)
    tl.store(
        out + token * SIZE + across,
        _rotated(x + token * SIZE, across, turn, across < SIZE, None, False, 0),
        across < SIZE,
    )


def gate(x: Tensor, up: Tensor) -> Tensor:
    """Return silu(x) * up, each rounded, by one kernel."""
    out = torch.empty_like(x)
    size = x.numel()
    _gate[(triton.cdiv(size, GATED),)](x, up, out, size, GATED)
    return out


@triton.jit
def _gate(x, up, out, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + place, place < size, 0.0)
    wide = number.to(tl.float32)
    passed = (wide / (1 + tl.exp(-wide))).to(number.dtype)
    tl.store(out + place, passed * tl.load(up + place, place < size, 0.0), place < size)


TRITON = GraphOps(
    "Triton", FLASH, norm, rotate, gate, triton_head, advance, prompts=True, step=triton_step, nucleus=nucleus
)


def serves(weights: LayerWeights, head_dim: int) -> bool:
    """Return True if the kernels compute a layer of these weights: 16 bits, no other biases or norms than the named."""
    wq, wk = (weights.tensors[f"attention.{name}.weight"] for name in ("wq", "wk"))
    w1 = weights.tensors["feed_forward.w1.weight"]
    fit = [len(wq) % TILES["wqkv"].block_out, len(wk) % TILES["wqkv"].block_out, wq.shape[1] % 64, len(w1) % 64]
    more = [sum(name in weights.tensors for name in names) for names in (BIASES, HEAD_NORMS)]
    known = more[0] in (0, 3) and more[1] in (0, 2) and len(weights.tensors) == WEIGHTS + sum(more)
    few = known and len(wq) // len(wk) <= PADDED.value
    return few and not any(fit) and head_dim in HEAD_DIMS and wq.element_size() == 2
