"""Peers that are killed or stall in the middle of transfers over NIXL: the same outcomes as on other paths."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from nixl_kit import SHARED_MEMORY, TCP, TRANSPORTS, needs_nixl, process_with
from peers import GUARD, TIMEOUT_S, Node
from test_faults import go_on, moves, stop
from test_kills import ALLOWED, move_until_error, neighbours_untouched, poison_targets, pull_is_right, with_memory

if TYPE_CHECKING:
    from peers import Peer, Peers

pytestmark = needs_nixl
OK = LLMStatusCode.LLM_SUCCESS
SURVIVOR, VICTIM = 1, 2
DEADLINE_S = 4.0
BLOCKS, BLOCK_BYTES = 64, 1 << 20


def make(peers: Peers, cluster_id: int, transports: str, timeout_s: float = DEADLINE_S) -> Peer:
    process = process_with(peers, transports)
    return peers.make(cluster_id, process=process, paths="nixl", sync_kv_timeout=int(timeout_s * 1000))


@pytest.mark.parametrize("method", ["pull_blocks", "push_blocks"])
@pytest.mark.parametrize("transports", TRANSPORTS.values(), ids=TRANSPORTS.keys())
def test_kill_9(peers: Peers, transports: str, method: str) -> None:
    """Again and again; the same survivor goes through all of it."""
    survivor = make(peers, SURVIVOR, transports)
    survivor.call(with_memory, 0)
    for number in range(2):
        survivor.call(poison_targets)
        victim = make(peers, VICTIM, transports)
        victim.call(with_memory, number)
        assert survivor.call("unlink", VICTIM, force=True) == OK
        assert survivor.link(victim) == OK
        assert survivor.call(pull_is_right, number)
        running = survivor.begin(move_until_error, method)
        end = time.monotonic() + TIMEOUT_S
        while survivor.call(moves) < 1:
            assert time.monotonic() < end
        victim.process.kill()
        status, _, seconds = running.result(TIMEOUT_S)
        assert status in ALLOWED
        assert seconds < DEADLINE_S + 20
        assert survivor.call(neighbours_untouched)
    survivor.call("finalize")
    assert survivor.process.close() == 0


def big(node: Node, seed: int | None) -> None:
    """In the child: a cache whose transfer over TCP takes a while."""
    node.register_blocks("mine", 1, BLOCKS, BLOCK_BYTES, model_id=0, seed=seed)


def attempt(node: Node, method: str) -> tuple[str, bool, float]:
    """In the child: status and quiescence of one transfer of everything, and how long it took."""
    begin, blocks = time.monotonic(), list(range(BLOCKS))
    try:
        key, cache = BlocksCacheKey(VICTIM, 0), node.caches["mine"]
        getattr(node.manager, method)(key, cache, blocks, blocks, tensor_num_per_layer=1)
    except LLMException as error:
        return error.status_code.name, error.quiescent, time.monotonic() - begin
    return "LLM_SUCCESS", True, time.monotonic() - begin


def unregister(node: Node) -> str:
    """In the child: the status."""
    try:
        node.manager.unregister_cache(node.caches["mine"].cache_id)
    except LLMException as error:
        return error.status_code.name
    return "LLM_SUCCESS"


def unregister_at_last(node: Node) -> None:
    """In the child: once what NIXL still had has ended."""
    end = time.monotonic() + TIMEOUT_S
    while unregister(node) != "LLM_SUCCESS":
        assert time.monotonic() < end


def content(node: Node) -> Any:
    """In the child."""
    return np.array(node.arenas["mine"].memory[0][GUARD:-GUARD])


@pytest.mark.parametrize("method", ["pull_blocks", "push_blocks"])
def test_a_stalled_peer_over_tcp(peers: Peers, method: str) -> None:
    """The call ends by its deadline, says that not all is quiet, and the memory is kept until it is."""
    caller, victim = make(peers, SURVIVOR, TCP, 1.0), make(peers, VICTIM, TCP)
    caller.call(big, 1)
    victim.call(big, 2)
    assert caller.link(victim) == OK
    stop(victim.process)
    try:
        status, quiescent, seconds = caller.call(attempt, method)
        assert (status, quiescent) == ("LLM_TIMEOUT", False)
        assert seconds < 20
        again = caller.call(attempt, method)
        assert again[0] == "LLM_TIMEOUT"  # nothing overtakes what may still be under way
        if method == "pull_blocks":
            assert caller.call(unregister) == "LLM_LINK_BUSY"
    finally:
        go_on(victim.process)
    if method == "pull_blocks":
        caller.call(unregister_at_last)
        caller.call(big, 3)
    end = time.monotonic() + TIMEOUT_S
    while caller.call(attempt, method)[0] != "LLM_SUCCESS":
        assert time.monotonic() < end
    assert (caller.call(content) == victim.call(content)).all()


def test_a_stalled_peer_over_shared_memory(peers: Peers) -> None:
    """It has no part in a transfer, as with process_vm."""
    caller, victim = make(peers, SURVIVOR, SHARED_MEMORY), make(peers, VICTIM, SHARED_MEMORY)
    caller.call(big, 1)
    victim.call(big, 2)
    assert caller.link(victim) == OK
    assert caller.call(attempt, "pull_blocks")[0] == "LLM_SUCCESS"
    stop(victim.process)
    try:
        assert caller.call(attempt, "pull_blocks")[0] == "LLM_SUCCESS"
    finally:
        go_on(victim.process)
    assert (caller.call(content) == victim.call(content)).all()


def idle_cpu(_node: Node) -> float:
    """In the child: share of a core that an idle second takes."""
    before, begin = time.process_time(), time.monotonic()
    time.sleep(1)  # what is measured
    return (time.process_time() - before) / (time.monotonic() - begin)


def test_an_idle_process_hardly_uses_a_core(peers: Peers) -> None:
    caller, victim = make(peers, SURVIVOR, TCP), make(peers, VICTIM, TCP)
    caller.call(big, 1)
    victim.call(big, 2)
    assert caller.link(victim) == OK
    assert caller.call(attempt, "pull_blocks")[0] == "LLM_SUCCESS"
    assert max(peer.call(idle_cpu) for peer in (caller, victim)) < 0.1


def registered_again(node: Node, seed: int) -> None:
    """In the child: the same memory, as another cache."""
    node.unregister("mine")
    node.register_blocks("mine", 1, BLOCKS, BLOCK_BYTES, model_id=0, seed=seed)


def test_memory_that_is_registered_again(peers: Peers) -> None:
    """Keys of what was there before are not used, also where there is RDMA, so that they would be wrong."""
    caller = make(peers, SURVIVOR, SHARED_MEMORY)
    victim = make(peers, VICTIM, SHARED_MEMORY)
    victim.call(as_with_rdma)
    caller.call(big, 1)
    victim.call(big, 2)
    assert caller.link(victim) == OK
    for seed in range(3):
        assert caller.call(attempt, "pull_blocks")[0] == "LLM_SUCCESS"
        assert (caller.call(content) == victim.call(content)).all()
        victim.call(registered_again, seed)


def as_with_rdma(_node: Node) -> None:
    """In the child: an agent that is made from now on counts registrations that have gone."""
    from llm_datadist.paths import nixl_agent  # noqa: PLC0415 - in the child

    nixl_agent.rdma_devices = lambda: ["mlx5_0"]
