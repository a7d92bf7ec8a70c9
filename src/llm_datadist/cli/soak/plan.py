"""What a soak does in each round. All of it follows from the seed, whatever the machine's speed."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from llm_datadist.cli.models import CacheShape

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS: Final = 64
BATCH: Final = 4
"""Entries of the contiguous view of the same memory."""
ENTRY_BLOCKS: Final = BLOCKS // BATCH
NUM_LAYERS: Final = 2
_TOKEN_SHAPE: Final = (512,)
_FEW_BLOCKS: Final = 3
BUSY_S: Final = 0.2
"""How long each transfer of a round is made again and again."""
_CALM_SHARE: Final = 0.4
"""Of the rounds in which nothing is disturbed."""


class Lane(Enum):
    """One way for bytes to go. Members of different lanes do not know each other; the value is their ``paths``."""

    PROCESS_VM = "process_vm"
    MAPPED = "mapped"
    TCP = "tcp"
    INPROCESS = "inprocess"
    MESSAGES = "auto"
    """In message mode, over whatever works."""


class Operation(Enum):
    """One way to move bytes from a source to a target; the value is what the table shows."""

    PULL_BLOCKS = "pull_blocks"
    PULL_FEW = "pull_blocks (few)"
    PUSH_BLOCKS = "push_blocks"
    PULL_CACHE = "pull_cache"
    PUSH_CACHE = "push_cache"
    CACHE_TO_BLOCKS = "pull_blocks (cache)"
    LAYER_WISE = "transfer_cache_async"
    COPY_BLOCKS = "pull_blocks, copy_blocks"

    @property
    def by_source(self) -> bool:
        """Whether the source makes the call, not the target."""
        return self in {Operation.PUSH_BLOCKS, Operation.PUSH_CACHE, Operation.LAYER_WISE}


_BY_MESSAGE: Final = (Operation.PULL_CACHE, Operation.CACHE_TO_BLOCKS, Operation.LAYER_WISE)


class Event(Enum):
    """What disturbs a round; the value is what the table shows."""

    NONE = "undisturbed"
    KILL = "kill -9, restart"
    STOP = "stop, go on"
    REGISTER = "unregister, register"
    UNLINK = "unlink by force, link"
    SWITCH = "unlink, switch_role, link"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """One ``LLMDataDist``: in which process, in which lane; a lane within processes has two of them in each."""

    process: int
    lane_index: int
    slot: int = 0

    @property
    def lane(self) -> Lane:
        """Its lane."""
        return list(Lane)[self.lane_index]

    @property
    def cluster_id(self) -> int:
        """Its cluster id; the same in every life of the process."""
        return 1 + 100 * self.process + 10 * self.lane_index + self.slot

    @property
    def shape(self) -> CacheShape:
        """Its caches; contents differ from place to place."""
        return CacheShape(self.lane.value, self.cluster_id, NUM_LAYERS, 2, _TOKEN_SHAPE)


@dataclass(frozen=True, slots=True)
class Table:
    """Which block of the source goes to which of the target."""

    src: tuple[int, ...]
    dst: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One operation from the source cache of one place to the target cache of another."""

    operation: Operation
    source: Place
    target: Place
    table: Table
    """Where each block should be afterwards, for all operations."""
    entries: tuple[int, int] = (0, 0)
    """Batch entries of source and target, for what moves those."""

    @property
    def actor(self) -> Place:
        """Who makes the call."""
        return self.source if self.operation.by_source else self.target


@dataclass(frozen=True, slots=True)
class Round:
    """All transfers of one round, which run at once, and what disturbs them."""

    number: int
    transfers: tuple[Transfer, ...]
    event: Event
    victim: Place
    other: Place
    """A peer of the victim, for what concerns two."""
    delay_s: float
    """When the event happens, after the transfers have begun."""
    seed: int
    """Of contents that are made anew."""


def groups(processes: int) -> list[list[Place]]:
    """The places that are linked with each other."""
    found = []
    for index, lane in enumerate(Lane):
        if lane is Lane.INPROCESS:
            found += [[Place(process, index, slot) for slot in range(2)] for process in range(processes)]
        else:
            found.append([Place(process, index) for process in range(processes)])
    return found


class Schedule:
    """The rounds, one after the other, of a seed."""

    def __init__(self, seed: int, processes: int) -> None:
        self._chance = random.Random(seed)  # noqa: S311 - it shall be repeatable, not secret
        self._processes = processes
        self._numbers = itertools.count(1)

    def seed(self) -> int:
        """A seed for contents."""
        return self._chance.randrange(1 << 62)

    def next(self) -> Round:
        """The next round. The first process is never killed or stopped: it has to show that nothing piles up."""
        chance = self._chance
        transfers: list[Transfer] = []
        for group in groups(self._processes):
            ring = chance.sample(group, len(group))
            transfers += [self._transfer(source, ring[at - 1]) for at, source in enumerate(ring)]
        event = Event.NONE if chance.random() < _CALM_SHARE else chance.choice(list(Event)[1:])
        first = 1 if event in {Event.KILL, Event.STOP} else 0
        candidates = [place for group in groups(self._processes) for place in group if place.process >= first]
        victim = chance.choice(candidates)
        peers = next(group for group in groups(self._processes) if victim in group)
        other = chance.choice([place for place in peers if place != victim])
        delay = chance.uniform(0, BUSY_S)
        return Round(next(self._numbers), tuple(transfers), event, victim, other, delay, self.seed())

    def _transfer(self, source: Place, target: Place) -> Transfer:
        chance = self._chance
        operations: Sequence[Operation] = _BY_MESSAGE if source.lane is Lane.MESSAGES else list(Operation)
        operation = chance.choice(operations)
        src, dst = chance.sample(range(BLOCKS), BLOCKS), chance.sample(range(BLOCKS), BLOCKS)
        entries = (chance.randrange(BATCH), chance.randrange(BATCH))
        from_entry, to_entry = (tuple(range(at * ENTRY_BLOCKS, (at + 1) * ENTRY_BLOCKS)) for at in entries)
        count = chance.randint(1, BLOCKS // 2)
        if operation in {Operation.PULL_CACHE, Operation.PUSH_CACHE}:
            table = Table(from_entry, to_entry)
        elif operation is Operation.CACHE_TO_BLOCKS:
            table = Table(from_entry, tuple(dst[:ENTRY_BLOCKS]))
        elif operation is Operation.LAYER_WISE and source.lane is Lane.MESSAGES:
            table = Table(from_entry, from_entry)
        elif operation is Operation.COPY_BLOCKS:
            table = Table((*src[:count], *src[:count]), tuple(dst[: 2 * count]))
        else:
            count = min(count, _FEW_BLOCKS) if operation is Operation.PULL_FEW else count
            table = Table(tuple(src[:count]), tuple(dst[:count]))
        return Transfer(operation, source, target, table, entries)
