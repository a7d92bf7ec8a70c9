"""``CacheManager``: registers caches and moves them. One file for each group of calls; see :mod:`.manager`."""

from __future__ import annotations

from llm_datadist.cache_manager.background import TransferTask
from llm_datadist.cache_manager.manager import CacheManager

__all__ = ["CacheManager", "TransferTask"]
