"""Module path of the original for ``CacheManager``."""

from __future__ import annotations

from llm_datadist.cache_manager import CacheManager

__all__ = ["CacheManager"]
