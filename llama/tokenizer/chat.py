"""Dialog -> ids and back, in the two formats of Llama-shaped chat models: Llama 3's headers and ChatML.

Knows roles and special tokens. Does not know models, how an answer is generated, or Jinja: of a chat template it reads
which format it writes and, for ChatML, the system message that it puts before a dialog without one.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict, get_args

from llama.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Role = Literal["system", "user", "assistant"]


class Message(TypedDict):
    """What one side said."""

    role: Role
    content: str


Dialog = list[Message]

_LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_CHATML = ("<|im_start|>", "<|im_end|>")
# In SmolLM2's template: {% if ... messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n...<|im_end|>\n' }}, where
# the newlines stand as themselves or as Jinja's "\n".
_DEFAULT_SYSTEM = re.compile(
    r"messages\[0\]\['role'\] != 'system' %\}\{\{ '<\|im_start\|>system(?:\n|\\n)([^'\\]*)<\|im_end\|>(?:\n|\\n)' \}\}"
)


class ChatFormat:
    """Turns dialogs into ids: each special token by its id, all else as plain text, so that no content can forge one.

    Raises ValueError where the tokenizer has neither format's special tokens, or a chat template that says otherwise.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        template = tokenizer.chat_template or ""
        has = tokenizer.special_tokens.keys()
        formats = [marks for marks in (_LLAMA3, _CHATML) if has >= set(marks) and marks[0] in (template or marks)]
        if not formats:
            raise ValueError(
                f"this tokenizer has no known chat format: that takes {' '.join(_LLAMA3)} or {' '.join(_CHATML)} as "
                "special tokens, and a chat template, if there is one, that uses them; complete plain text instead"
            )
        self._is_chatml = formats[0] is _CHATML
        if not self._is_chatml and "Cutting Knowledge Date" in template:
            logger.info("the chat template's own system text, with its dates, is left out, as in Meta's ChatFormat")
        found = _DEFAULT_SYSTEM.search(template)
        if self._is_chatml and found is None and "<|im_start|>system" in template:
            raise ValueError("the chat template has a system message of its own, in a form that only Jinja can read")
        self._default_system: Message | None = {"role": "system", "content": found[1]} if found else None
        has_bos = not self._is_chatml or "bos_token" in template
        self._opening = [tokenizer.bos_id] if has_bos and tokenizer.bos_id is not None else []

    def encode_header(self, message: Message) -> list[int]:
        """Return the ids that open a message of this role."""
        if self._is_chatml:
            return [self._special("<|im_start|>"), *self._text(f"{message['role']}\n")]
        start, end = self._special("<|start_header_id|>"), self._special("<|end_header_id|>")
        return [start, *self._text(message["role"]), end, *self._text("\n\n")]

    def encode_message(self, message: Message) -> list[int]:
        """Return the ids of one whole message."""
        _check_message(message)
        if self._is_chatml:
            # One text, because merges may reach from the header's newline into the content.
            body = self._text(f"{message['role']}\n{message['content']}")
            return [self._special("<|im_start|>"), *body, *self._ending()]
        return [*self.encode_header(message), *self._text(message["content"].strip()), *self._ending()]

    def encode_opening(self, system: str | None = None) -> list[int]:
        """Return the ids that a dialog begins with: BOS where the format has one, and a system message.

        Without a text for it, that is the template's own where it has one, else none.
        """
        message = self._default_system if system is None else Message(role="system", content=system)
        return [*self._opening, *(self.encode_message(message) if message else [])]

    def encode_dialog_prompt(self, dialog: Dialog) -> list[int]:
        """Return the ids of a dialog and of the header of the answer, after one BOS where the format has one."""
        _check_dialog(dialog)
        ids = list(self._opening) if dialog[0]["role"] == "system" else self.encode_opening()
        for message in dialog:
            ids.extend(self.encode_message(message))
        return ids + self.encode_header({"role": "assistant", "content": ""})

    def encode_rest(self, ids: Sequence[int]) -> list[int]:
        """Return what a dialog's ids lack for their last message to be whole; a next one may follow then.

        An answer that was generated lacks all of its end, for generation ends before the end's special token.
        """
        ending = self._ending()
        first = self._special("<|im_start|>" if self._is_chatml else "<|start_header_id|>")
        last = next((id for id in reversed(ids) if id in (first, ending[0])), None)
        return ending if last == first else ending[1:] if ids and ids[-1] == ending[0] else []

    def decode_dialog(self, ids: Sequence[int]) -> list[tuple[int, Message]]:
        """Return the messages that `ids` hold, and where each begins; the last may lack its end.

        The template's own system message is left out, as `encode_dialog_prompt` puts it in. Raises ValueError for ids
        that are no dialog in this format. Only what ends a message is looked for in it: a model may write all else.
        """
        ids, ending = list(ids), self._ending()
        begin = len(self._opening) if ids[: len(self._opening)] == self._opening else 0
        found: list[tuple[int, Message]] = []
        while begin < len(ids):
            end = ids.index(ending[0], begin) if ending[0] in ids[begin:] else len(ids)
            message = self._decode_message(ids[begin:end])
            if found or message != self._default_system:
                found.append((begin, message))
            begin = end + (len(ending) if ids[end : end + len(ending)] == ending else 1)
        return found

    def _decode_message(self, ids: list[int]) -> Message:
        """Return the message that these ids hold, which begin with a header and lack the end."""
        for role in get_args(Role):
            header = self.encode_header({"role": role, "content": ""})
            # Merges may reach from a header's newlines into the content, so these are told by their text.
            marks = header[: 1 if self._is_chatml else header.index(self._special("<|end_header_id|>")) + 1]
            text = self.tokenizer.decode(header[len(marks) :])
            body = self.tokenizer.decode(ids[len(marks) :])
            if ids[: len(marks)] == marks and body.startswith(text):
                return {"role": role, "content": body.removeprefix(text)}
        raise ValueError(f"these ids are no dialog in this tokenizer's format: {self.tokenizer.decode(ids)[:40]!r}")

    def _ending(self) -> list[int]:
        """Return the ids that end a message: a special token, and what the format has behind it."""
        if self._is_chatml:
            return [self._special("<|im_end|>"), *self._text("\n")]
        return [self._special("<|eot_id|>")]

    def _special(self, text: str) -> int:
        return self.tokenizer.special_tokens[text]

    def _text(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, bos=False, eos=False)


def _check_dialog(dialog: Dialog) -> None:
    if not isinstance(dialog, list) or not dialog:
        raise ValueError(f"a dialog is a list of at least one message, not {dialog!r:.80}")
    for message in dialog:
        _check_message(message)


def _check_message(message: Message) -> None:
    keys = Message.__annotations__.keys()
    if not isinstance(message, Mapping) or message.keys() != keys:
        raise ValueError(
            f"a message has the keys {' and '.join(map(repr, keys))} and no others, unlike {message!r:.80}"
        )
    if message["role"] not in get_args(Role):
        raise ValueError(f"unknown role {message['role']!r}; known are {', '.join(get_args(Role))}")
    if not isinstance(message["content"], str):
        raise ValueError(f"the content of a message is a str, not {type(message['content']).__name__}")
