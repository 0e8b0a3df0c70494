"""Any number of texts run on one model at the same time, in any threads, and each is what it is alone."""

import copy
import os
import pickle
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fakes import Ids
from native import model_of, needs_a_compiler, twins
from threads import elsewhere, in_threads
from tiny import some_tokens, tiny_model
from torch import Tensor, nn

from llama.model import Transformer
from llama.texts.session import Session

PROMPTS = [[1, 2, 3], [7, 8, 9, 10], [20, 3], [5] * 6]
LENGTH = 12
KINDS = ("static", "concat", "paged", "int8", "int4", "window:20+3")

FAST = [False, pytest.param(True, marks=needs_a_compiler)]


@pytest.fixture(params=FAST, ids=["plain", "fast"])
def model(request: pytest.FixtureRequest) -> Transformer:
    return twins("fp32")[1] if request.param else model_of("fp32")


def text_of(model: Transformer, prompt: list[int], **options: Any) -> list[int]:
    return model.generate_tokens([prompt], LENGTH, **{"temperature": 0.0, **options})[0][0]


# ---- many texts ------------------------------------------------------------------------------------------------------


class Work:
    """The work of one thread with a shared model, compared with a model of its own."""

    def __init__(self, model: Transformer, alone: Transformer, seed: int) -> None:
        self.model, self.alone, self.draw = model, alone, random.Random(seed)
        self.sessions: list[tuple[Session, Session]] = []
        self.done = 0

    def step(self) -> None:
        of_sessions = (self.feed, self.fork, self.go_on, self.go_back, self.leave_a_stream, self.drop)
        self.draw.choice((self.generate, self.call, *of_sessions))()
        self.done += 1

    def both(self, act: Callable[[Transformer], object]) -> None:
        expected, found = act(self.alone), act(self.model)
        assert found == expected

    def generate(self) -> None:
        prompts = self.draw.sample(PROMPTS, self.draw.randint(1, 3))
        room = [self.draw.randint(1, LENGTH) for _ in prompts]  # rows end apart, and leave the batch
        options = {"seed": self.draw.randrange(99), "temperature": self.draw.choice((0.0, 0.9))}
        options |= self.draw.choice(({"kv_caching": False}, {"kv_cache": self.draw.choice(KINDS)}, {}))
        if options.keys() & {"kv_caching", "kv_cache"}:
            self.both(lambda model: model.generate_tokens(prompts, room, **options)[0])
        else:  # other threads may set another kind meanwhile
            self.both(lambda model: model.generate_tokens(prompts, room, **options, kv_cache="static")[0])

    def feed(self) -> None:
        kind, prompt = self.draw.choice(KINDS), self.draw.choice(PROMPTS)
        pair = tuple(model.session(Ids(), kv_cache=kind) for model in (self.model, self.alone))  # type: ignore[arg-type]
        for session in pair:
            session.feed(prompt)
        self.sessions = [*self.sessions[-3:], pair]  # type: ignore[list-item]

    def fork(self) -> None:
        if self.sessions:
            ours, twin = self.draw.choice(self.sessions)
            self.sessions.append((ours.fork(), twin.fork()))

    def go_on(self) -> None:
        if self.sessions:
            count, seed = self.draw.randint(1, 9), self.draw.randrange(99)
            ours, twin = self.draw.choice(self.sessions)
            assert ours.generate(count, seed=seed) == twin.generate(count, seed=seed)
            assert (ours.tokens, ours.fed, ours.nbytes) == (twin.tokens, twin.fed, twin.nbytes)
        else:
            self.model.kv_cache = self.draw.choice(KINDS)  # the kind of later caches

    def go_back(self) -> None:
        if self.sessions:
            back = self.draw.randint(1, 30)
            for session in self.draw.choice(self.sessions):
                session.rewind(max(1, session.position - back))

    def leave_a_stream(self) -> None:
        if self.sessions:
            ours, twin = (session.stream(5, temperature=0.0) for session in self.draw.choice(self.sessions))
            assert next(ours) == next(twin)

    def drop(self) -> None:
        if self.sessions:
            for session in self.sessions.pop(self.draw.randrange(len(self.sessions))):
                session.drop()

    def call(self) -> None:
        tokens, kind = torch.tensor([self.draw.choice(PROMPTS)]), self.draw.choice(KINDS)
        caches = [model.new_cache(kind) for model in (self.alone, self.model)]
        for start in range(tokens.shape[1]):
            models = zip((self.alone, self.model), caches, strict=True)
            expected, found = (model(tokens[:, start : start + 1], start, cache=cache) for model, cache in models)
            assert torch.equal(expected, found)


