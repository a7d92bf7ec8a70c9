"""``LLMConfig.verify_transfers``: what differs after a transfer is found, and what does not differ is no alarm."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expect import expect
from llm_datadist import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from llm_datadist.engine import verify
from llm_datadist.memory import digests
from llm_datadist.testing import loopback
from llm_datadist.utils.deadline import Deadline
from net_helpers import logged
from peers import GUARD, TIMEOUT_S, Node, Peer, Peers, close_off
from short_kit import BLOCKS as FEW_BLOCKS
from short_kit import METHODS, MODELS, OK, SOURCE, TARGET, attempt, blocks_of, moved, same, sides_of, watch, with_caches
from stopping import go_on, stop
from test_interruptions import interrupt_at_all_steps, split_from

if TYPE_CHECKING:
    from collections.abc import Iterator

FAILED = LLMStatusCode.LLM_FAILED
NO_FEATURE = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
PATHS = ("inprocess", "process_vm", "mapped", "tcp")
BIG_BLOCKS, BIG_BYTES = 48, 128 << 10
"""A transfer of all of them is cut into parts, which several threads compare."""


class Ready(LayerSynchronizer):
    """Every layer is ready at once."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


def make_pair(peers: Peers, path: str, **properties: Any) -> tuple[Peer, Peer]:
    """(client, server), linked by the client; both verify."""
    properties = {"paths": path, "verify_transfers": True, **properties}
    first = close_off if path == "mapped" else None
    if path == "mapped":
        properties["mem_pool_cfg"] = '{"memory_size": 67108864, "page_shift": 12}'
    server = peers.make(2, process=peers.process(first), **properties)
    process = server.process if path == "inprocess" else peers.process(first)
    client = peers.make(1, process=process, listen=False, **properties)
    for peer in (server, client):
        peer.call("use_pool", path == "mapped")
    assert client.link(server) == OK
    assert client.call("path", 2) == path
    return client, server


# What was moved is changed behind the back of both sides


def corrupt(node: Node, cluster_id: int, position: int | None) -> None:
    """In the child: from now on, flip one byte of the local side after each transfer; None: no more.

    That is the destination of a pull, and the source of a push: both sides differ afterwards.
    """
    path = node.manager._engine._core.table.get(cluster_id).path(node.manager._engine.deadline())
    for name in ("read", "write"):
        vars(path).pop(name, None)
        real = getattr(path, name)

        def changed(spans: Any, *args: Any, real: Any = real) -> None:
            real(spans, *args)
            whole = spans.here.iovecs(spans.runs.lengths)
            places = np.concatenate([np.arange(length, dtype=np.uint64) + base for base, length in whole])
            memory = (np.ctypeslib.ctypes.c_uint8 * 1).from_address(int(places[position]))
            memory[0] ^= 0x10

        if position is not None:
            setattr(path, name, changed)


def transfer(node: Node, operation: str, blocks: int) -> LLMStatusCode | None:
    """In the child: one transfer of the last ``blocks`` blocks of the named kind; the status of a task."""
    ids = list(range(BIG_BLOCKS))[-blocks:]
    manager, cache = node.manager, node.caches["here"]
    if operation == "pull_blocks":
        manager.pull_blocks(BlocksCacheKey(2, 0), cache, ids, ids[::-1])
    elif operation == "push_blocks":
        manager.push_blocks(BlocksCacheKey(2, 0), cache, ids, ids[::-1])
    elif operation == "pull_cache":
        manager.pull_cache(
            CacheKeyByIdAndIndex(2, node.caches["entries"].cache_id, 1), node.caches["entries"], 2, blocks * BIG_BYTES
        )
    elif operation == "push_cache":
        manager.push_cache(CacheKeyByIdAndIndex(2, node.caches["entries"].cache_id, 1), node.caches["entries"], 2)
    else:
        config = TransferWithCacheKeyConfig(BlocksCacheKey(2, 0), range(1), range(1))
        task = manager.transfer_cache_async(cache, Ready(), [config], ids, ids[::-1])
        status: LLMStatusCode = task.synchronize(20_000)
        return status
    return None


def big_caches(peer: Peer, seed: int) -> None:
    """One of blocks, one of batch entries; both have the same ids at every peer."""
    peer.call("register_blocks", "here", 2, BIG_BLOCKS, BIG_BYTES, model_id=0, seed=seed)
    peer.call("register_contiguous", "entries", 2, 3, BIG_BLOCKS * BIG_BYTES, seed=seed + 10)


