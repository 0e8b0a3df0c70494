"""Compare the functions of a GPU's steps and prompts with the modules, on the device, when a model is loaded.

Calls are also recorded and replayed. This compiles Triton's kernels, so that no text waits for a compiler later.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.fast.graph_buffers import LEAST_WIDTH, DecodeBuffers, GraphKey, Recorder
from llama.fast.graph_calls import fed_tokens, next_layer, next_logits, prompt_logits, shared_by_prompts
from llama.fast.graph_ops import GraphOps, fresh, layer
from llama.fast.graph_runner import GraphRunner, short_message
from llama.fast.supported import Unsupported
from llama.model import Transformer
from llama.ops import without_cudnn
from llama.rows import Rows
from llama.sampling import Settings, choose

logger = logging.getLogger(__name__)

# How far kernels may be from the modules: float32 sums have another order, and 16-bit numbers are rounded in other
# places. Of a layer: the norm of the difference as a share of the norm of its output; layers of 24 numbers in bfloat16
# differ by 0.0104 on an H200, wide ones by less. Of the logits: the largest difference as a share of the largest logit;
# rounding adds up over the layers.
LAYER_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
# Rows and lengths of steps. Attention divides long texts into parts.
SHAPES = ((1, 6), (1, 600), (2, 1100), (16, 40))
PROMPT_SHAPES = ((1, 40), (2, 33))
MORE = 7  # tokens that follow a prompt
DRAWS = 16
REPLAYS = 50  # that must be equal in all bits: a race between kernels shows in some of them only

GREEDY_KEY = GraphKey(1, (False,) * len(Settings._fields))


def try_steps(model: Transformer, runner: GraphRunner) -> None:
    """Raise Unsupported if steps do not compute what the modules do."""
    model, args = model.with_kv_caching(True), model.args
    shapes = [(rows, min(length, args.max_seq_len)) for rows, length in SHAPES if rows <= (args.max_batch_size or rows)]
    for rows, length in dict.fromkeys(shapes):
        with _filled(model, runner, rows, length) as (buffers, ids, expected):
            ops = runner.ops
            _check_layers(model, buffers, ops)
            _check_logits(model, ops, next_logits(model, buffers, ops), expected)
            _check_recorded(model, runner, buffers, ids)
            _place(buffers, ids)
            _check_replays(model, buffers, ops)


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


def _check_recorded(model: Transformer, runner: GraphRunner, buffers: DecodeBuffers, ids: Tensor) -> None:
    """Raise Unsupported if two replays of a recorded step do not what two unrecorded steps do."""
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


def usable(model: Transformer, ops: GraphOps) -> GraphOps:
    """Return the functions without those of prompts, or of the nucleus, if their trial fails; that is logged."""
    if ops.prompts and not _passes(try_prompts, model, ops, "prompts run on the plain path"):
        ops = ops._replace(prompts=False)
    if ops.nucleus is not None and not _passes(try_nucleus, model, ops, "the vocabulary is sorted"):
        ops = ops._replace(nucleus=None)
    return ops


def _passes(trial: Callable[[Transformer, GraphOps], None], model: Transformer, ops: GraphOps, otherwise: str) -> bool:
    """Return True if a trial passes; otherwise log what happens then, and why."""
    try:
        trial(model, ops)
    except Exception as why:  # a compiler or a driver may raise anything
        logger.warning("fast: %s: %s", otherwise, short_message(why))
        return False
    return True


def try_nucleus(model: Transformer, ops: GraphOps) -> None:
    """Raise Unsupported if a choice is not that of the sorted vocabulary, from flat logits and from peaked ones."""
    assert ops.nucleus is not None
    stream, size = torch.Generator("cpu").manual_seed(0), (DRAWS, model.args.vocab_size)
    draws = torch.rand(DRAWS, generator=stream, dtype=torch.float64, device="cpu").to(model.device)
    noise = torch.randn(size, generator=stream, dtype=torch.float32, device="cpu").to(model.device)
    # Side by side, as in the buffers: kernels are compiled for the alignment of an address.
    temperature, top_p = torch.tensor([0.7, 0.9], dtype=torch.float64, device=model.device).unbind()
    for logits in (0.1 * noise, 5 * noise):
        ids, sure = _replayed(model.device, ops.nucleus, logits, temperature, top_p, draws)
        wanted, _ = choose(logits, Settings(temperature, top_p, None, None, None), None, draws, whole=True)
        if not sure.all() or not torch.equal(ids, wanted):
            raise Unsupported(f"the choices of {ops.name} kernels are not those of a sort")


def _replayed(device: torch.device, function: Callable[..., tuple[Tensor, Tensor]], *given: Tensor) -> list[Tensor]:
    """Return the results of a function by a recording."""
    made: list[Tensor] = []

    def call() -> None:
        made[:] = function(*given)

    Recorder(device)(call)()
    return made


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
