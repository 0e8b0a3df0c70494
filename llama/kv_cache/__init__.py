"""Keys and values of past tokens: the contract of a cache, and a file for each kind of it."""

from llama.kv_cache.attended import Attended
from llama.kv_cache.cache import Cache
from llama.kv_cache.concat import ConcatCache
from llama.kv_cache.contract import KVCache, NativeLayout, check_lossless
from llama.kv_cache.fp8 import Fp8Cache
from llama.kv_cache.names import cache_kind
from llama.kv_cache.paged import PagedCache
from llama.kv_cache.published import SnapKVCache
from llama.kv_cache.quantized import Int4Cache, Int8Cache, KiviCache, RotatedCache
from llama.kv_cache.quest import QuestCache
from llama.kv_cache.scored import ScoredCache
from llama.kv_cache.static import StaticCache
from llama.kv_cache.window import WindowCache

__all__ = [
    "Attended",
    "Cache",
    "ConcatCache",
    "Fp8Cache",
    "Int4Cache",
    "Int8Cache",
    "KVCache",
    "KiviCache",
    "NativeLayout",
    "PagedCache",
    "QuestCache",
    "RotatedCache",
    "ScoredCache",
    "SnapKVCache",
    "StaticCache",
    "WindowCache",
    "cache_kind",
    "check_lossless",
]
