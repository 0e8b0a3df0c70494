"""The passes through a session and with other texts: a session's random life, rows behind its text, texts that join.

Each pass yields logits at some positions of a text. Knows the model and what a session can do. Does not know which
passes are compared, nor which difference is rounding.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from llama.batch import NonFiniteLogits
from llama.model import Transformer
from llama.request import Options, Step
from llama.streaming import TextStream
from llama.texts.many import steady
from llama.texts.scheduler import Texts as TextsTogether
from llama.texts.session import Session
from llama.texts.session_file import IdsOnly
from llama.verify.passes import Chunk, Texts, record_logits

SESSION, IN_ROWS, AMONG_OTHERS = "a session", "rows behind a beginning", "among other texts"

SHARE = 4  # each pass runs on one text in four: all texts would add half of the time of the other passes
ANSWER = 2  # tokens generated at a time: one from the logits of the last feed, and one from a step
OTHERS = 4  # the most tokens that are not the text's, and that a session feeds at a time
ROWS = 3  # that begin alike; the last one continues with other tokens

Position = tuple[int, Tensor]  # a position in a text, and the logits there, (1, vocab)
Pass = Callable[[Transformer, list[int], random.Random], Iterator[Position]]


def session_passes(model: Transformer, texts: Texts, seed: int) -> dict[str, Iterator[Chunk]]:
    """Return the passes by name, over one text in SHARE. Each one computes when it is iterated.

    `seed` draws which texts each pass runs on, and what happens to them. AMONG_OTHERS is left out if rows of this
    model, or of its kind of cache, cannot join a batch.
    """
    passes: dict[str, Pass] = {SESSION: _session, IN_ROWS: _in_rows}
    with suppress(ValueError):
        steady(model.with_kv_caching(True)).new_cache().check_joins()
        passes[AMONG_OTHERS] = _among_others
    return {name: _some_rows(model, texts, run, random.Random(f"{seed}, {name}")) for name, run in passes.items()}


def _some_rows(model: Transformer, texts: Texts, run: Pass, dice: random.Random) -> Iterator[Chunk]:
    cached = model.with_kv_caching(True)
    for row in sorted(dice.sample(range(len(texts)), -(-len(texts) // SHARE))):
        yield from ((row, position, logits) for position, logits in run(cached, list(texts[row]), dice))


# ---- a session -------------------------------------------------------------------------------------------------------


def _session(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Position]:
    """Feed the text in turns; behind each, the session goes another way and comes back."""
    session, ways = model.session(Ids()), [*_WAYS]
    dice.shuffle(ways)
    for end in [*sorted(dice.sample(range(1, len(text)), min(len(ways), len(text) - 1))), len(text)]:
        session.feed(text[:end])
        logits = session.logits
        if end < len(text):
            others = [(id + 1) % model.args.vocab_size for id in text[end : end + OTHERS]]
            session = ways.pop()(session, others)
            logits = session.logits if session.position == end and session.logits is not None else logits
        assert logits is not None, "a session that was fed has the logits of its last token"
        yield end - 1, logits[None]


def _answered(session: Session, others: list[int]) -> Session:
    with suppress(NonFiniteLogits):
        session.generate(min(ANSWER, len(others)), temperature=0)
    return session


def _rewound(session: Session, others: list[int]) -> Session:
    """Append other tokens and remove them."""
    start = session.position
    session.append(others)
    session.rewind(start)
    return session


def _forked(session: Session, others: list[int]) -> Session:
    """Return a fork whose original goes back a token, into memory that they share, and on with other tokens."""
    fork = session.fork()
    session.rewind(session.position - 1)
    session.append(others)
    return fork


def _original(session: Session, others: list[int]) -> Session:
    """Return a session whose fork does that."""
    _forked(session.fork(), others)
    return session


def _saved(session: Session, others: list[int]) -> Session:
    with TemporaryDirectory() as folder:
        session.save(file := Path(folder) / "session")
        loaded: Session = session.model.load_session(file, Ids())
    return loaded


_WAYS = (_answered, _rewound, _forked, _original, _saved)


class Ids(IdsOnly):
    """A stand-in for a tokenizer, with which a session can also generate ids; each is decoded to nothing."""

    def __init__(self) -> None:
        super().__init__("ids")

    def stream(self) -> TextStream:
        return self

    def feed(self, id: int, /) -> str:
        return ""

    def flush(self) -> str:
        return ""


# ---- other texts -----------------------------------------------------------------------------------------------------


def _in_rows(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Position]:
    """Continue rows that begin with the text of a session, or that begin alike, which is fed once."""
    start, session = dice.randint(1, len(text) // 2), model.session(Ids())
    session.feed(text[:start])
    ways: list[tuple[int, Options]] = [(start, {"prefix": session}), (0, {"share_prefix": True})]
    ends = sorted(dice.sample(range(start + 1, len(text) + 1), min(len(text) - start, 2 * (ROWS - 1))))
    for (given, how), own in zip(ways, (ends[::2], ends[1::2]), strict=True):
        own = own[: max((model.args.max_batch_size or ROWS) - 1, 1)]
        rows = [text[:end] for end in own]
        if own and model.args.max_batch_size != 1:
            rows.append([*text[:start], *((id + 1) % model.args.vocab_size for id in text[start : own[-1]])])
        recorded, steps = list[Tensor](), list[Step]()
        options: Options = {**how, "temperature": 0, "on_step": steps.append}
        with record_logits(model, recorded, []), suppress(NonFiniteLogits):
            if rows:
                new = [min(ANSWER, len(text) - end + 1) for end in (*own, own[-1])]
                model.generate_tokens([row[given:] for row in rows], new[: len(rows)], stop_ids=(), **options)
        yield from _recorded(dict(enumerate(own)), text, recorded, steps)


def _among_others(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Position]:
    """Continue beginnings of a text that join the rows of other texts in pieces, while some of these leave."""
    limit = model.args.max_seq_len
    choices = range(len(text) - max(len(text) // 3, 1), len(text))  # the end was generated: greedy steps repeat it
    ends = sorted(dice.sample(choices, min(ROWS - 1, len(choices))))
    recorded, steps, numbers = list[Tensor](), list[Step](), dict[int, int]()
    rows = min(model.args.max_batch_size or ROWS, ROWS)
    texts = TextsTogether(steady(model), rows=rows, piece=dice.randint(-(-ends[0] // 4), ends[0]), on_step=steps.append)
    with record_logits(model, recorded, []):
        for end in ends:
            other = [(id + 1) % model.args.vocab_size for id in text[: dice.randint(1, len(text) // 2)]]
            for steps_of_other in (2, 12):
                texts.add(other, min(steps_of_other, limit - len(other)), temperature=0)
            numbers[texts.add(text[:end], min(ANSWER, limit - end), temperature=0).number] = end
        while not texts.idle:
            for event in texts.step():
                if event.error is not None and not isinstance(event.error, NonFiniteLogits):
                    raise event.error
    yield from _recorded(numbers, text, recorded, steps)


def _recorded(
    ends: dict[int, int], text: Sequence[int], recorded: Sequence[Tensor], steps: Sequence[Step]
) -> Iterator[Position]:
    """Yield the logits of rows that began with text[:end], by number, each position once, as far as they repeat it."""
    for (number, end), following in zip(ends.items(), [*ends.values(), len(text) + 1][1:], strict=True):
        of_row = [
            logits[place : place + 1]
            for logits, step in zip(recorded, steps, strict=True)
            for place, (fed, cur_pos) in enumerate(zip(step.rows, step.cur_pos, strict=True))
            if fed == number and cur_pos >= end
        ]
        for position, logits in enumerate(of_row[: following - end], end - 1):
            yield position, logits
            if text[position + 1 : position + 2] != [int(logits.argmax())]:
                break


SESSIONS = (SESSION, IN_ROWS, AMONG_OTHERS)
