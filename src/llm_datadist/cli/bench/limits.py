"""What the machine can do at the very moment: the bare system calls on the same spans, everything prepared beforehand.

Run by the driver as ``python -m llm_datadist.cli.bench.limits KIND``. As many threads and connections as the library
uses by default.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from llm_datadist.cli.bench import cases
from llm_datadist.cli.bench.contestant import Contestant, Owner, serve
from llm_datadist.layout.spans import Runs, merge
from llm_datadist.memory import iovec, syscalls
from llm_datadist.paths.tcp_stream import SAME_HOST_BUFFER_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from llm_datadist.cli.bench.protocol import Offer
    from llm_datadist.cli.bench.results import Case

    I64 = NDArray[np.int64]

_MAX_THREADS: Final = 4
_CONNECTIONS: Final = 2
_PARALLEL_BYTES: Final = 1 << 20
_PARTS_PER_THREAD: Final = 8
_CONNECT_S: Final = 10.0
_GO: Final = b"g"


class Batch(NamedTuple):
    """What one system call moves, on one side."""

    address: int
    """Of the first entry of its iovecs."""
    entries: int
    total: int
    """Bytes."""


class Side:
    """The iovecs of one side, in parts that move at the same time; both sides are cut alike."""

    def __init__(self, case: Case, runs: Runs, offsets: I64, tensors: Sequence[int], parts: int) -> None:
        """Prepare.

        Args:
            case: what is moved.
            runs: the pieces of each tensor, adjacent blocks joined.
            offsets: those of ``runs`` that belong to this side.
            tensors: the addresses of this side.
            parts: at most so many; one if the case is small.
        """
        addresses = (np.array(tensors, dtype=np.int64)[:, None] + offsets[None, :]).reshape(-1)
        lengths = np.tile(runs.lengths, len(tensors))
        if (cut := iovec.split_long(lengths)) is not None:
            lengths, source, start = cut
            addresses = addresses[source] + start
        self._iovecs = iovec.pair(addresses.astype(np.uint64), lengths)
        ends = np.cumsum(lengths)
        count = parts if case.total_bytes >= _PARALLEL_BYTES else 1
        marks = [case.total_bytes * part // count for part in range(1, count)]
        cuts = [0, *(np.searchsorted(ends, marks) + 1).tolist(), len(lengths)]
        self.parts: list[list[Batch]] = [self._batches(lengths, a, b) for a, b in itertools.pairwise(cuts) if a < b]

    def _batches(self, lengths: I64, start: int, stop: int) -> list[Batch]:
        base = self._iovecs.ctypes.data + self._iovecs.strides[0] * start
        return [
            Batch(
                base + self._iovecs.strides[0] * first, last - first, int(lengths[start + first : start + last].sum())
            )
            for first, last in iovec.batches(lengths[start:stop])
        ]


def _runs(case: Case, selection: cases.Selection) -> Runs:
    lengths = np.full(case.blocks, case.block_bytes, dtype=np.int64)
    return merge(selection.local * case.block_bytes, selection.remote * case.block_bytes, lengths)


class Team:
    """Does the parts of a case at the same time, the first one on the calling thread."""

    def __init__(self, parts: list[Callable[[], None]]) -> None:
        self._first, *self._others = parts
        self._pool = ThreadPoolExecutor(max(1, len(self._others)))

    def __call__(self) -> None:
        """Return when all have ended."""
        futures = [self._pool.submit(part) for part in self._others]
        self._first()
        for future in futures:
            future.result()


def _whole(done: int, batch: Batch, name: str) -> None:
    if done != batch.total:
        message = f"{name} moved {done} of {batch.total} bytes"
        raise OSError(message)


class PassiveOwner(Owner):
    """Only has memory."""

    def open(self) -> dict[str, Any]:
        """See ``Owner.open``."""
        return {}


class ProcessVm(Contestant):
    """``process_vm_readv`` and ``process_vm_writev``, 1024 entries a call."""

    def open(self, offer: Offer) -> None:
        """See ``Contestant.open``."""
        runs = _runs(self.case, self.selection)
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        parts = threads * _PARTS_PER_THREAD
        self._local = Side(self.case, runs, runs.local, self.tensors.addresses, parts)
        self._remote = Side(self.case, runs, runs.remote, offer.addresses, parts)
        call = syscalls.process_vm_readv if cases.pulls(self.case) else syscalls.process_vm_writev

        def work() -> None:
            for ours, theirs in self._left:  # shared: each thread takes the next part
                for here, there in zip(ours, theirs, strict=True):
                    _whole(call(offer.pid, here.address, there.address, here.entries), here, call.__name__)

        self._team = Team([work] * min(threads, len(self._local.parts)))

    def move(self) -> None:
        """See ``Contestant.move``."""
        self._left = iter(list(zip(self._local.parts, self._remote.parts, strict=True)))
        self._team()


class SocketsOwner(Owner):
    """Sends, or receives, its part on each connection whenever it is told to."""

    def open(self) -> dict[str, Any]:
        """See ``Owner.open``."""
        runs = _runs(self.case, self.selection)
        self._side = Side(self.case, runs, runs.remote, self.tensors.addresses, _CONNECTIONS)
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return {"port": self._listener.getsockname()[1]}

    def _accept(self) -> None:
        for part in self._side.parts:
            sock, _ = self._listener.accept()
            _tune(sock)
            threading.Thread(target=self._serve, args=(sock, part), daemon=True).start()

    def _serve(self, sock: socket.socket, part: list[Batch]) -> None:
        while sock.recv(1):
            if cases.pulls(self.case):
                _send(sock, part)
            else:
                _receive(sock, part)
                sock.sendall(_GO)


class Sockets(Contestant):
    """``sendmsg`` and ``recvmsg``, 1024 entries a call."""

    def open(self, offer: Offer) -> None:
        """See ``Contestant.open``."""
        runs = _runs(self.case, self.selection)
        self._side = Side(self.case, runs, runs.local, self.tensors.addresses, _CONNECTIONS)
        self._team = Team([self._connected(offer.extra["port"], part) for part in self._side.parts])

    def _connected(self, port: int, part: list[Batch]) -> Callable[[], None]:
        sock = socket.create_connection(("127.0.0.1", port), _CONNECT_S)
        sock.settimeout(None)
        _tune(sock)

        def pull() -> None:
            sock.sendall(_GO)
            _receive(sock, part)

        def push() -> None:
            sock.sendall(_GO)
            _send(sock, part)
            if not sock.recv(1):
                message = "the owner closed the connection"
                raise OSError(message)

        return pull if cases.pulls(self.case) else push

    def move(self) -> None:
        """See ``Contestant.move``."""
        self._team()


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, SAME_HOST_BUFFER_BYTES)


def _send(sock: socket.socket, part: list[Batch]) -> None:
    for batch in part:
        _whole(syscalls.send_iovecs(sock.fileno(), batch.address, batch.entries, socket.MSG_NOSIGNAL), batch, "sendmsg")


def _receive(sock: socket.socket, part: list[Batch]) -> None:
    for batch in part:
        done = syscalls.receive_iovecs(sock.fileno(), batch.address, batch.entries, socket.MSG_WAITALL)
        _whole(done, batch, "recvmsg")


class Memcpy(Contestant):
    """One plain copy of every tensor within this process, by one thread, whatever the direction of the case."""

    @property
    def receives(self) -> bool:
        """See ``Contestant.receives``."""
        return True

    def open(self, offer: Offer) -> None:
        """See ``Contestant.open``."""
        del offer
        self.selection: cases.Selection = cases.Selection.identity(self.case)
        self._source = cases.Tensors(self.case)

    def fill(self, seed: int) -> None:
        """See ``Contestant.fill``."""
        self._source.fill(seed)

    def move(self) -> None:
        """See ``Contestant.move``."""
        self.tensors.copy_from(self._source)


_KINDS: Final[dict[str, tuple[type[Owner], type[Contestant]]]] = {
    "process_vm": (PassiveOwner, ProcessVm),
    "sockets": (SocketsOwner, Sockets),
    "memcpy": (PassiveOwner, Memcpy),
}


if __name__ == "__main__":
    serve(*_KINDS[sys.argv.pop(1)])
