"""Text around token ids: prompts in, and out only whole characters and nothing past a stop string.

Knows what it needs of a tokenizer; does not know models or how ids are made.
"""

from collections.abc import Sequence
from typing import Protocol


class TextStream(Protocol):
    """Turns ids into text, whole characters only."""

    def feed(self, id: int, /) -> str: ...
    def flush(self) -> str: ...


class TextCodec(Protocol):
    """What text needs of a tokenizer."""

    @property
    def bos_id(self) -> int | None: ...
    @property
    def adds_bos(self) -> bool: ...
    @property
    def stop_tokens(self) -> Sequence[int]: ...
    def encode(self, s: str, *, bos: bool, eos: bool) -> list[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...
    def stream(self) -> TextStream: ...


def encode_prompt(tokenizer: TextCodec, prompt: str | Sequence[int]) -> list[int]:
    """Return a prompt's ids, with BOS as the file asks for; an empty text is BOS alone where there is one."""
    if isinstance(prompt, bytes):
        raise ValueError(f"a prompt is a str or a list of token ids, not bytes: {prompt[:40]!r}; decode it first")
    if not isinstance(prompt, str):
        return list(prompt)
    ids = tokenizer.encode(prompt, bos=tokenizer.adds_bos, eos=False)
    return ids if ids or tokenizer.bos_id is None else [tokenizer.bos_id]


class RowText:
    """The text of one row, let out as soon as no stop string can begin in it."""

    def __init__(self, stream: TextStream, stops: Sequence[str]) -> None:
        self.stream, self.stops = stream, stops
        self.held = ""
        self.stopped = False

    def feed(self, id: int) -> str:
        return self._let_out(self.stream.feed(id), last=False)

    def flush(self) -> str:
        return self._let_out(self.stream.flush(), last=True)

    def _let_out(self, piece: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self.held + piece
        found = [text.index(stop) for stop in self.stops if stop in text]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = 0 if last else max((_overlap(text, stop) for stop in self.stops), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
