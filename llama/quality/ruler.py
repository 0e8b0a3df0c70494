"""The tasks of RULER that need no data set, 11 of 13, made from a seed at any length; and a short needle test.

Source: Hsieh et al., RULER, https://arxiv.org/abs/2404.06654, and its generator, https://github.com/NVIDIA/RULER at
c3f5e3b. Sizes, counts, positions, scores and lengths of answers are RULER's; the sentences, the words and the novel
around the needles are not. docs/quality.md lists each difference. `needle` is the test of Kamradt,
https://github.com/gkamradt/LLMTest_NeedleInAHaystack, with short answers: it costs a fraction of `niah_single_2`.

Knows text and how many tokens it has; does not know models.
"""

import math
import re
import string
import uuid
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from llama.quality.samples import Sample
from llama.streaming import TextCodec

NOISE = "Rain falls on the roof. The road is long. A bird sits on the fence. Nobody is at home. The day goes by."
CITIES = ("Athens", "Berlin", "Cairo", "Dublin", "Lima", "Lisbon", "Madrid", "Oslo", "Tokyo", "Vienna")
DEPTHS = 40  # depths of a needle in prose, from the beginning to the end
SHORT = 4096  # tokens, below which words are repeated less often
EXPONENT = 2  # of the frequencies of coded words; their sum, zeta(2), is pi^2 / 6


class Source(NamedTuple):
    """The words of a text without digits, because answers are digits; and the distinct plain ones among them."""

    prose: Sequence[str]
    vocabulary: Sequence[str]

    @classmethod
    def of(cls, text: str) -> "Source":
        prose = [word for word in text.split() if not re.search(r"\d", word)]
        return cls(prose, sorted({word for word in prose if re.fullmatch(r"[a-z]{5,12}", word)}))

    def sentences(self, words: int, dice: Random) -> list[str]:
        """Return sentences of so many words in a row, from a random word on; after the end the text begins again."""
        start = dice.randrange(len(self.prose))
        row = [self.prose[(start + i) % len(self.prose)] for i in range(words)]
        return re.split(r"(?<=[.!?]) ", " ".join(row)) if row else []

    def words(self, count: int, dice: Random) -> list[str]:
        """Return distinct words; if the text has too few, pairs of them."""
        n = len(self.vocabulary)
        if count <= n:
            return dice.sample(self.vocabulary, count)
        return [f"{self.vocabulary[i // n]}-{self.vocabulary[i % n]}" for i in dice.sample(range(n * n), count)]


# ---- the tasks: (source, size, length, dice) -> a sample; its tokens grow with size ----------------------------------

DRAWN: Mapping[str, tuple[str, Callable[[Source, Random], str]]] = {  # what a needle is made of, and its unit
    "words": ("word", lambda source, dice: "-".join(dice.sample(source.vocabulary, 2))),
    "numbers": ("number", lambda _, dice: str(dice.randrange(10**6, 10**7))),
    "short numbers": ("number", lambda _, dice: str(dice.randrange(10**3, 10**4))),
    "uuids": ("uuid", lambda _, dice: str(uuid.UUID(int=dice.getrandbits(128), version=4))),
    "cities": ("city", lambda _, dice: dice.choice(CITIES)),
}


