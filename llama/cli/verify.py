"""Certify that switching the KV cache changes nothing: llama-kv verify [--dtype bf16] [--runs 50] [--exact].

A run's prompts follow from its seed; `certificate` measures and judges it. The command prints the sum of its runs, and
stores them in a JSON file. Knows models by their paths; does not know which difference is a violation.
"""

import random
import shlex
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from llama.api import load, pick_cache, pick_device
from llama.host import console
from llama.host.cores import FreeCores
from llama.host.files import check_writable
from llama.host.machine import environment
from llama.host.progress import progress_bar
from llama.kv_cache import KVCache
from llama.kv_cache.names import kinds_named
from llama.model import Transformer
from llama.ranks.torchrun import world_size
from llama.texts.origin import weights_digest
from llama.tokenizer import Tokenizer
from llama.verify.certificate import Certificate, report
from llama.verify.measured_run import STAGES, Figures, measure_run
from llama.verify.passes import reference_of
from llama.verify.tolerance import TOLERANCE_FACTOR


def main(
    *,
    ckpt_dir: str = "demo",
    dtype: str = "fp32",
    batch_size: int = 4,
    tokens: int = 64,
    prompt_len: int = 8,
    seed: int = 0,
    runs: int = 1,
    exact: bool = False,
    fast: bool = False,
    quantize: str = "auto",
    activations: int = 16,
    kv_cache: str = "static",
    device: str = "auto",
    output: str = "results/verify.json",
) -> int:
    """Certify that a model writes the same with its KV cache on and off, down to rounding; or, if exact, to the bit.

    Exits with 0 if all runs are certified, 1 if one found a bug, 2 on bad input.

    Args:
        ckpt_dir: Meta's or Hugging Face's checkpoint directory, a .gguf file, or "demo".
        dtype: The dtype to compute in: auto, fp32, bf16, fp16 or fp64.
        batch_size: The rows of a run.
        tokens: The number of greedy tokens in each row; at least 2.
        prompt_len: The longest prompt; prompts are random ids, from 1 to this many a row.
        seed: The seed of the first run, which draws its prompts; each further run has the next seed.
        runs: How many runs to make and to add up.
        exact: Measure exact mode, in which no bit may differ.
        fast: With exact, use the exact mode of native code, if it supports the model.
        quantize: With exact and fast, quantise the weights to int8, int4, stored or none; see llama-kv run.
        activations: With packed weights, 8 rounds the inputs of products to 8 bits.
        kv_cache: The kind of cache, NAME or NAME:PARAMS: static, concat, paged, or FILE.py:NAME[:PARAMS]. A lossy kind
            is rejected; llama-kv bench --preset caches measures those.
        device: The device to compute on: auto, cpu, cuda or mps.
        output: The file to write the runs to, as JSON; it is replaced after each run.
    """
    if world_size() > 1:
        raise ValueError("this command certifies one process; start it without torchrun")
    if (fast or quantize not in ("auto", "none")) and not exact:
        flags = "--exact" if fast else "--exact --fast"
        raise ValueError(f"native code is certified to the bit, and not down to rounding; give {flags}, too")
    check_numbers(batch_size=batch_size, tokens=tokens, prompt_len=prompt_len, seed=seed, runs=runs)
    kind = lossless_kind(kv_cache)
    path = Path(output)
    check_replaced(path)
    check_writable(path)
    packing: dict[str, Any] = {"quantize": quantize, "activations": activations}
    if pick_device(device).type == "cpu":
        FreeCores().choose_threads(console.note)
    model, tokenizer = load(ckpt_dir, dtype=dtype, device=device, kv_cache=kind, exact=exact, fast=fast, **packing)
    sizes = {"batch_size": batch_size, "tokens": tokens, "prompt_len": prompt_len}
    config = {"model": ckpt_dir, "kv_cache": kv_cache, **sizes, **facts_of(model)}
    check_lengths(model, tokenizer, tokens=tokens, prompt_len=prompt_len)
    certificate = Certificate(config, environment(model.device), {})
    for run, figures in make_runs(model, tokenizer, config, range(seed, seed + runs)):
        certificate.runs[run] = figures
        certificate.write(path)  # an interruption keeps the runs that are done
    console.put(f"runs in {path}: {runs}\n\n{report(certificate)}")
    return int(bool(certificate.total.violations))


