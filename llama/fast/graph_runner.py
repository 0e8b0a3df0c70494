"""The fast step of a GPU: whole steps, choosing included, recorded once as a CUDA graph and repeated without the host.

The host lets the device run some steps ahead, and looks at what they chose while the next ones run. With the cache, a
step is the few fused kernels of `llama.fast.triton_kernels`, or PyTorch's own (`llama.fast.graph_ops`); without it, the
plain modules over the whole prefix, whose length is rounded up so that few graphs serve all. Prompts are left to the
plain path. On a CPU the same steps run unrecorded, which is how they are tested without a GPU.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from llama.batch import Batch, Chosen
from llama.fast.fingerprint import Described
from llama.fast.graph_ops import PLAIN, StepOps, step_on
from llama.fast.supported import NotServed, Warnings, caching_of, check_modules
from llama.kv_cache import StaticCache
from llama.model import Transformer, TransformerBlock
from llama.quantize import int8_weights
from llama.request import Request
from llama.sampling import Sampler, Sampling, choose

logger = logging.getLogger(__name__)

AHEAD = 8  # steps between two looks at the outcome: how far a stream lags, and half of what may be computed in vain
SLOTS = 32  # a lane's length is a multiple of it, so that texts of nearly one length share a lane
KEPT = 16  # graphs of a lane

# How far fused kernels may be from the modules, of the largest logit: float32 adds up in another order, 16-bit numbers
# are rounded at other places.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}

Replay = Callable[[], object]


class Turns(NamedTuple):
    """cos and sin of the positions 0, 1, ..., each (positions, 1, head_dim)."""

    cos: Tensor
    sin: Tensor


class Kind(NamedTuple):
    """What a recorded step does."""

    sampling: Sampling
    logprobs: bool
    prefix: int | None  # how many positions are fed; None: the newest alone, over the cache


@dataclass
class Lane:
    """The rows of a generation as the device has them, at addresses that graphs rely on.

    tokens: (rows, slots), the texts. positions: (rows,), where each row's newest token stands. chosen, logprobs:
    (rows,), of the last step. draws: (rows,), numbers that sampling uses up. seen: (rows, vocab), the tokens that each
    row has, where they are penalized. turns: the model may make a longer table one day and drop this one. cache: keys
    and values of every layer. The last slot belongs to no text. last: what the device was given last. pool: where
    graphs have their memory, all the same, for they run one at a time.
    """

    tokens: Tensor
    positions: Tensor
    chosen: Tensor
    logprobs: Tensor
    draws: Tensor
    seen: Tensor
    turns: Turns
    cache: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    graphs: dict[Kind, Replay] = field(default_factory=dict)
    last: torch.cuda.Event | None = None
    pool: Any = None

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def slots(self) -> int:
        return self.tokens.shape[1]

    def state(self) -> list[Tensor]:
        """What a step changes, but for the cache."""
        return [self.tokens, self.positions, self.chosen, self.logprobs, self.seen]


class GraphRunner:
    """Runs a generation's steps ahead of the loop. `forwards` counts them."""

    takes_prompts = False

    def __init__(self, ops: StepOps = PLAIN, backend: str | Callable[..., Any] | None = None) -> None:
        self.ops, self.name = ops, f"CUDA graphs of {ops.name} kernels"
        self._backend = backend
        self._layer = run_layer if backend is None else compiled(backend)
        self.forwards = 0
        self.watch: Callable[[int, int], None] | None = None
        self._lane: Lane | None = None
        self._described = Described(_describe)
        self._of: object = None  # the model, as it was described when the lane was made
        self._warn = Warnings(logger)

    def __reduce__(self) -> tuple[type["GraphRunner"], tuple[Any, ...]]:
        return GraphRunner, (self.ops, self._backend)  # the copy of a model has weights, and so graphs, of its own

    def check(self, model: Transformer) -> None:
        """Raise NotServed where steps would pass by what the model is, or where the kernels do not give its logits."""
        self._described.of(model)
        if self.ops != PLAIN and (difference := self._difference(model)):
            raise NotServed(difference)

    def __call__(
        self,
        model: Transformer,
        tokens: Tensor,
        start_pos: int | Sequence[int],
        *,
        logits: Literal["all", "last"],
        lengths: Sequence[int] | None,
    ) -> Tensor | None:
        """Leave single forwards to the plain path; but lend a generation's caches the buffers that graphs know."""
        if model.kv_caching and model.first_attention.cache.nbytes == 0:
            with suppress(NotServed):  # `run_ahead` says it, where there is one
                self._lend(model)
        return None

    def run_ahead(self, model: Transformer, batch: Batch) -> Iterator[Chosen]:
        """Return what all further steps choose; see Generation.run_ahead."""
        if batch.request.on_step is not None or self._watched(model):
            return iter(())  # who wants to see every step has the loop take it
        try:
            lane = self._lane_of(model, *batch.tokens.shape)
        except NotServed as why:
            self._warn(why)
            return iter(())
        lane.tokens[:, : batch.tokens.shape[1]] = batch.tokens
        lane.positions.copy_(torch.tensor(batch.cur_pos) - 1)
        if batch.sampler.seen is not None:
            lane.seen.copy_(batch.sampler.seen)
        return self._run(model, lane, batch.request, batch.sampler, end=max(batch.cur_pos), left=batch.left)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _run(
        self, model: Transformer, lane: Lane, request: Request, sampler: Sampler, *, end: int, left: int
    ) -> Iterator[Chosen]:
        """Yield what `left` steps choose, each block once the next one is on its way."""
        waiting: Block | None = None
        while left > 0 or waiting is not None:
            count = min(left, AHEAD)
            launched = self._launch(model, lane, request, sampler, end=end, count=count) if count else None
            for step, chosen in enumerate([] if waiting is None else waiting.read(), start=1):
                yield chosen
                if waiting is not None and not self._is_still(model):  # whoever took it may have changed the model
                    sampler.put_back([*waiting.draws[step:], *([] if launched is None else launched.draws)])
                    return
            waiting, left, end = launched, left - count, end + count

    def _watched(self, model: Transformer) -> bool:
        return bool(model._forward_hooks or model._forward_pre_hooks) and self.watch is None

    def _is_still(self, model: Transformer) -> bool:
        """Tell whether the model is still the one that the lane is of; say where it is not, once."""
        try:
            if self._described.of(model) is not self._of or self._watched(model):
                raise NotServed("the model was changed in the middle of a text")
        except NotServed as why:
            self._warn(why)
            return False
        return True

    def _launch(
        self, model: Transformer, lane: Lane, request: Request, sampler: Sampler, *, end: int, count: int
    ) -> "Block":
        """Let the device run `count` steps, of which the first feeds the rows up to `end` at most."""
        block = Block(count, lane, logprobs=request.logprobs)
        for step in range(count):
            draws = sampler.draw()
            if draws is not None:
                lane.draws.copy_(draws, non_blocking=True)
                block.draws.append(draws)
            longest = min(end + step, request.longest)
            prefix = None if model.kv_caching else rounded_up(longest)
            replay = self._recorded(model, lane, Kind(request.sampling, request.logprobs, prefix))
            if self.watch is not None:
                self.watch(lane.rows, 1 if prefix is None else longest)
            replay()
            block.note(step)
            self.forwards += 1
        self.name = self._named(lane.rows, prefix)
        block.send()
        lane.last = block.event
        return block

    def _recorded(self, model: Transformer, lane: Lane, kind: Kind) -> Replay:
        """Return the step as a graph, recorded the first time it is asked for."""
        if kind not in lane.graphs:
            if len(lane.graphs) == KEPT:
                del lane.graphs[next(iter(lane.graphs))]
            step = self._step(model, lane, kind)
            before = [tensor.clone() for tensor in lane.state()]
            lane.positions.fill_((kind.prefix or lane.slots) - 1)  # with a cache: where nobody's keys stand
            if not lane.graphs and model.device.type == "cuda":
                lane.pool = torch.cuda.graph_pool_handle()  # one that has no graphs any more is not to be used again
            with self._in_words(lane.rows, lane.slots):
                lane.graphs[kind] = self._record(step, model.device, lane.pool)
            for tensor, was in zip(lane.state(), before, strict=True):
                tensor.copy_(was)
        return lane.graphs[kind]

    @contextmanager
    def _in_words(self, rows: int, slots: int) -> Iterator[None]:
        """Say what did not fit into memory, and hold nothing of it."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._lane = None
            raise MemoryError(
                f"the fast step of {rows} rows of {slots} positions does not fit into the GPU's memory; "
                "take fewer or shorter rows, or load the model without fast"
            ) from error

    def _record(self, step: Replay, device: torch.device, pool: object) -> Replay:
        try:
            return record(step, device, pool)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            logger.warning("fast: torch.compile failed (%s); layers run as they are", str(error).splitlines()[0])
            self._backend, self._layer = None, run_layer
            return record(step, device, pool)

    def _step(self, model: Transformer, lane: Lane, kind: Kind) -> Replay:
        """Return a function of no arguments that takes one step, on the lane alone."""
        ops = self._ops_for(lane.rows)
        sampling = kind.sampling
        greedy = sampling.temperature == 0 and sampling.repetition_penalty == 1 and not kind.logprobs
        penalized = sampling.repetition_penalty != 1

        def step() -> None:
            fed = kind.prefix
            h = cached(model, lane, ops) if fed is None else uncached(model, lane, fed, self._layer)
            if greedy:
                take_likeliest(model, lane, ops, h)
                return
            logits, best, _ = ops.head(h, model.norm.weight, model.norm.eps, model.output.weight)
            draws = None if sampling.temperature == 0 else lane.draws
            ids = choose(logits, sampling, lane.seen if penalized else None, draws)
            if kind.logprobs:
                lane.logprobs.copy_(logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0])
            step_on(ids.where(~best.isnan().any(-1), -1), lane.tokens, lane.positions, lane.chosen)

        return step

    def _ops_for(self, rows: int) -> StepOps:
        """Return the kernels, or PyTorch's own where there are more rows than they take."""
        if self.ops.most_rows is None or rows <= self.ops.most_rows:
            return self.ops
        return PLAIN

    def _named(self, rows: int, prefix: int | None) -> str:
        """Return in words what runs these rows."""
        if prefix is None:
            return f"CUDA graphs of {self._ops_for(rows).name} kernels"
        return f"CUDA graphs of {'plain' if self._backend is None else 'compiled'} layers"

    # ---- lanes ------------------------------------------------------------------------------------------------------

    def _lend(self, model: Transformer) -> None:
        """Give a generation's empty caches the lane's buffers, so that its prompt is written where graphs read."""
        caches = [cache for cache in model.caches if type(cache) is StaticCache]
        rows, length = caches[0].reserved if caches else (0, 0)
        if length == 0 or len(caches) < len(model.caches):
            return
        lane = self._fitting(model, rows, length)
        if not lane.cache:
            with self._in_words(rows, lane.slots):
                lane.cache = [cache.room(rows, lane.slots, like=model.norm.weight) for cache in caches]
        for cache, held in zip(caches, lane.cache, strict=True):
            cache.adopt(*held)

    def _lane_of(self, model: Transformer, rows: int, length: int) -> Lane:
        """Return the lane of the generation that runs. Raises NotServed where its cache is somebody else's."""
        lane = self._fitting(model, rows, length)
        if model.kv_caching and (not lane.cache or lane.cache[0][0] is not model.first_attention.cache.keys):
            raise NotServed("the cache was filled by somebody else")
        return lane

    def free_cache(self) -> None:
        """Hold no cache: off costs nothing."""
        if self._lane is not None and self._lane.cache:
            self._lane.cache.clear()
            self._lane.graphs = {kind: graph for kind, graph in self._lane.graphs.items() if kind.prefix is not None}

    def _fitting(self, model: Transformer, rows: int, length: int) -> Lane:
        """Return the lane that is there, if it has these rows, about this room, and this model; else a new one."""
        described = self._described.of(model)
        caching_of([block.attention for block in model.blocks])
        slots, lane = rounded_up(length + 1), self._lane
        if lane is None or lane.rows != rows or not slots <= lane.slots <= 2 * slots or self._of is not described:
            lane = self._lane = None  # before another takes memory
            with self._in_words(rows, slots):
                lane = new_lane(model, rows, slots)
        if lane.last is not None:  # what an abandoned stream left under way, perhaps on another stream of the device
            torch.cuda.current_stream(model.device).wait_event(lane.last)
        self._lane, self._of = lane, described
        return lane

    def _difference(self, model: Transformer) -> str | None:
        """Return in words how the kernels' logits differ from the modules' where they differ too far; else None."""
        length = min(6, model.args.max_seq_len)
        ids = torch.arange(2 * length, device=model.device).view(2, length) % model.args.vocab_size
        most = min(limit for limit in (2, model.args.max_batch_size, self.ops.most_rows) if limit is not None)
        for rows in range(1, most + 1):  # one row and several are computed in two ways
            with torch.inference_mode(), model.switched(kv_caching=True):
                model.reserve_cache(rows, length)
                self._lend(model)
                model(ids[:rows, :-1], 0, logits="last")
                plain = model(ids[:rows, -1:], length - 1, logits="last")[:, 0]
                lane = self._lane_of(model, rows, length)
                lane.tokens[:, :length] = ids[:rows]
                lane.positions.fill_(length - 1)
                h = cached(model, lane, self.ops)
                logits, _, _ = self.ops.head(h, model.norm.weight, model.norm.eps, model.output.weight)
                self._lane = None
            off = ((logits - plain).abs().max() / plain.abs().max()).item()
            if not off <= _TOLERANCE[model.norm.weight.dtype]:
                return f"the {self.ops.name} kernels' logits are off by {off:.2g} of the largest here"
        return None


