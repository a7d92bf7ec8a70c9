"""KV-cache transfer between the processes of disaggregated LLM serving: the LLM-DataDist API.

Start with :class:`LLMConfig` and :class:`LLMDataDist`. Importing this package does no work: it starts nothing, reads no
environment variable, and loads neither numpy nor the transfer engine.
"""

from __future__ import annotations

import importlib

from llm_datadist import (  # noqa: F401 - part of the API: reachable as attributes after "import llm_datadist"
    configs,
    data_type,
    llm_datadist_wrapper,
    metadef_wrapper,
    status,
    utils,
    v2,
)
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
    RegisterMemStatus,
)
from llm_datadist.cache_manager import TransferTask
from llm_datadist.configs import LLMClusterInfo, LLMConfig, LlmConfig, LLMRole
from llm_datadist.data_type import DataType
from llm_datadist.datadist import LLMDataDist
from llm_datadist.engine.requests import Notification
from llm_datadist.layerwise import CacheTask, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.status import LLMException, LLMStatusCode, Status

__version__ = "0.1.0"

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheTask",
    "DataType",
    "KvCache",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMRole",
    "LLMStatusCode",
    "LayerSynchronizer",
    "LlmConfig",
    "MemInfo",
    "Memtype",
    "Notification",
    "Placement",
    "RegisterMemStatus",
    "Status",
    "TransferConfig",
    "TransferTask",
    "TransferWithCacheKeyConfig",
]

v2_list: list[str] = list(__all__)
"""The names of the public classes."""

_V1_NAMES = frozenset({"KvCacheManager", "Tensor", "TensorDesc"})


def __getattr__(name: str) -> object:
    if name in _V1_NAMES:  # classes of the original's older mode, in a package of its own
        return getattr(importlib.import_module("llm_datadist_v1"), name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
