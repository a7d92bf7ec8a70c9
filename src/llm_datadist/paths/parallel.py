"""Run parts of one transfer at the same time and end together."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

from llm_datadist.paths.base import PathTimeoutError, PeerGoneError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from llm_datadist.net.workers import Workers
    from llm_datadist.utils.deadline import Deadline


class StoppedError(Exception):
    """Another part of the same transfer failed."""


class Checkpoint:
    """What a running transfer looks at between two batches: its deadline and whether it should stop."""

    __slots__ = ("_deadline", "_stop")

    def __init__(self, deadline: Deadline) -> None:
        self._deadline = deadline
        self._stop = threading.Event()

    def stop(self) -> None:
        """Make the other parts end at their next look."""
        self._stop.set()

    def __call__(self) -> None:
        """Raise if the transfer must not go on."""
        if self._stop.is_set():
            raise StoppedError
        if self._deadline.expired():
            message = "the deadline passed"
            raise PathTimeoutError(message)


def run(parts: Sequence[Callable[[], object]], workers: Workers, checkpoint: Checkpoint) -> None:
    """Run all parts, the first one on the calling thread, and return when all have ended.

    Raises:
        the first error of a part, after all of them have ended.
    """

    def guarded(part: Callable[[], object]) -> None:
        try:
            part()
        except BaseException:
            checkpoint.stop()
            raise

    errors: list[BaseException] = []
    futures: list[Future[object]] = []
    try:
        # Extended one by one: those that have been started are waited for even if the next one cannot be.
        futures.extend(workers.submit(functools.partial(guarded, part)) for part in parts[1:])
        guarded(parts[0])
        for future, part in zip(futures, parts[1:], strict=True):
            if future.cancel():  # all workers are busy, perhaps with a peer that is stalled
                guarded(part)
    except BaseException as error:  # noqa: BLE001 - raised below, after the others have ended
        checkpoint.stop()
        errors.append(error)
    for future in futures:
        if not future.cancel():
            _collect(future, errors, checkpoint)
    real = [error for error in errors if not isinstance(error, StoppedError)]
    if not real:
        return
    if isinstance(real[0], CancelledError):
        message = "the engine was finalized during the transfer"
        raise PeerGoneError(message) from real[0]
    raise real[0]


def _collect(future: Future[object], errors: list[BaseException], checkpoint: Checkpoint) -> None:
    """Wait for a part to end, whatever happens meanwhile: Ctrl-C makes it end soon, but is raised only after it has."""
    while True:
        try:
            error = future.exception()
        except CancelledError as cancelled:
            error = cancelled
        except KeyboardInterrupt as interrupt:
            checkpoint.stop()
            errors.insert(0, interrupt)
            continue
        if error is not None:
            errors.append(error)
        return
