"""Other people's engines behind the benchmark's protocol: transformers and llama.cpp, with the weights of our model.

The only file that knows how they are driven. Each is imported when an engine of its kind is made, and not before.
"""

import ctypes
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.bench.run.engines import Engine, Run, hooked, weights_bytes
from llama.checkpoint.export import huggingface_config, huggingface_tensors, save_gguf
from llama.model import Transformer
from llama.request import make_request
from llama.streaming import TextCodec, encode_prompt

PEERS = {"transformers": "transformers", "llama.cpp": "llama-cpp-python"}  # each with the package that it is in

# The GPT-2 models of the teaching notebooks, each with what makes its config out of GPT2Config, that of the smallest.
GPT2: dict[str, dict[str, int]] = {
    "gpt2": {},
    "gpt2-medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "distilgpt2": {"n_layer": 6},
}
# What llama.cpp calls weights in int8 and int4, with their numbers of enum llama_ftype.
_GGML_QUANTIZED = {"int8": ("Q8_0", 7), "int4": ("Q4_0", 2)}
_GGML_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}  # numbers of enum ggml_type
_UBATCH = 2048  # tokens that are computed at a time; with 512, its default, a prompt of 8 rows took a sixth longer
_GGML_LOG_ERROR = 4  # of enum ggml_log_level
_GPT2_OWNERS = ("", "openai-community/", "distilbert/")  # the hub moved them, and caches hold old names and new ones


def open_peer(engine: str, model: Transformer, tokenizer: TextCodec, *, quantize: str | None = None) -> Engine:
    """Return the engine of that name, with the weights, the dtype and the device of `model`.

    It computes on as many threads as torch is set to. `quantize` lets llama.cpp bring the weights into int8 or int4.
    Raises ValueError for an unknown name, a package that is not installed, and a model that the engine cannot run.
    """
    check_engine(engine)
    if engine == "transformers":
        if quantize is not None:
            raise ValueError(
                f"quantize={quantize}: transformers is measured with the weights as they are; leave it out"
            )
        return TransformersEngine.of(model, tokenizer)
    return LlamaCppEngine.of(model, tokenizer, quantize=quantize)


def check_engine(engine: str) -> Any:
    """Return an engine's package; raise ValueError for a name that is not in PEERS, and where it is not installed."""
    if engine not in PEERS:
        raise ValueError(f"engine={engine!r} is not known; the peers are {' and '.join(PEERS)}")
    try:
        if engine == "transformers":
            import transformers

            return transformers
        import llama_cpp
    except ModuleNotFoundError as error:
        remedy = 'pip install -c constraints.txt -e ".[peers]"'
        raise ValueError(f"--engine {engine} needs {PEERS[engine]}, which is not installed: {remedy}") from error
    return llama_cpp


Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]


def no_text(name: str) -> tuple[Encode, Decode]:
    """Return what stands where there is no vocabulary."""

    def encode(text: str) -> list[int]:
        raise ValueError(
            f"{name} has random weights and no vocabulary, because its files are not in Hugging Face's cache; "
            "leave the text out for random ids"
        )

    return encode, lambda ids: " ".join(["ids", *map(str, ids)])


# ---- transformers ----------------------------------------------------------------------------------------------------


