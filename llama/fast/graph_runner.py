"""The fast path of a GPU: whole steps, choosing included, recorded once as CUDA graphs and replayed without the host.

The host launches several steps, and reads their tokens while the next ones run. Prompts, and whole prefixes if the
cache is off, run without graphs, by fewer kernels than those of the modules. Both consist of the functions in
`llama.fast.graph_ops`, which `llama.fast.graph_trial` selects. On a CPU the same steps run unrecorded: this is how they
are tested without a GPU.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from threading import Lock
from typing import Any, Literal
from weakref import finalize

import torch
from torch import Tensor

from llama.args import Refused
from llama.batch import Batch, Chosen, Token
from llama.fast.fingerprint import Descriptions
from llama.fast.graph_buffers import DecodeBuffers, GraphKey, Recorder, Replay, StepBlock, allocate
from llama.fast.graph_ops import PYTORCH, GraphOps, LayerWeights, if_finite, prompt_layer, step_on
from llama.fast.supported import Unsupported, WarnOnce, caching_of, check_modules
from llama.generation import PlainStepper
from llama.kv_cache import Cache, StaticCache
from llama.model import RMSNorm, Transformer
from llama.ops import last_real
from llama.quant.layers import quantized_weights
from llama.request import Request
from llama.rows import Rows
from llama.sampling import Settings, choose, must_sort
from llama.stepper import Left

logger = logging.getLogger(__name__)

# Steps between two reads of the results: a stream lags by at most twice as many, and as many may be computed in vain.
SYNC_INTERVAL = 8
LENGTH_STEP = 32  # buffer lengths are multiples of it, so that texts of similar length share buffers
LEAST_SLOTS = 256  # if attention's time does not depend on the buffers, their lengths are powers of two from here on
KEPT, KEPT_SHARE = 3, 1 / 16  # sets of buffers that are kept, and their share of the device's memory

UNSURE = -2  # the id of a token that the candidates do not decide, see `choose`; -1: logits that are not finite


class GraphRunner:
    """The buffers and graphs of a model's steps, and its calls for prompts. `forwards` counts both.

    ops: the functions of steps and prompts.
    in_use: acquired by the one text that uses the buffers; other texts run on the plain path meanwhile.
    """

    exact: bool | None = None

    def __init__(self, ops: GraphOps = PYTORCH, recorder: type[Recorder] = Recorder) -> None:
        self.ops, self._recorder = ops, recorder
        self.name = self.code = f"CUDA graphs of {ops.name} kernels"
        self.plain_prompts = ops.prompts is None
        self.forwards = 0
        self.watch: Callable[[Sequence[int]], None] | None = None
        self._sets: list[DecodeBuffers] = []  # the latest first
        self.in_use = Lock()
        self._descriptions = Descriptions(_describe)
        self._retired = False
        self._warn = WarnOnce(logger)

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphRunner, (self.ops, self._recorder)  # a copied model has other weights and other graphs

    def describe(self, model: Transformer) -> list[LayerWeights]:
        """Return the model's layers: the same list until it changes.

        Raises Unsupported for a model whose modules compute something else.
        """
        return self._descriptions.of(model).description

    def left(self, model: Transformer, cache: Cache | None) -> Left:
        """Return the calls with such a cache, or without one, that the plain path runs."""
        if cache is not None and any(type(layer) is not StaticCache for layer in cache.layers):
            return "all"
        return "prompts" if self.plain_prompts else "none"

    # ---- prompts, and whole prefixes without a cache -----------------------------------------------------------------

    def __call__(
        self, model: Transformer, tokens: Tensor, rows: Rows, cache: Cache | None, *, logits: Literal["all", "last"]
    ) -> Tensor | None:
        """Return the logits of whole prompts; None for other calls, which the modules compute."""
        if self.plain_prompts or self._retired or rows.start != 0 or rows.width == 1:
            return None
        if cache is not None and any(type(layer) is not StaticCache for layer in cache.layers):
            return None
        try:
            weights = self.describe(model)
            trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in model.parameters())
            if caching_of(model) != (cache is not None) or trained:
                return None  # the modules record gradients
            with current(model.device):
                made = prompt_logits(model, weights, self.ops, tokens, rows, cache, logits=logits)
        except Unsupported as why:
            self._warn(why)
            return None
        except Refused:
            raise
        except Exception as error:  # a compiler or a driver may raise anything; the modules feed the prompt again
            self.give_up(error, *tokens.shape)
            return None
        self.forwards += 1
        return made

    # ---- steps -------------------------------------------------------------------------------------------------------

    def stepper(self, model: Transformer, batch: Batch, cache: Cache | None) -> "GraphStepper | None":
        """Return a stepper for the batch, or None if the plain path has to run it, for example for an `on_step`."""
        request = batch.request
        if self._retired or request.on_step is not None or self._watched(model):
            return None
        if request.schema is not None:
            logger.info("fast: CUDA graphs choose by no schema, so the plain path runs this batch")
            return None
        if not self.in_use.acquire(blocking=False):
            return None
        rows, length = len(request.prompts), request.longest
        made: GraphStepper | None = None
        try:
            buffers = self.buffers_for(model, rows, length, _new_cache(model, request, cache))
            if cache is not None and rows == 1:
                allocate(cache, 1, length, like=model.norm.weight)
            made = GraphStepper(self, model, batch, buffers, cache)
        except Unsupported as why:
            self._warn(why)
        except Exception as error:  # a driver may raise anything
            self.give_up(error, rows, length)
        finally:
            if made is None:
                self.in_use.release()
        return made

    def steady(self) -> None:
        """Return None: recorded steps have a fixed number of rows."""

    def _watched(self, model: Transformer) -> bool:
        return bool(model._forward_hooks or model._forward_pre_hooks) and self.watch is None

    def may_step(self, model: Transformer, buffers: DecodeBuffers) -> bool:
        """Return True if a text may continue with the buffers: no step failed, and the model is unchanged."""
        try:
            same = self.describe(model) is buffers.weights and caching_of(model)
            if not same or self._watched(model):
                raise Unsupported("the model was changed in the middle of a text")
        except Unsupported as why:
            self._warn(why)
            return False
        return buffers in self._sets

    def give_up(self, error: Exception, rows: int, length: int) -> None:
        """Log the error and run the plain path: for this text if memory ran out, otherwise from now on."""
        self.drop()
        if short_of_memory(error):
            self._warn(f"graphs for {rows} rows of {length} positions do not fit into the GPU's memory")
        else:
            self._retired, self.name, self.plain_prompts = True, "plain", False
            self._warn(f"a kernel failed ({short_message(error)})")

    def recorded(self, model: Transformer, buffers: DecodeBuffers, key: GraphKey) -> Replay:
        """Return the step's graph; record it if there is none yet."""
        if key not in buffers.graphs:
            buffers.graphs[key] = buffers.recorded(self.step(model, buffers, key))
        return buffers.graphs[key]

    def step(self, model: Transformer, buffers: DecodeBuffers, key: GraphKey) -> Replay:
        """Return a function without arguments that runs one step on the buffers."""
        ops = self.ops
        numbers = zip(buffers.numbers.unbind(), key.chooses, strict=True)
        settings = Settings(*(number if there else None for number, there in numbers))
        greedy = settings.temperature is None and settings.penalty is None and not key.logprobs

        def step() -> None:
            logits = next_logits(model, buffers, ops)
            if greedy:
                ops.advance(logits, buffers.tokens, buffers.positions, buffers.chosen)
                return
            ids, sure = choose(logits, settings, buffers.seen, buffers.draws, whole=key.whole)
            if key.logprobs:
                buffers.logprobs.copy_(logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0])
            ids = ids if sure is None else ids.where(sure, UNSURE)
            step_on(if_finite(logits, ids), buffers.tokens, buffers.positions, buffers.chosen)

        return step

    # ---- buffers ----------------------------------------------------------------------------------------------------

    def buffers_for(self, model: Transformer, rows: int, length: int, cache: Cache) -> DecodeBuffers:
        """Return buffers for `rows` rows of `length` positions: earlier ones if some fit, or new ones.

        cache: an empty one for new buffers. Raises Unsupported.
        """
        weights, by_text = self.describe(model), self.ops.attention.by_text
        slots = max(LEAST_SLOTS, 1 << length.bit_length()) if by_text else -(-(length + 1) // LENGTH_STEP) * LENGTH_STEP
        most = math.inf if by_text else 2 * slots
        self._sets = [buffers for buffers in self._sets if buffers.weights is weights]
        fit = (buffers for buffers in self._sets if buffers.rows == rows and slots <= buffers.slots <= most)
        if (found := next(fit, None)) is None:
            kept = [buffers for buffers in self._sets if buffers.rows != rows][: KEPT - 1]
            self._sets = kept = _within_memory(kept, model.device)  # frees the others before more is allocated
            try:
                found = DecodeBuffers(model, weights, rows, slots, cache, self._recorder(model.device))
            except torch.OutOfMemoryError:
                if not self._sets:
                    raise
                self._sets.clear()
                return self.buffers_for(model, rows, length, cache)
        if found.last is not None:  # an abandoned stream may still compute, perhaps on another stream of the device
            torch.cuda.current_stream(model.device).wait_event(found.last)
        self._sets = [found, *(buffers for buffers in self._sets if buffers is not found)]
        return found

    def drop(self) -> None:
        """Release all buffers and their graphs."""
        self._sets = []


class GraphStepper(PlainStepper):
    """Make the tokens of a batch by recorded steps, and by calls of the model once a step cannot be recorded.

    It uses the runner's buffers, and their cache, until it ends. The device computes all rows until then: rows that
    have ended are left out of the results, and of the cache once calls of the model continue.
    given: the cache of a text that is continued. The prompt is fed to it, and it is copied into the buffers: graphs are
    bound to addresses, and a recording takes as long as many steps.
    """

    model: Transformer

    def __init__(
        self, runner: GraphRunner, model: Transformer, batch: Batch, buffers: DecodeBuffers, given: Cache | None
    ) -> None:
        super().__init__(model, batch, given or buffers.cache)
        if self.width is not None:
            self.width = None
            logger.info("fast: CUDA graphs have no calls of several tokens a row, so nothing is guessed")
        self._runner, self._buffers = runner, buffers
        self._end = finalize(self, runner.in_use.release)  # called once, at the latest when this object is freed

    def prefill(self) -> Iterator[Token]:
        try:
            yield from super().prefill()
        except BaseException:
            self._end()
            raise

    def __iter__(self) -> Iterator[Chosen]:
        """Yield the tokens of each step: from the prompts' logits, then by recorded steps, then by calls again."""
        calls = super().__iter__()
        try:
            yield next(calls)
            self._copy_cache()
            yield from self._recorded(whole=must_sort(self.model.args.vocab_size, self.batch.request.sampling.top_k))
            assert self.cache is not None
            self.cache.select_rows(self._numbers)
            yield from calls
        finally:
            self._end()

    def _copy_cache(self) -> None:
        """Copy a given cache into the buffers, without the positions of the newest tokens.

        The cache of a single row is a session's, which may be read between two steps: `_launch` copies back to it. That
        of several rows is a copy for this batch, and is not used any more.
        """
        rows, filled = self._buffers.rows, self._buffers.cache
        assert self.cache is not None
        if self.cache is not filled:
            _copy(self.cache, filled, rows, 0, max(self.batch.cur_pos) - 1)
            if rows > 1:
                filled.source, filled.failed_at = self.cache.source, None
                self.cache = filled

    def _recorded(self, *, whole: bool) -> Iterator[Chosen]:
        """Yield the tokens of further steps, each block after the next one was launched.

        whole: whether they sort the whole vocabulary. If not, they do so from the first step on that the candidates do
        not decide.
        """
        batch = self.batch
        if not self._runner.may_step(self.model, self._buffers):
            return
        batch.drop_ended()
        self._buffers.place(batch)
        waiting = self._launch(0, whole=whole)
        while waiting is not None:
            following = self._launch(waiting.count, whole=whole)
            draws = waiting.draws if following is None else waiting.draws + following.draws
            for step, (ids, logprobs) in enumerate(waiting.read()):
                batch.drop_ended()
                chosen = Chosen([ids[row] for row in self._numbers], [logprobs[row] for row in self._numbers])
                if UNSURE in chosen.ids:
                    self._put_back(draws[step:])
                    yield from self._recorded(whole=True)
                    return
                batch.fed += len(batch.rows)
                self.logits = None  # they stay on the device
                yield chosen
                if not self._runner.may_step(self.model, self._buffers):  # the caller may have changed the model
                    self._put_back(draws[step + 1 :])
                    return
            waiting = following

    def _launch(self, ahead: int, *, whole: bool) -> "StepBlock | None":
        """Launch steps behind the `ahead` steps that were launched and not read yet.

        Return None if no steps are left, or if a step failed, which is logged; the steps before it still complete.
        """
        runner, buffers, batch, request = self._runner, self._buffers, self.batch, self.batch.request
        count = min(batch.left - ahead, SYNC_INTERVAL)
        if count <= 0:
            return None
        block = StepBlock(count, buffers, logprobs=request.logprobs)
        key = GraphKey(tuple(number is not None for number in request.sampling.settings), whole, request.logprobs)
        for step in range(count):
            if runner.watch is not None:  # outside of `try`: its errors are the caller's
                runner.watch([1] * buffers.rows)
            try:
                self._draw(block)
                runner.recorded(self.model, buffers, key)()
                block.note(step)
            except Exception as error:  # a compiler, a capture or a driver may raise anything
                self._put_back(block.draws)
                runner.give_up(error, buffers.rows, request.longest)
                return None
        if self.cache is not buffers.cache:
            begin = batch.cur_pos[0] - 1 + ahead
            _copy(buffers.cache, self.cache, 1, begin, begin + count)
        runner.forwards += count
        block.send()
        buffers.last = block.event
        return block

    def _draw(self, block: "StepBlock") -> None:
        """Draw the random numbers of the next step, and send them to the device."""
        draws = self.batch.draw()
        if draws is not None:
            block.draws.append(torch.zeros(self._buffers.rows, dtype=draws.dtype, device="cpu"))
            block.draws[-1][self._numbers] = draws
            self._buffers.draws.copy_(block.draws[-1], non_blocking=True)

    def _put_back(self, draws: Sequence[Tensor]) -> None:
        """Return the random numbers of steps that are discarded to the sampler."""
        self.batch.put_back([each[self._numbers] for each in draws])

    @property
    def _numbers(self) -> list[int]:
        """The places in the buffers of the rows in the batch."""
        return [row.number for row in self.batch.rows]


def _copy(source: Cache, target: Cache | None, rows: int, begin: int, end: int) -> None:
    """Copy the first rows of a static cache, from position `begin` up to `end`."""
    assert target is not None
    for one, other in zip(source.layers, target.layers, strict=True):
        for name, tensor in one.held().items():
            other.held()[name][:rows, begin:end] = tensor[:rows, begin:end]


def _describe(model: Transformer) -> list[LayerWeights]:
    """Return the weights of a model's layers. Raises Unsupported."""
    check_modules(model)
    if quantized_weights(model):
        raise Unsupported("quantised weights run on a CPU only")
    layers = []
    for block in model.blocks:
        eps = {name: module.eps for name, module in block.named_modules() if isinstance(module, RMSNorm)}
        layers.append(LayerWeights(dict(block.named_parameters(remove_duplicate=False)), eps))
    return layers


def _new_cache(model: Transformer, request: Request, given: Cache | None) -> Cache:
    """Return an empty cache for buffers. Raises Unsupported if the request's cache, or the given one, is not static."""
    if not caching_of(model):
        raise Unsupported("a GPU's fast step needs the KV cache")
    cache = model.new_cache(request.kv_cache) if given is None else given
    if any(type(layer) is not StaticCache for layer in cache.layers):
        raise Unsupported(f"kv_cache={cache.kind!r} has no fast step; these kinds have one: static")
    return cache if given is None else model.new_cache(cache.kind)


def next_logits(model: Transformer, buffers: DecodeBuffers, ops: GraphOps) -> Tensor:
    """Feed every row's newest token with the cache; return the logits, (rows, vocab)."""
    positions, attention = buffers.positions, ops.attention
    ids, cos_sin, prepared = ops.begin(attention.prepare, buffers.tokens, positions, *buffers.cos_sin)
    h: Tensor = model.tok_embeddings(ids)
    for weights, (keys, values) in zip(buffers.weights, buffers.keys_values, strict=True):
        h = ops.layer(attention.attend, ops.product, h, weights, cos_sin, prepared, positions, keys, values)
    return ops.head(h, model.norm.weight, model.norm.eps, model.output.weight)


def prompt_logits(
    model: Transformer,
    weights: list[LayerWeights],
    ops: GraphOps,
    tokens: Tensor,
    rows: Rows,
    cache: Cache | None,
    *,
    logits: Literal["all", "last"],
) -> Tensor:
    """Feed whole prompts, with a cache of static layers or without one; return the logits as the model does."""
    bsz, width = tokens.shape
    assert ops.prompts is not None
    shared, head_dim = shared_by_layers(model, bsz, width), model.args.head_dim
    h: Tensor = model.tok_embeddings(tokens.flatten())
    for number, layer in enumerate(weights):
        h, keys, values = prompt_layer(ops.prompts, head_dim, h, layer, *shared)
        if cache is not None:
            cache.layers[number].update(rows, *(made.view(bsz, width, *made.shape[1:]) for made in (keys, values)))
    if logits == "last":
        h = last_real(h.view(bsz, width, -1), rows.lengths).flatten(0, 1)
    scores: Tensor = ops.head(h, model.norm.weight, model.norm.eps, model.output.weight)
    return scores.view(bsz, -1, scores.shape[-1])


def shared_by_layers(model: Transformer, bsz: int, width: int) -> tuple[tuple[Tensor, Tensor], Tensor, int]:
    """Return the last arguments of `prompt_layer`, which all layers share."""
    cos, sin = (part[:width].repeat(bsz, 1, 1) for part in model.rope.up_to(width, model.device))
    ends = torch.arange(bsz + 1, dtype=torch.int32, device=model.device) * width
    return (cos, sin), ends, width


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is PyTorch's current one, on which Triton launches kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _within_memory(sets: list[DecodeBuffers], device: torch.device) -> list[DecodeBuffers]:
    """Return the latest sets of buffers that together take at most KEPT_SHARE of a GPU's memory."""
    most = KEPT_SHARE * torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else math.inf
    totals = accumulate(buffers.cache.nbytes for buffers in sets)
    return [buffers for buffers, total in zip(sets, totals, strict=True) if total <= most]


def short_of_memory(error: BaseException | None) -> bool:
    """Return True if the error, or one in its context, is out of memory: ending a capture may raise another error."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or short_of_memory(error.__context__))


def short_message(error: Exception) -> str:
    """Return the error as one line of at most 200 characters: compilers and drivers write pages."""
    if isinstance(error, Unsupported):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
