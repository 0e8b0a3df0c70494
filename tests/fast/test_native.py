"""The native forward gives what the plain one gives, the same bits cached and uncached, or leaves it to the plain one.

Compiled for this machine, and where it is an x86 for older ones, too, so that their code is run as well.
"""

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native import (
    ARGS,
    FAMILIES,
    FOLDER,
    KINDS,
    VOCAB,
    check_bits,
    compiled_with,
    cpu_flags,
    model_of,
    needs_a_compiler,
    served,
    tolerance,
    twins,
)
from oracles import bits, fp32_tolerance, some_tokens, tiny_args
from torch import Tensor

from llama.args import ModelArgs
from llama.batch import NonFiniteLogits
from llama.fast import native_build
from llama.fast.choose import make_fast
from llama.fast.native_check import check_blocks, check_library, tiny_model
from llama.fast.native_runner import NativeRunner
from llama.fast.supported import Unsupported
from llama.model import Transformer
from llama.quant.gguf_types import KINDS as KINDS_OF_FILES
from llama.quant.gguf_types import Kind
from llama.quant.layers import PackedLinear, quantized_weights
from llama.quant.packed import Format, MappedWeight, Parts

pytestmark = needs_a_compiler
# AVX2 by the rules of the CPU on which GCC fuses some loops' products and sums and not others', left to itself.
OTHER = ("-march=x86-64-v3", "-mtune=znver3")


@pytest.fixture(params=["native", *(["x86-64-v3"] if "fma" in cpu_flags() else [])])
def cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let native code be compiled for this machine's CPU, then for one with AVX2 alone."""
    with compiled_with(*(OTHER if request.param == "x86-64-v3" else ())):
        yield


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("kind", KINDS)
def test_native_logits_are_the_plain_ones(kind: str) -> None:
    plain, fast = twins(kind)
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


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("kind", KINDS)
def test_native_bits_depend_on_nothing_but_the_text(kind: str) -> None:
    check_bits(kind)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_plain_logits_and_bits_that_depend_on_the_text_alone(family: str, kind: str) -> None:
    plain, fast = twins(kind, FAMILIES[family])
    tokens = some_tokens(3, 90, vocab_size=VOCAB)
    for caching in (False, True):
        plain.kv_caching = fast.kv_caching = caching
        ours, theirs = fast(tokens), plain(tokens)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance(kind, theirs))
    assert served(fast) == 2
    check_bits(kind, FAMILIES[family])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.layers[1].attention, "q_norm", torch.nn.LayerNorm(32)),
        lambda model: setattr(model.layers[1].attention.k_norm, "eps", 1e-3),
        lambda model: setattr(model.layers[0], "ffn_norm", torch.nn.Identity()),
        lambda model: setattr(model.layers[0].feed_forward.w1, "bias", torch.nn.Parameter(torch.ones(256))),
        lambda model: setattr(model.output, "bias", torch.nn.Parameter(torch.ones(VOCAB))),
        lambda model: setattr(model.layers[0].attention.wq, "bias", torch.nn.Parameter(torch.ones(3))),
    ],
)
def test_what_no_family_has_is_left_to_the_plain_path(change: Callable[[Transformer], None]) -> None:
    _, fast = twins("fp32", FAMILIES["qwen3"])
    tokens = some_tokens(1, 5, vocab_size=VOCAB)
    fast(tokens)
    change(fast)
    with suppress(RuntimeError), torch.inference_mode():  # the plain path's own error, of a bias that does not fit
        fast(tokens)
    assert served(fast) == 1


