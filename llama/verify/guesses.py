"""Compare texts with and without speculation: ids and log-probabilities, greedy and sampled.

Every guess is fed, whatever it costs: those of `Lookup`, and the text itself with wrong tokens at random places, so
that guesses are right for every number of tokens. Reads no files, prints nothing.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch

from llama.batch import Batch, Token
from llama.generation import make_stepper
from llama.model import Transformer
from llama.request import Options, make_request
from llama.speculation import Eager, Lookup, Proposer

WAYS: dict[str, Options] = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "top_p": 0.95}}
RIGHT = 0.8  # the share of right tokens in the guesses of `Noisy`


@dataclass
class Compared:
    """The tokens of one way that were compared.

    tokens: how many. ids, logprobs: how many differ. proposed, accepted: how many were guessed, and of these right.
    """

    tokens: int = 0
    ids: int = 0
    logprobs: int = 0
    proposed: int = 0
    accepted: int = 0


class Noisy:
    """Proposes what follows in the text of these that begins alike, with wrong tokens at random places."""

    def __init__(self, texts: Sequence[list[int]], vocab_size: int, seed: int) -> None:
        self._texts, self._vocab_size, self._dice = texts, vocab_size, random.Random(seed)

    def propose(self, ids: Sequence[int], count: int) -> list[int]:
        follows = next((text[len(ids) :] for text in self._texts if text[: len(ids)] == list(ids)), [])[:count]
        return [id if self._dice.random() < RIGHT else self._dice.randrange(self._vocab_size) for id in follows]


@torch.inference_mode()
def compare_guesses(
    model: Transformer, prompts: Sequence[list[int]], tokens: int, *, seed: int, totals: dict[str, Compared]
) -> None:
    """Continue the prompts by `tokens` ids in each way, plain and by guesses, and add what differs to `totals`."""
    for name, way in WAYS.items():
        how: Options = {**way, "seed": seed, "logprobs": True}
        plain, _ = _tokens(model, prompts, tokens, how, None)
        texts = [[*prompt, *(token.id for token in row)] for prompt, row in zip(prompts, plain, strict=True)]
        total = totals.setdefault(name, Compared())
        for proposer in (Lookup, partial(Noisy, texts, model.args.vocab_size, seed)):
            made, batch = _tokens(model, prompts, tokens, how, proposer)
            total.proposed, total.accepted = total.proposed + batch.proposed, total.accepted + batch.accepted
            pairs = [pair for rows in zip(plain, made, strict=True) for pair in zip_longest(*rows)]
            total.tokens += len(pairs)
            total.ids += sum(one is None or other is None or one.id != other.id for one, other in pairs)
            total.logprobs += sum(one != other for one, other in pairs)


def _tokens(
    model: Transformer, prompts: Sequence[list[int]], count: int, how: Options, speculate: Callable[[], Proposer] | None
) -> tuple[list[list[Token]], Batch]:
    """Return the tokens of each row, and the batch."""
    options: Options = {**how, "speculate": speculate}
    batch = Batch(make_request(model.args, True, prompts, count, (), options), model.args.vocab_size)
    stepper = make_stepper(model.with_kv_caching(True), batch, None)
    stepper.width = None if speculate is None else Eager()
    rows: list[list[Token]] = [[] for _ in prompts]
    for _ in stepper.prefill():
        pass
    for chosen in stepper:
        for token in batch.record(chosen):
            rows[token.row].append(token)
        if not batch.goes_on:
            break
    return rows, batch
