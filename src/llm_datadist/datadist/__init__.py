"""``LLMDataDist``: one process's end of the transfer layer."""

from __future__ import annotations

from llm_datadist.datadist.datadist import LLMDataDist, _shutdown_handler

__all__ = ["LLMDataDist", "_shutdown_handler"]
