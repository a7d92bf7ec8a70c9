"""KV connector for vLLM: prefill and decode engines that exchange KV through llm-datadist.

vLLM is imported with the connector, not with the package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_datadist.integrations.vllm.connector import LLMDataDistConnector

__all__ = ["LLMDataDistConnector"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(importlib.import_module("llm_datadist.integrations.vllm.connector"), name)
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)
