"""A path that goes wrong when it is told to: wraps any other one."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import threading
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from llm_datadist.layout.spans import Runs, Spans
from llm_datadist.paths import registry
from llm_datadist.paths.base import ConnectionLostError, Path, PathTimeoutError, PeerGoneError, Transport
from llm_datadist.testing.faults import Fault, FaultKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from llm_datadist.paths.base import Context, Peer
    from llm_datadist.utils.deadline import Deadline

    Move = Callable[[Spans], None]
    Change = Callable[[list[Spans], Fault], None]

_LONGEST_DELAY_S: Final = 0.01


class Faults:
    """What happens to the transfers of faulty paths: nothing, until something is injected. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: deque[Fault] = deque()
        self._chance: Callable[[int], Fault | None] = lambda _total: None
        self.happened: list[Fault] = []
        """Those that have been dealt out, in order."""

    def inject(self, fault: Fault) -> Fault:
        """Let a fault happen to one transfer: the next one of ``at`` bytes or more. The fault, to be waited for.

        Several are dealt out in the order in which they were injected.
        """
        with self._lock:
            self._next.append(fault)
        return fault

    def storm(self, seed: int, rate: float, kinds: Sequence[FaultKind] = tuple(FaultKind)) -> None:
        """From now on, let each transfer fail by chance, at a random byte.

        The same seed makes the same faults for the same transfers. A STALL lasts until the deadline of its transfer.

        Args:
            seed: of the chance.
            rate: how many of the transfers get a fault, 0 to 1.
            kinds: which ones.

        Raises:
            ValueError: the rate is out of range, or there is no kind.
        """
        if not 0 <= rate <= 1 or not kinds:
            message = f"a storm with rate={rate} and kinds={kinds}: the rate goes from 0 to 1, kinds name at least one"
            raise ValueError(message)
        source = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret

        def chance(total: int) -> Fault | None:
            hit, kind, at = source.random() < rate, source.choice(kinds), source.randrange(max(1, total))
            return Fault(kind, at, seconds=_LONGEST_DELAY_S * source.random(), seed=at) if hit else None

        with self._lock:
            self._chance = chance

    def calm(self) -> None:
        """Inject nothing more, and release what has happened. Idempotent."""
        with self._lock:
            self._next.clear()
            self._chance = lambda _total: None
            happened = list(self.happened)
        for fault in happened:
            fault.release()

    def deal(self, total: int) -> Fault | None:
        """The fault for a transfer of so many bytes; for the faulty path."""
        with self._lock:
            fault = self._chance(total) if not self._next else None
            if self._next and self._next[0].at <= total:
                fault = self._next.popleft()
            if fault is not None:
                self.happened.append(fault)
            return fault


class FaultyPath(Path):
    """Moves what another path moves, with faults. What it does not break it leaves to that path.

    CUT raises ``ConnectionLostError``, STALL and a DELAY beyond the deadline raise ``PathTimeoutError``. DROP and
    CORRUPT break the promise of a path: they report success, as a faulty memory or network card would.
    """

    def __init__(self, path: Path, faults: Faults) -> None:
        self.name: str = path.name
        self.reaches_all: bool = path.reaches_all
        self.reaches_devices: bool = path.reaches_devices
        self._path = path
        self._faults = faults
        self._changed = threading.Condition()
        self._aborted = False

    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.read``."""
        self._move(spans, deadline, lambda part: self._path.read(part, deadline, epoch), _change_here)

    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.write``."""

        def move(part: Spans) -> None:
            self._path.write(part, deadline, epoch)

        self._move(spans, deadline, move, lambda parts, fault: _change_there(parts, fault, move))

    def _move(self, spans: Spans, deadline: Deadline, move: Move, change: Change) -> None:
        fault = self._faults.deal(spans.total)
        if fault is None:
            move(spans)
            return
        before, after = cut_at(spans, fault.at)
        for part in before:
            move(part)
        fault.happen()
        if fault.kind is FaultKind.CUT:
            message = f"the faulty path was cut after {fault.at} bytes"
            raise ConnectionLostError(message)
        if fault.kind in (FaultKind.STALL, FaultKind.DELAY):
            self._hold(fault, deadline)
        if fault.kind is not FaultKind.DROP:
            for part in after:
                move(part)
        if fault.kind is FaultKind.CORRUPT:
            change(after, fault)

    def _hold(self, fault: Fault, deadline: Deadline) -> None:
        fault.when_released(self._notify)
        late = fault.kind is FaultKind.DELAY and fault.seconds < deadline.remaining()
        with self._changed:
            seconds = fault.seconds if late else deadline.remaining()
            ended = self._changed.wait_for(lambda: self._aborted or fault.released, seconds)
        if self._aborted:
            message = "the link was closed"
            raise PeerGoneError(message)
        if not ended and not late:
            message = f"the deadline passed after {fault.at} bytes: the faulty path was stalled"
            raise PathTimeoutError(message)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """See ``Path.close``."""
        self._path.close()

    def abort(self) -> None:
        """See ``Path.abort``."""
        self._aborted = True
        self._notify()
        self._path.abort()

    def describe(self) -> str:
        """See ``Path.describe``."""
        return f"{self._path.describe()}, with faults for tests"