@pytest.mark.usefixtures("cpu")
def test_a_bias_that_is_assigned_later_is_computed() -> None:
    plain, fast = twins("fp32")
    tokens = some_tokens(1, 5, vocab_size=VOCAB)
    for model in (plain, fast):
        model(tokens)
        model.layers[1].attention.wv.bias = torch.nn.Parameter(torch.linspace(-1, 1, 64), requires_grad=False)
    theirs = plain(tokens)
    torch.testing.assert_close(fast(tokens), theirs, rtol=0, atol=tolerance("fp32", theirs))
    assert served(fast) == 2


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("cache", ["static", "paged"])
def test_a_step_behind_a_long_text_has_the_bits_of_the_text_read_at_once(kind: str, cache: str) -> None:
    # So long that threads share its keys by whole chunks, with all heads, and once so short that they share heads, too.
    _, fast = twins(kind, replace(ARGS, max_seq_len=1100))
    fast.kv_cache = cache
    tokens = some_tokens(2, 1100, vocab_size=VOCAB)
    whole = fast(tokens)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            for start in (1, 300, 1023, 1099):
                steps = fast(tokens[:1, start : start + 1], start), fast(tokens[:, start : start + 1], start)
                for step in steps:
                    assert torch.equal(bits(step), bits(whole[: len(step), start : start + 1])), (threads, start)
        finally:
            torch.set_num_threads(1)


PACKED = {kind.name: kind.format for kind in KINDS_OF_FILES.values() if kind.format is not None}
MIXTURES: dict[str, tuple[frozenset[Format | None], torch.dtype]] = {
    **{name: (frozenset([packed]), torch.float32) for name, packed in PACKED.items()},
    "all in bf16": (frozenset(PACKED.values()), torch.bfloat16),
    "Q4_K and floats": (frozenset([PACKED["Q4_K"], None]), torch.float32),
    "Q8_0 and floats in bf16": (frozenset([PACKED["Q8_0"], None]), torch.bfloat16),
}


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("activations", [16, 8])
@pytest.mark.parametrize(("formats", "dtype"), MIXTURES.values(), ids=MIXTURES)
def test_every_packed_format_gives_what_its_plain_layers_give_and_always_the_same_bits(
    formats: frozenset[Format | None], dtype: torch.dtype, activations: int
) -> None:
    check_library.__wrapped__(FOLDER, dtype, formats=formats, activations=activations)


def mapped(kind: Kind) -> MappedWeight:
    assert kind.format is not None
    assert kind.parts is not None
    raw = torch.zeros(16, 512 // kind.block, kind.size, dtype=torch.uint8)
    return MappedWeight(512, kind.format, raw, kind.name, kind.parts)


@pytest.mark.usefixtures("cpu")
def test_every_kind_of_mapped_block_is_read_as_its_definition_says() -> None:
    kinds = [kind for kind in KINDS_OF_FILES.values() if kind.format is not None]
    check_blocks(FOLDER, map(mapped, kinds))


@pytest.mark.parametrize("name", PACKED)
def test_a_block_that_is_read_wrongly_is_noticed(name: str) -> None:
    kind = next(kind for kind in KINDS_OF_FILES.values() if kind.name == name)
    weight = mapped(kind)
    right = weight.split

    def wrong(raw: Tensor) -> Parts:
        parts = right(raw)
        return parts._replace(codes=parts.codes ^ 128)

    weight.split = wrong
    with pytest.raises(Unsupported, match=f"reads the codes of {name} wrongly"):
        check_blocks(FOLDER, [weight])


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("activations", [16, 8])
@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED)
def test_sums_of_the_largest_codes_and_activations_are_not_cut(packed: Format, activations: int) -> None:
    model = tiny_model(torch.float32, [packed], activations)
    for weight in quantized_weights(model).values():
        weight.codes.fill_(255)
        for part in (weight.scales, weight.zeros, weight.scale_units, weight.zero_units):
            if part is not None:  # so that all vectors are of one number, which is rounded to the largest
                part.copy_(part.flatten()[0].expand_as(part))
    for norm in (model.norm, *(norm for block in model.blocks for norm in (block.attention_norm, block.ffn_norm))):
        norm.weight.fill_(1.0)
    with torch.inference_mode():
        plain = model(torch.arange(8).view(2, 4))
        make_fast(model, FOLDER)
        torch.testing.assert_close(model(torch.arange(8).view(2, 4)), plain, rtol=2e-4, atol=0)
    assert served(model) == 1


