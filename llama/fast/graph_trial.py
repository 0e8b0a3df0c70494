"""Select the functions of a GPU's steps: the fastest candidate that is right.

When a model is loaded, each candidate is compared with the modules on the device, recorded, replayed and timed. This
also compiles it for rows and lengths that vary, so that no text waits for a compiler later.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from llama.fast.graph_ops import GraphOps
from llama.fast.graph_runner import DecodeBuffers, GraphKey, GraphRunner, next_logits, short_message
from llama.fast.supported import Unsupported
from llama.host.machine import wait_for
from llama.model import Transformer
from llama.ops import without_cudnn
from llama.sampling import Settings

logger = logging.getLogger(__name__)

# How far kernels may be from the modules, as a share of the largest logit: float32 sums have another order, and 16-bit
# numbers are rounded in other places.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
SHAPES = ((1, 6), (1, 40), (2, 6))  # rows and lengths: one row, two rows, and buffers of two sizes
TRIES, STEPS = 3, 20  # the fastest of TRIES counts, of STEPS steps each

GREEDY_KEY = GraphKey((False,) * len(Settings._fields), whole=False, logprobs=False)


def fastest(candidates: Iterable[GraphOps], trial: Callable[[GraphOps], float]) -> GraphOps | None:
    """Return the candidate whose trial took the least time, or None if all trials failed; log the outcome of each."""
    best: tuple[float, GraphOps] | None = None
    for ops in candidates:
        try:
            seconds = trial(ops)
        except Exception as why:  # a compiler, a capture or a driver may raise anything
            reason = why if isinstance(why, Unsupported) else short_message(why)
            logger.warning("fast: %s kernels are not used: %s", ops.name, reason)
            continue
        logger.info("fast: %s kernels take %.3f ms", ops.name, 1e3 * seconds)
        if best is None or seconds < best[0]:
            best = seconds, ops
    return None if best is None else best[1]


def try_steps(model: Transformer, runner: GraphRunner) -> float:
    """Return the seconds of a step at batch 1. Raises Unsupported if steps do not compute what the modules do."""
    seconds = []
    model, ops, args = model.with_kv_caching(True), runner.ops, model.args
    shapes = {(rows, min(length, args.max_seq_len)) for rows, length in SHAPES if rows <= (args.max_batch_size or rows)}
    for rows, length in sorted(shapes):
        with _filled(model, runner, rows, length) as (buffers, ids, expected):
            off = ((next_logits(model, buffers, ops) - expected).abs().max() / expected.abs().max()).item()
            if not off <= TOLERANCE[model.dtype]:
                raise Unsupported(f"the {ops.name} kernels' logits are off by {off:.2g} of the largest here")
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
                    raise Unsupported(f"a recorded step of {ops.name} kernels does not repeat what was recorded")
            if rows == 1:
                seconds.append(_timed(model, replay))
    return min(seconds)


@contextmanager
def _filled(
    model: Transformer, runner: GraphRunner, rows: int, length: int
) -> Iterator[tuple[DecodeBuffers, Tensor, Tensor]]:
    """Yield the runner's buffers with ids in texts and cache, the ids, and the logits behind them by the modules."""
    ids = torch.arange(rows * length, device=model.device).view(rows, length) % model.args.vocab_size
    with torch.inference_mode(), without_cudnn(model.device):
        buffers = runner.buffers_for(model, rows, length, model.new_cache("static"))
        try:
            if length > 1:
                model(ids[:, :-1], 0, cache=buffers.cache, logits="last")
            expected = model(ids[:, -1:], length - 1, cache=buffers.cache, logits="last")[:, 0]
            _place(buffers, ids)
            yield buffers, ids, expected
        finally:
            runner.drop()


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
