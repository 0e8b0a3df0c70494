"""How long one step takes, by context, batch and mode: the curves under the table.

A step makes one token per row out of a context of n tokens: with the cache the newest is fed, without it all n are.
A cached step can stand at any position that was fed before, so one prefill of the longest context serves all of them.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from llama.bench.run.filling import cache_size, filled_cache
from llama.bench.schema import CacheSize, Crossover, StepTimes
from llama.bench.statistics import percentiles
from llama.model import Transformer

LEAST, MOST, ENOUGH = 3, 9, 0.3  # repetitions, at least and at most, and the seconds that are enough of them


@torch.inference_mode()
def step_times(
    model: Transformer,
    batch_size: int,
    contexts: Sequence[int],
    *,
    kv_caching: bool,
    logits: Literal["last", "all"] = "last",
) -> list[StepTimes]:
    """Time a step at every context length, up to the model's limit, each after a warm-up of its own shape."""
    stream = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.args.vocab_size, (batch_size, max(contexts)), generator=stream).to(model.device)
    switched = model.with_kv_caching(kv_caching)
    cache = model.new_cache(rows=batch_size, length=max(contexts)) if kv_caching else None
    if kv_caching:
        switched(tokens, 0, cache=cache, logits="last")
    steps: list[StepTimes] = []
    for context in sorted(contexts, reverse=True):  # a cache that grows forgets what lies past a position
        start = context - 1 if kv_caching else 0
        step = partial(_step, switched, tokens[:, start:context], start, cache=cache, logits=logits)
        seconds = percentiles(_repeat(step, model))
        steps.append({"batch_size": batch_size, "context": context, "kv_caching": kv_caching, "seconds": seconds})
    return steps[::-1]


def _more(seconds: list[float], model: Transformer) -> bool:
    more = len(seconds) < LEAST or (len(seconds) < MOST and sum(seconds) < ENOUGH)
    # Clocks differ, and all ranks go on together.
    return bool(model.ranks.decide(torch.tensor([more], dtype=torch.uint8, device=model.device)))


def _step(model: Transformer, fed: Tensor, start: int, **options: Any) -> None:
    model(fed, start, **options)[:, -1].argmax(-1).tolist()  # on the host, as the loop has it


def _repeat(work: Callable[[], object], model: Transformer) -> list[float]:
    work()
    seconds: list[float] = []
    while _more(seconds, model):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return seconds


def crossover(steps: Sequence[StepTimes]) -> Crossover:
    """Return the shortest context from which on the cached step was the faster one at every length that was tried.

    Faster beyond the spread: the slow end of its times lies below the fast end of the others.
    """
    seconds = {(step["context"], step["kv_caching"]): step["seconds"] for step in steps}
    found = None
    for context in sorted({step["context"] for step in steps}, reverse=True):
        if seconds[context, True]["p90"] >= seconds[context, False]["p10"]:
            break
        found = context
    return {"batch_size": steps[0]["batch_size"], "context": found, "steps": list(steps)}


@torch.inference_mode()
def cache_sizes(model: Transformer, lengths: Sequence[int]) -> list[CacheSize]:
    """Take caches of one row of each length, and compare their bytes with the prediction."""
    return [cache_size(model, filled_cache(model, length, reserved=length), length) for length in lengths]


def context_lengths(longest: int) -> list[int]:
    """Return context lengths up to `longest`, closer together where the cache begins to pay.

    Out of a context of one token both modes do the same, so it is there only where nothing else is.
    """
    steps = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192]
    octaves = [256 * 2**n for n in range(20)]
    return [*(length for length in steps + octaves if length < longest), longest]
