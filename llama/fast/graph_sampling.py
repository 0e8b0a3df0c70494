"""Triton kernels that choose tokens from logits on a GPU: the most likely one, or a draw from the nucleus of top_p.

A row's vocabulary is divided into parts, because one program would read it slowly. `advance` in llama/fast/graph_ops.py
and `choose` in llama/sampling.py define the results.

`nucleus` sorts no vocabulary. It finds the token at which a sum over tokens, in order of falling logits, exceeds a
target: first for the cut of top_p, then for the draw. A histogram shows the bin of that token, and only the tokens of
this bin are compared with each other. The sums are whole numbers, so they have the same bits in any order.
Knows tensors, not modules or graphs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (a kernel's parameters are Triton's, and Triton is not typed)

import torch
import triton
import triton.language as tl
from torch import Tensor

from llama.sampling import Number

PART = tl.constexpr(1024)  # logits of a program: 126 programs for the 128,256 tokens of Llama 3
BINS = tl.constexpr(4096)  # logits of normal distribution have up to 60 of 128,256 tokens in a bin
GATHERED = tl.constexpr(2048)  # logits of a program of `_gather`, each of which reads all bins
ROOM = tl.constexpr(1024)  # tokens of a bin that are compared with each other, by one program in registers
FEW = tl.constexpr(8)  # of them at a time
# Of a row, in int64: the sums of its bins; the number of tokens in the bin of the cut, and of the draw; the kept mass.
STATE = tl.constexpr(BINS.value + 3)
LAST = tl.constexpr(2**63 - 1)


def advance(logits: Tensor, tokens: Tensor, positions: Tensor, chosen: Tensor) -> None:
    """Choose every row's most likely token as `graph_ops.advance` does, by two kernels.

    logits: (rows, vocab) float32, contiguous. tokens: (rows, slots). positions, chosen: (rows,). All three are int64.
    """
    peaks, _, sizes = _peaks_of(logits, None)
    _step_on[(len(logits),)](*peaks, tokens, positions, chosen, tokens.stride(0), tokens.shape[1], *sizes, num_warps=1)


def nucleus(logits: Tensor, temperature: Number, top_p: Number, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids that `sampling.choose` draws with a temperature and top_p, and which of them are certain.

    Both are (rows,), int64 and bool, of six kernels. An id that is not certain is a token of the vocabulary.

    logits: (rows, vocab) float32, contiguous.
    temperature, top_p: on a GPU, float64 tensors of one number.
    draws: a random number of each row, (rows,), in [0, 1).

    The id is uncertain if a sum comes so close to a target that rounding might decide, or if more than ROOM tokens are
    in the bin of a target. For a row with NaN or infinity, it is any token of the vocabulary.
    """
    rows, vocab = logits.shape
    temperature, top_p, draws = (
        torch.as_tensor(x, dtype=torch.float64, device=logits.device) for x in (temperature, top_p, draws)
    )
    state, lists = (
        torch.empty((rows, size), dtype=torch.int64, device=logits.device) for size in (STATE.value, ROOM.value)
    )
    ids, sure = (torch.empty(rows, dtype=dtype, device=logits.device) for dtype in (torch.int64, torch.bool))
    (highest, lowest, _), grid, parts = _peaks_of(logits, state)
    # The sum of a row is below 2 ** 62. Beyond 45 bits, float64's own rounding would be larger than a unit.
    sizes = *parts, min(45, 62 - vocab.bit_length()), vocab
    _histogram[grid](logits, highest, lowest, temperature, state, *sizes)
    for turn, fraction in enumerate((top_p, draws)):
        _gather[triton.cdiv(vocab, GATHERED.value), rows](
            logits, highest, lowest, temperature, state, fraction, lists, turn, *sizes, num_warps=8
        )
        _resolve[(rows,)](highest, lowest, temperature, state, fraction, lists, ids, sure, turn, *sizes, num_warps=16)
    return ids, sure


def _peaks_of(
    logits: Tensor, state: Tensor | None
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int], tuple[int, int]]:
    """Return the results of `_peaks`, its grid, and the number of parts, also as a power of two. Zero the state."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, PART.value)
    highest, lowest = (torch.empty((rows, parts), dtype=torch.float32, device=logits.device) for _ in range(2))
    first = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    _peaks[(parts, rows)](logits, highest, lowest, first, state, parts, vocab, state is not None)
    return (highest, lowest, first), (parts, rows), (parts, 1 << (parts - 1).bit_length())


@triton.jit
def _part(logits, row, SIZE: tl.constexpr, VOCAB: tl.constexpr):
    """Return this program's logits, and their ids, which are VOCAB or more behind the last."""
    ids = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    return tl.load(logits + row * VOCAB + ids, ids < VOCAB, float("-inf")), ids


