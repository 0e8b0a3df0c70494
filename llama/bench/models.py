"""The models that a benchmark can measure: a checkpoint, the demo model, or a released shape with random weights.

Meta's weights are gated, and no time or size depends on their values; the tokenizer is Meta's real one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from llama.api import pick_device, pick_dtype
from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.checkpoint import load_weights, materialise, open_checkpoint
from llama.costs import RELEASED
from llama.demo import demo_model_path, meta_tokenizer_path
from llama.model import Transformer
from llama.tokenizer import Tokenizer


@dataclass(frozen=True)
class Source:
    """A model that is not in memory yet: its sizes, its tokenizer, and how to build it on a device."""

    args: ModelArgs
    tokenizer: Tokenizer
    weights: str
    device: torch.device
    dtype: torch.dtype
    build: Callable[[], Transformer]


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a cell."""
    return next(name for name, known in DTYPES.items() if known == dtype)


def find_model(cell: Cell) -> Source:
    """Return what `cell.model` names, fetched if need be and read as far as its sizes.

    Raises ValueError, and DemoUnavailable.
    """
    device = pick_device(cell.device)
    dtype = pick_dtype(DTYPES[cell.dtype], device)
    if cell.model in RELEASED:
        args = replace(RELEASED[cell.model], kv_cache=cell.kv_cache)
        tokenizer = Tokenizer(cell.tokenizer_path or meta_tokenizer_path())
        return Source(args, tokenizer, "random", device, dtype, lambda: random_model(args, dtype=dtype, device=device))
    path = demo_model_path() if cell.model == "demo" else cell.model
    checkpoint = open_checkpoint(path, tokenizer_path=cell.tokenizer_path)
    args = replace(checkpoint.args, kv_cache=cell.kv_cache)
    build = lambda: load_weights(checkpoint, args, dtype=dtype, device=device).eval()  # noqa: E731
    return Source(args, checkpoint.tokenizer, "checkpoint", device, dtype, build)


def random_model(args: ModelArgs, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Transformer:
    """Return a model of these sizes whose numbers are random, the same in every process."""
    with torch.device("meta"):
        model = Transformer(args)
    materialise(model, dtype=dtype, device=device)
    stream = torch.Generator(device).manual_seed(seed)
    for parameter in model.requires_grad_(False).parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)  # the norms
        else:
            bound = parameter.shape[-1] ** -0.5
            parameter.uniform_(-bound, bound, generator=stream)
    return model.eval()
