"""The asking end over TCP: transfers of many requests, refusals while others are under way, and what stalls."""

from __future__ import annotations

import contextlib
import dataclasses
import select
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from llm_datadist.layout.spans import Runs, Spans
from llm_datadist.memory.regions import RegionError, StaleEpochError, UnknownRegionError
from llm_datadist.paths import tcp, tcp_stream
from llm_datadist.paths.base import ConnectionLostError, PathError, TensorPairs
from llm_datadist.paths.tcp import TcpPath
from llm_datadist.paths.tcp_asker import Asker, AskerPool, FewPieces
from llm_datadist.wire import data, framing
from llm_datadist.wire.data import MAX_SPANS, Greeting, Op, Request
from net_helpers import WAIT_S, ended, receive, soon, tcp_pair
from peers import GUARD, POISON, TIMEOUT_S, Node, Peer, Peers
from short_kit import METHODS, SOURCE, attempt, make_pair
from stopping import go_on, stop
from tcp_kit import SIZE, TENSORS, Both, Owner, memory, owner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.utils.deadline import Deadline

UNKNOWN = 77 << 16 | 9


@contextlib.contextmanager
def path_to(made: Owner) -> Iterator[TcpPath]:
    path = TcpPath(made.context())
    path.open(soon())
    try:
        yield path
    finally:
        path.close()


@pytest.fixture(scope="module")
def asked() -> Iterator[tuple[Owner, TcpPath]]:
    with owner() as made, path_to(made) as path:
        yield made, path


