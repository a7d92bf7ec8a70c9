"""One soak, round by round: let transfers run, disturb them, look at every byte, and put together what was broken."""

from __future__ import annotations

import concurrent.futures
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from llm_datadist.cli.soak.orders import (
    Done,
    Link,
    Move,
    Moved,
    Ready,
    Refused,
    Register,
    Start,
    SwitchRole,
    Unlink,
    Verified,
    Verify,
)
from llm_datadist.cli.soak.plan import BUSY_S, Event, Schedule, groups
from llm_datadist.cli.soak.process import PATIENCE_S, GoneError, SoakError, SoakProcess, expected

if TYPE_CHECKING:
    from concurrent.futures import Future

    from llm_datadist.cli.soak.orders import Answer
    from llm_datadist.cli.soak.plan import Operation, Place, Round, Transfer
    from llm_datadist.cli.soak.process import Usage

_STOPPED_S: Final = 0.3
_ENDS: Final = frozenset({"LLM_NOT_YET_LINK", "LLM_FAILED", "LLM_TIMEOUT"})
_ALLOWED: Final = {
    Event.KILL: _ENDS,
    Event.UNLINK: _ENDS,
    Event.REGISTER: frozenset({"LLM_KV_CACHE_NOT_EXIST"}),
}
"""What may become of a transfer in which the victim of an event takes part."""


@dataclass
class Tally:
    """What has happened so far."""

    rounds: int = 0
    calls: Counter[Operation] = field(default_factory=Counter)
    """Those of transfers that succeeded to the last."""
    verified: Counter[Operation] = field(default_factory=Counter)
    """Transfers whose target was compared, byte by byte, after the last call."""
    interrupted: Counter[Operation] = field(default_factory=Counter)
    """Those that could not succeed, because of an event; their targets were compared around what they had named."""
    bytes_moved: Counter[Operation] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    events: Counter[Event] = field(default_factory=Counter)
    compared: int = 0
    """Bytes looked at, of all targets."""
    usages: list[Usage] = field(default_factory=list)
    """Of the process that is never killed, after each round."""


