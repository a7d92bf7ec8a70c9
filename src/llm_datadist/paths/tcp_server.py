"""The owner's end of data connections: checks every span against its own regions, then moves bytes."""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.memory import iovec
from llm_datadist.memory.move import MemoryFaultError, mapped, peeker
from llm_datadist.memory.regions import RegionError, RegionView, StaleEpochError, UnknownRegionError
from llm_datadist.net.loop import READ
from llm_datadist.observe.events import Served
from llm_datadist.paths.base import FEW, PathError, PathFaultError, PathTimeoutError
from llm_datadist.paths.tcp_stream import SPIN_S, iovec_of, stream_on
from llm_datadist.utils import log
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire.data import MAX_REASON, REQUEST_BYTES, Op, Reply, Request, Result, decode_few, decode_spans
from llm_datadist.wire.framing import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.memory.regions import RegionTable
    from llm_datadist.net.loop import Loop
    from llm_datadist.net.workers import Workers
    from llm_datadist.observe.recorder import Recorder
    from llm_datadist.paths.tcp_stream import Stream

_LINGER_S: Final = 0.002
"""How long a worker stays with a connection for the next request before it gives it back to the loop."""
_GRACE_S: Final = 0.5
_DENSE_S: Final = 2 * SPIN_S
_LARGE_BYTES: Final = 4 << 20
"""Of a request from which it pays to choose a core for it."""
_FIRST_BYTES: Final = 16 << 10
"""What is read at once where a request begins: all of most."""
_OK: Final = Reply(Result.OK).encode()
_OK_AT: Final = int(iovec_of(_OK)[0, 0])
_MOST_EDGES: Final = 64
"""Groups of regions whose ends are kept at hand."""
_NOT_MAPPED: Final = "a registered tensor is not mapped at its owner (any more)"
MAX_CONNECTIONS: Final = 64
"""Of one link."""


class _Served:
    """One data connection on which the peer asks."""

    def __init__(self, sock: socket.socket, peer: int) -> None:
        self.sock = sock
        self.peer = peer
        self.busy = False
        self.closing = False
        self.when_closed: list[Callable[[], object]] = []


