"""The mapped path in real processes: what it reaches, what takes another path, and what is left when someone dies."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from pathlib import Path
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
    LLMException,
    LLMStatusCode,
)
from llm_datadist.memory import syscalls
from peers import GUARD, POISON, TIMEOUT_S, Node, Peer, Peers, array_at, close_off
from test_faults import (
    _as_few_as,
    big_cache,
    cycles,
    go_on,
    move_once,
    move_until_error,
    register_wild,
    settled,
    still_filled,
    stop,
    wait_until_moving,
)
from test_links import explain, pull_one, with_caches
from test_stalls import hold_writes, push_all, release_writes, wait_entered

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
    stop(server.process)
    try:
        for blocks in (FEW, FEW, ALL):
            client.call(pull, 1, 0, "dst", blocks)
        expect(LLMStatusCode.LLM_TIMEOUT, lambda: client.call(pull, 1, 1, "dst", FEW))
    finally:
        go_on(server.process)
    assert same(blocks_of(client, "dst"), source, ALL)
    client.call(pull, 1, 1, "dst", ALL)
    assert same(blocks_of(client, "dst"), blocks_of(server, "other"), ALL)


@pytest.mark.parametrize("accessible", [True, False])
def test_other_memory_takes_the_next_path(peers: Peers, accessible: bool) -> None:
    """Without giving the mapped one up, in both modes."""
    properties = {"enable_remote_cache_accessible": accessible, "paths": "process_vm,mapped,tcp"}
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

    syscalls.process_vm_readv = syscalls.process_vm_writev = denied
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


@pytest.mark.parametrize("method", ["pull_blocks", "push_blocks"])
@pytest.mark.parametrize("victim", ["server", "client"])
def test_kill_in_the_middle(peers: Peers, method: str, victim: str) -> None:
    """The survivor gets an LLMException in time, keeps its guards, and links the restarted peer."""
    properties = {"paths": "mapped", "sync_kv_timeout": 4_000}
    server, client = make(peers, 1, **properties), make(peers, 2, **properties)
    for peer in (server, client):
        peer.call("use_pool")
        peer.call(big_cache, "mine", 0)
    assert client.link(server) == OK
    survivor, dying = (client, server) if victim == "server" else (server, client)
    running = survivor.begin(move_until_error, method, dying.cluster_id)
    wait_until_moving(survivor, running)
    dying.process.kill()
    status, _ = running.result(TIMEOUT_S)
    assert status == LLMStatusCode.LLM_NOT_YET_LINK
    memory = survivor.memory("mine")[0]
    assert (memory[:GUARD] == POISON).all()
    assert (memory[-GUARD:] == POISON).all()
    assert survivor.call("unlink", dying.cluster_id, force=True) == OK
    assert survivor.call(settled_mappings) == 0
    again = make(peers, dying.cluster_id, **properties)
    again.call("use_pool")
    again.call(big_cache, "mine", 0)
    assert survivor.link(again) == OK
    survivor.call(move_once, method, dying.cluster_id)


def mappings() -> int:
    """How many pools of others this process has mapped: its own one is one more."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    inodes = {line.split()[4] for line in lines if "memfd:llm-datadist-pool" in line}
    return len(inodes) - 1


def settled_mappings(node: Node) -> int:
    """In the child: ``mappings``, for nodes with a pool."""
    del node
    return mappings()


def test_unregister_while_peers_write(peers: Peers) -> None:
    """When the memory is given back, nobody writes to it any more: bytes written after it stay."""
    server, client = make(peers, 1, paths="mapped"), make(peers, 2, listen=False, paths="mapped")
    server.call("use_pool")
    assert client.link(server) == OK
    client.call(big_cache, "mine", None)
    for _ in range(5):
        server.call(big_cache, "theirs", 0)
        running = client.begin(move_until_error, "push_blocks", 1)
        wait_until_moving(client, running)
        server.call(unregister_and_fill, "theirs")
        status, _ = running.result(TIMEOUT_S)
        assert status == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        assert server.call(still_filled)
        server.call(give_back_pool)


def unregister_and_fill(node: Node, name: str) -> None:
    """In the child: take the memory back and use it for something else at once."""
    node.manager.unregister_cache(node.caches.pop(name).cache_id)
    node.extra["arena"] = node.arenas.pop(name)
    node.extra["arena"].memory[0][:] = 0x55


def give_back_pool(node: Node) -> None:
    """In the child."""
    node.manager.deallocate_cache(node.extra.pop("arena").pool)


def deallocate(node: Node, name: str) -> LLMStatusCode:
    """In the child: give the cache back, and use its memory again at once; the status."""
    try:
        node.manager.deallocate_blocks_cache(node.caches[name])
    except LLMException as error:
        return error.status_code
    node.extra[name][0][:] = POISON
    return OK


def big_pool_cache(node: Node) -> None:
    """In the child: as ``big_cache``, allocated."""
    desc = CacheDesc(1, [256, 256 << 10], DataType.DT_UINT8)
    cache = node.caches["mine"] = node.manager.allocate_blocks_cache(desc, BlocksCacheKey(1, 0))
    node.extra["mine"] = [array_at(addr, 64 << 20) for addr in cache.tensor_addrs]


def untouched(node: Node) -> bool:
    """In the child."""
    return bool((node.extra["mine"][0] == POISON).all())


