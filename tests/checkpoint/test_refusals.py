"""Incomplete and contradictory checkpoints are refused with a message that explains them; see untrusted/malformed."""

import json
import shutil
import time
from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    config_of,
    finish,
    gguf_writer,
    meta_params,
    meta_weights,
    random_model,
    write_meta,
)
from forge import add_value
from refusals import unrefused
from safetensors.torch import load_file, save_file
from tables import table
from untrusted.malformed.cases import write_originals

from llama import load
from llama.checkpoint import CheckpointError, open_checkpoint
from llama.checkpoint.convert import convert
from llama.checkpoint.doctor import facts
from llama.checkpoint.export import save_gguf
from llama.untrusted.gguf_header import read_gguf_header


@cache
def tiny_llama() -> Any:
    return random_model(config_of())


def refusal(path: Path) -> str:
    """Return the message with which the path is refused, after checking that it came without waiting for anything."""
    start = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert time.perf_counter() - start < 5
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_originals(directory := tmp_path_factory.mktemp("originals"))
    return directory


@pytest.fixture
def meta(originals: Path, tmp_path: Path) -> Path:
    return shutil.copytree(originals / "meta", tmp_path / "meta")


@pytest.fixture
def huggingface(originals: Path, tmp_path: Path) -> Path:
    return shutil.copytree(originals / "huggingface", tmp_path / "huggingface")


# ---- what is not there -----------------------------------------------------------------------------------------------


def test_a_path_without_a_checkpoint_is_refused_with_the_formats(tmp_path: Path) -> None:
    assert "there is no such file" in refusal(tmp_path / "nowhere")
    assert "contains no weights, found nothing" in refusal(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    assert "is not a checkpoint" in refusal(tmp_path / "notes.txt")
    assert "contains no weights, found notes.txt; a checkpoint is" in refusal(tmp_path)


def test_one_file_of_a_checkpoint_is_refused_with_its_directory(meta: Path, huggingface: Path) -> None:
    for file in [*meta.iterdir(), *huggingface.glob("*.safetensors"), huggingface / "config.json"]:
        assert f"pass its directory: {file.parent}" in refusal(file)


def test_a_checkpoint_without_a_tokenizer_works_on_ids_and_names_what_text_lacks(
    meta: Path, huggingface: Path, tmp_path: Path
) -> None:
    def texts_of(folder: Path) -> tuple[Any, Any]:
        model, tokenizer = load(folder, device="cpu", dtype="fp32")
        return model.generate_tokens([[5, 6, 7]], 4, temperature=0), (model, tokenizer)

    for folder, name in ((meta, "tokenizer.model"), (huggingface, "tokenizer.json")):
        expected, (model, known) = texts_of(folder)
        save_gguf(model, bare := tmp_path / "bare.gguf")
        (folder / name).unlink()
        found, (_, missing) = texts_of(folder)
        assert found == expected == texts_of(bare)[0]
        assert deepcopy(missing).fingerprint() != known.fingerprint()
        uses: list[Callable[[], object]] = [
            partial(model.generate, missing, ["x"], 4),
            partial(missing.encode, "x", bos=True, eos=False),
            partial(missing.decode, [5]),
            partial(getattr, missing, "stop_tokens"),
            partial(convert, folder, tmp_path / "out.gguf", type="f32"),
        ]
        said = f"lacks {name} .* give tokenizer_path, or work on ids"
        assert unrefused([(use, said) for use in uses]) == []
        assert facts(open_checkpoint(folder))["tokenizer"] == "none, so the model works on ids alone"
    params = json.loads((meta / "params.json").read_text())
    (meta / "params.json").write_text(json.dumps(params | {"vocab_size": -1}))
    assert "lacks vocab_size, and there is no tokenizer.model that has it" in refusal(meta)


def test_a_gguf_file_in_a_folder_is_opened(originals: Path, tmp_path: Path) -> None:
    shutil.copy(originals / "model.gguf", tmp_path)
    (tmp_path / "params.json").write_text("")
    assert open_checkpoint(tmp_path).args.dim == 32


# ---- tensors ---------------------------------------------------------------------------------------------------------


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


def test_shards_with_different_names_shapes_or_dtypes_are_refused(tmp_path: Path) -> None:
    write_meta(tmp_path, meta_weights(tiny_llama()), meta_params(tiny_llama().config), shards=2)
    path = tmp_path / "consolidated.01.pth"
    shard = torch.load(path, weights_only=True)
    name = "layers.1.feed_forward.w1.weight"
    torch.save({**shard, name: shard[name].bfloat16()}, path)
    assert f"{name} has different dtypes or shapes in the shards" in refusal(tmp_path)
    torch.save({**shard, name: shard[name][1:].clone()}, path)
    assert f"{name} has different dtypes or shapes in the shards" in refusal(tmp_path)
    torch.save({other: tensor for other, tensor in shard.items() if other != name}, path)
    assert f"only one of consolidated.00.pth and consolidated.01.pth has {name}" in refusal(tmp_path)


def test_a_shard_of_a_matrix_that_is_cut_by_columns_must_be_a_matrix(tmp_path: Path) -> None:
    write_meta(tmp_path, meta_weights(tiny_llama()), meta_params(tiny_llama().config), shards=2)
    for path in tmp_path.glob("*.pth"):
        shard = torch.load(path, weights_only=True)
        shard["layers.1.feed_forward.w2.weight"] = torch.ones(32)  # as many rows as it needs, and no columns
        torch.save(shard, path)
    assert "wrong shape: layers.1.feed_forward.w2.weight is (64,) and must be (32, 64)" in refusal(tmp_path)


# ---- metadata of GGUF ------------------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    **{"uint8": 200, "int8": -100, "uint16": 60_000, "int16": -30_000, "uint32": 4 * 10**9, "int32": -2 * 10**9},
    **{"uint64": 1 << 63, "int64": -(1 << 62), "float32": -0.15625, "float64": 0.1, "bool": True, "string": "naïve"},
    "array": ["a", "", "naïve"],
}


