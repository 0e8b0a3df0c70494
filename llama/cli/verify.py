"""Certify that switching the KV cache changes nothing: python -m llama.verify [--dtype bf16] [--runs 50] [--exact].

Runs are drawn by their seeds, measured and judged by `certificate`, and kept in a JSON file in which they add up; what
is printed is the sum of that file. Knows models by their paths, files and words; nothing of what a violation is.
"""

import hashlib
import random
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from llama.api import load
from llama.cli.progress import progress_bar
from llama.costs import size
from llama.exact import slowdown
from llama.host.files import check_writable
from llama.host.machine import available_memory, environment
from llama.kv_cache import KVCache, cache_kind
from llama.kv_cache.names import kinds_named
from llama.model import Transformer
from llama.ranks.torchrun import world_size
from llama.tokenizer import Tokenizer
from llama.verify import certificate
from llama.verify.passes import reference_of
from llama.verify.results import Run, add_run, group_of, read_runs, report
from llama.verify.tolerance import TOLERANCE_FACTOR


def main(
    *,
    ckpt_dir: str = "demo",
    dtype: str = "fp32",
    batch_size: int = 4,
    tokens: int = 64,
    prompt_len: int = 8,
    seed: int | None = None,
    runs: int = 1,
    exact: bool = False,
    fast: bool = False,
    quantize: str | None = None,
    activations: int = 16,
    repack: bool = True,
    kv_cache: str = "static",
    device: str = "auto",
    output: str = "results/verify.json",
) -> int:
    """Certify that a model writes the same with its KV cache on and off, down to rounding; or, if exact, to the bit.

    Exits with 0 where all runs of the file are certified, 1 where one found a bug, 2 on bad input. A run with a bug
    stays in the file; move the file away once the bug is mended.

    Args:
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo".
        dtype: Numbers that it computes in: auto, fp32, bf16, fp16 or fp64.
        batch_size: The rows of a run.
        tokens: How many tokens each row grows by, greedily; at least 2.
        prompt_len: Prompts are random ids, from 1 to this many a row.
        seed: Of the first run, which draws its prompts; by default the first number that the file does not have.
        runs: How many runs to add to the file; 0 prints what it holds.
        exact: Measure exact mode, and allow not a bit to differ.
        fast: With exact: the exact mode of native code, where that serves the model.
        quantize: With exact and fast: int8, int4, or stored, see llama-kv run.
        activations: With quantize: 8 rounds what is multiplied by such weights to 8 bits.
        repack: With stored weights: --repack=False leaves them in their file, mapped.
        kv_cache: The kind of cache, NAME or NAME:PARAMS: static, concat, paged, or FILE.py:NAME[:PARAMS]. One that
            keeps less than it is given is refused: llama-kv bench --preset caches measures those.
        device: Where it computes: auto, cpu, cuda or mps.
        output: The file in which runs add up.
    """
    if world_size() > 1:
        raise ValueError("this command certifies one process; exact mode across ranks is what the tests compare")
    if (fast or quantize is not None) and not exact:
        flags = "--exact" if fast else "--exact --fast"
        raise ValueError(f"native code is certified to the bit, and not down to rounding; give {flags}, too")
    path = Path(output)
    check_numbers(batch_size=batch_size, tokens=tokens, prompt_len=prompt_len, seed=seed, runs=runs)
    before = read_runs(path)
    if runs == 0:
        if not before:
            raise ValueError(f"{path} holds no runs yet; make some with --runs 1")
        return report(before, path)
    kind = lossless_kind(kv_cache)
    check_writable(path)
    packing: dict[str, Any] = {"quantize": quantize, "activations": activations, "repack": repack}
    model, tokenizer = load(ckpt_dir, dtype=dtype, device=device, kv_cache=kind, exact=exact, fast=fast, **packing)
    execution = model.execution
    config = {
        "model": ckpt_dir,
        "weights": weights_id(model),
        "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
        "device": str(model.device),
        "batch_size": batch_size,
        "tokens": tokens,
        "prompt_len": prompt_len,
        "exact": execution.exact,
        "runner": execution.runner,
        "quantize": execution.weights,
        "activations": execution.activations,
        "kv_cache": kv_cache,
        "slack": TOLERANCE_FACTOR[model.norm.weight.itemsize],
    }
    check_room(model, tokenizer, config)
    for run in make_runs(model, tokenizer, config, choose_seeds(before, config, seed, runs)):
        add_run(path, run)
    return report(read_runs(path), path)


# ---- what is asked for -----------------------------------------------------------------------------------------------


def check_numbers(*, seed: int | None, runs: int, **sizes: int) -> None:
    """Refuse what no model could do."""
    least = {"batch_size": 1, "tokens": 2, "prompt_len": 1}  # the cache is first read for the second token
    for name, number in sizes.items():
        if number < least[name]:
            raise ValueError(f"{name}={number} must be at least {least[name]}")
    if runs < 0:
        raise ValueError(f"runs={runs} must be at least 0, which prints the sum of the file")
    if seed is not None and seed < 0:
        raise ValueError(f"seed={seed} must not be negative")
    if seed is not None and runs == 0:
        raise ValueError(f"seed={seed} means nothing with runs=0, which makes none; leave one of them out")


