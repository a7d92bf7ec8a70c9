"""Descriptors, memory, mappings, threads and ports that run out.

A clear status whose text names the limit, its value and what to do; nothing is left behind; once there is more again,
everything goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import mmap
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from confine_kit import become, logged, mount, observed, set_limit
from expect import expect
from few_kit import with_caches as with_few_caches
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMException,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from peers import TIMEOUT_S, Node, Peer, Peers, close_off
from test_comms import table
from test_faults import BLOCKS, big_cache, go_on, stop
from test_links import pull_one, with_caches
from test_matrix import Ready
from test_permissions import transfer_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OK = LLMStatusCode.LLM_SUCCESS
FAILED = LLMStatusCode.LLM_FAILED
LIMIT = 256
"""Descriptors of a starved process."""
POOL = '{"memory_size": 4194304, "page_shift": 12}'
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become others")


class Held(NamedTuple):
    """What a process has of the system."""

    descriptors: int
    threads: int
    mappings: int
    """Of shared memory of this library."""


def held(node: Node | None = None) -> Held:
    """In the child."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return Held(len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), maps.count("memfd:llm-datadist"))


def steady(peer: Peer) -> Held:
    """The counters once they stay as they are: some things close on the background thread."""
    found = [peer.call(held)]
    while len(found) < 5 or len(set(found[-5:])) > 1:
        assert len(found) < 1_000
        time.sleep(0.02)
        found.append(peer.call(held))
    return found[-1]


def check_nothing_left(peer: Peer, before: Held) -> None:
    """No more descriptors and mappings than then, at least after a while; threads may stay for later work."""
    until = time.monotonic() + TIMEOUT_S
    while True:
        now = peer.call(held)
        if (now.descriptors <= before.descriptors and now.mappings <= before.mappings) or time.monotonic() > until:
            break
        time.sleep(0.02)
    assert now.descriptors <= before.descriptors
    assert now.mappings <= before.mappings


def starve(node: Node, spare: int) -> None:
    """In the child: take all descriptors but a few."""
    set_limit("RLIMIT_NOFILE", LIMIT)
    taken = node.extra.setdefault("taken", [])
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    for _ in range(spare):
        os.close(taken.pop())


def feed(node: Node) -> None:
    """In the child: undo ``starve``."""
    for fd in node.extra.pop("taken"):
        os.close(fd)
    set_limit("RLIMIT_NOFILE", LIMIT * 2)


def names_descriptors(text: str) -> bool:
    """Whether it names the limit, its value and the remedy."""
    return f"this process may have {LIMIT} descriptors, RLIMIT_NOFILE" in text and "raise it with ulimit -n" in text


class Start(NamedTuple):
    """What became of ``init``."""

    status: LLMStatusCode
    text: str
    left: Held
    """More than before."""


def try_to_start(node: Node, prepare: Callable[[], object], repair: Callable[[], object], **properties: Any) -> Start:
    """In the child: ``init`` between ``prepare`` and ``repair``."""
    before = held()
    status, text = OK, ""
    prepare()
    try:
        node.init(1, **properties)
    except LLMException as error:
        status, text = error.status_code, str(error)
    finally:
        repair()
    if status == OK:
        node.finalize()
    return Start(status, text, Held(*(now - then for now, then in zip(held(), before, strict=True))))


def start_starved(node: Node, spare: int, **properties: Any) -> Start:
    """In the child: with a few descriptors."""
    return try_to_start(node, lambda: starve(node, spare), lambda: feed(node), **properties)


def test_descriptors_at_the_start(peers: Peers) -> None:
    """However many are missing, it says so and leaves nothing behind, until it works."""
    peer = Peer(peers.process(), "node-1")
    properties = {"listen_ip_info": "127.0.0.1:0", "mem_pool_cfg": POOL, "paths": "mapped,tcp"}
    peer.call(start_starved, 64, **properties)  # what is loaded only once
    for spare in range(32):
        status, text, left = peer.call(start_starved, spare, **properties)
        assert left == Held(0, 0, 0), (spare, text)
        if status == OK:
            break
        assert status in {FAILED, LLMStatusCode.LLM_OUT_OF_MEMORY}, text
        assert names_descriptors(text), text
    assert status == OK
    assert spare > 5  # it really was too little before
    assert peer.init(1, **properties).address is not None