@pytest.mark.parametrize("force", [False, True])
def test_deallocate_waits_for_a_writer_that_was_held_up(peers: Peers, force: bool) -> None:
    """Also when the link has been unlinked by force: busy until the writer has ended, and safe after that."""
    owner = make(peers, 1, paths="mapped", sync_kv_timeout=100)
    writer = make(peers, 2, listen=False, paths="mapped")
    owner.call(big_pool_cache)
    writer.call(big_cache, "mine", None)
    assert writer.link(owner) == OK
    writer.call(hold_writes)
    pushing = writer.begin(push_all, 1)
    assert writer.call(wait_entered)
    if force:
        assert owner.call("unlink", 2, force=True) == OK
    assert owner.call(deallocate, "mine") == LLMStatusCode.LLM_LINK_BUSY
    writer.call(release_writes)
    with pytest.raises(LLMException):
        pushing.result(TIMEOUT_S)
    assert owner.call(deallocate, "mine") == OK
    assert owner.call(untouched)


def test_200_cycles_leave_nothing_behind(peers: Peers) -> None:
    """Link, pull over both paths, unlink: descriptors, threads and mappings stay flat on both sides."""
    server, client = make(peers, 1), make(peers, 2, listen=False)
    server.call("use_pool")
    with_caches(server, client)
    client.call(cycles, server.address, 20)
    before = [settled(peer, lambda _values: True) for peer in (server, client)]
    client.call(cycles, server.address, 200)
    for peer, start in zip((server, client), before, strict=True):
        _as_few_as(peer, start)
        assert peer.call(settled_mappings) == 0


def handover_name(node: Node) -> str:
    """In the child: the name of its socket."""
    return str(node.datadist._engine._core.offer.handover)


def test_strangers_get_nothing_and_leave_nothing_behind(peers: Peers) -> None:
    """Silent ones, wrong tokens and long packets, while the path is in use."""
    server, client = make(peers, 1, paths="mapped"), make(peers, 2, listen=False, paths="mapped")
    server.call("use_pool")
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull_one, 1)
    start = settled(server, lambda _values: True)
    address = "\0" + server.call(handover_name)
    for said in (None, bytes(16), b"x", bytes(17), bytes(5000)) * 20:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.connect(address)
            if said is not None:
                sock.send(said)
                assert sock.recvmsg(100, 100)[:2] == (b"", [])
    client.call(pull_one, 1)
    _as_few_as(server, start)


def maps_in_fork(node: Node) -> tuple[int, int]:
    """In the child: pools that are mapped here and in a fork."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, bytes([mappings() + 1]))
        os._exit(0)
    os.close(writing)
    (found,) = os.read(reading, 1)
    os.close(reading)
    os.waitpid(pid, 0)
    return mappings() + 1, found


def test_forks_do_not_keep_the_memory_of_others(peers: Peers) -> None:
    """A client without a pool: what it has mapped is the server's."""
    server, client = make(peers, 1), make(peers, 2, listen=False, mem_pool_cfg=None)
    server.call("use_pool")
    with_caches(server, client)
    assert client.link(server) == OK
    assert chosen(client, 1) == ["mapped"]
    assert client.call(maps_in_fork) == (1, 0)
    client.call(pull_one, 1)


def test_finalize_of_the_owner_ends_it(peers: Peers) -> None:
    """The memory goes back to the system when the client has heard of it."""
    server, client = make(peers, 1, paths="mapped"), make(peers, 2, listen=False, paths="mapped")
    server.call("use_pool")
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull_one, 1)
    server.call("finalize")
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: client.call(pull_one, 1))
    assert client.call(settled_mappings) == 0


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


def enter_pid_namespace() -> None:
    """In a child, before it has threads: go on in a process of another pid namespace, with a /proc of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_pids, new_mounts, private = 0x20000000, 0x00020000, 1 << 18 | 1 << 14
    if libc.unshare(new_pids | new_mounts):
        raise OSError(ctypes.get_errno(), "unshare")
    pid = os.fork()
    if pid:
        os.closerange(3, 256)  # so that the end of the other one is seen
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 0xFF)
    assert libc.mount(None, b"/", None, private, None) == 0
    assert libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0


def _may_unshare() -> bool:
    pid = os.fork()
    if not pid:
        os._exit(bool(ctypes.CDLL(None).unshare(0x20000000 | 0x00020000)))
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make pid namespaces")
def test_across_pid_namespaces(peers: Peers) -> None:
    """As containers of one pod: both processes are pid 1, and the death of one is seen by the other."""
    if not _may_unshare():
        pytest.skip("unshare is not permitted here")
    properties: dict[str, Any] = {"mem_pool_cfg": POOL, "paths": "process_vm,mapped", "sync_kv_timeout": 4_000}
    server, client = (peers.make(number, process=peers.process(enter_pid_namespace), **properties) for number in (1, 2))
    for peer in (server, client):
        peer.call("use_pool")
        peer.call(big_cache, "mine", 0)
        assert peer.call(own_pid) == 1
    assert client.link(server) == OK
    report = client.call(explain, 1)
    assert report.path == "mapped"
    assert "another pid namespace" in str(report)
    running = client.begin(move_until_error, "pull_blocks", 1)
    wait_until_moving(client, running)
    server.begin(end_at_once)
    assert running.result(TIMEOUT_S)[0] == LLMStatusCode.LLM_NOT_YET_LINK


def own_pid(node: Node) -> int:
    """In the child."""
    del node
    return os.getpid()


def end_at_once(node: Node) -> None:
    """In the child: die without a word."""
    del node
    os._exit(9)
