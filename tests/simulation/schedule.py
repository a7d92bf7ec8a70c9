"""One schedule: members that link, transfer, unlink, die and live again in an order that its seed decides."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest import mock

from llm_datadist.engine.link import Link
from llm_datadist.engine.session import Session
from llm_datadist.memory.regions import RegionTable
from llm_datadist.paths import inprocess, one_sided, tcp
from simulation import state
from simulation.cluster import Member, Plan
from simulation.operations import Caller, Trial
from simulation.scheduler import StuckError
from simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_S = 1200.0
"""Longer than all calls of one caller, were each a rank-table link that waits for its peer in vain."""
REST_S = 150.0
"""Longer than any timer of an engine."""


@dataclass
class Result:
    """What one schedule came to."""

    seed: int
    violations: list[str]
    outcomes: dict[str, int]
    digest: int
    steps: int
    seconds: float
    """Virtual ones."""
    trace: list[str] = field(default_factory=list)


class _Errors(logging.Handler):
    """Whatever the library did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.seen.append(logging.Formatter().format(record))


def run(seed: int) -> Result:
    """Run one schedule."""
    world = World(seed)
    errors = _Errors()
    logger = logging.getLogger("LLM_DATADIST")
    logger.handlers, logger.propagate = [errors], False
    logger.setLevel(logging.ERROR)
    plan = Plan.draw(world)
    serials = itertools.count(1)
    count = world.scheduler.rng.choice((2, 2, 3, 4))
    members = [Member(number, world, plan, serials) for number in range(1, count + 1)]
    trial = Trial(world, members)
    with world.installed(), _countable(), _small_parts(world), _tables() as tables:
        director = _Director(trial)
        task = world.watcher.run("director", director.run)
        try:
            world.scheduler.run(task)
        except StuckError as error:
            trial.violated(str(error))
        _finish(world, members, trial, tables)
    trial.violations += world.scheduler.failures
    trial.violations += [f"unexpected error: {text}" for text in errors.seen]
    return Result(
        seed,
        trial.violations,
        trial.outcomes,
        world.scheduler.digest,
        world.scheduler.steps,
        world.scheduler.now - 1000,
        trial.trace,
    )


@contextlib.contextmanager
def _countable() -> Iterator[None]:
    """Let sets of links and sessions have the same order in each run."""
    numbers = itertools.count()

    def number(self: Any) -> int:
        found: int = self.__dict__.setdefault("_number", next(numbers))
        return found

    with mock.patch.object(Link, "__hash__", number), mock.patch.object(Session, "__hash__", number):
        yield


@contextlib.contextmanager
def _small_parts(world: World) -> Iterator[None]:
    """In some schedules transfers are cut into parts as only large ones are otherwise."""
    sizes = [(tcp, "PARALLEL_BYTES", 2048), (tcp, "REQUEST_BYTES", 1024)]
    sizes += [(one_sided, "PARALLEL_BYTES", 2048), (one_sided, "_LEAST_PART", 512), (one_sided, "_PARTS_PER_THREAD", 8)]
    with contextlib.ExitStack() as stack:
        if world.scheduler.rng.random() < 0.5:
            for module, name, size in sizes:
                stack.enter_context(mock.patch.object(module, name, size))
        yield


@contextlib.contextmanager
def _tables() -> Iterator[list[RegionTable]]:
    """All region tables that are made meanwhile, also those of engines that are killed before they are complete."""
    tables: list[RegionTable] = []
    real = RegionTable.__init__

    def made(self: RegionTable) -> None:
        tables.append(self)
        real(self)

    with mock.patch.object(RegionTable, "__init__", made):
        yield tables


def _finish(world: World, members: list[Member], trial: Trial, tables: list[RegionTable]) -> None:
    """End what is left, so that nothing of it gets into the next schedule."""
    scheduler = world.scheduler
    for member in members:
        if member.process is not None and member.process.alive:
            member.crash()
    for process in world.processes.values():
        process.kill()
    last = scheduler.spawn(world.process("last"), "last", lambda: scheduler.sleep(1.0))
    try:
        scheduler.run(last)
    except StuckError as error:
        trial.violated(f"threads do not end: {error}")
    if scheduler.tasks:
        trial.violated(f"threads do not end:\n{scheduler.stacks()}")
    # What killed processes have had is real: here the system does not take it back.
    closing = world.process("undertaker").run("undertaker", lambda: [table.close() for table in tables])
    scheduler.run(closing)
    inprocess._tables.clear()
    world.close()


