"""A model has one owner at a time, by call and by thread; all others get an error, never another text."""

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from fakes import Ids
from native import needs_a_compiler, twins
from oracles import some_tokens, tiny_model
from threads import elsewhere, in_threads
from torch import Tensor, nn

from llama.model import Transformer
from llama.perplexity import expected

PROMPTS = [[1, 2, 3], [7, 8, 9, 10], [20, 3], [5] * 6]
LENGTH = 12


FAST = [pytest.param(f"fast, {kind}", marks=needs_a_compiler) for kind in ("static", "paged")]


@pytest.fixture(params=["plain, static", "plain, paged", *FAST])
def model(request: pytest.FixtureRequest) -> Transformer:
    how, _, kind = request.param.partition(", ")
    made = twins("fp32")[how == "fast"]
    made.kv_cache = kind
    return made


def text_of(model: Transformer, prompt: list[int]) -> list[int]:
    return model.generate_tokens([prompt], LENGTH, temperature=0.0)[0][0]


def test_every_text_of_many_threads_is_right_or_refused(model: Transformer, request: pytest.FixtureRequest) -> None:
    tries = 2000 if request.config.getoption("--long") else 12
    expected = [text_of(model, prompt) for prompt in PROMPTS]
    before, right, wrong = sys.getswitchinterval(), [0], []

    def work(own: int) -> None:
        for turn in range(tries):
            prompt = (own + turn) % len(PROMPTS)
            try:
                text = text_of(model, PROMPTS[prompt])
            except RuntimeError as error:
                if "in the middle of" not in str(error):
                    raise
                continue
            right[0] += text == expected[prompt]
            if text != expected[prompt]:
                wrong.append((text, expected[prompt]))

    sys.setswitchinterval(1e-5)
    try:
        outcomes = in_threads(*(lambda own=own: work(own) for own in range(32)))  # type: ignore[misc]
    finally:
        sys.setswitchinterval(before)
    assert outcomes == [None] * 32
    assert wrong == []
    assert right[0] > 0
    assert text_of(model, PROMPTS[0]) == expected[0]


def test_a_generation_within_a_forward_hook_is_refused_and_the_outer_text_is_whole(model: Transformer) -> None:
    expected = text_of(model, PROMPTS[0])
    refused = []

    def intrude(*_: object) -> None:
        for intrusion in (
            lambda: text_of(model, PROMPTS[1]),
            lambda: model(torch.tensor([[1, 2]])),
            lambda: model.free_cache(),
            lambda: setattr(model, "kv_caching", False),
        ):
            with pytest.raises(RuntimeError, match="in the middle of"):
                intrusion()
            refused.append(1)

    for module in (model, model.blocks[0].attention):
        hook = module.register_forward_hook(intrude)
        assert text_of(model, PROMPTS[0]) == expected
        hook.remove()
    assert len(refused) == 2 * 4 * LENGTH


def while_it_computes(model: Transformer, feed: Callable[[], Any], task: Callable[[], Any]) -> Any:
    """Do a task in this thread while another is in the middle of a forward."""
    inside, done = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        if threading.current_thread() is thread:
            inside.set()
            done.wait(60)

    hook = model.blocks[0].feed_forward.register_forward_hook(wait)
    thread = threading.Thread(target=feed)
    thread.start()
    try:
        inside.wait(60)
        return task()
    finally:
        done.set()
        thread.join()
        hook.remove()


INTRUSIONS: dict[str, Callable[[Transformer], Any]] = {
    "generate": lambda model: text_of(model, PROMPTS[1]),
    "cached call": lambda model: model(torch.tensor([[1, 2]])),
    "switch": lambda model: setattr(model, "kv_caching", not model.kv_caching),
    "free": lambda model: model.free_cache(),
    "reserve": lambda model: model.reserve_cache(1, 4),
    "operations": lambda model: model.use(model.ops),
}


@pytest.mark.parametrize("intrusion", INTRUSIONS)
@pytest.mark.parametrize("how", ["generation", "cached call", "uncached call"])
def test_nobody_changes_a_model_that_computes_in_another_thread(how: str, intrusion: str) -> None:
    model = tiny_model(dtype=torch.float32).requires_grad_(False)
    model.kv_caching = how != "uncached call"
    tokens = some_tokens(1, 5)
    results: list[Any] = []

    def feed() -> None:
        results.append(text_of(model, PROMPTS[0]) if how == "generation" else model(tokens))

    feed()
    if how == "uncached call" and intrusion == "cached call":
        while_it_computes(model, feed, lambda: INTRUSIONS[intrusion](model))  # it is uncached here, and shares nothing
    else:
        with pytest.raises(RuntimeError, match="in the middle of"):
            while_it_computes(model, feed, lambda: INTRUSIONS[intrusion](model))
    assert torch.equal(torch.as_tensor(results[0]), torch.as_tensor(results[1]))
    INTRUSIONS[intrusion](model)


