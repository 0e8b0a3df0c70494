"""The native forward gives the plain logits, and the same bits cached and uncached, or the plain path runs.

Compiled for this machine; `test_native_builds` and `test_native_kernels` compile for others.
"""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_float
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from changes import outcome
from native import (
    ARGS,
    EVERYTHING,
    FOLDER,
    VOCAB,
    cases,
    check_bits,
    compiled_with,
    cpu_flags,
    each_kind,
    model_of,
    needs_a_compiler,
    served,
    tolerance,
    twins,
)
from tiny import bits, fp32_tolerance, some_tokens, tiny_args
from torch import Tensor

from llama.args import ModelArgs
from llama.batch import NonFiniteLogits
from llama.fast import native_call
from llama.fast.choose import make_fast
from llama.fast.native_build import NoNativeCode
from llama.fast.native_call import NativeForward
from llama.fast.native_check import check_library, trial_model
from llama.fast.native_runner import NativeRunner
from llama.fast.native_structs import NativeBatch, NativeModel
from llama.fast.supported import Unsupported
from llama.model import Transformer
from llama.quant.gguf_types import KINDS as KINDS_OF_FILES
from llama.quant.layers import quantized_weights
from llama.quant.packed import Format

pytestmark = needs_a_compiler
# AVX2 by the rules of a CPU for which GCC by default fuses the products and sums of some loops only.
OTHER = ("-march=x86-64-v3", "-mtune=znver3")


@pytest.fixture(params=cases(["native", "x86-64-v3"], "native"))
def cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile native code for this machine's CPU, then for one with AVX2 only."""
    if request.param == "x86-64-v3" and "fma" not in cpu_flags():
        pytest.skip("no x86")
    with compiled_with(*(OTHER if request.param == "x86-64-v3" else ())):
        yield


@each_kind
def test_native_logits_are_the_plain_ones(kind: str) -> None:
    plain, fast = twins(kind, EVERYTHING)
    tokens = some_tokens(3, 90, vocab_size=VOCAB)
    for caching in (False, True):
        plain.kv_caching = fast.kv_caching = caching
        ours, theirs = fast(tokens), plain(tokens)
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance(kind, theirs))
        last = fast(tokens, logits="last", lengths=[5, 90, 64])
        torch.testing.assert_close(last[:, 0], theirs[range(3), [4, 89, 63]], rtol=0, atol=tolerance(kind, theirs))
    assert served(fast) == 4


@each_kind
def test_native_bits_depend_only_on_the_text(kind: str) -> None:
    check_bits(kind, EVERYTHING)


@pytest.mark.parametrize(("kind", "cache"), cases([("fp32", "static"), ("bf16", "paged")], ("fp32", "static")))
def test_a_step_behind_a_long_text_has_the_bits_of_the_text_read_at_once(kind: str, cache: str) -> None:
    # So long that threads share its keys by whole chunks, with all heads; for one start so short that they share heads.
    _, fast = twins(kind, replace(ARGS, max_seq_len=1100))
    fast.kv_cache = cache
    tokens = some_tokens(2, 1100, vocab_size=VOCAB)
    whole = fast(tokens)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            for start in (1, 300, 1023, 1099):
                for rows in (1, 2):
                    step = fast(tokens[:rows, start : start + 1], start)
                    assert torch.equal(bits(step), bits(whole[:rows, start : start + 1])), (threads, start)
        finally:
            torch.set_num_threads(1)


@pytest.mark.parametrize("kind", cases(["fp32", "bf16", "int8", "int4", "int8 in bf16"], "bf16", "int8", "int4"))
def test_the_last_logits_of_prompts_of_any_lengths_have_the_bits_of_one_long_text(kind: str) -> None:
    """Many rows share strips of packed columns and chunks of keys, and the last layer completes only what is read."""
    _, fast = twins(kind, replace(ARGS, max_seq_len=140))
    tokens = some_tokens(9, 140, vocab_size=VOCAB)
    whole = fast(tokens)
    ragged = [2, 1, 31, 32, 33, 2, 71, 131, 3]
    for lengths in (ragged, [2] * 9, [1, 9] * 4 + [1], *([n] for n in (1, 2, 31, 32, 35, 36, 64, 128, 131))):
        places = [n - 1 for n in lengths]
        last = fast(tokens[: len(lengths), : max(lengths)], logits="last", lengths=lengths)
        assert torch.equal(bits(last[:, 0]), bits(whole[range(len(lengths)), places])), lengths


PACKED = {kind.name: kind.format for kind in KINDS_OF_FILES.values() if kind.format is not None}
MIXTURES: dict[str, tuple[set[Format | None], torch.dtype]] = {
    **{name: ({packed}, torch.float32) for name, packed in PACKED.items()},
    "all": ({*PACKED.values()}, torch.float32),
    "all in bf16": ({*PACKED.values()}, torch.bfloat16),
    "Q4_K and floats": ({PACKED["Q4_K"], None}, torch.float32),
    "Q8_0 and floats in bf16": ({PACKED["Q8_0"], None}, torch.bfloat16),
}
WITH_8_BITS = [(name, 8) for name in list(MIXTURES)[len(PACKED) :]]


