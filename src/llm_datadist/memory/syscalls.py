"""The few system calls that the standard library does not offer, through ctypes.

All of them raise ``OSError`` on failure, and all but ``peek`` release the interpreter lock while they run.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final

MAX_IOVECS: Final = 1024
"""Entries that one vectored call takes (UIO_MAXIOV); more is EINVAL."""
MAX_CALL_BYTES: Final = 0x7FFFF000
"""Bytes that one call moves at most (MAX_RW_COUNT); the rest is left for the next call."""

_libc = ctypes.CDLL(None, use_errno=True)
_locked = ctypes.PyDLL(None, use_errno=True)


class Message(ctypes.Structure):
    """``struct msghdr``."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_process_vm_readv = _libc.process_vm_readv
_process_vm_writev = _libc.process_vm_writev
_peek = _locked.process_vm_readv
for _call in (_process_vm_readv, _process_vm_writev, _peek):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    ]
_sendmsg = _libc.sendmsg
_recvmsg = _libc.recvmsg
for _call in (_sendmsg, _recvmsg):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]

_recv = _libc.recv
_recv.restype = ctypes.c_ssize_t
_recv.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_sendmmsg = _libc.sendmmsg
_sendmmsg.restype = ctypes.c_int
_sendmmsg.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int]


def _checked(result: int, name: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def process_vm_readv(pid: int, local: int, remote: int, count: int) -> int:
    """Read from ``pid`` what the ``count`` iovecs at address ``remote`` name into those at ``local``; bytes moved."""
    done: int = _process_vm_readv(pid, local, count, remote, count, 0)
    return done if done >= 0 else _checked(done, "process_vm_readv")


def peek(pid: int, local: int, remote: bytes, count: int) -> int:
    """``process_vm_readv`` for a few bytes, with the interpreter lock held: to get it back may take 5 ms.

    ``local`` is the address of iovecs, ``remote`` are iovecs.
    """
    return _checked(_peek(pid, local, count, remote, count, 0), "process_vm_readv")


def gather(pid: int, room: int, remote: int, count: int) -> int:
    """Read from ``pid`` what the ``count`` iovecs at ``remote`` name into the one iovec at address ``room``; bytes."""
    return _checked(_process_vm_readv(pid, room, 1, remote, count, 0), "process_vm_readv")


def process_vm_writev(pid: int, local: int, remote: int, count: int) -> int:
    """Write what the ``count`` iovecs at address ``local`` name to those at ``remote`` in ``pid``; bytes moved."""
    done: int = _process_vm_writev(pid, local, count, remote, count, 0)
    return done if done >= 0 else _checked(done, "process_vm_writev")


_bare = ctypes.CDLL(None)
bare_process_vm_readv: Any = _bare["process_vm_readv"]
bare_process_vm_writev: Any = _bare["process_vm_writev"]
bare_peek: Any = ctypes.PyDLL(None)["process_vm_readv"]
"""The same, half a microsecond quicker: every argument must be a ctypes value already, and a failure is -1."""
for _call in (bare_process_vm_readv, bare_process_vm_writev, bare_peek):
    _call.restype = ctypes.c_ssize_t


def send_iovecs(fd: int, iovecs: int, count: int, flags: int) -> int:
    """``sendmsg`` of the ``count`` iovecs at address ``iovecs``; bytes taken by the kernel."""
    message = Message(iov=iovecs, iovlen=count)  # it must outlive the call
    return send_message(fd, ctypes.addressof(message), flags)


def send_message(fd: int, message: int, flags: int) -> int:
    """``sendmsg`` of the ``Message`` at an address; bytes taken by the kernel."""
    done: int = _sendmsg(fd, message, flags)
    return done if done >= 0 else _checked(done, "sendmsg")


def send_messages(fd: int, headers: int, count: int, flags: int) -> int:
    """``sendmmsg`` of the ``count`` ``struct mmsghdr`` at address ``headers``; messages begun, each has its own count.

    On a stream that is many ``sendmsg`` in one call: the interpreter lock is taken back only once.
    """
    return _checked(_sendmmsg(fd, headers, count, flags), "sendmmsg")


def receive(fd: int, address: int, size: int, flags: int) -> int:
    """``recv``; unlike that of the socket module it does not begin anew, with its full timeout, after each signal."""
    return _checked(_recv(fd, address, size, flags), "recv")


def receive_iovecs(fd: int, iovecs: int, count: int, flags: int) -> int:
    """``recvmsg`` into the ``count`` iovecs at address ``iovecs``; bytes received, 0 at the end of the stream."""
    message = Message(iov=iovecs, iovlen=count)  # it must outlive the call
    return receive_message(fd, ctypes.addressof(message), flags)


def receive_message(fd: int, message: int, flags: int) -> int:
    """``recvmsg`` into the ``Message`` at an address; bytes received, 0 at the end of the stream."""
    done: int = _recvmsg(fd, message, flags)
    return done if done >= 0 else _checked(done, "recvmsg")
