"""Which cells the fault matrix has."""

from __future__ import annotations

import enum
from typing import NamedTuple

from fault_matrix_child import OPERATIONS

PATHS = ("process_vm", "mapped", "tcp", "inprocess")
SAME, AGAIN = "same link", "linked again"
LOST = "gone with its owner"
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

_GONE = frozenset({"LLM_NOT_YET_LINK"})
_LATE = frozenset({"LLM_TIMEOUT"})
_BROKEN = frozenset({"LLM_FAILED"})
_OK = frozenset({"LLM_SUCCESS"})
_MISSING = frozenset({"LLM_KV_CACHE_NOT_EXIST"})
_NO_LINK = frozenset({"LLM_LINK_FAILED"})
_NOT_TOLD = frozenset({"LLM_UNLINK_FAILED"})
_ENDED = ("peer killed", "peer restarted", "control connection cut")
_OUTLASTS = ("peer stopped past the deadline", "connection stalled", "deadline far too short")


def expected(cell: Cell) -> frozenset[str]:
    """The statuses that a cell may end with."""
    fault, phase = cell.fault, cell.phase
    if phase is Phase.TRANSFER:
        return _expected_of_transfer(fault, cell.path)
    if fault in _OUTLASTS:
        return _LATE
    if phase is Phase.LINK:
        return _NO_LINK
    if phase is Phase.UNLINK:
        return _NOT_TOLD | _OK if fault == "peer finalizes" else _NOT_TOLD
    if fault == "cache unregistered":  # a pull in message mode has the cache held
        return _MISSING | _OK if cell.operation.startswith("pull") else _MISSING
    # Over TCP, of two connections that end at once, each may be seen first.
    return _GONE | _BROKEN if fault in _ENDED and cell.path == "tcp" else _GONE


def _expected_of_transfer(fault: str, path: str) -> frozenset[str]:
    if fault in _ENDED:
        # The end of a connection may come after the last byte.
        return _GONE | _BROKEN | _OK if path == "tcp" else _GONE | _OK
    return {
        "peer stopped past the deadline": _LATE if path == "tcp" else _OK,
        "peer finalizes": _GONE | _OK,
        "data connections cut": _BROKEN,
        "connection stalled": _LATE,
        "garbage instead of a reply": _BROKEN,
        "cache unregistered": _MISSING | _OK,
        "memory not mapped": _BROKEN,
        "deadline far too short": _LATE if path == "tcp" else _LATE | _OK,
    }[fault]


def objection(cell: Cell, seen: Observed) -> str | None:
    """What is wrong with what was seen, if anything."""
    if seen.status not in expected(cell):
        return f"{seen.status}, expected {' or '.join(sorted(expected(cell)))}"
    if cell.phase is Phase.LOOKUP and seen.status != "LLM_SUCCESS" and seen.destination not in ("untouched", LOST):
        return f"{seen.status} before the first byte, but the destination is {seen.destination}"
    if seen.recovery not in (SAME, AGAIN):
        return f"recovery: {seen.recovery}"
    return None