@pytest.mark.parametrize(
    ("mixture", "activations"), cases([*((name, 16) for name in MIXTURES), *WITH_8_BITS], ("Q6_K", 16))
)
def test_every_packed_format_gives_the_plain_logits_and_always_the_same_bits(mixture: str, activations: int) -> None:
    formats, dtype = MIXTURES[mixture]
    check_library.__wrapped__(FOLDER, dtype, formats=frozenset(formats), activations=activations)


@pytest.mark.parametrize(("error", "says"), [(1.0, "is wrong for float32"), (1e-4, "differently from call to call")])
def test_wrong_logits_are_noticed(error: float, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`test_native_builds` compiles wrong code."""
    run, calls = NativeForward.__call__, itertools.count(1)

    def wrong(native: NativeForward, model: NativeModel, batch: NativeBatch, room: int) -> int:
        size = run(native, model, batch, room)
        if size <= room:
            c_float.from_address(batch.logits).value += error * next(calls)
        return size

    monkeypatch.setattr(NativeForward, "__call__", wrong)
    with pytest.raises(Unsupported, match=says):
        check_library.__wrapped__(FOLDER, torch.float32, formats=frozenset(), activations=0)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("activations", cases([16, 8], 16))
@pytest.mark.parametrize("name", cases(PACKED, "Q8_0", "Q6_K"))
def test_sums_of_the_largest_codes_and_activations_do_not_overflow(name: str, activations: int) -> None:
    model = trial_model(torch.float32, [PACKED[name]], activations)
    for weight in quantized_weights(model).values():
        weight.codes.fill_(255)
        for part in (weight.scales, weight.zeros, weight.scale_units, weight.zero_units):
            if part is not None:  # all vectors consist of one number, which is rounded to the largest code
                part.copy_(part.flatten()[0].expand_as(part))
    for norm in (model.norm, *(norm for block in model.blocks for norm in (block.attention_norm, block.ffn_norm))):
        norm.weight.fill_(1.0)
    with torch.inference_mode():
        plain = model(torch.arange(8).view(2, 4))
        model.runner = NativeRunner(FOLDER)  # unchecked
        torch.testing.assert_close(model(torch.arange(8).view(2, 4)), plain, rtol=2e-4, atol=0)
    assert served(model) == 1


@pytest.mark.parametrize("heads", [(50, 1), (64, 2)])
def test_more_query_heads_than_attention_takes_at_a_time(heads: tuple[int, int]) -> None:
    args = tiny_args(dim=64, n_heads=heads[0], n_kv_heads=heads[1], head_dim=32, multiple_of=32, vocab_size=VOCAB)
    plain, fast = twins("fp32", args)
    tokens = some_tokens(2, 20, vocab_size=VOCAB)
    theirs = plain(tokens)
    torch.testing.assert_close(fast(tokens), theirs, rtol=0, atol=fp32_tolerance(theirs, args))
    torch.testing.assert_close(fast(tokens[:, 7:8], 7), theirs[:, 7:8], rtol=0, atol=fp32_tolerance(theirs, args))


def test_large_and_small_activations_keep_their_exponentials() -> None:
    # Scores and gates of several hundred: their exp is 0 or past float32, and their softmax is neither.
    plain, fast = twins("fp32")
    for model in (plain, fast):
        for block in model.blocks:
            block.attention.wq.weight.mul_(40)
            block.feed_forward.w1.weight.mul_(40)
    tokens = some_tokens(2, 70, vocab_size=VOCAB)
    theirs = plain.double()(tokens)
    torch.testing.assert_close(fast(tokens).double(), theirs, rtol=0, atol=100 * fp32_tolerance(theirs, ARGS))


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_tiny_activations_keep_their_digits(kind: str) -> None:
    plain, fast = twins(kind)
    tokens, size = some_tokens(2, 9, vocab_size=VOCAB), 1.0
    for factor in (1e-20, 1e-10, 1e-7):
        size *= factor
        for model in (plain, fast):
            model.norm.weight.mul_(factor)
        theirs = plain(tokens)
        assert 0 < theirs.abs().max() < 100 * size
        torch.testing.assert_close(fast(tokens), theirs, rtol=0, atol=1e-3 * float(theirs.abs().max()))


@each_kind
def test_logits_that_are_not_finite_are_reported(kind: str) -> None:
    _, fast = twins(kind)
    for bad in (torch.nan, torch.inf):
        fast.blocks[1].ffn_norm.weight[5] = bad
        with pytest.raises(NonFiniteLogits):
            fast.generate_tokens([[1, 2, 3]], 4, temperature=0.0)


def test_an_id_outside_of_the_vocabulary_raises() -> None:
    _, fast = twins("fp32")
    for id in (-1, VOCAB):
        with pytest.raises(IndexError, match="outside of the vocabulary"):
            fast(torch.tensor([[1, id]]))


# ---- left to the plain path ------------------------------------------------------------------------------------------


class Silent(torch.nn.Module):
    """A module of a researcher in the place of an MLP."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def double(scores: Tensor, *_: Any) -> Tensor:
    return 2 * scores


def set_bias(layer: torch.nn.Module, size: int) -> None:
    layer.bias = torch.nn.Parameter(torch.ones(size), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.blocks[0].feed_forward.register_forward_hook(lambda *_: None), "hook"),
        (lambda model: setattr(model.blocks[1], "feed_forward", Silent()), "Silent is not one of the modules"),
        (lambda model: model.use(model.ops._replace(name="mine", silu=torch.relu)), "operations are mine"),
        (lambda model: model.use(model.ops._replace(score_mod=double)), "operations are plain with score_mod="),
        (torch.nn.Module.double, "not for torch.float64"),
        (lambda model: setattr(model.layers[1].attention, "q_norm", torch.nn.LayerNorm(32)), "LayerNorm is not one of"),
        (lambda model: setattr(model.layers[1].attention.k_norm, "eps", 1e-3), "norms differ in their eps"),
        (lambda model: setattr(model.layers[0], "ffn_norm", torch.nn.Identity()), "Identity is not one of"),
        (lambda model: set_bias(model.layers[0].feed_forward.w1, 256), "a layer other than wq, wk and wv has a bias"),
        (lambda model: set_bias(model.output, VOCAB), "the head has a bias"),
        (lambda model: set_bias(model.layers[0].attention.wq, 3), "a tensor is (3,)"),
    ],
)
def test_a_changed_model_runs_on_the_plain_path_with_one_warning(
    change: Callable[[Transformer], object], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = twins("fp32", EVERYTHING)
    for model in (plain, fast):
        change(model)
    tokens = some_tokens(2, 9, vocab_size=VOCAB)
    with caplog.at_level(logging.WARNING, "llama"):
        for _ in range(2):
            theirs, ours = (outcome(lambda model=model: model(tokens)) for model in (plain, fast))  # type: ignore[misc]
            if isinstance(theirs, Tensor) and isinstance(ours, Tensor):
                assert torch.equal(ours, theirs)
                assert torch.equal(fast(tokens[:, :1], 9), plain(tokens[:, :1], 9))
            else:
                assert ours is theirs
            fast.free_cache()
            plain.free_cache()
    assert served(fast) == 0
    assert [words in record.message for record in caplog.records if record.levelname == "WARNING"] == [True]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (replace(ARGS, kv_cache="window:20+3"), "kv_cache='window:20+3' has no fast step; these kinds have one: "),
        (replace(ARGS, rope_theta=None), "rope_theta=None: models without RoPE have no fast step"),
        (tiny_args(dim=48, head_dim=32, multiple_of=32), "dim=48 of the model is not a multiple of 32"),
        (tiny_args(dim=64, head_dim=8, multiple_of=32), "head_dim=8 of the model"),
    ],
)
def test_an_unsupported_model_stays_plain(args: ModelArgs, words: str, caplog: pytest.LogCaptureFixture) -> None:
    model = model_of("fp32", args)
    with caplog.at_level(logging.WARNING, "llama"):
        make_fast(model, FOLDER)
    assert model.runner is None
    assert words in caplog.text
    assert "plain path" in caplog.text


