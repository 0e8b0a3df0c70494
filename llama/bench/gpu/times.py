"""Times steps and whole jobs, reads their memory, and looks at one step kernel by kernel."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.gpu.rows import JobRow, KernelRow, NotHere, StepRow
from llama.bench.gpu.run import (
    WORDS,
    Run,
    cache_words,
    device_seconds,
    graph_pool_bytes,
    host_seconds,
    milliseconds,
    prompts_of,
    samples,
    settle,
    stepping,
    wait,
    workspace_bytes,
)
from llama.bench.run.memory import Peak, tensor_peak
from llama.bench.run.memory_ledger import make_ledger, predict, workspace
from llama.bench.schema import Line
from llama.bench.statistics import spread
from llama.costs import cache_bytes, peak_memory, step_bytes
from llama.fast.graph_ops import PYTORCH, GraphOps
from llama.fast.graph_runner import (
    DecodeBuffers,
    GraphRunner,
    Replay,
    cached,
    new_buffers,
    record,
    rounded_up,
    take_likeliest,
)
from llama.model import Transformer

REPLAYED = 3  # replays under the profiler, of which the last is read

Job = Callable[[list[list[int]], int, bool], object]  # prompts, new tokens, kv_caching


class Span(NamedTuple):
    """A kernel on the timeline, in microseconds."""

    name: str
    start: float
    end: float


@torch.inference_mode()
def bandwidth(run: Run) -> None:
    """Measure a copy, which the floors divide by, and a sum, which only reads and is a little faster."""
    source = torch.ones((2**31 if run.device.type == "cuda" else 2**24) // 4, device=run.device)
    target = torch.empty_like(source)
    for work in (partial(target.copy_, source), source.sum):
        work()
    copies = samples(run, partial(device_seconds, partial(target.copy_, source), run.device))
    sums = samples(run, partial(device_seconds, source.sum, run.device))
    run.report.copied = 2 * source.nbytes / statistics.median(copies)
    run.report.read = source.nbytes / statistics.median(sums)


def filled_buffers(model: Transformer, rows: int, length: int, room: int = 0) -> DecodeBuffers:
    """Return rows whose newest token stands at length - 1, over random keys and values."""
    stream = torch.Generator(model.device).manual_seed(1)
    buffers = new_buffers(model, rows, rounded_up(length + room + 1))
    size = (2, rows, buffers.slots, model.args.n_kv_heads, model.args.head_dim)
    for _ in model.blocks:
        drawn = torch.randn(size, generator=stream, device=model.device).to(model.norm.weight.dtype)
        buffers.cache.append((drawn[0].clone(), drawn[1].clone()))
    buffers.tokens.random_(model.args.vocab_size, generator=stream)
    buffers.positions.fill_(length - 1)
    return buffers


def one_step(model: Transformer, buffers: DecodeBuffers, ops: GraphOps) -> None:
    """Do what the fast step does where ids are chosen greedily."""
    take_likeliest(model, buffers, ops, cached(model, buffers, ops))


def recorded(run: Run, ops: GraphOps, rows: int) -> tuple[DecodeBuffers, Replay]:
    buffers = filled_buffers(run.model, rows, run.options.input_len, run.options.output_len)
    return buffers, record(partial(one_step, run.model, buffers, ops), run.device)


@torch.inference_mode()
def steps(run: Run) -> None:
    """Time replays of the cached step, one after another without the host, over the contexts of the job."""
    length, count = run.options.input_len, max(1, run.options.output_len - 1)
    for rows in run.options.batch_sizes:
        nbytes = step_bytes(run.args, rows=rows, context=length, itemsize=run.dtype.itemsize)
        floor = 1000 * nbytes / run.report.copied if run.report.copied else None
        for ops in dict.fromkeys((run.ops, PYTORCH)):
            if run.left <= 0:
                run.report.missing["steps"] = f"out of time at batch {rows}"
                return
            if ops.most_rows is not None and rows > ops.most_rows:
                continue
            began = time.perf_counter()
            buffers, replay = recorded(run, ops, rows)
            wait(run.device)
            took = time.perf_counter() - began

            def replays(buffers: DecodeBuffers = buffers, replay: Replay = replay) -> None:
                buffers.positions.fill_(length - 1)
                for _ in range(count):
                    replay()

            replays()
            values = samples(run, lambda work=replays: device_seconds(work, run.device) / count)  # type: ignore[misc]
            run.report.steps.append(StepRow(ops.name, rows, milliseconds(values), took, nbytes, floor))
            del buffers, replay, replays
            settle(run.device)


def jobs(run: Run) -> None:
    """Time whole generations of ours, with the cache and without, and read the memory of each."""
    workspace_bytes(run.device)  # those of earlier sections are given back, or they would count here
    for rows in run.options.batch_sizes:
        for kv_caching in (True, False):
            for way, make in run.ways().items():
                step = make()
                with stepping(run.model, step):
                    row = measured(run, way, rows, kv_caching, partial(continued, run.model))
                    if way == run.fast and row.milliseconds is not None:
                        run.report.ledgers[f"{way}, batch {rows}, {cache_words(kv_caching)}"] = ledger(run, row)
                del step
                settle(run.device)
                run.report.jobs.append(replace(row, workspace=workspace_bytes(run.device)))


def continued(model: Transformer, prompts: list[list[int]], count: int, kv_caching: bool) -> object:
    return model.generate_tokens(prompts, count, temperature=0.0, kv_caching=kv_caching)


def measured(run: Run, way: str, rows: int, kv_caching: bool, job: Job, note: str = "", needs: float = 0.0) -> JobRow:
    """Time a job of `rows` prompts and, with the cache, the same of one token; read the peak of its first two runs."""
    if run.left <= needs:
        return JobRow(way, rows, kv_caching, note="out of time")
    options, prompts = run.options, prompts_of(run.args, [run.options.input_len] * rows)
    whole, single = partial(job, prompts, options.output_len, kv_caching), partial(job, prompts, 1, kv_caching)
    settle(run.device)
    meter = Peak(run.device)
    meter.start()
    first = host_seconds(whole, run.device)
    whole()
    found, pool = meter.stop(), graph_pool_bytes(run.device)
    peak = found["peak_allocated_bytes"] if run.device.type == "cuda" else run.weights + tensor_peak(whole)
    long = samples(run, partial(host_seconds, whole, run.device))
    step = None
    if kv_caching and options.output_len > 1 and run.left > 0:
        single()
        short = statistics.median(samples(run, partial(host_seconds, single, run.device)))
        step = milliseconds([(seconds - short) / (options.output_len - 1) for seconds in long])
    floor = peak_memory(
        run.args, rows=rows, input_len=options.input_len, output_len=options.output_len, kv_caching=kv_caching,
        itemsize=run.dtype.itemsize,
    )  # fmt: skip
    sizes = {"peak": peak, "peak_floor": floor.total, "reserved": found["peak_reserved_bytes"], "graph_pool": pool}
    return JobRow(way, rows, kv_caching, milliseconds(long), step, 1000 * first, **sizes, note=note)


def ledger(run: Run, row: JobRow) -> list[Line]:
    """Return the predicted peak of a job of ours, line by line, beside what was measured."""
    options, model = run.options, run.model
    held = {"cache": 0, "logits": 0}

    def look(_: object, __: object, logits: Tensor) -> None:
        held["cache"] = max(held["cache"], sum(cache.nbytes for cache in model.caches))
        held["logits"] = max(held["logits"], logits.nbytes)

    hook = model.register_forward_hook(look)
    if isinstance(model.runner, GraphRunner):
        model.runner.watch = lambda *_: None  # told that somebody watches, it still runs ahead
    try:
        continued(model, prompts_of(run.args, [options.input_len] * row.rows), options.output_len, row.kv_caching)
    finally:
        hook.remove()
        if isinstance(model.runner, GraphRunner):
            model.runner.watch = None
    cell = Cell(
        batch_size=row.rows, input_len=options.input_len, output_len=options.output_len, kv_caching=row.kv_caching,
        model=options.model, device=str(run.device), dtype=WORDS[run.dtype], fast=model.runner is not None,
    )  # fmt: skip
    predicted = predict(run.args, cell, workspace=workspace(run.device))
    head = 0 if run.args.tied_head else model.output.weight.nbytes
    made = make_ledger(
        run.args, cell, predicted, weights=run.weights, head=head, cache=held["cache"], logits=held["logits"],
        peak=row.peak,
    )  # fmt: skip
    return made["lines"]


# ---- one step under the profiler -------------------------------------------------------------------------------------


@torch.inference_mode()
def profiled(run: Run) -> None:
    """Read the kernels of one replay of the fast step, at the smallest batch, and the gaps between them."""
    rows = min(run.options.batch_sizes)
    buffers, replay = recorded(run, run.ops, rows)
    buffers.positions.fill_(run.options.input_len - 1)
    cuda = run.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as prof:
        for _ in range(REPLAYED):
            replay()
            wait(run.device)
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in prof.events() or []
        if (event.device_type.name == "CUDA" if cuda else not event.cpu_children) and "Synchronize" not in event.name
    ]
    if len(spans) < REPLAYED:
        raise NotHere("the profiler saw no kernels")
    spans = sorted(spans, key=lambda span: span.start)[-(len(spans) // REPLAYED) :]
    nbytes = kernel_bytes(run.args, rows=rows, context=run.options.input_len, itemsize=run.dtype.itemsize)
    run.report.kernels = kernel_rows(spans, nbytes)
    gaps = [max(0.0, later.start - earlier.end) for earlier, later in pairwise(spans)]
    run.report.gap_sum, run.report.gaps = sum(gaps), spread(gaps) if gaps else None


def kernel_bytes(args: ModelArgs, *, rows: int, context: int, itemsize: int) -> dict[str, int]:
    """Return what the fused kernels of one step must read, all layers together: weights, and keys and values."""
    queries, shared = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    numbers = {
        "_qkv": args.n_layers * args.dim * (1 + queries + 2 * shared),  # the norm's weight, wq, wk, wv
        "_combine": args.n_layers * args.dim * queries,
        "_gate": args.n_layers * args.dim * (1 + 2 * args.ffn_dim),
        "_project": args.n_layers * args.dim * args.ffn_dim,
        "_head": args.dim * (1 + args.vocab_size),
    }
    sizes = {name: count * itemsize for name, count in numbers.items()}
    return {**sizes, "_attend": cache_bytes(args, rows=rows, length=context, itemsize=itemsize), "_advance": 0}


def kernel_rows(spans: Sequence[Span], moved: dict[str, int]) -> list[KernelRow]:
    """Return the kernels by name, the one that takes longest first."""
    by_name = groupby(sorted(spans, key=lambda span: span.name), key=lambda span: span.name)
    rows = []
    for name, group in by_name:
        times = [span.end - span.start for span in group]
        rows.append(KernelRow(name, len(times), sum(times), moved.get(name)))
    return sorted(rows, key=lambda row: -row.microseconds)
