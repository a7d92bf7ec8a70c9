"""Links that are slow, that swallow large packets, or that close by halves: deadlines hold, and no byte comes late."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import expect
from hosts_kit import Network, network
from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from llm_datadist.wire.framing import Kind, preamble
from peers import GUARD, POISON, TIMEOUT_S, Node, Peer, Peers
from test_hosts_partitions import Hosts, filled, overwrite, shape_all, status_of_pull
from test_links import pull_one, with_caches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

OK = LLMStatusCode.LLM_SUCCESS
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
BLOCKS, BLOCK_BYTES = 80, 256 << 10
"""20 MiB."""
HALF = range(0, BLOCKS, 2)
SENTINEL = 0xEE


@pytest.fixture
def net() -> Iterator[Network]:
    """A network for one test."""
    with network() as made:
        yield made


def register(node: Node, name: str, model_id: int | None, seed: int | None, blocks: int = BLOCKS) -> None:
    """In the child: one tensor of 20 MiB."""
    node.register_blocks(name, 1, blocks, BLOCK_BYTES, model_id=model_id, seed=seed)


def move(node: Node, method: str, cluster_id: int, model_id: int, name: str, blocks: Sequence[int]) -> tuple[Any, str]:
    """In the child: blocks to the same place; status and text."""
    key, ids = BlocksCacheKey(cluster_id, model_id), list(blocks)
    try:
        getattr(node.manager, method)(key, node.caches[name], ids, ids, tensor_num_per_layer=1)
    except LLMException as error:
        return error.status_code, str(error)
    return OK, ""


def patient_pull(node: Node, model_id: int, name: str) -> None:
    """In the child: the even blocks of the peer, one by one, each until it has come."""
    for block in HALF:
        until = time.monotonic() + TIMEOUT_S
        while move(node, "pull_blocks", 1, model_id, name, [block])[0] != OK:
            assert time.monotonic() < until


def body(peer: Peer, name: str) -> np.ndarray:
    """The blocks of a cache; its guards are untouched."""
    (memory,) = peer.memory(name)
    assert (memory[:GUARD] == POISON).all()
    assert (memory[-GUARD:] == POISON).all()
    blocks: np.ndarray = memory[GUARD:-GUARD].reshape(-1, BLOCK_BYTES)
    return blocks


@pytest.mark.parametrize("method", ["pull_blocks", "push_blocks"])
def test_nothing_lands_after_a_timeout(net: Network, peers: Peers, method: str) -> None:
    """20 MiB over 80 mbit take two seconds and get 200 ms; the destination is used for something else at once."""
    hosts = Hosts(net, peers, sync_kv_timeout=200)
    server, client = hosts.server, hosts.client
    server.call(register, "old", 7, 1)
    server.call(register, "new", 8, 2)
    client.call(register, "dst", 9, None)
    assert client.link(server) == OK
    shape_all(hosts.wires, "80mbit")
    begin = time.monotonic()
    if method == "pull_blocks":
        status, text = client.call(move, method, 1, 7, "dst", range(BLOCKS))
    else:
        status, text = server.call(move, method, 2, 9, "old", range(BLOCKS))
    assert time.monotonic() - begin < 1.5
    assert status == TIMEOUT, text
    if "did not confirm" in text:  # then the owner has to end the link before the memory is its own again
        assert client.call("unlink", 1, force=True) == OK
    client.call(overwrite, "dst", SENTINEL)
    relinked = "did not confirm" in text and client.link(server) == OK
    assert relinked == ("did not confirm" in text)
    client.call(patient_pull, 8, "dst")
    threading.Event().wait(4)  # whatever was on its way has had the time to arrive
    found, wanted = body(client, "dst"), body(server, "new")
    for block in range(BLOCKS):
        expected = wanted[block] if block in HALF else np.full(BLOCK_BYTES, SENTINEL, np.uint8)
        assert np.array_equal(found[block], expected), block


@pytest.mark.parametrize("method", ["pull_blocks", "push_blocks"])
def test_slow_link_and_tiny_buffers(net: Network, peers: Peers, method: str) -> None:
    """1 MiB over 8 mbit with socket buffers of a page: all of it, in both directions at the same time."""
    hosts = Hosts(net, peers, sync_kv_timeout=30_000)
    for wire in hosts.wires:
        wire.host.sysctl(tcp_rmem="4096 4096 4096", tcp_wmem="4096 4096 4096")
    for peer in (hosts.server, hosts.client):
        peer.call(register, "src", 7, peer.cluster_id, 4)
        peer.call(register, "dst", 8, None, 4)
    shape_all(hosts.wires, "8mbit")
    assert hosts.client.link(hosts.server) == OK
    sides = ((hosts.client, hosts.server), (hosts.server, hosts.client))
    arguments = (7, "dst") if method == "pull_blocks" else (8, "src")
    running = [here.begin(move, method, there.cluster_id, *arguments, range(4)) for here, there in sides]
    assert [future.result(TIMEOUT_S * 3) for future in running] == [(OK, "")] * 2
    for here, there in sides:
        assert np.array_equal(body(here, "dst"), body(there, "src"))


def test_deadline_of_a_slow_transfer(net: Network, peers: Peers) -> None:
    """It ends in time however little has come, and a small one gets through after it."""
    hosts = Hosts(net, peers, sync_kv_timeout=400)
    hosts.server.call(register, "theirs", 7, 1)
    hosts.client.call(register, "mine", None, None)
    assert hosts.client.link(hosts.server) == OK
    shape_all(hosts.wires, "8mbit")
    for _ in range(3):
        begin = time.monotonic()
        assert hosts.client.call(move, "pull_blocks", 1, 7, "mine", range(BLOCKS))[0] == TIMEOUT
        assert time.monotonic() - begin < 0.4 + 1.0
    until = time.monotonic() + TIMEOUT_S
    while hosts.client.call(status_of_pull, 1) != OK:
        assert time.monotonic() < until


def test_packets_that_are_too_large_vanish(net: Network, peers: Peers) -> None:
    """A hole for packets of full size: what is small works, what is large times out, until the hole is closed."""
    hosts = Hosts(net, peers, sync_kv_timeout=1_000)
    hosts.server.call(register, "theirs", 7, 1)
    hosts.client.call(register, "mine", None, None)
    assert hosts.client.link(hosts.server) == OK
    wire = hosts.wires[1]
    wire.host.ip("link", "set", wire.inside, "gso_max_segs", "1")  # large bundles would slip through
    wire.router.ip("link", "set", wire.outside, "mtu", "1280")
    hosts.client.call(pull_one, 1)
    before = body(hosts.client, "mine").copy()
    begin = time.monotonic()
    status, text = hosts.client.call(move, "pull_blocks", 1, 7, "mine", range(BLOCKS))
    assert status == TIMEOUT, text
    assert time.monotonic() - begin < 1.0 + 1.0
    assert np.array_equal(body(hosts.client, "mine"), before)
    hosts.client.call(pull_one, 1)
    wire.router.ip("link", "set", wire.outside, "mtu", "1500")
    assert hosts.client.call(move, "pull_blocks", 1, 7, "mine", range(BLOCKS)) == (OK, "")
    assert np.array_equal(body(hosts.client, "mine"), body(hosts.server, "theirs"))


class Relay:
    """Between a client and a server on this host; it may end one direction of data connections after some bytes."""

    def __init__(self, server: tuple[str, int]) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self.left: dict[str, int] = {}
        """Bytes until a direction of data connections ends, by "to the client" and "to the server"."""
        self.ended = 0
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = [self._listener]
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=args))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._server, TIMEOUT_S)
                far.settimeout(None)
                self._sockets += [near, far]
                begin = near.recv(1 << 16)
                far.sendall(begin)
                data = begin.startswith(preamble(Kind.DATA))
                self._start(self._pump, near, far, "to the server" if data else "")
                self._start(self._pump, far, near, "to the client" if data else "")

    def _pump(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        with contextlib.suppress(OSError):
            while some := source.recv(1 << 16):
                if direction in self.left:
                    some = some[: self.left[direction]]
                    self.left[direction] -= len(some)
                target.sendall(some)
                if self.left.get(direction) == 0:
                    del self.left[direction]
                    self.ended += 1
                    break
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):  # the other end may not notice that nobody reads any more
            while source.recv(1 << 16):
                pass

    def close(self) -> None:
        """End all connections and threads."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("method", ["pull_blocks", "push_blocks"])