def lossless_kind(text: str) -> str:
    """Return the name of the kind that is asked for; refuse one that says itself that it changes what it is given."""
    kind = cache_kind(text)
    if not all(KVCache.named(part).lossless for part, _ in kinds_named(kind)):
        raise ValueError(
            f"kv_cache={text!r} does not keep all it is given, so it is not equal by design and cannot be certified; "
            f"llama-kv bench --preset caches --kv_cache {shlex.quote(text)} measures how far off it is"
        )
    return kind


def check_room(model: Transformer, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Refuse, before anything slow, texts longer than the model's limit and what does not fit into memory."""
    rows, tokens, prompt_len = config["batch_size"], config["tokens"], config["prompt_len"]
    if prompt_len + tokens > model.args.max_seq_len:
        raise ValueError(
            f"prompt_len={prompt_len} and tokens={tokens} together pass max_seq_len={model.args.max_seq_len}; "
            "shorten one of them"
        )
    if tokenizer.adds_bos and prompt_len < 2:
        raise ValueError("prompt_len=1 leaves room for BOS alone, so that all prompts would be one; give at least 2")
    needed = certificate.bytes_needed(model, rows=rows, length=prompt_len + tokens, tokens=tokens)
    free = available_memory(model.device)
    if free is not None and needed > free:
        raise ValueError(
            f"{rows} rows of {prompt_len + tokens} positions need {size(needed)} beside the model, for its float64 "
            f"copy and the logits, and {model.device} has {size(free)} left; give a smaller batch_size, fewer tokens, "
            "or another device"
        )


def weights_id(model: Transformer) -> str:
    """Return 16 hexadecimal digits that tell models apart: SHA-256 of a sample of each tensor, some 1000 numbers."""
    digest = hashlib.sha256()
    for name, weight in model.state_dict().items():
        some = weight.flatten()[:: max(1, weight.numel() // 1000)].contiguous()
        digest.update(f"{name} {tuple(weight.shape)}".encode() + bytes(some.view(torch.uint8).tolist()))
    return digest.hexdigest()[:16]


def choose_seeds(runs: Sequence[Run], config: dict[str, Any], seed: int | None, wanted: int) -> list[int]:
    """Return `wanted` seeds that no run had with which these are added up; from `seed` on, or whichever come first."""
    used = {run["seed"] for run in runs if group_of(run["config"]) == group_of(config)}
    if seed is None:
        free = (number for number in count() if number not in used)
        return [next(free) for _ in range(wanted)]
    seeds = range(seed, seed + wanted)
    taken = sorted(used.intersection(seeds))
    if taken:
        raise ValueError(
            f"seed={taken[0]} has been run, and would count twice; leave seed out, or give one from {max(used) + 1} on"
        )
    return list(seeds)


def draw_prompts(seed: int, rows: int, longest: int, vocab_size: int, bos: int | None) -> list[list[int]]:
    """Return `rows` prompts of up to `longest` random ids, BOS first where there is one and never alone."""
    dice = random.Random(seed)
    head = [] if bos is None else [bos]
    lengths = [dice.randint(1, longest - len(head)) for _ in range(rows)]
    return [[*head, *(dice.randrange(vocab_size) for _ in range(length))] for length in lengths]


def make_runs(model: Transformer, tokenizer: Tokenizer, config: dict[str, Any], seeds: Sequence[int]) -> Iterator[Run]:
    """Make the runs of `seeds`, each when it is asked for."""
    timed = model.exact and model.runner is None  # native code does in exact mode what it does without
    with progress(model, timed + 1 + certificate.STAGES * len(seeds)) as begin:
        cost = None
        if timed:
            begin("timing what exact mode costs")
            cost = dict(zip(("prefill", "step"), slowdown(model), strict=True))
        machine = environment(model.device)
        begin("a copy in float64")
        reference = reference_of(model)
        bos = tokenizer.bos_id if tokenizer.adds_bos else None
        for number, seed in enumerate(seeds, 1):
            prompts = draw_prompts(seed, config["batch_size"], config["prompt_len"], model.args.vocab_size, bos)
            started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
            of_this = partial(begin, number=f"run {number} of {len(seeds)}: ")
            figures = certificate.measure(model, reference, prompts, config["tokens"], seed=seed, on_stage=of_this)
            yield {
                "config": config,
                "seed": seed,
                "started": started,
                "seconds": round(time.perf_counter() - began, 3),
                "environment": machine,
                "exact_cost": cost,
                "figures": asdict(figures),
            }


@contextmanager
def progress(model: Transformer, parts: int) -> Iterator[Callable[..., None]]:
    """Show which of how many parts is being made, and how many forwards the model has run for it.

    What it gives is called with the name of each part when it begins.
    """
    with progress_bar(total=parts, unit="part") as bar:
        begun = forwards = 0

        def begin(part: str, *, number: str = "") -> None:
            nonlocal begun, forwards
            begun, forwards = begun + 1, 0
            bar.update(int(begun > 1))  # the part before is made
            bar.set_postfix_str("", refresh=False)
            bar.set_description(number + part)

        def count_forward(*_: Any) -> None:
            nonlocal forwards
            forwards += 1
            bar.set_postfix_str(f"forward {forwards}")

        hook = model.register_forward_hook(count_forward)  # which the copy in float64 will have, too
        try:
            yield begin
        finally:
            hook.remove()
