"""A pool of page-granular allocations in one memfd."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import mmap
import os
import threading


class PoolExhaustedError(Exception):
    """The pool has no free run of pages that is long enough."""


class MemoryPool:
    """``size`` bytes of zeroed memory handed out in whole pages, first fit; thread-safe.

    The memory is a memfd sealed against shrinking, so a process that maps it is never killed by a truncation.
    """

    def __init__(self, size: int, page_shift: int) -> None:
        self._shift = page_shift
        self._pages = size >> page_shift
        length = self._pages << page_shift
        self._fd = os.memfd_create("llm-datadist-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, length)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self._fd, length)
        except BaseException:
            os.close(self._fd)
            raise
        self._anchor = ctypes.c_char.from_buffer(self._map)
        self._base = ctypes.addressof(self._anchor)
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self._pages)]  # (first page, pages), sorted, never adjacent
        self._used: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes in free pages, not necessarily in one run."""
        with self._lock:
            return sum(pages for _, pages in self._free) << self._shift

    def allocate(self, size: int) -> int:
        """Address of ``size`` bytes, rounded up to whole pages.

        Raises:
            PoolExhaustedError: no free run is long enough.
        """
        pages = -(-size >> self._shift)
        with self._lock:
            for index, (first, length) in enumerate(self._free):
                if length >= pages:
                    self._free[index : index + 1] = [(first + pages, length - pages)] if length > pages else []
                    self._used[first] = pages
                    return self._base + (first << self._shift)
        longest = max((pages for _, pages in self._free), default=0) << self._shift
        message = (
            f"no free run of {pages << self._shift} bytes in the memory pool of {self._pages << self._shift} bytes "
            f"(longest free run: {longest}); free caches or make memory_size larger"
        )
        raise PoolExhaustedError(message)

    def free(self, address: int) -> None:
        """Give an allocation back."""
        first = (address - self._base) >> self._shift
        with self._lock:
            pages = self._used.pop(first)
            at = bisect.bisect(self._free, (first, 0))
            if at < len(self._free) and self._free[at][0] == first + pages:
                pages += self._free.pop(at)[1]
            if at and sum(self._free[at - 1]) == first:
                at -= 1
                first, before = self._free.pop(at)
                pages += before
            self._free.insert(at, (first, pages))

    def close(self) -> None:
        """Give everything back to the system; allocations must not be used any more. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            del self._anchor
            with contextlib.suppress(BufferError):
                self._map.close()
