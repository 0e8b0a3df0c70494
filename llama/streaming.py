"""Ids -> text as it grows: whole characters only, nothing past a stop string; and prompts -> ids.

Knows what it needs of a tokenizer, and which rows of a batch still grow; does not know models or how ids are made.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Literal, NotRequired, Protocol, TypedDict

from llama.batch import Batch, Token


class TextStream(Protocol):
    """Turns ids into text, whole characters only."""

    def feed(self, id: int, /) -> str: ...
    def flush(self) -> str: ...


class TextCodec(Protocol):
    """What text needs of a tokenizer. `begins`: the text begins one; else it goes on from another, as streams do."""

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
    """What `generate` returns for a prompt.

    `finish_reason` is None while a stream goes on, or where it was broken off. `logprobs`, one for each of `ids`, are
    there only where they were asked for.
    """

    generation: str
    ids: list[int]
    finish_reason: Literal["stop", "length"] | None
    logprobs: NotRequired[list[float | None]]


def encode_prompt(tokenizer: TextCodec, prompt: str | Sequence[int], *, bos: bool = True) -> list[int]:
    """Return a prompt's ids, with BOS as the file asks for; an empty text is BOS alone where there is one.

    Without `bos` a text has none, for it goes on from another.
    """
    if isinstance(prompt, bytes):
        raise ValueError(f"a prompt is a str or a list of token ids, not bytes: {prompt[:40]!r}; decode it first")
    if not isinstance(prompt, Iterable):
        raise ValueError(f"a prompt is a str or a list of token ids, not {prompt!r:.40}; one of ids alone is [[1, 2]]")
    if not isinstance(prompt, str):
        return list(prompt)
    ids = tokenizer.encode(prompt, bos=bos and tokenizer.adds_bos, eos=False, begins=bos)
    return ids if ids or not bos or tokenizer.bos_id is None else [tokenizer.bos_id]


# A row, some of its text, and the token that it came with: none, or no text, where a character needs several tokens.
Piece = tuple[int, str, Token | None]


class Stream(Iterator[tuple[int, str]]):
    """The texts of one generation, made while it is iterated; `results` holds what there is so far.

    The model may serve others meanwhile, other streams too. To leave a loop over it early, `close` it, or put the loop
    into `with model.stream(...) as stream:`; else the memory of its cache is held for as long as the stream is.
    """

    def __init__(
        self,
        tokens: Generator[Token, None, None],
        batch: Batch,
        tokenizer: TextCodec,
        prompts: Sequence[str | Sequence[int]],
        stop: str | Sequence[str],
    ) -> None:
        stops = [stop] if isinstance(stop, str) else list(stop)
        if not all(isinstance(text, str) and text for text in stops):
            raise ValueError(
                f"stop={stop!r} must be texts that are not empty: an empty one would end every text at once"
            )
        self._batch = batch
        self._texts = [RowText(tokenizer.stream(), stops) for _ in prompts]
        echoed = prompts if batch.request.echo else ()
        echo = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in echoed]
        self._pieces = _pieces(tokens, batch, self._texts, echo)
        self.results: list[Completion] = [{"generation": "", "ids": [], "finish_reason": None} for _ in prompts]
        if batch.request.logprobs:
            for result in self.results:
                result["logprobs"] = []

    def __next__(self) -> tuple[int, str]:
        piece = self.advance()
        if piece is None:
            raise StopIteration
        self._batch.disturbed = True  # until the next piece is asked for, the caller may change the model
        return piece

    def advance(self) -> tuple[int, str] | None:
        """Return the next piece, None at the end, to a caller who leaves the model as it is."""
        for row, text, token in self._pieces:
            result = self.results[row]
            result["generation"] += text
            if token is not None:
                result["ids"].append(token.id)
                if "logprobs" in result:
                    result["logprobs"].append(token.logprob)
            if row not in self._batch.live:
                result["finish_reason"] = "stop" if row in self._batch.stopped else "length"
            if text:
                return row, text
        return None

    def finish(self) -> None:
        """Make the rest, for a caller who leaves the model as it is."""
        while self.advance() is not None:
            pass

    def close(self) -> None:
        """End the generation here, drop its cache, and let what was held back of the texts into `results`."""
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
    """Yield the texts of all rows, piece by piece, and what a row still holds back as soon as it has ended."""
    yield from ((row, prompt, None) for row, prompt in enumerate(echo))
    unfinished = set(range(len(texts)))
    with closing(tokens):
        for token in tokens:
            text = texts[token.row]
            piece = "" if token.echoed else text.feed(token.id)
            if text.stopped:
                batch.stop(token.row)
            yield token.row, piece, token
            ended = unfinished - batch.live
            unfinished -= ended
            yield from _flush(batch, texts, ended)
    yield from _flush(batch, texts, unfinished)


def _flush(batch: Batch, texts: "Sequence[RowText]", rows: set[int]) -> Iterator[Piece]:
    for row in sorted(rows):
        piece = texts[row].flush()
        if texts[row].stopped:
            batch.stop(row)
        yield row, piece, None


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
