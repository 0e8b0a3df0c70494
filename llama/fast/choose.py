"""Which step runs a model where speed was asked for: native code on a CPU, CUDA graphs on a GPU, or the plain path.

`model.runner` is asked first, at every forward and at the head of every generation's steps, and answers None where the
plain path has to serve.
"""

import logging
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from llama.fast.graph_ops import FUNCTIONS, PYTORCH, Compiled, GraphOps, compiled
from llama.fast.graph_runner import GraphRunner, RunLayer, run_layer
from llama.fast.graph_trial import quickest, try_prompts, try_steps
from llama.fast.native_build import NoNativeCode
from llama.fast.native_caches import check_cache
from llama.fast.native_check import check_blocks, check_library
from llama.fast.native_runner import NativeRunner
from llama.fast.supported import Unsupported
from llama.model import Transformer
from llama.quant.layers import quantized_weights
from llama.quant.packed import Format

logger = logging.getLogger(__name__)


Fast = bool | Literal["fused"]  # whether speed was asked for; "fused": by our own kernels, where a GPU runs the model

COMPILER = "inductor"
MEASURED: frozenset[tuple[int, int]] = frozenset()  # compute capabilities of which docs/log.md has the fused kernels


def make_fast(model: Transformer, folder: Path, *, fused: bool = False) -> None:
    """Let the best step that this machine has run the model, and say which; compiled code is kept in `folder`.

    fused: on a GPU, by the kernels of `llama.fast.triton_kernels`.
    """
    try:
        if model.device.type == "cuda":
            _use_graphs(model, fused=fused)
        else:
            _use_native_code(model, folder)
    except (NoNativeCode, Unsupported) as why:
        logger.warning("fast: %s; the plain path runs instead", why)


def _use_native_code(model: Transformer, folder: Path) -> None:
    step = NativeRunner(folder)
    described = step.describe(model)
    check_cache(described, model.new_cache(), model.rope)
    weights = quantized_weights(model).values()
    formats: set[Format | None] = {weight.format for weight in weights}
    formats |= {None} if described.sizes.mixed else set()
    check_library(folder, described.dtype, formats=frozenset(formats), activations=described.sizes.activations)
    check_blocks(folder, weights)
    model.runner = step
    logger.info("fast: native code for %s", step.instructions)


def _use_graphs(model: Transformer, *, fused: bool) -> None:
    """Try the ways that there are on this very device, and take the quickest of those that are right."""
    logger.info("fast: compiling and trying steps and prompts; the first time takes some tens of seconds")
    GraphRunner().describe(model)

    def trial(ops: GraphOps) -> float:
        return try_steps(model, GraphRunner(ops))

    ops = None
    if fused and (own := find_fused(model)) is not None:
        ops = quickest([("fused kernels", own)], trial)
    if ops is None:
        ops = quickest([("PyTorch's own kernels", PYTORCH), ("compiled kernels", compiled(COMPILER))], trial)
    if ops is None:
        raise Unsupported("no step works on this GPU")
    layers: list[tuple[str, RunLayer]] = [("prompts by plain layers", run_layer)]
    layers.append(("prompts by compiled layers", Compiled(run_layer, COMPILER)))
    model.runner = GraphRunner(ops, quickest(layers, partial(try_prompts, model)))
    logger.info("fast: %s", model.runner.name)


def find_fused(model: Transformer) -> GraphOps | None:
    """Return the fused kernels where they serve this model's device and dtype; say what speaks against them."""
    try:
        from llama.fast import triton_kernels
    except ModuleNotFoundError as missing:
        logger.warning("fast: %s is not installed, so PyTorch's own kernels run: pip install triton", missing.name)
        return None
    dtype, device = model.dtype, model.device
    refusal = triton_kernels.refusal(1, dtype, device)
    if refusal is not None:
        logger.warning("fast: %s; PyTorch's own kernels run instead", refusal)
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) not in MEASURED:
        name = torch.cuda.get_device_name(device)
        logger.warning("fast: the fused kernels are not measured on this GPU (%s); docs/log.md will tell", name)
    several = triton_kernels.refusal(triton_kernels.MAX_ROWS, dtype, device) is None
    functions: dict[str, Any] = {name: getattr(triton_kernels, name) for name in FUNCTIONS}
    return GraphOps("fused", **functions, most_rows=triton_kernels.MAX_ROWS if several else 1)