@pytest.mark.parametrize("path", PATHS)
def test_a_byte_that_differs_is_found(peers: Peers, path: str) -> None:
    """In every operation, small and large, the first, the last and one in the middle."""
    client, server = make_pair(peers, path)
    for peer in (client, server):
        big_caches(peer, peer.cluster_id)
    for operation in ("pull_blocks", "push_blocks", "pull_cache", "push_cache"):
        for blocks, position in ((1, 0), (1, -1), (BIG_BLOCKS, 0), (BIG_BLOCKS, 5_000_001), (BIG_BLOCKS, -1)):
            client.call(corrupt, 2, position)
            error = expect(FAILED, lambda: client.call(transfer, operation, blocks))  # noqa: B023
            assert (error.operation, error.phase, error.path, error.peer) == (operation, "confirm", path, 2)  # type: ignore[attr-defined]
            assert "transferred bytes some differ" in str(error)
            assert "contents are undefined" in str(error)
            client.call(corrupt, 2, None)
            client.call(transfer, operation, blocks)
    client.call(corrupt, 2, 0)
    assert client.call(transfer, "transfer_cache_async", 1) == FAILED
    client.call(corrupt, 2, None)
    assert client.call(transfer, "transfer_cache_async", BIG_BLOCKS) == OK


@pytest.mark.parametrize("path", PATHS)
def test_in_message_mode_too(peers: Peers, path: str) -> None:
    client, server = make_pair(peers, path, enable_remote_cache_accessible=False)
    for peer in (client, server):
        big_caches(peer, peer.cluster_id)
    for blocks in (1, BIG_BLOCKS):
        client.call(transfer, "pull_blocks", blocks)
        client.call(corrupt, 2, -1)
        expect(FAILED, lambda: client.call(transfer, "pull_blocks", blocks), match="some differ")  # noqa: B023
        client.call(corrupt, 2, None)
    server.call("unregister", "here")  # the failed pulls have let go of it
    expect(NOT_EXIST, lambda: client.call(transfer, "pull_blocks", 1))


def spoil_on_the_way(node: Node, cluster_id: int) -> None:
    """In the child: the next push sends one byte that is not in its source."""
    path = node.manager._engine._core.table.get(cluster_id).path(node.manager._engine.deadline())
    real = path.write

    def spoiling(spans: Any, *args: Any) -> None:
        memory = (np.ctypeslib.ctypes.c_uint8 * 1).from_address(int(spans.bases[0] + spans.runs.local[0]))
        memory[0] ^= 0x10
        real(spans, *args)
        memory[0] ^= 0x10
        del path.write

    path.write = spoiling


def test_bytes_spoiled_on_the_way_are_found_and_counted(peers: Peers) -> None:
    """The source is as it was, the destination holds something else; the log counts."""
    client, server = make_pair(peers, "tcp")
    for peer in (client, server):
        big_caches(peer, peer.cluster_id)
    for number in (1, 2):
        client.call(spoil_on_the_way, 2)
        text = client.call(failing_push)
        assert f"mismatch {number} of this engine" in text
        client.call(transfer, "push_blocks", 1)


def failing_push(node: Node) -> str:
    """In the child: what is logged when a push fails."""
    with logged() as records:
        expect(FAILED, lambda: transfer(node, "push_blocks", 1))
    return "\n".join(record.getMessage() for record in records)


# No false alarm, and nothing else changes


@pytest.fixture(scope="module", params=("inprocess", "process_vm", "tcp"))
def couple(request: pytest.FixtureRequest) -> Iterator[tuple[Node, Node]]:
    """Two linked nodes of this process: the first verifies."""
    nodes = Node(), Node()
    paths = {"paths": request.param}
    address = nodes[1].init(2, listen_ip_info="127.0.0.1:0", **paths)
    nodes[0].init(1, verify_transfers=True, **paths)
    assert address is not None
    assert nodes[0].link(2, address) == OK
    yield nodes
    for node in nodes:
        node.finalize()


SOME_BLOCKS, SOME_BYTES = 12, 40
block_pairs = st.lists(st.tuples(st.integers(0, SOME_BLOCKS - 1), st.integers(0, SOME_BLOCKS - 1)), min_size=1)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pairs=block_pairs, method=st.sampled_from(METHODS), part=st.integers(1, 200))
def test_no_false_alarm(couple: tuple[Node, Node], pairs: list[tuple[int, int]], method: str, part: int) -> None:
    """Any lists, also with a source or a destination several times, in parts of any size; and the bytes are right."""
    here, there = couple
    for node, name, seed in ((here, "ours", 1), (there, "theirs", 2)):
        if name not in node.caches:
            node.register_blocks(name, 3, SOME_BLOCKS, SOME_BYTES, model_id=0, seed=seed)
    ours, theirs = (
        [tensor[GUARD:-GUARD].reshape(SOME_BLOCKS, -1) for tensor in node.arenas[name].memory]
        for node, name in ((here, "ours"), (there, "theirs"))
    )
    source, target = (theirs, ours) if method == "pull_blocks" else (ours, theirs)
    for value, tensor in enumerate(target):
        tensor[:] = value
    src, dst = (list(ids) for ids in zip(*pairs, strict=True))
    expected = moved(source, target, src, dst)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "_PARALLEL_BYTES", part)
        layers = {"tensor_num_per_layer": 1} if method == "push_blocks" else {}
        getattr(here.manager, method)(BlocksCacheKey(2, 0), here.caches["ours"], src, dst, **layers)
    assert same(target, expected)


