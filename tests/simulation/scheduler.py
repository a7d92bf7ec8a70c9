"""Threads that are none, on a clock that is none: one runs at a time, and a seed decides which one goes on.

A task is a greenlet. It gives way where a thread may: at locks, events, queues, sockets, clocks. Time passes only when
nobody can go on, except for a few microseconds now and then, so whatever waits for time costs nothing.
"""

from __future__ import annotations

import heapq
import itertools
import random
import traceback
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent, greenlet

if TYPE_CHECKING:
    from collections.abc import Callable

_TICK_S = 5e-6
_SOON_S = 0.002
MOST_STEPS = 400_000


class Killed(BaseException):
    """The process of this task has ended."""


class StuckError(Exception):
    """Nobody can go on, or it never ends."""


class Event:
    """Something that happens at a time, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], object]) -> None:
        self.action: Callable[[], object] | None = action

    def cancel(self) -> None:
        self.action = None


class Task:
    """What runs like a thread; ``host`` is the process that it belongs to."""

    def __init__(self, scheduler: Scheduler, host: Any, name: str, run: Callable[[], object]) -> None:
        self.name = name
        self.host = host
        self.ident = next(scheduler.idents)
        self.killed = False
        self.done = False
        self.parked = False
        self.woken = False
        self.waiters: list[Task] = []
        self._scheduler = scheduler
        self._run = run
        self.greenlet = greenlet(self._main, scheduler.hub)

    def _main(self) -> None:
        try:
            if not self.killed:
                self._run()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - told at the end of the schedule
            told = "".join(traceback.format_exception(error, limit=-5))
            self._scheduler.failures.append(f"{self.name} of {self.host} failed: {told}")
        self.done = True
        self._scheduler.tasks.pop(self, None)
        for waiter in self.waiters:
            self._scheduler.wake(waiter)

    def stack(self) -> str:
        """Where it stands."""
        frame = self.greenlet.gr_frame
        places = traceback.extract_stack(frame) if frame else []
        told = [f"{place.name} ({place.filename.rpartition('/')[2]}:{place.lineno})" for place in places]
        return " > ".join(told[-12:]) or "(not begun)"


class Scheduler:
    """Runs tasks in an order that depends on the seed alone."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.hub = greenlet(self._loop)
        self.idents = itertools.count(1)
        self.tasks: dict[Task, None] = {}
        self.current: Task
        self.steps = 0
        self.failures: list[str] = []
        """Of tasks that have ended with an exception."""
        self.digest = 0
        """Of all decisions: equal for two runs that were the same."""
        self._ready: list[Task] = []
        self._events: list[tuple[float, int, Event]] = []
        self._order = itertools.count()
        self._until: Task | None = None
        self._preempt = self.rng.choice((0.02, 0.1, 0.3, 0.6))
        self._slow = self.rng.choice((0.0, 0.0, 0.002, 0.02))

    def spawn(self, host: Any, name: str, run: Callable[[], object]) -> Task:
        """Start a task."""
        task = Task(self, host, name, run)
        self.tasks[task] = None
        self._ready.append(task)
        return task

    def at(self, when: float, action: Callable[[], object]) -> Event:
        """Do something at a time; it must not block."""
        event = Event(action)
        heapq.heappush(self._events, (when, next(self._order), event))
        return event

    def after(self, seconds: float, action: Callable[[], object]) -> Event:
        """Do something later; it must not block."""
        return self.at(self.now + seconds, action)

    def park(self, deadline: float | None = None) -> bool:
        """Let the current task sleep until it is woken, or until the deadline; whether it was woken."""
        task = self.current
        self._check_alive(task)
        task.parked, task.woken = True, False
        alarm = None if deadline is None else self.at(deadline, lambda: self._resume(task))
        self.hub.switch()
        if alarm is not None:
            alarm.cancel()
        self._check_alive(task)
        return task.woken

    def wake(self, task: Task) -> None:
        """Let a task that sleeps go on."""
        if task.parked:
            task.woken = True
            self._resume(task)

    def preempt(self) -> None:
        """A place where another task may go on."""
        task = self.current
        self._check_alive(task)
        what = self.rng.random()
        if what < self._slow:
            self.park(self.now + self.rng.choice((0.0005, 0.005, 0.03)))
        elif what < self._preempt:
            self._ready.append(task)
            self.hub.switch()
            self._check_alive(task)

    def sleep(self, seconds: float) -> None:
        """Let time pass for the current task."""
        until = self.now + max(seconds, 0.0)
        while self.now < until:
            self.park(until)

    def tick(self) -> float:
        """What a clock shows; to look at it takes a moment."""
        self.now += _TICK_S
        return self.now

    def kill(self, task: Task) -> None:
        """End a task: what it does next raises ``Killed``."""
        task.killed = True
        if task.parked:
            self._resume(task)

    def run(self, until: Task) -> None:
        """Go on until a task has ended.

        Raises:
            StuckError: that will never be.
        """
        self._until = until
        self.hub.parent = getcurrent()
        self.hub.switch()

    def close(self) -> None:
        """Run no more: a greenlet that is left in the middle would be kept for ever, with all that it knows."""
        self.hub.parent = getcurrent()
        self.hub.throw()

    def _check_alive(self, task: Task) -> None:
        if task.killed:
            raise Killed

    def _resume(self, task: Task) -> None:
        if task.parked:
            task.parked = False
            self._ready.append(task)

    def _loop(self) -> None:
        while True:
            while self._until is not None and self._until.done:
                self.hub.parent.switch()
            self._fire()
            if not self._ready:
                self._advance()
                continue
            if self._events and self.rng.random() < 0.02:
                when = self._events[0][0]
                if when - self.now < _SOON_S:
                    self.now = max(self.now, when)
                    continue
            self._step()

    def _step(self) -> None:
        ready = self._ready
        at = int(self.rng.random() * len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        task = ready.pop()
        self.steps += 1
        if self.steps > MOST_STEPS:
            message = f"no end after {self.steps} steps\n{self.stacks()}"
            raise StuckError(message)
        self.digest = (self.digest * 31 + task.ident) % (1 << 61)
        self.current = task
        task.greenlet.switch()

    def _fire(self) -> None:
        events = self._events
        while events and events[0][0] <= self.now:
            action = heapq.heappop(events)[2].action
            if action is not None:
                action()

    def _advance(self) -> None:
        events = self._events
        while events and events[0][2].action is None:
            heapq.heappop(events)
        if not events:
            message = f"nobody can go on\n{self.stacks()}"
            raise StuckError(message)
        self.now = max(self.now, events[0][0])

    def stacks(self) -> str:
        """Where all tasks stand."""
        return "\n".join(f"--- {task.name} of {task.host}\n{task.stack()}" for task in self.tasks if not task.done)
