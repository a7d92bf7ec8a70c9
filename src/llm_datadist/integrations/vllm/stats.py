"""What the connector counts, for vLLM's log line and its Prometheus metrics."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.metrics.utils import create_metric_per_engine

from llm_datadist.integrations.vllm.bases import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

_MIB: Final = 1 << 20
SECONDS, BYTES = "transfer_seconds", "transfer_bytes"
COUNTERS: Final = {
    "failed_loads": "Requests whose KV could not be loaded, for whatever reason.",
    "failed_pushes": "Requests of this engine whose KV could not be pushed to a decode engine.",
    "expired_leases": "Requests of this engine whose blocks were freed because nobody has read them in time.",
    "late_notices": "Notices of decode engines for requests that this engine does not keep any more.",
}
_SECONDS_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_BYTES_BUCKETS: Final = tuple(float(1 << shift) for shift in range(14, 36, 2))


@dataclasses.dataclass
class Stats(KVConnectorStats):
    """Of one interval: durations and sizes of finished transfers, and counters."""

    data: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.data = {SECONDS: [], BYTES: [], **{name: [] for name in COUNTERS}}

    def transferred(self, seconds: float, size: int) -> None:
        """One request's KV has been moved."""
        self.data[SECONDS].append(seconds)
        self.data[BYTES].append(size)

    def count(self, name: str) -> None:
        """Add one to a counter."""
        self.data[name].append(1)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add what another worker has counted."""
        for name, values in other.data.items():
            self.data.setdefault(name, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        seconds, size = self.data[SECONDS], sum(self.data[BYTES])
        found: dict[str, int | float] = {"Num successful transfers": len(seconds)}
        if seconds:
            ordered = sorted(seconds)
            found["Avg xfer time (ms)"] = round(1e3 * sum(seconds) / len(seconds), 3)
            found["P90 xfer time (ms)"] = round(1e3 * ordered[int(0.9 * (len(ordered) - 1))], 3)
            found["Avg MB per transfer"] = round(size / len(seconds) / _MIB, 3)
            found["Throughput (MB/s)"] = round(size / sum(seconds) / _MIB, 3)
        for name in COUNTERS:
            found[f"Num {name.replace('_', ' ')}"] = len(self.data[name])
        return found

    def is_empty(self) -> bool:
        """Whether nothing has happened."""
        return not any(self.data.values())


class PromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus metrics, ``vllm:llm_datadist_*``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            made = self._histogram_cls(name=name, documentation=text, buckets=list(buckets), labelnames=labelnames)
            return create_metric_per_engine(made, self.per_engine_labelvalues)

        self._histograms = {
            SECONDS: histogram(
                "vllm:llm_datadist_transfer_seconds", "Time to move one request's KV.", _SECONDS_BUCKETS
            ),
            BYTES: histogram("vllm:llm_datadist_transfer_bytes", "Bytes of one request's KV moved.", _BYTES_BUCKETS),
        }
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=f"vllm:llm_datadist_{name}", documentation=text, labelnames=labelnames),
                self.per_engine_labelvalues,
            )
            for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what workers have counted."""
        for name, histogram in self._histograms.items():
            for value in transfer_stats_data.get(name, ()):
                histogram[engine_idx].observe(value)
        for name, counter in self._counters.items():
            if values := transfer_stats_data.get(name):
                counter[engine_idx].inc(sum(values))
