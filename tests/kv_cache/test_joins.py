"""Texts join a batch, leave it and change their places; each row has the bits that the text has alone."""

import copy
from dataclasses import replace
from typing import Any, Self

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tables import cases
from tiny import tiny_args
from torch import Tensor

from llama.kv_cache import Attended, Cache, KVCache, PagedCache, StaticCache
from llama.kv_cache.cache import Source
from llama.kv_cache.paged import BLOCK
from llama.ops import Scoring
from llama.rows import Rows
from llama.testing import same_tensors

ROWS, LENGTH = 4, 120
KINDS = ["static", "paged", "int8", "window:20+3", "knorm:12", "concat", "int4", "rotated:k4v3+2", "kivi:2+16", "fp8"]
KINDS += ["quest:16", "static@0;int8"]

DEFAULT = ("static", "paged", "int8")


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


class Joins(RuleBasedStateMachine):
    """Texts arrive in two pieces, step, change their places and leave; each is also fed to a cache of its own."""

    kind = "static"

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.batch = torch.Generator().manual_seed(0), made(self.kind)
        self.batch.reserve(ROWS, LENGTH)
        self.alone: list[Cache] = []
        self.ends: list[int] = []
        self.blocks = self.row = 0
        self.tables: list[int] = []  # the blocks of each row

    def new(self, rows: int, tokens: int) -> Tensor:
        heads = self.batch.layers[0].args.n_kv_heads
        return torch.randn(2, rows, tokens, heads, 32, generator=self.stream)

    @precondition(lambda self: len(self.ends) < ROWS)
    @rule(first=st.integers(1, 40), second=st.integers(0, 40), reserved=st.sampled_from([0, LENGTH]))
    def arrive(self, first: int, second: int, reserved: int) -> None:
        text, alone = self.batch.sibling(reserved), made(self.kind)
        for start, tokens in ((0, first), (first, second)):
            new = self.new(1, tokens)
            for cache in (text, alone) if tokens else ():
                fed(cache, [start], new, prompt_ends=start + tokens == first + second)
            self.tables[len(self.ends) :] = [-(-(start + tokens) // BLOCK)]
            self.use()
        self.batch.join(text, len(self.ends), first + second)
        assert text.empty
        self.alone.append(alone)
        self.ends.append(first + second)

    @precondition(lambda self: self.ends and max(self.ends) < LENGTH)
    @rule(count=st.integers(1, 9))
    def step(self, count: int) -> None:
        for _ in range(min(count, LENGTH - max(self.ends))):
            new = self.new(len(self.ends), 1)
            fed(self.batch, self.ends, new)
            for row, alone in enumerate(self.alone):
                fed(alone, [self.ends[row]], new[:, row : row + 1])
            if any(end == blocks * BLOCK for end, blocks in zip(self.ends, self.tables, strict=True)):
                self.tables = [-(-min(end + BLOCK, LENGTH) // BLOCK) for end in self.ends]
                self.use()
            self.ends = [end + 1 for end in self.ends]

    @rule(order=st.permutations(range(ROWS)), count=st.integers(0, ROWS))
    def leave(self, order: list[int], count: int) -> None:
        rows = [row for row in order if row < len(self.ends)][:count]
        self.ends, self.alone = [self.ends[row] for row in rows], [self.alone[row] for row in rows]
        self.tables = [self.tables[row] for row in rows]
        self.batch.select_rows(rows)

    def use(self) -> None:
        """Count the blocks of the pool, after more of them came into use."""
        if sum(self.tables) > self.blocks:
            self.blocks = max(sum(self.tables), self.blocks + self.blocks // 8)

    @invariant()
    def a_row_has_the_bits_of_its_text(self) -> None:
        if self.ends:
            self.row = (self.row + 1) % len(self.ends)
            ours, end = self.batch.copy(), self.ends[self.row]
            ours.select_rows([self.row])
            for found, wanted in zip(ours.state(1, end), self.alone[self.row].state(1, end), strict=True):
                assert same_tensors(found, wanted)

    @invariant()
    def as_many_bytes_are_stored_as_predicted(self) -> None:
        if self.kind == "paged":
            assert self.batch.nbytes == self.blocks * BLOCK * self.batch.position_bytes(4)
            most = sum(self.batch.text_bytes(prompt=end, end=end, itemsize=4) for end in self.ends)
            assert sum(self.tables) * BLOCK * self.batch.position_bytes(4) <= most
        elif self.kind == "static" and self.batch.nbytes:
            assert self.batch.nbytes == ROWS * self.batch.text_bytes(prompt=1, end=LENGTH, itemsize=4)


@pytest.mark.parametrize("kind", cases(KINDS, *DEFAULT))
def test_texts_that_join_and_leave_have_the_bits_that_they_have_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = KVCache._allocate  # some slots are never written nor read, and both caches must have the same there
    monkeypatch.setattr(KVCache, "_allocate", lambda *of: allocate(*of).fill_(1))
    machine, count = type("Machine", (Joins,), {"kind": kind}), 3 if kind in DEFAULT else 15
    limits = settings(max_examples=count, stateful_step_count=10, deadline=None)
    run_state_machine_as_test(machine, settings=limits)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", ["static", "int8", "window:100+4"])
def test_a_longer_text_that_joins_adds_the_bytes_that_it_reserved(kind: str) -> None:
    """Memory that doubled instead would be more than what is predicted for the longest text."""
    cache = with_text(made(kind).sibling(64))
    text = with_text(cache.sibling(96))
    cache.join(text, 1, 5)
    fed(cache, [5, 5], torch.randn(2, 2, 91, 2, 32))
    assert cache.nbytes == 2 * cache.text_bytes(prompt=5, end=96, itemsize=4)


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
    cache.select_rows([])
    assert [len(layer.pool.used()) for layer in layers] == [0, 0]


def test_a_join_during_a_call_is_refused() -> None:
    cache = with_text(made("static"))
    text = with_text(cache.sibling())
    for busy in (cache, text):
        with busy._call, pytest.raises(RuntimeError, match="in the middle of another call"):
            cache.join(text, 1, 5)
    cache.join(text, 1, 5)
