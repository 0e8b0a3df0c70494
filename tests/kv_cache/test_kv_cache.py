"""A cache stores exactly what was written, in the predicted bytes, or rejects the write."""

from typing import Any

import pytest
import torch
from tiny import bits, kv_nbytes, tiny_args
from torch import Tensor
from writes import write

from llama.args import ModelArgs
from llama.kv_cache import ConcatCache, KVCache, StaticCache

HEADS, HEAD_DIM, ROWS, LENGTH = 2, 4, 4, 12  # never one kv head: writes to a wrong axis would broadcast (bug 1)
KINDS = ["static", "concat"]


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
def test_bad_write_is_refused_before_anything_is_written_or_allocated(kind: str) -> None:
    """Catches bugs 1, 15 and 16."""
    cache = make(kind)
    write(cache, 0, *new(2, 5))
    before = state(cache)
    for what, (start_pos, xk, xv, words) in bad_writes().items():
        with pytest.raises(ValueError, match=words):
            write(cache, start_pos, xk, xv)
        assert all(map(torch.equal, before, state(cache))), what
        if what not in ("another dtype", "another device"):
            with pytest.raises(ValueError, match=f"{words}|gap"):
                write(empty := make(kind), start_pos, xk, xv)
            assert empty.nbytes == 0, what


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
