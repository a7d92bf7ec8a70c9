"""Vectored, blocking transfer between a socket and memory, with the deadline enforced by the kernel.

One ``sendmsg`` or ``recvmsg`` moves up to 1024 memory ranges without a copy in between and without the interpreter
lock.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.memory import iovec, syscalls
from llm_datadist.net.channel import set_timeouts
from llm_datadist.paths.base import ConnectionLostError, PathError, PathFaultError, PathTimeoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llm_datadist.utils.deadline import Deadline

    U64 = NDArray[np.uint64]

BUFFER_BYTES: Final = 4 << 20
_SCRATCH: Final = 256 << 10
_TIMED_OUT: Final = frozenset({errno.EAGAIN, errno.EWOULDBLOCK, errno.EINPROGRESS})


def tune(sock: socket.socket) -> None:
    """Large buffers, no delay for small requests."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)


def send(sock: socket.socket, memory: U64, deadline: Deadline) -> None:
    """Send everything that the iovec array names, which is used up.

    Raises:
        PathError: it could not all be sent; the connection is out of step and must be given up.
    """
    _pump(sock, memory, deadline, sending=True)


def receive(sock: socket.socket, memory: U64, deadline: Deadline) -> None:
    """Fill everything that the iovec array names, which is used up.

    Raises:
        PathError: it could not all be filled; the connection is out of step and must be given up.
    """
    _pump(sock, memory, deadline, sending=False)


def _pump(sock: socket.socket, memory: U64, deadline: Deadline, *, sending: bool) -> None:
    cursor = iovec.Cursor(memory)
    try:
        while cursor.left:
            set_timeouts(sock, deadline.remaining())
            address, count = cursor.window()
            try:
                if sending:
                    done = syscalls.send_iovecs(sock.fileno(), address, count, socket.MSG_NOSIGNAL)
                else:
                    done = syscalls.receive_iovecs(sock.fileno(), address, count, socket.MSG_WAITALL)
            except InterruptedError:  # by a signal, whose handler has run or will run in the main thread
                _check(deadline, cursor)
                continue
            if not done:
                message = "the peer closed the data connection"
                raise ConnectionLostError(message)
            cursor.advance(done)
            _check(deadline, cursor)
    except OSError as error:
        raise translate(error, f"after {cursor.done} of {cursor.total} bytes") from error


def _check(deadline: Deadline, cursor: iovec.Cursor) -> None:
    if cursor.left and deadline.expired():
        message = f"the deadline passed after {cursor.done} of {cursor.total} bytes"
        raise PathTimeoutError(message)


def translate(error: OSError, where: str) -> PathError:
    """The path error for what the kernel said about a data connection."""
    if error.errno in _TIMED_OUT:
        return PathTimeoutError(f"the deadline passed {where}")
    if error.errno == errno.EFAULT:
        return PathFaultError(f"registered memory cannot be accessed ({where}): it must stay mapped")
    return ConnectionLostError(f"data connection lost {where}: {error.strerror}")


def receive_exactly(sock: socket.socket, size: int, deadline: Deadline) -> bytes:
    """``size`` bytes of a header.

    Raises:
        PathError: they did not come.
    """
    data = bytearray(size)
    receive(sock, iovec_of(data), deadline)
    return bytes(data)


def iovec_of(data: bytes | bytearray | NDArray[np.uint64]) -> U64:
    """The iovec array of one buffer, which must outlive it."""
    view = np.frombuffer(data, dtype=np.uint8)
    return np.array([[view.ctypes.data, view.nbytes]], dtype=np.uint64)


def discard(sock: socket.socket, size: int, deadline: Deadline) -> None:
    """Read and forget ``size`` bytes, to stay in step.

    Raises:
        PathError: they did not come.
    """
    scratch = bytearray(min(size, _SCRATCH))
    base = iovec_of(scratch)[0, 0] if size else 0
    while size:
        part = min(size, len(scratch))
        receive(sock, np.array([[base, part]], dtype=np.uint64), deadline)
        size -= part
