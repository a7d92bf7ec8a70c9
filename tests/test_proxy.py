"""The TCP proxy for tests: what it does to bytes, and to links between real processes."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from expect import expect
from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.testing import Carries, Direction, Fault, FaultKind, TcpProxy
from net_helpers import WAIT_S, ended, receive
from test_links import pull_one, with_caches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers import Peer, Peers

OK = LLMStatusCode.LLM_SUCCESS
TO, FROM = Direction.TO_TARGET, Direction.FROM_TARGET
HEAD = b"LLMDD\x01\0\0"


class Pair:
    """The two ends of connections through a proxy."""

    def __init__(self, proxy: TcpProxy, server: socket.socket) -> None:
        self.proxy = proxy
        self.ends: list[socket.socket] = []
        self._server = server

    def connect(self, head: bytes = HEAD) -> tuple[socket.socket, socket.socket]:
        """The connecting end, and the one behind the proxy, which has read the first bytes."""
        near = socket.create_connection(self.proxy.address, WAIT_S)
        self.ends.append(near)
        near.sendall(head)
        far, _ = self._server.accept()
        self.ends.append(far)
        assert receive(far, len(head)) == head
        return near, far

    def close(self) -> None:
        for end in self.ends:
            end.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        with TcpProxy(server.getsockname()) as proxy:
            made = Pair(proxy, server)
            yield made
            made.close()


def test_without_faults_every_byte_passes(pair: Pair) -> None:
    near, far = pair.connect()
    data = os.urandom(1 << 20)
    for source, sink in ((near, far), (far, near)):
        thread = threading.Thread(target=source.sendall, args=(data,))
        thread.start()
        assert receive(sink, len(data)) == data
        thread.join(WAIT_S)
    near.shutdown(socket.SHUT_WR)
    assert ended(far)
    far.sendall(b"after the end of the other direction")
    assert receive(near, 9) == b"after the"


@pytest.mark.parametrize(
    ("head", "carries"),
    [(HEAD, Carries.DATA), (b"LLMDC\x01\0\0", Carries.CONTROL), (b"GET / HTTP/1.1", Carries.OTHER)],
)
def test_connections_are_told_by_their_first_bytes(pair: Pair, head: bytes, carries: Carries) -> None:
    pair.connect(head)
    assert {kind: pair.proxy.count(kind) for kind in Carries} == {kind: int(kind is carries) for kind in Carries}
    assert pair.proxy.count() == 1


def test_corruption_changes_exactly_the_bytes_it_names(pair: Pair) -> None:
    near, far = pair.connect()
    data = bytes(100)
    fault = pair.proxy.inject(Fault(FaultKind.CORRUPT, at=10, length=5, seed=3), Carries.DATA, TO)
    near.sendall(data)
    got = receive(far, 100)
    assert [at for at in range(100) if got[at]] == [10, 11, 12, 13, 14]
    assert got[10:15] == Fault(FaultKind.CORRUPT, length=5, seed=3).changer()(bytes(5))
    assert fault.wait(0)
    far.sendall(data)
    assert receive(near, 100) == data
    other, behind = pair.connect()  # begins to count anew, from its first byte
    other.sendall(data)
    assert receive(behind, 100)[2:7] == got[10:15]


def test_a_stall_holds_what_follows_until_it_is_released(pair: Pair) -> None:
    near, far = pair.connect()
    fault = pair.proxy.inject(Fault(FaultKind.STALL, at=3), direction=FROM)
    far.sendall(b"abcdef")
    assert receive(near, 3) == b"abc"
    assert fault.wait(WAIT_S)
    near.setblocking(False)
    with pytest.raises(BlockingIOError):
        near.recv(1)
    near.sendall(b"the other direction goes on")
    assert receive(far, 27) == b"the other direction goes on"
    fault.release()
    assert receive(near, 3) == b"def"


def test_a_cut_at_a_byte_breaks_both_directions(pair: Pair) -> None:
    near, far = pair.connect()
    pair.proxy.inject(Fault(FaultKind.CUT, at=4), direction=TO)
    near.sendall(b"abcdef")
    assert receive(far, 6) == b"abcd"
    assert ended(near)


def test_dropped_bytes_never_come(pair: Pair) -> None:
    near, far = pair.connect()
    fault = pair.proxy.inject(Fault(FaultKind.DROP, at=2), direction=TO)
    near.sendall(b"abcdef")
    assert receive(far, 2) == b"ab"
    assert fault.wait(WAIT_S)
    pair.proxy.heal()
    near.sendall(b"xyz")
    assert receive(far, 3) == b"xyz"


def test_delays_and_throttling_take_their_time(pair: Pair) -> None:
    near, far = pair.connect()
    pair.proxy.inject(Fault(FaultKind.DELAY, at=1, seconds=0.2), direction=TO)
    begin = time.monotonic()
    near.sendall(b"ab")
    assert receive(far, 2) == b"ab"
    assert time.monotonic() - begin >= 0.2
    pair.proxy.throttle(10_000)
    begin = time.monotonic()
    near.sendall(bytes(1000))
    receive(far, 1000)
    near.sendall(b"x")  # after the time for what went before
    receive(far, 1)
    assert time.monotonic() - begin >= 0.1
    with pytest.raises(ValueError, match="bytes_per_second is 0"):
        pair.proxy.throttle(0)


def test_cut_takes_only_its_kind(pair: Pair) -> None:
    (data, _), (control, behind) = pair.connect(), pair.connect(b"LLMDC\x01\0\0")
    assert pair.proxy.cut(Carries.DATA) == 1
    assert ended(data)
    control.sendall(b"still there")
    assert receive(behind, 11) == b"still there"


def test_a_target_that_is_not_there_ends_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    with TcpProxy(address) as proxy, socket.socket() as near:
        near.settimeout(WAIT_S)
        assert near.connect_ex(proxy.address) or ended(near)


def test_close_leaves_no_thread_and_no_descriptor() -> None:
    threads, descriptors = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy = TcpProxy(server.getsockname())
        pair = Pair(proxy, server)
        near, _ = pair.connect()
        pair.connect()
        pair.ends += [socket.create_connection(proxy.address, WAIT_S), server.accept()[0]]  # says nothing
        proxy.inject(Fault(FaultKind.STALL))
        near.sendall(b"held")
        proxy.close()
        proxy.close()
        pair.close()
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


@pytest.mark.parametrize("values", [{"at": -1}, {"seconds": -0.1}, {"length": 0}])
def test_faults_that_make_no_sense(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="length must be positive, the others 0 or more"):
        Fault(FaultKind.CUT, **values)  # type: ignore[arg-type]


def test_a_link_through_the_proxy(peers: Peers) -> None:
    """Cut in the middle of a reply: the pull fails, the next one opens another connection."""
    server, client = peers.make(1, paths="tcp"), peers.make(2, paths="tcp", listen=False)
    with_caches(server, client)
    assert server.address is not None
    with contextlib.closing(TcpProxy(server.address)) as proxy:
        assert client.call("link", 1, proxy.address) == OK
        assert proxy.count(Carries.CONTROL) == 1
        assert proxy.count(Carries.DATA) >= 1
        fault = proxy.inject(Fault(FaultKind.CUT, at=100), Carries.DATA, FROM)
        error = expect(LLMStatusCode.LLM_FAILED, lambda: client.call(pull_one, 1))
        assert "data connection" in str(error)
        assert fault.wait(0)
        proxy.heal()
        client.call(pull_one, 1)
        assert client.call("unlink", 1, server.address) == OK


@pytest.fixture
def through_proxy(peers: Peers) -> Iterator[tuple[Peer, Peer, TcpProxy]]:
    """A server with a short deadline, a client, and what is between them; not linked."""
    server = peers.make(1, paths="tcp", sync_kv_timeout=2_000)
    client = peers.make(2, paths="tcp", listen=False)
    with_caches(server, client)
    assert server.address is not None
    with TcpProxy(server.address) as proxy:
        yield server, client, proxy


def test_a_path_that_is_stalled_while_linking_is_too_late(through_proxy: tuple[Peer, Peer, TcpProxy]) -> None:
    """The probe gets no answer: that is LLM_TIMEOUT, not LLM_LINK_FAILED, and linking again works."""
    _, client, proxy = through_proxy
    fault = proxy.inject(Fault(FaultKind.STALL), Carries.DATA, FROM)
    assert client.call("link", 1, proxy.address, 500) == LLMStatusCode.LLM_TIMEOUT
    assert fault.wait(0)
    proxy.heal()
    assert client.call("link", 1, proxy.address) == OK
    client.call(pull_one, 1)


def test_a_data_connection_that_comes_too_late_is_a_timeout(through_proxy: tuple[Peer, Peer, TcpProxy]) -> None:
    """The listening side has to ask for one over a control connection that is stalled."""
    server, client, proxy = through_proxy
    assert client.call("link", 1, proxy.address) == OK
    server.call(pull_one, 2)
    proxy.inject(Fault(FaultKind.STALL), Carries.CONTROL, FROM)
    proxy.cut(Carries.DATA)
    expect(LLMStatusCode.LLM_FAILED, lambda: server.call(pull_one, 2))  # on the connection that is cut
    error = expect(LLMStatusCode.LLM_TIMEOUT, lambda: server.call(pull_one, 2))
    assert "did not open data connections" in str(error)
    assert isinstance(error, LLMException)
    assert error.retryable
    proxy.heal()
    server.call(pull_one, 2)
