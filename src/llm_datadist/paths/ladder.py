"""Choose the path to a peer: try the permitted ones from the fastest to the most general, each with a live probe."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.layout.spans import Spans
from llm_datadist.memory.devices import HOST_ONLY
from llm_datadist.memory.regions import RegionError
from llm_datadist.paths import registry
from llm_datadist.paths.base import (
    NoDevicePathError,
    Path,
    PathDeniedError,
    PathError,
    PathRejectedError,
    PathTimeoutError,
    PeerGoneError,
)
from llm_datadist.paths.tcp import Tcp
from llm_datadist.utils import log
from llm_datadist.utils.turn import Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.memory.devices import Devices
    from llm_datadist.paths.base import Context, Peer
    from llm_datadist.utils.deadline import Deadline
    from llm_datadist.wire.messages import Identity


_DEVICE_HINT: Final = (
    "install NIXL on both sides (pip install 'llm-datadist[nixl]') and permit the path nixl, or transfer by way of "
    "caches in host memory (Placement.HOST)"
)


def one_sided(peer: Peer, ours: Identity, permitted: Sequence[str]) -> bool:
    """Whether the peer may reach our memory without our doing, so that it has to be asked when it has stopped."""
    same_host = bool(ours.boot_id) and peer.identity.boot_id == ours.boot_id
    common = [name for name in permitted if name in peer.offer.paths and name != Tcp.name]
    return any(same_host or name not in registry.BUILT_IN for name in common)


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of one path to one peer."""

    name: str
    chosen: bool
    reason: str
    """How it works, or why it is not used."""
    hint: str | None = None
    """What would make it usable."""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" + (f" [{self.hint}]" if self.hint else "")


_unquiet: Final[list[object]] = []
"""Memory of probes that have failed in such a way that something may still arrive in it."""


class Route:
    """The path in use to one peer, and why it is this one. Thread-safe.

    Where it does not reach all memory of the peer, there are further ones in use, found when they are first needed.
    """

    def __init__(self, order: Sequence[str], peer: Peer, context: Context) -> None:
        self._left = list(order)
        self._left_for_devices = list(order)
        """A path that is not for host memory here may yet be for that of a GPU."""
        self._peer = peer
        self._context = context
        self._climbing = Turn()
        self._lock = threading.RLock()  # for moments only: nobody who has it waits for a peer
        self._attempts: list[Attempt] = [
            Attempt(name, chosen=False, reason="not permitted by this side's configuration")
            for name in registry.names()
            if name not in order
        ]
        self._paths: tuple[Path, ...] = ()
        """Those in use; each one is for what those before it do not reach."""
        self._ended: list[Path] = []
        self._warned = False
        self._closed = False
        self.cluster_id: int = peer.identity.cluster_id

    def connect(self, deadline: Deadline, beyond: Path | None = None, devices: Devices = HOST_ONLY) -> Path:
        """The path in use, or the one for what lies ``beyond`` a path; finds one first if there is none.

        Raises:
            NoDevicePathError: GPU memory takes part, and no permitted path that reaches it works.
            PathError: no permitted path works.
        """
        return self._known(beyond, devices) or self._find(beyond, devices, deadline)

    def _find(self, beyond: Path | None, devices: Devices, deadline: Deadline) -> Path:
        ticket = object()
        try:
            if not self._climbing.take(ticket, deadline):
                message = "the deadline passed while another transfer was trying a path"
                raise PathTimeoutError(message)
            return self._known(beyond, devices) or self._climb(devices, deadline)
        finally:
            self._climbing.taken.discard(ticket)
            self._climbing.leave()

    def _known(self, beyond: Path | None, devices: Devices) -> Path | None:
        with self._lock:
            if self._closed:
                raise _ended()
            at = self._paths.index(beyond) + 1 if beyond in self._paths else 0
            fit = (path for path in self._paths[at:] if not devices.any or path.reaches_devices)
            return next(fit, None)

    def demote(self, path: Path, reason: str, hint: str | None) -> None:
        """Stop using ``path``: the system does not permit it any more. ``hint`` says what would help."""
        with self._lock:
            if path in self._paths:
                self._paths = tuple(other for other in self._paths if other is not path)
                self._ended.append(path)
                self._attempts = [each for each in self._attempts if each.name != path.name]
                ended = Attempt(path.name, chosen=False, reason=f"stopped working: {reason}", hint=hint)
                self._attempts.append(ended)
                self._warned = True
                log.warn("cluster %d is reached over another path from now on: %s", self.cluster_id, ended)

    def _warn_if_slower(self) -> None:
        """Say once for which reasons that can be helped a path is not the fastest one that both sides permit."""
        with self._lock:
            slower = [each for each in self._attempts if each.hint]
            if slower and self._paths and not self._warned:
                self._warned = True
                reasons = "; ".join(map(str, slower))
                log.warn("cluster %d is reached over %s only: %s", self.cluster_id, self._paths[-1].name, reasons)

    @property
    def path(self) -> Path | None:
        """The path in use, if one is."""
        paths = self._paths
        return paths[0] if paths else None

    def uses(self, path: Path) -> bool:
        """Whether this path is in use."""
        return path in self._paths

    def attempts(self, *, on_devices: bool = False) -> tuple[Attempt, ...]:
        """What became of every path, those in use first; ``on_devices`` says that there are caches in GPU memory."""
        found = self._all_attempts()
        return tuple(map(_told_of_devices, found)) if on_devices else found

    def _all_attempts(self) -> tuple[Attempt, ...]:
        with self._lock:
            known = {each.name for each in self._attempts}
            enough = not self._paths or self._paths[-1].reaches_all
            reason = "not needed" if enough else f"for what {self._paths[-1].name} does not reach, not needed yet"
            unneeded = [Attempt(name, chosen=False, reason=reason) for name in self._left if name not in known]
            return (*sorted(self._attempts, key=lambda each: not each.chosen), *unneeded)

    def abort(self) -> None:
        """Make running transfers fail soon."""
        for path in self._paths:
            path.abort()

    def close(self) -> None:
        """Give up all paths; transfers must have ended. Does not wait for a thread that is just finding one."""
        with self._lock:
            self._closed = True
            paths = [*self._ended, *self._paths]
            self._ended, self._paths, self._left, self._left_for_devices = [], (), [], []
        for path in paths:
            path.close()

    def _climb(self, devices: Devices, deadline: Deadline) -> Path:
        left = filter(_reaches_devices, self._left_for_devices) if devices.any else self._left
        context = replace(self._context, devices=devices) if devices.any else self._context
        for name in tuple(left):
            try:
                path = attempt(name, self._peer, context, deadline)
            except PathRejectedError as rejection:
                if deadline.expired():  # the path may not be to blame: let a later transfer try it again
                    message = f"the deadline passed while trying the path {name}: {rejection.reason}"
                    raise PathTimeoutError(message) from rejection
                self._tried(Attempt(name, chosen=False, reason=rejection.reason, hint=rejection.hint), devices)
            else:
                return self._adopt(name, path, devices)
        if devices.any:
            reasons = "; ".join(map(str, self.attempts(on_devices=True)))
            message = f"the caches are in {devices}, and no path to the peer reaches GPU memory ({reasons})"
            raise NoDevicePathError(message, _DEVICE_HINT)
        with self._lock:
            reasons = "; ".join(str(each) for each in self._attempts if not each.chosen)
            what = "this memory of the peer" if self._paths else "the peer"
        message = f"no path to {what} works ({reasons})"
        raise PathError(message)

    def _tried(self, outcome: Attempt, devices: Devices) -> None:
        with self._lock:
            self._attempts = [*(each for each in self._attempts if each.name != outcome.name), outcome]
            self._left = [name for name in self._left if name != outcome.name]
            if devices.any or outcome.chosen:
                self._left_for_devices = [name for name in self._left_for_devices if name != outcome.name]

    def _adopt(self, name: str, path: Path, devices: Devices) -> Path:
        """Use a path that has just been found."""
        reason = path.describe()
        with self._lock:
            closed = self._closed
            if not closed:
                if devices.any and self._paths:
                    reason = f"for GPU memory: {reason}"
                elif self._paths:
                    reason = f"for what {self._paths[-1].name} does not reach: {reason}"
                self._tried(Attempt(name, chosen=True, reason=reason), devices)
                self._paths += (path,)
        if closed:
            path.close()
            raise _ended()
        self._warn_if_slower()
        return path

    def connections(self) -> int:
        """How many data connections the paths in use keep."""
        return sum(path.connections() for path in self._paths)

    @property
    def copy_threads(self) -> int:
        """How many threads a transfer may use."""
        return self._context.copy_threads


