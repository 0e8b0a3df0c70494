"""Turn ids into text while they are generated, in whole characters and up to a stop string; and prompts into ids.

Knows a tokenizer's interface and the rows of a batch; does not know models or how ids are made.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Literal, NotRequired, Protocol, TypedDict

from llama.batch import Batch, Ended, Row, Token


class TextStream(Protocol):
    """Turns ids into text, in whole characters."""

    def feed(self, id: int, /) -> str: ...
    def flush(self) -> str: ...


class TextCodec(Protocol):
    """A tokenizer, as far as it is needed here. `begins`: False if the text continues another one."""

    @property
    def bos_id(self) -> int | None: ...
    @property
    def adds_bos(self) -> bool: ...
    @property
    def stop_tokens(self) -> Sequence[int]: ...
    def encode(self, s: str, *, bos: bool, eos: bool, begins: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...
    def stream(self) -> TextStream: ...


class Completion(TypedDict):
    """The result of `generate` for one prompt.

    `finish_reason` is None while a stream is open, and if it was closed early or has failed. `logprobs`, one for each
    of `ids`, exist only if they were requested.
    """

    generation: str
    ids: list[int]
    finish_reason: Literal["stop", "length"] | None
    logprobs: NotRequired[list[float | None]]


def stop_strings(stop: str | Sequence[str]) -> list[str]:
    """Return the stop strings of a text. Raises ValueError for others than texts that are not empty."""
    stops = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Iterable) else [stop]
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"stop={stop!r} must be texts that are not empty: an empty one would end every text at once")
    return stops


def encode_prompt(tokenizer: TextCodec, prompt: str | Sequence[int], *, bos: bool = True) -> list[int]:
    """Return a prompt's ids, with BOS if the tokenizer adds it. An empty text gives BOS, if the tokenizer has one.

    Pass `bos=False` for a text that continues another one.
    """
    if isinstance(prompt, bytes):
        raise ValueError(f"a prompt is a str or a list of token ids, not bytes: {prompt[:40]!r}; decode it first")
    if not isinstance(prompt, Iterable):
        raise ValueError(f"a prompt is a str or a list of token ids, not {prompt!r:.40}; one of ids alone is [[1, 2]]")
    if not isinstance(prompt, str):
        return list(prompt)
    ids = tokenizer.encode(prompt, bos=bos and tokenizer.adds_bos, eos=False, begins=bos)
    return ids if ids or not bos or tokenizer.bos_id is None else [tokenizer.bos_id]


class Stream(Iterator[tuple[int, str]]):
    """An iterator that generates texts; `results` has the texts so far.

    Other calls and streams of the model may run between two pieces. To leave a loop early, call `close`, or write the
    loop in `with model.stream(...) as stream:`; otherwise the cache is not freed while the stream exists.
    """

    def __init__(
        self,
        tokens: Generator[Token, None, None],
        batch: Batch,
        tokenizer: TextCodec,
        prompts: Sequence[str | Sequence[int]],
        stop: str | Sequence[str],
    ) -> None:
        self._batch = batch
        self._texts = [RowText(tokenizer, stop, logprobs=batch.request.logprobs) for _ in prompts]
        self.results = [text.completion for text in self._texts]
        echoed = prompts if batch.request.echo else ()
        echo = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in echoed]
        self._pieces = _pieces(tokens, list(batch.rows), self._texts, echo)

    @property
    def guesses(self) -> tuple[int, int]:
        """How many tokens were guessed and fed so far, and how many of them were right."""
        return self._batch.proposed, self._batch.accepted

    def __next__(self) -> tuple[int, str]:
        piece = self.advance()
        if piece is None:
            raise StopIteration
        self._batch.maybe_changed = True  # the caller may change the model before the next piece
        return piece

    def advance(self) -> tuple[int, str] | None:
        """Return the next piece, or None at the end. For callers that do not change the model between pieces."""
        while (piece := self.step()) is not None and not piece[1]:
            pass
        return piece

    def step(self) -> tuple[int, str] | None:
        """Take at most one token, which may have no text; return its row and its piece, or None at the end.

        For callers that do not change the model between tokens.
        """
        return next(self._pieces, None)

    def finish(self) -> None:
        """Generate the rest. For callers that do not change the model meanwhile."""
        while self.advance() is not None:
            pass

    def close(self) -> None:
        """End the generation, free its cache, and add the pending text to `results`."""
        self._pieces.close()
        for text in self._texts:
            text.flush()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pieces(  # no method: a reference cycle would delay freeing the cache of a stream that is deleted
    tokens: Generator[Token, None, None], rows: Sequence[Row], texts: "Sequence[RowText]", echo: Sequence[str]
) -> Generator[tuple[int, str], None, None]:
    """Yield the pieces of all rows, and the pending text of a row that has ended without a token."""
    for row, prompt in enumerate(echo):
        texts[row].completion["generation"] += prompt
        yield row, prompt

    def taken(number: int, token: Token | None = None) -> tuple[int, str]:
        """Add a token to a row's text, and the end if the row has ended; return the row and its piece."""
        piece = texts[number].take(token, rows[number].ended)
        if texts[number].stopped:
            rows[number].ended = "stop"
        return number, piece

    unfinished = dict(enumerate(rows))
    with closing(tokens):
        for token in tokens:
            yield taken(token.row, token)
            for number in [number for number, row in unfinished.items() if row.ended]:
                del unfinished[number]
                yield taken(number)
    for number in unfinished:
        yield taken(number)


class RowText:
    """The text of one row, and its Completion so far. Text that may be the beginning of a stop string stays pending."""

    def __init__(self, tokenizer: TextCodec, stop: str | Sequence[str], *, logprobs: bool = False) -> None:
        self.stops, self.stream, self.pending, self.stopped = stop_strings(stop), tokenizer.stream(), "", False
        self.completion: Completion = {"generation": "", "ids": [], "finish_reason": None}
        if logprobs:
            self.completion["logprobs"] = []

    def take(self, token: Token | None, ended: Ended | None) -> str:
        """Add the row's next token, if there is one, and why the row has ended, if it has; return the new text."""
        piece = ""
        if token is not None:
            self.completion["ids"].append(token.id)
            if "logprobs" in self.completion:
                self.completion["logprobs"].append(token.logprob)
            piece = "" if token.echoed else self._released(self.stream.feed(token.id))
        if ended or self.stopped:
            piece += self.flush()
            self.completion["finish_reason"] = "stop" if self.stopped else None if ended == "failed" else ended
        return piece

    def flush(self) -> str:
        """End the text; return what was pending."""
        return self._released(self.stream.flush(), last=True)

    def _released(self, piece: str, *, last: bool = False) -> str:
        """Add text, and return what no stop string can begin with."""
        if self.stopped:
            return ""
        text = self.pending + piece
        found = [text.index(stop) for stop in self.stops if stop in text]
        keep = 0 if last else max((_overlap(text, stop) for stop in self.stops), default=0)
        self.stopped, end = bool(found), min(found, default=len(text) - keep)
        self.pending = text[end:]
        self.completion["generation"] += text[:end]
        return text[:end]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
