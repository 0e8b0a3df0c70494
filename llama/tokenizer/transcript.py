"""The messages of a conversation, and the positions of generated answers in the ids of its text.

A chat format renders the whole dialog again each turn. Text that did not change has the same ids, except answers: a
model often generates other ids than those to which their text encodes. So a transcript stores where each answer ends,
in the ids and in the rendered text, and the answer's ids stay as long as the rendering contains its text.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from llama.tokenizer import Tokenizer
from llama.tokenizer.chat import ChatFormat, Dialog, Message, check_dialog


class End(NamedTuple):
    """The end of an answer with generated ids: the number of ids, and of characters of the rendering, up to it."""

    ids: int
    text: int


@dataclass(frozen=True)
class Transcript:
    """A conversation. Each method gets the ids of its text, which the caller stores.

    messages: without the last answer, if it is decoded from the ids behind `begin`. text: the latest rendering.
    answers: the ends of the answers with generated ids. kept: for each user message, the number of earlier ids that
    stayed the same when the message was added.
    """

    messages: tuple[Message, ...] = ()
    text: str = ""
    begin: int | None = None
    answers: tuple[End, ...] = ()
    kept: tuple[int, ...] = ()

    def dialog(self, tokenizer: Tokenizer, ids: Sequence[int]) -> Dialog:
        """Return the messages, including the last answer as far as it is in the ids."""
        dialog: Dialog = [message.copy() for message in self.messages]
        if self.begin is not None:
            dialog.append({"role": "assistant", "content": tokenizer.decode(ids[self.begin :])})
        return dialog

    def ask(self, format: ChatFormat, ids: Sequence[int], content: str) -> "tuple[Transcript, list[int]]":
        """Return the transcript with one more user message, and the ids up to the beginning of its answer."""
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
        """Return the transcript without the last exchange, and the number of remaining ids. ValueError without one."""
        if not self.kept:
            raise ValueError("the conversation has no message, so there is nothing to undo")
        dialog, left = self.dialog(tokenizer, ids), min(self.kept[-1], len(ids))
        last = max(index for index, message in enumerate(dialog) if message["role"] == "user")
        answers = tuple(end for end in self.answers if end.ids <= left)
        return Transcript(tuple(dialog[:last]), self.text, None, answers, self.kept[:-1]), left

    def _ends(self, tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[End]:
        """Return the ends of answers, in order, up to which the ids are valid for the beginning of a new rendering."""
        same = _common(self.text, text)
        ends = [end for end in self.answers if end.text <= same]
        if self.begin is None or same < len(self.text):
            return ends
        # Decoded with the id before it: some vocabularies drop a space at the beginning of a text.
        before = self.begin - 1
        answer = tokenizer.decode(ids[before:]).removeprefix(tokenizer.decode(ids[before : self.begin]))
        # Templates contain the answer as it is, or trimmed.
        forms = [form for form in (answer.strip(), answer) if text.startswith(form, same)]
        return ends + [End(len(ids), same + len(form)) for form in dict.fromkeys(forms)]

    # ---- JSON --------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str, ids: Sequence[int]) -> "Transcript":
        """Return the transcript that `to_json` wrote, for these ids. Raises ValueError for any other text."""
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["messages"], fields["kept"] = tuple(fields["messages"]), tuple(fields["kept"])
            fields["answers"] = tuple(End(*end) for end in fields["answers"])
            made = cls(**fields)
            check_dialog(list(made.messages))
            users = sum(message["role"] == "user" for message in made.messages)
            counts = [*made.kept, *(number for end in made.answers for number in end)]
            counts += [] if made.begin is None else [made.begin, made.begin - 1]
            valid = len(fields) == 5 and isinstance(made.text, str) and len(made.kept) == users > 0
            if valid and all(type(count) is int and count >= 0 for count in counts) and made._fits(len(ids)):
                return made
        except (AttributeError, KeyError, TypeError, RecursionError, ValueError):
            pass
        raise ValueError("its transcript of the conversation is invalid")

    def _fits(self, ids: int) -> bool:
        """Return whether all ends lie inside a text of `ids` ids, in order."""
        last = ids if self.begin is None else self.begin
        ends = [*self.answers, End(last, len(self.text))]
        return last <= ids and all(one.ids <= next.ids and one.text <= next.text for one, next in pairwise(ends))


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    """Return the length of the common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
