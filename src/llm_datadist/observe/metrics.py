"""Counters and histograms of one engine, and what they read at a moment.

Names and units follow Prometheus: base units, ``_total`` for counters. The same snapshot serves programs
(``LLMDataDist.metrics``) and exporters.
"""

from __future__ import annotations

import bisect
import enum
import threading
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from llm_datadist.observe.events import SUCCESS, Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from llm_datadist.observe.events import Served, Transfer

    Labels: TypeAlias = tuple[str, ...]

PREFIX: Final = "llm_datadist_"
SECONDS_BOUNDS: Final = (
    *(10e-6, 25e-6, 50e-6, 100e-6, 250e-6, 500e-6),
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of the buckets of all durations, in seconds; one more counts the rest."""
_BOUNDS_NS: Final = tuple(round(bound * 1e9) for bound in SECONDS_BOUNDS)


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

    def plus(self, other: Histogram) -> Histogram:
        """Both together."""
        counts = tuple(map(int.__add__, self.counts, other.counts))
        return Histogram(counts, self.total + other.total)


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


class _Spread:
    """A histogram that is being filled."""

    __slots__ = ("counts", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS_NS) + 1)
        self.total_ns = 0

    def add(self, nanoseconds: int) -> None:
        self.counts[bisect.bisect_left(_BOUNDS_NS, nanoseconds)] += 1
        self.total_ns += nanoseconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    def read(self) -> Histogram:
        return Histogram(tuple(self.counts), self.total_ns / 1e9)


class _Way:
    """All transfers with one operation, path and status."""

    __slots__ = ("copied", "num_bytes", "phases", "took")

    def __init__(self) -> None:
        self.num_bytes = 0
        self.took = _Spread()
        self.phases: dict[Phase, _Spread] = {}
        self.copied = _Spread()
        """Of those that were one copy and nothing else; it is their whole time and their phase, in neither of these."""

    @property
    def count(self) -> int:
        return self.took.count + self.copied.count


class Metrics:
    """Counts everything that it is told. Thread-safe. What is added is arranged for the reader only when it reads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may transfer while one is being counted
        self._ways: dict[tuple[str, str, str], _Way] = {}
        self._served: dict[tuple[str, str], _Way] = {}
        self._fallbacks: Counter[tuple[str, str]] = Counter()

    def transfer(self, event: Transfer) -> None:
        """See ``Observer.transfer``."""
        key = (event.operation, event.path, event.status)
        with self._lock:
            way = self._ways.get(key) or self._ways.setdefault(key, _Way())
            way.num_bytes += event.num_bytes
            way.took.add(event.end_ns - event.start_ns)
            for step in event.steps:
                spread = way.phases.get(step.phase) or way.phases.setdefault(step.phase, _Spread())
                spread.add(step.end_ns - step.start_ns)
            for left in event.fallbacks:
                self._fallbacks[left.path, left.reason.value] += 1

    def copied(self, operation: str, path: str, status: str, num_bytes: int, took_ns: int) -> None:
        """The same as ``transfer`` for one that was a copy from its begin to its end, at a fraction of the cost."""
        key = (operation, path, status)
        with self._lock:
            way = self._ways.get(key) or self._ways.setdefault(key, _Way())
            way.num_bytes += num_bytes
            way.copied.add(took_ns)

    def served(self, event: Served) -> None:
        """See ``Observer.served``."""
        key = (event.operation, event.status)
        with self._lock:
            way = self._served.get(key) or self._served.setdefault(key, _Way())
            way.num_bytes += event.num_bytes
            way.took.add(event.end_ns - event.start_ns)

    def families(self) -> tuple[Family, ...]:
        """What has been counted, as of one moment."""
        with self._lock:
            return (*self._of_transfers(), *self._of_served())

    def _of_transfers(self) -> Iterator[Family]:
        ways = sorted(self._ways.items())
        moved = [(key[:2], float(way.num_bytes)) for key, way in ways if key[2] == SUCCESS]
        took = [(key[:2], spread.read()) for key, way in ways for spread in (way.took, way.copied)]
        phases = [
            ((key[0], phase.value), spread.read()) for key, way in ways for phase, spread in list(way.phases.items())
        ]
        phases += [((key[0], Phase.COPY.value), way.copied.read()) for key, way in ways if way.copied.count]
        yield _counter(
            "transfers",
            "Transfers that have ended.",
            ("operation", "path", "status"),
            [(key, float(way.count)) for key, way in ways],
        )
        yield _counter("transferred_bytes", "Bytes of successful transfers.", ("operation", "path"), moved)
        yield _histogram(
            "transfer_duration_seconds",
            "Time of a transfer, from the call to its end.",
            ("operation", "path"),
            took,
        )
        yield _histogram(
            "transfer_phase_duration_seconds",
            "Time that a transfer spent in a phase.",
            ("operation", "phase"),
            phases,
        )
        yield _counter(
            "fallbacks",
            "Times that a transfer left a path for another one.",
            ("path", "reason"),
            [(key, float(count)) for key, count in sorted(self._fallbacks.items())],
        )

    def _of_served(self) -> Iterator[Family]:
        ways = sorted(self._served.items())
        yield _counter(
            "served_requests",
            "Requests of peers, by outcome.",
            ("operation", "status"),
            [(key, float(way.count)) for key, way in ways],
        )
        yield _counter(
            "served_bytes",
            "Bytes of requests of peers that succeeded.",
            ("operation",),
            [(key[:1], float(way.num_bytes)) for key, way in ways if key[1] == "ok"],
        )
        yield _histogram(
            "served_request_duration_seconds",
            "Time to answer a request of a peer.",
            ("operation",),
            [(key[:1], way.took.read()) for key, way in ways],
        )


def _counter(name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, float]]) -> Family:
    samples = tuple(Sample(key, value) for key, value in values)
    return Family(PREFIX + name, text, Kind.COUNTER, labels, samples)


def _histogram(name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, Histogram]]) -> Family:
    added: dict[Labels, Histogram] = {}
    for key, each in values:  # those with other statuses, or paths, go together
        known = added.get(key)
        added[key] = each if known is None else known.plus(each)
    samples = tuple(Sample(key, value) for key, value in sorted(added.items()))
    return Family(PREFIX + name, text, Kind.HISTOGRAM, labels, samples)
