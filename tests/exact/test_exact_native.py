"""Exact mode by native code: the same bits in any company, granted after a comparison, never lost without a word."""

import copy
import logging
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from changes import CHANGES, outcome
from checkpoints import Kind, config_of, meta_weights, random_model, write_gguf
from fakes import NATIVE_SIZES, Ids, write_checkpoint
from native import ARGS, FOLDER, VOCAB, model_of, needs_a_compiler, served, twins
from oracles import bits, some_tokens

from llama.api import load
from llama.exact import first_difference, slowdown_words
from llama.fast.choose import make_fast
from llama.fast.native_call import Frame
from llama.fast.native_runner import NativeRunner
from llama.model import Transformer
from llama.stepper import Execution

pytestmark = needs_a_compiler
TOKENS = some_tokens(3, 100, vocab_size=VOCAB)


def exact_model(kind: str, kv_cache: str = "static") -> Transformer:
    _, fast = twins(kind, replace(ARGS, kv_cache=kv_cache))
    fast.exact = True
    return fast


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_cache", ["static", "paged"])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int8 in bf16", "int4", "int4 in bf16"])
def test_bits_are_those_of_no_cache_in_any_cut_batch_and_number_of_threads(kind: str, kv_cache: str) -> None:
    model = exact_model(kind, kv_cache)
    assert model.exact
    assert model.execution == Execution("native", kind[:4] if "int" in kind else None, exact=True)
    forwards = served(model)
    with torch.inference_mode():
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            try:
                assert first_difference(model, rows=3, length=150) is None
            finally:
                torch.set_num_threads(1)
        model.kv_caching = False
        whole = model(TOKENS)
        last = model(TOKENS, logits="last", lengths=[100, 7, 64])
        assert torch.equal(bits(last[:, 0]), bits(whole[range(3), [99, 6, 63]]))
    cached, uncached = (
        model.generate_tokens([[1, 2, 3], [4] * 40], 30, temperature=0, logprobs=True, kv_caching=kv_caching)
        for kv_caching in (True, False)
    )
    assert cached == uncached
    assert served(model) > forwards + 60


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
def test_weights_as_a_file_has_them_are_exact_too(kind: Any, tmp_path: Path) -> None:
    config = config_of(hidden_size=64, intermediate_size=96, num_attention_heads=2)
    path = write_gguf(tmp_path / "model.gguf", meta_weights(random_model(config)), config, kind=kind)
    model, _ = load(path, device="cpu", exact=True, fast=True, quantize="stored", max_seq_len=160)
    assert str(model.execution) == "native, stored weights, exact"
    assert first_difference(model, rows=3, length=150) is None


@pytest.mark.parametrize("kv_cache", ["int8", "int4", "window:20+4"])
def test_a_cache_that_does_not_keep_all_it_is_given_is_refused(kv_cache: str) -> None:
    """What such a kind gives back depends on when its groups were full, so it cannot have the bits of no cache."""
    model = exact_model("fp32")
    with pytest.raises(ValueError, match="drops or rounds keys and values; choose static, concat or paged"):
        model.kv_cache = kv_cache
    with pytest.raises(ValueError, match="drops or rounds"):
        model.generate_tokens([[1, 2]], 3, kv_cache=kv_cache)


def test_a_model_with_such_a_cache_is_not_granted_exact_mode() -> None:
    _, fast = twins("int8", replace(ARGS, kv_cache="int4"))
    with pytest.raises(ValueError, match="drops or rounds keys"):
        fast.exact = True
    assert not fast.exact


# ---- granted after a comparison --------------------------------------------------------------------------------------


def test_native_code_that_differs_from_itself_is_refused_and_stays_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    real = NativeRunner.run

    def by_width(runner: NativeRunner, frame: Frame) -> None:
        real(runner, frame)
        frame.logits.add_(frame._held[1].shape[1] * 1e-5)  # of the ids

    for kind in ("fp32", "int8"):
        _, fast = twins(kind)
        with monkeypatch.context() as patch:
            patch.setattr(NativeRunner, "run", by_width)
            with pytest.raises(ValueError, match=r"by native code \(leave out exact, or fast\): the first 21 tokens"):
                fast.exact = True
        assert not fast.exact
        assert str(fast.execution) == ("native" if kind == "fp32" else "native, int8 weights")
        fast.exact = True  # once the fault is gone


def test_a_model_that_native_code_does_not_run_is_refused_and_that_is_not_passed_over() -> None:
    _, fast = twins("fp32")
    hook = fast.blocks[0].feed_forward.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="a hook watches FeedForward: undo that"):
        fast.exact = True
    assert not fast.exact
    hook.remove()
    fast.exact = True


def test_a_model_without_rope_has_no_exact_native_code() -> None:
    model = model_of("fp32", replace(ARGS, rope_theta=None))
    model.runner = NativeRunner(FOLDER)
    with pytest.raises(ValueError, match="rope_theta=None: models without RoPE have no fast step"):
        model.exact = True