@dataclass(frozen=True)
class Needles:
    """Hides needles, each a value of a key, in a haystack, and asks for all values of some keys.

    hay: prose, noise (the same sentences again and again), or needles of other keys. at_start: in prose, all needles
    precede the haystack.
    """

    hay: str
    keys: str = "words"
    values: str = "numbers"
    n_keys: int = 1
    n_values: int = 1
    n_queries: int = 1
    max_gen_len: int = 128
    at_start: bool = False

    def __call__(self, source: Source, size: int, length: int, dice: Random) -> Sample:
        (unit, value), (_, key) = DRAWN[self.values], DRAWN[self.keys]
        hidden: dict[str, list[str]] = {}
        while len(hidden) < self.n_keys:
            hidden[key(source, dice)] = [value(source, dice) for _ in range(self.n_values)]
        needles = [_needle(unit, one, each) for one, values in hidden.items() for each in values]
        dice.shuffle(needles)
        asked = dice.sample(sorted(hidden), self.n_queries)
        if self.hay == "prose":
            depths = sorted(dice.sample(range(DEPTHS), len(needles)))
            hay = source.sentences(size, dice)
            places = [0 if self.at_start else len(hay) * depth // (DEPTHS - 1) for depth in depths]
        else:
            hay = [NOISE] * size
            if self.hay == "needles":
                hay = [_needle(unit, key(source, dice), value(source, dice)) for _ in range(size)]
            places = sorted(dice.sample(range(size), len(needles)))
        for place, needle in zip(reversed(places), needles, strict=True):
            hay.insert(place, needle)
        text = (" " if self.hay == "prose" else "\n").join(hay)
        one, of = self.n_queries * self.n_values == 1, _listed(asked)
        what = f"magic {unit}" if one else f"magic {unit}s"
        return Sample(
            context=f"The text below hides {'a ' if one else ''}{what}. Remember {'it' if one else 'them'}.\n{text}",
            question=f"\nQuestion: What {'is' if one else 'are all'} the {what} of {of} in the text?\n"
            f"Answer: The {what} of {of} {'is' if one else 'are'}",
            answers=tuple(each for key in asked for each in hidden[key]),
            max_gen_len=self.max_gen_len,
        )


def _needle(unit: str, key: str, value: str) -> str:
    return f"One magic {unit} of {key} is {value}."


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def variable_tracking(source: Source, size: int, length: int, dice: Random, *, hops: int = 4) -> Sample:
    """Hide a chain of assignments in noise, and ask for all variables with the value; a solved example precedes."""

    def tracked(size: int, letters: int) -> Sample:
        names = [""]
        while len(set(names)) <= hops:
            names = ["".join(dice.choices(string.ascii_uppercase, k=letters)) for _ in range(hops + 1)]
        value = str(dice.randrange(10000, 100000))
        lines, chain = [NOISE] * size, zip(names, [value, *names], strict=False)
        places = sorted(dice.sample(range(size), hops + 1))
        for moved, (place, (name, of)) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + moved, f"VAR {name} = {'VAR ' * (of != value)}{of}.")
        return Sample(
            context="Follow the assignments of variables that the text below hides.\n\n" + "\n".join(lines),
            question=f"\nQuestion: Which variables have the value {value}?\n"
            f"Answer: The assignments in the text give the value {value} to {hops + 1} variables:",
            answers=tuple(names),
            max_gen_len=30,
        )

    return _after(tracked(5, 3), tracked(size, 5), lambda names: " ".join(names))


def common_words(source: Source, size: int, length: int, dice: Random, *, common: int = 10) -> Sample:
    """List words, ten of them more often than the others, and ask for the ten; a solved example precedes the list."""

    def counted(size: int, often: int, seldom: int) -> Sample:
        words = source.words(size, dice)
        shown = words[:common] * often + words[common:] * seldom
        dice.shuffle(shown)
        return Sample(
            context=f"The list below repeats some words more often than others. Remember these.\n{_numbered(shown)}",
            question=f"\nQuestion: Which {common} words does the list repeat most often?\n"
            f"Answer: The {common} most frequent words of the list are:",
            answers=tuple(words[:common]),
            max_gen_len=120,
        )

    example, asked = ((20, 3, 1), (6, 1)) if length < SHORT else ((40, 10, 3), (30, 3))
    return _after(counted(*example), counted(size, *asked), _numbered)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def _after(example: Sample, sample: Sample, solution: Callable[[Sequence[str]], str]) -> Sample:
    """Return the sample with a solved example before it, in the same words."""
    solved = f"{example.context}{example.question} {solution(example.answers)}\n\n"
    return Sample(f"{solved}{sample.context}", sample.question, sample.answers, sample.metric, sample.max_gen_len)


