"""Memory, pools and mappings that run out; see ``test_exhaustion``."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
import os
import re
from pathlib import Path
from typing import Any

import pytest

from confine_kit import logged, mount, observed, set_limit
from exhaustion_kit import (
    POOL,
    Held,
    Start,
    as_root,
    check_nothing_left,
    steady,
    try_to_start,
)
from expect import expect
from llm_datadist import (
    CacheDesc,
    DataType,
    LLMException,
    LLMStatusCode,
)
from peers import Node, Peer, Peers
from short_kit import with_caches as with_few_caches
from test_links import pull_one, with_caches
from test_permissions import transfer_all

OK = LLMStatusCode.LLM_SUCCESS
FAILED = LLMStatusCode.LLM_FAILED


def used_address_space() -> int:
    """Bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


def start_with(node: Node, limit: str, value: int, **properties: Any) -> Start:
    """In the child: under a limit; a negative value is so much more than is in use."""
    if value < 0:
        value = used_address_space() - value
    return try_to_start(node, lambda: set_limit(limit, value), functools.partial(set_limit, limit, -1), **properties)


BIG_POOL = '{"memory_size": 4294967296, "page_shift": 16}'


@pytest.mark.parametrize(
    ("limit", "value", "pool", "text"),
    [
        (
            "RLIMIT_FSIZE",
            3 << 20,
            BIG_POOL,
            "4294967296 bytes: File too large (this process may make files of 3145728 bytes, RLIMIT_FSIZE, and shared",
        ),
        ("RLIMIT_FSIZE", 1 << 20, None, "cannot start: File too large (this process may make files of 1048576 bytes"),
        ("RLIMIT_AS", -(64 << 20), BIG_POOL, "bytes of address space, RLIMIT_AS); raise it with ulimit -v"),
        ("RLIMIT_AS", -(1 << 20), None, "bytes of address space, RLIMIT_AS); raise it with ulimit -v"),
    ],
)
def test_memory_at_the_start(peers: Peers, limit: str, value: int, pool: str | None, text: str) -> None:
    """LLM_OUT_OF_MEMORY, nothing left behind, and it starts without the limit."""
    peer = Peer(peers.process(), "node-1")
    properties: dict[str, Any] = {"mem_pool_cfg": pool}
    assert peer.call(start_with, "RLIMIT_CORE", 0, **properties).status == OK  # what is loaded only once
    start = peer.call(start_with, limit, value, **properties)
    assert start.status == LLMStatusCode.LLM_OUT_OF_MEMORY, start
    assert text in start.text
    assert start.left == Held(0, 0, 0)
    peer.init(1, **properties)


def test_a_pool_larger_than_the_machine(peers: Peers) -> None:
    """Is refused when it is made, not when it is first used."""
    huge = '{"memory_size": 1125899906842624, "page_shift": 16}'
    peer = Peer(peers.process(), "node-1")
    error = expect(LLMStatusCode.LLM_OUT_OF_MEMORY, lambda: peer.init(1, mem_pool_cfg=huge))
    assert "1125899906842624 bytes" in str(error)
    assert re.search(r"this machine has \d+ bytes", str(error))


@as_root
def test_a_full_dev_shm_does_not_matter(peers: Peers) -> None:
    """Shared memory is not from there, and nothing is ever put there."""
    first = functools.partial(mount, "tmpfs", "/dev/shm", "size=1m")
    server, client = (observed(peers, number, peers.process(first), mem_pool_cfg=POOL) for number in (1, 2))
    for peer in (server, client):
        peer.call(fill_dev_shm)
        peer.call("use_pool")
    with_few_caches(server, client)
    assert client.link(server) == OK
    transfer_all(client, server)
    for peer in (server, client):
        assert peer.call(in_dev_shm) == ["full"]
        assert peer.call(logged) == []


