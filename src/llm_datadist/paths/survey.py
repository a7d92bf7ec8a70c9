"""Every path to one peer, tried and measured: what a link would say only of the paths that it needs.

Nothing but the peer's probe region is touched.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.layout.spans import Runs, Spans
from llm_datadist.memory.regions import PROBE_BYTES, RegionError, StaleEpochError
from llm_datadist.paths import registry
from llm_datadist.paths.base import PathError, PathRejectedError, TensorPairs
from llm_datadist.paths.ladder import attempt
from llm_datadist.utils.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.paths.base import Context, Path, Peer

SMALL_BYTES: Final = 4096
LARGE_BYTES: Final = 64 << 20
_MOST_READS: Final = 500
_LEAST_READS: Final = 20
_MOST_ROUNDS: Final = 8
_LATENCY_S: Final = 0.5
_BANDWIDTH_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Figures:
    """How fast a path is just now, between these two processes."""

    reads: int
    """Small reads that were timed, of ``SMALL_BYTES`` each."""
    p50_s: float
    p99_s: float
    bytes_per_s: float
    """The best of a few reads of ``LARGE_BYTES``, all from the probe region, which stays in the processor's caches."""


@dataclass(frozen=True, slots=True)
class PathFinding:
    """What became of one path."""

    name: str
    works: bool
    reason: str
    """How it works, or why it does not."""
    hint: str | None = None
    """What would make it work."""
    figures: Figures | None = None


def survey(peer: Peer, context: Context, epoch: int, timeout_s: float) -> Iterator[PathFinding]:
    """Try each known path, best first, for at most ``timeout_s`` each, and measure it if it works.

    ``epoch`` is that of the peer's region table: without it no path takes its short way.
    """
    for name in registry.names():
        yield _find(name, peer, context, epoch, Deadline.after(timeout_s))


def _find(name: str, peer: Peer, context: Context, epoch: int, deadline: Deadline) -> PathFinding:
    try:
        path = attempt(name, peer, context, deadline)
    except PathError as error:
        hint = error.hint if isinstance(error, PathRejectedError) else None
        return PathFinding(name, works=False, reason=str(error), hint=hint)
    try:
        return PathFinding(name, works=True, reason=path.describe(), figures=_figures(path, peer, epoch, deadline))
    except Exception as error:
        if name in registry.BUILT_IN and not isinstance(error, (PathError, RegionError)):
            raise  # of others' paths we cannot know what they raise
        reason = f"it was probed, but failed when it was measured: {error}"
        return PathFinding(name, works=False, reason=reason)
    finally:
        path.close()


def _figures(path: Path, peer: Peer, epoch: int, deadline: Deadline) -> Figures:
    try:
        return _measure(path, peer, epoch, deadline)
    except StaleEpochError:  # the peer has just unregistered a cache; the probe region stays
        return _measure(path, peer, 0, deadline)


def _measure(path: Path, peer: Peer, epoch: int, deadline: Deadline) -> Figures:
    room = np.empty(LARGE_BYTES, dtype=np.uint8)
    room[:] = 1  # the pages are there before the clock runs
    base, region = room.ctypes.data, peer.offer.probe_region
    small = path.shortcut(TensorPairs([base], [region], epoch))
    times: list[float] = []
    end = time.perf_counter() + _LATENCY_S
    while len(times) < _LEAST_READS or (len(times) < _MOST_READS and time.perf_counter() < end):
        begun = time.perf_counter()
        small.read(SMALL_BYTES, [0], [0], deadline)
        times.append(time.perf_counter() - begun)
    pieces = LARGE_BYTES // PROBE_BYTES
    runs = Runs(
        np.arange(pieces, dtype=np.int64) * PROBE_BYTES,
        np.zeros(pieces, dtype=np.int64),
        np.full(pieces, PROBE_BYTES, dtype=np.int64),
    )
    start = np.zeros(1, dtype=np.int64)
    spans = Spans(np.array([base], dtype=np.uint64), np.array([region], dtype=np.uint64), start, runs)
    rounds: list[float] = []
    end = time.perf_counter() + _BANDWIDTH_S
    while not rounds or (len(rounds) < _MOST_ROUNDS and time.perf_counter() < end):
        begun = time.perf_counter()
        path.read(spans, deadline)
        rounds.append(time.perf_counter() - begun)
    p50, p99 = np.percentile(times, (50, 99))
    return Figures(len(times), float(p50), float(p99), LARGE_BYTES / min(rounds))
