"""Messages between linked processes: order, bounds, waiting, and those that come with a transfer."""

from __future__ import annotations

import asyncio
import select
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import expect
from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Notification,
)
from llm_datadist.engine.notifications import MAX_BYTES, MAX_MESSAGES
from loopback_kit import cluster
from net_helpers import logged
from peers import GUARD, TIMEOUT_S, Node
from short_kit import BLOCKS, SOURCE, TARGET, blocks_of, make_pair
from stopping import go_on, stop
from test_mapped import BLOCKS as POOLED
from test_mapped import allocate, allocated, make
from test_transfer_tasks import in_background
from waiting_kit import WAYS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers import Peers

OK = LLMStatusCode.LLM_SUCCESS
BUSY = LLMStatusCode.LLM_LINK_BUSY
LONGEST = 64 << 10
WAIT_MS = int(TIMEOUT_S * 1000)


def send(node: Node, cluster_id: int, *messages: bytes) -> None:
    """In the child."""
    for message in messages:
        node.datadist.send_notify(cluster_id, message, WAIT_MS)


def get(node: Node, timeout_ms: int = 0) -> list[tuple[int, bytes]]:
    """In the child: what has come."""
    return [(each.cluster_id, each.message) for each in node.datadist.get_notifies(timeout_ms)]


# Between processes


def test_order(peers: Peers) -> None:
    """Of two senders, one of which was linked and one of which has linked; each message once."""
    middle, left, right = peers.make(1), peers.make(2), peers.make(3)
    assert middle.link(left) == OK
    assert right.link(middle) == OK
    numbers = [str(number).encode() for number in range(300)]
    sending = [peer.begin(send, 1, *numbers) for peer in (left, right)]
    for each in sending:
        each.result(TIMEOUT_S)
    got = middle.call(get)
    assert len(got) == 600
    for cluster_id in (2, 3):
        assert [message for sender, message in got if sender == cluster_id] == numbers
    assert middle.call(get) == []
    middle.call(send, 3, b"", bytes(LONGEST))
    assert right.call(get) == [(1, b""), (1, bytes(LONGEST))]


def test_they_outlive_the_link_and_their_sender(peers: Peers) -> None:
    server, client = peers.make(1), peers.make(2)
    assert client.link(server) == OK
    client.call(send, 1, b"one")
    assert client.call("unlink", 1, server.address) == OK
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: client.call(send, 1, b"lost"))
    assert client.link(server) == OK
    client.call(send, 1, b"two")
    client.process.kill()
    assert server.call(get) == [(2, b"one"), (2, b"two")]
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: server.call(send, 2, b"lost"))


def test_a_peer_that_is_full(peers: Peers) -> None:
    """The sender learns of it, and may send again later; what had come is kept."""
    server, client = peers.make(1), peers.make(2)
    assert client.link(server) == OK
    numbers = [str(number).encode() for number in range(MAX_MESSAGES)]
    client.call(send, 1, *numbers)
    error = expect(BUSY, lambda: client.call(send, 1, b"one more"))
    assert isinstance(error, LLMException)
    assert error.retryable
    assert error.peer == 1
    assert f"{MAX_MESSAGES} notifications" in str(error)
    assert "get_notifies" in str(error)
    assert server.call(get) == [(2, number) for number in numbers]
    client.call(send, 1, b"again")
    assert server.call(get) == [(2, b"again")]


def at_get(node: Node, cluster_id: int, name: str) -> list[np.ndarray]:
    """In the child: what is in the memory when the message is there."""
    assert get(node, WAIT_MS) == [(cluster_id, b"all there")]
    return allocated(node, name) if name in node.extra else node.memory(name)


@pytest.mark.parametrize("path", ["inprocess", "process_vm", "tcp"])
@pytest.mark.parametrize("way", WAYS)
def test_all_bytes_are_there_before_the_message_of_a_push(peers: Peers, path: str, way: str) -> None:
    client, server = make_pair(peers, path)
    blocks = list(range(BLOCKS))
    waiting = server.begin(at_get, 1, TARGET)
    client.call(in_background, "push_blocks", way, 2, blocks, blocks, notify=b"all there")
    for there, here in zip(waiting.result(TIMEOUT_S), client.memory(SOURCE), strict=True):
        assert (there == here).all()


