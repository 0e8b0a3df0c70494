"""The passes through a session: fed in turns, forked, rewound, saved and loaded, and as the prefix of other rows.

Each pass yields logits at some positions of a text. Knows the model and what a session can do. Does not know which
passes are compared, nor which difference is rounding.
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
from llama.many import steady
from llama.model import Transformer
from llama.request import Options, Step
from llama.scheduler import Texts as TextsTogether
from llama.session import Session
from llama.sessions.file import IdsOnly
from llama.streaming import TextStream
from llama.verify.passes import Chunk, Texts, record_logits

IN_TURNS, FORKED, REWOUND = "session in turns", "session forked", "session rewound"
SAVED, AFTER_SESSION, FED_ONCE = "session saved and loaded", "after a session's text", "common beginning fed once"
AMONG_OTHERS = "among other texts"

SHARE = 4  # each pass runs on one text in four: all texts would add half of the time of the other passes
TURNS = 4  # the most turns in which a text is fed
ANSWER = 2  # tokens generated at a time: one from the logits of the last feed, and one from a step
PREFIX_ROWS = 3  # rows with a common prefix; the last one continues with other tokens

Position = tuple[int, Tensor]  # a position in a text, and the logits there, (1, vocab)
Pass = Callable[[Transformer, list[int], random.Random], Iterator[Position]]


def session_passes(model: Transformer, texts: Texts, seed: int) -> dict[str, Iterator[Chunk]]:
    """Return the passes through sessions by name, over one text in SHARE. Each one computes when it is iterated.

    `seed` draws which texts each pass runs on, and where they are cut. AMONG_OTHERS is left out if rows of this model,
    or of its kind of cache, cannot join a batch.
    """
    passes = {name: run for name, run in _PASSES.items() if name != AMONG_OTHERS or _may_join(model)}
    return {name: _some_rows(model, texts, run, random.Random(f"{seed}, {name}")) for name, run in passes.items()}


def _may_join(model: Transformer) -> bool:
    """Return True if rows of the model can join a batch, and its kind of cache can join rows."""
    with suppress(ValueError):
        steady(model.with_kv_caching(True)).new_cache().check_joins()
        return True
    return False


def _some_rows(model: Transformer, texts: Texts, run: Pass, dice: random.Random) -> Iterator[Chunk]:
    cached = model.with_kv_caching(True)
    for row in sorted(dice.sample(range(len(texts)), -(-len(texts) // SHARE))):
        yield from ((row, position, logits) for position, logits in run(cached, list(texts[row]), dice))


# ---- the passes ------------------------------------------------------------------------------------------------------


def _in_turns(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Position]:
    """Feed the text in turns and generate an answer after each; the next feed replaces tokens that differ."""
    session = model.session(Ids())
    for end, following in pairwise([*_ends(text, dice), len(text) + 1]):
        session.feed(text[:end])
        _, last = _last_logits(session, end)
        answer: list[Tensor] = []
        with record_logits(model, answer, []), suppress(NonFiniteLogits):
            session.generate(min(ANSWER, following - end), temperature=0)
        yield from _until_divergence(text, end, [last, *answer])


def _forked(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Position]:
    """Fork at every turn. One branch continues the text; the other goes back a token and appends other tokens.

    The branch that continues is alternately the fork and the original.
    """
    session = model.session(Ids())
    ends = _ends(text, dice)
    session.feed(text[: ends[0]])
    for number, (start, end) in enumerate(pairwise(ends)):
        other = session.fork()
        if number % 2 == 0:
            session, other = other, session
        other.rewind(start - 1)
        for tokens in (text[start - 1 : start], text[start:end]):  # the first write goes into memory they shared
            other.append(_other_ids(tokens, model.args.vocab_size))
        session.append(text[start:end])
        yield _last_logits(session, end)


def _rewound(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Position]:
    """At every turn append other tokens, rewind and append the text; at the end rewind to the end of the first turn."""
    session = model.session(Ids())
    ends = _ends(text, dice)
    session.feed(text[: ends[0]])
    for start, end in pairwise(ends):
        session.append(_other_ids(text[start:end], model.args.vocab_size))
        session.rewind(start)
        session.append(text[start:end])
        yield _last_logits(session, end)
    session.rewind(ends[0])
    session.append([])  # computes its last token again
    yield _last_logits(session, ends[0])


def _saved(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Position]:
    """Save the session after its first turn and load it; the saved logits are compared too."""
    session = model.session(Ids())
    ends = _ends(text, dice)
    session.feed(text[: ends[0]])
    with TemporaryDirectory() as folder:
        file = Path(folder) / "session"
        session.save(file)
        session = model.load_session(file, Ids())
    yield _last_logits(session, ends[0])
    for start, end in pairwise(ends):
        session.append(text[start:end])
        yield _last_logits(session, end)


class _NoText:
    """A text stream that decodes every id to nothing."""

    def feed(self, id: int, /) -> str:
        return ""

    def flush(self) -> str:
        return ""


class Ids(IdsOnly):
    """A stand-in for a tokenizer, with which a session can also generate ids."""

    def __init__(self) -> None:
        super().__init__("ids")

    def stream(self) -> TextStream:
        return _NoText()


def _ends(text: Sequence[int], dice: random.Random) -> list[int]:
    """Return the end of each of up to TURNS turns; the last is that of the text, which has at least 2 tokens."""
    return [*sorted(dice.sample(range(1, len(text)), min(TURNS, len(text)) - 1)), len(text)]


def _other_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """Return the same number of ids, each different from the given one."""
    return [(id + 1) % vocab_size for id in ids]


def _last_logits(session: Session, end: int) -> Position:
    """Return the logits after the text of a session, which should be text[:end]."""
    logits = session.logits
    assert logits is not None, "a session that was fed has the logits of its last token"
    return end - 1, logits[None]


def _after_session(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Position]:
    """Continue rows from a session's text, which is not fed again."""
    session = model.session(Ids())
    start = dice.randint(1, len(text) // 2)
    session.feed(text[:start])
    yield from _in_rows(model, text, start, dice, prefix=session)


def _fed_once(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Position]:
    """Continue rows whose common beginning is fed once."""
    yield from _in_rows(model, text, dice.randint(1, len(text) // 2), dice, share_prefix=True)


def _in_rows(
    model: Transformer, text: list[int], start: int, dice: random.Random, **options: Unpack[Options]
) -> Iterator[Position]:
    """Continue rows that begin with text[:start], and yield the logits of those that follow the text.

    The last row has other tokens, if the model takes more than one row. A `prefix` has text[:start].
    """
    given = start if "prefix" in options else 0
    choices, limit = range(start + 1, len(text) + 1), model.args.max_batch_size or PREFIX_ROWS
    ends = sorted(dice.sample(choices, min(len(choices), PREFIX_ROWS - 1, max(1, limit - 1))))
    prompts = [text[given:end] for end in ends]
    if limit > 1:
        prompts.append([*text[given:start], *_other_ids(text[start : ends[-1]], model.args.vocab_size)])
    max_new = [min(ANSWER, len(text) - end + 1) for end in (*ends, ends[-1])][: len(prompts)]
    recorded: list[Tensor] = []
    steps: list[tuple[int, Step]] = []  # each with the index of its logits
    with record_logits(model, recorded, []), suppress(NonFiniteLogits):
        options |= {"temperature": 0, "on_step": lambda step: steps.append((len(recorded), step))}
        model.generate_tokens(prompts, max_new, stop_ids=(), **options)
    for row, (end, following) in enumerate(pairwise([*ends, len(text) + 1])):
        of_row = [  # without the pass over a common prefix, whose rows end before `end`
            recorded[index][place : place + 1]
            for index, step in steps
            for place, (fed, cur_pos) in enumerate(zip(step.rows, step.cur_pos, strict=True))
            if fed == row and cur_pos >= end
        ]
        yield from _until_divergence(text[: following - 1], end, of_row)


def _among_others(model: Transformer, text: list[int], dice: random.Random) -> Iterator[Position]:
    """Continue beginnings of a text that join the rows of other texts in pieces, while some of these leave."""
    limit = model.args.max_seq_len
    choices = range(len(text) - max(len(text) // 3, 1), len(text))  # the end was generated: greedy steps repeat it
    ends = sorted(dice.sample(choices, min(PREFIX_ROWS - 1, len(choices))))
    recorded: list[Tensor] = []
    steps: list[Step] = []
    rows = min(model.args.max_batch_size or PREFIX_ROWS, PREFIX_ROWS)
    texts = TextsTogether(steady(model), rows=rows, piece=dice.randint(-(-ends[0] // 4), ends[0]), on_step=steps.append)
    with record_logits(model, recorded, []):
        numbers = []
        for end in ends:
            other = _other_ids(text[: dice.randint(1, len(text) // 2)], model.args.vocab_size)
            for steps_of_other in (2, 12):
                texts.add(other, min(steps_of_other, limit - len(other)), temperature=0)
            numbers.append(texts.add(text[:end], min(ANSWER, limit - end), temperature=0))
        while not texts.idle:
            for event in texts.step():
                if event.error is not None and not isinstance(event.error, NonFiniteLogits):
                    raise event.error
    for number, (end, following) in zip(numbers, pairwise([*ends, len(text) + 1]), strict=True):
        of_text = [
            logits[place : place + 1]
            for logits, step in zip(recorded, steps, strict=True)
            for place, (fed, cur_pos) in enumerate(zip(step.rows, step.cur_pos, strict=True))
            if fed == number and cur_pos >= end
        ]
        yield from _until_divergence(text[: following - 1], end, of_text)


def _until_divergence(text: Sequence[int], end: int, steps: Sequence[Tensor]) -> Iterator[Position]:
    """Yield the logits of greedy steps from text[:end] on, up to the first whose choice is not the text's next id."""
    for position, logits in enumerate(steps[: len(text) - end + 1], end - 1):
        yield position, logits
        if text[position + 1 : position + 2] != [int(logits.argmax())]:
            return


_PASSES: dict[str, Pass] = {
    IN_TURNS: _in_turns,
    FORKED: _forked,
    REWOUND: _rewound,
    SAVED: _saved,
    AFTER_SESSION: _after_session,
    FED_ONCE: _fed_once,
    AMONG_OTHERS: _among_others,
}
SESSIONS = tuple(_PASSES)
