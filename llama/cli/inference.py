"""The command that completes prompts: prompts and flags -> load, stream -> print.

Uses the public functions of the library. Slow imports come after the flags are checked.
"""

import math
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from datetime import date as a_date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama.host import console
from llama.host.cores import FreeCores
from llama.untrusted.files import read_regular
from llama.untrusted.json_object import parse_object

if TYPE_CHECKING:
    import torch

    from llama.model import Transformer
    from llama.request import Options, Step
    from llama.streaming import Stream
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

LINES = (".jsonl", ".ndjson")  # files with a prompt in each line
MANY_LINES = 10  # of a file that may be meant as a prompt in each line
PROMPT_LIMIT = 16_000_000  # bytes; the longest context, of 128 Ki tokens, has far fewer


def main(
    *prompts: str,
    ckpt_dir: str = "demo",
    tokenizer_path: str | None = None,
    prompt_file: str | None = None,
    out: str | None = None,
    part: str | None = None,
    date: str | None = None,
    rows: int | None = None,
    cache_gb: float | None = None,
    max_gen_len: int | None = None,
    temperature: float = 0.6,
    top_p: float = 0.9,
    top_k: int | None = None,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 1,
    stop: list[str] = [],  # noqa: B006  (read only)
    schema: str | None = None,
    kv_caching: bool = True,
    kv_cache: str = "static",
    share_prefix: bool = False,
    speculate: str | None = None,
    fast: bool | None = None,
    quantize: str = "auto",
    exact: bool = False,
    stream: bool = False,
    chat: bool = False,
    trace: bool = False,
    watch: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    max_seq_len: int | None = None,
    timeout: float = 60.0,
) -> int:
    """Complete prompts with a Llama model; with no arguments, Meta's four example prompts with the demo model.

    Args:
        prompts: The texts to continue, as plain words or after --prompts; used exactly as typed.
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo".
        tokenizer_path: Meta's tokenizer.model, if it is not in ckpt_dir.
        prompt_file: A file that is one more prompt, without its last line end; "-" is standard input. A file named
            .jsonl has a prompt in each line, as a JSON object of its own or one of OpenAI's batches; see docs/files.md.
        out: With a .jsonl file, the file of the answers, one a line. The same command resumes a killed run.
        part: With a .jsonl file, answer its i-th of n parts, i/n; by default that of a task of Slurm's job array.
        date: With a .jsonl file, the day, YYYY-MM-DD, that some chat templates print; by default that of the first run.
        rows: With a .jsonl file, how many prompts run at a time, by default 16.
        cache_gb: With a .jsonl file, the most memory of all caches, in units of 2^30 bytes; by default no limit.
        max_gen_len: The most tokens to add to each prompt, by default 64; in a conversation 512 for each answer.
        temperature: 0 takes the most likely token each time; higher values give more varied texts.
        top_p: Draw from the most likely tokens whose probabilities add up to this number.
        top_k: Draw from this many most likely tokens.
        min_p: Draw from tokens that are at least this fraction as likely as the most likely one.
        repetition_penalty: Values above 1 make tokens of the text less likely.
        seed: Prompt i, from 0, draws from the random stream seed + i.
        stop: End a text before this string; may be given several times. The shell passes a line end as $'\\n'.
        schema: A file with a JSON Schema, which every new text satisfies unless max_gen_len or stop ends it.
        kv_caching: Cache keys and values; --kv_caching=False computes those of all past tokens at every step.
        kv_cache: A kind of cache, NAME, NAME:PARAMS or FILE.py:NAME, or by layer static@:2;int4. NAME is one of adakv,
            chunkkv, compactor, concat, criticalkv, cur, duo-attention, expected-attention, finch, fp8, h2o, int4, int8,
            keydiff, kivi, knorm, lagkv, paged, pyramidkv, quest, random, rotated, snapkv, static, tova and window,
            which llama-kv kinds describes.
        share_prefix: Feed the common prefix of all prompts once.
        speculate: How tokens are guessed: lookup takes those that followed the same tokens before, lookup:N at most N.
            Several are verified at once if that is faster; no text changes with --fast or --exact.
        fast: Use the fastest implementation that this machine supports, native code on a CPU or CUDA graphs on a GPU.
            By default on with chat or prompt_file, except with watch, exact, several ranks, or on a GPU.
        quantize: The format of the weights in memory: int8, int4, stored (as in the .gguf file), or none (floats); auto
            is stored with fast and a quantised .gguf file, such as the demo's, else none.
        exact: Compute the same bits with the cache on and off, alone and in any batch. Slower, unless with --fast.
        stream: Print the text of the first prompt while it is generated.
        chat: Answer each prompt as a user's message; without prompts, hold a conversation, one message a line.
        trace: Print the tokens that each step is fed: one a row with the cache, the growing prefix without.
        watch: Write an HTML page that shows the first prompt's text step by step, with and without the cache.
        device: The device to compute on: auto, cpu, cuda or mps.
        dtype: The dtype to compute in: auto, fp32, bf16, fp16 or fp64; auto is fp32 on a CPU.
        max_seq_len: The longest text, prompt and answer together; by default that of the checkpoint.
        timeout: Seconds after which a rank of a torchrun that does not answer is lost.
    """
    cores = FreeCores()  # measures the load while torch is imported
    conversation = chat and not prompts and prompt_file is None
    check_outputs(conversation, stream=stream, trace=trace, watch=watch, fast=fast is True)
    has_lines = prompt_file is not None and Path(prompt_file).suffix.lower() in LINES
    others = {"a prompt": prompts, "--chat": chat, "--stream": stream, "--trace": trace, "--watch": watch}
    of_lines = {"--out": out, "--part": part, "--date": date, "--rows": rows, "--cache_gb": cache_gb}
    check_files(has_lines, of_lines, {**others, "--share_prefix": share_prefix, "--kv_caching=False": not kv_caching})
    texts = [] if conversation or has_lines else read_prompts(prompts, prompt_file)
    note_escapes(stop)
    shape = None if schema is None else read_schema(Path(schema))
    longest = max_gen_len if max_gen_len is not None else 512 if conversation else 64
    sampling: Options = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
    sampling["repetition_penalty"] = repetition_penalty
    modes: Options = {"kv_caching": kv_caching, "share_prefix": share_prefix, "speculate": speculate}
    check_options(len(texts) or 1, longest, stop, {**sampling, **modes})
    from llama.api import load, pick_device
    from llama.ranks import torchrun

    chosen = pick_device(device)
    alone = "--watch" if watch else "--chat without prompts" if conversation else "--out" if has_lines else None
    join_ranks(chosen, timeout, one_process=alone)
    files: dict[str, Any] = {"path": ckpt_dir, "tokenizer_path": tokenizer_path, "device": device, "dtype": dtype}
    limits: dict[str, Any] = {"max_seq_len": max_seq_len, "kv_cache": kv_cache}
    writing: dict[str, Any] = {**sampling, "max_gen_len": longest, "stop": stop, "schema": shape}
    if has_lines:
        from llama.cli.prompt_files import answer_file, plan

        source, answers = plan(str(prompt_file), out, part)
        flags = {**limits, "device": str(chosen), "cache_gb": cache_gb}
    one_cpu = chosen.type == "cpu" and torchrun.world_size() == 1
    by_default = fast is None and (chat or prompt_file is not None) and not (watch or exact) and one_cpu
    notes: list[str] = []
    if chosen.type == "cpu":
        cores.choose_threads(notes.append)
    model, tokenizer = load(**files, **limits, quantize=quantize, fast=fast or by_default, exact=exact)
    if by_default:
        notes.append("--chat and --prompt_file run with --fast by default; --fast=False chooses the plain path")
    if notes:
        console.note("; ".join([f"execution: {model.execution}", *notes]))
    model.kv_caching = kv_caching
    about = setting(model, kv_cache)
    if has_lines:
        rows = rows or 16
        return answer_file(source, answers, model, tokenizer, writing, flags, rows=rows, speculate=speculate, date=date)
    if conversation:
        from llama.cli.terminal import TerminalChat

        return TerminalChat(model, tokenizer, speculate=speculate, **writing).run(about)
    asked = as_messages(texts, tokenizer) if chat else texts
    on_step = Trace(tokenizer, guesses=speculate is not None) if trace else None
    how: Options = {"share_prefix": share_prefix, "speculate": speculate, "on_step": on_step}
    pieces = model.stream(tokenizer, asked, **how, **writing)
    code = complete(model, texts, pieces, about, live=stream)
    if watch is not None and code == 0:
        console.put(
            write_watch_page(Path(watch), model, tokenizer, asked, Path(ckpt_dir), speculate=speculate, **writing)
        )
    return code