class _Director:
    """Starts members, makes trouble, and looks at what is left in the end."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._world = trial.world
        self._scheduler = trial.world.scheduler
        self._rng = trial.world.scheduler.rng
        self._lives = itertools.count(1)
        self._tasks: list[tuple[Member, Any]] = []
        self._trouble = self._rng.choice((0, 0, 2, 5, 10))

    def run(self) -> None:
        for member in self._trial.members:
            self._start(member)
        for _ in range(self._trouble):
            self._scheduler.sleep(self._rng.random() * 0.6)
            self._rng.choice((self._cut, self._cut, self._interrupt, self._interrupt, self._crash))()
        self._wait_for_callers()
        self._scheduler.sleep(REST_S)
        self._look()
        self._end()

    def _start(self, member: Member) -> None:
        member.start(next(self._lives))
        assert member.process is not None
        for number in range(self._rng.choice((1, 2, 3))):
            caller, count = Caller(self._trial, member), self._rng.choice((2, 4, 8))
            eager = not number and self._rng.random() < 0.8
            task = member.process.run(f"caller {number}", functools.partial(caller.run, count, link_all=eager))
            self._tasks.append((member, task))

    def _cut(self) -> None:
        connected = self._world.network.connected()
        if connected:
            sock = self._rng.choice(connected)
            self._trial.trace.append(f"{self._scheduler.now - 1000:.4f} cut {sock.host} - {sock.peer.host}")
            self._world.network.cut(sock)

    def _interrupt(self) -> None:
        one, other = self._rng.sample(self._trial.members, 2)
        seconds = self._rng.choice((0.05, 0.5, 2.0, 10.0, 80.0))
        self._trial.trace.append(
            f"{self._scheduler.now - 1000:.4f} interrupt {one.process} - {other.process} for {seconds} s"
        )
        self._world.network.interrupt(one.process, other.process, seconds)

    def _crash(self) -> None:
        member = self._rng.choice(self._trial.members)
        self._trial.trace.append(f"{self._scheduler.now - 1000:.4f} crash {member.process}")
        member.crash()
        self._scheduler.sleep(self._rng.choice((0.0, 0.1, 1.0)))
        self._start(member)

    def _wait_for_callers(self) -> None:
        end = self._scheduler.now + LONGEST_S
        while any(not task.done for _, task in self._tasks):
            if self._scheduler.failures:
                return
            if self._scheduler.now > end:
                self._trial.violated(f"calls do not end:\n{self._scheduler.stacks()}")
                return
            self._scheduler.sleep(1.0)

    def _look(self) -> None:
        """At rest: both ends agree, nothing is left, and nobody has changed what is nobody's."""
        trial = self._trial
        living = [member for member in trial.members if member.ready and member.engine is not None]
        for member in living:
            assert member.engine is not None
            for what in state.leftovers(member.engine):
                trial.violated(f"left in cluster {member.cluster_id}: {what}")
        for one, other in itertools.combinations(living, 2):
            what = state.disagreement(one, other)
            if what is not None:
                trial.violated(what)
        for frozen in trial.frozen:
            if frozen.changed():
                trial.violated(f"memory was changed {frozen.why}")

    def _end(self) -> None:
        """Finalize all at once; nothing runs any more then."""
        tasks = []
        for member in self._trial.members:
            if member.process is not None and member.process.alive and member.engine is not None and not member.closing:
                close = functools.partial(self._trial.call, member, "close", 8.0, member.finalize)
                tasks.append(member.process.run("finalize", close))
        while any(not task.done for task in tasks):
            self._scheduler.sleep(0.1)
        self._scheduler.sleep(30.0)
        for task in self._scheduler.tasks:
            if task is not self._scheduler.current:
                self._trial.violated(f"a thread is left after finalize: {task.name} of {task.host}\n{task.stack()}")
        for member in self._trial.members:
            if member.closing and member.engine is not None and state.has_table(member.engine):
                self._trial.violated(f"the region table of cluster {member.cluster_id} is left after finalize")
        for sock in self._world.network.descriptors.values():
            self._trial.violated(f"a descriptor is left after finalize: {sock} of {sock.host}")
