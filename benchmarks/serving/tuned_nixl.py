"""vLLM's NixlConnector without what makes it slow on a machine with few cores: a fair peer for the benchmark.

As shipped, its progress thread polls without a pause, which takes a core of every idle engine, and on CPUs it pins all
engines of a host to the same core. Both are set in code only, so this sets them from outside; nothing else is changed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.platforms import current_platform

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

_POLL_US: Final = 1000
"""Its thread waits for an event in between, so nothing is later for it."""


class TunedNixlConnector(NixlConnector):
    """Set before the agent is made."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        type(current_platform).discover_numa_topology = classmethod(lambda _: [])
        api = importlib.import_module("nixl._api")
        if not isinstance(api.nixlBind, _Bindings):
            api.nixlBind = _Bindings(api.nixlBind)
        super().__init__(vllm_config, role, kv_cache_config)


class _Bindings:
    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def nixlAgent(self, name: str, config: Any) -> Any:  # noqa: N802 - its name
        config.pthrDelay = _POLL_US
        return self._real.nixlAgent(name, config)
