"""KV caches and their names: the value classes of the public API, and their meaning to the engine.

None of the classes defines equality: two objects are equal only if they are the same object, as in the original.
"""

from __future__ import annotations

from llm_datadist.cache.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, is_invalid_id, is_valid_id
from llm_datadist.cache.types import (
    Cache,
    CacheDesc,
    KvCache,
    MemInfo,
    Memtype,
    Placement,
    PushType,
    RegisterMemStatus,
    int_to_mem_status_dict,
)

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "KvCache",
    "MemInfo",
    "Memtype",
    "Placement",
    "PushType",
    "RegisterMemStatus",
    "int_to_mem_status_dict",
    "is_invalid_id",
    "is_valid_id",
]
