"""After a call that did not end, a cache and a session give the right result or refuse by name."""

import copy
import pickle
import random
from threading import Thread

import pytest
import torch
from crossings import kinds
from interrupts import Sessions, Texts, interrupted, lines_of
from tables import cases
from tiny import failing, some_tokens, tiny_model

from llama.kv_cache import Cache, PagedCache
from llama.kv_cache.paged import Pool

KINDS = ["static", "paged", "int8", "window:20+3", "h2o:20", "static@0;int4"]
ALL = [*dict.fromkeys([*KINDS, *kinds(), "quest:16", "paged:40"])]
EVERY = cases(ALL, *KINDS)


@pytest.fixture
def count(request: pytest.FixtureRequest) -> int:
    """Return how many interrupts a kind gets: 10,000 of all kinds with --long, half of them in sessions."""
    return (10_000 if request.config.getoption("--long") else 600) // 2 // len(EVERY) + 1


@torch.inference_mode()
@pytest.mark.parametrize("kind", cases(ALL, "paged", "int8"))
def test_after_any_interrupt_a_cache_is_right_or_refuses(kind: str, count: int) -> None:
    model = tiny_model(head_dim=32, max_seq_len=128, dtype=torch.float32)
    texts, dice = Texts(model, kind), random.Random(kind)
    for _ in range(count):
        texts.interrupt(dice)


@pytest.mark.parametrize("kind", cases(ALL, "paged", "int8"))
def test_after_any_interrupt_a_session_goes_on(kind: str, count: int) -> None:
    model = tiny_model(vocab_size=258, head_dim=32, max_seq_len=160).requires_grad_(False)
    sessions, dice = Sessions(model, kind), random.Random(kind)
    for _ in range(count):
        sessions.interrupt(dice)


@pytest.mark.parametrize("kind", ["static", "int8"])
def test_a_text_that_a_later_layer_refuses_is_not_mixed_with_the_one_before(kind: str) -> None:
    """Gradients are refused; the layers before have written."""
    model = tiny_model(head_dim=32, max_seq_len=128, dtype=torch.float32).requires_grad_(False)
    model.layers[1].requires_grad_(True)
    first, second, cache = some_tokens(1, 41), some_tokens(1, 41, seed=1), model.new_cache(kind)
    with torch.inference_mode():
        model(first[:, :40], cache=cache)
    with pytest.raises(ValueError, match="gradients cannot flow"):
        model(second[:, :40], cache=cache)
    with torch.inference_mode(), pytest.raises(ValueError, match="did not end"):
        model(first[:, 40:], 40, cache=cache)


@torch.inference_mode()
@pytest.mark.parametrize("whose", ["another model", "another text"])
@pytest.mark.parametrize("layer", [0, 1], ids=["before writing", "in the middle of writing"])
@pytest.mark.parametrize("kind", EVERY)
def test_after_a_call_from_0_that_failed_no_call_continues(kind: str, layer: int, whose: str) -> None:
    models = [tiny_model(head_dim=32, max_seq_len=128, dtype=torch.float32) for _ in range(2)]
    first, second = some_tokens(1, 41), some_tokens(1, 41, seed=1)
    cache, fails = models[0].new_cache(kind), models[whose == "another model"]
    models[0](first[:, :40], cache=cache)
    with failing(fails.layers[layer], ZeroDivisionError), pytest.raises(ZeroDivisionError):
        fails(second[:, :40], cache=cache)
    for model in models:
        for text in (first, second):
            with pytest.raises(ValueError, match=r"did not end.* feed the text again from start_pos=0"):
                model(text[:, 40:], 40, cache=cache)
    model, other = models[1], models[1].new_cache(kind)
    for start, end in ((0, 40), (40, 41)):
        expected = model(second[:, start:end], start, cache=other)
        assert torch.equal(model(second[:, start:end], start, cache=cache), expected)


@torch.inference_mode()
@pytest.mark.parametrize("kind", EVERY)
def test_after_a_step_that_failed_a_text_goes_on_from_where_the_cache_can_be_truncated(kind: str) -> None:
    model, text = tiny_model(head_dim=32, max_seq_len=128, dtype=torch.float32), some_tokens(1, 60)
    cache, other = (model.new_cache(kind) for _ in range(2))
    for one in (cache, other):
        model(text[:, :40], cache=one)
    with failing(model.layers[1], MemoryError), pytest.raises(MemoryError):
        model(text[:, 40:50], 40, cache=cache)
    for start in (40, 50):
        with pytest.raises(ValueError, match="did not end"):
            model(text[:, start:], start, cache=cache)
    assert not cache.truncate(50)
    assert cache.truncate(40) == all(layer.keeps_past for layer in cache.layers)
    if cache.failed_at is None:
        assert torch.equal(model(text[:, 40:], 40, cache=cache), model(text[:, 40:], 40, cache=other))


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["static", "paged"])
def test_a_copy_of_a_cache_after_a_call_that_failed_refuses_what_the_cache_refuses(kind: str) -> None:
    model, text = tiny_model(head_dim=32, max_seq_len=128, dtype=torch.float32), some_tokens(1, 60)
    cache = model.new_cache(kind)
    model(text[:, :40], cache=cache)
    with failing(model.layers[1], MemoryError), pytest.raises(MemoryError):
        model(text[:, 40:50], 40, cache=cache)
    copies = [cache.copy(), cache.row_copy(0, 40), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    for one in copies:
        with pytest.raises(ValueError, match="did not end"):
            model(text[:, 40:], 40, cache=one)
        with pytest.raises(ValueError, match="did not end"):
            model.new_cache(kind).join(one, 0, 40)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["static", "concat", "int8", "window:20+3", "static@0;int8"])