def read_schema(path: Path) -> dict[str, Any]:
    """Return the JSON Schema of a file. Raises ValueError and OSError."""
    try:
        return parse_object(read_regular(path, limit=1 << 20))
    except ValueError as error:
        raise ValueError(f"--schema {path}: {error}") from None


def check_files(has_lines: bool, of_lines: dict[str, Any], others: dict[str, Any]) -> None:
    """Raise ValueError for flags that mean nothing with JSON lines, or without, for numbers not above 0, or no date."""
    given = [name for name, value in (others if has_lines else of_lines).items() if value not in (None, (), False)]
    if given:
        raise ValueError(
            f"{given[0]} cannot be used with{'' if has_lines else 'out'} a file of JSON lines; leave it out"
        )
    for name in ("--rows", "--cache_gb"):
        if of_lines[name] is not None and not 0 < of_lines[name] < math.inf:
            raise ValueError(f"{name}={of_lines[name]} must be above 0, and finite")
    if (day := of_lines["--date"]) is not None:
        with suppress(ValueError):
            if str(a_date.fromisoformat(day)) == day:
                return
        raise ValueError(f"--date={day!r:.40} is no date; write it as YYYY-MM-DD")


def check_outputs(conversation: bool, *, stream: bool, trace: bool, watch: str | None, fast: bool) -> None:
    """Raise ValueError for flags that exclude each other, a page that cannot be written, or a closed standard input."""
    if (stream or conversation) and trace:
        first = "--stream" if stream else "--chat without prompts"
        raise ValueError(f"{first} and --trace would mix their output; give one of them")
    if watch is not None:
        from llama.host.files import check_writable

        if conversation:
            raise ValueError("--watch shows one text, and --chat without prompts makes many; give a prompt")
        if fast:
            raise ValueError("--watch records the plain path, which --fast does not use; leave out --fast")
        check_writable(Path(watch))
    if conversation:
        console.standard_input()  # raises if it is closed


