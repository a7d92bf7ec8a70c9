"""The one background thread of an engine: sockets that became ready, and timers.

Callbacks run on that thread and must not block; blocking work goes to ``Workers``.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import os
import selectors
import threading
import time
from typing import TYPE_CHECKING, Final, Protocol

from llm_datadist.utils import log

if TYPE_CHECKING:
    from collections.abc import Callable

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
_LONGEST_S: Final = 3600.0  # the system call ends at about 2**31 ms


class HasFileno(Protocol):
    """A socket, or whatever else can be watched."""

    def fileno(self) -> int:
        """Its descriptor; -1 once it is closed."""


class Timer:
    """A pending ``call_later``; ``cancel`` is idempotent."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        """Do not call it."""
        self.callback = None


class Loop:
    """An event loop on its own daemon thread. Every method may be called from any thread."""

    def __init__(self, name: str) -> None:
        """Start it.

        Raises:
            OSError: the system gives no descriptors.
            RuntimeError: it gives no thread.
        """
        self._lock = threading.Lock()
        self._calls: list[Callable[[], object]] = []
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._closed = False
        self.ended: bool = False
        """Whether its thread runs nothing any more."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        with contextlib.ExitStack() as undo:
            self._selector = undo.enter_context(selectors.DefaultSelector())
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake_fd)
            self._selector.register(self._wake_fd, READ, None)
            self._thread.start()
            undo.pop_all()

    def in_loop(self) -> bool:
        """Whether the caller runs on the loop's thread."""
        return threading.get_ident() == self._thread.ident

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` on the loop's thread; at once, by the caller, if that has ended.

        Nothing is left to do then but to close what came too late.
        """
        with self._lock:
            if not self.ended:
                self._calls.append(callback)
                if not self._closed:
                    os.eventfd_write(self._wake_fd, 1)
                return
        guarded(callback)

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        """Run ``callback`` on the loop's thread after ``seconds``."""
        timer = Timer(callback)
        with self._lock:
            heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
            if not self._closed:
                os.eventfd_write(self._wake_fd, 1)
        return timer

    def watch(self, sock: HasFileno, events: int, callback: Callable[[int], object]) -> bool:
        """Call ``callback(ready_events)`` whenever ``sock`` is ready. Loop thread only.

        False if the loop has ended: nobody watches.
        """
        if self.ended:
            return False
        if sock.fileno() in self._selector.get_map():
            self._selector.modify(sock, events, callback)
        else:
            self._selector.register(sock, events, callback)
        return True

    def unwatch(self, sock: HasFileno) -> None:
        """Stop watching; does nothing for a socket that is not watched. Loop thread only."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(sock)

    def close(self) -> None:
        """Stop the thread after the calls that are queued already; idempotent, waits at most two seconds."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wake_fd, 1)
        if not self.in_loop():
            self._thread.join(2.0)

    def _run(self) -> None:
        while True:
            with self._lock:
                calls, self._calls = self._calls, []
                if self._closed and not calls:
                    self.ended = True
                    break
                timeout = self._timeout() if not calls else 0
            for call in calls:
                guarded(call)
            for key, events in self._selector.select(timeout):
                if key.fd == self._wake_fd:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
                else:
                    guarded(functools.partial(key.data, events))
            self._run_timers()
        self._selector.close()
        with self._lock:
            os.close(self._wake_fd)

    def _timeout(self) -> float | None:
        if self._closed:
            return 0
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        return min(max(0.0, self._timers[0][0] - time.monotonic()), _LONGEST_S) if self._timers else None

    def _run_timers(self) -> None:
        while True:
            with self._lock:
                if not self._timers or self._timers[0][0] > time.monotonic():
                    return
                timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                guarded(timer.callback)


def guarded(callback: Callable[[], object]) -> None:
    """Call it and log what it raises: one bad callback must not stop the others."""
    try:
        callback()
    except Exception:  # noqa: BLE001 - one bad callback must not stop the loop for every link
        log.get_logger().exception("unexpected error in the background thread")