class Block:
    """What some steps choose: noted on the device, sent to the host, read there."""

    def __init__(self, count: int, lane: Lane, *, logprobs: bool) -> None:
        self._sources = [lane.chosen, lane.logprobs] if logprobs else [lane.chosen]
        self._noted = [source.new_empty((count, lane.rows)) for source in self._sources]
        self._sent: list[Tensor] = []
        self.draws: list[Tensor] = []  # what its steps used up of chance
        self.event: torch.cuda.Event | None = None  # when all of it was on the host

    def note(self, step: int) -> None:
        for noted, source in zip(self._noted, self._sources, strict=True):
            noted[step] = source

    def send(self) -> None:
        """Let what was noted be copied once it is there; nobody waits."""
        for noted in self._noted:
            host = torch.empty(noted.shape, dtype=noted.dtype, pin_memory=noted.is_cuda)
            self._sent.append(host.copy_(noted, non_blocking=True))
        if self._noted[0].is_cuda:
            self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.event.record(torch.cuda.current_stream(self._noted[0].device))

    def read(self) -> Iterator[Chosen]:
        if self.event is not None:
            self.event.synchronize()  # host sync: one in AHEAD steps
        ids, *logprobs = (sent.tolist() for sent in self._sent)
        for step, row in enumerate(ids):
            yield Chosen(row, logprobs[0][step] if logprobs else [None] * len(row))


