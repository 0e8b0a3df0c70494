"""Times the cached step alone on a GPU, with each set of kernels.

Whole generations, their memory and other engines are cells of the ordinary benchmark.
"""

import time
from functools import partial
from typing import TypedDict

import torch
from torch.utils.benchmark import Timer

from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.run.memory_ledger import check_memory
from llama.bench.run.models import find_model, random_model
from llama.bench.statistics import Spread, percentiles
from llama.costs import step_bytes
from llama.fast.choose import COMPILER
from llama.fast.graph_ops import PYTORCH, Compiled, GraphOps, compiled
from llama.fast.graph_runner import (
    DecodeBuffers,
    Recorder,
    Replay,
    RunLayer,
    cached,
    new_buffers,
    rounded_up,
    run_layer,
    take_likeliest,
)
from llama.host.machine import wait_for
from llama.model import Transformer

SECONDS = 1.5  # for which one row of the table is repeated


class StepRow(TypedDict):
    """The replayed step alone. `record_seconds`: compiling and recording; `bytes`: what a step must read."""

    seconds: Spread
    record_seconds: float
    bytes: int


def model_for(cell: Cell) -> Transformer:
    """Return a random model of the cell's sizes. Raises ValueError if it does not fit into memory."""
    source = find_model(cell)
    check_memory(cell, source.args, source.device, held=0)
    return uneven_model(source.args, source.dtype, source.device)


def uneven_model(args: ModelArgs, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Return a random model whose norms are not all ones, so that a kernel without its norm is found."""
    model = random_model(args, dtype=dtype, device=device)
    stream = torch.Generator(device).manual_seed(0)
    for weight in model.parameters():
        if weight.ndim == 1:
            weight.uniform_(0.5, 1.5, generator=stream)
    return model


def ways_of(model: Transformer) -> dict[str, GraphOps]:
    """Return the sets of kernels that a step can run here; a rehearsal on a CPU compiles nothing."""
    cuda = model.device.type == "cuda"
    return {"plain": PYTORCH, "compiled": compiled(COMPILER) if cuda else PYTORCH._replace(name="compiled")}


def layer_for(device: torch.device) -> RunLayer:
    """Return the function that runs a layer of a prompt, compiled on a GPU."""
    return Compiled(run_layer, COMPILER) if device.type == "cuda" else run_layer


def filled_buffers(model: Transformer, rows: int, length: int, room: int = 0) -> DecodeBuffers:
    """Return rows with random keys and values, whose newest token is at length - 1."""
    stream = torch.Generator(model.device).manual_seed(1)
    buffers = new_buffers(model, rows, rounded_up(length + room + 1), Recorder(model.device))
    buffers.take_cache(model.new_cache("static"), like=model.norm.weight)
    for keys_values in buffers.keys_values:
        for kept in keys_values:
            kept.copy_(torch.randn(kept.shape, generator=stream, device=model.device))
    buffers.tokens.random_(model.args.vocab_size, generator=stream)
    buffers.positions.fill_(length - 1)
    return buffers


def one_step(model: Transformer, buffers: DecodeBuffers, ops: GraphOps) -> None:
    """Run the fast step with greedy sampling."""
    take_likeliest(model, buffers, ops, cached(model, buffers, ops))


def recorded(model: Transformer, cell: Cell, ops: GraphOps) -> tuple[DecodeBuffers, Replay]:
    """Return rows like the cell's after its prompt, and a replay of their next step."""
    buffers = filled_buffers(model, cell.batch_size, cell.input_len, cell.output_len)
    return buffers, buffers.recorded(partial(one_step, model, buffers, ops), buffers.slots - 1)


@torch.inference_mode()
def step_row(model: Transformer, cell: Cell, ops: GraphOps) -> StepRow:
    """Time replays of the cell's cached step, one after another over the contexts of its generation."""
    count = max(1, cell.output_len - 1)
    began = time.perf_counter()
    buffers, replay = recorded(model, cell, ops)
    wait_for(model.device)
    record_seconds = time.perf_counter() - began

    def replays() -> None:
        buffers.positions.fill_(cell.input_len - 1)
        for _ in range(count):
            replay()
        wait_for(model.device)  # the timer waits for the current device, which may be another

    timer = Timer("replays()", globals={"replays": replays}, num_threads=torch.get_num_threads())
    taken = timer.blocked_autorange(min_run_time=SECONDS).times
    return {
        "seconds": percentiles([seconds / count for seconds in taken]),
        "record_seconds": record_seconds,
        "bytes": step_bytes(model.args, rows=cell.batch_size, context=cell.input_len, itemsize=cell.itemsize),
    }
