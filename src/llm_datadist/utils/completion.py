"""The end of work in the background, for every style of waiting: block, ``await``, be called, watch a descriptor."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

T = TypeVar("T")


class Completion(Generic[T]):
    """Ends once, with a result or an exception. Thread-safe; nothing here polls."""

    def __init__(self, future: concurrent.futures.Future[T], foreign: type[Exception] = RuntimeError) -> None:
        """``foreign`` is raised in a forked child, where the end of the work will never be known."""
        self._future = future
        self._foreign = foreign
        self._pid = os.getpid()
        self._signal: _Signal | None = None
        self._lock = threading.Lock()

    def done(self) -> bool:
        """Whether it has ended."""
        self._check_process()
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> T:
        """The result, as soon as there is one; None waits without limit.

        Raises:
            TimeoutError: it has not ended in time; it goes on.
            Exception: that with which it ended.
        """
        self._check_process()
        if not concurrent.futures.wait([self._future], timeout_s).done:
            message = f"it has not ended within {timeout_s} s"
            raise TimeoutError(message)
        return self._future.result()

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once it has ended, on the thread that ends it; at once, on this one, if it has already.

        It should return soon. What it raises is logged by ``concurrent.futures`` and has no effect.
        """
        self._check_process()
        self._future.add_done_callback(lambda _future: callback())

    def __await__(self) -> Generator[object, None, T]:
        import asyncio  # noqa: PLC0415 - only who awaits pays for it

        self._check_process()
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # that loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(ended.set)

        # Not wrap_future: a task that is cancelled while it waits must leave the work alone.
        self.add_done_callback(tell)
        yield from ended.wait().__await__()
        return self._future.result()

    def fileno(self) -> int:
        """A descriptor that is readable from the end on, for select, poll and epoll; made at the first call.

        Do not read or close it: ``close`` does that, or the end of this object.

        Raises:
            OSError: no descriptor is left.
        """
        self._check_process()
        with self._lock:
            signal = self._signal
            if signal is None:
                signal = self._signal = _Signal()
                weakref.finalize(self, signal.close)
                self._future.add_done_callback(lambda _future: signal.give())
            return signal.fileno()

    def close(self) -> None:
        """Give the descriptor of ``fileno`` back; idempotent, no effect on the work."""
        with self._lock:
            if self._signal is not None:
                self._signal.close()

    def _check_process(self) -> None:
        """Before any lock: another thread may have held it at the fork."""
        if os.getpid() != self._pid:
            message = f"the work runs in process {self._pid}, not in its forked child {os.getpid()}: wait for it there"
            raise self._foreign(message)


class _Signal:
    """An eventfd that is given once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        if self._fd < 0:
            message = "the descriptor has been closed"
            raise ValueError(message)
        return self._fd

    def give(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