def test_metadata_of_every_type_is_read_as_it_was_written(tmp_path: Path) -> None:
    writer = gguf_writer(tmp_path / "model.gguf", tiny_llama().config)
    for kind, value in VALUES.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    writer.add_array("numbers", [-1, 0, 1])
    finish(writer)
    found = read_gguf_header(tmp_path / "model.gguf").metadata
    assert {kind: found[f"a.{kind}"] for kind in VALUES} == VALUES
    assert all(type(found[f"a.{kind}"]) is type(value) for kind, value in VALUES.items())
    assert found["numbers"] == [-1, 0, 1]
    assert found["llama.block_count"] == tiny_llama().config.num_hidden_layers


# Of each key the values that change nothing.
PLAIN: dict[str, list[Any]] = {
    "split.count": [0, 1],
    "llama.rope.scaling.type": ["none"],
    "llama.attention.causal": [True],
    **{f"llama.{key}": [0] for key in ("expert_count", "attention.sliding_window")},
    **{f"llama.attention.{key}": [0.0] for key in ("scale", "clamp_kqv", "max_alibi_bias")},
    **{f"llama.{key}": [0.0, 1.0] for key in ("rope.scaling.factor", "rope.scale_linear", "embedding_scale")},
    **{f"llama.{key}": [1.0] for key in ("residual_scale", "logit_scale")},
}


@table("number", [0, 1])
def test_metadata_that_changes_nothing_is_accepted(tmp_path: Path, number: int) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf_writer(path, tiny_llama().config)
    for key, values in PLAIN.items():
        add_value(writer, key, values[min(number, len(values) - 1)])
    finish(writer)
    assert "missing: " in refusal(path)  # the tensors are checked after the metadata, and this file has none
