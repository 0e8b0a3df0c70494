"""Dialog -> text -> ids: by the tokenizer's chat template, else in Llama 3's format.

The content of a message never becomes a special token. In Llama 3's format a dialog is a list of parts, of which every
second one is a special token, so no content is searched. A template gives one text, and its special tokens must be
found in it; but a content may contain the text of a special token, or a part that the template's text completes. So
every character of a content that occurs in any special token is replaced by a private character that occurs nowhere
else. In the rendered text a special token then has no character of a content. Afterwards the replacement is undone.
Three notes:

- A template may search a content, as Qwen 3's does for `</think>`, and would not find it. So a second rendering
  replaces only whole special tokens. It is used if it has the special tokens of the first one in the same order, and
  else the first one is used.
- White space is not replaced, because templates trim it; a special token of white space is never recognised.
- Markers that are plain text, such as Zephyr's `<|user|>` in a vocabulary without that token, are not special tokens:
  a content can contain them. Added tokens that are not special become their ids, as in any text.

The plain text between two special tokens is encoded in one call, as in the libraries for which templates are written;
so merges cross from a template's text into a content.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, TypedDict, get_args

from llama.tokenizer import Tokenizer
from llama.tokenizer.vocabulary import check_text
from llama.untrusted.template import DialogRefused, Renderer, TemplateFailed

Role = Literal["system", "user", "assistant"]


class Message(TypedDict):
    """A message of a dialog."""

    role: Role
    content: str


Dialog = list[Message]


@dataclass(frozen=True)
class Rendering:
    """A dialog as text. parts: plain text, special token, plain text, ..., plain text; plain ones may be empty."""

    parts: Sequence[str]

    @cached_property
    def text(self) -> str:
        return "".join(self.parts)

    def after(self, place: int) -> "Rendering | None":
        """Return the rest from character `place` on; None if no special token begins there."""
        places = [0, *accumulate(map(len, self.parts))]
        index = next((index for index in range(1, len(self.parts), 2) if places[index] == place), None)
        return None if index is None else Rendering(["", *self.parts[index:]])


def day_of(tokenizer: Any) -> str | None:
    """Return today's date if the tokenizer's chat template prints the time: then it decides ids. Else return None."""
    template = getattr(tokenizer, "chat_template", None) or ""
    return datetime.now().date().isoformat() if "strftime_now" in template else None


_LLAMA_3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


class ChatFormat:
    """Converts dialogs to ids by the tokenizer's chat template, or without one in Llama 3's format.

    A template gets the variables of transformers: `messages`, `add_generation_prompt`, the texts of the BOS, EOS and
    padding tokens, `tools` and `documents` as None, and `strftime_now`, whose time is the beginning of `day`, or by
    default that of the constructor. Raises ValueError if there is neither a template that can be rendered nor Llama 3's
    special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, *, day: str | None = None) -> None:
        self.tokenizer = tokenizer
        has = tokenizer.special_tokens
        self._is_llama_3 = has.keys() >= set(_LLAMA_3)
        self._renderer: Renderer | None = None
        self._special_texts = sorted((text for text in has if text.strip()), key=len, reverse=True)
        self._chars = {char for text in has for char in text if not char.isspace()}
        if tokenizer.chat_template:
            self._try(tokenizer.chat_template, None if day is None else datetime.fromisoformat(day))
        elif not self._is_llama_3:
            raise ValueError(
                "this tokenizer has no known chat format: it has no chat template and no special tokens "
                f"{' '.join(_LLAMA_3)}; complete plain text instead"
            )

    @property
    def name(self) -> str:
        """The name of the format, for people."""
        return "Llama 3's, by its special tokens" if self._renderer is None else "the checkpoint's own template"

    def encode_dialog_prompt(self, dialog: Dialog) -> list[int]:
        """Return the ids of a dialog and of the opening of the answer, after a BOS if the format has one.

        Raises ValueError for a malformed dialog, and for one that the template rejects.
        """
        return self.encode(self.render(dialog))

    def render(self, dialog: Dialog) -> Rendering:
        """Return the text of a dialog and of the opening of the answer. Raises ValueError as `encode_dialog_prompt`."""
        check_dialog(dialog)
        if self._renderer is None:
            return Rendering(self._llama_3(dialog))
        with self._with_remedy():
            return Rendering(self._from_template(self._renderer, dialog))

    def encode(self, rendering: Rendering) -> list[int]:
        """Return the ids of a rendering: special tokens as their ids, the other parts as plain text."""
        ids: list[int] = []
        before: str | None = None
        for index, part in enumerate(rendering.parts):
            if index % 2:
                ids.append(self.tokenizer.special_tokens[part])
                before = part
            elif part:
                ids.extend(self._between(before, part))
        return ids

    def _between(self, before: str | None, text: str) -> list[int]:
        """Return the ids of plain text behind a special token.

        Some vocabularies add a space before a text, but not behind a special token. So the text is encoded behind that
        token, or behind another one if the text contains it.
        """
        marks = [before, *self.tokenizer.special_tokens] if before is not None else []
        mark = next((mark for mark in marks if mark is not None and mark not in text), None)
        if mark is None:
            return self.tokenizer.encode(text, bos=False, eos=False)
        return self.tokenizer.encode(mark + text, bos=False, eos=False, allowed_special={mark})[1:]

    # ---- within ------------------------------------------------------------------------------------------------------

    def _try(self, template: str, now: datetime | None) -> None:
        """Raise TemplateFailed if the template cannot be rendered; it may reject the sample dialog."""
        with self._with_remedy():
            self._renderer = Renderer(template, now)
        with suppress(DialogRefused):
            self.render([{"role": "user", "content": "Hi"}])

    def _llama_3(self, dialog: Dialog) -> list[str]:
        """Return the parts of a dialog in Meta's format.

        Source: https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py, class ChatFormat.
        """
        start, end, turn = _LLAMA_3
        bos = self._text_of(self.tokenizer.bos_id)
        parts = [""] if bos is None else ["", bos, ""]
        for message in dialog:
            parts += [start, message["role"], end, "\n\n" + message["content"].strip(), turn, ""]
        return [*parts, start, "assistant", end, "\n\n"]

    def _from_template(self, renderer: Renderer, dialog: Dialog) -> list[str]:
        """Return the parts of the template's text of a dialog. The docstring of this file explains the renderings."""
        hide = self._stand_ins(renderer.template, dialog)
        hidden, back = str.maketrans(hide), str.maketrans({stand_in: char for char, stand_in in hide.items()})
        replacements: list[Callable[[str], str]] = [
            lambda content: content.translate(hidden),
            lambda content: self._hide_special_tokens(content, hidden),
        ]
        ids = {name: getattr(self.tokenizer, f"{name}_id") for name in ("bos", "eos", "pad")}
        texts = {f"{name}_token": text for name, id in ids.items() if (text := self._text_of(id)) is not None}
        given = {**texts, "add_generation_prompt": True, "tools": None, "documents": None}
        safe, readable = renderer.render(
            [
                {**given, "messages": [{**message, "content": replace(message["content"])} for message in dialog]}
                for replace in replacements
            ],
            cut_at=self._special_texts,
        )
        if not any(safe):
            raise TemplateFailed("the chat template gives no text")
        chosen = readable if readable[1::2] == safe[1::2] else safe
        return [part if index % 2 else part.translate(back) for index, part in enumerate(chosen)]

    def _hide_special_tokens(self, content: str, hidden: dict[int, str]) -> str:
        """Return a content with the characters of whole special tokens replaced."""
        for text in self._special_texts:
            content = content.replace(text, text.translate(hidden))
        return content

    def _stand_ins(self, template: str, dialog: Dialog) -> dict[str, str]:
        """Return, for each character of special tokens, a private character that occurs in no message or template."""
        seen = self._chars.union(template, *(message["content"] for message in dialog))
        private = (chr(code) for code in range(0xF0000, 0x110000))  # planes 15 and 16 of Unicode
        return dict(zip(sorted(self._chars), (char for char in private if char not in seen), strict=False))

    def _text_of(self, id: int | None) -> str | None:
        return next((text for text, known in self.tokenizer.special_tokens.items() if known == id), None)

    @contextmanager
    def _with_remedy(self) -> Iterator[None]:
        """Add a remedy to the message of a TemplateFailed."""
        try:
            yield
        except TemplateFailed as error:
            remedy = "complete plain text instead"
            if self._is_llama_3:
                remedy = "tokenizer.chat_template = None selects Llama 3's format by the special tokens"
            raise type(error)(f"{error}; {remedy}") from error


def check_dialog(dialog: object) -> None:
    """Raise ValueError unless the dialog is a list of at least one well-formed message."""
    if not isinstance(dialog, list) or not dialog:
        raise ValueError(f"a dialog is a list of at least one message, not {dialog!r:.80}")
    for message in dialog:
        _check_message(message)


def _check_message(message: object) -> None:
    keys = Message.__annotations__.keys()
    if not isinstance(message, Mapping) or message.keys() != keys:
        raise ValueError(f"a message has the keys {' and '.join(map(repr, keys))}, not as in {message!r:.80}")
    if message["role"] not in get_args(Role):
        raise ValueError(f"unknown role {message['role']!r}; known are {', '.join(get_args(Role))}")
    if not isinstance(message["content"], str):
        raise ValueError(f"the content of a message is a str, not {type(message['content']).__name__}")
    check_text(message["content"], "the text")  # JSON would join two halves of a pair to one character
