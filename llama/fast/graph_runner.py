"""The fast step of a GPU: whole steps, choosing included, recorded once as a CUDA graph and repeated without the host.

The host lets the device run some steps ahead, and looks at what they chose while the next ones run. With the cache, a
step is made of a set of kernels (`llama.fast.graph_ops`); without it, of layers over the whole prefix, whose length is
rounded up so that few graphs serve all. Prompts go through the same layers where these are compiled, else they are left
to the plain path. Which kernels and layers serve is decided by `llama.fast.graph_trial`. On a CPU the same steps run
unrecorded, which is how they are tested without a GPU.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.batch import Batch, Chosen
from llama.fast.fingerprint import Described
from llama.fast.graph_ops import PYTORCH, Compiled, GraphOps, step_on
from llama.fast.supported import Unsupported, WarnOnce, caching_of, check_modules
from llama.kv_cache import StaticCache
from llama.model import Transformer, TransformerBlock
from llama.ops import UNCHANGED, _attend_in_step, last_real, without_cudnn
from llama.quantize import quantized_weights
from llama.rope import apply_rotary_emb
from llama.rows import Rows
from llama.sampling import Sampler, Settings, choose_ahead, must_sort

logger = logging.getLogger(__name__)

SYNC_INTERVAL = (
    8  # steps between two looks at the outcome: how far a stream lags, and half of what may be computed in vain
)
LENGTH_STEP = 32  # the length of buffers is a multiple of it, so that texts of nearly one length share them
MAX_GRAPHS = 16  # for one set of buffers

UNSURE = -2  # stands for a token that candidates do not decide, as -1 does for logits that are not finite

Replay = Callable[[], object]


class GraphKey(NamedTuple):
    """What a recorded step does; by which numbers it chooses, it reads anew each time."""

    chooses: tuple[bool, ...]  # which of the Settings there are
    whole: bool  # whether the whole vocabulary is sorted
    logprobs: bool
    prefix: int | None  # how many positions are fed; None: the newest alone, over the cache


class Unsure(Exception):
    """Candidates did not decide a step, see `llama.sampling.choose_ahead`."""


@dataclass
class DecodeBuffers:
    """The rows of a generation as the device has them, at addresses that graphs rely on.

    tokens: (rows, slots), the texts. positions: (rows,), where each row's newest token stands. chosen, logprobs:
    (rows,), of the last step. draws: (rows,), numbers that sampling uses up. numbers: those of the Settings. seen:
    (rows, vocab), the tokens that each row has, where they are penalized. cos_sin: the first of what RopeTable has; the
    model may make a longer table and drop this one. record: makes graphs. cache: keys and values of every layer. The
    last slot belongs to no text. last: what the device was given last.
    """

    tokens: Tensor
    positions: Tensor
    chosen: Tensor
    logprobs: Tensor
    draws: Tensor
    numbers: Tensor
    seen: Tensor
    cos_sin: tuple[Tensor, Tensor]
    record: "Recorder"
    cache: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    graphs: dict[GraphKey, Replay] = field(default_factory=dict)
    last: torch.cuda.Event | None = None

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def slots(self) -> int:
        return self.tokens.shape[1]

    def place(self, batch: Batch, made: Sequence[Sequence[int]]) -> None:
        """Stand where the batch stands behind the steps that were `made`; tokens of such steps are there already."""
        if not made:
            self.tokens[:, : batch.tokens.shape[1]] = batch.tokens
        self.positions.copy_((torch.tensor(batch.cur_pos) - 1 + len(made)).clamp(max=self.slots - 1))
        self.numbers.copy_(torch.tensor([x or 0.0 for x in batch.request.sampling.settings], dtype=torch.float64))
        if batch.sampler.seen is not None:
            self.seen.copy_(batch.sampler.seen)
            if made:
                self.seen.scatter_(1, torch.tensor(made, device=self.seen.device).T.clamp(min=0), True)

    def state(self) -> list[Tensor]:
        """What a step changes, but for the cache."""
        return [self.tokens, self.positions, self.chosen, self.logprobs, self.seen]

    def recorded(self, step: Replay, position: int) -> Replay:
        """Return a step's replay, recorded with all rows at `position`; what that changes of them is put back."""
        before = [tensor.clone() for tensor in self.state()]
        self.positions.fill_(position)
        with without_cudnn(self.tokens.device):
            replay = self.record(step)
        for tensor, was in zip(self.state(), before, strict=True):
            tensor.copy_(was)
        return replay


