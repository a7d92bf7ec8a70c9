"""Run parts of one transfer at the same time and end together."""

from __future__ import annotations

import contextlib
import functools
import threading
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING

from llm_datadist.net.workers import NoThreadError
from llm_datadist.paths.base import PathTimeoutError, PeerGoneError
from llm_datadist.utils.cores import Apart

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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

    apart = Apart()
    errors: list[BaseException] = []
    # Made beforehand: one that was handed over is never lost, even if Ctrl-C comes at that very moment.
    futures: list[Future[object]] = [Future() for _ in parts[1:]]
    try:
        try:
            with contextlib.suppress(NoThreadError):  # then this thread does them all
                for future, part in zip(futures, parts[1:], strict=True):
                    workers.submit(functools.partial(apart.run, functools.partial(guarded, part)), future)
            guarded(parts[0])
            for future, part in zip(futures, parts[1:], strict=True):
                if future.cancel():  # all workers are busy, perhaps with a peer that is stalled
                    guarded(part)
        except BaseException as error:  # noqa: BLE001 - raised below, after the others have ended
            checkpoint.stop()
            errors.append(error)
    finally:  # whatever comes in the middle of that; no call, at whose begin Ctrl-C may come, is outside the loop
        while True:
            try:
                _collect_all(futures, errors, checkpoint)
            except KeyboardInterrupt as interrupt:
                errors.insert(0, interrupt)
                checkpoint.stop()
            else:
                break
    _raise_first(errors)


def _raise_first(errors: list[BaseException]) -> None:
    try:
        real = next((error for error in errors if not isinstance(error, StoppedError)), None)
        if isinstance(real, CancelledError):
            message = "the engine was finalized during the transfer"
            raise PeerGoneError(message) from real
        if real is not None:
            raise real
    finally:
        errors.clear()  # or they would keep the frames alive from which they come, and these them
        real = None


def _collect_all(futures: list[Future[object]], errors: list[BaseException], checkpoint: Checkpoint) -> None:
    """Cancel the parts that have not begun and wait for the others to end."""
    for future in futures:
        if not future.cancel():
            _collect(future, errors, checkpoint)


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
