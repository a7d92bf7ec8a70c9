"""Any peer that NIXL reaches: RDMA, and whatever else its backends can do. One-sided, like ``process_vm``.

The peer's interpreter has no part in a transfer. Its agent's keys are asked for over the control connection; what is
registered at this very moment is read from its region table before and after each transfer.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.layout.progress import Progress
from llm_datadist.memory import iovec
from llm_datadist.memory.move import mapped
from llm_datadist.memory.regions import StaleEpochError
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
from llm_datadist.paths.nixl_options import NixlUnavailableError, rdma_devices
from llm_datadist.paths.nixl_remote import KeysOutdatedError, attach, detach
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from llm_datadist.layout.spans import Spans
    from llm_datadist.memory.iovec import Part
    from llm_datadist.paths.base import Ask, Context, Peer, TensorPairs
    from llm_datadist.paths.nixl_agent import Agent
    from llm_datadist.paths.nixl_remote import Look, Remote

    U64 = NDArray[np.uint64]

_PART_SPANS: Final = 4096
_PART_BYTES: Final = 16 << 20
"""Of one request: what may still move when the deadline has passed."""
_AHEAD: Final = 2
"""Requests of a transfer that are under way at a time."""
_SHORT_BYTES: Final = 4 << 20
"""Below this, one request is enough."""
_GRACE_S: Final = 0.15


class Flight:
    """One transfer, and all that it holds until NIXL has ended each of its requests."""

    def __init__(self, path: NixlPath, remote: Remote, look: Look, deadline: Deadline) -> None:
        self._path = path
        self._requests = path.agent.requests
        self._remote = remote
        self.look = look
        self._deadline = deadline
        self._live: dict[int, bool] = {}
        """Requests that may run, and whether they are used again."""
        self._lock = threading.Lock()
        self._open = 1
        self._left = False
        self.undo = contextlib.ExitStack()
        self.bases: Sequence[int] = ()
        """Of local tensors that are read or written."""

    def __enter__(self) -> Flight:  # noqa: PYI034 - there is no Self in Python 3.10
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None and not self.settle() and isinstance(error, PathError):
                error.quiescent = False
        finally:
            self.end()

    def post(self, handle: int, *, reuse: bool = False) -> bool:
        """Begin a request; whether it has ended already.

        Raises:
            ConnectionLostError: the peer's agent cannot be reached (any more).
        """
        self._live[handle] = reuse
        try:
            done = self._requests.post(handle)
        except ConnectionLostError:
            self._lost(handle)
            raise
        if done:
            self._over(handle)
        return done

    def wait(self, handle: int) -> None:
        """Wait for the end of a request that was posted."""
        try:
            self._requests.wait(handle, self._deadline, self._path.stopped)
        except ConnectionLostError:
            self._lost(handle)
            raise
        self._over(handle)

    def run(self, handle: int, *, reuse: bool = False) -> None:
        """Both; see ``Run``."""
        if not self.post(handle, reuse=reuse):
            self.wait(handle)

    def _lost(self, handle: int) -> None:
        self._remote.lost()
        self._over(handle)

    def _over(self, handle: int) -> None:
        if not self._live.pop(handle):
            self._requests.free(handle)

    def settle(self) -> bool:
        """After a failure: wait a moment for requests that still run, then leave them; whether all have ended."""
        grace = Deadline.after(_GRACE_S)
        for handle in list(self._live):
            if self._requests.ends_by(handle, grace):
                self._over(handle)
            else:
                self._leave(handle)
        return not self._left

    def more_time(self, seconds: float) -> None:
        """After a failure: look at the peer once more."""
        self._deadline = Deadline.after(seconds)

    def _leave(self, handle: int) -> None:
        """Nobody waits for this request any more: what it touches is held until it has ended."""
        with self._lock:
            self._open += 1
            first, self._left = not self._left, True
        if first:
            self._remote.abandon()
            self.undo.callback(self._path.context.linger())
            self._path.hold(self.bases, self.undo)
        reuse = self._live.pop(handle)

        def ended() -> None:
            if not reuse:
                self._requests.free(handle)
            self.end()

        self._requests.leave(handle, ended)

    def end(self) -> None:
        """The call, or one of the requests that were left, has ended."""
        with self._lock:
            self._open -= 1
            if self._open:
                return
        self.undo.close()
        self._path.agent.leave()
        self._remote.leave(self.look, was_left=self._left)


class NixlPath(Path):
    """Transfers by the NIXL agent of this engine."""

    name = "nixl"

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
        return _OneRequest(self, pairs)

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
                raise PathFaultError(str(error)) from error

    def begin(self, deadline: Deadline) -> Flight:
        """Begin a transfer."""
        if deadline.expired():
            message = "the deadline passed"
            raise PathTimeoutError(message)
        if self.aborted:
            message = "the link was closed"
            raise PeerGoneError(message)
        if not self.agent.enter(deadline):
            message = "the deadline passed while other transfers came to an end"
            raise PathTimeoutError(message)
        try:
            return Flight(self, self.remote, self.remote.enter(self._ask, deadline), deadline)
        except BaseException:
            self.agent.leave()
            raise

    def _move(self, flight: Flight, spans: Spans, epoch: int, deadline: Deadline, *, writing: bool) -> None:
        remote, look, regions = self.remote, flight.look, spans.regions
        view, seen = remote.check(regions, epoch, look, flight.run)
        bases = view.bases(regions, spans.starts, spans.runs.extent)
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
                    flight.more_time(_GRACE_S)
                    remote.confirm(regions, seen, look, flight.run)
                    error.progress = progress
            raise
        remote.confirm(regions, seen, look, flight.run)

    def _prepare(self, flight: Flight, spans: Spans) -> None:
        """Have the local memory registered, for this transfer alone if it is in no region."""
        low = int(spans.runs.local.min())
        high = int((spans.runs.local + spans.runs.lengths).max())
        flight.bases = bases = spans.bases.tolist()
        self.require_mapped([edge for base in bases for edge in (base + low, base + high - 1)])
        agent = self.agent
        for base in bases:
            begin, end = base + low, base + high
            if not agent.covers(base, begin, end):
                agent.registrations.register(begin, end)
                flight.undo.callback(agent.registrations.deregister, begin, end)

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
            near, far = (_descriptors(side.iovecs(lengths, part)) for side in (here, there))
            handle = self.agent.requests.make(near, far, self.remote.name, writing=writing)
            if flight.post(handle):
                progress.mark(part)
                continue
            running.append((handle, part))
            if len(running) >= _AHEAD:
                finish_first()
        while running:
            finish_first()

    def hold(self, bases: Sequence[int], undo: contextlib.ExitStack) -> None:
        """Keep local memory from being unregistered until ``undo``."""
        regions = self.context.regions
        found = [regions.around(base, 1) for base in bases]
        with contextlib.suppress(Exception):  # one of them has gone: it is the caller's own fault
            undo.enter_context(regions.lease([region[0] for region in found if region is not None]))

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


def _descriptors(iovecs: U64) -> U64:
    descriptors = np.zeros((len(iovecs), 3), dtype=np.uint64)
    descriptors[:, :2] = iovecs
    return descriptors


class _OneRequest(Shortcut):
    """One request, with addresses that are valid as long as the peer's epoch is the same.

    Where anything at all is unusual the long way does it, perhaps once more, and tells why.
    """

    def __init__(self, path: NixlPath, pairs: TensorPairs) -> None:
        super().__init__(path, pairs)
        self._nixl = path
        self._sides: list[tuple[int, int]] | None = None
        """Addresses of each tensor here and there."""
        self._room = 0

    def read(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline) -> None:
        """See ``Shortcut.read``."""
        if not self._move(size, here, there, deadline, writing=False):
            super().read(size, here, there, deadline)

    def write(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline) -> None:
        """See ``Shortcut.write``."""
        if not self._move(size, here, there, deadline, writing=True):
            super().write(size, here, there, deadline)

    def _find(self) -> list[tuple[int, int]] | None:
        bases, regions, epoch = self._pairs
        found = self._nixl.remote.found(regions, epoch)
        if found is not None:
            self._room = min(size for _, size in found)
            self._sides = [(near, far) for near, (far, _) in zip(bases, found, strict=True)]
        return self._sides

    def _move(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline, *, writing: bool) -> bool:
        path = self._nixl
        sides = self._sides or self._find()
        if sides is None or deadline.expired() or size * len(here) * len(sides) >= _SHORT_BYTES:
            return False
        last = self._room - size
        ours: list[tuple[int, int, int]] = []
        theirs: list[tuple[int, int, int]] = []
        for local, other in zip(here, there, strict=True):
            near_at, far_at = local * size, other * size
            if not 0 <= far_at <= last:
                return False
            for near, far in sides:
                ours.append((near + near_at, size, 0))
                theirs.append((far + far_at, size, 0))
        edges = [edge for begin, length, _ in ours for edge in (begin, begin + length - 1)]
        path.require_mapped(edges)
        agent, low, high = path.agent, min(here) * size, max(here) * size + size
        with path.begin(deadline) as flight:
            try:
                if not all(agent.covers(near, near + low, near + high) for near, _ in sides):
                    return False
            except (NixlUnavailableError, OverlapError):
                return False
            remote, epoch = path.remote, self._pairs.epoch
            flight.bases = self._pairs.bases
            if remote.head(flight.look, flight.run).epoch != epoch or remote.found(self._pairs.regions, epoch) is None:
                return False
            try:
                flight.run(agent.requests.make(ours, theirs, remote.name, writing=writing))
            except ConnectionLostError as error:
                error.quiescent = not writing
                raise
            return remote.head(flight.look, flight.run).epoch == epoch


class Nixl(Transport):
    """Loads NIXL, and asks the peer for its agent."""

    name = "nixl"

    def connect(self, peer: Peer, context: Context, deadline: Deadline) -> Path:
        """See ``Transport.connect``."""
        if context.nixl is None or context.ask is None:
            message = "nothing can be asked of the peer here"
            raise PathRejectedError(message)
        if peer.identity.incarnation == context.identity.incarnation:
            message = "the peer is this very engine"
            raise PathRejectedError(message)
        objection = context.nixl.options.objection()
        if objection is not None:
            raise PathRejectedError(objection)
        try:
            agent = context.nixl.agent()
        except NixlUnavailableError as error:
            raise PathRejectedError(str(error), error.hint) from error
        ask = messages.AskAgent(backend=agent.backend_name, regions=[])
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
        return NixlPath(agent, attach(agent, told.name), context, context.ask)