def test_where_native_code_does_not_serve_the_plain_operations_do_and_quantised_weights_are_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_checkpoint(tmp_path, **NATIVE_SIZES)
    with caplog.at_level(logging.WARNING, "llama"):
        model, _ = load(path, device="cpu", exact=True, fast=True, kv_cache="concat")
    assert model.execution == Execution("exact", exact=True)
    assert "kv_cache='concat' has no fast step; these kinds have one: static, int8, int4, paged" in caplog.text
    with pytest.raises(ValueError, match="by native code alone, which does not serve this model"):
        load(path, device="cpu", exact=True, fast=True, quantize="int8", kv_cache="concat")


# ---- never lost without a word ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_what_native_code_cannot_run_any_more_is_refused_in_the_middle_of_a_text(kind: str) -> None:
    model = exact_model(kind)
    with torch.inference_mode():
        whole = model(TOKENS)
        model.free_cache()
        model(TOKENS[:, :50])
        hook = model.blocks[0].feed_forward.register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match="the plain path has other bits; but a hook watches FeedForward"):
            model(TOKENS[:, 50:], 50)
        hook.remove()
        assert torch.equal(bits(model(TOKENS[:, 50:], 50)), bits(whole[:, 50:]))
    model.exact = False
    model.blocks[0].feed_forward.register_forward_hook(lambda *_: None)
    assert model(TOKENS[:, :9]).isfinite().all()


@pytest.mark.parametrize("kind", ["fp32", "int4"])
@pytest.mark.parametrize("change", CHANGES)
def test_after_any_change_native_code_serves_or_it_is_refused(change: str, kind: str) -> None:
    """But for a change that switches exact mode off, and says so."""
    model = exact_model(kind)
    with suppress(RuntimeError, ValueError):
        CHANGES[change](model)
    before = served(model)
    with torch.inference_mode():
        made = outcome(lambda: model(TOKENS[:, :9]))
    assert served(model) > before or isinstance(made, type) or not model.exact


def test_another_kind_of_cache_is_refused_where_native_code_does_not_serve_it() -> None:
    model = exact_model("fp32")
    model.kv_cache = "concat"  # which has the same bits, by other operations
    with pytest.raises(ValueError, match="has no fast step"):
        model.generate_tokens([[1, 2, 3]], 4)
    model.kv_cache = "paged"
    model.generate_tokens([[1, 2, 3]], 4)


def test_gradients_are_refused_in_words() -> None:
    model = exact_model("fp32").requires_grad_(True)
    with pytest.raises(ValueError, match="gradients are recorded"):
        model(TOKENS)
    with torch.inference_mode():
        model(TOKENS)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiling_is_refused_in_words() -> None:
    """A graph would hold the plain path, and native code's addresses are nothing for one."""
    model = exact_model("fp32")
    with torch.inference_mode(), pytest.raises(ValueError, match=r"torch\.compile is under way"):
        torch.compile(model, backend="eager")(TOKENS[:, :5])
    torch.compiler.reset()
    with torch.inference_mode():
        assert model(TOKENS[:, :5]).isfinite().all()


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_exact_as_well(twin: Callable[[Transformer], Transformer]) -> None:
    other = twin(exact_model("fp32"))
    assert other.exact
    other.blocks[0].feed_forward.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="hook"):
        other(TOKENS)


def test_moving_to_another_dtype_shows_it_anew() -> None:
    assert exact_model("fp32").to(torch.bfloat16).exact
    model = exact_model("fp32")
    with pytest.raises(ValueError, match=r"not for torch\.float64"):
        model.to(torch.float64)
    assert not model.exact


def test_a_session_of_native_bits_is_not_gone_on_with_by_plain_ones(tmp_path: Path) -> None:
    model = exact_model("fp32")
    session = model.session(Ids())
    session.feed([1, 2, 3, 4])
    session.save(tmp_path / "session")
    assert model.load_session(tmp_path / "session", Ids()).tokens == [1, 2, 3, 4]
    model.runner = None
    assert not model.exact
    model.exact = True
    assert session.logits is None  # they are fed again
    with pytest.raises(ValueError, match=r"place was 'native code forward-.*feed the text again"):
        model.load_session(tmp_path / "session", Ids())


def test_switching_it_off_leaves_the_fast_model() -> None:
    model = exact_model("fp32")
    model.exact = False
    assert model.execution == Execution("native")
    before = served(model)
    model(TOKENS)
    assert served(model) == before + 1


def test_it_takes_no_longer_and_nothing_is_timed_to_say_so() -> None:
    """The plain path of quantised weights takes a thousand times as long."""
    model = exact_model("int8")
    forwards = served(model)
    assert "takes no longer" in slowdown_words(model)
    assert served(model) == forwards


def test_making_an_exact_model_fast_leaves_it_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("fp32")
    model.exact = True
    with caplog.at_level(logging.WARNING, "llama"):
        make_fast(model, FOLDER)
    assert model.execution == Execution("exact", exact=True)
    assert "the model's operations are exact" in caplog.text
