"""Threads for work that may block, started when needed and few."""

from __future__ import annotations

from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TYPE_CHECKING

from llm_datadist.utils import log

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future


class Workers:
    """A bounded pool of threads; ``run`` is for callbacks whose result nobody waits for."""

    def __init__(self, name: str, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    def submit(self, work: Callable[[], object]) -> Future[object]:
        """Run ``work`` on a worker.

        Raises:
            CancelledError: the pool is closed.
        """
        try:
            return self._pool.submit(work)
        except RuntimeError as error:
            raise CancelledError(str(error)) from error

    def run(self, work: Callable[[], object]) -> bool:
        """Run ``work`` on a worker and log what it raises; False when the pool is closed."""

        def guarded() -> None:
            try:
                work()
            except Exception:  # noqa: BLE001 - nobody waits for the result
                log.get_logger().exception("unexpected error in a worker thread")

        try:
            self._pool.submit(guarded)
        except RuntimeError:
            return False
        return True

    def close(self) -> None:
        """Take no more work; what runs is finished, what waits is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)
