"""The pieces of a session's text while it grows.

Knows that a text has one writer at a time; does not know how a token is made.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from llama.streaming import Completion, Stream


class Streamed(Protocol):
    """What a stream needs of a session. writer: the mark of the stream that made the text's end, and may go on."""

    model: Any
    writer: object

    def computing(self, kv_caching: bool | None = None) -> AbstractContextManager[None]: ...


class SessionStream(Iterator[str]):
    """The pieces of a session's text while it grows. `result` holds what there is so far."""

    def __init__(self, session: Streamed, stream: Stream, *, kv_caching: bool) -> None:
        self._session, self._stream, self._kv_caching = session, stream, kv_caching
        self._model_was = self._model_is()
        self._mark = session.writer = object()  # not the stream: a cycle would keep the cache until it is collected

    def _model_is(self) -> tuple[object, ...]:
        return self._session.model.source, self._session.model.kv_caching

    @property
    def result(self) -> Completion:
        return self._stream.results[0]

    def __next__(self) -> str:
        with self._going_on():
            _, piece = next(self._stream)
        return piece

    def finish(self) -> Completion:
        """Make the rest, and return all."""
        with torch.inference_mode(), self._going_on():
            self._stream.finish()
        return self.result

    def close(self) -> None:
        """End the text here."""
        self._stream.close()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Keep the session to this stream; raise RuntimeError where its text, or the model, is not as it was left."""
        session = self._session
        if session.writer is not self._mark or self._model_was != self._model_is():
            raise RuntimeError(
                "the session's text, or the model, was changed since this stream made its last piece; stream anew"
            )
        with session.computing(self._kv_caching):
            session.writer = self._mark
            yield

    def __enter__(self) -> "SessionStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
