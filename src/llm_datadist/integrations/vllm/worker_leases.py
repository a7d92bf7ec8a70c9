"""The leases of a prefill worker: which requests' blocks are kept for a reader, until when, and how a reader sees it.

Each lease has a slot in an array that readers can read like a cache. It holds the lease's generation as long as the
blocks are kept, and nothing before they may be used for something else. So a reader that finds the generation *after*
it has read the blocks has read the right bytes, and one that does not find it knows that it may have read others.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from llm_datadist.integrations.vllm.orders import Hold, Open

SLOTS: Final = 65536


@dataclasses.dataclass
class _Lease:
    slot: int
    seconds: float = 0.0
    deadline: float | None = None
    """When the blocks are given back in any case; None while the request still runs."""
    readers: int = 0
    """How many have done with it."""
    done: bool = False


class Leases:
    """Thread-safe."""

    def __init__(self) -> None:
        self.generations: npt.NDArray[np.uint64] = np.zeros(SLOTS, np.uint64)
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._over: set[str] = set()

    def open(self, orders: Iterable[Open]) -> None:
        """Requests that will be read have begun."""
        with self._lock:
            for each in orders:
                self.generations[each.slot] = each.generation
                self._leases[each.request] = _Lease(each.slot)

    def close(self, requests: Iterable[str]) -> None:
        """Requests that will not be read."""
        with self._lock:
            for request in requests:
                if (lease := self._leases.pop(request, None)) is not None:
                    self.generations[lease.slot] = 0

    def hold(self, orders: Iterable[Hold]) -> None:
        """Requests have ended, and their blocks are kept."""
        now = time.monotonic()
        with self._lock:
            for each in orders:
                lease = self._leases[each.request]
                lease.seconds, lease.deadline = each.seconds, now + each.seconds
                if lease.done:
                    self._end(each.request)

    def renew(self, requests: Iterable[str]) -> None:
        """Readers still want to read them."""
        now = time.monotonic()
        with self._lock:
            for request in requests:
                lease = self._leases.get(request)
                if lease is not None and lease.deadline is not None:
                    lease.deadline = now + lease.seconds

    def release(self, request: str, readers: int) -> bool:
        """One of so many readers has done with a request; False if its blocks are not kept (any more)."""
        with self._lock:
            lease = self._leases.get(request)
            if lease is None:
                return False
            lease.readers += 1
            if lease.readers >= readers:
                lease.done = True
                self.generations[lease.slot] = 0
                if lease.deadline is not None:
                    self._end(request)
            return True

    def expire(self) -> list[str]:
        """End those whose time is over; which."""
        with self._lock:
            if not self._leases:
                return []
            now = time.monotonic()
            found = [name for name, each in self._leases.items() if each.deadline is not None and each.deadline <= now]
            for request in found:
                self._end(request)
            return found

    @property
    def kept(self) -> bool:
        """Whether blocks of any request are kept, or will be."""
        return bool(self._leases)

    def over(self) -> set[str]:
        """Requests whose blocks are not needed any more; each is given once."""
        with self._lock:
            found, self._over = self._over, set()
            return found

    def _end(self, request: str) -> None:
        self.generations[self._leases.pop(request).slot] = 0
        self._over.add(request)
