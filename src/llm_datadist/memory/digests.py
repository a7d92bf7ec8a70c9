"""Digests of memory: by comparing them two processes know whether they hold the same bytes.

xxh3 from the optional package xxhash. Its 64 bits leave one chance in 2**64 to miss an accident and fit into one
integer of a message; against intent the 128 bits would not help either.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.memory import iovec, syscalls
from llm_datadist.memory.move import DENIED, MemoryFaultError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]

ALGORITHM: Final = "xxh3_64"
INSTALL: Final = "pip install 'llm-datadist[verify]'"
STAGE_BYTES: Final = 1 << 20
"""What is gathered and hashed at a time: it stays in the cache of the core in between."""


def available() -> bool:
    """Whether digests can be computed here: whether xxhash is installed."""
    return importlib.util.find_spec("xxhash") is not None


def digest(memory: U64, checkpoint: Callable[[], object] = lambda: None) -> int:
    """The digest of the byte ranges that an iovec array names, in order; the array is used up.

    The kernel gathers them in a buffer, so a bad address raises instead of ending the process and many small ranges
    cost no step of Python each. ``checkpoint`` is called now and then and may raise to stop. The interpreter lock is
    free while bytes are gathered and hashed.

    Raises:
        MemoryFaultError: part of the memory is not mapped.
    """
    import xxhash  # noqa: PLC0415 - an extra, imported where it is used

    state = xxhash.xxh3_64()
    cursor = iovec.Cursor(memory)
    stage = np.empty(min(cursor.total, STAGE_BYTES), dtype=np.uint8)
    while cursor.left:
        checkpoint()
        count = _gather(cursor, stage)
        state.update(stage[:count].data)
        cursor.advance(count)
    return state.intdigest()


def _gather(cursor: iovec.Cursor, stage: NDArray[np.uint8]) -> int:
    """Copy the next bytes into ``stage``; how many."""
    address, count = cursor.window()
    room = np.array([stage.ctypes.data, min(cursor.left, len(stage))], dtype=np.uint64)
    try:
        done = syscalls.gather(os.getpid(), room.ctypes.data, address, min(count, syscalls.MAX_IOVECS))
    except OSError as error:
        if error.errno in DENIED:
            return _gather_unchecked(address, stage)
        if error.errno not in (errno.EFAULT, errno.ENOMEM):
            raise
        done = 0
    if not done:
        message = f"cannot read registered memory after {cursor.done} of {cursor.total} bytes: it must stay mapped"
        raise MemoryFaultError(message)
    return done


def _gather_unchecked(address: int, stage: NDArray[np.uint8]) -> int:
    """Without the kernel, where it may not: the first range or its begin."""
    base, length = (ctypes.c_uint64 * 2).from_address(address)
    size = min(int(length), len(stage))
    ctypes.memmove(stage.ctypes.data, int(base), size)
    return size
