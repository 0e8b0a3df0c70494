"""The cache changes how much is computed, never the result; and every test here also checks that it was really used.

`watched` records the tokens that each forward was fed and the bytes of the caches after it: without that, these tests
would pass with the cache off.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import tiny  # registers the caches full of nan
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

from llama.args import ModelArgs
from llama.kv_cache import KVCache
from llama.rows import Rows

LENGTH = 24  # max_seq_len of the tiny models
# Logits of about 3, rounded at ten places or so in each of two layers. In units of the dtype's epsilon, 9 to 13 were
# measured, and one position off makes 300 and more.
HALF_TOLERANCE = 48
GQA = [(4, 4), (4, 2), (4, 1), (2, 2)]  # heads and kv heads: groups of 1, 2 and 4, and never one head alone


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


def held_by(kind: str, args: ModelArgs, rows: int, end: int, reserved: int, dtype: torch.dtype) -> int:
    """Return the bytes that a kind has after a step that ended at position `end`."""
    length = {"static": reserved, "poisoned": reserved, "newest_first": args.max_seq_len}.get(kind, end)
    return kv_nbytes(args, rows, length, dtype)


def gqa(heads: tuple[int, int]) -> dict[str, int]:
    return {"n_heads": heads[0], "n_kv_heads": heads[1]}


@st.composite
def chunks(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Cut a prompt of 1, 2, 7 or max_seq_len tokens anywhere; return the start and end of every part."""
    length = draw(st.sampled_from([1, 2, 7, LENGTH]))
    cuts = draw(st.sets(st.integers(1, max(length - 1, 1))))
    edges = sorted({0, length} | {cut for cut in cuts if cut < length})
    return list(pairwise(edges))


def token_by_token(length: int) -> list[tuple[int, int]]:
    return [(start, start + 1) for start in range(length)]


def assert_parity(
    args: ModelArgs, rows: int, parts: list[tuple[int, int]], dtype: torch.dtype, atol: float | None = None
) -> None:
    """Feed the parts one after the other with the cache, and the whole prefix each time without."""
    model, length = tiny_model(args, dtype=dtype), parts[-1][1]
    plain = tiny_model(replace(args, kv_caching=False), dtype=dtype)
    tokens = some_tokens(rows, length)
    with torch.inference_mode(), watched(model) as cached, watched(plain) as uncached:
        cache = model.new_cache(rows=rows, length=length)
        for start, end in parts:
            expected = plain(tokens[:, :end], 0)[:, start:]
            made = model(tokens[:, start:end], start, cache=cache)
            allowed = fp32_tolerance(expected, args, dtype) if atol is None else atol
            torch.testing.assert_close(made, expected, rtol=0, atol=allowed)
    assert cached.widths == [end - start for start, end in parts]
    assert cached.nbytes == [held_by(args.kv_cache, args, rows, end, length, dtype) for _, end in parts]
    assert (uncached.widths, set(uncached.nbytes)) == ([end for _, end in parts], {0})


@settings(max_examples=30)
@given(chunks(), st.sampled_from(KINDS), st.sampled_from(GQA), st.sampled_from([2, 1, 3]))
def test_cached_logits_equal_uncached_however_the_prompt_is_cut(
    parts: list[tuple[int, int]], kind: str, heads: tuple[int, int], rows: int
) -> None:
    """Catches bugs 1, 2, 13 and 14: writes to a wrong axis, positions, stale slots, the mask of a chunk."""
    args = tiny_args(kv_cache=kind, max_seq_len=LENGTH, **gqa(heads))
    assert_parity(args, rows, parts, torch.float64, FP64_TOLERANCE)


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
    allowed = None if dtype == torch.float32 else HALF_TOLERANCE * torch.finfo(dtype).eps
    assert_parity(args, 2, [(0, 7), *token_by_token(LENGTH)[7:20], (20, 24)], dtype, allowed)


def test_float64_tolerance_would_not_let_a_mistake_through() -> None:
    """One position off, or one past token overwritten, changes the logits by far more than the tolerance."""
    model, tokens = tiny_model().requires_grad_(False), some_tokens(2, 9)
    expected = tiny_model(kv_caching=False)(tokens)[:, 8:]
    model(tokens[:, :8])
    assert (model(tokens[:, 8:], 7) - expected).abs().max() > 0.1
    model(tokens[:, :8])
    model(tokens[:, :1], 3)
    assert (model(tokens[:, 8:], 8) - expected).abs().max() > 0.1
    assert 1e6 * FP64_TOLERANCE < 0.1


# --- Rows at different positions


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 12), min_size=2, max_size=4),
    st.lists(st.integers(1, 4), max_size=3),
    st.sampled_from(KINDS),
    st.sampled_from(GQA),
    st.sampled_from([list, tuple, torch.tensor]),
)
def test_ragged_rows_give_what_each_gives_alone(
    prompts: list[int], more: list[int], kind: str, heads: tuple[int, int], given_as: Callable[[list[int]], Any]
) -> None:
    """Prompts of any lengths in one padded prefill, then steps of one or more tokens, each row at its own position.

    Catches bugs 13 and 14, and results of a row that depend on other rows.
    """
    args = tiny_args(kv_cache=kind, max_seq_len=LENGTH, **gqa(heads))
    model, plain = tiny_model(args).requires_grad_(False), tiny_model(replace(args, kv_caching=False))
    rows, longest = len(prompts), max(prompts) + sum(more)
    tokens = some_tokens(rows, LENGTH)
    alone = [plain(tokens[row : row + 1]).detach()[0] for row in range(rows)]

    cache = model.new_cache(rows=rows, length=longest)
    with watched(model) as watch:
        made = model(tokens[:, : max(prompts)], given_as([0] * rows), cache=cache, logits="last", lengths=prompts)
        expected = [alone[row][length - 1] for row, length in enumerate(prompts)]
        torch.testing.assert_close(made[:, 0], torch.stack(expected), rtol=0, atol=FP64_TOLERANCE)
        starts = prompts
        for width in more:
            fed = torch.stack([tokens[row, start : start + width] for row, start in enumerate(starts)])
            made = model(fed, given_as(starts), cache=cache)
            expected = [alone[row][start : start + width] for row, start in enumerate(starts)]
            torch.testing.assert_close(made, torch.stack(expected), rtol=0, atol=FP64_TOLERANCE)
            starts = [start + width for start in starts]
    assert watch.widths == [max(prompts), *more]
    assert watch.nbytes[-1] == held_by(kind, args, rows, longest, longest, torch.float64)
    assert watch.nbytes == sorted(watch.nbytes)


# --- Generation


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


# --- Texts after texts


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_gives_the_same_bits_after_any_other(kind: str) -> None:
    """Direct calls: a smaller batch after a larger one, a shorter prompt after a longer one. Catches bug 13."""
    model = tiny_model(kv_cache=kind, dtype=torch.float32).requires_grad_(False)

    def run(rows: int, length: int, seed: int) -> list[Tensor]:
        tokens = some_tokens(rows, length + 3, seed=seed)
        ragged = [max(1, length - row) for row in range(rows)]
        prefill = model(tokens[:, :length])
        steps = [model(tokens[:, length + i : length + i + 1], length + i) for i in range(3)]
        return [prefill, *steps, model(tokens[:, -1:], ragged)]

    first = run(2, 6, seed=0)
    for rows, length in [(4, 15), (1, 2), (2, 6), (3, 1)]:
        run(rows, length, seed=1)
        assert cache_nbytes(model) > 0
        assert all(map(torch.equal, run(2, 6, seed=0), first))


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
