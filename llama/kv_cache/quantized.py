"""Quantised caches: keys and values in 8 or 4 bits, and the newest of them in full precision.

Source: Liu et al., KIVI, https://arxiv.org/abs/2402.02750. Some channels of keys are large in every token, so keys are
quantised per channel, over a group of tokens. Values have no such channels and are quantised per token.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.kv_cache.contract import doubled
from llama.kv_cache.counting import CountingCache
from llama.rope import RopeTable
from llama.rows import Rows

# GROUP tokens share a scale per channel of the keys; GROUP numbers of a token's values share one (docs/log.md).
GROUP = 32
SCALES = torch.float16  # the dtype of scales and zeros
_SIDES = ("key", "value")


class QuantizedCache(CountingCache):
    """Groups of GROUP positions in `bits` bits, and the newest group of every row in full precision.

    A call reads its own keys and values in full precision, for example all of a prompt; a group is quantised when it is
    full. The number x is stored as code = round((x - zero) / scale). By row, group and KV head:

        key_codes                   (rows, groups, n_kv_heads, head_dim, GROUP x bits / 8) uint8, see `_packed`
        key_scale, key_zero         (rows, groups, n_kv_heads, 1, head_dim): of each channel
        value_codes                 (rows, groups, n_kv_heads, GROUP, head_dim x bits / 8) uint8
        value_scale, value_zero     (rows, groups, n_kv_heads, parts, GROUP): of each token, see `value_parts`
        keys, values                (rows, GROUP, n_kv_heads, head_dim): the newest; position p has the slot p % GROUP

    A step multiplies each channel of a group's keys by one number of the query, and each token of its values by one
    weight. The numbers with a common factor are adjacent in memory.
    """

    lossless = False
    preallocates = True
    bits: ClassVar[int]
    key_codes: Tensor | None

    def __init__(self, args: ModelArgs, layer: int = 0, rope: RopeTable | None = None) -> None:
        super().__init__(args, layer, rope)
        for side in _SIDES:
            for part in ("codes", "scale", "zero"):
                setattr(self, f"{side}_{part}", None)

    def position_bytes(self, itemsize: int) -> int:
        """Return the bytes of a position in a full group, with its part of the scales."""
        return self._group_bytes() // GROUP

    def predicted_bytes(
        self, *, prompts: Sequence[int], ends: Sequence[int], reserved: tuple[int, int], itemsize: int
    ) -> int:
        newest = 2 * GROUP * self.args.n_kv_heads * self.args.head_dim * itemsize
        first, last, most = (
            -(-length // GROUP) for length in (max(*prompts, reserved[1]), max(ends), self.args.max_seq_len)
        )
        return max(len(prompts), reserved[0]) * (doubled(first, last, most) * self._group_bytes() + newest)

    def _group_bytes(self) -> int:
        args = self.args
        codes = 2 * GROUP * args.n_kv_heads * args.head_dim * self.bits // 8
        scales = args.n_kv_heads * (args.head_dim + GROUP * value_parts(args.head_dim))
        return codes + 2 * SCALES.itemsize * scales

    @property
    def slots(self) -> int | None:
        codes = self.key_codes
        return None if codes is None else codes.shape[1] * GROUP

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        self.check(rows, xk, xv)
        starts, bsz = rows.starts, len(rows.starts)
        self._refuse_what_is_gone(starts)
        self.args.check_room(bsz, rows.end)
        self._take(bsz, -(-rows.end // GROUP), like=xk)
        keys, values = self._whole("key", starts, xk), self._whole("value", starts, xv)
        for row, (start, count) in enumerate(zip(starts, rows.lengths, strict=True)):
            self._keep("key", row, start, start + count, keys[row])
            self._keep("value", row, start, start + count, values[row])
        self._note_ends(starts, rows.lengths)
        if self.unrotated:
            keys = self.rotated(keys, torch.arange(keys.shape[1], device=keys.device), keys.shape[1] - 1)
        return keys, values

    def written(self, name: str, length: int) -> int:
        """Return the number of full groups, or the length of the newest one for `keys` and `values`."""
        return length - _newest(length) if name in ("keys", "values") else length // GROUP

    def restore(self, state: Mapping[str, Tensor], rows: int, length: int) -> None:
        super().restore(state, rows, length)
        keys = state["keys"]
        self._enlarge(self.sizes(rows, -(-max(self._ends) // GROUP), keys), keys.device)

    def _refusal(self, row: int, start: int, end: int) -> str | None:
        if start % GROUP == 0 or start >= _newest(end):
            return None
        return (
            f"start_pos={start} lies within a group of {GROUP} positions that is quantised, because {end} were fed; "
            f"continue from {start // GROUP * GROUP}"
        )

    def _take(self, rows: int, groups: int, like: Tensor) -> None:
        """Allocate at least `groups` groups of `rows` rows; grow by doubling, up to the model's limit."""
        codes = self.key_codes
        held_rows, held = (0, 0) if codes is None else codes.shape[:2]
        if held_rows >= rows and held >= groups:
            return
        if held and groups > held:
            groups = max(groups, min(2 * held, -(-self.args.max_seq_len // GROUP)))
        rows, groups = max(rows, held_rows, self.reserved[0]), max(groups, held, -(-self.reserved[1] // GROUP))
        self._enlarge(self.sizes(rows, groups, like), like.device)

    def sizes(self, rows: int, groups: int, like: Tensor) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        """Return every buffer's shape and dtype by name, for keys like `like`, (..., n_kv_heads, head_dim)."""
        heads, width = like.shape[2:]
        sizes: dict[str, tuple[Sequence[int], torch.dtype]] = {}
        for side, count, length, parts in (("key", width, GROUP, 1), ("value", GROUP, width, value_parts(width))):
            sizes[f"{side}_codes"] = ((rows, groups, heads, count, length * self.bits // 8), torch.uint8)
            sizes |= {f"{side}_{part}": ((rows, groups, heads, parts, count), SCALES) for part in ("scale", "zero")}
            sizes[f"{side}s"] = ((rows, GROUP, heads, width), like.dtype)
        return sizes

    def _whole(self, side: str, starts: Sequence[int], new: Tensor) -> Tensor:
        """Return all keys or values, (bsz, kv_len, n_kv_heads, head_dim), with the full groups dequantised."""
        codes, scale, zero = (getattr(self, f"{side}_{part}") for part in ("codes", "scale", "zero"))
        newest = getattr(self, f"{side}s")
        bsz, seqlen = new.shape[:2]
        full = max(starts) // GROUP
        whole = new.new_empty((bsz, max(starts) + seqlen, *new.shape[2:]))
        if full:
            held = [part[:bsz, :full] for part in (codes, scale, zero)]
            groups = dequantize(held[0], held[1], held[2], bits=self.bits)
            if side == "key":
                groups = groups.mT  # (bsz, full, n_kv_heads, GROUP, head_dim)
            whole[:, : full * GROUP] = groups.transpose(2, 3).flatten(1, 2)
        for row, start in enumerate(starts):
            begin = start // GROUP * GROUP
            whole[row, begin:start] = newest[row, : start - begin]
            whole[row, start : start + seqlen] = new[row]
        return whole

    def _keep(self, side: str, row: int, start: int, end: int, whole: Tensor) -> None:
        """Quantise the groups of a row that [start, end) filled, and store the newest one in full precision."""
        first, full = start // GROUP, end // GROUP
        if full > first:
            groups = whole[first * GROUP : full * GROUP].view(-1, GROUP, *whole.shape[1:]).transpose(1, 2)
            if side == "key":
                held = quantize(groups.mT, bits=self.bits, parts=1)
            else:
                held = quantize(groups, bits=self.bits, parts=value_parts(groups.shape[-1]))
            for part, numbers in zip(("codes", "scale", "zero"), held, strict=True):
                getattr(self, f"{side}_{part}")[row, first:full] = numbers
        begin = _newest(end)  # even if it is full: its tokens may be fed again
        if end > start:
            getattr(self, f"{side}s")[row, : end - begin] = whole[begin:end]


class Int8Cache(QuantizedCache, kind="int8"):
    """Keys and values in 8 bits."""

    bits = 8


class Int4Cache(QuantizedCache, kind="int4"):
    """Keys and values in 4 bits, two to a byte.

    Keys are stored before RoPE: within a group RoPE rotates them by up to 31 positions, which widens the range of a
    channel. At 8 bits that costs nothing, at 4 bits it changes 0.5 to 2 % of the most likely tokens (docs/log.md).
    Source: Hooper et al., KVQuant, https://arxiv.org/abs/2401.18079.
    """

    bits = 4
    unrotated = True


def value_parts(head_dim: int) -> int:
    """Return the number of scales for one token's values of one head."""
    return head_dim // GROUP if head_dim % GROUP == 0 else 1


def quantize(x: Tensor, *, bits: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the packed codes, the scales and the zeros of x, (..., count, length).

    Codes are (..., count, length x bits / 8). Scales and zeros, `parts` for each row of x, are (..., parts, count).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(*x.shape[:-1], parts, -1)
    low, high = wide.amin(-1), wide.amax(-1)  # (..., count, parts)
    zero = low.to(SCALES)
    scale = ((high - low) / (2**bits - 1)).to(SCALES)
    divisor = scale.to(wide.dtype).clamp(min=torch.finfo(SCALES).tiny)
    steps = (wide - zero.to(wide.dtype)[..., None]) / divisor[..., None]
    codes = steps.round().clamp(0, 2**bits - 1).to(torch.uint8).flatten(-2)
    return _packed(codes, bits), scale.mT, zero.mT


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor, *, bits: int) -> Tensor:
    """Return the numbers of the codes that `quantize` returned, (..., count, length), in float32."""
    numbers = _unpacked(codes, bits).float()
    numbers = numbers.reshape(*numbers.shape[:-1], scale.shape[-2], -1)
    return (numbers * scale.float().mT[..., None] + zero.float().mT[..., None]).flatten(-2)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Return codes as they are stored: a byte has two 4-bit codes, one of each half of a run."""
    if bits == 8:
        return codes
    first, last = codes.reshape(*codes.shape[:-1], -1, 2, _run(codes.shape[-1]) // 2).unbind(-2)
    return (first | last << 4).flatten(-2)


def _unpacked(codes: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes
    halves = codes.reshape(*codes.shape[:-1], -1, _run(2 * codes.shape[-1]) // 2)
    return torch.cat((halves & 15, halves >> 4), dim=-1).flatten(-2)


def _run(length: int) -> int:
    """Return the number of codes in a run."""
    return GROUP if length % GROUP == 0 else length


def _newest(end: int) -> int:
    """Return the first position of the newest group of a row with this end."""
    return max(end - 1, 0) // GROUP * GROUP
