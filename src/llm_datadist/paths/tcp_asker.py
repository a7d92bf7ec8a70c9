"""The asking end of data connections, and the small pools in which they wait to be used."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from llm_datadist.memory.regions import RegionError, StaleEpochError, UnknownRegionError
from llm_datadist.paths.base import PathError, PathFaultError, PathTimeoutError, PeerGoneError
from llm_datadist.paths.tcp_stream import stream_on, translate
from llm_datadist.wire.data import REPLY_BYTES, Op, Reply, Request, Result, encode_few, encode_spans
from llm_datadist.wire.framing import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.layout.spans import Spans
    from llm_datadist.paths.base import DataConnector, TensorPairs
    from llm_datadist.utils.deadline import Deadline

_SLICE_S: Final = 0.5
_LONGEST_MS: Final = 2**32 - 1
_REFUSALS: Final[dict[Result, type[RegionError | PathFaultError]]] = {
    Result.STALE: StaleEpochError,
    Result.UNKNOWN_REGION: UnknownRegionError,
    Result.OUT_OF_RANGE: RegionError,
    Result.FAULT: PathFaultError,
}


class RequestRefusedError(Exception):
    """The owner refused a request and moved nothing; the connection is in step unless others are under way."""

    def __init__(self, error: RegionError | PathFaultError) -> None:
        super().__init__(str(error))
        self.error = error


class FewPieces(NamedTuple):
    """What a ``Shortcut`` moves."""

    pairs: TensorPairs
    size: int
    here: Sequence[int]
    there: Sequence[int]

    @property
    def spans(self) -> int:
        """Pieces in all tensors."""
        return len(self.here) * len(self.pairs.bases)

    @property
    def total(self) -> int:
        """Bytes of all pieces."""
        return self.size * self.spans


class Asker:
    """One data connection on which this side asks. For one thread at a time.

    With a request ``under_way`` after an error it is out of step and must be given up.
    """

    def __init__(self, number: int, sock: socket.socket) -> None:
        """Take it over.

        Raises:
            PathError: it is broken already; it has been closed.
        """
        self.number = number
        self.sock = sock
        try:
            self._stream = stream_on(sock)
        except OSError as error:
            sock.close()
            raise translate(error, "before the first byte") from error
        self.under_way: int = 0
        """Requests that are not answered yet."""

    @property
    def worn(self) -> bool:
        """Whether another connection should take its place."""
        return self._stream.worn

    def begin(self, op: Op, spans: Spans, deadline: Deadline, epoch: int) -> None:
        """Send a request, even if the reply to the one before is still to be received (``finish``).

        For a read, what cannot be sent without waiting is left for ``flush``: the owner may wait for us to receive.
        """
        request = Request(
            op, len(spans.bases), len(spans.runs), epoch, spans.total, _milliseconds(deadline), deadline.transfer_id
        )
        tables = encode_spans(spans.regions, spans.starts, spans.runs.remote, spans.runs.lengths)
        data = request.encode() + tables + bytes(request.padding)
        self.under_way += 1
        if op is Op.READ:
            self._stream.post(data)
            return
        self._stream.send_bytes(data, deadline)
        self._stream.send(spans.here.iovecs(spans.runs.lengths), deadline)

    def flush(self, deadline: Deadline) -> None:
        """Send what ``begin`` has left."""
        self._stream.flush(deadline)

    def finish(self, op: Op, spans: Spans, deadline: Deadline) -> None:
        """Receive the reply to the oldest request."""
        self._reply(deadline)
        if op is Op.READ:
            self._stream.receive(spans.here.iovecs(spans.runs.lengths), deadline)
        self.under_way -= 1

    def exchange_few(self, op: Op, few: FewPieces, deadline: Deadline) -> None:
        """One request and its reply, without arrays."""
        (bases, regions, epoch, _), size, here, there = few
        timeout_ms = _milliseconds(deadline)
        request = Request(op, len(bases), len(here), epoch, few.total, timeout_ms, deadline.transfer_id)
        memory = [word for base in bases for at in here for word in (base + at * size, size)]
        self.under_way += 1
        self._stream.send_bytes(encode_few(request, regions, [at * size for at in there], size), deadline)
        if op is Op.WRITE:
            self._stream.send_few(memory, few.total, deadline)
        self._reply(deadline)
        if op is Op.READ:
            self._stream.receive_few(memory, few.total, deadline)
        self.under_way -= 1

    def _reply(self, deadline: Deadline) -> None:
        reply = Reply.decode(self._stream.receive_exactly(REPLY_BYTES, deadline))
        if reply.result is not Result.OK:
            reason = self._stream.receive_exactly(reply.reason_bytes, deadline)
            self.under_way -= 1
            raise RequestRefusedError(_REFUSALS[reply.result](reason.decode("utf-8", "replace")))

    def drain(self, deadline: Deadline) -> None:
        """After a refusal: requests that were sent before it was known are refused for the same reason, as a rule."""
        with contextlib.suppress(PathError, ProtocolError):
            self.flush(deadline)
            while self.under_way:
                try:
                    self._reply(deadline)
                except RequestRefusedError:
                    continue
                return

    def shut_down(self) -> None:
        """Make whoever waits on it, on either side, stop."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