@st.composite
def some_runs(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Runs that overlap nowhere, neither here nor there."""
    count = draw(st.integers(1, 12))
    slot = SIZE // count
    order = draw(st.permutations(range(count)))
    return [(slot * n, slot * other, draw(st.integers(1, slot))) for n, other in zip(range(count), order, strict=True)]


@pytest.mark.parametrize("op", Op)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    runs=some_runs(),
    request_bytes=st.sampled_from([1, 37, 200, 5000]),
    max_spans=st.sampled_from([1, 3, 7, 100]),
    parallel=st.booleans(),
    with_epoch=st.booleans(),
)
def test_transfers_of_many_requests(
    asked: tuple[Owner, TcpPath],
    op: Op,
    runs: list[tuple[int, int, int]],
    request_bytes: int,
    max_spans: int,
    parallel: bool,
    with_epoch: bool,
) -> None:
    """Every connection asks for the next part while the reply to the one before is on its way."""
    made, path = asked
    both = Both(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tcp, "REQUEST_BYTES", request_bytes)
        patch.setattr(tcp, "MAX_SPANS", max_spans)
        patch.setattr(tcp, "PARALLEL_BYTES", 1 if parallel else 1 << 20)
        both.check_move(path, op, runs, made.table.epoch if with_epoch else 0)
    both.close()
    assert (len(path._large), len(path._small), made.fenced) == (2, 1, [])


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("at", range(TENSORS))
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("error", [UnknownRegionError, RegionError])
def test_a_refusal_while_another_request_is_under_way(
    monkeypatch: pytest.MonkeyPatch, op: Op, at: int, parallel: bool, error: type[RegionError]
) -> None:
    """What was asked after it may have been done, but is over when the error is raised; then the path goes on."""
    monkeypatch.setattr(tcp, "MAX_SPANS", 1)
    monkeypatch.setattr(tcp, "PARALLEL_BYTES", 1 if parallel else 1 << 20)
    with owner() as made, path_to(made) as path:
        both = Both(made)
        short = memory(1, 10)[0]
        bad = UNKNOWN if error is UnknownRegionError else made.add(short)
        regions = [*both.regions[:at], bad, *both.regions[at + 1 :]]
        runs = [(0, 100, 100), (200, 0, 100)]
        for _ in range(10):
            with pytest.raises(error) as caught:
                both.move(path, op, both.spans(runs, regions))
            assert type(caught.value) is error
            for buffer in (*both.here, *both.there):
                buffer[:] = 7
            both.check_move(path, op, [(0, 0, SIZE)])
            assert all((buffer == 7).all() for buffer in (*both.here, *both.there))
        assert (short == 0).all()


@pytest.mark.parametrize("op", Op)
def test_old_knowledge_is_found_out_before_the_first_byte_moves(monkeypatch: pytest.MonkeyPatch, op: Op) -> None:
    monkeypatch.setattr(tcp, "MAX_SPANS", 1)
    with owner() as made, path_to(made) as path:
        both = Both(made)
        epoch = made.table.epoch
        made.table.invalidate()
        before = [buffer.copy() for buffer in (*both.here, *both.there)]
        for _ in range(3):
            with pytest.raises(StaleEpochError):
                both.move(path, op, both.spans([(0, 0, 9), (50, 50, 9)]), epoch)
        assert all((a == b).all() for a, b in zip(before, (*both.here, *both.there), strict=True))
        both.check_move(path, op, [(0, 0, 9), (50, 50, 9)], made.table.epoch)
        assert (len(path._large), len(path._small), made.fenced) == (2, 1, [])


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("parallel", [False, True])
def test_tables_that_do_not_fit_the_socket(monkeypatch: pytest.MonkeyPatch, op: Op, parallel: bool) -> None:
    """128 KiB of table a request, 32 KiB of buffer: neither side may wait for the other for ever."""
    monkeypatch.setattr(tcp_stream, "SAME_HOST_BUFFER_BYTES", 32 << 10)
    monkeypatch.setattr(tcp, "PARALLEL_BYTES", 1 if parallel else 1 << 30)
    count = 2 * MAX_SPANS + 100
    with owner() as made, path_to(made) as path:
        both = Both(made, tensors=2, size=32 * count)
        runs = [(32 * n, 32 * (count - 1 - n) + 5, 24) for n in range(count)]
        both.check_move(path, op, runs)
        both.check_move(path, op, runs, made.table.epoch)
        assert made.fenced == []


def test_a_read_is_asked_for_without_waiting_for_room() -> None:
    """The owner may be waiting for us to receive: what does not fit is left for later."""
    ours, theirs = tcp_pair()
    with contextlib.closing(theirs), contextlib.closing(ours):
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        asker = Asker(1, ours)
        at = np.arange(MAX_SPANS, dtype=np.int64)
        spans = Spans(
            np.zeros(1, dtype=np.uint64), np.ones(1, dtype=np.uint64), np.zeros(1, dtype=np.int64), Runs(at, at, at)
        )
        sent = 0
        while not asker._stream._unsent:
            asker.begin(Op.READ, spans, soon(), 7)
            sent += 1
            assert sent < 1000
        header = Request(Op.READ, 1, MAX_SPANS, 7, spans.total, 1)
        size = data.REQUEST_BYTES + header.table_bytes + header.padding
        received: list[bytes] = []
        reading = threading.Thread(target=lambda: received.append(receive(theirs, sent * size)))
        reading.start()
        asker.flush(soon())
        reading.join(WAIT_S)
        assert not reading.is_alive()
        assert asker.under_way == sent
        tables = data.encode_spans(spans.regions, spans.starts, at, at)
        for n in range(sent):
            request = received[0][n * size : (n + 1) * size]
            assert Request.decode(request[: data.REQUEST_BYTES]).epoch == 7
            assert request[data.REQUEST_BYTES :] == tables + bytes(header.padding)


def reset(ours: socket.socket, theirs: socket.socket) -> None:
    """Let the other side break a connection, and wait until this side could know."""
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    poll = select.poll()
    poll.register(ours, 0)
    assert poll.poll(WAIT_S * 1000)


@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("how", ["reset", "shut down"])
def test_a_connection_that_broke_while_it_was_idle(asked: tuple[Owner, TcpPath], op: Op, few: bool, how: str) -> None:
    """Who uses it first gets an error of the path, and it is known to be out of step."""
    both = Both(asked[0])
    ours, theirs = tcp_pair()
    asker = Asker(1, ours)
    if how == "reset":
        reset(ours, theirs)
    else:
        asker.shut_down()
    pieces = FewPieces(TensorPairs([both.here[0].ctypes.data], both.regions[:1], 0), 10, [0], [1])
    with contextlib.closing(ours), contextlib.closing(theirs), pytest.raises(ConnectionLostError):
        asker.exchange_few(op, pieces, soon()) if few else asker.begin(op, both.spans([(0, 0, 10)]), soon(), 0)
    assert asker.under_way
    both.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_connection_that_breaks_while_it_is_opened(replaced: bool) -> None:
    """At the beginning of a link, or to replace another: an error of the path, and no descriptor stays open."""
    sockets = []

    def open_data(count: int, _deadline: Deadline) -> list[tuple[int, socket.socket]]:
        made = [tcp_pair() for _ in range(count)]
        reset(*made[-1])
        sockets.extend(ours for ours, _ in made)
        for _, theirs in made[:-1]:
            theirs.close()
        return [(number, ours) for number, (ours, _) in enumerate(made)]

    with owner() as made:
        path = TcpPath(dataclasses.replace(made.context(), open_data=open_data))
        pool = AskerPool(1, open_data)
        try:
            with pytest.raises(PathError):
                pool.take(object(), soon()) if replaced else path.open(soon())
            path.close()
            assert [sock.fileno() for sock in sockets] == [-1] * len(sockets)
        finally:
            for sock in sockets:
                sock.close()


def test_transfers_may_leave_while_they_are_aborted() -> None:
    """A thread that is woken up takes its ticket out at once: nobody else is left waiting for that."""
    pool = AskerPool(3, lambda _count, _deadline: [])

    class Leaving:
        def __init__(self, ticket: int) -> None:
            self.ticket = ticket

        def shut_down(self) -> None:
            del pool.used[self.ticket]

    pool.used |= {ticket: Leaving(ticket) for ticket in range(3)}  # type: ignore[misc]
    pool.abort()
    assert pool.used == {}


# Between processes, through the public API

BLOCKS = 64
BLOCK_BYTES = 1 << 16


def small_requests(node: Node) -> None:
    """In the child: transfers are cut into many requests."""
    tcp.REQUEST_BYTES = 3 * BLOCK_BYTES  # type: ignore[misc]
    tcp.PARALLEL_BYTES = 1  # type: ignore[misc]


def with_large_caches(*peers: Peer) -> None:
    for peer in peers:
        for name, model_id in (("from", 2), ("to", 3)):
            peer.call("register_blocks", name, 2, BLOCKS, BLOCK_BYTES, model_id=model_id, seed=peer.cluster_id)


def transfer_large(node: Node, method: str, src: list[int], dst: list[int]) -> LLMStatusCode | None:
    """In the child."""
    model_id, name = (2, "to") if method == "pull_blocks" else (3, "from")
    try:
        getattr(node.manager, method)(BlocksCacheKey(2, model_id), node.caches[name], src, dst)
    except LLMException as error:
        return error.status_code
    return None


def check_large(client: Peer, server: Peer, method: str, seed: int) -> None:
    """A large transfer that must succeed, every byte compared."""
    rng = np.random.default_rng(seed)
    src, dst = ([int(at) for at in rng.permutation(BLOCKS)[:40]] for _ in range(2))
    giver, taker = (server, client) if method == "pull_blocks" else (client, server)
    expected = taker.memory("to")
    for tensor, origin in zip(expected, giver.memory("from"), strict=True):
        tensor[GUARD:-GUARD].reshape(BLOCKS, -1)[dst] = origin[GUARD:-GUARD].reshape(BLOCKS, -1)[src]
    assert client.call(transfer_large, method, src, dst) is None
    assert all((a == b).all() for a, b in zip(taker.memory("to"), expected, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_many_requests_between_processes(peers: Peers, method: str) -> None:
    client, server = make_pair(peers, "tcp")
    with_large_caches(client, server)
    client.call(small_requests)
    for seed in range(4):
        check_large(client, server, method, seed)


@pytest.mark.parametrize("method", METHODS)
def test_a_cache_that_goes_in_the_middle_of_many_requests(peers: Peers, method: str) -> None:
    """Refused requests among others that are under way; then the next cache is served as if nothing had been."""
    client, server = make_pair(peers, "tcp")
    with_large_caches(client, server)
    client.call(small_requests)
    name, model_id = ("from", 2) if method == "pull_blocks" else ("to", 3)
    for round_ in range(4):
        running = client.begin(transfer_until_refused, method)
        assert client.call(begun)
        server.call(take_back, name)
        assert running.result(TIMEOUT_S) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        assert server.call(still_poisoned)
        server.call("register_blocks", name, 2, BLOCKS, BLOCK_BYTES, model_id=model_id, seed=round_)
        check_large(client, server, method, round_)


def transfer_until_refused(node: Node, method: str) -> LLMStatusCode:
    """In the child."""
    node.extra["begun"] = threading.Event()
    while True:
        status = transfer_large(node, method, list(range(BLOCKS)), list(range(BLOCKS))[::-1])
        node.extra["begun"].set()
        if status is not None:
            return status


def begun(node: Node) -> bool:
    """In the child: wait until the first of them has ended."""
    while "begun" not in node.extra:
        threading.Event().wait(0.001)
    return bool(node.extra["begun"].wait(TIMEOUT_S))


def take_back(node: Node, name: str) -> None:
    """In the child: unregister, and poison the memory at once."""
    node.manager.unregister_cache(node.caches.pop(name).cache_id)
    node.extra["taken"] = node.arenas.pop(name).memory
    for tensor in node.extra["taken"]:
        tensor[:] = POISON


def still_poisoned(node: Node) -> bool:
    """In the child."""
    return all((tensor == POISON).all() for tensor in node.extra["taken"])


@pytest.mark.parametrize("method", METHODS)
def test_a_stalled_peer(peers: Peers, method: str) -> None:
    """Small and large transfers time out; when it goes on they work, and nothing of the earlier ones comes late."""
    client, server = make_pair(peers, "tcp", sync_kv_timeout=600)
    with_large_caches(client, server)
    stop(server.process.pid)
    try:
        outcome = client.call(attempt, method, 2, [1], [2])
        assert outcome.status is LLMStatusCode.LLM_TIMEOUT
        every = list(range(BLOCKS))
        assert client.call(transfer_large, method, every, every) is LLMStatusCode.LLM_TIMEOUT
        assert client.call(attempt, method, 2, [3], [4]).status is LLMStatusCode.LLM_TIMEOUT
    finally:
        go_on(server.process.pid)
    for seed in range(3):
        check_large(client, server, method, seed)
        assert client.call(attempt, method, 2, [5], [6]).error is None


def hold_large_replies(node: Node) -> None:
    """In the child: as an owner, begin no reply of more than a megabyte before ``release``."""
    real, gate, entered = tcp_stream.Stream.send_few, threading.Event(), threading.Event()
    node.extra |= {"gate": gate, "entered": entered}

    def send_few(self: tcp_stream.Stream, words: Any, total: int, deadline: Deadline) -> None:
        if total > 1 << 20:
            entered.set()
            assert gate.wait(TIMEOUT_S)
        real(self, words, total, deadline)

    tcp_stream.Stream.send_few = send_few  # type: ignore[method-assign]


def entered(node: Node) -> bool:
    """In the child."""
    return bool(node.extra["entered"].wait(TIMEOUT_S))


def release(node: Node) -> None:
    """In the child."""
    node.extra["gate"].set()


def test_small_transfers_do_not_wait_for_a_large_one(peers: Peers) -> None:
    """It has its own connections."""
    client, server = make_pair(peers, "tcp")
    with_large_caches(client, server)
    server.call(hold_large_replies)
    every = list(range(BLOCKS))
    order = every[1::2] + every[::2]
    large = [client.begin(transfer_large, "pull_blocks", order, every) for _ in range(3)]
    assert server.call(entered)
    for _ in range(20):
        for method in METHODS:
            outcome = client.call(attempt, method, 2, [1, 2], [3, 4])
            assert (outcome.error, outcome.short) == (None, True)
    assert not any(each.done() for each in large)
    server.call(release)
    assert [each.result(TIMEOUT_S) for each in large] == [None] * 3


@pytest.mark.parametrize("greeting", [b"", Greeting.make(b"", b"?" * 16, 1, serve=True).encode(), b"\xff" * 64])
def test_a_stranger_on_a_data_connection(peers: Peers, greeting: bytes) -> None:
    """Whatever it sends after the preamble, it reads nothing and disturbs nobody."""
    client, server = make_pair(peers, "tcp")
    before = server.memory(SOURCE)
    assert server.address is not None
    request = Request(Op.READ, 1, 1, 0, 64, 1000).encode() + bytes(32)
    with socket.create_connection(server.address, TIMEOUT_S) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(framing.preamble(framing.Kind.DATA) + greeting + request * 3)
            stranger.shutdown(socket.SHUT_WR)
        for method in METHODS:
            assert client.call(attempt, method, 2, [1], [2]).short
        assert ended(stranger)
    assert all((a == b).all() for a, b in zip(before, server.memory(SOURCE), strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_a_link_whose_connections_all_break_opens_new_ones(peers: Peers, method: str) -> None:
    """A transfer for each of them may fail, but with an error of the library; the link does not."""
    client, server = make_pair(peers, "tcp")
    with_large_caches(client, server)
    client.call(break_connections)
    every = list(range(BLOCKS))
    assert client.call(attempt, method, 2, [1], [2]).status in {None, LLMStatusCode.LLM_FAILED}
    results = [client.call(transfer_large, method, every, every) for _ in range(tcp.CONNECTIONS + 1)]
    assert set(results) <= {None, LLMStatusCode.LLM_FAILED}
    assert results[-1] is None
    assert client.call(attempt, method, 2, [1], [2]).error is None
    check_large(client, server, method, 1)


def break_connections(node: Node) -> None:
    """In the child: cut the idle data connections."""
    path = node.manager._engine._links.peek(2)._route.path
    for pool in (path._large, path._small):
        for asker in pool._idle:
            asker.sock.shutdown(socket.SHUT_RDWR)