class GraphRunner:
    """Runs a generation's steps ahead of the loop. `forwards` counts them."""

    exact: bool | None = None

    def __init__(
        self, ops: GraphOps = PYTORCH, layer: "RunLayer | None" = None, recorder: "type[Recorder] | None" = None
    ) -> None:
        self.ops, self.layer = ops, layer or run_layer
        self.takes_prompts = isinstance(self.layer, Compiled)
        self._recorder = recorder or Recorder
        self.name = self.code = self._named(1, None)
        self.forwards = 0
        self.watch: Callable[[int, int], None] | None = None
        self._buffers: DecodeBuffers | None = None
        self._described = Described(_describe)
        self._of: object = None  # the model, as it was described when the buffers were made
        self._unlent: str | None = None  # why the running generation was not lent them
        self._retired = False
        self._warn = WarnOnce(logger)

    def __reduce__(self) -> tuple[type["GraphRunner"], tuple[Any, ...]]:
        return GraphRunner, (self.ops, self.layer, self._recorder)  # a copy has weights, and so graphs, of its own

    def __call__(
        self,
        model: Transformer,
        tokens: Tensor,
        rows: Rows,
        *,
        logits: Literal["all", "last"],
    ) -> Tensor | None:
        """Lend a generation's caches the buffers that graphs know, and run its prompt; leave others to the modules."""
        if self._retired or model.first_attention.cache.nbytes:
            return None
        try:
            self._unlent, cache = None, None
            if model.kv_caching:
                buffers = self.lend(model)
                if buffers is None or len(tokens) > buffers.rows or tokens.shape[1] >= buffers.slots:
                    return None  # no generation reserved so much
                cache = buffers.cache
            if not (self.takes_prompts and logits == "last" and model.generating and torch.is_inference_mode_enabled()):
                return None
            self._described.of(model)
            scores = self.prompt(model, tokens, rows.lengths, cache)
            self.forwards += 1
            return scores
        except Unsupported as why:  # said by `run_ahead`, where there is one
            self._unlent = str(why)
        except Exception as error:  # whatever a compiler or a driver may raise
            self._unlent = self._give_up(error, len(tokens), tokens.shape[1])
        return None

    def describe(self, model: Transformer) -> None:
        """Raise Unsupported where steps would ignore what the model is."""
        self._described.of(model)

    def run_ahead(self, model: Transformer, batch: Batch) -> Iterator[Chosen]:
        """Return what all further steps choose; see Generation.run_ahead."""
        if self._retired or batch.request.on_step is not None or batch.lasting or self._watched(model):
            return iter(())  # who wants to see every step, or its logits, has the loop take it
        if type(batch.sampler) is not Sampler:
            return iter(())  # and so has who chooses in a way of their own
        try:
            buffers = self.buffers_of(model, *batch.tokens.shape)
        except Unsupported as why:
            self._warn(why)
            return iter(())
        except Exception as error:  # as in a call
            self._give_up(error, *batch.tokens.shape)
            return iter(())
        return self._run(model, buffers, batch)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _run(self, model: Transformer, buffers: DecodeBuffers, batch: Batch) -> Iterator[Chosen]:
        """Yield what all steps choose; from the first that candidates do not decide on, by the whole vocabulary."""
        made: list[list[int]] = []
        left = batch.left
        try:
            whole = must_sort(model.args.vocab_size, batch.request.sampling.top_k)
            yield from self._steps(model, buffers, batch, made, left, whole=whole)
        except Unsure:
            yield from self._steps(model, buffers, batch, made, left, whole=True)

    def _steps(
        self,
        model: Transformer,
        buffers: DecodeBuffers,
        batch: Batch,
        made: list[list[int]],
        left: int,
        *,
        whole: bool,
    ) -> Iterator[Chosen]:
        """Yield what the steps behind those `made` choose, each block once the next one is on its way."""
        buffers.place(batch, made)
        waiting: StepBlock | None = None
        begun = len(made)
        while begun < left or waiting is not None:
            launched = None
            if begun < left:
                launched = self._launch(model, buffers, batch, begun, min(left - begun, SYNC_INTERVAL), whole=whole)
                begun = left if launched is None else begun + launched.count  # without it, the loop goes on
            unused = [] if launched is None else launched.draws
            for step, chosen in enumerate([] if waiting is None else waiting.read()):
                assert waiting is not None
                if UNSURE in chosen.ids:
                    batch.sampler.put_back([*waiting.draws[step:], *unused])
                    raise Unsure
                made.append(chosen.ids)
                yield chosen
                if not self._is_still(model, buffers):  # whoever took it may have changed the model
                    batch.sampler.put_back([*waiting.draws[step + 1 :], *unused])
                    return
            waiting = launched

    def _watched(self, model: Transformer) -> bool:
        return bool(model._forward_hooks or model._forward_pre_hooks) and self.watch is None

    def _is_still(self, model: Transformer, buffers: DecodeBuffers) -> bool:
        """Tell whether the model is still the one that the buffers are of; say where it is not, once."""
        try:
            if self._described.of(model) is not self._of or self._watched(model) or not _lent(model, buffers):
                raise Unsupported("the model was changed in the middle of a text")
        except Unsupported as why:
            self._warn(why)
            return False
        return True

    def _launch(
        self, model: Transformer, buffers: DecodeBuffers, batch: Batch, begun: int, count: int, *, whole: bool
    ) -> "StepBlock | None":
        """Let the device run `count` steps behind those `begun`; None, and that is said, where it cannot."""
        request = batch.request
        block = StepBlock(count, buffers, logprobs=request.logprobs)
        chooses = tuple(number is not None for number in request.sampling.settings)
        for step in range(count):
            longest = min(max(batch.cur_pos) + begun + step, request.longest)
            prefix = None if model.kv_caching else rounded_up(longest)
            if self.watch is not None:  # what it raises is no failure of a step
                self.watch(buffers.rows, 1 if prefix is None else longest)
            try:
                draws = batch.sampler.draw()
                if draws is not None:
                    block.draws.append(draws)
                    buffers.draws.copy_(draws, non_blocking=True)
                replay = self.recorded(model, buffers, GraphKey(chooses, whole, request.logprobs, prefix))
                replay()
                block.note(step)
            except Exception as error:  # whatever a compiler, a capture or a driver may raise
                batch.sampler.put_back(block.draws)
                self._give_up(error, buffers.rows, buffers.slots)
                return None
        self.forwards += count
        self.name = self._named(buffers.rows, prefix)
        block.send()
        buffers.last = block.event
        return block

    def _give_up(self, error: Exception, rows: int, length: int) -> str:
        """Leave all to the plain path: this time, where memory was short; else from now on. Say why, and return it."""
        self._buffers = None
        if short_of_memory(error):
            words = f"graphs for {rows} rows of {length} positions do not fit into the GPU's memory"
        else:
            self._retired, self.name = True, "plain"
            words = f"a step failed ({in_one_line(error)})"
        self._warn(words)
        return words

    def recorded(self, model: Transformer, buffers: DecodeBuffers, key: GraphKey) -> Replay:
        """Return the step as a graph, recorded the first time it is asked for."""
        if key not in buffers.graphs:
            if len(buffers.graphs) == MAX_GRAPHS:
                del buffers.graphs[next(iter(buffers.graphs))]
            if not buffers.graphs:
                buffers.record = self._recorder(model.device)  # a pool without graphs is not to be used again
            aside = (key.prefix or buffers.slots) - 1  # with a cache: where no row's keys stand
            buffers.graphs[key] = buffers.recorded(self._step(model, buffers, key), aside)
        return buffers.graphs[key]

    def _step(self, model: Transformer, buffers: DecodeBuffers, key: GraphKey) -> Replay:
        """Return a function of no arguments that takes one step, on the buffers alone."""
        ops = self._ops_for(buffers.rows)
        numbers = zip(buffers.numbers.unbind(), key.chooses, strict=True)
        settings = Settings(*(number if there else None for number, there in numbers))
        greedy = settings.temperature is None and settings.penalty is None and not key.logprobs

        def step() -> None:
            fed = key.prefix
            h = cached(model, buffers, ops) if fed is None else uncached(model, buffers, fed, self.layer)
            if greedy:
                take_likeliest(model, buffers, ops, h)
                return
            logits, best, _ = ops.head(h, model.norm.weight, model.norm.eps, model.output.weight)
            ids, sure = choose_ahead(logits, settings, buffers.seen, buffers.draws, whole=key.whole)
            if key.logprobs:
                buffers.logprobs.copy_(logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0])
            ids = ids if sure is None else ids.where(sure, UNSURE)
            step_on(ids.where(~best.isnan().any(-1), -1), buffers.tokens, buffers.positions, buffers.chosen)

        return step

    def _ops_for(self, rows: int) -> GraphOps:
        """Return the kernels, or PyTorch's own where there are more rows than they take."""
        if self.ops.most_rows is None or rows <= self.ops.most_rows:
            return self.ops
        return PYTORCH

    def _named(self, rows: int, prefix: int | None) -> str:
        """Return the name of what runs these rows."""
        if prefix is None:
            return f"CUDA graphs of {self._ops_for(rows).name} kernels"
        return f"CUDA graphs of {'compiled' if isinstance(self.layer, Compiled) else 'plain'} layers"

    # ---- prompts ----------------------------------------------------------------------------------------------------

    def prompt(
        self,
        model: Transformer,
        tokens: Tensor,
        lengths: Sequence[int],
        cache: Sequence[tuple[Tensor, Tensor]] | None,
    ) -> Tensor:
        """Feed prompts, (bsz, seqlen), to an empty cache, or none; return the logits behind each, (bsz, 1, vocab).

        Lengths are rounded up as those of buffers are; what is fed beyond a row's end is overwritten before it is read.
        """
        bsz, seqlen = tokens.shape
        h = model.tok_embeddings(F.pad(tokens, (0, rounded_up(seqlen) - seqlen)))
        freqs_cis = first_angles(model.rope.up_to(h.shape[1], h.device), h.shape[1])
        with without_cudnn(h.device):
            for layer, block in enumerate(model.blocks):
                h, *made = self.layer(block, h, freqs_cis)
                for buffer, fed in zip(cache[layer], made, strict=True) if cache is not None else ():
                    buffer[:bsz, : fed.shape[1]] = fed
        scores: Tensor = model.output(model.norm(last_real(h, lengths)))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    # ---- buffers ----------------------------------------------------------------------------------------------------

    def lend(self, model: Transformer) -> DecodeBuffers | None:
        """Give a generation's empty caches the runner's buffers, so that its prompt is written where graphs read.

        Returns these, or None where no generation reserved its caches. Raises Unsupported.
        """
        caches = [cache for cache in model.caches if type(cache) is StaticCache]
        rows, length = caches[0].reserved if caches else (0, 0)
        if length == 0 or len(caches) < len(model.caches):
            return None
        buffers = self._fitting(model, rows, length)
        if not buffers.cache:
            buffers.cache = [cache.room(rows, buffers.slots, like=model.norm.weight) for cache in caches]
        for cache, held in zip(caches, buffers.cache, strict=True):
            cache.adopt(*held)
        return buffers

    def buffers_of(self, model: Transformer, rows: int, length: int) -> DecodeBuffers:
        """Return the buffers of the running generation. Raises Unsupported where other code filled its cache."""
        if self._unlent is not None:
            raise Unsupported(self._unlent)
        buffers = self._fitting(model, rows, length)
        if not _lent(model, buffers):
            raise Unsupported("the cache was filled by other code")
        return buffers

    def free_cache(self) -> None:
        """Hold no cache: off costs nothing."""
        if self._buffers is not None and self._buffers.cache:
            self._buffers.cache.clear()
            self._buffers.graphs = {key: graph for key, graph in self._buffers.graphs.items() if key.prefix is not None}

    def _fitting(self, model: Transformer, rows: int, length: int) -> DecodeBuffers:
        """Return the buffers that are there, if they fit these rows, this length and this model; else new ones."""
        described = self._described.of(model)
        slots, buffers = rounded_up(length + 1), self._buffers
        if (
            buffers is None
            or buffers.rows != rows
            or not slots <= buffers.slots <= 2 * slots
            or self._of is not described
        ):
            buffers = self._buffers = None  # before another takes memory
            buffers = new_buffers(model, rows, slots, self._recorder(model.device))
        if buffers.last is not None:  # what an abandoned stream left under way, perhaps on another stream of the device
            torch.cuda.current_stream(model.device).wait_event(buffers.last)
        self._buffers, self._of = buffers, described
        return buffers

    def drop(self) -> None:
        """Hold no buffers and no graphs."""
        self._buffers = None


