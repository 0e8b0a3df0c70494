"""Texts that have ended, kept with their caches for new ones that begin alike. Knows ids and bytes."""

from collections.abc import Sequence

from llama.kv_cache import Cache


class Kept:
    """Ended texts, the least recently used first: the ids that are cached, and a cache of that one row."""

    def __init__(self) -> None:
        self._texts: list[tuple[list[int], Cache, int]] = []

    @property
    def nbytes(self) -> int:
        """The bytes of all caches. Memory that they share with others counts in each."""
        return sum(size for _, _, size in self._texts)

    @property
    def caches(self) -> list[Cache]:
        return [cache for _, cache, _ in self._texts]

    def add(self, ids: list[int], cache: Cache, nbytes: int) -> None:
        """Keep a text, in the place of those that it continues."""
        self._texts = [one for one in self._texts if one[0] != ids[: len(one[0])]]
        self._texts.append((ids, cache, nbytes))

    def longest(self, prompt: Sequence[int]) -> tuple[Cache | None, int]:
        """Return the cache of the text that has the longest common beginning with a prompt, and the beginning's length.

        The text is the most recently used one afterwards.
        """
        found = max(self._texts, key=lambda one: common_length(one[0], prompt), default=None)
        if found is None:
            return None, 0
        self._texts.remove(found)
        self._texts.append(found)
        return found[1], common_length(found[0], prompt)

    def shrink(self, most: int) -> None:
        """Drop texts, the least recently used first, until at most so many bytes are left."""
        while self._texts and self.nbytes > most:
            del self._texts[0]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning of two lists: by halves, because lists compare in C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
