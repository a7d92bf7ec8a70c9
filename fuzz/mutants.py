"""Mutated inputs without end, always the same ones: ``python -m fuzz.mutants --count 1000000 --live 100000``.

Most go to the decoders alone, ``--live`` of them to the sockets of a running engine (see ``storm``). A finding is told
with the seed and the number with which it comes again.
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import time
import traceback
from dataclasses import dataclass

from fuzz import storm
from fuzz.mutate import Mutator
from fuzz.targets import TARGETS

MAX_GROWTH_BYTES = 128 << 20
_SHOWN = 400


@dataclass(frozen=True)
class Outcome:
    """What became of the mutants of one target."""

    name: str
    inputs: int
    seconds: float
    finding: str | None
    """Which input it was, and the traceback."""


def run(name: str, seed: int, count: int) -> Outcome:
    """``count`` mutants for one target; ends at the first finding."""
    target = TARGETS[name]
    begin = time.monotonic()
    mutants = iter(Mutator(list(target.examples()), target.form, seed))
    for number in range(count):
        raw = next(mutants)
        try:
            target.run(raw)
        except Exception:  # noqa: BLE001 - whatever is not documented is a finding
            finding = f"seed {seed}, input {number}: {raw[:_SHOWN]!r} ({len(raw)} bytes)\n{traceback.format_exc()}"
            return Outcome(name, number + 1, time.monotonic() - begin, finding)
    return Outcome(name, count, time.monotonic() - begin, None)


def quiet() -> None:
    """Do not log what is refused: that is nearly everything."""
    logging.getLogger("LLM_DATADIST").setLevel(logging.CRITICAL + 1)


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="inputs in all")
    parser.add_argument("--live", type=int, default=0, help="how many of them go to a running engine")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    quiet()
    each = -(-(given.count - given.live) // len(TARGETS))
    failed = False
    print(f"{'target':<16}{'inputs':>10}{'seconds':>9}  finding")
    for name in TARGETS:
        before = peak_bytes()
        outcome = run(name, given.seed, each)
        growth = peak_bytes() - before
        finding = outcome.finding or (f"grew by {growth >> 20} MiB" if growth > MAX_GROWTH_BYTES else None)
        failed |= finding is not None
        print(f"{name:<16}{outcome.inputs:>10}{outcome.seconds:>9.1f}  {finding or '-'}", flush=True)
    if given.live:
        report = storm.run(given.seed, given.live)
        failed |= bool(report.findings)
        print(report)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
