"""What the native stepper chooses, and its memory while models, caches and other texts change.

`test_paths` compares its texts with those of plain steps, each of which is a call of the model by native code.
"""

import weakref
from collections.abc import Callable, Sequence
from ctypes import c_int64
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from fakes import Ids
from generations import GREEDY, WAYS
from hypothesis import given, settings
from hypothesis import strategies as st
from native import FOLDER, VOCAB, needs_a_compiler, served, twins
from paths import native as native_path
from tables import cases
from threads import elsewhere, in_threads
from torch import Tensor

from llama.batch import Batch, NonFiniteLogits
from llama.fast.fingerprint import Snapshot
from llama.fast.native_caches import CacheRoom, NativeCache
from llama.fast.native_call import NativeForward
from llama.fast.native_runner import NativeRunner
from llama.fast.native_structs import Choice, NativeBatch, NativeModel
from llama.generation import make_stepper
from llama.kv_cache import Cache, StaticCache
from llama.model import Transformer
from llama.request import make_request
from llama.rows import Rows
from llama.sampling import Sampler, Sampling, choose

pytestmark = needs_a_compiler
PROMPTS = [[5, 9, 2, 44], [7] * 40, [3, 3, 8, 1, 60, 12, 30]]


def pair(kv_cache: str) -> tuple[Transformer, Transformer]:
    """Return a model with the plain stepper, of which each step is a native call, and one with the native stepper."""
    path = native_path(kv_cache)
    return path.plain, path.fast


# ---- choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_no_token_is_chosen_if_a_logit_is_not_finite(bad: float) -> None:
    for vocab in (1, 15, 16, 17, 600):
        for place in {0, vocab // 2, vocab - 1}:
            logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(vocab))
            logits[1, place] = bad
            assert chosen(logits, Sampling(temperature=0.0)) == [int(logits[0].argmax()), -1]


@lru_cache
def native() -> NativeRunner:
    return NativeRunner(FOLDER)


def chosen(logits: Tensor, sampling: Sampling, draws: Tensor | None = None, seen: Tensor | None = None) -> list[int]:
    """Return what native code chooses."""
    draws = torch.zeros(len(logits), dtype=torch.float64) if draws is None else draws
    marks = [[]] * len(logits) if seen is None else [row.nonzero()[:, 0].tolist() for row in seen]
    stream = torch.Generator()
    return native().choose(logits, [Sampler(sampling, stream, row, logits.shape[1]) for row in marks], draws)


def test_two_threads_choose_what_one_chooses() -> None:
    stream = torch.Generator().manual_seed(0)
    draws, made = torch.rand(5, generator=stream, dtype=torch.float64), []
    logits = [2 * torch.randn((5, vocab), generator=stream) for vocab in (1, 16, 513, 5000)]
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            made.append([chosen(some, Sampling(0.9, top_p=0.9, top_k=40), draws) for some in logits])
    finally:
        torch.set_num_threads(1)
    assert made[0] == made[1]


def check_choice(ours: list[int], theirs: Tensor) -> int:
    """Assert that both chose the same tokens, except those that native code left undecided; return their number."""
    assert all(one in (other, Choice.TOO_NEAR) for one, other in zip(ours, theirs.tolist(), strict=True))
    return ours.count(Choice.TOO_NEAR)


@settings(max_examples=200, deadline=None)
@given(
    vocab=st.one_of(st.integers(1, 70), st.sampled_from([511, 512, 513, 2047, 2049, 5000, 49152])),
    spread=st.sampled_from([0.0, 1e-30, 1e-6, 0.1, 2.0, 10.0, 1e4, 1e30]),
    steps=st.sampled_from([None, 0.25]),  # with them many logits are the same, and some are -0.0
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),  # of the tokens that a penalty concerns
    seed=st.integers(0, 999),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 1e-30, 0.01, 0.6, 1.0, 3.0, 1e30]),
        top_p=st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.95, 0.999999, 1.0]),
        top_k=st.sampled_from([None, 1, 2, 40, 1023, 70000]),
        min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
        repetition_penalty=st.just(1.0) | st.sampled_from([1e-300, 1e-30, 0.5, 0.999, 1.1, 2.0, 1e30, 1e300]),
    ),
)
def test_native_code_chooses_what_the_sampler_chooses(
    vocab: int, spread: float, steps: float | None, share: float, seed: int, sampling: Sampling
) -> None:
    stream = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn((4, vocab), generator=stream)
    logits = logits if steps is None else (logits / steps).round() * steps
    draws = torch.rand(4, generator=stream, dtype=torch.float64)
    draws[seed % 4] = [0.0, 0.5, 1 - 2**-53, 2**-60][seed % 4]
    seen = None if sampling.repetition_penalty == 1 else torch.rand((4, vocab), generator=stream) < share
    marks = None if seen is None else seen.clone()
    theirs, _ = choose(logits, sampling.settings, marks, draws)
    check_choice(chosen(logits, sampling, draws, seen), theirs)


