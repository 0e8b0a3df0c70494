"""A text joins a batch in the memory that was reserved, or is refused; `llama.testing` compares what rows give."""

import copy
from dataclasses import replace
from typing import Any, Self

import pytest
import torch
from tiny import tiny_args
from torch import Tensor

from llama.kv_cache import Attended, Cache, KVCache, PagedCache, StaticCache
from llama.kv_cache.cache import Source
from llama.kv_cache.paged import BLOCK
from llama.ops import Scoring
from llama.rows import Rows
from llama.testing import same_tensors

ROWS, LENGTH = 4, 120


def made(kind: str) -> Cache:
    return Cache.of(tiny_args(n_layers=2, head_dim=32, max_seq_len=LENGTH, max_batch_size=ROWS, kv_cache=kind), kind)


SOURCE = Source("weights", False, torch.float32, torch.device("cpu"))


def fed(cache: Cache, starts: list[int], new: Tensor, *, prompt_ends: bool = False) -> None:
    """Write keys and values, new[0] and new[1], (rows, tokens, heads, head_dim), and observe without a model."""
    rows = Rows.at(starts, [new.shape[2]] * len(starts), prompt_ends=prompt_ends)
    xq = new.new_zeros(len(starts), new.shape[2], 4, 32)

    def compute() -> None:
        for layer in cache.layers:
            keys, values = layer.update(rows, new[0], new[1])
            if layer.observes:
                positions = layer.key_positions()
                scoring = Scoring(layer.layer, positions, None)
                layer.observe(Attended(None, rows, xq, xq, keys, values, layer.visible(rows, xq), scoring))

    cache.feed(SOURCE, starts, compute)


@pytest.mark.parametrize("kind", ["static", "int8", "window:100+4"])
def test_a_longer_text_that_joins_adds_the_bytes_that_it_reserved(kind: str) -> None:
    """Memory that doubled instead would be more than what is predicted for the longest text."""
    cache = with_text(made(kind).sibling(64))
    text = with_text(cache.sibling(96))
    cache.join(text, 1, 5)
    fed(cache, [5, 5], torch.randn(2, 2, 91, 2, 32))
    assert cache.nbytes == 2 * cache.text_bytes(prompt=5, end=96, itemsize=4)
    for reserved in (96, 2 * LENGTH):
        cache = with_text(made(kind).sibling(64))
        cache.join(with_text(cache.sibling(reserved)), 0, 5)  # in the place of a shorter text
        stored = cache.nbytes
        fed(cache, [5], torch.randn(2, 1, 91, 2, 32))
        assert cache.nbytes == stored >= cache.text_bytes(prompt=5, end=96, itemsize=4), "no step needs memory"


# ---- texts that cannot join ------------------------------------------------------------------------------------------


class Unknown(StaticCache):
    """Does not say what a text has written."""

    def written(self, name: str, length: int) -> None:  # type: ignore[override]
        return None


class Own(Unknown):
    """Moves a text by a `join` of its own, which allocates, too."""

    joined: tuple[int, int] | None = None

    def join(self, other: Self, rows: int, length: int) -> None:
        self.joined = rows, length


class Stops(StaticCache):
    """Does not end to write a second row."""

    def join(self, other: Self, rows: int, length: int) -> None:
        if self.layer and rows:
            raise KeyboardInterrupt
        super().join(other, rows, length)


def with_text(cache: Cache, tokens: int = 5, *, dtype: torch.dtype = torch.float32) -> Cache:
    new = torch.randn(2, 1, tokens, 2, 32, dtype=dtype)
    fed(cache, [0], new, prompt_ends=True)
    cache.source = SOURCE._replace(dtype=dtype)
    return cache


def of(kind: type[StaticCache]) -> Cache:
    return Cache([kind(layer.args, layer.layer, layer.rope) for layer in made("static").layers], "static")


def test_a_kind_that_only_overrides_join_is_asked_for_nothing_else() -> None:
    cache = with_text(of(Own))
    cache.join(with_text(of(Own)), 1, 5)
    assert [layer.joined for layer in cache.layers if isinstance(layer, Own)] == [(1, 5)] * len(cache.layers)


