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
from weakref import finalize

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.batch import Batch, Chosen, Token
from llama.fast.fingerprint import Described
from llama.fast.graph_ops import PYTORCH, Compiled, GraphOps, step_on
from llama.fast.supported import Unsupported, WarnOnce, caching_of, check_modules
from llama.generation import PlainStepper
from llama.kv_cache import Cache, StaticCache
from llama.model import Transformer, TransformerBlock
from llama.ops import UNCHANGED, _attend_in_step, last_real, without_cudnn
from llama.quant.layers import quantized_weights
from llama.request import Request
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
    model may make a longer table and drop this one. record: makes graphs. cache: static layers of (rows, slots); None
    while no step has needed it. The last slot belongs to no text. last: what the device was given last.
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
    cache: Cache | None = None
    graphs: dict[GraphKey, Replay] = field(default_factory=dict)
    last: torch.cuda.Event | None = None

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def slots(self) -> int:
        return self.tokens.shape[1]

    @property
    def keys_values(self) -> list[tuple[Tensor, Tensor]]:
        """The cache's buffers of every layer."""
        held = [] if self.cache is None else self.cache.layers
        return [(layer.keys, layer.values) for layer in held if layer.keys is not None and layer.values is not None]

    def take_cache(self, cache: Cache, *, like: Tensor) -> None:
        """Let an empty cache of static layers have room for all rows and slots, and be what graphs read and write."""
        for layer in cache.layers:
            assert isinstance(layer, StaticCache)
            layer.room(self.rows, self.slots, like=like)
        self.cache = cache

    def drop_cache(self) -> None:
        """Hold no cache, and none of the graphs that know one."""
        self.cache = None
        self.graphs = {key: graph for key, graph in self.graphs.items() if key.prefix is not None}

    def place(self, batch: Batch) -> None:
        """Stand where the batch stands. Rows that have left it stay anywhere, and go along."""
        mark_seen(batch)
        rows = torch.tensor(batch.rows, device="cpu").to(self.tokens.device)
        texts = batch.tokens([0] * len(batch.rows))
        self.tokens[rows, : texts.shape[1]] = texts
        self.positions[rows] = torch.tensor(batch.cur_pos, device="cpu").to(rows.device) - 1
        settings = batch.request.sampling.settings
        self.numbers.copy_(torch.tensor([x or 0.0 for x in settings], dtype=torch.float64, device="cpu"))
        if batch.sampler.seen is not None:
            self.seen[rows] = batch.sampler.seen

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


def mark_seen(batch: Batch) -> None:
    """Let the sampler know all tokens of the batch's rows, where it penalizes them."""
    if batch.sampler.seen is not None:
        for place, row in enumerate(batch.rows):
            batch.sampler.seen[place, batch.texts[row]] = True


