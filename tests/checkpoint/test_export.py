"""An export is read back to the bit; test_families.py compares what transformers computes from it."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import N_WORDS, write_huggingface_tokenizer
from tiny import tiny_model

from llama.args import LinearScaling, ModelArgs, RopeScaling
from llama.checkpoint import load_weights, open_checkpoint
from llama.checkpoint.export import huggingface_tensors, save_gguf, save_huggingface
from llama.model import Transformer
from llama.ranks import Ranks, cut_for

LLAMA_SCALING = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0, original_max_seq_len=64)


def args_of(**changes: Any) -> ModelArgs:
    """Return sizes that the formats can say, all of them other than their defaults."""
    sizes: dict[str, Any] = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "ffn_dim": 48}
    limits = {"vocab_size": N_WORDS, "max_seq_len": 96, "norm_eps": 2e-5, "rope_theta": 20000.0}
    return ModelArgs(**{**sizes, **limits, **changes})


def model_of(dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    return tiny_model(args_of(**changes), dtype=dtype)


def export(kind: str, model: Transformer, directory: Path) -> Path:
    if kind == "gguf":
        save_gguf(model, directory / "model.gguf")
        return directory / "model.gguf"
    save_huggingface(model, directory / "exported" / "deep")
    return directory / "exported" / "deep"


def tokenizer_in(directory: Path) -> Path:
    write_huggingface_tokenizer(directory / "tokenizer")
    return directory / "tokenizer" / "tokenizer.json"


@pytest.mark.parametrize("kind", ["huggingface", "gguf"])
@pytest.mark.parametrize(
    ("scaling", "tied", "dtype"),
    [
        (None, False, torch.float32),
        (RopeScaling(), True, torch.float16),
        (RopeScaling(factor=32.0), False, torch.bfloat16),
    ],
)
def test_an_export_is_read_as_the_same_bits_and_the_same_args(
    tmp_path: Path, kind: str, scaling: RopeScaling | None, tied: bool, dtype: torch.dtype
) -> None:
    model = model_of(dtype, rope_scaling=scaling, tied_head=tied)
    path = export(kind, model, tmp_path)
    checkpoint = open_checkpoint(path, tokenizer_path=tokenizer_in(tmp_path))
    assert checkpoint.args == model.args
    state = load_weights(checkpoint, checkpoint.args, dtype=dtype, device="cpu").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(state[name], weight), name


@pytest.mark.skipif(os.name != "posix", reason="needs links")
@pytest.mark.parametrize("kind", ["huggingface", "gguf"])
def test_an_export_over_links_replaces_the_files_that_they_lead_to(tmp_path: Path, kind: str) -> None:
    path = export(kind, model_of(), tmp_path)
    files = [path] if path.is_file() else [path / "config.json", path / "model.safetensors"]
    for file in files:
        file.rename(tmp_path / f"real-{file.name}")
        file.symlink_to(tmp_path / f"real-{file.name}")
    model = model_of()
    model.norm.weight.data.fill_(0.5)
    export(kind, model, tmp_path)
    assert all(file.is_symlink() for file in files)
    checkpoint = open_checkpoint(path, tokenizer_path=tokenizer_in(tmp_path))
    read = load_weights(checkpoint, checkpoint.args, dtype=torch.float32, device="cpu")
    assert torch.equal(read.norm.weight, model.norm.weight)


def test_divisors_go_into_a_gguf_file_and_are_refused_by_name_in_a_config(tmp_path: Path) -> None:
    divisors = tuple(float(i) for i in range(1, 17))
    model = model_of(rope_scaling=divisors)
    path = export("gguf", model, tmp_path)
    assert open_checkpoint(path, tokenizer_path=tokenizer_in(tmp_path)).args == model.args
    with pytest.raises(ValueError, match=r"rope_scaling has 16 divisors.*write a \.gguf"):
        export("huggingface", model, tmp_path)
    with pytest.raises(ValueError, match="no key for the attention_factor of linear RoPE scaling"):
        export("huggingface", model_of(rope_scaling=LinearScaling(4.0, 1.5)), tmp_path)
    assert not (tmp_path / "exported").exists()


def test_a_rule_that_gguf_cannot_name_arrives_as_its_divisors(tmp_path: Path) -> None:
    model = model_of(rope_scaling=LLAMA_SCALING)
    checkpoint = open_checkpoint(export("gguf", model, tmp_path), tokenizer_path=tokenizer_in(tmp_path))
    assert replace(checkpoint.args, rope_scaling=LLAMA_SCALING) == model.args
    read = load_weights(checkpoint, checkpoint.args, dtype=torch.float32, device="cpu")
    assert torch.allclose(read.rope.freqs, model.rope.freqs, rtol=1e-6, atol=0)  # one rounding there and one back


@pytest.mark.parametrize("kind", ["huggingface", "gguf"])
def test_a_model_that_no_format_can_express_is_refused_before_writing(tmp_path: Path, kind: str) -> None:
    two = Ranks()
    two.size = 2
    with cut_for(two):
        part = Transformer(args_of())
    for model, reason in (
        (model_of(rope_theta=None), r"other formats have no model without RoPE; save its state_dict\(\)"),
        (model_of(torch.float64), r"torch\.float64 cannot be written; bring the model to fp32, fp16 or bf16"),
        (part, "has 1 of 2 slices of the model; load it in one to write it"),
    ):
        with pytest.raises(ValueError, match=reason):
            export(kind, model, tmp_path)
        assert not list(tmp_path.iterdir())


def test_only_the_permuted_weights_are_copies() -> None:
    model = model_of(tied_head=True)
    own = {weight.data_ptr() for weight in model.state_dict().values()}
    copies = {name for name, tensor in huggingface_tensors(model).items() if tensor.data_ptr() not in own}
    projections = ("q_proj", "k_proj")
    assert copies == {f"model.layers.{i}.self_attn.{name}.weight" for i in range(2) for name in projections}
