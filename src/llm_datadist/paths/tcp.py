"""Any peer that can be reached over TCP: persistent data connections.

Bytes go straight between sockets and registered memory, without staging copies.
"""

from __future__ import annotations

import functools
import itertools
import threading
from typing import TYPE_CHECKING, Final, NamedTuple

from llm_datadist.layout.progress import Progress
from llm_datadist.memory import iovec
from llm_datadist.paths.base import (
    FEW,
    ConnectionLostError,
    Path,
    PathError,
    PathRejectedError,
    PathTimeoutError,
    Shortcut,
    Transport,
)
from llm_datadist.paths.parallel import Checkpoint, run
from llm_datadist.paths.tcp_asker import Asker, AskerPool, FewPieces, RequestRefusedError
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire.data import MAX_SPANS, Op
from llm_datadist.wire.framing import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from llm_datadist.layout.spans import Spans
    from llm_datadist.memory.iovec import Part
    from llm_datadist.paths.base import Context, Peer, TensorPairs

CONNECTIONS: Final = 2
"""That large transfers share."""
PARALLEL_BYTES: Final = 8 << 20
"""Below this a second connection gains nothing: one moves as much in the time it takes to wake more threads."""
REQUEST_BYTES: Final = 128 << 20
"""Of one request at most. Large, because its owner may have to wait for the interpreter before each."""
_FENCE_S: Final = 0.15


