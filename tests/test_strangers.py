"""A thousand strangers that say nothing, or a little now and then: whoever belongs here is served all the same."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist.wire import framing, messages
from llm_datadist.wire.auth import NO_KEY
from llm_datadist.wire.data import ANSWER_BYTES, REPLY_BYTES, Greeting, Op, Reply, Request, Result, encode_few
from llm_datadist.wire.framing import Kind
from net_helpers import WAIT_S, receive
from security_kit import certificates, log_lines, open_descriptors, pull, push, same, watch_log, with_caches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers import Node, Peer, Peers

OK = LLMStatusCode.LLM_SUCCESS
STRANGERS = 1000
DESCRIPTORS = 1024
"""What many systems give a process."""
SHARE = DESCRIPTORS // 8
CONTROL, DATA = framing.preamble(Kind.CONTROL), framing.preamble(Kind.DATA)


def few_descriptors() -> None:
    """In a child, before anything else."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))


def threads(_node: Node) -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def resident(_node: Node) -> int:
    """Bytes of memory in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def many_descriptors() -> Iterator[None]:
    """For the strangers, which are all in this process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 2 * STRANGERS:
        pytest.skip(f"this process may open {before[1]} descriptors only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4 * STRANGERS), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def crowd() -> Iterator[list[socket.socket]]:
    socks: list[socket.socket] = []
    yield socks
    for sock in socks:
        sock.close()


def hello(cluster_id: int, *, accessible: bool = True) -> bytes:
    """The introduction of a stranger that knows how to speak."""
    identity = messages.Identity(
        cluster_id=cluster_id, incarnation=secrets.token_bytes(16), boot_id="x", pid_namespace=0, pid=1, start_time=1
    )
    offer = messages.Offer(probe_region=1, nonce=b"n" * 16, table_fd=0, paths=["tcp"])
    body = messages.Hello(
        versions=(1, 1), identity=identity, remote_accessible=accessible, timeout_ms=600_000, offer=offer
    )
    return framing.frame(messages.encode(messages.Envelope(body=body, id=1)))


def words(kind: str, number: int) -> bytes:
    """What a stranger says before it falls silent."""
    return {
        "nothing": b"",
        "half a preamble": CONTROL[:5],
        "a preamble": CONTROL,
        "the length of a frame": CONTROL + (60_000).to_bytes(4, "big"),
        "half a data greeting": DATA + bytes(20),
        "a TLS preamble": framing.preamble(Kind.CONTROL, tls=True),
        "half a TLS handshake": framing.preamble(Kind.DATA, tls=True) + b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "an introduction": CONTROL + hello(1000 + number),
        "a confirmation": CONTROL + hello(1000 + number),
    }[kind]


def knock(server: Peer, said: bytes) -> socket.socket:
    assert server.address is not None
    sock = socket.create_connection(server.address, WAIT_S)
    with contextlib.suppress(OSError):  # of too many, the oldest are dropped
        sock.sendall(said)
    return sock


def come(server: Peer, kind: str, number: int) -> socket.socket:
    """One stranger."""
    sock = knock(server, words(kind, number))
    if kind == "a confirmation":
        sock.settimeout(WAIT_S)
        assert b"welcome" in sock.recv(4096)
        confirm = messages.Envelope(body=messages.Confirm(path="tcp"), id=2)
        sock.sendall(framing.frame(messages.encode(confirm)))
    return sock


@pytest.mark.parametrize(
    ("kind", "tls"),
    [
        ("nothing", False),
        ("half a preamble", False),
        ("a preamble", False),
        ("the length of a frame", False),
        ("half a data greeting", False),
        ("nothing", True),
        ("a preamble", True),
        ("a TLS preamble", True),
        ("half a TLS handshake", True),
        ("an introduction", False),
        ("a confirmation", False),
    ],
)
def test_a_thousand_idle_strangers(peers: Peers, crowd: list[socket.socket], kind: str, tls: bool) -> None:
    options = {"paths": "tcp"} | (certificates() if tls else {})
    server = peers.make(1, process=peers.process(few_descriptors), **options)
    friend, late = peers.make(2, listen=False, **options), peers.make(3, listen=False, **options)
    with_caches(server, friend, late)
    assert friend.link(server) == OK
    before = {what: server.call(what) for what in (open_descriptors, threads, resident)}
    crowd += (come(server, kind, number) for number in range(STRANGERS))
    assert late.link(server, timeout=60_000) == OK
    for peer in (friend, late):
        peer.call(pull, 1, [1, 2, 3])
        peer.call(push, 1, [4])
        assert same(
            [peer.memory("dst")[0][4096 + (1 << 16) : 4096 + (4 << 16)]],
            [server.memory("src")[0][4096 + (1 << 16) : 4096 + (4 << 16)]],
        )
    assert server.call(open_descriptors) <= before[open_descriptors] + 3 * SHARE + 16
    assert server.call(threads) <= before[threads] + 64 + 8  # those that wait for a confirmed stranger's connections
    assert server.call(resident) <= before[resident] + (128 << 20)
    for sock in crowd:
        sock.close()
    end = time.monotonic() + 3 * WAIT_S
    while server.call(open_descriptors) > before[open_descriptors] + 16 and time.monotonic() < end:
        time.sleep(0.05)
    assert server.call(open_descriptors) <= before[open_descriptors] + 16
    friend.call(pull, 1, [5])


def test_strangers_that_say_a_little_now_and_then(peers: Peers, crowd: list[socket.socket]) -> None:
    """A byte of a frame of 60,000 at a time, as long as they are let."""
    server = peers.make(1, process=peers.process(few_descriptors), paths="tcp")
    friend = peers.make(2, listen=False, paths="tcp")
    with_caches(server, friend)
    before = server.call(open_descriptors)
    crowd += (knock(server, CONTROL + (60_000).to_bytes(4, "big")) for _ in range(STRANGERS // 2))
    stop = threading.Event()

    def dribble() -> None:
        while not stop.wait(0.05):
            for sock in list(crowd):
                with contextlib.suppress(OSError):
                    sock.send(b"x", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    thread = threading.Thread(target=dribble)
    thread.start()
    try:
        for _ in range(5):
            assert friend.link(server, timeout=60_000) == OK
            friend.call(pull, 1, [1])
            assert friend.call("unlink", 1, server.address) == OK
        assert server.call(open_descriptors) <= before + SHARE + 16
        end = time.monotonic() + 3 * WAIT_S
        while server.call(open_descriptors) > before + 16 and time.monotonic() < end:
            time.sleep(0.1)  # the ten seconds that they get
        assert server.call(open_descriptors) <= before + 16
    finally:
        stop.set()
        thread.join(WAIT_S)


def test_what_strangers_do_does_not_fill_the_log(peers: Peers) -> None:
    server = peers.make(1)
    server.call(watch_log)
    for number in range(300):
        knock(server, f"GET /{number} HTTP/1.1\r\n\r\n".encode()).close()
        knock(server, CONTROL + framing.frame(b"nonsense")).close()
        knock(server, DATA + bytes(24) + bytes(40)).close()
    friend = peers.make(2, listen=False)
    assert friend.link(server) == OK
    assert 1 <= len(server.call(log_lines)) <= 4


def test_a_frame_that_is_too_long_is_not_waited_for(peers: Peers) -> None:
    server = peers.make(1)
    for length in ((64 << 10) + 1, 1 << 24, 2**32 - 1):
        with knock(server, CONTROL + length.to_bytes(4, "big")) as sock:
            sock.settimeout(WAIT_S)
            assert sock.recv(1) == b""


def test_one_peer_holds_a_bounded_number_of_caches(peers: Peers) -> None:
    """In message mode, and all the same they are free when it has gone."""
    server = peers.make(1, enable_remote_cache_accessible=False)
    server.call("register_blocks", "src", 1, 4, 64, model_id=0, seed=1)
    ask = messages.Lookup(key=messages.KeyRef(model_id=0, blocks=True), timeout_ms=600_000)
    answers = {messages.Found: 0, messages.Refuse: 0}
    decoder = framing.FrameDecoder()
    with knock(server, CONTROL + hello(5, accessible=False)) as sock:
        sock.settimeout(WAIT_S)
        assert b"welcome" in sock.recv(4096)
        asking = b"".join(
            framing.frame(messages.encode(messages.Envelope(body=ask, id=number))) for number in range(2, 5002)
        )
        sender = threading.Thread(target=sock.sendall, args=(asking,))
        sender.start()
        while sum(answers.values()) < 5000:
            for payload in decoder.feed(sock.recv(1 << 16)):
                answers[type(messages.decode(payload).body)] += 1
        sender.join()
    assert answers == {messages.Found: 4096, messages.Refuse: 904}
    server.call("unregister", "src")  # waits until nobody holds it


def test_a_request_out_of_range_is_refused_logged_once_and_has_no_effect(peers: Peers) -> None:
    """Of somebody who speaks the protocol: beyond a region, across its end, of one that does not exist."""
    server = peers.make(1)
    with_caches(server)
    server.call(watch_log)
    before = server.memory("src") + server.memory("dst")
    region = server.call(region_of, "dst")
    with knock(server, CONTROL + hello(5)) as control:
        control.settimeout(WAIT_S)
        (welcome,) = framing.FrameDecoder().feed(control.recv(4096))
        token = messages.decode(welcome).body.link_token  # type: ignore[union-attr]
        greeting = Greeting.make(NO_KEY, token, 1, serve=True)
        with knock(server, DATA + greeting.encode()) as data:
            assert receive(data, ANSWER_BYTES) == greeting.answer(NO_KEY)
            for number, (target, offset) in enumerate([(region, 1 << 40), (region, 4 * (1 << 16) * 16 - 8), (99, 0)]):
                for op, payload in ((Op.READ, b""), (Op.WRITE, bytes(64))):
                    request = Request(op, 1, 1, 0, 64, 5000)
                    data.sendall(encode_few(request, [target], [offset], 64) + payload)
                    reply = Reply.decode(receive(data, REPLY_BYTES))
                    assert reply.result is (Result.UNKNOWN_REGION if number == 2 else Result.OUT_OF_RANGE)
                    assert receive(data, reply.reason_bytes)
    assert len(server.call(log_lines)) == 4  # one for each that a correct peer would never send
    assert same(before, server.memory("src") + server.memory("dst"))


def region_of(node: Node, name: str) -> int:
    """In the child: the region of a cache's first tensor."""
    found = node.datadist._engine._core.regions.find(node.addrs(name)[0], 1)
    assert found is not None
    return int(found[0])
