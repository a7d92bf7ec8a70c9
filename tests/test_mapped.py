"""The mapped path in real processes: what it reaches, and what takes another path."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
import pytest

from expect import expect
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMStatusCode,
)
from llm_datadist.memory import syscalls
from peers import GUARD, POISON, Node, Peer, Peers, array_at, close_off
from stopping import go_on, stop
from test_faults import register_wild
from test_links import explain, pull_one, with_caches
from test_observe_engine import read

OK = LLMStatusCode.LLM_SUCCESS
POOL = '{"memory_size": 268435456, "page_shift": 12}'
TENSORS = 4
BLOCKS = 8
BLOCK_BYTES = 5000
FEW, ALL = [3, 1], list(range(BLOCKS))


def make(peers: Peers, cluster_id: int, **properties: Any) -> Peer:
    """A peer with a pool, whose process no other one may look into."""
    properties.setdefault("mem_pool_cfg", POOL)
    return peers.make(cluster_id, process=peers.process(close_off), **properties)


def allocate(node: Node, name: str, seed: int | None, model_id: int | None = None) -> list[int]:
    """In the child: a blocks cache from the pool; its addresses."""
    key = None if model_id is None else BlocksCacheKey(node.datadist.cluster_id, model_id)
    desc = CacheDesc(TENSORS, [BLOCKS, BLOCK_BYTES], DataType.DT_UINT8)
    cache = node.caches[name] = node.manager.allocate_blocks_cache(desc, key)
    node.extra[name] = [array_at(addr, BLOCKS * BLOCK_BYTES) for addr in cache.tensor_addrs]
    if seed is not None:
        rng = np.random.default_rng(seed)
        for tensor in node.extra[name]:
            tensor[:] = rng.integers(0, 256, len(tensor), dtype=np.uint8)
    return list(cache.tensor_addrs)


def allocated(node: Node, name: str) -> list[np.ndarray]:
    """In the child: copies of the tensors, as blocks."""
    return [tensor.reshape(BLOCKS, -1).copy() for tensor in node.extra[name]]


def blocks_of(peer: Peer, name: str) -> list[np.ndarray]:
    """The tensors of a registered cache, as blocks."""
    return [tensor[GUARD:-GUARD].reshape(BLOCKS, -1) for tensor in peer.memory(name)]


def pull(node: Node, cluster_id: int, model_id: int, name: str, blocks: list[int]) -> None:
    """In the child: pull blocks to where they are at the peer."""
    node.manager.pull_blocks(BlocksCacheKey(cluster_id, model_id), node.caches[name], blocks, blocks)


def push(node: Node, cluster_id: int, model_id: int, name: str, blocks: list[int]) -> None:
    """In the child: push blocks to where they are here."""
    node.manager.push_blocks(BlocksCacheKey(cluster_id, model_id), node.caches[name], blocks, blocks)


def same(ours: list[np.ndarray], theirs: list[np.ndarray], blocks: list[int]) -> bool:
    """Whether these blocks are equal."""
    return all((near[blocks] == far[blocks]).all() for near, far in zip(ours, theirs, strict=True))


def chosen(peer: Peer, cluster_id: int) -> list[str]:
    """The paths in use to a cluster, as explain_link tells."""
    return [attempt.name for attempt in peer.call(explain, cluster_id).attempts if attempt.chosen]


def test_pools_are_mapped_where_tracing_is_denied(peers: Peers) -> None:
    """By default, in both directions, by many blocks and by few."""
    server, client = make(peers, 1), make(peers, 2, listen=False)
    for peer in (server, client):
        peer.call(allocate, "src", peer.cluster_id, 0)
        peer.call(allocate, "dst", None, 1)
    assert client.link(server) == OK
    report = client.call(explain, 1)
    reasons = {attempt.name: attempt.reason for attempt in report.attempts}
    assert report.path == "mapped"
    assert "cannot look into process" in reasons["process_vm"]
    assert "MiB mapped here" in reasons["mapped"]
    assert reasons["tcp"] == "for what mapped does not reach, not needed yet"
    for here, there in ((client, server), (server, client)):
        source = there.call(allocated, "src")
        for blocks in (FEW, FEW, ALL):
            here.call(pull, there.cluster_id, 0, "dst", blocks)
            assert same(here.call(allocated, "dst"), source, blocks)
        mine = here.call(allocated, "src")
        for blocks in (FEW, FEW, ALL):
            here.call(push, there.cluster_id, 1, "src", blocks)
            assert same(there.call(allocated, "dst"), mine, blocks)


def test_the_owner_has_no_part_in_it(peers: Peers) -> None:
    """It is stopped meanwhile; what is not from its pool needs it, and so does not come in time."""
    server, client = make(peers, 1), make(peers, 2, listen=False, sync_kv_timeout=500)
    server.call(allocate, "pool", 7, 0)
    server.call("register_blocks", "other", TENSORS, BLOCKS, BLOCK_BYTES, model_id=1, seed=8)
    client.call("register_blocks", "dst", TENSORS, BLOCKS, BLOCK_BYTES)
    assert client.link(server) == OK
    source = server.call(allocated, "pool")
    stop(server.process.pid)
    try:
        for blocks in (FEW, FEW, ALL):
            client.call(pull, 1, 0, "dst", blocks)
        expect(LLMStatusCode.LLM_TIMEOUT, lambda: client.call(pull, 1, 1, "dst", FEW))
    finally:
        go_on(server.process.pid)
    assert same(blocks_of(client, "dst"), source, ALL)
    client.call(pull, 1, 1, "dst", ALL)
    assert same(blocks_of(client, "dst"), blocks_of(server, "other"), ALL)


@pytest.mark.parametrize("accessible", [True, False])
def test_other_memory_takes_the_next_path(peers: Peers, accessible: bool) -> None:
    """Without giving the mapped one up, in both modes; what falls back is counted."""
    properties = {"enable_remote_cache_accessible": accessible, "paths": "process_vm,mapped,tcp", "metrics": True}
    server, client = make(peers, 1, **properties), make(peers, 2, listen=False, **properties)
    server.call(allocate, "pool", 7, 0)
    server.call("register_blocks", "other", TENSORS, BLOCKS, BLOCK_BYTES, model_id=1, seed=8)
    client.call("register_blocks", "dst", TENSORS, BLOCKS, BLOCK_BYTES)
    assert client.link(server) == OK
    sources = {0: server.call(allocated, "pool"), 1: blocks_of(server, "other")}
    assert chosen(client, 1) == ["mapped"]
    for blocks in (ALL, FEW, FEW, ALL):
        for model_id, source in sources.items():
            client.call(pull, 1, model_id, "dst", blocks)
            assert same(blocks_of(client, "dst"), source, blocks)
    assert chosen(client, 1) == ["mapped", "tcp"]
    text = str(client.call(explain, 1))
    assert "path mapped" in text
    assert "* tcp: for what mapped does not reach: " in text
    # Small transfers between caches that a catalogue has named remember where they have to go.
    times = 1 if accessible else 4
    assert client.call(read, "fallbacks", {"path": "mapped", "reason": "out_of_reach"}) == times


def register_half(node: Node) -> None:
    """In the child: half of the tensors are from the pool, half are not."""
    ours = node.arena(2, BLOCKS * BLOCK_BYTES, 9)
    node.use_pool(on=False)
    others = node.arena(2, BLOCKS * BLOCK_BYTES, 10)
    desc = CacheDesc(TENSORS, [BLOCKS, BLOCK_BYTES], DataType.DT_UINT8)
    ours.memory += others.memory
    node.extra["others"] = others
    node._keep("half", node.manager.register_blocks_cache(desc, ours.addrs, BlocksCacheKey(1, 0)), ours)


def pull_layer(node: Node, layer: int) -> None:
    """In the child: two tensors."""
    layers = range(layer, layer + 1)
    key = BlocksCacheKey(1, 0)
    node.manager.pull_blocks(key, node.caches["dst"], FEW, FEW, src_layer_range=layers, dst_layer_range=layers)


def test_a_cache_of_which_half_is_from_the_pool(peers: Peers) -> None:
    """Layer by layer, then as a whole, then by the short way."""
    server, client = make(peers, 1), make(peers, 2, listen=False)
    server.call("use_pool")
    server.call(register_half)
    client.call("register_blocks", "dst", TENSORS, BLOCKS, BLOCK_BYTES)
    assert client.link(server) == OK
    client.call(pull_layer, 0)
    assert chosen(client, 1) == ["mapped"]
    client.call(pull_layer, 1)
    assert chosen(client, 1) == ["mapped", "tcp"]
    for blocks in (FEW, ALL, FEW):
        client.call(pull, 1, 0, "dst", blocks)
    assert same(blocks_of(client, "dst"), blocks_of(server, "half"), ALL)


def test_other_memory_without_another_path(peers: Peers) -> None:
    """An error that says which path would help, and no harm to the link."""
    server, client = make(peers, 1, paths="mapped"), make(peers, 2, listen=False, paths="mapped")
    server.call(allocate, "pool", 7, 0)
    server.call("register_blocks", "other", TENSORS, BLOCKS, BLOCK_BYTES, model_id=1, seed=8)
    client.call("register_blocks", "dst", TENSORS, BLOCKS, BLOCK_BYTES)
    assert client.link(server) == OK
    for _ in range(2):
        error = expect(LLMStatusCode.LLM_FAILED, lambda: client.call(pull, 1, 1, "dst", FEW))
        assert "no path to this memory of the peer works" in str(error)
        assert "tcp: not permitted by this side's configuration" in str(error)
        client.call(pull, 1, 0, "dst", FEW)


def test_without_a_pool(peers: Peers) -> None:
    """The peer says that it has none, and TCP is used; without TCP there is no link."""
    server = make(peers, 1, mem_pool_cfg=None)
    client = make(peers, 2, listen=False)
    assert client.link(server) == OK
    report = client.call(explain, 1)
    assert report.path == "tcp"
    attempt = next(attempt for attempt in report.attempts if attempt.name == "mapped")
    assert attempt.reason == "the peer has no memory pool"
    assert "mem_pool_cfg" in attempt.hint
    other = make(peers, 3, listen=False, paths="mapped")
    assert other.link(server) == LLMStatusCode.LLM_LINK_FAILED


def allocate_keyed(node: Node) -> None:
    """In the child: a cache with a key, all of 3."""
    desc = CacheDesc(TENSORS, [2, 3000], DataType.DT_UINT8)
    cache = node.caches["keyed"] = node.manager.allocate_cache(desc, [CacheKey(1, 5), CacheKey(1, 6)])
    for addr in cache.tensor_addrs:
        array_at(addr, 6000)[:] = 3


def pull_keyed(node: Node, req_id: int) -> None:
    """In the child."""
    node.manager.pull_cache(CacheKey(1, req_id), node.caches["dst"], 0)


def test_allocated_cache_by_key_in_message_mode(peers: Peers) -> None:
    """The pulled key goes, and with the last one the cache."""
    properties = {"enable_remote_cache_accessible": False, "paths": "mapped"}
    server, client = make(peers, 1, **properties), make(peers, 2, listen=False, **properties)
    server.call(allocate_keyed)
    client.call("register_contiguous", "dst", TENSORS, 2, 3000)
    assert client.link(server) == OK
    client.call(pull_keyed, 5)
    for tensor in client.memory("dst"):
        assert (tensor[GUARD : GUARD + 3000] == 3).all()
        assert (tensor[GUARD + 3000 :] == POISON).all()
    expect(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, lambda: client.call(pull_keyed, 5))
    client.call(pull_keyed, 6)


def deny_process_vm(node: Node) -> None:
    """In the child: the process_vm calls are refused, even on the process itself, as by seccomp."""

    def denied(*_args: int) -> int:
        raise OSError(errno.EPERM, "injected")

    syscalls.process_vm_readv = syscalls.process_vm_writev = syscalls.peek = denied
    syscalls.bare_process_vm_readv = syscalls.bare_process_vm_writev = lambda *_args: -1


def test_where_not_even_the_own_memory_may_be_copied_by_the_kernel(peers: Peers) -> None:
    """Then it is left to memmove, in both directions."""
    server, client = make(peers, 1), make(peers, 2, listen=False)
    server.call(allocate, "pool", 7, 0)
    client.call("register_blocks", "dst", TENSORS, BLOCKS, BLOCK_BYTES)
    client.call("register_blocks", "src", TENSORS, BLOCKS, BLOCK_BYTES, seed=4)
    client.call(deny_process_vm)
    assert client.link(server) == OK
    assert chosen(client, 1) == ["mapped"]
    source = server.call(allocated, "pool")
    for blocks in (FEW, FEW, ALL):
        client.call(pull, 1, 0, "dst", blocks)
        assert same(blocks_of(client, "dst"), source, blocks)
    for blocks in (FEW, FEW, ALL):
        client.call(push, 1, 0, "src", blocks)
        assert same(server.call(allocated, "pool"), blocks_of(client, "src"), blocks)


def pull_wild(node: Node) -> None:
    """In the child: pull into memory that is not mapped."""
    desc = CacheDesc(2, [4, 512], DataType.DT_UINT8)
    cache = node.manager.register_blocks_cache(desc, [1 << 20, 1 << 21])
    try:
        node.manager.pull_blocks(BlocksCacheKey(1, 0), cache, [0], [0])
    finally:
        node.manager.unregister_cache(cache.cache_id)


def test_memory_that_is_not_mapped(peers: Peers) -> None:
    """Here: an error, no crash. At the peer: it is not from the pool, so the next path finds out."""
    server, client = make(peers, 1), make(peers, 2, listen=False)
    for peer in (server, client):
        peer.call("use_pool")
    with_caches(server, client)
    server.call(register_wild, 5)
    assert client.link(server) == OK
    for call in (lambda: client.call(pull_wild), lambda: client.call(pull_one, 1, 5)):
        assert "mapped" in str(expect(LLMStatusCode.LLM_FAILED, call))
        client.call(pull_one, 1)


def test_entry_by_id_at_the_end_of_the_pool(peers: Peers) -> None:
    """The last byte of the pool is within reach."""
    server = make(peers, 1, paths="mapped", mem_pool_cfg='{"memory_size": 8192, "page_shift": 12}')
    client = make(peers, 2, listen=False, paths="mapped")
    cache_id = server.call(fill_pool)
    client.call("register_contiguous", "dst", 1, 1, 8192)
    assert client.link(server) == OK
    client.call(pull_by_id, cache_id)
    assert (client.memory("dst")[0][GUARD:-GUARD] == 9).all()


def fill_pool(node: Node) -> int:
    """In the child: a cache of the whole pool; its id."""
    cache = node.manager.allocate_cache(CacheDesc(1, [1, 8192], DataType.DT_UINT8))
    array_at(cache.tensor_addrs[0], 8192)[:] = 9
    return int(cache.cache_id)


def pull_by_id(node: Node, cache_id: int) -> None:
    """In the child."""
    node.manager.pull_cache(CacheKeyByIdAndIndex(1, cache_id, 0), node.caches["dst"], 0)