def _reaches_devices(name: str) -> bool:
    try:
        return registry.get(name).reaches_devices
    except PathRejectedError:  # to try it tells why
        return True


def _told_of_devices(outcome: Attempt) -> Attempt:
    """What became of a path, and that it is no path to GPU memory, if that is so."""
    if _reaches_devices(outcome.name):
        return outcome
    return replace(outcome, reason=f"{outcome.reason}; it reaches host memory only")


def _ended() -> PeerGoneError:
    return PeerGoneError("the link was closed")


def attempt(name: str, peer: Peer, context: Context, deadline: Deadline) -> Path:
    """A path to a peer that has been probed.

    Raises:
        PathRejectedError: it does not work.
    """
    if name not in peer.offer.paths:
        message = "not permitted by the peer's configuration"
        raise PathRejectedError(message)
    path = _connected(name, peer, context, deadline)
    try:
        probe(path, peer, deadline)
    except Exception as error:
        path.close()
        if name in registry.BUILT_IN and not isinstance(error, (PathError, RegionError)):
            raise  # of others' paths we cannot know what they raise
        hint = error.hint if isinstance(error, (PathRejectedError, PathDeniedError)) else None
        message = f"the probe failed: {error}"
        raise PathRejectedError(message, hint) from error
    return path


def _connected(name: str, peer: Peer, context: Context, deadline: Deadline) -> Path:
    transport = registry.get(name)
    try:
        return transport.connect(peer, context, deadline)
    except PathRejectedError:
        raise
    except Exception as error:
        if name in registry.BUILT_IN:
            raise
        message = f"it cannot connect: {type(error).__name__}: {error}"
        raise PathRejectedError(message) from error


def probe(path: Path, peer: Peer, deadline: Deadline) -> None:
    """Really read the peer's nonce over this path and write the same bytes back.

    Raises:
        PathError: it does not work, or leads to somebody else.
        RegionError: the peer does not know its own probe region.
    """
    nonce = peer.offer.nonce
    buffer = np.zeros(len(nonce), dtype=np.uint8)
    spans = Spans.single(buffer.ctypes.data, peer.offer.probe_region, len(nonce))
    try:
        path.read(spans, deadline)
        if buffer.tobytes() != nonce:
            message = "it reads other bytes than the peer holds: this is not the process that introduced itself"
            raise PathRejectedError(message)
        path.write(spans, deadline)
    except BaseException as error:
        if not (isinstance(error, (PathError, RegionError)) and getattr(error, "quiescent", True)):
            _unquiet.append(buffer)
        raise