def _describe(model: Transformer) -> object:
    """Return something new for every model that is another than before. Raises NotServed."""
    check_modules(model)
    if int8_weights(model):
        raise NotServed("int8 weights are for a CPU so far")
    return object()


def cached(model: Transformer, lane: Lane, ops: StepOps) -> Tensor:
    """Feed every row's newest token over the lane's cache; return the last layer's vectors, (rows, dim)."""
    positions = lane.positions
    h: Tensor = model.tok_embeddings(lane.tokens.gather(1, positions[:, None])[:, 0])
    for block, (keys, values) in zip(model.blocks, lane.cache, strict=True):
        attention, mlp = block.attention, block.feed_forward
        norm, then = block.attention_norm, block.ffn_norm
        products = (attention.wq.weight, attention.wk.weight, attention.wv.weight)
        q = ops.qkv(h, norm.weight, norm.eps, *products, *lane.turns, positions, keys, values)
        h = ops.attend_project(q, keys, values, positions, attention.wo.weight, h)
        hidden = ops.gate(h, then.weight, then.eps, mlp.w1.weight, mlp.w3.weight)
        h = ops.project(hidden, mlp.w2.weight, h)
    return h


def uncached(model: Transformer, lane: Lane, prefix: int, layer: "RunLayer") -> Tensor:
    """Feed the first `prefix` tokens of every row; return the vectors of each one's newest, (rows, dim).

    What stands past it in the text is fed along and seen by nobody.
    """
    h = model.tok_embeddings(lane.tokens[:, :prefix])
    freqs_cis = lane.turns.cos[None, :prefix], lane.turns.sin[None, :prefix]
    for block in model.blocks:
        h = layer(block, h, freqs_cis)
    positions = lane.positions.clamp(max=prefix - 1)  # rows that have ended may stand anywhere
    newest: Tensor = h[torch.arange(lane.rows, device=h.device), positions]
    return newest