class TcpPath(Path):
    """A few data connections: a large transfer uses several at once, a small one does not wait for large ones."""

    name = "tcp"

    def __init__(self, context: Context) -> None:
        self._context = context
        self._large = AskerPool(CONNECTIONS, context.open_data)
        self._small = AskerPool(CONNECTIONS, context.open_data)
        self._lock = threading.RLock()
        self._unfenced: set[int] = set()
        """Connections of failed writes of which the peer has not said yet that it has stopped."""

    def open(self, deadline: Deadline) -> None:
        """Open the connections.

        Raises:
            PathError: the peer cannot be reached.
        """
        opened = self._context.open_data(CONNECTIONS + 1, deadline)
        try:
            askers = [Asker(number, sock) for number, sock in opened]
        except PathError:
            for _, sock in opened:
                sock.close()
            raise
        for asker in askers[1:]:
            self._large.adopt(asker)
        self._small.adopt(askers[0])

    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.read``."""
        self._transfer(Op.READ, spans, deadline, epoch)

    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.write``."""
        self._transfer(Op.WRITE, spans, deadline, epoch)

    def shortcut(self, pairs: TensorPairs) -> Shortcut:
        """See ``Path.shortcut``."""
        return _OneExchange(self, pairs)

    def _transfer(self, op: Op, spans: Spans, deadline: Deadline, epoch: int) -> None:
        self._settle(deadline)
        checkpoint = Checkpoint(deadline)
        spans = spans.cut()
        count = CONNECTIONS if spans.total >= PARALLEL_BYTES else 1
        pool = self._large if count > 1 else self._small
        size = min(REQUEST_BYTES, -(-spans.total // count))
        parts = list(iovec.parts(len(spans.bases), spans.runs.lengths, MAX_SPANS, size))
        rest = iter(parts[count:])  # shared: each takes the next one
        progress = Progress(len(spans.bases), spans.runs)

        def work(first: Part) -> None:
            # Each has one of its own: a thread that is slow to start would find that another has asked for all of them.
            requests = (_Request(op, part, spans[part], progress) for part in itertools.chain((first,), rest))
            self._use(op, pool, deadline, lambda asker: _pipeline(asker, requests, deadline, epoch, checkpoint))

        try:
            run([functools.partial(work, part) for part in parts[:count]], self._context.copiers, checkpoint)
        except PathError as error:
            error.progress = progress
            raise

    def exchange_few(self, op: Op, few: FewPieces, deadline: Deadline) -> None:
        """One request and its reply, without arrays."""
        if deadline.expired():
            message = "the deadline passed"
            raise PathTimeoutError(message)
        if self._unfenced:
            self._settle(deadline)
        self._use(op, self._small, deadline, lambda asker: asker.exchange_few(op, few, deadline))

    def _use(self, op: Op, pool: AskerPool, deadline: Deadline, use: Callable[[Asker], None]) -> None:
        """Use a connection for one transfer; what goes wrong on it becomes the error of a path."""
        ticket = object()
        asker: Asker | None = None
        try:
            asker = pool.take(ticket, deadline)
            use(asker)
        except BaseException as error:  # also Ctrl-C: when it gets to the caller, nothing moves any more
            cause: BaseException = error
            if isinstance(error, RequestRefusedError):
                cause = error.error
                if asker is not None:
                    asker.drain(deadline)
            elif isinstance(error, ProtocolError):
                cause = ConnectionLostError(str(error))
            if op is Op.WRITE and asker is not None and asker.under_way:
                # The peer may still be storing bytes that are on their way: wait until it has stopped.
                asker.shut_down()
                quiescent = self._context.fence([asker.number], Deadline.after(_FENCE_S))
                if not quiescent:
                    with self._lock:
                        self._unfenced.add(asker.number)
                if isinstance(cause, PathError):
                    cause.quiescent = quiescent
            if cause is error:
                raise
            raise cause from error
        finally:
            try:
                pool.used.pop(ticket, None)  # in one step: Ctrl-C may come between any two
            finally:
                pool.give_back(asker)

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

    def close(self) -> None:
        """See ``Path.close``."""
        for pool in (self._large, self._small):
            pool.close()

    def abort(self) -> None:
        """See ``Path.abort``."""
        for pool in (self._large, self._small):
            pool.abort()

    def connections(self) -> int:
        """See ``Path.connections``."""
        return len(self._large) + len(self._small)

    def describe(self) -> str:
        """See ``Path.describe``."""
        return (
            f"{self.connections()} persistent data connections, sendmsg/recvmsg between sockets and registered memory"
        )


class _OneExchange(Shortcut):
    """One request and its reply, without arrays."""

    def __init__(self, path: TcpPath, pairs: TensorPairs) -> None:
        super().__init__(path, pairs)
        self._tcp = path

    def read(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline) -> None:
        """See ``Shortcut.read``."""
        few = FewPieces(self._pairs, size, here, there)
        if few.spans > FEW or few.total >= PARALLEL_BYTES:
            super().read(size, here, there, deadline)
        else:
            self._tcp.exchange_few(Op.READ, few, deadline)

    def write(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline) -> None:
        """See ``Shortcut.write``."""
        few = FewPieces(self._pairs, size, here, there)
        if few.spans > FEW or few.total >= PARALLEL_BYTES:
            super().write(size, here, there, deadline)
        else:
            self._tcp.exchange_few(Op.WRITE, few, deadline)


class _Request(NamedTuple):
    """One request of a large transfer."""

    op: Op
    part: Part
    spans: Spans
    progress: Progress
    """Of the whole transfer."""

    def finish(self, asker: Asker, deadline: Deadline) -> None:
        """Receive the reply."""
        try:
            asker.finish(self.op, self.spans, deadline)
        except PathError as error:
            self.progress.mark_begin(self.part, error.moved)
            raise
        self.progress.mark(self.part)


def _pipeline(
    asker: Asker, requests: Iterable[_Request], deadline: Deadline, epoch: int, checkpoint: Checkpoint
) -> None:
    """Ask for all parts, each while the reply to the one before is on its way."""
    asked: _Request | None = None
    for request in requests:
        checkpoint()
        asker.flush(deadline)
        asker.begin(request.op, request.spans, deadline, epoch)
        if asked is not None:
            asked.finish(asker, deadline)
            epoch = 0  # settled; from here on the regions alone decide
        asked = request
    if asked is not None:
        asker.flush(deadline)
        asked.finish(asker, deadline)


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