class TransformersEngine:
    """transformers' `generate` as it comes: eager, with its default attention and its default cache.

    `weights` are "given", or those of a GPT-2: "pretrained" or "random".
    """

    max_batch_size = None  # no limit on rows, for the common check of what is asked

    def __init__(self, model: Any, encode: Encode, decode: Decode, args: ModelArgs | None, weights: str) -> None:
        transformers = check_engine("transformers")
        # What a hub's file says of ends and sampling must not end a row early.
        model.generation_config = transformers.GenerationConfig(pad_token_id=0)
        self.model, self.args, self.weights = model.eval(), args, weights
        self.path = f"transformers {transformers.__version__} eager, {model.config._attn_implementation}"
        self.vocab_size: int = model.config.vocab_size
        self.max_seq_len: int = model.config.max_position_embeddings if args is None else args.max_seq_len
        self.weights_bytes: int | None = weights_bytes(model)
        self.encode, self.decode = encode, decode

    @classmethod
    def of(cls, model: Transformer, tokenizer: TextCodec) -> "TransformersEngine":
        """Return an engine that shares the memory of the model's weights, all but those of wq and wk."""
        transformers = check_engine("transformers")
        # A limit by which nothing is allocated; transformers warns of scaled RoPE where it is a short one.
        length = max(model.args.max_seq_len, 1 << 17)
        config = transformers.LlamaConfig(**huggingface_config(model.args) | {"max_position_embeddings": length})
        with torch.device("meta"):
            twin = transformers.LlamaForCausalLM(config)
        twin.load_state_dict(huggingface_tensors(model), assign=True)
        # Its frequencies are no part of the weights, so they are still on the meta device.
        twin.model.rotary_emb = type(twin.model.rotary_emb)(config).to(model.device)
        return cls(twin, partial(encode_prompt, tokenizer), tokenizer.decode, model.args, "given")

    @classmethod
    def gpt2(
        cls,
        name: str,
        *,
        seed: int = 1,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        cache_dir: Path | None = None,
    ) -> "TransformersEngine":
        """Return the GPT-2 of that name from Hugging Face's local cache, or with random weights where it is not there.

        Nothing is downloaded. `cache_dir` is that cache, where it is not the usual one. Random weights come without a
        vocabulary: `encode` raises ValueError, and `decode` shows the ids.
        """
        if name not in GPT2:
            raise ValueError(f"model={name!r} is not a GPT-2 that is known; there are {', '.join(GPT2)}")
        transformers = check_engine("transformers")
        found = _pretrained_gpt2(transformers, name, cache_dir, dtype)
        if found is not None:
            model, tokenizer = found
            return cls(model.to(device), tokenizer.encode, tokenizer.decode, None, "pretrained")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2[name]))
        return cls(model.to(device, dtype), *no_text(name), None, "random")

    def run(
        self, prompts: Sequence[Sequence[int]], output_len: int, *, kv_caching: bool, steps: int | None = None
    ) -> Run:
        """Continue every prompt; see `Engine`. Its cache grows as it goes, so `steps` need no room for the rest."""
        make_request(self, kv_caching, prompts, output_len, (), {})  # refuses what cannot be run
        count = min(steps or output_len, output_len)
        run = Run(fed=[], cache_bytes=0, cache_length=0, logits_bytes=0)
        clock = _Clock()
        with self._watched(run, last=count), torch.inference_mode():
            run.started = time.perf_counter()
            ids, mask = _left_padded(prompts, self.model.device)
            asked = {"max_new_tokens": count, "do_sample": False, "use_cache": kv_caching}
            made = self.model.generate(ids, attention_mask=mask, streamer=clock, **asked)
        run.token_times = clock.times[1:]  # the first is the prompt's
        run.ids = made[:, ids.shape[1] :].tolist()
        return run

    @contextmanager
    def _watched(self, run: Run, last: int) -> Iterator[None]:
        """Note what the model is really fed and returns; ask the cache once, at the last forward."""

        def before(_: object, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            rows, width = (given[0] if given else named["input_ids"]).shape
            assert run.fed is not None
            run.fed.append((rows, width))

        def after(_: object, given: object, output: Any) -> None:
            run.logits_bytes = max(run.logits_bytes or 0, output.logits.untyped_storage().nbytes())
            cache = output.past_key_values
            if cache is not None and len(run.fed or ()) == last:
                run.cache_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
                run.cache_length = cache.get_seq_length()

        with hooked(self.model, before, after):
            yield


class _Clock:
    """Notes when transformers hands over the prompt and then each token of all rows, on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def _pretrained_gpt2(
    transformers: ModuleType, name: str, cache_dir: Path | None, dtype: torch.dtype
) -> tuple[Any, Any] | None:
    """Return the model and its tokenizer, or None where either is not in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    for owner in _GPT2_OWNERS:
        config = try_to_load_from_cache(owner + name, "config.json", cache_dir=cache_dir)
        if not isinstance(config, str):
            continue
        # By the path of the folder and not by the name, under which transformers may ask the hub for a better file.
        folder = str(Path(config).parent)
        try:
            model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=dtype, local_files_only=True)
            return model, transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except OSError:
            continue  # a part of the files: a download that stopped, or was of one file only
    return None


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask, (rows, longest). transformers continues at the right end, so the pad is left."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


