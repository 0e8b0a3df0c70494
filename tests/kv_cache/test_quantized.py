"""Quantised caches equal their definition in plain float64 loops, and the newest tokens are not rounded."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_args
from torch import Tensor
from writes import write

from llama.args import ModelArgs
from llama.kv_cache import KiviCache, KVCache, RotatedCache
from llama.kv_cache.quantized import (
    GROUP,
    dequantize,
    hadamard,
    packed,
    quantize,
    unpacked,
    wide_scales,
)
from llama.rope import RopeTable, rotate

HEADS, HEAD_DIM = 2, 64


class Shape(NamedTuple):
    key_bits: int
    value_bits: int
    group: int
    window: int
    sinks: int
    rotates: bool = False


KINDS = {
    "int8": Shape(8, 8, 32, 0, 0),
    "int4": Shape(4, 4, 32, 0, 0),
    "rotated:k4v3+20": Shape(4, 3, 64, 20, 4, rotates=True),
    "rotated:k7v6+64": Shape(7, 6, 64, 64, 4, rotates=True),
    "rotated:k4v2+20": Shape(4, 2, 64, 20, 4, rotates=True),
    "kivi:k2v5+40": Shape(2, 5, 32, 40, 0),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RANGES = [
    *((kind, torch.float32) for kind in (*KINDS, "fp8")),
    *(("int8", torch.bfloat16), ("fp8", torch.bfloat16), ("rotated:k4v2+20", torch.float16), ("fp8", torch.float16)),
]


def args(kind: str, max_seq_len: int = 256) -> ModelArgs:
    return tiny_args(dim=128, n_heads=2, n_kv_heads=HEADS, head_dim=HEAD_DIM, kv_cache=kind, max_seq_len=max_seq_len)


def numbers(*size: int, seed: int = 0) -> Tensor:
    """Return numbers of which some channels are large in every token, as in keys."""
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(*size, HEADS, HEAD_DIM, generator=stream, dtype=torch.float64)
    x[..., 3] += 8
    x[..., 10] *= 6
    return x


def short(scale: float) -> float:
    """Round to 9 bits of mantissa, the first of which is not stored."""
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(math.floor(mantissa * 2**9 + 0.5), exponent - 9)


def by_loops(x: Sequence[float], bits: int, share: float = 1.0) -> list[float]:
    """Round numbers that share a scale and a zero; the zero is a number of scales in float16."""
    middle, half, last = (min(x) + max(x)) / 2, (max(x) - min(x)) / 2 * share, 2**bits - 1
    size = max(map(abs, x))
    scale = short(max(2 * half / last, (half + size / 2048) / (last / 2 + 1 / 4), size / 32768))
    zero = torch.tensor(middle / scale - last / 2).half().item()
    codes = [min(max(round(value / scale - zero), 0), last) for value in x]
    if share < 1:
        products = sum((value - middle) * (code - last / 2) for value, code in zip(x, codes, strict=True))
        scale = short(sum((value - middle) ** 2 for value in x) / products)
        zero = torch.tensor(middle / scale - last / 2).half().item()
    return [(code + zero) * scale for code in codes]


def matrix(size: int) -> Tensor:
    """Return the orthonormal Hadamard matrix: the sign of an entry is the parity of the bits that its places share."""
    signs = [[(-1) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    return torch.tensor(signs, dtype=torch.float64) / math.sqrt(size)


def rounded(keys: Tensor, values: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return what a step after a row, (length, heads, head_dim), reads: old full groups are rounded, but no sinks."""
    shape, given = KINDS[kind], (keys, values)
    keys, values = keys.clone(), values.clone()
    turn = matrix(HEAD_DIM) if shape.rotates else torch.eye(HEAD_DIM, dtype=torch.float64)
    part = HEAD_DIM if shape.rotates else GROUP
    groups = max(len(keys) - shape.window, 0) // shape.group
    for group in range(groups):
        own = slice(max(group * shape.group, shape.sinks), (group + 1) * shape.group)
        for head in range(HEADS):
            for channel in range(HEAD_DIM):
                numbers = by_loops(keys[own, head, channel].tolist(), shape.key_bits)
                keys[own, head, channel] = torch.tensor(numbers).double()
    for token in range(groups * shape.group):
        for head in range(HEADS):
            numbers = (turn @ values[token, head]).tolist()
            share = 0.75 if shape.rotates and shape.value_bits == 2 else 1.0
            parts = [by_loops(numbers[i : i + part], shape.value_bits, share) for i in range(0, HEAD_DIM, part)]
            values[token, head] = turn @ torch.tensor(parts).double().flatten()
    for side, exact in zip((keys, values), given, strict=True):
        side[: shape.sinks] = exact[: shape.sinks]
    return keys, values


