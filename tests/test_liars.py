"""Peers that lie about who and where they are or what they have: refused, or of no harm to anybody else."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import expect
from liar_kit import Liar
from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from llm_datadist.engine import service
from llm_datadist.wire import messages
from net_helpers import WAIT_S, ended
from peers import GUARD, POISON, TIMEOUT_S, Node, Peer
from test_faults import WORKERS, settled
from test_links import explain, pull_one, with_caches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers import Peers

OK = LLMStatusCode.LLM_SUCCESS
LIAR = 66
SIZE = 4 * 512
"""Bytes of the tensor that a liar's catalogue tells of."""


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar(LIAR)
    yield made
    made.close()


@pytest.fixture
def pair(peers: Peers) -> tuple[Peer, Peer]:
    """(server 1, client 2), linked: they must not be disturbed."""
    server, client = peers.make(1, sync_kv_timeout=5000), peers.make(2, listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    return server, client


def undisturbed(pair: tuple[Peer, Peer]) -> None:
    """The two honest ones go on."""
    server, client = pair
    client.call(pull_one, 1)
    server.call(pull_one, 2)


def address_of(peer: Peer) -> tuple[str, int]:
    assert peer.address is not None
    return peer.address


def linked(node: Node) -> list[int]:
    """In the child: the clusters that are linked."""
    return sorted(link.cluster_id for link in node.datadist._engine._core.table.all())


def pending(node: Node) -> int:
    """In the child: handshakes under way."""
    return len(node.datadist._engine._core.pending)


UNUSABLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a pid of somebody else": ({"pid": 1}, {}, "started at another time"),
    "a pid that nobody has": ({"pid": 2**31 - 1}, {}, "cannot find process"),
    "no pid at all": ({"pid": 0}, {}, "cannot find process"),
    "another start time": ({"start_time": 12345}, {}, "started at another time"),
    "another pid namespace": ({"pid_namespace": 1}, {}, "another pid namespace"),
    "another boot": ({"boot_id": "00000000-0000-0000-0000-000000000000"}, {}, "another host"),
    "no boot": ({"boot_id": ""}, {}, "cannot tell on which host it is"),
    "a descriptor that is not open": ({}, {"table_fd": 1000}, "is hidden from this process in /proc, or has ended"),
    "another nonce": ({}, {"nonce": b"n" * 32}, "reads other bytes"),
    "a region that is not there": ({}, {"probe_region": 7}, "not registered"),
    "a region numbered zero": ({}, {"probe_region": 0}, "not registered"),
    "no path": ({}, {"paths": []}, "not permitted by the peer"),
}


@pytest.mark.parametrize("lie", UNUSABLE)
def test_lies_about_place_and_memory_end_the_handshake(pair: tuple[Peer, Peer], liar: Liar, lie: str) -> None:
    """The side that checks finds no path, says why, and nothing is left behind."""
    identity, offer, reason = UNUSABLE[lie]
    answer = liar.pretend(**identity).offers(**offer).link(address_of(pair[0]))
    assert isinstance(answer, messages.Refuse)
    assert reason in answer.reason
    assert pair[0].call(linked) == [2]
    assert pair[0].call(pending) == 0
    undisturbed(pair)


@pytest.mark.parametrize("kind", ["file", "pipe", "socket", "directory", "memfd"])
def test_descriptors_that_are_no_table(pair: tuple[Peer, Peer], liar: Liar, kind: str) -> None:
    """Whatever it is, it is not mapped, and does not hold up anybody."""
    ours: list[int] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as file, socket.socket() as sock:
        ours = [*os.pipe(), os.memfd_create("none"), os.open(folder, os.O_RDONLY)]
        descriptor = {"file": file.fileno(), "pipe": ours[0], "socket": sock.fileno(), "directory": ours[3]}
        answer = liar.offers(table_fd=descriptor.get(kind, ours[2])).link(address_of(pair[0]))
    for fd in ours:
        os.close(fd)
    assert isinstance(answer, messages.Refuse)
    undisturbed(pair)


