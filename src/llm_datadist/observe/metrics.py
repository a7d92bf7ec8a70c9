"""Counters and histograms of one engine, and what they read at a moment.

Names and units follow Prometheus: base units, ``_total`` for counters. The same snapshot serves programs
(``LLMDataDist.metrics``) and exporters.
"""

from __future__ import annotations

import bisect
import enum
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from llm_datadist.observe.recorder import SUCCESS

if TYPE_CHECKING:
    from llm_datadist.observe.events import Served, Transfer

    Labels: TypeAlias = tuple[str, ...]

PREFIX: Final = "llm_datadist_"
SECONDS_BOUNDS: Final = (
    *(10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6),
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of the buckets of all durations, in seconds; one more counts the rest."""


class Kind(enum.Enum):
    """What a family of metrics is."""

    COUNTER = "counter"
    """Only grows."""
    GAUGE = "gauge"
    """A momentary value."""
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Histogram:
    """How observations are spread."""

    counts: tuple[int, ...]
    """By bucket of ``SECONDS_BOUNDS``, not accumulated; the last one is above all bounds."""
    total: float
    """Sum of all observations."""

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a family."""

    labels: tuple[str, ...]
    """Values of the family's labels, in order."""
    value: float | Histogram


@dataclass(frozen=True, slots=True)
class Family:
    """One metric, by labels."""

    name: str
    """Without ``_total``, which exporters add to counters."""
    help: str
    kind: Kind
    labels: tuple[str, ...]
    samples: tuple[Sample, ...]

    def value(self, **labels: str) -> float | Histogram | None:
        """The value for these labels; None if nothing of that kind has happened."""
        wanted = tuple(labels[name] for name in self.labels)
        return next((sample.value for sample in self.samples if sample.labels == wanted), None)


class _Counters:
    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._values: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1) -> None:
        self._values[labels] = self._values.get(labels, 0) + amount

    def family(self) -> Family:
        samples = tuple(Sample(labels, value) for labels, value in sorted(self._values.items()))
        return Family(PREFIX + self._name, self._text, Kind.COUNTER, self._labels, samples)


class _Histograms:
    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._counts: dict[Labels, list[int]] = {}
        self._totals: dict[Labels, float] = {}

    def observe(self, labels: Labels, value: float) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(SECONDS_BOUNDS) + 1)
            self._totals[labels] = 0.0
        counts[bisect.bisect_left(SECONDS_BOUNDS, value)] += 1
        self._totals[labels] += value

    def family(self) -> Family:
        samples = tuple(
            Sample(labels, Histogram(tuple(counts), self._totals[labels]))
            for labels, counts in sorted(self._counts.items())
        )
        return Family(PREFIX + self._name, self._text, Kind.HISTOGRAM, self._labels, samples)


class Metrics:
    """Counts everything that it is told. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transfers = _Counters("transfers", "Transfers that have ended.", "operation", "path", "status")
        self._bytes = _Counters("transferred_bytes", "Bytes of successful transfers.", "operation", "path")
        self._seconds = _Histograms(
            "transfer_duration_seconds", "Time of a transfer, from the call to its end.", "operation", "path"
        )
        self._phases = _Histograms(
            "transfer_phase_duration_seconds", "Time that a transfer spent in a phase.", "operation", "phase"
        )
        self._served = _Counters("served_requests", "Requests of peers, by outcome.", "operation", "status")
        self._served_bytes = _Counters("served_bytes", "Bytes of requests of peers that succeeded.", "operation")
        self._served_seconds = _Histograms(
            "served_request_duration_seconds", "Time to answer a request of a peer.", "operation"
        )

    def transfer(self, event: Transfer) -> None:
        """See ``Observer.transfer``."""
        way = (event.operation, event.path)
        with self._lock:
            self._transfers.add((*way, event.status))
            self._seconds.observe(way, event.seconds)
            if event.status == SUCCESS:
                self._bytes.add(way, event.num_bytes)
            for step in event.steps:
                self._phases.observe((event.operation, step.phase.value), step.seconds)

    def served(self, event: Served) -> None:
        """See ``Observer.served``."""
        with self._lock:
            self._served.add((event.operation, event.status))
            self._served_seconds.observe((event.operation,), event.seconds)
            if event.status == "ok":
                self._served_bytes.add((event.operation,), event.num_bytes)

    def families(self) -> tuple[Family, ...]:
        """What has been counted, as of one moment."""
        with self._lock:
            return tuple(
                each.family()
                for each in (
                    *(self._transfers, self._bytes, self._seconds, self._phases),
                    *(self._served, self._served_bytes, self._served_seconds),
                )
            )