@pytest.mark.parametrize("direction", ["to the client", "to the server"])
@pytest.mark.parametrize("after", [1, 100_000])
def test_half_closed_data_connection(peers: Peers, method: str, direction: str, after: int) -> None:
    """One direction ends in the middle, the other stays open: an error at once, and the next transfer works."""
    properties: dict[str, Any] = {"paths": "tcp", "sync_kv_timeout": 8_000}
    server, client = peers.make(1, **properties), peers.make(2, listen=False, **properties)
    with_caches(server, client)
    server.call(register, "theirs", 7, 1)
    client.call(register, "mine", None, 2)
    assert server.address is not None
    with contextlib.closing(Relay(server.address)) as relay:
        assert client.call("link", 1, relay.address) == OK
        assert client.call(move, method, 1, 7, "mine", range(BLOCKS)) == (OK, "")
        server.call(overwrite, "theirs", 0x33)
        client.call(overwrite, "mine", 0x44)
        relay.left[direction] = after
        begin = time.monotonic()
        status, text = client.call(move, method, 1, 7, "mine", range(BLOCKS))
        if after > 1 and (method == "pull_blocks") == (direction == "to the server"):
            assert (status, relay.ended) == (OK, 0)  # so few bytes go that way that they all come
            return
        assert relay.ended == 1
        assert status in {LLMStatusCode.LLM_FAILED, LLMStatusCode.LLM_NOT_YET_LINK}, text
        assert time.monotonic() - begin < 6
        assert client.call(move, method, 1, 7, "mine", range(BLOCKS)) == (OK, "")
        value = 0x33 if method == "pull_blocks" else 0x44
        assert client.call(filled, "mine", value)
        assert server.call(filled, "theirs", value)


def test_half_closed_control_connection(peers: Peers) -> None:
    """A client that only stops sending is gone for the server; the link ends on both sides."""
    server, client = peers.make(1, paths="tcp"), peers.make(2, listen=False, paths="tcp")
    with_caches(server, client)
    assert client.link(server) == OK
    client.call(half_close_control)
    until = time.monotonic() + TIMEOUT_S
    for here, there in ((server, 2), (client, 1)):
        while here.call(status_of_pull, there) != LLMStatusCode.LLM_NOT_YET_LINK:
            assert time.monotonic() < until
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: client.call(pull_one, 1))
    assert client.call("unlink", 1, force=True) == OK
    assert client.link(server) == OK
    client.call(pull_one, 1)


def half_close_control(node: Node) -> None:
    """In the child."""
    (link,) = node.datadist._engine._core.table.all()
    link.channel._sock.shutdown(socket.SHUT_WR)