@pytest.mark.parametrize("spread", cases([0.4, 2.5, 8.0], 2.5))
def test_native_code_decides_nearly_every_draw(spread: float) -> None:
    stream = torch.Generator().manual_seed(0)
    logits = torch.randn((32, 49152), generator=stream).mul(spread)
    logits[:16, ::500] += 5 * spread  # few tokens stand out
    draws = torch.rand(32, generator=stream, dtype=torch.float64)
    for sampling in (
        *(Sampling(0.6, 0.9), Sampling(1.0, 1.0, top_k=50), Sampling(0.3, 0.5)),
        *(Sampling(1.0, 1.0, min_p=0.01), Sampling(1.5, 0.95, top_k=999)),
    ):
        assert check_choice(chosen(logits, sampling, draws), choose(logits, sampling.settings, None, draws)[0]) <= 1


@pytest.mark.parametrize("way", cases(["sampled", "sampled in every way"], "sampled in every way"))
def test_the_sampler_draws_what_native_code_does_not_decide(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, native = pair("static")
    expected = loop.generate_tokens(PROMPTS, 30, **WAYS[way])
    run, calls = NativeForward.__call__, []

    def sometimes(native: NativeForward, model: NativeModel, batch: NativeBatch, room: int) -> int:
        size = run(native, model, batch, room)
        if batch.choice and size <= room:
            calls.append(batch.choice)
            if len(calls) % 3 == 0:
                c_int64.from_address(Choice.from_address(batch.choice).ids).value = Choice.TOO_NEAR
        return size

    monkeypatch.setattr(NativeForward, "__call__", sometimes)
    assert native.generate_tokens(PROMPTS, 30, **WAYS[way]) == expected
    assert len(calls) == 29


@pytest.mark.parametrize("way", cases(WAYS, "sampled"))
def test_the_sampler_decides_if_only_native_code_finds_infinite_logits(way: str) -> None:
    """Sums of numbers near the end of float32 overflow in one order and not in another."""
    made = []
    for model in pair("static"):
        head = model.output.weight.detach()
        scale = 5e37 / float(model(torch.tensor([PROMPTS[0]])).abs().max())
        model.output.weight = torch.nn.Parameter(head * scale, requires_grad=False)
        try:
            made.append(model.generate_tokens(PROMPTS, 12, **{**WAYS[way], "logprobs": True}))
        except NonFiniteLogits as error:
            made.append((error.step, error.row))  # type: ignore[arg-type]
    assert made[0] == made[1]


# ---- between two tokens ----------------------------------------------------------------------------------------------


def move_the_cache(cache: Cache) -> None:
    for layer in cache.layers:
        assert isinstance(layer, StaticCache)
        assert layer.keys is not None
        assert layer.values is not None
        layer.keys, layer.values = layer.keys.clone(), -layer.values


def assign_a_method(cache: Cache) -> None:
    layer = cache.layers[1]
    layer.update = lambda rows, xk, xv: StaticCache.update(layer, rows, xk, 2 * xv)  # type: ignore[arg-type, method-assign]


@pytest.mark.parametrize("change", [Cache.free, move_the_cache, assign_a_method])
def test_a_change_of_a_sessions_cache_takes_effect_at_the_next_token(change: Callable[[Cache], None]) -> None:
    outcomes = []
    for model in pair("static"):
        session = model.session(Ids())  # type: ignore[arg-type]
        session.feed([5, 6, 7] * 9)
        pieces: list[object] = []
        before = served(model)
        try:
            for made, piece in enumerate(session.stream(12, **GREEDY)):
                pieces.append(piece)
                if made == 5:
                    change(session.cache)
        except ValueError as error:
            pieces.append(str(error))
        outcomes.append((pieces, served(model) - before))
    assert outcomes[0] == outcomes[1]


# ---- several texts ---------------------------------------------------------------------------------------------------


def test_during_a_step_its_cache_rejects_other_calls_and_the_model_does_not() -> None:
    _, native = pair("static")
    session = native.session(Ids())  # type: ignore[arg-type]
    session.feed([5, 6, 7])
    expected = session.fork().generate(6, **GREEDY)["ids"]
    refused: list[str] = []

    def others(lengths: Sequence[int]) -> None:
        native.runner.watch = None  # type: ignore[union-attr]
        try:
            native(torch.tensor([[1]]), 3, cache=session.cache)
        except RuntimeError as error:
            refused.append(str(error))
        assert native.generate_tokens([[5, 6, 7]], 6, **GREEDY) == ([expected], None)
        native.runner.watch = others  # type: ignore[union-attr]

    assert native.runner is not None
    native.runner.watch = others  # called during a step
    assert session.generate(6, **GREEDY)["ids"] == expected
    assert len(refused) == 5
    assert all("in the middle of another call" in words for words in refused)


def test_forks_that_share_blocks_step_at_once_in_threads() -> None:
    """Each enlarges their pool, which moves the blocks of the others."""
    _, model = pair("paged")
    session = model.session(Ids())  # type: ignore[arg-type]
    session.feed([5, 6, 7] * 7)
    before = served(model)
    expected = [session.fork().generate(90, temperature=0.9, seed=seed)["ids"] for seed in range(3)]
    steps = served(model) - before
    for _ in range(2):
        forks = [session.fork() for _ in range(3)]
        made = in_threads(*(partial(fork.generate, 90, temperature=0.9, seed=seed) for seed, fork in enumerate(forks)))
        assert [one["ids"] for one in made] == expected
    assert served(model) == before + 3 * steps > before


def test_a_stretch_of_steps_detects_that_a_fork_has_moved_the_pool() -> None:
    """No other code runs between these steps, so the model is not compared again."""
    _, model = pair("paged")
    session = model.session(Ids())  # type: ignore[arg-type]
    session.feed([5, 6, 7] * 7)
    expected = session.fork().generate(60, **GREEDY)["ids"]
    batch = Batch(make_request(model.args, True, [[5, 6, 7] * 7], 60, (), {"temperature": 0.0}, bound=None), VOCAB)
    cache, other = session.cache.copy(), session.fork()
    batch.prefix_len = 20
    stepper = make_stepper(model, batch, cache)
    with torch.inference_mode():
        ids = [*stepper.prefill()]
        for step, chosen in enumerate(stepper):
            ids += [token.id for token in batch.record(chosen)]
            if step == 3:
                before = cache.layers[0].keys
                elsewhere(lambda: other.append([1] * 120))
                assert cache.layers[0].keys is not before
            if len(ids) == 60:
                break
    assert ids == expected


def test_weights_that_are_moved_or_freed_under_a_native_step_live_as_long_as_it() -> None:
    """Between the comparison and the step, another thread casts the model and allocates the freed memory."""
    _, model = pair("static")
    expected = model.generate_tokens(PROMPTS, 6, **GREEDY)
    taken: list[Tensor] = []
    sizes = {weight.numel() for weight in model.parameters()}

    def move() -> None:
        if not taken:
            model.double()
            taken.extend(torch.full((size,), torch.nan, dtype=torch.float32) for size in sizes for _ in range(20))

    assert model.runner is not None
    model.runner.watch = lambda _: elsewhere(move)
    assert model.generate_tokens(PROMPTS, 6, **GREEDY) == expected
    assert taken
    model.runner.watch = None
    assert model.norm.weight.dtype == torch.float64


def test_the_memory_of_weights_that_have_moved_is_not_used() -> None:
    """Another thread may move a weight between the comparison and the reference to its memory."""
    model = twins("fp32")[1]
    facts = Snapshot(model)
    assert facts.memory() is not None
    model.norm.weight.data = model.norm.weight.data.clone()
    assert facts.memory() is None


def test_a_cache_that_is_freed_under_a_native_step_lives_as_long_as_it() -> None:
    _, model = pair("static")
    session = model.session(Ids())  # type: ignore[arg-type]
    session.feed([5, 6, 7] * 9)
    expected = session.fork().generate(6, **GREEDY)["ids"]
    assert model.runner is not None
    taken: list[Tensor] = []

    def free(lengths: Sequence[int]) -> None:
        if not taken:
            size = session.cache.layers[0].held()["keys"].numel()
            session.cache.free()
            taken.extend(torch.full((size,), torch.nan, dtype=torch.float32) for _ in range(20))

    model.runner.watch = free
    assert session.generate(6, **GREEDY)["ids"] == expected
    assert taken


@pytest.mark.parametrize("leave", ["close", "delete"])
def test_a_stream_that_is_closed_or_deleted_frees_its_cache(leave: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, native = pair("static")
    caches: list[weakref.ref[Any]] = []
    reserve = NativeCache.reserve

    def noting(self: NativeCache, described: Any, cache: Cache, rows: Rows) -> CacheRoom:
        room = reserve(self, described, cache, rows)
        caches.append(weakref.ref(cache.layers[0].held()["keys"]))
        return room

    monkeypatch.setattr(NativeCache, "reserve", noting)
    stream = native.stream(Ids(), PROMPTS, 50, **GREEDY)  # type: ignore[arg-type]
    for _ in range(10):
        next(stream)
    assert caches[-1]() is not None
    if leave == "close":
        stream.close()
    del stream
    assert caches[-1]() is None
