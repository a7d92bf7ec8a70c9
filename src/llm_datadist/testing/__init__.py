"""Tools for testing code that uses this library, and paths that are added to it."""

from __future__ import annotations

from llm_datadist.testing.conformance import CHECKS, check_path
from llm_datadist.testing.ends import PathEnds, ends_of
from llm_datadist.testing.faults import Fault, FaultKind
from llm_datadist.testing.faulty import Faults, FaultyPath, FaultyTransport, faulty_path
from llm_datadist.testing.loopback import loopback
from llm_datadist.testing.moves import ConformanceError
from llm_datadist.testing.owner import GUARD, POISON, MemoryOwner, pattern
from llm_datadist.testing.proxy import Carries, Direction, TcpProxy

__all__ = [
    "CHECKS",
    "GUARD",
    "POISON",
    "Carries",
    "ConformanceError",
    "Direction",
    "Fault",
    "FaultKind",
    "Faults",
    "FaultyPath",
    "FaultyTransport",
    "MemoryOwner",
    "PathEnds",
    "TcpProxy",
    "check_path",
    "ends_of",
    "faulty_path",
    "loopback",
    "pattern",
]
