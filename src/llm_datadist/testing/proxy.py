"""Faults between two real processes: a TCP proxy that delays, cuts, stalls, drops, corrupts or throttles.

Only the standard library is used, and only bytes are known: the proxy needs no part in what the connections carry.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, final

from llm_datadist.testing.faults import Fault, FaultKind

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK: Final = 64 << 10
_PREAMBLE: Final = 8
_MAGIC: Final = b"LLMD"
_LINGER_RESET: Final = b"\x01\0\0\0\0\0\0\0"
_END_S: Final = 20.0


class Carries(enum.Enum):
    """What a connection is for, told from its first bytes."""

    CONTROL = b"C"
    """Handshakes, catalogues and look-ups of one link."""
    DATA = b"D"
    """The bytes of caches."""
    OTHER = b""
    """Not of this library."""


class Direction(enum.Enum):
    """Which way bytes go."""

    TO_TARGET = "to the target"
    """From the side that connects to the one that listens."""
    FROM_TARGET = "from the target"


@final
class TcpProxy:
    """Listens, and carries every connection on to ``target``, with the faults that are injected. Thread-safe.

    Give its ``address`` to ``link_clusters`` instead of the peer's: all connections of a link, control and data, in
    either direction of transfer, are opened by the side that links.

    Example::

        with TcpProxy(prefill_address) as proxy:
            decode.link_clusters([info_of(proxy.address)])
            stall = proxy.inject(Fault(FaultKind.STALL, at=100_000), Carries.DATA)
            ...  # begin a pull in a thread
            assert stall.wait(10)
            proxy.cut(Carries.DATA)  # in the middle of it
    """

    def __init__(self, target: tuple[str, int], host: str = "127.0.0.1") -> None:
        """Listen on a free port of ``host``.

        Raises:
            OSError: the system does not allow it.
        """
        self._target = target
        self._lock = threading.Lock()
        self._faults: list[tuple[Fault, Carries | None, Direction | None]] = []
        self._connections: set[_Connection] = set()
        self._threads: set[threading.Thread] = set()
        self._rate: float | None = None
        self._closed = False
        self._listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        _keep_little(self._listener)  # those that it accepts inherit that
        self._listener.bind((host, 0))
        self._listener.listen()
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._run(self._accept)

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def inject(self, fault: Fault, carries: Carries | None = None, direction: Direction | None = None) -> Fault:
        """Let a fault happen to all connections that ``carries`` and ``direction`` name (None: any), also later ones.

        It goes on until ``Fault.release``, or ``heal``. The fault, to be waited for.
        """
        with self._lock:
            self._faults.append((fault, carries, direction))
            for connection in self._connections:
                connection.take(fault, carries, direction)
        return fault

    def heal(self) -> None:
        """End all faults and the throttling: what is stalled goes on; what was cut or lost is not mended."""
        with self._lock:
            faults, self._faults, self._rate = self._faults, [], None
            connections = list(self._connections)
        for fault, _, _ in faults:
            fault.release()
        for connection in connections:
            connection.notify()

    def throttle(self, bytes_per_second: float | None) -> None:
        """Carry no more than this on each connection and in each direction; None for as much as there is.

        Raises:
            ValueError: it is not positive.
        """
        if bytes_per_second is not None and bytes_per_second <= 0:
            message = f"bytes_per_second is {bytes_per_second}, it must be positive, or None"
            raise ValueError(message)
        self._rate = bytes_per_second

    def cut(self, carries: Carries | None = None) -> int:
        """Break all connections of this kind (None: any) at once, with a reset; how many there were."""
        with self._lock:
            cut = [each for each in self._connections if carries in (None, each.carries)]
        for connection in cut:
            connection.cut()
        return len(cut)

    def retarget(self, target: tuple[str, int]) -> None:
        """Carry connections that come from now on to another address."""
        self._target = target

    def count(self, carries: Carries | None = None) -> int:
        """How many connections of this kind are open (None: any)."""
        with self._lock:
            return sum(carries in (None, each.carries) for each in self._connections)

    def close(self) -> None:
        """Stop listening, break all connections and wait for the threads. Idempotent."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self.heal()
        self.cut()
        end = time.monotonic() + _END_S
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run(self, work: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                work()
            finally:
                self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=guarded, name="llm_datadist-proxy", daemon=True)
        with self._lock:  # one that has not begun cannot be waited for
            self._threads.add(thread)
            thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._run(lambda near=near: self._carry(near))  # type: ignore[misc]

    def _carry(self, near: socket.socket) -> None:
        """One connection from its begin to its end."""
        far = socket.socket(socket.AF_INET6 if ":" in self._target[0] else socket.AF_INET)
        _keep_little(far)
        try:
            far.settimeout(_END_S)
            far.connect(self._target)
        except OSError:
            far.close()
            _reset(near)
            return
        far.settimeout(None)
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(near, far, lambda: self._rate)
        try:
            with self._lock:
                if self._closed:
                    return
                self._connections.add(connection)
            begin = _first_bytes(near)
            connection.carries = _kind_of(begin)
            with self._lock:
                for fault, carries, direction in self._faults:
                    connection.take(fault, carries, direction)
            there, back = connection.lanes
            self._run(lambda: back.carry(b""))
            there.carry(begin)
            back.ended.wait()
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()


