"""Select the functions of a GPU's steps and prompts: the fastest candidate that is right.

When a model is loaded, each candidate is compared with the modules on the device, recorded, replayed and timed. This
also compiles it for rows and lengths that vary, so that no text waits for a compiler later.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.fast.graph_buffers import LEAST_WIDTH, DecodeBuffers, GraphKey
from llama.fast.graph_ops import GraphOps, fresh, layer
from llama.fast.graph_runner import (
    GraphRunner,
    fed_tokens,
    next_layer,
    next_logits,
    prompt_logits,
    shared_by_prompts,
    short_message,
)
from llama.fast.supported import Unsupported
from llama.host.machine import wait_for
from llama.model import Transformer
from llama.ops import without_cudnn
from llama.rows import Rows
from llama.sampling import Settings

logger = logging.getLogger(__name__)

# How far kernels may be from the modules: float32 sums have another order, and 16-bit numbers are rounded in other
# places. Of a layer: the norm of the difference as a share of the norm of its output; layers of 24 numbers in bfloat16
# differ by 0.0104 on an H200, wide ones by less. Of the logits: the largest difference as a share of the largest logit;
# rounding adds up over the layers.
LAYER_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# Rows and lengths of steps. Flash attention divides long texts into parts. FEW and MANY rows are timed.
FEW, MANY = 1, 16
SHAPES = ((FEW, 6), (FEW, 600), (2, 1100), (MANY, 40))
PROMPT_SHAPES = ((1, 40), (2, 33))
MORE = 7  # tokens that follow a prompt
REPLAYS = 50  # that must be equal in all bits: a race between kernels shows in some of them only
TRIES, STEPS = 3, 20  # the fastest of TRIES counts, of STEPS steps each
FASTER = 1.03  # a candidate replaces an earlier one if it is so many times as fast; less is noise

GREEDY_KEY = GraphKey(1, (False,) * len(Settings._fields))

Seconds = dict[int, float]  # of a step with FEW rows, and with MANY if the model's limits allow


def fastest(candidates: Iterable[GraphOps], trial: Callable[[GraphOps], Seconds]) -> GraphOps | None:
    """Return the candidate whose steps take the least time; None if all trials failed. Log the outcome of each."""
    best, least = None, math.inf
    for ops in candidates:
        try:
            taken = trial(ops)
        except Exception as why:  # a compiler, a capture or a driver may raise anything
            logger.warning("fast: %s kernels are not used: %s", ops.name, short_message(why))
            continue
        for rows, seconds in taken.items():
            logger.info("fast: a step of %s kernels takes %.3f ms with %d rows", ops.name, 1e3 * seconds, rows)
        if FASTER * sum(taken.values()) < least:
            best, least = ops, sum(taken.values())
    return best


def try_steps(model: Transformer, runner: GraphRunner) -> Seconds:
    """Return the seconds of a step. Raises Unsupported if steps do not compute what the modules do."""
    model, args, taken = model.with_kv_caching(True), model.args, Seconds()
    shapes = [(rows, min(length, args.max_seq_len)) for rows, length in SHAPES if rows <= (args.max_batch_size or rows)]
    for rows, length in dict.fromkeys(shapes):
        with _filled(model, runner, rows, length) as (buffers, ids, expected):
            ops = runner.ops
            _check_layers(model, buffers, ops)
            _check_logits(model, ops, next_logits(model, buffers, ops), expected)
            replay = _check_recorded(model, runner, buffers, ids)
            _place(buffers, ids)
            _check_replays(model, buffers, ops)
            if rows in (FEW, MANY):
                taken[rows] = _timed(model, replay)
    return taken


def _check_layers(model: Transformer, buffers: DecodeBuffers, ops: GraphOps) -> None:
    """Raise Unsupported if a layer's output for the newest tokens is not that of its module, from the same input."""
    rows, positions = buffers.rows, buffers.positions
    start = int(positions[0])
    assert buffers.cache is not None
    ids, shared = fed_tokens(buffers, ops, 1)
    h = model.tok_embeddings(ids[:, 0])
    for number, (block, weights) in enumerate(zip(model.blocks, buffers.weights, strict=True)):
        h = _small(h)
        angles = model.rope.at([start] * rows, 1, model.device)
        wanted = block(h[:, None], Rows.at([start] * rows, [1] * rows), angles, buffers.cache.layers[number])[:, 0]
        made = next_layer(buffers, ops, number, h, weights, shared)
        _check_layer(ops, number, made, wanted)
        h = wanted


