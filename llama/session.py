"""A text that grows, and its cache, which outlive a call: fed, continued, forked and rewound.

Only what the cache does not hold is fed. Any number of sessions of one model may live, and compute, at a time. Knows
ids, positions and what a cache promises; does not know kinds of cache, or what a model is made of.
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
from llama.sessions.origin import Model
from llama.sessions.stream import SessionStream
from llama.streaming import Completion, Stream, TextCodec, encode_prompt
from llama.untrusted.words import printable

logger = logging.getLogger(__name__)


class Session(HeldText):
    """A text and its cache. Made by `model.session`.

    note: a text that goes into its file, for who knows more of the ids than the session does. Where the model's switch
    is off, everything is fed each time. A session belongs to one caller at a time; the model's weights must stay what
    they are.
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
        self.writer: object = None  # the mark of the stream that made the end of the text, and may go on
        self._dropped = False
        self._lock = threading.Lock()  # held by the one call that is under way

    # ---- the text ----------------------------------------------------------------------------------------------------

    @property
    def max_seq_len(self) -> int:
        """The most tokens that the text may have, unless its cache is bounded."""
        return self.limits.max_seq_len

    def feed(self, text: str | Sequence[int], *, prompt_ends: bool | None = None) -> int:
        """Let this be the text, of which the part is fed that the cache does not hold; return how many tokens it has.

        `text` is the whole text, or its ids, as a chat template renders it anew each turn: what it begins with, and
        the session holds already, is not fed again. `append` adds to the text. Kinds of cache that compress a prompt do
        so at the end of what is fed from position 0 on, or as `prompt_ends` says.
        """
        ids = encode_prompt(self.tokenizer, text)
        with self.computing():
            self._check(ids)
            same = common_beginning(self.tokens, ids)
            if same < len(self.tokens):
                logger.info("the text parts from the one before at token %d of %d", same, len(self.tokens))
            self._cut(same)
            return self._feed(ids, prompt_ends)

    def append(self, text: str | Sequence[int]) -> int:
        """Add to the text, and feed what was added; return how many tokens were fed."""
        with self.computing():
            if isinstance(text, str):
                text = self.tokenizer.encode(text, bos=False, eos=False, begins=not self.tokens)
            ids = [*self.tokens, *text]
            self._check(ids)
            return self._feed(ids)

    def rewind(self, position: int) -> None:
        """Forget what stands at `position` and after it."""
        with self._in_use():
            if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position <= len(self.tokens):
                raise ValueError(
                    f"position={position!r} must be a whole number from 0 to {len(self.tokens)}, where the text ends"
                )
            self._cut(position)
            self.writer = None

    def fork(self) -> "Session":
        """Return a session of the same text, which goes its own way; what is held is shared where the kind can."""
        with self._in_use():
            branch = copy(self)
            branch.tokens, branch.cache, branch.fed, branch.writer = list(self.tokens), self.cache.copy(), 0, None
        return branch

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "writer")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock(), writer=None)  # a copy is in the middle of no call

    def save(self, path: str | PathLike[str]) -> None:
        """Keep the session in a file, from which `model.load_session` goes on.

        The file has the ids and what is held of them, and says by digests of which model and tokenizer. Only its owner
        may read it; one that is there is replaced as a whole. Raises ValueError where it cannot be written.
        """
        with self._in_use():
            self._look_at_the_model()
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
        """Give the memory back; the session cannot be used any more."""
        with self._in_use():
            self._forget()
            self._dropped = True

    # ---- going on ----------------------------------------------------------------------------------------------------

    @listing_options(but=("kv_cache", "prefix"))
    def generate(
        self, max_gen_len: int = 64, *, stop: str | Sequence[str] = (), **options: Unpack[Options]
    ) -> Completion:
        """Continue the text, and keep what was made. `stop`: strings before which it ends. Returns a Completion."""
        with self.stream(max_gen_len, stop=stop, **options) as stream:
            return stream.finish()

    @listing_options(but=("kv_cache", "prefix"))
    def stream(
        self, max_gen_len: int = 64, *, stop: str | Sequence[str] = (), **options: Unpack[Options]
    ) -> SessionStream:
        """Return an iterator over the pieces of the text as they are made; its `result` is what `generate` returns.

        The model may serve others between two pieces. The text has the tokens that were made, wherever it is left.
        """
        with self._in_use():
            if not self.tokens:
                raise ValueError("the session has no text yet; feed it one first")
        for name in ("kv_cache", "prefix"):
            if options.get(name) is not None:
                raise ValueError(f"{name} is no option here: a session has a cache, and a text, of its own")
        if options.get("echo") and options.get("logprobs"):
            raise ValueError("a session keeps no logits of its text; ask model.generate for echo with logprobs")
        stops = self.tokenizer.stop_tokens
        caching, bound = self.model.kv_caching, self.bound
        request = make_request(self.limits, caching, [self.tokens], max_gen_len, stops, options, bound=bound)
        batch = Batch(request)
        stream = Stream(self._tokens(batch), batch, self.tokenizer, [list(self.tokens)], stop)
        return SessionStream(self, stream, kv_caching=request.kv_caching)

    # ---- within ------------------------------------------------------------------------------------------------------

    def held_copy(self, *, kv_caching: bool) -> Cache | None:
        """Return a cache that holds the session's text, for texts that begin with it; None with the switch off."""
        if not kv_caching:
            return None
        with self.computing(kv_caching):
            if self._held < len(self.tokens):
                self._feed(list(self.tokens), model=self.model.with_kv_caching(kv_caching))
            return self.cache.copy()

    def restore(self, content: Content) -> None:
        """Have the text, and hold what is held of it, that another session was saved with. Raises ValueError."""
        if self.bound != content.bound:
            raise ValueError(
                f"kv_cache={self.kv_cache!r} held {content.bound} positions at most where the session was saved, and "
                f"holds {self.bound} here; load the model with the max_seq_len of then"
            )
        if content.held:
            self.cache.restore(content.layers, 1, content.held, self.model.source)
        self.tokens, self._logits = content.ids, content.logits
        self._held, self._written = content.held, content.written
        self.note = content.note

    @contextmanager
    def computing(self, kv_caching: bool | None = None) -> Iterator[None]:
        """Keep the session to what stands under `with`, which may change the text, and look at the model before.

        `kv_caching`: the switch of that; None: the model's.
        """
        with self._in_use(), self.model.ranks.one_at_a_time():
            self.writer = None
            self._look_at_the_model()
            if not (self.model.kv_caching if kv_caching is None else kv_caching) and self._held:
                self._forget()  # off holds nothing
            yield

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the session to one call: every other one, of any thread, gets a RuntimeError until it has ended."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("this session is in the middle of a call; wait for it, or fork the session")
        try:
            if self._dropped:
                raise ValueError("this session was dropped, and holds nothing any more; make a new one")
            yield
        finally:
            self._lock.release()

    def _check(self, ids: list[int]) -> None:
        """Refuse a text that the session cannot have."""
        make_request(self.limits, self.model.kv_caching, [ids], [0], (), {}, bound=self.bound)


class Sessions:
    """Mix into a LanguageModel to let it keep texts."""

    def session(
        self: LanguageModel, tokenizer: TextCodec, *, max_seq_len: int | None = None, kv_cache: str | None = None
    ) -> Session:
        """Return a new session: a text, and its cache, apart from the model's other work.

        `max_seq_len` limits the text, by default as the model does; `kv_cache` names the kind, by default the model's.
        """
        return Session(self, tokenizer, max_seq_len=max_seq_len, kv_cache=kv_cache)

    def load_session(self: Model, path: str | PathLike[str], tokenizer: TextCodec | None = None) -> Session:
        """Return a session as `session.save` left it, which goes on as if it had never been on disk.

        Without a tokenizer it takes and gives ids alone. Raises ValueError for a file that is no session or was
        damaged, and for one of another model, tokenizer, dtype or mode.
        """
        content, codec = load_session(path, self, tokenizer)
        try:
            session = Session(self, codec, max_seq_len=content.max_seq_len, kv_cache=content.kv_cache)
            session.restore(content)
        except ValueError as error:
            raise ValueError(f"{path} cannot be loaded here: {printable(str(error), 400)}") from error
        return session
