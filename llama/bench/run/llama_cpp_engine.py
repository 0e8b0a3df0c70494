"""llama.cpp as an engine of the benchmark, by its C interface, with the weights of our model or of a file."""

import ctypes
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Self

import torch

from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.run.engines import (
    SCORED,
    Conversation,
    Engine,
    Prompts,
    Run,
    Source,
    cached_prefix,
    check_cached,
    check_on_cpu,
    needed,
)
from llama.checkpoint.export import save_gguf
from llama.model import Transformer
from llama.request import make_request
from llama.streaming import TextCodec

# llama.cpp's names of weights in int8 and int4, with their numbers of enum llama_ftype.
_GGML_QUANTIZED = {"int8": ("Q8_0", 7), "int4": ("Q4_0", 2)}
_GGML_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # numbers of enum ggml_type
_UBATCH = 2048  # tokens that are computed at a time; with 512, its default, a prompt of 8 rows took a sixth longer
_GGML_LOG_ERROR = 4  # of enum ggml_log_level


class LlamaCppEngine(Engine):
    """llama.cpp on the CPU: all rows in one batch, and logits only where they are used.

    Its cache has the dtype of the weights, as ours does; beside quantized weights it has fp16, its default. It does not
    report the bytes of its cache and its logits.
    """

    always_cached = True
    quantized = ("int8", "int4", "stored")

    @staticmethod
    def package() -> Any:
        with needed("llama.cpp", "llama-cpp-python"):
            import llama_cpp
        return llama_cpp

    @classmethod
    def load(cls, source: Source, cell: Cell) -> Self:
        if cell.quantize != "stored":
            return cls.of(source.build(), source.tokenizer, quantize=cell.quantize)
        assert source.file is not None
        return cls(source.file, source.args, source.tokenizer, weights="stored")

    def __init__(
        self,
        file: Path,
        args: ModelArgs,
        tokenizer: TextCodec,
        *,
        weights: str | None,
        cache: torch.dtype = torch.float16,
        resources: ExitStack | None = None,
    ) -> None:
        """Load a .gguf file. `weights` names their layout if they are quantized. The engine takes over `resources`."""
        self.api = self.package()
        _log_errors_only(self.api)
        self._pointer = _loaded(self.api, file)
        resources = ExitStack() if resources is None else resources
        resources.callback(self.api.llama_model_free, self._pointer)
        weakref.finalize(self, resources.pop_all().close)
        self._cache_type = _GGML_TYPES[cache]
        path = f"llama.cpp (llama-cpp-python {self.api.__version__})"
        path += f", {weights} weights, fp16 cache" if weights else ""
        super().__init__(args, tokenizer, path=path, weights_bytes=self.api.llama_model_size(self._pointer))

    @classmethod
    def of(cls, model: Transformer, tokenizer: TextCodec, *, quantize: str | None = None) -> Self:
        """Return an engine with a copy of the weights, in a .gguf file that exists as long as the engine.

        `quantize` is int8 for its Q8_0, int4 for its Q4_0, or None for the weights as they are.
        """
        api = cls.package()
        check_on_cpu("llama.cpp", model)
        with ExitStack() as stack:
            file = Path(stack.enter_context(TemporaryDirectory(prefix="llama-kv-"))) / "model.gguf"
            save_gguf(model, file)
            _log_errors_only(api)
            if quantize is not None:
                file = _quantized(api, file, quantize)
            kind = None if quantize is None else _GGML_QUANTIZED[quantize][0]
            dtype = torch.float16 if quantize else model.norm.weight.dtype
            return cls(file, model.args, tokenizer, weights=kind, cache=dtype, resources=stack)

    def run(self, prompts: Prompts, output_len: int, *, kv_caching: bool, steps: int | None = None) -> Run:
        """Continue every prompt; see `Engine`. Raises ValueError without the cache, which llama.cpp always has."""
        check_cached("llama.cpp", kv_caching)
        request = make_request(self.args, kv_caching, prompts, output_len, (), {})
        run = Run(ids=[[] for _ in prompts])
        fed, starts = request.prompts, [0] * len(prompts)
        # The context is made before the clock starts, because it also plans every kind of batch. This clears its cache
        # outside the time; ours is allocated within it.
        with self.context(len(prompts), request.longest) as context, self.batch(sum(map(len, fed))) as batch:
            run.cache_length = self.api.llama_n_ctx(context) // len(prompts)
            run.started = time.perf_counter()
            for _ in range(min(steps or output_len, output_len)):
                ids = self.forward(context, batch, fed, starts)
                run.token_times.append(time.perf_counter())
                run.fed.append((len(fed), max(map(len, fed))))
                starts = [start + len(row) for start, row in zip(starts, fed, strict=True)]
                fed = [[id] for id in ids]
                run.ids = [row + new for row, new in zip(run.ids, fed, strict=True)]
        return run

    def most_likely(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Return the most likely token after every position of a text, and what executed the forwards."""
        found: list[int] = []
        with self.context(1, len(ids), scored=SCORED) as context, self.batch(SCORED) as batch:
            for start in range(0, len(ids), SCORED):
                found += self.forward(context, batch, [ids[start : start + SCORED]], [start], every=True)
        return found, self.path

    def conversation(self, length: int, *, kv_caching: bool) -> "LlamaCppConversation":
        """Return an empty text; see `Engine`."""
        check_cached("llama.cpp", kv_caching)
        return LlamaCppConversation(self, length)

    def forward(
        self, context: Any, batch: Any, fed: Prompts, starts: Sequence[int], *, every: bool = False
    ) -> list[int]:
        """Feed every row at its position, and return the most likely next token of each, or of every position."""
        at, asked = 0, []
        for row, (ids, start) in enumerate(zip(fed, starts, strict=True)):
            for pos, id in enumerate(ids, start):
                batch.token[at], batch.pos[at] = id, pos
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                batch.logits[at] = every or pos + 1 == start + len(ids)
                asked += [at] if batch.logits[at] else []
                at += 1
        batch.n_tokens = at
        code = self.api.llama_decode(context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode ended with code {code}; llama.cpp's message is on stderr")
        vector = ctypes.POINTER(ctypes.c_float * self.args.vocab_size)
        logits = [ctypes.cast(self.api.llama_get_logits_ith(context, end), vector).contents for end in asked]
        return [int(torch.frombuffer(each, dtype=torch.float32).argmax()) for each in logits]

    @contextmanager
    def batch(self, tokens: int) -> Iterator[Any]:
        """Allocate a batch of so many tokens: ids, not embeddings (0), each of one row (1)."""
        batch = self.api.llama_batch_init(tokens, 0, 1)
        try:
            yield batch
        finally:
            self.api.llama_batch_free(batch)

    @contextmanager
    def context(self, rows: int, length: int, *, scored: int = 1) -> Iterator[Any]:
        """Allocate `rows` x `length` positions, and logits of `scored` of them at a time."""
        most = self.api.llama_max_parallel_sequences()
        if rows > most:
            raise ValueError(f"{rows} rows are more than the {most} that llama.cpp computes at a time; give fewer")
        wanted = self.api.llama_context_default_params()
        wanted.n_ctx, wanted.n_seq_max = rows * length, rows  # it rounds a row's share up
        wanted.kv_unified = False  # or every row's attention also goes through the keys of all others
        wanted.n_batch, wanted.n_ubatch = rows * length, _UBATCH
        wanted.n_outputs_max = rows * scored  # or it allocates the logits of every position
        if self._cache_type == _GGML_TYPES[torch.float32]:
            wanted.flash_attn_type = 0  # because that kernel rounds keys and values to fp16, and other ids come out
        wanted.n_threads = wanted.n_threads_batch = torch.get_num_threads()
        wanted.type_k = wanted.type_v = self._cache_type
        wanted.offload_kqv = wanted.op_offload = False
        context = self.api.llama_init_from_model(self._pointer, wanted)
        if not context:
            raise ValueError(
                f"llama.cpp made no context of {rows} rows x {length} positions; its message is on stderr; ask for "
                "fewer rows or shorter ones"
            )
        try:
            yield context
        finally:
            self.api.llama_free(context)


class LlamaCppConversation(Conversation):
    """A context of llama.cpp that keeps the common beginning of the old and the new text, as its server does."""

    def __init__(self, engine: LlamaCppEngine, length: int) -> None:
        self._engine, self._ids = engine, list[int]()
        self._stack = ExitStack()
        self._context = self._stack.enter_context(engine.context(1, length))
        self._batch = self._stack.enter_context(engine.batch(length))

    def feed(self, ids: list[int]) -> int:
        begin, api = cached_prefix(self._ids, ids), self._engine.api
        api.llama_memory_seq_rm(api.llama_get_memory(self._context), 0, begin, -1)
        [next_id] = self._engine.forward(self._context, self._batch, [ids[begin:]], [begin])
        self._ids, self.fed = ids, self.fed + len(ids) - begin
        return next_id

    def close(self) -> None:
        self._stack.close()


def _quantized(api: ModuleType, file: Path, quantize: str) -> Path:
    """Replace a file by one whose weights llama.cpp has quantized, and return its path."""
    name, number = _GGML_QUANTIZED[quantize]
    made = file.with_name(f"model-{name}.gguf")
    wanted = api.llama_model_quantize_default_params()
    wanted.ftype, wanted.nthread = number, torch.get_num_threads()
    code = api.llama_model_quantize(str(file).encode(), str(made).encode(), ctypes.byref(wanted))
    if code != 0:
        raise ValueError(f"llama.cpp cannot quantize this model to {name}; its message is on stderr")
    file.unlink()
    return made


def _loaded(api: ModuleType, file: Path) -> Any:
    """Return the pointer to llama.cpp's model of a .gguf file."""
    api.llama_backend_init()
    wanted = api.llama_model_default_params()
    wanted.n_gpu_layers = 0
    pointer = api.llama_model_load_from_file(str(file).encode(), wanted)
    if not pointer:
        raise ValueError(f"llama.cpp cannot load {file}; its message is on stderr")
    return pointer


@cache  # which also keeps the callback alive, for llama.cpp calls it from then on
def _log_errors_only(api: ModuleType) -> object:
    def log(level: int, text: bytes, _: object) -> None:
        if level == _GGML_LOG_ERROR:
            sys.stderr.write(text.decode(errors="replace"))

    callback: object = api.llama_log_callback(log)
    api.llama_log_set(callback, None)
    return callback