@pytest.mark.parametrize("intrusion", INTRUSIONS)
def test_nobody_changes_a_model_that_another_thread_has_switched(intrusion: str) -> None:
    model = tiny_model(dtype=torch.float32).requires_grad_(False)
    with model.switched(kv_caching=False, kv_cache="concat"):
        with pytest.raises(RuntimeError, match="another thread keeps"):
            elsewhere(lambda: INTRUSIONS[intrusion](model))
        with model.switched(kv_caching=True):
            text_of(model, PROMPTS[0])
        with pytest.raises(RuntimeError, match="another thread keeps"):
            elsewhere(lambda: INTRUSIONS[intrusion](model))
    assert (model.kv_caching, model.caches[0].args.kv_cache) == (True, "static")
    elsewhere(lambda: INTRUSIONS[intrusion](model))


def test_a_block_that_another_thread_ends_is_undone_and_read_on_there() -> None:
    model = tiny_model(dtype=torch.float32).requires_grad_(False)
    model.kv_caching = False
    generator = expected_of(model)
    next(generator)
    elsewhere(generator.close)
    assert (model.kv_caching, [cache.nbytes for cache in model.caches]) == (False, [0, 0])
    generator = expected_of(model)
    next(generator)
    elsewhere(lambda: next(generator))
    elsewhere(lambda: list(generator))
    assert elsewhere(lambda: text_of(model, PROMPTS[0])) == text_of(model, PROMPTS[0])


def test_blocks_that_end_in_the_order_in_which_they_began_keep_nothing_afterwards() -> None:
    model = tiny_model(dtype=torch.float32).requires_grad_(False)
    first, second = expected_of(model), expected_of(model)
    next(first), next(second)
    first.close(), second.close()
    assert elsewhere(lambda: text_of(model, PROMPTS[0])) == text_of(model, PROMPTS[0])


def expected_of(model: Transformer) -> Generator[Tensor, None, None]:
    return expected(model, list(range(1, 9)), prompt_len=4)


def test_caches_and_layers_that_are_put_in_place_by_hand_go_on_with_a_text(model: Transformer) -> None:
    tokens = some_tokens(1, 9)
    whole = model(tokens)
    twin = copy.deepcopy(model)

    def copy_the_caches() -> None:
        for block in model.blocks:
            block.attention.cache = copy.deepcopy(block.attention.cache)

    def copy_a_layer() -> None:
        model.layers[-1] = copy.deepcopy(model.layers[-1])

    def hand_over() -> None:
        for block, other in zip(model.blocks, twin.blocks, strict=True):
            block.attention.cache = other.attention.cache

    for change, by in ((copy_the_caches, model), (copy_a_layer, model), (hand_over, twin)):
        model.free_cache()
        by(tokens[:, :5])
        change()
        torch.testing.assert_close(model(tokens[:, 5:], 5), whole[:, 5:], rtol=0, atol=1e-4)


def test_a_layer_of_ones_own_needs_no_cache() -> None:
    class Skip(nn.Module):
        def forward(self, h: Tensor, *_: object) -> Tensor:
            return h

    model = tiny_model(dtype=torch.float32).requires_grad_(False)
    model.layers[-1] = Skip()
    assert model(some_tokens(1, 3)).shape[:2] == (1, 3)


def test_uncached_calls_run_beside_each_other(model: Transformer) -> None:
    model.kv_caching = False
    tokens = [some_tokens(1, 20, seed=seed) for seed in range(8)]
    expected = [model(some) for some in tokens]
    found = in_threads(*(lambda some=some: model(some) for some in tokens * 4))  # type: ignore[misc]
    assert all(isinstance(one, Tensor) for one in found)
    assert all(torch.equal(one, other) for one, other in zip(found, expected * 4, strict=True))


def test_a_stream_may_go_on_in_another_thread(model: Transformer) -> None:
    expected = text_of(model, PROMPTS[0])
    steps = model.generate_tokens  # its ids, taken by threads in turn
    assert elsewhere(lambda: steps([PROMPTS[0]], LENGTH, temperature=0.0)[0][0]) == expected
    stream = model.stream(Ids(), [PROMPTS[0]], LENGTH, temperature=0.0)  # type: ignore[arg-type]
    while elsewhere(lambda: next(stream, None)) is not None:
        pass
    assert stream.results[0]["ids"] == expected
    assert text_of(model, PROMPTS[0]) == expected


