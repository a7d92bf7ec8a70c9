"""How one cell of the fault matrix is run."""

from __future__ import annotations

from concurrent.futures import wait
from typing import TYPE_CHECKING, Any, NamedTuple

import fault_matrix_child as child
from fault_matrix_cells import AGAIN, LINK_OPERATION, LOST, SAME, UNLINK_OPERATION, Cell, Observed, Phase
from fault_matrix_rig import PATIENT_S
from llm_datadist.testing import Carries, Direction, Fault, FaultKind
from stopping import go_on, stop
from until import until

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from fault_matrix_child import Outcome
    from fault_matrix_rig import Rig
    from peers import Peer

LIMIT_S = 20.0
"""An operation that takes so much longer than its deadline hangs, whatever else the machine does."""
HASTY_S, SHORT_S = 0.4, 0.001
NOTHING_HELD = "nothing came to where it was to be held"
MIDDLE = child.TOTAL // 3
_TRIES = 20
OTHERS = {
    "pull_blocks": "push_blocks",
    "pull_cache": "push_cache",
    "push_blocks": "pull_blocks",
    "push_cache": "pull_cache",
    "transfer_cache_async": "pull_blocks",
    LINK_OPERATION: "pull_blocks",
    UNLINK_OPERATION: "pull_blocks",
}
"""Operations whose destination is elsewhere."""
OTHERS_IN_MESSAGE_MODE = {"pull_blocks": "pull_cache", "pull_cache": "pull_blocks"}


class CellError(AssertionError):
    """A cell broke one of the promises that hold for all of them."""


