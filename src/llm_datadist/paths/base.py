"""The interface of all paths.

A path moves spans of bytes between this process and one peer; it knows nothing of caches. To add one: subclass
``Transport``, whose ``connect`` returns a ``Path`` or raises ``PathRejectedError`` with a reason for people.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from llm_datadist.layout.spans import Spans, merge
from llm_datadist.memory.devices import HOST_ONLY

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from llm_datadist.layout.progress import Progress
    from llm_datadist.memory.devices import Devices
    from llm_datadist.memory.regions import RegionTable
    from llm_datadist.net.workers import Workers
    from llm_datadist.paths.nixl_agent import NixlHost
    from llm_datadist.utils.deadline import Deadline
    from llm_datadist.wire.messages import Body, Identity, Offer


class PathError(Exception):
    """A transfer over a path failed. When it is raised, no byte of the destination changes any more.

    Attributes:
        quiescent: False if that could not be established, because the peer does not answer.
        progress: what of the spans is surely in place; None if that is not known.
        moved: bytes that a data connection had carried of the message in whose middle it failed.
    """

    def __init__(self, message: str, *, quiescent: bool = True) -> None:
        super().__init__(message)
        self.quiescent = quiescent
        self.progress: Progress | None = None
        self.moved = 0


class PathRejectedError(PathError):
    """This path does not work for this pair of processes; ``hint`` says what would help, if anything."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.hint = hint


class PathDeniedError(PathError):
    """The system no longer permits this path; another one may work. ``hint`` says what would help, if anything."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.hint = hint


class OutOfReachError(PathError):
    """Some of this memory is beyond this path; nothing was moved, and another path may reach it."""


class NoDevicePathError(PathError):
    """GPU memory takes part, and no path to the peer reaches that; nothing was moved. ``hint`` says what would help."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.hint = hint


class PathTimeoutError(PathError):
    """The deadline passed."""


class PeerGoneError(PathError):
    """The peer's process has ended, or its engine has been finalized."""


class ConnectionLostError(PathError):
    """The connection that carried the bytes broke; the next transfer opens a new one."""


class PathFaultError(PathError):
    """Registered memory on one of the two sides cannot be accessed."""


class DataConnector(Protocol):
    """Opens numbered data connections to the peer."""

    def __call__(self, count: int, deadline: Deadline) -> list[tuple[int, socket.socket]]:
        """``count`` new connections.

        Raises:
            PathError: they could not be opened.
        """


class Ask(Protocol):
    """Asks the peer over the control connection."""

    def __call__(self, body: Body, deadline: Deadline) -> Body:
        """The answer.

        Raises:
            PeerGoneError: the link has ended.
            PathTimeoutError: there was no answer in time.
        """


@dataclass(frozen=True, slots=True)
class Peer:
    """The other side, as it introduced itself."""

    identity: Identity
    offer: Offer


@dataclass(frozen=True, slots=True)
class Context:
    """What this side gives to its paths."""

    identity: Identity
    regions: RegionTable
    copiers: Workers
    """Threads for parallel copies."""
    copy_threads: int
    """How many of them one transfer may use, the caller's own thread included."""
    open_data: DataConnector
    fence: Callable[[list[int], Deadline], bool]
    """Ask the peer to stop using these data connections; whether it confirmed."""
    token: bytes
    """Secret of the link, for a path that has to show whom it belongs to."""
    devices: Devices = HOST_ONLY
    """In which memory the two sides are of the transfer for which a path is wanted."""
    ask: Ask | None = None
    """Asks the peer over the control connection, where there is one."""
    linger: Callable[[], Callable[[], object]] = lambda: lambda: None
    """Count the link as in use until what it returns is called: something may still move after its call has failed."""
    nixl: NixlHost | None = None
    """This side's NIXL agent, made when it is first needed."""


FEW: Final = 256
"""Spans of a transfer that is better planned with plain ints: an array costs a microsecond before it holds anything."""


