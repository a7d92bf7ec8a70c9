"""Peers that die in the middle, memory that goes away, and what is left behind."""

from __future__ import annotations

import gc
import mmap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import expect
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMStatusCode,
)
from peers import GUARD, POISON, TIMEOUT_S, Node, Peer
from stopping import go_on, stop
from test_links import pull_one, with_caches

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from peers import Peers

OK = LLMStatusCode.LLM_SUCCESS
BLOCKS = 256
BLOCK_BYTES = 256 << 10
SYNC_MS = 4_000


def big_cache(node: Node, name: str, model_id: int | None) -> None:
    """In the child: 64 MiB in one tensor."""
    node.register_blocks(name, 1, BLOCKS, BLOCK_BYTES, model_id=model_id, seed=None)


def move_until_error(node: Node, method: str, cluster_id: int) -> tuple[LLMStatusCode, float]:
    """In the child: pull or push again and again until that fails; status and seconds of the failing call."""
    node.extra["moves"] = 0
    blocks = list(range(BLOCKS))
    key = BlocksCacheKey(cluster_id, 0)
    while True:
        begin = time.monotonic()
        try:
            getattr(node.manager, method)(key, node.caches["mine"], blocks, blocks[::-1], tensor_num_per_layer=1)
        except LLMException as error:
            return error.status_code, time.monotonic() - begin
        node.extra["moves"] += 1


def moves(node: Node) -> int:
    """In the child: how many have succeeded."""
    return int(node.extra.get("moves", 0))


def wait_until_moving(peer: Peer, running: Future[Any]) -> None:
    """Return once a second transfer has surely begun."""
    until = time.monotonic() + TIMEOUT_S
    while peer.call(moves) < 1:
        assert time.monotonic() < until
        assert not running.done(), running.result()


@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
@pytest.mark.parametrize("method", ["pull_blocks", "push_blocks"])
@pytest.mark.parametrize("victim", ["server", "client"])
def test_kill_in_the_middle(peers: Peers, paths: str, method: str, victim: str) -> None:
    """The survivor gets an LLMException in time, keeps its guards, and links the restarted peer."""
    properties: dict[str, Any] = {"paths": paths, "sync_kv_timeout": SYNC_MS}
    server, client = peers.make(1, **properties), peers.make(2, **properties)
    for peer in (server, client):
        peer.call(big_cache, "mine", 0)
    assert client.link(server) == OK
    survivor, dying = (client, server) if victim == "server" else (server, client)
    running = survivor.begin(move_until_error, method, dying.cluster_id)
    wait_until_moving(survivor, running)
    dying.process.kill()
    status, seconds = running.result(TIMEOUT_S)
    assert status in {LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_FAILED, LLMStatusCode.LLM_TIMEOUT}
    assert seconds < SYNC_MS / 1000 + 0.5
    memory = survivor.memory("mine")[0]
    assert (memory[:GUARD] == POISON).all()
    assert (memory[-GUARD:] == POISON).all()
    assert survivor.call("unlink", dying.cluster_id, force=True) == OK
    again = peers.make(dying.cluster_id, listen_ip_info=f"127.0.0.1:{dying.address[1]}", **properties)  # type: ignore[index]
    again.call(big_cache, "mine", 0)
    assert survivor.link(again) == OK
    survivor.call(move_once, method, dying.cluster_id)


def move_once(node: Node, method: str, cluster_id: int) -> None:
    """In the child."""
    getattr(node.manager, method)(BlocksCacheKey(cluster_id, 0), node.caches["mine"], [0], [0], tensor_num_per_layer=1)


def test_peer_that_stops_answering_times_out(peers: Peers) -> None:
    """A stalled owner over TCP: LLM_TIMEOUT by the deadline, and the link works again once it goes on."""
    server, client = peers.make(1, paths="tcp"), peers.make(2, paths="tcp", sync_kv_timeout=500)
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull_one, 1)
    stop(server.process.pid)
    try:
        begin = time.monotonic()
        error = expect(LLMStatusCode.LLM_TIMEOUT, lambda: client.call(pull_one, 1))
        assert time.monotonic() - begin < 5
        assert isinstance(error, LLMException)
        assert error.retryable
    finally:
        go_on(server.process.pid)
    client.call(pull_one, 1)


