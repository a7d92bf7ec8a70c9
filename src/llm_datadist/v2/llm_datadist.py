"""Module path of the original for ``LLMDataDist``."""

from __future__ import annotations

from llm_datadist.datadist import LLMDataDist, _shutdown_handler
from llm_datadist.v2.config import EngineConfig

__all__ = ["EngineConfig", "LLMDataDist", "_shutdown_handler"]
