"""The owner's end of data connections: checks every span against its own regions, then moves bytes."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.memory import iovec
from llm_datadist.memory.move import MemoryFaultError, mapped
from llm_datadist.memory.regions import RegionError, RegionView, StaleEpochError, UnknownRegionError, distinct
from llm_datadist.net.loop import READ
from llm_datadist.paths import tcp_stream
from llm_datadist.paths.base import PathError, PathFaultError
from llm_datadist.utils import log
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire.data import MAX_REASON, REQUEST_BYTES, Op, Reply, Request, Result, decode_spans
from llm_datadist.wire.framing import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from llm_datadist.memory.regions import RegionTable
    from llm_datadist.net.loop import Loop
    from llm_datadist.net.workers import Workers

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]

_LINGER_MS: Final = 2
"""How long a worker stays with a connection for the next request before it gives it back to the loop."""
_GRACE_S: Final = 0.5
MAX_CONNECTIONS: Final = 64
"""Of one link."""


class _Served:
    """One data connection on which the peer asks."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.busy = False
        self.closing = False
        self.when_closed: list[Callable[[], object]] = []


class DataServer:
    """Serves all data connections of an engine with a few threads. ``token`` names the link a connection belongs to."""

    def __init__(self, regions: RegionTable, loop: Loop, workers: Workers) -> None:
        self._regions = regions
        self._view = RegionView(regions.rows)
        self._loop = loop
        self._workers = workers
        self._lock = threading.Lock()
        self._served: dict[tuple[bytes, int], _Served] = {}
        self._given_up: dict[bytes, set[int]] = {}

    def add(self, token: bytes, number: int, sock: socket.socket) -> None:
        """Serve a connection from now on."""
        with self._lock:
            refused = (
                (token, number) in self._served
                or number in self._given_up.get(token, ())
                or sum(key[0] == token for key in self._served) >= MAX_CONNECTIONS
            )
            if not refused:
                served = self._served[token, number] = _Served(sock)
        if refused:
            log.warn("data connection %d of a link was refused: given up, in use, or one too many", number)
            sock.close()
            return
        tcp_stream.tune(sock)
        self._loop.call_soon(lambda: self._watch((token, number), served))

    def count(self, token: bytes) -> int:
        """How many connections of a link are served."""
        with self._lock:
            return sum(key[0] == token for key in self._served)

    def give_up(self, token: bytes, numbers: list[int] | None, then: Callable[[], object]) -> None:
        """Close connections of a link (None: all) and call ``then`` when no request on them runs any more."""
        with self._lock:
            if numbers is None:
                self._given_up.pop(token, None)
            else:
                # One that has not arrived yet must not be served when it does: its asker has been told that it is over.
                self._given_up.setdefault(token, set()).update(numbers)
            keys = [key for key in self._served if key[0] == token and (numbers is None or key[1] in numbers)]
            ending = [self._served.pop(key) for key in keys]
        countdown = _Countdown(len(ending), then)
        for served in ending:
            self._close(served, countdown.one)

    def close(self) -> None:
        """Close all connections; idempotent."""
        with self._lock:
            ending, self._served = list(self._served.values()), {}
        for served in ending:
            self._close(served)

    def _close(self, served: _Served, then: Callable[[], object] = lambda: None) -> None:
        with self._lock:
            served.closing = True
            if served.busy:
                served.when_closed.append(then)
                with contextlib.suppress(OSError):
                    served.sock.shutdown(socket.SHUT_RDWR)
                return
        self._loop.call_soon(lambda: self._discard(served))
        then()

    def _discard(self, served: _Served) -> None:
        self._loop.unwatch(served.sock)
        served.sock.close()

    def _watch(self, key: tuple[bytes, int], served: _Served) -> None:
        if not served.closing:
            self._loop.watch(served.sock, READ, lambda _events: self._ready(key, served))

    def _ready(self, key: tuple[bytes, int], served: _Served) -> None:
        self._loop.unwatch(served.sock)
        with self._lock:
            if served.closing:
                return
            served.busy = True
        self._workers.run(lambda: self._serve(key, served), lambda: self._done(key, served, keep=False))

    def _serve(self, key: tuple[bytes, int], served: _Served) -> None:
        keep = False
        try:
            poll = select.poll()
            poll.register(served.sock, select.POLLIN)
            while True:
                if not self._serve_one(served.sock):
                    break
                if not poll.poll(_LINGER_MS):
                    keep = True
                    break
        except ProtocolError as error:
            log.warn("data connection closed: %s", error)
        except (PathError, OSError) as error:
            log.info("data connection closed: %s", error)
        finally:
            self._done(key, served, keep=keep)

    def _done(self, key: tuple[bytes, int], served: _Served, *, keep: bool) -> None:
        with self._lock:
            served.busy = False
            keep = keep and not served.closing
            if not keep:
                served.closing = True
                if self._served.get(key) is served:
                    del self._served[key]
            waiting, served.when_closed = served.when_closed, []
        if keep:
            self._loop.call_soon(lambda: self._watch(key, served))
        else:
            served.sock.close()
        for then in waiting:
            then()

    def _serve_one(self, sock: socket.socket) -> bool:
        """Answer one request; False when the peer has closed the connection."""
        first = sock.recv(1)
        if not first:
            return False
        patience = Deadline.after(_GRACE_S)
        request = Request.decode(first + tcp_stream.receive_exactly(sock, REQUEST_BYTES - 1, patience))
        deadline = Deadline.after(request.timeout_ms / 1000 + _GRACE_S)
        table = np.empty((request.spans, 3), dtype="<u8")
        tcp_stream.receive(sock, tcp_stream.iovec_of(table), deadline)
        regions, offsets, lengths = decode_spans(table, request.total)
        try:
            with self._regions.lease(regions):
                memory = self._check(request, regions, offsets, lengths)
                self._move(sock, request, memory, deadline)
        except StaleEpochError as error:
            self._refuse(sock, request, Result.STALE, error, deadline)
        except UnknownRegionError as error:
            self._refuse(sock, request, Result.UNKNOWN_REGION, error, deadline)
        except RegionError as error:
            log.warn("data request refused: %s", error)
            self._refuse(sock, request, Result.OUT_OF_RANGE, error, deadline)
        except MemoryFaultError as error:
            log.error("data request refused: %s", error)
            self._refuse(sock, request, Result.FAULT, error, deadline)
        return True

    def _check(self, request: Request, regions: U64, offsets: I64, lengths: I64) -> U64:
        if request.epoch not in (0, self._regions.epoch):
            message = f"planned with epoch {request.epoch}, now {self._regions.epoch}"
            raise StaleEpochError(message)
        memory = iovec.pair(self._view.addresses(regions, offsets, lengths), lengths)
        if not mapped(self._view.edges(distinct(regions))):
            message = "a registered tensor is not mapped at its owner (any more)"
            raise MemoryFaultError(message)
        return memory

    def _move(self, sock: socket.socket, request: Request, memory: U64, deadline: Deadline) -> None:
        reply = Reply(Result.OK).encode()
        try:
            if request.op is Op.READ:
                tcp_stream.send(sock, np.concatenate([tcp_stream.iovec_of(reply), memory]), deadline)
            else:
                tcp_stream.receive(sock, memory, deadline)
                tcp_stream.send(sock, tcp_stream.iovec_of(reply), deadline)
        except PathFaultError as error:
            # The reply has begun, or bytes are under way: all that is left is to end the connection.
            log.error("a data request failed, %s", error)
            raise

    def _refuse(
        self, sock: socket.socket, request: Request, result: Result, error: Exception, deadline: Deadline
    ) -> None:
        reason = str(error).encode()[:MAX_REASON]
        if request.op is Op.WRITE:
            tcp_stream.discard(sock, request.total, deadline)
        reply = Reply(result, len(reason)).encode() + reason
        tcp_stream.send(sock, tcp_stream.iovec_of(reply), deadline)


class _Countdown:
    """Calls ``then`` after ``one`` has been called ``count`` times."""

    def __init__(self, count: int, then: Callable[[], object]) -> None:
        self._left = count + 1
        self._then = then
        self._lock = threading.Lock()
        self.one()

    def one(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._then()