def test_a_text_that_cannot_join_is_refused_and_both_caches_stay_as_they_were() -> None:
    static, paged, other = with_text(made("static")), with_text(made("paged")), SOURCE._replace(weights="others")
    another, failed = with_text(static.sibling()), with_text(static.sibling())
    another.source, failed.failed_at = other, 3
    refused = [
        (with_text(of(Unknown)), with_text(of(Unknown)), 1, 5, "does not state what a text has written"),
        (static, with_text(made("concat")), 1, 5, "differ in their kinds or sizes"),
        (static, static.sibling(), 1, 5, "or no text was fed"),
        (static, with_text(static.sibling()), 1, 6, "a text of 6 positions cannot become row 1"),
        (static, with_text(static.sibling()), 2, 5, "there are fewer rows"),
        (static, with_text(static.sibling(), dtype=torch.float64), 0, 5, "another way .*float32.* than .*float64"),
        (static, another, 1, 5, "fed by another model"),
        (static, failed, 1, 5, "did not end"),
        (paged, with_text(made("paged")), 1, 5, "in another pool of blocks cannot join; make its cache by sibling"),
        (paged, with_text(paged.sibling()), 1, 17, "a text of 17 positions cannot become row 1"),
        (with_text(made("int8")), with_text(made("int8")), 1, 4, "it has other positions"),
    ]
    for cache, text, rows, length, words in refused:
        before = copy.deepcopy([[layer.state() for layer in one.layers] for one in (cache, text)])
        with pytest.raises(ValueError, match=words):
            cache.join(text, rows, length)
        for one, states in zip((cache, text), before, strict=True):
            assert all(same_tensors(layer.state(), state) for layer, state in zip(one.layers, states, strict=True))
    with_fewer = with_text(made("static"))
    for layer in with_fewer.layers:
        layer.args = replace(layer.args, max_batch_size=1)
    with pytest.raises(ValueError, match="2 rows are more than max_batch_size=1"):
        with_fewer.join(with_text(with_fewer.sibling()), 1, 5)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kv_cache", ["static", "concat", "int8", "window:8+1", "fp8"])
def test_a_join_that_finds_no_memory_in_a_layer_changes_neither_text(
    kv_cache: str, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = with_text(made(kv_cache))
    twin, text, allocate = cache.copy(), with_text(cache.sibling(), 7), KVCache._allocate

    def poor(self: KVCache, *of: Any) -> Tensor:
        if self.layer == layer:
            raise MemoryError
        return allocate(self, *of)

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "_allocate", poor)
        with pytest.raises(MemoryError):
            cache.join(text, 1, 7)
    new = torch.randn(2, 1, 1, 2, 32)
    fed(cache, [5], new)
    fed(twin, [5], new)
    fed(text, [7], torch.randn(2, 1, 1, 2, 32))
    for own, other in zip(cache.layers, twin.layers, strict=True):
        assert same_tensors(own.state(1, 6), other.state(1, 6))
    cache.join(text, 1, 8)


def test_after_a_join_that_did_not_end_no_call_continues_either_text() -> None:
    cache = with_text(of(Stops))
    text = with_text(cache.sibling())
    with pytest.raises(KeyboardInterrupt):
        cache.join(text, 1, 5)
    for one in (cache, text):
        with pytest.raises(ValueError, match="did not end"):
            fed(one, [5], torch.randn(2, 1, 1, 2, 32))
    with_text(cache)
    text = with_text(cache.sibling(), 7)
    cache.join(text, 0, 7)  # in the place of the old text
    fed(cache, [7], torch.randn(2, 1, 1, 2, 32))


def test_a_joined_text_gives_its_blocks_back() -> None:
    cache = with_text(made("paged"), 40)
    layers = [layer for layer in cache.layers if isinstance(layer, PagedCache)]
    text = with_text(cache.sibling(), 70)
    keys = cache.layers[0].keys
    assert text.layers[0].keys is keys
    cache.join(text, 1, 70)
    assert cache.layers[0].keys is keys
    cache.select_rows([1])
    assert [len(layer.pool.used()) for layer in layers] == [5, 5]
    blocks = cache.text_bytes(prompt=70, end=70, itemsize=4) / (BLOCK * cache.position_bytes(4))
    assert 5 <= blocks <= 6
    cache.select_rows([])
    assert [len(layer.pool.used()) for layer in layers] == [0, 0]
    assert cache.state() == [{}, {}]


def test_a_join_during_a_call_is_refused() -> None:
    cache = with_text(made("static"))
    text = with_text(cache.sibling())
    for busy in (cache, text):
        with busy._call, pytest.raises(RuntimeError, match="in the middle of another call"):
            cache.join(text, 1, 5)
    cache.join(text, 1, 5)