class DataServer:
    """Serves all data connections of an engine with a few threads. ``token`` names the link a connection belongs to."""

    def __init__(self, regions: RegionTable, loop: Loop, workers: Workers, recorder: Recorder) -> None:
        self._recorder = recorder
        self._regions = regions
        self._loop = loop
        self._workers = workers
        self._lock = threading.Lock()
        self._served: dict[tuple[bytes, int], _Served] = {}
        self._ending: dict[tuple[bytes, int], _Served] = {}
        """Given up, with a request that may still run."""
        self._given_up: dict[bytes, set[int]] = {}
        self._closed = False
        self._edges = _Edges()

    def add(self, token: bytes, number: int, sock: socket.socket, peer: int) -> None:
        """Serve a connection of a peer, which is a cluster id, from now on."""
        with self._lock:
            refused = (
                self._closed
                or (token, number) in self._served
                or number in self._given_up.get(token, ())
                or sum(key[0] == token for key in self._served) >= MAX_CONNECTIONS
            )
            if not refused:
                served = self._served[token, number] = _Served(sock, peer)
        if refused:
            log.warn("data connection %d of a link was refused: given up, in use, one too many, or too late", number)
            sock.close()
            return
        self._loop.call_soon(lambda: self._watch((token, number), served))

    def total(self) -> int:
        """How many connections are served."""
        return len(self._served)

    def serves(self, peer: int) -> bool:
        """Whether a connection of a cluster is served, or a request on one that was given up may still run."""
        with self._lock:
            return any(each.peer == peer for each in (*self._served.values(), *self._ending.values()))

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
            # Also those that were given up a moment ago for another reason: a request on them may still run.
            known = self._ending | self._served
            keys = [key for key in known if key[0] == token and (numbers is None or key[1] in numbers)]
            ending = [known[key] for key in keys]
            for key in keys:
                self._ending[key] = known[key]
                self._served.pop(key, None)
        countdown = _Countdown(len(ending), then)
        for key, served in zip(keys, ending, strict=True):
            self._close(served, functools.partial(self._gone, key, countdown.one))

    def _gone(self, key: tuple[bytes, int], then: Callable[[], object]) -> None:
        with self._lock:
            self._ending.pop(key, None)
        then()

    def close(self) -> None:
        """Close all connections; idempotent."""
        with self._lock:
            self._closed = True
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
            stream = stream_on(served.sock)
            inbox = _Inbox(stream)
            while inbox.wait():
                self._serve_one(served, stream, inbox)
            keep = True
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

    def _serve_one(self, served: _Served, stream: Stream, inbox: _Inbox) -> None:
        """Answer one request."""
        patience = Deadline.after(_GRACE_S)
        request = Request.decode(inbox.take(REQUEST_BYTES, patience))
        if not self._recorder.active:
            self._answer(stream, inbox, request)
            return
        status, start_ns = "lost", time.time_ns()
        try:
            status = self._answer(stream, inbox, request).name.lower()
        finally:
            self._recorder.served(
                Served(
                    transfer_id=request.transfer_id,
                    operation=request.op.name.lower(),
                    peer=served.peer,
                    status=status,
                    num_bytes=request.total,
                    start_ns=start_ns,
                    end_ns=time.time_ns(),
                )
            )

    def _answer(self, stream: Stream, inbox: _Inbox, request: Request) -> Result:
        deadline = Deadline.after(request.timeout_ms / 1000 + _GRACE_S)
        table_bytes = request.table_bytes
        tables = inbox.take(table_bytes + request.padding, deadline)[:table_bytes]
        spans = _Few(tables, request, self._edges) if request.spans <= FEW else _Many(tables, request)
        try:
            self._carry_out(stream, inbox, request, spans, deadline)
        except StaleEpochError as error:
            return self._refuse(stream, inbox, request, Result.STALE, error, deadline)
        except UnknownRegionError as error:
            return self._refuse(stream, inbox, request, Result.UNKNOWN_REGION, error, deadline)
        except RegionError as error:
            log.warn("data request refused: %s (transfer %016x)", error, request.transfer_id)
            return self._refuse(stream, inbox, request, Result.OUT_OF_RANGE, error, deadline)
        except MemoryFaultError as error:
            log.error("data request refused: %s (transfer %016x)", error, request.transfer_id)
            return self._refuse(stream, inbox, request, Result.FAULT, error, deadline)
        return Result.OK

    def _carry_out(
        self, stream: Stream, inbox: _Inbox, request: Request, spans: _Few | _Many, deadline: Deadline
    ) -> None:
        regions, lease = self._regions, object()
        try:
            regions.hold(lease, spans.regions)
            if request.epoch not in (0, regions.epoch):
                message = f"planned with epoch {request.epoch}, now {regions.epoch}"
                raise StaleEpochError(message)
            spans.locate(regions.view)
            self._move(stream, inbox, request, spans, deadline)
        finally:
            regions.let_go(lease)

    def _move(self, stream: Stream, inbox: _Inbox, request: Request, spans: _Few | _Many, deadline: Deadline) -> None:
        try:
            with stream.beside_peer() if request.total >= _LARGE_BYTES else contextlib.nullcontext():
                if request.op is Op.READ:
                    spans.send(stream, deadline)
                else:
                    spans.receive(stream, inbox.rest(request.total), deadline)
                    stream.send_bytes(_OK, deadline)
        except PathFaultError as error:
            # The reply has begun, or bytes are under way: all that is left is to end the connection.
            log.error("a data request failed, %s (transfer %016x)", error, request.transfer_id)
            raise

    def _refuse(
        self, stream: Stream, inbox: _Inbox, request: Request, result: Result, error: Exception, deadline: Deadline
    ) -> Result:
        reason = str(error).encode()[:MAX_REASON]
        if request.op is Op.WRITE:
            stream.discard(request.total - len(inbox.rest(request.total)), deadline)
        stream.send_bytes(Reply(result, len(reason)).encode() + reason, deadline)
        return result


