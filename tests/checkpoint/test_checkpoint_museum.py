"""Broken and hostile checkpoints are refused with a CheckpointError whose words explain them: see museum/ for more."""

import json
import os
import pickle
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    N_WORDS,
    config_of,
    finish,
    gguf_writer,
    meta_params,
    meta_weights,
    random_model,
    write_gguf,
    write_huggingface,
    write_meta,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from museum.exhibits import DATA, U8, array, header, number, tensor
from safetensors.torch import load_file, save_file

from llama.checkpoint import CheckpointError, open_checkpoint
from llama.untrusted.gguf_header import read_header

MODEL = random_model(config_of())
WEIGHTS = meta_weights(MODEL)


def refusal(path: Path) -> str:
    """Return the message with which the path is refused, after checking that it came at once."""
    start = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert time.perf_counter() - start < 1
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("originals")
    return {
        "meta": write_meta(directory / "meta", WEIGHTS, meta_params(MODEL.config)),
        "huggingface": write_huggingface(directory / "huggingface", MODEL, max_shard_size="60KB"),
        "gguf": write_gguf(directory / "model.gguf", WEIGHTS, MODEL.config),
    }


@pytest.fixture
def meta(originals: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(originals["meta"], tmp_path / "meta")


@pytest.fixture
def huggingface(originals: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(originals["huggingface"], tmp_path / "huggingface")


# ---- what is not there -----------------------------------------------------------------------------------------------


def test_what_is_no_checkpoint_is_answered_with_what_is_needed(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path / "nowhere")
    assert "holds no weights, found nothing" in refusal(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    assert "is no checkpoint" in refusal(tmp_path / "notes.txt")
    assert "holds no weights, found notes.txt; a checkpoint is" in refusal(tmp_path)


def test_one_file_of_a_checkpoint_is_answered_with_its_directory(meta: Path, huggingface: Path) -> None:
    for file in [*meta.iterdir(), *huggingface.glob("*.safetensors"), huggingface / "config.json"]:
        assert f"pass the directory that holds it: {file.parent}" in refusal(file)


@pytest.mark.parametrize("name", ["params.json", "tokenizer.model"])
def test_half_a_meta_checkpoint(meta: Path, name: str) -> None:
    (meta / name).unlink()
    assert f"lacks {name}" in refusal(meta)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00002-of-00004.safetensors"])
def test_half_a_huggingface_checkpoint(huggingface: Path, name: str) -> None:
    (huggingface / name).unlink()
    assert f"lacks {name}" in refusal(huggingface)


def test_config_without_weights(meta: Path, huggingface: Path) -> None:
    for directory in (meta, huggingface):
        for file in [*directory.glob("*.pth"), *directory.glob("*.safetensors*")]:
            file.unlink()
        assert "holds no weights, found" in refusal(directory)


def test_two_checkpoints_in_one_directory(meta: Path, huggingface: Path, originals: dict[str, Path]) -> None:
    shutil.copy(originals["gguf"], huggingface)
    assert "more than one checkpoint (weights of Hugging Face's .safetensors and .gguf)" in refusal(huggingface)
    (meta / "consolidated.00.pth").unlink()
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(originals["gguf"], meta / name)
    assert "more than one checkpoint (a.gguf, b.gguf)" in refusal(meta)
    (meta / "a.gguf").unlink()
    assert open_checkpoint(meta).args.dim == 32


def test_truncated_weights(meta: Path, huggingface: Path, originals: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(originals["gguf"], tmp_path / "model.gguf")
    shard = sorted(huggingface.glob("*.safetensors"))[0]
    for file, opened in [
        (meta / "consolidated.00.pth", meta),
        (shard, huggingface),
        (tmp_path / "model.gguf", tmp_path / "model.gguf"),
    ]:
        size = file.stat().st_size
        for kept in (size - 1, size // 2, 10, 0):
            os.truncate(file, kept)
            assert str(file) in refusal(opened)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(meta: Path) -> None:
    for name in ("params.json", "consolidated.00.pth"):
        (meta / name).rename(meta / "kept")
        os.mkfifo(meta / name)
        refusal(meta)
        (meta / name).unlink()
        (meta / "kept").rename(meta / name)


def test_a_tokenizer_that_does_not_fit(meta: Path) -> None:
    params = meta_params(MODEL.config) | {"vocab_size": N_WORDS - 1}
    (meta / "params.json").write_text(json.dumps(params))
    assert f"has {N_WORDS} tokens but the model only {N_WORDS - 1}" in refusal(meta)
    (meta / "tokenizer.model").write_text("nonsense\n")
    assert "tokenizer.model: is not a tokenizer that can be used: line 1: " in refusal(meta)
    (meta / "tokenizer.model").write_bytes(b"\n\x03\n\x01a\x12\x02\x18\x02")  # as spm_train writes it by default
    said = refusal(meta)
    assert (said.count("tokenizer.model"), said.count("can be used")) == (1, 1)
    assert "used: SentencePiece: remove_extra_whitespaces=true is not supported: it drops spaces" in said
    assert "train with spm_train --remove_extra_whitespaces=false" in said


# ---- configs ---------------------------------------------------------------------------------------------------------

BAD_PARAMS: list[dict[str, Any]] = [
    {"quantization_args": {}, "lora_args": {}},
    {"dim": True},
    {"dim": 32.0},
    {"dim": 10**400},
    {"dim": 1 << 40},
    {"n_layers": 10**9},
    {"n_heads": 5},
    {"n_heads": 0},
    {"n_kv_heads": 3},
    {"ffn_dim_multiplier": 1e308},
    {"norm_eps": 1e999},
    {"norm_eps": 0.5},
    {"rope_theta": "500000"},
    {"rope_theta": None},
    {"use_scaled_rope": "false"},
    {"vocab_size": 1 << 30},
    {"max_seq_len": 10**30},
    {"rope_scaling": {}},
]


@pytest.mark.parametrize("change", BAD_PARAMS, ids=str)
def test_params_that_describe_no_model(meta: Path, change: dict[str, Any]) -> None:
    (meta / "params.json").write_text(json.dumps(meta_params(MODEL.config) | change))
    message = refusal(meta)
    assert "params.json" in message
    if "lora_args" in change:
        assert "lora_args, quantization_args" in message


BAD_CONFIGS: list[dict[str, Any]] = [
    {"model_type": "mixtral"},
    {"hidden_act": "gelu"},
    {"attention_bias": True},
    {"mlp_bias": True},
    {"quantization_config": {"quant_method": "awq"}},
    {"sliding_window": "4096"},
    {"partial_rotary_factor": 0.5},
    {"tie_word_embeddings": "yes"},
    {"hidden_size": None},
    {"num_hidden_layers": "2"},
    {"vocab_size": 1 << 40},
    {"rms_norm_eps": -1.0},
    {"rope_parameters": None, "rope_theta": "x"},
    {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    {"rope_parameters": {"rope_type": "longrope", "factor": 8.0}},
    {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"rope_type": ["llama3"]}},
    {"rope_parameters": "llama3"},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": None},
    {"rope_scaling": {"type": "llama3"}},
]


@pytest.mark.parametrize("change", BAD_CONFIGS, ids=str)
def test_configs_that_describe_another_model(huggingface: Path, change: dict[str, Any]) -> None:
    path = huggingface / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    message = refusal(huggingface)
    assert "config.json" in message
    if "rope_parameters" not in change:
        assert next(iter(change)) in message or "cannot be built" in message or "vocab_size" in message


# ---- Hugging Face's index and shards ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where",
    ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\\b.safetensors", "C:x", "\0", "x.bin", 7],
)
def test_an_index_cannot_lead_elsewhere(huggingface: Path, where: object) -> None:
    index = huggingface / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = where
    index.write_text(json.dumps(content))
    assert "which is not" in refusal(huggingface)


def test_a_tensor_indexed_in_one_shard_and_present_in_another(huggingface: Path) -> None:
    index = huggingface / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    places = content["weight_map"]
    other = next(place for place in places.values() if place != places["model.norm.weight"])
    places["model.norm.weight"] = other
    index.write_text(json.dumps(content))
    assert "it and the index do not both place here: model.norm.weight" in refusal(huggingface)


def test_tensors_missing_unexpected_and_misshapen_are_all_named(huggingface: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for shard in huggingface.glob("*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    (huggingface / "model.safetensors.index.json").unlink()
    for i in (0, 1):
        del tensors[f"model.layers.{i}.mlp.up_proj.weight"]
        tensors[f"model.layers.{i}.self_attn.q_proj.bias"] = torch.zeros(32)
    tensors["model.norm.weight"] = torch.ones(31)
    save_file(tensors, huggingface / "model.safetensors")
    message = refusal(huggingface)
    assert "missing: model.layers.0.mlp.up_proj.weight, model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.0.self_attn.q_proj.bias, model.layers.1.self_attn.q_proj.bias" in message
    assert "wrong shape: model.norm.weight is (31,) and must be (32,)" in message
    save_file(tensors | {"model.norm.weight": torch.ones(32, dtype=torch.int32)}, huggingface / "model.safetensors")
    assert "model.norm.weight is I32; F64, F32, F16, BF16 are read" in refusal(huggingface)


def test_an_index_without_a_map_of_weights(huggingface: Path) -> None:
    for content in ({}, {"weight_map": {}}, {"weight_map": ["model.safetensors"]}):
        (huggingface / "model.safetensors.index.json").write_text(json.dumps(content))
        assert "lacks weight_map" in refusal(huggingface)


def test_a_config_must_count_its_words(huggingface: Path) -> None:
    path = huggingface / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": -1}))
    assert "vocab_size=-1 must be a whole number of at least 1" in refusal(huggingface)


def test_files_of_transformers_before_safetensors(huggingface: Path) -> None:
    for shard in huggingface.glob("*.safetensors*"):
        shard.unlink()
    (huggingface / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin" in refusal(huggingface)


# ---- .pth ------------------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil-was-here",)


def recompressed(
    path: Path, change: Callable[[zipfile.ZipInfo, bytes], Iterator[tuple[zipfile.ZipInfo, bytes]]]
) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = [(info, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for info, data in entries:
            for new_info, new_data in change(info, data):
                archive.writestr(new_info, new_data)


def test_pickles_that_run_code(meta: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = meta / "consolidated.00.pth"
    torch.save({"norm.weight": Evil()}, path)
    assert "is not a .pth file that can be used" in refusal(meta)
    path.write_bytes(pickle.dumps(Evil()))
    assert "not a zip archive" in refusal(meta)
    torch.save(WEIGHTS, path, _use_new_zipfile_serialization=False)
    assert "not a zip archive" in refusal(meta)
    assert not (tmp_path / "evil-was-here").exists()


PTH_CONTENTS: dict[str, Callable[[], object]] = {
    "a list": lambda: [torch.ones(2)],
    "numbers as names": lambda: {1: torch.ones(2)},
    "not a tensor": lambda: {"norm.weight": [1.0]},
    "sparse": lambda: {"norm.weight": torch.eye(32).to_sparse()},
    "integers": lambda: {"norm.weight": torch.ones(32, dtype=torch.int8)},
    "float64": lambda: {"norm.weight": torch.ones(32, dtype=torch.float64)},
    "transposed": lambda: {"norm.weight": torch.ones(4, 8).T},
    "expanded from one number": lambda: {"norm.weight": torch.ones(1).expand(1 << 40)},
    "empty": lambda: {"norm.weight": torch.ones(0, 1 << 40)},
    "a single number": lambda: {"layers.0.attention.wq.weight": torch.tensor(1.0)},
    "a piece of a larger storage": lambda: {"norm.weight": torch.ones(64)[32:]},
    "overlapping": lambda: {"norm.weight": SHARED[:32], "layers.0.ffn_norm.weight": SHARED[16:]},
    "the same bytes twice": lambda: {"norm.weight": SHARED, "layers.0.ffn_norm.weight": SHARED},
    "on the meta device": lambda: {"norm.weight": torch.ones(32, device="meta")},
}
SHARED = torch.ones(48)


@pytest.mark.parametrize("what", PTH_CONTENTS)
def test_pth_files_that_hold_something_else(meta: Path, what: str) -> None:
    torch.save(PTH_CONTENTS[what](), meta / "consolidated.00.pth")
    message = refusal(meta)
    if what in ("overlapping", "the same bytes twice"):
        assert "norm.weight overlap" in message
    if what == "a piece of a larger storage":
        assert "missing: " in message  # allowed: Meta's own files keep several tensors in one storage


def test_zip_archives_that_claim_more_than_they_hold(meta: Path) -> None:
    path = meta / "consolidated.00.pth"
    original = path.read_bytes()

    def compress(info: zipfile.ZipInfo, data: bytes) -> Iterator[tuple[zipfile.ZipInfo, bytes]]:
        info.compress_type = zipfile.ZIP_DEFLATED
        yield info, data

    def lead_out(info: zipfile.ZipInfo, data: bytes) -> Iterator[tuple[zipfile.ZipInfo, bytes]]:
        yield info, data
        if info.filename.endswith("/version"):
            yield zipfile.ZipInfo("consolidated.00/../../x"), b""

    def shrink(info: zipfile.ZipInfo, data: bytes) -> Iterator[tuple[zipfile.ZipInfo, bytes]]:
        yield info, data[: len(data) // 2] if info.filename.endswith("data/3") else data

    for change, reason in ((compress, "compressed or encrypted"), (lead_out, "leads out"), (shrink, "")):
        path.write_bytes(original)
        recompressed(path, change)
        assert reason in refusal(meta)
    path.write_bytes(original)
    with pytest.warns(UserWarning, match="Duplicate name"):
        recompressed(path, lambda info, data: iter([(info, data), (info, data)]))
    assert "repeats a name" in refusal(meta)


def test_records_of_another_size_than_their_tensors(meta: Path) -> None:
    path = meta / "consolidated.00.pth"

    def add(info: zipfile.ZipInfo, data: bytes) -> Iterator[tuple[zipfile.ZipInfo, bytes]]:
        yield info, data
        if info.filename.endswith("data/3"):
            yield zipfile.ZipInfo(info.filename.replace("data/3", "data/999")), b"unused"

    recompressed(path, add)
    assert "record 'data/999' belongs to no tensor" in refusal(meta)


def test_shards_that_do_not_hold_the_same_names_or_shapes_or_dtypes(tmp_path: Path) -> None:
    write_meta(tmp_path, WEIGHTS, meta_params(MODEL.config), shards=2)
    path = tmp_path / "consolidated.01.pth"
    shard = torch.load(path, weights_only=True)
    name = "layers.1.feed_forward.w1.weight"
    torch.save({**shard, name: shard[name].bfloat16()}, path)
    assert f"the shards hold {name} in different dtypes or shapes" in refusal(tmp_path)
    torch.save({**shard, name: shard[name][1:].clone()}, path)
    assert f"the shards hold {name} in different dtypes or shapes" in refusal(tmp_path)
    torch.save({other: tensor for other, tensor in shard.items() if other != name}, path)
    assert f"consolidated.00.pth and consolidated.01.pth do not both hold {name}" in refusal(tmp_path)


def test_a_shard_of_a_matrix_that_is_cut_by_columns_must_be_a_matrix(tmp_path: Path) -> None:
    write_meta(tmp_path, WEIGHTS, meta_params(MODEL.config), shards=2)
    for path in tmp_path.glob("*.pth"):
        shard = torch.load(path, weights_only=True)
        shard["layers.1.feed_forward.w2.weight"] = torch.ones(32)  # as many rows as it needs, and no columns
        torch.save(shard, path)
    assert "wrong shape: layers.1.feed_forward.w2.weight is (64,) and must be (32, 64)" in refusal(tmp_path)


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def test_the_museums_plain_gguf_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(header(number(b"k", 7), array(U8, 2, b"ab").replace(b"k", b"a", 1), tensors=(tensor(),)) + DATA)
    found = read_header(path)
    assert found.metadata == {"k": 7, "a": [97, 98]}
    assert found.tensors["t"].shape == (8,)
    assert "general.architecture=None is not supported" in refusal(path)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("uint8", 200),
        ("int8", -100),
        ("uint16", 60_000),
        ("int16", -30_000),
        ("uint32", 4_000_000_000),
        ("int32", -2_000_000_000),
        ("float32", -0.15625),
        ("bool", True),
        ("string", "naïve"),
        ("uint64", 1 << 63),
        ("int64", -(1 << 62)),
        ("float64", 0.1),
        ("array", [-1, 0, 1]),
        ("array", ["a", "", "naïve"]),
    ],
    ids=str,
)
def test_metadata_of_every_type_is_read_as_it_was_written(tmp_path: Path, kind: str, value: object) -> None:
    writer = gguf_writer(tmp_path / "model.gguf", MODEL.config)
    getattr(writer, f"add_{kind}")("a.key", value)
    finish(writer)
    found = read_header(tmp_path / "model.gguf").metadata
    assert found["a.key"] == value
    assert type(found["a.key"]) is type(value)
    assert found["llama.block_count"] == MODEL.config.num_hidden_layers  # and so is what stands around it


BAD_METADATA: list[tuple[str, str, Any]] = [
    ("general.architecture", "string", "qwen2"),
    ("split.count", "uint16", 3),
    ("llama.expert_count", "uint32", 8),
    ("llama.rope.scaling.type", "string", "longrope"),
    ("llama.rope.scale_linear", "float32", 4.0),
    ("llama.rope.dimension_count", "uint32", 4),
    ("llama.attention.value_length", "uint32", 16),
    ("llama.attention.sliding_window", "string", "4096"),
    ("llama.attention.causal", "bool", False),
    ("llama.attention.scale", "float32", 0.5),
    ("llama.attention.clamp_kqv", "float32", 8.0),
    ("llama.attention.max_alibi_bias", "float32", 8.0),
    ("llama.embedding_scale", "float32", 12.0),
    ("llama.residual_scale", "float32", 0.5),
    ("llama.logit_scale", "float32", 0.5),
    ("llama.rope.scale_linear", "float32", 2.0),
    ("llama.block_count", "uint32", 1 << 31),
    ("llama.embedding_length", "string", "32"),
    ("llama.rope.freq_base", "float32", float("nan")),
    ("llama.rope.freq_base", "float64", 1e300),
    ("llama.vocab_size", "uint32", 3),
    ("tokenizer.ggml.tokens", "uint32", 3),
    ("tokenizer.ggml.model", "string", "llama"),
]


@pytest.mark.parametrize(("key", "kind", "value"), BAD_METADATA, ids=str)
def test_gguf_metadata_of_another_model(tmp_path: Path, key: str, kind: str, value: object) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf_writer(path, MODEL.config)
    for data in writer.kv_data:
        data.pop(key, None)
    getattr(writer, f"add_{kind}")(key, value)
    finish(writer)
    message = refusal(path)
    assert "missing: " not in message  # refused before the tensors are even looked at


PLAIN_METADATA: list[tuple[str, str, Any]] = [
    ("split.count", "uint16", 0),
    ("split.count", "uint16", 1),
    ("llama.expert_count", "uint32", 0),
    ("llama.rope.scaling.type", "string", "none"),
    ("llama.rope.scaling.factor", "float32", 0.0),
    ("llama.rope.scaling.factor", "float32", 1.0),
    ("llama.rope.scale_linear", "float32", 0.0),
    ("llama.rope.scale_linear", "float32", 1.0),
    ("llama.attention.sliding_window", "uint32", 0),
    ("llama.attention.causal", "bool", True),
    ("llama.attention.scale", "float32", 0.0),
    ("llama.attention.clamp_kqv", "float32", 0.0),
    ("llama.attention.max_alibi_bias", "float32", 0.0),
    ("llama.embedding_scale", "float32", 0.0),
    ("llama.embedding_scale", "float32", 1.0),
    ("llama.residual_scale", "float32", 1.0),
    ("llama.logit_scale", "float32", 1.0),
]


@pytest.mark.parametrize(("key", "kind", "value"), PLAIN_METADATA, ids=str)
def test_gguf_metadata_that_says_what_is_so_anyway_is_let_pass(
    tmp_path: Path, key: str, kind: str, value: object
) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf_writer(path, MODEL.config)
    getattr(writer, f"add_{kind}")(key, value)
    finish(writer)
    assert "missing: " in refusal(path)  # the metadata is behind us: it is the tensors that this file lacks


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_damage_to_a_gguf_header_is_refused_or_harmless(originals: dict[str, Path], data: st.DataObject) -> None:
    raw = bytearray(originals["gguf"].read_bytes())
    table = raw.index(b"token_embd.weight")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.one_of(st.integers(0, 700), st.integers(table - 40, table + 1500)))
        raw[at] = data.draw(st.integers(0, 255))
    path = originals["gguf"].with_name("damaged.gguf")
    path.write_bytes(raw)
    try:
        found = open_checkpoint(path)
    except CheckpointError:
        return
    assert sum(torch.Size(weight.shape).numel() for weight in found.tensors.values()) * 4 < 2 * len(raw)
