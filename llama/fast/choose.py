"""Choose the runner of a model with `fast`: native code on a CPU, CUDA graphs on a GPU, else the plain path."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from llama.fast.graph_ops import GraphOps, plain_ops
from llama.fast.graph_runner import GraphRunner, current, short_message
from llama.fast.graph_trial import try_steps, usable
from llama.fast.native_build import NoNativeCode
from llama.fast.native_caches import check_cache
from llama.fast.native_check import check_library
from llama.fast.native_runner import NativeRunner
from llama.fast.native_trial import plain_prompts
from llama.fast.supported import Unsupported
from llama.model import Transformer
from llama.quant.layers import quantized_weights
from llama.quant.packed import Format

logger = logging.getLogger(__name__)

LEAST = (8, 0)  # the compute capability from which on Triton's kernels compile; they have run on 9.0


def make_fast(model: Transformer, folder: Path, *, trial: bool = False, said: set[str] | None = None) -> None:
    """Set the fastest runner that this machine has for the model, and log which; `folder` stores the compiled code.

    trial: leave prompts to the plain path if it is faster at them than native code, see `native_trial`.
    said: reasons for the plain path that are not logged again; a new one is added.
    """
    try:
        if model.device.type == "cuda":
            with current(model.device):
                _use_graphs(model)
        else:
            _use_native_code(model, folder, trial=trial)
    except (NoNativeCode, Unsupported) as why:
        said = set() if said is None else said
        if str(why) not in said:
            logger.warning("fast: %s; the plain path runs instead", why)
        said.add(str(why))


def _use_native_code(model: Transformer, folder: Path, *, trial: bool) -> None:
    """Set the native runner. Raises NoNativeCode and Unsupported if it may not run this model on this machine."""
    runner = NativeRunner(folder)  # compiles the code
    native = runner.describe(model)  # checks modules (supported.py) and tensors; every call compares (fingerprint.py)
    check_cache(native, model.new_cache(), model.rope)
    formats: set[Format | None] = {weight.format for weight in quantized_weights(model).values()}
    formats |= {None} if native.mixed else set()
    check_library(folder, native.dtype, formats=frozenset(formats), activations=native.activations)  # its numbers
    if trial:
        runner.plain_prompts = plain_prompts(model, runner, folder)  # its speed
    model.runner = runner
    logger.debug("fast: native code for %s", runner.instructions)  # what runs is in `model.execution`
    if runner.plain_prompts:
        logger.info("fast: %s, because the plain path is faster at them here", model.execution)


def _use_graphs(model: Transformer) -> None:
    """Set a runner with the first kernels for this device that are right."""
    logger.info("fast: trying steps; the first time takes some seconds")
    for ops in candidates(model):
        try:
            try_steps(model, GraphRunner(ops))
        except Exception as why:  # a compiler, a capture or a driver may raise anything
            logger.warning("fast: %s kernels are not used: %s", ops.name, short_message(why))
            continue
        model.runner = GraphRunner(usable(model, ops))
        logger.info("fast: %s", model.execution)
        return
    raise Unsupported("no step works on this GPU")


def candidates(model: Transformer) -> Iterator[GraphOps]:
    """Yield the kernels that may serve on this device, the best ones first. Raises Unsupported."""
    layers = GraphRunner().describe(model)
    if model.device.type == "cuda" and torch.cuda.get_device_capability(model.device) >= LEAST:
        with suppress(ImportError):  # of Triton
            from llama.fast.graph_kernels import TRITON, serves

            if all(serves(layer, model.args.head_dim) for layer in layers):
                yield TRITON
    yield from plain_ops(model.device, model.dtype, model.args.head_dim)
