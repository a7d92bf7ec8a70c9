"""Two snapshots of one endpoint, and what happened between them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_datadist.observe.events import SUCCESS, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llm_datadist.cli.top.scrape import Snapshot


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine."""

    cluster: str
    links: Mapping[str, int]
    """By state; no zeros."""
    paths: Mapping[str, int]
    """Links by path."""
    in_progress: int
    """Transfers of this process that run, those that wait included."""
    waiting: float
    """How many of them waited for a free data connection, on average between the snapshots."""
    holds: int
    """Caches held for pulls of peers."""
    served_per_s: float
    served_bytes_per_s: float
    data_connections: int


@dataclass(frozen=True, slots=True)
class OperationRow:
    """Transfers of one kind over one path."""

    cluster: str
    operation: str
    path: str
    per_s: float
    bytes_per_s: float
    p50_s: float
    p99_s: float
    """Estimated from the buckets of those that ended between the snapshots; NaN if none did."""
    total: int
    """Since the process began."""


@dataclass(frozen=True, slots=True)
class FailureRow:
    """Transfers, or requests of peers, that failed in one way."""

    cluster: str
    operation: str
    status: str
    per_s: float
    total: int


@dataclass(frozen=True, slots=True)
class Rows:
    """All of one endpoint."""

    engines: tuple[EngineRow, ...]
    operations: tuple[OperationRow, ...]
    failures: tuple[FailureRow, ...]


class _Between:
    """Reads counters of both snapshots. A counter that has gone back began anew: its process was restarted."""

    def __init__(self, before: Snapshot, now: Snapshot) -> None:
        self._before, self._now = before, now
        self.seconds = max(now.at - before.at, 1e-9)

    def grown(self, name: str, labels: tuple[str, ...]) -> float:
        now = self._now.of(name).get(labels, 0.0)
        before = self._before.of(name).get(labels, 0.0)
        return now - before if now >= before else now

    def per_s(self, name: str, labels: Iterable[tuple[str, ...]]) -> float:
        return sum(self.grown(name, each) for each in labels) / self.seconds


def rows(before: Snapshot, now: Snapshot) -> Rows:
    """What to show."""
    between = _Between(before, now)
    return Rows(
        tuple(_engine(cluster, between, now) for cluster in now.clusters),
        tuple(_operations(between, now)),
        tuple(_failures(between, now)),
    )


def _engine(cluster: str, between: _Between, now: Snapshot) -> EngineRow:
    def by_label(name: str) -> dict[str, int]:
        return {labels[1]: int(value) for labels, value in now.of(name).items() if labels[0] == cluster and value}

    def rate(name: str) -> float:
        return between.per_s(name, (labels for labels in now.of(name) if labels[0] == cluster))

    waits = "transfer_phase_duration_seconds_sum"  # seconds of waiting in a second are transfers that wait
    return EngineRow(
        cluster=cluster,
        links=by_label("links"),
        paths=by_label("link_paths"),
        in_progress=int(now.of("transfers_in_progress").get((cluster,), 0)),
        waiting=between.per_s(
            waits, (labels for labels in now.of(waits) if labels[::2] == (cluster, Phase.QUEUE.value))
        ),
        holds=int(now.of("cache_holds").get((cluster,), 0)),
        served_per_s=rate("served_requests_total"),
        served_bytes_per_s=rate("served_bytes_total"),
        data_connections=int(now.of("data_connections").get((cluster,), 0)),
    )


def _operations(between: _Between, now: Snapshot) -> Iterable[OperationRow]:
    ended: dict[tuple[str, str, str], list[tuple[str, ...]]] = defaultdict(list)
    for labels in now.of("transfers_total"):
        ended[labels[0], labels[1], labels[2]].append(labels)
    edges: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for labels in now.of("transfer_duration_seconds_bucket"):
        grown = between.grown("transfer_duration_seconds_bucket", labels)
        edges[labels[0], labels[1], labels[2]].append((float(labels[3]), grown))
    for kind in sorted(ended):
        buckets = sorted(edges[kind])
        yield OperationRow(
            *kind,
            per_s=between.per_s("transfers_total", ended[kind]),
            bytes_per_s=between.per_s("transferred_bytes_total", [kind]),
            p50_s=quantile(0.5, buckets),
            p99_s=quantile(0.99, buckets),
            total=int(sum(now.of("transfers_total")[labels] for labels in ended[kind])),
        )


def _failures(between: _Between, now: Snapshot) -> Iterable[FailureRow]:
    total: Counter[tuple[str, str, str]] = Counter()
    grown: Counter[tuple[str, str, str]] = Counter()
    for name, good in (("transfers_total", SUCCESS), ("served_requests_total", "ok")):
        for labels, value in now.of(name).items():
            cluster, operation, status = labels[0], labels[1], labels[-1]
            if status != good:
                served = operation if name == "transfers_total" else f"serve {operation}"
                total[cluster, served, status] += int(value)
                grown[cluster, served, status] += int(between.grown(name, labels))
    for kind in sorted(total):
        yield FailureRow(*kind, per_s=grown[kind] / between.seconds, total=total[kind])


def quantile(share: float, buckets: Sequence[tuple[float, float]]) -> float:
    """Of accumulated buckets (upper bound, count), as Prometheus estimates it: linear within a bucket; NaN if empty.

    What is in the last bucket, which has no bound, is taken for the highest bound.
    """
    count = buckets[-1][1] if buckets else 0.0
    if not count:
        return math.nan
    wanted, low, below = share * count, 0.0, 0.0
    for bound, accumulated in buckets:
        if accumulated >= wanted and accumulated > below:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - below) / (accumulated - below)
        if not math.isinf(bound):
            low, below = bound, accumulated
    return low