def take_likeliest(model: Transformer, lane: Lane, ops: StepOps, h: Tensor) -> None:
    """Choose every row's likeliest next token, and step on."""
    _, best, at = ops.head(h, model.norm.weight, model.norm.eps, model.output.weight)
    ops.advance(best, at, lane.tokens, lane.positions, lane.chosen)


RunLayer = Callable[[TransformerBlock, Tensor, tuple[Tensor, Tensor]], Tensor]


def run_layer(block: TransformerBlock, h: Tensor, freqs_cis: tuple[Tensor, Tensor]) -> Tensor:
    """Run a layer over a whole prefix."""
    out: Tensor = block(h, 0, freqs_cis)
    return out


def compiled(backend: str | Callable[..., Any]) -> RunLayer:
    """Return `run_layer` compiled, once for all layers and lengths: what it fuses are norms, turns and SiLU."""
    made: RunLayer = torch.compile(run_layer, backend=backend, dynamic=True, fullgraph=True)
    return made


def record(step: Replay, device: torch.device, pool: Any = None) -> Replay:
    """Return the step as a CUDA graph's replay; on a CPU, which has none, the step itself. It is run some times first.

    Whatever has to be compiled, chosen or allocated happens in those runs, which a graph could not record. What the
    graph needs in between comes out of `pool`, or out of one of its own.
    """
    if device.type != "cuda":
        step()
        return step
    with torch.cuda.device(device):
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(aside)
        # cuBLAS keeps a workspace for every stream. That of the runs is given back; the graph takes its own from its
        # pool, where it may stay, but nobody else may go on to use it.
        _clear_workspaces()
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread, with another model, may allocate meanwhile
        with torch.cuda.graph(graph, pool=pool, stream=aside, capture_error_mode="thread_local"):
            step()
        _clear_workspaces()
    return graph.replay


