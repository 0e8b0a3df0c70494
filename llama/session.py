"""A text that grows, and the cache of it, which outlive a call: fed, continued, forked and rewound.

Only what the cache does not hold is fed. Several sessions of one model may live at a time: each has caches of its own,
which the model has for as long as the session computes, and never beyond. Knows ids, positions and what a cache
promises; does not know kinds of cache, or what a model is made of.
"""

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from os import PathLike
from typing import Any, Unpack

import torch
from torch import Tensor

from llama.batch import Batch, Token
from llama.generation import LanguageModel, grow
from llama.kv_cache import KVCache, cache_kind, check_lossless
from llama.request import Options, common_beginning, listing_options, make_request
from llama.session_file import Content, load_session, save_session
from llama.session_origin import Model
from llama.streaming import Completion, Stream, TextCodec, encode_prompt
from llama.words import printable

logger = logging.getLogger(__name__)


class Session:
    """A text and its cache. Made by `model.session`.

    tokens: the ids of the text. fed: how many tokens the model was fed for it so far, again ones too. note: a text that
    goes into its file, for who knows more of the ids than the session does. Where the model's cache is off, everything
    is fed each time. A session belongs to one caller at a time, as the model does while it computes; the model's
    weights must stay what they are.
    """

    def __init__(
        self, model: Any, tokenizer: TextCodec, *, max_seq_len: int | None = None, kv_cache: str | None = None
    ) -> None:
        limit = model.args.max_seq_len
        if max_seq_len is not None and not 0 < max_seq_len <= limit:
            raise ValueError(
                f"max_seq_len={max_seq_len!r} must be from 1 to the model's {limit}; build or load it with a larger one"
            )
        kind = None if kv_cache is None else cache_kind(kv_cache)
        self.model, self.tokenizer = model, tokenizer
        self.max_seq_len = limit if max_seq_len is None else max_seq_len
        self.tokens: list[int] = []
        self.fed = 0
        self.note: str | None = None
        self._caches = [_empty(cache, kind, self.max_seq_len) for cache in model.caches]
        self._held = 0  # how many tokens the caches hold
        self._written = 0  # up to where the caches may have been written, by a call that failed or a text that was cut
        self._logits: Tensor | None = None  # those that follow the text, (1, vocab), where they are known
        self._way = self._way_now()
        self._dropped = False
        self._lock = threading.Lock()  # held by the one call that is under way

    # ---- what it is --------------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """Where the next token will stand: the length of the text."""
        return len(self.tokens)

    @property
    def logits(self) -> Tensor | None:
        """A copy of the logits behind the text, (vocab,), from which the next token is chosen.

        None where they are not known: before the first `feed`, after `rewind`, behind tokens that were generated, of
        which the newest was not fed yet, and where the model computes in another way now. `append([])` computes them.
        """
        return None if self._logits is None or self._way != self._way_now() else self._logits[0].clone()

    @property
    def nbytes(self) -> int:
        """The bytes that its caches hold; what forks share counts in each."""
        return sum(cache.nbytes for cache in self._caches)

    @property
    def kv_cache(self) -> str:
        """The kind of its cache, NAME or NAME:PARAMS."""
        return self._caches[0].args.kv_cache

    @property
    def bound(self) -> int | None:
        """How many positions its cache holds at most; None: as many as the text has."""
        return self._caches[0].bound

    @property
    def vocab_size(self) -> int:
        return int(self.model.args.vocab_size)

    @property
    def max_batch_size(self) -> int | None:
        limit: int | None = self.model.args.max_batch_size
        return limit

    # ---- the text ----------------------------------------------------------------------------------------------------

    def feed(self, text: str | Sequence[int]) -> int:
        """Let this be the text, of which the part is fed that the cache does not hold; return how many tokens it has.

        `text` is the whole text, or its ids, as a chat template renders it anew each turn: what it begins with, and
        the session holds already, is not fed again. `append` adds to the text.
        """
        ids = encode_prompt(self.tokenizer, text)
        with self._computing():
            self._check(ids)
            same = common_beginning(self.tokens, ids)
            if same < len(self.tokens):
                logger.info("the text parts from the one before at token %d of %d", same, len(self.tokens))
            self._cut(same)
            return self._feed(ids)

    def append(self, text: str | Sequence[int]) -> int:
        """Add to the text, and feed what was added; return how many tokens were fed."""
        with self._computing():
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

    def fork(self) -> "Session":
        """Return a session of the same text, which goes its own way; what is held is shared where the kind can."""
        with self._in_use(), self.model.ownership.hold():  # so that what is shared is not written meanwhile
            branch = copy(self)
            branch.tokens, branch._caches, branch.fed = list(self.tokens), [cache.copy() for cache in self._caches], 0
        return branch

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())  # a copy is in the middle of no call

    def save(self, path: str | PathLike[str]) -> None:
        """Keep the session in a file, from which `model.load_session` goes on.

        The file has the ids and what is held of them, and says by digests of which model and tokenizer. Only its owner
        may read it; one that is there is replaced as a whole. Raises ValueError where it cannot be written.
        """
        with self._in_use():
            self._look_at_the_model()
            held, kinds = self._held, sorted({(type(cache).__name__, cache.args.kv_cache) for cache in self._caches})
            if len(kinds) > 1:
                raise ValueError(
                    f"the session's layers have caches of several kinds, {', '.join(name for _, name in kinds)}, and a "
                    "file names one; save a session whose layers have one kind of cache"
                )
            kind = type(self._caches[0])
            if KVCache.named(self.kv_cache) is not kind:
                raise ValueError(
                    f"a file would name the session's cache {self.kv_cache!r}, and that is another kind than its "
                    f"{kind.__name__}; register it: class {kind.__name__}(..., kind=NAME)"
                )
            content = Content(
                kv_cache=self.kv_cache,
                max_seq_len=self.max_seq_len,
                bound=self.bound,
                ids=self.tokens,
                held=held,
                written=max(held, self._written) if held else 0,
                logits=self._logits,
                layers=[cache.state(1, held) for cache in self._caches] if held else [],
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
    ) -> "SessionStream":
        """Return an iterator over the pieces of the text as they are made; its `result` is what `generate` returns.

        The model may serve others between two pieces. The text has the tokens that were made, wherever it is left.
        """
        self._check_use()
        if not self.tokens:
            raise ValueError("the session has no text yet; feed it one first")
        for name in ("kv_cache", "prefix"):
            if options.get(name) is not None:
                raise ValueError(f"{name} is no option here: a session has a cache, and a text, of its own")
        if options.get("echo") and options.get("logprobs"):
            raise ValueError("a session keeps no logits of its text; ask model.generate for echo with logprobs")
        stops = self.tokenizer.stop_tokens
        request = make_request(
            self, self.model.kv_caching, [self.tokens], max_gen_len, stops, options, bound=self.bound
        )
        batch = Batch(request)
        return SessionStream(self, Stream(self._tokens(batch), batch, self.tokenizer, [list(self.tokens)], stop))

    # ---- within ------------------------------------------------------------------------------------------------------

    def copies(self, *, kv_caching: bool) -> list[KVCache]:
        """Return caches that hold the session's text, for other texts that begin with it; none where that is off."""
        if not kv_caching:
            return []
        with self._computing(kv_caching):
            if self._held < len(self.tokens):
                self._feed(list(self.tokens))
            return [cache.copy() for cache in self._caches]

    def restore(self, content: Content) -> None:
        """Have the text, and hold what is held of it, that another session was saved with. Raises ValueError."""
        if self.bound != content.bound:
            raise ValueError(
                f"kv_cache={self.kv_cache!r} held {content.bound} positions at most where the session was saved, and "
                f"holds {self.bound} here; load the model with the max_seq_len of then"
            )
        for cache, state in zip(self._caches, content.layers, strict=False):  # none where nothing is held
            cache.restore(state, 1, content.held)
        self.tokens, self._logits = content.ids, content.logits
        self._held, self._written = content.held, content.written
        self.note = content.note

    @property
    def _known(self) -> bool:
        """Whether the logits behind the text are known, and the caches, where they are on, hold all of it."""
        return self._logits is not None and self._held == len(self.tokens) * self.model.kv_caching

    def _tokens(self, batch: Batch) -> Generator[Token, None, None]:
        """Yield the tokens by which the text grows, and keep them."""
        batch.begin(self.model.args.vocab_size, self.model.device)
        if batch.request.echo:
            yield from (Token(0, id, None, True) for id in self.tokens)
        begin = len(self.tokens) if self._known else self._begin(len(self.tokens) - 1)
        known = self._logits if self._known else None
        with self._noting(len(self.tokens)):
            for made, logits in grow(self.model, batch, begin, known):
                self.fed, batch.fed = self.fed + batch.fed, 0
                self._held = self._written = len(self.tokens) * self.model.kv_caching
                self._logits = logits
                for token in made:
                    self.tokens.append(token.id)
                    self._logits = None
                    yield token

    def _feed(self, ids: list[int]) -> int:
        """Feed what the caches do not hold of these ids, which begin with the text."""
        if ids == self.tokens and self._known and self._held:
            return 0
        begin = self._begin(len(ids) - 1)
        fed = torch.tensor([ids[begin:]], device=self.model.device)
        with self._noting(len(ids)), torch.inference_mode(), self.model.ownership.acting():
            logits = self.model(fed, begin, logits="last")[:, -1]
        self.fed += len(ids) - begin
        self.tokens, self._logits = ids, logits
        self._held = self._written = len(ids) * self.model.kv_caching
        return len(ids) - begin

    def _begin(self, most: int) -> int:
        """Return how many tokens need no feeding, at most `most`; the caches can go on from there."""
        begin = min(self._held, most)
        self._written = max(self._written, self._held)
        if begin <= 0:
            self._forget()
            return 0
        if begin < self._written and not all(cache.rewind(begin) for cache in self._caches):
            logger.info("kv_cache=%s cannot go back to position %d: all is fed again", self.kv_cache, begin)
            self._forget()
            return 0
        self._held = begin
        return begin

    def _cut(self, position: int) -> None:
        if position < len(self.tokens):
            self._written = max(self._written, self._held)
            self.tokens, self._held, self._logits = self.tokens[:position], min(self._held, position), None

    def _forget(self) -> None:
        for cache in self._caches:
            cache.free()
        self._held, self._written, self._logits = 0, 0, None

    @contextmanager
    def _noting(self, end: int) -> Iterator[None]:
        """Note where the caches may have been written up to by what did not come to its end."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException:
            self._written, self._logits = max(self._written, end, len(self.tokens)), None
            raise

    @contextmanager
    def _computing(self, kv_caching: bool | None = None) -> Iterator[None]:
        """Give the model the session's caches, and its own ones back whatever happens; `kv_caching` may switch it."""
        model = self.model
        with self._in_use(), model.ownership.hold():
            own, caching = model.caches, model.kv_caching
            try:
                self._look_at_the_model()
                with model.ownership.acting():
                    model.caches = self._caches
                    if kv_caching not in (None, caching):
                        model.kv_caching = kv_caching
                if not model.kv_caching and self._held:
                    self._forget()  # off holds nothing
                yield
            finally:
                with model.ownership.acting():
                    if model.kv_caching is not caching:
                        model.kv_caching = caching
                    model.put_back(own)

    def _look_at_the_model(self) -> None:
        """Forget what is held where it was computed in another way than the model computes now."""
        if self._way != self._way_now():
            if self._held:
                logger.info("the model computes in another way than before: all of the session is fed again")
            self._forget()
            self._way = self._way_now()
        if self.model.exact:
            check_lossless(self._caches)

    def mark(self) -> tuple[object, ...]:
        """Return what a stream that goes on relies on."""
        return len(self.tokens), self._dropped, self.model.kv_caching, self._way_now()

    def _way_now(self) -> tuple[object, ...]:
        """Return what of the model decides what is in the caches, but for the weights' numbers."""
        exactly = self.model.exact and ("plain" if self.model.runner is None else self.model.runner.code)
        return exactly, self.model.dtype, self.model.device

    def _check_use(self) -> None:
        """Refuse a session that was dropped, or that is in the middle of a call."""
        with self._in_use():
            pass

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
        make_request(self, self.model.kv_caching, [ids], [0], (), {}, bound=self.bound)