# ---- llama.cpp -------------------------------------------------------------------------------------------------------


class LlamaCppEngine:
    """llama.cpp on the CPU, by its C interface: all rows in one batch, and logits only where they are used.

    Its cache is of the weights' dtype, as ours is; beside weights that it has quantized, it is of fp16, its default.
    What it holds and returns in bytes, it does not tell.
    """

    max_batch_size = None  # no limit on rows, for the common check of what is asked

    def __init__(
        self, held: ExitStack, pointer: Any, model: Transformer, tokenizer: TextCodec, *, quantize: str | None
    ) -> None:
        """Take over llama.cpp's model at `pointer`, and what is to be given back with it."""
        self._api, self._pointer = check_engine("llama.cpp"), pointer
        self._finalizer = weakref.finalize(self, held.close)
        self._cache_type = _GGML_TYPES[torch.float16 if quantize else model.norm.weight.dtype]
        self.path = f"llama.cpp (llama-cpp-python {self._api.__version__})"
        self.path += f", {_GGML_QUANTIZED[quantize][0]} weights, fp16 cache" if quantize else ""
        self.args: ModelArgs | None = model.args
        self.vocab_size, self.max_seq_len = model.args.vocab_size, model.args.max_seq_len
        self.weights_bytes: int | None = self._api.llama_model_size(pointer)
        self.encode, self.decode = partial(encode_prompt, tokenizer), tokenizer.decode

    @classmethod
    def of(cls, model: Transformer, tokenizer: TextCodec, *, quantize: str | None = None) -> "LlamaCppEngine":
        """Return an engine with a copy of the weights, as a .gguf file that is there as long as the engine.

        `quantize` is int8 for its Q8_0, int4 for its Q4_0, or None for the weights as they are. `close` gives all back
        early.
        """
        api = check_engine("llama.cpp")
        if model.device.type != "cpu":
            raise ValueError(f"the model is on {model.device}, and llama.cpp is run on the CPU here; use --device cpu")
        with ExitStack() as stack:
            file = Path(stack.enter_context(TemporaryDirectory(prefix="llama-kv-"))) / "model.gguf"
            save_gguf(model, file)
            _let_only_errors_through(api)
            if quantize is not None:
                file = _quantized(api, file, quantize)
            pointer = _loaded(api, file)
            stack.callback(api.llama_model_free, pointer)
            return cls(stack.pop_all(), pointer, model, tokenizer, quantize=quantize)

    def close(self) -> None:
        """Free the model and delete its file; the engine can run no more."""
        self._finalizer()

    def run(
        self, prompts: Sequence[Sequence[int]], output_len: int, *, kv_caching: bool, steps: int | None = None
    ) -> Run:
        """Continue every prompt; see `Engine`. Refuses to run without its cache, which it always has."""
        if not self._finalizer.alive:
            raise ValueError("this engine was closed; make a new one")
        if not kv_caching:
            raise ValueError("kv_caching=False: llama.cpp cannot run without its cache; use --engine transformers")
        request = make_request(self, kv_caching, prompts, output_len, (), {})
        run = Run(fed=[], ids=[[] for _ in prompts])
        fed, starts = request.prompts, [0] * len(prompts)
        # The context is made before the clock starts, because it also plans every kind of batch. Its cache is cleared
        # then; ours is allocated within the time. A batch is of ids, not embeddings (0), each of one row (1).
        with self._context(len(prompts), request.longest) as context, ExitStack() as held:
            batch = self._api.llama_batch_init(sum(map(len, fed)), 0, 1)
            held.callback(self._api.llama_batch_free, batch)
            run.cache_length = self._api.llama_n_ctx(context) // len(prompts)
            run.started = time.perf_counter()
            for _ in range(min(steps or output_len, output_len)):
                ids = self._forward(context, batch, fed, starts)
                run.token_times.append(time.perf_counter())
                assert run.fed is not None
                run.fed.append((len(fed), max(map(len, fed))))
                starts = [start + len(row) for start, row in zip(starts, fed, strict=True)]
                fed = [[id] for id in ids]
                run.ids = [row + new for row, new in zip(run.ids, fed, strict=True)]
        return run

    def _forward(self, context: Any, batch: Any, fed: Sequence[Sequence[int]], starts: Sequence[int]) -> list[int]:
        """Feed every row at its position, and return the most likely next token of each."""
        at, ends = 0, []
        for row, (ids, start) in enumerate(zip(fed, starts, strict=True)):
            for pos, id in enumerate(ids, start):
                batch.token[at], batch.pos[at] = id, pos
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
                batch.logits[at] = pos + 1 == start + len(ids)
                at += 1
            ends.append(at - 1)
        batch.n_tokens = at
        code = self._api.llama_decode(context, batch)
        if code != 0:
            raise RuntimeError(f"llama_decode ended with code {code}; what llama.cpp says of it stands on stderr")
        vector = ctypes.POINTER(ctypes.c_float * self.vocab_size)
        logits = [ctypes.cast(self._api.llama_get_logits_ith(context, end), vector).contents for end in ends]
        return [int(torch.frombuffer(each, dtype=torch.float32).argmax()) for each in logits]

    @contextmanager
    def _context(self, rows: int, length: int) -> Iterator[Any]:
        """Make room for `rows` x `length` positions, and free it at the end."""
        most = self._api.llama_max_parallel_sequences()
        if rows > most:
            raise ValueError(f"{rows} rows are more than the {most} that llama.cpp takes at a time; give fewer")
        wanted = self._api.llama_context_default_params()
        wanted.n_ctx, wanted.n_seq_max = rows * length, rows  # it rounds a row's share up
        wanted.kv_unified = False  # or every row's attention also goes through the keys of all others
        wanted.n_batch, wanted.n_ubatch = rows * length, _UBATCH
        wanted.n_outputs_max = rows  # or it takes room for the logits of every position
        if self._cache_type == _GGML_TYPES[torch.float32]:
            wanted.flash_attn_type = 0  # because that kernel rounds keys and values to fp16, and other ids come out
        wanted.n_threads = wanted.n_threads_batch = torch.get_num_threads()
        wanted.type_k = wanted.type_v = self._cache_type
        wanted.offload_kqv = wanted.op_offload = False
        context = self._api.llama_init_from_model(self._pointer, wanted)
        if not context:
            raise ValueError(
                f"llama.cpp made no context of {rows} rows x {length} positions, for a reason that stands on stderr; "
                "ask for fewer rows or shorter ones"
            )
        try:
            yield context
        finally:
            self._api.llama_free(context)


