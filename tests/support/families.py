"""Tiny random models of transformers, of every family that is built like Llama."""

from typing import Any

import checkpoints
import torch
from checkpoints import TINY
from references import in_float64

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
    from transformers import AutoConfig

    rope = {"rope_type": scaling.partition(" ")[0], "rope_theta": 10000.0, **SCALINGS[scaling]}
    sizes = {**TINY, "head_dim": 8, "max_position_embeddings": 128, "rope_parameters": rope}
    if family == "mistral":
        sizes["sliding_window"] = None
    return AutoConfig.for_model(family, **(sizes | changes))


def random_model(config: Any) -> Any:
    """Return a model in float64 whose norms do not round to float32."""
    return in_float64(checkpoints.random_model(config, dtype=torch.float64))
