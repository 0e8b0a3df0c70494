"""The window cache equals its definition in plain loops, with constant memory and bounded angles."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_args, tiny_model
from torch import Tensor
from writes import rows_of, write

from llama.args import ModelArgs
from llama.kv_cache import KVCache
from llama.ops import attend
from llama.request import Step
from llama.rope import rope_frequencies

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
# Angles come from a float32 table; positions of some dozens, numbers of about 1.
TOLERANCE = 2e-5


def args(window: int, sinks: int) -> ModelArgs:
    return tiny_args(dim=32, head_dim=HEAD_DIM, kv_cache=f"window:{window}+{sinks}", max_seq_len=64)


def turned(x: Tensor, place: int | Tensor) -> Tensor:
    """Rotate the pairs of x, (..., head_dim), by the angles of a place, or of places, (..., 1)."""
    angles = place * rope_frequencies(HEAD_DIM, 10000.0).double()
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def by_loops(xq: Tensor, xk: Tensor, xv: Tensor, window: int, sinks: int) -> Tensor:
    """Return attention of one row, (length, heads, head_dim), query by query, each over its own window."""
    out = torch.zeros_like(xq, dtype=torch.float64)
    for p in range(len(xq)):
        seen = sorted({*range(min(sinks, p + 1)), *range(max(0, p - window + 1), p + 1)})
        place = min(p, sinks + window - 1)
        for head in range(HEADS):
            query, own = turned(xq[p, head], place), head // (HEADS // KV_HEADS)
            places = torch.tensor([[k if k < sinks else place - (p - k)] for k in seen])
            scores = turned(xk[seen, own], places) @ query / HEAD_DIM**0.5
            out[p, head] = scores.softmax(0) @ xv[seen, own].double()
    return out


def numbers(length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    stream = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(length, heads, HEAD_DIM, generator=stream, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )  # type: ignore[return-value]


def attended(
    cache: KVCache, xq: Tensor, xk: Tensor, xv: Tensor, start: int | Sequence[int], lengths: Sequence[int] | None = None
) -> Tensor:
    """Return attention of queries before RoPE, (bsz, seqlen, heads, head_dim), through a cache."""
    keys, values = write(cache, start, xk, xv, lengths=lengths)
    rows = rows_of(start, xq)
    first = cache.rope_starts(rows)
    ahead = torch.arange(xq.shape[1])[:, None, None]
    rotated = torch.stack([turned(row, place + ahead) for row, place in zip(xq, first, strict=True)])
    return attend(rotated, keys, values, rows, cache.visible(rows, rotated))


@settings(max_examples=20)
@given(
    st.integers(1, 9), st.integers(0, 4), st.integers(0, 30), st.lists(st.integers(1, 29), max_size=6), st.integers()
)
def test_each_query_of_any_chunk_sees_its_own_window(
    window: int, sinks: int, length: int, cuts: list[int], seed: int
) -> None:
    window, length = max(window, sinks), length + 1
    xq, xk, xv = numbers(length, seed % 1000)
    cache = KVCache.of(args(window, sinks))
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    parts = [attended(cache, xq[None, a:b], xk[None, a:b], xv[None, a:b], a)[0] for a, b in pairwise(edges)]
    torch.testing.assert_close(torch.cat(parts), by_loops(xq, xk, xv, window, sinks), atol=TOLERANCE, rtol=TOLERANCE)


def test_memory_and_angles_do_not_grow_with_the_text() -> None:
    model = tiny_model(dtype=torch.float32, kv_cache="window:10+2", max_seq_len=16)
    held: list[int] = []
    asked: list[int] = []
    up_to = model.rope.up_to

    def watched(end: int, device: torch.device) -> tuple[Tensor, Tensor]:
        asked.append(end)
        return up_to(end, device)

    model.rope.up_to = watched  # type: ignore[method-assign]

    def note(step: Step) -> None:
        assert step.cache is not None
        held.append(step.cache.nbytes)

    ids, _ = model.generate_tokens([[1, 2, 3]], 100, temperature=0.0, on_step=note)
    assert len(ids[0]) == 100
    assert set(held[1:]) == {model.new_cache().predicted_bytes(prompts=[3], ends=[102], reserved=(1, 103), itemsize=4)}
    assert max(asked) <= 16


STARTS: list[tuple[int, str]] = [(11, "would leave a gap"), (4, "has dropped positions before 5")]


@pytest.mark.parametrize(("start", "words"), STARTS)
def test_a_start_that_the_window_cannot_serve_is_refused_and_the_text_goes_on(start: int, words: str) -> None:
    xq, xk, xv = numbers(12, 1)
    cache = KVCache.of(args(5, 2))
    attended(cache, xq[None, :10], xk[None, :10], xv[None, :10], 0)
    before = {name: tensor.clone() for name, tensor in cache.state().items()}
    with pytest.raises(ValueError, match=words):
        write(cache, start, xk[None, :1], xv[None, :1])
    assert all(torch.equal(before[name], tensor) for name, tensor in cache.state().items())
    step = attended(cache, xq[None, 10:], xk[None, 10:], xv[None, 10:], 10)[0]
    torch.testing.assert_close(step, by_loops(xq, xk, xv, 5, 2)[10:], atol=TOLERANCE, rtol=TOLERANCE)


def test_by_default_the_window_fills_the_limit_with_four_sinks() -> None:
    cache = KVCache.of(replace(args(1, 0), kv_cache="window"))
    assert (cache.window, cache.sinks, cache.bound) == (60, 4, 64)  # type: ignore[attr-defined]
    made: Callable[[str], KVCache] = lambda kind: KVCache.of(replace(args(1, 0), kv_cache=kind))  # noqa: E731
    assert made("window:32").bound == 36
    assert made("window:32+0").bound == 32
