"""Which cells the fault matrix has."""

from __future__ import annotations

import enum
from typing import NamedTuple

from fault_matrix_child import OPERATIONS

PATHS = ("process_vm", "mapped", "tcp", "inprocess")
LINK_OPERATION, UNLINK_OPERATION = "link_clusters", "unlink_clusters"


class Phase(enum.Enum):
    """When the fault happens."""

    LINK = "link"
    LOOKUP = "lookup"
    TRANSFER = "transfer"
    UNLINK = "unlink"


class Cell(NamedTuple):
    """One combination."""

    fault: str
    phase: Phase
    path: str
    operation: str

    def __str__(self) -> str:
        return f"{self.path}-{self.phase.value}-{self.fault}-{self.operation}"


class Observed(NamedTuple):
    """What was seen in one cell."""

    status: str
    destination: str
    """How the destination looked: untouched, partial or complete, or that it went with its owner; else empty."""
    recovery: str
    """What was needed before the next operation succeeded: nothing (same link), or to link again."""

    def __str__(self) -> str:
        return ", ".join(part.removeprefix("LLM_") for part in self if part)


_ALL = frozenset(Phase)
_LINKED = frozenset({Phase.LOOKUP, Phase.TRANSFER, Phase.UNLINK})
_OPERATING = frozenset({Phase.LOOKUP, Phase.TRANSFER})
FAULTS: dict[str, frozenset[Phase]] = {
    "peer killed": _ALL,
    "peer restarted": _ALL,
    "peer stopped past the deadline": _ALL,
    "peer finalizes": _ALL,
    "control connection cut": _ALL,
    "data connections cut": frozenset({Phase.LINK, Phase.TRANSFER}),
    "connection stalled": _ALL,
    "garbage instead of a reply": _ALL,
    "cache unregistered": _OPERATING,
    "memory not mapped": frozenset({Phase.TRANSFER}),
    "deadline far too short": _ALL,
}
"""Each fault and the phases in which it can happen."""
_IN_ONE_PROCESS = (
    "peer finalizes",
    "control connection cut",
    "cache unregistered",
    "memory not mapped",
    "deadline far too short",
)
_ON_DATA_CONNECTIONS = ("data connections cut", "connection stalled", "garbage instead of a reply")


def makes_sense(fault: str, phase: Phase, path: str) -> bool:
    """Whether a fault can happen there."""
    if phase not in FAULTS[fault]:
        return False
    if path == "inprocess":
        return phase is Phase.TRANSFER and fault in _IN_ONE_PROCESS
    if path != "tcp" and (
        fault == "data connections cut" or (phase is Phase.TRANSFER and fault in _ON_DATA_CONNECTIONS)
    ):
        return False
    return not (path == "mapped" and fault == "memory not mapped")  # pools stay mapped


def operations(phase: Phase) -> tuple[str, ...]:
    """What is called in a phase."""
    return {Phase.LINK: (LINK_OPERATION,), Phase.UNLINK: (UNLINK_OPERATION,)}.get(phase, OPERATIONS)


CELLS = [
    Cell(fault, phase, path, operation)
    for path in PATHS
    for phase in Phase
    for fault in FAULTS
    if makes_sense(fault, phase, path)
    for operation in operations(phase)
]
