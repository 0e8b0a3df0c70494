"""Exact mode: operations whose bits for one position do not depend on what is computed beside it.

A matrix product rounds a row differently when it is alone, attention rounds differently over another number of keys,
and so do the last few numbers of a vector loop. So here everything is cut into pieces of one shape, the same wherever a
position stands: rows in whole blocks, queries in blocks of 16 that begin at multiples of 16, keys in chunks of 64.
Which blocks of rows are enough belongs to the machine, so it is probed; and nothing is promised before the model has
been compared with itself. Knows tensors, and what can be asked of a model; llama.exact.triton_kernels does it on CUDA.
Source of the idea: He et al., "Defeating Nondeterminism in LLM Inference", Thinking Machines, 2025.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from llama.linear import linear
from llama.ops import PLAIN, Ops, rms_norm
from llama.ranks import Ranks
from llama.self_comparison import LanguageModel, cuts

QUERIES, KEYS = 16, 64  # in a piece of attention
TILES = 256  # such pieces at a time, and so scores of 256 x 16 queries at once in memory
SIDE = 16  # what the inner sizes of a product are filled up to
# The most rows and outputs of a product: what is used is to be probed, and a probe is to cost little beside a forward.
# More of them gain no speed; both are multiples of whatever they are filled up to.
ROWS, OUTPUTS = 256, 8192

Product = Callable[[Tensor, Tensor], Tensor]  # x @ weight.T, with the same bits for a row in any company


class Block(NamedTuple):
    """A way to multiply many rows: padded to a multiple of `rows`, then in one product or in one for each block."""

    rows: int
    in_one: bool = True


# The fewest rows first. The last, a product for each row, is exact on any machine that computes the same twice.
BLOCKS = (*(Block(2**n) for n in range(7)), Block(16, in_one=False), Block(1, in_one=False))


def exact_ops(device: torch.device) -> Ops:
    """Return the operations of exact mode for a device. Raises ValueError where CUDA lacks Triton."""
    if device.type != "cuda":
        return Ops("exact", exact_linear, partial(exact_sum_linear, exact_product), exact_attend, rms_norm, exact_silu)
    try:
        from llama.exact import triton_kernels
    except ModuleNotFoundError as missing:
        raise ValueError(f"exact mode on CUDA needs {missing.name}: pip install triton, or take device=cpu") from None

    def whole_linear(x: Tensor, weight: Tensor, pieces: int) -> Tensor:
        return triton_kernels.linear(x, weight)  # whose tiles do not depend on how many outputs there are

    by_pieces = partial(exact_sum_linear, triton_kernels.linear)
    return Ops("exact", whole_linear, by_pieces, triton_kernels.attend, triton_kernels.rms_norm, exact_silu)


def exact_linear(x: Tensor, weight: Tensor, pieces: int) -> Tensor:
    """Return x @ weight.T, of x (..., in_features) and weight (out_features, in_features), as `pieces` of outputs."""
    if pieces == 1 or (len(weight) <= OUTPUTS and _is_its_pieces(weight, pieces)):
        return exact_product(x, weight)
    return torch.cat([exact_product(x, rows) for rows in weight.chunk(pieces)], dim=-1)


def exact_sum_linear(product: Product, x: Tensor, weight: Tensor, pieces: int, ranks: Ranks) -> Tensor:
    """Return x @ weight.T, every rank having its share of the columns of both, added up from pieces, in order."""
    slices = zip(x.chunk(pieces, dim=-1), weight.chunk(pieces, dim=-1), strict=True)
    parts = torch.stack([product(part, columns.contiguous()) for part, columns in slices])
    wide = torch.promote_types(x.dtype, torch.float32)
    everyones = torch.cat(ranks.gather(parts)).to(wide)  # (pieces of all ranks, *x.shape[:-1], out_features)
    total = everyones[0]
    for part in everyones[1:]:
        total = total + part
    return total.to(x.dtype)


def exact_silu(x: Tensor) -> Tensor:
    """Return x * sigmoid(x). The exponential of PyTorch has no tail that rounds differently; its silu has."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / (1 + (-wide).exp())).type_as(x)


def exact_attend(
    xq: Tensor,
    keys: Tensor,
    values: Tensor,
    start_pos: int | Sequence[int],
    key_positions: Tensor | None = None,
) -> Tensor:
    """Do what `llama.attend.attend` does, each query in the same place of the same piece wherever it is fed."""
    if key_positions is not None:
        raise ValueError("exact mode needs a cache whose keys stand at 0, 1, 2, ...; choose kv_cache=static or concat")
    _compare_attention(xq, keys)
    if isinstance(start_pos, int):
        return _attend_in_step(xq, keys, values, start_pos)
    rows = [slice(row, row + 1) for row in range(len(start_pos))]
    return torch.cat(
        [_attend_in_step(xq[row], keys[row], values[row], pos) for row, pos in zip(rows, start_pos, strict=True)]
    )