@settings(max_examples=25)
@given(data=st.data())
def test_models_of_many_shapes_and_ragged_rows(data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from([1, 2, 3, 4, 8]))
    args = tiny_args(
        dim=32 * data.draw(st.integers(1, 4)),
        n_layers=data.draw(st.integers(1, 3)),
        n_heads=heads,
        n_kv_heads=data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if heads % n == 0])),
        head_dim=data.draw(st.sampled_from([32, 64, 96, 128])),
        multiple_of=32,
        vocab_size=data.draw(st.sampled_from([3, 16, 57])),
        tied_head=data.draw(st.booleans()),
        max_seq_len=200,
    )
    plain, fast = twins(data.draw(st.sampled_from(["fp32", "int8"])), args)
    torch.set_num_threads(data.draw(st.integers(1, 3)))
    try:
        lengths = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
        tokens = some_tokens(len(lengths), max(lengths), vocab_size=args.vocab_size)
        step = some_tokens(len(lengths), 1, vocab_size=args.vocab_size, seed=1)
        for fed, starts, ends in ((tokens, 0, lengths), (step, lengths, None)):
            theirs = plain(fed, starts, logits="last", lengths=ends)
            ours = fast(fed, starts, logits="last", lengths=ends)
            allowed = 16 * fp32_tolerance(theirs, args)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=allowed)
    finally:
        torch.set_num_threads(1)
    assert served(fast) == 2


@pytest.mark.parametrize("heads", [(50, 1), (64, 2)])
def test_more_query_heads_than_attention_takes_at_a_time(heads: tuple[int, int]) -> None:
    args = tiny_args(dim=64, n_heads=heads[0], n_kv_heads=heads[1], head_dim=32, multiple_of=32, vocab_size=VOCAB)
    plain, fast = twins("fp32", args)
    tokens = some_tokens(2, 20, vocab_size=VOCAB)
    theirs = plain(tokens)
    torch.testing.assert_close(fast(tokens), theirs, rtol=0, atol=fp32_tolerance(theirs, args))
    torch.testing.assert_close(fast(tokens[:, 7:8], 7), theirs[:, 7:8], rtol=0, atol=fp32_tolerance(theirs, args))


def test_large_and_small_activations_keep_their_exponentials() -> None:
    # Scores and gates of several hundred: exp of them is 0 or past float32, and the softmax of them is neither.
    plain, fast = twins("fp32")
    for model in (plain, fast):
        for block in model.blocks:
            block.attention.wq.weight.mul_(40)
            block.feed_forward.w1.weight.mul_(40)
    tokens = some_tokens(2, 70, vocab_size=VOCAB)
    theirs = plain.double()(tokens)
    torch.testing.assert_close(fast(tokens).double(), theirs, rtol=0, atol=100 * fp32_tolerance(theirs, ARGS))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_never_written_is_never_read(kind: str) -> None:
    _, fast = twins(kind)
    tokens = some_tokens(3, 80, vocab_size=VOCAB)
    fast(tokens, logits="last", lengths=[80, 20, 33])
    expected = fast(tokens[:, :1], [80, 20, 33])
    for cache in fast.own_cache().layers:
        for buffer in (cache.keys, cache.values):
            assert buffer is not None
            for row, end in enumerate([80, 20, 33]):
                buffer[row, end:] = torch.nan
    assert torch.equal(bits(fast(tokens[:, :1], [80, 20, 33])), bits(expected))


@pytest.mark.parametrize("size", [1e-20, 1e-30, 1e-37])
@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_tiny_activations_keep_their_digits(kind: str, size: float) -> None:
    plain, fast = twins(kind)
    for model in (plain, fast):
        model.norm.weight.mul_(size)
    tokens = some_tokens(2, 9, vocab_size=VOCAB)
    theirs = plain(tokens)
    assert 0 < theirs.abs().max() < 100 * size
    torch.testing.assert_close(fast(tokens), theirs, rtol=0, atol=1e-3 * float(theirs.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_none_is_noticed(kind: str, bad: float) -> None:
    _, fast = twins(kind)
    fast.blocks[1].ffn_norm.weight[5] = bad
    with pytest.raises(NonFiniteLogits):
        fast.generate_tokens([[1, 2, 3]], 4, temperature=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_goes_on_in_every_way(kind: str) -> None:
    plain, fast = twins(kind)
    prompts = [[5, 6, 7], [1] * 40, [9, 8]]
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "kv_caching": False},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"temperature": 0.0, "logprobs": True, "echo": True},
    ]
    for way in ways:
        before = served(fast)
        ids, scores = fast.generate_tokens(prompts, [12, 5, 12], **way)
        assert served(fast) - before == 12  # one a token: the native code really ran
        if kind == "fp32":  # where margins are far above rounding
            expected, their_scores = plain.generate_tokens(prompts, [12, 5, 12], **way)
            assert ids == expected
            for ours, theirs in zip(scores or [], their_scores or [], strict=True):
                assert ours == pytest.approx(theirs, abs=1e-4)
    cached, uncached = (fast.generate_tokens(prompts, 12, **way)[0] for way in ways[:2])
    assert cached == uncached


