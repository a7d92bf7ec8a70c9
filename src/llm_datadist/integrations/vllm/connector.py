"""``LLMDataDistConnector``: vLLM's hooks, passed on to the scheduler's or the worker's half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import vllm
from packaging.version import Version
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from llm_datadist.integrations.vllm.bases import KVConnectorBase_V1, SupportsHMA
from llm_datadist.integrations.vllm.metadata import Orders
from llm_datadist.integrations.vllm.options import Options
from llm_datadist.integrations.vllm.scheduler import Scheduler
from llm_datadist.integrations.vllm.stats import PromMetrics, Stats
from llm_datadist.integrations.vllm.worker import Worker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from llm_datadist.integrations.vllm.bases import KVConnectorHandshakeMetadata, KVConnectorMetadata

TESTED_VERSIONS = ("0.32.0", "0.33")
"""vLLM from the first one on, and before the second."""


class LLMDataDistConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV between prefill and decode engines of vLLM with llm-datadist; docs/vllm.md tells how to use it.

    Raises:
        RuntimeError: this vLLM is not one that it was tested with.
        ValueError: a wrong option, or a model or set-up whose KV it cannot move; the text names it.
    """

    _cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        _check_version(vllm.__version__)
        super().__init__(vllm_config, role, kv_cache_config)
        options = Options.parse(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(
                options,
                str(vllm_config.kv_transfer_config.engine_id),
                kv_cache_config,
                overlapping=vllm_config.max_concurrent_batches > 1,
                lockstep=vllm_config.parallel_config.data_parallel_size > 1,  # 1 where the engines are independent
            )
        else:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank  # noqa: PLC0415 - workers only

            self._worker = Worker(options, vllm_config, kv_cache_config, int(get_tensor_model_parallel_rank()))

    def shutdown(self) -> None:
        """Stop."""
        if self._worker is not None:
            self._worker.shutdown()

    # ------------------------------------------------------------ scheduler

    @property
    def _s(self) -> Scheduler:
        if self._scheduler is None:
            raise RuntimeError("this is the connector of a worker")
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Learn where the workers are."""
        self._s.set_workers(metadata)

    def on_new_request(self, request: Request) -> None:
        """A request has arrived."""
        self._s.arrived(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens are loaded, and that it happens between steps."""
        count = self._s.matched(request, num_computed_tokens)
        return count, count > 0

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:  # noqa: ARG002 - all of every request
        """All groups that can be transferred."""
        found: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return found

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """A request has its blocks."""
        self._s.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """The orders of this step."""
        return self._s.orders(scheduler_output, self._kv_cache_manager)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether blocks are kept, and the client's ``kv_transfer_params``."""
        return self._s.finished(request, block_ids)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Workers have finished with requests."""
        self._s.done(connector_output)

    # ------------------------------------------------------------ worker

    @property
    def _w(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("this is the connector of the scheduler")
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the KV cache known to peers, where it is."""
        self._w.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Where this worker is."""
        return self._w.address

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Start the step's transfers, before the forward pass: they have nothing to do with it."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, Orders):
            self._w.begin(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: ``bind_connector_metadata`` has done it."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is computed only once all of it is there."""

    def save_kv_layer(  # vLLM passes more than the name, which is enough here
        self,
        layer_name: str,
        kv_layer: torch.Tensor,  # noqa: ARG002
        attn_metadata: AttentionMetadata,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """A layer's KV of this step is final."""
        self._w.layer_done(layer_name)

    def wait_for_save(self) -> None:
        """All layers' KV of this step is final."""
        self._w.step_done()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002 - known
        """What has ended since the last step."""
        orders = self._connector_metadata
        ended = self._w.end(orders if isinstance(orders, Orders) else None)
        return KVConnectorTransferResults(
            finished_sending=ended.sent, finished_recving=ended.received, failed_recving=ended.failed
        )

    # ------------------------------------------------------------ statistics

    def get_kv_connector_stats(self) -> Stats | None:
        """What the worker has counted since the last step."""
        return None if self._worker is None else self._worker.stats()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A push needs its hook after every layer."""
        return bool(extra_config.get("mode") == "push")

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Statistics from their wire form."""
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        """Prometheus metrics of the connector."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _check_version(version: str) -> None:
    first, after = (Version(each) for each in TESTED_VERSIONS)
    if not first <= Version(version) < after:
        text = f"LLMDataDistConnector was tested with vLLM {first} to before {after}, but this is {version}"
        raise RuntimeError(text)