def _attend_in_step(xq: Tensor, keys: Tensor, values: Tensor, start_pos: int) -> Tensor:
    """Attend where all rows stand at the same position; in float32 or wider."""
    bsz, seqlen, n_heads, head_dim = xq.shape
    before = start_pos % QUERIES  # places of the first block that stay empty
    wide = torch.promote_types(xq.dtype, torch.float32)
    # Filled up with zeros, which add nothing; the scale belongs to the size as it was.
    queries = _in_pieces(xq.to(wide) / head_dim**0.5, QUERIES, before)  # (bsz, n_heads, blocks, QUERIES, width)
    k, v = (  # (bsz, n_heads, chunks, KEYS, width)
        _in_pieces(kept[:, : start_pos + seqlen].to(wide), KEYS).repeat_interleave(n_heads // keys.shape[2], dim=1)
        for kept in (keys, values)
    )
    some = max(1, TILES // (bsz * n_heads))  # blocks at a time
    begins = range(start_pos - before, start_pos + seqlen, some * QUERIES)
    parts = zip(torch.split(queries, some, dim=2), begins, strict=True)
    output = torch.cat([_attend_blocks(part, k, v, begin) for part, begin in parts], dim=2)
    return output[:, :, before : before + seqlen, :head_dim].transpose(1, 2).to(xq.dtype)


def _attend_blocks(queries: Tensor, k: Tensor, v: Tensor, begin: int) -> Tensor:
    """Attend for blocks of queries of which the first begins at `begin`: (bsz, n_heads, blocks x QUERIES, width)."""
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


# The sizes for which a process has compared attention with itself: heads, KV heads, head_dim, dtype, device, threads.
_ATTENDS: set[tuple[int, int, int, torch.dtype, torch.device, int]] = set()


def _compare_attention(xq: Tensor, keys: Tensor, length: int = 5 * KEYS) -> None:
    """Raise ValueError where attention with these heads, cut into calls, has not the bits of one call.

    A model's comparison with itself is too dear to be as long. Compared once for each size, dtype and count of threads.
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
                f"exact mode is not to be had here: attention to {end} positions, asked from {start} on, differs"
            )
    _ATTENDS.add(key)


def _in_pieces(x: Tensor, size: int, before: int = 0) -> Tensor:
    """Cut (bsz, seqlen, heads, head_dim), behind `before` empty places, into (bsz, heads, pieces, size, width)."""
    bsz, seqlen, heads, head_dim = x.shape
    whole = x.new_zeros(bsz, heads, _up(before + seqlen, size), _up(head_dim, SIDE))
    whole[:, :, before : before + seqlen, :head_dim] = x.transpose(1, 2)
    return whole.view(bsz, heads, -1, size, whole.shape[-1])


def _for_each_block(chunk: Tensor, blocks: int) -> Tensor:
    """Return a chunk of every head, (bsz, n_heads, KEYS, width), once for each block of its queries."""
    return chunk[:, :, None].expand(-1, -1, blocks, -1, -1).flatten(0, 2)


def exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T in blocks of as many rows as this machine needs, OUTPUTS at a time.

    Raises ValueError on gradients.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        raise ValueError(
            "exact mode records no gradients, which other kernels would compute: run the model under "
            "torch.inference_mode(), or switch exact mode off"
        )
    if len(weight) <= OUTPUTS:
        return _product(x, weight, block_for(weight))
    return torch.cat([_product(x, some, block_for(some)) for some in torch.split(weight, OUTPUTS)], dim=-1)


def _product(x: Tensor, weight: Tensor, block: Block) -> Tensor:
    out_features, in_features = weight.shape
    flat = x.reshape(-1, in_features)
    # The rows are copied in any case: bits can depend on where in memory an operand begins.
    whole = flat.new_zeros(_up(flat.shape[0], block.rows), _up(in_features, SIDE))
    whole[: flat.shape[0], :in_features] = flat
    if out_features % SIDE or in_features % SIDE:  # sizes that no published model has: copied at each call
        weight = pad(weight, (0, -in_features % SIDE, 0, -out_features % SIDE))
    tiles = torch.split(whole, ROWS if block.in_one else block.rows)
    product = torch.cat([linear(tile, weight) for tile in tiles])
    return product[: flat.shape[0], :out_features].reshape(*x.shape[:-1], out_features)


def _up(size: int, multiple: int) -> int:
    return size + -size % multiple


# What a process has probed already, for each weight's shape, dtype and device and each count of threads: `block_for`,
# and `_is_its_pieces` by the count of pieces.
_Key = tuple[torch.Size, torch.dtype, torch.device, int]
_FOUND: dict[_Key, Block] = {}
_WHOLE: dict[tuple[_Key, int], bool] = {}


def _key_of(weight: Tensor) -> _Key:
    return weight.shape, weight.dtype, weight.device, torch.get_num_threads()


def block_for(weight: Tensor) -> Block:
    """Return the first of BLOCKS in which a product with this weight gives a row the same bits in any company.

    Raises ValueError where none does.
    """
    key = _key_of(weight)
    if key not in _FOUND:
        _FOUND[key] = _probe(weight)
    return _FOUND[key]


def _probe(weight: Tensor) -> Block:
    x, like = _sensitive(ROWS, weight)
    whole = _product(x, like, Block(ROWS))  # that of every block which is multiplied in one
    for block in BLOCKS:
        if not block.in_one:
            whole = _product(x, like, block)
        if all(_agrees(x, like, block, whole, size) for size in _sizes(block)):
            return block
    raise ValueError(
        f"exact mode is not to be had here: products with a weight of {tuple(weight.shape)} in {weight.dtype} on "
        f"{weight.device} round differently from call to call"
    )


def _is_its_pieces(weight: Tensor, pieces: int) -> bool:
    """Tell whether one product gives the bits that pieces of its outputs give; it is quicker."""
    key = _key_of(weight), pieces
    if key not in _WHOLE:
        x, like = _sensitive(64, weight)  # few are enough: what more of them are beside a row has been probed
        parts = like.chunk(pieces)
        _WHOLE[key] = all(
            torch.equal(
                _product(some, like, block_for(like)),
                torch.cat([_product(some, part, block_for(part)) for part in parts], dim=-1),
            )
            for some in (x, x[:1], x[:7])
        )
    return _WHOLE[key]


def _sensitive(rows: int, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return `rows` rows, and a matrix like `weight`, whose products show every other order of summing.

    Each term has its opposite somewhere in the sum, so nothing but rounding errors remains. Of ordinary sums in 16 bits
    one in some ten thousand would differ.
    """
    stream = torch.Generator().manual_seed(0)
    half = weight.shape[1] // 2
    one, other = torch.randperm(2 * half, generator=stream).chunk(2)
    scale = torch.randint(-6, 7, (half,), generator=stream).float().exp2()
    terms, factors = torch.randn(rows, half, generator=stream) * scale, torch.randn(len(weight), half, generator=stream)
    x, like = weight.new_zeros(rows, weight.shape[1]), torch.zeros_like(weight)
    x[:, one], x[:, other] = terms.to(x), -terms.to(x)
    like[:, one] = like[:, other] = factors.to(x)
    return x, like


def _sizes(block: Block) -> list[int]:
    """Return counts of rows that differ in how many blocks they fill, the cheap ones first."""
    if not block.in_one:
        return [block.rows, 2 * block.rows]  # no product has more than a block
    blocks = (*range(1, 10), 12, 15, 16, 17, 31, 33, 48, 64, 65, 128)
    return [n * block.rows for n in blocks if n * block.rows < ROWS]


def _agrees(x: Tensor, weight: Tensor, block: Block, whole: Tensor, size: int) -> bool:
    """Are the products of `size` rows at a time those of all of them, at other places of their blocks?"""
    rows = max(size, -(-(2**12) // weight.shape[0]))  # some 4,000 numbers or more
    shift = block.rows // 2 + 1 if size // block.rows % 2 == 0 else 1  # by one moves every row, by half a block far
    return all(
        torch.equal(_product(part, weight, block), whole[shift + i * size :][: len(part)])
        for i, part in enumerate(torch.split(x[shift : shift + rows], size))
    )


class ExactModel(LanguageModel, Protocol):
    """What is needed of a model to time it both ways."""

    ops: Ops

    def use(self, ops: Ops) -> None: ...


@torch.inference_mode()
def slowdown(model: ExactModel, *, prompt: int = 64, repeats: int = 5, patience: float = 3.0) -> tuple[float, float]:
    """Return how many times as long one row takes in exact mode: to prefill `prompt` tokens, and a cached step.

    The ratios of the median seconds, both ways timed in turns, `repeats` times after one that warms up; or fewer, and
    at worst in that one alone, where `patience` seconds have passed. The model needs room for one position more.
    """
    prompt = min(prompt, model.args.max_seq_len - 1)
    tokens = torch.zeros(1, prompt, dtype=torch.int64, device=model.device)
    before = model.ops
    seconds: dict[str, list[tuple[float, float]]] = {"plain": [], "exact": []}
    began = time.perf_counter()
    try:
        for turn in range(repeats + 1):
            if turn and time.perf_counter() - began > patience:
                break
            for ops in (PLAIN, exact_ops(model.device)):
                model.use(ops)
                with model.switched(kv_caching=True):
                    prefill = _timed(model, tokens, 0)
                    seconds[ops.name].append((prefill, _timed(model, tokens[:, :1], prompt)))
    finally:
        model.use(before)
    medians = {
        name: [statistics.median(times) for times in zip(*(pairs[1:] or pairs), strict=True)]
        for name, pairs in seconds.items()
    }
    prefill, step = (exact / plain for exact, plain in zip(medians["exact"], medians["plain"], strict=True))
    return prefill, step


def slowdown_words(model: ExactModel) -> str:
    """Return what exact mode costs this model here, measured now, in words."""
    prefill, step = slowdown(model)
    return f"exact mode: a short prompt takes {prefill:.1f} times as long as without it, a step {step:.1f} times"


def _timed(model: ExactModel, tokens: Tensor, start_pos: int) -> float:
    started = time.perf_counter()
    model(tokens, start_pos).sum().item()  # the sum is on the host once the logits are made
    return time.perf_counter() - started
