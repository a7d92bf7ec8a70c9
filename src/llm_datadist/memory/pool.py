"""A pool of page-granular allocations in one memfd."""

from __future__ import annotations

import bisect
import threading
from typing import TYPE_CHECKING

from llm_datadist.memory import huge_pages, shared

if TYPE_CHECKING:
    from collections.abc import Iterable


class PoolExhaustedError(Exception):
    """The pool has no free run of pages that is long enough."""


class MemoryPool:
    """``size`` bytes of zeroed memory handed out in whole pages, first fit; thread-safe.

    The memory is a memfd sealed against shrinking, so a process that maps it is never killed by a truncation. It is
    mapped at the boundary of a huge page.
    """

    def __init__(self, size: int, page_shift: int) -> None:
        self._shift = page_shift
        self._pages = size >> page_shift
        self._length = length = self._pages << page_shift
        self.area: shared.Area = shared.create("llm-datadist-pool", length)
        """Its memory, for processes that map it."""
        self._base = self.area.base
        self._open = True
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self._pages)]  # (first page, pages), sorted, never adjacent
        self._used: dict[int, int] = {}
        self._advised: set[int] = set()  # huge pages by number; they stay when allocations come and go

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

    def advise(self, addresses: Iterable[int]) -> huge_pages.Advice:
        """Put huge pages under allocations, where that was not tried before; takes bounded time, never raises.

        Touching them for the first time would cost more, 4 KiB page by 4 KiB page. What else lies in these huge pages
        of the pool gets them, too.
        """
        page = huge_pages.page_size() or self._length  # any number does where there are none
        touched: set[int] = set()
        with self._lock:
            for address in addresses:
                start = address - self._base
                end = start + (self._used[start >> self._shift] << self._shift)
                touched.update(range(start // page, -(-end // page)))
            fresh = touched - self._advised
            self._advised |= fresh
        starts = (self._base + number * page for number in fresh)
        ranges = [(start, min(start + page, self._base + self._length)) for start in starts]
        advice = huge_pages.advise(ranges, populate=True)
        if advice.outcome is huge_pages.Outcome.OUT_OF_TIME:
            with self._lock:
                self._advised -= fresh  # the next allocation goes on; what is done costs it next to nothing
        return advice

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
        if self._open:
            self._open = False
            shared.release(self.area)
