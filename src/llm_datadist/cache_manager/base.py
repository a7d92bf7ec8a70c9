"""What the groups of calls share: the engine, the mode, and checks that occur in several calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.status import LLMStatusCode, exception_for, raise_if_false, raise_if_true
from llm_datadist.utils import utils

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llm_datadist.cache.types import Cache
    from llm_datadist.engine import Engine


class ManagerBase:
    """The state of a cache manager."""

    def __init__(self, engine: Engine, options: Mapping[str, str]) -> None:
        self._engine = engine
        self._strict = options.get("llm.StrictConstraints") == "1"
        self._accessible = options.get("llm.EnableRemoteCacheAccessible") == "1"
        self._initialized = True
        self._is_call_linked = False

    def set_is_call_linked(self) -> None:
        """Remember that ``LLMDataDist.link`` was called: ``remote_accessible=True`` is refused from now on."""
        self._is_call_linked = True

    def mark_finalized(self) -> None:
        """Refuse engine calls from now on; ``LLMDataDist.finalize`` calls this."""
        self._initialized = False

    def _live(self, operation: str, status: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID) -> Engine:
        """The engine, or ``status`` as an exception once the owner was finalized."""
        if not self._initialized:
            hint = "call init again and take the new cache_manager"
            message = f"[{operation}] failed, error code is {status}, the LLMDataDist was finalized: {hint}."
            raise exception_for(status, message, operation=operation, phase="check", hint=hint)
        return self._engine


def check_blocks(name: str, cache: Cache) -> None:
    """Raise unless this is a blocks cache: AttributeError for None, else LLM_PARAM_INVALID."""
    utils.require(name, cache, "a Cache")
    raise_if_false(cache.is_blocks_cache, "{} must be a blocks cache, but is a contiguous one: {!r}", name, cache)


def check_contiguous(name: str, cache: Cache) -> None:
    """Raise if this is a blocks cache: AttributeError for None, else LLM_PARAM_INVALID."""
    utils.require(name, cache, "a Cache")
    raise_if_true(cache.is_blocks_cache, "{} must be a contiguous cache, but is a blocks cache: {!r}", name, cache)


def check_size(size: int) -> None:
    """Raise LLM_PARAM_INVALID unless a size is -1 or positive."""
    raise_if_false(size == -1 or size > 0, "size must be -1 (all) or a positive number of bytes, but is {}", size)


def check_tensors_per_layer(tensor_num_per_layer: int) -> None:
    """An unsigned 32-bit int (TypeError, ValueError) that is not 0 (LLM_PARAM_INVALID)."""
    utils.check_uint32("tensor_num_per_layer", tensor_num_per_layer)
    raise_if_false(tensor_num_per_layer > 0, "tensor_num_per_layer must be at least 1, but is {}", tensor_num_per_layer)