def facts_of(model: Transformer) -> dict[str, Any]:
    """Return the facts of a loaded model that belong to a run's configuration."""
    execution = model.execution
    return {
        "weights": weights_digest(model),
        "dtype": str(model.norm.weight.dtype).removeprefix("torch."),
        "device": str(model.device),
        "exact": execution.exact,
        "runner": execution.runner,
        "quantize": execution.weights,
        "activations": execution.activations,
        "slack": TOLERANCE_FACTOR[model.norm.weight.itemsize],
    }


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_numbers(**numbers: int) -> None:
    """Raise ValueError for numbers that no model can use."""
    least = {"batch_size": 1, "tokens": 2, "prompt_len": 1, "seed": 0, "runs": 1}  # the second token reads the cache
    for name, number in numbers.items():
        if number < least[name]:
            raise ValueError(f"{name}={number} must be at least {least[name]}")


def check_replaced(path: Path) -> None:
    """Raise ValueError for a file that this command did not write: it would be overwritten."""
    if path.is_file():
        with path.open("rb") as file:
            if b'"llama-kv/verify/' not in file.read(100):
                raise ValueError(f"{path} is not a file of this command; move it away, or give another --output")


def lossless_kind(text: str) -> str:
    """Return the name of the kind of cache; raise ValueError for a lossy kind."""
    kind = pick_cache(text)
    if not all(KVCache.named(part).lossless for part, _ in kinds_named(kind)):
        raise ValueError(
            f"kv_cache={text!r} is lossy, so it cannot be certified to change nothing; "
            f"llama-kv bench --preset caches --kv_cache {shlex.quote(text)} measures its quality"
        )
    return kind


def check_lengths(model: Transformer, tokenizer: Tokenizer, *, tokens: int, prompt_len: int) -> None:
    """Raise ValueError, before anything slow, for texts beyond the model's limit."""
    if prompt_len + tokens > model.args.max_seq_len:
        raise ValueError(
            f"prompt_len={prompt_len} plus tokens={tokens} is more than max_seq_len={model.args.max_seq_len}; "
            "reduce one of them"
        )
    if tokenizer.adds_bos and prompt_len < 2:
        raise ValueError("prompt_len=1 fits BOS only, so all prompts would be equal; give at least 2")


# ---- runs ------------------------------------------------------------------------------------------------------------


def draw_prompts(seed: int, rows: int, longest: int, vocab_size: int, bos: int | None) -> list[list[int]]:
    """Return `rows` prompts of up to `longest` random ids. If `bos` is given, it comes first and never alone."""
    dice = random.Random(seed)
    head = [] if bos is None else [bos]
    lengths = [dice.randint(1, longest - len(head)) for _ in range(rows)]
    return [[*head, *(dice.randrange(vocab_size) for _ in range(length))] for length in lengths]


def make_runs(
    model: Transformer, tokenizer: Tokenizer, config: dict[str, Any], seeds: range
) -> Iterator[tuple[int, Figures]]:
    """Yield each seed with the figures of its run, as soon as they are measured; show the stages as a bar."""
    begun = count()
    with progress_bar(total=1 + STAGES * len(seeds), unit="stage") as bar:

        def begin(stage: str, *, prefix: str = "") -> None:
            bar.update(next(begun) > 0)  # the stage before has ended
            bar.set_description(prefix + stage)

        begin("copying the model to float64")
        reference = reference_of(model)
        bos = tokenizer.bos_id if tokenizer.adds_bos else None
        for number, seed in enumerate(seeds, 1):
            prompts = draw_prompts(seed, config["batch_size"], config["prompt_len"], model.args.vocab_size, bos)
            on_stage = partial(begin, prefix=f"run {number} of {len(seeds)}: ")
            yield seed, measure_run(model, reference, prompts, config["tokens"], seed=seed, on_stage=on_stage)
