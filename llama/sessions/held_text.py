"""A text of ids, and the part of it that a cache holds: what has to be fed, what may be kept, what has to be forgotten.

Knows positions and what a cache promises; does not know text, limits, or who else may use the text.
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

    tokens: the ids. cache: what holds them; empty where the model's switch is off. fed: how many tokens the model was
    fed for the text so far, again ones too.
    """

    def __init__(self, model: Any, cache: Cache) -> None:
        self.model, self.cache = model, cache
        self.tokens: list[int] = []
        self.fed = 0
        self._held = 0  # how many tokens the cache holds
        self._written = 0  # up to where it may have been written, by a call that failed or a text that was cut
        self._logits: Tensor | None = None  # those that follow the text, (1, vocab), where they are known
        self._source = model.source  # who computed what is held, and the logits

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
        return None if self._logits is None or self._source != self.model.source else self._logits[0].clone()

    @property
    def nbytes(self) -> int:
        """The bytes that its cache holds; what forks share counts in each."""
        return self.cache.nbytes

    @property
    def kv_cache(self) -> str:
        """The kind of its cache, as `llama.kv_cache.names` reads it."""
        return self.cache.kind

    @property
    def bound(self) -> int | None:
        """How many positions its cache holds at most; None: as many as the text has."""
        return self.cache.bound

    def is_known(self, model: Any) -> bool:
        """Tell whether the logits behind the text are known, and the cache, where it is on, holds all of it."""
        return self._logits is not None and self._held == len(self.tokens) * model.kv_caching

    @inferring
    def _tokens(self, batch: Batch) -> Generator[Token, None, None]:
        """Yield the tokens by which the text grows, and keep them."""
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
                if not batch.live:
                    return

    def _feed(self, ids: list[int], prompt_ends: bool | None = None, *, model: Any = None) -> int:
        """Feed what the cache does not hold of these ids, which begin with the text."""
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
        """Return how many tokens need no feeding, at most `most`; the cache can go on from there."""
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
        """Note where the cache may have been written up to by what did not come to its end."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException:
            self._written, self._logits = max(self._written, end, len(self.tokens)), None
            raise

    def _look_at_the_model(self) -> None:
        """Forget what is held where it was computed in another way than the model computes now."""
        if self._source != self.model.source:
            if self._held:
                logger.info("the model computes in another way than before: all of the session is fed again")
            self._forget()
            self._source = self.model.source
        if self.model.exact:
            check_lossless(self.cache.layers)
