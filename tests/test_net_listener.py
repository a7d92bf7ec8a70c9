"""Listening and connecting: connections sorted by their first bytes, strangers dropped, ports given back."""

from __future__ import annotations

import errno
import queue
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist.net import listener as module
from llm_datadist.net.dial import connect
from llm_datadist.net.listener import Listener
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire import framing
from llm_datadist.wire.data import GREETING_BYTES, Greeting
from llm_datadist.wire.framing import Kind
from net_helpers import WAIT_S, ended, logged, receive, running_loop, settle, soon, tcp_pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.net.address import Address
    from llm_datadist.net.loop import Loop

CONTROL, DATA = framing.preamble(Kind.CONTROL), framing.preamble(Kind.DATA)
GREETING = Greeting.make(b"", b"0123456789abcdef", 7, serve=True)


class Door:
    """A listener, and the connections that it let in."""

    def __init__(self, loop: Loop, address: Address = ("127.0.0.1", 0)) -> None:
        self.loop = loop
        self.came: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.listener = Listener(
            address,
            loop,
            lambda sock: self.came.put(("control", sock, loop.in_loop())),
            lambda sock, greeting: self.came.put(("data", sock, loop.in_loop(), greeting)),
        )
        self.address = self.listener.address

    def next(self) -> tuple[Any, ...]:
        return self.came.get(timeout=WAIT_S)

    def close(self) -> None:
        self.listener.close()
        while not self.came.empty():
            self.came.get_nowait()[1].close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is dropped just because time passes."""
    monkeypatch.setattr(module, "_PATIENCE_S", 50 * WAIT_S)


@pytest.fixture
def loop() -> Iterator[Loop]:
    with running_loop() as made:
        yield made


@pytest.fixture
def door(loop: Loop) -> Iterator[Door]:
    made = Door(loop)
    yield made
    made.close()


def knock(door: Door, greeting: bytes = b"") -> socket.socket:
    return connect(door.address, greeting, soon())


# Sorting


def test_a_control_connection_is_handed_over_with_what_follows(door: Door) -> None:
    with knock(door, CONTROL + b"and more") as sock:
        kind, accepted, in_loop = door.next()
        with accepted:
            assert (kind, in_loop) == ("control", True)
            assert accepted.gettimeout() is None
            assert receive(accepted, 8) == b"and more"
            accepted.sendall(b"answer")
            assert receive(sock, 6) == b"answer"


def test_a_data_connection_is_handed_over_with_its_greeting(door: Door) -> None:
    with knock(door, DATA + GREETING.encode() + b"request") as sock:
        kind, accepted, in_loop, greeting = door.next()
        with accepted:
            assert (kind, in_loop, greeting) == ("data", True, GREETING)
            assert receive(accepted, 7) == b"request"
            assert sock.gettimeout() is None


@pytest.mark.parametrize("stream", [CONTROL, DATA + GREETING.encode()], ids=["control", "data"])
def test_greetings_may_come_byte_by_byte(door: Door, stream: bytes) -> None:
    with knock(door) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in stream:
            sock.sendall(bytes([byte]))
            settle(door.loop)
        door.next()[1].close()


def test_connections_that_say_nothing_keep_nobody_waiting(door: Door) -> None:
    silent = [knock(door) for _ in range(20)]
    with knock(door, CONTROL):
        door.next()[1].close()
    for sock in silent:
        sock.close()


@pytest.mark.parametrize(
    "stream",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(8),
        b"LLMDC\x02\0\0",
        b"LLMDX\x01\0\0",
        DATA + GREETING.encode()[:24] + b"\x02" + bytes(39),
        b"\x16\x03\x01\x00\xa5\x01\x00\x00",
    ],
    ids=lambda stream: stream[:8].hex(),
)
def test_garbage_is_dropped(door: Door, stream: bytes) -> None:
    with logged() as records, knock(door, stream) as sock:
        assert ended(sock)
    assert door.came.empty()
    assert [record.levelname for record in records] == ["WARNING"]
    with knock(door, CONTROL):
        door.next()[1].close()


@pytest.mark.parametrize("stream", [b"", b"LLMD", DATA, DATA + bytes(GREETING_BYTES - 1)], ids=len)
def test_connections_that_end_early_are_forgotten(door: Door, stream: bytes) -> None:
    sock = knock(door, stream)
    sock.shutdown(socket.SHUT_WR)
    assert ended(sock)
    sock.close()
    settle(door.loop)
    assert door.came.empty()
    assert door.listener._strangers == {}


def test_a_connection_that_says_nothing_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch, loop: Loop) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    door = Door(loop)
    with knock(door, b"LLM") as slow:
        assert ended(slow)
    assert door.came.empty()
    door.close()


def test_patience_does_not_end_a_connection_that_was_let_in(monkeypatch: pytest.MonkeyPatch, loop: Loop) -> None:
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    door = Door(loop)
    with knock(door, CONTROL) as sock:
        _, accepted, _ = door.next()
        with accepted:
            with knock(door) as slow:
                assert ended(slow)  # later than the other one's time
            accepted.sendall(b"alive")
            assert receive(sock, 5) == b"alive"
    door.close()


def test_of_too_many_strangers_the_oldest_goes(monkeypatch: pytest.MonkeyPatch, loop: Loop) -> None:
    monkeypatch.setattr(module, "_MAX_STRANGERS", 3)
    door = Door(loop)
    socks = []
    for _ in range(5):
        socks.append(knock(door))
        settle(loop)
    for sock in socks[:2]:
        assert ended(sock)
    for sock in socks[2:]:
        sock.sendall(CONTROL)
        door.next()[1].close()
    for sock in socks:
        sock.close()
    door.close()


# Addresses


def test_port_zero_becomes_a_real_one(door: Door) -> None:
    host, port = door.address
    assert host == "127.0.0.1"
    assert port > 0


def test_a_port_that_is_taken(door: Door) -> None:
    with pytest.raises(OSError, match="Address already in use") as caught:
        Door(door.loop, door.address)
    assert caught.value.errno == errno.EADDRINUSE


def test_an_address_of_another_machine(loop: Loop) -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        Door(loop, ("192.0.2.1", 0))


@pytest.mark.parametrize("host", ["localhost", "", "*", "fe80::1%nosuch0"])
def test_listen_takes_ip_literals_only(loop: Loop, host: str) -> None:
    with pytest.raises(ValueError, match=r"address|interface"):
        Door(loop, (host, 0))


def test_ipv6(loop: Loop) -> None:
    door = Door(loop, ("::1", 0))
    assert door.address[0] == "::1"
    assert door.listener._sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1
    with knock(door, CONTROL + b"hi"):
        _, accepted, _ = door.next()
        with accepted:
            assert accepted.family == socket.AF_INET6
            assert receive(accepted, 2) == b"hi"
    door.close()


# The end


def test_the_port_is_free_when_close_returns(loop: Loop) -> None:
    address: Address = ("127.0.0.1", 0)
    for _ in range(20):
        door = Door(loop, address)
        with knock(door, CONTROL):
            door.next()[1].close()
        address = door.address
        door.close()
        door.close()
        with pytest.raises(ConnectionRefusedError):
            connect(address, b"", soon())


def test_close_drops_strangers_and_leaves_the_others(loop: Loop) -> None:
    door = Door(loop)
    with knock(door, CONTROL) as let_in, knock(door, b"LLM") as stranger:
        _, accepted, _ = door.next()
        with accepted:
            door.listener.close()
            assert ended(stranger)
            accepted.sendall(b"alive")
            assert receive(let_in, 5) == b"alive"


def test_close_on_the_loop_does_not_wait_for_itself(loop: Loop) -> None:
    door = Door(loop)
    done = threading.Event()
    loop.call_soon(lambda: (door.listener.close(), done.set()))
    assert done.wait(WAIT_S)
    settle(loop)
    with pytest.raises(ConnectionRefusedError):
        connect(door.address, b"", soon())


def test_close_at_once_after_opening(loop: Loop) -> None:
    for _ in range(20):
        door = Door(loop)
        door.close()
    settle(loop)
    assert len(loop._selector.get_map()) == 1  # the loop's own


# Connecting


def test_connect_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with pytest.raises(ConnectionRefusedError):
        connect(address, b"hello", soon())


def test_connect_ends_by_its_deadline() -> None:
    """A listener with a full backlog answers to nobody."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        waiting = []
        try:
            for _ in range(3):
                sock = socket.socket()
                sock.setblocking(False)
                sock.connect_ex(server.getsockname())
                waiting.append(sock)
            with pytest.raises(TimeoutError):
                connect(server.getsockname(), b"hello", Deadline.after(0.2))
        finally:
            for sock in waiting:
                sock.close()


def test_a_greeting_that_nobody_reads_ends_by_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TimeoutError):
        connect(server.getsockname(), bytes(64 << 20), Deadline.after(0.1))


def test_an_expired_deadline_does_not_mean_for_ever() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TimeoutError):
        connect(server.getsockname(), bytes(64 << 20), Deadline.after(0))


@pytest.mark.parametrize("host", ["localhost", "", "no such host", "127.0.0.1%lo"])
def test_connect_takes_ip_literals_only(host: str) -> None:
    with pytest.raises(ValueError, match="is not an IPv4 or IPv6 address"):
        connect((host, 1), b"", soon())


def test_connect_with_a_scope_that_no_interface_can_have() -> None:
    with pytest.raises((OSError, ValueError)):
        connect((f"fe80::1%{2**32}", 1), b"", Deadline.after(0.1))


def test_helpers_make_connected_sockets() -> None:
    left, right = tcp_pair()
    with left, right:
        left.sendall(b"x")
        assert receive(right, 1) == b"x"
