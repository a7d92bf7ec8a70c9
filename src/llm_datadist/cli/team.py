"""The parent's hold on the two demo processes: start, orders and answers with bounded waits, and a certain end."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from typing import TYPE_CHECKING, Final, TypeVar

from llm_datadist.cli.orders import Failed, Progress, Stop
from llm_datadist.cli.plan import Role
from llm_datadist.cli.worker import serve

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence
    from multiprocessing.process import BaseProcess

    from llm_datadist.cli.orders import Answer, Order
    from llm_datadist.cli.plan import Plan

T = TypeVar("T")
_KILL_S: Final = 10.0


class DemoError(Exception):
    """The demo cannot go on; the message names the process and the reason."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long the parent waits."""

    silence_s: float
    """For any sign of life of a process that works."""
    total_s: float
    """For everything together."""
    stop_s: float = 10.0
    """For each process to finalize once told to stop."""

    @classmethod
    def for_plan(cls, plan: Plan) -> Limits:
        """Far more than a slow machine needs: a call may last as long as its timeout."""
        call_s = plan.timeout_ms / 1000
        return cls(silence_s=60 + call_s, total_s=120 + 10 * call_s)


class _Member:
    """One process and the pipe to it."""

    def __init__(self, role: Role, process: BaseProcess, pipe: connection.Connection) -> None:
        self.role = role
        self.process = process
        self.pipe = pipe

    def epitaph(self) -> str:
        """How it ended."""
        self.process.join(1.0)
        code = self.process.exitcode
        if code is None:
            return f"the {self.role.value} process closed its pipe without an answer"
        if code >= 0:
            return f"the {self.role.value} process ended with exit code {code} before its work was done"
        name = signal.Signals(-code).name
        hint = ": out of memory? Try fewer --tokens" if -code == signal.SIGKILL else ""
        return f"the {self.role.value} process was killed by {name}{hint}"


@contextlib.contextmanager
def started_team(plan: Plan, limits: Limits, on_progress: Callable[[int], None]) -> Generator[Team, None, None]:
    """Both processes; on leaving they have ended: by order after success, else killed."""
    team = Team(plan, limits, on_progress)
    orderly = False
    try:
        team.start()
        yield team
        orderly = True
    finally:
        team.stop(orderly=orderly)


class Team:
    """Both processes."""

    def __init__(self, plan: Plan, limits: Limits, on_progress: Callable[[int], None]) -> None:
        self._plan = plan
        self._limits = limits
        self._on_progress = on_progress
        self._members: dict[Role, _Member] = {}
        self._end = time.monotonic() + limits.total_s

    def start(self) -> None:
        """Start them; an interrupt comes before or after.

        Raises:
            DemoError: the system refuses.
        """
        # This helper of multiprocessing unblocks signals when it starts: let it start before they are blocked.
        resource_tracker.ensure_running()
        with _interrupts_held():
            for role in Role:
                self._start(role)

    def _start(self, role: Role) -> None:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        arguments = (role, self._plan, theirs, self._limits.total_s)
        process = context.Process(target=serve, args=arguments, name=role.value, daemon=True)
        try:
            process.start()
        except OSError as error:
            mine.close()
            message = f"cannot start the {role.value} process: {error}"
            raise DemoError(message) from error
        finally:
            theirs.close()
        self._members[role] = _Member(role, process, mine)

    def pid(self, role: Role) -> int | None:
        """Process id."""
        return self._members[role].process.pid

    def ask(self, role: Role, order: Order, answer: type[T]) -> T:
        """Give one process an order and wait for the answer, which must be of this type.

        Raises:
            DemoError: the process failed, ended, or kept silent for too long.
        """
        found = self.ask_all({role: order})[role]
        if not isinstance(found, answer):
            message = f"the {role.value} process answered {order} with {found}"
            raise DemoError(message)
        return found

    def ask_all(self, orders: Mapping[Role, Order]) -> dict[Role, Answer]:
        """Give orders and wait until all are answered.

        Raises:
            DemoError: a process failed, ended, or kept silent for too long.
        """
        for role, order in orders.items():
            _send(self._members[role], order)
        waiting = {self._members[role].pipe: self._members[role] for role in orders}
        answers: dict[Role, Answer] = {}
        while waiting:
            for member in self._heard_from(list(waiting.values())):
                message = _receive(member)
                if isinstance(message, Progress):
                    self._on_progress(message.bytes_done)
                else:
                    answers[member.role] = message
                    del waiting[member.pipe]
        return answers

    def _heard_from(self, waiting: list[_Member]) -> list[_Member]:
        """Those of the members that have something to say; a process that nobody waits for must not end either."""
        others = [member for member in self._members.values() if member not in waiting]
        heard: Sequence[object] = ()
        patience = min(self._limits.silence_s, self._end - time.monotonic())
        if patience > 0:
            ends = [member.process.sentinel for member in others]
            heard = connection.wait([*(member.pipe for member in waiting), *ends], patience)
        if not heard:
            raise DemoError(self._overdue(waiting))
        for member in others:
            if member.process.sentinel in heard:
                raise DemoError(member.epitaph())
        return [member for member in waiting if member.pipe in heard]

    def _overdue(self, members: list[_Member]) -> str:
        names = " and ".join(member.role.value for member in members)
        if time.monotonic() >= self._end:
            return f"not finished after {self._limits.total_s:g} s, still waiting for: {names}"
        return f"no sign of life for {self._limits.silence_s:g} s from: {names}"

    def stop(self, *, orderly: bool) -> None:
        """End them: give them time to finalize, or not; an interrupt comes before or after.

        Raises:
            DemoError: one did not end by itself although it was given time.
        """
        problems: list[str] = []
        with _interrupts_held():
            if orderly:
                problems = self._finalize()
            for member in self._members.values():
                member.process.kill()
            for member in self._members.values():
                member.process.join(_KILL_S)
                member.pipe.close()
            self._members.clear()
        if problems:
            raise DemoError("; ".join(problems))

    def _finalize(self) -> list[str]:
        for member in self._members.values():
            with contextlib.suppress(OSError):
                member.pipe.send(Stop())
        problems = []
        for member in self._members.values():
            member.process.join(self._limits.stop_s)
            if member.process.exitcode is None:
                problems.append(f"the {member.role.value} process did not finalize within {self._limits.stop_s:g} s")
            elif member.process.exitcode:
                problems.append(member.epitaph())
        return problems


def _send(member: _Member, order: Order) -> None:
    try:
        member.pipe.send(order)
    except OSError as error:
        raise DemoError(member.epitaph()) from error


def _receive(member: _Member) -> Answer | Progress:
    try:
        message: Answer | Progress = member.pipe.recv()
    except (EOFError, OSError) as error:
        raise DemoError(member.epitaph()) from error
    if isinstance(message, Failed):
        text = f"the {member.role.value} process failed: {message.reason}"
        raise DemoError(text)
    return message


@contextlib.contextmanager
def _interrupts_held() -> Generator[None, None, None]:
    """Keep Ctrl-C waiting.

    A process started meanwhile inherits the blocked signal and never sees it: the parent alone decides when it ends.
    Other threads of the parent do not block it, so its handler waits, too.
    """
    held: list[int] = []
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, lambda number, _frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if held and callable(handler):
            handler(signal.SIGINT, None)