def incarnation_of(node: Node, cluster_id: int) -> bytes:
    """In the child: that of a peer."""
    link = node.datadist._engine._core.table.get(cluster_id)
    assert link is not None
    return bytes(link.peer.identity.incarnation)


def test_a_life_that_is_linked_cannot_be_taken_over(pair: tuple[Peer, Peer], liar: Liar) -> None:
    """Cluster id and incarnation of a peer that is alive: the peer itself is asked, and it is."""
    identity = {"cluster_id": 2, "incarnation": pair[0].call(incarnation_of, 2)}
    answer = liar.pretend(**identity).link(address_of(pair[0]))
    assert isinstance(answer, messages.Refuse)
    assert "linked already" in answer.reason
    undisturbed(pair)


def own_incarnation(node: Node) -> bytes:
    """In the child."""
    return bytes(node.datadist._engine._core.identity.incarnation)


def test_the_life_of_the_listener_itself(pair: tuple[Peer, Peer], liar: Liar) -> None:
    """Taken for a link to itself, which nobody here began: it is in no table and gets in nobody's way."""
    liar.pretend(cluster_id=1, incarnation=pair[0].call(own_incarnation))
    liar.link(address_of(pair[0]))
    assert pair[0].call(linked) == [2]
    undisturbed(pair)