def test_a_refused_write_leaves_the_cache_as_it_was_unless_an_earlier_layer_wrote(kind: str) -> None:
    model, text = tiny_model(head_dim=32, max_seq_len=128, dtype=torch.float32), some_tokens(1, 60)
    cache = model.new_cache(kind, max_seq_len=50)
    model(text[:, :49], cache=cache)
    for wrong in (20, 55):
        if wrong == 55 or kind in ("int8", "window:20+3", "static@0;int8"):
            with pytest.raises(ValueError, match=r"gap|from 0|max_seq_len=50|did not end"):
                model(text[:, wrong : wrong + 1], wrong, cache=cache)
    if kind == "static@0;int8":
        with pytest.raises(ValueError, match="did not end"):
            model(text[:, 49:50], 49, cache=cache)
    else:
        other = model.new_cache(kind, max_seq_len=50)
        model(text[:, :49], cache=other)
        assert torch.equal(model(text[:, 49:50], 49, cache=cache), model(text[:, 49:50], 49, cache=other))


# ---- a pool that texts share -----------------------------------------------------------------------------------------


def long_rows(*rows: range) -> torch.Tensor:
    return torch.tensor([list(row) for row in rows])


@torch.inference_mode()
@pytest.mark.parametrize("every", cases([1, 9], 9))
def test_an_interrupt_of_a_join_or_of_a_pool_that_grows_leaves_both_texts_right(every: int) -> None:
    """The text that was interrupted is fed again, then the other one is, and then the first goes on."""
    model = tiny_model(max_seq_len=100, vocab_size=100)
    first, second, third = range(1, 21), range(30, 50), range(60, 80)

    def joining() -> tuple[Cache, Cache]:
        batch = model.new_cache("paged")
        model(long_rows(first), cache=batch)
        text = batch.sibling()
        model(long_rows(second), cache=text)
        return batch, text

    def growing() -> tuple[Cache, Cache]:
        cache = model.new_cache("paged")
        model(long_rows(first), cache=cache)
        return cache, cache.copy()

    def join(batch: Cache, text: Cache) -> None:
        batch.join(text, 1, 20)

    def grow(cache: Cache, _: Cache) -> None:
        model(torch.tensor([[*third, *second]]), 20, cache=cache)

    together, alone = model.new_cache("paged"), model.new_cache("paged")
    model(long_rows(first, second), cache=together)
    model(torch.tensor([[*first, *third, *second]]), cache=alone)
    wanted = model(torch.tensor([[5], [6]]), [20, 20], cache=together), model(torch.tensor([[5]]), 60, cache=alone)
    for make, act, expected in ((joining, join, wanted[0]), (growing, grow, wanted[1])):
        caches = make()
        for at in range(1, lines_of(lambda caches=caches, act=act: act(*caches)), every):
            caches = make()
            if not interrupted(lambda caches=caches, act=act: act(*caches), at):
                continue
            if act is join:
                model(long_rows(first, second), cache=caches[0])
                model(long_rows(third), cache=caches[1])
                found = model(torch.tensor([[5], [6]]), [20, 20], cache=caches[0])
            elif caches[0].truncate(20):
                grow(*caches)
                model(torch.tensor([[*second] * 3]), 20, cache=caches[1])
                found = model(torch.tensor([[5]]), 60, cache=caches[0])
            assert torch.allclose(found, expected, atol=1e-9), f"{act.__name__}, line {at}"


@torch.inference_mode()
def test_a_pool_that_grows_gives_no_memory_to_a_copy_that_is_freed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(max_seq_len=100, vocab_size=100)
    cache = model.new_cache("paged")
    model(long_rows(range(1, 21)), cache=cache)
    copy, users, threads = cache.copy(), Pool.users, list[Thread]()

    def freed_meanwhile(pool: Pool) -> list[PagedCache]:
        found = users(pool)
        if pool.growing and not threads:
            threads.append(Thread(target=copy.free))
            threads[0].start()
            threads[0].join(0.1)
        return found

    monkeypatch.setattr(Pool, "users", freed_meanwhile)
    model(long_rows(range(30, 90)), 20, cache=cache)
    threads[0].join()
    assert copy.nbytes == 0