def join_ranks(device: "torch.device", timeout: float, *, one_process: str | None) -> None:
    """Join the ranks of the torchrun that started this process, if any.

    `one_process` names a flag that needs one process; raises ValueError if it is given under torchrun.
    """
    from llama.ranks import torchrun

    if one_process is not None and torchrun.world_size() > 1:
        raise ValueError(f"{one_process} needs one process, and this is a rank of several; run it without torchrun")
    torchrun.join(torchrun.own_device(device), timeout=torchrun.check_timeout(timeout))


def complete(model: "Transformer", texts: list[str], pieces: "Stream", about: str, *, live: bool) -> int:
    """Print every prompt's text and the speed; return the exit code."""
    # Errors of the other ranks go to stderr.
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere) if model.ranks.rank else nullcontext():
        started = time.perf_counter()
        code = show(texts, pieces, live=live)
        seconds = time.perf_counter() - started
        ranks = f", {model.ranks.size} ranks" if model.ranks.size > 1 else ""
        tokens = sum(len(result["ids"]) for result in pieces.results)
        speed = f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s"
        proposed, accepted = pieces.guesses
        guesses = f", {accepted} of {proposed} guessed tokens right" if proposed else ""
        console.put(f"{speed}, prompts included{guesses} (batch {len(texts)}, {about}{ranks})")
    return code


def setting(model: "Transformer", kv_cache: str) -> str:
    """Return as text: the cache, the dtype and device, and how the model computes if not in the plain way."""
    cache = f"KV cache on ({kv_cache})" if model.kv_caching else "KV cache off"
    how = "" if str(model.execution) == "plain" else f", {model.execution}"
    return f"{cache}, {str(model.norm.weight.dtype).removeprefix('torch.')} on {model.device}{how}"


def write_watch_page(
    path: Path,
    model: "Transformer",
    tokenizer: "Tokenizer",
    prompts: Sequence[str | list[int]],
    checkpoint: Path,
    **writing: Any,
) -> str:
    """Write the page of the first prompt's text; return one line about it."""
    from llama.host.files import replace_file
    from llama.host.progress import progress_bar
    from llama.watch.record import record
    from llama.watch.watch_page import page

    with progress_bar("recording", unit="step") as bar:
        recording = record(model, tokenizer, prompts[0], progress=bar.update, **writing)
    content = page(recording, model=checkpoint.absolute().name).encode()  # "." has no name of its own
    replace_file(path, content)
    line = f"{path}: {len(recording.moments)} steps, {len(content) / 1024:,.0f} kB; open it in a browser"
    return line if len(prompts) == 1 else f"{line}; it shows the first of {len(prompts)} prompts"


def read_prompts(prompts: tuple[str, ...], prompt_file: str | None) -> list[str]:
    """Return the prompts as typed and the one in the file, or Meta's if there are none."""
    texts = list(prompts)
    if prompt_file == "-":
        from llama.ranks.torchrun import world_size  # here, because it imports torch

        if world_size() > 1:
            raise ValueError("--prompt_file=- can be read by one rank only; give a file")
    if prompt_file is not None:
        texts.append(read_prompt(prompt_file).removesuffix("\n"))
        check_one_prompt(prompt_file, texts[-1])
    return texts or list(PROMPTS)


