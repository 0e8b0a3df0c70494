"""Dialog -> text -> ids: by the chat template that came with the tokenizer, else in one of two well-known formats.

Knows roles, special tokens, and what a template is rendered with. Does not know models, how an answer is generated, or
how a template is rendered.

What people write never becomes a special token. A family's format is a list of parts, of which every second one is a
special token, so nothing is looked for in a content. A template gives one text, in which its special tokens have to be
found, while contents may hold their spelling: whole, or a part that the next text completes, or that a template's own
operations join. So every character of the contents that stands in some special token is replaced by a stand-in, a
private character that stands nowhere else, and the template is rendered with these. No special token of the result has
a character of a content in it, whatever the template did; behind it the stand-ins are replaced back. Three things
remain:

- A template may look into contents, as Qwen 3's does for `</think>`, and would not find it. So contents as they are get
  rendered as well. Where both give one text, the template has seen what mattered. Where they do not, contents in which
  only whole spellings of special tokens were replaced are rendered, and that result is taken if its special tokens are
  those of the first one, in their order; else the first one is.
- White space is not replaced, so that templates can trim it; a special token of white space alone is never looked for.
- Marks that are plain text, as Zephyr's `<|user|>` in a vocabulary without them, are no special tokens: anybody can
  write them. Added tokens that are not special become their ids wherever they stand, as in any text.

Two special tokens have one piece of plain text between them, which is encoded in one go, as the libraries do that
templates are written for; so merges cross from a template's text into a content as they do there.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, TypedDict, get_args

from llama.tokenizer import Tokenizer
from llama.untrusted.template import DialogRefused, Renderer, TemplateFailed

Role = Literal["system", "user", "assistant"]


class Message(TypedDict):
    """What one side said."""

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

    @cached_property
    def _starts(self) -> dict[int, int]:
        """Where in the text each special token begins, and which of the parts it is."""
        places = [0, *accumulate(map(len, self.parts))]
        return {places[index]: index for index in range(1, len(self.parts), 2)}

    def after(self, place: int) -> "Rendering | None":
        """Return what stands behind so many characters; None where no special token begins there."""
        index = self._starts.get(place)
        return None if index is None else Rendering(["", *self.parts[index:]])


class Family(NamedTuple):
    """A format that needs no template. What opens a message has {role} in it; both begin with a special token."""

    name: str
    opens: tuple[str, ...]
    ends: tuple[str, ...]
    begins_with_bos: bool
    strips: bool  # white space around a content

    @property
    def marks(self) -> tuple[str, ...]:
        """The special tokens that it takes."""
        return (*self.opens[::2], *self.ends[::2])

    def header(self, role: Role) -> list[str]:
        return [part.format(role=role) for part in self.opens]

    def message(self, message: Message) -> list[str]:
        *header, last = self.header(message["role"])
        content = message["content"].strip() if self.strips else message["content"]
        return [*header, last + content, *self.ends]


_FAMILIES = (
    # https://github.com/meta-llama/llama3/blob/main/llama/tokenizer.py, class ChatFormat
    Family(
        "Llama 3",
        opens=("<|start_header_id|>", "{role}", "<|end_header_id|>", "\n\n"),
        ends=("<|eot_id|>", ""),
        begins_with_bos=True,
        strips=True,
    ),
    # https://github.com/openai/openai-python/blob/release-v0.28.0/chatml.md
    Family(
        "ChatML",
        opens=("<|im_start|>", "{role}\n"),
        ends=("<|im_end|>", "\n"),
        begins_with_bos=False,
        strips=False,
    ),
)


class ChatFormat:
    """Turns dialogs into ids as the tokenizer's chat template says, or, without one, as its special tokens do.

    A template is rendered with what transformers gives it: `messages`, `add_generation_prompt`, the texts of the BOS,
    EOS and padding tokens, `tools` and `documents` as None, and `strftime_now`, whose time is when this was made. All
    else is undefined. Raises ValueError where there is neither a template that can be rendered nor a known format.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        has = tokenizer.special_tokens
        self._family = next((family for family in _FAMILIES if has.keys() >= set(family.marks)), None)
        self._renderer: Renderer | None = None
        self._spellings = sorted((text for text in has if text.strip()), key=len, reverse=True)
        self._chars = {char for text in has for char in text if not char.isspace()}
        if tokenizer.chat_template:
            self._try(tokenizer.chat_template)
        elif self._family is None:
            known = " or ".join(" ".join(family.marks) for family in _FAMILIES)
            raise ValueError(
                f"this tokenizer has no known chat format: that takes a chat template, or {known} as special tokens; "
                "complete plain text instead"
            )

    @property
    def name(self) -> str:
        """What writes dialogs, in words."""
        if self._renderer is not None:
            return "the checkpoint's own template"
        assert self._family is not None
        return f"{self._family.name}'s, by its special tokens"

    def encode_dialog_prompt(self, dialog: Dialog) -> list[int]:
        """Return the ids of a dialog and of what opens the answer, after a BOS where the format has one.

        Raises ValueError for what is no dialog, or one that the template refuses.
        """
        return self.encode(self.render(dialog))

    def render(self, dialog: Dialog) -> Rendering:
        """Return the text of a dialog, and of what opens the answer. Raises ValueError as `encode_dialog_prompt`."""
        check_dialog(dialog)
        if self._renderer is None:
            return Rendering(self._from_family(dialog))
        with self._saying_what_would_work():
            return Rendering(self._from_template(self._renderer, dialog))

    def encode(self, rendering: Rendering) -> list[int]:
        """Return the ids of a rendering: its special tokens by their ids, all else as plain text."""
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

        Some vocabularies put a space before a text, but not before one that goes on behind a special token; so it is
        encoded behind one: that one, or where the text spells it, some other.
        """
        marks = [before, *self.tokenizer.special_tokens] if before is not None else []
        mark = next((mark for mark in marks if mark is not None and mark not in text), None)
        if mark is None:
            return self.tokenizer.encode(text, bos=False, eos=False)
        return self.tokenizer.encode(mark + text, bos=False, eos=False, allowed_special={mark})[1:]

    # ---- within ------------------------------------------------------------------------------------------------------

    def _try(self, template: str) -> None:
        """Refuse now what cannot be rendered at all; a dialog of its own choice a template may refuse."""
        with self._saying_what_would_work():
            self._renderer = Renderer(template)
        with suppress(DialogRefused):
            self.render([{"role": "user", "content": "Hi"}])

    def _from_family(self, dialog: Dialog) -> list[str]:
        assert self._family is not None
        bos = self._text_of(self.tokenizer.bos_id)
        opening = [bos, ""] if self._family.begins_with_bos and bos is not None else []
        said = [part for message in dialog for part in self._family.message(message)]
        return ["", *opening, *said, *self._family.header("assistant")]

    def _from_template(self, renderer: Renderer, dialog: Dialog) -> list[str]:
        """Return the parts of what the template makes of a dialog. The file's docstring has the reasoning."""
        hide = self._stand_ins(renderer.template, dialog)
        hidden, back = str.maketrans(hide), str.maketrans({stand_in: char for char, stand_in in hide.items()})
        ways: list[Callable[[str], str]] = [
            lambda content: content.translate(hidden),
            lambda content: content,
            lambda content: self._hide_spellings(content, hidden),
        ]
        names = {
            "bos_token": self.tokenizer.bos_id,
            "eos_token": self.tokenizer.eos_id,
            "pad_token": self.tokenizer.pad_id,
        }
        texts = {name: text for name, id in names.items() if (text := self._text_of(id)) is not None}
        given = {**texts, "add_generation_prompt": True, "tools": None, "documents": None}
        safe, plain, readable = renderer.render(
            [{**given, "messages": [{**said, "content": way(said["content"])} for said in dialog]} for way in ways],
            cut_at=self._spellings,
        )
        if not any(plain):
            raise TemplateFailed("the chat template gives no text")
        if "".join(safe).translate(back) != "".join(plain) and readable[1::2] == safe[1::2]:
            safe = readable
        return [part if index % 2 else part.translate(back) for index, part in enumerate(safe)]

    def _hide_spellings(self, content: str, hidden: dict[int, str]) -> str:
        """Return a content in which the special tokens that it spells, and nothing else, have stand-ins."""
        for text in self._spellings:
            content = content.replace(text, text.translate(hidden))
        return content

    def _stand_ins(self, template: str, dialog: Dialog) -> dict[str, str]:
        """Return a private character, which stands nowhere in all this, for each character of special tokens."""
        seen = self._chars.union(template, *(message["content"] for message in dialog))
        private = (chr(code) for code in range(0xF0000, 0x110000))  # planes 15 and 16 of Unicode
        return dict(zip(sorted(self._chars), (char for char in private if char not in seen), strict=False))

    def _text_of(self, id: int | None) -> str | None:
        return next((text for text, known in self.tokenizer.special_tokens.items() if known == id), None)

    @contextmanager
    def _saying_what_would_work(self) -> Iterator[None]:
        try:
            yield
        except TemplateFailed as error:
            way = "complete plain text instead"
            if self._family is not None:
                name = self._family.name
                way = (
                    f"with tokenizer.chat_template = None, dialogs take {name}'s format, whose special tokens are there"
                )
            raise type(error)(f"{error}; {way}") from error


def check_dialog(dialog: object) -> None:
    """Raise ValueError for what is no dialog: a list of at least one message."""
    if not isinstance(dialog, list) or not dialog:
        raise ValueError(f"a dialog is a list of at least one message, not {dialog!r:.80}")
    for message in dialog:
        _check_message(message)


def _check_message(message: object) -> None:
    keys = Message.__annotations__.keys()
    if not isinstance(message, Mapping) or message.keys() != keys:
        raise ValueError(
            f"a message has the keys {' and '.join(map(repr, keys))} and no others, unlike {message!r:.80}"
        )
    if message["role"] not in get_args(Role):
        raise ValueError(f"unknown role {message['role']!r}; known are {', '.join(get_args(Role))}")
    if not isinstance(message["content"], str):
        raise ValueError(f"the content of a message is a str, not {type(message['content']).__name__}")
    if half := re.search("[\ud800-\udfff]", message["content"]):  # on its way to a template, two of them become one
        raise ValueError(
            f"character {half.start()} of the text, {half[0]!r}, is half of a surrogate pair; "
            "decode the text properly first"
        )