def angles(keys: Tensor, kind: str) -> Tensor:
    """Rotate keys by their positions if the kind is unrotated."""
    if not KVCache.named(kind).unrotated:
        return keys
    cos, sin = RopeTable.of(args(kind)).up_to(keys.shape[0], torch.device("cpu"))
    return rotate(keys[None], (cos[: len(keys)], sin[: len(keys)]))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_full_groups_are_the_loops_and_the_newest_tokens_are_as_they_came(kind: str) -> None:
    shape = KINDS[kind]
    length = 2 * shape.group + shape.window + 5
    xk, xv = numbers(length), numbers(length, seed=1)
    cache = KVCache.of(args(kind))
    keys, values = write(cache, 0, xk[None], xv[None])
    assert torch.equal(values[0], xv)  # a prompt is attended to in full precision
    torch.testing.assert_close(keys[0], angles(xk, kind))
    new = numbers(1, seed=2)
    keys, values = write(cache, length, new[None], new[None])
    held_keys, held_values = rounded(xk, xv, kind)
    held_keys, held_values = torch.cat((held_keys, new)), torch.cat((held_values, new))
    # A number half-way between two codes may be rounded either way in float32.
    apart = ((keys[0] - angles(held_keys, kind)).abs() > 1e-3).double().mean()
    assert apart < 1e-3
    assert ((values[0] - held_values).abs() > 1e-3).double().mean() < 1e-3
    for exact in (slice(0, shape.sinks), slice(2 * shape.group, length)):
        assert torch.equal(values[0, exact], xv[exact])
    assert not torch.equal(keys[0, : 2 * shape.group], angles(xk, kind)[: 2 * shape.group])


@pytest.mark.parametrize("kind", ["int8", "rotated:k4v2+20", "kivi:k2v5+40"])
def test_a_step_reads_the_window_as_it_came_at_every_position(kind: str) -> None:
    """The rows have different lengths, so their groups are quantised at different steps."""
    shape, steps = KINDS[kind], 2 * KINDS[kind].group + 1
    given, starts = numbers(2, steps + 120), [110, 3]
    cache = KVCache.of(args(kind))
    write(cache, 0, given[:, :110], given[:, :110], lengths=starts)
    for step in range(steps):
        ends = [start + step for start in starts]
        new = given[[0, 1], ends][:, None]
        _, values = write(cache, ends, new, new)
        for row, end in enumerate(ends):
            first = max(end - shape.window, 0) // shape.group * shape.group
            assert torch.equal(values[row, first : end + 1], given[row, first : end + 1])
            assert torch.equal(values[row, : min(shape.sinks, end)], given[row, : min(shape.sinks, end)])
            assert (values[row, shape.sinks : first] != given[row, shape.sinks : first]).any(-1).all()