def _small(h: Tensor) -> Tensor:
    """Return each vector with a root mean square of 0.1: a layer adds more to it, and so shows in its own output."""
    return 0.1 * F.rms_norm(h, h.shape[-1:])


def _check_layer(ops: GraphOps, layer: int, made: Tensor, wanted: Tensor) -> None:
    off = ((made.double() - wanted.double()).norm() / wanted.double().norm()).item()
    if not off <= LAYER_TOLERANCE[wanted.dtype]:
        raise Unsupported(f"the output of layer {layer} by {ops.name} kernels is off by {off:.2g} of its norm")


def _check_logits(model: Transformer, ops: GraphOps, made: Tensor, wanted: Tensor) -> None:
    off = ((made - wanted).abs().max() / wanted.abs().max()).item()
    if not off <= TOLERANCE[model.dtype]:
        raise Unsupported(f"the {ops.name} kernels' logits are off by {off:.2g} of the largest here")


def _check_replays(model: Transformer, buffers: DecodeBuffers, ops: GraphOps) -> None:
    """Raise Unsupported unless all replays of a recorded step make the same logits, bit for bit."""
    logits = torch.empty_like(next_logits(model, buffers, ops))
    replay = buffers.recorded(lambda: logits.copy_(next_logits(model, buffers, ops)))
    replay()
    first = logits.clone()
    for number in range(1, REPLAYS):
        replay()
        if not torch.equal(logits, first):
            raise Unsupported(f"replay {number} of {ops.name} kernels makes other logits than the first")


def _check_recorded(
    model: Transformer, runner: GraphRunner, buffers: DecodeBuffers, ids: Tensor
) -> Callable[[], object]:
    """Return a recorded step. Raises Unsupported if two replays do not what two unrecorded steps do."""
    _place(buffers, ids)
    step, wanted = runner.step(model, buffers, GREEDY_KEY), []
    for _ in range(2):
        step()
        wanted.append([tensor.clone() for tensor in buffers.state()])
    _place(buffers, ids)
    replay = runner.recorded(model, buffers, GREEDY_KEY)
    for states in wanted:
        replay()
        if not all(map(torch.equal, buffers.state(), states)):
            raise Unsupported(f"a recorded step of {runner.ops.name} kernels does not repeat what was recorded")
    return replay


@contextmanager
def _filled(
    model: Transformer, runner: GraphRunner, rows: int, length: int
) -> Iterator[tuple[DecodeBuffers, Tensor, Tensor]]:
    """Yield the runner's buffers with ids in texts and cache, the ids, and the logits behind them by the modules.

    All slots of the cache behind the texts are NaN, which shows in the logits of a kernel that reads one.
    """
    ids = torch.arange(rows * length, device=model.device).view(rows, length) % model.args.vocab_size
    with torch.inference_mode(), without_cudnn(model.device):
        buffers = runner.buffers_for(model, rows, length, model.new_cache("static"))
        for tensor in chain.from_iterable(buffers.keys_values):
            tensor.fill_(torch.nan)
        try:
            if length > 1:
                model(ids[:, :-1], 0, cache=buffers.cache, logits="last")
            expected = model(ids[:, -1:], length - 1, cache=buffers.cache, logits="last")[:, 0]
            _place(buffers, ids)
            yield buffers, ids, expected
        finally:
            runner.drop()


