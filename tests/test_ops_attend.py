"""Attention equals two loops over positions, for all positions of queries and keys."""

import math
from contextlib import ExitStack
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import weights_by_loops
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from writes import rows_of

from llama import ops


def attend(
    xq: Tensor,
    keys: Tensor,
    values: Tensor,
    start_pos: int | list[int],
    visible: Tensor | None = None,
    scoring: ops.Scoring = ops.UNCHANGED,
) -> Tensor:
    return ops.attend(xq, keys, values, rows_of(start_pos, xq), visible, scoring)


FP64_TOLERANCE = 1e-13  # averages of numbers of about 1 with a few dozen roundings of 1e-16
FP32_TOLERANCE = 1e-5  # the same with roundings of 6e-8


Shape = tuple[int, int, int, int, int]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Draw rows, queries, grouped-query heads and their size; two kv heads or more in most draws."""
    groups = draw(st.sampled_from([2, 1, 4]))
    return draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 3)), groups, draw(st.integers(1, 8))


def qkv(shape: Shape, kv_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rows, seqlen, per_group, groups, head_dim = shape
    generator = torch.Generator().manual_seed(0)

    def made(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=dtype)

    keys, values = made(rows, kv_len, groups, head_dim), made(rows, kv_len, groups, head_dim)
    return made(rows, seqlen, groups * per_group, head_dim), keys, values


def assert_attends(output: Tensor, expected: Tensor) -> None:
    atol = FP64_TOLERANCE if output.dtype == torch.float64 else FP32_TOLERANCE
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=atol)


def read(weights: Tensor, values: Tensor) -> Tensor:
    """Return attention, (rows, seqlen, n_heads, head_dim): the sum of the values by these weights."""
    per_group = weights.shape[1] // values.shape[2]
    return torch.einsum("bhqk,bkhd->bqhd", weights, values.double().repeat_interleave(per_group, dim=2))


dtypes = st.sampled_from([torch.float64, torch.float32])
randoms = st.randoms(use_true_random=False)


@settings(max_examples=30)
@given(shapes(), st.integers(0, 6), st.integers(0, 3), dtypes)
def test_rows_at_one_position_see_their_past_and_themselves(
    shape: Shape, start_pos: int, more: int, dtype: torch.dtype
) -> None:
    """A prompt, a chunk after cached tokens (bug 14: PyTorch's own causal mask would start at key 0), and one token."""
    xq, keys, values = qkv(shape, start_pos + shape[1] + more, dtype)
    expected = read(weights_by_loops(xq, keys, [start_pos] * shape[0]), values)
    assert_attends(attend(xq, keys, values, start_pos), expected)


@settings(max_examples=30)
@given(shapes(), st.lists(st.integers(0, 6), min_size=3, max_size=3), dtypes)
def test_every_row_may_stand_at_a_position_of_its_own(shape: Shape, starts: list[int], dtype: torch.dtype) -> None:
    starts = starts[: shape[0]]
    xq, keys, values = qkv(shape, max(starts) + shape[1], dtype)
    assert_attends(attend(xq, keys, values, starts), read(weights_by_loops(xq, keys, starts), values))


@settings(max_examples=30)
@given(shapes(), st.integers(0, 6), st.booleans(), st.booleans(), dtypes, randoms)
def test_keys_may_stand_in_any_order(
    shape: Shape, start_pos: int, per_row: bool, ragged: bool, dtype: torch.dtype, random: Random
) -> None:
    """One order for all rows or one per row, and slots that no query may see yet."""
    rows, seqlen = shape[:2]
    starts = [start_pos + row if ragged else start_pos for row in range(rows)]
    kv_len = max(starts) + seqlen + 2
    one = random.sample(range(kv_len), kv_len)
    orders = [random.sample(one, kv_len) if per_row else one for _ in range(rows)]
    xq, keys, values = qkv(shape, kv_len, dtype)
    expected = read(weights_by_loops(xq, keys, starts, orders=orders), values)
    positions = torch.tensor(orders if per_row else orders[0])[..., None, :]
    queries = torch.tensor(starts)[:, None] + torch.arange(seqlen) if ragged else start_pos + torch.arange(seqlen)
    visible = positions <= queries[..., None]
    assert_attends(attend(xq, keys, values, starts if ragged else start_pos, visible), expected)


@settings(max_examples=40)
@given(shapes(), st.lists(st.integers(0, 6), min_size=3, max_size=3), st.booleans(), st.booleans(), st.booleans())
def test_each_head_may_see_keys_of_its_own(
    shape: Shape, starts: list[int], ragged: bool, by_group: bool, changed: bool
) -> None:
    """By KV head and by head, with equal and different starts, with and without a score_mod."""
    rows, seqlen, per_group, groups, _ = shape
    starts = starts[:rows] if ragged else starts[:1] * rows
    kv_len = max(starts) + seqlen + 1
    xq, keys, values = qkv(shape, kv_len, torch.float64)
    heads = groups if by_group else groups * per_group
    visible = torch.rand(rows, heads, seqlen, kv_len, generator=torch.Generator().manual_seed(kv_len)) > 0.4
    visible[..., 0] = True
    scoring = ops.Scoring(1, None, capped_and_sloped if changed else None)
    by_head = visible.repeat_interleave(groups * per_group // heads, dim=1)
    changes: dict[str, Any] = {"change": partial(score_capped_and_sloped, 1)} if changed else {}
    weights = weights_by_loops(xq, keys, starts, visible=by_head, **changes)
    assert_attends(attend(xq, keys, values, starts, visible, scoring), read(weights, values))
    for row, start in enumerate(starts):
        one = slice(row, row + 1)
        made = ops.attention_weights(xq[one], keys[one], start, visible[one], scoring)
        torch.testing.assert_close(made, weights[one], rtol=0, atol=FP64_TOLERANCE)


def test_a_head_axis_of_another_count_of_heads_is_refused() -> None:
    xq, keys, values = qkv((1, 2, 2, 2, 4), 3, torch.float64)
    with pytest.raises(ValueError, match=r"visible is \(1, 3, 2, 3\); .* or its 4 heads"):
        attend(xq, keys, values, 1, torch.ones(1, 3, 2, 3, dtype=torch.bool))


def capped_and_sloped(scores: Tensor, query_positions: Tensor, key_positions: Tensor, layer: int) -> Tensor:
    """Soft-cap and ALiBi, whose slope differs by layer."""
    assert query_positions.dtype == key_positions.dtype == torch.int64
    slopes = 0.5 ** torch.arange(1, scores.shape[1] + 1)[:, None, None]
    return 2 * (scores / 2).tanh() - layer * slopes * (query_positions - key_positions)


def score_capped_and_sloped(layer: int, score: float, head: int, far: int) -> float:
    """Return what `capped_and_sloped` makes of one score."""
    return 2 * math.tanh(score / 2) - layer * 0.5 ** (head + 1) * far


@settings(max_examples=30)
@given(shapes(), st.lists(st.integers(0, 6), min_size=3, max_size=3), st.booleans(), st.booleans(), dtypes, randoms)
def test_a_score_mod_changes_every_score_by_where_query_and_key_stand(
    shape: Shape, starts: list[int], ragged: bool, in_order: bool, dtype: torch.dtype, random: Random
) -> None:
    """Keys in order of position, or in another order per row."""
    rows, seqlen = shape[:2]
    starts = starts[:rows] if ragged else starts[:1] * rows
    kv_len = max(starts) + seqlen + 2
    orders = [list(range(kv_len)) if in_order else random.sample(range(kv_len), kv_len) for _ in range(rows)]
    positions = None if in_order else torch.tensor(orders)
    queries = torch.tensor(starts)[:, None] + torch.arange(seqlen)
    visible = None if positions is None else positions[:, None] <= queries[..., None]
    xq, keys, values = qkv(shape, kv_len, dtype)
    made = attend(xq, keys, values, starts, visible, ops.Scoring(3, positions, capped_and_sloped))
    weights = weights_by_loops(xq, keys, starts, orders=orders, change=partial(score_capped_and_sloped, 3))
    assert made.dtype == dtype
    assert_attends(made, read(weights, values))


def test_a_query_without_visible_keys_returns_zeros_also_with_a_score_mod() -> None:
    xq, keys, values = qkv((1, 2, 2, 2, 4), 3, torch.float64)
    visible = torch.tensor([[True] * 3, [False] * 3])
    plain = attend(xq, keys, values, 1, visible)
    changed = attend(xq, keys, values, 1, visible, ops.Scoring(score_mod=lambda scores, *_: scores))
    torch.testing.assert_close(changed, plain)
    assert not plain[:, 1].any()


def lost_heads(scores: Tensor, *_: Any) -> Tensor:
    return scores[:, :1]


def test_a_score_mod_that_returns_no_scores_is_refused_by_name() -> None:
    xq, keys, values = qkv((1, 2, 2, 2, 4), 2, torch.float64)
    mods: list[tuple[Any, str]] = [(lost_heads, r"\(1, 1, 2, 2\)"), (lambda *_: None, "NoneType")]
    for score_mod, found in mods:
        with pytest.raises(ValueError, match=rf"score_mod=\S+ returned {found}; it must .* \(1, 4, 2, 2\)"):
            attend(xq, keys, values, 0, None, ops.Scoring(score_mod=score_mod))


@pytest.mark.parametrize("start_pos", [0, 3, [0, 3], [3, 0]])
@pytest.mark.parametrize("seqlen", [1, 2])
def test_what_lies_past_a_rows_own_end_is_never_read(seqlen: int, start_pos: int | list[int]) -> None:
    """A mask is not enough: it multiplies by zero, and 0 x NaN is NaN (bug 13)."""
    xq, keys, values = qkv((2, seqlen, 2, 2, 4), 8, torch.float64)
    both = ops.UNCHANGED, ops.Scoring(1, None, capped_and_sloped)
    expected = [attend(xq, keys, values, start_pos, None, scoring) for scoring in both]
    starts = [start_pos] * 2 if isinstance(start_pos, int) else start_pos
    for row, start in enumerate(starts):
        keys[row, start + seqlen :] = values[row, start + seqlen :] = torch.nan
    for scoring, wanted in zip(both, expected, strict=True):
        assert torch.equal(attend(xq, keys, values, start_pos, None, scoring), wanted)
        assert wanted.isfinite().all()


def test_row_gives_the_same_bits_beside_rows_at_other_positions() -> None:
    xq, keys, values = qkv((3, 2, 2, 2, 4), 9, torch.float32)
    together = attend(xq, keys, values, [0, 4, 7])
    for row, start in enumerate([0, 4, 7]):
        alone = attend(xq[row : row + 1], keys[row : row + 1, : start + 2], values[row : row + 1, : start + 2], start)
        assert torch.equal(together[row : row + 1], alone)


@pytest.mark.parametrize(("score_mod", "start_pos"), [(None, 0), (capped_and_sloped, [0, 0])])
def test_gradients_flow(start_pos: int | list[int], score_mod: ops.ScoreMod | None) -> None:
    tensors = [tensor.requires_grad_() for tensor in qkv((2, 3, 2, 2, 4), 3, torch.float64)]
    scoring = ops.Scoring(1, None, score_mod)
    assert torch.autograd.gradcheck(lambda *qkv: attend(*qkv, start_pos, None, scoring), tensors)


# ---- what is for GPUs, as far as a CPU can tell ----------------------------------------------------------------------


@settings(max_examples=20)
@given(shapes(), st.integers(1, 6), dtypes)
def test_attention_of_a_gpu_after_a_past_is_that_of_a_mask(shape: Shape, start_pos: int, dtype: torch.dtype) -> None:
    xq, keys, values = qkv(shape, start_pos + shape[1], dtype)
    assert_attends(ops._attend_behind_past(xq, keys, values), attend(xq, keys, values, start_pos).double())


@pytest.mark.parametrize(("seqlen", "start_pos"), [(1, 3), (3, 0), (3, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_cudnn_is_disabled_during_attention_and_as_before_after_it(
    seqlen: int, start_pos: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    xq, keys, values = qkv((1, seqlen, 2, 2, 4), start_pos + seqlen, torch.float32)
    visible = torch.ones(seqlen, start_pos + seqlen, dtype=torch.bool) if masked else None
    seen, attention = [], torch.nn.functional.scaled_dot_product_attention

    def watched(*given: Any, **named: Any) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attention(*given, **named)

    monkeypatch.setattr(ops, "F", SimpleNamespace(scaled_dot_product_attention=watched))
    monkeypatch.setattr(ops, "without_cudnn", lambda _, real=ops.without_cudnn: real(torch.device("cuda")))
    for before in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(before)
        attend(xq, keys, values, start_pos, visible)
        ops._attend_behind_past(xq, keys, values)
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert not any(seen)
    assert len(seen) >= 4


def test_threads_that_keep_clear_of_cudnn_at_once_leave_it_as_it_was() -> None:
    """The second thread finds it off; if it restored that, cuDNN would stay off."""
    threads = ExitStack(), ExitStack()
    for thread in threads:
        thread.enter_context(ops.without_cudnn(torch.device("cuda")))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    for thread in threads:
        thread.close()
    assert torch.backends.cuda.cudnn_sdp_enabled()


class OnGpu(Tensor):
    """A tensor whose `is_cuda` is True."""

    is_cuda = True  # type: ignore[assignment]


def test_a_chunk_after_a_past_has_no_mask_in_memory_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask has the shape of the scores, and only kernels that compute all scores support it."""
    masks: list[Any] = []

    def noting(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
        masks.append(attn_mask)
        return q

    monkeypatch.setattr(ops, "F", SimpleNamespace(scaled_dot_product_attention=noting))
    xq, keys = (torch.empty(1, seqlen, 4, 8).as_subclass(OnGpu) for seqlen in (3, 8))
    attend(xq, keys, keys, 5)
    attend(xq, keys, keys, [5])
    assert [type(mask) for mask in masks] == [CausalBias] * 2
