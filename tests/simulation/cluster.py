"""Members of a simulated cluster: an engine each, and caches whose every word tells where it came from."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist.engine.engine import Engine
from llm_datadist.engine.options import EngineOptions
from llm_datadist.engine.requests import BlocksKey, CacheKind, CacheSpec, PeerAddress
from llm_datadist.status import LLMException

if TYPE_CHECKING:
    from simulation.scheduler import Task
    from simulation.world import Process, World

BLOCKS = 8
TENSORS = 2
POISON = 0xDDDDDDDD
SOURCE, SINK, TARGET = range(3)
"""The cache that others read, the one that they write (both also are the model ids of keys), and that for own pulls."""


@dataclass(eq=False)
class Memory:
    """One registered cache."""

    serial: int
    tensors: list[np.ndarray[Any, np.dtype[np.uint32]]]
    cache_id: int = 0
    since: float = 0.0
    ending: float | None = None
    """When its unregistration began."""
    until: float | None = None
    """When it was unregistered."""

    @property
    def addrs(self) -> list[int]:
        return [tensor.ctypes.data for tensor in self.tensors]

    def fill(self) -> None:
        """Let every word name this cache, the tensor and the block."""
        for number, tensor in enumerate(self.tensors):
            tensor[:] = self.word(number, np.arange(BLOCKS, dtype=np.uint32))[:, None]

    def word(self, tensor: int, block: Any) -> Any:
        return np.uint32(self.serial << 16 | tensor << 8) | block

    def poison(self) -> None:
        for tensor in self.tensors:
            tensor[:] = POISON


@dataclass(frozen=True)
class Frozen:
    """Bytes that nobody may change any more."""

    tensors: list[np.ndarray[Any, np.dtype[np.uint32]]]
    blocks: list[int]
    content: list[np.ndarray[Any, np.dtype[np.uint32]]]
    why: str

    @classmethod
    def of(cls, memory: Memory, blocks: list[int], why: str) -> Frozen:
        return cls(memory.tensors, blocks, [tensor[blocks].copy() for tensor in memory.tensors], why)

    def changed(self) -> bool:
        return any(
            not np.array_equal(tensor[self.blocks], content)
            for tensor, content in zip(self.tensors, self.content, strict=True)
        )


@dataclass
class Plan:
    """What all members of one cluster have in common; drawn from the seed."""

    remote_accessible: bool
    paths: tuple[str, ...]
    timeout_ms: int
    words: int
    """Of one block of one tensor."""

    @classmethod
    def draw(cls, world: World) -> Plan:
        rng = world.scheduler.rng
        return cls(
            remote_accessible=rng.random() < 0.7,
            paths=rng.choice((("tcp",), ("tcp",), ("process_vm",), ("process_vm", "tcp"))),
            timeout_ms=rng.choice((200, 1000, 3000)),
            words=rng.choice((16, 128, 1500)),
        )


@dataclass(eq=False)
class Member:
    """One cluster id; it may die and live again."""

    cluster_id: int
    world: World
    plan: Plan
    serials: itertools.count[int]
    process: Process | None = None
    engine: Engine | None = None
    ready: bool = False
    closing: bool = False
    memories: list[list[Memory]] = field(default_factory=lambda: [[], [], []])
    """Of all its lives: sources, sinks, and what pulls go to."""
    busy: set[int] = field(default_factory=set)
    """Blocks of the sink that pushes are under way to."""
    busy_targets: set[int] = field(default_factory=set)
    lock: Any = None
    """Of who unregisters something."""

    @property
    def port(self) -> int:
        return 26_000 + self.cluster_id

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.cluster_id, (("127.0.0.1", self.port),), 1)

    def options(self) -> EngineOptions:
        return EngineOptions(
            remote_accessible=self.plan.remote_accessible,
            sync_timeout_ms=self.plan.timeout_ms,
            listen=("127.0.0.1", self.port),
            has_comm_res=True,
            paths=self.plan.paths,
            huge_pages=False,
        )

    def start(self, life: int) -> Task:
        """A new process with an engine and its caches; its first task."""
        self.process = self.world.process(f"cluster {self.cluster_id}, life {life}")
        self.engine, self.ready, self.closing = None, False, False
        self.busy, self.busy_targets = set(), set()
        self.lock = self.world.primitives.Lock()
        return self.process.run("main", self._begin)

    def _begin(self) -> None:
        for _ in range(50):
            try:
                self.engine = Engine(self.cluster_id, self.options())
                break
            except LLMException:  # the port is not free yet
                self.world.scheduler.sleep(0.1)
        assert self.engine is not None, "cannot listen"
        for role in (SOURCE, SINK, TARGET):
            self.register(role)
        self.ready = True

    def register(self, role: int) -> Memory:
        """A new cache for a role."""
        assert self.engine is not None
        tensors = [np.zeros((BLOCKS, self.plan.words), dtype=np.uint32) for _ in range(TENSORS)]
        memory = Memory(next(self.serials), tensors)
        if role == SOURCE:
            memory.fill()
        spec = CacheSpec(TENSORS, (BLOCKS, self.plan.words), 4, "DT_UINT32", on_device=True, kind=CacheKind.BLOCKS)
        memory.since = self.world.scheduler.now
        self.memories[role].append(memory)
        key = BlocksKey(role) if role in (SOURCE, SINK) else None
        memory.cache_id = self.engine.register(spec, memory.addrs, [key], accessible=True)
        return memory

    def present(self, role: int) -> Memory:
        """The newest cache of a role."""
        return self.memories[role][-1]

    def crash(self) -> None:
        """The process is killed."""
        assert self.process is not None
        self.process.kill()
        now = self.world.scheduler.now
        for memory in itertools.chain(*self.memories):
            memory.until = memory.until if memory.until is not None else now
        self.ready, self.engine = False, None

    def finalize(self) -> None:
        """End it in good order."""
        engine = self.engine
        if engine is None or self.closing:
            return
        self.closing, self.ready = True, False
        engine.close()