class StepBlock:
    """What some steps choose: noted on the device, sent to the host, read there."""

    def __init__(self, count: int, buffers: DecodeBuffers, *, logprobs: bool) -> None:
        self.count = count
        self._sources = [buffers.chosen, buffers.logprobs] if logprobs else [buffers.chosen]
        self._noted = [source.new_empty((count, buffers.rows)) for source in self._sources]
        self._sent: list[Tensor] = []
        self.draws: list[Tensor] = []  # what its steps used up of chance
        self.event: torch.cuda.Event | None = None  # when all of it was on the host

    def note(self, step: int) -> None:
        for noted, source in zip(self._noted, self._sources, strict=True):
            noted[step] = source

    def send(self) -> None:
        """Let what was noted be copied once it is there, without waiting."""
        for noted in self._noted:
            host = torch.empty(noted.shape, dtype=noted.dtype, pin_memory=noted.is_cuda)
            self._sent.append(host.copy_(noted, non_blocking=True))
        if self._noted[0].is_cuda:
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record(torch.cuda.current_stream(self._noted[0].device))

    def read(self) -> Iterator[Chosen]:
        if self.event is not None:
            self.event.synchronize()  # host sync: one in SYNC_INTERVAL steps
        ids, *logprobs = (sent.tolist() for sent in self._sent)
        for step, row in enumerate(ids):
            yield Chosen(row, logprobs[0][step] if logprobs else [None] * len(row))


