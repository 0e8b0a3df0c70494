"""The cache changes how much is computed, never the result; and every test here also checks that it was really used.

`watched` records the tokens that each forward was fed and the bytes of the caches after it: without that, these tests
would pass with the cache off.
"""

from dataclasses import replace

import pytest
import tiny  # registers the caches full of nan
import torch
from tiny import (
    FP64_TOLERANCE,
    cache_nbytes,
    fp32_tolerance,
    kv_nbytes,
    some_tokens,
    tiny_args,
    tiny_model,
    watched,
)
from torch import Tensor

from llama.kv_cache import KVCache
from llama.rows import Rows
from llama.testing import SIZES, a_row_is_its_text_alone, lossless_in_any_chunks, memory_may_have_any_contents

LENGTH = 24  # max_seq_len of the tiny models
# Logits of about 3, rounded at ten places or so in each of two layers. In units of the dtype's epsilon, 9 to 13 were
# measured, and one position off makes 300 and more.
HALF_TOLERANCE = 48
GQA = [(4, 4), (4, 2), (4, 1), (2, 2), (6, 2)]  # heads and KV heads: groups of 1 to 4, and never one head alone


class NewestFirst(KVCache, kind="newest_first"):
    """A kind as a researcher would add one: all slots at once, the newest position in the first of them."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        self.check(rows, xk, xv)
        ends = [start + rows.width for start in rows.starts]
        if self.keys is None or len(self.keys) < len(ends):
            size = (len(ends), self.args.max_seq_len, self.args.n_kv_heads, self.args.head_dim)
            self.keys, self.values = xk.new_zeros(size), xv.new_zeros(size)
        assert self.values is not None
        for row, end in enumerate(ends):
            slots = slice(self.args.max_seq_len - end, self.args.max_seq_len - end + xk.shape[1])
            self.keys[row, slots], self.values[row, slots] = xk[row].flip(0), xv[row].flip(0)
        return self.keys[: len(ends)], self.values[: len(ends)]

    def key_positions(self) -> Tensor:
        assert self.keys is not None
        return torch.arange(self.args.max_seq_len - 1, -1, -1, device=self.keys.device)


KINDS = ["static", "concat", "poisoned", "poisoned_concat", "newest_first"]
assert tiny.PoisonedCache in KVCache.kinds.values()


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "heads"), zip(KINDS, GQA, strict=True))
def test_a_text_is_that_without_a_cache_however_it_is_cut_and_whatever_is_beside_it(
    kind: str, heads: tuple[int, int]
) -> None:
    """Catches bugs 1, 2, 13 and 14: writes to a wrong axis, positions, stale slots, the mask of a chunk."""
    args = replace(SIZES, kv_cache=kind, n_heads=heads[0], n_kv_heads=heads[1])
    assert lossless_in_any_chunks(args)
    assert a_row_is_its_text_alone(args)
    assert kind == "newest_first" or memory_may_have_any_contents(args)  # with positions, all keys must be finite


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.float32, "static"),
        (torch.float32, "concat"),
        (torch.bfloat16, "poisoned"),
        (torch.bfloat16, "newest_first"),
        (torch.float16, "poisoned_concat"),
    ],
    ids=str,
)
def test_cached_logits_equal_uncached_down_to_the_rounding_of_the_dtype(dtype: torch.dtype, kind: str) -> None:
    """Loose in 16 bits; the tests in float64 find every mistake."""
    args = tiny_args(kv_cache=kind, max_seq_len=LENGTH, rope_scaling=(1.0, 2.0, 4.0, 8.0))
    model, plain, tokens = tiny_model(args, dtype=dtype), tiny_model(args, dtype=dtype), some_tokens(2, LENGTH)
    plain.kv_caching = False
    parts = [(0, 7), *((at, at + 1) for at in range(7, 20)), (20, 24)]
    with torch.inference_mode(), watched(model) as cached, watched(plain) as uncached:
        cache = model.new_cache(rows=2, length=LENGTH)
        for start, end in parts:
            expected = plain(tokens[:, :end], 0)[:, start:]
            made = model(tokens[:, start:end], torch.tensor([start] * 2), cache=cache)
            half = HALF_TOLERANCE * torch.finfo(dtype).eps
            allowed = fp32_tolerance(expected, args, dtype) if dtype == torch.float32 else half
            torch.testing.assert_close(made, expected, rtol=0, atol=allowed)
    assert cached.widths == [end - start for start, end in parts]
    lengths = [end if "concat" in kind else LENGTH for _, end in parts]
    assert cached.nbytes == [kv_nbytes(args, 2, length, dtype) for length in lengths]
    assert (uncached.widths, set(uncached.nbytes)) == ([end for _, end in parts], {0})


def test_no_cache_is_asked_while_caching_is_off() -> None:
    """Catches bug 3: an uncached path that still writes to a cache, or reads from one."""

    class Untouchable(KVCache, kind="untouchable"):
        def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
            raise AssertionError("the cache was touched")

        def key_positions(self) -> Tensor | None:
            raise AssertionError("the cache was asked")

    model = tiny_model(kv_cache="untouchable", kv_caching=False)
    torch.testing.assert_close(model(some_tokens(2, 5)), tiny_model(kv_caching=False)(some_tokens(2, 5)))
    model.generate_tokens([[1, 2]], 3)
    assert model.cache is None
    model.kv_caching = True
    with torch.no_grad(), pytest.raises(AssertionError, match="touched"):
        model(some_tokens(2, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_caching_can_be_switched_in_the_middle_of_a_text(kind: str) -> None:
    model, tokens = tiny_model(kv_cache=kind), some_tokens(2, 9)
    expected = tiny_model(kv_caching=False)(tokens)
    with torch.inference_mode(), watched(model) as watch:
        assert_near(model(tokens[:, :6]), expected[:, :6])
        assert_near(model(tokens[:, 6:7], 6), expected[:, 6:7])
        model.kv_caching = False
        assert cache_nbytes(model) == 0  # off frees
        assert_near(model(tokens[:, :8]), expected[:, :8])
        model.kv_caching = True
        assert cache_nbytes(model) == 0  # on allocates nothing before the first use
        assert_near(model(tokens[:, :8]), expected[:, :8])
        assert_near(model(tokens[:, 8:], 8), expected[:, 8:])
    assert watch.widths == [6, 1, 8, 8, 1]
    assert [nbytes > 0 for nbytes in watch.nbytes] == [True, True, False, True, True]


def assert_near(made: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(made, expected.detach(), rtol=0, atol=FP64_TOLERANCE)