def test_nothing_is_compiled_while_text_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    _, fast = twins("fp32")
    ran: list[Any] = []
    monkeypatch.setattr(native_build.subprocess, "run", lambda *words, **_: ran.append(words))
    for length in (1, 2, 17, 33, 64, 100):
        fast.generate_tokens([[3] * length, [4]], 3, temperature=0.0)
        fast.generate_tokens([[3] * length], 3, temperature=0.0, kv_caching=False)
    assert served(fast) == 36
    assert ran == []


def test_an_unknown_token_is_refused() -> None:
    _, fast = twins("fp32")
    for id in (-1, VOCAB):
        with pytest.raises(IndexError, match="outside of the vocabulary"):
            fast(torch.tensor([[1, id]]))


# ---- what it leaves to the plain path --------------------------------------------------------------------------------


class Silent(torch.nn.Module):
    """A research module: in the place of an MLP, it says nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


def watch(model: Transformer) -> None:
    model.blocks[0].feed_forward.register_forward_hook(lambda *_: None)


def change_a_module(model: Transformer) -> None:
    model.blocks[1].feed_forward = Silent()  # type: ignore[assignment]


def change_an_operation(model: Transformer) -> None:
    model.use(model.ops._replace(name="mine", silu=torch.relu))


def change_the_scores(model: Transformer) -> None:
    model.use(model.ops._replace(score_mod=lambda scores, *_: 2 * scores))


def change_a_dtype(model: Transformer) -> None:
    model.double()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (watch, "hook"),
        (change_a_module, "Silent is not one of the modules"),
        (change_an_operation, "operations are mine"),
        (change_the_scores, "operations are plain with score_mod="),
        (change_a_dtype, "not for torch.float64"),
    ],
)
def test_a_changed_model_is_run_as_it_is_and_that_is_said_once(
    change: Callable[[Transformer], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = twins("fp32")
    for model in (plain, fast):
        change(model)
    tokens = some_tokens(2, 9, vocab_size=VOCAB)
    with caplog.at_level(logging.WARNING, "llama"):
        for _ in range(2):
            fast.free_cache()
            plain.free_cache()
            assert torch.equal(fast(tokens), plain(tokens))
            assert torch.equal(fast(tokens[:, :1], 9), plain(tokens[:, :1], 9))  # a step behind such a prompt, too
    assert served(fast) == 0
    assert [words in record.message for record in caplog.records if record.levelname == "WARNING"] == [True]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (replace(ARGS, kv_cache="concat"), "kv_cache='concat' has no fast step"),
        (replace(ARGS, rope_theta=None), "rope_theta=None: models without RoPE have no fast step"),
        (tiny_args(dim=48, head_dim=32, multiple_of=32), "dim of the model, 48, is no multiple of 32"),
        (tiny_args(dim=64, head_dim=8, multiple_of=32), "head_dim of the model, 8"),
    ],
)
def test_a_model_that_it_does_not_cover_stays_plain(
    args: ModelArgs, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of("fp32", args)
    with caplog.at_level(logging.WARNING, "llama"):
        make_fast(model, FOLDER)
    assert model.runner is None
    assert words in caplog.text
    assert "plain path" in caplog.text


def test_gradients_flow_through_the_plain_modules() -> None:
    _, fast = twins("fp32")
    fast.requires_grad_(True)
    fast.kv_caching = False
    fast(some_tokens(1, 6, vocab_size=VOCAB)).sum().backward()
    assert fast.blocks[0].attention.wq.weight.grad is not None
    assert served(fast) == 0
    with torch.no_grad():
        fast(some_tokens(1, 6, vocab_size=VOCAB))
    assert served(fast) == 1


# ---- a model that changes, or goes -----------------------------------------------------------------------------------


def test_weights_that_were_replaced_are_the_ones_that_count() -> None:
    plain, fast = twins("fp32")
    tokens = some_tokens(1, 8, vocab_size=VOCAB)
    before = fast(tokens)
    for model in (plain, fast):
        model.blocks[0].attention.wo.weight = torch.nn.Parameter(
            torch.ones_like(model.blocks[0].attention.wo.weight), requires_grad=False
        )
        model.norm.weight.mul_(2)
        model.free_cache()
    theirs = plain(tokens)
    torch.testing.assert_close(fast(tokens), theirs, rtol=0, atol=fp32_tolerance(theirs, ARGS))
    assert not torch.allclose(before, theirs, atol=1.0)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_runs_on_weights_of_its_own(twin: Callable[[Transformer], Transformer]) -> None:
    _, fast = twins("fp32")
    tokens = some_tokens(1, 8, vocab_size=VOCAB)
    expected = fast(tokens)
    other = twin(fast)
    fast.norm.weight.zero_()
    other.free_cache()
    assert torch.equal(other(tokens), expected)
    assert served(other) == 1


def test_a_freed_cache_is_gone() -> None:
    _, fast = twins("fp32")
    fast(some_tokens(2, 8, vocab_size=VOCAB))
    held = [weakref.ref(cache.keys) for cache in fast.own_cache().layers if cache.keys is not None]
    assert len(held) == ARGS.n_layers
    fast.free_cache()
    gc.collect()
    assert [ref() for ref in held] == [None] * ARGS.n_layers
    assert fast(some_tokens(4, 30, vocab_size=VOCAB)).shape == (4, 30, VOCAB)


def test_a_growing_text_moves_into_larger_buffers() -> None:
    _, fast = twins("fp32")
    tokens = some_tokens(2, 100, vocab_size=VOCAB)
    whole = fast(tokens)
    fast.free_cache()
    parts = [fast(tokens[:, pos : pos + 1], pos) for pos in range(100)]
    assert torch.equal(torch.cat(parts, 1), whole)


# ---- compiling -------------------------------------------------------------------------------------------------------


def test_without_a_compiler_the_plain_path_goes_on_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    model = model_of("fp32")
    with caplog.at_level(logging.WARNING, "llama"):
        make_fast(model, tmp_path)
    assert model.runner is None
    assert "there is no C++ compiler" in caplog.text
    assert model(some_tokens(1, 3, vocab_size=VOCAB)).shape == (1, 3, VOCAB)


def test_a_compiler_that_fails_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-no-such-flag"))
    with caplog.at_level(logging.WARNING, "llama"):
        make_fast(model_of("fp32"), tmp_path)
    assert "no-such-flag" in caplog.text
    assert list(tmp_path.glob("*")) == []


def test_a_second_start_compiles_nothing_and_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    _, fast = twins("fp32")
    assert fast.runner is not None


@pytest.mark.slow
def test_a_damaged_library_is_compiled_again_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "FLAGS", (*native_build.FLAGS, "-O0"))  # compiles in a moment
    NativeRunner(tmp_path)
    library = next(tmp_path.glob("*.so"))
    damaged = library.read_bytes()[:1000]
    library.unlink()  # it is in use here, and what is mapped must not change
    library.write_bytes(damaged)
    with caplog.at_level(logging.INFO, "llama"):
        _, fast = twins("fp32", folder=tmp_path)
    assert [record.levelname for record in caplog.records][:2] == ["WARNING", "INFO"]
    assert "damaged" in caplog.records[0].message
    assert "compiling" in caplog.records[1].message
    assert fast(some_tokens(1, 3, vocab_size=VOCAB)).isfinite().all()


def test_a_folder_that_cannot_be_written_leaves_the_plain_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    model = model_of("fp32")
    with caplog.at_level(logging.WARNING, "llama"):
        make_fast(model, tmp_path / "file" / "native")
    assert model.runner is None
    assert "plain path" in caplog.text


def test_the_int8_layers_of_the_twins_are_int8() -> None:
    assert isinstance(model_of("int8").blocks[0].attention.wq, PackedLinear)
