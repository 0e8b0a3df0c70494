"""The caches of texts that come and go: what they may take, and which beginnings they share.

Knows ids, bytes and rows of caches; does not know when a text runs.
"""

import logging
from collections.abc import Collection, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from llama.batch import Row
from llama.generation import PlainStepper, state_of
from llama.kv_cache import Cache, PagedCache, ScoredCache
from llama.kv_cache.paged import BLOCK
from llama.request import Request

logger = logging.getLogger(__name__)

LEAST = 32  # tokens that are worth copying from another text's cache


class Kept(NamedTuple):
    """A text that has ended: the ids that are cached, and a cache of that one row."""

    ids: list[int]
    cache: Cache
    nbytes: int


class Sizes(NamedTuple):
    """The most rows of a batch since it began, and of its texts the most bytes, tokens of a prompt and new tokens."""

    rows: int = 0
    nbytes: int = 0
    prompt: int = 0
    new: int = 0


class TextCaches:
    """Caches of one kind for texts on one model.

    root: an empty cache, of which all others are siblings.
    lossless: whether texts may share beginnings: behind another text's cut, a lossy kind would round or drop keys in
        another way.
    most_bytes: the most bytes of all caches; None: no limit. A pool of blocks may have its own.
    """

    def __init__(self, model: Any, kind: str, most_bytes: int | None) -> None:
        """Raise ValueError for a kind that cannot join rows."""
        self._model, self._itemsize, self.most_bytes = model, model.dtype.itemsize, most_bytes
        self.root: Cache = model.new_cache(kind)
        self.root.check_joins()
        if kind == "paged" and most_bytes is not None:
            block = BLOCK * self.root.position_bytes(self._itemsize)
            self.root = model.new_cache(f"paged:{max(most_bytes // block, 1)}")
        paged = [layer for layer in self.root.layers if isinstance(layer, PagedCache)]
        self._by_row = 0 < len(paged) == len(self.root.layers)  # a row takes and returns its own memory
        if self._by_row and (blocks := paged[0].most_blocks) is not None:
            of_pool = blocks * BLOCK * self.root.position_bytes(self._itemsize)
            self.most_bytes = min(of_pool, of_pool if most_bytes is None else most_bytes)
        # Remembered: a text that waits is compared at every step, and a kind may compute its bytes layer by layer.
        bytes_of = partial(self.root.text_bytes, itemsize=self._itemsize)
        self._bytes = lru_cache(maxsize=4096)(lambda prompt, end: bytes_of(prompt=prompt, end=end))
        self.lossless = all(layer.lossless for layer in self.root.layers)
        self._most = Sizes()
        self._keeps_parts = any(isinstance(layer, ScoredCache) for layer in self.root.layers)
        self._kept: list[Kept] = []  # the least recently used first
        self._old: list[Row] = []  # those that were fed before the model changed
        self._computed_by: object = None  # the state of the model when a text began
        self.maybe_changed = True  # since then

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def nbytes(self, steppers: Sequence[PlainStepper]) -> int:
        """Return the bytes of all caches. Memory that they share counts once."""
        caches = [*(stepper.cache for stepper in steppers if stepper.cache), *(text.cache for text in self._kept)]
        held = [held for cache in caches for layer in cache.layers for held in layer.held().values()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())

    def alone(self, request: Request) -> int:
        """Return the most bytes of a text."""
        return self._bytes(len(request.prompts[0]), request.longest)

    def predicted(self, requests: Collection[Request]) -> int:
        """Return the most bytes of these texts until all have ended, whenever each began."""
        if self._by_row or not requests:
            return sum(map(self.alone, requests))
        most = self._sizes(requests)
        # Memory behind the parts of prompts that are kept is as long for each row as for the row with the most tokens.
        largest = self._bytes(most.prompt, most.prompt + most.new) if self._keeps_parts else most.nbytes
        fed = largest if most.rows > 1 else 0  # a text has its own cache until its row joins
        return most.rows * largest + fed

    def _sizes(self, requests: Collection[Request]) -> Sizes:
        """Return the sizes of the batch with these texts."""
        each = [(self.alone(one), len(one.prompts[0]), one.max_new[0]) for one in requests]
        return Sizes(max(self._most.rows, len(each)), *map(max, zip(self._most[1:], *each, strict=True)))

    @property
    def kept_bytes(self) -> int:
        """The bytes of the texts that are kept. Memory that they share with others counts in each."""
        return sum(text.nbytes for text in self._kept)

    def begin_batch(self, running: Sequence[Request]) -> None:
        """Forget the size of a batch that has ended; these texts are left, or none."""
        if self._by_row and not running and not self._kept:
            self.root.free()  # a pool of blocks has its largest size as long as a cache is in it
        self._most = Sizes()
        self._most = self._sizes(running)

    def admit(self, running: Sequence[Request], request: Request) -> bool:
        """Return True if a text fits beside those that run, until all have ended; free kept texts for it."""
        if not running:
            self.begin_batch([])
        together = [*running, request]
        if not self._leave(self.predicted(together)):
            return False
        self._most = self._sizes(together)
        return True

    def _leave(self, needed: int) -> bool:
        """Free kept texts, the least recently used first, until `needed` bytes are left; False if they never are."""
        if self.most_bytes is None:
            return True
        if needed > self.most_bytes:
            return False
        while self.kept_bytes > self.most_bytes - needed:
            del self._kept[0]
        return True

    # ---- beginnings that texts share ---------------------------------------------------------------------------------

    def beginning(self, request: Request, running: PlainStepper | None) -> tuple[Cache, int]:
        """Return a cache for a text, and how many of its tokens it has because another text begins alike."""
        (prompt,) = request.prompts
        cache, rows = self.root.sibling(request.longest), running.batch.rows if running is not None else []
        if self.lossless and self.maybe_changed:
            self._drop_old(rows)
        found = [(_common(text.ids, prompt), text.cache, 0) for text in self._kept]
        if running is not None and running.cache is not None:
            new = [(at, row) for at, row in enumerate(rows) if row not in self._old]
            found += [(_common(_cached(row), prompt), running.cache, at) for at, row in new]
        best, source, place = max(found, key=lambda one: one[0], default=(0, cache, 0))
        best = min(best, len(prompt) - 1)  # the logits after the prompt come from its last token
        if best < LEAST or not self.lossless:
            return cache, 0
        self._kept.sort(key=lambda text: text.cache is source)  # the most recently used one is the last
        cache.join(source.row_copy(place, best), 0, best)
        return cache, best

    def _drop_old(self, running: Sequence[Row]) -> None:
        """Drop the texts that are kept, and exclude those that run, if the model has changed since they began."""
        now, self.maybe_changed = (self._model.source, state_of(self._model)), False
        if now != self._computed_by:
            self._computed_by, self._kept, self._old = now, [], list(running)

    def keep(self, row: Row, stepper: PlainStepper, running: Sequence[Request]) -> None:
        """Keep a text that has ended, if there is a limit of bytes and room within it.

        It takes the place of texts that it continues. running: the texts that still run.
        """
        ids = _cached(row)
        if self.most_bytes is None or not self.lossless or row.ended == "failed" or len(ids) < LEAST:
            return
        if row in self._old:
            return
        size = self._bytes(len(ids), len(ids))
        if not self._leave(self.predicted(running) + size):
            return
        assert stepper.cache is not None
        try:
            cache = stepper.cache.row_copy(stepper.batch.rows.index(row), len(ids))
        except Exception as error:  # the text itself is complete
            logger.info("a text that has ended is not kept: %s", error)
            return
        self._kept = [text for text in self._kept if text.ids != ids[: len(text.ids)]]
        self._kept.append(Kept(ids, cache, size))


def _cached(row: Row) -> list[int]:
    """Return the ids of a row that are cached: the newest one may not be fed yet."""
    return row.ids[:-1]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning of two lists: by halves, because lists compare in C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