class _Connection:
    """One connection and its two directions."""

    def __init__(self, near: socket.socket, far: socket.socket, rate: Callable[[], float | None]) -> None:
        self.carries = Carries.OTHER
        self.over = False
        self.changed = threading.Condition()
        """Notified when it is over, or a fault is."""
        self.lanes = (
            _Lane(self, near, far, Direction.TO_TARGET, rate),
            _Lane(self, far, near, Direction.FROM_TARGET, rate),
        )
        self._sockets = (near, far)

    def take(self, fault: Fault, carries: Carries | None, direction: Direction | None) -> None:
        """A fault that may concern this connection."""
        if carries in (None, self.carries):
            fault.when_released(self.notify)
            for lane in self.lanes:
                if direction in (None, lane.direction):
                    lane.take(fault)

    def notify(self) -> None:
        """Let those look who wait for a change."""
        with self.changed:
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool], seconds: float | None) -> None:
        """Wait until ``condition`` holds, the connection is over, or the time."""
        with self.changed:
            self.changed.wait_for(lambda: self.over or condition(), seconds)

    def cut(self) -> None:
        """Break it at both ends."""
        self.over = True
        self.notify()
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the threads; who closes then sends the reset

    def close(self) -> None:
        """Give the sockets back, when no thread uses them."""
        for sock in self._sockets:
            sock.close()


class _Lane:
    """One direction of one connection."""

    def __init__(
        self,
        connection: _Connection,
        source: socket.socket,
        sink: socket.socket,
        direction: Direction,
        rate: Callable[[], float | None],
    ) -> None:
        self.direction = direction
        self.ended = threading.Event()
        self._connection = connection
        self._source = source
        self._sink = sink
        self._rate = rate
        self._lock = threading.Lock()
        self._passed = 0
        self._due: list[_Due] = []

    def take(self, fault: Fault) -> None:
        """A fault that concerns this direction, from here on."""
        with self._lock:
            self._due.append(_Due(fault, self._passed + fault.at))

    def carry(self, begin: bytes) -> None:
        """Carry everything, until either end closes or a fault cuts it."""
        try:
            data = begin
            while data or (data := self._source.recv(_CHUNK)):
                self._pass(data)
                data = b""
            self._sink.shutdown(socket.SHUT_WR)
        except (_CutError, OSError):  # a fault, or either end, has broken it
            self._connection.cut()
        finally:
            self.ended.set()

    def _pass(self, data: bytes) -> None:
        while data:
            with self._lock:
                live = [due for due in self._due if not due.fault.released and not due.over]
                self._due = live
                here = [due for due in live if due.at <= self._passed]
                following = min((due.at for due in live if due.at > self._passed), default=None)
                size = len(data) if following is None else min(len(data), following - self._passed)
                self._passed += size  # before anybody can know that they have come
            piece, data = data[:size], data[size:]
            for due in here:
                piece = due.apply(piece, self._connection)
            if piece:
                self._sink.sendall(piece)
                self._slow_down(len(piece))

    def _slow_down(self, size: int) -> None:
        rate = self._rate()
        if rate is not None:
            self._connection.wait_for(lambda: self._rate() is None, size / rate)


class _CutError(Exception):
    """A fault cuts the connection."""


class _Due:
    """A fault on one lane, from byte ``at`` of it on."""

    def __init__(self, fault: Fault, at: int) -> None:
        self.fault = fault
        self.at = at
        self.over = False
        self._left = fault.length
        self._change = fault.changer()

    def apply(self, piece: bytes, connection: _Connection) -> bytes:
        """What becomes of a piece that begins at ``at`` or later."""
        fault = self.fault
        fault.happen()
        if fault.kind is FaultKind.CUT:
            raise _CutError
        if fault.kind is FaultKind.DROP:
            return b""
        if fault.kind is FaultKind.CORRUPT:
            size = len(piece) if self._left is None else min(len(piece), self._left)
            if self._left is not None:
                self._left -= size
                self.over = not self._left
            return self._change(piece[:size]) + piece[size:]
        connection.wait_for(lambda: fault.released, fault.seconds if fault.kind is FaultKind.DELAY else None)
        if connection.over:
            raise _CutError
        self.over = True
        return piece


def _first_bytes(sock: socket.socket) -> bytes:
    """So many that one can tell what it carries, unless it ends before."""
    data = b""
    with contextlib.suppress(OSError):
        while len(data) < _PREAMBLE and (more := sock.recv(_PREAMBLE - len(data))):
            data += more
            if not _MAGIC.startswith(data[: len(_MAGIC)]):
                break
    return data


def _kind_of(begin: bytes) -> Carries:
    if begin[: len(_MAGIC)] != _MAGIC:
        return Carries.OTHER
    return {kind.value: kind for kind in Carries}.get(begin[len(_MAGIC) : len(_MAGIC) + 1], Carries.OTHER)


def _keep_little(sock: socket.socket) -> None:
    """Let little be under way, so that a fault hits the two ends where it says."""
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _CHUNK)


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
    sock.close()