def _milliseconds(deadline: Deadline) -> int:
    return min(max(1, int(deadline.remaining() * 1000)), _LONGEST_MS)


class AskerPool:
    """A few connections to one peer, opened when needed and kept. Thread-safe.

    Who uses one has a ticket, any object. To end the use, also if ``take`` has raised, first take the ticket out of
    ``used``, and see to it that ``give_back`` is called whatever happens: Ctrl-C may come between any two steps of
    Python, but not within the one that takes it out.
    """

    def __init__(self, count: int, open_data: DataConnector) -> None:
        self._count = count
        self._open_data = open_data
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._idle: list[Asker] = []
        self.used: dict[object, Asker | None] = {}
        """By ticket; None while it is being opened."""
        self._closed = False

    def __len__(self) -> int:
        return len(self._idle) + len(self.used)

    def adopt(self, asker: Asker) -> None:
        """Add a connection."""
        self._idle.append(asker)

    def take(self, ticket: object, deadline: Deadline) -> Asker:
        """A connection for one transfer.

        Raises:
            PathError: none became free in time, or none can be opened.
        """
        with self._lock:
            if len(self.used) >= self._count:
                self._wait_for_one(deadline)
            self._check_open()
            self.used[ticket] = asker = self._idle.pop() if self._idle else None
        if asker is None:  # one was given up after an error, or is needed for the first time
            asker = Asker(*self._open_data(1, deadline)[0])
            with self._lock:
                self.used[ticket] = asker
                self._check_open()
        return asker

    def _wait_for_one(self, deadline: Deadline) -> None:
        begun = time.monotonic()
        while len(self.used) >= self._count and not self._closed:
            # In slices: who has given one back may have been interrupted before it could say so.
            if not self._changed.wait(min(deadline.remaining(), _SLICE_S)) and deadline.expired():
                message = "the deadline passed while waiting for a free data connection"
                raise PathTimeoutError(message)
        deadline.queued_s = max(deadline.queued_s, time.monotonic() - begun)

    def _check_open(self) -> None:
        if self._closed:
            message = "the link was closed"
            raise PeerGoneError(message)

    def give_back(self, asker: Asker | None) -> None:
        """Keep a connection that is not used any more; one that is out of step or worn is closed."""
        with self._lock:
            keep = asker is not None and not asker.under_way and not asker.worn and not self._closed
            if asker is not None and keep:
                self._idle.append(asker)
            self._changed.notify()
        if asker is not None and not keep:
            asker.sock.close()

    def close(self) -> None:
        """Close the idle ones, refuse the others when they come back; idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            self._changed.notify_all()
        for asker in idle:
            asker.sock.close()

    def abort(self) -> None:
        """Make running transfers fail soon."""
        with self._lock:
            self._closed = True
            for asker in list(self.used.values()):  # a copy: tickets are taken out without the lock
                if asker is not None:
                    asker.shut_down()
            self._changed.notify_all()