def _quantized(api: ModuleType, file: Path, quantize: str) -> Path:
    """Return a file beside this one with its weights quantized by llama.cpp itself, and delete this one."""
    name, number = _GGML_QUANTIZED[quantize]
    made = file.with_name(f"model-{name}.gguf")
    wanted = api.llama_model_quantize_default_params()
    wanted.ftype, wanted.nthread = number, torch.get_num_threads()
    code = api.llama_model_quantize(str(file).encode(), str(made).encode(), ctypes.byref(wanted))
    if code != 0:
        raise ValueError(f"llama.cpp cannot bring this model into {name}, for a reason that stands on stderr")
    file.unlink()
    return made


def _loaded(api: ModuleType, file: Path) -> Any:
    api.llama_backend_init()
    wanted = api.llama_model_default_params()
    wanted.n_gpu_layers = 0
    pointer = api.llama_model_load_from_file(str(file).encode(), wanted)
    if not pointer:
        raise ValueError(f"llama.cpp cannot load this model, for a reason that stands on stderr; its file was {file}")
    return pointer


@cache  # which also keeps the function alive: llama.cpp calls it from then on, whatever it logs
def _let_only_errors_through(api: ModuleType) -> object:
    def log(level: int, text: bytes, _: object) -> None:
        if level == _GGML_LOG_ERROR:
            sys.stderr.write(text.decode(errors="replace"))

    callback: object = api.llama_log_callback(log)
    api.llama_log_set(callback, None)
    return callback
