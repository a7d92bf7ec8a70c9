"""One link to one peer: its state, the transfers that run over it, and what is known of the peer."""

from __future__ import annotations

import abc
import contextlib
import enum
import functools
import itertools
import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llm_datadist.engine.peer_catalogue import PeerCatalogue
from llm_datadist.memory.devices import HOST_ONLY
from llm_datadist.net.channel import ChannelClosedError, ReplyTimeoutError
from llm_datadist.utils import log
from llm_datadist.utils.turn import Turn
from llm_datadist.wire import messages
from llm_datadist.wire.auth import NO_KEY, OnceOnly
from llm_datadist.wire.framing import ProtocolError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from llm_datadist.engine.options import EngineOptions
    from llm_datadist.engine.short import Pairing
    from llm_datadist.memory.devices import Devices
    from llm_datadist.net.address import Address
    from llm_datadist.net.channel import Channel
    from llm_datadist.net.loop import Timer
    from llm_datadist.paths.base import Path, Peer
    from llm_datadist.paths.ladder import Attempt, Route
    from llm_datadist.utils.deadline import Deadline
    from llm_datadist.wire.messages import Body


_MOMENT_S: Final = 0.05
_MAX_ARRIVALS: Final = 64


class LinkState(enum.Enum):
    """Life of a link. It only goes forward; a new life is a new link."""

    CONNECTING = 0
    """The handshake runs; transfers are refused."""
    LINKED = 1
    CLOSING = 2
    """Running transfers end, new ones are refused."""
    CLOSED = 3


