"""Guesses of a text's next tokens, and how many of them one call of the model verifies.

A call that is fed the newest token and a guess computes what as many steps would compute, if the guess is right. The
tokens that are used are always the model's own choices. So a proposer may guess anything, and the width of a guess may
depend on a clock: no text does. Knows ids and seconds; does not know models, caches or sampling.

Sources: Leviathan et al., https://arxiv.org/abs/2211.17192; guesses from the text itself: Saxena, prompt lookup
decoding, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

import logging
from bisect import bisect, insort
from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import eq
from typing import NamedTuple, Protocol

logger = logging.getLogger(__name__)

MOST = 15  # tokens of a guess: with the newest token a row has 16, which every kernel computes as it computes steps
# Guesses that are considered: with the newest token 4, 5, 8 or 16 rows, most of which share unpacked weights.
WIDTHS = (3, 4, 7, MOST)
NGRAMS = (3, 2)  # the tokens at a text's end that are looked up: the longest match counts
CHEAP = 1 / 8  # the expected seconds of a token more, as a share of a step's, before any guess was fed
NEWEST = 1 / 4  # what the newest guessed token counts for a row's chance: texts begin and stop to copy at once
AGING = 1 / 1024  # a measurement counts as less by this share for each later call, so that it is repeated now and then


class Proposer(Protocol):
    """Guesses the next tokens of one text. It is asked before every step, so it should take far less time than one."""

    def propose(self, ids: Sequence[int], count: int) -> list[int]:
        """Return at most `count` tokens that may follow `ids`. The ids of one call begin with those of the last."""
        ...


class Lookup:
    """Guesses what followed the last occurrence of the text's newest n-gram, for each length in NGRAMS."""

    def __init__(self) -> None:
        self._following: dict[tuple[int, ...], int] = {}  # n-gram -> the position behind its last occurrence
        self._known = 0  # positions below this are behind n-grams in the table

    def propose(self, ids: Sequence[int], count: int) -> list[int]:
        for end in range(max(self._known, 1), len(ids)):  # the newest n-gram itself has no continuation yet
            for n in NGRAMS:
                if n <= end:
                    self._following[tuple(ids[end - n : end])] = end
        self._known = len(ids)
        found = (self._following.get(tuple(ids[-n:])) for n in NGRAMS if n < len(ids))
        place = next((place for place in found if place is not None), None)
        if place is None:
            return []
        guess = list(ids[place : place + count])
        for past in range(place + len(guess) - len(ids), place + count - len(ids)):
            guess.append(guess[past])  # the guess continues into itself: a loop
        return guess


class EveryGuess(NamedTuple):
    """A way to guess, `of`, all of whose guesses are fed whatever they cost: no clock decides which calls are made."""

    of: "str | Callable[[], Proposer]"


Speculate = str | Callable[[], Proposer] | EveryGuess


def check_speculate(option: object) -> None:
    """Raise ValueError unless `option` is "lookup", "lookup:N", a function without arguments, one of these, or None."""
    option = option.of if isinstance(option, EveryGuess) else option
    if option is None or callable(option) or _most_of(option) is not None:
        return
    raise ValueError(
        f'speculate={option!r:.60} must be "lookup", "lookup:N" with at most N guessed tokens, N from 1 to {MOST}, or '
        "None for none"
    )


def _most_of(option: object) -> int | None:
    """Return the most tokens of a guess by "lookup" or "lookup:N"; None for any other value."""
    if option == "lookup":
        return MOST
    name, _, most = option.partition(":") if isinstance(option, str) else ("", "", "")
    return int(most) if name == "lookup" and most in map(str, range(1, MOST + 1)) else None


class Guesser:
    """The guesses of one row, and how often a guessed token has been right.

    chance: the share of right ones among the latest tokens that were guessed, whether they were fed or not.
    proposed, accepted: how many guessed tokens were fed, and how many of these were right.
    """

    def __init__(self, option: Speculate, vocab_size: int) -> None:
        option = option.of if isinstance(option, EveryGuess) else option
        self._vocab_size = vocab_size
        self._proposer = option() if callable(option) else Lookup()
        self._most = MOST if callable(option) else _most_of(option) or 0
        self._guess: list[int] = []
        self._begin = 0  # the position of the guess
        self.chance = 0.5
        self.proposed = self.accepted = 0

    def guess(self, ids: Sequence[int], count: int) -> list[int]:
        """Return at most `count` tokens that may follow."""
        for guessed, came in zip(self._guess, ids[self._begin :], strict=False):
            self.chance += ((guessed == came) - self.chance) * NEWEST
            if guessed != came:
                break
        self._begin, count = len(ids), min(count, self._most)
        self._guess = self._proposed(ids, count) if count > 0 else []
        return self._guess

    def _proposed(self, ids: Sequence[int], count: int) -> list[int]:
        """Return the proposer's guess up to the first id that the model does not have; none if the proposer fails."""
        try:
            guess = [*self._proposer.propose(ids, count)][:count]
            return list(takewhile(lambda id: 0 <= id < self._vocab_size, guess))
        except Exception as error:  # other texts go on, and this one does without guesses
            logger.warning("a proposer of guesses failed: %s: %s", type(error).__name__, error)
            return []

    def count(self, proposed: int, accepted: int) -> None:
        """Note how many guessed tokens were fed, and how many of these were right."""
        self.proposed, self.accepted = self.proposed + proposed, self.accepted + accepted


