"""What is compared with whom, and how much is enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llm_datadist.cli.bench.results import Case, Contestant, Memory

if TYPE_CHECKING:
    from collections.abc import Mapping

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20

NAMES: Final[Mapping[Contestant, str]] = {
    Contestant.LIMIT_PROCESS_VM: "the bare process_vm calls",
    Contestant.LIMIT_SOCKETS: "bare sockets",
    Contestant.NIXL: "NIXL",
    Contestant.NIXL_TCP: "NIXL over TCP",
    Contestant.MOONCAKE_TCP: "Mooncake over TCP",
}


@dataclass(frozen=True, slots=True)
class Race:
    """A way to move the whole total, and how many times as fast as others it must be."""

    operation: str
    path: str
    block_bytes: int
    at_least: Mapping[Contestant, float]
    memory: Memory = Memory.HUGE

    def case(self, total_bytes: int) -> Case:
        """Two tensors that have so many bytes together."""
        blocks = max(1, total_bytes // 2 // self.block_bytes)
        return Case(self.operation, self.path, 2, blocks, self.block_bytes, memory=self.memory)


def _pull(block_bytes: int, nixl: float) -> Race:
    return Race("pull_blocks", "process_vm", block_bytes, {Contestant.NIXL: nixl, Contestant.LIMIT_PROCESS_VM: 0.85})


def _push(block_bytes: int, nixl: float) -> Race:
    return Race("push_blocks", "process_vm", block_bytes, {Contestant.NIXL: nixl})


def _tcp(block_bytes: int, nixl: float, mooncake: float) -> Race:
    others = {Contestant.NIXL_TCP: nixl, Contestant.MOONCAKE_TCP: mooncake, Contestant.LIMIT_SOCKETS: 0.80}
    return Race("pull_blocks", "tcp", block_bytes, others)


SAME_HOST: Final = (
    _pull(16 * _KIB, 3.0),
    _pull(64 * _KIB, 2.5),
    _pull(_MIB, 1.5),
    _push(16 * _KIB, 2.0),
    _push(64 * _KIB, 2.0),
    _push(_MIB, 1.5),
    Race("pull_blocks", "process_vm", 32 * _KIB, {Contestant.NIXL: 3.0}, Memory.SMALL),
)
TCP: Final = (_tcp(16 * _KIB, 5.0, 3.0), _tcp(256 * _KIB, 6.0, 2.0))

CPU_BLOCK_BYTES: Final = 64 * _KIB
"""Of the pull on the same host whose CPU time must be at most that of NIXL."""
MAX_CPU: Final = 1.0

SMALL: Final = {
    "process_vm": Contestant.NIXL,
    "tcp": Contestant.NIXL_TCP,
}
"""Whose latency a pull of one block of 32 KiB of two tensors must not exceed, by path."""
MAX_LATENCY: Final = 1.0

BUSY: Final = {"process_vm": (64 * _KIB, 0.9), "tcp": (256 * _KIB, 0.5)}
"""Block size, and share of the throughput that must remain while the owner's interpreter is busy, by path."""
MAX_BUSY_P99: Final = 2.0

MAX_NS_A_SPAN: Final = 40.0
MAX_GROWTH: Final = 1.5
"""Cost a span at any number of spans against the least at a smaller number: more would not be linear."""

MAX_LINKS_LATENCY: Final = 1.2

LAYERS: Final = 32
LAYER_BLOCK_BYTES: Final = 64 * _KIB
MAX_LAYERWISE: Final = 1.10
