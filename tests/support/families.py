"""Tiny random models of transformers, of every family that is built like Llama, and their folders."""

from pathlib import Path
from typing import Any

import torch
from checkpoints import TINY, write_huggingface_tokenizer
from oracles import in_float64
from transformers import AutoConfig, AutoModelForCausalLM

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn with all its words": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn as DeepSeek's": {
        "factor": 40.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
}


def config_of(family: str, scaling: str = "default", **changes: Any) -> Any:
    rope = {"rope_type": scaling.partition(" ")[0], "rope_theta": 10000.0, **SCALINGS[scaling]}
    sizes = {**TINY, "head_dim": 8, "max_position_embeddings": 128, "rope_parameters": rope}
    if family == "mistral":
        sizes["sliding_window"] = None
    return AutoConfig.for_model(family, **(sizes | changes))


def random_model(config: Any, seed: int = 0) -> Any:
    """Return a model of transformers in which no number is 0 or 1, and whose norms do not round to float32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.copy_(("norm" in name) + 0.3 * torch.randn_like(parameter))
    return in_float64(model)


def write_folder(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    write_huggingface_tokenizer(folder)
    return folder
