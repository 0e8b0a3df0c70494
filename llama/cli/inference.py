"""Text from a Llama model on the command line: prompts and flags -> load, stream -> print.

Knows the library by its front door. Nothing that takes long is imported before the flags are read.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama.cli import console
from llama.host.cores import FreeCores

if TYPE_CHECKING:
    from llama.generation import Stream
    from llama.model import Transformer
    from llama.request import Options, Step
    from llama.tokenizer import Tokenizer

# Meta's example prompts, example_text_completion.py in https://github.com/meta-llama/llama3.
PROMPTS = (
    "I believe the meaning of life is",
    "Simply put, the theory of relativity states that ",
    """A brief message congratulating the team on the launch:

        Hi everyone,

        I just """,
    """Translate English to French:

        sea otter => loutre de mer
        peppermint => menthe poivrée
        plush girafe => girafe peluche
        cheese =>""",
)

PROMPT_LIMIT = 16_000_000  # bytes: far above the longest context, of 128 Ki tokens


def main(
    *prompts: str,
    ckpt_dir: str = "demo",
    tokenizer_path: str | None = None,
    prompt_file: str | None = None,
    max_gen_len: int | None = None,
    temperature: float = 0.6,
    top_p: float = 0.9,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 1,
    stop: list[str] = [],  # noqa: B006  (read only)
    kv_caching: bool = True,
    kv_cache: str = "static",
    share_prefix: bool = False,
    fast: bool = False,
    fast_kernels: str | None = None,
    quantize: str | None = None,
    activations: int = 16,
    repack: bool = True,
    exact: bool = False,
    stream: bool = False,
    chat: bool = False,
    trace: bool = False,
    watch: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    max_seq_len: int | None = None,
    max_batch_size: int | None = None,
    timeout: float = 60.0,
) -> int:
    """Complete prompts with a Llama model; with no arguments, Meta's four example prompts with the demo model.

    Args:
        prompts: The texts to continue, as plain words or after --prompts; they arrive as they were typed.
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo".
        tokenizer_path: Meta's tokenizer.model, where it does not stand in ckpt_dir.
        prompt_file: A file that is one more prompt, all of its lines together, without its last line end; "-" is
            standard input. Lines of JSON are refused.
        max_gen_len: The most tokens to add to each prompt, 64 by default; to an answer in a conversation 512.
        temperature: 0 takes the most likely token each time; higher is more varied.
        top_p: Draw from the most likely tokens that have this probability together.
        top_k: Draw from this many most likely tokens.
        min_p: Draw from tokens at least this much as likely as the most likely one.
        repetition_penalty: Above 1 makes tokens that are there already less likely.
        seed: Prompt i draws from the random stream seed + i.
        stop: End a text before this string; may be given several times.
        kv_caching: Keep the keys and values of past tokens; --kv_caching=False computes them anew at each step.
        kv_cache: The kind of cache, NAME or NAME:PARAMS: static, concat, window:1024+4, int8, int4, paged; or
            FILE.py:NAME[:PARAMS] for one of your own. By layer: "static@:2,-1;int4".
        share_prefix: Feed the tokens that all prompts begin with once, for all of them.
        fast: Take the fastest way to compute that this machine has, native code on a CPU or CUDA graphs on a GPU, and
            say which.
        fast_kernels: What steps on a CUDA GPU are made of: fused are our own kernels, which nobody has measured. Give
            --fast with it.
        quantize: How weights are held: int8 in 8 bits, a quarter of fp32's memory, int4 most of them in 4; stored as a
            .gguf file has them. Give --fast with it.
        activations: 8 rounds what is multiplied by such weights to 8 bits, as llama.cpp does: faster, less accurate.
        repack: --repack=False leaves stored weights in the file, mapped: there at once and shared by processes, but
            slower at every step.
        exact: Give every position's logits the same bits with the cache on and off, alone and in any batch; slower,
            unless --fast serves the model: native code keeps its bits.
        stream: Print the text as it is made; of several prompts, the first one's.
        chat: Take each prompt as a user's message and answer it; without prompts, hold a conversation: one message a
            line, typed or piped, with /undo, /save FILE, /load FILE, /stats and /quit.
        trace: Print what each step is fed: one token a row with the cache, the growing prefix without.
        watch: Write a page of HTML here, FILE.html, on which one steps through the first prompt's text and sees what
            the cache holds, what is computed in vain without it, and what both take. The text is made three times more.
        device: Where it computes: auto, cpu, cuda or mps.
        dtype: Numbers that it computes in: auto, fp32, bf16, fp16 or fp64; auto is fp32 on a CPU.
        max_seq_len: The longest text, prompt and answer together; by default what the checkpoint was made for.
        max_batch_size: The most prompts at once; by default without limit.
        timeout: Seconds that the ranks of a torchrun wait for one that does not answer, before they end.
    """
    cores = FreeCores()  # looks while torch and the model are loaded
    conversation = chat and not prompts and prompt_file is None
    if (stream or conversation) and trace:
        asked_for = "--stream" if stream else "--chat without prompts"
        raise ValueError(f"{asked_for} and --trace would print into one another; give one of them")
    if watch is not None:
        check_watch(watch, conversation=conversation, fast=fast)
    if conversation:
        console.standard_input()  # a closed one is refused before a model is loaded
    texts = [] if conversation else read_prompts(prompts, prompt_file)
    options: Options = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "kv_caching": kv_caching,
        "share_prefix": share_prefix,
    }
    limits: dict[str, Any] = {"max_seq_len": max_seq_len, "max_batch_size": max_batch_size, "kv_cache": kv_cache}
    if fast_kernels not in (None, "fused") or (fast_kernels is not None and not fast):
        raise ValueError(f"--fast_kernels={fast_kernels}: there is fused, which goes with --fast; give both, or none")
    modes: dict[str, Any] = {
        "fast": fast_kernels or fast,
        "quantize": quantize,
        "activations": activations,
        "repack": repack,
        "exact": exact,
    }
    longest = 64 if max_gen_len is None else max_gen_len
    check_without_a_model(len(texts) or 1, longest, stop, options, limits, modes, device=device, dtype=dtype)

    from llama import load  # here, so that a mistyped flag is refused without waiting for torch
    from llama.api import pick_device
    from llama.exact import slowdown_words
    from llama.ranks import torchrun

    if watch is not None and torchrun.world_size() > 1:
        raise ValueError("--watch sees one process, and each of a torchrun computes a part; run it without torchrun")
    if conversation and torchrun.world_size() > 1:
        raise ValueError("--chat without prompts would be typed to one rank of the torchrun alone; give prompts")
    torchrun.join(torchrun.own_device(pick_device(device)), timeout=torchrun.check_timeout(timeout))
    if pick_device(device).type == "cpu":
        cores.choose_threads(console.say)
    model, tokenizer = load(ckpt_dir, tokenizer_path=tokenizer_path, device=device, dtype=dtype, **modes, **limits)
    cache = f"KV cache on ({kv_cache})" if kv_caching else "KV cache off"
    if conversation:
        return hold_conversation(model, tokenizer, max_gen_len, stop, options, about=f"{cache}, {where(model)}")
    if trace:
        options["on_step"] = Trace(tokenizer)
    asked = as_messages(texts, tokenizer) if chat else texts
    pieces = model.stream(tokenizer, asked, longest, stop=stop, **options)
    with only_rank_0_prints(model.ranks.rank):
        started = time.perf_counter()
        code = show(texts, pieces, live=stream)
        seconds = time.perf_counter() - started
        if exact and code == 0:
            console.put(slowdown_words(model))
        size = f"batch {len(texts)}, {cache}, {where(model)}{shared(model)}"
        console.put(f"{speed(pieces, seconds)}, prompts included ({size})")
    if watch is not None and code == 0:
        name = Path(ckpt_dir).absolute().name  # "." has none of its own
        console.put(watched(Path(watch), model, tokenizer, asked, longest, stop, options, name=name))
    return code


def check_watch(path: str, *, conversation: bool, fast: bool) -> None:
    """Refuse, before a model is loaded, a page that could not be written or that would show something else."""
    from llama.host.files import check_writable

    if conversation:
        raise ValueError("--watch shows one text, and --chat without prompts makes many; give a prompt")
    if fast:
        raise ValueError(
            "--watch looks into the plain path, step by step, and --fast computes past it; leave out --fast"
        )
    check_writable(Path(path))


def watched(
    path: Path,
    model: "Transformer",
    tokenizer: "Tokenizer",
    prompts: Sequence[str | list[int]],
    max_gen_len: int,
    stop: list[str],
    options: "Options",
    *,
    name: str,
) -> str:
    """Write the page on which the first prompt's text is made again, step by step; return a line about it."""
    from llama.watch.write import write_page

    both = ("kv_caching", "share_prefix", "on_step")  # said by the recording itself
    each: Any = {name: value for name, value in options.items() if name not in both}
    said = write_page(path, model, tokenizer, prompts[0], max_gen_len, name=name, stop=stop, **each)
    return said if len(prompts) == 1 else f"{said}; it shows the first of {len(prompts)} prompts"


