"""Between the engine and its observers. While there are none, a transfer pays for one look."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from llm_datadist.observe.events import SUCCESS, Fallback, Phase, Step, Transfer
from llm_datadist.observe.metrics import Metrics
from llm_datadist.utils import log

if TYPE_CHECKING:
    from types import TracebackType

    from llm_datadist.observe.events import FallbackReason, Observer, Served
    from llm_datadist.utils.deadline import Deadline

_OTHER: Final = "LLM_FAILED"


class Watch:
    """One transfer that is being observed: a context that covers all of it. For one thread."""

    active = True

    def __init__(self, recorder: Recorder, deadline: Deadline, operation: str, peer: int) -> None:
        self._recorder = recorder
        self._deadline = deadline
        self._operation = operation
        self._peer = peer
        self._path = ""
        self._bytes = 0
        self._phase: Phase | None = None
        self._steps: list[Step] = []
        self._fallbacks: list[Fallback] = []
        # Wall-clock times that only go forward: what a trace viewer can put beside those of another process.
        self._offset = time.time_ns() - time.monotonic_ns()
        self._start = self._since = time.monotonic_ns()

    def enter(self, phase: Phase) -> None:
        """The transfer begins with this, and ends what it did before."""
        now = time.monotonic_ns()
        self._end_step(now)
        self._phase, self._since = phase, now

    def over(self, path: str, num_bytes: int) -> None:
        """It moves so many bytes, over this path."""
        self._path, self._bytes = path, num_bytes

    def leave(self, path: str, reason: FallbackReason) -> None:
        """It goes on over another path than this one."""
        self._fallbacks.append(Fallback(path, reason))

    def _end_step(self, now: int) -> None:
        if self._phase is None:
            return
        start, end = self._since + self._offset, now + self._offset
        if self._phase is Phase.COPY:
            self._steps += _copying(start, end, self._deadline)
        else:
            self._steps.append(Step(self._phase, start, end))

    def __enter__(self) -> Watch:  # noqa: PYI034 - typing.Self is newer than Python 3.10
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = time.monotonic_ns()
        self._end_step(now)
        status = SUCCESS if error is None else status_of(error)
        self._recorder.transfer(
            Transfer(
                transfer_id=self._deadline.transfer_id,
                operation=self._operation,
                peer=self._peer,
                path=self._path,
                status=status,
                num_bytes=self._bytes,
                start_ns=self._start + self._offset,
                end_ns=now + self._offset,
                steps=tuple(self._steps),
                fallbacks=tuple(self._fallbacks),
            )
        )


class _NoWatch(Watch):
    """Nobody observes."""

    active = False

    def __init__(self) -> None:
        pass

    def enter(self, phase: Phase) -> None:
        pass

    def over(self, path: str, num_bytes: int) -> None:
        pass

    def leave(self, path: str, reason: FallbackReason) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


NO_WATCH: Final = _NoWatch()


class Recorder:
    """Tells all observers. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.observers: tuple[Observer, ...] = ()

    @property
    def active(self) -> bool:
        """Whether anybody observes."""
        return bool(self.observers)

    def add(self, observer: Observer) -> None:
        """Tell it from now on."""
        with self._lock:
            self.observers = (*self.observers, observer)

    def remove(self, observer: Observer) -> None:
        """Tell it no longer; without effect if it was not told."""
        with self._lock:
            self.observers = tuple(each for each in self.observers if each is not observer)

    def watch(self, deadline: Deadline, operation: str, peer: int) -> Watch:
        """The context for the transfer that this deadline belongs to."""
        return Watch(self, deadline, operation, peer) if self.observers else NO_WATCH

    def short(
        self,
        operation: str,
        peer: int,
        path: str,
        deadline: Deadline,
        begun_ns: int,
        status: str = SUCCESS,
        *,
        num_bytes: int = 0,
    ) -> None:
        """A transfer that began at ``begun_ns`` of the monotonic clock has ended: a copy, from its begin to its end."""
        now = time.monotonic_ns()
        event: Transfer | None = None
        copied = not deadline.queued_s
        for observer in self.observers:
            if copied and type(observer) is Metrics:  # without an event, which costs more than all that is counted
                observer.copied(operation, path, status, num_bytes, now - begun_ns)
                continue
            if event is None:
                offset = time.time_ns() - time.monotonic_ns()
                start, end = begun_ns + offset, now + offset
                ended = (start, end, _copying(start, end, deadline))
                event = Transfer(deadline.transfer_id, operation, peer, path, status, num_bytes, *ended)
            _tell(observer, event)

    def transfer(self, event: Transfer) -> None:
        """A transfer has ended."""
        for observer in self.observers:
            _tell(observer, event)

    def served(self, event: Served) -> None:
        """A request of a peer has been answered."""
        for observer in self.observers:
            try:
                observer.served(event)
            except Exception as error:  # noqa: BLE001 - an observer must not break what it observes
                log.error("an observer failed: %r", error)


def status_of(error: BaseException) -> str:
    """What a failed transfer's status is called."""
    return getattr(getattr(error, "status_code", None), "name", _OTHER)


def _copying(start: int, end: int, deadline: Deadline) -> tuple[Step, ...]:
    """The steps of a copy: before it, it may have waited for a connection."""
    queued = min(int(deadline.queued_s * 1e9), end - start)
    if not queued:
        return (Step(Phase.COPY, start, end),)
    deadline.queued_s = 0.0
    return Step(Phase.QUEUE, start, start + queued), Step(Phase.COPY, start + queued, end)


def _tell(observer: Observer, event: Transfer) -> None:
    try:
        observer.transfer(event)
    except Exception as error:  # noqa: BLE001 - an observer must not break what it observes
        log.error("an observer failed: %r", error)