def _describe(model: Transformer) -> object:
    """Return something new for every model that is another than before. Raises Unsupported."""
    check_modules(model, (StaticCache,))
    if quantized_weights(model):
        raise Unsupported("int8 weights are for a CPU so far")
    if any(name.endswith(("bias", "q_norm.weight", "k_norm.weight")) for name, _ in model.named_parameters()):
        raise Unsupported("biases, and norms of queries and keys, have no kernels for a GPU so far")
    return object()


def _lent(model: Transformer, buffers: DecodeBuffers) -> bool:
    """Tell whether the model's caches, where they are on, hold the very buffers. Raises Unsupported."""
    held = [id(held) for cache in model.caches for held in (cache.keys, cache.values)]
    on = caching_of([block.attention for block in model.blocks])
    return not on or held == [id(lent) for keys_values in buffers.cache for lent in keys_values]


def cached(model: Transformer, buffers: DecodeBuffers, ops: GraphOps) -> Tensor:
    """Feed every row's newest token over the buffers' cache; return the last layer's vectors, (rows, dim)."""
    positions = buffers.positions
    h: Tensor = model.tok_embeddings(buffers.tokens.gather(1, positions[:, None])[:, 0])
    for block, (keys, values) in zip(model.blocks, buffers.cache, strict=True):
        attention, mlp = block.attention, block.feed_forward
        norm, then = block.attention_norm, block.ffn_norm
        products = (attention.wq.weight, attention.wk.weight, attention.wv.weight)
        q = ops.qkv(h, norm.weight, norm.eps, *products, *buffers.cos_sin, positions, keys, values)
        h = ops.attend_project(q, keys, values, positions, attention.wo.weight, h)
        hidden = ops.gate(h, then.weight, then.eps, mlp.w1.weight, mlp.w3.weight)
        h = ops.project(hidden, mlp.w2.weight, h)
    return h


