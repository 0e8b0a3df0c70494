"""The ids of a text and its cache: which tokens are cached, which must be fed, and when the cache is invalid.

Knows positions and the interface of a cache; does not know text, limits or other users of the text.
"""

import logging
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from llama.batch import Batch, Token
from llama.generation import make_stepper
from llama.kv_cache import Cache, check_lossless
from llama.rows import Rows
from llama.stepper import inferring

logger = logging.getLogger(__name__)


class HeldText:
    """A text and its cache.

    tokens: the ids. cache: their cache; empty with the model's switch off. fed: the number of tokens that the model was
    fed for the text so far; tokens that were fed twice count twice.
    """

    def __init__(self, model: Any, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.tokens: list[int] = []
        self.fed = 0
        self._held = 0  # the number of tokens that are cached
        self._written = 0  # the end of what may be written, also by a call that failed or for tokens that were cut
        self._logits: Tensor | None = None  # those after the text, (1, vocab), if they are known
        self._source = model.source  # of the cache and the logits

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

    def is_known(self, model: Any) -> bool:
        """Return True if the logits after the text are known and, with the switch on, all of the text is cached."""
        return self._logits is not None and self._held == len(self.tokens) * model.kv_caching

    @inferring
    def _tokens(self, batch: Batch) -> Generator[Token, None, None]:
        """Generate tokens, add them to the text and yield them."""
        model = self.model.with_kv_caching(batch.request.kv_caching)
        batch.begin(model.args.vocab_size, model.device)
        known = self.is_known(model)
        batch.held = 0 if known else self._begin(len(self.tokens) - 1)
        stepper = make_stepper(model, batch, self.cache if model.kv_caching else None)
        with self._noting(len(self.tokens)):
            if known:
                stepper.logits = self._logits
                yield from (Token(0, id, None, True) for id in self.tokens if batch.request.echo)
            else:
                yield from stepper.prefill()
            for chosen in stepper:
                self.fed, batch.fed = self.fed + batch.fed, 0
                self._held = self._written = len(self.tokens) * model.kv_caching
                self._logits = stepper.logits
                for token in batch.record(chosen):
                    self.tokens.append(token.id)
                    self._logits = None
                    yield token
                if not batch.active:
                    return

    def _feed(self, ids: list[int], prompt_ends: bool | None = None, *, model: Any = None) -> int:
        """Feed those of these ids that are not cached; the ids begin with the text. Return the number fed."""
        model = self.model if model is None else model
        if ids == self.tokens and self.is_known(model) and self._held:
            return 0
        begin = self._begin(len(ids) - 1)
        fed = torch.tensor([ids[begin:]], device=model.device)
        rows = Rows.at([begin], [len(ids) - begin], prompt_ends=begin == 0 if prompt_ends is None else prompt_ends)
        with self._noting(len(ids)), torch.inference_mode():
            logits = model(fed, rows, cache=self.cache if model.kv_caching else None, logits="last")[:, -1]
        self.fed += len(ids) - begin
        self.tokens, self._logits = ids, logits
        self._held = self._written = len(ids) * model.kv_caching
        return len(ids) - begin

    def _begin(self, most: int) -> int:
        """Return the position, at most `most`, from which to feed; truncate the cache, or free it, for that."""
        begin = min(self._held, most)
        self._written = max(self._written, self._held)
        if begin <= 0:
            self._forget()
            return 0
        if begin < self._written and not self.cache.truncate(begin):
            logger.info("kv_cache=%s cannot go back to position %d: all is fed again", self.cache.kind, begin)
            self._forget()
            return 0
        self._held = begin
        return begin

    def _cut(self, position: int) -> None:
        if position < len(self.tokens):
            self._written = max(self._written, self._held)
            self.tokens, self._held, self._logits = self.tokens[:position], min(self._held, position), None

    def _forget(self) -> None:
        self.cache.free()
        self._held, self._written, self._logits = 0, 0, None

    @contextmanager
    def _noting(self, end: int) -> Iterator[None]:
        """Record that the cache may be written up to `end` if the code under `with` fails."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException:
            self._written, self._logits = max(self._written, end, len(self.tokens)), None
            raise

    def _check_source(self) -> None:
        """Free the cache if the model computes in another way now. Raises ValueError for a lossy kind in exact mode."""
        if self._source != self.model.source:
            if self._held:
                logger.info("the model computes in another way than before: all of the session is fed again")
            self._forget()
            self._source = self.model.source
        if self.model.exact:
            check_lossless(self.cache.layers)
