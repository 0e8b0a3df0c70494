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
from llama.fast.graph_ops import PYTORCH, GraphOps, step_on
from llama.fast.supported import Unsupported, WarnOnce, caching_of, check_modules
from llama.kv_cache import StaticCache
from llama.model import Transformer, TransformerBlock
from llama.quantize import quantized_weights
from llama.request import Request
from llama.sampling import Sampler, Sampling, choose

logger = logging.getLogger(__name__)

SYNC_INTERVAL = (
    8  # steps between two looks at the outcome: how far a stream lags, and half of what may be computed in vain
)
LENGTH_STEP = 32  # the length of buffers is a multiple of it, so that texts of nearly one length share them
MAX_GRAPHS = 16  # for one set of buffers

# How far fused kernels may be from the modules, of the largest logit: float32 adds up in another order, 16-bit numbers
# are rounded at other places.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}

Replay = Callable[[], object]


class GraphKey(NamedTuple):
    """What a recorded step does."""

    sampling: Sampling
    logprobs: bool
    prefix: int | None  # how many positions are fed; None: the newest alone, over the cache


@dataclass
class DecodeBuffers:
    """The rows of a generation as the device has them, at addresses that graphs rely on.

    tokens: (rows, slots), the texts. positions: (rows,), where each row's newest token stands. chosen, logprobs:
    (rows,), of the last step. draws: (rows,), numbers that sampling uses up. seen: (rows, vocab), the tokens that each
    row has, where they are penalized. cos_sin: as RopeTable has them; the model may make a longer table and drop this
    one. cache: keys and values of every layer. The last slot belongs to no text. last: what the device was given last.
    pool: where graphs have their memory, all the same, for they run one at a time.
    """

    tokens: Tensor
    positions: Tensor
    chosen: Tensor
    logprobs: Tensor
    draws: Tensor
    seen: Tensor
    cos_sin: tuple[Tensor, Tensor]
    cache: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    graphs: dict[GraphKey, Replay] = field(default_factory=dict)
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
    exact: bool | None = None

    def __init__(self, ops: GraphOps = PYTORCH, backend: str | Callable[..., Any] | None = None) -> None:
        self.ops, self.name = ops, f"CUDA graphs of {ops.name} kernels"
        self.code = self.name
        self._backend = backend
        self._layer = run_layer if backend is None else compiled(backend)
        self.forwards = 0
        self.watch: Callable[[int, int], None] | None = None
        self._buffers: DecodeBuffers | None = None
        self._described = Described(_describe)
        self._of: object = None  # the model, as it was described when the buffers were made
        self._warn = WarnOnce(logger)

    def __reduce__(self) -> tuple[type["GraphRunner"], tuple[Any, ...]]:
        return GraphRunner, (self.ops, self._backend)  # the copy of a model has weights, and so graphs, of its own

    def check(self, model: Transformer) -> None:
        """Raise Unsupported where steps would ignore what the model is, or where the kernels do not give its logits."""
        self._described.of(model)
        if self.ops != PYTORCH and (difference := self._difference(model)):
            raise Unsupported(difference)

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
            with suppress(Unsupported):  # `run_ahead` says it, where there is one
                self._lend(model)
        return None

    def run_ahead(self, model: Transformer, batch: Batch) -> Iterator[Chosen]:
        """Return what all further steps choose; see Generation.run_ahead."""
        if batch.request.on_step is not None or batch.lasting or self._watched(model):
            return iter(())  # who wants to see every step, or its logits, has the loop take it
        try:
            buffers = self._buffers_of(model, *batch.tokens.shape)
        except Unsupported as why:
            self._warn(why)
            return iter(())
        buffers.tokens[:, : batch.tokens.shape[1]] = batch.tokens
        buffers.positions.copy_(torch.tensor(batch.cur_pos) - 1)
        if batch.sampler.seen is not None:
            buffers.seen.copy_(batch.sampler.seen)
        return self._run(model, buffers, batch.request, batch.sampler, end=max(batch.cur_pos), left=batch.left)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _run(
        self, model: Transformer, buffers: DecodeBuffers, request: Request, sampler: Sampler, *, end: int, left: int
    ) -> Iterator[Chosen]:
        """Yield what `left` steps choose, each block once the next one is on its way."""
        waiting: StepBlock | None = None
        while left > 0 or waiting is not None:
            count = min(left, SYNC_INTERVAL)
            launched = self._launch(model, buffers, request, sampler, end=end, count=count) if count else None
            for step, chosen in enumerate([] if waiting is None else waiting.read(), start=1):
                yield chosen
                if waiting is not None and not self._is_still(model):  # whoever took it may have changed the model
                    sampler.put_back([*waiting.draws[step:], *([] if launched is None else launched.draws)])
                    return
            waiting, left, end = launched, left - count, end + count

    def _watched(self, model: Transformer) -> bool:
        return bool(model._forward_hooks or model._forward_pre_hooks) and self.watch is None

    def _is_still(self, model: Transformer) -> bool:
        """Tell whether the model is still the one that the buffers are of; say where it is not, once."""
        try:
            if self._described.of(model) is not self._of or self._watched(model):
                raise Unsupported("the model was changed in the middle of a text")
        except Unsupported as why:
            self._warn(why)
            return False
        return True

    def _launch(
        self, model: Transformer, buffers: DecodeBuffers, request: Request, sampler: Sampler, *, end: int, count: int
    ) -> "StepBlock":
        """Let the device run `count` steps, of which the first feeds the rows up to `end` at most."""
        block = StepBlock(count, buffers, logprobs=request.logprobs)
        for step in range(count):
            draws = sampler.draw()
            if draws is not None:
                buffers.draws.copy_(draws, non_blocking=True)
                block.draws.append(draws)
            longest = min(end + step, request.longest)
            prefix = None if model.kv_caching else rounded_up(longest)
            replay = self._recorded(model, buffers, GraphKey(request.sampling, request.logprobs, prefix))
            if self.watch is not None:
                self.watch(buffers.rows, 1 if prefix is None else longest)
            replay()
            block.note(step)
            self.forwards += 1
        self.name = self._named(buffers.rows, prefix)
        block.send()
        buffers.last = block.event
        return block

    def _recorded(self, model: Transformer, buffers: DecodeBuffers, key: GraphKey) -> Replay:
        """Return the step as a graph, recorded the first time it is asked for."""
        if key not in buffers.graphs:
            if len(buffers.graphs) == MAX_GRAPHS:
                del buffers.graphs[next(iter(buffers.graphs))]
            step = self._step(model, buffers, key)
            before = [tensor.clone() for tensor in buffers.state()]
            buffers.positions.fill_((key.prefix or buffers.slots) - 1)  # with a cache: where no row's keys stand
            if not buffers.graphs and model.device.type == "cuda":
                buffers.pool = torch.cuda.graph_pool_handle()  # one that has no graphs any more is not to be used again
            with self._explained(buffers.rows, buffers.slots):
                buffers.graphs[key] = self._record(step, model.device, buffers.pool)
            for tensor, was in zip(buffers.state(), before, strict=True):
                tensor.copy_(was)
        return buffers.graphs[key]

    @contextmanager
    def _explained(self, rows: int, slots: int) -> Iterator[None]:
        """Say what did not fit into memory, and hold nothing of it."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._buffers = None
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

    def _step(self, model: Transformer, buffers: DecodeBuffers, key: GraphKey) -> Replay:
        """Return a function of no arguments that takes one step, on the buffers alone."""
        ops = self._ops_for(buffers.rows)
        sampling = key.sampling
        greedy = sampling.temperature == 0 and sampling.repetition_penalty == 1 and not key.logprobs
        penalized = sampling.repetition_penalty != 1

        def step() -> None:
            fed = key.prefix
            h = cached(model, buffers, ops) if fed is None else uncached(model, buffers, fed, self._layer)
            if greedy:
                take_likeliest(model, buffers, ops, h)
                return
            logits, best, _ = ops.head(h, model.norm.weight, model.norm.eps, model.output.weight)
            draws = None if sampling.temperature == 0 else buffers.draws
            ids = choose(logits, sampling, buffers.seen if penalized else None, draws)
            if key.logprobs:
                buffers.logprobs.copy_(logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0])
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
        return f"CUDA graphs of {'plain' if self._backend is None else 'compiled'} layers"

    # ---- buffers ----------------------------------------------------------------------------------------------------

    def _lend(self, model: Transformer) -> None:
        """Give a generation's empty caches the runner's buffers, so that its prompt is written where graphs read."""
        caches = [cache for cache in model.caches if type(cache) is StaticCache]
        rows, length = caches[0].reserved if caches else (0, 0)
        if length == 0 or len(caches) < len(model.caches):
            return
        buffers = self._fitting(model, rows, length)
        if not buffers.cache:
            with self._explained(rows, buffers.slots):
                buffers.cache = [cache.room(rows, buffers.slots, like=model.norm.weight) for cache in caches]
        for cache, held in zip(caches, buffers.cache, strict=True):
            cache.adopt(*held)

    def _buffers_of(self, model: Transformer, rows: int, length: int) -> DecodeBuffers:
        """Return the buffers of the running generation. Raises Unsupported where other code filled its cache."""
        buffers = self._fitting(model, rows, length)
        if model.kv_caching and (not buffers.cache or buffers.cache[0][0] is not model.first_attention.cache.keys):
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
        caching_of([block.attention for block in model.blocks])
        slots, buffers = rounded_up(length + 1), self._buffers
        if (
            buffers is None
            or buffers.rows != rows
            or not slots <= buffers.slots <= 2 * slots
            or self._of is not described
        ):
            buffers = self._buffers = None  # before another takes memory
            with self._explained(rows, slots):
                buffers = new_buffers(model, rows, slots)
        if buffers.last is not None:  # what an abandoned stream left under way, perhaps on another stream of the device
            torch.cuda.current_stream(model.device).wait_event(buffers.last)
        self._buffers, self._of = buffers, described
        return buffers

    def _difference(self, model: Transformer) -> str | None:
        """Say how the kernels' logits differ from the modules' where they differ too far; else None."""
        length = min(6, model.args.max_seq_len)
        ids = torch.arange(2 * length, device=model.device).view(2, length) % model.args.vocab_size
        most = min(limit for limit in (2, model.args.max_batch_size, self.ops.most_rows) if limit is not None)
        for rows in range(1, most + 1):  # one row and several are computed in two ways
            with torch.inference_mode(), model.switched(kv_caching=True):
                model.reserve_cache(rows, length)
                self._lend(model)
                model(ids[:rows, :-1], 0, logits="last")
                plain = model(ids[:rows, -1:], length - 1, logits="last")[:, 0]
                buffers = self._buffers_of(model, rows, length)
                buffers.tokens[:, :length] = ids[:rows]
                buffers.positions.fill_(length - 1)
                h = cached(model, buffers, self.ops)
                logits, _, _ = self.ops.head(h, model.norm.weight, model.norm.eps, model.output.weight)
                self._buffers = None
            off = ((logits - plain).abs().max() / plain.abs().max()).item()
            if not off <= _TOLERANCE[model.norm.weight.dtype]:
                return f"the {self.ops.name} kernels' logits are off by {off:.2g} of the largest here"
        return None


class StepBlock:
    """What some steps choose: noted on the device, sent to the host, read there."""

    def __init__(self, count: int, buffers: DecodeBuffers, *, logprobs: bool) -> None:
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
    cos, sin = buffers.cos_sin
    freqs_cis = cos[None, :prefix], sin[None, :prefix]
    for block in model.blocks:
        h = layer(block, h, freqs_cis)
    positions = buffers.positions.clamp(max=prefix - 1)  # rows that have ended may stand anywhere
    newest: Tensor = h[torch.arange(buffers.rows, device=h.device), positions]
    return newest


def take_likeliest(model: Transformer, buffers: DecodeBuffers, ops: GraphOps, h: Tensor) -> None:
    """Choose every row's likeliest next token, and step on."""
    _, best, at = ops.head(h, model.norm.weight, model.norm.eps, model.output.weight)
    ops.advance(best, at, buffers.tokens, buffers.positions, buffers.chosen)


