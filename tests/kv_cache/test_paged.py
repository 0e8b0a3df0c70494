"""A paged cache takes blocks as texts grow, shares those of a common prefix, and returns them."""

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from threads import in_threads
from tiny import some_tokens, tiny_args, tiny_model
from torch import Tensor
from writes import write

from llama.args import Refused
from llama.kv_cache import KVCache, PagedCache
from llama.kv_cache.paged import BLOCK

HEADS, HEAD_DIM = 2, 8


def made(kind: str = "paged", **changes: int) -> PagedCache:
    cache = KVCache.of(tiny_args(n_kv_heads=HEADS, head_dim=HEAD_DIM, kv_cache=kind, max_seq_len=2048, **changes))
    assert isinstance(cache, PagedCache)
    return cache


def new(rows: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, length, HEADS, HEAD_DIM), torch.randn(rows, length, HEADS, HEAD_DIM)


def in_use(*caches: PagedCache) -> int:
    """Return the number of blocks in use, of caches that share a pool; no block that one row owns is another's."""
    cache = caches[0]
    assert all(other.pool is cache.pool and other.keys is cache.keys for other in caches)
    tables = [table for other in caches for table in other.tables]
    counted = Counter(block for table in tables for block in table)
    owned = [table[n:] for other in caches for table, n in zip(other.tables, other.shared, strict=True)]
    assert all(counted[block] == 1 for table in owned for block in table)
    return len(counted)


def test_sixteen_rows_that_share_a_thousand_tokens_take_a_fifth_of_a_static_cache() -> None:
    """1,000 shared tokens are 62 blocks; each row copies one of these, and takes 4 or 5 more for its own 64."""
    xk, xv = new(1, 1000)
    cache = made()
    write(cache, 0, xk, xv)
    cache.repeat_first_row(16)
    own = new(16, 64)
    keys, values = write(cache, 1000, *own)
    assert torch.equal(keys[:, :1000], xk.expand(16, -1, -1, -1))
    assert torch.equal(values, torch.cat((xv.expand(16, -1, -1, -1), own[1]), dim=1))
    static = 16 * 1064 * HEADS * HEAD_DIM * 2 * 4
    assert static / cache.nbytes >= 5
    assert in_use(cache) == 62 + 16 * 5


def test_a_shared_block_is_copied_before_a_row_writes_into_it() -> None:
    cache = made()
    xk, xv = new(1, BLOCK + 4)
    write(cache, 0, xk, xv)
    cache.repeat_first_row(3)
    assert in_use(cache) == 2
    fresh = new(3, 1)
    keys, _ = write(cache, BLOCK + 4, *fresh)
    assert torch.equal(keys[:, -1:], fresh[0])
    assert in_use(cache) == 1 + 3
    write(cache, 2, *new(3, 1))  # into the first block, which all of them share
    assert in_use(cache) == 2 * 3


def test_rows_that_leave_give_their_blocks_back_and_the_others_take_them() -> None:
    cache = made()
    write(cache, 0, *new(4, 64))
    size = cache.nbytes
    cache.select_rows([2])
    assert in_use(cache) == 4
    kept, _ = write(cache, 64, *new(1, 1))
    for position in range(65, 64 + 3 * 64):
        keys, _ = write(cache, position, *new(1, 1))
    assert torch.equal(keys[0, :65], kept[0])
    assert cache.nbytes == size
    assert in_use(cache) == 16


@pytest.mark.parametrize("kind", ["static", "concat", "paged", "window:40+2"])
def test_a_shared_prefix_is_fed_once_and_the_text_is_the_same(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="llama")
    model = tiny_model(kv_cache=kind, max_seq_len=128, head_dim=8)
    prefix = some_tokens(1, 32)[0].tolist()
    prompts = [[*prefix, 1, 2], [*prefix, 3], [*prefix, 3]]
    fed: list[list[list[int]]] = []
    shared, _ = model.generate_tokens(
        prompts, 6, temperature=0.0, share_prefix=True, on_step=lambda step: fed.append(step.ids)
    )
    assert fed[0] == [prefix]
    assert fed[1] == [[1, 2], [3], [3]]
    assert "32 tokens that all 3 prompts begin with are fed once" in caplog.text
    if KVCache.named(kind).lossless:
        assert shared == model.generate_tokens(prompts, 6, temperature=0.0)[0]