@dataclass(frozen=True, slots=True)
class LinkTerms:
    """Under what a link works, from its handshake to its end."""

    version: int
    """Of the protocol."""
    remote_accessible: bool
    """The mode of both sides."""
    secret: bool
    """Whether both sides have proved that they know one."""
    tls: bool
    """Whether what goes over the network is encrypted."""
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    """As this side is configured."""

    @classmethod
    def of(cls, options: EngineOptions, version: int, *, secret: bool) -> LinkTerms:
        """Those of a link that is admitted under these options."""
        heartbeat = (options.heartbeat_interval_ms, options.heartbeat_timeout_ms)
        return cls(version, options.remote_accessible, secret, options.tls is not None, *heartbeat)

    def __str__(self) -> str:
        mode = "remote-accessible mode" if self.remote_accessible else "message mode"
        guards = [name for name, used in (("secret", self.secret), ("TLS", self.tls)) if used]
        heartbeat = "no heartbeats"
        if self.heartbeat_interval_ms:
            interval, timeout = self.heartbeat_interval_ms / 1000, self.heartbeat_timeout_ms / 1000
            heartbeat = f"heartbeat after {interval:g} s of silence, given up after {timeout:g} s"
        return f"{mode}, protocol {self.version}, {' and '.join(guards) or 'neither secret nor TLS'}, {heartbeat}"


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What ``explain`` tells about a link."""

    cluster_id: int
    peer_address: str
    peer_pid: int
    state: LinkState
    path: str | None
    """Name of the path in use; memory that it does not reach takes another one, which ``attempts`` tells."""
    attempts: tuple[Attempt, ...]
    """What became of every path, those in use first."""
    stalled: str | None = None
    """Since when the peer has given no sign of life, if it has been asked for one in vain."""
    terms: LinkTerms | None = None
    """None within a process that is linked to itself."""
    connections: int = 0
    """Data connections on which this side asks; same-host paths need none."""
    served: int = 0
    """Data connections on which the peer asks."""
    copy_threads: int = 1
    """How many threads a large transfer may use."""

    def __str__(self) -> str:
        who = f"link to cluster {self.cluster_id} at {self.peer_address} (pid {self.peer_pid})"
        lines = [f"{who}: {self.state.name.lower()}, path {self.path or 'none'}"]
        if self.stalled:
            lines[0] += f"; {self.stalled}"
        if self.terms:
            threads = f"{self.copy_threads} {'thread' if self.copy_threads == 1 else 'threads'}"
            work = f"{self.connections} data connections to the peer, {self.served} from it, up to {threads} a transfer"
            lines += [f"  {self.terms}", f"  {work}"]
        for attempt in self.attempts:
            mark = "*" if attempt.chosen else "-"
            lines.append(f"  {mark} {attempt}")
        return "\n".join(lines)


class PeerLink(abc.ABC):
    """What transfers need of a link."""

    cluster_id: int

    @abc.abstractmethod
    def begin(self, ticket: object) -> None:
        """Count a running transfer; ``ticket`` is any object.

        Raises:
            ChannelClosedError: the link is not up (any more).
        """

    @abc.abstractmethod
    def end(self, ticket: object) -> None:
        """Count it no longer; without effect if it was not begun.

        In a ``finally``, first discard the ticket from ``running`` and see to it that this is called whatever happens:
        Ctrl-C may come between any two steps of Python, but not within the one that discards it.
        """

    @abc.abstractmethod
    def path(self, deadline: Deadline, beyond: Path | None = None, devices: Devices = HOST_ONLY) -> Path:
        """The path in use for such memory, or the one for what is out of reach of the path ``beyond``.

        Raises:
            PathError: none works (any more).
        """

    @abc.abstractmethod
    def uses(self, path: Path) -> bool:
        """Whether a path is (still) in use."""

    @abc.abstractmethod
    def demote(self, path: Path, reason: str, hint: str | None) -> None:
        """Stop using ``path``: the system does not permit it any more. ``hint`` says what would help."""

    @abc.abstractmethod
    def ends(self, deadline: Deadline) -> bool:
        """Whether the link has ended, or does so within a moment: a data connection often breaks a little earlier."""

    @abc.abstractmethod
    def request(self, body: Body, deadline: Deadline) -> Body:
        """Ask the peer.

        Raises:
            ChannelClosedError: the link is gone.
            ReplyTimeoutError: no reply by the deadline.
        """

    @abc.abstractmethod
    def notify(self, body: Body) -> None:
        """Tell the peer, if it is still there."""

    def __init__(self, digest: str | None) -> None:
        self.digest = digest
        """The digest of its memory that the peer can tell, if any."""
        self._catalogue: PeerCatalogue | None = None
        self._fetching = Turn()
        self.running: set[object] = set()
        """Tickets of the transfers that run."""
        self.pairings: dict[tuple[int, int], Pairing] = {}
        """What small transfers know already, by the peer's model id and the local cache id."""
        self.noted: set[tuple[int, int]] = set()
        """Pairs of the peer's and local cache ids of which it was said that their data types differ."""

    def forget_cache(self, cache_id: int) -> None:
        """A local cache has gone: what small transfers know of it is of no use any more."""
        for key in tuple(self.pairings):
            if key[1] == cache_id:
                self.pairings.pop(key, None)
        self.noted -= {pair for pair in tuple(self.noted) if pair[1] == cache_id}

    def catalogue(self, deadline: Deadline, outdated: PeerCatalogue | None = None) -> PeerCatalogue:
        """The peer's catalogue: the one known already, unless it is ``outdated``; then it is fetched again.

        Raises:
            ChannelClosedError: the link is gone.
            ReplyTimeoutError: no reply by the deadline.
        """
        known = self._catalogue
        if known is not None and known is not outdated:
            return known
        thread = threading.get_ident()  # as the ticket: a signal handler in the middle of a fetch makes its own
        try:
            if not self._fetching.take(thread, deadline):  # of many threads that find it outdated, one fetches
                message = "another transfer asked for the peer's catalogue, and had no reply in time"
                raise ReplyTimeoutError(message)
            known = self._catalogue
            if known is None or known is outdated:
                known = self._catalogue = self._fetch(deadline)
            return known
        finally:
            self._fetching.taken.discard(thread)
            self._fetching.leave()

    def _fetch(self, deadline: Deadline) -> PeerCatalogue:
        reply = self.request(messages.Fetch(), deadline)
        if not isinstance(reply, messages.Catalogue):
            message = f"the peer answered a catalogue request with {type(reply).__name__}"
            raise ChannelClosedError(message)
        try:
            return PeerCatalogue(reply)
        except ValueError as error:
            message = f"the peer's catalogue is not understood: {error}"
            raise ChannelClosedError(message) from error


