"""Fails if the library has become slower, by its ratio to what the machine can do in the same run.

Run it with a Python that has the project installed: ``python benchmarks/gate.py``. Takes about half a minute. The
bounds leave room for a noisy machine, and a ratio that misses its bound is measured again; one that is 1.5 times worse
than usual still fails.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

from llm_datadist.cli.bench import driver, scales
from llm_datadist.cli.bench.cases import describe
from llm_datadist.cli.bench.driver import Plan, Program
from llm_datadist.cli.bench.results import Case, Contestant, latency_ratio, ratio

_KIB: Final = 1 << 10
_TOTAL: Final = 128 << 20
_PLAN: Final = Plan(rounds=5)
_CALLS: Final = 400
_ATTEMPTS: Final = 6


@dataclass(frozen=True, slots=True)
class Gate:
    """One bound on our throughput, or on our latency, as a multiple of the limit's."""

    case: Case
    limit: Contestant
    at_least: float = 0.0
    at_most: float = 0.0
    """Of the median latency; 0 bounds the throughput instead."""

    def measure(self) -> tuple[bool, str]:
        """Whether the bound holds, and what was seen."""
        programs = [Program.ours(), Program.limit(self.limit)]
        if self.at_most:
            ours, limit = driver.latency([self.case], programs, _PLAN, _CALLS)
            seen = latency_ratio(ours, limit, 0.5, _PLAN.rounds).median
            return seen <= self.at_most, f"{seen:.2f}x the latency of {self.limit.value}, at most {self.at_most}x"
        found, bare = driver.run([self.case], programs, _PLAN)
        seen = ratio(found, bare).median
        return seen >= self.at_least, f"{seen:.2f}x the throughput of {self.limit.value}, at least {self.at_least}x"


def _large(operation: str, path: str, block_bytes: int) -> Case:
    return Case(operation, path, tensors=2, blocks=_TOTAL // 2 // block_bytes, block_bytes=block_bytes)


GATES: Final = (
    Gate(_large("pull_blocks", "process_vm", 16 * _KIB), Contestant.LIMIT_PROCESS_VM, at_least=0.65),
    Gate(_large("pull_blocks", "process_vm", 64 * _KIB), Contestant.LIMIT_PROCESS_VM, at_least=0.65),
    Gate(_large("push_blocks", "process_vm", 64 * _KIB), Contestant.LIMIT_PROCESS_VM, at_least=0.65),
    Gate(_large("pull_blocks", "tcp", 16 * _KIB), Contestant.LIMIT_SOCKETS, at_least=0.6),
    Gate(_large("pull_blocks", "tcp", 256 * _KIB), Contestant.LIMIT_SOCKETS, at_least=0.6),
    Gate(_large("push_blocks", "tcp", 256 * _KIB), Contestant.LIMIT_SOCKETS, at_least=0.6),
    Gate(scales.small("process_vm"), Contestant.LIMIT_PROCESS_VM, at_most=3.0),
    Gate(scales.small("tcp"), Contestant.LIMIT_SOCKETS, at_most=3.2),
)


def main() -> int:
    """Measure, print a line for each bound.

    Returns:
        0 if all hold, else 1.
    """
    broken = 0
    for gate in GATES:
        for _ in range(_ATTEMPTS):
            holds, seen = gate.measure()
            if holds:
                break
        broken += not holds
        sys.stdout.write(f"{'ok  ' if holds else 'FAIL'} {describe(gate.case)}: {seen}\n")
        sys.stdout.flush()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
