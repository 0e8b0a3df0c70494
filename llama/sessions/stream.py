"""The iterator over the pieces of a session's text.

Knows that a text has one writer at a time; does not know how a token is generated.
"""

from collections.abc import Iterator
from typing import Any

import torch

from llama.streaming import Completion, Stream


class SessionStream(Iterator[str]):
    """An iterator over the pieces of a Session's text. `result` is the Completion so far."""

    def __init__(self, session: Any, stream: Stream, *, kv_caching: bool) -> None:
        self._session, self._stream, self._kv_caching = session, stream, kv_caching
        self._model_was = self._model_is()
        self._mark = session.writer = object()  # not `self`: a reference cycle would delay freeing the cache

    def _model_is(self) -> tuple[object, ...]:
        return self._session.model.source, self._session.model.kv_caching

    @property
    def result(self) -> Completion:
        return self._stream.results[0]

    def __next__(self) -> str:
        self._check()
        with self._session.in_use(), self._session.model.ranks.one_at_a_time():
            self._begin()
            _, piece = next(self._stream)
        return piece

    def finish(self) -> Completion:
        """Generate the rest, and return the Completion."""
        self._check()
        with self._session.in_use(), self._session.model.ranks.one_at_a_time(), torch.inference_mode():
            self._begin()
            self._stream.finish()
        return self.result

    def close(self) -> None:
        """End the generation."""
        self._stream.close()

    def _check(self) -> None:
        """Raise RuntimeError if the session's text or the model has changed since the last piece."""
        session = self._session
        if session.writer is not self._mark or self._model_was != self._model_is():
            raise RuntimeError(
                "another call fed or changed the session's text, or the model was changed, since this stream made its "
                "last piece; start a new one"
            )

    def _begin(self) -> None:
        self._session.begin_computing(self._kv_caching)
        self._session.writer = self._mark

    def __enter__(self) -> "SessionStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
