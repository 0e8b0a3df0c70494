"""Tiny checkpoints in all three formats, written by independent code.

transformers writes Hugging Face directories, and the gguf package GGUF files. No package writes Meta's layout; here it
is built row by row from its definition: RoPE pairs are neighbours.
"""

import base64
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from references import HF_LAYER_NAMES
from torch import Tensor

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import LlamaConfig, LlamaForCausalLM

MERGES = [b"th", b"he", b"in", b"er", b"an", b" t", b" a", b"the"]
N_RANKS = 256 + len(MERGES)
N_WORDS = N_RANKS + 256  # Llama 3 has 256 special tokens after the ranks
BOS, EOS, EOT = N_RANKS, N_RANKS + 1, N_RANKS + 9

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": N_WORDS,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "initializer_range": 0.3,  # large enough that every weight shows in the logits
}
GGUF_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 16)
HF_NAMES = {
    **{"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"},
    **HF_LAYER_NAMES,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_of(**changes: Any) -> "LlamaConfig":
    """Return a tiny Llama of transformers; `scaled=True` gives it Llama 3.1's RoPE scaling, by `factor`."""
    scaled, factor = changes.pop("scaled", False), changes.pop("factor", 8.0)
    scaling = LLAMA3_SCALING | {"factor": factor} if scaled else {"rope_type": "default"}
    rope = {"rope_theta": 500000.0, **scaling}
    sizes: dict[str, Any] = {
        **TINY,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072 if scaled else 8192,
        "rope_parameters": rope,
    }
    from transformers import LlamaConfig

    return LlamaConfig(**(sizes | changes))


def random_model(config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Return a model of transformers in which no number is 0 or 1."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.copy_(("norm" in name) + 0.3 * torch.randn_like(parameter))
    return model


def meta_rows(n_heads: int, head_dim: int) -> list[int]:
    """Return, for each row of Meta's wq or wk, the row of Hugging Face's where the same numbers are."""
    half = head_dim // 2
    return [head * head_dim + place for head in range(n_heads) for pair in range(half) for place in (pair, half + pair)]


def meta_weights(model: "LlamaForCausalLM") -> dict[str, Tensor]:
    """Return the model's weights in Meta's names and layout; a tied head only as the embedding."""
    theirs, config = model.state_dict(), model.config
    weights = {}
    for ours, name in HF_NAMES.items():
        if ours.startswith(("attention", "feed_forward", "ffn_norm")):
            for i in range(config.num_hidden_layers):
                weights[f"layers.{i}.{ours}.weight"] = theirs[f"model.layers.{i}.{name}.weight"]
        elif not (ours == "output" and config.tie_word_embeddings):
            weights[f"{ours}.weight"] = theirs[f"{name}.weight"]
    for name, weight in weights.items():
        for suffix, heads in (("wq", config.num_attention_heads), ("wk", config.num_key_value_heads)):
            if name.endswith(f"{suffix}.weight"):
                weights[name] = weight[meta_rows(heads, config.head_dim)]
    return {name: weight.clone() for name, weight in weights.items()}


def meta_params(config: "LlamaConfig") -> dict[str, Any]:
    """Return params.json for the config, whose FFN width Meta's rule must give by multiple_of alone."""
    params = {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
        "multiple_of": config.intermediate_size,
        "ffn_dim_multiplier": config.intermediate_size / int(8 * config.hidden_size / 3),
        "norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
    }
    if config.rope_parameters["rope_type"] == "llama3":
        params["use_scaled_rope"] = True
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        params["head_dim"] = config.head_dim  # not a key of Meta's; ours
    return params


def write_meta_tokenizer(path: Path) -> None:
    tokens = [bytes([i]) for i in range(256)] + MERGES
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    path.write_text("".join(lines))


def special_tokens() -> list[str]:
    named = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 6: "<|start_header_id|>", 7: "<|end_header_id|>"}
    named |= {9: "<|eot_id|>"}
    return [named.get(i, f"<|reserved_special_token_{i}|>") for i in range(256)]


def write_huggingface_tokenizer(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(_tokenizer_json())


@cache
def _tokenizer_json() -> str:
    """Let transformers make a tokenizer.json from Meta's file."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source.model")
        write_meta_tokenizer(source)
        return str(
            TikTokenConverter(str(source), extra_special_tokens=special_tokens()).converted().to_str(pretty=True)
        )


def write_huggingface(directory: Path, model: Any, *, max_shard_size: str = "5GB", tokenizer: bool = True) -> Path:
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if tokenizer:
        write_huggingface_tokenizer(directory)
    return directory


def cut(name: str, weight: Tensor, shards: int, n_kv_heads: int, *, llama2: bool = False) -> list[Tensor]:
    """Cut a tensor as Meta does for so many GPUs."""
    if "norm" in name:
        return [weight.clone() for _ in range(shards)]
    if name.endswith(("wk.weight", "wv.weight")) and shards > n_kv_heads:
        return [head for head in weight.chunk(n_kv_heads) for _ in range(shards // n_kv_heads)]
    by_columns = name.endswith(("wo.weight", "w2.weight")) or (llama2 and name == "tok_embeddings.weight")
    return list(weight.chunk(shards, dim=1 if by_columns else 0))


def write_meta(
    directory: Path,
    weights: Mapping[str, Tensor],
    params: Mapping[str, Any],
    *,
    shards: int = 1,
    llama2: bool = False,
    tokenizer: bool = True,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "params.json").write_text(json.dumps(dict(params)))
    parts = {name: cut(name, w, shards, params["n_kv_heads"], llama2=llama2) for name, w in weights.items()}
    for i in range(shards):
        shard = {name: part[i].clone() for name, part in parts.items()}
        shard["rope.freqs"] = torch.ones(4)  # as old files have it
        torch.save(shard, directory / f"consolidated.{i:02d}.pth")
    if tokenizer:
        write_meta_tokenizer(directory / "tokenizer.model")
    return directory


def gguf_name(name: str) -> str:
    """Return llama.cpp's name, from the gguf package's own table."""
    theirs = GGUF_NAMES.get_name(name, try_suffixes=(".weight",))
    assert theirs is not None
    return theirs


def rope_divisors(config: "LlamaConfig") -> np.ndarray:
    """Return what llama.cpp's converter writes for Llama 3.1's scaling, in plain floats."""
    rope, dim = config.rope_parameters, config.head_dim
    divisors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / dim)
        periods = rope["original_max_position_embeddings"] / wavelength
        if periods > rope["high_freq_factor"]:
            divisors.append(1.0)
        elif periods < rope["low_freq_factor"]:
            divisors.append(rope["factor"])
        else:
            smooth = (periods - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, dtype=np.float32)


def stored_as(weight: Tensor, kind: Kind) -> np.ndarray:
    """Return the weight's bytes in one of llama.cpp's types; random blocks for those the package cannot quantise."""
    if kind in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        return random_blocks(tuple(weight.shape), kind)
    return gguf.quants.quantize(weight.float().numpy(), kind)


def random_blocks(shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.001).tobytes(), dtype=np.uint8)
    for at in {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}[kind]:
        raw[..., at : at + 2] = scale  # random bytes would also be infinite scales
    return raw.reshape(*shape[:-1], -1)


def gguf_writer(path: Path, config: "LlamaConfig", *, tokenizer: bool = True) -> gguf.GGUFWriter:
    """Return a writer that has all metadata and no tensors yet; the architecture is the config's `model_type`."""
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        write_gguf_tokenizer(writer)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_divisors(config))
    return writer


def write_gguf_tokenizer(writer: gguf.GGUFWriter) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = bytes_to_unicode()
    ordinary = [bytes([i]) for i in range(256)] + MERGES
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(["".join(alphabet[b] for b in token) for token in ordinary] + special_tokens())
    writer.add_token_types([1] * N_RANKS + [3] * 256)
    writer.add_token_merges(["t h", "h e", "i n", "e r", "a n", "Ġ t", "Ġ a", "th e"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(
    path: Path,
    weights: Mapping[str, Tensor],
    config: "LlamaConfig",
    *,
    kind: Kind = Kind.F32,
    whole: Sequence[str] = (),
    tokenizer: bool = True,
) -> Path:
    """Write weights in Meta's layout, which is llama.cpp's too; vectors, and what is `whole`, stay float32."""
    writer = gguf_writer(path, config, tokenizer=tokenizer)
    for name, weight in weights.items():
        used = kind if weight.ndim > 1 and name not in whole else Kind.F32
        writer.add_tensor(gguf_name(name), stored_as(weight, used), raw_dtype=used)
    finish(writer)
    return path
