"""With `fast`, the plain path runs prompts if it is faster at them: timed once, cached, named, and fixed."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Kind, config_of, meta_weights, random_model, write_gguf
from fakes import Ids
from native import ARGS, FOLDER, VOCAB, model_of, needs_a_compiler, served
from tiny import some_tokens

from llama import load
from llama.bench.run.engines import LlamaEngine
from llama.fast import choose, native_trial
from llama.fast.choose import make_fast
from llama.fast.native_call import NativeCall
from llama.fast.native_runner import NativeRunner
from llama.fast.native_trial import plain_prompts
from llama.model import Transformer
from llama.rows import Rows

pytestmark = needs_a_compiler


class Clock:
    """A clock that advances 1 ms at every reading, so that all calls take as long, on any machine."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now


CLOCK = Clock()


class SlowRunner(NativeRunner):
    """Native code that takes so many times as long as the plain path, and far longer in the first of all calls."""

    def __init__(self, times: float) -> None:
        super().__init__(FOLDER)
        self.times, self.calls = times, list[NativeCall]()

    def run(self, call: NativeCall) -> None:
        CLOCK.now += 0.001 * (self.times - 1) if self.calls else 0.1
        self.calls.append(call)
        super().run(call)


class BrokenRunner(NativeRunner):
    def __call__(self, *given: Any, **how: Any) -> None:
        raise AssertionError("a call was timed again")


@pytest.fixture(autouse=True)
def trial_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_NATIVE_TRIAL", "on")
    monkeypatch.setattr(native_trial, "time", CLOCK)


def fast_model(*, plain: bool = False) -> Transformer:
    model = model_of("fp32")
    make_fast(model, FOLDER)
    assert isinstance(model.runner, NativeRunner)
    model.runner.plain_prompts = plain
    return model


@pytest.mark.parametrize(("times", "plain"), [(1.05, False), (1.2, True)])
def test_a_small_lead_and_a_first_call_that_allocates_do_not_decide(times: float, plain: bool, tmp_path: Path) -> None:
    model, runner = model_of("fp32"), SlowRunner(times)
    assert plain_prompts(model, runner, tmp_path) == plain
    assert model.runner is None, "the trial changes nothing"
    assert {(call._batch.rows, call._batch.width) for call in runner.calls} == {(1, ARGS.max_seq_len)}
    assert {call.logits.shape[-1] for call in runner.calls} == {16}, "a prompt is timed without the head"


def test_a_prompt_through_large_layers_is_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, weights = SlowRunner(1), sum(weight.numel() for weight in model_of("fp32").layers.parameters())
    monkeypatch.setattr(native_trial, "MULTIPLICATIONS", 40 * weights)
    plain_prompts(model_of("fp32"), runner, tmp_path)
    assert {call._batch.width for call in runner.calls} == {40}


def test_the_plain_path_runs_prompts_and_native_code_steps() -> None:
    plain, model = model_of("fp32"), fast_model(plain=True)
    for rows, width in ((1, 2), (9, 15), (1, 1), (9, 1)):
        before, tokens = served(model), some_tokens(rows, width, vocab_size=VOCAB)
        assert torch.equal(model(tokens), plain(tokens)) == (width > 1)
        assert (served(model) > before) == (width == 1)
    guess = some_tokens(1, 3, vocab_size=VOCAB), Rows.at([0], [3]), model.new_cache()
    assert isinstance(model.runner, NativeRunner)
    assert model.runner.prepare(model, *guess, steps=True) is not None, "guesses take the place of steps"


def test_the_times_are_stored_for_the_machine_and_the_sizes_and_measured_once(tmp_path: Path) -> None:
    model = model_of("fp32")
    assert plain_prompts(model, SlowRunner(2), tmp_path)
    assert plain_prompts(model_of("fp32"), BrokenRunner(FOLDER), tmp_path)
    with pytest.raises(AssertionError, match="timed again"):
        plain_prompts(model_of("bf16"), BrokenRunner(FOLDER), tmp_path)
    (file,) = tmp_path.glob("trial-*.json")
    for damaged in ("", "[]", "{}", "3", '["a", 1]', "[1, 2, 3]", "[" * 100_000):
        file.write_text(damaged)
        with pytest.raises(AssertionError, match="timed again"):
            plain_prompts(model, BrokenRunner(FOLDER), tmp_path)


def test_quantised_weights_and_a_pinned_process_are_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not plain_prompts(model_of("int8"), BrokenRunner(FOLDER), tmp_path)
    monkeypatch.setenv("LLAMA_NATIVE_TRIAL", "off")
    assert not plain_prompts(model_of("fp32"), BrokenRunner(FOLDER), tmp_path)
    monkeypatch.setenv("LLAMA_NATIVE_TRIAL", "no")
    with pytest.raises(ValueError, match="LLAMA_NATIVE_TRIAL='no' in the environment must be on or off"):
        plain_prompts(model_of("fp32"), BrokenRunner(FOLDER), tmp_path)


def test_the_execution_names_the_calls_of_the_plain_path() -> None:
    assert str(fast_model().execution) == "native"
    assert str(copy.deepcopy(fast_model(plain=True)).execution) == "native, plain prompts"


@pytest.mark.parametrize(("plain", "path", "forwards"), [(True, "native, plain prompts", 3), (False, "native", 4)])
def test_a_benchmark_does_not_miss_the_calls_that_are_left_to_the_plain_path(
    plain: bool, path: str, forwards: int
) -> None:
    run = LlamaEngine(fast_model(plain=plain), Ids()).run([[1, 2, 3]], 4, kv_caching=True)  # type: ignore[arg-type]
    assert (run.path, run.fast_forwards, run.fast_wanted) == (path, forwards, forwards)


def test_exact_mode_runs_every_call_by_native_code() -> None:
    model, tokens = fast_model(plain=True), some_tokens(2, 5, vocab_size=VOCAB)
    model.exact = True
    assert str(model.execution) == "native, exact"
    before = served(model)
    model(tokens)
    assert served(model) == before + 1
    model.exact = False
    model(tokens)
    assert served(model) == before + 1


def test_a_model_is_timed_as_it_is_loaded_except_for_exact_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(hidden_size=64, intermediate_size=96, num_attention_heads=2)
    path = write_gguf(tmp_path / "model.gguf", meta_weights(random_model(config)), config, kind=Kind.F32)
    monkeypatch.setattr(choose, "plain_prompts", lambda *_: True)
    how: dict[str, Any] = {"device": "cpu", "fast": True}
    assert str(load(path, **how)[0].execution) == "native, plain prompts"
    assert not load(path, **how, exact=True)[0].runner.plain_prompts  # type: ignore[union-attr]


def test_a_session_file_names_the_execution_and_another_one_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = fast_model(), fast_model(plain=True)
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