def test_an_earlier_life_is_another_peer(peers: Peers, liar: Liar) -> None:
    """The link of a life that has ended is not found by who pretends to be it: it starts from nothing."""
    server, client = peers.make(1), peers.make(LIAR, listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    old = server.call(incarnation_of, LIAR)
    client.process.kill()
    answer = liar.pretend(incarnation=old).link(address_of(server))
    assert isinstance(answer, messages.Ok)
    liar.close()
    again = peers.make(LIAR, listen=False)
    with_caches(again)
    assert again.link(server) == OK
    again.call(pull_one, 1)
    server.call(pull_one, LIAR)


def take_catalogue(liar: Liar, region: int, *, entries: int = 4, epoch: int = 0) -> None:
    """Answer the next ``Fetch`` with one blocks cache of model 0 whose two tensors are in this region."""
    while True:
        asked = liar.hear()
        if isinstance(asked.body, messages.Fetch):
            break
    cache = messages.CacheInfo(
        cache_id=1,
        kind="blocks",
        tensor_size=entries * 512,
        entries=entries,
        dtype="DT_UINT8",
        accessible=True,
        regions=[region, region],
    )
    key = messages.KeyInfo(cache_id=1, model_id=0)
    liar.say(messages.Catalogue(epoch=epoch, caches=[cache], keys=[key]), reply_to=asked.id)


def pull(node: Node, block: int) -> None:
    """In the child: pull a block of the liar into block 1."""
    node.manager.pull_blocks(BlocksCacheKey(LIAR, 0), node.caches["dst"], [block], [1])


def push(node: Node, block: int) -> None:
    """In the child: push block 1 to a block of the liar."""
    node.manager.push_blocks(BlocksCacheKey(LIAR, 0), node.caches["dst"], [1], [block])


def guards_are_whole(peer: Peer) -> bool:
    return all(
        bool((tensor[:GUARD] == POISON).all() and (tensor[-GUARD:] == POISON).all()) for tensor in peer.memory("dst")
    )


@pytest.mark.parametrize("call", [pull, push])
def test_a_catalogue_that_goes_beyond_its_regions(pair: tuple[Peer, Peer], liar: Liar, call: Any) -> None:
    """What is inside is moved; a block beyond the region, in the liar's own table, is refused by the one who asks."""
    server = pair[0]
    memory = np.arange(SIZE, dtype=np.uint64).astype(np.uint8)
    region = liar.table.add(memory.ctypes.data, SIZE)
    assert isinstance(liar.link(address_of(server)), messages.Ok)
    take_catalogue(liar, region, entries=64, epoch=liar.table.epoch)
    server.call(call, 3)
    before = memory.copy()
    for block in (4, 63):
        error = expect(LLMStatusCode.LLM_PARAM_INVALID, lambda block=block: server.call(call, block))
        assert "outside their region" in str(error)
    assert (memory == before).all()
    assert guards_are_whole(server)
    undisturbed(pair)


def pull_often(node: Node) -> set[LLMStatusCode]:
    """In the child: the long way, which looks at the table each time; what became of it."""
    seen = set()
    for _ in range(300):
        try:
            key, cache = BlocksCacheKey(LIAR, 0), node.caches["dst"]
            node.manager.pull_blocks(key, cache, [3], [1], tensor_num_per_layer=1)
            seen.add(OK)
        except LLMException as error:
            seen.add(error.status_code)
    return seen


def test_a_table_that_changes_under_the_reader(pair: tuple[Peer, Peer], liar: Liar) -> None:
    """The liar moves and resizes its region as fast as it can: an exception or the liar's bytes, nothing else."""
    server = pair[0]
    memory = np.full(SIZE, 7, dtype=np.uint8)
    region = liar.table.add(memory.ctypes.data, SIZE)
    assert isinstance(liar.link(address_of(server)), messages.Ok)
    take_catalogue(liar, region, epoch=liar.table.epoch)
    row = liar.table.rows[region & 0xFFFF]
    true = row.copy()
    lies = [(0, SIZE), (2**64 - 512, 2**63), (4096, 2**64 - 1), (int(true[1]), 16)]
    pulling = server.begin(pull_often)
    while not pulling.done():
        for base, size in lies:
            row[1], row[2] = base, size
            row[1:3] = true[1:3]
    assert pulling.result(TIMEOUT_S) <= {OK, LLMStatusCode.LLM_FAILED, LLMStatusCode.LLM_PARAM_INVALID}
    blocks = [tensor[GUARD:-GUARD].reshape(-1, 512) for tensor in server.memory("dst")]
    assert all(set(np.unique(block[1])) <= {7, POISON} for block in blocks)
    assert all(bool((block[[0, 2, 3]] == POISON).all()) for block in blocks)
    assert guards_are_whole(server)
    undisturbed(pair)


def test_a_listener_that_lies(peers: Peers, liar: Liar) -> None:
    """The same from the other side: who connects to it finds out and says so."""
    client = peers.make(2, listen=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        for identity, offer in (({"start_time": 1}, {}), ({}, {"nonce": b"n" * 16})):
            honest = liar.identity, liar.offer
            liar.pretend(**identity).offers(**offer)
            linking = client.begin("link", LIAR, server.getsockname())
            liar.welcome(liar.accept(server))
            assert linking.result(TIMEOUT_S) == LLMStatusCode.LLM_LINK_FAILED
            liar.identity, liar.offer = honest
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: client.call(explain, LIAR))
    assert client.call(linked) == []


# ---------------------------------------------------------------- handshakes that stop half way


def descriptors(node: Node) -> int:
    """In the child."""
    del node
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("stops_after", ["hello", "welcome"])
def test_half_open_handshakes_are_reclaimed(pair: tuple[Peer, Peer], stops_after: str) -> None:
    """The listener closes the connection when the time is over that the other side has given itself."""
    server = pair[0]
    before = server.call(descriptors)
    silent = [Liar(LIAR + number) for number in range(8)]
    for liar in silent:
        if stops_after == "hello":
            liar.connect(address_of(server))
            liar.say(liar.hello(timeout_ms=300), 1)
        else:
            assert isinstance(liar.introduce(address_of(server), timeout_ms=300), messages.Welcome)
    for liar in silent:
        assert liar.sock is not None
        liar.sock.settimeout(WAIT_S)
        if stops_after == "hello":
            liar.hear()  # the welcome
        assert ended(liar.sock)
        liar.close()
    assert server.call(pending) == 0
    assert server.call(linked) == [2]
    assert server.call(descriptors) <= before
    undisturbed(pair)


def test_a_listener_that_stops_half_way(peers: Peers, liar: Liar) -> None:
    """After accept, or after its welcome: LLM_TIMEOUT in time, and nothing is left behind."""
    client = peers.make(2, listen=False)
    before = client.call(descriptors)
    with socket.create_server(("127.0.0.1", 0)) as server:
        linking = client.begin("link", LIAR, server.getsockname(), timeout=300)
        liar.accept(server)
        assert linking.result(TIMEOUT_S) == LLMStatusCode.LLM_TIMEOUT
        assert liar.sock is not None
        assert ended(liar.sock)
        linking = client.begin("link", LIAR, server.getsockname(), timeout=1000)
        liar.welcome(liar.accept(server))
        assert linking.result(TIMEOUT_S) == LLMStatusCode.LLM_TIMEOUT
    liar.close()
    assert client.call(linked) == []
    assert client.call(descriptors) <= before


# ---------------------------------------------------------------- many lives, and what they leave behind


def meet(liar: Liar, address: tuple[str, int], number: int) -> None:
    """Link as another cluster, and go without a word."""
    liar.pretend(cluster_id=1000 + number, incarnation=number.to_bytes(16, "little"))
    assert isinstance(liar.link(address), messages.Ok)
    assert liar.sock is not None
    liar.sock.close()
    liar.forget()


def test_2000_peers_that_come_and_go_leave_nothing_behind(pair: tuple[Peer, Peer], liar: Liar) -> None:
    """Each with a cluster id of its own. Why the last thousand went is remembered, no more."""
    server = pair[0]
    for number in range(1200):
        meet(liar, address_of(server), number)
    before = settled(server, lambda _values: True)
    for number in range(1200, 2000):
        meet(liar, address_of(server), number)
    after = settled(server, lambda values: values[0] <= before[0])
    assert after[0] <= before[0]
    assert after[1] <= before[1] + WORKERS
    assert after[2] <= before[2] + 1024
    assert server.call(linked) == [2]
    undisturbed(pair)


def unregister_source(node: Node) -> str:
    """In the child: why it cannot be taken back, if it cannot."""
    try:
        node.manager.unregister_cache(node.caches["src"].cache_id)
    except LLMException as error:
        return str(error)
    return ""


def hold_source(liar: Liar, server: Peer, timeout_ms: int) -> int:
    """Look the source cache up, as a pull begins, and never say that it has ended; the hold."""
    assert isinstance(liar.link(address_of(server)), messages.Ok)
    liar.say(messages.Lookup(key=messages.KeyRef(cache_id=1), timeout_ms=timeout_ms), 3)
    found = liar.reply(3)
    assert isinstance(found, messages.Found)
    return found.hold


def no_grace(_node: Node) -> None:
    """In the child: holds end with their time."""
    service._HOLD_GRACE_S = 0.0  # type: ignore[misc]


@pytest.mark.parametrize("how", ["it goes", "its time is over"])
def test_caches_that_a_peer_holds_are_free_when(peers: Peers, liar: Liar, how: str) -> None:
    """A puller that looked a cache up and then vanished, or was never heard of again, does not keep it for ever."""
    server = peers.make(1, enable_remote_cache_accessible=False, sync_kv_timeout=100)
    server.call("register_contiguous", "src", 2, 4, 512, seed=1)
    server.call(no_grace)
    liar.remote_accessible = False
    hold = hold_source(liar, server, 600_000 if how == "it goes" else 3000)
    assert "held for peers" in server.call(unregister_source)
    if how == "it goes":
        liar.close()
    end = time.monotonic() + TIMEOUT_S
    while "held for peers" in (why := server.call(unregister_source)):
        assert time.monotonic() < end
    # A peer on this host that does not say that its copies have ended is another matter.
    assert why == "" if how == "it goes" else "transfers of cluster 66" in why
    if how == "its time is over":
        liar.say(messages.Finish(hold=hold, success=True), 4)
        answer = liar.reply(4)
        assert isinstance(answer, messages.Refuse)
        assert "held too long" in answer.reason
