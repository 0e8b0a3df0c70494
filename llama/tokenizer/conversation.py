"""A conversation on a session: each turn feeds the model only the new tokens. Does not know terminals."""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING, Literal, Unpack

from llama.request import Options, listing_options, make_request
from llama.tokenizer.chat import ChatFormat, Dialog, check_dialog
from llama.tokenizer.transcript import Transcript

if TYPE_CHECKING:
    from llama.model import Transformer
    from llama.session import Session
    from llama.tokenizer import Tokenizer

MIN_ANSWER = 8  # tokens that must remain for an answer


@dataclass(frozen=True)
class Turn:
    """The counts and times of an answer.

    fed: the tokens that were fed before its first token. context: the tokens before it. first: seconds to the first
    token. made: its tokens. per_second: tokens per second after the first; None if there is only one. finish_reason: as
    in a Completion; None while the answer is generated, and after an interruption. Times do not include the caller's
    work between two pieces.
    """

    fed: int
    context: int
    first: float
    made: int
    per_second: float | None
    finish_reason: Literal["stop", "length"] | None


class ContextFull(ValueError):
    """A message does not fit into max_seq_len. The conversation is unchanged."""

    def __init__(self, tokens: int, new: int, limit: int) -> None:
        super().__init__(
            f"the conversation has {tokens} tokens, and with {new} for this message and {MIN_ANSWER} for an answer it "
            f"would exceed max_seq_len={limit}; undo an exchange, or start with a larger max_seq_len or "
            f"kv_cache={endless(limit)!r}, which has no such limit"
        )
        self.tokens, self.new, self.limit = tokens, new, limit


def endless(max_seq_len: int) -> str:
    """Return a kind of cache with which a text of a model of this length has no limit."""
    return f"window:{max(1, min(1024, max_seq_len // 2))}+4"


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
        message is removed, too. Raises ValueError for an empty message or one that the chat template rejects, and
        ContextFull; the conversation is then unchanged.
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
                unchanged = asked.kept[-1]
                raise ContextFull(unchanged, len(prompt) - unchanged, self.session.max_seq_len)
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

    def save(self, path: str | PathLike[str]) -> None:
        """Write the conversation and its cache to a file."""
        self.finish()
        if not self._transcript.kept:
            raise ValueError("the conversation has no message, so there is nothing to save")
        self.session.note = self._transcript.to_json()
        self.session.save(path)

    @classmethod
    def load(cls, model: "Transformer", tokenizer: "Tokenizer", path: str | PathLike[str]) -> "Chat":
        """Return the conversation in a file that `save` wrote. Raises ValueError if the file has none."""
        chat = cls(model, tokenizer)
        session = model.load_session(path, tokenizer)
        if session.note is None:
            raise ValueError(f"{fspath(path)} has a session without a conversation; model.load_session loads it")
        try:
            chat._transcript = Transcript.from_json(session.note, session.tokens)
        except ValueError as error:
            raise ValueError(f"{fspath(path)} is damaged: {error}") from None
        chat.session = session
        return chat

    def _undo(self) -> None:
        """Restore the state before the last user message."""
        self._transcript, left = self._transcript.undo(self.tokenizer, self.session.tokens)
        self.session.rewind(left)

    def _stream(
        self, asked: Transcript, prompt: list[int], max_gen_len: int, stop: str | Sequence[str], options: Options
    ) -> Generator[str, None, None]:
        session, clock = self.session, _Clock()
        self._transcript = asked
        try:
            with clock:
                fed = session.feed(prompt)
            with session.stream(max_gen_len, stop=stop, **options) as stream:
                while True:
                    with clock:
                        piece = next(stream, None)
                    made = len(session.tokens) - len(prompt)
                    if piece is not None:
                        clock.note(made)
                    reason = stream.result["finish_reason"]
                    self.last = Turn(fed, len(prompt), clock.first, made, clock.per_second, reason)
                    if piece is None:
                        return
                    yield piece
        except BaseException:
            if len(session.tokens) <= len(prompt):
                self._undo()  # without an answer the message is removed, too
            raise


class _Clock:
    """Sums the seconds under `with`, and stores the times of the first and the last tokens."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._notes: list[tuple[float, int]] = []

    @property
    def first(self) -> float:
        """Seconds to the first token, or to the end of an answer without tokens."""
        return self._notes[0][0] if self._notes else self.seconds

    @property
    def per_second(self) -> float | None:
        """Tokens per second, from the first to the last."""
        if not self._notes:
            return None
        (began, first), (ended, last) = self._notes[0], self._notes[-1]
        return (last - first) / (ended - began) if last > first else None

    def note(self, tokens: int) -> None:
        self._notes[1:] = [(self.seconds, tokens)] if self._notes else []
        self._notes = self._notes or [(self.seconds, tokens)]

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began
