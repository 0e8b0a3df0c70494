"""The fast path of a GPU: whole steps, choosing included, recorded once as CUDA graphs and replayed without the host.

The host launches several steps, and reads their tokens while the next ones run. A step feeds each row's newest token,
or the whole prefix if the cache is off. Prompts are recorded too, padded to few widths. Larger calls, which take
the GPU longer than the host, run unrecorded. `llama.fast.graph_calls` computes the calls, and `llama.fast.graph_trial`
compares them with the modules. On a CPU, which has no graphs, the same calls run unrecorded.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from threading import Lock
from typing import Any, Literal
from weakref import finalize

import torch
from torch import Tensor

from llama.args import Refused
from llama.batch import Batch, Chosen, Token
from llama.fast.fingerprint import Descriptions
from llama.fast.graph_buffers import DecodeBuffers, GraphKey, Recorder, Replay, StepBlock, allocate, padded_width
from llama.fast.graph_calls import next_logits, prompt_logits
from llama.fast.graph_ops import PYTORCH, GraphOps, LayerWeights, if_finite, step_on
from llama.fast.supported import Unsupported, WarnOnce, caching_of, check_modules
from llama.generation import PlainStepper
from llama.kv_cache import Cache, StaticCache
from llama.model import RMSNorm, Transformer
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
    """The buffers and graphs of a model's steps and prompts. `forwards` counts both.

    ops: the functions of steps and prompts.
    in_use: acquired by the one text that uses the buffers; other texts have no recorded calls meanwhile. A single call
        also acquires `_in_call`: a text that begins waits for it.
    """

    exact: bool | None = None

    def __init__(self, ops: GraphOps = PYTORCH, recorder: type[Recorder] = Recorder) -> None:
        self.ops, self._recorder = ops, recorder
        self.name = self.code = f"CUDA graphs of {ops.name} kernels"
        self.plain_prompts = not ops.prompts
        self.forwards = 0
        self.watch: Callable[[Sequence[int]], None] | None = None
        self._sets: list[DecodeBuffers] = []  # the latest first
        self.in_use, self._in_call = Lock(), Lock()
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
        if (cache is None and self.plain_prompts) or not _is_static(cache):
            return "all"
        return "prompts" if self.plain_prompts else "none"

    # ---- prompts, and whole prefixes without a cache -----------------------------------------------------------------

    def __call__(
        self, model: Transformer, tokens: Tensor, rows: Rows, cache: Cache | None, *, logits: Literal["all", "last"]
    ) -> Tensor | None:
        """Return the logits of prompts; None for other calls, which the modules compute."""
        if self.plain_prompts or self._retired or rows.start is None or rows.width == 1:
            return None
        if not _is_static(cache):
            return None
        try:
            weights = self.describe(model)
            trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in model.parameters())
            if caching_of(model) != (cache is not None) or trained:
                return None  # the modules record gradients
            with current(model.device):
                made = self._replayed(model, weights, tokens, rows, cache) if logits == "last" else None
                if made is None and rows.start == 0:
                    made = prompt_logits(model, weights, self.ops, tokens, rows, cache, logits=logits)
        except Unsupported as why:
            self._warn(why)
            return None
        except Refused:
            raise
        except Exception as error:  # a compiler or a driver may raise anything; the modules feed the prompt again
            self.give_up(error, *tokens.shape)
            return None
        self.forwards += made is not None
        return made

    def _replayed(
        self, model: Transformer, weights: list[LayerWeights], tokens: Tensor, rows: Rows, cache: Cache | None
    ) -> Tensor | None:
        """Return the logits after each row by a recorded call, (bsz, 1, vocab); None if this call is not recorded."""
        with self._buffers_of(model, tokens, rows, cache) as buffers:
            if buffers is None or buffers.weights is not weights:
                return None
            width = padded_width(buffers.rows, rows.width, buffers.slots)
            if width is None or rows.starts[0] + width > buffers.slots:
                return None
            return self.prompt(model, buffers, tokens, rows, cache, width)[:, None]

    @contextmanager
    def _buffers_of(
        self, model: Transformer, tokens: Tensor, rows: Rows, cache: Cache | None
    ) -> Iterator[DecodeBuffers | None]:
        """Yield the buffers that the caller's text uses, or for one row any that no text uses; otherwise None."""
        own = next((one for one in self._sets if one.fed is tokens and (one.cache is None) == (cache is None)), None)
        width = None if own is not None or len(rows.starts) > 1 else padded_width(1, rows.width)
        if width is None:
            yield own
            return
        with self._in_call:
            if not self.in_use.acquire(blocking=False):  # a text began meanwhile
                yield None
                return
            try:
                empty = None if cache is None else model.new_cache(cache.kind)
                yield self.buffers_for(model, 1, rows.starts[0] + width, empty)
            finally:
                self.in_use.release()

    def prompt(
        self, model: Transformer, buffers: DecodeBuffers, tokens: Tensor, rows: Rows, cache: Cache | None, width: int
    ) -> Tensor:
        """Feed tokens, (bsz, at most `width`), by a recorded call; return the logits after each row, (bsz, vocab).

        cache: the one that is fed, which is copied into the buffers and back unless it is theirs.
        """
        copied, bsz, start = cache is not buffers.cache, len(rows.starts), rows.starts[0]
        if copied:
            _copy(cache, buffers.cache, bsz, 0, start)
        buffers.hold(tokens, start, rows.lengths)
        self.recorded(model, buffers, GraphKey(width))()
        if copied:
            assert cache is not None
            for own in cache.layers:
                own.prepare(rows, like=model.norm.weight)
            _copy(buffers.cache, cache, bsz, start, rows.end)
        buffers.mark()
        return buffers.logits.clone()

    # ---- steps -------------------------------------------------------------------------------------------------------

    def stepper(self, model: Transformer, batch: Batch, cache: Cache | None) -> "GraphStepper | None":
        """Return a stepper for the batch, or None if the plain path has to run it, for example for an `on_step`."""
        request = batch.request
        if self._retired or request.on_step is not None or self._watched(model):
            return None
        if request.schema is not None:
            logger.info("fast: CUDA graphs choose by no schema, so the plain path runs this batch")
            return None
        with self._in_call:
            if not self.in_use.acquire(blocking=False):
                return None
        rows, length = len(request.prompts), request.longest
        made: GraphStepper | None = None
        try:
            if not caching_of(model) and padded_width(rows, max(map(len, request.prompts))) is None:
                return None  # calls that are not recorded
            buffers = self.buffers_for(model, rows, length, self._new_cache(model, request, cache))
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
            same = self.describe(model) is buffers.weights and caching_of(model) == (buffers.cache is not None)
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
        """Return the call's graph; record it if there is none yet."""
        if key not in buffers.graphs:
            buffers.graphs[key] = buffers.recorded(self.step(model, buffers, key))
        return buffers.graphs[key]

    def step(self, model: Transformer, buffers: DecodeBuffers, key: GraphKey) -> Replay:
        """Return a function without arguments that runs one step on the buffers, or feeds one prompt."""
        ops = self.ops
        if key.chooses is None:
            return lambda: buffers.logits.copy_(next_logits(model, buffers, ops, key.width))
        numbers = zip(buffers.numbers.unbind(), key.chooses, strict=True)
        settings = Settings(*(number if there else None for number, there in numbers))
        greedy = settings.temperature is None and settings.penalty is None and not key.logprobs

        def step() -> None:
            logits = next_logits(model, buffers, ops, key.width)
            if greedy:
                ops.advance(logits, buffers.tokens, buffers.positions, buffers.chosen)
                return
            ids, sure = choose(logits, settings, buffers.seen, buffers.draws, whole=key.whole, nucleus=ops.nucleus)
            if key.logprobs:
                buffers.logprobs.copy_(logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0])
            ids = ids if sure is None else ids.where(sure, UNSURE)
            step_on(if_finite(logits, ids), buffers.tokens, buffers.positions, buffers.chosen)

        return step

    def _new_cache(self, model: Transformer, request: Request, given: Cache | None) -> Cache | None:
        """Return an empty cache for buffers; None with the switch off. Raises Unsupported unless it is static."""
        if not caching_of(model):
            if not self.ops.prompts:
                raise Unsupported("these kernels' steps need the KV cache")
            return None
        cache = model.new_cache(request.kv_cache) if given is None else given
        if not _is_static(cache):
            raise Unsupported(f"kv_cache={cache.kind!r} has no fast step; these kinds have one: static")
        return cache if given is None else model.new_cache(cache.kind)

    # ---- buffers ----------------------------------------------------------------------------------------------------

    def buffers_for(self, model: Transformer, rows: int, length: int, cache: Cache | None) -> DecodeBuffers:
        """Return buffers for `rows` rows of `length` positions: earlier ones if some fit, or new ones.

        cache: an empty one for new buffers; None with the switch off. Raises Unsupported.
        """

        def alike(buffers: DecodeBuffers) -> bool:
            return buffers.rows == rows and (buffers.cache is None) == (cache is None)

        weights, by_text = self.describe(model), self.ops.attention.by_text
        slots = max(LEAST_SLOTS, 1 << length.bit_length()) if by_text else -(-(length + 1) // LENGTH_STEP) * LENGTH_STEP
        most = math.inf if by_text else 2 * slots
        self._sets = [buffers for buffers in self._sets if buffers.weights is weights]
        fit = (buffers for buffers in self._sets if alike(buffers) and slots <= buffers.slots <= most)
        if (found := next(fit, None)) is None:
            kept = [buffers for buffers in self._sets if not alike(buffers)][: KEPT - 1]
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
            logger.info("fast: CUDA graphs verify no guesses, so nothing is guessed")
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
            if self.cache is not None:
                self.cache.select_rows(self._numbers)
            yield from calls
        finally:
            self._end()

    def _feed(self, fed: Tensor, rows: Rows, logits: Literal["all", "last"] = "last") -> Tensor:
        """Call the model. The runner knows by the tokens that the call may use this text's buffers."""
        self._buffers.fed = fed if len(rows.starts) == self._buffers.rows else None
        return super()._feed(fed, rows, logits)

    def _copy_cache(self) -> None:
        """Copy a given cache into the buffers, without the positions of the newest tokens.

        The cache of a single row is a session's, which may be read between two steps: `_launch` copies back to it. That
        of several rows is a copy for this batch, and is not used any more.
        """
        rows, filled = self._buffers.rows, self._buffers.cache
        if self.cache is not None and filled is not None and self.cache is not filled:
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
                batch.fed += len(batch.rows) if self.cache is not None else sum(batch.cur_pos)
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
        # A step without the cache takes long: none is computed in vain for the sake of fewer reads.
        count = min(batch.left - ahead, SYNC_INTERVAL if self.cache is not None else 1)
        keys = list[GraphKey]()
        while len(keys) < count and (key := self._key(ahead + len(keys), whole=whole)) is not None:
            keys.append(key)
        if not keys:
            return None
        block = StepBlock(len(keys), buffers, logprobs=request.logprobs)
        for step, key in enumerate(keys):
            if runner.watch is not None:  # outside of `try`: its errors are the caller's
                fed = [length + ahead + step for length in batch.cur_pos]
                runner.watch([1] * buffers.rows if key.width == 1 else fed)
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
            _copy(buffers.cache, self.cache, 1, begin, begin + block.count)
        runner.forwards += block.count
        block.send()
        return block

    def _key(self, ahead: int, *, whole: bool) -> GraphKey | None:
        """Return what the step behind the next `ahead` ones does; None if such steps are not recorded."""
        buffers, request = self._buffers, self.batch.request
        longest = max(self.batch.cur_pos) + ahead
        width = padded_width(buffers.rows, longest, buffers.slots) if self.cache is None else 1
        chooses = tuple(number is not None for number in request.sampling.settings)
        return None if width is None else GraphKey(width, chooses, whole, request.logprobs)

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


def _is_static(cache: Cache | None) -> bool:
    """Return True if graphs may use a cache: all layers are static, or there is none."""
    return cache is None or all(type(layer) is StaticCache for layer in cache.layers)


def _copy(source: Cache | None, target: Cache | None, rows: int, begin: int, end: int) -> None:
    """Copy the first rows of a static cache, from position `begin` up to `end`. Raises Unsupported if it has fewer."""
    assert source is not None
    assert target is not None
    for one, other in zip(source.layers, target.layers, strict=True):
        for name, tensor in one.held().items():
            if tensor.shape[1] < end:  # a caller may leave a gap before a call
                raise Unsupported("the cache has fewer positions than the call begins at")
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


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is PyTorch's current one, on which Triton launches kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _within_memory(sets: list[DecodeBuffers], device: torch.device) -> list[DecodeBuffers]:
    """Return the latest sets of buffers that together take at most KEPT_SHARE of a GPU's memory."""
    most = KEPT_SHARE * torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else math.inf
    totals = accumulate(buffers.nbytes for buffers in sets)
    return [buffers for buffers, total in zip(sets, totals, strict=True) if total <= most]


def short_of_memory(error: BaseException | None) -> bool:
    """Return True if the error, or one in its context, is out of memory: ending a capture may raise another error."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or short_of_memory(error.__context__))


def short_message(error: Exception) -> str:
    """Return the error as one line of at most 200 characters: compilers and drivers write pages."""
    if isinstance(error, Unsupported):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