class FaultyTransport(Transport):
    """Makes the paths of another transport, with faults."""

    def __init__(self, transport: Transport, faults: Faults) -> None:
        self.name: str = transport.name
        self._transport = transport
        self._faults = faults

    def connect(self, peer: Peer, context: Context, deadline: Deadline) -> Path:
        """See ``Transport.connect``."""
        return FaultyPath(self._transport.connect(peer, context, deadline), self._faults)


@contextlib.contextmanager
def faulty_path(name: str) -> Iterator[Faults]:
    """While this is active, links that this process makes over the path ``name`` have the faults that are injected.

    A link tries its path when it begins, so inject faults once it is up. Links made meanwhile stay as they are.

    Example::

        with llm_datadist.testing.faulty_path("tcp") as faults:
            datadist.link_clusters([info])
            faults.inject(Fault(FaultKind.CUT, at=4096))
            ...  # the next pull fails with LLM_FAILED, its destination is partly written

    Raises:
        PathRejectedError: there is no such path.
    """
    faults = Faults()
    real = registry.get(name)
    registry.transports[name] = FaultyTransport(real, faults)
    try:
        yield faults
    finally:
        registry.transports[name] = real
        faults.calm()


def cut_at(spans: Spans, count: int) -> tuple[list[Spans], list[Spans]]:
    """The first ``count`` bytes of spans, in the order in which they are moved, and the others."""
    size = spans.runs.total
    tensor, rest = divmod(count, size) if size else (0, 0)
    before, after = [spans[slice(0, tensor), slice(None)]], [spans[slice(tensor + 1, None), slice(None)]]
    if tensor < len(spans.bases):
        first, others = _cut_runs(spans.runs, rest)
        here = spans[slice(tensor, tensor + 1), slice(None)]
        before.append(Spans(here.bases, here.regions, here.starts, first, here.devices))
        after.insert(0, Spans(here.bases, here.regions, here.starts, others, here.devices))
    return [part for part in before if part.total], [part for part in after if part.total]


def _cut_runs(runs: Runs, count: int) -> tuple[Runs, Runs]:
    ends = np.cumsum(runs.lengths)
    at = int(np.searchsorted(ends, count, side="right"))
    if at == len(runs):
        return runs, runs[at:]
    done = count - int(ends[at] - runs.lengths[at])
    first, others = runs[: at + 1], runs[at:]
    lengths, left = first.lengths.copy(), others.lengths.copy()
    lengths[-1] = done
    left[0] -= done
    local, remote = others.local.copy(), others.remote.copy()
    local[0] += done
    remote[0] += done
    return Runs(first.local, first.remote, lengths), Runs(local, remote, left)


class _Piece(NamedTuple):
    """Some of the bytes that a fault changes."""

    address: int
    region: int
    offset: int
    length: int


def _pieces(parts: list[Spans], fault: Fault) -> Iterator[_Piece]:
    """The bytes that a fault changes, of those that follow it."""
    left = sum(part.total for part in parts) if fault.length is None else fault.length
    for spans in parts:
        runs = spans.runs
        rows = list(zip(runs.local.tolist(), runs.remote.tolist(), runs.lengths.tolist(), strict=True))
        tensors = zip(spans.bases.tolist(), spans.regions.tolist(), spans.starts.tolist(), strict=True)
        for (base, region, start), (local, remote, length) in itertools.product(tensors, rows):
            taken = min(left, length)
            if taken:
                yield _Piece(base + local, region, start + remote, taken)
            left -= taken


def _change_here(parts: list[Spans], fault: Fault) -> None:
    change = fault.changer()
    for piece in _pieces(parts, fault):
        changed = change(ctypes.string_at(piece.address, piece.length))
        ctypes.memmove(piece.address, changed, piece.length)


def _change_there(parts: list[Spans], fault: Fault, move: Move) -> None:
    change = fault.changer()
    for piece in _pieces(parts, fault):
        scratch = np.frombuffer(change(ctypes.string_at(piece.address, piece.length)), dtype=np.uint8)
        bases, regions = np.array([[scratch.ctypes.data], [piece.region]], dtype=np.uint64)
        starts, zero, lengths = np.array([[piece.offset], [0], [piece.length]], dtype=np.int64)
        move(Spans(bases, regions, starts, Runs(zero, zero, lengths)))
