"""Any peer that NIXL reaches: RDMA, and whatever else its backends can do. One-sided, like ``process_vm``.

The peer's interpreter has no part in a transfer. Its agent's keys are asked for over the control connection; what is
registered at this very moment is read from its region table before and after each transfer.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.layout.progress import Progress
from llm_datadist.memory import iovec
from llm_datadist.memory.move import mapped
from llm_datadist.memory.regions import StaleEpochError, UnknownRegionError
from llm_datadist.paths.base import (
    ConnectionLostError,
    Path,
    PathError,
    PathFaultError,
    PathRejectedError,
    PathTimeoutError,
    PeerGoneError,
    Shortcut,
    Transport,
)
from llm_datadist.paths.nixl_agent import OverlapError
from llm_datadist.paths.nixl_few import OneRequest
from llm_datadist.paths.nixl_flight import GRACE_S, Flight
from llm_datadist.paths.nixl_options import NixlUnavailableError, rdma_devices
from llm_datadist.paths.nixl_remote import KeysOutdatedError, attach, detach
from llm_datadist.wire import messages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llm_datadist.layout.spans import Spans
    from llm_datadist.memory.iovec import Part
    from llm_datadist.paths.base import Ask, Context, Peer, TensorPairs
    from llm_datadist.paths.nixl_agent import Agent
    from llm_datadist.paths.nixl_remote import Remote
    from llm_datadist.utils.deadline import Deadline

    U64 = NDArray[np.uint64]

_PART_SPANS: Final = 4096
_PART_BYTES: Final = 16 << 20
"""Of one request: what may still move when the deadline has passed."""
_CONNECT_S: Final = 5.0
_AHEAD: Final = 2
"""Requests of a transfer that are under way at a time."""


class NixlPath(Path):
    """Transfers by the NIXL agent of this engine."""

    name = "nixl"
    reaches_devices = True

    def __init__(self, agent: Agent, remote: Remote, context: Context, ask: Ask) -> None:
        self.agent = agent
        self.context = context
        self.aborted: bool = False
        self.remote = remote
        self._ask = ask
        self._closed = False

    def stopped(self) -> bool:
        """Whether transfers must not go on."""
        return self.aborted

    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.read``."""
        self._transfer(spans, deadline, epoch, writing=False)

    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.write``."""
        self._transfer(spans, deadline, epoch, writing=True)

    def shortcut(self, pairs: TensorPairs) -> Shortcut:
        """See ``Path.shortcut``."""
        return Shortcut(self, pairs) if pairs.devices.any else OneRequest(self, pairs)

    def _transfer(self, spans: Spans, deadline: Deadline, epoch: int, *, writing: bool) -> None:
        spans = spans.cut()
        while True:
            try:
                with self.begin(deadline) as flight:
                    self._move(flight, spans, epoch, deadline, writing=writing)
                return
            except KeysOutdatedError:
                self.remote.lost()
            except OverlapError as overlap:
                if not self.agent.merge(overlap, deadline):
                    message = f"{overlap}, and other transfers did not end in time"
                    raise PathTimeoutError(message) from overlap
            except NixlUnavailableError as error:
                raise PathFaultError(f"{error} [{error.hint}]" if error.hint else str(error)) from error

    def begin(self, deadline: Deadline) -> Flight:
        """Begin a transfer."""
        if deadline.expired():
            message = "the deadline passed"
            raise PathTimeoutError(message)
        if self.aborted:
            message = "the link was closed"
            raise PeerGoneError(message)
        return Flight(self, self.remote.enter(self._ask, deadline), deadline)

    def reach(self, deadline: Deadline) -> None:
        """Connect, and read the peer's table: where NIXL cannot, that may take for ever, and another path is wanted.

        Raises:
            PathError: it does not work, or takes too long.
        """
        with self.begin(deadline) as flight:
            self.remote.head(flight.look, flight.run)

    def _move(self, flight: Flight, spans: Spans, epoch: int, deadline: Deadline, *, writing: bool) -> None:
        remote, look, regions = self.remote, flight.look, spans.regions
        view, seen = remote.check(regions, epoch, look, flight.run)
        bases = view.bases(regions, spans.starts, spans.runs.extent, devices=spans.devices.there is not None)
        if not spans.total:
            return
        remote.need(regions.tolist(), self._ask, deadline)
        self._prepare(flight, spans)
        progress = Progress(len(regions), spans.runs)
        try:
            self._parts(flight, spans, bases, progress, deadline, writing=writing)
        except PathError as error:
            error.quiescent = flight.settle()
            if isinstance(error, ConnectionLostError):
                error.quiescent = not writing  # what was under way may still arrive there
            elif error.quiescent:
                with contextlib.suppress(PathError, StaleEpochError):
                    flight.more_time(GRACE_S)
                    remote.confirm(regions, seen, look, flight.run)
                    error.progress = progress
            raise
        remote.confirm(regions, seen, look, flight.run)

    def _prepare(self, flight: Flight, spans: Spans) -> None:
        """Have the local memory registered, for this transfer alone if it is in no region."""
        low = int(spans.runs.local.min())
        high = int((spans.runs.local + spans.runs.lengths).max())
        flight.bases = bases = spans.bases.tolist()
        if spans.devices.here is None:
            self.require_mapped([edge for base in bases for edge in (base + low, base + high - 1)])
        agent = self.agent
        for base in bases:
            begin, end = base + low, base + high
            if not agent.covers(base, begin, end):
                agent.registrations.register(begin, end)
                flight.at_end(functools.partial(agent.registrations.deregister, begin, end))

    def require_mapped(self, addresses: list[int]) -> None:
        """Raise PathFaultError unless there is memory: what NIXL does where there is none is a crash."""
        if not mapped(addresses):
            message = "a local tensor is not mapped (any more)"
            raise PathFaultError(message)

    def _parts(
        self, flight: Flight, spans: Spans, bases: U64, progress: Progress, deadline: Deadline, *, writing: bool
    ) -> None:
        lengths, here = spans.runs.lengths, spans.here
        there = iovec.Side(bases, spans.runs.remote)
        running: deque[tuple[int, Part]] = deque()

        def finish_first() -> None:
            handle, part = running.popleft()
            flight.wait(handle)
            progress.mark(part)

        for part in iovec.parts(len(bases), lengths, _PART_SPANS, _PART_BYTES):
            if deadline.expired():
                message = "the deadline passed"
                raise PathTimeoutError(message)
            near, far = (
                _descriptors(side.iovecs(lengths, part), device)
                for side, device in zip((here, there), spans.devices, strict=True)
            )
            handle = self.agent.requests.make(near, far, self.remote.name, writing=writing, devices=spans.devices)
            if flight.post(handle):
                progress.mark(part)
                continue
            running.append((handle, part))
            if len(running) >= _AHEAD:
                finish_first()
        while running:
            finish_first()

    def hold(self, flight: Flight) -> None:
        """Keep local memory from being unregistered until the end of a flight."""
        regions = self.context.regions
        for region in {region for base in flight.bases for region in regions.at(base)}:
            lease = contextlib.ExitStack()
            with contextlib.suppress(UnknownRegionError):  # it has gone already, against all rules
                lease.enter_context(regions.lease([region]))
            flight.at_end(lease.close)

    def close(self) -> None:
        """See ``Path.close``."""
        if not self._closed:
            self._closed = True
            detach(self.agent, self.remote)

    def abort(self) -> None:
        """See ``Path.abort``: no request follows; what is under way ends by itself."""
        self.aborted = True

    def describe(self) -> str:
        """See ``Path.describe``."""
        devices = rdma_devices()
        how = f"RDMA over {', '.join(devices)}" if devices else "this host has no RDMA device"
        return f"NIXL with its backend {self.agent.backend_name}; {how}"


def _descriptors(iovecs: U64, device: int | None) -> U64:
    descriptors = np.zeros((len(iovecs), 3), dtype=np.uint64)
    descriptors[:, :2] = iovecs
    descriptors[:, 2] = device or 0
    return descriptors


class Nixl(Transport):
    """Loads NIXL, and asks the peer for its agent."""

    name = "nixl"
    reaches_devices = True

    def connect(self, peer: Peer, context: Context, deadline: Deadline) -> Path:
        """See ``Transport.connect``."""
        if context.nixl is None or context.ask is None:
            message = "nothing can be asked of the peer here"
            raise PathRejectedError(message)
        if peer.identity.incarnation == context.identity.incarnation:
            message = "the peer is this very engine"
            raise PathRejectedError(message)
        on_devices = context.devices.any
        objection = context.nixl.options.objection(on_devices=on_devices)
        if objection is not None:
            raise PathRejectedError(objection)
        try:
            agent = context.nixl.agent()
        except NixlUnavailableError as error:
            raise PathRejectedError(str(error), error.hint) from error
        ask = messages.AskAgent(backend=agent.backend_name, regions=[], on_devices=on_devices)
        try:
            told = context.ask(ask, deadline)
        except PathError as error:
            message = f"the peer does not tell of its NIXL agent: {error}"
            raise PathRejectedError(message) from error
        if isinstance(told, messages.Refuse):
            message = f"the peer refuses: {told.reason}"
            raise PathRejectedError(message)
        if not isinstance(told, messages.Agent):
            message = f"the peer answered with {type(told).__name__} when it was asked for its NIXL agent"
            raise PathRejectedError(message)
        remote = attach(agent, told.name)
        remote.on_devices |= on_devices
        path = NixlPath(agent, remote, context, context.ask)
        try:
            path.reach(deadline.at_most(min(_CONNECT_S, deadline.remaining() / 2)))
        except (PathError, NixlUnavailableError) as error:
            path.close()
            message = f"NIXL does not reach the peer: {error}"
            raise PathRejectedError(message) from error
        return path