def test_stopped_owner_can_still_be_read_on_the_same_host(peers: Peers) -> None:
    """process_vm needs nothing from the peer's interpreter."""
    server, client = peers.make(1, paths="process_vm"), peers.make(2, paths="process_vm")
    with_caches(server, client)
    assert client.link(server) == OK
    stop(server.process.pid)
    try:
        client.call(pull_one, 1)
    finally:
        go_on(server.process.pid)


@pytest.mark.parametrize("paths", ["inprocess", "process_vm", "tcp"])
def test_memory_that_is_not_mapped(peers: Peers, paths: str) -> None:
    """Registered at a wild address: an error, no crash, and the link goes on."""
    server = peers.make(1, paths=paths)
    client = peers.make(2, paths=paths, listen=False, process=server.process if paths == "inprocess" else None)
    with_caches(server, client)
    server.call(register_wild, 5)
    assert client.link(server) == OK
    error = expect(LLMStatusCode.LLM_FAILED, lambda: client.call(pull_one, 1, 5))
    assert "mapped" in str(error)
    client.call(pull_one, 1)


def register_wild(node: Node, model_id: int) -> None:
    """In the child: a cache at an address where nothing is."""
    desc = CacheDesc(2, [4, 512], DataType.DT_UINT8)
    node.manager.register_blocks_cache(desc, [1 << 20, 1 << 21], BlocksCacheKey(0, model_id))


def test_unregister_while_peers_write(peers: Peers) -> None:
    """When unregister_cache returns, nobody writes to the memory any more: bytes written after it stay."""
    server, client = peers.make(1), peers.make(2, listen=False)
    assert client.link(server) == OK
    client.call(big_cache, "mine", None)
    for _ in range(5):
        server.call(big_cache, "theirs", 0)
        running = client.begin(move_until_error, "push_blocks", 1)
        wait_until_moving(client, running)
        assert server.call(unregister_and_fill, "theirs")
        status, _ = running.result(TIMEOUT_S)
        assert status == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        assert server.call(still_filled)


def unregister_and_fill(node: Node, name: str) -> bool:
    """In the child: take the memory back and use it for something else at once."""
    node.manager.unregister_cache(node.caches.pop(name).cache_id)
    node.extra["arena"] = node.arenas.pop(name)
    node.extra["arena"].memory[0][:] = 0x55
    return True


def still_filled(node: Node) -> bool:
    """In the child."""
    return bool((node.extra["arena"].memory[0] == 0x55).all())


def counters(node: Node) -> tuple[int, int, int]:
    """In the child: descriptors, threads, resident KiB."""
    gc.collect()
    # A worker that ends its last piece of work may need a moment to go idle; descriptors close on the loop's thread.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), resident


WORKERS = 3
"""Worker threads start when they are needed, up to a fixed bound; a leak would show many more in 200 cycles."""


def settled(peer: Peer, good: Callable[[tuple[int, int, int]], bool]) -> tuple[int, int, int]:
    """The counters once they are good, or after a second."""
    until = time.monotonic() + 1
    while True:
        values: tuple[int, int, int] = peer.call(counters)
        if good(values) or time.monotonic() > until:
            return values


@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
def test_200_cycles_leave_nothing_behind(peers: Peers, paths: str) -> None:
    """Link, pull, unlink: descriptors, threads and memory stay flat on both sides.

    Allocators and new worker threads take a megabyte now and then; a leak takes some in every 200 cycles.
    """
    server, client = peers.make(1, paths=paths), peers.make(2, paths=paths, listen=False)
    with_caches(server, client)
    client.call(cycles, server.address, 60)
    first = before = [settled(peer, lambda _values: True) for peer in (server, client)]
    for _ in range(6):
        client.call(cycles, server.address, 200)
        after = [_as_few_as(peer, start) for peer, start in zip((server, client), first, strict=True)]
        growth = max(now[2] - then[2] for now, then in zip(after, before, strict=True))
        if growth <= 256:
            return
        before = after
    pytest.fail(f"resident memory grows by {growth} KiB in every 200 cycles")


