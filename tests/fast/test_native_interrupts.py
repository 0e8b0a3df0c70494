"""After a call that did not end, a cache that native code reads gives the right result or refuses by name."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from interrupts import Sessions, Texts, interrupted, lines_of
from native import ARGS, needs_a_compiler, served, twins
from tables import cases
from tiny import failing, some_tokens

pytestmark = needs_a_compiler
KINDS = ("static", "int8", "int4", "rotated:k4v3+2", "kivi:2+16", "paged", "quest:32", "adakv:0.3")


def interrupt(kind: str, count: int) -> None:
    _, fast = twins("fp32", ARGS)
    texts, dice, before = Texts(fast, kind), random.Random(kind), served(fast)
    for _ in range(count):
        texts.interrupt(dice)
    assert served(fast) > before + count


@torch.inference_mode()
@pytest.mark.parametrize(("kind", "count"), cases([("paged", 4), *((kind, 25) for kind in KINDS)], ("paged", 4)))
def test_after_any_interrupt_a_cache_is_right_or_refuses(kind: str, count: int) -> None:
    interrupt(kind, count)


@torch.inference_mode()
def test_native_code_reads_layers_of_which_a_call_has_grown_some() -> None:
    _, fast = twins("fp32", ARGS)
    text, wanted = some_tokens(1, 100, vocab_size=ARGS.vocab_size), None
    for start in (0, 40):
        cache = fast.new_cache()
        fast(text[:, :40], cache=cache)
        cache.layers[0].room(1, 60, like=cache.layers[0].keys)  # type: ignore[attr-defined]
        before = served(fast)
        found = fast(text[:, start : start + 50], start, cache=cache)
        assert served(fast) == before + 1
        assert len({layer.keys.shape for layer in cache.layers}) == 1  # type: ignore[union-attr]
        other = fast.new_cache()
        fast(text[:, :40], cache=other)
        wanted = fast(text[:, start : start + 50], start, cache=other)
        assert torch.equal(found, wanted)


@torch.inference_mode()
@pytest.mark.parametrize("kind", cases(KINDS, "adakv:0.3"))
def test_a_call_that_was_interrupted_or_failed_is_followed_by_a_call_from_0_alone(kind: str) -> None:
    _, fast = twins("fp32", ARGS)
    text, base = some_tokens(1, 60, vocab_size=ARGS.vocab_size), fast.new_cache(kind)
    fast(text[:, :40], cache=base)
    step = partial(fast, text[:, 40:41], 40)
    caches = [base.copy() for _ in range(lines_of(partial(step, cache=base.copy())) // 20)]
    for number, cache in enumerate(caches):
        interrupted(partial(step, cache=cache), 20 * number + 20)
    caches.append(base.copy())
    with failing(fast.layers[0], MemoryError), pytest.raises(MemoryError):  # a hook: the plain path runs
        fast(text[:, :40], cache=caches[-1])
    failed = [cache for cache in caches if cache.failed_at is not None]
    assert len(failed) > len(caches) // 2
    for cache in failed:
        with pytest.raises(ValueError, match="did not end"):
            step(cache=cache)
        fast(text[:, :40], cache=cache)
        assert torch.equal(step(cache=cache), step(cache=base.copy()))


@pytest.mark.parametrize("kind", cases(["static", "paged", "int8"], "paged"))
def test_after_an_interrupt_a_session_goes_on(kind: str) -> None:
    _, fast = twins("fp32", replace(ARGS, vocab_size=258))
    sessions, dice = Sessions(fast, kind, tolerance=1e-3), random.Random(kind)
    for _ in range(3):
        sessions.interrupt(dice)
