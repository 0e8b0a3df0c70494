"""All formats give the same weights to the bit, and the logits of transformers and llama.cpp."""

import json
import logging
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import (
    BOS,
    EOT,
    N_WORDS,
    config_of,
    finish,
    gguf_name,
    gguf_writer,
    meta_params,
    meta_weights,
    random_model,
    rope_divisors,
    write_gguf,
    write_huggingface,
    write_huggingface_tokenizer,
    write_meta,
    write_meta_tokenizer,
)
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tables import table
from torch import Tensor
from vocabularies import pieces

from llama.args import RopeScaling
from llama.checkpoint import CheckpointError, load_weights, open_checkpoint
from llama.model import Transformer
from llama.tokenizer import MissingTokenizer

TOKENS = torch.arange(22).reshape(2, 11) * 13 % N_WORDS

# Two float32 programs that do the same sums in another order; logits are of the order of 10.
TOLERANCE = 1e-3


def load(path: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    checkpoint = open_checkpoint(path)
    return load_weights(checkpoint, checkpoint.args, dtype=dtype, device="cpu", **changes)


def write_all(directory: Path, model: Any, **meta: Any) -> dict[str, Path]:
    weights = meta_weights(model)
    kind = {torch.float32: Kind.F32, torch.float16: Kind.F16, torch.bfloat16: Kind.BF16}[model.dtype]
    return {
        "meta": write_meta(directory / "meta", weights, meta_params(model.config), **meta),
        "huggingface": write_huggingface(directory / "huggingface", model, max_shard_size="20KB"),
        "gguf": write_gguf(directory / "model.gguf", weights, model.config, kind=kind),
    }


def assert_same_bits(model: Transformer, weights: dict[str, Tensor]) -> None:
    state = model.state_dict()
    assert state.keys() - weights.keys() <= {"output.weight"}  # a tied head is not written twice
    for name, weight in weights.items():
        assert state[name].dtype == weight.dtype, name
        assert torch.equal(state[name], weight), name


@torch.inference_mode()
def logits_of(model: Any) -> Tensor:
    output = model(TOKENS)
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.parametrize(("tied", "scaled"), [(False, False), (True, True)])
def test_three_formats_give_the_same_bits_and_the_logits_of_transformers(
    tmp_path: Path, scaled: bool, tied: bool
) -> None:
    theirs = random_model(config_of(scaled=scaled, tie_word_embeddings=tied))
    for path in write_all(tmp_path, theirs, shards=2).values():
        model = load(path)
        assert_same_bits(model, meta_weights(theirs))
        assert (model.output.weight is model.tok_embeddings.weight) == tied
        assert torch.allclose(logits_of(model), logits_of(theirs), atol=TOLERANCE, rtol=0)


@settings(max_examples=6, deadline=None)
@given(
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2), (6, 2)]),
    head_dim=st.sampled_from([2, 4, 6, 16]),
    wider=st.booleans(),
    scaled=st.booleans(),
    tied=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_formats_agree_for_any_shape(
    heads: tuple[int, int],
    head_dim: int,
    wider: bool,
    scaled: bool,
    tied: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    n_heads, n_kv_heads = heads
    config = config_of(
        hidden_size=n_heads * (8 if wider else head_dim),  # heads wider or narrower than dim / n_heads
        head_dim=head_dim,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        intermediate_size=24,
        scaled=scaled,
        tie_word_embeddings=tied,
    )
    theirs = random_model(config, dtype=dtype, seed=seed)
    with tempfile.TemporaryDirectory() as directory:
        paths = write_all(Path(directory), theirs)
        models = [load(path, dtype) for path in paths.values()]
    for model in models:
        assert_same_bits(model, meta_weights(theirs))
        for name in ("dim", "n_layers", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size", "norm_eps", "tied_head"):
            assert getattr(model.args, name) == getattr(models[0].args, name)
        # Few frequencies may not show the rule behind them; GGUF then has divisors, to float32 rounding.
        assert torch.allclose(model.rope.freqs, models[0].rope.freqs, rtol=1e-6, atol=0)


def test_llama_cpp_gives_the_logits_of_the_same_gguf_file(tmp_path: Path) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    config = config_of(scaled=True, hidden_size=64, intermediate_size=128, tie_word_embeddings=True)
    path = write_gguf(tmp_path / "model.gguf", meta_weights(random_model(config)), config)
    f32 = 0  # its cache is float16 unless told otherwise
    theirs = llama_cpp.Llama(str(path), n_ctx=32, n_threads=1, logits_all=True, verbose=False, type_k=f32, type_v=f32)
    theirs.eval(TOKENS[0].tolist())
    expected = torch.from_numpy(np.array(theirs.scores[: TOKENS.shape[1]], dtype=np.float32))
    theirs.close()
    assert torch.allclose(logits_of(load(path))[0], expected, atol=TOLERANCE, rtol=0)


def test_every_format_brings_its_tokenizer(tmp_path: Path) -> None:
    for path in write_all(tmp_path, random_model(config_of())).values():
        tokenizer = open_checkpoint(path).tokenizer
        assert tokenizer.n_words == N_WORDS
        assert tokenizer.decode(tokenizer.encode("the thin hat", bos=False, eos=False)) == "the thin hat"
        assert tokenizer.bos_id == BOS
        assert tokenizer.special_tokens["<|eot_id|>"] == EOT


def test_rows_of_the_embedding_beyond_the_tokenizers_tokens_decode_to_nothing(tmp_path: Path) -> None:
    paths = write_all(tmp_path, random_model(config_of(vocab_size=N_WORDS + 24)))
    for path in (paths["meta"], paths["huggingface"]):  # in a .gguf file such tokens are there, and unused
        checkpoint = open_checkpoint(path)
        assert (checkpoint.tokenizer.n_words, checkpoint.args.vocab_size) == (N_WORDS, N_WORDS + 24)
        assert checkpoint.tokenizer.decode([ord("a"), N_WORDS + 23, ord("b")]) == "ab"
        with pytest.raises(ValueError, match="is not in this vocabulary"):
            checkpoint.tokenizer.decode([N_WORDS + 24])
        model = load(path)
        with torch.no_grad():
            model.norm.weight.zero_()  # every logit is 0: the ids that are drawn are of all rows alike
        (result,) = model.generate(checkpoint.tokenizer, ["the hat"], 64, temperature=1.0, top_p=1.0, seed=1)
        assert max(result["ids"]) >= N_WORDS


def test_a_given_tokenizer_replaces_the_checkpoints_own(tmp_path: Path) -> None:
    model = random_model(config_of())
    elsewhere = tmp_path / "tokenizer.model"
    write_meta_tokenizer(elsewhere)
    write_huggingface_tokenizer(tmp_path / "other")
    weights = meta_weights(model)
    paths = [
        write_meta(tmp_path / "meta", weights, meta_params(model.config), tokenizer=False),
        write_huggingface(tmp_path / "huggingface", model, tokenizer=False),
        write_gguf(tmp_path / "model.gguf", weights, model.config, tokenizer=False),
    ]
    for path in paths:
        assert isinstance(open_checkpoint(path).tokenizer, MissingTokenizer)
        for tokenizer_path in (elsewhere, str(tmp_path / "other" / "tokenizer.json")):
            assert open_checkpoint(str(path), tokenizer_path=tokenizer_path).tokenizer.n_words == N_WORDS


def test_an_old_folder_has_sentencepieces_file_and_no_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(pieces())
    write_huggingface(tmp_path, random_model(config_of(vocab_size=2000)), tokenizer=False)
    tokenizer = open_checkpoint(tmp_path).tokenizer
    assert tokenizer.n_words == 2000
    assert tokenizer.decode(tokenizer.encode("größer 😀", bos=True, eos=False)[1:]) == "größer 😀"


# ---- dtypes, devices, progress ---------------------------------------------------------------------------------------


@table("stored", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_numbers_are_rounded_once(tmp_path: Path, stored: torch.dtype) -> None:
    theirs = random_model(config_of(num_hidden_layers=1), dtype=stored)
    weights = meta_weights(theirs)
    folder = tmp_path / str(stored)
    only = {"huggingface": write_huggingface(folder, theirs)}  # no other format has float64
    for kind, path in (only if stored == torch.float64 else write_all(folder, theirs)).items():
        for wanted in (torch.float32, torch.float16, torch.bfloat16, stored):
            state = load(path, wanted).state_dict()
            assert all(torch.equal(state[name], weight.to(wanted)) for name, weight in weights.items()), kind


def test_weights_are_copies_that_outlive_their_files(tmp_path: Path) -> None:
    theirs = random_model(config_of())
    for path in write_all(tmp_path, theirs).values():
        model = load(path)
        files = [path] if path.is_file() else list(path.iterdir())
        for file in files:
            if file.suffix in (".gguf", ".pth", ".safetensors"):
                file.write_bytes(bytes(file.stat().st_size))
        assert_same_bits(model, meta_weights(theirs))


def test_an_edit_of_what_was_read_never_reaches_the_file(tmp_path: Path) -> None:
    for path in write_all(tmp_path, random_model(config_of())).values():
        files = {file: file.read_bytes() for file in ([path] if path.is_file() else path.iterdir())}
        checkpoint = open_checkpoint(path)
        for weight in checkpoint.tensors.values():
            weight.rows(0, weight.shape[0]).zero_()
        for file, content in files.items():
            assert file.read_bytes() == content, file


def test_any_rows_of_a_weight_and_any_ranks_part_are_cut_from_the_whole(tmp_path: Path) -> None:
    """A block of rows, and of a vector some of its numbers, also where shards or ranks hold a whole each."""
    theirs = random_model(config_of(hidden_size=64, num_attention_heads=8, num_key_value_heads=2))
    expected = meta_weights(theirs)
    paths = write_all(tmp_path, theirs, shards=4)
    for path in paths.values():
        for name, weight in open_checkpoint(path).tensors.items():
            whole, middle = expected[name], weight.shape[0] // 2
            for start, stop in ((0, middle), (middle - 1, middle + 1), (middle + 1, weight.shape[0])):
                assert torch.equal(weight.rows(start, stop), whole[start:stop]), name
            shape = (*weight.shape[:-1], weight.shape[-1] // (2 if whole.ndim > 1 else 1))
            for rank, columns in enumerate(whole.chunk(2, dim=1) if whole.ndim > 1 else (whole, whole)):
                part = weight.part(shape, rank, 2)
                assert part.shape == shape
                assert torch.equal(part.rows(1, middle), columns[1:middle]), name


def test_progress_counts_the_models_bytes(tmp_path: Path) -> None:
    path = write_huggingface(tmp_path, random_model(config_of(tie_word_embeddings=True)))
    seen: list[tuple[int, int]] = []
    model = load(path, torch.bfloat16, progress=lambda done, total: seen.append((done, total)))
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_weights_that_do_not_fit_other_args_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_huggingface(tmp_path, random_model(config_of())))
    args = replace(checkpoint.args, n_layers=1, ffn_dim=32)
    with pytest.raises(CheckpointError, match=r"unexpected: layers\.1\..*; wrong shape: layers\.0\.feed_forward"):
        load_weights(checkpoint, args, dtype=torch.float32, device="cpu")


# ---- quantised GGUF --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [Kind.Q4_1, Kind.Q6_K]
    + [
        pytest.param(kind, marks=pytest.mark.slow)
        for kind in Kind
        if kind.name in ("Q4_0", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K")
    ],
    ids=lambda kind: kind.name,
)
def test_quantised_weights_are_what_the_gguf_package_makes_of_them(tmp_path: Path, kind: Kind) -> None:
    config = config_of(hidden_size=256, intermediate_size=256, num_hidden_layers=1, tie_word_embeddings=True)
    weights = meta_weights(random_model(config))
    state = load(write_gguf(tmp_path / "model.gguf", weights, config, kind=kind), torch.bfloat16).state_dict()
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    for tensor in reader.tensors:
        (name,) = [ours for ours in weights if gguf_name(ours) == tensor.name]
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.isfinite(expected).all()
        assert torch.equal(state[name], expected.to(torch.bfloat16)), name


@table("number, part, quantize", [(torch.nan, "wq", None), (-torch.inf, "wk", None), (torch.nan, "wk", "stored")])
def test_weights_of_queries_and_keys_that_are_not_finite_are_refused(
    number: float, part: str, quantize: str | None, tmp_path: Path
) -> None:
    """PyTorch's attention on a CPU would take scores that are all nan for a query that sees nothing."""
    config, name = config_of(), f"layers.1.attention.{part}.weight"
    weights = meta_weights(random_model(config))
    weights[name][3] = number
    path = write_gguf(tmp_path / "bad.gguf", weights, config, kind=Kind.Q8_0, whole=[name])
    with pytest.raises(CheckpointError, match=rf"{name} has numbers that are not finite in torch.float32"):
        load(path, quantize=quantize)


# ---- RoPE scaling ----------------------------------------------------------------------------------------------------


def test_gguf_divisors_become_the_rule_behind_them_or_stay_divisors(tmp_path: Path) -> None:
    def scaling_of(divisors: Any) -> object:
        writer = gguf_writer(tmp_path / "model.gguf", config_of(head_dim=16))
        writer.add_tensor("rope_freqs.weight", np.array(divisors, dtype=np.float32))
        for name, weight in weights.items():
            writer.add_tensor(gguf_name(name), weight.numpy())
        finish(writer)
        return open_checkpoint(tmp_path / "model.gguf").args.rope_scaling

    weights = meta_weights(random_model(config_of(head_dim=16)))
    for factor in (8.0, 32.0):
        divisors = rope_divisors(config_of(head_dim=16, scaled=True, factor=factor))
        assert 1 < divisors[4] < factor  # one pair is in the band that is blended
        assert scaling_of(divisors) == RopeScaling(factor)
        divisors[4] *= 1.01
        assert scaling_of(divisors) == tuple(divisors.tolist())
    assert scaling_of([1.0] * 8) is None
    for odd in (float("nan"), float("inf"), 0.0):
        with pytest.raises(CheckpointError, match="finite numbers above 0"):
            scaling_of([1.0] * 7 + [odd])
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight has shape \(3,\) and must have \(8,\)"):
        scaling_of([1.0, 1.0, 1.0])


@table("dim, n_layers, factor", [(2048, 16, 32), (4096, 32, 8)])
def test_a_bare_use_scaled_rope_is_completed_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dim: int, n_layers: int, factor: int
) -> None:
    params = {"dim": dim, "n_layers": n_layers, "n_heads": 16, "rope_theta": 500000.0, "use_scaled_rope": True}
    (tmp_path / "params.json").write_text(json.dumps(params))
    write_meta_tokenizer(tmp_path / "tokenizer.model")
    torch.save({"norm.weight": torch.ones(dim)}, tmp_path / "consolidated.00.pth")
    with caplog.at_level(logging.INFO, "llama.checkpoint"), pytest.raises(CheckpointError, match="missing: "):
        open_checkpoint(tmp_path)
    assert f"no factor; using {factor}" in caplog.text


def test_transformers_4_and_5_configs_mean_the_same(tmp_path: Path) -> None:
    write_huggingface(tmp_path, random_model(config_of(scaled=True)))
    new = open_checkpoint(tmp_path).args
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    for key in ("rope_type", "type"):
        config["rope_scaling"] = {key: "llama3"} | {k: v for k, v in rope.items() if k != "rope_type"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert open_checkpoint(tmp_path).args == new
    assert new.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


# ---- heads -----------------------------------------------------------------------------------------------------------


def test_an_untied_head_stays_untied_even_where_it_is_equal(tmp_path: Path) -> None:
    theirs = random_model(config_of())
    with torch.no_grad():
        theirs.lm_head.weight.copy_(theirs.model.embed_tokens.weight)
    for path in write_all(tmp_path, theirs).values():
        assert not open_checkpoint(path).args.tied_head


def test_a_head_in_a_file_that_says_tied_must_be_the_embedding(tmp_path: Path) -> None:
    theirs = random_model(config_of(tie_word_embeddings=True))
    path = write_huggingface(tmp_path, theirs) / "model.safetensors"
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, path)
    model = load(tmp_path)
    assert model.output.weight is model.tok_embeddings.weight
    save_file(tensors | {"lm_head.weight": embedding + 1}, path)
    with pytest.raises(CheckpointError, match=r"says that the head is tied, but lm_head\.weight is not"):
        open_checkpoint(tmp_path)


def test_a_config_that_says_untied_needs_its_head(tmp_path: Path) -> None:
    write_huggingface(tmp_path, random_model(config_of(tie_word_embeddings=True)))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        open_checkpoint(tmp_path)


# ---- Meta's shards ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shards", "llama2"), [(2, True), (8, False)])
def test_shards_are_merged_also_where_they_share_kv_heads(tmp_path: Path, shards: int, llama2: bool) -> None:
    theirs = random_model(config_of(hidden_size=64, num_attention_heads=8, num_key_value_heads=2))
    weights = meta_weights(theirs)
    path = write_meta(tmp_path, weights, meta_params(theirs.config), shards=shards, llama2=llama2)
    assert_same_bits(load(path), weights)


def test_an_incomplete_set_of_shards_is_refused_with_the_files_found(tmp_path: Path) -> None:
    theirs = random_model(config_of())
    write_meta(tmp_path, meta_weights(theirs), meta_params(theirs.config), shards=4)
    (tmp_path / "consolidated.03.pth").unlink()
    with pytest.raises(CheckpointError, match=r"need 4 shards.*found consolidated\.00\.pth, .*01\.pth, .*02\.pth$"):
        open_checkpoint(tmp_path)
    (tmp_path / "consolidated.01.pth").unlink()
    with pytest.raises(CheckpointError, match=r"without a gap; found consolidated\.00\.pth, consolidated\.02\.pth$"):
        open_checkpoint(tmp_path)


def write_shards(folder: Path, model: Any, change: Callable[[dict[str, Tensor]], object]) -> Path:
    """Write a model in four shards, the last of which is changed."""
    path = write_meta(folder, meta_weights(model), meta_params(model.config), shards=4)
    last = torch.load(path / "consolidated.03.pth", weights_only=True)
    change(last)
    torch.save(last, path / "consolidated.03.pth")
    return path


def steps_away(weight: Tensor, steps: int) -> None:
    """Move every other number by so many steps of its dtype, away from 0."""
    weight.view({2: torch.int16, 4: torch.int32}[weight.itemsize])[::2] += steps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_that_differ_by_a_rounding_step_are_the_first_shards_with_one_warning(
    dtype: torch.dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = random_model(config_of(), dtype=dtype)
    norms = ("norm.weight", "layers.0.attention_norm.weight", "layers.1.ffn_norm.weight")
    path = write_shards(tmp_path, theirs, lambda last: [steps_away(last[name], 1) for name in norms])
    with caplog.at_level(logging.WARNING, "llama.checkpoint"):
        assert_same_bits(load(path, dtype), meta_weights(theirs))
    assert caplog.text.count("differs by a rounding step in the shards") == 1


@table(
    "name, change",
    [
        ("layers.0.attention_norm.weight", lambda weight: steps_away(weight, 3)),
        ("norm.weight", lambda weight: weight[5:6].neg_()),
        ("norm.weight", lambda weight: weight[5:6].fill_(torch.nan)),
        ("norm.weight", lambda weight: weight[5:6].fill_(torch.inf)),
        ("layers.1.attention.wk.weight", lambda weight: steps_away(weight, 1)),
        ("layers.1.attention.wv.weight", lambda weight: steps_away(weight, 1)),
    ],
)
def test_norms_far_apart_and_heads_that_differ_at_all_are_refused(
    name: str, change: Callable[[Tensor], object], tmp_path: Path
) -> None:
    theirs = random_model(config_of(num_key_value_heads=1), dtype=torch.bfloat16)
    path = write_shards(tmp_path, theirs, lambda last: change(last[name]))
    with pytest.raises(CheckpointError, match=rf"{name} must be equal in several shards"):
        load(path, torch.bfloat16)
