"""With `fast`, the plain path runs the kinds of calls at which it is faster: timed once, cached, named, and fixed."""

import copy
import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Kind, config_of, meta_weights, random_model, write_gguf
from fakes import Ids
from native import ARGS, FOLDER, VOCAB, model_of, needs_a_compiler, served
from tables import cases
from tiny import some_tokens

from llama import load
from llama.bench.run.engines import LlamaEngine
from llama.fast import choose, native_trial
from llama.fast.choose import make_fast
from llama.fast.native_call import NativeCall
from llama.fast.native_runner import NativeRunner
from llama.fast.native_trial import ENOUGH, calls_of, plain_calls
from llama.model import Transformer
from llama.stepper import LONG_PROMPTS, PROMPTS, STEPS, CallKind

pytestmark = needs_a_compiler
FEW_PROMPTS, MANY_PROMPTS, FEW_LONG, MANY_LONG, FEW_STEPS, MANY_STEPS = CALLS = calls_of(1)
TIMED = {(rows, min(width, ARGS.max_seq_len)): kind for kind, (rows, width) in CALLS.items()}
# A call of each kind that is almost, or only just, one of another kind.
SHAPES = {
    FEW_PROMPTS: (1, 127),
    MANY_PROMPTS: (9, 2),
    FEW_LONG: (1, 128),
    MANY_LONG: (9, 15),
    FEW_STEPS: (1, 1),
    MANY_STEPS: (9, 1),
}


