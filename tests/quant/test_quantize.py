"""Packed weights are near or equal to the weights they were made of, have the expected size, and run everywhere."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Kind, config_of, meta_weights, random_model, write_gguf, write_huggingface
from hypothesis import given, settings
from hypothesis import strategies as st
from native import needs_a_compiler, served
from refusals import unrefused
from tiny import some_tokens, tiny_args
from torch import Tensor

from llama import load
from llama.api import check_modes
from llama.bench.run.memory import tensor_peak
from llama.checkpoint import CheckpointError, load_weights, open_checkpoint
from llama.checkpoint.demo import demo_model_path
from llama.fast.choose import make_fast
from llama.host.files import cache_dir
from llama.model import Transformer
from llama.quant.gguf_types import KINDS
from llama.quant.layers import PackedEmbedding, PackedLinear, in_8_bits, quantize_layers, quantized_weights
from llama.quant.packed import GROUP, INT4, INT8, Format, PackedWeight, Parts, pack_codes, unpack_codes
from llama.untrusted.gguf_header import read_gguf_header

HALF_STEP = 0.5 + 240 * 2.0**-11  # of a code: rounding it, and its scale to float16
FORMATS = {8: INT8, 4: INT4}
STEPS = {8: 240, 4: 15}  # from a group's smallest weight to its largest


def packed(weight: Tensor, bits: int = 8) -> PackedWeight:
    made = PackedWeight(*weight.shape, FORMATS[bits])
    made.fill(0, weight)
    return made


@settings(max_examples=40)
@given(
    outputs=st.integers(1, 70),
    groups=st.integers(1, 5),
    size=st.sampled_from([1e-3, 0.1, 1.0, 50.0]),
    seed=st.integers(0, 99),
    bits=st.sampled_from([8, 4]),
)
def test_a_weight_is_off_by_half_a_step(outputs: int, groups: int, size: float, seed: int, bits: int) -> None:
    weight = size * torch.randn(outputs, groups * GROUP, generator=torch.Generator().manual_seed(seed))
    off = (packed(weight, bits).rows(0, outputs) - weight).abs().view(outputs, groups, GROUP)
    low, high = weight.view(outputs, groups, GROUP).aminmax(dim=-1, keepdim=True)
    assert (off <= HALF_STEP * (high - low) / STEPS[bits] + low.abs() * 2.0**-11).all()


def test_weights_on_a_grid_come_back_unchanged() -> None:
    # As in files of 4 bits a weight in groups of 32, with a step and a smallest weight in float16.
    levels = torch.randint(16, (48, 4, GROUP)).float()
    levels[..., 0], levels[..., 1] = 0, 15
    step, least = torch.rand(2, 48, 4, 1).half().float()
    weight = (levels * step - least).flatten(1)
    for bits in (8, 4):
        torch.testing.assert_close(packed(weight, bits).rows(0, 48), weight, rtol=0, atol=1e-6)
    levels = torch.randint(-127, 128, (48, 4, GROUP)).float()
    levels[..., 0] = 127
    weight = (levels * torch.rand(48, 4, 1).half().float()).flatten(1)
    torch.testing.assert_close(packed(weight).rows(0, 48), weight, rtol=0, atol=1e-4)


def test_a_group_of_one_number_and_a_group_of_zeros() -> None:
    weight = torch.cat([torch.full((3, GROUP), 0.25), torch.zeros(3, GROUP), torch.full((3, GROUP), -2.0)], dim=1)
    assert [torch.equal(packed(weight, bits).rows(0, 3), weight) for bits in (8, 4)] == [True, True]


@settings(max_examples=30)
@given(
    cut=st.sampled_from([16, 32, 48, 64]),
    start=st.integers(0, 69),
    width=st.integers(1, 70),
    bits=st.sampled_from([8, 4]),
)
def test_blocks_are_parts_of_the_whole(cut: int, start: int, width: int, bits: int) -> None:
    weight = torch.randn(70, 2 * GROUP, generator=torch.Generator().manual_seed(0))
    whole, parts = packed(weight, bits), PackedWeight(70, 2 * GROUP, FORMATS[bits])
    parts.fill(cut, weight[cut:])
    parts.fill(0, weight[:cut])
    stop = min(70, start + width)
    assert torch.equal(parts.rows(start, stop), whole.rows(0, 70)[start:stop])


@settings(max_examples=20)
@given(st.sampled_from([4, 5, 6, 8]), st.integers(0, 99))
def test_codes_of_any_width_are_stored_unchanged(bits: int, seed: int) -> None:
    codes = torch.randint(1 << bits, (20, 3, GROUP), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    words = pack_codes(codes, bits)
    assert words.shape == (20, 3, bits, 4), "no byte more than the bits need"
    assert torch.equal(unpack_codes(words, bits), codes)
    ones, weight = torch.ones(20, 3, dtype=torch.float16), PackedWeight(20, 3 * GROUP, Format(bits))
    weight.take(0, Parts(words, ones, 0 * ones))
    assert torch.equal(weight.rows(0, 20).view(20, 3, GROUP).byte(), codes)
    assert torch.equal(weight.at(torch.tensor([[3, 19]]), torch.float32)[0], codes[[3, 19]].flatten(1).float())


def test_8_bits_of_activations_keep_each_32_to_1_part_in_254_of_the_largest() -> None:
    x = torch.randn(3, 5, 4 * GROUP) * torch.tensor([1e-30, 1.0, 1e3])[:, None, None]
    x[0, 0, :GROUP] = 0
    rounded = in_8_bits(x)
    most = x.unflatten(-1, (4, GROUP)).abs().amax(-1, keepdim=True)
    assert ((rounded - x).unflatten(-1, (4, GROUP)).abs() <= most / 253).all()
    assert 0 < (rounded != x).float().mean() < 1
    x[0, 1, 5] = torch.nan
    assert in_8_bits(x)[0, 1, :GROUP].isnan().all()


@pytest.mark.parametrize("bits", [8, 4])
def test_layers_multiply_and_look_up_the_dequantised_weights(bits: int) -> None:
    weight = packed(torch.randn(5000, GROUP), bits)  # more outputs than are dequantised at a time
    wide = weight.rows(0, 5000)
    x, ids = torch.randn(2, 3, GROUP), torch.tensor([[0, 17, 4999], [16, 15, 4096]])
    torch.testing.assert_close(PackedLinear(weight)(x), x @ wide.T, rtol=1e-5, atol=1e-5)
    assert torch.equal(PackedEmbedding(weight, torch.float32)(ids), wide[ids])
    assert PackedEmbedding(weight, torch.bfloat16)(ids).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_changes_activations_and_not_the_weights(dtype: torch.dtype) -> None:
    model = Transformer(tiny_args(tied_head=True)).requires_grad_(False)
    quantize_layers(model, torch.float32)
    for name, weight in quantized_weights(model).items():
        weight.fill(0, torch.randn(*weight.shape, generator=torch.Generator().manual_seed(len(name))))
    before = {name: weight.rows(0, weight.shape[0]) for name, weight in quantized_weights(model).items()}
    logits = model(some_tokens(1, 5))
    model.free_cache()
    model.to(dtype)
    for name, weight in quantized_weights(model).items():
        assert torch.equal(weight.rows(0, weight.shape[0]), before[name])
    assert model.norm.weight.dtype == dtype
    assert model.tok_embeddings(torch.tensor([[1]])).dtype == dtype
    off = (model(some_tokens(1, 5)) - logits).abs().max()
    assert off < 0.1 * logits.abs().max()


def test_dequantising_never_makes_a_second_copy_of_a_large_matrix() -> None:
    weight = packed(torch.randn(40_000, GROUP))
    x = torch.randn(1, GROUP)
    layer = PackedLinear(weight)
    assert tensor_peak(lambda: layer(x)) < 40_000 * GROUP * 4 / 2


def test_sizes_that_fill_no_panel_or_no_group_raise() -> None:
    for start, rows in ((8, 16), (0, 10), (32, 7)):
        with pytest.raises(ValueError, match="do not end with a panel"):
            PackedWeight(64, GROUP).fill(start, torch.zeros(rows, GROUP))
    with pytest.raises(ValueError, match=r"groups of 32.* 40 inputs; leave quantize out"):
        PackedWeight(16, 40)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_stays_one_with_the_embedding(tied: bool) -> None:
    model = Transformer(tiny_args(tied_head=tied))
    quantize_layers(model, torch.float32)
    assert (model.output.weight is model.tok_embeddings.weight) == tied
    assert len(quantized_weights(model)) == 2 * 7 + (1 if tied else 2)
    matrices = sum(weight.shape.numel() for weight in quantized_weights(model).values())
    padding = sum(-weight.shape[0] % 16 * weight.shape[1] for weight in quantized_weights(model).values())
    assert sum(weight.nbytes for weight in quantized_weights(model).values()) == (matrices + padding) * 9 // 8
    floats = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32]
    assert all("norm" in name for name in floats)


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_huggingface(tmp_path_factory.mktemp("checkpoint"), random_model(config_of(**SIZES)))


def test_a_checkpoint_is_loaded_into_int8_matrix_by_matrix(checkpoint: Path) -> None:
    opened = open_checkpoint(checkpoint)
    told: list[tuple[int, int]] = []
    plain = load_weights(opened, opened.args, dtype=torch.float32, device="cpu")
    quantized = load_weights(
        opened, opened.args, dtype=torch.float32, device="cpu", quantize="int8", progress=lambda *at: told.append(at)
    )
    for name, weight in quantized_weights(quantized).items():
        made = PackedWeight(*weight.shape)
        made.fill(0, plain.get_parameter(name))
        assert torch.equal(weight.codes, made.codes), name
        assert torch.equal(weight.scales, made.scales), name
    assert torch.equal(quantized.norm.weight, plain.norm.weight)
    assert told[-1][0] == told[-1][1] == sum(parameter.nbytes for parameter in quantized.parameters())


@pytest.mark.slow
def test_the_demo_in_int8_never_needs_the_memory_of_its_floats_and_knows_the_capital(demo_checkpoint: Any) -> None:
    how: Any = {"dtype": torch.float32, "device": "cpu", "quantize": "int8"}
    models: list[Transformer] = []
    peak = tensor_peak(lambda: models.append(load_weights(demo_checkpoint, demo_checkpoint.args, **how)))
    float_model = 538_060_032  # bytes of the demo model's float32 weights
    assert peak < 0.4 * float_model
    (said,) = models[0].generate(demo_checkpoint.tokenizer, ["The capital of France is"], 2, temperature=0.0)
    assert "Paris" in said["generation"]


@pytest.fixture(scope="module")
def demo_checkpoint() -> Any:
    return open_checkpoint(demo_model_path())


EXCLUSIVE: list[tuple[dict[str, Any], str]] = [
    ({"activations": 8}, "activations=8 goes with packed weights; ask for quantize int8, int4 or stored"),
    ({"quantize": "int8", "activations": 4}, "activations=4 must be 8 or 16, in bits"),
    ({"fast": "fused"}, "fast='fused' must be True or False"),
    ({"quantize": "int3"}, "quantize='int3' is not known; choose of int8, int4, stored"),
    ({"quantize": "stored", "exact": True}, "exact mode computes with stored weights by native code alone; ask"),
    ({"quantize": "int4", "dtype": "fp16"}, "int4 weights go with activations in fp32 or bf16"),
    ({"quantize": "int8", "dtype": "fp64"}, "fp32 or bf16"),
]


def test_options_that_exclude_each_other_raise_before_anything_is_read() -> None:
    assert unrefused((partial(load, "/there/is/no/such/checkpoint", **how), words) for how, words in EXCLUSIVE) == []


def test_int8_under_torchrun_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="without torchrun"):
        check_modes(torch.device("cpu"), torch.float32, fast=False, quantize="int8", exact=False)


@pytest.mark.parametrize("quantize", ["int8", "stored"])
def test_training_through_quantised_weights_raises(quantize: str, tmp_path: Path) -> None:
    model, _ = load(gguf_of(tmp_path, Kind.Q4_1), device="cpu", quantize=quantize)
    model.kv_caching = False
    tokens = some_tokens(2, 5, vocab_size=20)
    assert not model(tokens).requires_grad  # inference needs no context
    model.norm.weight.requires_grad_(True)  # only the head comes after it
    with pytest.raises(ValueError, match=f"a model with {quantize} weights cannot be trained: load it without"):
        model(tokens)
    with torch.inference_mode():
        model(tokens)


def test_int8_logits_are_near_the_float_ones_and_8_bits_of_activations_lose_more(checkpoint: Path) -> None:
    opened = open_checkpoint(checkpoint)
    ways: list[Any] = [{}, {"quantize": "int8"}, {"quantize": "int8", "activations": 8}]
    plain, fine, coarse = (
        load_weights(opened, opened.args, dtype=torch.float32, device="cpu", **how).requires_grad_(False)
        for how in ways
    )
    layers = [module for module in coarse.modules() if isinstance(module, PackedLinear)]
    assert len(layers) == 2 * 7 + 1
    assert all(layer.activations == 8 for layer in layers)
    assert str(coarse.execution) == "plain, int8 weights, 8-bit activations"
    tokens = some_tokens(2, 11, vocab_size=20)
    exactly, wide = plain(tokens), fine(tokens)
    assert 0 < (wide - exactly).abs().max() < 0.1 * exactly.abs().max()
    assert 0.001 < (coarse(tokens) - wide).abs().max() / wide.abs().max() < 0.1


# ---- the weights of a file -------------------------------------------------------------------------------------------


def gguf_of(path: Path, kind: Any, **sizes: Any) -> Path:
    config = config_of(**{**SIZES, **sizes})
    return write_gguf(path / f"{kind.name}.gguf", meta_weights(random_model(config)), config, kind=kind)


def some_of_stored(*default: str) -> Any:
    """Parametrize a test with every quantised kind; those that are not named here are slow."""
    kinds = [Kind[kind.name] for kind in KINDS.values() if kind.format is not None]
    params = [pytest.param(kind, marks=[pytest.mark.slow] * (kind.name not in default), id=kind.name) for kind in kinds]
    return pytest.mark.parametrize("kind", params)


@some_of_stored("Q4_1", "Q8_0", "Q6_K")
def test_stored_weights_are_those_of_the_file_to_the_bit(kind: Any, tmp_path: Path) -> None:
    path = gguf_of(tmp_path, kind, **({"hidden_size": 256, "intermediate_size": 512} if "_K" in kind.name else {}))
    wide, _ = load(path, device="cpu", dtype="fp32")
    kept, _ = load(path, device="cpu", dtype="fp32", quantize="stored")
    matrices = quantized_weights(kept)
    assert len(matrices) == 2 * 7 + 2
    for name, weight in matrices.items():
        assert torch.equal(weight.rows(0, weight.shape[0]), wide.get_parameter(name)), name
        assert weight.format == KINDS[kind.name].format
    assert str(kept.execution) == "plain, stored weights"
    tokens = some_tokens(2, 11, vocab_size=20)
    with torch.inference_mode():
        torch.testing.assert_close(kept(tokens), wide(tokens), rtol=1e-5, atol=1e-5)


def test_int4_restores_the_codes_of_a_file_of_4_bits(tmp_path: Path) -> None:
    path = gguf_of(tmp_path, Kind.Q4_1)
    stored, _ = load(path, device="cpu", quantize="stored")
    made, _ = load(path, device="cpu", quantize="int4")
    for (name, one), other in zip(quantized_weights(stored).items(), quantized_weights(made).values(), strict=True):
        if name.startswith("layers."):
            assert torch.equal(one.codes, other.codes), name
            assert torch.equal(one.zeros, other.zeros), name
            assert torch.equal(one.scales, other.scales), name
        else:
            assert (one.format, other.format) == (INT4, INT8)


def test_float_matrices_of_a_file_stay_floats(tmp_path: Path) -> None:
    config = config_of(**SIZES)
    weights = meta_weights(random_model(config))
    path = write_gguf(tmp_path / "mixed.gguf", weights, config, kind=Kind.Q4_1, whole=["output.weight"])
    model, _ = load(path, device="cpu", quantize="stored")
    assert "output.weight" not in quantized_weights(model)
    assert torch.equal(model.output.weight, weights["output.weight"])
    assert len(quantized_weights(model)) == 2 * 7 + 1
    tokens = some_tokens(2, 9, vocab_size=20)
    with torch.inference_mode():
        plain = model(tokens)
        make_fast(model, cache_dir() / "native")
        torch.testing.assert_close(model(tokens), plain, rtol=1e-3, atol=1e-3)
    assert model.runner is None or model.runner.forwards == 1


def test_the_demo_is_stored_in_the_formats_of_its_file(demo_checkpoint: Any) -> None:
    how: Any = {"dtype": torch.float32, "device": "cpu", "quantize": "stored"}
    weights = quantized_weights(load_weights(demo_checkpoint, demo_checkpoint.args, **how)).values()
    assert {weight.format.bits for weight in weights} == {4, 8}
    file = 106_168_320 * 20 // 32 + 28_311_552 * 34 // 32  # its layers are Q4_1, its embedding is Q8_0
    assert sum(weight.nbytes for weight in weights) == file


@needs_a_compiler
def test_layers_that_round_to_different_bits_run_on_the_plain_path(tmp_path: Path) -> None:
    path = gguf_of(tmp_path, Kind.Q4_1, num_attention_heads=2)
    model, _ = load(path, device="cpu", quantize="stored", fast=True)
    model(some_tokens(1, 5, vocab_size=20))
    model.blocks[1].feed_forward.w1.activations = 8
    model(some_tokens(1, 5, vocab_size=20))
    assert served(model) == 1


@needs_a_compiler
def test_fast_stores_a_quantised_file_as_it_is_unless_floats_are_asked_for(tmp_path: Path) -> None:
    floats, path = (gguf_of(tmp_path, kind, num_attention_heads=2) for kind in (Kind.F16, Kind.Q4_1))

    def execution(file: Path, **how: Any) -> str:
        return str(load(file, device="cpu", **how)[0].execution)

    assert execution(path) == "plain"
    assert execution(path, fast=True) == "native, stored weights"
    assert execution(path, fast=True, exact=True) == "native, stored weights, exact"
    assert execution(path, fast=True, activations=8) == "native, stored weights, 8-bit activations"
    assert execution(path, fast=True, quantize="int8") == "native, int8 weights"
    assert execution(path, fast=True, quantize="none") == execution(floats, fast=True) == "native"
    with pytest.raises(ValueError, match="activations=8 goes with packed weights"):
        load(floats, device="cpu", fast=True, activations=8)


@needs_a_compiler
def test_fast_loads_floats_if_stored_weights_are_not_supported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = gguf_of(tmp_path, Kind.Q4_1, num_attention_heads=2)
    for how, execution, reason in (
        ({"dtype": "fp16"}, "plain", "stored weights go with activations in fp32 or bf16, not in torch.float16"),
        ({"kv_cache": "concat"}, "plain", "the weights are loaded as floats: the plain path would widen stored ones"),
        ({"kv_cache": "concat", "exact": True}, "exact", "kv_cache='concat' has no fast step"),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO, "llama"):
            model, _ = load(path, device="cpu", fast=True, **how)  # type: ignore[arg-type]
        assert (str(model.execution), quantized_weights(model)) == (execution, {})
        assert caplog.text.count(reason) == 1
        assert "the weights are loaded as floats" in caplog.text
    with pytest.raises(ValueError, match="stored weights go with activations in fp32 or bf16"):
        load(path, device="cpu", fast=True, dtype="fp16", activations=8)


def test_stored_raises_if_no_matrix_is_quantised(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match=r"needs a \.gguf file with quantised matrices, and no matrix is"):
        load(checkpoint, device="cpu", quantize="stored")


def overwrite(path: Path, tensor: str, at: int, number: float) -> None:
    """Write a float16 into the bytes of a file's tensor."""
    raw = bytearray(path.read_bytes())
    begin = read_gguf_header(path).tensors[tensor].start + at
    raw[begin : begin + 2] = torch.tensor([number], dtype=torch.float16).numpy().tobytes()
    path.write_bytes(raw)