def check_one_prompt(file: str, text: str) -> None:
    """Raise ValueError for a text of JSON lines, which has a prompt in each line; note that other lines are one prompt.

    Only the ends of the lines are examined: a line of another file's JSON may be of any size and depth.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    objects = len(lines) > 1 and all(re.match(r'\{\s*"', line) and line.endswith("}") for line in lines)
    name = "standard input" if file == "-" else file
    if objects:
        raise ValueError(
            f"{name} is a file of {len(lines)} JSON lines, and would be one prompt; give it as a file named .jsonl"
        )
    if len(lines) >= MANY_LINES:
        console.note(f"{name} is one prompt of {len(lines)} lines; a .jsonl file has a prompt in each line")


def note_escapes(stop: list[str]) -> None:
    """Print a notice for each stop string with a backslash and a letter that Python and C read as one character."""
    for text in stop:
        if found := re.search(r"\\[nrt]", text):
            console.note(
                f"--stop {text!r} has a backslash and the letter {found[0][1]}, which stay two characters; for a line "
                "end or a tab, write $'\\n' or $'\\t' in bash"
            )


def read_prompt(file: str) -> str:
    """Return the text of a file, or of standard input for "-"; raise ValueError if it is longer than PROMPT_LIMIT."""
    from llama.untrusted.files import read_text

    if file != "-":
        return read_text(Path(file), limit=PROMPT_LIMIT)
    try:
        text = console.standard_input().read(PROMPT_LIMIT + 1)
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is not {error.encoding.upper()}; convert it first") from None
    if len(text) > PROMPT_LIMIT:
        raise ValueError(
            f"standard input has more than the limit of {PROMPT_LIMIT / 1e6:,.0f} MB for a prompt; shorten it"
        )
    return text.removeprefix("\ufeff")  # a byte order mark


def check_options(rows: int, max_gen_len: int, stop: list[str], options: "Options") -> None:
    """Raise ValueError for wrong numbers before a checkpoint is read or the demo model downloaded."""
    from llama.args import ModelArgs
    from llama.request import make_request

    if "" in stop:
        raise ValueError("--stop is empty, so it would end every text at once; give at least one character")
    least = ModelArgs(vocab_size=1, max_seq_len=sys.maxsize)
    make_request(least, True, [[0]] * rows, max_gen_len, (), options)  # the shortest possible prompts


def as_messages(texts: list[str], tokenizer: "Tokenizer") -> list[list[int]]:
    """Return for each text the ids of a dialog in which it is the user's message, up to the answer."""
    from llama.tokenizer.chat import ChatFormat

    format = ChatFormat(tokenizer)
    return [format.encode_dialog_prompt([{"role": "user", "content": text}]) for text in texts]


def show(texts: list[str], pieces: "Stream", *, live: bool) -> int:
    """Print every prompt and its continuation, the first one while it is generated if `live`; return the exit code.

    If a signal (exit code 130, 143 or 129) or an error ends the run, the text so far is printed. The error is raised.
    """
    done = ""  # the printed part of the first text
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


class Trace:
    """Prints the tokens that each step is fed, for every active row, and how many of the last guess were right."""

    def __init__(self, tokenizer: "Tokenizer", *, guesses: bool = False) -> None:
        self.tokenizer, self.step, self.guesses = tokenizer, 0, guesses
        self.guessed: dict[int, tuple[int, int]] = {}  # by row: where the last guess began, and its tokens

    def __call__(self, step: "Step") -> None:
        console.put(f"step {self.step}")
        for row, prev_pos, cur_pos in zip(step.rows, step.prev_pos, step.cur_pos, strict=True):
            begin, count = self.guessed.pop(row, (0, 0))
            if count:
                console.put(f"  row {row}: {prev_pos - begin} of {count} guessed tokens were right")
            if self.guesses and self.step > 1 and cur_pos - prev_pos > 1:  # prompts are at most two steps
                self.guessed[row] = prev_pos + 1, cur_pos - prev_pos - 1
        self.step += 1
        for row, prev_pos, cur_pos, ids in zip(step.rows, step.prev_pos, step.cur_pos, step.ids, strict=True):
            console.put(
                f"  row {row}: prev_pos={prev_pos} cur_pos={cur_pos} "
                f"fed {len(ids)}: {ids} {self.tokenizer.decode(ids, begins=False)!r}"
            )
