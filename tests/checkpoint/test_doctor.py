"""The doctor describes a checkpoint, the memory that it needs, and the reason why it would not load."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import (
    N_WORDS,
    meta_params,
    meta_weights,
    write_gguf,
    write_huggingface,
    write_huggingface_tokenizer,
    write_meta,
)
from checkpoints import config_of as llama_config
from checkpoints import random_model as random_llama
from families import FAMILIES, config_of, random_model
from gguf import GGMLQuantizationType as Kind
from tables import table

from llama.args import ModelArgs
from llama.checkpoint import open_checkpoint
from llama.checkpoint.doctor import facts, memory
from llama.cli.doctor import check_manifest, fast_path, main
from llama.fast.native_build import find_compiler
from llama.host.machine import dtype_name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_a_family_is_described(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = random_model(config_of(family, "yarn"))
    assert main(str(write_huggingface(tmp_path, theirs))) == 0
    printed = capsys.readouterr().out
    count = sum(weight.numel() for weight in theirs.parameters())
    for fact in (
        "Hugging Face's safetensors",
        family,
        f"{count:,}",
        "2 of width 32, MLP 64",
        "4 of 8 numbers, 2 for keys and values",
        "its own matrix",
        "YarnScaling: factor 4, original_max_seq_len 32",
        f"{N_WORDS} tokens, 256 of them special",
        "<|end_of_text|>",
        "chat format",
        "Llama 3's, by its special tokens",
    ):
        assert fact in printed, fact
    assert ("biases of q, k and v" in printed) == (family == "qwen2")
    assert ("norms of q and k" in printed) == (family == "qwen3")
    assert printed.endswith("loads\n")


def test_meta_and_gguf_are_described_with_the_types_of_their_tensors(tmp_path: Path) -> None:
    theirs = random_llama(llama_config(tie_word_embeddings=True))
    weights = meta_weights(theirs)
    meta = facts(open_checkpoint(write_meta(tmp_path / "meta", weights, meta_params(theirs.config), shards=2)))
    assert meta["format"] == "Meta's .pth"
    assert meta["weights"].startswith("2 files")
    gguf = facts(open_checkpoint(write_gguf(tmp_path / "model.gguf", weights, theirs.config, kind=Kind.Q8_0)))
    assert gguf["format"] == "GGUF"
    assert gguf["tensors"] == "15 Q8_0, 5 float32"
    assert gguf["head"] == "is the embedding (tied)"


def test_memory_is_that_of_the_model_in_every_mode(tmp_path: Path) -> None:
    theirs = random_llama(llama_config())
    path = write_gguf(tmp_path / "model.gguf", meta_weights(theirs), theirs.config, kind=Kind.Q8_0)
    found = list(memory(open_checkpoint(path), positions=2048))
    weights = {(dtype_name(dtype), quantize): nbytes for dtype, quantize, nbytes, _ in found}
    count = sum(weight.numel() for weight in theirs.parameters())
    assert weights["fp32", ""] == 4 * count
    assert weights["bf16", ""] == 2 * count
    assert weights["fp32", ""] > weights["fp32", "int8"] > weights["fp32", "int4"]
    assert weights["fp32", "stored"] < weights["fp32", "int8"] + 1
    assert {cache for dtype, _, _, cache in found if dtype == torch.float32} == {2 * 2 * 2 * 8 * 2048 * 4}


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler, so there is no native code")
def test_a_row_says_whether_native_code_runs_here_and_if_not_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = ModelArgs(dim=4096, n_kv_heads=8, vocab_size=128256)  # 2 GB, of which none is touched
    assert fast_path(sizes) == "yes, native code on this CPU"
    assert fast_path(replace(sizes, dim=4080, head_dim=128)) == (
        "no, because dim=4080 of the model is not a multiple of 32"
    )
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CXX", raising=False)
    for folder, why in (
        ("empty", r"no, because there is no C\+\+ compiler"),
        ("file", "no, because .*file/native.*: Not a directory; set LLAMA_CACHE_DIR to a folder that can be written$"),
    ):
        monkeypatch.setenv("LLAMA_CACHE_DIR", str(tmp_path / folder))
        assert re.match(why, fast_path(sizes)), fast_path(sizes)


def test_a_window_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(write_huggingface(tmp_path, random_model(config_of("mistral", sliding_window=48))))) == 0
    printed = capsys.readouterr().out
    assert "note: " in printed
    assert "it loads with --max_seq_len 48" in printed


def test_a_missing_checkpoint_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(str(tmp_path / "nothing")) == 1
    assert "there is no such file or directory" in capsys.readouterr().out
    with pytest.raises(ValueError, match="takes one"):
        main()


def test_a_manifest_is_checked_file_by_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_huggingface(tmp_path / "model", random_model(config_of("llama")))
    names = ("config.json", "model.safetensors")
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    manifest = tmp_path / "SHA256SUMS"
    manifest.write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    assert main(str(folder), sha256=str(manifest)) == 0
    assert capsys.readouterr().out.startswith("config.json: OK\nmodel.safetensors: OK\n")
    write_huggingface_tokenizer(folder)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    manifest.write_text(manifest.read_text() + f"{'0' * 64} *absent.txt\n")
    assert main(str(folder), sha256=str(manifest)) == 1
    printed = capsys.readouterr().out
    assert "config.json: differs from the manifest" in printed
    assert "absent.txt: is missing" in printed


@table("line", ["", "no digest", f"{'0' * 64}  ../secret", f"{'0' * 64}  /etc/passwd", f"{'0' * 63}  a"])
def test_a_malformed_manifest_is_refused_before_a_file_is_read(line: str, tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1: expected a SHA-256 and the plain name"):
        list(check_manifest(tmp_path / "SHA256SUMS", tmp_path))
