"""What an agent knows of another one: how to reach it, the keys of its memory, and its region table.

The table is read over NIXL, too: who is about to move bytes, or has just done so, sees without the peer's doing what is
registered at that very moment.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from llm_datadist.memory.regions import (
    ALIVE,
    CAPACITY,
    MAGIC,
    ROW_BYTES,
    RegionView,
    StaleEpochError,
    UnknownRegionError,
)
from llm_datadist.paths.base import ConnectionLostError, PathError, PathTimeoutError, PeerGoneError
from llm_datadist.wire import messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from llm_datadist.paths.base import Ask
    from llm_datadist.paths.nixl_agent import Agent
    from llm_datadist.utils.deadline import Deadline

    U64 = NDArray[np.uint64]

_ROWS: Final = 1024
"""Of the table, that are read at a time."""


class Head(NamedTuple):
    """The first row of a region table."""

    magic: int
    epoch: int
    state: int
    capacity: int


class Run(Protocol):
    """Posts a request and waits for its end; then gives it back, unless it is to be used again."""

    def __call__(self, handle: int, *, reuse: bool = False) -> object:
        """See above.

        Raises:
            PathError: it failed, or there is no time.
        """


class KeysOutdatedError(Exception):
    """The peer has taken memory back since its keys were told: they all have to be told anew."""


class Look:
    """Room for parts of the peer's table, and a request that is ready for its head. For one transfer at a time."""

    def __init__(self, agent: Agent, remote: str, table: int) -> None:
        self._agent = agent
        self._remote = remote
        self._table = table
        self._room: U64 = np.zeros((_ROWS, ROW_BYTES // 8), dtype=np.uint64)
        self._at = self._room.ctypes.data
        self._words = memoryview(self._room.reshape(-1).data)
        self.ticket: object = None
        """Of the flight that has it."""
        agent.registrations.register(self._at, self._at + self._room.nbytes)
        try:
            self._head = agent.requests.make([(self._at, ROW_BYTES, 0)], [(table, ROW_BYTES, 0)], remote, writing=False)
        except ConnectionLostError:
            agent.registrations.deregister(self._at, self._at + self._room.nbytes)
            raise

    def head(self, run: Run) -> Head:
        """The head as it is now."""
        run(self._head, reuse=True)
        words = self._words
        return Head(words[0], words[1], words[2], words[3])

    def is_in(self, epoch: int, run: Run) -> bool:
        """Whether the peer serves its memory, and is in this epoch."""
        run(self._head, reuse=True)
        words = self._words
        return words[0] == MAGIC and words[1] == epoch and words[2] == ALIVE

    def rows(self, slots: U64, run: Run) -> U64:
        """These rows as they are now."""
        return np.concatenate([self._some(slots[at : at + _ROWS], run) for at in range(0, len(slots), _ROWS)])

    def _some(self, slots: U64, run: Run) -> U64:
        count = len(slots)
        here, there = (np.zeros((count, 3), dtype=np.uint64) for _ in range(2))
        here[:, 0] = self._at + np.arange(count, dtype=np.uint64) * np.uint64(ROW_BYTES)
        there[:, 0] = np.uint64(self._table) + slots * np.uint64(ROW_BYTES)
        here[:, 1] = there[:, 1] = ROW_BYTES
        handle = self._agent.requests.make(here, there, self._remote, writing=False)
        run(handle)
        rows: U64 = self._room[:count].copy()
        return rows

    def close(self) -> None:
        """Give everything back; none of its requests runs."""
        self._agent.requests.free(self._head)
        self._agent.registrations.deregister(self._at, self._at + self._room.nbytes)


class Remote:
    """One peer's agent, shared by all paths to it. Thread-safe."""

    def __init__(self, agent: Agent, name: str) -> None:
        self.name = name
        self.on_devices: bool = False
        """Whether a path to it is for GPU memory."""
        self._agent = agent
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.users: int = 0
        """Paths."""
        self.connection: int = 0
        """Counts them: keys are bound to one."""
        self._flights: set[object] = set()
        """A ticket for each transfer that uses it."""
        self._waiters = 0
        """Threads that wait for none to be left."""
        self._ready = False
        self._left = 0
        """Of the flights, those for which nobody waits."""
        self._mending = False
        self._loaded = False
        self._table = 0
        self._generation = 0
        self._keys: dict[int, tuple[int, int]] = {}
        """Regions whose keys are known, and from where to where memory is registered with them."""
        self._looks: list[Look] = []
        self._mirror: U64 = np.zeros((CAPACITY, ROW_BYTES // 8), dtype=np.uint64)
        self._view = RegionView(self._mirror)
        self._valid: tuple[int, set[int]] = (0, set())
        """Regions whose rows in the mirror are those of that epoch."""

    # Connection

    def borrow(self) -> Look | None:
        """``enter``, if that needs nothing more; else None.

        Takes no lock: either this sees that it is not ready, or whoever has made it so sees the ticket, and touches no
        look meanwhile.
        """
        ticket = object()
        self._flights.add(ticket)
        if self._ready:
            try:
                look = self._looks.pop()
            except IndexError:
                pass  # all are in use
            else:
                look.ticket = ticket
                return look
        self._flights.discard(ticket)
        if self._waiters:
            self._tell_waiters()
        return None

    def enter(self, ask: Ask, deadline: Deadline) -> Look:
        """Begin to use it: connected, and with nothing under way that an earlier transfer has left.

        Raises:
            PathError: it cannot be reached, or not in time.
        """
        while True:
            look = self.borrow()
            if look is not None:
                return look
            if self._left:
                self._agent.requests.look_after()
            with self._lock:
                if not self._changed.wait_for(lambda: not (self._mending or self._left), deadline.remaining()):
                    message = "NIXL has not finished an earlier transfer that failed"
                    raise PathTimeoutError(message)
                if self._loaded:
                    return self._new_look()
                self._mending = True
            try:
                self._connect(ask, deadline)
            finally:
                self.resume()

    def _new_look(self) -> Look:
        try:
            look = Look(self._agent, self.name, self._table)
        except ConnectionLostError:  # NIXL has forgotten the peer by itself
            self.lost()
            raise
        look.ticket = object()
        self._flights.add(look.ticket)
        return look

    def pause(self, deadline: Deadline) -> bool:
        """Let nobody begin to use it, and wait until nobody does; False, and it is not paused, if that takes too long.

        ``resume`` ends it.
        """
        with self._lock:
            if not self._changed.wait_for(lambda: not self._mending, deadline.remaining()):
                return False
            self._mending = True
            self._update()
            if self._idle(deadline):
                return True
        self.resume()
        return False

    def resume(self) -> None:
        """Undo ``pause``."""
        with self._lock:
            self._mending = False
            self._update()
            self._changed.notify_all()

    def _idle(self, deadline: Deadline) -> bool:
        self._waiters += 1
        try:
            return self._changed.wait_for(lambda: not self._flights, deadline.remaining())
        finally:
            self._waiters -= 1

    def _update(self) -> None:
        self._ready = self._loaded and not self._mending and not self._left

    def leave(self, look: Look, *, was_left: bool = False) -> None:
        """End what ``enter`` began."""
        ticket = look.ticket
        self._looks.append(look)  # as long as the ticket is there, nobody closes it
        self._flights.discard(ticket)
        if was_left:
            with self._lock:
                self._left -= 1
                self._update()
                self._changed.notify_all()
        elif self._waiters:
            self._tell_waiters()
        if not self.users:
            self.retire()

    def _tell_waiters(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def abandon(self) -> None:
        """Nobody waits any more for what one of its users has begun."""
        with self._lock:
            self._left += 1
            self._update()

    def lost(self) -> None:
        """The connection is broken, or what is known is out of date: connect anew before anything else."""
        with self._lock:
            self._loaded = False
            self._update()

    def _connect(self, ask: Ask, deadline: Deadline) -> None:
        with self._lock:
            if not self._idle(deadline):
                message = "other transfers did not end, so that NIXL cannot connect anew"
                raise PathTimeoutError(message)
        told = self._ask(ask, [], deadline)
        self._disconnect()
        self._load(told.metadata)
        with self._lock:
            self._table, self._generation, self._loaded = told.table, told.generation, True
            self.connection += 1

    def _disconnect(self) -> None:
        while self._looks:
            self._looks.pop().close()
        self._keys = {}
        with contextlib.suppress(Exception):  # nothing is known of it, or it has gone by itself
            self._agent.native.invalidateRemoteMD(self.name)

    def _load(self, metadata: bytes) -> None:
        try:
            self._agent.native.loadRemoteMD(metadata)
        except Exception as error:
            message = f"NIXL does not understand what the peer says of its agent: {error}"
            raise ConnectionLostError(message) from error

    def _ask(self, ask: Ask, regions: Sequence[int], deadline: Deadline) -> messages.Agent:
        backend, on_devices = self._agent.backend_name, self.on_devices
        answer = ask(messages.AskAgent(backend=backend, regions=list(regions), on_devices=on_devices), deadline)
        if isinstance(answer, messages.Refuse):
            raise ConnectionLostError(answer.reason)
        if not isinstance(answer, messages.Agent) or answer.name != self.name:
            message = f"the peer answered with {type(answer).__name__}, not with what it has said before"
            raise PathError(message)
        if len(answer.regions) != len(answer.ranges):
            message = "the peer tells of regions without saying where they are registered"
            raise PathError(message)
        return answer

    def need(self, regions: Sequence[int], ask: Ask, deadline: Deadline) -> None:
        """Have the keys of these regions.

        Raises:
            KeysOutdatedError: connect anew first.
            UnknownRegionError: one of them is not registered.
            PathError: the peer does not tell them.
        """
        missing = [region for region in regions if region not in self._keys]
        for first in range(0, len(missing), messages.MAX_AGENT_REGIONS):
            part = missing[first : first + messages.MAX_AGENT_REGIONS]
            told = self._ask(ask, part, deadline)
            unknown = set(part) - set(told.regions)
            if unknown:
                message = f"region {min(unknown):#x} is not registered (any more)"
                raise UnknownRegionError(message)
            ranges = dict(zip(told.regions, told.ranges, strict=True))
            # Of memory that has gone, NIXL keeps what it knows; it neither takes a new key for the same addresses nor
            # finds any for addresses that overlap them.
            known = set(self._keys.values())
            fresh = set(ranges.values())
            if _overlap(fresh - known, known) or (told.generation != self._generation and fresh & known):
                raise KeysOutdatedError
            with self._lock:
                self._load(told.metadata)
                if told.device_metadata:
                    self._load(told.device_metadata)
                self._keys.update(ranges)

    def found(self, regions: Sequence[int], epoch: int) -> list[tuple[int, int]] | None:
        """Address and size of these regions, if that and their keys are known since this epoch has begun.

        Raises:
            RegionError: one of them is not for peers.
        """
        known_epoch, known = self._valid
        if known_epoch != epoch or not known.issuperset(regions) or not self._keys.keys() >= set(regions):
            return None
        return [self._view.find(region) for region in regions]

    # The peer's region table

    def head(self, look: Look, run: Run) -> Head:
        """The head of the table as it is now.

        Raises:
            PeerGoneError: the peer has been finalized.
        """
        head = look.head(run)
        if head.magic != MAGIC:
            message = "what NIXL reads is not the peer's region table"
            raise PathError(message)
        if head.state != ALIVE:
            message = "the peer has been finalized"
            raise PeerGoneError(message)
        return head

    def check(self, regions: U64, epoch: int, look: Look, run: Run) -> tuple[RegionView, int]:
        """The peer's table with the rows of these regions, and its epoch.

        Raises:
            PeerGoneError: the peer has been finalized.
            StaleEpochError: it is in another epoch.
        """
        head = self.head(look, run)
        if epoch not in (0, head.epoch):
            message = f"planned with epoch {epoch}, now {head.epoch}"
            raise StaleEpochError(message)
        known_epoch, known = self._valid
        if known_epoch != head.epoch:
            known = set()
        wanted = regions.tolist()
        if not known.issuperset(wanted):
            slots = np.unique(regions & np.uint64(CAPACITY - 1))
            self._mirror[slots.astype(np.int64)] = look.rows(slots, run)
            self._valid = (head.epoch, known | set(wanted))
        return self._view, head.epoch

    def confirm(self, regions: U64, epoch: int, look: Look, run: Run) -> None:
        """Make sure, after a transfer that ``check`` let go on, that these regions have been there all the time.

        Raises:
            PeerGoneError: the peer has been finalized.
            StaleEpochError: one has gone.
        """
        head = self.head(look, run)
        if head.epoch == epoch:
            return
        rows = look.rows(regions & np.uint64(CAPACITY - 1), run)
        if not (rows[:, 0] == regions).all():
            message = "a cache was unregistered during the transfer"
            raise StaleEpochError(message)

    def retire(self) -> None:
        """No path uses it: forget it if the connection is broken. A good one is kept, for it cannot be closed.

        UCX keeps the socket of a connection until the peer closes it, too.
        """
        with self._agent.lock:  # nobody may attach to what is being closed
            if not (self.users or self._loaded):
                self.close()

    def close(self) -> None:
        """Forget it; idempotent. As long as something is under way it stays, and the agent with it."""
        with self._lock:
            self._loaded = False
            self._update()
            if self._flights or self._mending:
                return
            self._disconnect()
        self._agent.remotes.pop(self.name, None)


def _overlap(some: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> bool:
    """Whether any of some ranges shares a byte with any of others."""
    return any(low < end and begin < high for low, high in some for begin, end in others)


def attach(agent: Agent, name: str) -> Remote:
    """What is known of a peer's agent, for one more path."""
    with agent.lock:
        remote = agent.remotes.get(name)
        if remote is None:
            remote = agent.remotes[name] = Remote(agent, name)
        remote.users += 1
        return remote


def detach(agent: Agent, remote: Remote) -> None:
    """Undo ``attach``."""
    with agent.lock:
        remote.users -= 1
        unused = not remote.users
    if unused:
        remote.retire()