class Run:
    """One run of one cell."""

    def __init__(self, rig: Rig, cell: Cell) -> None:
        self.rig = rig
        self.cell = cell
        self.fault = ACTIONS[cell.fault]
        self.message = cell.phase is Phase.LOOKUP and cell.operation.startswith("pull")
        self.here = rig.here(message=self.message)
        self.there = rig.there(message=self.message)
        self.marked: Peer | None = None
        """The side whose destination must not change any more."""
        self.gone = False
        """Whether the peer's memory has gone."""
        self.hold: Hold = Hold()
        self.running: Future[Outcome]
        self.later: list[Future[Any]] = []
        """What the fault has begun at the server."""

    def run(self) -> Observed:
        """Run it.

        Raises:
            CellError: it hung, left something behind, or moved a wrong byte.
        """
        before = self._prepare()
        try:
            outcome = self._operate()
            destination = self._look(outcome)
        finally:
            self.hold.release()
            self.rig.proxy.heal()
        self._restore()
        recovery = self._recover(outcome)
        self._end(before)
        return Observed(outcome.status, destination, recovery)

    # Before

    def _prepare(self) -> list[child.Level]:
        """A link that has worked, and what both sides have open."""
        for peer in (self.here, self.there):
            peer.call(child.reset)
        if (self.here.name, self.there.name) not in self.rig.warm:
            self.rig.warm.add((self.here.name, self.there.name))
            self._link()
            for operation in ("pull_blocks", "pull_cache"):
                self._must("LLM_SUCCESS", self._call(operation))
            self._unlink()
            self.here.call(child.reset)
        before = [peer.call(child.level) for peer in (self.here, self.there)]
        if self.cell.phase is not Phase.LINK:
            self._link()
        return before

    def _operate(self) -> Outcome:
        cell, fault = self.cell, self.fault
        if cell.phase is Phase.LOOKUP and not self.message:
            self.there.call(child.invalidate)
        if fault.prepare is not None:
            fault.prepare(self)
        self.hold = self._hold()
        self.here.call(child.set_deadline, self.deadline_s)
        self.running = self._begin()
        self.hold.wait(self.running)
        fault.happen(self)
        outcome: Outcome = self.result(self.running, self.deadline_s)
        self.here.call(child.set_deadline, PATIENT_S)
        return outcome

    @property
    def one_sided(self) -> bool:
        """Whether bytes move without the peer's doing."""
        return self.rig.path != "tcp" and self.cell.phase is Phase.TRANSFER

    @property
    def deadline_s(self) -> float:
        """Of the operation, or of the linking."""
        if self.cell.fault == "deadline far too short":
            return SHORT_S
        return HASTY_S if self.fault.outlasts and not self.one_sided else PATIENT_S

    def _hold(self) -> Hold:
        """Stop the operation in the middle of its phase."""
        phase, proxy = self.cell.phase, self.rig.proxy
        if self.cell.fault == "garbage instead of a reply":
            carries = Carries.DATA if phase is Phase.TRANSFER else Carries.CONTROL
            proxy.inject(Fault(FaultKind.CORRUPT, length=None, seed=1), carries, Direction.FROM_TARGET)
            return Hold()
        if self.fault.prepare is not None:
            return Hold()
        if self.one_sided:
            return HeldCall(self.here, 1 if self.rig.path == "inprocess" else 2)
        carries, direction, at = Carries.CONTROL, Direction.FROM_TARGET, 0
        if phase is Phase.TRANSFER:
            carries, at = Carries.DATA, MIDDLE
            direction = Direction.FROM_TARGET if self.cell.operation.startswith("pull") else Direction.TO_TARGET
        elif self.cell.fault == "data connections cut":
            carries = Carries.DATA
        elif phase is Phase.UNLINK or self.cell.fault == "peer stopped past the deadline":
            direction = Direction.TO_TARGET  # else it has answered already
        return Stalled(proxy.inject(Fault(FaultKind.STALL, at), carries, direction))

    def _begin(self) -> Future[Outcome]:
        milliseconds = max(1, int(self.deadline_s * 1000))
        peer, address = self.there.cluster_id, self.rig.proxy.address
        if self.cell.operation == LINK_OPERATION:
            return self.here.begin(child.link, peer, address, milliseconds)
        if self.cell.operation == UNLINK_OPERATION:
            return self.here.begin(child.unlink, peer, address, milliseconds)
        return self.here.begin(child.operate, self.cell.operation, peer, self.rig.ids[self.message])

    def result(self, future: Future[Any], deadline_s: float = PATIENT_S) -> Any:
        """What a process answers, which must not take for ever."""
        if not wait([future], deadline_s + LIMIT_S).done:
            message = f"hangs: no answer {LIMIT_S} s after a deadline of {deadline_s} s"
            raise CellError(message)
        try:
            return future.result()
        except EOFError:
            message = "crash: the process of the survivor has ended"
            raise CellError(message) from None

    # After

    def _look(self, outcome: Outcome) -> str:
        """How the destination looks; it is marked from now on, so that what comes late would be seen."""
        operation = self.cell.operation
        name = child.DESTINATIONS.get(operation)
        if name is None:
            return ""
        if operation.startswith("pull"):
            self.marked = self.here
        elif self.gone or self.cell.fault == "memory not mapped":
            return LOST
        said = self._verdict(operation)
        if self.marked is None and outcome.quiescent:
            self.there.call(child.mark, name)
            self.marked = self.there
        if said.startswith("WRONG"):
            raise CellError(said)
        if outcome.status == "LLM_SUCCESS" and said != "complete":
            message = f"success, but the destination is {said}"
            raise CellError(message)
        return said

    def _restore(self) -> None:
        """The server as it was before the fault."""
        for future in self.later:
            said = self.result(future)
            if said:
                message = f"the server could not do its part: {said}"
                raise CellError(message)
        if self.fault.restore is not None:
            self.fault.restore(self)

    def _recover(self, outcome: Outcome) -> str:
        """Transfer the other way, on the same link if that works, else on a new one; then do the same once more.

        What was under way would have come by then, to a destination that is marked.
        """
        operation = self.cell.operation
        other = OTHERS_IN_MESSAGE_MODE[operation] if self.message else OTHERS[operation]
        second = self._call(other)
        for _ in range(_TRIES):  # it may meet a connection that is broken, or a write that is not over
            if second.status not in ("LLM_TIMEOUT", "LLM_FAILED"):
                break
            second = self._call(other)
        recovery = SAME
        if second.status != "LLM_SUCCESS":
            recovery = AGAIN
            self._unlink()
            self._link()
            self._must("LLM_SUCCESS", self._call(other))
        if self.marked is not None and not self.marked.call(child.still_marked, child.DESTINATIONS[operation]):
            message = "the destination changed after the operation had ended"
            raise CellError(message)
        if operation in child.DESTINATIONS:
            self._must("LLM_SUCCESS", self._call(operation))
            said = self._verdict(operation)
            if said != "complete":
                message = f"after a success in the end the destination is {said}"
                raise CellError(message)
        return recovery

    def _end(self, before: list[child.Level]) -> None:
        """Unlink: nothing is left."""
        self._unlink()
        for side, level in zip((self.here, self.there), before, strict=True):
            if side is self.there and self.fault.replaces:
                continue  # another process or life than the one that was looked at
            side.call(child.wait_level, level)

    # Steps

    def _verdict(self, operation: str) -> str:
        """How the destination looked when a pull had ended, or looks after a push."""
        if operation.startswith("pull"):
            said: str = self.here.call(child.last_verdict)
        else:
            said = self.there.call(child.verdict, child.DESTINATIONS[operation])
        return said

    def _call(self, operation: str) -> Outcome:
        outcome: Outcome = self.result(
            self.here.begin(child.operate, operation, self.there.cluster_id, self.rig.ids[self.message])
        )
        return outcome

    def _link(self) -> None:
        milliseconds = int(PATIENT_S * 1000)
        self._must(
            "LLM_SUCCESS",
            self.result(self.here.begin(child.link, self.there.cluster_id, self.rig.proxy.address, milliseconds)),
        )

    def _unlink(self) -> None:
        milliseconds = int(PATIENT_S * 1000)
        for side, other in ((self.here, self.there), (self.there, self.here)):
            ended = side.begin(child.unlink, other.cluster_id, None, milliseconds, force=True)
            self._must("LLM_SUCCESS", self.result(ended))

    @staticmethod
    def _must(status: str, outcome: Outcome) -> None:
        if outcome.status != status:
            message = f"{outcome.status} instead of {status} where nothing is wrong: {outcome.text}"
            raise CellError(message)


