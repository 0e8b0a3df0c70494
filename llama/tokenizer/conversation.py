"""A conversation: what is said turn by turn, on a session, so that each turn feeds the model only what is new.

Knows sessions and chat formats. Does not know terminals, or what a model is made of.
"""

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

LEAST = 8  # tokens that an answer must have room for; with fewer it would hardly begin


@dataclass(frozen=True)
class Turn:
    """What an answer took.

    fed: the tokens that were fed for its first token. context: how many tokens stood before it. first: seconds to the
    first token. made: its tokens. per_second: how many of them a second after the first, None where there is one only.
    finish_reason: as a Completion's, None while it goes on or where it was broken off. Times are the model's: what the
    caller does between two pieces does not count.
    """

    fed: int
    context: int
    first: float
    made: int
    per_second: float | None
    finish_reason: Literal["stop", "length"] | None


class ContextFull(ValueError):
    """A message does not fit any more. Nothing was said: the conversation is as it was before."""

    def __init__(self, tokens: int, new: int, limit: int) -> None:
        super().__init__(
            f"the conversation has {tokens} tokens, and with {new} more for this message and {LEAST} for an answer it "
            f"would pass max_seq_len={limit}; undo an exchange, or begin with a larger max_seq_len or "
            f"kv_cache={endless(limit)!r}, which has no such limit"
        )
        self.tokens, self.new, self.limit = tokens, new, limit


def endless(max_seq_len: int) -> str:
    """Return a kind of cache under which a text of a model of this length may go on for ever."""
    return f"window:{max(1, min(1024, max_seq_len // 2))}+4"


class Chat:
    """A conversation between a user and a model.

    Each turn renders the whole dialog as the chat format has it, and feeds what its session does not hold. An answer's
    ids stay as they were generated, unless the format tells it otherwise later: some templates leave out what a model
    thought before. An answer that was cut is kept as far as it came, and ended as the format ends one when the
    conversation goes on.

    `system` is the system message; None: the chat template's own, where it has one. `max_seq_len` and `kv_cache` are
    those of its session. Raises ValueError where the tokenizer has no known chat format.
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
        self.last: Turn | None = None  # what the last answer took
        self._answer: Generator[str, None, None] | None = None  # the last one, which may still go on

    @property
    def messages(self) -> Dialog:
        """What was said, the system message first where `system` gave one; an answer that goes on as far as it is."""
        return self._transcript.dialog(self.tokenizer, self.session.tokens)

    @property
    def left(self) -> int | None:
        """How many more tokens the conversation has room for; None: there is no limit."""
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
        """Return an iterator over the pieces of the answer to a user's message; it computes while it is iterated.

        `max_gen_len` is cut to what there is room for; `stop` and the options are those of `Session.stream`, and tokens
        that a stop string stands in stay in the conversation. Left early, by `close` or an exception, the answer ends
        there; where it has no token yet, the message is taken back, too. Raises ValueError for an empty message, or one
        that the chat template refuses, and ContextFull, before anything is said.
        """
        self.finish()
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"a message is some text, not {text!r:.40}; say something")
        if options.get("kv_caching") is not None:
            raise ValueError("kv_caching is no option of one answer; set model.kv_caching, for all that follow")
        if options.get("echo"):
            raise ValueError("echo is no option of an answer; chat.messages has what was said")
        asked, prompt = self._transcript.ask(self._format, self.session.tokens, text)
        if self.left is not None:
            room = self.session.max_seq_len - len(prompt)
            if room < LEAST:
                held = asked.kept[-1]
                raise ContextFull(held, len(prompt) - held, self.session.max_seq_len)
            max_gen_len = min(max_gen_len, room) if isinstance(max_gen_len, int) else max_gen_len
        caching, bound = self.model.kv_caching, self.session.bound
        make_request(
            self.session.limits, caching, [prompt], max_gen_len, (), options, bound=bound
        )  # refuses bad options
        self._answer = self._stream(asked, prompt, max_gen_len, stop, options)
        return self._answer

    def undo(self) -> Dialog:
        """Take back the last exchange, and return its messages."""
        self.finish()
        said = self.messages
        self._take_back()
        return said[len(self.messages) :]

    def finish(self) -> None:
        """End the last answer where it is, if it still goes on."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None

    def save(self, path: str | PathLike[str]) -> None:
        """Write the conversation and its cache to a file."""
        self.finish()
        if not self._transcript.kept:
            raise ValueError("nothing has been said yet, so there is nothing to save")
        self.session.note = self._transcript.to_json()
        self.session.save(path)

    @classmethod
    def load(cls, model: "Transformer", tokenizer: "Tokenizer", path: str | PathLike[str]) -> "Chat":
        """Return the conversation of a file that `save` wrote, ready to go on. Raises ValueError where it has none."""
        chat = cls(model, tokenizer)
        session = model.load_session(path, tokenizer)
        if session.note is None:
            raise ValueError(f"{fspath(path)} holds a session, but no conversation; model.load_session goes on with it")
        try:
            chat._transcript = Transcript.from_json(session.note, session.tokens)
        except ValueError as error:
            raise ValueError(f"{fspath(path)} is damaged: {error}") from None
        chat.session = session
        return chat

    # ---- within ------------------------------------------------------------------------------------------------------

    def _take_back(self) -> None:
        """Be as before the last message of the user."""
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
                self._take_back()  # no answer: the message was not said
            raise


class _Clock:
    """Adds up the seconds that are spent under `with`, and notes when tokens were there."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._notes: list[tuple[float, int]] = []

    @property
    def first(self) -> float:
        """Seconds to the first token, or to the end of an answer without one."""
        return self._notes[0][0] if self._notes else self.seconds

    @property
    def per_second(self) -> float | None:
        """Tokens a second, from the first to the last."""
        if not self._notes:
            return None
        (began, one), (ended, all) = self._notes[0], self._notes[-1]
        return (all - one) / (ended - began) if all > one else None

    def note(self, tokens: int) -> None:
        self._notes[1:] = [(self.seconds, tokens)] if self._notes else []
        self._notes = self._notes or [(self.seconds, tokens)]

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._began
