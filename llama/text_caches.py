"""The caches of texts that come and go: what they may take, and which beginnings they share.

Knows ids, bytes and rows of caches; does not know when a text runs.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from llama.batch import Row
from llama.generation import PlainStepper
from llama.kv_cache import Cache
from llama.kv_cache.paged import BLOCK
from llama.request import Request

LEAST = 32  # tokens that are worth copying from another text's cache


class Kept(NamedTuple):
    """A text that has ended: the ids that are cached, and a cache of that one row."""

    ids: list[int]
    cache: Cache
    nbytes: int


class TextCaches:
    """Caches of one kind for texts on one model.

    root: an empty cache, of which all others are siblings. lossless: whether texts may share beginnings: behind another
    text's cut, a lossy kind would round or drop keys in another way.
    """

    def __init__(self, model: Any, kind: str, most_bytes: int | None) -> None:
        """Raise ValueError for a kind that cannot join rows. most_bytes: of all caches; None: no limit."""
        self._itemsize, self._most_bytes = model.dtype.itemsize, most_bytes
        self.root: Cache = model.new_cache(kind)
        self.root.check_joins()
        if kind == "paged" and most_bytes is not None:
            block = BLOCK * self.root.position_bytes(self._itemsize)
            self.root = model.new_cache(f"paged:{max(most_bytes // block, 1)}")
        self.lossless = all(layer.lossless for layer in self.root.layers)
        self._by_row = self.root.kind.startswith("paged")  # a row takes and returns its own memory
        self._most = (0, 0)  # rows, and positions of the longest, since the batch began
        self._kept: list[Kept] = []  # the least recently used first

    # ---- bytes -------------------------------------------------------------------------------------------------------

    def nbytes(self, steppers: Sequence[PlainStepper]) -> int:
        """Return the bytes of all caches. Memory that they share counts once."""
        caches = [*(stepper.cache for stepper in steppers if stepper.cache), *(text.cache for text in self._kept)]
        held = [held for cache in caches for layer in cache.layers for held in layer.held().values()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())

    def predicted(self, requests: Collection[Request]) -> int:
        """Return the most bytes of these texts until all have ended, whenever each began."""
        alone = [self._bytes_alone(len(request.prompts[0]), request.longest) for request in requests]
        if self._by_row or len(alone) < 2:
            return sum(alone)
        most = max(self._most[0], len(alone)), max(self._most[1], *(request.longest for request in requests))
        together = self.root.predicted_bytes(
            prompts=[len(request.prompts[0]) for request in requests],
            ends=[request.longest for request in requests],
            reserved=most,
            itemsize=self._itemsize,
        )
        return max(together, sum(alone)) + max(alone)  # one has its own cache until its row joins

    def _bytes_alone(self, prompt: int, end: int) -> int:
        return self.root.text_bytes(prompt=prompt, end=end, itemsize=self._itemsize)

    @property
    def kept_bytes(self) -> int:
        """The bytes of the texts that are kept. Memory that they share with others counts in each."""
        return sum(text.nbytes for text in self._kept)

    def admit(self, running: Sequence[Request], request: Request) -> bool:
        """Return True if a text fits beside those that run, until all have ended; free kept texts for it."""
        together = [*running, request]
        if self._most_bytes is not None and not self._leave(self.predicted(together)):
            return False
        rows, longest = self._most if running else (0, 0)
        self._most = max(rows, len(together)), max(longest, request.longest)
        return True

    def _leave(self, needed: int) -> bool:
        """Free kept texts, the least recently used first, until `needed` bytes are left; False if they never are."""
        assert self._most_bytes is not None
        if needed > self._most_bytes:
            return False
        while self.kept_bytes > self._most_bytes - needed:
            del self._kept[0]
        return True

    # ---- beginnings that texts share ---------------------------------------------------------------------------------

    def beginning(self, request: Request, running: PlainStepper | None) -> tuple[Cache, int]:
        """Return a cache for a text, and how many of its tokens it has because another text begins alike."""
        (prompt,) = request.prompts
        cache = self.root.sibling(request.longest)
        found = [(_common(text.ids, prompt), text.cache, 0) for text in self._kept]
        if running is not None and running.cache is not None:
            found += [(_common(_cached(row), prompt), running.cache, at) for at, row in enumerate(running.batch.rows)]
        best, source, place = max(found, key=lambda one: one[0], default=(0, cache, 0))
        best = min(best, len(prompt) - 1)  # the logits after the prompt come from its last token
        if best < LEAST or not self.lossless:
            return cache, 0
        self._kept.sort(key=lambda text: text.cache is source)  # the most recently used one is the last
        cache.join(source.row_copy(place, best), 0, best)
        return cache, best

    def keep(self, row: Row, stepper: PlainStepper, running: Sequence[Request]) -> None:
        """Keep a text that has ended, if there is a limit of bytes and room within it.

        It takes the place of texts that it continues. running: the texts that still run.
        """
        ids = _cached(row)
        size = self._bytes_alone(len(ids), len(ids))
        if self._most_bytes is None or not self.lossless or row.ended == "failed" or len(ids) < LEAST:
            return
        if self._leave(self.predicted(running) + size):
            assert stepper.cache is not None
            cache = stepper.cache.row_copy(stepper.batch.rows.index(row), len(ids))
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
