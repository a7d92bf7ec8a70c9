"""Any peer that can be reached over TCP: persistent data connections.

Bytes go straight between sockets and registered memory, without staging copies.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.memory import iovec
from llm_datadist.memory.regions import RegionError, StaleEpochError, UnknownRegionError
from llm_datadist.paths import tcp_stream
from llm_datadist.paths.base import (
    ConnectionLostError,
    Path,
    PathError,
    PathFaultError,
    PathRejectedError,
    PathTimeoutError,
    PeerGoneError,
    Transport,
)
from llm_datadist.paths.parallel import Checkpoint, run
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire.data import MAX_SPANS, REPLY_BYTES, Op, Reply, Request, Result, encode_spans
from llm_datadist.wire.framing import ProtocolError

if TYPE_CHECKING:
    from llm_datadist.layout.spans import Spans
    from llm_datadist.paths.base import Context, Peer

CONNECTIONS: Final = 2
PARALLEL_BYTES: Final = 1 << 20
_FENCE_S: Final = 0.15
_REFUSALS: Final[dict[Result, type[RegionError | PathFaultError]]] = {
    Result.STALE: StaleEpochError,
    Result.UNKNOWN_REGION: UnknownRegionError,
    Result.OUT_OF_RANGE: RegionError,
    Result.FAULT: PathFaultError,
}


class RequestRefusedError(Exception):
    """The owner refused a request and moved nothing; the connection is in step."""

    def __init__(self, error: RegionError | PathFaultError) -> None:
        super().__init__(str(error))
        self.error = error


class _Connection:
    """One data connection on which this side asks."""

    def __init__(self, number: int, sock: socket.socket) -> None:
        self.number = number
        self.sock = sock
        tcp_stream.tune(sock)

    def exchange(self, op: Op, spans: Spans, deadline: Deadline, epoch: int) -> None:
        """One request and its reply. After an error other than a refusal the connection is out of step."""
        total = spans.total
        timeout_ms = max(1, int(deadline.remaining() * 1000))
        header = Request(op, len(spans), epoch, total, min(timeout_ms, 2**32 - 1)).encode()
        table = encode_spans(spans.regions, spans.offsets, spans.lengths)
        memory = iovec.pair(spans.local, spans.lengths)
        outgoing = [tcp_stream.iovec_of(header), tcp_stream.iovec_of(table)]
        if op is Op.WRITE:
            outgoing.append(memory)
        tcp_stream.send(self.sock, np.concatenate(outgoing), deadline)
        reply = Reply.decode(tcp_stream.receive_exactly(self.sock, REPLY_BYTES, deadline))
        if reply.result is not Result.OK:
            reason = tcp_stream.receive_exactly(self.sock, reply.reason_bytes, deadline)
            raise RequestRefusedError(_REFUSALS[reply.result](reason.decode("utf-8", "replace")))
        if op is Op.READ:
            tcp_stream.receive(self.sock, memory, deadline)


class TcpPath(Path):
    """A small pool of data connections; a large transfer uses several at once."""

    name = "tcp"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Condition()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._opening = 0
        self._closed = False
        self._unfenced: set[int] = set()
        """Connections of failed writes of which the peer has not said yet that it has stopped."""

    def open(self, deadline: Deadline) -> None:
        """Open the connections.

        Raises:
            PathError: the peer cannot be reached.
        """
        for number, sock in self._context.open_data(CONNECTIONS, deadline):
            self._idle.append(_Connection(number, sock))

    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.read``."""
        self._transfer(Op.READ, spans, deadline, epoch)

    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.write``."""
        self._transfer(Op.WRITE, spans, deadline, epoch)

    def _transfer(self, op: Op, spans: Spans, deadline: Deadline, epoch: int) -> None:
        self._settle(deadline)
        checkpoint = Checkpoint(deadline)
        spans = spans.cut()
        shares = iovec.share(spans.lengths, CONNECTIONS if spans.total >= PARALLEL_BYTES else 1)
        parts = [functools.partial(self._part, op, spans[a:b], deadline, epoch, checkpoint) for a, b in shares]
        run(parts, self._context.copiers, checkpoint)

    def _part(self, op: Op, spans: Spans, deadline: Deadline, epoch: int, checkpoint: Checkpoint) -> None:
        connection = self._take(deadline)
        in_step = True
        try:
            for start, stop in iovec.batches(spans.lengths, MAX_SPANS):
                checkpoint()
                in_step = False
                connection.exchange(op, spans[start:stop], deadline, epoch)
                in_step = True
                epoch = 0  # the first request has settled it; from here on the regions alone decide
        except RequestRefusedError as refusal:
            in_step = True
            raise refusal.error from None
        except BaseException as error:  # also Ctrl-C: when it gets to the caller, nothing moves any more
            cause = ConnectionLostError(str(error)) if isinstance(error, ProtocolError) else error
            if op is Op.WRITE and not in_step:
                # The peer may still be storing bytes that are on their way: wait until it has stopped.
                _shut_down(connection)
                quiescent = self._context.fence([connection.number], Deadline.after(_FENCE_S))
                if not quiescent:
                    with self._lock:
                        self._unfenced.add(connection.number)
                if isinstance(cause, PathError):
                    cause.quiescent = quiescent
            if cause is error:
                raise
            raise cause from error
        finally:
            self._give_back(connection, in_step=in_step)

    def _settle(self, deadline: Deadline) -> None:
        """Let nothing follow a failed write before the peer has stopped it: it would overwrite what comes later."""
        with self._lock:
            numbers = sorted(self._unfenced)
        if not numbers:
            return
        if not self._context.fence(numbers, deadline):
            message = "the peer has not confirmed that an earlier write which failed has stopped"
            raise PathTimeoutError(message)
        with self._lock:
            self._unfenced.difference_update(numbers)

    def _take(self, deadline: Deadline) -> _Connection:
        with self._lock:
            while not self._idle and len(self._busy) + self._opening >= CONNECTIONS and not self._closed:
                if not self._lock.wait(deadline.remaining()):
                    message = "the deadline passed while waiting for a free data connection"
                    raise PathTimeoutError(message)
            if self._closed:
                message = "the link was closed"
                raise PeerGoneError(message)
            if self._idle:
                connection = self._idle.pop()
                self._busy.add(connection)
                return connection
            self._opening += 1
        # One was given up after an error; replace it.
        try:
            connection = _Connection(*self._context.open_data(1, deadline)[0])
        finally:
            with self._lock:
                self._opening -= 1
                self._lock.notify()
        with self._lock:
            self._busy.add(connection)
        return connection

    def _give_back(self, connection: _Connection, *, in_step: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            keep = in_step and not self._closed
            if keep:
                self._idle.append(connection)
            self._lock.notify()
        if not keep:
            connection.sock.close()

    def close(self) -> None:
        """See ``Path.close``."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._lock.notify_all()
        for connection in idle:
            connection.sock.close()

    def abort(self) -> None:
        """See ``Path.abort``."""
        with self._lock:
            self._closed = True
            for connection in self._busy:
                _shut_down(connection)
            self._lock.notify_all()

    def describe(self) -> str:
        """See ``Path.describe``."""
        with self._lock:
            count = len(self._idle) + len(self._busy)
        return f"{count} persistent data connections, sendmsg/recvmsg between sockets and registered memory"


def _shut_down(connection: _Connection) -> None:
    with contextlib.suppress(OSError):
        connection.sock.shutdown(socket.SHUT_RDWR)


class Tcp(Transport):
    """Opens data connections next to the control connection."""

    name = "tcp"

    def connect(self, peer: Peer, context: Context, deadline: Deadline) -> Path:
        """See ``Transport.connect``."""
        del peer
        path = TcpPath(context)
        try:
            path.open(deadline)
        except PathError as error:
            path.close()
            message = f"cannot open data connections: {error}"
            raise PathRejectedError(message) from error
        return path
