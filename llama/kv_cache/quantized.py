"""Quantised caches: keys and values in 2 to 8 bits, and the newest and the first of them in full precision.

Source: Liu et al., KIVI, https://arxiv.org/abs/2402.02750. Some channels of keys are large in every token, so keys are
quantised per channel, over a group of tokens. Values have no such channels and are quantised per token.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.kv_cache.contract import NativeLayout, doubled
from llama.kv_cache.counting import CountingCache
from llama.kv_cache.names import read_kind
from llama.ops import widest
from llama.rope import RopeTable
from llama.rows import Rows

# GROUP numbers of a token's values share a scale, and as many tokens per channel of the keys (docs/log.md).
GROUP = 32
SCALES, ZEROS = torch.int16, torch.float16  # the dtypes in which they are stored; see `short_scales`
FEWEST_BITS, MOST_BITS = 2, 8
# Rotated values are almost normally distributed. Four levels have the least square error over 0.64 of the range of 64
# such numbers; a wider range loses less of the large ones (docs/log.md).
CLIPPED = 0.75
_SIDES, _PARTS = ("key", "value"), ("codes", "scale", "zero")


class QuantizedCache(CountingCache):
    """Groups of `group` positions in few bits; the newest `window` and the first `sinks` are in full precision.

    A call reads its own keys and values in full precision, for example all of a prompt. A group is quantised when it is
    full and `window` positions follow it. The number x is stored as code = round(x / scale - zero), and is read as
    (code + zero) * scale, at most half a scale from x. By row, group and KV head:

        key_codes                   (rows, groups, n_kv_heads, head_dim, group x key_bits / 8) uint8, see `packed`
        key_scale, key_zero         (rows, groups, n_kv_heads, 1, head_dim): of each channel
        value_codes                 (rows, groups, n_kv_heads, group, head_dim x value_bits / 8) uint8
        value_scale, value_zero     (rows, groups, n_kv_heads, parts, group): of each token, see `value_parts`
        keys, values                (rows, sinks + window + group, n_kv_heads, head_dim): position p has the slot
                                    sinks + p % (window + group), and the first positions also have the slots 0 to
                                    sinks - 1

    A step multiplies each channel of a group's keys by one number of the query, and each token of its values by one
    weight. The numbers with a common factor are adjacent in memory.

    rotates_values: values are rotated by `hadamard` before they are quantised, which spreads large numbers over the
    head; then all numbers of a token and head share a scale. In 2 bits they are clipped to CLIPPED of their range.
    """

    lossless = False
    preallocates = True
    whole_prompt = True  # a later call reads rounded keys and values, on which those of deeper layers depend
    group: ClassVar[int] = GROUP
    sinks: ClassVar[int] = 0
    rotates_values: ClassVar[bool] = False
    key_bits: int
    value_bits: int
    window: int
    key_codes: Tensor | None

    def __init__(self, args: ModelArgs, layer: int = 0, rope: RopeTable | None = None) -> None:
        super().__init__(args, layer, rope)
        for side in _SIDES:
            for part in _PARTS:
                setattr(self, f"{side}_{part}", None)

    @property
    def turn(self) -> int:
        """The number of positions after which a slot behind those of the sinks is written again."""
        return self.window + self.group

    @property
    def _full_slots(self) -> int:
        return self.sinks + self.turn

    @property
    def value_parts(self) -> int:
        """The number of scales for one token's values of one head."""
        return 1 if self.rotates_values or self.args.head_dim % GROUP else self.args.head_dim // GROUP

    @property
    def value_share(self) -> float:
        """The share of the range of a token's values that their codes cover."""
        return CLIPPED if self.rotates_values and self.value_bits == 2 else 1.0

    def position_bytes(self, itemsize: int) -> int:
        """Return the bytes of a position in a full group, with its part of the scales."""
        return self._group_bytes() // self.group

    def predicted_bytes(
        self, *, prompts: Sequence[int], ends: Sequence[int], reserved: tuple[int, int], itemsize: int
    ) -> int:
        full = 2 * self._full_slots * self.args.n_kv_heads * self.args.head_dim * itemsize
        first, last, most = map(self._groups, (max(*prompts, reserved[1]), max(ends), self.args.max_seq_len))
        return max(len(prompts), reserved[0]) * (doubled(first, last, most) * self._group_bytes() + full)

    def _group_bytes(self) -> int:
        args = self.args
        codes = self.group * args.n_kv_heads * args.head_dim * (self.key_bits + self.value_bits) // 8
        scales = args.n_kv_heads * (args.head_dim + self.group * self.value_parts)
        return codes + (SCALES.itemsize + ZEROS.itemsize) * scales

    @property
    def slots(self) -> int | None:
        codes = self.key_codes
        return None if codes is None else codes.shape[1] * self.group + self.window

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        self.check(rows, xk, xv)
        self.prepare(rows, xk)
        starts = rows.starts
        keys, values = self._whole("key", starts, xk), self._whole("value", starts, xv)
        for row, (start, count) in enumerate(zip(starts, rows.lengths, strict=True)):
            self._keep("key", row, start, start + count, keys[row])
            self._keep("value", row, start, start + count, values[row])
        self.record(rows)
        if self.unrotated:
            keys = self.rotated(keys, torch.arange(keys.shape[1], device=keys.device), keys.shape[1] - 1)
        return keys, values

    def written(self, name: str, length: int) -> int:
        """Return the number of groups in codes, or the number of slots of `keys` and `values`."""
        if name not in ("keys", "values"):
            return self.quantized_len(length) // self.group
        oldest = self._oldest(length)
        return min(self.sinks + oldest % self.turn + length - oldest, self._full_slots)

    def restore(self, state: Mapping[str, Tensor], rows: int, length: int) -> None:
        super().restore(state, rows, length)
        keys = state["keys"]
        self._enlarge(self.sizes(rows, self._groups(max(self._ends)), keys), keys.device)

    def quantized_len(self, end: int) -> int:
        """Return the number of positions in full groups that a call at the position `end` reads quantised."""
        return max((end - self.window) // self.group * self.group, 0)

    def _oldest(self, end: int) -> int:
        """Return the oldest position in full precision behind the sinks, of a row with this end."""
        return self.quantized_len(end - 1)  # not `end`: if a group is full, its tokens may be fed again

    def _groups(self, end: int) -> int:
        """Return the number of groups for which memory is allocated, for rows with this end."""
        return max(-((self.window - end) // self.group), 1)

    def _refusal(self, row: int, start: int, end: int) -> str | None:
        first = self.quantized_len(start)
        if first == start or first >= self._oldest(end):
            return None
        return (
            f"start_pos={start} needs positions in full precision that are quantised in groups of {self.group}, "
            f"because {end} were fed; continue from {0 if self.window else first}"
        )

    def prepare(self, rows: Rows, like: Tensor) -> None:
        super().prepare(rows, like)
        end, reserved, most = map(self._groups, (rows.end, self.reserved[1], self.args.max_seq_len))
        self._grow(len(rows.starts), end, like, most=most, reserved=reserved, of="key_codes")

    def native_layout(self, like: Tensor) -> NativeLayout | None:
        assert self.key_codes is not None
        rows, groups = self.key_codes.shape[:2]
        bits, sizes = (self.key_bits, self.value_bits), (self.group, self.window, self.sinks, self.value_parts)
        settings = (*bits, *sizes, self.unrotated, self.rotates_values)
        return NativeLayout(self.sizes(rows, groups, like), groups, groups=settings)

    def sizes(self, rows: int, groups: int, like: Tensor) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        """Return every buffer's shape and dtype by name, for keys like `like`, (..., n_kv_heads, head_dim)."""
        heads, width = like.shape[2:]
        sides = (
            ("key", self.key_bits, width, self.group, 1),
            ("value", self.value_bits, self.group, width, self.value_parts),
        )
        sizes: dict[str, tuple[Sequence[int], torch.dtype]] = {}
        for side, bits, count, length, parts in sides:
            sizes[f"{side}_codes"] = ((rows, groups, heads, count, length * bits // 8), torch.uint8)
            sizes |= {f"{side}_scale": ((rows, groups, heads, parts, count), SCALES)}
            sizes |= {f"{side}_zero": ((rows, groups, heads, parts, count), ZEROS)}
            sizes[f"{side}s"] = ((rows, self._full_slots, heads, width), like.dtype)
        return sizes

    def _whole(self, side: str, starts: Sequence[int], new: Tensor) -> Tensor:
        """Return all keys or values, (bsz, kv_len, n_kv_heads, head_dim), with the full groups dequantised."""
        full_precision = getattr(self, f"{side}s")
        bsz, seqlen = new.shape[:2]
        quantized = self.quantized_len(max(starts))
        whole = new.new_empty((bsz, max(starts) + seqlen, *new.shape[2:]))
        if quantized:
            held = [getattr(self, f"{side}_{part}")[:bsz, : quantized // self.group] for part in _PARTS]
            if side == "key":
                groups = dequantize(held[0], held[1], held[2], bits=self.key_bits, group=self.group).mT
            else:
                groups = dequantize(held[0], held[1], held[2], bits=self.value_bits, group=self.group)
                groups = hadamard(groups) if self.rotates_values else groups
            groups.clamp_(-_largest(new.dtype), _largest(new.dtype))  # half a step may be more than what is left
            whole[:, :quantized] = groups.transpose(2, 3).flatten(1, 2)  # (bsz, quantized, n_kv_heads, head_dim)
        for row, start in enumerate(starts):
            whole[row, : min(self.sinks, start)] = full_precision[row, : min(self.sinks, start)]
            for positions, slots in self._slots(self.quantized_len(start), start):
                whole[row, positions] = full_precision[row, slots]
            whole[row, start : start + seqlen] = new[row]
        return whole

    def _keep(self, side: str, row: int, start: int, end: int, whole: Tensor) -> None:
        """Quantise the groups of a row that [start, end) pushed out of the window, and store what is in it."""
        first, last = self.quantized_len(start), self.quantized_len(end)
        if last > first:
            groups = torch.unflatten(whole[first:last], 0, (-1, self.group)).transpose(1, 2)
            if first == 0 and self.sinks:  # they are stored elsewhere, and would widen the ranges
                groups = groups.clone()
                groups[0, :, : self.sinks] = groups[0, :, self.sinks, None]
            if side == "key":
                held = quantize(groups.mT, bits=self.key_bits, parts=1, group=self.group)
            else:
                groups = hadamard(_wide(groups)) if self.rotates_values else groups
                held = quantize(
                    groups, bits=self.value_bits, parts=self.value_parts, group=self.group, share=self.value_share
                )
            for part, numbers in zip(_PARTS, held, strict=True):
                getattr(self, f"{side}_{part}")[row, first // self.group : last // self.group] = numbers
        full_precision = getattr(self, f"{side}s")
        for positions, slots in self._slots(max(self._oldest(end), start), end):
            full_precision[row, slots] = whole[positions]
        full_precision[row, start : min(self.sinks, end)] = whole[start : min(self.sinks, end)]

    def _slots(self, begin: int, end: int) -> Iterator[tuple[slice, slice]]:
        """Yield runs of the positions from `begin` to `end`, and their slots."""
        while begin < end:
            slot = begin % self.turn
            stop = min(end, begin - slot + self.turn)
            yield slice(begin, stop), slice(self.sinks + slot, self.sinks + slot + stop - begin)
            begin = stop


class Int8Cache(QuantizedCache, kind="int8"):
    """Keys and values in 8 bits."""

    native = 2
    key_bits = value_bits = 8
    window = 0


class Int4Cache(QuantizedCache, kind="int4"):
    """Keys and values in 4 bits, two to a byte.

    Keys are stored before RoPE: within a group RoPE rotates them by up to 31 positions, which widens the range of a
    channel. At 8 bits that costs nothing, at 4 bits it changes 0.5 to 2 % of the most likely tokens (docs/log.md).
    Source: Hooper et al., KVQuant, https://arxiv.org/abs/2401.18079.
    """

    native = 2
    key_bits = value_bits = 4
    window = 0
    unrotated = True


class LowBitCache(QuantizedCache):
    """A kind with parameters: NAME:kKvV+W is K bits of keys, V bits of values and a window of W; NAME:B is kBvB."""

    form = "kKvV+W"

    def configure(self, params: str) -> None:
        text = f"kv_cache={self.args.kv_cache!r}"
        example = f"such as {read_kind(self.args.kv_cache).name}:k4v3+64"
        form = r"(?:k(\d{1,9})v(\d{1,9})|(\d{1,9}))?(?:\+(\d{1,9}))?"
        found, default = re.fullmatch(form, params), re.fullmatch(form, self.default)
        if found is None:
            raise ValueError(f"{text}: the parameters are bits of keys, bits of values and a window, {example}")
        assert default is not None
        asked = found if found[3] or found[1] else default
        self.key_bits, self.value_bits = int(asked[3] or asked[1]), int(asked[3] or asked[2])
        for bits in (self.key_bits, self.value_bits):
            if not FEWEST_BITS <= bits <= MOST_BITS:
                raise ValueError(f"{text}: bits={bits} must be from {FEWEST_BITS} to {MOST_BITS}, {example}")
        together = 8 // (self.value_bits & -self.value_bits)  # codes in a byte of the narrowest plane
        if self.args.head_dim % together:
            raise ValueError(
                f"{text}: head_dim={self.args.head_dim} must be a multiple of {together} for values of "
                f"{self.value_bits} bits; choose 4 or 8 bits"
            )
        self.window = int(found[4] or min(int(default[4]), self.args.max_seq_len))
        if not 1 <= self.window <= self.args.max_seq_len:
            raise ValueError(
                f"{text}: a window of {self.window} positions must be from 1 to max_seq_len="
                f"{self.args.max_seq_len}, {example}"
            )


class RotatedCache(LowBitCache, kind="rotated"):
    """`rotated:kKvV+W`: keys before RoPE, in K bits per channel of 64 tokens, and rotated values, in V bits per token.

    The newest W positions and the first 4 stay in full precision. By default k4v4+64, which takes 4.5 bits a number. At
    3.5 bits, k4v2 is closer to the full cache than k3v3.
    Source of the rotation: Ashkboos et al., QuaRot, https://arxiv.org/abs/2404.00456; of keys before RoPE: Hooper et
    al., KVQuant, https://arxiv.org/abs/2401.18079.
    """

    native = 2
    unrotated = True
    rotates_values = True
    group = 64
    sinks = 4
    default = "k4v4+64"


class KiviCache(LowBitCache, kind="kivi"):
    """`kivi:kKvV+W`: keys in K bits per channel of 32 tokens, values in V bits per token, and a window of W.

    By default 2 bits and a window of 128, as in the paper. Keys are stored after RoPE.
    Source: Liu et al., KIVI, https://arxiv.org/abs/2402.02750.
    """

    native = 2
    default = "k2v2+128"


def quantize(
    x: Tensor, *, bits: int, parts: int, group: int = GROUP, share: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the packed codes, the scales and the zeros of x, (..., count, length).

    Codes are (..., count, length x bits / 8). Scales and zeros, `parts` for each row of x, are (..., parts, count):
    scales as `short_scales` returns them, and zeros in scales, so that both serve every range that a float32 has.
    With a `share` below 1, codes cover the middle share of the range, and scales are corrected by `_unbiased`.
    """
    wide, most = _wide(x).reshape(*x.shape[:-1], parts, -1), 2**bits - 1
    low, high = wide.amin(-1), wide.amax(-1)  # (..., count, parts)
    middle, half = high / 2 + low / 2, (high / 2 - low / 2) * share  # halves first: a sum could overflow
    size = torch.maximum(high, -low)
    # The zero is rounded by up to 2^-11 of it, and it is at most 2^15, in float16. The codes still reach both ends.
    scale = torch.maximum(half / (most / 2), half / (most / 2 + 1 / 4) + size / (most / 2 + 1 / 4) * 2**-11)
    scale = short_scales(torch.maximum(scale, size * 2**-15))
    step, zero = _steps(scale, middle, most)
    codes = (wide / step[..., None] - zero.to(wide.dtype)[..., None]).round().clamp(0, most)
    if share < 1:
        scale = _unbiased(wide - middle[..., None], codes - most / 2, scale)
        _, zero = _steps(scale, middle, most)
    return packed(codes.to(torch.uint8).flatten(-2), bits, group), scale.mT, zero.mT


def _steps(scale: Tensor, middle: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the numbers to divide by, and the zeros with which codes from 0 to `most` are around `middle`."""
    step = wide_scales(scale).to(middle.dtype)
    step = step.where(step != 0, 1)  # 0: all numbers are 0, or below 2^-119
    return step, (middle / step - most / 2).to(ZEROS)


def _unbiased(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Return the scales with which codes x scale, q, have q . x = x . x; `scale` if all x are 0. Both are around 0.

    Clipped numbers are too small on average. Attention adds the values of many tokens: there errors of both signs
    cancel out, and one of the mean does not. Source: Vargaftik et al., EDEN, https://arxiv.org/abs/2108.08842.
    """
    squares, products = (widest(x) * x).sum(-1), (widest(x) * codes).sum(-1)
    return torch.where(products > 0, short_scales(squares / products), scale)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, *, bits: int, group: int = GROUP) -> Tensor:
    """Return the numbers of the codes that `quantize` returned, (..., count, length), in float32."""
    numbers = unpacked(codes, bits, group).float()
    numbers = numbers.reshape(*numbers.shape[:-1], scale.shape[-2], -1)
    return ((numbers + zero.float().mT[..., None]) * wide_scales(scale).mT[..., None]).flatten(-2)


def short_scales(scales: Tensor) -> Tensor:
    """Return numbers from 0 on as they are stored, in int16: the bits 15 to 30 of their float32, rounded to nearest.

    These are all of its exponent, and 8 bits of the mantissa. A scale needs no sign, and 1 bit more than bfloat16 has.
    """
    return (scales.float().view(torch.int32) + (1 << 14) >> 15).to(SCALES)


def wide_scales(stored: Tensor) -> Tensor:
    """Return the numbers that `short_scales` stored, in float32."""
    return ((stored.int() & 0xFFFF) << 15).view(torch.float32)


def hadamard(x: Tensor) -> Tensor:
    """Return x, (..., length), times the orthonormal Hadamard matrix; twice gives x again.

    The matrix has the largest power of two that divides the length; a longer x is rotated block by block. Sums have a
    fixed order, which native code repeats.
    """
    size, step = x.shape[-1] & -x.shape[-1], 1
    x = x * size**-0.5  # first: a sum could overflow
    while step < size:
        first, second = torch.unflatten(x, -1, (-1, 2, step)).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return x


def packed(codes: Tensor, bits: int, group: int) -> Tensor:
    """Return codes as they are stored, (..., length x bits / 8): every run of codes in planes of 8, 4, 2 and 1 bits.

    The planes are those of the binary digits of `bits`, the widest first, which has the lowest bits of the codes. A
    plane of w bits takes run x w / 8 bytes. Byte i has the codes i, i + run x w / 8, ... from its lowest bits on.
    """
    if bits == 8:
        return codes
    runs = torch.unflatten(codes, -1, (-1, _run(codes.shape[-1], group)))
    planes = []
    for width, low in _planes(bits):
        parts = torch.unflatten(runs >> low & 2**width - 1, -1, (8 // width, -1)).unbind(-2)
        planes.append(reduce(torch.bitwise_or, (part << width * place for place, part in enumerate(parts))))
    return torch.cat(planes, dim=-1).flatten(-2)


def unpacked(stored: Tensor, bits: int, group: int) -> Tensor:
    """Return the codes that `packed` stored."""
    if bits == 8:
        return stored
    run = _run(stored.shape[-1] * 8 // bits, group)
    runs, parts = torch.unflatten(stored, -1, (-1, run * bits // 8)), list[Tensor]()
    sizes = [run * width // 8 for width, _ in _planes(bits)]
    for plane, (width, low) in zip(torch.split(runs, sizes, dim=-1), _planes(bits), strict=True):
        codes = [plane >> place & 2**width - 1 for place in range(0, 8, width)]
        parts.append(torch.cat(codes, dim=-1) << low)
    return reduce(torch.bitwise_or, parts).flatten(-2)


def _planes(bits: int) -> list[tuple[int, int]]:
    """Return the width of each plane of a code, and the number of bits below it."""
    return [(width, bits // (2 * width) * 2 * width) for width in (8, 4, 2, 1) if bits & width]


def _run(length: int, group: int) -> int:
    """Return the number of codes in a run."""
    return next((run for run in (group, GROUP) if length % run == 0), length)


def _largest(dtype: torch.dtype) -> float:
    """Return the largest number of the dtype that float32 has, too."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