def fill_dev_shm(node: Node) -> None:
    """In the child: no byte is left."""
    file = os.open("/dev/shm/full", os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while True:
            os.write(file, bytes(4096))
    os.close(file)


def in_dev_shm(node: Node) -> list[str]:
    """In the child."""
    return [path.name for path in Path("/dev/shm").iterdir()]


def test_pool_exhausted(peers: Peers) -> None:
    """Nothing of a cache that does not fit is kept; what is freed can be had again."""
    peer = Peer(peers.process(), "node-1").init(1, mem_pool_cfg=POOL)
    for _ in range(3):
        count, status, text = peer.call(allocate_until_full)
        assert (count, status) == (4, LLMStatusCode.LLM_OUT_OF_MEMORY)
        assert (
            "in the memory pool of 4194304 bytes (longest free run: 0); free caches or make memory_size larger" in text
        )
        peer.call(free_all)


def allocate_until_full(node: Node) -> tuple[int, LLMStatusCode, str]:
    """In the child: caches of two tensors, 1 MiB together; how many fit, and what is said then."""
    node.extra["allocated"] = made = []
    desc = CacheDesc(2, [1, 512 << 10], DataType.DT_UINT8)
    while True:
        try:
            made.append(node.manager.allocate_cache(desc))
        except LLMException as error:
            return len(made), error.status_code, str(error)


def free_all(node: Node) -> None:
    """In the child."""
    for cache in node.extra.pop("allocated"):
        node.manager.deallocate_cache(cache)


def take_mappings(node: Node, spare: int) -> None:
    """In the child: all but a few that vm.max_map_count permits."""
    most = int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    page = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    node.extra["mappings"] = area = mmap.mmap(-1, most * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = ctypes.addressof(ctypes.c_char.from_buffer(area))
    at = base + page
    lines = len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())
    for _ in range((most - lines - spare) // 2):
        if libc.mprotect(at, page, mmap.PROT_READ):
            break
        at += 2 * page


def free_mappings(node: Node) -> None:
    """In the child."""
    area = node.extra.pop("mappings")
    gc.collect()  # the view of it that its address was taken from
    area.close()


@pytest.mark.parametrize("spare", [2, 8, 64])
def test_mappings_at_a_link(peers: Peers, spare: int) -> None:
    """A link gets a path that needs none, and says why, or fails and says why."""
    server, client = observed(peers, 1, peers.process()), observed(peers, 2, peers.process(), listen_ip_info=None)
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(pull_one, 1)
    assert client.call("unlink", 1, server.address) == OK
    before = steady(client)
    status, path, said = client.call(link_without_mappings, server.address, spare)
    if status == OK:
        assert path in {"process_vm", "tcp"}
        assert path == "process_vm" or any("vm.max_map_count" in line for line in said), said
        client.call(pull_one, 1)
        assert client.call("unlink", 1, server.address) == OK
    else:
        assert status == LLMStatusCode.LLM_LINK_FAILED
        assert any("vm.max_map_count" in line for line in said), said
    check_nothing_left(client, before)
    assert client.link(server) == OK
    assert client.call("path", 1) == "process_vm"
    client.call(pull_one, 1)


def link_without_mappings(node: Node, address: tuple[str, int], spare: int) -> tuple[LLMStatusCode, str | None, Any]:
    """In the child: link with few mappings left; status, path and what was said."""
    take_mappings(node, spare)
    try:
        status = node.link(1, address)
        path = node.path(1) if status == OK else None
    finally:
        free_mappings(node)
    return status, path, logged(node)


def link_with_little_room(node: Node, address: tuple[str, int]) -> tuple[LLMStatusCode, str | None]:
    """In the child: link with 192 MiB of address space left; status and path.

    Too little for the pool, enough for every thread to begin: one that cannot is lost without an error by Python.
    """
    set_limit("RLIMIT_AS", used_address_space() + (192 << 20))
    try:
        status = node.link(1, address)
    finally:
        set_limit("RLIMIT_AS", -1)
    return status, node.path(1)


def test_no_room_for_the_pools_of_a_peer(peers: Peers) -> None:
    """256 MiB cannot be mapped: TCP does it, and one warning names the limit."""
    pool = '{"memory_size": 268435456, "page_shift": 12}'
    server = observed(peers, 1, peers.process(), paths="mapped,tcp", mem_pool_cfg=pool)
    client = observed(peers, 2, peers.process(), paths="mapped,tcp", listen_ip_info=None)
    server.call("use_pool")
    with_caches(server, client)
    before = steady(client)
    assert client.call(link_with_little_room, server.address) == (OK, "tcp")
    (warning,) = client.call(logged)
    assert "mapped: cannot map the peer's shared memory: mmap of" in warning
    assert "RLIMIT_AS) [raise it with ulimit -v" in warning
    client.call(pull_one, 1)
    assert client.call("unlink", 1, server.address) == OK
    check_nothing_left(client, before)
    assert client.link(server) == OK
    assert client.call("path", 1) == "mapped"
    client.call(pull_one, 1)
