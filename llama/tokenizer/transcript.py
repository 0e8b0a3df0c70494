"""A conversation beside the ids of its text: what was said, and which answers stand there as they were generated.

A chat format renders the whole dialog anew each turn. What is rendered like before has the same ids, except answers:
those that a model generated are often not the ones that their text encodes to. So a transcript notes where answers
stand, in the ids and in the rendered text, and keeps their ids for as long as the rendering says what they say.
Knows dialogs and ids. Does not know models, caches or files.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from llama.tokenizer import Tokenizer
from llama.tokenizer.chat import ChatFormat, Dialog, Message, check_dialog


class End(NamedTuple):
    """Where an answer that stands as it was generated ends: behind so many ids, and characters of the rendering."""

    ids: int
    text: int


@dataclass(frozen=True)
class Transcript:
    """What was said. The ids of the text, which its owner has, are given to each method.

    messages: what was said, without an answer that stands behind `begin` ids, to be read out of them. text: the newest
    rendering. answers: of those in it that stand as they were generated, the ends. kept: for each of the user's
    messages, how many of the ids before it stood still when it was said.
    """

    messages: tuple[Message, ...] = ()
    text: str = ""
    begin: int | None = None
    answers: tuple[End, ...] = ()
    kept: tuple[int, ...] = ()

    def dialog(self, tokenizer: Tokenizer, ids: Sequence[int]) -> Dialog:
        """Return what was said, with the last answer as far as it stands in the ids."""
        said: Dialog = [message.copy() for message in self.messages]
        if self.begin is not None:
            said.append({"role": "assistant", "content": tokenizer.decode(ids[self.begin :])})
        return said

    def ask(self, format: ChatFormat, ids: Sequence[int], content: str) -> "tuple[Transcript, list[int]]":
        """Return the transcript with one more message of the user, and the ids up to where its answer begins."""
        dialog: Dialog = [*self.dialog(format.tokenizer, ids), {"role": "user", "content": content}]
        rendering = format.render(dialog)
        begin, rest, answers = 0, rendering, list[End]()
        for end in self._ends(format.tokenizer, ids, rendering.text):
            if behind := rendering.after(end.text):
                begin, rest = end.ids, behind
                answers.append(end)
        prompt = [*ids[:begin], *format.encode(rest)]
        kept = (*self.kept, _common(ids, prompt))
        return Transcript(tuple(dialog), rendering.text, len(prompt), tuple(answers), kept), prompt

    def undo(self, tokenizer: Tokenizer, ids: Sequence[int]) -> "tuple[Transcript, int]":
        """Return the transcript without the last exchange, and how many of the ids are left. ValueError without one."""
        if not self.kept:
            raise ValueError("nothing has been said yet, so there is nothing to take back")
        said, left = self.dialog(tokenizer, ids), min(self.kept[-1], len(ids))
        last = max(place for place, message in enumerate(said) if message["role"] == "user")
        answers = tuple(end for end in self.answers if end.ids <= left)
        return Transcript(tuple(said[:last]), self.text, None, answers, self.kept[:-1]), left

    def _ends(self, tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[End]:
        """Return where answers may end, in order, up to which the ids stand for the beginning of a new rendering."""
        same = _common(self.text, text)
        ends = [end for end in self.answers if end.text <= same]
        if self.begin is None or same < len(self.text):
            return ends
        # Behind the id before it, for a vocabulary may drop a space where a text begins.
        before = self.begin - 1
        answer = tokenizer.decode(ids[before:]).removeprefix(tokenizer.decode(ids[before : self.begin]))
        # As it is, or trimmed, as templates do, which takes nothing from what was said.
        ways = [way for way in (answer.strip(), answer) if text.startswith(way, same)]
        return ends + [End(len(ids), same + len(way)) for way in dict.fromkeys(ways)]

    # ---- as text -----------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str, ids: Sequence[int]) -> "Transcript":
        """Return what `to_json` wrote, for these ids. Raises ValueError for anything else."""
        try:
            said: dict[str, Any] = json.loads(text)
            made = cls(
                messages=tuple(said.pop("messages")),
                text=said.pop("text"),
                begin=said.pop("begin"),
                answers=tuple(End(*end) for end in said.pop("answers")),
                kept=tuple(said.pop("kept")),
            )
            check_dialog(list(made.messages))
            users = sum(message["role"] == "user" for message in made.messages)
            counts = [*made.kept, *(number for end in made.answers for number in end)]
            counts += [] if made.begin is None else [made.begin, made.begin - 1]
            whole = not said and isinstance(made.text, str) and len(made.kept) == users > 0
            if whole and all(type(count) is int and count >= 0 for count in counts) and made._fits(len(ids)):
                return made
        except (AttributeError, KeyError, TypeError, RecursionError, ValueError):
            pass
        raise ValueError("what it says of the conversation is not what was saved")

    def _fits(self, ids: int) -> bool:
        """Whether the places lie in a text of so many ids, in order."""
        last = ids if self.begin is None else self.begin
        ends = [*self.answers, End(last, len(self.text))]
        return last <= ids and all(one.ids <= next.ids and one.text <= next.text for one, next in pairwise(ends))


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many items two sequences have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