@contextmanager
def only_rank_0_prints(rank: int) -> Iterator[None]:
    """Keep the other ranks of a torchrun from printing the same once more; their errors go to stderr."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere) if rank else nullcontext():
        yield


def read_prompts(prompts: tuple[str, ...], prompt_file: str | None) -> list[str]:
    """Return the prompts as typed and the one in the file; where there are none, Meta's."""
    texts = list(prompts)
    if prompt_file == "-":
        from llama.ranks.torchrun import world_size  # here, so that a file that is not there is refused without torch

        if world_size() > 1:
            raise ValueError("--prompt_file=- would be read by one rank of the torchrun alone; give a file")
    if prompt_file is not None:
        texts.append(read_prompt(prompt_file).removesuffix("\n"))
        check_one_prompt(texts[-1], "standard input" if prompt_file == "-" else prompt_file)
    return texts or list(PROMPTS)


def read_prompt(file: str) -> str:
    """Return what stands in a file or comes from standard input; refuse what is longer than any context."""
    from llama.untrusted.files import read_text

    if file != "-":
        return read_text(Path(file), limit=PROMPT_LIMIT)
    try:
        text = console.standard_input().read(PROMPT_LIMIT + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is no {error.encoding.upper()} text; convert it first") from None
    if len(text) > PROMPT_LIMIT:
        raise ValueError(f"standard input holds more than the {PROMPT_LIMIT / 1e6:,.0f} MB that are read of a prompt")
    return text


def check_one_prompt(text: str, name: str) -> None:
    """Refuse several lines that are each an object or a string of JSON: records, of which each has a prompt."""
    lines = [line for line in text.removeprefix("\ufeff").split("\n") if line.strip()]
    try:
        records = len(lines) > 1 and all(isinstance(json.loads(line), dict | str) for line in lines)
    except (ValueError, RecursionError):
        return
    if records:
        raise ValueError(
            f"{name} has {len(lines):,} lines of JSON, and a prompt file is one prompt; give each record's text as a "
            'word of the command line, or all lines as one: "$(cat FILE)"'
        )


def check_without_a_model(
    rows: int,
    max_gen_len: int,
    stop: list[str],
    options: "Options",
    limits: dict[str, Any],
    modes: dict[str, Any],
    *,
    device: str,
    dtype: str,
) -> None:
    """Refuse what would be refused anyway, before a checkpoint is read or the demo model downloaded."""
    from llama.api import check_modes, pick_device, pick_dtype
    from llama.args import ModelArgs
    from llama.kv_cache import KVCache, cache_kind
    from llama.kv_cache.names import kinds_named
    from llama.request import make_request

    if "" in stop:
        raise ValueError("--stop is empty, so it would end every text before it began; give it a character")
    on = pick_device(device)
    check_modes(on, pick_dtype(dtype, on), **modes)
    longest = sys.maxsize if limits["max_seq_len"] is None else limits["max_seq_len"]  # the checkpoint's is not known
    for kind, _ in kinds_named(cache_kind(limits["kv_cache"])):
        KVCache.of(ModelArgs(**{**limits, "max_seq_len": longest, "kv_cache": kind}))
    least = ModelArgs(vocab_size=1, max_seq_len=sys.maxsize, max_batch_size=limits["max_batch_size"])
    make_request(least, True, [[0]] * rows, max_gen_len, (), options)  # the shortest prompts there could be


def hold_conversation(
    model: "Transformer",
    tokenizer: "Tokenizer",
    max_gen_len: int | None,
    stop: list[str],
    options: "Options",
    *,
    about: str,
) -> int:
    """Answer what is typed or piped; return the exit code."""
    from llama.cli.terminal import converse

    model.kv_caching = options["kv_caching"] is not False
    each: dict[str, Any] = {
        name: value for name, value in options.items() if name not in ("kv_caching", "share_prefix")
    }
    return converse(model, tokenizer, max_gen_len, stop=stop, about=about, **each)


def as_messages(texts: list[str], tokenizer: "Tokenizer") -> list[list[int]]:
    """Return the ids of dialogs in which a user has said each text and is to be answered."""
    from llama.tokenizer.chat import ChatFormat

    format = ChatFormat(tokenizer)
    return [format.encode_dialog_prompt([{"role": "user", "content": text}]) for text in texts]


def show(texts: list[str], pieces: "Stream", *, live: bool) -> int:
    """Print every prompt and its continuation, of the first one as it is made if `live`; return the exit code.

    If a signal (exit code 130, 143 or 129) or an error ends the run, the text so far is printed. The error is raised.
    """
    done = ""  # of the first page, while it is made
    try:
        if live:
            done = f"{texts[0]}\n> "
            console.put(done, end="")
        for row, piece in pieces:
            if live and row == 0:
                done += piece
                console.put(piece, end="")
    except KeyboardInterrupt as stop:
        return console.exit_code(stop)
    finally:
        pieces.close()
        for text, result in zip(texts, pieces.results, strict=True):
            page = f"{text}\n> {result['generation']}"
            console.put(f"{page[len(done) :]}\n\n==================================\n")
            done = ""
    return 0


def speed(pieces: "Stream", seconds: float) -> str:
    """Return how many tokens were made and how fast, as text."""
    tokens = sum(len(result["ids"]) for result in pieces.results)
    return f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s"


def where(model: "Transformer") -> str:
    """Return the model's dtype and device, and how it computes where that is not the plain way, as text."""
    way = "" if str(model.execution) == "plain" else f", {model.execution}"
    return f"{str(model.norm.weight.dtype).removeprefix('torch.')} on {model.device}{way}"


def shared(model: "Transformer") -> str:
    return f", {model.ranks.size} ranks" if model.ranks.size > 1 else ""


class Trace:
    """Prints what each step is fed, of the rows that still grow."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self.tokenizer, self.step = tokenizer, 0

    def __call__(self, step: "Step") -> None:
        console.put(f"step {self.step}")
        self.step += 1
        for row, prev_pos, cur_pos, ids in zip(step.rows, step.prev_pos, step.cur_pos, step.ids, strict=True):
            console.put(
                f"  row {row}: prev_pos={prev_pos} cur_pos={cur_pos} "
                f"fed {len(ids)}: {ids} {self.tokenizer.decode(ids, begins=False)!r}"
            )