class Soak:
    """Processes and what they have to do."""

    def __init__(self, processes: int, seed: int) -> None:
        self.tally: Tally = Tally()
        self._schedule = Schedule(seed, processes)
        self._groups = groups(processes)
        self._ready: dict[Place, Ready] = {}
        self._processes: dict[int, SoakProcess] = {}
        for number in range(processes):
            self._processes[number] = SoakProcess(number)

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [process.pid for process in self._processes.values()]

    def start(self) -> None:
        """Initialise and link all.

        Raises:
            SoakError: that does not work.
        """
        for number in self._processes:
            self._start(number, self._schedule.seed())
        for group in self._groups:
            for at, place in enumerate(group):
                self._link(place, group[:at])

    def _start(self, number: int, seed: int) -> None:
        places = [place for group in self._groups for place in group if place.process == number]
        process = self._processes[number]
        for place in places:
            self._ready[place] = process.ask(Start(place, seed), Ready)

    def _link(self, place: Place, peers: list[Place]) -> None:
        self._processes[place.process].ask(Link(place, tuple(self._ready[peer] for peer in peers)), Done)

    def round(self) -> None:
        """One round.

        Raises:
            SoakError: something went wrong that should not.
        """
        plan = self._schedule.next()
        try:
            self._round(plan)
        except SoakError as error:
            message = f"round {plan.number} ({plan.event.value}): {error}"
            raise SoakError(message) from error

    def _round(self, plan: Round) -> None:
        before = dict(self._ready)
        running = [(transfer, self._begin(transfer)) for transfer in plan.transfers]
        time.sleep(plan.delay_s)
        self._disturb(plan)
        outcomes = [(transfer, self._outcome(transfer, future, plan)) for transfer, future in running]
        self._mend(plan)
        verified = [self._verify(transfer, before, plan, complete=complete) for transfer, complete in outcomes]
        for (transfer, future), (_, complete) in zip(verified, outcomes, strict=True):
            if future is not None:
                self._judge(transfer, expected(future, Verified, str(transfer)))
                self.tally.verified[transfer.operation] += complete
        self.tally.events[plan.event] += 1
        self.tally.rounds += 1
        self.tally.usages.append(self._processes[0].usage())

    def _begin(self, transfer: Transfer) -> Future[Answer]:
        order = Move(transfer, self._ready[transfer.source], self._ready[transfer.target], BUSY_S)
        return self._processes[transfer.actor.process].begin(order)

    def _disturb(self, plan: Round) -> None:
        """What happens while the transfers run."""
        process = self._processes[plan.victim.process]
        if plan.event is Event.KILL:
            process.kill()
        elif plan.event is Event.STOP:
            process.signal(signal.SIGSTOP)
            time.sleep(_STOPPED_S)
            process.signal(signal.SIGCONT)
        elif plan.event is Event.REGISTER:
            self._ready[plan.victim] = process.ask(Register(plan.victim, plan.seed), Ready)
        elif plan.event is Event.UNLINK:
            process.ask(Unlink(plan.victim, (self._ready[plan.other],), force=True), Done)

    def _mend(self, plan: Round) -> None:
        """After the transfers: restart and link again; also what needs links that are at rest."""
        victim = plan.victim
        if plan.event is Event.KILL:
            self._processes[victim.process] = SoakProcess(victim.process)
            self._start(victim.process, plan.seed)
            self._link_again(victim.process)
        elif plan.event is Event.UNLINK:
            self._link(victim, [plan.other])  # the other one may not even know yet that it is not linked any more
        elif plan.event is Event.SWITCH:
            peers = [peer for group in self._groups if victim in group for peer in group if peer != victim]
            process = self._processes[victim.process]
            process.ask(Unlink(victim, tuple(self._ready[peer] for peer in peers), force=False), Done)
            self._ready[victim] = process.ask(SwitchRole(victim), Ready)
            for peer in peers:
                self._link(peer, [victim])

    def _link_again(self, process: int) -> None:
        """Link all places of a process that is new to all others."""
        for group in self._groups:
            for at, place in enumerate(group):
                if place.process == process:
                    earlier = group[:at]
                    self._link(place, [peer for peer in group if peer.process != process or peer in earlier])

    def _outcome(self, transfer: Transfer, future: Future[Answer], plan: Round) -> bool:
        """Whether a transfer succeeded.

        Raises:
            SoakError: it did not, and nothing that happened is an excuse.
        """
        try:
            answer = future.result(PATIENCE_S)
        except GoneError:
            answer = Refused("LLM_NOT_YET_LINK", "the process that made the call has ended")
        except concurrent.futures.TimeoutError as error:
            message = f"no end within {PATIENCE_S:g} s: {transfer}"
            raise SoakError(message) from error
        if isinstance(answer, Moved):
            self.tally.calls[transfer.operation] += answer.times
            self.tally.bytes_moved[transfer.operation] += answer.bytes_moved
            self.tally.paths[answer.path] += answer.times
            return True
        if isinstance(answer, Refused) and answer.status in self._excuses(transfer, plan):
            self.tally.interrupted[transfer.operation] += 1
            return False
        message = f"{transfer.operation.value} of {transfer.actor} failed: {answer}"
        raise SoakError(message)

    def _excuses(self, transfer: Transfer, plan: Round) -> frozenset[str]:
        ends = {transfer.source, transfer.target}
        if plan.event is Event.KILL:
            concerned = plan.victim.process in {end.process for end in ends}
        elif plan.event is Event.UNLINK:
            concerned = ends == {plan.victim, plan.other}
        else:
            concerned = plan.victim == transfer.source
        return _ALLOWED.get(plan.event, frozenset()) if concerned else frozenset()

    def _verify(
        self, transfer: Transfer, before: dict[Place, Ready], plan: Round, *, complete: bool
    ) -> tuple[Transfer, Future[Answer] | None]:
        if plan.event is Event.KILL and transfer.target.process == plan.victim.process:
            return transfer, None  # its memory has gone with it
        seeds = {before[transfer.source].seed, self._ready[transfer.source].seed}
        order = Verify(transfer, tuple(sorted(seeds)), complete)
        return transfer, self._processes[transfer.target.process].begin(order)

    def _judge(self, transfer: Transfer, verified: Verified) -> None:
        self.tally.compared += verified.compared
        if verified.problems:
            what = f"{transfer.operation.value} over {transfer.source.lane.value}"
            message = f"{what}: {'; '.join(verified.problems)}"
            raise SoakError(message)

    def finish(self) -> None:
        """Let all processes finalize and end.

        Raises:
            SoakError: one does not.
        """
        problems = [process.stop() for process in self._processes.values()]
        found = [problem for problem in problems if problem]
        if found:
            raise SoakError("; ".join(found))

    def kill(self) -> None:
        """End all processes now. Idempotent."""
        for process in self._processes.values():
            process.kill()
