"""Run many schedules: ``python -m simulation --schedules 10000 --seed 1`` in the folder ``tests``.

A bad schedule is told with its seed: with ``--seed`` of it, ``--schedules 1 --trace`` shows all that happened.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import os
import sys
import time

from simulation.planted import PLANTED
from simulation.schedule import Result, run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule; the others count up from it")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--trace", action="store_true", help="tell what happened in each schedule")
    parser.add_argument("--keep-going", type=int, default=5, help="stop after so many bad schedules")
    parser.add_argument("--plant", choices=sorted(PLANTED), help="take something away that an invariant rests on")
    given = parser.parse_args()
    with PLANTED[given.plant]() if given.plant else contextlib.nullcontext():
        return _run(given)


def _run(given: argparse.Namespace) -> int:
    begin, bad, steps, seconds, digest = time.monotonic(), 0, 0, 0.0, 0
    outcomes: collections.Counter[str] = collections.Counter()
    descriptors = _descriptors()
    done = 0
    for seed in range(given.seed, given.seed + given.schedules):
        if time.monotonic() - begin > given.seconds:
            break
        result: Result = run(seed)
        left = _left_since(descriptors)
        if left:
            descriptors += left
            result.violations.append(f"{left} descriptors are left after the schedule")
        done += 1
        outcomes.update(result.outcomes)
        steps += result.steps
        seconds += result.seconds
        digest = (digest * 31 + result.digest) % (1 << 61)
        if given.trace:
            print("\n".join(result.trace))
        if result.violations:
            bad += 1
            print(f"seed {seed}: " + "\n  ".join(result.violations), flush=True)
            if bad >= given.keep_going:
                break
    print(f"{done} schedules, {bad} bad, {steps} steps, {seconds:.0f} virtual s in {time.monotonic() - begin:.1f} s")
    print(f"digest {digest:016x}")
    print(", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    return int(bool(bad))


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - after each schedule: quicker than a Path each


def _left_since(before: int) -> int:
    """How many descriptors more there are than ``before``, even when garbage has given its own back."""
    if _descriptors() > before:
        gc.collect()
    return max(0, _descriptors() - before)


if __name__ == "__main__":
    sys.exit(main())