@pytest.mark.parametrize("paths", ["process_vm", "mapped", "tcp", "auto"])
@pytest.mark.parametrize("starved", ["client", "server"])
def test_descriptors_at_a_link(peers: Peers, paths: str, starved: str) -> None:
    """Too few at either side: a status and a reason, or a slower path and a warning; then it works again."""
    first = close_off if paths == "mapped" else None
    server, client = (
        observed(peers, number, peers.process(first), paths=paths, mem_pool_cfg=POOL) for number in (1, 2)
    )
    for peer in (server, client):
        peer.call("use_pool")
        peer.call(set_soft_limit, "RLIMIT_NOFILE", LIMIT * 2)
    with_caches(server, client)
    assert client.link(server) == OK  # once, so that everything is loaded and all threads run
    server.call(pull_one, 2)
    client.call(pull_one, 1)
    assert client.call("unlink", 1, server.address) == OK
    poor = client if starved == "client" else server
    before = [steady(peer) for peer in (server, client)]
    statuses = set()
    for spare in range(12):
        poor.call(starve, spare)
        try:
            status = client.link(server, timeout=1_000)
            said = "\n".join(client.call(logged) + server.call(logged))
            if status == OK:
                client.call(pull_one, 1)
                assert client.call("unlink", 1, server.address) == OK
            else:
                assert status in {LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_TIMEOUT}, said
                assert names_descriptors(said) or spare > 0, said
                assert "same user" not in said
            statuses.add(status)
        finally:
            poor.call(feed)
        for peer, start in zip((server, client), before, strict=True):
            check_nothing_left(peer, start)
    assert OK in statuses
    assert len(statuses) > 1
    assert client.link(server) == OK
    client.call(pull_one, 1)
    server.call(pull_one, 2)


def set_soft_limit(node: Node, name: str, value: int) -> None:
    """In the child."""
    set_limit(name, value)


def test_accepting_is_told_once(peers: Peers) -> None:
    """Without a descriptor the connection waits; one line in the log, however long it takes."""
    server, client = observed(peers, 1, peers.process()), peers.make(2, listen=False)
    with_caches(server, client)
    server.call(starve, 0)
    assert client.link(server, timeout=1_500) == LLMStatusCode.LLM_TIMEOUT
    server.call(feed)
    (said,) = server.call(logged)
    assert said.startswith(f"cannot accept connections on 127.0.0.1:{server.address[1]}: Too many open files")  # type: ignore[index]
    assert names_descriptors(said)
    assert client.link(server) == OK
    client.call(pull_one, 1)


def cut_data(node: Node) -> None:
    """In the child: the data connections on which this side asks break."""
    for link in node.datadist._engine._core.table.all():
        path = link.path(node.datadist._engine.deadline())
        for pool in (path._large, path._small):
            for asker in list(pool._idle):
                asker.sock.shutdown(socket.SHUT_RDWR)


def pull_status(node: Node, cluster_id: int) -> tuple[LLMStatusCode, str]:
    """In the child: of one pull."""
    try:
        pull_one(node, cluster_id)
    except LLMException as error:
        return error.status_code, str(error)
    return OK, ""


@pytest.mark.parametrize("asking", ["client", "server"])
def test_descriptors_for_a_data_connection(peers: Peers, asking: str) -> None:
    """One has to be replaced, and the side that opens it, always the client, has no descriptor left."""
    server, client = peers.make(1, paths="tcp"), peers.make(2, paths="tcp", listen=False, sync_kv_timeout=1_000)
    with_caches(server, client)
    assert client.link(server) == OK
    here, there = (client, server) if asking == "client" else (server, client)
    here.call(pull_one, there.cluster_id)
    stop(there.process)
    try:
        status, _ = here.call(pull_status, there.cluster_id) if asking == "client" else (None, None)
    finally:
        go_on(there.process)
    assert status in {None, LLMStatusCode.LLM_TIMEOUT}  # its connection is given up
    if asking == "server":
        here.call(cut_data)
    client.call(starve, 0)
    seen = []
    for _ in range(4):
        status, text = here.call(pull_status, there.cluster_id)
        seen.append(status)
        assert status in {OK, FAILED}, text
        assert status == OK or names_descriptors(text) or "try again" in text, text
    client.call(feed)
    assert FAILED in seen
    here.call(pull_one, there.cluster_id)
    there.call(pull_one, here.cluster_id)


# Memory


