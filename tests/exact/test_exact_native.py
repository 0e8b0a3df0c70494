"""Exact mode by native code: the same bits in any batch, after a comparison, and an error instead of other bits."""

import copy
import logging
import pickle
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from changes import CHANGES, outcome, some_changes
from fakes import NATIVE_SIZES, Ids, write_checkpoint
from native import ARGS, FOLDER, VOCAB, model_of, needs_a_compiler, served, twins
from tiny import bits, some_tokens

from llama.api import load
from llama.exact.batch_invariance import first_difference
from llama.fast.choose import make_fast
from llama.fast.native_call import NativeCall
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


@pytest.mark.parametrize(
    ("kind", "kv_cache", "threads"),
    [
        ("fp32", "paged", 1),
        pytest.param("int8", "static", 2, marks=pytest.mark.slow, id="two threads, which spin"),
        *(
            pytest.param(kind, kv_cache, 1, marks=pytest.mark.slow)
            for kind, kv_cache in (("bf16", "static"), ("int8 in bf16", "paged"), ("int4", "paged"))
        ),
    ],
)
def test_bits_are_those_without_a_cache_in_any_chunks_or_batch(kind: str, kv_cache: str, threads: int) -> None:
    model = exact_model(kind, kv_cache)
    assert model.exact
    assert model.execution == Execution("native", kind[:4] if "int" in kind else None, exact=True)
    forwards = served(model)
    with torch.inference_mode():
        if threads > 1:  # one was compared when exact mode was switched on
            torch.set_num_threads(threads)
            try:
                assert first_difference(model, rows=3) is None
            finally:
                torch.set_num_threads(1)
        model.kv_caching = False
        whole = model(TOKENS)
        last = model(TOKENS, logits="last", lengths=[100, 7, 64])
        assert torch.equal(bits(last[:, 0]), bits(whole[range(3), [99, 6, 63]]))
    cached, uncached = (
        model.generate_tokens([[1, 2, 3], [4] * 40], 9, temperature=0, logprobs=True, kv_caching=kv_caching)
        for kv_caching in (True, False)
    )
    assert cached == uncached
    assert served(model) > forwards + 18


# ---- switched on after a comparison ----------------------------------------------------------------------------------


def test_native_code_that_differs_from_itself_raises_and_stays_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    real = NativeRunner.run

    def by_width(runner: NativeRunner, call: NativeCall) -> None:
        real(runner, call)
        call.logits.add_(call._batch.width * 1e-5)

    _, fast = twins("fp32")
    with monkeypatch.context() as patch:
        patch.setattr(NativeRunner, "run", by_width)
        with pytest.raises(ValueError, match=r"by native code \(leave out exact, or fast\): the first 21 tokens"):
            fast.exact = True
    assert not fast.exact
    assert str(fast.execution) == "native"
    fast.exact = True


def test_a_model_that_native_code_does_not_support_raises() -> None:
    _, fast = twins("fp32")
    hook = fast.blocks[0].feed_forward.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="a hook watches FeedForward: undo that"):
        fast.exact = True
    assert not fast.exact
    hook.remove()
    fast.exact = True
    model = model_of("fp32", replace(ARGS, rope_theta=None))
    model.runner = NativeRunner(FOLDER)
    with pytest.raises(ValueError, match="rope_theta=None: models without RoPE have no fast step"):
        model.exact = True


def test_without_native_code_operations_are_exact_or_raise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_checkpoint(tmp_path, **NATIVE_SIZES)
    with caplog.at_level(logging.WARNING, "llama"):
        model, _ = load(path, device="cpu", exact=True, fast=True, kv_cache="concat")
    assert model.execution == Execution("exact", exact=True)
    assert (
        "kv_cache='concat' has no fast step; these kinds have one: static, int8, int4, rotated, kivi, paged"
        in caplog.text
    )
    with pytest.raises(ValueError, match="by native code alone, which does not serve this model"):
        load(path, device="cpu", exact=True, fast=True, quantize="int8", kv_cache="concat")


# ---- an error instead of other bits ----------------------------------------------------------------------------------


def test_a_change_that_native_code_does_not_support_raises_in_the_middle_of_a_text() -> None:
    model = exact_model("fp32")
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


@some_changes
def test_after_any_change_native_code_runs_or_a_call_raises(change: str) -> None:
    """Unless the change switches exact mode off, which it logs."""
    model = exact_model("int4" if len(change) % 2 else "fp32")
    with suppress(RuntimeError, ValueError):
        CHANGES[change](model)
    before = served(model)
    with torch.inference_mode():
        made = outcome(lambda: model(TOKENS[:, :9]))
    assert served(model) > before or isinstance(made, type) or not model.exact


def test_a_kind_of_cache_without_native_code_raises() -> None:
    model = exact_model("fp32")
    model.kv_cache = "concat"  # has the same bits, by other operations
    with pytest.raises(ValueError, match="has no fast step"):
        model.generate_tokens([[1, 2, 3]], 4)
    model.kv_cache = "paged"
    model.generate_tokens([[1, 2, 3]], 4)


def test_recording_gradients_raises() -> None:
    model = exact_model("fp32").requires_grad_(True)
    with pytest.raises(ValueError, match="gradients are recorded"):
        model(TOKENS)
    with torch.inference_mode():
        model(TOKENS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiling_raises() -> None:
    """A compiled graph would contain the plain path."""
    model = exact_model("fp32")
    with torch.inference_mode(), pytest.raises(ValueError, match=r"torch\.compile is under way"):
        torch.compile(model, backend="eager")(TOKENS[:, :5])
    torch.compiler.reset()
    with torch.inference_mode():
        assert model(TOKENS[:, :5]).isfinite().all()


def test_a_copy_is_exact_as_well() -> None:
    model = exact_model("fp32")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.exact
        other.blocks[0].feed_forward.register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match="hook"):
            other(TOKENS)


def test_moving_to_another_dtype_compares_again() -> None:
    assert exact_model("fp32").to(torch.bfloat16).exact
    model = exact_model("fp32")
    with pytest.raises(ValueError, match=r"not for torch\.float64"):
        model.to(torch.float64)
    assert not model.exact


def test_a_session_of_native_bits_is_not_continued_by_plain_ones(tmp_path: Path) -> None:
    model = exact_model("fp32")
    session = model.session(Ids())
    session.feed([1, 2, 3, 4])
    session.save(tmp_path / "session")
    assert model.load_session(tmp_path / "session", Ids()).tokens == [1, 2, 3, 4]
    model.runner = None
    assert not model.exact
    model.exact = True
    assert session.logits is None  # the tokens are fed again
    with pytest.raises(ValueError, match=r"place was 'native code forward-.*feed the text again"):
        model.load_session(tmp_path / "session", Ids())


def test_switching_exact_mode_off_leaves_the_fast_model() -> None:
    model = exact_model("int8")
    before = served(model)
    model.exact = False
    assert str(model.execution) == "native, int8 weights"
    model(TOKENS)
    assert served(model) == before + 1


def test_make_fast_leaves_an_exact_model_on_the_plain_path(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("fp32")
    model.exact = True
    with caplog.at_level(logging.WARNING, "llama"):
        make_fast(model, FOLDER)
    assert model.execution == Execution("exact", exact=True)
    assert "the model's operations are exact" in caplog.text
