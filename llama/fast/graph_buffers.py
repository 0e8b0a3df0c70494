"""The memory that the recorded calls of a batch read and write on a GPU, and the recording itself.

A CUDA graph is bound to addresses, so all memory that a call reads or writes is in a DecodeBuffers. On a CPU, which has
no graphs, the call itself is the replay. Knows batches and caches; does not know what a call computes.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from llama.batch import Batch
from llama.fast.graph_ops import LayerWeights
from llama.kv_cache import Cache, StaticCache
from llama.model import Transformer
from llama.ops import without_cudnn
from llama.sampling import Settings

Replay = Callable[[], object]


# Recorded calls feed at most so many tokens, rows times width. An H200 computes more in a longer time than the host
# needs to launch them: 16 x 272 tokens of a 1B shape took 18 ms, and the host 10 (docs/log.md).
RECORDED_TOKENS = 2048
LEAST_WIDTH = 64


class GraphKey(NamedTuple):
    """Identify a recorded call. The numbers that it samples by are read from a buffer at each replay."""

    width: int  # the tokens that are fed of each row: 1 in steps with the cache
    chooses: tuple[bool, ...] | None = None  # which of the Settings are set; None: a prompt, whose logits are stored
    whole: bool = False  # whether the whole vocabulary is sorted
    logprobs: bool = False


def padded_width(rows: int, width: int, slots: int = sys.maxsize) -> int | None:
    """Return the width of the recorded calls that feed `width` tokens a row; None if such calls are not recorded.

    A multiple of 64 up to 512, and of an eighth of the next power of two above: at most a quarter of a long call is
    padding.
    """
    step = max(LEAST_WIDTH, 1 << max((width - 1).bit_length() - 3, 0))
    padded = min(-(-width // step) * step, slots)
    return padded if rows * padded <= RECORDED_TOKENS else None


class DecodeBuffers:
    """The rows of a generation on the device, at the addresses that graphs read and write.

    weights: the layers of the model that the graphs are of.
    tokens: the texts, (rows, slots). The last slot belongs to no text.
    starts: the position of each row's first token that a prompt feeds, (rows,).
    positions: the position of each row's newest token, (rows,).
    chosen, logprobs: the ids of the last step and their log-probabilities, (rows,).
    draws: the random numbers of the next step, (rows,).
    numbers: the numbers of the Settings; 0 for None.
    seen: the tokens of each row, (rows, vocab), for the repetition penalty.
    cos_sin: the first rows of the RopeTable, which may replace its own tensors by longer ones.
    logits: those after each row's newest token, (rows, vocab), by a prompt.
    cache: static layers of (rows, slots); None with the switch off. keys_values: their tensors, by layer.
    record: makes the graphs, which are in `graphs`.
    fed: the tokens of a call that the text which uses the buffers makes.
    last: an event behind the latest launch; None on a CPU.
    """

    def __init__(
        self,
        model: Transformer,
        weights: list[LayerWeights],
        rows: int,
        slots: int,
        cache: Cache | None,
        record: "Recorder",
    ) -> None:
        """Allocate the buffers. cache: an empty one of static layers, or None."""
        self.weights, self.rows, self.slots, self.cache, self.record = weights, rows, slots, cache, record
        self.keys_values = [] if cache is None else allocate(cache, rows, slots, like=model.norm.weight)
        cos, sin = model.rope.up_to(slots, model.device)
        self.cos_sin = cos[:slots], sin[:slots]
        with torch.inference_mode(False), model.device:  # tensors made in inference mode could not be written outside
            self.tokens = torch.zeros((rows, slots), dtype=torch.int64)
            self.starts, self.positions, self.chosen = (torch.zeros(rows, dtype=torch.int64) for _ in range(3))
            self.logprobs, self.draws = (torch.zeros(rows, dtype=torch.float64) for _ in range(2))
            self.numbers = torch.zeros(len(Settings._fields), dtype=torch.float64)
            self.seen = torch.zeros((rows, model.args.vocab_size), dtype=torch.bool)
            dtype = torch.promote_types(model.dtype, torch.float32)
            self.logits = torch.zeros((rows, model.args.vocab_size), dtype=dtype)
        self.graphs: dict[GraphKey, Replay] = {}
        self.fed: Tensor | None = None
        self.last: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        """The memory of the cache and the graphs, in bytes."""
        return (0 if self.cache is None else self.cache.nbytes) + self.record.nbytes

    def hold(self, fed: Tensor, start: int, lengths: Sequence[int]) -> None:
        """Copy the tokens of a prompt, (rows, width), which begin at `start`, and the position of each row's last."""
        self.tokens[:, start : start + fed.shape[1]] = fed
        self.starts.fill_(start)
        self.positions.copy_(torch.tensor(lengths, device="cpu") + (start - 1))

    def mark(self) -> "torch.cuda.Event | None":
        """Return an event behind what was launched; None on a CPU."""
        if self.tokens.is_cuda:
            self.last = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.last.record(torch.cuda.current_stream(self.tokens.device))
        return self.last

    def place(self, batch: Batch) -> None:
        """Copy the batch's texts, positions and settings. Rows that have left it keep theirs, and are computed too."""
        rows = torch.tensor([row.number for row in batch.rows], device="cpu").to(self.tokens.device)
        texts = batch.tokens([0] * len(batch.rows), rows.device)
        self.tokens[rows, : texts.shape[1]] = texts
        self.positions[rows] = torch.tensor(batch.cur_pos, device="cpu").to(rows.device) - 1
        settings = batch.request.sampling.settings
        self.numbers.copy_(torch.tensor([x or 0.0 for x in settings], dtype=torch.float64, device="cpu"))
        seen = [sampler.seen for sampler in batch.samplers if sampler.seen is not None]
        if seen:
            self.seen[rows] = torch.stack(seen).to(rows.device)

    def state(self) -> list[Tensor]:
        """Return all that a step changes, except the cache."""
        return [self.tokens, self.positions, self.chosen, self.logprobs, self.seen]

    def recorded(self, step: Replay) -> Replay:
        """Return a step's replay. It is recorded in the slot of no text; the state is restored afterwards."""
        before = [tensor.clone() for tensor in self.state()]
        self.positions.fill_(self.slots - 1)
        with without_cudnn(self.tokens.device):
            replay = self.record(step)
        for tensor, was in zip(self.state(), before, strict=True):
            tensor.copy_(was)
        return replay