def start_with(node: Node, limit: str, value: int, **properties: Any) -> Start:
    """In the child: under a limit; a negative value is so much more than is in use."""
    if value < 0:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        used = int(re.search(r"VmSize:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]
        value = used - value
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


# Mappings


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


# Threads


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """The system gives this user no further thread."""
    set_limit("RLIMIT_NPROC", 1)
    try:
        yield
    finally:
        set_limit("RLIMIT_NPROC", 4096)


_users = iter(range(os.getpid() % 10_000 * 3 + 100_000, 1 << 30))


def poor_process(peers: Peers) -> Any:
    """A process of a user who has no other one."""
    return peers.process(functools.partial(become, next(_users)))


def start_without_threads(node: Node) -> Start:
    """In the child."""
    with contextlib.ExitStack() as stack:
        return try_to_start(node, lambda: stack.enter_context(no_threads()), stack.close, mem_pool_cfg=POOL)


NO_THREAD = r"can't start new thread \(user \d+ may have 1 threads, RLIMIT_NPROC, .*raise the one that was reached"


@as_root
def test_threads_at_the_start(peers: Peers) -> None:
    """An error with the limit, and nothing left behind."""
    peer = Peer(poor_process(peers), "node-1")
    start = peer.call(start_without_threads)
    assert start.status == FAILED
    assert re.search(NO_THREAD, start.text)
    assert start.left == Held(0, 0, 0)
    peer.init(1)


def without_threads(node: Node, function: Callable[..., Any], *args: Any) -> Any:
    """In the child: call a function; the result, or status and text of its failure."""
    with no_threads():
        try:
            return function(node, *args)
        except LLMException as error:
            return error.status_code, str(error)


def pull_all(node: Node, cluster_id: int) -> str:
    """In the child: 64 MiB."""
    blocks = list(range(BLOCKS))
    node.manager.pull_blocks(BlocksCacheKey(cluster_id, 0), node.caches["mine"], blocks, blocks)
    return "done"


def begin_async(node: Node, cluster_id: int) -> None:
    """In the child."""
    config = TransferWithCacheKeyConfig(BlocksCacheKey(cluster_id, 0), range(1), range(1))
    node.manager.transfer_cache_async(node.caches["dst"], Ready(), [config], [0], [0])


def link_by_table(node: Node) -> None:
    """In the child."""
    device = {"device_id": "0", "device_ip": "127.0.0.1", "device_port": "26400"}
    node.datadist.link("group", {1: 0, 2: 1}, table([device, device]))


def link_both(node: Node, address: tuple[str, int]) -> Any:
    """In the child: a peer, and one that does not exist."""
    infos = [node.cluster(1, address), node.cluster(9, ("127.0.0.1", 1))]
    return node.datadist.link_clusters(infos, 5_000)[1]


@as_root
@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
def test_threads_of_the_caller(peers: Peers, paths: str) -> None:
    """What can be done by the caller's own thread is; what cannot says why."""
    first = functools.partial(become, next(_users))
    server, client = (observed(peers, number, peers.process(first), paths=paths) for number in (1, 2))
    for peer in (server, client):
        peer.call(big_cache, "mine", 0 if peer is server else None)
    with_caches(client)
    possible = paths != "tcp"  # for the peer's data connections it needs a thread
    first_status = OK if possible else LLMStatusCode.LLM_LINK_FAILED
    assert client.call(without_threads, link_both, server.address) == [first_status, LLMStatusCode.LLM_LINK_FAILED]
    assert possible or "this side has no thread to open connections" in "".join(client.call(logged))
    assert possible or client.link(server) == OK
    assert client.call(without_threads, pull_all, 1) == "done"
    for refused in (begin_async, link_by_table):
        status, text = client.call(without_threads, *([refused, 1] if refused is begin_async else [refused]))
        assert status == FAILED
        assert re.search(NO_THREAD, text), text
    client.call(pull_all, 1)


def serve_without_threads(node: Node, enough: int) -> list[str]:
    """In the child: until so many lines are in the log; these."""
    said: list[str] = []
    until = time.monotonic() + TIMEOUT_S
    with no_threads():
        while len(said) < enough and time.monotonic() < until:
            said += logged(node)
            time.sleep(0.01)
    return said


def wait_until_starved(peer: Peer) -> None:
    """Return once a process may start no thread: it cannot be asked, for that takes one."""
    until = time.monotonic() + TIMEOUT_S
    limits = Path(f"/proc/{peer.process.pid}/limits")
    while not re.search(r"Max processes +1 ", limits.read_text(encoding="ascii")):
        assert time.monotonic() < until


@as_root
@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
def test_threads_of_the_owner(peers: Peers, paths: str) -> None:
    """No thread for a handshake, or for a request: the peer is told at once, and later it works."""
    first = functools.partial(become, next(_users))
    server, client = (observed(peers, number, peers.process(first), paths=paths) for number in (1, 2))
    with_caches(server, client)
    serving = server.begin(serve_without_threads, 1)
    wait_until_starved(server)
    assert client.link(server) == LLMStatusCode.LLM_LINK_FAILED
    assert "refused by the peer: this side has no thread for the handshake" in "".join(client.call(logged))
    (line,) = serving.result(TIMEOUT_S)
    assert re.search(NO_THREAD, line), line
    assert client.link(server) == OK
    client.call(pull_one, 1)
    server.call(pull_one, 2)
