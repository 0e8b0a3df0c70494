"""The passes that compute the same logits: cache on or off, in one forward, in steps, in pieces, one row alone.

Knows the model and how tokens can be fed. Does not know which passes are compared, nor which difference is rounding.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llama.batch import NonFiniteLogits, padded
from llama.model import Transformer
from llama.request import Options
from llama.speculation import EveryGuess, Speculate

UNCACHED, STEPS, PIECES, ALONE = "uncached in one pass", "cached step by step", "pieces", "row alone"
FREE_CACHED, FREE_UNCACHED, FREE_GUESSED = "free cached", "free uncached", "free with guesses"
WIDE_STEPS, WIDE_PIECES = f"float64 {STEPS}", f"float64 {PIECES}"

RIGHT = 0.8  # the share of right tokens in the guesses of `Noisy`

Texts = Sequence[Sequence[int]]
Chunk = tuple[int, int, Tensor]  # a row, a position in it, and the logits from that position on, (n, vocab)


def reference_of(model: Transformer) -> Transformer:
    """Return a float64 copy with the same rounded weights and the same float32 rotations."""
    reference = copy.deepcopy(model)
    reference.exact = False  # exact operations are under test; operations that a researcher added define the model
    reference.runner = None  # native code is under test, too
    device = torch.device("cpu") if model.device.type == "mps" else model.device  # Metal has no float64
    return reference.to(device, torch.float64)


@dataclass(frozen=True)
class FreeRun:
    """A greedy generation by the real loop: its ids, and each forward's logits (bsz, vocab) and width.

    failure: the violation if the logits were not finite; else None.
    """

    name: str
    ids: list[list[int]]
    logits: list[Tensor]
    widths: list[int]
    failure: str | None = None


class Noisy:
    """Proposes what follows in the text of these that begins alike, with wrong tokens at random places."""

    def __init__(self, texts: Texts, vocab_size: int, seed: int) -> None:
        self._texts, self._vocab_size, self._dice = texts, vocab_size, random.Random(seed)

    def propose(self, ids: Sequence[int], count: int) -> list[int]:
        follows = next((text[len(ids) :] for text in self._texts if list(text[: len(ids)]) == list(ids)), [])[:count]
        return [id if self._dice.random() < RIGHT else self._dice.randrange(self._vocab_size) for id in follows]


def run_guessed(model: Transformer, prompts: Texts, texts: Texts, tokens: int, *, seed: int) -> FreeRun:
    """Continue every prompt by `tokens` ids; all guesses of `Noisy` are fed, whatever they cost."""
    guesses = EveryGuess(partial(Noisy, texts, model.args.vocab_size, seed))
    return run_free(model, prompts, tokens, kv_caching=True, name=FREE_GUESSED, speculate=guesses)


def run_free(
    model: Transformer,
    prompts: Texts,
    tokens: int,
    *,
    kv_caching: bool,
    name: str = "",
    speculate: Speculate | None = None,
) -> FreeRun:
    """Continue every prompt by `tokens` ids. Raises ValueError as `generate_tokens` does."""
    run = FreeRun(name or (FREE_CACHED if kv_caching else FREE_UNCACHED), [[] for _ in prompts], [], [])
    options: Options = {"temperature": 0, "kv_caching": kv_caching, "speculate": speculate}
    with record_logits(model, run.logits, run.widths):
        try:
            run.ids[:], _ = model.generate_tokens(prompts, tokens, stop_ids=(), **options)
        except NonFiniteLogits as error:
            return replace(run, failure=f"{run.name}: {error}")
    return run


@contextmanager
def record_logits(model: Transformer, logits: list[Tensor], widths: list[int]) -> Iterator[None]:
    """Append the last logits of each row, (bsz, vocab), and the width of every forward inside the block."""

    def record(_: torch.nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        widths.append(inputs[0].shape[1])
        logits.append(output[:, -1])

    hook = model.register_forward_hook(record)
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
    """Return the passes over `texts` by name. Each one computes when it is iterated.

    They align the texts on the right. The passes by steps cut them before each generated token, as generation feeds
    them; the passes in pieces cut them at random columns that leave every row a first token.
    """
    longest, shortest = max(map(len, texts)), min(map(len, texts))
    steps, columns = range(longest - tokens + 1, longest), range(longest - shortest + 1, longest)
    dice = random.Random(seed)
    pieces = sorted(dice.sample(columns, dice.randint(1, min(8, len(columns)))))
    return {
        WIDE_STEPS: _through_cache(reference, texts, steps),
        WIDE_PIECES: _through_cache(reference, texts, pieces),
        STEPS: _through_cache(model, texts, steps),
        PIECES: _through_cache(model, texts, pieces),
        ALONE: ((row, 0, logits) for row, text in enumerate(texts) for _, _, logits in in_one_pass(model, [text])),
    }


def in_one_pass(model: Transformer, texts: Texts) -> Iterator[Chunk]:
    """Yield the logits of every text, computed without the cache."""
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
