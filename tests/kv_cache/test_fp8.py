"""A cache in fp8 equals its definition in plain loops, and a token does not depend on what is cached beside it."""

import math

import pytest
import torch
from tiny import tiny_args
from writes import write

from llama.kv_cache import Fp8Cache, KVCache

ARGS = tiny_args(dim=16, n_heads=2, n_kv_heads=2, head_dim=8, kv_cache="fp8", max_seq_len=64)


def nearest(x: float) -> float:
    """Return the e4m3 number next to x: a mantissa of 3 bits, exponents from -6 on, up to 448."""
    step = 2.0 ** (max(math.floor(math.log2(abs(x) or 1e-9)), -6) - 3)
    return max(min(round(x / step) * step, 448.0), -448.0)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 500.0, 1e37])
def test_numbers_are_the_nearest_of_8_bits(size: float) -> None:
    keys = size * torch.randn(2, 5, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cache, values = KVCache.of(ARGS), keys.flip(1)
    for given, made in zip((keys, values), write(cache, 0, keys, values), strict=True):
        for numbers, rounded in zip(given.flatten(0, 2), made.flatten(0, 2), strict=True):
            mantissa, exponent = math.frexp(float(numbers.abs().max() / 448))
            scale = math.ldexp(math.floor(mantissa * 2**8), exponent - 8)
            expected = torch.tensor([nearest(x / scale) * scale for x in numbers.tolist()]).double()
            torch.testing.assert_close(rounded, expected, rtol=1e-6, atol=0)
            assert ((rounded - numbers).abs() <= numbers.abs() / 16 + scale * 2.0**-10).all()
    assert cache.nbytes == cache.position_bytes(8) * 2 * 5


def test_another_dtype_is_refused_until_the_cache_is_freed() -> None:
    cache, x = KVCache.of(ARGS), torch.ones(1, 1, 2, 8)
    assert isinstance(cache, Fp8Cache)
    write(cache, 0, x, x)
    with pytest.raises(ValueError, match=r"holds torch\.float32 on cpu, so it cannot take torch\.bfloat16"):
        write(cache, 1, x.bfloat16(), x.bfloat16())
    cache.free()
    write(cache, 0, x.bfloat16(), x.bfloat16())
