"""Peers that are killed or stall in the middle of transfers over NIXL: the same outcomes as on other paths."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMException, LLMStatusCode
from nixl_kit import SHARED_MEMORY, TCP, TRANSPORTS, needs_nixl, process_with
from peers import GUARD, TIMEOUT_S, Node
from stopping import go_on, stop
from test_faults import moves
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
    stop(victim.process.pid)
    try:
        status, quiescent, seconds = caller.call(attempt, method)
        assert (status, quiescent) == ("LLM_TIMEOUT", False)
        assert seconds < 20
        again = caller.call(attempt, method)
        assert again[0] == "LLM_TIMEOUT"  # nothing overtakes what may still be under way
        if method == "pull_blocks":
            assert caller.call(unregister) == "LLM_LINK_BUSY"
    finally:
        go_on(victim.process.pid)
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
    stop(victim.process.pid)
    try:
        assert caller.call(attempt, "pull_blocks")[0] == "LLM_SUCCESS"
    finally:
        go_on(victim.process.pid)
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


def register_part(node: Node, first: int, count: int) -> None:
    """In the child: some of the blocks of the same memory, as another cache."""
    if "part" in node.extra:
        node.manager.unregister_cache(node.extra.pop("part").cache_id)
    memory = node.extra.setdefault("memory", np.random.default_rng(5).bytes(BLOCKS * BLOCK_BYTES))
    base = np.frombuffer(memory, dtype=np.uint8).ctypes.data + first * BLOCK_BYTES
    desc = CacheDesc(1, [count, BLOCK_BYTES], DataType.DT_UINT8)
    node.extra["part"] = node.manager.register_blocks_cache(desc, [base], BlocksCacheKey(VICTIM, 0))


def part_is_right(node: Node, first: int, count: int) -> bool:
    """In the child: all of it pulled at once, and then some blocks one by one, is what the peer has there."""
    key, cache, blocks = BlocksCacheKey(VICTIM, 0), node.caches["mine"], list(range(count))
    wanted = np.frombuffer(np.random.default_rng(5).bytes(BLOCKS * BLOCK_BYTES), dtype=np.uint8)
    wanted = wanted[first * BLOCK_BYTES : (first + count) * BLOCK_BYTES]
    node.manager.pull_blocks(key, cache, blocks, blocks)
    right = bool((content(node)[: len(wanted)] == wanted).all())
    for block in blocks[:4]:
        node.manager.pull_blocks(key, cache, [block], [count - 1 - block])
    ours = content(node).reshape(BLOCKS, BLOCK_BYTES)
    theirs = wanted.reshape(count, BLOCK_BYTES)
    return right and all(bool((ours[count - 1 - block] == theirs[block]).all()) for block in blocks[:4])


@pytest.mark.parametrize("rdma", [False, True], ids=["as it is", "as with RDMA"])
def test_memory_that_is_registered_again(peers: Peers, rdma: bool) -> None:
    """The same addresses, and others that overlap them: what was known of those before is not used."""
    caller, victim = (make(peers, cluster_id, SHARED_MEMORY) for cluster_id in (SURVIVOR, VICTIM))
    if rdma:
        victim.call(as_with_rdma)
    caller.call(big, 1)
    for number, part in enumerate(((8, 16), (8, 16), (0, 64), (16, 40), (0, 20))):
        victim.call(register_part, *part)
        if not number:
            assert caller.link(victim) == OK
        assert caller.call(part_is_right, *part)


def register_overlapping(node: Node) -> None:
    """In the child: three caches of the same memory, the largest last."""
    memory = node.extra["memory"] = np.ones(BLOCKS * BLOCK_BYTES, dtype=np.uint8)
    for model_id, (first, count) in enumerate(((8, 16), (16, 24), (0, 64))):
        desc = CacheDesc(1, [count, BLOCK_BYTES], DataType.DT_UINT8)
        base = memory.ctypes.data + first * BLOCK_BYTES
        node.manager.register_blocks_cache(desc, [base], BlocksCacheKey(VICTIM, model_id))


def pull_all_models(node: Node) -> bool:
    """In the child: from each of them, also after the others have been used."""
    for model_id in (0, 1, 2, 1, 0):
        node.arenas["mine"].memory[0][:] = 0
        key, blocks = BlocksCacheKey(VICTIM, model_id), list(range(16))
        node.manager.pull_blocks(key, node.caches["mine"], blocks, blocks)
        if not (content(node)[: 16 * BLOCK_BYTES] == 1).all():
            return False
    return True


def test_caches_that_overlap(peers: Peers) -> None:
    """NIXL finds what is registered only if nothing of it overlaps."""
    caller, victim = (make(peers, cluster_id, SHARED_MEMORY) for cluster_id in (SURVIVOR, VICTIM))
    caller.call(big, 1)
    victim.call(register_overlapping)
    assert caller.link(victim) == OK
    assert caller.call(pull_all_models)


def as_with_rdma(_node: Node) -> None:
    """In the child: an agent that is made from now on counts registrations that have gone."""
    from llm_datadist.paths import nixl_agent  # noqa: PLC0415 - in the child

    nixl_agent.rdma_devices = lambda: ["mlx5_0"]