def uncached(model: Transformer, buffers: DecodeBuffers, prefix: int, layer: "RunLayer") -> Tensor:
    """Feed the first `prefix` tokens of every row; return the vectors of each one's newest, (rows, dim).

    What stands past it in the text is fed along, and no query sees it.
    """
    h = model.tok_embeddings(buffers.tokens[:, :prefix])
    freqs_cis = first_angles(buffers.cos_sin, prefix)
    for block in model.blocks:
        h, _, _ = layer(block, h, freqs_cis)
    positions = buffers.positions.clamp(max=prefix - 1)  # rows that have ended may stand anywhere
    newest: Tensor = h[torch.arange(buffers.rows, device=h.device), positions]
    return newest


def first_angles(cos_sin: tuple[Tensor, Tensor], length: int) -> tuple[Tensor, Tensor]:
    """Return those of the first positions, as layers take them, out of a RopeTable's."""
    cos, sin = cos_sin
    return cos[None, :length], sin[None, :length]


def take_likeliest(model: Transformer, buffers: DecodeBuffers, ops: GraphOps, h: Tensor) -> None:
    """Choose every row's likeliest next token, and step on."""
    _, best, at = ops.head(h, model.norm.weight, model.norm.eps, model.output.weight)
    ops.advance(best, at, buffers.tokens, buffers.positions, buffers.chosen)