# ---- compiling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", ["a compiler", "a folder"])
def test_without_a_compiler_or_a_folder_the_plain_path_runs(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    if lacks == "a compiler":
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
    model = model_of("fp32")
    with caplog.at_level(logging.WARNING, "llama"):
        make_fast(model, tmp_path if lacks == "a compiler" else tmp_path / "file" / "native")
    assert model.runner is None
    assert ("there is no C++ compiler" if lacks == "a compiler" else "Not a directory") in caplog.text
    assert "the plain path runs instead" in caplog.text
    assert model(some_tokens(1, 3, vocab_size=VOCAB)).shape == (1, 3, VOCAB)


def test_a_forward_is_compiled_when_a_model_needs_it_and_the_plain_path_runs_if_it_cannot_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled: list[str] = []
    known = native_call.load_library

    def load(source: Path, folder: Path, defines: Sequence[str] = ()) -> Any:
        compiled.append(" ".join((source.name, *defines)))
        if "bfloat" in compiled[-1]:
            raise NoNativeCode("no compiler is left")
        return known(source, folder, defines)

    monkeypatch.setattr(native_call, "load_library", load)
    plain, fast = twins("fp32")
    assert set(compiled) == {"common.cpp", "forward.cpp -DNUMBER=float -DPRODUCT=Plain<float>"}
    tokens = some_tokens(2, 5, vocab_size=VOCAB)
    fast(tokens)
    assert served(fast) == 1
    for model in (plain, fast):
        model.to(torch.bfloat16)
    with caplog.at_level(logging.WARNING, "llama"):
        assert torch.equal(fast(tokens), plain(tokens))
    assert served(fast) == 1
    assert "no compiler is left" in caplog.text