class StepBlock:
    """The results of some steps: stored on the device, copied to the host, read there."""

    def __init__(self, count: int, buffers: DecodeBuffers, *, logprobs: bool) -> None:
        self.count = count
        self._sources = [buffers.chosen, buffers.logprobs] if logprobs else [buffers.chosen]
        self._noted = [source.new_empty((count, buffers.rows)) for source in self._sources]
        self._sent: list[Tensor] = []
        self._mark = buffers.mark
        self.draws: list[Tensor] = []  # the random numbers of each step, (rows of the buffers,)
        self.event: torch.cuda.Event | None = None  # behind the copies to the host

    def note(self, step: int) -> None:
        for noted, source in zip(self._noted, self._sources, strict=True):
            noted[step] = source

    def send(self) -> None:
        """Start copying the results to the host, without waiting."""
        for noted in self._noted:
            host = torch.empty(noted.shape, dtype=noted.dtype, pin_memory=noted.is_cuda)
            self._sent.append(host.copy_(noted, non_blocking=True))
        self.event = self._mark()

    def read(self) -> Iterator[tuple[list[int], list[float | None]]]:
        """Yield the ids of each step, one for each row of the buffers, and their log-probabilities."""
        if self.event is not None:
            self.event.synchronize()  # host sync: one in SYNC_INTERVAL steps
        ids, *logprobs = (sent.tolist() for sent in self._sent)
        for step, row in enumerate(ids):
            yield row, logprobs[0][step] if logprobs else [None] * len(row)


class Recorder:
    """Record steps as graphs that share one stream and one memory pool, because they run one at a time.

    On a CPU, which has no graphs, the step itself is the replay.
    """

    _recording = Lock()  # a process may capture one graph at a time

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.pool = torch.cuda.graph_pool_handle()

    @property
    def nbytes(self) -> int:
        """The memory of the pool in bytes: the graphs' tensors. Those of one graph replace those of another."""
        if self.device.type != "cuda":
            return 0
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) == tuple(self.pool))

    def __call__(self, step: Replay) -> Replay:
        """Return the step's replay. The step runs twice before: to compile, to select kernels, to allocate."""
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
                current.wait_stream(self.stream)  # also for a step that failed

    def _captured(self, step: Replay) -> Replay:
        # cuBLAS caches a workspace for each stream. Free that of the runs before; the graph allocates its own in its
        # pool. Clear the cache again afterwards, so that no other code uses the graph's.
        _clear_workspaces()
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: another thread, with another model, may allocate meanwhile
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                step()
        except BaseException:
            # Before https://github.com/pytorch/pytorch/pull/180395, PyTorch's allocator frees no memory after a
            # capture whose end raised, because it waits for that end.
            graph.reset()
            with suppress(RuntimeError):  # the capture had ended
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
            raise
        finally:
            _clear_workspaces()
        return graph.replay


def _clear_workspaces() -> None:
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()


def allocate(cache: Cache, rows: int, slots: int, *, like: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Make each layer of a static cache at least so large; return the keys and the values of each layer."""
    return [layer.room(rows, slots, like=like) for layer in cache.layers if isinstance(layer, StaticCache)]
