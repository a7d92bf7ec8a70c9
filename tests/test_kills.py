"""kill -9 at random moments, again and again, on every path between processes: the survivor always gets on.

The suite kills a few; ``LLM_DATADIST_KILLS=300`` makes it a long run, and ``LLM_DATADIST_KILLS_SEED`` another one. The
figures are printed (``pytest -s``).
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from llm_datadist.paths.nixl_options import installed
from peers import GUARD, POISON, TIMEOUT_S, Node, Peer, Peers, Process
from test_faults import WORKERS, moves, settled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

OK = LLMStatusCode.LLM_SUCCESS
PATHS = ("process_vm", "mapped", "tcp", *(("nixl",) if installed() is not None else ()))
METHODS = ("pull_blocks", "push_blocks")
KILLS = int(os.environ.get("LLM_DATADIST_KILLS", "15"))
SEED = int(os.environ.get("LLM_DATADIST_KILLS_SEED", "1"))
LONG = KILLS > 15
"""Then the machine has nothing else to do, and times mean something."""
BLOCKS, BLOCK_BYTES = 256, 128 << 10
TARGETS = list(range(0, BLOCKS, 2))
"""Every other block is written to; those between them are the neighbours."""
DEADLINE_S = 4.0
LATE_S = 0.2 if LONG else 20.0
WARM_UP = 3
POOL = '{"memory_size": 134217728, "page_shift": 16}'
SURVIVOR, VICTIM = 1, 2
ALLOWED = {LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_FAILED, LLMStatusCode.LLM_TIMEOUT}


@dataclass
class Figures:
    """What came of the kills of one path."""

    kills: int = 0
    interrupted: int = 0
    """Those in which the failing call had begun before the kill."""
    longest_s: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        statuses = ", ".join(f"{name} {count}" for name, count in sorted(self.statuses.items()))
        return (
            f"{self.kills} kills, {self.interrupted} in the middle of a call; longest failing call "
            f"{self.longest_s * 1e3:.0f} ms of {DEADLINE_S:g} s allowed; {statuses}"
        )


def with_memory(node: Node, seed: int) -> None:
    """In the child: 32 MiB, from the pool if there is one."""
    node.use_pool(bool(node.config.mem_pool_cfg))
    node.register_blocks("mine", 1, BLOCKS, BLOCK_BYTES, model_id=0, seed=seed)


def poison_targets(node: Node) -> None:
    """In the child: what is not the victim's is poison."""
    node.arenas["mine"].memory[0][:] = POISON


def move_until_error(node: Node, method: str) -> tuple[LLMStatusCode, float, float]:
    """In the child: status of the first call that fails, when it began (monotonic) and how long it took."""
    node.extra["moves"] = 0
    key, sources = BlocksCacheKey(VICTIM, 0), TARGETS[::-1]
    while True:
        begin = time.monotonic()
        try:
            getattr(node.manager, method)(key, node.caches["mine"], sources, TARGETS, tensor_num_per_layer=1)
        except LLMException as error:
            return error.status_code, begin, time.monotonic() - begin
        node.extra["moves"] += 1


def neighbours_untouched(node: Node) -> bool:
    """In the child: guards and all blocks that nobody wrote to."""
    memory = node.arenas["mine"].memory[0]
    blocks = memory[GUARD:-GUARD].reshape(BLOCKS, BLOCK_BYTES)
    between = np.delete(blocks, TARGETS, axis=0)
    return all(bool((part == POISON).all()) for part in (memory[:GUARD], memory[-GUARD:], between))


def pull_is_right(node: Node, seed: int) -> bool:
    """In the child: pull once from the victim, whose content follows from ``seed``."""
    sources = TARGETS[::-1]
    key = BlocksCacheKey(VICTIM, 0)
    node.manager.pull_blocks(key, node.caches["mine"], sources, TARGETS, tensor_num_per_layer=1)
    size = BLOCKS * BLOCK_BYTES
    theirs = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).reshape(BLOCKS, BLOCK_BYTES)
    ours = node.arenas["mine"].memory[0][GUARD:-GUARD].reshape(BLOCKS, BLOCK_BYTES)
    return bool((ours[TARGETS] == theirs[sources]).all())


@pytest.fixture
def quick_peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Peers]:
    """Peers whose processes start in a moment: forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["peers", "test_kills"])
    monkeypatch.setattr("peers._SPAWN", context)
    made = Peers()
    yield made
    made.close()


def new_victim(peers: Peers, survivor: Peer, path: str, seed: int) -> Peer:
    """A victim with memory, linked by the survivor, which pulls from it once."""
    victim = make(peers, VICTIM, path)
    victim.call(with_memory, seed)
    assert survivor.call("unlink", VICTIM, force=True) == OK
    assert survivor.link(victim) == OK
    assert survivor.call(pull_is_right, seed)
    return victim


def make(peers: Peers, cluster_id: int, path: str) -> Peer:
    return peers.make(
        cluster_id,
        paths=path,
        mem_pool_cfg=POOL if path == "mapped" else None,
        sync_kv_timeout=int(DEADLINE_S * 1000),
    )


def strike(victim: Process, survivor: Peer, running: Future[tuple[LLMStatusCode, float, float]], delay: float) -> float:
    """Kill some time after the first transfer; when."""
    end = time.monotonic() + TIMEOUT_S
    while survivor.call(moves) < 1:
        assert time.monotonic() < end
        assert not running.done(), running.result()
    time.sleep(delay)  # the random moment
    at = time.monotonic()
    victim.kill()
    return at


@pytest.mark.timeout(3600 if LONG else 300)
@pytest.mark.parametrize("path", PATHS)
def test_kill_9_at_random_moments(quick_peers: Peers, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Owner of a pull and target of a push in turn; the same survivor goes through all of it."""
    chance = random.Random(f"{SEED} {path}")
    survivor = make(quick_peers, SURVIVOR, path)
    survivor.call(with_memory, 0)
    figures, first = Figures(), (0, 0, 0)
    for number in range(KILLS // len(PATHS) + WARM_UP):
        if number == WARM_UP:
            first = settled(survivor, lambda _values: True)
        seed, method = chance.randrange(1 << 30), METHODS[number % 2]
        survivor.call(poison_targets)
        victim = new_victim(quick_peers, survivor, path, seed)
        running = survivor.begin(move_until_error, method)
        at = strike(victim.process, survivor, running, chance.uniform(0, 0.05))
        status, begin, seconds = running.result(TIMEOUT_S)
        assert status in ALLOWED, f"kill {number} (seed {SEED}): {status}"
        assert seconds < DEADLINE_S + LATE_S, f"kill {number} (seed {SEED}): the exception took {seconds:.3f} s"
        assert survivor.call(neighbours_untouched), f"kill {number} (seed {SEED})"
        figures.kills += 1
        figures.interrupted += begin < at
        figures.longest_s = max(figures.longest_s, seconds)
        figures.statuses[status.name] = figures.statuses.get(status.name, 0) + 1
    assert survivor.call("unlink", VICTIM, force=True) == OK
    last = settled(survivor, lambda values: values[0] <= first[0] and values[1] <= first[1])
    with capsys.disabled():
        sys.stdout.write(
            f"\n{path}: {figures}; descriptors {first[0]} -> {last[0]}, threads {first[1]} -> {last[1]}, "
            f"resident {first[2]} -> {last[2]} KiB\n"
        )
    assert last[0] <= first[0]
    assert last[1] <= first[1] + WORKERS