def test_a_prefix_is_shared_only_where_there_is_one_and_the_cache_is_on() -> None:
    model = tiny_model(kv_cache="paged")
    fed: list[list[list[int]]] = []
    for prompts in ([[1, 2, 3]], [[1, 2], [3, 4]], [[1], [1]]):
        fed.clear()
        model.generate_tokens(prompts, 2, share_prefix=True, on_step=lambda step: fed.append(step.ids))
        assert fed[0] == prompts
    fed.clear()
    model.generate_tokens([[1, 2], [1, 2]], 2, share_prefix=True, on_step=lambda step: fed.append(step.ids))
    assert fed[:2] == [[[1]], [[2], [2]]]
    with pytest.raises(ValueError, match="share_prefix=True needs the KV cache"):
        model.generate_tokens([[1, 2], [1, 2]], 2, share_prefix=True, kv_caching=False)


def test_a_pool_that_is_too_small_says_what_would_do_and_nothing_is_lost() -> None:
    cache = made("paged:4")
    xk, xv = new(2, 2 * BLOCK)
    write(cache, 0, xk, xv)
    with pytest.raises(ValueError, match="6 blocks of 16 positions are needed, and the pool may have 4; take a larger"):
        write(cache, 2 * BLOCK, *new(2, 1))
    assert in_use(cache) == 4
    keys, values = write(cache, 2 * BLOCK - 1, xk[:, -1:], xv[:, -1:])
    assert torch.equal(keys, xk)
    assert torch.equal(values, xv)


def test_padding_that_is_not_kept_is_finite_where_a_mask_hides_it() -> None:
    """A mask multiplies by zero, and unwritten memory may contain NaN."""
    cache = KVCache.of(tiny_args(kv_cache="paged", max_seq_len=64))
    sizes = cache.args.n_kv_heads, cache.args.head_dim
    assert isinstance(cache, PagedCache)
    whole = torch.ones(2, 64, *sizes)
    write(cache, 0, whole, whole)
    assert cache.keys is not None
    cache.keys.fill_(torch.nan)
    keys, values = write(cache, 0, whole[:, :40], whole[:, :40], lengths=[3, 40])
    assert torch.equal(keys, whole[:, :40])
    assert torch.equal(values, whole[:, :40])


def test_a_row_that_begins_again_in_shared_blocks_takes_only_those_that_it_writes() -> None:
    cache = made()
    write(cache, 0, *new(1, 3 * BLOCK))
    copy = cache.copy()
    write(copy, 4, *new(1, 1))
    assert (in_use(cache, copy), [*map(len, copy.tables)]) == (4, [1])


def test_a_full_pool_needs_no_block_for_what_a_deleted_copy_shared() -> None:
    cache = made("paged:2")
    write(cache, 0, *new(1, BLOCK + 4))
    cache.copy()
    write(cache, BLOCK + 4, *new(1, 1))
    other = cache.copy()
    with pytest.raises(Refused, match="3 blocks"):
        write(other, BLOCK + 5, *new(1, 1))


# ---- by several threads ----------------------------------------------------------------------------------------------


@contextmanager
def often_switched() -> Iterator[None]:
    """Switch between threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def test_copies_come_and_go_in_threads_while_a_text_grows() -> None:
    cache, length = made(), 12 * BLOCK
    xk, xv = new(1, length)
    write(cache, 0, xk[:, :BLOCK], xv[:, :BLOCK])
    kept: list[PagedCache] = []
    grown = False

    def grow() -> Tensor:
        nonlocal grown
        for at in range(BLOCK, length):
            keys, _ = write(cache, at, xk[:, at : at + 1], xv[:, at : at + 1])
        grown = True
        return keys

    def come_and_go() -> None:
        copies: list[PagedCache] = []
        while not grown:
            copies.append(cache.copy())
            if len(copies) > 3:
                copies.pop(0).free()  # at once
            if len(copies) > 2:
                del copies[1]  # when it is collected, which is here at once, too
        kept.extend(copies)

    with often_switched():
        keys, *others = in_threads(grow, come_and_go, come_and_go)
    assert others == [None, None]
    assert torch.equal(keys, xk)
    write(cache, length, *new(1, 1))
    assert in_use(cache, *kept) >= 13
    kept.clear()
    write(cache, length + 1, *new(1, 1))
    assert in_use(cache) == 13
