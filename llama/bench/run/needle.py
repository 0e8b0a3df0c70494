"""The needle test: does the model find a sentence that is hidden in a long text?

A sentence with a secret number is hidden among the sentences of a text, at a relative depth. A question and the start
of its answer follow the text, and the model has to continue with the secret. This shows a cache that has dropped or
blurred the one place that counts, which perplexity hardly does. The question is fed token by token, so that only the
cache can give the secret.
Source: Kamradt, https://github.com/gkamradt/LLMTest_NeedleInAHaystack; the short form of the sentence is that of
"passkey retrieval", Mohtashami and Jaggi, https://arxiv.org/abs/2305.16300.
"""

import random
import re
from bisect import bisect_left, bisect_right
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, chain, islice

from llama.model import Transformer
from llama.quality.perplexity import next_logits
from llama.streaming import TextCodec

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (256, 512, 1024)  # at which the demo model finds every needle with a full cache
SEEDS = (0, 1, 2, 3)
CITIES = ("Athens", "Berlin", "Cairo", "Dublin", "Lima", "Lisbon", "Madrid", "Oslo", "Tokyo", "Vienna")


@dataclass(frozen=True)
class Hidden:
    """A needle in a haystack, as ids: the text that hides it, the question after it, and the secret."""

    haystack: list[int]
    question: list[int]
    secret: list[int]


class Haystack:
    """The sentences of a text, without those that have digits, because secrets are digits."""

    def __init__(self, tokenizer: TextCodec, text: str) -> None:
        self.tokenizer = tokenizer
        sentences = (" ".join(sentence.split()) for sentence in re.split(r"(?<=[.!?])\s+", text))
        kept = [sentence for sentence in sentences if sentence and not re.search(r"\d", sentence)]
        self.sentences = [self._ids(f" {sentence}") for sentence in kept]
        self.ends = list(accumulate(map(len, self.sentences)))  # the tokens up to the end of each
        self.tokens = self.ends[-1] if self.ends else 0

    def hide(self, *, length: int, depth: float, seed: int) -> Hidden:
        """Return a text of `length` tokens, with the question, and a needle at `depth`: 0 at its start, 1 at its end.

        City, secret and part of the text depend on length, depth and seed. Raises ValueError if the text is too short
        for the length, or the length for the needle.
        """
        dice = random.Random(f"{length} {depth} {seed}")
        city, secret = dice.choice(CITIES), str(dice.randrange(1000, 10000))
        fact = f"The magic number of {city} is"
        head = self.tokenizer.encode("", bos=self.tokenizer.adds_bos, eos=False)
        needle = self._ids(f" {fact} {secret}.")
        question = self._ids(f"\n\nQuestion: What is the magic number of {city}?\nAnswer: {fact}")
        hay = self._hay(length - len(head) - len(needle) - len(question), dice)
        at = round(depth * len(hay))
        return Hidden([*head, *chain(*hay[:at]), *needle, *chain(*hay[at:])], question, self._ids(f" {secret}"))

    def _hay(self, tokens: int, dice: random.Random) -> list[list[int]]:
        """Return consecutive sentences with so many tokens; the first one may lack its beginning."""
        if not 0 < tokens <= self.tokens:
            raise ValueError(
                f"{tokens} tokens are left for the text around a needle, and they must be from 1 to the {self.tokens} "
                "of the text; give another length, or a longer text"
            )
        end = dice.randrange(bisect_left(self.ends, tokens), len(self.ends))
        surplus = self.ends[end] - tokens
        begin = bisect_right(self.ends, surplus)
        cut = surplus - (self.ends[begin - 1] if begin else 0)
        return [self.sentences[begin][cut:], *self.sentences[begin + 1 : end + 1]]

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, bos=False, eos=False)


def finds(model: Transformer, hidden: Hidden, *, question_seen: bool = False) -> bool:
    """Return whether the model continues greedily with the secret, with its own kind of cache.

    The secret is fed: the model would write it if each of its tokens is the most likely one after those before.
    question_seen: the question is part of the prompt, so that a kind that compresses a prompt sees it. Otherwise it is
    fed token by token behind the prompt.
    """
    ids = [*hidden.haystack, *hidden.question, *hidden.secret]
    behind = 0 if question_seen else len(hidden.question)
    with closing(next_logits(model, ids, prompt_len=len(hidden.haystack) + len(hidden.question) - behind)) as steps:
        of_secret = islice(steps, behind, None)
        return all(int(logits.argmax()) == id for logits, id in zip(of_secret, hidden.secret, strict=True))
