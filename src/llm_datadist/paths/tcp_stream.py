"""Vectored, blocking transfer between a socket and memory, with the deadline enforced by the kernel.

Bytes go straight between the socket and up to 1024 memory ranges a system call, without the interpreter lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import socket
import struct
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.memory import iovec, syscalls
from llm_datadist.memory.move import MemoryFaultError, scatter
from llm_datadist.memory.syscalls import MAX_IOVECS
from llm_datadist.net.security import tls_of
from llm_datadist.paths.base import FEW, ConnectionLostError, PathError, PathFaultError, PathTimeoutError
from llm_datadist.utils import cores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from llm_datadist.utils.deadline import Deadline

    U64 = NDArray[np.uint64]

SAME_HOST_BUFFER_BYTES: Final = 208 << 10
"""Of a connection within one host: what is under way stays in the processor's cache. Measured on 2 cores with 2
connections and 256 KiB blocks: 7.5 GB/s, with 4 MiB 5.0. Between hosts the kernel sizes them as it finds best."""
SPIN_S: Final = 100e-6
"""How long a thread looks for an answer before it sleeps: to wake it on another core takes tens of microseconds."""
_ENOUGH_CORES: Final = 4
"""One for each end of the two connections that a large transfer uses: then the system may place the threads."""
_SO_INCOMING_CPU: Final = 49
"""Python's ``socket`` has it from 3.11 on, its types not even then."""
_MOST_SKIPPED: Final = 64
_SCRATCH: Final = 256 << 10
_SHORTEST_S: Final = 0.001
_TIMED_OUT: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINPROGRESS})
_NOTHING: Final = memoryview(b"")
_TIMEVAL: Final = struct.Struct("ll")


