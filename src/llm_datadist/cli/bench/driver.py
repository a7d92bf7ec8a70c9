"""Measures contestants beside each other: all of one case run at once, and take turns round by round.

Only the contestant whose turn it is runs; the processes of all others are stopped, so that busy threads of one cost the
other nothing. A figure counts only if every byte was compared before and after the rounds.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import tempfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from llm_datadist.cli.bench import cases
from llm_datadist.cli.bench.protocol import (
    Child,
    ChildError,
    Done,
    Hello,
    Message,
    Prepare,
    Ran,
    Run,
    Time,
    Timed,
    Verified,
    Verify,
)
from llm_datadist.cli.bench.results import Contestant, Latency, Throughput

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from llm_datadist.cli.bench.results import Case

T = TypeVar("T")
_STOP_S: Final = 10.0


class BenchError(Exception):
    """Something cannot be measured; the message names the contestant, if it is one's fault, the case and the reason."""

    def __init__(self, message: str, contestant: Contestant | None = None) -> None:
        super().__init__(message)
        self.contestant = contestant


@dataclass(frozen=True, slots=True)
class Program:
    """How to start a contestant."""

    contestant: Contestant
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to set."""

    @classmethod
    def ours(cls, *options: str) -> Program:
        """This library; for the options see ``ours.py`` and ``contestant.py``."""
        return cls(Contestant.OURS, _module("ours", *options))

    @classmethod
    def limit(cls, limit: Contestant, *options: str) -> Program:
        """A bare limit of the machine; for the options see ``contestant.py``."""
        return cls(limit, _module("limits", _LIMITS[limit], *options))


_LIMITS: Final = {
    Contestant.LIMIT_PROCESS_VM: "process_vm",
    Contestant.LIMIT_SOCKETS: "sockets",
    Contestant.LIMIT_MEMCPY: "memcpy",
}


def _module(name: str, *options: str) -> tuple[str, ...]:
    return (sys.executable, "-m", f"llm_datadist.cli.bench.{name}", *options)


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of work is done."""

    case: Case
    contestant: Contestant
    done: int
    """Pieces of work done by this call of ``run`` or ``latency``."""
    total: int


OnStep: TypeAlias = "Callable[[Step], None]"


@dataclass(frozen=True, slots=True)
class Plan:
    """How to measure."""

    rounds: int = 5
    seed: int = 1
    """Of block ids and contents."""
    patience_s: float = 120.0
    """For each answer of a contestant; far more than a slow machine needs."""


def run(
    measured: Sequence[Case], programs: Sequence[Program], plan: Plan, on_step: OnStep = lambda _: None
) -> list[Throughput]:
    """Move each case ``plan.rounds`` times with each program.

    Returns:
        For each case, in order, one result a program, in order.

    Raises:
        BenchError: a contestant failed, hung, died or brought wrong bytes. All processes have ended.
        ValueError: a case cannot be measured.
    """
    found = _measure(measured, programs, plan, on_step, Run(), Ran)
    return [
        Throughput(case, program.contestant, [each.seconds for each in rounds], [each.cpu_seconds for each in rounds])
        for case, program, rounds in found
    ]


def latency(
    measured: Sequence[Case],
    programs: Sequence[Program],
    plan: Plan,
    calls: int,
    on_step: OnStep = lambda _: None,
) -> list[Latency]:
    """As ``run``, but each round makes ``calls`` calls, each by the clock; for small cases."""
    found = _measure(measured, programs, plan, on_step, Time(calls), Timed)
    return [
        Latency(case, program.contestant, [seconds for each in rounds for seconds in each.seconds])
        for case, program, rounds in found
    ]


def _measure(
    measured: Sequence[Case], programs: Sequence[Program], plan: Plan, on_step: OnStep, order: Message, answer: type[T]
) -> list[tuple[Case, Program, list[T]]]:
    for case in measured:
        cases.check(case)
    total = len(measured) * len(programs) * (plan.rounds + 1)
    done = 0
    found: list[tuple[Case, Program, list[T]]] = []
    for case in measured:
        rounds: list[list[T]] = [[] for _ in programs]
        with _started(case, programs, plan) as runners:
            for number in range(plan.rounds + 1):
                for runner, results in zip(runners, rounds, strict=True):
                    with runner.turn():
                        if number in (0, plan.rounds):
                            runner.verify(plan.seed + number)
                        if number < plan.rounds:
                            results.append(runner.ask(order, answer))
                    done += 1
                    on_step(Step(case, runner.program.contestant, done, total))
        found.extend((case, program, results) for program, results in zip(programs, rounds, strict=True))
    return found


@contextlib.contextmanager
def _started(case: Case, programs: Sequence[Program], plan: Plan) -> Generator[list[_Runner], None, None]:
    """All programs, prepared and stopped; on leaving they have ended, whatever happens."""
    runners: list[_Runner] = []
    try:
        for program in programs:
            runners.append(_Runner(program, case, plan))  # noqa: PERF401 - those started are ended if the next one fails
        for runner in runners:
            with runner.turn():
                runner.prepare()
        yield runners
        for runner in runners:
            runner.stop()
    finally:
        for runner in runners:
            runner.kill()


class _Runner:
    """One contestant that runs."""

    def __init__(self, program: Program, case: Case, plan: Plan) -> None:
        self.program = program
        self._case = case
        self._plan = plan
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill
        try:
            self._child = Child(program.contestant.value, program.command, program.environment, self._errors)
        except ChildError as error:
            self._errors.close()
            raise BenchError(str(error), program.contestant) from error

    def prepare(self) -> None:
        """Get ready for the case."""
        self._child.hear(Hello, self._plan.patience_s)
        self.ask(Prepare(self._case, self._plan.seed), Done)

    @contextlib.contextmanager
    def turn(self) -> Generator[None, None, None]:
        """Let it run meanwhile, and stop it afterwards."""
        self._child.signal(signal.SIGCONT)
        try:
            yield
        except ChildError as error:
            message = f"{error} (while measuring {cases.describe(self._case)})"
            raise BenchError(message, self.program.contestant) from error
        finally:
            self._child.signal(signal.SIGSTOP)

    def ask(self, order: Message, answer: type[T]) -> T:
        """Give an order and wait for its answer."""
        return self._child.ask(order, answer, self._plan.patience_s)

    def verify(self, seed: int) -> None:
        """Let it prove that it moves the right bytes."""
        found = self.ask(Verify(seed), Verified)
        if found.wrong or found.compared != self._case.total_bytes:
            message = (
                f"{self._child.name}: {found.wrong} wrong bytes of {found.compared} compared, "
                f"{self._case.total_bytes} should have been moved"
            )
            raise ChildError(message)

    def stop(self) -> None:
        """Let it end by itself, if it does so in time."""
        self._child.signal(signal.SIGCONT)
        self._child.stop(_STOP_S)

    def kill(self) -> None:
        """End it now. Idempotent."""
        self._child.kill()
        self._errors.close()