RunLayer = Callable[[TransformerBlock, Tensor, tuple[Tensor, Tensor]], tuple[Tensor, Tensor, Tensor]]


def run_layer(block: TransformerBlock, h: Tensor, freqs_cis: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Run a layer over whole prefixes; return what comes out of it, and the keys and values that a cache would hold."""
    attention = block.attention
    normed = block.attention_norm(h)
    products = (attention.wq(normed), attention.wk(normed), attention.wv(normed))
    xq, xk, xv = (product.unflatten(-1, (-1, attention.head_dim)) for product in products)
    xq, xk = apply_rotary_emb(xq, xk, freqs_cis)
    # Without Rows, whose tuples would have a compiler make a graph for each number of rows.
    h = h + attention.wo(_attend_in_step(xq, xk, xv, 0, None, UNCHANGED).flatten(-2))
    return h + block.feed_forward(block.ffn_norm(h)), xk, xv


class Recorder:
    """Makes graphs of steps, all on one stream and out of one pool of memory: for they run one at a time.

    On a CPU, which has no graphs, the step itself is what is replayed.
    """

    _recording = Lock()  # a process may capture one graph at a time

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Replay) -> Replay:
        """Return the step's replay. It is run some times first: for what has to be compiled, chosen or allocated."""
        if self.device.type != "cuda":
            step()
            return step
        with self._recording, torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self.stream.wait_stream(current)
            try:
                with torch.cuda.stream(self.stream):  # also around the capture, which stays there if its end raises
                    for _ in range(2):
                        step()
                    return self._captured(step)
            finally:
                current.wait_stream(self.stream)  # for what was begun of a step that failed, too

    def _captured(self, step: Replay) -> Replay:
        # cuBLAS keeps a workspace for every stream. That of the runs is given back; the graph takes its own from its
        # pool, where it may stay, but no other code may go on to use it.
        _clear_workspaces()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: another thread, with another model, may allocate meanwhile
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                step()
        except BaseException:
            # Where a capture could not be ended, PyTorch's allocator of before https://github.com/pytorch/pytorch/pull/180395
            # would wait for its end, and refuse to give memory back.
            graph.reset()
            with suppress(RuntimeError):  # it was ended
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
            raise
        finally:
            _clear_workspaces()
        return graph.replay


def _clear_workspaces() -> None:
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def rounded_up(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def new_buffers(model: Transformer, rows: int, slots: int, record: Recorder) -> DecodeBuffers:
    device = model.device
    cos, sin = model.rope.up_to(slots, device)
    with torch.inference_mode(False):  # or it could not be written outside of inference mode
        return DecodeBuffers(
            tokens=torch.zeros((rows, slots), dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            chosen=torch.zeros(rows, dtype=torch.int64, device=device),
            logprobs=torch.zeros(rows, dtype=torch.float64, device=device),
            draws=torch.zeros(rows, dtype=torch.float64, device=device),
            numbers=torch.zeros(len(Settings._fields), dtype=torch.float64, device=device),
            seen=torch.zeros((rows, model.args.vocab_size), dtype=torch.bool, device=device),
            cos_sin=(cos[:slots], sin[:slots]),
            record=record,
        )


def short_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error began with memory: where it ends a capture, the capture's own end raises another one."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or short_of_memory(error.__context__))


def in_one_line(error: Exception) -> str:
    """Return what an error says, short: compilers and drivers write pages."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