def test_small_transfers_do_not_take_the_short_way(couple: tuple[Node, Node]) -> None:
    """It does not verify. Without the option they take it, as the other node shows."""
    here, there = couple
    for node, seed in ((here, 1), (there, 2)):
        watch(node)
        for name, model_id in MODELS.items():
            node.register_blocks(name, 2, FEW_BLOCKS, 64, model_id=10 + model_id, seed=seed)
    for node, cluster_id, short in ((here, 2, False), (there, 1, True)):
        for method in METHODS:
            model_id = 10 + MODELS[sides_of(method)[0]]
            outcomes = [attempt(node, method, cluster_id, [1], [2], model_id=model_id) for _ in range(3)]
            assert [outcome.error for outcome in outcomes] == [None] * 3
            assert [outcome.short for outcome in outcomes] == [False, short, short]


def test_more_threads_than_may_ask_at_a_time(couple: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_MAX_ASKED", 2)
    here, there = couple
    here.register_blocks("many", 2, 16, 5000, seed=1)
    there.register_blocks("many", 2, 16, 5000, model_id=5, seed=2)

    def pull(block: int) -> None:
        for _ in range(20):
            here.manager.pull_blocks(BlocksCacheKey(2, 5), here.caches["many"], [block], [block])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(pull, range(16), timeout=TIMEOUT_S))
    for near, far in zip(here.memory("many"), there.memory("many"), strict=True):
        assert (near[GUARD:-GUARD] == far[GUARD:-GUARD]).all()


def take_back(node: Node, name: str) -> threading.Thread:
    """Begin to unregister, which waits for transfers, and return once nobody finds the cache any more."""
    core = node.manager._engine._core
    region = int(core.catalogue.get(node.caches[name].cache_id).regions[0])
    thread = threading.Thread(target=node.unregister, args=(name,))
    thread.start()
    deadline, pause = Deadline.after(TIMEOUT_S), threading.Event()
    while core.regions.rows[region & 0xFFFF, 0] == region:
        assert not deadline.expired()
        pause.wait(0.001)
    return thread


@pytest.mark.parametrize("newer", [False, True])
def test_a_source_that_goes_while_it_is_compared(
    couple: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch, newer: bool
) -> None:
    """It is as if it had gone during the transfer: looked up again, and not found, or found to be a newer one."""
    here, there = couple
    here.register_blocks("into", 1, 4, 512)
    there.register_blocks("going", 1, 4, 512, model_id=7, seed=3)
    real, threads = verify.Verifier.confirm, []

    def confirm(*args: Any) -> None:
        if not threads:
            threads.append(take_back(there, "going"))
            if newer:
                there.register_blocks("newer", 1, 4, 512, model_id=7, seed=5)
        real(*args)

    def pull() -> None:
        here.manager.pull_blocks(BlocksCacheKey(2, 7), here.caches["into"], [0, 1], [1, 2])

    monkeypatch.setattr(verify.Verifier, "confirm", confirm)
    if newer:
        pull()
        source, target = there.memory("newer")[0][GUARD:-GUARD], here.memory("into")[0][GUARD:-GUARD]
        assert (target[512:1536] == source[:1024]).all()
        there.unregister("newer")
    else:
        expect(NOT_EXIST, pull)
    threads[0].join(TIMEOUT_S)
    assert not threads[0].is_alive()


def stop_after_the_copy(node: Node, cluster_id: int, pid: int) -> None:
    """In the child: the next pull stops the peer's process between copy and comparison."""
    path = node.manager._engine._core.table.get(cluster_id).path(node.manager._engine.deadline())
    real = path.read

    def stopping(*args: Any) -> None:
        real(*args)
        stop(pid)
        del path.read

    path.read = stopping


@pytest.mark.parametrize("blocks", [1, BIG_BLOCKS])
def test_a_peer_that_does_not_answer_is_a_timeout(peers: Peers, blocks: int) -> None:
    """The deadline is that of the whole call, and the link goes on."""
    client, server = make_pair(peers, "process_vm", sync_kv_timeout=3000)
    for peer in (client, server):
        big_caches(peer, peer.cluster_id)
    client.call(stop_after_the_copy, 2, server.process.pid)
    try:
        expect(LLMStatusCode.LLM_TIMEOUT, lambda: client.call(transfer, "pull_blocks", blocks))
    finally:
        go_on(server.process.pid)
    server.call("path", 1)  # it has come to itself
    client.call(transfer, "pull_blocks", blocks)
    assert (client.memory("here")[1][GUARD:-GUARD][-BIG_BYTES:]).any()


