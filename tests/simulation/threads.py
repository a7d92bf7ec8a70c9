"""``threading``, ``queue``, ``Future`` and the clocks, for tasks."""

from __future__ import annotations

import collections
import concurrent.futures
import queue
import secrets
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.scheduler import Scheduler, Task


class Primitives:
    """Everything that tasks of one scheduler wait with."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        bound: dict[str, Any] = {"scheduler": scheduler, "primitives": self}
        self.Lock = type("Lock", (_Lock,), bound)
        self.RLock = type("RLock", (_RLock,), bound)
        self.Condition = type("Condition", (_Condition,), bound)
        self.Event = type("Event", (_Event,), bound)
        self.Thread = type("Thread", (_Thread,), bound)
        self.SimpleQueue = type("SimpleQueue", (_SimpleQueue,), bound)
        self.Future = type("Future", (_Future,), bound)
        self.threading = _Threading(self)
        self.queue = _Queues(self)
        self.time = _Time(scheduler)
        self.secrets = _Secrets(scheduler)


class _Waiting:
    """Has tasks that wait for it."""

    scheduler: Scheduler
    primitives: Primitives

    def __init__(self) -> None:
        self._waiting: list[Task] = []

    def _wait(self, deadline: float | None) -> bool:
        task = self.scheduler.current
        self._waiting.append(task)
        try:
            while task in self._waiting:
                if not self.scheduler.park(deadline) and task in self._waiting:
                    return False
            return True
        finally:
            if task in self._waiting:
                self._waiting.remove(task)

    def _wake(self, count: int | None = None) -> None:
        for task in self._waiting[:count]:
            self._waiting.remove(task)
            self.scheduler.wake(task)

    def _until(self, timeout: float | None) -> float | None:
        return None if timeout is None or timeout < 0 else self.scheduler.now + timeout


class _RLock(_Waiting):
    most = 1 << 30

    def __init__(self) -> None:
        super().__init__()
        self.owner: Task | None = None
        self.count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        scheduler = self.scheduler
        scheduler.preempt()
        task, deadline = scheduler.current, self._until(timeout)
        while self.owner is not None and not (self.owner is task and self.count < self.most):
            if not blocking or not self._wait(deadline):
                return False
        self.owner = task
        self.count += 1
        return True

    def release(self) -> None:
        if self.scheduler.current.killed and self.owner is not self.scheduler.current:
            return
        assert self.owner is self.scheduler.current or self.most == 1
        self.count -= 1
        if not self.count:
            self.owner = None
            self._wake()

    def save(self) -> int:
        """Release it altogether, for a condition."""
        assert self.owner is self.scheduler.current, "a condition is used without its lock"
        count, self.count, self.owner = self.count, 0, None
        self._wake()
        return count

    def restore(self, count: int) -> None:
        while self.owner is not None:
            self._wait(None)
        self.owner, self.count = self.scheduler.current, count

    def locked(self) -> bool:
        return self.owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Lock(_RLock):
    most = 1


class _Condition(_Waiting):
    def __init__(self, lock: _RLock | None = None) -> None:
        super().__init__()
        self._lock = lock or self.primitives.RLock()
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        deadline, count = self._until(None if timeout is None else max(timeout, 0.0)), self._lock.save()
        try:
            return self._wait(deadline)
        finally:
            self._lock.restore(count)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = self._until(None if timeout is None else max(timeout, 0.0))
        while not (result := predicate()):
            left = None if deadline is None else deadline - self.scheduler.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        assert self._lock.owner is self.scheduler.current, "notify without the lock"
        self._wake(n)

    def notify_all(self) -> None:
        assert self._lock.owner is self.scheduler.current, "notify without the lock"
        self._wake()


class _Event(_Waiting):
    def __init__(self) -> None:
        super().__init__()
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        self.scheduler.preempt()
        deadline = self._until(None if timeout is None else max(timeout, 0.0))
        while not self._set and self._wait(deadline):
            pass
        return self._set


class _SimpleQueue(_Waiting):
    def __init__(self) -> None:
        super().__init__()
        self._items: collections.deque[Any] = collections.deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._wake(1)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self.scheduler.preempt()
        deadline = self._until(timeout)
        while not self._items:
            if not block or not self._wait(deadline):
                raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class _Thread:
    scheduler: Scheduler

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] = lambda: None,
        name: str = "thread",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        assert group is None
        self.name, self.daemon = name, daemon
        self._call = (target, args, kwargs or {})
        self._task: Task | None = None

    @property
    def ident(self) -> int | None:
        return self._task.ident if self._task else None

    def start(self) -> None:
        target, args, kwargs = self._call
        host = self.scheduler.current.host
        self._task = self.scheduler.spawn(host, self.name, lambda: target(*args, **kwargs))

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done

    def join(self, timeout: float | None = None) -> None:
        assert self._task is not None
        deadline = None if timeout is None else self.scheduler.now + timeout
        while not self._task.done:
            self._task.waiters.append(self.scheduler.current)
            if not self.scheduler.park(deadline):
                return


class _Future(concurrent.futures.Future):  # type: ignore[type-arg]
    primitives: Primitives

    def __init__(self) -> None:
        super().__init__()
        self._condition = self.primitives.Condition()


class _Threading:
    """The names of ``threading`` that are simulated; any other one fails."""

    def __init__(self, primitives: Primitives) -> None:
        for name in ("Lock", "RLock", "Condition", "Event", "Thread"):
            setattr(self, name, getattr(primitives, name))
        self._scheduler = primitives.scheduler

    def get_ident(self) -> int:
        return self._scheduler.current.ident

    def current_thread(self) -> Task:
        return self._scheduler.current


class _Queues:
    Empty = queue.Empty

    def __init__(self, primitives: Primitives) -> None:
        self.SimpleQueue = self.Queue = primitives.SimpleQueue


class _Time:
    def __init__(self, scheduler: Scheduler) -> None:
        self.monotonic = self.perf_counter = scheduler.tick
        self.sleep = scheduler.sleep
        self.monotonic_ns = self.perf_counter_ns = lambda: int(scheduler.tick() * 1e9)
        self.time, self.time_ns = time.time, time.time_ns


class _Secrets:
    compare_digest = staticmethod(secrets.compare_digest)

    def __init__(self, scheduler: Scheduler) -> None:
        self.token_bytes = scheduler.rng.randbytes
        self.token_hex = lambda size: scheduler.rng.randbytes(size).hex()
