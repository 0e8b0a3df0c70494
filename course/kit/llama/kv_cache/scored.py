"""Stands in for the kinds that drop keys, which the benchmark knows by their class."""

from llama.kv_cache.contract import KVCache


class ScoredCache(KVCache):
    """The exercise has none."""
