"""A conversation on a session: each turn feeds the model only the new tokens. Does not know terminals."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Unpack

from llama.request import Options, listing_options, make_request
from llama.tokenizer.chat import ChatFormat, Dialog, check_dialog
from llama.tokenizer.transcript import Transcript

if TYPE_CHECKING:
    from llama.model import Transformer
    from llama.texts.session import Session
    from llama.tokenizer import Tokenizer

MIN_ANSWER = 8  # tokens that must remain for an answer


@dataclass(frozen=True)
class Turn:
    """The counts and times of an answer. Times do not include the caller's work between two pieces.

    fed: the number of tokens that were fed before the answer's first token.
    context: the number of tokens before the answer.
    first: the seconds to the first token.
    made: the number of tokens of the answer.
    per_second: the tokens per second after the first; None if there is only one.
    finish_reason: as in a Completion; None while the answer is generated, and after an interruption.
    """

    fed: int
    context: int
    first: float
    made: int
    per_second: float | None
    finish_reason: Literal["stop", "length"] | None


class Chat:
    """A conversation between a user and a model.

    Each turn renders the whole dialog in the chat format and feeds what the session has not cached. The ids of an
    answer stay as they were generated unless the format changes its text later: some templates drop a model's earlier
    thoughts. An interrupted answer stays, and gets the format's end when the conversation continues.

    `system` is the system message; None: the chat template's own, if it has one. `max_seq_len` and `kv_cache` are those
    of the session. Raises ValueError if the tokenizer has no known chat format.
    """

    def __init__(
        self,
        model: "Transformer",
        tokenizer: "Tokenizer",
        *,
        system: str | None = None,
        max_seq_len: int | None = None,
        kv_cache: str | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._format = ChatFormat(tokenizer)
        opening: Dialog = [] if system is None else [{"role": "system", "content": system}]
        if opening:
            check_dialog(opening)
        self._transcript = Transcript(tuple(opening))
        self.session: Session = model.session(tokenizer, max_seq_len=max_seq_len, kv_cache=kv_cache)
        self.last: Turn | None = None  # of the last answer
        self._answer: Generator[str, None, None] | None = None  # the last one, which may be unfinished

    @property
    def messages(self) -> Dialog:
        """All messages, with the system message of `system`, and with an unfinished answer as far as it exists."""
        return self._transcript.dialog(self.tokenizer, self.session.tokens)

    @property
    def left(self) -> int | None:
        """The number of tokens that the conversation can still add; None: there is no limit."""
        if self.session.bound is not None and self.model.kv_caching:
            return None
        return self.session.max_seq_len - len(self.session.tokens)

    @listing_options(but=("kv_caching", "kv_cache", "prefix", "echo"))
    def say(
        self,
        text: str,
        max_gen_len: int = 512,
        *,
        stop: str | Sequence[str] = (),
        **options: Unpack[Options],
    ) -> Generator[str, None, None]:
        """Return an iterator over the pieces of the answer to a user's message; they are computed during iteration.

        `max_gen_len` is cut to the remaining length; `stop` and the options are those of `Session.stream`. The tokens
        of a stop string stay in the conversation. `close` or an exception ends the answer; if it has no token yet, the
        message is removed, too. Raises ValueError for a message that is empty, that the chat template rejects, or that
        does not fit into max_seq_len; the conversation is then unchanged.
        """
        self.finish()
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"a message must be a text that is not empty, not {text!r:.40}")
        if options.get("kv_caching") is not None:
            raise ValueError("kv_caching is not an option of one answer; set model.kv_caching, for all that follow")
        if options.get("echo"):
            raise ValueError("echo is not an option of an answer; chat.messages has all messages")
        asked, prompt = self._transcript.ask(self._format, self.session.tokens, text)
        if self.left is not None:
            remaining = self.session.max_seq_len - len(prompt)
            if remaining < MIN_ANSWER:
                limit, now = self.session.max_seq_len, asked.kept[-1]
                raise ValueError(
                    f"the conversation has {now} tokens, and with {len(prompt) - now} for the message and {MIN_ANSWER} "
                    f"for an answer it would exceed max_seq_len={limit}; undo an exchange, or start with a larger "
                    f"max_seq_len or kv_cache='window:{max(1, min(1024, limit // 2))}+4', which has no such limit"
                )
            max_gen_len = min(max_gen_len, remaining) if isinstance(max_gen_len, int) else max_gen_len
        caching, bound = self.model.kv_caching, self.session.bound
        # Rejects invalid options now; the iterator would do so at its first step.
        make_request(self.session.limits, caching, [prompt], max_gen_len, (), options, bound=bound)
        self._answer = self._stream(asked, prompt, max_gen_len, stop, options)
        return self._answer

    def undo(self) -> Dialog:
        """Remove the last exchange, and return its messages."""
        self.finish()
        messages = self.messages
        self._undo()
        return messages[len(self.messages) :]

    def finish(self) -> None:
        """End the last answer if it is unfinished."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def _undo(self) -> None:
        """Restore the state before the last user message."""
        self._transcript, left = self._transcript.undo(self.tokenizer, self.session.tokens)
        self.session.rewind(left)

    def _stream(
        self, asked: Transcript, prompt: list[int], max_gen_len: int, stop: str | Sequence[str], options: Options
    ) -> Generator[str, None, None]:
        session, seconds, began = self.session, 0.0, time.perf_counter()
        timed: list[tuple[float, int]] = []  # seconds and tokens at the first piece, and at the latest one
        self._transcript = asked
        try:
            fed = session.feed(prompt)
            with session.stream(max_gen_len, stop=stop, **options) as stream:
                while True:
                    piece = next(stream, None)
                    seconds += time.perf_counter() - began
                    made = len(session.tokens) - len(prompt)
                    if piece is not None:
                        timed[1:] = [(seconds, made)]
                    first = timed[0][0] if timed else seconds
                    reason = stream.result["finish_reason"]
                    self.last = Turn(fed, len(prompt), first, made, _rate(timed), reason)
                    if piece is None:
                        return
                    yield piece
                    began = time.perf_counter()
        except BaseException:
            if len(session.tokens) <= len(prompt):
                self._undo()  # without an answer the message is removed, too
            raise


def _rate(timed: list[tuple[float, int]]) -> float | None:
    """Return the tokens per second from the first of these points to the last; None if there is one at most."""
    if len(timed) < 2:
        return None
    (began, first), (ended, last) = timed
    return (last - first) / (ended - began) if last > first else None
