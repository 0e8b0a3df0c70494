"""Keys and values of past tokens: the contract of a cache, and the one kind that the exercise is about."""

from llama.kv_cache.attended import Attended
from llama.kv_cache.cache import Cache
from llama.kv_cache.contract import KVCache, check_lossless
from llama.kv_cache.names import cache_kind
from llama.kv_cache.paged import PagedCache
from llama.kv_cache.scored import ScoredCache
from llama.kv_cache.static import StaticCache

__all__ = [
    "Attended",
    "Cache",
    "KVCache",
    "PagedCache",
    "ScoredCache",
    "StaticCache",
    "cache_kind",
    "check_lossless",
]
