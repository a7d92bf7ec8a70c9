"""Copy iovec arrays between this process and another one, or within this one."""

from __future__ import annotations

import collections
import ctypes
import errno
import functools
import os
import struct
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.memory import iovec, syscalls
from llm_datadist.memory.iovec import Side
from llm_datadist.memory.syscalls import MAX_IOVECS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]
    VmCall = Callable[[int, int, int, int], int]

DENIED = frozenset({errno.EPERM, errno.EACCES, errno.ENOSYS})
"""What the kernel answers where process_vm_* is not allowed: another user, a namespace, seccomp, not dumpable."""

_BYTE: Final = ctypes.c_char()
_NOWHERE: Final = (ctypes.c_uint64 * (2 * MAX_IOVECS))(*(ctypes.addressof(_BYTE), 1) * MAX_IOVECS)
_NOWHERE_AT: Final = ctypes.addressof(_NOWHERE)
"""Iovecs of bytes that nobody looks at, all the same one."""
_FAULTS: Final = frozenset({errno.EFAULT, errno.ENOMEM})


class MemoryFaultError(Exception):
    """An address that is registered is not mapped, or not with the access that is needed."""


def move(call: VmCall, pid: int, local: U64, remote: U64) -> None:
    """Move all bytes of two iovec arrays that are cut alike; returns when the last one is in place.

    At most ``MAX_IOVECS`` entries. The arrays may be changed.

    Raises:
        MemoryFaultError: part of the memory is not mapped.
        OSError: the kernel refused (``DENIED``), or the process is gone (ESRCH).
    """
    try:
        done = call(pid, local.ctypes.data, remote.ctypes.data, len(local))
    except OSError as error:
        raise _fault(error, local[0], remote[0], pid) from error
    if done != int(local[:, 1].sum()):
        _resume(call, pid, local, remote, done)


def _resume(call: VmCall, pid: int, local: U64, remote: U64, done: int) -> None:
    """Go on after a short count: the kernel stops without an error at the first entry it cannot finish."""
    here, there = iovec.Cursor(local), iovec.Cursor(remote)
    here.advance(done)
    there.advance(done)
    while here.left:
        address, count = here.window()
        try:
            done = call(pid, address, there.window()[0], count)
        except OSError as error:
            raise _fault(error, local[here.index], remote[here.index], pid) from error
        if not done:
            message = f"process {pid} gave no bytes for {int(remote[here.index, 1])} at {int(remote[here.index, 0]):#x}"
            raise MemoryFaultError(message)
        here.advance(done)
        there.advance(done)


def _fault(error: OSError, local: U64, remote: U64, pid: int) -> Exception:
    if error.errno not in _FAULTS:
        return error
    return MemoryFaultError(
        f"cannot access {int(local[1])} bytes at {int(local[0]):#x} here or at {int(remote[0]):#x} in process {pid}: "
        "registered memory must stay mapped, readable and, as a destination, writable"
    )


def mapped(addresses: Sequence[int]) -> bool:
    """Whether the bytes at these addresses of this process can be read; True where the system does not let us look."""
    for first in range(0, len(addresses), MAX_IOVECS):
        part = addresses[first : first + MAX_IOVECS]
        there = struct.pack(f"{2 * len(part)}Q", *[word for address in part for word in (address, 1)])
        try:
            done = syscalls.peek(os.getpid(), _NOWHERE_AT, there, len(part))
        except OSError as error:
            return error.errno not in _FAULTS
        if done != len(part):
            return False
    return True


def peeker(addresses: Sequence[int]) -> Callable[[], int]:
    """A quick way to ask again and again how many bytes at these addresses, ``MAX_IOVECS`` at most, can be read.

    It counts up to the first that cannot, or is negative, also where the system does not let us look.
    """
    count = len(addresses)
    here = (ctypes.c_uint64 * (2 + count))()  # one iovec, and room for the bytes
    here[0], here[1] = ctypes.addressof(here) + 16, count
    there = (ctypes.c_uint64 * (2 * count))(*[word for address in addresses for word in (address, 1)])
    local, remote = ctypes.pointer(here), ctypes.pointer(there)  # which keep what they point to
    pid, one, all_of_them, none = ctypes.c_int(os.getpid()), ctypes.c_ulong(1), ctypes.c_ulong(count), ctypes.c_ulong()
    return functools.partial(syscalls.bare_peek, pid, local, one, remote, all_of_them, none)


def scatter(data: memoryview, memory: U64) -> None:
    """Copy bytes into the first of the ranges that an iovec array names.

    Raises:
        MemoryFaultError: part of the memory is not mapped.
    """
    ends = np.cumsum(memory[:, 1].astype(np.int64))
    count = int(np.searchsorted(ends, len(data))) + 1
    lengths = memory[:count, 1].astype(np.int64)
    lengths[-1] -= int(ends[count - 1]) - len(data)
    source = np.array([np.frombuffer(data, dtype=np.uint8).ctypes.data], dtype=np.uint64)
    here = Side(np.zeros(1, dtype=np.uint64), memory[:count, 0].astype(np.int64))
    copy(here, Side(source, np.cumsum(lengths) - lengths), lengths)


def copy(target: Side, source: Side, lengths: I64, checkpoint: Callable[[], object] = lambda: None) -> None:
    """Copy byte ranges within this process, the same ones after every base. They must not overlap.

    The kernel copies, so a bad address raises instead of killing the process; where it may not, memmove does.
    ``checkpoint`` is called now and then and may raise to stop.

    Raises:
        MemoryFaultError: part of the memory is not mapped.
    """
    cut = iovec.split_long(lengths)
    if cut is not None:
        lengths, owner, start = cut
        target = Side(target.bases, target.offsets[owner] + start)
        source = Side(source.bases, source.offsets[owner] + start)
    try:
        _move_all(target, source, lengths, checkpoint)
    except OSError as error:
        if error.errno not in DENIED:
            raise
        for part in iovec.parts(len(target.bases), lengths):
            checkpoint()
            move_unchecked(target.iovecs(lengths, part), source.iovecs(lengths, part))


def copy_one(target: U64, source: U64) -> None:
    """As ``copy``, of one range: both iovec arrays have one entry, of the same length. They may be changed.

    Raises:
        MemoryFaultError: part of the memory is not mapped.
    """
    try:
        move(syscalls.process_vm_readv, os.getpid(), target, source)
    except OSError as error:
        if error.errno not in DENIED:
            raise
        move_unchecked(target, source)


def move_unchecked(target: U64, source: U64) -> None:
    """Move two iovec arrays that are cut alike without the kernel: memory that is not mapped ends the process."""
    calls = map(ctypes.memmove, target[:, 0].tolist(), source[:, 0].tolist(), target[:, 1].tolist())
    collections.deque(calls, maxlen=0)


def _move_all(target: Side, source: Side, lengths: I64, checkpoint: Callable[[], object]) -> None:
    pid = os.getpid()
    for part in iovec.parts(len(target.bases), lengths):
        checkpoint()
        move(syscalls.process_vm_readv, pid, target.iovecs(lengths, part), source.iovecs(lengths, part))
