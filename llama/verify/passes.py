"""The ways to compute the same logits: with the KV cache on and off, fed in one pass, in steps, in pieces, row by row.

Knows the model and how it can be fed. Does not know what is compared with what, nor what of a difference is rounding.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from llama.batch import NonFiniteLogits, padded
from llama.model import Transformer

UNCACHED, STEPS, PIECES, ALONE = "uncached in one pass", "cached step by step", "pieces", "row alone"
FREE_CACHED, FREE_UNCACHED = "free cached", "free uncached"
WIDE_STEPS, WIDE_PIECES = f"float64 {STEPS}", f"float64 {PIECES}"

Texts = Sequence[Sequence[int]]
Chunk = tuple[int, int, Tensor]  # a row, a position in it, and the logits from there on, (n, vocab)


def reference_of(model: Transformer) -> Transformer:
    """Return a float64 copy: the same rounded weights and the same float32 rotations, and no rounding after them."""
    reference = copy.deepcopy(model)
    reference.exact = False  # exact operations are among what is judged; a researcher's own define the model
    reference.runner = None  # and so is native code
    device = torch.device("cpu") if model.device.type == "mps" else model.device  # Metal has no float64
    return reference.to(device, torch.float64)


@dataclass(frozen=True)
class FreeRun:
    """A greedy generation by the real loop: its ids, each forward's logits (bsz, vocab) and width, or why it failed."""

    name: str
    ids: list[list[int]]
    logits: list[Tensor]
    widths: list[int]
    failure: str | None = None


def run_free(model: Transformer, prompts: Texts, tokens: int, *, kv_caching: bool) -> FreeRun:
    """Continue every prompt by `tokens` ids. Raises ValueError on what generation refuses."""
    run = FreeRun(FREE_CACHED if kv_caching else FREE_UNCACHED, [[] for _ in prompts], [], [])
    with heard(model, run.logits, run.widths):
        try:
            run.ids[:], _ = model.generate_tokens(prompts, tokens, stop_ids=(), temperature=0, kv_caching=kv_caching)
        except NonFiniteLogits as error:
            return replace(run, failure=f"{run.name}: {error}")
    return run


@contextmanager
def heard(model: Transformer, logits: list[Tensor], widths: list[int]) -> Iterator[None]:
    """Add the logits at the rows' ends, (bsz, vocab), and the width of each forward that is run under `with`."""

    def keep(_: torch.nn.Module, given: tuple[Any, ...], made: Tensor) -> None:
        widths.append(given[0].shape[1])
        logits.append(made[:, -1])

    hook = model.register_forward_hook(keep)
    try:
        yield
    finally:
        hook.remove()


def at_steps(prompts: Texts, run: FreeRun, steps: Sequence[int]) -> Iterator[Chunk]:
    """Yield the logits of the first `steps[row]` steps of every row, at their positions in its text."""
    for step, logits in enumerate(run.logits):
        for row, prompt in enumerate(prompts):
            if step < steps[row]:
                yield row, len(prompt) - 1 + step, logits[row : row + 1]


def all_passes(
    model: Transformer, reference: Transformer, texts: list[list[int]], tokens: int, seed: int
) -> dict[str, Iterator[Chunk]]:
    """Return what computes the logits of the texts, each when it is asked for.

    Stood up so that all texts end at the same column, they are cut at columns: behind the prompts and then before each
    token, as generation does it, or anywhere that leaves every row a first token.
    """
    longest, shortest = max(map(len, texts)), min(map(len, texts))
    steps, places = range(longest - tokens + 1, longest), range(longest - shortest + 1, longest)
    dice = random.Random(seed)
    pieces = sorted(dice.sample(places, dice.randint(1, min(8, len(places)))))
    return {
        WIDE_STEPS: _through_cache(reference, texts, steps),
        WIDE_PIECES: _through_cache(reference, texts, pieces),
        STEPS: _through_cache(model, texts, steps),
        PIECES: _through_cache(model, texts, pieces),
        ALONE: ((row, 0, logits) for row, text in enumerate(texts) for _, _, logits in in_one_pass(model, [text])),
    }


def in_one_pass(model: Transformer, texts: Texts) -> Iterator[Chunk]:
    """Yield the logits of every text, fed without the cache."""
    logits = model.with_kv_caching(False)(padded(texts, model.device))
    yield from ((row, 0, logits[row, : len(text)]) for row, text in enumerate(texts))


def _through_cache(model: Transformer, texts: Texts, cuts: Sequence[int]) -> Iterator[Chunk]:
    longest = max(map(len, texts))
    starts = [0] * len(texts)
    cached, cache = model.with_kv_caching(True), model.new_cache(rows=len(texts), length=longest)
    for cut in (*cuts, longest):
        ends = [cut - longest + len(text) for text in texts]
        fed = [text[start:end] for text, start, end in zip(texts, starts, ends, strict=True)]
        logits = cached(padded(fed, model.device), starts, cache=cache)
        yield from ((row, starts[row], logits[row, : len(ids)]) for row, ids in enumerate(fed))
        starts = ends
