"""A session: a growing text and its cache, which can be fed, continued, forked, rewound and saved.

Only tokens that are not cached are fed. One model can have any number of sessions, which may compute at the same time.
Knows ids, positions and the interface of a cache; does not know kinds of cache or the architecture of a model.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from os import PathLike
from typing import Any, Unpack

from llama.args import ModelArgs
from llama.batch import Batch
from llama.generation import LanguageModel
from llama.kv_cache import Cache
from llama.request import Options, common_beginning, listing_options, make_request
from llama.sessions.file import Content, load_session, save_session
from llama.sessions.held_text import HeldText
from llama.sessions.stream import SessionStream
from llama.streaming import Completion, Stream, TextCodec, encode_prompt
from llama.untrusted.words import printable

logger = logging.getLogger(__name__)


class Session(HeldText):
    """A text and its cache. `model.session` makes one.

    note: a text of the caller's that is stored in the file. With the model's switch off, the whole text is fed at each
    call. Only one call can use a session at a time, and the model's weights must not change.
    """

    def __init__(
        self, model: Any, tokenizer: TextCodec, *, max_seq_len: int | None = None, kv_cache: str | None = None
    ) -> None:
        limit = model.args.max_seq_len
        if max_seq_len is not None and not 0 < max_seq_len <= limit:
            raise ValueError(
                f"max_seq_len={max_seq_len!r} must be from 1 to the model's {limit}; build or load it with a larger one"
            )
        self.limits: ModelArgs = model.args if max_seq_len is None else replace(model.args, max_seq_len=max_seq_len)
        super().__init__(model, model.new_cache(kv_cache, max_seq_len=max_seq_len))
        self.tokenizer = tokenizer
        self.note: str | None = None
        self.writer: object = None  # the mark of the stream that may continue the text
        self._dropped = False
        self._lock = threading.Lock()  # locked during a call

    # ---- the text ----------------------------------------------------------------------------------------------------

    @property
    def max_seq_len(self) -> int:
        """The most tokens that the text may have, unless its cache is bounded."""
        return self.limits.max_seq_len

    def feed(self, text: str | Sequence[int], *, prompt_ends: bool | None = None) -> int:
        """Replace the text, feed the part of it that is not cached, and return the number of tokens that were fed.

        `text` is the whole text or its ids, for example as a chat template renders it at each turn: the prefix that is
        cached is not fed again. `append` adds to the text. `prompt_ends`: see `Rows`; None means True if the text is
        fed from position 0.
        """
        ids = encode_prompt(self.tokenizer, text)
        with self.computing():
            self._check(ids)
            same = common_beginning(self.tokens, ids)
            if same < len(self.tokens):
                logger.info("the text differs from the one before at token %d of %d", same, len(self.tokens))
            self._cut(same)
            return self._feed(ids, prompt_ends)

    def append(self, text: str | Sequence[int]) -> int:
        """Add to the text and feed it; return the number of tokens that were fed."""
        with self.computing():
            if isinstance(text, str):
                text = self.tokenizer.encode(text, bos=False, eos=False, begins=not self.tokens)
            ids = [*self.tokens, *text]
            self._check(ids)
            return self._feed(ids)

    def rewind(self, position: int) -> None:
        """Remove the tokens from `position` on."""
        with self._in_use():
            if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position <= len(self.tokens):
                raise ValueError(
                    f"position={position!r} must be a whole number from 0 to {len(self.tokens)}, where the text ends"
                )
            self._cut(position)
            self.writer = None

    def fork(self) -> "Session":
        """Return an independent session with the same text. Some kinds of cache share memory until one is written."""
        with self._in_use():
            branch = copy(self)
            branch.tokens, branch.cache, branch.fed, branch.writer = list(self.tokens), self.cache.copy(), 0, None
        return branch

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "writer")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock(), writer=None)  # no call uses the copy

    def save(self, path: str | PathLike[str]) -> None:
        """Save the session to a file for `model.load_session`.

        The file has the ids, the cache, and digests of the model and the tokenizer. Only its owner can read it. An
        existing file is replaced as a whole. Raises ValueError if the file cannot be written.
        """
        with self._in_use():
            self._check_source()
            self.cache.check_name()
            held = self._held
            content = Content(
                kv_cache=self.kv_cache,
                max_seq_len=self.max_seq_len,
                bound=self.bound,
                ids=self.tokens,
                held=held,
                written=max(held, self._written) if held else 0,
                logits=self._logits,
                layers=self.cache.state(1, held) if held else [],
                note=self.note,
            )
            save_session(path, content, self.model, self.tokenizer)

    def drop(self) -> None:
        """Free the memory. The session cannot be used afterwards."""
        with self._in_use():
            self._forget()
            self._dropped = True

    # ---- generation --------------------------------------------------------------------------------------------------

    @listing_options(but=("kv_cache", "prefix"))
    def generate(
        self, max_gen_len: int = 64, *, stop: str | Sequence[str] = (), **options: Unpack[Options]
    ) -> Completion:
        """Continue the text, up to a `stop` string, and return the Completion."""
        with self.stream(max_gen_len, stop=stop, **options) as stream:
            return stream.finish()

    @listing_options(but=("kv_cache", "prefix"))
    def stream(
        self, max_gen_len: int = 64, *, stop: str | Sequence[str] = (), **options: Unpack[Options]
    ) -> SessionStream:
        """Return an iterator over the pieces of the continuation; its `result` is what `generate` returns.

        Other calls of the model may run between two pieces. If the iterator is closed early, the text keeps the tokens
        that were generated.
        """
        with self._in_use():
            if not self.tokens:
                raise ValueError("the session has no text yet; feed it one first")
        for name in ("kv_cache", "prefix"):
            if options.get(name) is not None:
                raise ValueError(f"{name} is no option here: a session has its own cache and its own text")
        if options.get("echo") and options.get("logprobs"):
            raise ValueError("a session does not store logits of its text; use model.generate for echo with logprobs")
        stops = self.tokenizer.stop_tokens
        caching, bound = self.model.kv_caching, self.bound
        request = make_request(self.limits, caching, [self.tokens], max_gen_len, stops, options, bound=bound)
        batch = Batch(request)
        stream = Stream(self._tokens(batch), batch, self.tokenizer, [list(self.tokens)], stop)
        return SessionStream(self, stream, kv_caching=request.kv_caching)

    # ---- for this package --------------------------------------------------------------------------------------------

    def held_copy(self, *, kv_caching: bool) -> Cache | None:
        """Return a copy of the cache, with the whole text, for texts that continue it; None with the switch off."""
        if not kv_caching:
            return None
        with self.computing(kv_caching):
            if self._held < len(self.tokens):
                self._feed(list(self.tokens), model=self.model.with_kv_caching(kv_caching))
            return self.cache.copy()

    def restore(self, content: Content) -> None:
        """Replace the text and the cache by saved ones. Raises ValueError."""
        if self.bound != content.bound:
            raise ValueError(
                f"kv_cache={self.kv_cache!r} held {content.bound} positions at most when the session was saved, and "
                f"holds {self.bound} here; load the model with the same max_seq_len"
            )
        if content.held:
            self.cache.restore(content.layers, 1, content.held, self.model.source)
        self.tokens, self._logits = content.ids, content.logits
        self._held, self._written = content.held, content.written
        self.note = content.note

    @contextmanager
    def computing(self, kv_caching: bool | None = None) -> Iterator[None]:
        """Lock the session and the model's ranks for code that feeds the text; free a cache that cannot be continued.

        `kv_caching`: the switch of that code; None for the model's.
        """
        with self._in_use(), self.model.ranks.one_at_a_time():
            self.writer = None
            self._check_source()
            if not (self.model.kv_caching if kv_caching is None else kv_caching) and self._held:
                self._forget()  # with the switch off there is no cache
            yield

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Lock the session for one call. Raises RuntimeError during another call, in any thread."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this session is in the middle of a call; wait for it, or fork the session")
        try:
            if self._dropped:
                raise ValueError("this session was dropped and cannot be used; make a new one")
            yield
        finally:
            self._lock.release()

    def _check(self, ids: list[int]) -> None:
        """Raise ValueError for a text that the limits do not allow."""
        make_request(self.limits, self.model.kv_caching, [ids], [0], (), {}, bound=self.bound)


class Sessions:
    """A mixin that adds sessions to a LanguageModel."""

    def session(
        self: LanguageModel, tokenizer: TextCodec, *, max_seq_len: int | None = None, kv_cache: str | None = None
    ) -> Session:
        """Return a new session: a text and its cache.

        `max_seq_len` limits the text, and `kv_cache` names the kind of cache; the defaults are the model's.
        """
        return Session(self, tokenizer, max_seq_len=max_seq_len, kv_cache=kv_cache)

    def load_session(self: Any, path: str | PathLike[str], tokenizer: TextCodec | None = None) -> Session:
        """Return the session that `session.save` stored. It continues as if it had never been saved.

        Without a tokenizer the session accepts and returns ids only. Raises ValueError for a file that is not a session
        or is damaged, and for a session of another model, tokenizer, dtype or mode.
        """
        content, codec = load_session(path, self, tokenizer)
        try:
            session = Session(self, codec, max_seq_len=content.max_seq_len, kv_cache=content.kv_cache)
            session.restore(content)
        except ValueError as error:
            raise ValueError(f"{path} cannot be loaded here: {printable(str(error), 400)}") from error
        return session
