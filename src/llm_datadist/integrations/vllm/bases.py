"""The classes of vLLM that the connector's are derived from.

At run time they are vLLM's own. Type checkers see what is used of them, so that they know all of the connector's types
also where vLLM is not installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import dataclasses
    from collections.abc import Callable
    from typing import Any

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

    class KVConnectorHandshakeMetadata:
        """What a worker tells the scheduler at the start."""

    class KVConnectorMetadata:
        """What the scheduler tells the workers in each step."""

    class SupportsHMA:
        """A connector that knows KV groups."""

    class KVConnectorBase_V1:  # noqa: N801 - as in vLLM
        """A connector."""

        _connector_metadata: KVConnectorMetadata | None
        _kv_cache_config: KVCacheConfig
        _kv_cache_manager: KVCacheManager | None

        def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None: ...

        def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
            """Keep the metadata of the step that begins."""

    @dataclasses.dataclass
    class KVConnectorStats:
        """What a connector has counted."""

        data: dict[str, Any] = dataclasses.field(default_factory=dict)

    class KVConnectorPromMetrics:
        """A connector's metrics for Prometheus."""

        _counter_cls: Callable[..., Any]
        _histogram_cls: Callable[..., Any]
        per_engine_labelvalues: dict[int, list[object]]

        def __init__(
            self,
            vllm_config: VllmConfig,
            metric_types: dict[type[PromMetric], type[PromMetricT]],
            labelnames: list[str],
            per_engine_labelvalues: dict[int, list[object]],
        ) -> None: ...

else:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorStats",
    "SupportsHMA",
]
