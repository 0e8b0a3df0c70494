"""Quantised caches equal their definition in plain float64 loops, and the newest tokens are not rounded."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import tiny_args
from torch import Tensor
from writes import write

from llama.args import ModelArgs
from llama.kv_cache import KVCache
from llama.kv_cache.quantized import GROUP, dequantize, quantize
from llama.rope import RopeTable, rotate

HEADS, HEAD_DIM = 2, 64
KINDS = {"int8": 8, "int4": 4}


def args(kind: str) -> ModelArgs:
    return tiny_args(dim=128, n_heads=2, n_kv_heads=HEADS, head_dim=HEAD_DIM, kv_cache=kind, max_seq_len=256)


def numbers(*size: int, seed: int = 0) -> Tensor:
    """Return numbers of which some channels are large in every token, as in keys."""
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(*size, HEADS, HEAD_DIM, generator=stream, dtype=torch.float64)
    x[..., 3] += 8
    x[..., 10] *= 6
    return x


def by_loops(x: Sequence[float], bits: int) -> list[float]:
    """Round numbers that share a scale and a zero in float16."""
    zero = torch.tensor(min(x)).half().item()
    scale = torch.tensor((max(x) - min(x)) / (2**bits - 1)).half().item()
    codes = [min(max(round((value - zero) / scale), 0), 2**bits - 1) for value in x]
    return [code * scale + zero for code in codes]


def rounded(keys: Tensor, values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return a row's full groups, (length, heads, head_dim), as the cache rounds them."""
    keys, values = keys.clone(), values.clone()
    for group in range(len(keys) // GROUP):
        own = slice(group * GROUP, (group + 1) * GROUP)
        for head in range(HEADS):
            for channel in range(HEAD_DIM):
                keys[own, head, channel] = torch.tensor(by_loops(keys[own, head, channel].tolist(), bits)).double()
    for token in range(len(values) // GROUP * GROUP):
        for head in range(HEADS):
            for first in range(0, HEAD_DIM, GROUP):
                part = slice(first, first + GROUP)
                values[token, head, part] = torch.tensor(by_loops(values[token, head, part].tolist(), bits)).double()
    return keys, values


def angles(keys: Tensor, kind: str) -> Tensor:
    """Rotate keys by their positions if the kind is unrotated."""
    if not KVCache.named(kind).unrotated:
        return keys
    cos, sin = RopeTable.of(args(kind)).up_to(keys.shape[0], torch.device("cpu"))
    return rotate(keys[None], (cos[: len(keys)], sin[: len(keys)]))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_full_groups_are_the_loops_and_the_newest_tokens_are_as_they_came(kind: str) -> None:
    length = 2 * GROUP + 5
    xk, xv = numbers(length), numbers(length, seed=1)
    cache = KVCache.of(args(kind))
    keys, values = write(cache, 0, xk[None], xv[None])
    assert torch.equal(values[0], xv)  # a prompt is attended to in full precision
    torch.testing.assert_close(keys[0], angles(xk, kind))
    new = numbers(1, seed=2)
    keys, values = write(cache, length, new[None], new[None])
    held_keys, held_values = rounded(xk, xv, KINDS[kind])
    held_keys, held_values = torch.cat((held_keys, new)), torch.cat((held_values, new))
    # A number half-way between two codes may be rounded either way in float32.
    apart = ((keys[0] - angles(held_keys, kind)).abs() > 1e-3).double().mean()
    assert apart < 1e-3
    assert ((values[0] - held_values).abs() > 1e-3).double().mean() < 1e-3
    assert torch.equal(values[0, 2 * GROUP : length], xv[2 * GROUP :])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(cuts=st.lists(st.integers(1, 99), max_size=8), seed=st.integers(0, 99))
def test_what_is_held_does_not_depend_on_how_a_text_was_cut_once_its_groups_are_full(
    kind: str, cuts: list[int], seed: int
) -> None:
    """For given keys and values; in a model they depend on what a chunk attends to."""
    xk, xv = numbers(100, seed=seed), numbers(100, seed=seed + 1)
    new = numbers(1, seed=3)[None]
    whole, cut = KVCache.of(args(kind)), KVCache.of(args(kind))
    write(whole, 0, xk[None], xv[None])
    edges = sorted({0, 100, *cuts})
    for a, b in pairwise(edges):
        write(cut, a, xk[None, a:b], xv[None, a:b])
    for ours, theirs in zip(write(cut, 100, new, new), write(whole, 100, new, new), strict=True):
        # A group that was filled in two calls was rounded from the same numbers.
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(st.lists(st.integers(1, 100), min_size=2, max_size=4))
def test_padding_is_never_held(kind: str, lengths: list[int]) -> None:
    """Ragged rows, padded with numbers that would widen every group's range; then each row alone."""
    longest = max(lengths)
    rows = [(numbers(length, seed=length), numbers(length, seed=length + 1)) for length in lengths]
    xk, xv = (torch.full((len(rows), longest, HEADS, HEAD_DIM), 1e4, dtype=torch.float64) for _ in range(2))
    for row, (keys, values) in enumerate(rows):
        xk[row, : len(keys)], xv[row, : len(values)] = keys, values
    cache = KVCache.of(args(kind))
    write(cache, 0, xk, xv, lengths=lengths)
    new = numbers(len(rows), 1, seed=7)
    together = write(cache, lengths, new, new)
    for row, ((keys, values), length) in enumerate(zip(rows, lengths, strict=True)):
        alone = KVCache.of(args(kind))
        write(alone, 0, keys[None], values[None])
        for ours, theirs in zip(together, write(alone, length, new[row : row + 1], new[row : row + 1]), strict=True):
            assert torch.equal(ours[row, : length + 1], theirs[0])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("parts", [1, 2])
def test_a_number_comes_back_within_half_a_step(bits: int, parts: int) -> None:
    x = numbers(3, GROUP).transpose(1, 2)
    codes, scale, zero = quantize(x, bits=bits, parts=parts)
    assert codes.shape[-1] == HEAD_DIM * bits // 8
    back = dequantize(codes, scale, zero, bits=bits).double()
    step = scale.double().mT.repeat_interleave(HEAD_DIM // parts, -1)
    # Scale and zero are rounded to float16, so the largest code may be below the range.
    slack = (2**bits * step + x.abs()) * 2**-10
    assert ((back - x).abs() <= step / 2 + slack).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, -3.5, 1e-7, 6e4])
def test_a_constant_comes_back_as_it_was(bits: int, value: float) -> None:
    x = torch.full((GROUP, HEAD_DIM), value)
    for parts in (1, 2):
        back = dequantize(*quantize(x, bits=bits, parts=parts), bits=bits)
        torch.testing.assert_close(back, x, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_within_a_quantised_group_is_refused_and_its_beginning_is_not(kind: str) -> None:
    cache = KVCache.of(args(kind))
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
