"""Room for those who have not proved yet that they belong here: a bounded number, each for a bounded time."""

from __future__ import annotations

import functools
import resource
import threading
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.net.loop import Loop, Timer

T = TypeVar("T")
_SHARE: Final = 8
_LEAST: Final = 16


class WaitingRoom(Generic[T]):
    """Of too many guests, the one that has waited longest is turned out. Thread-safe."""

    def __init__(self, loop: Loop, most: int, turn_out: Callable[[T, str], object]) -> None:
        """``turn_out`` gets a guest and the reason; it is called on the loop's thread or on that of ``enter``."""
        self._loop = loop
        self._most = most
        self._turn_out = turn_out
        self._lock = threading.Lock()
        self._guests: dict[T, Timer] = {}

    def enter(self, guest: T, seconds: float) -> None:
        """Wait for ``leave``, at most so long."""
        timer = self._loop.call_later(seconds, functools.partial(self._expire, guest))
        with self._lock:
            crowded = len(self._guests) >= self._most
            oldest = next(iter(self._guests)) if crowded else None
            self._guests[guest] = timer
        if oldest is not None and self.leave(oldest):
            self._turn_out(oldest, "too many connections at once have not introduced themselves")

    def leave(self, guest: T) -> bool:
        """It need not wait any more; whether it was still there."""
        with self._lock:
            timer = self._guests.pop(guest, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    def _expire(self, guest: T) -> None:
        if self.leave(guest):
            self._turn_out(guest, "the peer did not introduce itself in time")


def share_of_descriptors(most: int) -> int:
    """How many connections strangers may hold: ``most``, and at most an eighth of what the process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else min(most, max(_LEAST, soft // _SHARE))