class GraphRunner:
    """Has the buffers and graphs of a model's steps. `forwards` counts steps, and prompts that its layers run.

    One text at a time has the buffers; others meanwhile are left to the plain path.
    """

    exact: bool | None = None

    def __init__(
        self, ops: GraphOps = PYTORCH, layer: "RunLayer | None" = None, recorder: "type[Recorder] | None" = None
    ) -> None:
        self.ops, self.layer = ops, layer or run_layer
        self.takes_prompts = isinstance(self.layer, Compiled)
        self._recorder = recorder or Recorder
        self.name = self.code = self.named(1, None)
        self.forwards = 0
        self.watch: Callable[[int, int], None] | None = None
        self.prompting: GraphStepper | None = None  # the text whose prompt is under way
        self._buffers: DecodeBuffers | None = None
        self.in_use = Lock()  # held by the text that has the buffers
        self._described = Described(_describe)
        self._of: object = None  # the model, as it was described when the buffers were made
        self._retired = False
        self._warn = WarnOnce(logger)

    def __reduce__(self) -> tuple[type["GraphRunner"], tuple[Any, ...]]:
        return GraphRunner, (self.ops, self.layer, self._recorder)  # a copy has weights, and so graphs, of its own

    def __call__(
        self,
        model: Transformer,
        tokens: Tensor,
        rows: Rows,
        cache: Cache | None,
        *,
        logits: Literal["all", "last"],
    ) -> Tensor | None:
        """Run the prompt of the text that has the buffers; leave all other calls to the modules."""
        text = self.prompting
        return None if text is None or rows is not text.prompt else text.run_prompt(tokens, rows)

    def describe(self, model: Transformer) -> None:
        """Raise Unsupported where steps would ignore what the model is."""
        self._described.of(model)

    def stepper(self, model: Transformer, batch: Batch, cache: Cache | None) -> "GraphStepper | None":
        """Return what makes the tokens of a batch by graphs, or None where the plain path has to.

        It has to for a text that goes on with a cache, a caller that looks at every step, and a sampler of its own.
        """
        request = batch.request
        usual = cache is None and request.on_step is None and type(batch.sampler) is Sampler
        if self._retired or not usual or self._watched(model) or not self.in_use.acquire(blocking=False):
            return None
        made = None
        try:
            buffers = self.buffers_for(model, len(request.prompts), request.longest, _new_cache(model, request))
            made = GraphStepper(self, model, batch, buffers)
        except Unsupported as why:
            self._warn(why)
        except Exception as error:  # whatever a driver may raise
            self.give_up(error, len(request.prompts), request.longest)
        finally:
            if made is None:
                self.in_use.release()
        return made

    def _watched(self, model: Transformer) -> bool:
        return bool(model._forward_hooks or model._forward_pre_hooks) and self.watch is None

    def may_step(self, model: Transformer, buffers: DecodeBuffers, *, kv_caching: bool) -> bool:
        """Tell whether a text may go on with the buffers: none of its steps failed, and the model is what it was."""
        try:
            same = self._described.of(model) is self._of and caching_of(model) == kv_caching
            if not same or self._watched(model):
                raise Unsupported("the model was changed in the middle of a text")
        except Unsupported as why:
            self._warn(why)
            return False
        return self.has(buffers)

    def has(self, buffers: DecodeBuffers) -> bool:
        """Tell whether these are still the buffers: where a step failed, they are not."""
        return self._buffers is buffers

    def give_up(self, error: Exception, rows: int, length: int) -> None:
        """Leave all to the plain path, and say why: this time, where memory was short; else from now on."""
        self._buffers = None
        if short_of_memory(error):
            self._warn(f"graphs for {rows} rows of {length} positions do not fit into the GPU's memory")
        else:
            self._retired, self.name = True, "plain"
            self._warn(f"a step failed ({in_one_line(error)})")

    # ---- steps ------------------------------------------------------------------------------------------------------

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

    def named(self, rows: int, prefix: int | None) -> str:
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
        kept: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Feed prompts, (bsz, seqlen), from position 0 on; return the logits behind each, (bsz, 1, vocab).

        `kept` are the buffers of every layer's keys and values, which are written; none with the switch off. Lengths
        are rounded up as those of buffers are; what is fed beyond a row's end is overwritten before it is read.
        """
        bsz, seqlen = tokens.shape
        h = model.tok_embeddings(F.pad(tokens, (0, rounded_up(seqlen) - seqlen)))
        freqs_cis = first_angles(model.rope.up_to(h.shape[1], h.device), h.shape[1])
        with without_cudnn(h.device):
            for layer, block in enumerate(model.blocks):
                h, *made = self.layer(block, h, freqs_cis)
                for buffer, fed in zip(kept[layer], made, strict=True) if kept else ():
                    buffer[:bsz, : fed.shape[1]] = fed
        scores: Tensor = model.output(model.norm(last_real(h, lengths)))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    # ---- buffers ----------------------------------------------------------------------------------------------------

    def buffers_for(self, model: Transformer, rows: int, length: int, cache: Cache | None) -> DecodeBuffers:
        """Return buffers for so many rows and positions of this model. Raises Unsupported.

        `cache` is what they have keys and values in, unless there are some already; None: they need none, and off
        costs nothing.
        """
        buffers = self._fitting(model, rows, length)
        if cache is None:
            buffers.drop_cache()
        elif buffers.cache is None:
            buffers.take_cache(cache, like=model.norm.weight)
        return buffers

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


class GraphStepper(PlainStepper):
    """Makes the tokens of a batch by recorded steps; from where these cannot go on, by calls of the model.

    It has the runner's buffers, and their cache, until it ends. The device goes on with all rows that it began with:
    those that have ended only leave what is handed out, and the cache once calls go on with it.
    """

    model: Transformer

    def __init__(self, runner: GraphRunner, model: Transformer, batch: Batch, buffers: DecodeBuffers) -> None:
        super().__init__(model, batch, buffers.cache)
        self.prompt: Rows | None = None  # those of the prompt that is under way
        self._runner, self._buffers = runner, buffers
        self._end = finalize(self, runner.in_use.release)  # called once, and at the latest when this object is gone

    def prefill(self) -> Iterator[Token]:
        try:
            yield from super().prefill()
        except BaseException:
            self._end()
            raise

    def __iter__(self) -> Iterator[Chosen]:
        """Yield what each step chooses: a call, recorded steps, and from where these end calls again."""
        calls = super().__iter__()
        try:
            yield next(calls)
            yield from self._recorded()
            self._hand_over()
            yield from calls
        finally:
            self._end()

    # ---- prompts ----------------------------------------------------------------------------------------------------

    def _feed(self, fed: Tensor, rows: Rows, logits: Literal["all", "last"] = "last") -> Tensor:
        """Run the model on `fed`; where the runner takes prompts, it is asked by the model for what begins a text."""
        runner = self._runner
        if rows.start != 0 or logits != "last" or not (runner.takes_prompts and runner.has(self._buffers)):
            return super()._feed(fed, rows, logits)
        self.prompt, runner.prompting = rows, self
        try:
            return super()._feed(fed, rows, logits)
        finally:
            self.prompt = runner.prompting = None

    def run_prompt(self, tokens: Tensor, rows: Rows) -> Tensor | None:
        """Return the logits behind each prompt, (bsz, 1, vocab), or None where this fails and the modules have to."""
        try:
            scores = self._runner.prompt(self.model, tokens, rows.lengths, self._buffers.keys_values)
        except Exception as error:  # whatever a compiler or a driver may raise
            self._runner.give_up(error, *tokens.shape)
            return None
        self._runner.forwards += 1
        return scores

    # ---- steps ------------------------------------------------------------------------------------------------------

    def _recorded(self) -> Iterator[Chosen]:
        """Yield what all steps choose; from the first that candidates do not decide on, by the whole vocabulary."""
        if not self._may_step():
            return
        try:
            whole = must_sort(self.model.args.vocab_size, self.batch.request.sampling.top_k)
            yield from self._steps(whole=whole)
        except Unsure:
            yield from self._steps(whole=True)

    def _steps(self, *, whole: bool) -> Iterator[Chosen]:
        """Yield what further steps choose, each block once the next one is on its way."""
        batch = self.batch
        batch.drop_ended()
        self._buffers.place(batch)
        waiting = self._launch(0, whole=whole)
        while waiting is not None:
            following = self._launch(waiting.count, whole=whole)
            draws = waiting.draws if following is None else waiting.draws + following.draws
            for step, (ids, logprobs) in enumerate(waiting.read()):
                if len(batch.live) < len(batch.rows):
                    batch.drop_ended()
                chosen = Chosen([ids[row] for row in batch.rows], [logprobs[row] for row in batch.rows])
                if UNSURE in chosen.ids:
                    self._put_back(draws[step:])
                    raise Unsure
                self._take(chosen)
                yield chosen
                if not self._may_step():  # whoever took it may have changed the model
                    self._put_back(draws[step + 1 :])
                    return
            waiting = following

    def _launch(self, ahead: int, *, whole: bool) -> "StepBlock | None":
        """Let the device run steps behind those `ahead` that are on their way.

        None where none are left, and where it cannot, which is said: what is on its way comes to its end.
        """
        runner, buffers, batch, request = self._runner, self._buffers, self.batch, self.batch.request
        count = min(batch.left - ahead, SYNC_INTERVAL)
        if count == 0:
            return None
        block = StepBlock(count, buffers, logprobs=request.logprobs)
        chooses = tuple(number is not None for number in request.sampling.settings)
        for step in range(count):
            longest = min(max(batch.cur_pos) + ahead + step, request.longest)
            prefix = None if self.cache is not None else rounded_up(longest)
            if runner.watch is not None:  # what it raises is no failure of a step
                runner.watch(buffers.rows, 1 if prefix is None else longest)
            try:
                self._draw(block)
                runner.recorded(self.model, buffers, GraphKey(chooses, whole, request.logprobs, prefix))()
                block.note(step)
            except Exception as error:  # whatever a compiler, a capture or a driver may raise
                self._put_back(block.draws)
                runner.give_up(error, buffers.rows, buffers.slots)
                return None
        runner.forwards += count
        runner.name = runner.named(buffers.rows, prefix)
        block.send()
        buffers.last = block.event
        return block

    def _take(self, chosen: Chosen) -> None:
        """Let the batch have what a step chose."""
        batch = self.batch
        batch.fed += len(batch.rows) if self.cache is not None else sum(batch.cur_pos)
        batch.append(chosen.ids)
        self.logits = None  # they stay on the device

    def _draw(self, block: "StepBlock") -> None:
        """Let the next step have what its rows draw by chance."""
        draws = self.batch.sampler.draw()
        if draws is not None:
            block.draws.append(torch.zeros(self._buffers.rows, dtype=draws.dtype, device="cpu"))
            block.draws[-1][self.batch.rows] = draws
            self._buffers.draws.copy_(block.draws[-1], non_blocking=True)

    def _put_back(self, draws: Sequence[Tensor]) -> None:
        """Let what was drawn for steps that are not taken be drawn again."""
        self.batch.sampler.put_back([each[self.batch.rows] for each in draws])

    def _hand_over(self) -> None:
        """Leave the rows that are in the batch to calls of the model."""
        mark_seen(self.batch)
        if self.cache is not None:
            self.cache.select_rows(self.batch.rows)

    def _may_step(self) -> bool:
        return self._runner.may_step(self.model, self._buffers, kv_caching=self.cache is not None)


class StepBlock:
    """What some steps choose: noted on the device, sent to the host, read there."""

    def __init__(self, count: int, buffers: DecodeBuffers, *, logprobs: bool) -> None:
        self.count = count
        self._sources = [buffers.chosen, buffers.logprobs] if logprobs else [buffers.chosen]
        self._noted = [source.new_empty((count, buffers.rows)) for source in self._sources]
        self._sent: list[Tensor] = []
        self.draws: list[Tensor] = []  # what its steps used up of chance, (rows of the buffers,) each
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

    def read(self) -> Iterator[tuple[list[int], list[float | None]]]:
        """Yield the ids of each step, one for each row of the buffers, and their log-probabilities."""
        if self.event is not None:
            self.event.synchronize()  # host sync: one in SYNC_INTERVAL steps
        ids, *logprobs = (sent.tolist() for sent in self._sent)
        for step, row in enumerate(ids):
            yield row, logprobs[0][step] if logprobs else [None] * len(row)


def _describe(model: Transformer) -> object:
    """Return something new for every model that is another than before. Raises Unsupported."""
    check_modules(model)
    if quantized_weights(model):
        raise Unsupported("int8 weights are for a CPU so far")
    if any(name.endswith(("bias", "q_norm.weight", "k_norm.weight")) for name, _ in model.named_parameters()):
        raise Unsupported("biases, and norms of queries and keys, have no kernels for a GPU so far")
    return object()


def _new_cache(model: Transformer, request: Request) -> Cache | None:
    """Return an empty cache of the kind that is asked for; None with the switch off. Raises Unsupported."""
    if not caching_of(model):
        return None
    cache = model.new_cache(request.kv_cache)
    if any(type(layer) is not StaticCache for layer in cache.layers):
        raise Unsupported(f"kv_cache={cache.kind!r} has no fast step; these kinds have one: static")
    return cache


def cached(model: Transformer, buffers: DecodeBuffers, ops: GraphOps) -> Tensor:
    """Feed every row's newest token over the buffers' cache; return the last layer's vectors, (rows, dim)."""
    positions = buffers.positions
    h: Tensor = model.tok_embeddings(buffers.tokens.gather(1, positions[:, None])[:, 0])
    for block, (keys, values) in zip(model.blocks, buffers.keys_values, strict=True):
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
