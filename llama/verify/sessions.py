"""The ways of a session: a text in turns, forked, rewound, saved and loaded, and begun by it for other rows.

Each looks at the logits behind the places that a session comes to. Knows the model and what a session can do. Does not
know what is compared with what, nor what of a difference is rounding.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

from torch import Tensor

from llama.batch import NonFiniteLogits
from llama.model import Transformer
from llama.request import Options, Step
from llama.session import Session
from llama.sessions.file import IdsOnly
from llama.streaming import TextStream
from llama.verify.passes import Chunk, Texts, heard

IN_TURNS, FORKED, REWOUND = "session in turns", "session forked", "session rewound"
SAVED, BEHIND, FED_ONCE = "session saved and loaded", "behind a session's text", "common beginning fed once"

SHARE = 4  # one text in so many goes a way: all of them would take as long as half of the rest
TURNS = 4  # in which a text is fed, where it is long enough
ANSWER = 2  # tokens that are generated at a time: one from the logits that are known, and one from a step
ROWS = 3  # that begin alike, the last of which goes astray
HELD = 6  # rows of the longest text that a way holds at once: three sessions, which may have room for twice their text

Place = tuple[int, Tensor]  # a position in a text, and the logits there, (1, vocab)
Way = Callable[[Transformer, list[int], random.Random], Iterator[Place]]


def session_passes(model: Transformer, texts: Texts, seed: int) -> dict[str, Iterator[Chunk]]:
    """Return what computes some of the logits of the texts through sessions, each way when it is asked for.

    `seed` draws which texts go a way, one in SHARE, and where they are cut.
    """
    return {name: _some_rows(model, texts, way, random.Random(f"{seed}, {name}")) for name, way in _WAYS.items()}


def _some_rows(model: Transformer, texts: Texts, way: Way, dice: random.Random) -> Iterator[Chunk]:
    cached = model.with_kv_caching(True)
    for row in sorted(dice.sample(range(len(texts)), -(-len(texts) // SHARE))):
        yield from ((row, position, logits) for position, logits in way(cached, list(texts[row]), dice))


# ---- the ways --------------------------------------------------------------------------------------------------------


def _in_turns(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Place]:
    """Feed the text in turns, and let the model answer each; what it says instead of the text is fed over."""
    session = model.session(Ids())
    for end, following in pairwise([*_ends(text, dice), len(text) + 1]):
        session.feed(text[:end])
        _, known = _behind(session, end)
        answer: list[Tensor] = []
        with heard(model, answer, []), suppress(NonFiniteLogits):
            session.generate(min(ANSWER, following - end), temperature=0)
        yield from _while_alike(text, end, [known, *answer])


def _forked(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Place]:
    """Fork at every turn: one goes on with the text, the other goes back a token and writes something else beside it.

    The one that goes on is by turns the fork, and what it was forked from.
    """
    session = model.session(Ids())
    ends = _ends(text, dice)
    session.feed(text[: ends[0]])
    for number, (start, end) in enumerate(pairwise(ends)):
        other = session.fork()
        if number % 2 == 0:
            session, other = other, session
        other.rewind(start - 1)
        for beside in (text[start - 1 : start], text[start:end]):  # first into the room that the two had together
            other.append(_astray(beside, model.args.vocab_size))
        session.append(text[start:end])
        yield _behind(session, end)


def _rewound(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Place]:
    """Write something else, go back and go on with the text, in turns; at last go back to where the first one ended."""
    session = model.session(Ids())
    ends = _ends(text, dice)
    session.feed(text[: ends[0]])
    for start, end in pairwise(ends):
        session.append(_astray(text[start:end], model.args.vocab_size))
        session.rewind(start)
        session.append(text[start:end])
        yield _behind(session, end)
    session.rewind(ends[0])
    session.append([])  # computes its last token anew
    yield _behind(session, ends[0])


def _saved(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Place]:
    """Save the first turn and load it; the logits that were saved are looked at too."""
    session = model.session(Ids())
    ends = _ends(text, dice)
    session.feed(text[: ends[0]])
    with TemporaryDirectory() as folder:
        file = Path(folder) / "session"
        session.save(file)
        session = model.load_session(file, Ids())
    yield _behind(session, ends[0])
    for start, end in pairwise(ends):
        session.append(text[start:end])
        yield _behind(session, end)


def _begun_by_a_session(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Place]:
    """Begin rows with the text of a session, which is not fed again."""
    session = model.session(Ids())
    start = dice.randint(1, len(text) // 2)
    session.feed(text[:start])
    yield from _in_rows(model, text, start, dice, given=start, prefix=session, temperature=0)


def _fed_once(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Place]:
    """Begin rows with what they have in common, which is fed for one of them."""
    start = dice.randint(1, len(text) // 2)
    yield from _in_rows(model, text, start, dice, given=0, share_prefix=True, temperature=0)


_WAYS: dict[str, Way] = {
    IN_TURNS: _in_turns,
    FORKED: _forked,
    REWOUND: _rewound,
    SAVED: _saved,
    BEHIND: _begun_by_a_session,
    FED_ONCE: _fed_once,
}
SESSIONS = tuple(_WAYS)


# ---- what they share -------------------------------------------------------------------------------------------------


class _Silence:
    """The text of ids that nobody reads."""

    def feed(self, id: int, /) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Ids(IdsOnly):
    """Stands where a tokenizer would: a session takes and gives ids, and generates them too."""

    def __init__(self) -> None:
        super().__init__("ids")

    def stream(self) -> TextStream:
        return _Silence()


def _ends(text: Sequence[int], dice: random.Random) -> list[int]:
    """Return where each of up to TURNS turns ends, the last one with the text, of at least 2 tokens."""
    return [*sorted(dice.sample(range(1, len(text)), min(TURNS, len(text)) - 1)), len(text)]


def _astray(ids: Sequence[int], vocab_size: int) -> list[int]:
    """Return as many other ids."""
    return [(id + 1) % vocab_size for id in ids]


def _behind(session: Session, end: int) -> Place:
    """Return what a session, whose text should be text[:end], knows behind it."""
    logits = session.logits
    assert logits is not None, "a session knows the logits behind what it was fed"
    return end - 1, logits[None]


def _in_rows(
    model: Transformer, text: list[int], start: int, dice: random.Random, *, given: int, **options: Unpack[Options]
) -> Iterator[Place]:
    """Continue rows that begin with text[:start], and yield what those come to that go on with the text.

    Each gets the text from `given` on. The last row goes astray, where the model takes more than one.
    """
    places, limit = range(start + 1, len(text) + 1), model.args.max_batch_size or ROWS
    ends = sorted(dice.sample(places, min(len(places), ROWS - 1, max(1, limit - 1))))
    prompts = [text[given:end] for end in ends]
    if limit > 1:
        prompts.append([*text[given:start], *_astray(text[start : ends[-1]], model.args.vocab_size)])
    room = [min(ANSWER, len(text) - end + 1) for end in (*ends, ends[-1])][: len(prompts)]
    made: list[Tensor] = []
    steps: list[tuple[int, Step]] = []  # each with the index of its logits
    with heard(model, made, []), suppress(NonFiniteLogits):
        options["on_step"] = lambda step: steps.append((len(made), step))
        model.generate_tokens(prompts, room, stop_ids=(), **options)
    for row, (end, following) in enumerate(pairwise([*ends, len(text) + 1])):
        of_row = [  # but for what was fed once
            made[index][place : place + 1]
            for index, step in steps
            for place, (fed, cur_pos) in enumerate(zip(step.rows, step.cur_pos, strict=True))
            if fed == row and cur_pos >= end
        ]
        yield from _while_alike(text[: following - 1], end, of_row)


def _while_alike(text: Sequence[int], end: int, steps: Sequence[Tensor]) -> Iterator[Place]:
    """Yield the logits of greedy steps, the first behind text[:end], for as long as they choose what stands there."""
    for position, logits in enumerate(steps[: len(text) - end + 1], end - 1):
        yield position, logits
        if text[position + 1 : position + 2] != [int(logits.argmax())]:
            return