class Stream:
    """One end of a data connection. For one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        """Tune it.

        Raises:
            OSError: it is broken already.
        """
        self.sock = sock
        self._fd = sock.fileno()
        self._limits: dict[int, float] = {}
        self._penalty = 0
        """How many spins to leave out after the next one in vain: where cores are scarce, they hold up the peer."""
        self._to_skip = 0
        self._unsent = memoryview(b"")
        self._few = ctypes.create_string_buffer(16 * (FEW + 1))
        """Iovecs of what ``send_few`` and ``receive_few`` move: a header and few ranges."""
        self._message = syscalls.Message(iov=ctypes.addressof(self._few))
        self._message_at = ctypes.addressof(self._message)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._same_host = sock.getsockname()[0] == sock.getpeername()[0]
        if self._same_host:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, SAME_HOST_BUFFER_BYTES)

    def limit(self, option: int, seconds: float) -> None:
        """Let blocking calls end after about as long, never longer; ``option`` is SO_RCVTIMEO or SO_SNDTIMEO.

        Whole powers of two, so that the next call with a similar deadline need not set it again.
        """
        seconds = max(seconds, _SHORTEST_S)
        set_to = self._limits.get(option, 0.0)
        if not set_to <= seconds < 2 * set_to:
            rounded = math.ldexp(1.0, math.frexp(seconds)[1] - 1)
            self.sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(rounded), int(rounded % 1 * 1e6)))
            self._limits[option] = rounded

    def beside_peer(self) -> contextlib.AbstractContextManager[None]:
        """Run on the core of the peer's thread meanwhile, if that is on this host and cores are scarce.

        Where two connections have two cores, each pair of threads, of which one sends what the other receives, does
        best on one of them: what is under way stays in its cache, and no thread has to be woken on another core.
        """
        if not self._same_host:
            return contextlib.nullcontext()
        core = self.sock.getsockopt(socket.SOL_SOCKET, _SO_INCOMING_CPU)
        return cores.bound(lambda permitted: {core} if len(permitted) < _ENOUGH_CORES else set())

    @property
    def worn(self) -> bool:
        """Whether the connection should be replaced when it is not in use."""
        return False

    def post(self, data: bytes) -> None:
        """Send what can be sent without waiting; the rest is left for ``flush``.

        Raises:
            PathError: the connection is broken.
        """
        self._unsent = memoryview(data)
        try:
            self._unsent = self._unsent[self.sock.send(data, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass
        except OSError as error:
            raise translate(error, "before the first byte") from error

    def flush(self, deadline: Deadline) -> None:
        """Send what ``post`` has left.

        Raises:
            PathError: it could not all be sent; the connection is out of step and must be given up.
        """
        if self._unsent:
            Stream.send_bytes(self, self._unsent, deadline)
            self._unsent = memoryview(b"")

    def send_bytes(self, data: bytes | memoryview, deadline: Deadline) -> None:
        """Send a header.

        Raises:
            PathError: it could not all be sent; the connection is out of step and must be given up.
        """
        try:
            done = self.sock.send(data, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            done = 0
        except OSError as error:
            raise translate(error, "before the first byte") from error
        if done < len(data):
            rest = memoryview(data)[done:]  # not a copy of the bytes, which nobody would keep
            self._pump(iovec.Cursor(iovec_of(rest)), deadline, socket.SO_SNDTIMEO)

    def send(self, memory: U64, deadline: Deadline) -> None:
        """Send everything that the iovec array names, which is used up.

        Raises:
            PathError: it could not all be sent; the connection is out of step and must be given up.
        """
        self._pump(iovec.Cursor(memory), deadline, socket.SO_SNDTIMEO)

    def receive(self, memory: U64, deadline: Deadline, begin: memoryview = _NOTHING) -> None:
        """Fill everything that the iovec array names, which is used up; ``begin`` are bytes of it that came already.

        Raises:
            PathError: it could not all be filled; the connection is out of step and must be given up.
        """
        cursor = iovec.Cursor(memory)
        if begin:
            try:
                scatter(begin, memory)
            except MemoryFaultError as error:
                raise PathFaultError(str(error)) from error
            cursor.advance(len(begin))
        self._pump(cursor, deadline, socket.SO_RCVTIMEO)

    def send_few(self, words: Sequence[int], total: int, deadline: Deadline) -> None:
        """``send`` of few ranges: address, length, address, length, ..., in all ``total`` bytes."""
        self._pump_few(words, total, deadline, socket.SO_SNDTIMEO)

    def receive_few(self, words: Sequence[int], total: int, deadline: Deadline) -> None:
        """``receive`` into few ranges, as ``send_few``."""
        self._pump_few(words, total, deadline, socket.SO_RCVTIMEO)

    def receive_into(self, room: memoryview, deadline: Deadline) -> int:
        """At least one byte of what the peer has sent; the count.

        Raises:
            PathError: nothing came.
        """
        address = ctypes.addressof(ctypes.c_char.from_buffer(room))
        while True:
            self.limit(socket.SO_RCVTIMEO, deadline.remaining())
            try:
                done = syscalls.receive(self._fd, address, len(room), 0)
            except (BlockingIOError, InterruptedError) as error:
                if deadline.expired():
                    message = "the deadline passed before the first byte"
                    raise PathTimeoutError(message) from error
                continue
            except OSError as error:
                raise translate(error, "before the first byte") from error
            if not done:
                raise _closed()
            return done

    def spin_into(self, room: memoryview) -> int:
        """Bytes that come within ``SPIN_S``, looked for without sleeping; 0 if none do, as happened a moment ago.

        Raises:
            PathError: the peer has closed the connection, or it is broken.
        """
        if self._to_skip:
            self._to_skip -= 1
            return 0
        end = time.monotonic() + SPIN_S
        while True:
            try:
                done = self.sock.recv_into(room, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                if time.monotonic() >= end:
                    self._to_skip = self._penalty = min(2 * self._penalty + 1, _MOST_SKIPPED)
                    return 0
            except OSError as error:
                raise translate(error, "before the first byte") from error
            else:
                if not done:
                    raise _closed()
                self._penalty = 0
                return done

    def receive_exactly(self, size: int, deadline: Deadline) -> bytes:
        """``size`` bytes of a header.

        Raises:
            PathError: they did not come.
        """
        data = bytearray(size)
        room = memoryview(data)
        room = room[self.spin_into(room) :]
        while room:
            room = room[self.receive_into(room, deadline) :]
        return bytes(data)

    def discard(self, size: int, deadline: Deadline) -> None:
        """Read and forget ``size`` bytes, to stay in step.

        Raises:
            PathError: they did not come.
        """
        scratch = memoryview(bytearray(min(size, _SCRATCH)))
        while size:
            size -= self.receive_into(scratch[:size], deadline)

    def _pump_few(self, words: Sequence[int], total: int, deadline: Deadline, option: int) -> None:
        struct.pack_into(f"{len(words)}Q", self._few, 0, *words)
        self._message.iovlen = len(words) // 2
        self.limit(option, deadline.remaining())
        try:
            if option == socket.SO_RCVTIMEO:
                done = syscalls.receive_message(self._fd, self._message_at, socket.MSG_WAITALL)
            else:
                done = syscalls.send_message(self._fd, self._message_at, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            done = 0
        except OSError as error:
            raise translate(error, "before the first byte") from error
        else:
            if not done:
                raise _closed()
        if done != total:
            cursor = iovec.Cursor(np.array(words, dtype=np.uint64).reshape(-1, 2))
            cursor.advance(done)
            self._pump(cursor, deadline, option)

    def _pump(self, cursor: iovec.Cursor, deadline: Deadline, option: int) -> None:
        while cursor.left:
            self.limit(option, deadline.remaining())
            try:
                done = self._move(*cursor.window(), option)
            except (BlockingIOError, InterruptedError):
                # The limit was rounded down; or a signal, whose handler has run or will run in the main thread.
                pass
            except OSError as error:
                raise _at(cursor, translate(error, _where(cursor))) from error
            else:
                if not done:
                    raise _at(cursor, _closed())
                cursor.advance(done)
            if cursor.left and deadline.expired():
                raise _at(cursor, PathTimeoutError(f"the deadline passed {_where(cursor)}"))

    def _move(self, address: int, count: int, option: int) -> int:
        if option == socket.SO_RCVTIMEO:
            return syscalls.receive_iovecs(self._fd, address, min(count, MAX_IOVECS), socket.MSG_WAITALL)
        if count <= MAX_IOVECS:
            return syscalls.send_iovecs(self._fd, address, count, socket.MSG_NOSIGNAL)
        firsts = np.arange(0, count, MAX_IOVECS, dtype=np.uint64)
        headers = np.zeros((len(firsts), 8), dtype=np.uint64)  # struct mmsghdr
        headers[:, 2] = np.uint64(address) + firsts * np.uint64(16)
        headers[:, 3] = np.minimum(np.uint64(count) - firsts, np.uint64(MAX_IOVECS))
        begun = syscalls.send_messages(self._fd, headers.ctypes.data, len(headers), socket.MSG_NOSIGNAL)
        return int((headers[:begun, 7] & np.uint64(0xFFFFFFFF)).sum())


def stream_on(sock: socket.socket) -> Stream:
    """One end of a data connection, with TLS if the connection has it.

    Raises:
        OSError: it is broken already.
    """
    tls = tls_of(sock)
    if tls is None:
        return Stream(sock)
    from llm_datadist.paths.tls_stream import TlsStream  # noqa: PLC0415 - only where it is used

    return TlsStream(sock, tls)


def _where(cursor: iovec.Cursor) -> str:
    return f"after {cursor.done} of {cursor.total} bytes"


def _at(cursor: iovec.Cursor, error: PathError) -> PathError:
    error.moved = cursor.done
    return error


def _closed() -> ConnectionLostError:
    return ConnectionLostError("the peer closed the data connection")


def translate(error: OSError, where: str) -> PathError:
    """The path error for what the kernel said about a data connection."""
    if error.errno in _TIMED_OUT:
        return PathTimeoutError(f"the deadline passed {where}")
    if error.errno == errno.EFAULT:
        return PathFaultError(f"registered memory cannot be accessed ({where}): it must stay mapped")
    return ConnectionLostError(f"data connection lost {where}: {error.strerror}")


def iovec_of(data: bytes | bytearray | memoryview | NDArray[np.uint64]) -> U64:
    """The iovec array of one buffer, which must outlive it."""
    view = np.frombuffer(data, dtype=np.uint8)
    return np.array([[view.ctypes.data, view.nbytes]], dtype=np.uint64)
