"""A cache stores exactly what was written, in the predicted bytes, or rejects the write."""

from typing import Any

import pytest
import tiny  # registers the caches full of nan
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tiny import bits, kv_nbytes, tiny_args
from torch import Tensor
from writes import write

from llama.args import ModelArgs
from llama.kv_cache import ConcatCache, KVCache, StaticCache

HEADS, HEAD_DIM, ROWS, LENGTH = 2, 4, 4, 12  # never one kv head: writes to a wrong axis would broadcast (bug 1)
KINDS = ["static", "concat"]
assert tiny.PoisonedCache in KVCache.kinds.values()


def cache_args(**changes: Any) -> ModelArgs:
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 4, "n_kv_heads": HEADS, "max_seq_len": LENGTH, "max_batch_size": ROWS}
    return tiny_args(**{**sizes, **changes})


def make(kind: str, **changes: Any) -> KVCache:
    return KVCache.of(cache_args(kv_cache=kind, **changes))


def new(rows: int, seqlen: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return random keys and values."""
    size = (rows, seqlen, HEADS, HEAD_DIM)
    return torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)


def state(cache: KVCache) -> list[Tensor]:
    return [bits(buffer).clone() for buffer in cache.held().values()]


def nbytes(rows: int, length: int, dtype: torch.dtype = torch.float32) -> int:
    return kv_nbytes(cache_args(), rows, length, dtype)


class Writes(RuleBasedStateMachine):
    """Any sequence of good and bad writes, compared with a dictionary."""

    kind = "poisoned"

    def __init__(self) -> None:
        super().__init__()
        self.cache = make(self.kind)
        self.known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.extent = (0, 0)  # allocated rows and positions

    @rule(rows=st.integers(1, ROWS + 1), start=st.integers(-1, LENGTH), seqlen=st.integers(1, 5))
    def write_in_step(self, rows: int, start: int, seqlen: int) -> None:
        self.write(start, [start] * rows, seqlen)

    @rule(starts=st.lists(st.integers(-1, LENGTH), min_size=1, max_size=ROWS + 1), seqlen=st.integers(1, 5))
    def write_ragged(self, starts: list[int], seqlen: int) -> None:
        self.write(starts, starts, seqlen)

    @rule(start=st.integers(0, 3))
    def append_to_what_is_there(self, start: int) -> None:
        rows, length = max(self.extent[0], 1), self.extent[1]
        self.write(max(length - start, 0), [max(length - start, 0)] * rows, start + 1)

    @rule(rows=st.integers(1, ROWS), seqlen=st.integers(1, 5), ragged=st.booleans())
    def begin(self, rows: int, seqlen: int, ragged: bool) -> None:
        self.write([0] * rows if ragged else 0, [0] * rows, seqlen)

    @rule()
    def free(self) -> None:
        self.cache.free()
        self.known, self.extent = {}, (0, 0)

    @rule(rows=st.integers(1, ROWS), length=st.integers(1, LENGTH))
    def reserve(self, rows: int, length: int) -> None:
        self.cache.reserve(rows, length)
        self.known, self.extent = {}, (0, 0)

    @rule(order=st.permutations(range(ROWS)), count=st.integers(1, ROWS))
    def select_rows(self, order: list[int], count: int) -> None:
        rows, before = [row for row in order if row < self.extent[0]][:count], dict(self.known)
        self.cache.select_rows(rows)
        for place, row in enumerate(rows):
            for pos in range(0 if place == row else LENGTH):
                self.known.pop((place, pos), None)
                if (row, pos) in before:
                    self.known[place, pos] = before[row, pos]

    def write(self, start_pos: int | list[int], starts: list[int], seqlen: int) -> None:
        xk, xv = new(len(starts), seqlen)
        ends = [start + seqlen for start in starts]
        if len(starts) > ROWS or min(starts) < 0 or max(ends) > LENGTH or self.gap(starts):
            before = state(self.cache)
            with pytest.raises(ValueError, match=r"max_batch_size|whole numbers|max_seq_len|gap"):
                write(self.cache, start_pos, xk, xv)
            assert all(map(torch.equal, before, state(self.cache)))
            return
        keys, values = write(self.cache, start_pos, xk, xv)
        self.note(start_pos, starts, xk, xv)
        assert keys.shape == values.shape == (len(starts), max(ends), HEADS, HEAD_DIM)
        for (row, pos), (key, value) in self.known.items():
            if row < len(starts) and pos < max(ends):
                assert torch.equal(keys[row, pos], key)
                assert torch.equal(values[row, pos], value)

    def gap(self, starts: list[int]) -> bool:
        return False

    def note(self, start_pos: int | list[int], starts: list[int], xk: Tensor, xv: Tensor) -> None:
        assert self.cache.keys is not None
        self.extent = (self.cache.keys.shape[0], self.cache.keys.shape[1])
        for row, start in enumerate(starts):
            for i in range(xk.shape[1]):
                self.known[row, start + i] = xk[row, i].clone(), xv[row, i].clone()

    @invariant()
    def holds_what_was_written_and_nothing_else(self) -> None:
        rows, length = self.extent
        assert rows <= ROWS
        assert length <= LENGTH
        assert self.cache.nbytes == nbytes(rows, length)
        expected = torch.full((2, rows, length, HEADS, HEAD_DIM), torch.nan)
        for (row, pos), (key, value) in self.known.items():
            expected[:, row, pos] = torch.stack((key, value))
        for held, wanted in zip((self.cache.keys, self.cache.values), expected, strict=True):
            assert held is None or torch.equal(bits(held), bits(wanted))


class ConcatWrites(Writes):
    """The concatenating cache drops what is past a write, and rejects gaps."""

    kind = "poisoned_concat"

    def gap(self, starts: list[int]) -> bool:
        return max(starts) > 0 and (max(starts) > self.extent[1] or len(starts) > self.extent[0])

    def note(self, start_pos: int | list[int], starts: list[int], xk: Tensor, xv: Tensor) -> None:
        end = starts[0] + xk.shape[1] if len(set(starts)) == 1 else LENGTH
        if len(starts) > self.extent[0]:  # more rows than before: a new batch
            self.known = {}
        self.known = {(row, pos): kept for (row, pos), kept in self.known.items() if row < len(starts) and pos < end}
        super().note(start_pos, starts, xk, xv)


TestStaticWrites = Writes.TestCase
TestConcatWrites = ConcatWrites.TestCase
TestStaticWrites.settings = TestConcatWrites.settings = settings(max_examples=40, stateful_step_count=20)


# --- What must not be written


def bad_writes() -> dict[str, tuple[Any, Tensor, Tensor, str]]:
    """Return start_pos, keys, values and a part of the error message, by what is wrong with them."""
    good, (two, too) = new(2, 3), new(2, 3)
    one = new(2, 1)
    return {
        "past the end": (10, *good, f"max_seq_len={LENGTH}"),
        "one token past the end, which torch would drop silently": (LENGTH, *one, f"max_seq_len={LENGTH}"),
        "one row past the end": ([0, LENGTH], *one, f"max_seq_len={LENGTH}"),
        "longer than the limit": (0, *new(2, LENGTH + 1), f"max_seq_len={LENGTH}"),
        "too many rows": (0, *new(ROWS + 1, 3), f"{ROWS + 1} rows are more than max_batch_size={ROWS}"),
        "no rows": (0, *new(0, 3), "one per row"),
        "no tokens": (0, *new(2, 0), "from 1 to 0"),
        "heads before positions": (0, two.transpose(1, 2), too.transpose(1, 2), "shape"),
        "heads flattened": (0, two.flatten(2), too.flatten(2), "shape"),
        "one head for all, which would broadcast": (0, two[:, :, :1], too[:, :, :1], "shape"),
        "fewer values than keys": (0, two, too[:, :2], "shape"),
        "fewer rows of values": (0, two, too[:1], "shape"),
        "another dtype": (3, two.double(), too.double(), "float64"),
        "another dtype of the values": (3, two, too.double(), "float64"),
        "another device": (3, two.to("meta"), too.to("meta"), "meta"),
        "negative": (-1, *good, "whole numbers"),
        "one row negative": ([0, -1], *good, "whole numbers"),
        "too few positions": ([0], *good, "one per row"),
        "too many positions": ([0, 0, 0], *good, "one per row"),
        "no whole positions": ([0.0, 1.0], *good, "one per row"),
        "a gradient for the keys": (3, two.clone().requires_grad_(), too, "kv_caching=False"),
        "a gradient for the values": (3, two, too.clone().requires_grad_(), "kv_caching=False"),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_bad_write_is_refused_before_anything_is_written(kind: str) -> None:
    """Catches bugs 1, 15 and 16."""
    cache = make(kind)
    write(cache, 0, *new(2, 5))
    before = state(cache)
    for start_pos, xk, xv, words in bad_writes().values():
        with pytest.raises(ValueError, match=words):
            write(cache, start_pos, xk, xv)
        assert all(map(torch.equal, before, state(cache))), words


@pytest.mark.parametrize("kind", KINDS)
def test_bad_first_writes_allocate_no_memory(kind: str) -> None:
    for what, (start_pos, xk, xv, words) in bad_writes().items():
        if what not in ("another dtype", "another device"):
            cache = make(kind)
            with pytest.raises(ValueError, match=f"{words}|gap"):
                write(cache, start_pos, xk, xv)
            assert cache.nbytes == 0, what


# --- Memory


def test_static_buffers_stay_where_they_are_while_there_is_room() -> None:
    cache = make("static")
    cache.reserve(2, LENGTH)
    assert cache.steps_left([0, 0]) == 0
    keys, _ = write(cache, 0, *new(2, 3))
    for start in range(3, LENGTH):
        assert cache.steps_left([start - 1, 0]) == LENGTH - start
        assert write(cache, start, *new(2, 1))[0].data_ptr() == keys.data_ptr()
    assert write(cache, 0, *new(1, 1))[0].data_ptr() == keys.data_ptr()


def test_a_step_of_a_window_copies_nothing_that_is_stored() -> None:
    cache, places = make("window:8+2"), set()
    cache.reserve(2, LENGTH)
    for start in range(LENGTH):
        write(cache, start, *new(2, 1))
        places.add(tuple(held.data_ptr() for held in cache.held().values()))
    assert len(places) == 1


def test_static_grows_by_doubling_to_the_limits_and_never_beyond() -> None:
    cache, lengths = make("static"), []
    for start in range(LENGTH):
        write(cache, start, *new(2, 1))
        lengths.append(cache.nbytes // nbytes(2, 1))
    assert lengths == [1, 2, 4, 4, *[8] * 4, *[12] * 4]
    write(cache, LENGTH - 1, *new(ROWS, 1))
    assert cache.nbytes == nbytes(ROWS, LENGTH)


def test_static_that_cannot_get_its_memory_is_left_as_it_was() -> None:
    """Catches bug 33: memory runs out between the keys and the values."""

    class Poor(StaticCache):
        allocations = 0

        def _allocate(self, *of: Any) -> Tensor:
            self.allocations += 1
            if self.allocations == 4:
                raise MemoryError
            return super()._allocate(*of)

    cache = Poor(cache_args())
    write(cache, 0, *new(2, 3))
    before = state(cache)
    with pytest.raises(MemoryError):
        write(cache, 3, *new(2, 4))
    assert all(map(torch.equal, before, state(cache)))
    assert write(cache, 3, *new(2, 4))[0].shape[1] == 7


# --- As a value


def test_kinds_are_chosen_by_name_and_a_subclass_without_one_is_not_listed() -> None:
    class Unnamed(StaticCache):
        pass

    assert type(make("static")) is StaticCache
    assert type(make("concat")) is ConcatCache
    assert Unnamed not in KVCache.kinds.values()
    with pytest.raises(ValueError, match="kind='static' is taken by StaticCache"):

        class Usurper(KVCache, kind="static"):
            pass

    assert type(make("static")) is StaticCache
    with pytest.raises(NotImplementedError):
        write(KVCache(cache_args()), 0, *new(1, 1))