class _Inbox:
    """Takes requests off a connection, with a system call each where that is possible.

    It may read beyond a request: what follows is the begin of the next one, or the first bytes of a write (``rest``).
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._buffer = memoryview(bytearray(_FIRST_BYTES))
        self._start = 0
        self._stop = 0
        self._dense = False
        """Whether requests follow each other so closely that it pays not to sleep in between."""

    def wait(self) -> bool:
        """Whether a request begins within a moment.

        Raises:
            PathError: the peer has closed the connection.
        """
        if self._start < self._stop:
            return True
        begin = time.monotonic()
        self._start, self._stop = 0, self._stream.spin_into(self._buffer) if self._dense else 0
        if not self._stop:
            try:
                self._stop = self._stream.receive_into(self._buffer, Deadline(begin + _LINGER_S))
            except PathTimeoutError:
                return False
            self._dense = time.monotonic() - begin < _DENSE_S
        return True

    def take(self, size: int, deadline: Deadline) -> memoryview:
        """The next ``size`` bytes; valid until the next call."""
        if self._stop - self._start < size:
            known = self._buffer[self._start : self._stop]
            room = memoryview(bytearray(max(size, _FIRST_BYTES)))
            room[: len(known)] = known
            self._buffer, self._start, self._stop = room, 0, len(known)
            while self._stop < size:
                self._stop += self._stream.receive_into(room[self._stop :], deadline)
        self._start += size
        return self._buffer[self._start - size : self._start]

    def rest(self, size: int) -> memoryview:
        """Up to ``size`` bytes that have been read already."""
        size = min(size, self._stop - self._start)
        self._start += size
        return self._buffer[self._start - size : self._start]


class _Many:
    """The spans of a request, as arrays."""

    def __init__(self, tables: memoryview, request: Request) -> None:
        self._regions, self._starts, self._offsets, self._lengths = decode_spans(tables, request)
        self.regions = self._regions.tolist()

    def locate(self, view: RegionView) -> None:
        """Check them against the registered regions.

        Raises:
            RegionError: they are not inside.
            MemoryFaultError: the memory is not mapped.
        """
        extent = int(self._offsets.min()), int((self._offsets + self._lengths).max())
        self._side = iovec.Side(view.bases(self._regions, self._starts, extent), self._offsets)
        if not mapped(view.edges(self.regions)):
            raise MemoryFaultError(_NOT_MAPPED)

    def send(self, stream: Stream, deadline: Deadline) -> None:
        """The reply, with the bytes."""
        stream.send(np.concatenate([iovec_of(_OK), self._side.iovecs(self._lengths)]), deadline)

    def receive(self, stream: Stream, begin: memoryview, deadline: Deadline) -> None:
        """Store the bytes, of which ``begin`` has come already."""
        stream.receive(self._side.iovecs(self._lengths), deadline, begin)


class _Edges:
    """Where the regions of small requests begin and end, in order to ask quickly whether they are still mapped."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], Callable[[], int]] = {}
        """By regions, whose ids are never used again."""

    def mapped(self, regions: list[int], view: RegionView) -> bool:
        """Whether both ends of live regions are mapped; True where the system does not let us look."""
        key = tuple(regions)
        peek = self._known.get(key)
        if peek is not None and peek() == 2 * len(key):
            return True
        edges = view.edges(regions)
        if peek is None:
            if len(self._known) >= _MOST_EDGES:
                self._known.clear()
            self._known[key] = peeker(edges)
        return mapped(edges)


class _Few:
    """The spans of a request, as ints."""

    def __init__(self, tables: memoryview, request: Request, edges: _Edges) -> None:
        self._tensors, self._runs = decode_few(tables, request)
        self._total = request.total
        self._edges = edges
        self.regions = [region for region, _ in self._tensors]

    def locate(self, view: RegionView) -> None:
        """See ``_Many.locate``."""
        extent = min([at for at, _ in self._runs]), max([at + length for at, length in self._runs])
        bases = [view.base(region, start, extent) for region, start in self._tensors]
        self._words = [word for base in bases for at, length in self._runs for word in (base + at, length)]
        if not self._edges.mapped(self.regions, view):
            raise MemoryFaultError(_NOT_MAPPED)

    def send(self, stream: Stream, deadline: Deadline) -> None:
        """See ``_Many.send``."""
        stream.send_few([_OK_AT, len(_OK), *self._words], len(_OK) + self._total, deadline)

    def receive(self, stream: Stream, begin: memoryview, deadline: Deadline) -> None:
        """See ``_Many.receive``."""
        stream.receive(np.array(self._words, dtype=np.uint64).reshape(-1, 2), deadline, begin)


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
