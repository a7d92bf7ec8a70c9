"""Sockets, selectors and descriptors of tasks, and the network between their processes.

A connection keeps the order of its bytes; everything else is as late as the seed says. Connections can be cut, and the
network between two processes can be interrupted: then everything waits until it is whole again, or, after a minute, the
connection breaks.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import os
import selectors
import socket
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from simulation.scheduler import Scheduler, Task

_TIMEVAL = struct.Struct("ll")
_BREAK_S = 60.0
_DONTWAIT = int(socket.MSG_DONTWAIT)  # an enum is slow
FIRST_FD = 1 << 20
"""Real descriptors are smaller."""


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class Network:
    """All connections of one simulation."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.listeners: dict[int, Socket] = {}
        self.descriptors: dict[int, Watched] = {}
        self.slow = scheduler.rng.choice((0.00005, 0.0005, 0.005))
        self.room = scheduler.rng.choice((600, 4096, 1 << 16, 1 << 20))
        self._cuts: dict[frozenset[Any], int] = {}
        self._healed: list[Task] = []
        self.stalled: list[Socket] = []
        """What has bytes that wait for an interruption to end."""
        self._ports = itertools.count(40_000)

    def delay(self) -> float:
        return self.scheduler.rng.expovariate(1 / self.slow)

    def add(self) -> int:
        """The lowest free descriptor, as in a real process: what is used again may be mixed up."""
        return next(number for number in itertools.count(FIRST_FD) if number not in self.descriptors)

    def find(self, fd: int) -> Socket:
        found = self.descriptors.get(fd)
        if not isinstance(found, Socket):
            raise _error(errno.EBADF)
        return found

    def port(self) -> int:
        return next(self._ports)

    def interrupted(self, one: Any, other: Any) -> bool:
        return bool(self._cuts.get(frozenset((one, other))))

    def interrupt(self, one: Any, other: Any, seconds: float) -> None:
        """Let nothing through between two processes for so long."""
        pair = frozenset((one, other))
        self._cuts[pair] = self._cuts.get(pair, 0) + 1
        self.scheduler.after(seconds, lambda: self._heal(pair))
        if seconds > _BREAK_S:
            self.scheduler.after(_BREAK_S + self.scheduler.rng.random() * 10, lambda: self._break(pair))

    def _heal(self, pair: frozenset[Any]) -> None:
        self._cuts[pair] -= 1
        if not self._cuts[pair]:
            stalled, self.stalled = self.stalled, []
            for sock in stalled:
                sock.pump()
            for task in self._healed:
                self.scheduler.wake(task)

    def _break(self, pair: frozenset[Any]) -> None:
        if self._cuts[pair]:
            for sock in self.connected():
                if frozenset((sock.host, sock.peer.host)) == pair:
                    sock.broken(errno.ETIMEDOUT)

    def wait_whole(self, one: Any, other: Any, deadline: float | None) -> bool:
        """Wait until something gets through."""
        while self.interrupted(one, other):
            self._healed.append(self.scheduler.current)
            if not self.scheduler.park(deadline):
                return False
        return True

    def connected(self) -> list[Any]:
        """Both ends of all connections."""
        return [sock for sock in self.descriptors.values() if isinstance(sock, Socket) and sock.peer is not None]

    def cut(self, sock: Socket) -> None:
        """Break a connection for both ends."""
        ends = [sock, sock.peer]
        for end in ends:
            if end is not None:
                end.broken(errno.ECONNRESET)

    def end(self, host: Any) -> None:
        """A process has ended: the system closes what it had."""
        for fd, thing in list(self.descriptors.items()):
            if thing.host is host:
                self.descriptors.pop(fd, None)  # one that waited to be accepted goes with its listener
                thing.vanish()


class Watched:
    """What a selector can watch, and tasks can wait for."""

    host: Any

    def __init__(self, network: Network, fd: int | None = None) -> None:
        self.network = network
        self.scheduler = network.scheduler
        self.host = network.scheduler.current.host
        self.waiting: list[Task] = []
        self.fd = network.add() if fd is None else fd
        network.descriptors[self.fd] = self

    def events(self) -> int:
        """What a selector tells."""
        return 0

    def vanish(self) -> None:
        """The process that had it has ended."""

    def changed(self) -> None:
        waiting, self.waiting = self.waiting, []
        for task in waiting:
            self.scheduler.wake(task)

    def wait(self, deadline: float | None) -> bool:
        task = self.scheduler.current
        self.waiting.append(task)
        try:
            return self.scheduler.park(deadline)
        finally:
            if task in self.waiting:
                self.waiting.remove(task)