def _clear_workspaces() -> None:
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def rounded_up(length: int) -> int:
    return -(-length // SLOTS) * SLOTS


def new_lane(model: Transformer, rows: int, slots: int) -> Lane:
    device = model.device
    with torch.inference_mode(False):  # or nobody could write into it outside of inference mode
        return Lane(
            tokens=torch.zeros((rows, slots), dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            chosen=torch.zeros(rows, dtype=torch.int64, device=device),
            logprobs=torch.zeros(rows, dtype=torch.float64, device=device),
            draws=torch.zeros(rows, dtype=torch.float64, device=device),
            seen=torch.zeros((rows, model.args.vocab_size), dtype=torch.bool, device=device),
            turns=Turns(*model.rope.up_to(slots, device)),
        )


def find_ops(model: Transformer) -> StepOps:
    """Return the fused kernels where they serve this model's device and dtype, else PyTorch's own, which is said."""
    try:
        from llama.fast import triton_kernels
    except ModuleNotFoundError as missing:
        logger.warning("fast: %s is not installed, so PyTorch's own kernels run: pip install triton", missing.name)
        return PLAIN
    refusal = triton_kernels.refusal(1, model.norm.weight.dtype, model.device)
    if refusal is not None:
        logger.warning("fast: %s; PyTorch's own kernels run instead", refusal)
        return PLAIN
    several = triton_kernels.refusal(triton_kernels.MAX_ROWS, model.norm.weight.dtype, model.device) is None
    return StepOps(
        "fused",
        triton_kernels.qkv,
        triton_kernels.attend_project,
        triton_kernels.gate,
        triton_kernels.project,
        triton_kernels.head,
        triton_kernels.advance,
        most_rows=triton_kernels.MAX_ROWS if several else 1,
    )