@triton.jit
def _peaks(
    logits,  # (rows, VOCAB)
    highest,  # (rows, PARTS)
    lowest,
    first,  # the id of each part's first largest logit, or -1 if a logit is not finite
    state,  # (rows, STATE)
    PARTS: tl.constexpr,
    VOCAB: tl.constexpr,
    ZEROED: tl.constexpr,
):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    logit, ids = _part(logits, row, PART, VOCAB)
    peak = tl.max(logit, 0)
    finite = (tl.abs(logit) < float("inf")) | (ids >= VOCAB)
    id = tl.min(tl.where(logit == peak, ids, VOCAB), 0)
    tl.store(highest + row * PARTS + part, peak)
    tl.store(lowest + row * PARTS + part, tl.min(tl.where(ids < VOCAB, logit, peak), 0))
    tl.store(first + row * PARTS + part, tl.where(tl.min(finite.to(tl.int32), 0) == 1, id, -1))
    if ZEROED:
        zeroed = tl.arange(0, BINS * 2)
        tl.store(state + row * STATE + zeroed, zeroed.to(tl.int64) * 0, (part == 0) & (zeroed < STATE))


@triton.jit
def _step_on(highest, lowest, first, tokens, positions, chosen, text, slots, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Write a row's first largest logit into its text. Texts have `slots` tokens, and lie `text` numbers apart."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    peaks = tl.load(highest + row * PARTS + part, part < PARTS, float("-inf"))
    ids = tl.load(first + row * PARTS + part, part < PARTS, 2**31 - 1)
    id = tl.min(tl.where((peaks == tl.max(peaks, 0)) | (ids < 0), ids, 2**31 - 1), 0)
    position = tl.minimum(tl.load(positions + row) + 1, slots - 1)
    tl.store(chosen + row, id.to(tl.int64))
    tl.store(positions + row, position)
    tl.store(tokens + row * text + position, tl.maximum(id, 0).to(tl.int64))


@triton.jit
def _bounds(highest, lowest, temperature, row, PARTS: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr):
    """Return a row's largest logit, one over the temperature, and how far below the peak the bins end, times that."""
    part, inverse = tl.arange(0, WIDTH), 1 / tl.load(temperature)
    peak = tl.max(tl.load(highest + row * PARTS + part, part < PARTS, float("-inf")), 0).to(tl.float64)
    deepest = (peak - tl.min(tl.load(lowest + row * PARTS + part, part < PARTS, float("inf")), 0)) * inverse
    depth = tl.minimum(deepest, BITS * 0.7)  # above ln 2: all masses that are not 0 are within
    return peak, inverse, tl.where(depth > 1e-300, depth, 1)  # by which a finite number can be divided


@triton.jit
def _masses(logit, peak, inverse, depth, BITS: tl.constexpr):
    """Return each token's share in units of 2 ** -BITS of the largest one, and its bin, or -1 if it has none.

    A share is rounded down, so it is off by up to a unit. The bins are monotone in the logits.
    """
    x = (peak - logit.to(tl.float64)) * inverse
    within = x <= depth  # not for NaN
    x = tl.where(within, x, 0)
    mass = tl.where(within, tl.exp(-x) * (1 << BITS), 0).to(tl.int64)
    return mass, tl.where(within, (x * ((BINS - 1) / depth)).to(tl.int32), -1)


@triton.jit
def _histogram(
    logits,
    highest,
    lowest,
    temperature,
    state,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    VOCAB: tl.constexpr,
):
    """Add the masses of a part to the bins of its row."""
    row = tl.program_id(1).to(tl.int64)
    logit, _ = _part(logits, row, PART, VOCAB)
    peak, inverse, depth = _bounds(highest, lowest, temperature, row, PARTS, WIDTH, BITS)
    mass, bin = _masses(logit, peak, inverse, depth, BITS)
    tl.atomic_add(state + row * STATE + bin, mass, mass > 0, sem="relaxed")


@triton.jit
def _wanted(state, fraction, row, TURN: tl.constexpr):
    """Return the target, the bin where the running sum exceeds it, the sum before this bin, and all and kept mass.

    TURN: 0 for the cut, whose target is top_p of all, 1 for the draw, whose target is a part of what the cut has kept.
    """
    masses = tl.load(state + tl.arange(0, BINS))
    total = tl.sum(masses, 0)
    whole = total
    if TURN == 1:
        whole = tl.load(state + BINS + 2)
    target = (tl.load(fraction + row * TURN) * whole.to(tl.float64)).to(tl.int64)
    before = tl.cumsum(masses, 0) <= target
    return target, tl.sum(before.to(tl.int32), 0), tl.sum(tl.where(before, masses, 0), 0), total, whole


@triton.jit
def _gather(
    logits,
    highest,
    lowest,
    temperature,
    state,
    fraction,
    lists,  # (rows, ROOM)
    TURN: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    VOCAB: tl.constexpr,
):
    """Write a part's tokens that are in the wanted bin to the row's list, in any order: a smaller number is earlier."""
    row = tl.program_id(1).to(tl.int64)
    logit, ids = _part(logits, row, GATHERED, VOCAB)
    peak, inverse, depth = _bounds(highest, lowest, temperature, row, PARTS, WIDTH, BITS)
    _, bin = _masses(logit, peak, inverse, depth, BITS)
    state += row * STATE
    _, wanted, _, _, _ = _wanted(state, fraction, row, TURN)
    there = bin == wanted
    slot = tl.atomic_add(state + BINS + TURN + tl.zeros_like(ids), there.to(tl.int64), there, sem="relaxed")
    bits = (logit + 0.0).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    falling = ~_as_whole(bits).to(tl.int64)
    tl.store(lists + row * ROOM + slot, (falling << 32) | ids, there & (slot < ROOM))


@triton.jit
def _as_whole(bits):
    """Return whole numbers in the order of the floating-point numbers of these bits, or such bits of the numbers."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _listed(list, slot, count, peak, inverse, depth, BITS: tl.constexpr):
    """Return what `_gather` has written to slots of a list, LAST in slots without a token, and the tokens' masses."""
    token = tl.load(list + slot, slot < count, LAST)
    logit = _as_whole(~(token >> 32).to(tl.int32)).to(tl.float32, bitcast=True)  # NaN for LAST
    return token, _masses(logit, peak, inverse, depth, BITS)[0]


@triton.jit
def _resolve(
    highest,
    lowest,
    temperature,
    state,
    fraction,
    lists,
    chosen,  # (rows,)
    sure,
    TURN: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    VOCAB: tl.constexpr,
):
    """Find the first token of a row at which the running sum exceeds the target: store that sum, or the token's id.

    The margin bounds both roundings. Here, VOCAB units for each of two sums. In `choose`, and of exponentials here,
    2 ** -53 of the total for each addition: 3 * VOCAB for the cut, as many for the draw, and some operations a token.
    """
    row = tl.program_id(0).to(tl.int64)
    state += row * STATE
    lists += row * ROOM
    target, _, base, total, whole = _wanted(state, fraction, row, TURN)
    count = tl.load(state + BINS + TURN).to(tl.int32)
    peak, inverse, depth = _bounds(highest, lowest, temperature, row, PARTS, WIDTH, BITS)
    token, _ = _listed(lists, tl.arange(0, ROOM), count, peak, inverse, depth, BITS)
    running = base + tl.zeros_like(token)
    for first in range(0, tl.minimum(count, ROOM), FEW):
        other, mass = _listed(lists, first + tl.arange(0, FEW), count, peak, inverse, depth, BITS)
        running += tl.sum(tl.where(other[None, :] <= token[:, None], mass[None, :], 0), 1)
    there = token < LAST
    beyond = there & (running > target)
    after = tl.min(tl.where(beyond, running, LAST), 0)
    before = tl.max(tl.where(beyond | ~there, base, running), 0)
    margin = ((total.to(tl.float64) * 2.0**-50 + 4) * (VOCAB + 64)).to(tl.int64)
    found = (after < LAST) & (count <= ROOM)
    low = (before == 0) | (target - before > margin)  # no token is before the first
    high = after - target > margin
    if TURN == 0:
        tl.store(state + BINS + 2, after)
        tl.store(sure + row, found & low & high)
    else:
        high |= after == whole  # no token is behind the last
        tl.store(sure + row, found & low & high & (tl.load(sure + row) != 0))
        tl.store(chosen + row, tl.where(after < LAST, tl.min(tl.where(beyond, token, LAST), 0) & 0x7FFFFFFF, 0))