class TensorPairs(NamedTuple):
    """Local tensors and their counterparts, as they were looked up."""

    bases: Sequence[int]
    """Address of each local one."""
    regions: Sequence[int]
    """Region of the peer that holds its counterpart, from its start."""
    epoch: int
    """Of the peer's region table at that time."""
    devices: Devices = HOST_ONLY
    """In which memory they are."""


class Shortcut:
    """Moves equal pieces of the same tensors, again and again.

    Of each tensor, the piece ``here[i]`` belongs to the piece ``there[i]`` of its counterpart, counted in pieces of
    ``size`` bytes; destinations differ. Guarantees and errors are those of ``Path``.
    """

    def __init__(self, path: Path, pairs: TensorPairs) -> None:
        self._path = path
        self._pairs = pairs
        self._bases, self._regions = np.array([pairs.bases, pairs.regions], dtype=np.uint64)
        self._starts = np.zeros(len(pairs.bases), dtype=np.int64)

    def read(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline) -> None:
        """See ``Path.read``."""
        self._path.read(self._spans(size, here, there), deadline, self._pairs.epoch)

    def write(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline) -> None:
        """See ``Path.write``."""
        self._path.write(self._spans(size, here, there), deadline, self._pairs.epoch)

    def _spans(self, size: int, here: Sequence[int], there: Sequence[int]) -> Spans:
        local, remote = np.array([here, there], dtype=np.int64) * size
        runs = merge(local, remote, np.full(len(local), size, dtype=np.int64))
        return Spans(self._bases, self._regions, self._starts, runs, self._pairs.devices)


class Path(abc.ABC):
    """Moves spans to and from one peer. All methods may be called from any thread, also at the same time.

    ``epoch`` is the epoch of the peer's region table with which the spans were planned; 0 is "do not check".
    """

    name: str
    reaches_all: bool = True
    """Whether any registered memory of the peer can be moved; else ``OutOfReachError`` tells which cannot."""
    reaches_devices: bool = False
    """As ``Transport.reaches_devices``, which see."""

    @abc.abstractmethod
    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """Copy the peer's bytes into local memory; they are in place when it returns.

        Raises:
            RegionError: a span is outside registered memory, or (``StaleEpochError``, ``UnknownRegionError``) planned
            with
                knowledge that is out of date.
            PathError: anything else.
        """

    @abc.abstractmethod
    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """Copy local bytes into the peer's memory; they are in place *there* when it returns.

        Raises:
            RegionError: as for ``read``.
            PathError: as for ``read``.
        """

    def shortcut(self, pairs: TensorPairs) -> Shortcut:
        """A short way for transfers between these tensors; a path that has a shorter one overrides it.

        Raises:
            RegionError: one of the peer's is not registered (any more).
            OutOfReachError: one of the peer's is beyond this path.
        """
        return Shortcut(self, pairs)

    @abc.abstractmethod
    def close(self) -> None:
        """Give up resources; transfers must have ended. Idempotent."""

    @abc.abstractmethod
    def abort(self) -> None:
        """Make running transfers fail soon. Idempotent; ``close`` is still needed."""

    def connections(self) -> int:
        """How many data connections it keeps."""
        return 0

    @abc.abstractmethod
    def describe(self) -> str:
        """One line for ``explain``: how it works here."""


class Transport(abc.ABC):
    """Makes paths of one kind."""

    name: str
    reaches_devices: bool = False
    """Whether its paths move GPU memory, too, on either side or both.

    Else they are only given spans whose ``devices`` are ``HOST_ONLY``, and are not even tried for others. If so, spans
    tell in which memory each side is.
    """

    @abc.abstractmethod
    def connect(self, peer: Peer, context: Context, deadline: Deadline) -> Path:
        """A path to the peer, not yet probed.

        Raises:
            PathRejectedError: it cannot work here.
        """
