"""Which kernels a GPU's steps are made of, and which layers its prompts go through: the quickest that are right.

Each way is compared with the modules on the device itself, recorded, replayed, and timed, when a model is loaded. What
torch.compile makes is compiled here, for rows and lengths that differ, and so not in the middle of a text. Knows ways;
how one is run is known to `llama.fast.graph_runner`.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from llama.fast.graph_runner import (
    DecodeBuffers,
    GraphKey,
    GraphRunner,
    RunLayer,
    cached,
    in_one_line,
    take_likeliest,
)
from llama.fast.supported import Unsupported
from llama.host.machine import wait_for
from llama.model import Transformer
from llama.ops import without_cudnn
from llama.sampling import Settings

logger = logging.getLogger(__name__)
Way = TypeVar("Way")

# How far kernels may be from the modules, of the largest logit: float32 adds up in another order, 16-bit numbers are
# rounded at other places.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# Rows and lengths of what is tried: alone and beside others, in buffers of two sizes.
SHAPES = ((1, 6), (1, 40), (2, 6))
PROMPT = 256  # tokens of a prompt that is timed
TRIES, STEPS = 3, 20  # the best of so many tries is taken, of so many steps each

GREEDY = GraphKey((False,) * len(Settings._fields), whole=False, logprobs=False, prefix=None)


def quickest(ways: Iterable[tuple[str, Way]], trial: Callable[[Way], float]) -> Way | None:
    """Return the way whose trial took the least time, or None where all of them failed; say of each how it went."""
    best: tuple[float, Way] | None = None
    for name, way in ways:
        try:
            seconds = trial(way)
        except Exception as why:  # whatever Triton, the compilers that it calls, a capture or a driver may raise
            logger.warning("fast: %s are not used: %s", name, why if isinstance(why, Unsupported) else in_one_line(why))
            continue
        logger.info("fast: %s take %.3f ms", name, 1e3 * seconds)
        if best is None or seconds < best[0]:
            best = seconds, way
    return None if best is None else best[1]


def try_steps(model: Transformer, runner: GraphRunner) -> float:
    """Return the seconds of a step at batch 1. Raises Unsupported where steps are not what the modules compute."""
    seconds = []
    model = model.with_kv_caching(True)
    for rows, length in _shapes(model, runner.ops.most_rows):
        with _filled(model, runner, rows, length) as (buffers, ids, expected):
            _place(buffers, ids)
            h = cached(model, buffers, runner.ops)
            logits, _, _ = runner.ops.head(h, model.norm.weight, model.norm.eps, model.output.weight)
            _compare(model, logits, expected, f"the {runner.ops.name} kernels' logits")
            _place(buffers, ids)
            wanted = []
            for _ in range(2):
                take_likeliest(model, buffers, runner.ops, cached(model, buffers, runner.ops))
                wanted.append([tensor.clone() for tensor in buffers.state()])
            _place(buffers, ids)
            replay = runner.recorded(model, buffers, GREEDY)
            for states in wanted:
                replay()
                if not all(map(torch.equal, buffers.state(), states)):
                    raise Unsupported(f"a recorded step of {runner.ops.name} kernels does not repeat what was recorded")
            if rows == 1:
                seconds.append(_timed(model, replay, STEPS) / STEPS)
    return min(seconds)


def try_prompts(model: Transformer, layer: RunLayer) -> float:
    """Return the seconds of a prompt. Raises Unsupported where it does not give the modules' logits, and cache."""
    runner, model = GraphRunner(layer=layer), model.with_kv_caching(True)
    for rows, length in (*_shapes(model, None), (1, PROMPT)):
        with _filled(model, runner, rows, min(length, model.args.max_seq_len)) as (buffers, ids, expected):
            run = partial(runner.prompt, model, ids, [ids.shape[1]] * rows, buffers.keys_values)
            run()
            behind = model(ids[:, -1:], ids.shape[1] - 1, cache=buffers.cache, logits="last")  # over what it left there
            _compare(model, behind[:, 0], expected, "logits behind a prompt")
            _compare(model, run()[:, 0], expected, "a prompt's logits")
            seconds = _timed(model, run)
    return seconds


def _shapes(model: Transformer, most_rows: int | None) -> list[tuple[int, int]]:
    """Return the shapes to try within the limits of the model and the kernels."""
    limits = [limit for limit in (model.args.max_batch_size, most_rows) if limit is not None]
    shapes = {(rows, min(length, model.args.max_seq_len)): None for rows, length in SHAPES}
    return [(rows, length) for rows, length in shapes if rows <= min(limits, default=rows)]


@contextmanager
def _filled(
    model: Transformer, runner: GraphRunner, rows: int, length: int
) -> Iterator[tuple[DecodeBuffers, Tensor, Tensor]]:
    """Let the modules of a model whose cache is on fill the runner's; yield its buffers, ids, and the logits behind."""
    ids = torch.arange(rows * length, device=model.device).view(rows, length) % model.args.vocab_size
    with torch.inference_mode(), without_cudnn(model.device):
        buffers = runner.buffers_for(model, rows, length, model.new_cache("static"))
        try:
            if length > 1:
                model(ids[:, :-1], 0, cache=buffers.cache, logits="last")
            yield buffers, ids, model(ids[:, -1:], length - 1, cache=buffers.cache, logits="last")[:, 0]
        finally:
            runner.drop()


def _place(buffers: DecodeBuffers, ids: Tensor) -> None:
    buffers.tokens.zero_()
    buffers.tokens[:, : ids.shape[1]] = ids
    buffers.positions.fill_(ids.shape[1] - 1)


def _compare(model: Transformer, ours: Tensor, theirs: Tensor, what: str) -> None:
    off = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    if not off <= TOLERANCE[model.dtype]:
        raise Unsupported(f"{what} are off by {off:.2g} of the largest here")


def _timed(model: Transformer, run: Callable[[], object], times: int = 1) -> float:
    """Return the seconds of so many calls, the quickest of some tries."""
    seconds = []
    for _ in range(TRIES):
        wait_for(model.device)
        began = time.perf_counter()
        for _ in range(times):
            run()
        wait_for(model.device)
        seconds.append(time.perf_counter() - began)
    return min(seconds)