class Link(PeerLink):
    """A link over a control connection. Thread-safe."""

    def __init__(self, peer: Peer, channel: Channel, token: bytes, address: str, terms: LinkTerms) -> None:
        super().__init__(peer.offer.digest)
        self.cluster_id: int = peer.identity.cluster_id
        self.peer = peer
        self.channel = channel
        self.token = token
        self.key = NO_KEY
        """With which data connections and the hand-over prove that they belong to it."""
        self.numbers_seen: OnceOnly = OnceOnly()
        """Of data connections that the peer has opened. Loop thread."""
        self.address = address
        self.terms = terms
        self.dialled: Address | None = None
        """Where this side connected to; None if the peer connected."""
        self.deadline: Deadline | None = None
        """When a link that the peer began must be up."""
        self.give_up: Timer | None = None
        """Drops it then."""
        self.fade: Timer | None = None
        """Closes the connection if the peer does not, after this side has ended the link."""
        self.supersedes: Link | None = None
        """The link to the same life of the peer that is known to be dead at its end."""
        self.confirming = False
        """Whether the peer has sent its ``Confirm``."""
        self.pending_comm: str | None = None
        """The rank-table link for which the peer connected."""
        self.initiated_here = False
        """Whether this side has called ``link_clusters`` for it."""
        self.comms: set[int] = set()
        """Rank-table links of this side that use it."""
        self.made_for_comm = False
        """Whether it ends with the last rank-table link that uses it."""
        self.peer_said_bye = False
        self.peer_is_idle = False
        """Whether it has asked for an orderly end: none of its transfers over the link run any more."""
        self.knows_agent = False
        """Whether the peer has been told how to reach our memory over NIXL."""
        self.stalled: str | None = None
        """See ``LinkReport.stalled``."""
        self.data_numbers: itertools.count[int] = itertools.count(1)
        """Numbers for the data connections that this side opens."""
        self._arrivals: queue.SimpleQueue[tuple[int, socket.socket] | None] = queue.SimpleQueue()
        self._route: Route | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiters = 0
        """Threads that wait for it to become idle."""
        self._state = LinkState.CONNECTING
        self._waiting: list[tuple[set[object], Callable[[], object]]] = []

    @property
    def state(self) -> LinkState:
        """Where in its life it is."""
        return self._state

    def advance(self, state: LinkState) -> bool:
        """Go forward to ``state``; False if it is there or further already."""
        with self._lock:
            if state.value <= self._state.value:
                return False
            self._state = state
            self._changed.notify_all()
        if state is not LinkState.LINKED:
            self._arrivals.put(None)  # nobody need wait for data connections any more
        log.info("link to cluster %d: %s", self.cluster_id, state.name)
        return True

    def resume(self) -> None:
        """Back from CLOSING to LINKED: an unlink could not be finished and keeps the link."""
        with self._lock:
            if self._state is LinkState.CLOSING and not self.channel.closed:
                self._state = LinkState.LINKED

    def data_arrived(self, number: int, sock: socket.socket) -> None:
        """The peer opened a data connection on which this side may ask; too many that nobody waits for are closed."""
        if self._arrivals.qsize() >= _MAX_ARRIVALS:
            sock.close()
            return
        self._arrivals.put((number, sock))

    def take_arrivals(self, count: int, deadline: Deadline) -> list[tuple[int, socket.socket]]:
        """``count`` data connections that the peer opened; fewer if they do not come in time."""
        taken: list[tuple[int, socket.socket]] = []
        with contextlib.suppress(queue.Empty):
            while len(taken) < count:
                arrival = self._arrivals.get(timeout=max(deadline.remaining(), 0.001))
                if arrival is None:
                    break
                taken.append(arrival)
        return taken

    def close_arrivals(self) -> None:
        """Close data connections that nobody took."""
        with contextlib.suppress(queue.Empty):
            while True:
                arrival = self._arrivals.get_nowait()
                if arrival is not None:
                    arrival[1].close()

    def use(self, route: Route) -> None:
        """Set the route; once, before LINKED."""
        with self._lock:
            self._route = route
            ended = self._state is LinkState.CLOSED
        if ended:
            route.close()

    def begin(self, ticket: object) -> None:
        """Count a transfer. Takes no lock: either this sees that the link is not up, or who ended it sees the ticket.

        Raises:
            ChannelClosedError: the link is not up (any more).
        """
        self.running.add(ticket)
        if self._state is not LinkState.LINKED:
            self.end(ticket)
            message = f"the link is {self._state.name.lower()}"
            raise ChannelClosedError(message)

    def end(self, ticket: object) -> None:
        """Count it no longer."""
        self.running.discard(ticket)
        if self._waiters or self._waiting:
            self._tell_waiters()

    def linger(self) -> Callable[[], object]:
        """Count one more transfer until what is returned is called, in whatever state the link is."""
        ticket = object()
        self.running.add(ticket)
        return functools.partial(self.end, ticket)

    def _tell_waiters(self) -> None:
        with self._lock:
            waiting = [(tickets & self.running, then) for tickets, then in self._waiting]
            due = [then for tickets, then in waiting if not tickets]
            self._waiting = [item for item in waiting if item[0]]
            self._changed.notify_all()
        for then in due:
            then()

    def when_idle(self, then: Callable[[], object]) -> None:
        """Call ``then`` once every transfer that runs now has ended; at once if none does."""
        with self._lock:
            self._waiting.append((set(self.running), then))
        self._tell_waiters()  # those that ended before they could see that somebody waits

    def wait_idle(self, deadline: Deadline) -> bool:
        """Wait until no transfer runs; whether that happened in time."""
        with self._lock:
            self._waiters += 1
            try:
                return self._changed.wait_for(lambda: not self.running, deadline.remaining())
            finally:
                self._waiters -= 1

    def path(self, deadline: Deadline, beyond: Path | None = None, devices: Devices = HOST_ONLY) -> Path:
        """See ``PeerLink.path``."""
        route = self._route
        if route is None:
            message = "the link is connecting"
            raise ChannelClosedError(message)
        known = route.path if beyond is None and not devices.any else None
        return known or route.connect(deadline, beyond, devices)

    def uses(self, path: Path) -> bool:
        """See ``PeerLink.uses``."""
        return self._route is not None and self._route.uses(path)

    def demote(self, path: Path, reason: str, hint: str | None) -> None:
        """See ``PeerLink.demote``."""
        if self._route is not None:
            self._route.demote(path, reason, hint)

    def ends(self, deadline: Deadline) -> bool:
        """See ``PeerLink.ends``."""
        moment = min(deadline.remaining(), _MOMENT_S)
        with self._lock:
            return self._changed.wait_for(lambda: self._state is not LinkState.LINKED, moment)

    def request(self, body: Body, deadline: Deadline) -> Body:
        """See ``PeerLink.request``."""
        return self.channel.request(body, deadline)

    def notify(self, body: Body, *, answered: bool = False) -> None:
        """See ``PeerLink.notify``; ``answered`` as for ``Channel.send``."""
        with contextlib.suppress(ChannelClosedError, ProtocolError):
            self.channel.send(body, answered=answered)

    def abort_transfers(self) -> None:
        """Make running transfers fail soon."""
        if self._route is not None:
            self._route.abort()

    def release(self) -> None:
        """Give up its paths; transfers must have ended."""
        if self._route is not None:
            self._route.close()

    def report(self, served: int = 0, *, on_devices: bool = False) -> LinkReport:
        """What there is to tell; ``served`` is how many data connections the peer asks on.

        ``on_devices`` tells whether this side has caches in GPU memory.
        """
        on_devices = on_devices or (self._catalogue is not None and self._catalogue.on_devices)
        route = self._route
        path = route.path if route else None
        return LinkReport(
            cluster_id=self.cluster_id,
            peer_address=self.address,
            peer_pid=self.peer.identity.pid,
            state=self._state,
            path=path.name if path else None,
            attempts=route.attempts(on_devices=on_devices) if route else (),
            stalled=self.stalled,
            terms=self.terms,
            connections=route.connections() if route else 0,
            served=served,
            copy_threads=route.copy_threads if route else 1,
        )
