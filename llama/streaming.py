"""Turn ids into text while they are generated, in whole characters and up to a stop string; and prompts into ids.

Knows a tokenizer's interface and the rows of a batch; does not know models or how ids are made.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Literal, NotRequired, Protocol, TypedDict

from llama.batch import Batch, Row, Token


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


# A row, a part of its text, and its token. A token can have no text yet; text from the end of a row has no token.
Piece = tuple[int, str, Token | None]


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
        stops = stop_strings(stop)
        self._batch, self._rows = batch, list(batch.rows)
        self._texts = [RowText(tokenizer.stream(), stops) for _ in prompts]
        echoed = prompts if batch.request.echo else ()
        echo = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in echoed]
        self._pieces = _pieces(tokens, batch, self._texts, echo)
        self.results: list[Completion] = [{"generation": "", "ids": [], "finish_reason": None} for _ in prompts]
        if batch.request.logprobs:
            for result in self.results:
                result["logprobs"] = []

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
        made = next(self._pieces, None)
        if made is None:
            return None
        row, text, token = made
        result = self.results[row]
        result["generation"] += text
        if token is not None:
            result["ids"].append(token.id)
            if "logprobs" in result:
                result["logprobs"].append(token.logprob)
        result["finish_reason"] = self._rows[row].finish_reason
        return row, text

    def finish(self) -> None:
        """Generate the rest. For callers that do not change the model meanwhile."""
        while self.advance() is not None:
            pass

    def close(self) -> None:
        """End the generation, free its cache, and add the pending text to `results`."""
        self._pieces.close()
        for result, text in zip(self.results, self._texts, strict=True):
            result["generation"] += text.flush()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pieces(
    tokens: Generator[Token, None, None], batch: Batch, texts: "Sequence[RowText]", echo: Sequence[str]
) -> Generator[Piece, None, None]:
    """Yield the pieces of all rows, and the pending text of a row as soon as the row ends."""
    yield from ((row, prompt, None) for row, prompt in enumerate(echo))
    rows = list(batch.rows)
    unfinished = dict(enumerate(rows))
    with closing(tokens):
        for token in tokens:
            text, row = texts[token.row], rows[token.row]
            piece = "" if token.echoed else text.feed(token.id)
            if text.stopped:
                row.ended = "stop"
            yield token.row, piece, token
            yield from _flush(texts, [unfinished.pop(number) for number, row in list(unfinished.items()) if row.ended])
    yield from _flush(texts, unfinished.values())


def _flush(texts: "Sequence[RowText]", rows: Iterable[Row]) -> Iterator[Piece]:
    for row in rows:
        text = texts[row.number]
        piece = text.flush()
        if text.stopped:
            row.ended = "stop"
        yield row.number, piece, None


class RowText:
    """The text of one row. Text that may be the beginning of a stop string stays pending."""

    def __init__(self, stream: TextStream, stops: Sequence[str]) -> None:
        self.stream, self.stops = stream, stops
        self.pending = ""
        self.stopped = False

    def feed(self, id: int) -> str:
        return self._released(self.stream.feed(id), last=False)

    def flush(self) -> str:
        return self._released(self.stream.flush(), last=True)

    def _released(self, piece: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self.pending + piece
        found = [text.index(stop) for stop in self.stops if stop in text]
        if found:
            self.stopped = True
            return text[: min(found)]
        keep = 0 if last else max((_overlap(text, stop) for stop in self.stops), default=0)
        self.pending = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` with which `stop` begins."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return len(text) - at if at >= 0 else 0