def _empty(cache: KVCache, kind: str | None, max_seq_len: int) -> KVCache:
    """Return an empty cache for the layer of `cache`: of the named kind, or else of that cache's own."""
    args = replace(cache.args, kv_cache=kind or cache.args.kv_cache, max_seq_len=max_seq_len)
    return KVCache.of(args) if kind else type(cache)(args)


class SessionStream(Iterator[str]):
    """The pieces of a session's text while it grows. `result` holds what there is so far."""

    def __init__(self, session: Session, stream: Stream) -> None:
        self._session, self._stream = session, stream
        self._mark = session.mark()

    @property
    def result(self) -> Completion:
        return self._stream.results[0]

    def __next__(self) -> str:
        _, piece = self._with_the_model(self._stream.__next__)
        return str(piece)

    def finish(self) -> Completion:
        """Make the rest, and return all."""
        with torch.inference_mode():
            self._with_the_model(self._stream.finish)
        return self.result

    def close(self) -> None:
        """End the text here."""
        self._stream.close()

    def _with_the_model(self, act: Callable[[], Any]) -> Any:
        session = self._session
        if session.mark() != self._mark:
            raise RuntimeError(
                "the session's text, or the model, was changed since this stream made its last piece; stream anew"
            )
        with session._computing(self._stream.kv_caching):
            try:
                return act()
            finally:
                self._mark = session.mark()

    def __enter__(self) -> "SessionStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