def _as_few_as(peer: Peer, start: tuple[int, int, int]) -> tuple[int, int, int]:
    """The counters, of which descriptors and threads must be as at the start."""
    after = settled(peer, lambda values: values[0] <= start[0] and values[1] <= start[1] + WORKERS)
    assert after[0] <= start[0]
    assert after[1] <= start[1] + WORKERS
    return after


def cycles(node: Node, address: tuple[str, int], count: int) -> None:
    """In the child."""
    for _ in range(count):
        assert node.link(1, address) == OK
        pull_one(node, 1)
        assert node.unlink(1, address) == OK


def test_readers_that_die_leave_nothing_behind(peers: Peers) -> None:
    """Twelve readers with new cluster ids link, pull and are killed; the owner keeps no descriptor and no thread."""
    server = peers.make(1)
    with_caches(server)
    start: tuple[int, int, int] | None = None
    for cluster_id in range(10, 22):
        reader = peers.make(cluster_id, listen=False)
        with_caches(reader)
        assert reader.link(server) == OK
        reader.call(pull_one, 1)
        reader.process.kill()
        start = start or settled(server, lambda _values: True)
    assert start is not None
    _as_few_as(server, start)


SIZE = (4 << 30) + 8192


def sparse(node: Node, name: str, *, marks: bool) -> int:
    """In the child: a tensor of 4 GiB + 8 KiB of which hardly a page is used; the id of its cache."""
    node.extra[name] = memory = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array = np.frombuffer(memory, dtype=np.uint8)
    node.extra[name + ".array"] = array
    if marks:
        for number, at in enumerate(MARKS):
            array[at] = number + 1
    desc = CacheDesc(1, [1, SIZE], DataType.DT_UINT8)
    node.caches[name] = node.manager.register_cache(desc, [array.ctypes.data])
    return int(node.caches[name].cache_id)


def sparse_blocks(node: Node, name: str, *, marks: bool) -> None:
    """In the child: the same memory as blocks of 4 KiB."""
    array = node.extra[name + ".array"]
    desc = CacheDesc(1, [SIZE // 4096, 4096], DataType.DT_UINT8)
    node.caches[name + ".blocks"] = node.manager.register_blocks_cache(
        desc, [array.ctypes.data], BlocksCacheKey(0, 0) if marks else None
    )


MARKS = (0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, SIZE - 1)


@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
def test_beyond_4_gib(peers: Peers, paths: str) -> None:
    """Single blocks on both sides of 2 GiB and 4 GiB, then the whole tensor of 4 GiB + 8 KiB."""
    properties: dict[str, Any] = {"paths": paths, "sync_kv_timeout": 60_000}
    server, client = peers.make(1, **properties), peers.make(2, listen=False, **properties)
    cache_id = server.call(sparse, "src", marks=True)
    server.call(sparse_blocks, "src", marks=True)
    client.call(sparse, "dst", marks=False)
    client.call(sparse_blocks, "dst", marks=False)
    assert client.link(server) == OK
    client.call(pull_marked_blocks)
    assert client.call(found_marks, reverse=True)
    client.call(pull_whole, cache_id)
    assert client.call(found_marks, reverse=False)


def pull_marked_blocks(node: Node) -> None:
    """In the child: each marked block goes to the block of the mark from the other end."""
    blocks = [mark // 4096 for mark in MARKS]
    node.manager.pull_blocks(BlocksCacheKey(1, 0), node.caches["dst.blocks"], blocks, blocks[::-1])


def pull_whole(node: Node, cache_id: int) -> None:
    """In the child."""
    node.manager.pull_cache(CacheKeyByIdAndIndex(1, cache_id, 0), node.caches["dst"])


def found_marks(node: Node, *, reverse: bool) -> bool:
    """In the child: every mark is where it belongs, and nothing else in the blocks around them."""
    array = node.extra["dst.array"]
    for mark, other in zip(MARKS, MARKS[::-1], strict=True):
        block = mark // 4096 if not reverse else other // 4096
        page = array[block * 4096 : (block + 1) * 4096].copy()
        here = [(n, m) for n, m in enumerate(MARKS) if m // 4096 == mark // 4096]
        for n, m in here:
            if page[m % 4096] != n + 1:
                return False
            page[m % 4096] = 0
        if page.any():
            return False
    return True