@settings(max_examples=60)
@given(
    bits=st.integers(2, 8),
    dtype=st.sampled_from([torch.float64, *DTYPES]),
    power=st.integers(-99, 127),
    far=st.integers(-20, 20),
    seed=st.integers(0, 99),
)
def test_a_number_comes_back_within_half_a_step_at_every_range(
    bits: int, dtype: torch.dtype, power: int, far: int, seed: int
) -> None:
    """Of ranges of the size 2^power, 2^far from 0; the range grows by 2^-10 of the largest number at most."""
    largest = torch.finfo(dtype).max if dtype != torch.float64 else torch.finfo(torch.float32).max
    if dtype == torch.float16:
        power = power // 9
    x = torch.randn(1, 8, HEAD_DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = ((x + (2.0**far if far else 0)) * 2.0**power).clamp(-largest, largest).to(dtype)
    for parts in (1, 2):
        codes, scale, zero = quantize(x, bits=bits, parts=parts)
        assert codes.shape[-1] == HEAD_DIM * bits // 8
        back = dequantize(codes, scale, zero, bits=bits).clamp(-largest, largest).double()
        given = x.double()
        step = wide_scales(scale).double().mT
        groups = given.unflatten(-1, (parts, -1))
        reach, size = groups.amax(-1) - groups.amin(-1), groups.abs().amax(-1)
        assert (step <= 1.003 * ((reach + size / 1024) / (2**bits - 1) + size / 2**15)).all()
        rounding = given.abs() * 2**-23  # of float32
        assert ((back - given).abs() <= step.repeat_interleave(HEAD_DIM // parts, -1) * 0.504 + rounding).all()


def test_clipped_numbers_are_as_large_as_given_on_average() -> None:
    """Less error than over the whole range, and the product with the numbers given is that of these with themselves."""
    x = torch.randn(300, HEAD_DIM, generator=torch.Generator().manual_seed(5))
    middle = (x.amin(-1, keepdim=True) + x.amax(-1, keepdim=True)) / 2
    errors, ratios = [], []
    for share in (1.0, 0.75):
        back = dequantize(*quantize(x, bits=2, parts=1, share=share), bits=2)
        errors.append(float((back - x).square().mean()))
        ratios.append(((back - middle) * (x - middle)).sum(-1) / (x - middle).square().sum(-1))
    assert (ratios[1] - 1).abs().max() < 2e-3 < (ratios[0] - 1).abs().mean()
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("bits", range(2, 9))
def test_a_constant_comes_back_as_it_was(bits: int) -> None:
    x = torch.tensor([0.0, -3.5, 1e-7, 6e4, -1e-30, 3e38])[:, None, None].repeat(1, GROUP, HEAD_DIM)
    for parts in (1, 2):
        share = 1 / parts
        back = dequantize(*quantize(x, bits=bits, parts=parts, share=share), bits=bits)
        torch.testing.assert_close(back, x, rtol=1e-3, atol=0)
        assert torch.equal(back[0], x[0]), "zeros"


def test_what_is_not_finite_stays_so() -> None:
    for bad in (math.inf, -math.inf, math.nan):
        x = torch.randn(1, GROUP)
        x[0, 3] = bad
        for share in (1.0, 0.75):
            assert not dequantize(*quantize(x, bits=4, parts=1, share=share), bits=4)[0, 3].isfinite()


@pytest.mark.parametrize(
    ("bits", "group", "length"),
    [*((bits, 32, 64) for bits in range(2, 9)), (3, 32, 16), (5, 64, 96), (6, 64, 128), (7, 64, 32)],
)
def test_a_code_is_in_planes_of_its_bits(bits: int, group: int, length: int) -> None:
    codes = torch.randint(2**bits, (3, length), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    stored = packed(codes, bits, group)
    assert stored.shape == (3, length * bits // 8)
    assert torch.equal(unpacked(stored, bits, group), codes)
    run = next((size for size in (group, 32) if length % size == 0), length)
    for row in range(len(codes)):
        found, place = [0] * length, 0
        for first in range(0, length, run):
            low = 0
            for width in (8, 4, 2, 1):
                if not bits & width:
                    continue
                plane = stored[row, place : place + run * width // 8].tolist()
                for number in range(run):
                    at, byte = divmod(number, len(plane))
                    found[first + number] |= (plane[byte] >> at * width & 2**width - 1) << low
                place, low = place + len(plane), low + width
        assert found == codes[row].tolist()


@pytest.mark.parametrize(("length", "block"), [(64, 64), (96, 32), (12, 4), (7, 1)])
def test_the_rotation_is_the_hadamard_matrix_in_blocks(length: int, block: int) -> None:
    x = numbers(1).repeat(1, 1, 2)[..., :length]
    expected = torch.cat([part @ matrix(block) for part in x.split(block, dim=-1)], dim=-1)
    torch.testing.assert_close(hadamard(x), expected)
    torch.testing.assert_close(hadamard(hadamard(x)), x)


def test_a_start_within_a_quantised_group_is_refused_and_its_beginning_is_not() -> None:
    cache = KVCache.of(args("int8"))
    xk = numbers(1, 3 * GROUP)
    write(cache, 0, xk, xk)
    with pytest.raises(ValueError, match=f"continue from {GROUP}"):
        write(cache, GROUP + 1, xk[:, :1], xk[:, :1])
    with pytest.raises(ValueError, match="would leave a gap"):
        write(cache, 3 * GROUP + 1, xk[:, :1], xk[:, :1])
    assert not cache.truncate(GROUP + 1)
    for position in (3 * GROUP - 1, 2 * GROUP, GROUP, 0):
        assert cache.truncate(position)
        write(cache, position, xk[:, :1], xk[:, :1])


def test_a_state_has_only_what_a_text_has_written() -> None:
    for length, groups, slots in ((19, 0, 23), (83, 0, 87), (84, 1, 88), (150, 2, 70), (200, 2, 88)):
        cache, x = KVCache.of(args("rotated:4+20")), numbers(1, length)
        cache.reserve(1, 256)
        write(cache, 0, x, x)
        sizes = {name: tensor.shape[1] for name, tensor in cache.state(1, length).items() if name != "ends"}
        assert sizes.pop("keys") == sizes.pop("values") == slots
        assert set(sizes.values()) == {groups}


def test_memory_is_for_whole_groups_and_the_window() -> None:
    cache, x = KVCache.of(args("rotated:4+20")), numbers(1, 90)
    assert cache.slots is None
    write(cache, 0, x, x)
    assert cache.slots == 2 * 64 + 20
    write(cache, 0, x.repeat(2, 1, 1, 1), x.repeat(2, 1, 1, 1))
    assert cache.slots == 2 * 64 + 20, "more rows need no more groups"
    write(cache, 90, x, x)
    assert cache.slots == 4 * 64 + 20, "memory doubles, up to max_seq_len"


def test_with_a_window_a_text_continues_from_its_newest_group_or_its_beginning() -> None:
    cache, xk = KVCache.of(args("rotated:4+20")), numbers(1, 200)
    write(cache, 0, xk[:, :200], xk[:, :200])
    assert [position for position in range(201) if cache.truncate(position)] == [0, *range(148, 201)]
    with pytest.raises(ValueError, match=r"start_pos=147 needs positions .* because 200 were fed; continue from 0"):
        write(cache, 147, xk[:, :1], xk[:, :1])
    again = KVCache.of(args("rotated:4+20"))
    write(again, 0, xk[:, :149], xk[:, :149])
    assert [position for position in range(150) if again.truncate(position)] == [0, 148, 149]
    write(again, 0, xk[:, :150], xk[:, :150])
    for ours, theirs in zip(*(write(one, 150, xk[:, 7:9], xk[:, 7:9]) for one in (cache, again)), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("kind", "kept"),
    {"rotated": (4, 4, 64), "rotated:3+128": (3, 3, 128), "rotated:k8v2+1": (8, 2, 1), "kivi": (2, 2, 128)}.items(),
)
def test_the_bits_and_the_window_are_those_of_the_name(kind: str, kept: tuple[int, int, int]) -> None:
    cache = KVCache.of(args(kind))
    assert isinstance(cache, RotatedCache | KiviCache)
    assert (cache.key_bits, cache.value_bits, cache.window) == kept
    write(cache, 0, numbers(1, 256), numbers(1, 256))
    bits = kept[0] + kept[1] + (2 if kind.startswith("rotated") else 4) * 16 / 64 * 2
    groups = (256 - kept[2] + cache.group - 1) // cache.group
    in_full = 2 * (cache.sinks + cache.window + cache.group) * 64
    assert cache.nbytes == HEADS * 64 * groups * cache.group * bits / 8 + HEADS * in_full * 8


def test_parameters_out_of_range_are_refused() -> None:
    for kind, says in {
        "rotated:k4": "the parameters are bits of keys, bits of values and a window, such as rotated:k4v3+64",
        "rotated:4-64": "the parameters are bits",
        "rotated:1": "bits=1 must be from 2 to 8, such as rotated:k4v3+64",
        "rotated:k4v9": "bits=9 must be from 2 to 8",
        "kivi:2+0": "a window of 0 positions must be from 1 to max_seq_len=256, such as kivi:k4v3+64",
        "rotated:4+257": "a window of 257 positions must be from 1 to max_seq_len=256",
    }.items():
        with pytest.raises(ValueError, match=f"kv_cache='{re.escape(kind)}': .*{re.escape(says)}"):
            KVCache.of(args(kind))
    few = tiny_args(dim=12, n_heads=3, n_kv_heads=3, head_dim=4, kv_cache="rotated:k3v5")
    with pytest.raises(ValueError, match="head_dim=4 must be a multiple of 8 for values of 5 bits; choose 4 or 8 bits"):
        KVCache.of(few)


# ---- every range of the dtype ----------------------------------------------------------------------------------------


def read_behind(kind: str, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a step behind a row, (length, heads, head_dim), reads of it."""
    cache, new = KVCache.of(args(kind)), torch.zeros(1, 1, HEADS, HEAD_DIM, dtype=xk.dtype)
    write(cache, 0, xk[None], xv[None])
    keys, values = write(cache, len(xk), new, new)
    return keys[0, : len(xk)], values[0, : len(xk)]


@pytest.mark.parametrize(("kind", "dtype"), RANGES, ids=str)
def test_numbers_of_every_size_have_the_same_error(kind: str, dtype: torch.dtype) -> None:
    """A power of two is exact, so it changes no code. Float16 rounds numbers below 2^-14 to steps of 2^-24."""
    drawn = (numbers(140, seed=seed).to(dtype) for seed in (0, 1))
    xk, xv = (x.abs().clamp(2**-6).copysign(x) for x in drawn)
    wanted = read_behind(kind, xk, xv)
    for power in (-3, 9) if dtype == torch.float16 else (-100, -9, 30, 120):
        found = read_behind(kind, xk * 2.0**power, xv * 2.0**power)
        for ours, theirs in zip(found, wanted, strict=True):
            step = 2.0 ** (-24 - power) if dtype == torch.float16 else 0
            torch.testing.assert_close(ours * 2.0**-power, theirs, rtol=0, atol=step)


@pytest.mark.parametrize(("kind", "dtype"), RANGES, ids=str)
def test_a_number_as_large_as_the_dtype_has_is_read_within_a_step_and_changes_no_other_head(
    kind: str, dtype: torch.dtype
) -> None:
    """One number of a token, beside others of ordinary size. RoPE adds keys in pairs, so theirs is half of it."""
    most, steps = torch.finfo(dtype).max, 8 if kind == "fp8" else 2 ** KINDS[kind].value_bits - 1
    for large in {min(7e4, most), -min(7e4, most), most, -most}:
        xk, xv = (numbers(140, seed=seed).to(dtype) for seed in (0, 1))
        ordinary = read_behind(kind, xk, xv)
        xk[5, 1, 7], xv[5, 1, 7] = large / 2, large
        keys, values = read_behind(kind, xk, xv)
        assert keys.isfinite().all()
        assert values.isfinite().all()
        assert torch.equal(keys[:, 0], ordinary[0][:, 0])
        assert torch.equal(values[:, 0], ordinary[1][:, 0])
        assert torch.equal(values[6:], ordinary[1][6:]), "other tokens"
        assert (values[5, 1].double() - xv[5, 1].double()).abs().max() <= abs(large) / steps


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_state_with_scales_in_float16_as_earlier_files_have_is_refused_by_name(kind: str) -> None:
    cache, x = KVCache.of(args(kind)), numbers(1, 140).float()
    write(cache, 0, x, x)
    state = cache.state(1, 140)
    cache.restore({name: tensor.clone() for name, tensor in state.items()}, 1, 140)
    with pytest.raises(ValueError, match=r"key_scale of a cache should be .* but is .*torch\.float16"):
        cache.restore(state | {"key_scale": torch.ones_like(state["key_scale"], dtype=torch.float16)}, 1, 140)