def frequent_words(source: Source, size: int, length: int, dice: Random) -> Sample:
    """Show coded words with frequencies of a zeta distribution, and ask for the three most frequent ones.

    The most frequent one is noise: dots.
    """
    count = max(5, (length - 50) // 50)  # distinct words
    words: dict[str, None] = {"...": None}
    while len(words) < count:
        words["".join(dice.choices(string.ascii_lowercase, k=6))] = None
    coded = list(words)
    zeta = math.pi**2 / 6
    shown = [word for rank, word in enumerate(coded, 1) for _ in range(int(size * rank**-EXPONENT / zeta))]
    dice.shuffle(shown)
    return Sample(
        context=f"Count how often each coded word occurs in the text below. Dots are no words.\n{' '.join(shown)}",
        question="\nQuestion: Which three coded words occur most often? Name only the words, and no dots.\n"
        "Answer: The three most frequent coded words of the text are:",
        answers=tuple(coded[1:4]),
        max_gen_len=50,
    )


class Task(NamedTuple):
    """A task: what makes its samples, and the least size with which its answers are defined."""

    make: Callable[[Source, int, int, Random], Sample]
    least: int


RULER: Mapping[str, Task] = {
    "niah_single_1": Task(Needles("noise"), 1),
    "niah_single_2": Task(Needles("prose"), 0),
    "niah_single_3": Task(Needles("prose", values="uuids"), 0),
    "niah_multikey_1": Task(Needles("prose", n_keys=4), 0),
    "niah_multikey_2": Task(Needles("needles"), 1),
    "niah_multikey_3": Task(Needles("needles", keys="uuids", values="uuids"), 1),
    "niah_multivalue": Task(Needles("prose", n_values=4), 0),
    "niah_multiquery": Task(Needles("prose", n_keys=4, n_queries=4), 0),
    "vt": Task(variable_tracking, 5),
    "cwe": Task(common_words, 11),
    "fwe": Task(frequent_words, 60),  # below it, the words of ranks 4 and 5 may occur equally often
}
TASKS: Mapping[str, Task] = {
    "needle": Task(Needles("prose", keys="cities", values="short numbers", max_gen_len=8), 0),
    "needle_at_start": Task(Needles("prose", keys="cities", values="short numbers", max_gen_len=8, at_start=True), 0),
    **RULER,
}


def check_length(
    name: str, tokenizer: TextCodec, source: Source, *, length: int, seed: int = 1, number: int = 0
) -> None:
    """Raise ValueError for an unknown name, and if `length` is too short for this sample of the task."""
    if name not in TASKS:
        raise ValueError(f"task {name!r:.80} is not known; choose ruler, or some of {', '.join(TASKS)}")
    needed = _made(name, source, TASKS[name].least, length, seed, number).total_len(tokenizer)
    if needed > length:
        raise ValueError(f"length={length} is too short for {name}, which needs at least {needed} tokens")


def _made(name: str, source: Source, size: int, length: int, seed: int, number: int) -> Sample:
    return TASKS[name].make(source, size, length, Random(f"{name} {length} {seed} {number}"))


def ruler_sample(
    name: str, tokenizer: TextCodec, source: Source, *, length: int, seed: int = 1, number: int = 0
) -> Sample:
    """Return the longest sample of a task that has at most `length` tokens with its longest answer.

    It depends on the name, length, seed and number alone. Raises the errors of `check_length`.
    """
    check_length(name, tokenizer, source, length=length, seed=seed, number=number)
    task = TASKS[name]

    def made(size: int) -> Sample:
        return _made(name, source, size, length, seed, number)

    def fits(size: int) -> bool:
        return made(size).total_len(tokenizer) <= length

    end = 2 * task.least + 1
    while fits(end):
        end *= 2
    size = bisect_right(range(task.least, end), False, key=lambda size: not fits(size)) + task.least - 1
    while not fits(size):  # other draws of another size can be longer
        size -= 1
    return made(size)