@pytest.mark.parametrize("path", ["process_vm", "tcp"])
@pytest.mark.parametrize("method", METHODS)
def test_ctrl_c_leaves_nothing_behind(peers: Peers, path: str, method: str) -> None:
    """At any step of a transfer that is compared in several parts."""
    client, server = make_pair(peers, path)
    with_caches(client, server)
    client.call(split_from, 1)
    client.call(compare_from, 1)
    ids = list(range(FEW_BLOCKS))
    assert client.call(interrupt_at_all_steps, method, 2, ids, ids[::-1]) > 1
    assert client.call(asking) == 0
    assert client.call(attempt, method, 2, ids, ids).error is None
    sender, receiver = (server, client) if method == "pull_blocks" else (client, server)
    assert same(blocks_of(receiver, TARGET), blocks_of(sender, SOURCE))
    for peer in (client, server):
        for name in MODELS:
            peer.call("unregister", name)


def compare_from(node: Node, size: int) -> None:
    """In the child: transfers of so many bytes are compared in several parts."""
    verify._PARALLEL_BYTES = size


def asking(node: Node) -> int:
    """In the child: digests that are still being asked for."""
    return len(node.manager._engine._transfers._verifier._asking)


# Refusals


def without_xxhash() -> None:
    """In a child, before anything else."""
    sys.modules["xxhash"] = None  # type: ignore[assignment]


@pytest.mark.parametrize("path", ["process_vm", "tcp"])
def test_a_peer_without_the_package_is_refused_before_anything_is_moved(peers: Peers, path: str) -> None:
    """Who has the package may still be pulled from by those who do not verify."""
    server = peers.make(2, process=peers.process(without_xxhash), paths=path)
    client = peers.make(1, listen=False, paths=path, verify_transfers=True)
    for peer in (client, server):
        big_caches(peer, peer.cluster_id)
    assert client.link(server) == OK
    before = {peer: peer.memory("here") for peer in (client, server)}
    for operation in METHODS:
        error = expect(NO_FEATURE, lambda: client.call(transfer, operation, 1))  # noqa: B023
        assert "cluster 2 cannot compute xxh3_64 digests" in str(error)
        assert "pip install 'llm-datadist[verify]' there" in str(error)
    for peer in (client, server):
        assert all((one == other).all() for one, other in zip(before[peer], peer.memory("here"), strict=True))
    server.call(pull_from, 1)


def pull_from(node: Node, cluster_id: int) -> None:
    """In the child."""
    node.manager.pull_blocks(BlocksCacheKey(cluster_id, 0), node.caches["here"], [0], [0])


@pytest.mark.parametrize("by_environment", [False, True])
def test_init_without_the_package(monkeypatch: pytest.MonkeyPatch, by_environment: bool) -> None:
    """A clear refusal; the object works without the option."""
    monkeypatch.setitem(sys.modules, "xxhash", None)
    config = LLMConfig()
    config.enable_cache_manager = config.allow_multiple_instances = True
    if by_environment:
        monkeypatch.setenv("LLM_DATADIST_VERIFY_TRANSFERS", "1")
    else:
        config.verify_transfers = True
    datadist = LLMDataDist(LLMRole.MIX, 1)
    error = expect(LLMStatusCode.LLM_PARAM_INVALID, lambda: datadist.init(config.generate_options()))
    assert "the package xxhash is not installed" in str(error)
    assert digests.INSTALL in str(error)
    config.verify_transfers = False
    datadist.init(config.generate_options())
    datadist.finalize()


def test_loopback_verifies_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The links of ``llm_datadist.testing.loopback`` answer for themselves."""
    node, compared = Node(), []
    real = verify.DigestService.compute
    monkeypatch.setattr(verify.DigestService, "compute", lambda *args: compared.append(1) or real(*args))
    with loopback():
        node.init(1, verify_transfers=True)
    try:
        node.register_blocks("from", 2, 4, 512, model_id=0, seed=1)
        node.register_blocks("to", 2, 4, 512, model_id=1)
        assert node.link(9, ("127.0.0.1", 1)) == OK
        node.manager.pull_blocks(BlocksCacheKey(9, 0), node.caches["to"], [1], [2])
    finally:
        node.finalize()
    source, target = (node.arenas[name].memory[0][GUARD:-GUARD] for name in ("from", "to"))
    assert (target[1024:1536] == source[512:1024]).all()
    assert compared == [1]
