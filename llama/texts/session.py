"""A session: a growing text and its cache, which can be fed, continued, forked, rewound and saved.

Only tokens that are not cached are fed. One model can have any number of sessions, which may compute at the same time.
Knows ids, positions and the interface of a cache; does not know kinds of cache or the architecture of a model.
"""

import logging
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from llama.args import ModelArgs
from llama.batch import Batch, Token
from llama.generation import make_stepper
from llama.kv_cache import Cache, check_lossless
from llama.locked import locked
from llama.request import Options, check_speculation, common_beginning, listing_options, make_request
from llama.rows import Rows
from llama.schemas import schema_of
from llama.speculation import MOST
from llama.stepper import inferring
from llama.streaming import Completion, Stream, TextCodec, encode_prompt
from llama.untrusted.words import printable

if TYPE_CHECKING:
    from llama.texts.session_file import Content

logger = logging.getLogger(__name__)


class Session:
    """A text and its cache. `model.session` makes one.

    Only one call can use a session at a time, and the model's weights must not change.
    tokens: the ids of the text.
    cache: the cache of the text; empty with the model's switch off, when the whole text is fed at each call.
    fed: the number of tokens that the model was fed for the text so far; tokens that were fed twice count twice.
    note: a text of the caller that is stored in the file.
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
        self.model, self.tokenizer = model, tokenizer
        self.cache: Cache = model.new_cache(kv_cache, max_seq_len=max_seq_len)
        self.tokens: list[int] = []
        self.fed = 0
        self.note: str | None = None
        self._cached_len = 0  # the number of tokens that are cached
        self._written = 0  # positions below this may hold keys, also those of failed calls and of removed tokens
        self._logits: Tensor | None = None  # those after the text, (1, vocab), if they are known
        self._source = model.source  # of the cache and the logits
        self.writer: object = None  # the mark of the stream that may continue the text
        self._dropped = self._said = False  # _said: whether the log says that this kind cannot go back
        self._lock = threading.Lock()  # locked during a call

    # ---- the text ----------------------------------------------------------------------------------------------------

    @property
    def max_seq_len(self) -> int:
        """The most tokens that the text may have, unless its cache is bounded."""
        return self.limits.max_seq_len

    @property
    def position(self) -> int:
        """The position of the next token: the length of the text."""
        return len(self.tokens)

    @property
    def logits(self) -> Tensor | None:
        """A copy of the logits after the text, (vocab,), from which the next token is chosen.

        None if they are not known: before the first `feed`, after `rewind`, after generated tokens (the newest is not
        fed yet), and after a change of how the model computes. `append([])` computes them.
        """
        return None if self._logits is None or self._source != self.model.source else self._logits[0].clone()

    @property
    def nbytes(self) -> int:
        """The bytes of the cache. Memory that forks share counts in each fork."""
        return self.cache.nbytes

    @property
    def kv_cache(self) -> str:
        """The name of the cache's kind."""
        return self.cache.kind

    @property
    def bound(self) -> int | None:
        """The most positions that the cache stores; None without a limit."""
        return self.cache.bound

    def feed(self, text: str | Sequence[int], *, prompt_ends: bool | None = None) -> int:
        """Replace the text, feed the part of it that is not cached, and return the number of tokens that were fed.

        `text` is the whole text or its ids, for example as a chat template renders it at each turn: the prefix that is
        cached is not fed again. `append` adds to the text. `prompt_ends`: see `Rows`; None means True if the text is
        fed from position 0.
        """
        ids = encode_prompt(self.tokenizer, text)
        with self.in_use(), self.model.ranks.one_at_a_time():
            self.begin_computing()
            self._check(ids)
            same = common_beginning(self.tokens, ids)
            if same < len(self.tokens):
                logger.info("the text differs from the one before at token %d of %d", same, len(self.tokens))
            self._cut(same)
            return self._feed(ids, prompt_ends)

    def append(self, text: str | Sequence[int]) -> int:
        """Add to the text and feed it; return the number of tokens that were fed."""
        with self.in_use(), self.model.ranks.one_at_a_time():
            self.begin_computing()
            if isinstance(text, str):
                text = self.tokenizer.encode(text, bos=False, eos=False, begins=not self.tokens)
            ids = [*self.tokens, *text]
            self._check(ids)
            return self._feed(ids)

    def rewind(self, position: int) -> None:
        """Remove the tokens from `position` on."""
        with self.in_use():
            if isinstance(position, bool) or not isinstance(position, int) or not 0 <= position <= len(self.tokens):
                raise ValueError(
                    f"position={position!r} must be a whole number from 0 to {len(self.tokens)}, where the text ends"
                )
            self._cut(position)
            self.writer = None

    def fork(self) -> "Session":
        """Return an independent session with the same text. Some kinds of cache share memory until one is written."""
        with self.in_use():
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
        from llama.texts.session_file import Content, save_session  # deferred: most sessions are never saved

        with self.in_use():
            self._check_cache()
            self.cache.check_name()
            content = Content(
                kv_cache=self.kv_cache,
                max_seq_len=self.max_seq_len,
                bound=self.bound,
                ids=self.tokens,
                held=self._cached_len,
                written=self._written if self._cached_len else 0,
                logits=self._logits,
                layers=self.cache.state(1, self._cached_len) if self._cached_len else [],
                note=self.note,
            )
            save_session(path, content, self.model, self.tokenizer)

    def drop(self) -> None:
        """Free the memory. The session cannot be used afterwards."""
        with self.in_use():
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
    ) -> "SessionStream":
        """Return an iterator over the pieces of the continuation; its `result` is what `generate` returns.

        Other calls of the model may run between two pieces. If the iterator is closed early, the text keeps the tokens
        that were generated.
        """
        with self.in_use():
            if not self.tokens:
                raise ValueError("the session has no text yet; feed it one first")
        for name in ("kv_cache", "prefix"):
            if options.get(name) is not None:
                raise ValueError(f"{name} is no option here: a session has its own cache and its own text")
        if options.get("echo") and options.get("logprobs"):
            raise ValueError("a session does not store logits of its text; use model.generate for echo with logprobs")
        options["schema"] = schema_of(options.get("schema"), self.tokenizer, self.limits.vocab_size)
        stops = self.tokenizer.stop_tokens
        caching, bound = self.model.kv_caching, self.bound
        request = make_request(self.limits, caching, [self.tokens], max_gen_len, stops, options, bound=bound)
        check_speculation(request.speculate, self.cache, self.model.ranks.size)
        batch = Batch(request, self.limits.vocab_size)
        stream = Stream(self._tokens(batch), batch, self.tokenizer, [list(self.tokens)], stop)
        return SessionStream(self, stream, kv_caching=request.kv_caching)

    # ---- for this package --------------------------------------------------------------------------------------------

    def cache_copy(self, *, kv_caching: bool) -> Cache | None:
        """Return a copy of the cache, with the whole text, for texts that continue it; None with the switch off."""
        if not kv_caching:
            return None
        if self.writer is not None:  # a stream may go on with this text: feed its newest token to a fork
            return self.fork().cache_copy(kv_caching=True)
        with self.in_use(), self.model.ranks.one_at_a_time():
            self.begin_computing(kv_caching=True)
            valid = self._cached_len >= self._written or self.cache.truncate(self._cached_len)
            if self._cached_len < len(self.tokens) or not valid:
                self._feed(list(self.tokens), kv_caching=True)
            return self.cache.copy()

    def restore(self, content: "Content") -> None:
        """Replace the text and the cache by saved ones. Raises ValueError."""
        if self.bound != content.bound:
            raise ValueError(
                f"kv_cache={self.kv_cache!r} stored {content.bound} positions at most when the session was saved, and "
                f"stores {self.bound} here; load the model with the same max_seq_len"
            )
        if content.held:
            self.cache.restore(content.layers, 1, content.held, self.model.source)
        self.tokens, self._logits = content.ids, content.logits
        self._cached_len, self._written = content.held, content.written
        self.note = content.note

    def in_use(self) -> AbstractContextManager[None]:
        """Return a lock for one call. Raises RuntimeError during another call, in any thread."""
        if self._dropped:
            raise ValueError("this session was dropped and cannot be used; make a new one")
        return locked(self._lock, "this session is in the middle of a call; wait for it, or fork the session")

    def begin_computing(self, kv_caching: bool | None = None) -> None:
        """Prepare for code that feeds the text: free a cache that cannot be continued.

        The caller has locked the session and the model's ranks. `kv_caching`: the switch of that code; None for the
        model's.
        """
        self.writer = None
        self._check_cache()
        if not (self.model.kv_caching if kv_caching is None else kv_caching) and self._cached_len:
            self._forget()  # with the switch off there is no cache

    def _check(self, ids: list[int]) -> None:
        """Raise ValueError for a text that the limits do not allow."""
        make_request(self.limits, self.model.kv_caching, [ids], [0], (), {}, bound=self.bound)

    # ---- which tokens are cached, and which are fed ------------------------------------------------------------------

    def _is_known(self, model: Any) -> bool:
        """Return True if the logits after the text are known and, with the switch on, all of the text is cached."""
        return self._logits is not None and self._cached_len == len(self.tokens) * model.kv_caching

    @inferring
    def _tokens(self, batch: Batch) -> Generator[Token, None, None]:
        """Generate tokens, add them to the text and yield them."""
        model = self.model.with_kv_caching(batch.request.kv_caching)
        known, guessed = self._is_known(model), 0 if batch.request.speculate is None else MOST
        batch.prefix_len = 0 if known else self._begin(len(self.tokens))
        batch.prompt_ends = batch.prefix_len == 0
        stepper = make_stepper(model, batch, self.cache if model.kv_caching else None)
        if known:
            stepper.logits = self._logits
            yield from (Token(0, id, None, True) for id in self.tokens if batch.request.echo)
        else:
            yield from stepper.prefill()
        for chosen in stepper:
            self.fed, batch.fed = self.fed + batch.fed, 0
            self._cached_len = len(self.tokens) * model.kv_caching
            self._written = self._cached_len + guessed  # a wrong guess stays behind the text until it is overwritten
            self._logits = stepper.logits
            for token in batch.record(chosen):
                self._logits = None
                self.tokens.append(token.id)
                yield token
            if not batch.goes_on:
                return
            self._written = (len(self.tokens) + guessed) * model.kv_caching  # the next step feeds the newest token

    def _feed(self, ids: list[int], prompt_ends: bool | None = None, *, kv_caching: bool | None = None) -> int:
        """Feed those of these ids that are not cached; the ids begin with the text. Return the number fed."""
        model = self.model if kv_caching is None else self.model.with_kv_caching(kv_caching)
        if ids == self.tokens and self._is_known(model) and self._cached_len:
            return 0
        begin = self._begin(len(ids))
        fed = torch.tensor([ids[begin:]], device=model.device)
        rows = Rows.at([begin], [len(ids) - begin], prompt_ends=begin == 0 if prompt_ends is None else prompt_ends)
        with torch.inference_mode():
            logits = model(fed, rows, cache=self.cache if model.kv_caching else None, logits="last")[:, -1]
        self.fed += len(ids) - begin
        self.tokens = ids
        self._cached_len = self._written = len(ids) * model.kv_caching
        self._logits = logits
        return len(ids) - begin

    def _begin(self, end: int) -> int:
        """Return the position from which to feed the text up to `end`; truncate the cache, or free it, for that.

        Record the end of the positions that the call may write before it writes them, because it may not end.
        """
        wanted = begin = max(min(self._cached_len, end - 1), 0)
        if begin < self._written:
            begin = self.cache.last_start(begin)
        if begin < wanted:
            again = f"the text is fed again from {begin}" if begin else "all is fed again"
            level = logging.DEBUG if self._said else logging.INFO  # once a session
            logger.log(level, "kv_cache=%s cannot go back to position %d: %s", self.cache.kind, wanted, again)
            self._said = True
        if not begin:
            self._forget()
        self._logits, self._cached_len, self._written = None, begin, max(self._written, end)
        return begin

    def _cut(self, position: int) -> None:
        if position < len(self.tokens):
            self._logits, self._cached_len, self.tokens = None, min(self._cached_len, position), self.tokens[:position]

    def _forget(self) -> None:
        self._logits = None
        self._cached_len = self._written = 0
        self.cache.free()

    def _check_cache(self) -> None:
        """Free the cache if a call did not end and it cannot go on, or if the model computes in another way now.

        Raises ValueError for a lossy kind in exact mode.
        """
        if self.cache.failed_at is not None and not self.cache.truncate(self._cached_len):
            logger.info("a call did not end, and kv_cache=%s cannot go on: all is fed again", self.cache.kind)
            self._forget()
        if self._source != self.model.source:
            if self._cached_len:
                logger.info("the model computes in another way than before: all of the session is fed again")
            self._forget()
            self._source = self.model.source
        if self.model.exact:
            check_lossless(self.cache.layers)


class SessionStream(Iterator[str]):
    """An iterator over the pieces of a Session's text. `result` is the Completion so far."""

    def __init__(self, session: Session, stream: Stream, *, kv_caching: bool) -> None:
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


def load_session(model: Any, path: str | PathLike[str], tokenizer: TextCodec | None) -> Session:
    """Return the session that `session.save` stored; see `Generation.load_session`."""
    from llama.texts import session_file  # deferred: most sessions are never saved

    content, codec = session_file.load_session(path, model, tokenizer)
    try:
        session = Session(model, codec, max_seq_len=content.max_seq_len, kv_cache=content.kv_cache)
        session.restore(content)
    except ValueError as error:
        again = "if an earlier version saved it, feed its ids again"
        raise ValueError(f"{path} cannot be loaded here: {printable(str(error), 400)}; {again}") from error
    return session
