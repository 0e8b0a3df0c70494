"""Keys and values of past tokens: the contract of a cache, and a file for each kind of it."""

from llama.kv_cache.concat import ConcatCache
from llama.kv_cache.contract import KVCache, cache_kind
from llama.kv_cache.static import StaticCache

__all__ = ["ConcatCache", "KVCache", "StaticCache", "cache_kind"]