class Width:
    """Chooses how much of the rows' guesses is fed: what makes the most tokens a second by the calls measured so far.

    A call's time depends on its number of tokens, of all rows together. One that was never measured is expected on the
    line through the two next smaller numbers, or through the smallest and the largest if it is larger than all; behind
    steps alone, at a cost that is low enough to be tried.
    """

    def __init__(self) -> None:
        self._tokens: list[int] = []  # the numbers that were measured, ascending
        self._seconds: dict[int, tuple[float, int]] = {}  # of each, and when it was measured
        self._calls = 0

    def took(self, tokens: int, seconds: float) -> None:
        """Record the seconds of a call. Load by other work makes a call slower, never faster: a peak counts little."""
        self._calls += 1
        if tokens not in self._seconds:
            insort(self._tokens, tokens)
        known = self._seconds.get(tokens, (seconds, 0))[0]
        self._seconds[tokens] = min(seconds, known + (seconds - known) / 16), self._calls

    def cut(self, guesses: Sequence[list[int]], chances: Sequence[float]) -> list[list[int]]:
        """Return the part of each row's guess to feed; `chances` are those of a row's guessed token to be right."""
        if len(guesses) not in self._seconds:
            return [[] for _ in guesses]  # first measure a step
        best = len(guesses) / self._expected(len(guesses))
        cut = [0] * len(guesses)
        by_chance = sorted((row for row, guess in enumerate(guesses) if guess), key=lambda row: -chances[row])
        for width in WIDTHS:
            tokens, gained, tried = len(guesses), float(len(guesses)), [0] * len(guesses)
            for row in by_chance:  # each row more is a candidate
                tried[row] = count = min(width, len(guesses[row]))
                tokens, gained = tokens + count, gained + _right(chances[row], count)
                if (speed := gained / self._expected(tokens)) > best:
                    best, cut = speed, list(tried)
        return [guess[:count] for guess, count in zip(guesses, cut, strict=True)]

    def _expected(self, tokens: int) -> float:
        """Return the seconds that a call of so many tokens is expected to take."""
        at = bisect(self._tokens, tokens) - 1
        known, seconds = self._tokens[at], self._measured(self._tokens[at])
        if known == tokens:
            return seconds
        largest = at == len(self._tokens) - 1  # two that are close have a poor slope for much larger calls
        low = 0 if at == 0 else self._tokens[0 if largest else at - 1]
        each = (seconds - self._measured(low)) / (known - low) if low else seconds / known * CHEAP
        return seconds + max(each, 0.0) * (tokens - known)

    def _measured(self, tokens: int) -> float:
        seconds, call = self._seconds[tokens]
        return max(seconds * (1 - AGING) ** (self._calls - call), 1e-9)  # a clock may be coarse, and a call long ago


class Eager(Width):
    """Feeds every guess."""

    def cut(self, guesses: Sequence[list[int]], chances: Sequence[float]) -> list[list[int]]:
        return list(guesses)


def width_of(option: Speculate | None) -> Width | None:
    """Return what chooses how much of the guesses is fed; None without guesses."""
    return None if option is None else Eager() if isinstance(option, EveryGuess) else Width()


def _right(chance: float, count: int) -> float:
    """Return how many tokens of a guess are expected to be right, up to the first wrong one."""
    return sum(chance**n for n in range(1, count + 1))


def accepted(guess: Sequence[int], chosen: Sequence[int | None]) -> int:
    """Return how many tokens of a guess are those that the model chose at their positions, up to the first other one.

    chosen: the choice behind the newest token, and behind each token of the guess.
    """
    return sum(1 for _ in takewhile(bool, map(eq, guess, chosen)))
