"""Whole clusters under simulated threads, clocks and networks; see docs/testing.md.

In child processes: while a world is installed, nothing else of the library may run in its process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("greenlet", reason="simulation needs the extra 'dev'")

HERE = Path(__file__).parent
SCHEDULES = 100


def simulate(*arguments: str, hash_seed: int = 0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "simulation", *arguments],
        cwd=HERE,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_no_schedule_violates_an_invariant() -> None:
    done = simulate("--schedules", str(SCHEDULES), "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SCHEDULES} schedules, 0 bad" in done.stdout
    for outcome in ("link LLM_SUCCESS", "pull ok", "push ok", "unregister ok", "unlink LLM_SUCCESS", "finalize ok"):
        found = re.search(rf"(\d+) {outcome}", done.stdout)
        assert found, done.stdout
        assert int(found[1]) > SCHEDULES // 20


@pytest.mark.parametrize("seed", [962, 1664, 2345, 203366, 204671, 108430, 304024, 304040, 403019])
def test_schedules_that_once_failed(seed: int) -> None:
    """Two sides that finalize at once: what the peer had ended in good order was waited for, and never closed.

    204671: a rank-table link that was begun while its engine was finalized listened for ever. 108430: who gave up a
    push that another was giving up did not wait, and its bytes came after its failure. 304024: who needed the peer's
    catalogue waited for others that had asked for it, past its own deadline. The last two were faults of the
    simulation: a caller that waits for four rank-table links takes long, and an engine may be killed before it is
    complete.
    """
    done = simulate("--schedules", "1", "--seed", str(seed))
    assert "1 schedules, 0 bad" in done.stdout, done.stdout + done.stderr


def test_a_seed_gives_the_same_schedule_again() -> None:
    first, again = (simulate("--schedules", "6", "--seed", "40", "--trace", hash_seed=seed) for seed in (1, 2))
    assert re.search(r"digest [0-9a-f]{16}", first.stdout)
    assert first.stdout.splitlines()[:-3] == again.stdout.splitlines()[:-3]
    digests = [re.search(r"digest (\S+)", done.stdout) for done in (first, again)]
    assert digests[0] is not None
    assert digests[1] is not None
    assert digests[0][1] == digests[1][1]


@pytest.mark.parametrize(("fault", "first"), [("install", 1), ("lease", 30), ("fence", 180)])
def test_a_planted_fault_is_found(fault: str, first: int) -> None:
    """``first`` is a seed that does not take long."""
    done = simulate("--schedules", "1000", "--seed", str(first), "--keep-going", "1", "--plant", fault)
    assert done.returncode == 1, done.stderr
    assert re.search(r"^seed \d+: ", done.stdout, re.MULTILINE)
    assert "1 bad" in done.stdout