RunLayer = Callable[[TransformerBlock, Tensor, tuple[Tensor, Tensor]], Tensor]


def run_layer(block: TransformerBlock, h: Tensor, freqs_cis: tuple[Tensor, Tensor]) -> Tensor:
    """Run a layer over a whole prefix."""
    out: Tensor = block(h, 0, freqs_cis)
    return out


def compiled(backend: str | Callable[..., Any]) -> RunLayer:
    """Return `run_layer` compiled, once for all layers and lengths: what it fuses are norms, rotations and SiLU."""
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
        # pool, where it may stay, but no other code may go on to use it.
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
    return -(-length // LENGTH_STEP) * LENGTH_STEP


def new_buffers(model: Transformer, rows: int, slots: int) -> DecodeBuffers:
    device = model.device
    with torch.inference_mode(False):  # or it could not be written outside of inference mode
        return DecodeBuffers(
            tokens=torch.zeros((rows, slots), dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            chosen=torch.zeros(rows, dtype=torch.int64, device=device),
            logprobs=torch.zeros(rows, dtype=torch.float64, device=device),
            draws=torch.zeros(rows, dtype=torch.float64, device=device),
            seen=torch.zeros((rows, model.args.vocab_size), dtype=torch.bool, device=device),
            cos_sin=model.rope.up_to(slots, device),
        )


def find_ops(model: Transformer) -> GraphOps:
    """Return the fused kernels where they serve this model's device and dtype, else PyTorch's own, which is said."""
    try:
        from llama.fast import triton_kernels
    except ModuleNotFoundError as missing:
        logger.warning("fast: %s is not installed, so PyTorch's own kernels run: pip install triton", missing.name)
        return PYTORCH
    refusal = triton_kernels.refusal(1, model.norm.weight.dtype, model.device)
    if refusal is not None:
        logger.warning("fast: %s; PyTorch's own kernels run instead", refusal)
        return PYTORCH
    several = triton_kernels.refusal(triton_kernels.MAX_ROWS, model.norm.weight.dtype, model.device) is None
    return GraphOps(
        "fused",
        triton_kernels.qkv,
        triton_kernels.attend_project,
        triton_kernels.gate,
        triton_kernels.project,
        triton_kernels.head,
        triton_kernels.advance,
        most_rows=triton_kernels.MAX_ROWS if several else 1,
    )
