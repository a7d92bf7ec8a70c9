"""Copy iovec arrays between this process and another one, or within this one."""

from __future__ import annotations

import collections
import ctypes
import errno
import os
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist.memory import iovec, syscalls

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]
    VmCall = Callable[[int, int, int, int], int]

DENIED = frozenset({errno.EPERM, errno.EACCES, errno.ENOSYS})
"""What the kernel answers where process_vm_* is not allowed: another user, a namespace, seccomp, not dumpable."""


class MemoryFaultError(Exception):
    """An address that is registered is not mapped, or not with the access that is needed."""


def move(call: VmCall, pid: int, local: U64, remote: U64, checkpoint: Callable[[], object]) -> None:
    """Move all bytes of two iovec arrays that are cut alike; returns when the last one is in place.

    ``checkpoint`` is called before each batch of at most 64 MiB and may raise to stop. The arrays may be changed.

    Raises:
        MemoryFaultError: part of the memory is not mapped.
        OSError: the kernel refused (``DENIED``), or the process is gone (ESRCH).
    """
    base_local, base_remote = local.ctypes.data, remote.ctypes.data
    for start, stop in iovec.batches(local[:, 1].astype(np.int64)):
        checkpoint()
        count = stop - start
        try:
            done = call(pid, base_local + 16 * start, base_remote + 16 * start, count)
        except OSError as error:
            raise _fault(error, local[start], remote[start], pid) from error
        if done != int(local[start:stop, 1].sum()):
            _resume(call, pid, local[start:stop], remote[start:stop], done)


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
    if error.errno not in (errno.EFAULT, errno.ENOMEM):
        return error
    return MemoryFaultError(
        f"cannot access {int(local[1])} bytes at {int(local[0]):#x} here or at {int(remote[0]):#x} in process {pid}: "
        "registered memory must stay mapped, readable and, as a destination, writable"
    )


def mapped(addresses: U64) -> bool:
    """Whether the bytes at these addresses of this process can be read; True where the system does not let us look."""
    count = len(addresses)
    target = np.zeros(count, dtype=np.uint8)
    ones = np.ones(count, dtype=np.int64)
    here = iovec.pair(np.uint64(target.ctypes.data) + np.arange(count, dtype=np.uint64), ones)
    try:
        move(syscalls.process_vm_readv, os.getpid(), here, iovec.pair(addresses, ones), lambda: None)
    except MemoryFaultError:
        return False
    except OSError:
        return True
    return True


def copy(destinations: U64, sources: U64, lengths: I64, checkpoint: Callable[[], object] = lambda: None) -> None:
    """Copy spans within this process. Spans of one call must not overlap.

    The kernel copies, so a bad address raises instead of killing the process; where it may not, memmove does.
    ``checkpoint`` is called now and then and may raise to stop.

    Raises:
        MemoryFaultError: part of the memory is not mapped.
    """
    cut = iovec.split_long(lengths)
    if cut is not None:
        lengths, owner, start = cut
        destinations = destinations[owner] + start.astype(np.uint64)
        sources = sources[owner] + start.astype(np.uint64)
    try:
        move(
            syscalls.process_vm_readv,
            os.getpid(),
            iovec.pair(destinations, lengths),
            iovec.pair(sources, lengths),
            checkpoint,
        )
    except OSError as error:
        if error.errno not in DENIED:
            raise
        checkpoint()
        calls = map(ctypes.memmove, destinations.tolist(), sources.tolist(), lengths.tolist())
        collections.deque(calls, maxlen=0)
