"""Compare many texts that come and go with each text alone: all ids and log-probabilities, bit for bit.

    python scripts/soak_texts.py --tokens 100000 [--quantize none] [--kv_cache static] [--rows 16]

Texts arrive at any time, greedy or sampled, half of them with a common beginning and half with guesses; they end at a
stop token or their length, or are cancelled. The bytes of all caches are compared with the prediction at every step.
Ends with exit code 1 if a text differs. An interrupted run says what it has compared; another --seed draws others.
"""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

if __name__ == "__main__":
    from llama.host import console

    console.quiet_imports()

import torch

from llama import cli, load
from llama.texts.many import steady
from llama.texts.scheduler import Text, Texts

WAYS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.2, "top_k": 40},
    {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.2},
]


@dataclass
class Soak:
    """What a run has compared. tokens, texts: how many. differing: the numbers of texts that differ. most_bytes: of all
    caches."""

    tokens: int = 0
    texts: int = 0
    cancelled: int = 0
    differing: list[int] = field(default_factory=list)
    most_bytes: int = 0


def some_text(draw: random.Random, common: Sequence[int], ids: int, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of `Texts.add` for a text of random ids and settings, with log-normal lengths.

    It has at most 5 times as many tokens as `common`.
    """

    def length(mean: float) -> int:
        return min(max(round(draw.lognormvariate(mean, 0.8)), 1), len(common))

    prompt = [draw.randrange(ids) for _ in range(length(3.5))]
    prompt = prompt * 3 if draw.random() < 0.3 else prompt  # copies itself
    prompt = [*common[: draw.randrange(len(common) // 2, len(common))], *prompt] if draw.random() < 0.5 else prompt
    guesses = {"speculate": "lookup"} if draw.random() < 0.5 else {}
    how = {"max_gen_len": length(4.0), "stop_ids": stop_ids, "seed": draw.randrange(2**32), "logprobs": True}
    return {"prompt": prompt, **how, **guesses, **draw.choice(WAYS)}


def soak(model: Any, done: Soak, *, tokens: int, rows: int, seed: int, cache_bytes: int | None) -> None:
    """Compare texts of at least so many new tokens, and count into `done`. Raises the error of a text that fails."""
    draw, vocab, longest = random.Random(seed), model.args.vocab_size, min(400, model.args.max_seq_len // 5)
    common, stop_ids = ([draw.randrange(vocab) for _ in range(n)] for n in (longest, vocab // 200))
    texts, alone = Texts(steady(model), rows=rows, cache_bytes=cache_bytes, max_pause=0.02), steady(model)
    given: dict[Text, dict[str, Any]] = {}
    made: dict[Text, list[tuple[int, float | None]]] = {}
    predicted = 0

    def compare(text: Text, *, cancelled: bool) -> None:
        own, one = made.pop(text), given.pop(text)
        prompt, options = one.pop("prompt"), {name: value for name, value in one.items() if name != "speculate"}
        options["max_gen_len"] = len(own) if cancelled else options["max_gen_len"]
        ids, logprobs = alone.generate_tokens([prompt], **options) if options["max_gen_len"] else ([[]], [[]])
        done.differing += [text.number] if own != list(zip(ids[0], logprobs[0], strict=True)) else []
        done.tokens, done.texts, done.cancelled = done.tokens + len(own), done.texts + 1, done.cancelled + cancelled

    while done.tokens < tokens or not texts.idle:
        while done.tokens < tokens and texts.waiting < rows and draw.random() < 0.3:
            one = some_text(draw, common, vocab, stop_ids)
            text = texts.add(**one)
            given[text], made[text] = one, []
        if given and draw.random() < 0.005:
            text = draw.choice(list(given))
            texts.cancel(text)
            compare(text, cancelled=True)
        for event in texts.step():
            if event.error is not None:
                raise event.error
            if event.token is not None:
                made[event.text].append((event.token.id, event.token.logprob))
            if event.finish is not None:
                compare(event.text, cancelled=False)
        held, predicted = texts.nbytes, max(predicted, texts.predicted_bytes)
        done.most_bytes = max(done.most_bytes, held)
        if held > predicted * 9 / 8:  # a pool of blocks grows by an eighth, and stays
            raise AssertionError(f"the caches have {held:,} bytes, and {predicted:,} were predicted")


def main(
    *,
    tokens: int = 100_000,
    quantize: str = "none",
    activations: int = 16,
    kv_cache: str = "static",
    cache_mb: int | None = None,
    rows: int = 16,
    seed: int = 1,
) -> int:
    """Compare texts of the demo model that come and go with each text alone.

    Args:
        tokens: The least number of new tokens.
        quantize: The weights, stored, int8, int4, or none for float32.
        activations: Bits of rounded activations with packed weights, 16 or 8.
        kv_cache: The kind of cache.
        cache_mb: The most MB (2^20 bytes) of all caches; by default no limit.
        rows: Texts that generate at a time.
        seed: Decides the texts.
    """
    torch.set_num_threads(1)
    model, _ = load("demo", fast=True, kv_cache=kv_cache, quantize=quantize, activations=activations)
    done, began = Soak(), time.perf_counter()
    try:
        soak(model, done, tokens=tokens, rows=rows, seed=seed, cache_bytes=cache_mb and cache_mb << 20)
    finally:
        print(
            f"{model.execution}, kv_cache={kv_cache}: {len(done.differing)} of {done.texts} texts differ from the text "
            f"alone; {done.tokens:,} tokens, {done.cancelled} texts cancelled, at most {done.most_bytes >> 20:,} MB of "
            f"caches, {time.perf_counter() - began:.0f} s"
        )
        if done.differing:
            print("texts that differ, by number:", *done.differing[:20])
    return int(bool(done.differing))


if __name__ == "__main__":
    cli.main(main)