class Bell(Watched):
    """An eventfd."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self.count = 0

    def events(self) -> int:
        return selectors.EVENT_READ if self.count else 0

    def ring(self) -> None:
        self.count += 1
        self.changed()


class Ending(Watched):
    """A pidfd: a real descriptor, which becomes readable at the end of a process."""

    def __init__(self, network: Network, fd: int, process: Any) -> None:
        super().__init__(network, fd)
        self._process = process
        process.endings.append(self)

    def events(self) -> int:
        return 0 if self._process.alive else selectors.EVENT_READ

    def vanish(self) -> None:
        os.close(self.fd)


class Socket(Watched):
    """A TCP socket."""

    def __init__(self, network: Network, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> None:
        assert kind == socket.SOCK_STREAM, "only TCP is simulated"
        super().__init__(network)
        self.family = family
        self.peer: Socket | None = None
        self.inbox = bytearray()
        self.backlog: collections.deque[Socket] | None = None
        self._name: tuple[str, int] = ("127.0.0.1", 0)
        self._timeout: float | None = None
        self._limits: dict[int, float] = {}
        self._error: int | None = None
        self._eof = self._read_shut = self._write_shut = self._closed = False
        self._pipe: collections.deque[bytes | None] = collections.deque()
        self._users = 0
        self._call_end: float | None = None
        self._due = 0.0
        """When the first of the bytes under way arrive."""

    def __enter__(self) -> Socket:  # noqa: PYI034 - Self is of Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the kernel does

    def pump(self) -> None:
        """Deliver what has arrived."""
        while self._pipe and self.peer is not None and self._due <= self.scheduler.now:
            if self.network.interrupted(self.host, self.peer.host):
                self.network.stalled.append(self)
                return
            self._deliver(self.peer, self._pipe.popleft())
            if self._pipe:
                self._due = self.scheduler.now + self.network.delay()
                self.scheduler.at(self._due, self.pump)

    def _deliver(self, peer: Socket, segment: bytes | None) -> None:
        if segment is None:
            peer._eof = True
        elif peer._closed and not peer._users:
            self.broken(errno.ECONNRESET)
        elif not peer._read_shut:
            peer.inbox += segment
        peer.changed()
        self.changed()

    def _transmit(self, segment: bytes | None) -> None:
        first = not self._pipe
        self._pipe.append(segment)
        if first:
            self._due = self.scheduler.now + self.network.delay()
            self.scheduler.at(self._due, self.pump)

    def broken(self, number: int) -> None:
        """The connection is gone for this end."""
        if self._error is None and not self._closed:
            self._error = number
            self._pipe.clear()
            self.inbox.clear()
            self.changed()

    def vanish(self) -> None:
        """Closed, by the program or by the end of its process."""
        if self._closed and not self._users:
            return
        self._closed = True
        if self.backlog is not None:
            self.network.listeners.pop(self._name[1], None)
            for sock in self.backlog:
                sock.close()
        elif self.peer is not None and self._error is None:
            if self.inbox:
                self.peer.broken(errno.ECONNRESET)
            elif not self._write_shut:
                self._transmit(None)
        self.changed()

    def events(self) -> int:
        if self.backlog is not None:
            return selectors.EVENT_READ if self.backlog else 0
        if self.peer is None:
            return 0
        gone = self._error is not None or self._read_shut
        readable = bool(self.inbox) or self._eof or gone
        writable = self._room() > 0 or gone
        return selectors.EVENT_READ * readable | selectors.EVENT_WRITE * writable

    def _room(self) -> int:
        waiting = sum(len(segment or b"") for segment in self._pipe)
        return self.network.room - waiting - (len(self.peer.inbox) if self.peer else 0)

    # What programs call

    def _check(self) -> None:
        self.scheduler.preempt()
        if self._closed:
            raise _error(errno.EBADF)

    def _deadline(self, flags: int, option: int) -> tuple[float | None, type[OSError]]:
        """Until when a call may wait, and what it raises then."""
        if flags & _DONTWAIT or self._timeout == 0:
            return self.scheduler.now, BlockingIOError
        if self._timeout is not None:
            return self.scheduler.now + self._timeout, TimeoutError
        if self._call_end is not None:
            return self._call_end, BlockingIOError
        limit = self._limits.get(option)
        return (None if limit is None else self.scheduler.now + limit), BlockingIOError

    def _until(self, ready: Callable[[], bool], flags: int, option: int) -> bool:
        deadline, _ = self._deadline(flags, option)
        self._users += 1
        try:
            while not ready():
                if deadline is not None and deadline <= self.scheduler.now:
                    return False
                if not self.wait(deadline):
                    return ready()
            return True
        finally:
            self._users -= 1
            if self._closed and not self._users and not self.scheduler.current.killed:
                self._users += 1  # it was closed while it was in use: now it really is
                self.vanish()
                self._users -= 1

    def _late(self, flags: int, option: int) -> OSError:
        _, kind = self._deadline(flags, option)
        return kind(errno.EAGAIN, "timed out")

    def _failed(self) -> OSError | None:
        return _error(self._error) if self._error is not None else None

    @contextlib.contextmanager
    def one_call(self, option: int) -> Iterator[None]:
        """Let the time limit be that of all that is received or sent meanwhile."""
        limit = self._limits.get(option)
        self._call_end = None if limit is None else self.scheduler.now + limit
        try:
            yield
        finally:
            self._call_end = None

    def recv(self, size: int, flags: int = 0) -> bytes:
        self._check()
        flags = int(flags)
        if self.peer is None:
            raise _error(errno.ENOTCONN)
        ready = lambda: bool(self.inbox) or self._eof or self._read_shut or self._error is not None  # noqa: E731
        if not self._until(ready, flags, socket.SO_RCVTIMEO):
            raise self._late(flags, socket.SO_RCVTIMEO)
        if not self.inbox:
            failed = self._failed()
            if failed and not self._read_shut:
                raise failed
            return b""
        data = bytes(self.inbox[:size])
        del self.inbox[:size]
        self.peer.changed()
        return data

    def recv_into(self, room: memoryview, size: int = 0, flags: int = 0) -> int:
        data = self.recv(size or len(room), flags)
        room[: len(data)] = data
        return len(data)

    def send(self, data: bytes | bytearray | memoryview, flags: int = 0) -> int:
        self._check()
        flags = int(flags)
        if self.peer is None:
            raise _error(errno.ENOTCONN)
        ready = lambda: self._room() > 0 or self._write_shut or self._error is not None  # noqa: E731
        if not self._until(ready, flags, socket.SO_SNDTIMEO):
            raise self._late(flags, socket.SO_SNDTIMEO)
        failed = self._failed()
        if failed:
            raise failed
        if self._write_shut:
            raise _error(errno.EPIPE)
        taken = bytes(data[: self._room()])
        self._transmit(taken)
        return len(taken)

    def sendall(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[self.send(left) :]

    def shutdown(self, how: int) -> None:
        self._check()
        if self.peer is None or self._error is not None:
            raise _error(errno.ENOTCONN)
        if how in (socket.SHUT_RD, socket.SHUT_RDWR):
            self._read_shut = True
        if how in (socket.SHUT_WR, socket.SHUT_RDWR) and not self._write_shut:
            self._write_shut = True
            self._transmit(None)
        self.changed()

    def close(self) -> None:
        if self._closed:
            return
        if self.network.descriptors.get(self.fd) is self:
            del self.network.descriptors[self.fd]
        if self._users:
            self._closed = True
        else:
            self.vanish()

    def fileno(self) -> int:
        return -1 if self._closed else self.fd

    def bind(self, where: tuple[Any, ...]) -> None:
        self._check()
        port = where[1] or self.network.port()
        if port in self.network.listeners:
            raise _error(errno.EADDRINUSE)
        self._name = (where[0], port)

    def listen(self, _backlog: int) -> None:
        if self._name[1] in self.network.listeners:
            raise _error(errno.EADDRINUSE)
        self.backlog = collections.deque()
        self.network.listeners[self._name[1]] = self

    def accept(self) -> tuple[Socket, tuple[str, int]]:
        self._check()
        assert self.backlog is not None
        if not self.backlog:
            raise _error(errno.EAGAIN)
        sock = self.backlog.popleft()
        assert sock.peer is not None
        return sock, sock.peer._name

    def connect(self, where: tuple[Any, ...]) -> None:
        self._check()
        network, scheduler = self.network, self.scheduler
        deadline = None if self._timeout is None else scheduler.now + self._timeout
        listener = network.listeners.get(where[1])
        if listener is not None and not network.wait_whole(self.host, listener.host, deadline):
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        scheduler.sleep(2 * network.delay())
        if deadline is not None and scheduler.now >= deadline:
            raise TimeoutError(errno.ETIMEDOUT, "timed out")
        listener = network.listeners.get(where[1])
        if self._closed:
            raise _error(errno.EBADF)
        if listener is None or listener.backlog is None:
            raise _error(errno.ECONNREFUSED)
        accepted = Socket(network)
        accepted.host = listener.host
        self._name, accepted._name = ("127.0.0.1", network.port()), listener._name
        self.peer, accepted.peer = accepted, self
        listener.backlog.append(accepted)
        listener.changed()

    def getsockname(self) -> tuple[str, int]:
        return self._name

    def getpeername(self) -> tuple[str, int]:
        self._check()
        if self.peer is None or self._error is not None:
            raise _error(errno.ENOTCONN)
        return self.peer._name

    def getsockopt(self, _level: int, option: int, _size: int = 0) -> int:
        self._check()
        return (self._error or 0) if option == socket.SO_ERROR else 0

    def settimeout(self, seconds: float | None) -> None:
        self._check()
        self._timeout = seconds

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self._check()
        if level == socket.SOL_SOCKET and option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            assert isinstance(value, bytes)
            whole, micro = _TIMEVAL.unpack(value)
            self._limits[option] = whole + micro * 1e-6
