"""The exercise `lookup`: what `Lookup.propose` guesses."""

from collections.abc import Iterator, Sequence
from typing import Any

NEAR = 0.0
MISTAKES = {
    "nothing-found": (
        40,
        "Nothing is guessed: the newest tokens are found at the end of the text, and nothing follows",
        "The newest tokens stand at the end of the text, too. Which occurrences can be continued?",
    ),
    "ngram-repeated": (
        40,
        "The guess begins with the tokens that were looked up, not behind them",
        "Which token do you expect behind 1 2 3 4 1 2 3? Print the guess.",
    ),
    "begins-late": (
        30,
        "The guess leaves out the first token behind the occurrence",
        "Which token do you expect behind 1 2 3 4 1 2 3? Print the guess.",
    ),
    "begins-early": (
        30,
        "The guess begins with the last token of the occurrence",
        "Which token do you expect behind 1 2 3 4 1 2 3? Print the guess.",
    ),
    "text-changed": (
        30,
        "The guess is appended to `ids` itself, which is the text",
        "Print `ids` before and after a call. Which of your lines change a list in place?",
    ),
    "later-unseen": (
        30,
        "Tokens that came after the first call are not looked up",
        "The next call has more tokens. When does your table get them?",
    ),
    "one-a-call": (
        20,
        "A call adds one token's n-grams to the table, where a step may have added several tokens",
        "How many tokens can a step add when a guess was right? How many does your table get?",
    ),
    "texts-shared": (
        30,
        "A guess depends on another text: all objects share a table",
        "Make two objects and give each its own text. Where is your table stored?",
    ),
    "first-occurrence": (
        20,
        "Of several occurrences the first one counts, not the last",
        "1 2 3 occurs twice before the end of 1 2 3 7 1 2 3 8 1 2 3. Which one counts in TASK.md?",
    ),
    "shorter-match": (
        20,
        "A match of two tokens counts, although there is one of three",
        "Which length do you look up first, and when do you look up the other?",
    ),
    "long-only": (
        20,
        "Two tokens that occurred before are not found",
        "What do you return if the newest three tokens did not occur before? Print NGRAMS.",
    ),
    "single-token": (
        20,
        "A single token is looked up, too",
        "How many tokens must occur again for a guess? Print NGRAMS.",
    ),
    "overlap-missed": (
        15,
        "An occurrence that overlaps the newest tokens is not found",
        "Where does 5 5 5 occur in 8 9 5 5 5 5, before the end of the text?",
    ),
    "count-ignored": (
        20,
        "The guess is all that follows, however many tokens were asked for",
        "Compare len(guess) with `count`.",
    ),
    "ends-with-text": (
        15,
        "The guess ends with the text, where it should continue into itself",
        "TASK.md has an example: what follows the third token of that guess?",
    ),
}
ASKED: tuple[tuple[Sequence[int], int], ...] = (
    ([7, 1, 2, 3, 4, 5, 6, 1, 2, 3], 2),  # occurred once before: three tokens, two, none, one
    ([7, 8, 1, 2, 9, 4, 5, 1, 2], 2),
    ([1, 2, 3, 4, 5], 3),
    ([1, 2, 3, 9, 8, 3], 2),
    ([1, 2, 3, 10, 11, 12, 1, 2, 3, 20, 21, 22, 1, 2, 3], 2),  # occurred twice
    ([5, 1, 2, 10, 6, 1, 2, 20, 7, 1, 2, 30, 8, 1, 2], 3),
    ([1, 2, 3, 10, 11, 12, 9, 2, 3, 20, 21, 22, 1, 2, 3], 2),  # a shorter match is newer; four tokens are not looked up
    ([1, 2, 3, 4, 10, 11, 2, 3, 4, 20, 21, 1, 2, 3, 4], 2),
    *(([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3], count) for count in (0, 1, 4, 6)),
    ([9, 1, 2, 3, 4, 1, 2, 3], 10),  # more is asked for than the text has
    ([8, 9, 5, 5, 5, 5], 3),
    ([8, 1, 2, 1, 2, 1, 2], 5),
    *((ids, 2) for ids in ([], [1], [1, 1], [1, 2, 1], [1, 1, 1], [2, 1, 2, 1])),
)
GROWN = (1, 2, 3, 4, 5, 1, 2, 6, 4, 5, 1, 2, 6, 3, 4, 5)
ENDS = (1, 2, 5, 6, 10, 13, 16)  # of the text that grows: with guesses that are right, by several tokens a step


def trials() -> Iterator[tuple[str, Any]]:
    from llama.speculation import Lookup

    one, other = Lookup(), Lookup()
    for lookup, text in ((one, [5, 6, 1, 2, 9, 9, 3]), (other, [3, 4, 8, 8, 1, 2])):
        yield f"the guess of 2 tokens behind {text}, of two texts", _guess(lookup, text, 2)
    for ids, count in ASKED:
        yield f"the guess of at most {count} tokens behind {ids}", _guess(Lookup(), list(ids), count)
    lookup, text = Lookup(), []
    for end in ENDS:
        text += GROWN[len(text) : end]  # the library passes one list, too, which grows
        yield f"the guess of 2 tokens as a text grows, behind {text}", _guess(lookup, text, 2)


def _guess(lookup: Any, text: list[int], count: int) -> list[int] | str:
    """Return the guess, whose ids may be of any integer type. If the call changes the text, restore it and say so."""
    before = list(text)
    guess = [int(id) for id in lookup.propose(text, count)]
    if text == before:
        return guess
    text[:] = before
    return "the call changed the text"


def install(*wrong: str) -> None:
    from llama.speculation import Lookup

    everyone: list[tuple[tuple[int, ...], int]] = []
    ngrams: tuple[int, ...] = (2,) if "shorter-match" in wrong else (3,) if "long-only" in wrong else (3, 2)
    ngrams += (1,) * ("single-token" in wrong)

    def propose(self: Any, ids: Sequence[int], count: int) -> list[int]:
        seen = everyone if "texts-shared" in wrong else vars(self).setdefault("seen", [])  # n-grams, and what ends them
        known = getattr(self, "known", 0)
        if not (known and "later-unseen" in wrong):
            ends = range(max(known, 1), len(ids) + ("nothing-found" in wrong))
            ends = ends[-1:] if known and "one-a-call" in wrong else ends
            seen += [(tuple(ids[end - n : end]), end) for end in ends for n in ngrams if n <= end]
            self.known = len(ids)
        for n in ngrams:
            most = len(ids) - n * ("overlap-missed" in wrong)
            found = [end for gram, end in seen if n < len(ids) and gram == tuple(ids[-n:]) and end <= most]
            if found:
                begin = found[0 if "first-occurrence" in wrong else -1] + ("begins-late" in wrong)
                begin -= n * ("ngram-repeated" in wrong) + ("begins-early" in wrong)
                guess = list(ids[begin:] if "count-ignored" in wrong else ids[begin : begin + count])
                while guess and len(guess) < count and not {"ends-with-text", "count-ignored"} & {*wrong}:
                    guess.append([*ids, *guess][begin + len(guess)])
                if "text-changed" in wrong:
                    ids += guess  # type: ignore[operator]
                return guess
        return []

    Lookup.__init__ = lambda self: None  # type: ignore[method-assign]
    Lookup.propose = propose  # type: ignore[method-assign]
