"""The cache manager: all groups of calls in one object."""

from __future__ import annotations

from llm_datadist.cache_manager.background import BackgroundTransfers
from llm_datadist.cache_manager.layers import LayerTransfers
from llm_datadist.cache_manager.local import LocalCopies
from llm_datadist.cache_manager.storage import Storage


class CacheManager(Storage, LocalCopies, BackgroundTransfers, LayerTransfers):
    """Registers caches and moves them between linked processes; taken from ``LLMDataDist.cache_manager``.

    Its methods may be called from several threads. After ``LLMDataDist.finalize`` they raise LLMException: LLM_FAILED
    from register, allocate and unregister, LLM_PARAM_INVALID from all others.
    """
