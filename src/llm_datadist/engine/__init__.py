"""The engine: one per ``LLMDataDist``. Loaded when it is first used, because it needs numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_datadist.engine.engine import Engine
    from llm_datadist.engine.link import LinkReport, LinkTerms
    from llm_datadist.engine.memory_report import MemoryReport
    from llm_datadist.engine.options import EngineOptions

__all__ = ["Engine", "EngineOptions", "LinkReport", "LinkTerms", "MemoryReport"]


def __getattr__(name: str) -> object:
    from importlib import import_module  # noqa: PLC0415 - only on first use

    if name == "Engine":
        return import_module("llm_datadist.engine.engine").Engine
    if name == "EngineOptions":
        return import_module("llm_datadist.engine.options").EngineOptions
    if name in {"LinkReport", "LinkTerms"}:
        return getattr(import_module("llm_datadist.engine.link"), name)
    if name == "MemoryReport":
        return import_module("llm_datadist.engine.memory_report").MemoryReport
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
