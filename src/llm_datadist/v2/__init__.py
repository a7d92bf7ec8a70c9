"""The public classes under the module paths of the original; nothing else lives here."""

from __future__ import annotations

from llm_datadist.v2 import cache_manager, config, llm_datadist, llm_types, llm_utils

__all__ = ["cache_manager", "config", "llm_datadist", "llm_types", "llm_utils"]
