"""One call of the GPU report: its model, the ways to run it, its clocks, and what the allocator tells."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from llama.args import ModelArgs
from llama.bench.gpu.rows import Report
from llama.bench.schema import Spread
from llama.bench.statistics import spread
from llama.costs import RELEASED
from llama.fast.graph_ops import PYTORCH, GraphOps
from llama.fast.graph_runner import GraphRunner, find_ops
from llama.model import Transformer

SMALL: dict[str, Any] = {"n_layers": 2, "max_seq_len": 2048, "tied_head": True}  # what small models have in common
TINY = ModelArgs(dim=64, n_heads=4, n_kv_heads=2, vocab_size=512, multiple_of=32, **SMALL)
MODELS = {"tiny": TINY, **RELEASED}
WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
LEAST, MOST, SAMPLE_SECONDS = 5, 30, 1.5  # repetitions of what is timed


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    model: str = "llama-3.2-1b"
    device: str = "cuda"
    batch_sizes: tuple[int, ...] = (1, 8, 16)
    input_len: int = 256
    output_len: int = 32
    minutes: float = 8.0
    skip: tuple[str, ...] = ()
    gpt_fast: str | None = None
    out: str = "results"


class Run:
    """One call: what was asked for, the model, the time that is left, and the report as far as it has come."""

    def __init__(self, options: Options, report: Report) -> None:
        self.options, self.report, self.device = options, report, torch.device(options.device)
        self.deadline = time.perf_counter() + 60 * options.minutes
        self.args, self.dtype = MODELS[options.model], dtype_of(self.device)
        self.model = random_model(self.args, self.dtype, self.device)
        self.ops = find_ops(self.model)

    @property
    def left(self) -> float:
        return self.deadline - time.perf_counter()

    @property
    def fast(self) -> str:
        return f"llama, fast ({self.ops.name} kernels)"

    @property
    def weights(self) -> int:
        return sum(weight.nbytes for weight in self.model.parameters())

    def ways(self) -> dict[str, Callable[[], GraphRunner | None]]:
        """Return ways to run the model; a step is made anew for each use, so that its recording is seen."""
        graphs = {"llama, graphs of PyTorch's kernels": GraphRunner} if self.ops != PYTORCH else {}
        return {self.fast: partial(fast_step, self.ops, self.device), **graphs, "llama, plain": lambda: None}


def dtype_of(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def fast_step(ops: GraphOps, device: torch.device) -> GraphRunner:
    """Return the step that `llama.fast.choose` gives a model on a GPU; on a CPU the same steps, unrecorded."""
    return GraphRunner(ops, backend="inductor" if device.type == "cuda" else None)


def random_model(args: ModelArgs, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Return a model whose norms matter and whose logits are about 1 in size.

    That of `llama.bench.run.models` needs more packages.
    """
    with torch.device("meta"):
        model = Transformer(args).to(dtype)
    model = model.to_empty(device=device)
    if args.tied_head:
        model.output.weight = model.tok_embeddings.weight
    stream = torch.Generator(device).manual_seed(0)
    for weight in model.requires_grad_(False).parameters():
        bound = (3 / weight.shape[-1]) ** 0.5
        low, high = (0.5, 1.5) if weight.ndim == 1 else (-bound, bound)
        weight.uniform_(low, high, generator=stream)
    return model.eval()


def prompts_of(args: ModelArgs, lengths: Sequence[int]) -> list[list[int]]:
    stream = torch.Generator().manual_seed(0)
    return [torch.randint(args.vocab_size, (length,), generator=stream).tolist() for length in lengths]


@contextmanager
def stepping(model: Transformer, step: GraphRunner | None) -> Iterator[None]:
    model.runner = step
    try:
        yield
    finally:
        model.runner = None


# ---- clocks and memory -----------------------------------------------------------------------------------------------


def cache_words(kv_caching: bool) -> str:
    return "with the cache" if kv_caching else "without the cache"


def in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_seconds(work: Callable[[], object], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - began


def device_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time work by CUDA events; a CPU has none."""
    if device.type != "cuda":
        return host_seconds(work, device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    wait(device)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def samples(run: Run, measure: Callable[[], float]) -> list[float]:
    """Repeat for a while; less than LEAST times only where the call's time is up."""
    until, values = time.perf_counter() + SAMPLE_SECONDS, [measure()]
    while run.left > 0 and len(values) < MOST and (len(values) < LEAST or time.perf_counter() < until):
        values.append(measure())
    return values


def milliseconds(seconds: Sequence[float]) -> Spread:
    return spread([1000 * value for value in seconds])


def settle(device: torch.device) -> None:
    """Give back the device memory that nobody holds."""
    if device.type == "cuda":
        gc.collect()
        wait(device)
        torch.cuda.empty_cache()


def graph_pool_bytes(device: torch.device) -> int | None:
    """Return the bytes of private pools, which belong to graphs; None where the allocator does not tell."""
    if device.type != "cuda":
        return None
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    if not segments or "segment_pool_id" not in segments[0]:
        return None
    return sum(int(each["total_size"]) for each in segments if tuple(each["segment_pool_id"]) != (0, 0))


def workspace_bytes(device: torch.device) -> int | None:
    """Return what cuBLAS holds, by taking it away; a graph that relies on it must be gone."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if device.type != "cuda" or clear is None:
        return None
    wait(device)
    before = torch.cuda.memory_allocated(device)
    clear()
    return before - torch.cuda.memory_allocated(device)