class Hold:
    """Nothing is held."""

    def wait(self, running: Future[Outcome]) -> None:
        """Until the operation is where it is held, or has ended."""

    def release(self) -> None:
        """Let it go on; idempotent."""


class Stalled(Hold):
    """Held on its way, by the proxy."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def wait(self, running: Future[Outcome]) -> None:
        """See ``Hold``."""
        until(lambda: self._fault.wait(0.02) or running.done(), what=lambda: NOTHING_HELD)

    def release(self) -> None:
        """See ``Hold``."""
        self._fault.release()


class HeldCall(Hold):
    """Held before a system call that copies."""

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer = peer
        peer.call(child.arm, number)

    def wait(self, running: Future[Outcome]) -> None:
        """See ``Hold``."""
        until(lambda: self._peer.call(child.entered) or running.done(), what=lambda: NOTHING_HELD)

    def release(self) -> None:
        """See ``Hold``."""
        self._peer.call(child.disarm)


def kill(run: Run) -> None:
    """Kill -9, then the operation goes on."""
    run.gone = True
    run.rig.kill_server()
    run.hold.release()


def restart(run: Run) -> None:
    """Kill -9, and another life on the same port is there before the operation goes on."""
    address = run.there.address
    assert address is not None
    run.gone = True
    run.rig.kill_server()
    run.there = run.rig.new_server(message=run.message, port=address[1])
    run.hold.release()


def suspend(run: Run) -> None:
    """SIGSTOP until the operation has ended."""
    stop(run.rig.server.pid)
    try:
        run.hold.release()
        wait([run.running], run.deadline_s + LIMIT_S)
    finally:
        go_on(run.rig.server.pid)


def cut_control(run: Run) -> None:
    """The control connection breaks."""
    run.rig.proxy.cut(Carries.CONTROL)
    if run.cell.phase is not Phase.LINK:
        run.here.call(child.wait_not_linked, run.there.cluster_id)
    run.hold.release()


def cut_data(run: Run) -> None:
    """The data connections break."""
    run.rig.proxy.cut(Carries.DATA)
    run.hold.release()


def keep(run: Run) -> None:
    """It is held until the operation has ended."""
    if run.one_sided:  # it cannot end while it is held; a short deadline passes meanwhile
        run.here.call(child.wait_held, SHORT_S)
        run.hold.release()


def unregister(run: Run) -> None:
    """The peer takes its caches back meanwhile."""
    now = run.there.call(child.epoch)
    run.later.append(run.there.begin(child.unregister_all, child.AT_PEER[run.cell.operation]))
    if not run.message:  # else it is held until this very transfer has ended
        run.there.call(child.wait_epoch, now)
    run.hold.release()


def finalize(run: Run) -> None:
    """The peer finalizes meanwhile; a pool ends with it."""
    run.gone = run.rig.path == "mapped"
    run.later.append(run.there.begin(child.finalize))
    if run.cell.phase in (Phase.TRANSFER, Phase.UNLINK):
        run.here.call(child.wait_not_linked, run.there.cluster_id)
    else:  # what it says is held up, too
        run.result(run.later[-1])
    run.hold.release()


def unmap(run: Run) -> None:
    """The peer's memory cannot be accessed any more, although it is registered."""
    run.rig.ids[run.message] = run.there.call(child.unmap)


def nothing(run: Run) -> None:
    """The fault has been injected already, or nothing is to be undone."""
    del run


def replace_process(run: Run) -> None:
    """Another process for the one that was killed."""
    run.there = run.rig.new_server(message=run.message)
    run.rig.there(message=run.message)


def replace_node(run: Run) -> None:
    """Another life for the one that was finalized."""
    run.there = run.rig.new_node(message=run.message)
    run.rig.there(message=run.message)


def register_again(run: Run) -> None:
    """The caches as before, in the same memory."""
    run.rig.ids[run.message] = run.there.call(child.register_as_before)


class Action(NamedTuple):
    """How a fault is made."""

    happen: Callable[[Run], None]
    """While the operation is held."""
    restore: Callable[[Run], None] = nothing
    """Afterwards, so that the peer is as it was."""
    prepare: Callable[[Run], None] | None = None
    """Before the operation, which is not held then."""
    outlasts: bool = False
    """Whether it lasts longer than the deadline."""
    replaces: bool = False
    """Whether the peer is another one afterwards."""


ACTIONS = {
    "peer killed": Action(kill, replace_process, replaces=True),
    "peer restarted": Action(restart, replaces=True),
    "peer stopped past the deadline": Action(suspend, outlasts=True),
    "peer finalizes": Action(finalize, replace_node, replaces=True),
    "control connection cut": Action(cut_control),
    "data connections cut": Action(cut_data),
    "connection stalled": Action(keep, outlasts=True),
    "garbage instead of a reply": Action(nothing),
    "cache unregistered": Action(unregister, register_again),
    "memory not mapped": Action(nothing, register_again, prepare=unmap),
    "deadline far too short": Action(keep, outlasts=True),
}
