"""Which step runs a model where speed was asked for: native code on a CPU, CUDA graphs on a GPU, or the plain path.

`model.runner` is asked first, at every forward and at the head of every generation's steps, and answers None where the
plain path has to serve.
"""

import logging
from pathlib import Path

from llama.fast.graph_ops import PYTORCH
from llama.fast.graph_runner import GraphRunner, find_ops
from llama.fast.native_build import NoNativeCode
from llama.fast.native_check import check_blocks, check_library
from llama.fast.native_runner import NativeRunner
from llama.fast.supported import Unsupported
from llama.model import Transformer
from llama.packed import Format
from llama.quantize import quantized_weights

logger = logging.getLogger(__name__)


def make_fast(model: Transformer, folder: Path) -> None:
    """Let the best step that this machine has run the model, and say which; compiled code is kept in `folder`."""
    try:
        if model.device.type == "cuda":
            _use_graphs(model)
        else:
            _use_native_code(model, folder)
    except (NoNativeCode, Unsupported) as why:
        logger.warning("fast: %s; the plain path runs instead", why)


def _use_native_code(model: Transformer, folder: Path) -> None:
    step = NativeRunner(folder)
    described = step.describe(model)
    weights = quantized_weights(model).values()
    formats: set[Format | None] = {weight.format for weight in weights}
    formats |= {None} if described.sizes.mixed else set()
    check_library(folder, described.dtype, formats=frozenset(formats), activations=described.sizes.activations)
    check_blocks(folder, weights)
    model.runner = step
    logger.info("fast: native code for %s", step.instructions)


def _use_graphs(model: Transformer) -> None:
    step = GraphRunner(find_ops(model), backend="inductor")
    try:
        step.check(model)
    except Exception as why:  # whatever Triton, the compilers that it calls, or a driver may raise
        if step.ops == PYTORCH:
            raise
        logger.warning("fast: %s; PyTorch's own kernels run instead", why)
        step = GraphRunner(backend="inductor")
        step.check(model)
    model.runner = step
    logger.info("fast: %s", step.name)