def test_a_text_that_another_thread_has_replaced_is_not_gone_on_with(model: Transformer) -> None:
    tokens = some_tokens(1, 9)
    model(tokens)
    elsewhere(lambda: model(some_tokens(1, 9, seed=1)))
    with pytest.raises(RuntimeError, match="another thread has begun a text of its own"):
        model(tokens[:, :1], 9)
    model(tokens, [0])
    model(tokens[:, :1], 9)


def test_a_text_may_be_handed_to_another_thread(model: Transformer) -> None:
    tokens = some_tokens(1, 10)
    whole = model(tokens)
    model.free_cache()
    model(tokens[:, :9])
    step = elsewhere(lambda: model(tokens[:, 9:], 9))
    torch.testing.assert_close(step, whole[:, 9:], rtol=0, atol=1e-4)


@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=needs_a_compiler)])
@pytest.mark.parametrize("kind", ["static", "concat", "paged", "int8", "window:30"])
@pytest.mark.parametrize("part", [slice(None), slice(1), slice(1, None)])
def test_models_that_share_layers_take_turns_and_none_goes_on_with_a_text_of_the_other(
    part: slice, kind: str, fast: bool
) -> None:
    one, other = (twins("fp32")[fast] for _ in range(2))
    one.kv_cache = kind
    other.layers = one.layers[part]
    expected = [text_of(copy.deepcopy(model), PROMPTS[0]) for model in (one, other)]
    for _ in range(2):
        assert [text_of(model, PROMPTS[0]) for model in (one, other)] == expected
    first, second = (model.stream(Ids(), PROMPTS[:1], LENGTH, temperature=0.0) for model in (one, other))  # type: ignore[arg-type]
    next(first), next(second), next(second)
    with pytest.raises(RuntimeError, match="another model, which shares layers"):
        list(first)
    with pytest.raises((RuntimeError, ValueError)):  # for the caches were given back
        list(second)
    one(torch.tensor([[1, 2]]))
    other(torch.tensor([[1, 2, 3]]))
    with pytest.raises(RuntimeError, match="another model, which shares layers"):
        one(torch.tensor([[3]]), 2)
    assert [text_of(model, PROMPTS[0]) for model in (one, other)] == expected


def test_a_copy_in_the_middle_of_a_forward_is_free() -> None:
    model = tiny_model(dtype=torch.float32).requires_grad_(False)
    other = while_it_computes(model, lambda: text_of(model, PROMPTS[0]), lambda: copy.deepcopy(model))
    for block in other.blocks:
        block.feed_forward._forward_hooks.clear()
    assert not other.generating
    assert text_of(other, PROMPTS[0]) == text_of(model, PROMPTS[0])


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("caching", [False, True])
def test_a_call_that_is_broken_off_leaves_a_usable_model(
    model: Transformer, error: type[BaseException], caching: bool
) -> None:
    def fail(*_: object) -> None:
        raise error

    model.kv_caching = caching
    hook = model.blocks[0].register_forward_hook(fail)
    for task in (lambda: model(some_tokens(1, 4)), lambda: text_of(model, PROMPTS[0])):
        with pytest.raises(error):
            task()
    hook.remove()
    assert not model.generating
    model(some_tokens(1, 4))
    text_of(model, PROMPTS[0])


FORKS = """
import os, torch
from llama.args import ModelArgs
from llama.fast.choose import make_fast
from llama.files import cache_dir
from llama.model import Transformer
model = Transformer(ModelArgs(dim=64, n_layers=2, n_heads=2, multiple_of=32, vocab_size=64)).requires_grad_(False)
if {fast}:
    make_fast(model, cache_dir() / "native-tests")
tokens = torch.arange(64).view(1, 64)
torch.set_num_threads(2)
expected = model(tokens)
for threads in (2, 1):
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(threads)
        try:
            code = 0 if torch.allclose(model(tokens), expected, atol=1e-5) else 3
        except RuntimeError as error:
            code = 4 if "forked" in str(error) and "set_num_threads(1)" in str(error) else 5
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=needs_a_compiler)])
def test_a_forked_process_is_told_why_it_would_hang_and_computes_with_one_thread(fast: bool) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKS.format(fast=fast)]
    assert subprocess.run(command, check=True, timeout=300, capture_output=True, text=True).stdout == "4\n0\n"
