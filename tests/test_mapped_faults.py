"""The mapped path when peers die, take memory back, fork, live in other namespaces; and strangers at its socket."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from expect import expect
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMException, LLMStatusCode
from peers import GUARD, POISON, TIMEOUT_S, Node, Peers, array_at
from test_faults import (
    _as_few_as,
    big_cache,
    cycles,
    move_once,
    move_until_error,
    settled,
    still_filled,
    wait_until_moving,
)
from test_links import explain, pull_one, with_caches
from test_mapped import OK, POOL, chosen, make
from test_stalls import held_push, let_fail


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
    """In the child: ``mappings`` once there are none, or after a second; the background thread closes what is lost."""
    del node
    until = time.monotonic() + 1
    while mappings() and time.monotonic() < until:
        pass
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
    pushing = held_push(writer, owner)
    if force:
        assert owner.call("unlink", 2, force=True) == OK
    assert owner.call(deallocate, "mine") == LLMStatusCode.LLM_LINK_BUSY
    let_fail(writer, pushing)
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


def test_readers_that_die_leave_nothing_behind(peers: Peers) -> None:
    """Four readers with new cluster ids link, pull and are killed; the owner keeps no descriptor."""
    server = make(peers, 1, paths="mapped")
    server.call("use_pool")
    with_caches(server)
    start: tuple[int, int, int] | None = None
    for cluster_id in range(10, 14):
        reader = make(peers, cluster_id, listen=False, paths="mapped")
        reader.call("use_pool")
        with_caches(reader)
        assert reader.link(server) == OK
        reader.call(pull_one, 1)
        server.call(pull_one, cluster_id)
        reader.process.kill()
        assert server.call(settled_mappings) == 0
        start = start or settled(server, lambda _values: True)
    assert start is not None
    _as_few_as(server, start)


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
