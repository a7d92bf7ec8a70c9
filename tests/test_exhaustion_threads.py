"""Threads that run out; see ``test_exhaustion``."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from confine_kit import become, logged, observed, set_limit
from exhaustion_kit import (
    POOL,
    Held,
    Start,
    as_root,
    try_to_start,
)
from llm_datadist import (
    BlocksCacheKey,
    LLMException,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from peers import TIMEOUT_S, Node, Peer, Peers
from test_comms import table
from test_faults import BLOCKS, big_cache
from test_links import pull_one, with_caches
from test_matrix import Ready
from until import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OK = LLMStatusCode.LLM_SUCCESS
FAILED = LLMStatusCode.LLM_FAILED


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

    def complete() -> bool:
        said.extend(logged(node))
        return len(said) >= enough

    with no_threads():
        until(complete, what=lambda: said)
    return said


def wait_until_starved(peer: Peer) -> None:
    """Return once a process may start no thread: it cannot be asked, for that takes one."""
    limits = Path(f"/proc/{peer.process.pid}/limits")
    until(lambda: re.search(r"Max processes +1 ", limits.read_text(encoding="ascii")))


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