def with_prompts(model: Transformer, ops: GraphOps) -> GraphOps:
    """Return the functions, which leave prompts to the plain path if their trial fails; that is logged."""
    if not ops.prompts:
        return ops
    try:
        try_prompts(model, ops)
    except Exception as why:  # a compiler or a driver may raise anything
        logger.warning("fast: prompts run on the plain path: %s", short_message(why))
        return ops._replace(prompts=False)
    return ops


def try_prompts(model: Transformer, ops: GraphOps) -> None:
    """Raise Unsupported if prompts are not computed as by the modules, with the cache and without."""
    args = model.args
    for bsz, width in PROMPT_SHAPES:
        if bsz > (args.max_batch_size or bsz) or width > args.max_seq_len:
            continue
        ids = torch.arange(bsz * width, device=model.device).view(bsz, width) % args.vocab_size
        rows = Rows.at([0] * bsz, [width - row for row in range(bsz)], width=width, prompt_ends=True)
        with torch.inference_mode(), without_cudnn(model.device):
            _check_prompt_layers(model.with_kv_caching(False), ops, ids, rows)
            for caching in (False, True):
                _check_prompts(model.with_kv_caching(caching), ops, ids, rows)


def _check_prompt_layers(model: Transformer, ops: GraphOps, ids: Tensor, rows: Rows) -> None:
    """Raise Unsupported if a layer's output for whole prompts is not that of its module, from the same input."""
    weights, shared = GraphRunner(ops).describe(model), shared_by_prompts(model, ops, *ids.shape)
    h = model.tok_embeddings(ids)
    for number, block in enumerate(model.blocks):
        h = _small(h)
        wanted = block(h, rows, model.rope.at(rows.starts, rows.width, model.device), None)
        made = layer(ops, h.flatten(0, 1), weights[number], shared, fresh)
        _check_layer(ops, number, made, wanted.flatten(0, 1))
        h = wanted


def _check_prompts(model: Transformer, ops: GraphOps, ids: Tensor, rows: Rows) -> None:
    """Raise Unsupported if logits after prompts, recorded or not, or after more tokens, are not those of the modules.

    All slots of the buffers' cache are NaN before, see `_filled`.
    """
    runner, bsz, start = GraphRunner(ops), len(ids), min(rows.lengths)
    own, other, third = (model.new_cache("static") if model.kv_caching else None for _ in range(3))
    made = prompt_logits(model, runner.describe(model), ops, ids, rows, own, logits="last")
    wanted = model(ids, rows, cache=other, logits="last")
    buffers = runner.buffers_for(model, bsz, rows.width + LEAST_WIDTH, third)
    for tensor in chain.from_iterable(buffers.keys_values):
        tensor.fill_(torch.nan)
    recorded = runner.prompt(model, buffers, ids, rows, third, LEAST_WIDTH)
    for logits in (made, recorded[:, None]):
        _check_logits(model, ops, logits, wanted)
    more = Rows.at([start] * bsz, [MORE] * bsz)
    if model.kv_caching and more.end <= model.args.max_seq_len:
        first, second = (model(ids[:, :MORE], more, cache=cache, logits="last") for cache in (own, other))
        recorded = runner.prompt(model, buffers, ids[:, :MORE], more, third, LEAST_WIDTH)
        for logits in (first, recorded[:, None]):
            _check_logits(model, ops, logits, second)


def _place(buffers: DecodeBuffers, ids: Tensor) -> None:
    buffers.tokens.zero_()
    buffers.tokens[:, : ids.shape[1]] = ids
    buffers.positions.fill_(ids.shape[1] - 1)


def _timed(model: Transformer, step: Callable[[], object]) -> float:
    """Return the seconds of a step, from the fastest of TRIES."""
    seconds = []
    for _ in range(TRIES):
        wait_for(model.device)
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        wait_for(model.device)
        seconds.append(time.perf_counter() - began)
    return min(seconds) / STEPS
