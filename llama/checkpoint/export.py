"""Write a model as Hugging Face's directory or as a .gguf file. The tokenizer is not written."""

import json
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llama.args import LinearScaling, ModelArgs, YarnScaling
from llama.checkpoint.assemble import Weight
from llama.checkpoint.families import SIZES, family_of, huggingface_names
from llama.checkpoint.gguf_writer import planned, write_gguf
from llama.checkpoint.half_split import in_half_split_order
from llama.host.files import replace_file, replacing
from llama.model import Transformer

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_GGUF_KINDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def save_huggingface(model: Transformer, directory: str | PathLike[str]) -> None:
    """Write config.json and model.safetensors, in the model's dtype, into a directory, which is created if needed.

    Raises ValueError for a dtype other than fp32, fp16 and bf16, and for RoPE scaling that config.json cannot express.
    """
    from safetensors.torch import save_file

    dtype = _dtype(model)
    config = huggingface_config(model.args) | {"dtype": _DTYPES[dtype]}
    tensors = huggingface_tensors(model)
    if model.args.tied_head:
        del tensors["lm_head.weight"]  # safetensors rejects one tensor under two names
    directory = Path(directory)
    replace_file(directory / "config.json", (json.dumps(config, indent=2) + "\n").encode())
    with replacing(directory / "model.safetensors") as new:
        save_file(tensors, new, metadata={"format": "pt"})


def huggingface_config(args: ModelArgs) -> dict[str, Any]:
    """Return the config.json of such a model, with the keys of transformers 5.

    Raises ValueError for RoPE scaling by a divisor per frequency: config.json has no key for it.
    """
    family = family_of(args)
    return {
        "architectures": [f"{family.name.capitalize()}ForCausalLM"],
        "model_type": family.name,
        **{key: getattr(args, ours) for ours, (key, _) in SIZES.items()},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {"rope_theta": args.rope_theta, **_rope_scaling(args)},
        "tie_word_embeddings": args.tied_head,
        # Without these keys transformers takes Llama 2's ids; ours come from the tokenizer.
        "bos_token_id": None,
        "eos_token_id": None,
    }


def huggingface_tensors(model: Transformer) -> dict[str, Tensor]:
    """Return the weights in Hugging Face's names and layout, with a tied head under both of its names.

    The weights of queries and keys are copies, because their rows have another order there; the others are shared.
    """
    names = huggingface_names(model.args)
    return {
        names[ours]: in_half_split_order(ours, Weight.of(weight.detach()), model.args.head_dim).rows(0, len(weight))
        for ours, weight in model.state_dict().items()
    }


def save_gguf(model: Transformer, path: str | PathLike[str]) -> None:
    """Write a .gguf file in the model's dtype, with vectors in float32 as llama.cpp needs them, and no tokenizer.

    Raises ValueError for a dtype other than fp32, fp16 and bf16.
    """
    kind = _GGUF_KINDS[_dtype(model)]
    parts = planned(model.args, {name: Weight.of(weight) for name, weight in model.state_dict().items()}, kind)
    with replacing(Path(path)) as new:
        write_gguf(new, model.args, parts, {"tokenizer.ggml.model": "no_vocab"})


def _dtype(model: Transformer) -> torch.dtype:
    """Return the dtype of the weights; raise ValueError unless the model is whole and can be written in it."""
    if model.ranks.size > 1:
        raise ValueError(f"this process has 1 of {model.ranks.size} slices of the model; load it in one to write it")
    dtype = model.tok_embeddings.weight.dtype
    if dtype not in _DTYPES:
        raise ValueError(f"weights in {dtype} cannot be written; bring the model to fp32, fp16 or bf16 first")
    return dtype


def _rope_scaling(args: ModelArgs) -> dict[str, Any]:
    rule = args.rope_scaling
    if rule is None:
        return {"rope_type": "default"}
    if isinstance(rule, tuple):
        raise ValueError(
            f"rope_scaling has {len(rule)} divisors, and Hugging Face's config only has rules "
            "(llama.args.RopeScaling); write a .gguf file instead"
        )
    values = asdict(rule)
    if isinstance(rule, LinearScaling):
        if values.pop("attention_factor") != 1:
            raise ValueError("Hugging Face's config has no key for the attention_factor of linear RoPE scaling")
        return {"rope_type": "linear", **values}
    kind = "yarn" if isinstance(rule, YarnScaling) else "llama3"
    return {"rope_type": kind, "original_max_position_embeddings": values.pop("original_max_seq_len"), **values}