def test_every_text_of_many_threads_is_what_it_is_alone(model: Transformer, request: pytest.FixtureRequest) -> None:
    """For ten minutes with --long, else for a fixed number of steps."""
    seconds, threads = (600, 2) if request.config.getoption("--long") else (0, 4)
    works = [Work(model, copy.deepcopy(model), seed) for seed in range(threads)]
    before, end = sys.getswitchinterval(), time.monotonic() + seconds

    def go(work: Work) -> None:
        while work.done < 8 or time.monotonic() < end:
            work.step()

    sys.setswitchinterval(1e-4)
    try:
        outcomes = in_threads(*(lambda work=work: go(work) for work in works))  # type: ignore[misc]
    finally:
        sys.setswitchinterval(before)
    assert outcomes == [None] * threads
    assert all(work.done > 5 for work in works)


def test_streams_read_in_turn_in_other_threads_equal_those_alone(model: Transformer) -> None:
    expected = [text_of(model, prompt) for prompt in PROMPTS]
    streams = [model.stream(Ids(), [prompt], LENGTH, temperature=0.0) for prompt in PROMPTS]  # type: ignore[arg-type]
    going = list(streams)
    while going:
        going = [stream for stream in going if elsewhere(partial(next, stream, None)) is not None]
    assert [stream.results[0]["ids"] for stream in streams] == expected


def test_meta_s_form_has_a_text_for_each_thread(model: Transformer) -> None:
    texts = [some_tokens(1, 9, seed=seed) for seed in range(4)]
    whole = [model.with_kv_caching(False)(text)[:, -1] for text in texts]

    def step_by_step(text: Tensor) -> Tensor:
        assert model.cache is None
        return [model(text[:, start : start + 1], start) for start in range(9)][-1][:, -1]

    found = in_threads(*(lambda text=text: step_by_step(text) for text in texts))  # type: ignore[misc]
    for ours, theirs in zip(found, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    assert model.cache is None


# ---- one cache has one user at a time --------------------------------------------------------------------------------


def while_it_computes(model: Transformer, feed: Callable[[], Any], task: Callable[[], Any]) -> Any:
    """Run a task in this thread while another thread is in the middle of a forward."""
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


def test_a_second_call_with_a_cache_in_the_middle_of_the_first_is_refused() -> None:
    model, tokens = tiny_model(dtype=torch.float32).requires_grad_(False), some_tokens(1, 5)
    cache, results = model.new_cache(), []
    expected = model(tokens)
    for act in (lambda: model(tokens, cache=cache), cache.copy):
        with pytest.raises(RuntimeError, match=r"this cache is in the middle of another call.*new_cache"):
            while_it_computes(model, lambda: results.append(model(tokens, cache=cache)), act)
    assert all(torch.equal(result, expected) for result in results)
    model(tokens, cache=cache)


def test_a_hook_that_calls_the_model_with_the_same_cache_is_refused_and_with_another_it_is_served() -> None:
    model, tokens = tiny_model(dtype=torch.float32).requires_grad_(False), some_tokens(1, 5)
    cache, expected, done = model.new_cache(), model(tokens), []

    def intrude(*_: object) -> None:
        hook.remove()
        with pytest.raises(RuntimeError, match="in the middle of another call"):
            model(tokens, cache=cache)
        done.append(torch.equal(model(tokens, cache=model.new_cache()), expected))

    hook = model.blocks[0].register_forward_hook(intrude)
    assert torch.equal(model(tokens, cache=cache), expected)
    assert done == [True]


def test_a_layer_of_ones_own_needs_no_cache() -> None:
    class Skip(nn.Module):
        def forward(self, h: Tensor, *_: object) -> Tensor:
            return h

    model = tiny_model(dtype=torch.float32).requires_grad_(False)
    model.layers[-1] = Skip()
    assert model(some_tokens(1, 3)).shape[:2] == (1, 3)
    cached, uncached = (text_of(model, PROMPTS[0], kv_caching=on) for on in (True, False))
    assert cached == uncached


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_refuses_threads_and_computes_with_one(model: Transformer) -> None:
    """Each use of a model that the parent made; SIGALRM ends a child that waits."""
    ids = [[1, 2, 3]]
    session = model.session(Ids())  # type: ignore[arg-type]
    session.feed([1, 2])
    uses: dict[str, Callable[[], object]] = {
        "the model": lambda: model.generate_tokens(ids, 2, temperature=0.0),
        "its twin": lambda: model.generate_tokens(ids, 2, temperature=0.0, kv_caching=False),
        "a copy": lambda: copy.copy(model).generate_tokens(ids, 2, temperature=0.0),
        "a deep copy": lambda: copy.deepcopy(model).generate_tokens(ids, 2, temperature=0.0),
        "a pickle": lambda: pickle.loads(pickle.dumps(model)).generate_tokens(ids, 2, temperature=0.0),
        "a session": lambda: session.fork().generate(2, temperature=0.0),
        "a session's twin": lambda: session.fork().generate(2, temperature=0.0, kv_caching=False),
    }
    for name, use in uses.items():
        expected = use()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            torch.set_num_threads(2)
            try:
                use()
            except RuntimeError as why:
                torch.set_num_threads(1)
                told = "this process was forked" in str(why) and "set_num_threads(1)" in str(why)
                os._exit(0 if told and use() == expected else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, name
