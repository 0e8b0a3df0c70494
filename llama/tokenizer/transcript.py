"""The messages of a conversation, and the positions of generated answers in the ids of its text.

A chat format renders the whole dialog again each turn. Text that did not change has the same ids, except answers: a
model often generates other ids than those to which their text encodes. So a transcript stores where each answer ends,
in the ids and in the rendered text, and the answer's ids stay as long as the rendering contains its text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from llama.request import common_beginning
from llama.tokenizer import Tokenizer
from llama.tokenizer.chat import ChatFormat, Dialog, Message


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
        kept = (*self.kept, common_beginning(ids, prompt))
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
        same = common_beginning(self.text, text)
        ends = [end for end in self.answers if end.text <= same]
        if self.begin is None or same < len(self.text):
            return ends
        # Decoded with the id before it: some vocabularies drop a space at the beginning of a text.
        before = self.begin - 1
        answer = tokenizer.decode(ids[before:]).removeprefix(tokenizer.decode(ids[before : self.begin]))
        # Templates contain the answer as it is, or trimmed.
        forms = [form for form in (answer.strip(), answer) if text.startswith(form, same)]
        return ends + [End(len(ids), same + len(form)) for form in dict.fromkeys(forms)]