def push_pool(node: Node, cluster_id: int, blocks: list[int]) -> None:
    """In the child."""
    node.manager.push_blocks(BlocksCacheKey(cluster_id, 1), node.caches["src"], blocks, blocks, notify=b"all there")


def test_the_same_over_mapped_memory(peers: Peers) -> None:
    server, client = make(peers, 1), make(peers, 2, listen=False)
    server.call(allocate, "dst", None, 1)
    client.call(allocate, "src", 5)
    assert client.link(server) == OK
    assert client.call("path", 1) == "mapped"
    for blocks in ([1], list(range(POOLED))):
        waiting = server.begin(at_get, 2, "dst")
        client.call(push_pool, 1, blocks)
        for there, here in zip(waiting.result(TIMEOUT_S), client.call(allocated, "src"), strict=True):
            assert (there[blocks] == here[blocks]).all()


def move(node: Node, method: str, *args: Any, **kwargs: Any) -> None:
    """In the child: a call of the manager, with a message; names stand for caches."""
    arguments = [node.caches[each] if isinstance(each, str) else each for each in args]
    getattr(node.manager, method)(*arguments, **kwargs, notify=method.encode())


def test_every_transfer_can_bring_one(peers: Peers) -> None:
    client, server = make_pair(peers, "process_vm")
    for peer in (client, server):
        cache_id = peer.call("register_contiguous", "entries", 2, 4, 64, seed=peer.cluster_id)
    entry = CacheKeyByIdAndIndex(2, cache_id, 1)
    calls: dict[str, tuple[Any, ...]] = {
        "pull_blocks": (BlocksCacheKey(2, 0), TARGET, [1], [2]),
        "push_blocks": (BlocksCacheKey(2, 1), SOURCE, [1], [2]),
        "pull_cache": (entry, "entries"),
        "push_cache": (entry, "entries"),
    }
    for method, arguments in calls.items():
        client.call(move, method, *arguments)
        assert server.call(get) == [(1, method.encode())]
    assert (blocks_of(client, TARGET)[0][2] == blocks_of(server, SOURCE)[0][1]).all()
    with pytest.raises(LLMException):
        client.call(move, "pull_blocks", BlocksCacheKey(2, 0), TARGET, [1], [BLOCKS])
    assert server.call(get) == []


def test_message_mode(peers: Peers) -> None:
    """The key has been released when the message is there."""
    properties = {"enable_remote_cache_accessible": False}
    server, client = peers.make(1, **properties), peers.make(2, listen=False, **properties)
    key = CacheKey(1, 9, 0)
    server.call("register_contiguous", "src", 2, 4, 64, seed=1, keys=[key])
    client.call("register_contiguous", "dst", 2, 4, 64)
    assert client.link(server) == OK
    client.call(move, "pull_cache", key, "dst")
    assert server.call(get) == [(2, b"pull_cache")]
    for there, here in zip(server.memory("src"), client.memory("dst"), strict=True):
        assert (there[GUARD : GUARD + 64] == here[GUARD : GUARD + 64]).all()


