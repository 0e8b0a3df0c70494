"""After a call that did not end, a cache that native code reads gives the right result or refuses by name."""

import random
from dataclasses import replace

import pytest
import torch
from interrupts import Texts, failing_at, interrupted, lines_of
from native import ARGS, needs_a_compiler, served, twins
from oracles import some_tokens

pytestmark = needs_a_compiler
KINDS = ("static", "int8", "int4", "rotated:k4v3+2", "kivi:2+16", "paged", "quest:32", "adakv:0.3")


def interrupt(kind: str, count: int) -> None:
    _, fast = twins("fp32", ARGS)
    texts, dice, before = Texts(fast, kind), random.Random(kind), served(fast)
    for _ in range(count):
        texts.interrupt(dice)
    assert served(fast) > before + count


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["static", "paged"])
def test_after_an_interrupt_a_cache_is_right_or_refuses(kind: str) -> None:
    interrupt(kind, 4)


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("kind", KINDS)
def test_after_any_interrupt_a_cache_is_right_or_refuses(kind: str) -> None:
    interrupt(kind, 150)


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
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_step_that_failed_nobody_goes_on_and_a_session_does(kind: str) -> None:
    """The step fails in a hook, or is interrupted behind the native call, between two steps of a generation."""
    _, fast = twins("fp32", replace(ARGS, vocab_size=258))
    text, cache = some_tokens(1, 60, vocab_size=258), fast.new_cache(kind)
    fast(text[:, :40], cache=cache)
    step = lambda: fast(text[:, 40:41], 40, cache=cache)  # noqa: E731
    refusals = 0
    for at in range(1, lines_of(lambda: fast(text[:, 40:41], 40, cache=cache.copy())), 9):
        kept = cache
        cache = kept.copy()
        interrupted(step, at)
        if cache.failed_at is not None:
            refusals += 1
            with pytest.raises(ValueError, match="did not end"):
                step()
        cache = kept
    assert refusals > 3
    with failing_at(fast.layers[0], MemoryError):  # a hook on a layer: the plain path runs, and fails
        with pytest.raises(MemoryError):
            fast(text[:, :40], cache=cache)
    with pytest.raises(ValueError, match="did not end"):
        step()
    fast(text[:, :40], cache=cache)
    step()
