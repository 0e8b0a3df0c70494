"""What a file does not state is the default of its format or follows from its family; else it is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    config_of,
    finish,
    gguf_name,
    gguf_writer,
    meta_params,
    meta_weights,
    random_model,
    write_huggingface,
    write_meta,
    write_meta_tokenizer,
)
from families import FAMILIES
from tables import table
from vocabularies import pieces

from llama import load
from llama.args import RopeScaling
from llama.checkpoint import CheckpointError, load_weights, open_checkpoint
from llama.checkpoint.meta import meta_args
from llama.cli.doctor import main as doctor
from llama.tokenizer import Tokenizer

SENTENCEPIECE, TIKTOKEN = True, False
OLD: dict[str, Any] = {"multiple_of": 256, "vocab_size": -1}
CODE: dict[str, Any] = {"multiple_of": 256, "ffn_dim_multiplier": 1.0, "norm_eps": 1e-5, "rope_theta": 1000000}
NEW: dict[str, Any] = {"vocab_size": 128256, "n_kv_heads": 8, "norm_eps": 1e-05, "rope_theta": 500000.0}
_SEVEN = {"dim": 4096, "n_heads": 32, "n_layers": 32}
_THIRTEEN = {"dim": 5120, "n_heads": 40, "n_layers": 40}
_SEVENTY = {"dim": 8192, "n_heads": 64, "n_layers": 80}

# The params.json as published, its tokenizer, and (rope_theta, length, n_kv_heads, ffn_dim, norm_eps, RoPE's factor) of
# the model's paper and code.
RELEASED: dict[str, tuple[bool, dict[str, Any], tuple[Any, ...]]] = {
    "Llama 1 7B": (SENTENCEPIECE, OLD | _SEVEN | {"norm_eps": 1e-06}, (1e4, 2048, 32, 11008, 1e-6, None)),
    "Llama 1 13B": (SENTENCEPIECE, OLD | _THIRTEEN | {"norm_eps": 1e-06}, (1e4, 2048, 40, 13824, 1e-6, None)),
    "Llama 1 33B": (
        SENTENCEPIECE,
        OLD | {"dim": 6656, "n_heads": 52, "n_layers": 60, "norm_eps": 1e-06},
        (1e4, 2048, 52, 17920, 1e-6, None),
    ),
    "Llama 1 65B": (SENTENCEPIECE, OLD | _SEVENTY | {"norm_eps": 1e-05}, (1e4, 2048, 64, 22016, 1e-5, None)),
    "Llama 2 7B": (SENTENCEPIECE, OLD | _SEVEN | {"norm_eps": 1e-05}, (1e4, 4096, 32, 11008, 1e-5, None)),
    "Llama 2 13B": (SENTENCEPIECE, OLD | _THIRTEEN | {"norm_eps": 1e-05}, (1e4, 4096, 40, 13824, 1e-5, None)),
    "Llama 2 70B": (
        SENTENCEPIECE,
        _SEVENTY
        | {"multiple_of": 4096, "ffn_dim_multiplier": 1.3, "n_kv_heads": 8, "norm_eps": 1e-05, "vocab_size": -1},
        (1e4, 4096, 8, 28672, 1e-5, None),
    ),
    "Code Llama 7B": (SENTENCEPIECE, CODE | _SEVEN, (1e6, 16384, 32, 11008, 1e-5, None)),
    "Code Llama 34B": (
        SENTENCEPIECE,
        CODE | {"dim": 8192, "n_layers": 48, "n_heads": 64, "n_kv_heads": 8},
        (1e6, 16384, 8, 22016, 1e-5, None),
    ),
    "Llama 3 8B": (
        TIKTOKEN,
        NEW | _SEVEN | {"multiple_of": 1024, "ffn_dim_multiplier": 1.3},
        (5e5, 8192, 8, 14336, 1e-5, None),
    ),
    "Llama 3.1 8B": (
        TIKTOKEN,
        NEW | _SEVEN | {"multiple_of": 1024, "ffn_dim_multiplier": 1.3, "use_scaled_rope": True},
        (5e5, 131072, 8, 14336, 1e-5, 8),
    ),
    "Llama 3.2 1B": (
        TIKTOKEN,
        NEW
        | {"dim": 2048, "n_layers": 16, "n_heads": 32, "multiple_of": 256}
        | {"ffn_dim_multiplier": 1.5, "use_scaled_rope": True},
        (5e5, 131072, 8, 8192, 1e-5, 32),
    ),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "pieces.model").write_bytes(pieces())
    write_meta_tokenizer(folder / "ranks.model")
    return {SENTENCEPIECE: folder / "pieces.model", TIKTOKEN: folder / "ranks.model"}


# ---- Meta's format ---------------------------------------------------------------------------------------------------


@table("name", RELEASED)
def test_a_released_params_json_means_what_its_paper_and_code_say(name: str, tokenizers: dict[bool, Path]) -> None:
    kind, params, expected = RELEASED[name]
    tokenizer = Tokenizer(tokenizers[kind])
    args, assumed = meta_args(Path("params.json"), params, tokenizer)
    factor = args.rope_scaling.factor if isinstance(args.rope_scaling, RopeScaling) else None
    assert (args.rope_theta, args.max_seq_len, args.n_kv_heads, args.ffn_dim, args.norm_eps, factor) == expected
    assert args.vocab_size == params.get("vocab_size", -1) or args.vocab_size == tokenizer.n_words
    assert args.head_dim == (64 if name == "Llama 3.2 1B" else 128)
    family = "Llama 3.1 and later" if factor else name if expected[0] == 1e4 else name.rpartition(" ")[0]
    assert assumed[-1] == f"max_seq_len={expected[1]} ({family})"
    assert ("rope_theta=10000.0 (Llama 1 and 2)" in assumed) == ("rope_theta" not in params)


def old_model(folder: Path, tokenizer: Path, **stated: Any) -> Path:
    """Write a tiny model whose params.json states no RoPE base, with SentencePiece's vocabulary."""
    theirs = random_model(config_of(vocab_size=2000, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    params = meta_params(theirs.config)
    del params["rope_theta"]
    path = write_meta(folder, meta_weights(theirs), params | stated, tokenizer=False)
    (path / "tokenizer.model").write_bytes(tokenizer.read_bytes())
    return path


@torch.inference_mode()
def test_a_model_without_a_stated_base_gives_the_logits_of_the_base_of_llama_2(
    tmp_path: Path, tokenizers: dict[bool, Path]
) -> None:
    tokens = torch.arange(24).reshape(2, 12) * 7 % 2000
    unsaid, stated, later = (
        load(old_model(tmp_path / str(i), tokenizers[SENTENCEPIECE], **said), max_seq_len=32, device="cpu")[0](tokens)
        for i, said in enumerate(({}, {"rope_theta": 10000.0}, {"rope_theta": 500000.0}))
    )
    assert torch.equal(unsaid, stated)
    assert not torch.allclose(unsaid, later, atol=0.1, rtol=0)


def test_a_base_that_nothing_decides_is_refused_by_name(tokenizers: dict[bool, Path]) -> None:
    for kind, params in (
        (TIKTOKEN, OLD | _SEVEN),
        (SENTENCEPIECE, OLD | _SEVEN | {"use_scaled_rope": True}),
    ):
        with pytest.raises(CheckpointError, match=r'lacks rope_theta.*add "rope_theta" to the file'):
            meta_args(Path("params.json"), params, Tokenizer(tokenizers[kind]), max_seq_len=64)
    with pytest.raises(CheckpointError, match="rope_theta=None must be a finite number"):
        meta_args(Path("params.json"), OLD | _SEVEN | {"rope_theta": None}, Tokenizer(tokenizers[SENTENCEPIECE]))


def test_a_length_that_nothing_decides_is_refused_with_the_flag_and_the_key_that_decide_it(
    tmp_path: Path, tokenizers: dict[bool, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = old_model(tmp_path / "a", tokenizers[SENTENCEPIECE])
    with pytest.raises(CheckpointError, match=r'with max_seq_len=N \(--max_seq_len N\), or add "max_seq_len": N to'):
        load(path, device="cpu")
    assert load(path, device="cpu", max_seq_len=64)[0].args.max_seq_len == 64
    assert open_checkpoint(old_model(tmp_path / "b", tokenizers[SENTENCEPIECE], max_seq_len=48)).args.max_seq_len == 48
    assert doctor(str(path)) == 1
    assert "--max_seq_len N" in capsys.readouterr().out
    assert doctor(str(tmp_path / "b")) == 0
    printed = capsys.readouterr().out
    assert "rope_theta=10000.0 (Llama 1 and 2)" in printed
    assert "base 10000, not scaled" in printed
    assert "48 positions" in printed
    for kind, base in ((TIKTOKEN, 10000.0), (TIKTOKEN, 1e6), (SENTENCEPIECE, 5e5)):
        with pytest.raises(CheckpointError, match="does not state for how many positions"):
            meta_args(Path("p"), OLD | _SEVEN | {"rope_theta": base}, Tokenizer(tokenizers[kind]))


@table("name", ["dim", "n_layers", "n_heads"])
def test_a_size_whose_default_differs_in_metas_code_must_be_stated(name: str, tokenizers: dict[bool, Path]) -> None:
    params = {key: value for key, value in (OLD | _SEVEN).items() if key != name}
    with pytest.raises(CheckpointError, match=f"lacks {name}$"):
        meta_args(Path("params.json"), params, Tokenizer(tokenizers[SENTENCEPIECE]))


# ---- Hugging Face's format -------------------------------------------------------------------------------------------

LEAST = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 520}


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_of_a_config_have_the_defaults_of_transformers(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    heads = 4 if family == "llama" else 32  # the other families have a default number of KV heads
    least = LEAST | {"num_attention_heads": heads, "model_type": family}
    theirs = AutoConfig.for_model(family, **LEAST, num_attention_heads=heads)
    write_huggingface(tmp_path, random_model(theirs))
    (tmp_path / "config.json").write_text(json.dumps(least))
    checkpoint = open_checkpoint(tmp_path)
    args = checkpoint.args
    assert args.rope_theta == theirs.rope_parameters["rope_theta"] == 10000.0
    assert args.max_seq_len == theirs.max_position_embeddings
    assert args.norm_eps == theirs.rms_norm_eps
    assert args.n_kv_heads == theirs.num_key_value_heads
    assert args.head_dim == getattr(theirs, "head_dim", 64 // heads)
    assert args.rope_scaling is None
    assert checkpoint.window == getattr(theirs, "sliding_window", None)
    assert {"rms_norm_eps=1e-06 (transformers)", "rope_theta=10000.0 (transformers)"} <= set(checkpoint.assumed)


# ---- GGUF ------------------------------------------------------------------------------------------------------------


def gguf_without(path: Path, *absent: str, **more: str) -> Path:
    """Write a .gguf file of a tiny model without some keys, and with texts under more keys."""
    theirs = random_model(config_of(num_key_value_heads=4))
    writer = gguf_writer(path, theirs.config)
    for key in absent:
        del writer.kv_data[0][f"llama.{key}"]
    for key, text in more.items():
        writer.add_string(f"llama.{key}", text)
    for name, weight in meta_weights(theirs).items():
        writer.add_tensor(gguf_name(name), weight.numpy())
    finish(writer)
    return path


def test_missing_keys_of_a_gguf_file_have_the_defaults_of_llama_cpp(tmp_path: Path) -> None:
    absent = ("rope.freq_base", "attention.head_count_kv", "attention.key_length", "attention.value_length")
    absent += ("rope.dimension_count", "vocab_size")
    checkpoint = open_checkpoint(gguf_without(tmp_path / "model.gguf", *absent))
    args = checkpoint.args
    assert (args.rope_theta, args.n_kv_heads, args.head_dim, args.vocab_size) == (10000.0, 4, 8, 520)
    assert args.rope_scaling is None
    assert checkpoint.assumed == ("rope.freq_base=10000.0 (llama.cpp)",)
    for key in ("context_length", "attention.layer_norm_rms_epsilon"):  # llama.cpp requires them
        with pytest.raises(CheckpointError, match=f"lacks llama.{key}"):
            open_checkpoint(gguf_without(tmp_path / "less.gguf", key))


# ---- settings --------------------------------------------------------------------------------------------------------


@table("name, value", [("kv_cache", "{evil}:mine"), ("kv_cache", "int8"), ("kv_caching", False), ("max_batch_size", 1)])
def test_no_format_may_state_how_a_model_is_used_nor_name_code(
    name: str, value: Any, tmp_path: Path, tokenizers: dict[bool, Path]
) -> None:
    evil = tmp_path / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    value = value.format(evil=evil) if isinstance(value, str) else value
    meta = old_model(tmp_path / "meta", tokenizers[SENTENCEPIECE], **{name: value}, max_seq_len=64)
    huggingface = write_huggingface(tmp_path / "huggingface", random_model(config_of()))
    config = json.loads((huggingface / "config.json").read_text())
    (huggingface / "config.json").write_text(json.dumps(config | {name: value}))
    for path in (meta, huggingface, gguf_without(tmp_path / "model.gguf", **{name: str(value)})):
        with pytest.raises(CheckpointError, match=f"{name}=.* is not supported; supported: no such key"):
            load_weights(checkpoint := open_checkpoint(path), checkpoint.args, dtype=torch.float32, device="cpu")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointError, match=f"has unknown keys: {name}"):
        meta_args(Path("p"), OLD | _SEVEN | {name: None}, Tokenizer(tokenizers[SENTENCEPIECE]))
