"""Metrics for Prometheus: ``prometheus_client.REGISTRY.register(Collector(datadist))``. Needs the extra ``metrics``."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector as _Collector

from llm_datadist.observe.metrics import SECONDS_BOUNDS, Family, Histogram, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client.metrics_core import Metric


class Source(Protocol):
    """What is exported: an ``LLMDataDist``."""

    @property
    def cluster_id(self) -> int:
        """The value of the label ``cluster``."""

    def metrics(self) -> tuple[Family, ...]:
        """What it reads now."""


class Collector(_Collector):
    """Exports what engines of this process have counted, each with the label ``cluster``; reads them when scraped."""

    def __init__(self, *sources: Source) -> None:
        self._sources = sources

    def collect(self) -> Iterable[Metric]:
        """The families of all engines. What has been finalized meanwhile is left out."""
        exported: dict[str, Metric] = {}
        for source in self._sources:
            for family in source.metrics():
                metric = exported.get(family.name)
                if metric is None:
                    metric = exported[family.name] = _made(family)
                for sample in family.samples:
                    _add(metric, (str(source.cluster_id), *sample.labels), sample.value)
        return exported.values()


def _made(family: Family) -> Metric:
    labels = ("cluster", *family.labels)
    if family.kind is Kind.COUNTER:
        return CounterMetricFamily(family.name, family.help, labels=labels)
    if family.kind is Kind.GAUGE:
        return GaugeMetricFamily(family.name, family.help, labels=labels)
    return HistogramMetricFamily(family.name, family.help, labels=labels)


def _add(metric: Metric, labels: tuple[str, ...], value: float | Histogram) -> None:
    if isinstance(metric, HistogramMetricFamily) and isinstance(value, Histogram):
        metric.add_metric(labels, buckets=list(_buckets(value)), sum_value=value.total)
    elif isinstance(metric, (CounterMetricFamily, GaugeMetricFamily)) and not isinstance(value, Histogram):
        metric.add_metric(labels, value)


def _buckets(histogram: Histogram) -> Iterator[tuple[str, float]]:
    names = (*map(repr, SECONDS_BOUNDS), "+Inf")
    return zip(names, itertools.accumulate(histogram.counts), strict=True)