def fill(node: Node, cluster_id: int) -> None:
    """In the child: send as much as the peer takes."""
    for _ in range(MAX_BYTES // LONGEST):
        node.datadist.send_notify(cluster_id, bytes(LONGEST), WAIT_MS)


@pytest.mark.parametrize("method", ["pull_blocks", "push_blocks"])
def test_a_message_that_cannot_be_delivered(peers: Peers, method: str) -> None:
    """The call fails, but the bytes are in place, and it says so."""
    client, server = make_pair(peers, "process_vm")
    client.call(fill, 2)
    model, name = (0, TARGET) if method == "pull_blocks" else (1, SOURCE)
    error = expect(BUSY, lambda: client.call(move, method, BlocksCacheKey(2, model), name, [5, 4], [7, 6]))
    assert isinstance(error, LLMException)
    assert (error.phase, error.finished_blocks, error.operation) == ("confirm", (6, 7), method)
    assert "the bytes are in place" in str(error)
    assert f"the limits are {MAX_MESSAGES} and {MAX_BYTES}" in str(error)
    near, far = (client, server) if method == "pull_blocks" else (server, client)
    assert (blocks_of(near, TARGET)[0][[7, 6]] == blocks_of(far, SOURCE)[0][[5, 4]]).all()
    assert len(server.call(get)) == MAX_BYTES // LONGEST


def stop_and_send(node: Node, peer_pid: int, cluster_id: int) -> None:
    """In the child: send to a process that is stopped."""
    stop(peer_pid)
    try:
        node.datadist.send_notify(cluster_id, b"late", 200)
    finally:
        go_on(peer_pid)


def test_a_peer_that_is_stopped(peers: Peers) -> None:
    """LLM_TIMEOUT: it may still arrive, and here it does."""
    server, client = peers.make(1), peers.make(2)
    assert client.link(server) == OK
    error = expect(LLMStatusCode.LLM_TIMEOUT, lambda: client.call(stop_and_send, server.process.pid, 1))
    assert "may still arrive" in str(error)
    assert server.call(get, WAIT_MS) == [(2, b"late")]


# Within one process


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    """Clusters 1 and 2, linked."""
    one, two = Node(), Node()
    address = one.init(1, listen_ip_info="127.0.0.1:0")
    two.init(2)
    assert address is not None
    assert two.link(1, address) == OK
    yield one, two
    two.finalize()
    one.finalize()


def test_what_they_are(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    send(two, 1, b"here")
    (got,) = one.datadist.get_notifies()
    assert got == Notification(2, b"here")
    assert hash(got) == hash(Notification(2, b"here"))


def test_waiting_for_the_first_one(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    assert one.datadist.get_notifies(10) == []
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get, one, WAIT_MS)
        send(two, 1, b"here")
        assert waiting.result(TIMEOUT_S) == [(2, b"here")]


def readable(fd: int, timeout_s: float = 0) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


def test_the_descriptor(nodes: tuple[Node, Node]) -> None:
    """Readable while there are messages, also those of before the first call."""
    one, two = nodes
    early, late = one.datadist, two.datadist
    send(one, 2, b"before")
    fd = late.notify_fileno()
    assert fd == late.notify_fileno()
    assert readable(fd)
    assert get(two) == [(1, b"before")]
    assert not readable(fd)
    fd = early.notify_fileno()
    assert not readable(fd)
    for _ in range(2):
        send(two, 1, b"a", b"b")
        assert readable(fd, TIMEOUT_S)
        assert get(one) == [(2, b"a"), (2, b"b")]
        assert not readable(fd)


def test_an_event_loop(nodes: tuple[Node, Node]) -> None:
    one, two = nodes

    async def first() -> list[Notification]:
        loop, there = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(one.datadist.notify_fileno(), there.set)
        sending = loop.run_in_executor(None, send, two, 1, b"here")
        await asyncio.wait_for(there.wait(), TIMEOUT_S)
        await sending
        loop.remove_reader(one.datadist.notify_fileno())
        return one.datadist.get_notifies()

    assert asyncio.run(first()) == [Notification(2, b"here")]


def test_finalize_ends_the_waiting(nodes: tuple[Node, Node]) -> None:
    """And says what is lost by it."""
    one, two = nodes
    fd = one.datadist.notify_fileno()
    with ThreadPoolExecutor(2) as pool:
        polling = pool.submit(readable, fd, TIMEOUT_S)
        waiting = pool.submit(one.datadist.get_notifies, WAIT_MS)
        end = time.monotonic() + TIMEOUT_S
        assert one.datadist._engine is not None
        while not one.datadist._engine._core.mailbox._changed._waiters:  # type: ignore[attr-defined]
            assert time.monotonic() < end
        one.finalize()
        expect(LLMStatusCode.LLM_FAILED, lambda: waiting.result(TIMEOUT_S))
        assert polling.result(TIMEOUT_S)
    expect(RuntimeError, one.datadist.get_notifies)
    expect(RuntimeError, one.datadist.notify_fileno)
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: send(two, 1, b"lost"))


def test_messages_that_nobody_has_read(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    send(two, 1, b"unread", b"too")
    with logged() as records:
        one.finalize()
    assert any("2 notifications that nobody has read" in record.getMessage() for record in records)


def test_many_senders_and_readers(nodes: tuple[Node, Node]) -> None:
    """Every message is given once."""
    one, two = nodes
    seen: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.extend(message for _, message in get(one, 50))

    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        senders = [
            pool.submit(send, two, 1, *(f"{sender}/{number}".encode() for number in range(100))) for sender in range(6)
        ]
        for sender in senders:
            sender.result(TIMEOUT_S)
        done.set()
        for reader in readers:
            reader.result(TIMEOUT_S)
    seen += [message for _, message in get(one)]
    assert sorted(seen) == sorted(f"{sender}/{number}".encode() for sender in range(6) for number in range(100))


def test_a_push_of_nothing_delivers_its_message(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    for node in nodes:
        node.register_blocks("thin", 1, 4, 64, model_id=3)
    for begin in (False, True):
        method = two.manager.push_blocks_async if begin else two.manager.push_blocks
        task = method(BlocksCacheKey(1, 3), two.caches["thin"], [0], [1], notify=b"nothing")
        assert task is None if not begin else task.result(TIMEOUT_S) is None
        assert get(one) == [(2, b"nothing")]


def test_loopback(loopback_datadist: LLMDataDist) -> None:
    """The process itself is the peer."""
    assert loopback_datadist.link_clusters([cluster(2)])[0] == OK
    loopback_datadist.send_notify(2, b"echo")
    assert loopback_datadist.get_notifies() == [Notification(3, b"echo")]


# Checks


@pytest.mark.parametrize(
    ("arguments", "failure", "match"),
    [
        ((1, "text"), TypeError, "message only support bytes"),
        ((1, None), TypeError, "message only support bytes"),
        ((-1, b""), ValueError, "cluster_id"),
        (("1", b""), TypeError, "cluster_id"),
        ((1, b"", 0), LLMStatusCode.LLM_PARAM_INVALID, "timeout_ms must be at least 1"),
        ((1, b"", 1.5), TypeError, "timeout_ms"),
        ((1, b"", 2**32), ValueError, "timeout_ms"),
        ((1, bytes(LONGEST + 1)), LLMStatusCode.LLM_PARAM_INVALID, "65537 bytes, but at most 65536"),
        ((7, b""), LLMStatusCode.LLM_NOT_YET_LINK, "cluster 7"),
    ],
)
def test_arguments(
    nodes: tuple[Node, Node], arguments: tuple[Any, ...], failure: type[Exception] | LLMStatusCode, match: str
) -> None:
    expect(failure, lambda: nodes[1].datadist.send_notify(*arguments), match=match)


def test_the_message_of_a_transfer_that_is_too_long(nodes: tuple[Node, Node]) -> None:
    """Nothing is moved."""
    one, two = nodes
    one.register_blocks("dst", 2, 4, 64, model_id=3)
    two.register_blocks("src", 2, 4, 64, seed=1)
    before = one.memory("dst")
    for method in (two.manager.push_blocks, two.manager.push_blocks_async):
        error = expect(
            LLMStatusCode.LLM_PARAM_INVALID,
            lambda method=method: method(  # type: ignore[misc]
                BlocksCacheKey(1, 3), two.caches["src"], [0], [1], notify=bytes(LONGEST + 1)
            ),
        )
        assert isinstance(error, LLMException)
        assert error.phase == "check"
    assert all(np.array_equal(*both) for both in zip(before, one.memory("dst"), strict=True))


@pytest.mark.parametrize("value", [-1, 1.5, 2**32])
def test_a_timeout_that_is_none(nodes: tuple[Node, Node], value: Any) -> None:
    expect(TypeError if value == 1.5 else ValueError, lambda: nodes[0].datadist.get_notifies(value))


def test_before_init() -> None:
    datadist = LLMDataDist(LLMRole.MIX, 1)
    for call in (datadist.get_notifies, datadist.notify_fileno, lambda: datadist.send_notify(2, b"")):
        expect(RuntimeError, call, match="not initialised")
