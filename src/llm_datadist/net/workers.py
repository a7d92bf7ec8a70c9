"""Threads for work that may block, started when needed and few."""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Final, TypeVar

from llm_datadist.utils import limits, log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Task = tuple[Future[object], Callable[[], object]]

T = TypeVar("T")
_CLOSED: Final = "the workers are closed"


class NoThreadError(CancelledError):
    """The system gives no thread, and there is none yet: whoever can should do the work on its own."""


class Workers:
    """A bounded pool of daemon threads: unlike an executor's, they never hold up the end of the interpreter."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._lock = threading.RLock()  # signal handlers may transfer, too
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._threads = 0
        self._free = 0
        """Threads without a task, less tasks without a thread."""
        self._closed = False

    def submit(self, work: Callable[[], object], future: Future[object] | None = None) -> Future[object]:
        """Run ``work`` on a worker.

        Who must not lose it, whatever interrupts this call, gives the future: it can be cancelled, or has been begun.

        Raises:
            CancelledError: the pool is closed, or (``NoThreadError``) no thread can be started.
        """
        future = future or Future()
        with self._lock:
            if self._closed:
                raise CancelledError(_CLOSED)
            if self._free <= 0 and self._threads < self._count:
                self._start()
            self._free -= 1
            self._tasks.put((future, work))
        return future

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{self._threads}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:
                raise NoThreadError(limits.with_hint(error)) from error
            return
        self._threads += 1
        self._free += 1

    def each(self, works: Sequence[Callable[[], T]]) -> list[T]:
        """Run all at once and wait for their ends; their results, in order.

        This thread does the first, and all that no worker has begun by then: they may be busy with other calls, whose
        peers are stalled, for longer than this one may take.

        Raises:
            CancelledError: the pool is closed, or gets closed before all have begun. Some may have been run.
        """
        futures: list[Future[Any]] = [Future() for _ in works]
        results: list[T] = []
        try:
            with contextlib.suppress(NoThreadError):  # then this thread does them all
                for future, work in zip(futures[1:], works[1:], strict=True):
                    self.submit(work, future)
            for future, work in zip(futures, works, strict=True):
                mine = future.cancel()
                if mine and self._closed:
                    raise CancelledError(_CLOSED)
                results.append(work() if mine else future.result())
        finally:
            for future in futures:
                future.cancel()
        return results

    def run(self, work: Callable[[], object], dropped: Callable[[], object] = lambda: None) -> None:
        """Run ``work`` on a worker and log what it raises; call ``dropped`` instead if the pool is or gets closed."""

        def guarded() -> None:
            try:
                work()
            except Exception:  # noqa: BLE001 - nobody waits for the result
                log.get_logger().exception("unexpected error in a worker thread")

        try:
            future = self.submit(guarded)
        except CancelledError as error:
            if isinstance(error, NoThreadError):
                log.warn("work for the threads %s is refused: %s", self._name, error)
            dropped()
        else:
            future.add_done_callback(lambda ended: dropped() if ended.cancelled() else None)

    def close(self) -> None:
        """Take no more work; what runs is finished, what waits is dropped. Does not wait. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(queue.Empty):  # workers go on taking tasks meanwhile
                while (task := self._tasks.get_nowait()) is not None:
                    task[0].cancel()
            for _ in range(self._threads):
                self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001 - whoever holds the future gets it
                    future.set_exception(error)
            del task, future, work
            with self._lock:
                self._free += 1
