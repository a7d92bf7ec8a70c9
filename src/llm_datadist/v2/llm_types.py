"""Module path of the original for the value classes."""

from __future__ import annotations

from llm_datadist.cache import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    KvCache,
    MemInfo,
    Memtype,
    Placement,
    PushType,
    RegisterMemStatus,
    int_to_mem_status_dict,
)
from llm_datadist.layerwise import (
    CacheTask,
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
    check_layer_range,
)

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheTask",
    "KvCache",
    "LayerSynchronizer",
    "MemInfo",
    "Memtype",
    "Placement",
    "PushType",
    "RegisterMemStatus",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "check_layer_range",
    "int_to_mem_status_dict",
]