def test_scales_that_are_not_finite_raise_with_their_tensor(tmp_path: Path) -> None:
    path = gguf_of(tmp_path, Kind.Q4_1)
    for damage in (float("inf"), float("nan")):
        overwrite(path, "blk.1.ffn_up.weight", 40, damage)
        with pytest.raises(CheckpointError, match=r"layers\.1\.feed_forward\.w3\.weight has scales that are not fin"):
            load(path, device="cpu", quantize="stored")


def test_numbers_too_large_for_a_scale_raise_with_their_tensor(tmp_path: Path) -> None:
    config = config_of(**SIZES)
    weights = meta_weights(random_model(config))
    weights["layers.1.feed_forward.w2.weight"][3, 5] = -7e6
    path = write_gguf(tmp_path / "wide.gguf", weights, config)
    assert load(path, device="cpu")[0].blocks[1].feed_forward.w2.weight[3, 5].item() == -7e6
    why = r"layers\.1\.feed_forward\.w2\.weight has scales .* leave quantize out"
    calls = [(partial(load, path, device="cpu", quantize=quantize), why) for quantize in ("int8", "int4")]
    assert unrefused(calls, CheckpointError) == []


def test_a_large_scale_is_kept(tmp_path: Path) -> None:
    path = gguf_of(tmp_path, Kind.Q8_0)
    overwrite(path, "blk.0.attn_q.weight", 0, 60000.0)
    wide, kept = (load(path, device="cpu", quantize=how)[0] for how in (None, "stored"))
    weight = quantized_weights(kept)["layers.0.attention.wq.weight"]
    assert torch.equal(weight.rows(0, weight.shape[0]), wide.blocks[0].attention.wq.weight)