class Clock:
    """A clock that advances 1 ms at every reading, so that all calls take as long, on any machine."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now


CLOCK = Clock()


class SlowRunner(NativeRunner):
    """Native code that takes 2 ms longer for some kinds of calls."""

    def __init__(self, *slow: CallKind) -> None:
        super().__init__(FOLDER)
        self.slow = slow

    def run(self, call: NativeCall) -> None:
        shape = call._batch.rows, call._batch.width
        if TIMED.get(shape, CallKind.of(*shape)) in self.slow:
            CLOCK.now += 0.002
        super().run(call)


class BrokenRunner(NativeRunner):
    def __call__(self, *given: Any, **how: Any) -> None:
        raise AssertionError("a call was timed again")


@pytest.fixture(autouse=True)
def trial_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_NATIVE_TRIAL", "on")
    monkeypatch.setattr(native_trial, "time", CLOCK)


def fast_model(*plain: CallKind) -> Transformer:
    model = model_of("fp32")
    make_fast(model, FOLDER)
    assert isinstance(model.runner, NativeRunner)
    model.runner.plain = frozenset(plain)
    return model


def test_a_small_lead_and_a_first_call_that_allocates_do_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of("fp32"), []

    class Noisy(NativeRunner):
        def run(self, call: NativeCall) -> None:
            CLOCK.now += 0.1 if len(calls) % 4 == 0 else 0.00005  # the first try of each kind, and 5 % in the others
            calls.append(call)
            super().run(call)

    runner = Noisy(FOLDER)
    seconds = native_trial.time_calls(model, runner)
    assert len(calls) == 4 * len(CALLS)
    assert all(1.04 < native / plain < 1.06 for plain, native in seconds.values())
    heads = {(call._batch.width > 1, call.logits.shape[-1]) for call in calls}
    assert heads == {(True, 16), (False, VOCAB)}, "prompts are timed without the head"


@pytest.mark.parametrize(("per_token", "timed"), cases([(0.0004, 6), (0.001, 5), (0.02, 4)], (0.001, 5)))
def test_long_prompts_that_would_take_too_long_have_the_times_of_shorter_ones(per_token: float, timed: int) -> None:
    """So the trial of long prompts takes at most two seconds, except for the first reading of a cold machine."""
    shapes = set[tuple[int, int]]()

    class Large(NativeRunner):
        def run(self, call: NativeCall) -> None:
            shape = call._batch.rows, call._batch.width
            CLOCK.now += per_token * shape[0] * shape[1]
            shapes.add(shape)
            long_ones[0] += CallKind.of(*shape).long * per_token * shape[0] * shape[1]
            super().run(call)

    long_ones = [0.0]
    seconds = native_trial.time_calls(model_of("fp32"), Large(FOLDER))
    assert (len(shapes), seconds.keys()) == (timed, CALLS.keys())
    assert long_ones[0] <= 2 * ENOUGH
    each = {kind: seconds[kind][1] / (rows * width) for (rows, width), kind in TIMED.items() if kind.long}
    assert all(per_token < one < 1.2 * per_token for one in each.values())


SLOW_ONES = {
    "none": (),
    "short prompts": (FEW_PROMPTS, MANY_PROMPTS),
    "long prompts": (FEW_LONG,),
    "many rows": (MANY_LONG, MANY_STEPS),
    "one of each": (FEW_STEPS, MANY_PROMPTS),
}


@pytest.mark.parametrize("slow", cases(SLOW_ONES, "long prompts", "one of each"))
def test_the_plain_path_runs_the_kinds_of_calls_at_which_native_code_is_slower(slow: str, tmp_path: Path) -> None:
    slow_ones = SLOW_ONES[slow]
    plain, model = model_of("fp32"), model_of("fp32")
    runner = SlowRunner(*slow_ones)
    assert plain_calls(model, runner, tmp_path) == frozenset(slow_ones)
    assert model.runner is None, "the trial changes nothing"
    runner.plain, model.runner = frozenset(slow_ones), runner
    for kind, (rows, width) in SHAPES.items():
        before, tokens = served(model), some_tokens(rows, width, vocab_size=VOCAB)
        ours, theirs = model(tokens), plain(tokens)
        assert (served(model) > before) == (kind not in slow_ones), kind
        assert torch.equal(ours, theirs) == (kind in slow_ones), kind


def test_a_generation_changes_its_path_when_rows_end() -> None:
    """Ten prompts, of which nine end after different numbers of tokens."""
    plain, model = model_of("fp32"), fast_model(MANY_STEPS)
    prompts = some_tokens(10, 6, vocab_size=VOCAB).tolist()
    whole = plain.generate_tokens(prompts, 12, temperature=0.0)[0]
    stops = {row[5] for row in whole[:4]}
    before = served(model)
    assert model.generate_tokens(prompts, 12, temperature=0.0, stop_ids=tuple(stops)) == plain.generate_tokens(
        prompts, 12, temperature=0.0, stop_ids=tuple(stops)
    )
    assert served(model) > before + 1, "the prompt, and steps of few rows"


def test_the_times_are_stored_for_the_machine_and_the_sizes_and_measured_once(tmp_path: Path) -> None:
    model = model_of("fp32")
    found = plain_calls(model, SlowRunner(FEW_STEPS), tmp_path)
    assert plain_calls(model_of("fp32"), BrokenRunner(FOLDER), tmp_path) == found == {FEW_STEPS}
    with pytest.raises(AssertionError, match="timed again"):
        plain_calls(model_of("bf16"), BrokenRunner(FOLDER), tmp_path)
    (file,) = tmp_path.glob("trial-*.json")
    older = file.read_text().replace("short prompts", "prompts").replace("long prompts", "others")
    for damaged in ("", "[]", "{}", '{"steps of up to 8 rows": 1}', "[" * 100_000, older):
        file.write_text(damaged)
        with pytest.raises(AssertionError, match="timed again"):
            plain_calls(model, BrokenRunner(FOLDER), tmp_path)


def test_limits_of_a_model_leave_kinds_of_calls_out(tmp_path: Path) -> None:
    model = model_of("fp32")
    for longest, kinds in (
        (63, {FEW_STEPS}),
        (127, {FEW_STEPS, FEW_PROMPTS}),
        (128, {FEW_STEPS, FEW_PROMPTS, FEW_LONG}),
    ):
        model.args = replace(ARGS, max_batch_size=4, max_seq_len=longest)
        assert set(native_trial.time_calls(model, NativeRunner(FOLDER))) == kinds


def test_quantised_weights_and_a_pinned_process_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plain_calls(model_of("int8"), BrokenRunner(FOLDER), tmp_path) == frozenset()
    monkeypatch.setenv("LLAMA_NATIVE_TRIAL", "off")
    assert plain_calls(model_of("fp32"), BrokenRunner(FOLDER), tmp_path) == frozenset()
    monkeypatch.setenv("LLAMA_NATIVE_TRIAL", "no")
    with pytest.raises(ValueError, match="LLAMA_NATIVE_TRIAL='no' in the environment must be on or off"):
        plain_calls(model_of("fp32"), BrokenRunner(FOLDER), tmp_path)


def test_the_execution_names_the_calls_of_the_plain_path() -> None:
    assert str(fast_model().execution) == "native"
    assert str(fast_model(*PROMPTS).execution) == "native, plain prompts"
    assert str(fast_model(*LONG_PROMPTS, *STEPS).execution) == "native, plain long prompts, plain steps"
    assert str(fast_model(MANY_PROMPTS, FEW_STEPS).execution) == (
        "native, plain short prompts of more than 8 rows, plain steps of up to 8 rows"
    )
    assert str(copy.deepcopy(fast_model(*PROMPTS)).execution) == "native, plain prompts"


@pytest.mark.parametrize(
    ("plain", "path", "forwards"),
    [
        (PROMPTS, "native, plain prompts", 3),
        ({FEW_STEPS}, "native, plain steps of up to 8 rows", 1),
        (CALLS, "plain", 0),
    ],
)
def test_a_benchmark_does_not_miss_the_calls_that_are_left_to_the_plain_path(
    plain: Collection[CallKind], path: str, forwards: int
) -> None:
    run = LlamaEngine(fast_model(*plain), Ids()).run([[1, 2, 3]], 4, kv_caching=True)  # type: ignore[arg-type]
    assert (run.path, run.fast_forwards, run.fast_wanted) == (path, forwards, forwards)


def test_exact_mode_runs_every_call_by_native_code() -> None:
    model = fast_model(*CALLS)
    model.exact = True
    assert str(model.execution) == "native, exact"
    before = served(model)
    model(some_tokens(2, 5, vocab_size=VOCAB))
    assert served(model) == before + 1
    model.exact = False
    model(some_tokens(2, 5, vocab_size=VOCAB))
    assert served(model) == before + 1


def test_a_model_is_timed_as_it_is_loaded_except_for_exact_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(hidden_size=64, intermediate_size=96, num_attention_heads=2)
    path = write_gguf(tmp_path / "model.gguf", meta_weights(random_model(config)), config, kind=Kind.F32)
    monkeypatch.setattr(choose, "plain_calls", lambda *_: PROMPTS)
    how: dict[str, Any] = {"device": "cpu", "fast": True}
    assert str(load(path, **how)[0].execution) == "native, plain prompts"
    assert load(path, **how, exact=True)[0].runner.plain == frozenset()  # type: ignore[union-attr]


def test_a_session_file_names_the_execution_and_another_one_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = fast_model(), fast_model(*PROMPTS)
    session = one.session(Ids())  # type: ignore[arg-type]
    session.append([1, 2, 3])
    session.save(tmp_path / "text.session")
    assert b'\\"execution\\": \\"native\\"' in (tmp_path / "text.session").read_bytes()
    caplog.clear()  # of the messages about native code, if the level is already INFO
    with caplog.at_level(logging.INFO, "llama"):
        one.load_session(tmp_path / "text.session", Ids())  # type: ignore[arg-type]
        assert not caplog.text
        assert other.load_session(tmp_path / "text.session", Ids()).tokens == [1, 2, 3]  # type: ignore[arg-type]
    assert "was computed by: native; this model computes by: native, plain prompts" in caplog.text
