"""Batch-invariant operations: the bits of one position do not depend on what is computed beside it.

A matrix product rounds a row differently when it is alone, attention rounds differently for another number of keys, and
so do the last few numbers of a vector loop. So all operands are cut into tiles of one shape: rows in whole blocks,
queries in blocks of 16 that begin at multiples of 16, keys in chunks of 64. The number of rows that a block needs
depends on the machine: see products.py. Ranks that share a model cut its products, so each product is computed in
slices: any number of ranks that divides them gives the same bits. On CUDA, `triton_kernels` has the same operations.
Knows tensors; does not know a model.
Source of the idea: He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines, 2025.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from llama.exact.batch_invariance import cuts
from llama.exact.products import SIDE, exact_product, is_its_slices, round_up
from llama.ops import UNCHANGED, Ops, Scoring, rms_norm, softmax_attention
from llama.ranks import Ranks
from llama.rows import Rows

QUERIES, KEYS = 16, 64  # in a tile of attention
TILES = 256  # tiles at a time: scores of 256 x 16 queries are in memory at once

Product = Callable[[Tensor, Tensor], Tensor]  # x @ weight.T, batch-invariant


def exact_ops(device: torch.device, slices: int = 1) -> Ops:
    """Return the operations of exact mode for a device. slices: those of a layer's products on this rank.

    Raises ValueError on CUDA without Triton.
    """
    if device.type != "cuda":
        by_slices = partial(exact_linear, slices=slices)
        sum_by_slices = partial(exact_sum_linear, exact_product, slices=slices)
        attend = softmax_attention(partial(_attend_all_before, exact_attend))
        return Ops("exact", by_slices, sum_by_slices, attend, rms_norm, exact_silu, exact=True)
    try:
        from llama.exact import triton_kernels as kernels
    except ModuleNotFoundError as missing:
        raise ValueError(f"exact mode on CUDA needs {missing.name}: pip install triton, or use device=cpu") from None
    # The tiles of Triton's product do not depend on the number of outputs, so only sums need slices.
    sum_by_slices = partial(exact_sum_linear, kernels.linear, slices=slices)
    attend = softmax_attention(partial(_attend_all_before, kernels.attend))
    return Ops("exact", kernels.linear, sum_by_slices, attend, kernels.rms_norm, exact_silu, exact=True)


def exact_linear(x: Tensor, weight: Tensor, slices: int = 1) -> Tensor:
    """Return x @ weight.T for x (..., in_features) and weight (out_features, in_features), by slices of the outputs."""
    if slices == 1 or is_its_slices(weight, slices):
        return exact_product(x, weight)
    return torch.cat([exact_product(x, rows) for rows in weight.chunk(slices)], dim=-1)


def exact_sum_linear(product: Product, x: Tensor, weight: Tensor, ranks: Ranks, slices: int = 1) -> Tensor:
    """Return x @ weight.T, of which every rank has a share of the columns: the sum of all slices, in order."""
    operands = zip(x.chunk(slices, dim=-1), weight.chunk(slices, dim=-1), strict=True)
    parts = torch.stack([product(part, columns.contiguous()) for part, columns in operands])
    wide = torch.promote_types(x.dtype, torch.float32)
    slices_of_all = torch.cat(ranks.gather(parts)).to(wide)  # (slices of all ranks, *x.shape[:-1], out_features)
    total = slices_of_all[0]
    for part in slices_of_all[1:]:
        total = total + part
    return total.to(x.dtype)


def exact_silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x). PyTorch's silu rounds the tail of a vector differently; its exponential does not."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / (1 + (-wide).exp())).type_as(x)


def _attend_all_before(
    attend: Callable[[Tensor, Tensor, Tensor, Rows], Tensor],
    xq: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
    visible: Tensor | None = None,
    scoring: Scoring = UNCHANGED,
) -> Tensor:
    """Call an exact `attend`. Raise ValueError for a score_mod, and if queries do not see all keys before them."""
    if scoring.score_mod is not None:
        raise ValueError("exact mode cannot apply a score_mod; set model.exact = False first")
    if visible is not None:
        raise ValueError("exact mode needs a cache whose keys stand at 0, 1, 2, ...; choose kv_cache=static or concat")
    return attend(xq, keys, values, rows)


def exact_attend(xq: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """Return what `llama.ops.attend` does; each query is in the same place of the same tile in every call."""
    _compare_attention(xq, keys)
    if rows.start is not None:
        return _attend_in_step(xq, keys, values, rows.start)
    each = [slice(row, row + 1) for row in range(len(rows.starts))]
    parts = zip(each, rows.starts, strict=True)
    return torch.cat([_attend_in_step(xq[row], keys[row], values[row], start) for row, start in parts])


def _attend_in_step(xq: Tensor, keys: Tensor, values: Tensor, start_pos: int) -> Tensor:
    """Attend for rows that all start at the same position, in float32 or wider."""
    bsz, seqlen, n_heads, head_dim = xq.shape
    before = start_pos % QUERIES  # empty places of the first block
    wide = torch.promote_types(xq.dtype, torch.float32)
    # Padded with zeros, which add nothing; the scale is that of the original size.
    queries = _in_tiles(xq.to(wide) / head_dim**0.5, QUERIES, before)  # (bsz, n_heads, blocks, QUERIES, width)
    k, v = (  # (bsz, n_heads, chunks, KEYS, width)
        _in_tiles(kept[:, : start_pos + seqlen].to(wide), KEYS).repeat_interleave(n_heads // keys.shape[2], dim=1)
        for kept in (keys, values)
    )
    some = max(1, TILES // (bsz * n_heads))  # blocks at a time
    begins = range(start_pos - before, start_pos + seqlen, some * QUERIES)
    parts = zip(torch.split(queries, some, dim=2), begins, strict=True)
    output = torch.cat([_attend_blocks(part, k, v, begin) for part, begin in parts], dim=2)
    return output[:, :, before : before + seqlen, :head_dim].transpose(1, 2).to(xq.dtype)


def _attend_blocks(queries: Tensor, k: Tensor, v: Tensor, begin: int) -> Tensor:
    """Return the attention of blocks of queries from position `begin` on, (bsz, n_heads, blocks x QUERIES, width)."""
    bsz, n_heads, blocks, _, width = queries.shape
    chunks = min(k.shape[2], -(-(begin + blocks * QUERIES) // KEYS))
    flat = queries.flatten(0, 2)  # (bsz x n_heads x blocks, QUERIES, width)
    scores = [torch.bmm(flat, _for_each_block(k[:, :, c], blocks).transpose(1, 2)) for c in range(chunks)]
    places = begin + torch.arange(blocks * QUERIES, device=k.device).view(blocks, QUERIES, 1)
    future = torch.arange(chunks * KEYS, device=k.device) > places  # (blocks, QUERIES, chunks x KEYS)
    shares = torch.cat(scores, dim=-1).view(-1, blocks, QUERIES, chunks * KEYS).masked_fill_(future, -torch.inf)
    shares = shares.softmax(-1).flatten(0, 1)  # (bsz x n_heads x blocks, QUERIES, chunks x KEYS)
    output = torch.zeros_like(flat)
    for c, part in enumerate(torch.split(shares, KEYS, dim=-1)):  # in order: the bits of a sum depend on it
        output += torch.bmm(part.contiguous(), _for_each_block(v[:, :, c], blocks))
    return output.view(bsz, n_heads, blocks * QUERIES, width)


# The sizes for which this process compared attention with itself: heads, KV heads, head_dim, dtype, device, threads.
_ATTENDS: set[tuple[int, int, int, torch.dtype, torch.device, int]] = set()


def _compare_attention(xq: Tensor, keys: Tensor, length: int = 5 * KEYS) -> None:
    """Raise ValueError if attention with these heads has other bits in several calls than in one.

    The comparison of a whole model is shorter, because it costs more. Runs once for each key of _ATTENDS.
    """
    n_heads, head_dim = xq.shape[2:]
    wide = torch.promote_types(xq.dtype, torch.float32)
    key = (n_heads, keys.shape[2], head_dim, wide, xq.device, torch.get_num_threads())
    if key in _ATTENDS:
        return
    stream = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, length, heads, head_dim, generator=stream).to(xq.device, wide)
        for heads in (n_heads, key[1], key[1])
    )
    whole = _attend_in_step(q, k, v, 0)
    for start, end in cuts(length):
        if not torch.equal(_attend_in_step(q[:, start:end], k, v, start), whole[:, start:end]):
            raise ValueError(
                f"exact mode is not available here: attention to {end} positions differs for queries from {start} on"
            )
    _ATTENDS.add(key)


def _in_tiles(x: Tensor, size: int, before: int = 0) -> Tensor:
    """Return (bsz, seqlen, heads, head_dim), after `before` empty places, as (bsz, heads, tiles, size, width)."""
    bsz, seqlen, heads, head_dim = x.shape
    whole = x.new_zeros(bsz, heads, round_up(before + seqlen, size), round_up(head_dim, SIDE))
    whole[:, :, before : before + seqlen, :head_dim] = x.transpose(1, 2)
    return whole.view(bsz, heads, -1, size, whole.shape[-1])


def _for_each_block(chunk: Tensor, blocks: int) -> Tensor:
    """Return a chunk of every head, (bsz, n_heads, KEYS, width), repeated for each block of queries."""
    return chunk[:, :, None].expand(-1, -1, blocks, -1, -1).flatten(0, 2)
