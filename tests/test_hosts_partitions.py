"""Two hosts lose sight of each other, in every phase; and what goes on when they see each other again.

Two ways to lose it: the router drops packets in silence, or the cable is unplugged.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import expect
from hosts_kit import Network, Wire, network, process_in
from llm_datadist import BlocksCacheKey, CacheKey, LLMException, LLMStatusCode
from peers import GUARD, TIMEOUT_S, Node, Peers
from test_faults import counters, settled
from test_links import pull_one, with_caches

if TYPE_CHECKING:
    from collections.abc import Iterator

OK = LLMStatusCode.LLM_SUCCESS
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
BLOCKS, BLOCK_BYTES = 64, 1 << 20
SYNC_MS = 1_500
LATE_S = 1.0
"""A call may end so much after its deadline: the peer is asked to fence, and this machine may be busy."""
FINE = {TIMEOUT, NOT_LINKED, LLMStatusCode.LLM_FAILED}
"""What a transfer may end with; what it leaves behind is looked at."""


class Hosts:
    """Two peers on two hosts; the client links."""

    def __init__(self, net: Network, peers: Peers, **properties: Any) -> None:
        self.wires = net.pair()
        properties.setdefault("sync_kv_timeout", SYNC_MS)
        here, there = self.wires
        server_process, client_process = process_in(peers, there.host), process_in(peers, here.host)
        self.server = peers.make(1, process=server_process, listen_ip_info=f"{there.address}:0", **properties)
        self.client = peers.make(2, process=client_process, listen_ip_info=f"{here.address}:0", **properties)
        with_caches(self.server, self.client)

    def part(self, how: str) -> None:
        """Neither reaches the other one any more."""
        if how == "unplug":
            self.wires[1].unplug()
        else:
            for wire in self.wires:
                wire.cut()

    def meet(self, how: str) -> None:
        """Undo ``part``."""
        if how == "unplug":
            self.wires[1].plug()
        else:
            for wire in self.wires:
                wire.heal()

    def recover(self) -> None:
        """As docs/guide.md says: try again, and where the link has gone, or does not come back, link anew."""
        for here, there in ((self.client, self.server), (self.server, self.client)):
            until = time.monotonic() + 3 * TIMEOUT_S
            while (status := here.call(status_of_pull, there.cluster_id)) != OK:
                assert status in FINE
                assert time.monotonic() < until
                if status == NOT_LINKED:
                    self.client.call("unlink", 1, force=True)
                    self.client.link(self.server, timeout=2_000)


def status_of_pull(node: Node, cluster_id: int) -> LLMStatusCode:
    """In the child."""
    try:
        pull_one(node, cluster_id)
    except LLMException as error:
        return error.status_code
    return OK


@pytest.fixture
def net() -> Iterator[Network]:
    """A network for one test."""
    with network() as made:
        yield made


both_ways = pytest.mark.parametrize("how", ["cut", "unplug"])


@both_ways
def test_before_a_link(net: Network, peers: Peers, how: str) -> None:
    """Silence until the timeout, or at once that there is no way; later it works."""
    hosts = Hosts(net, peers)
    start = settled(hosts.client, lambda _values: True)
    hosts.part(how)
    begin = time.monotonic()
    status = hosts.client.link(hosts.server, timeout=700)
    assert time.monotonic() - begin < 0.7 + LATE_S
    assert status in {TIMEOUT, LLMStatusCode.LLM_LINK_FAILED}
    hosts.meet(how)
    assert settled(hosts.client, lambda values: values[0] <= start[0])[0] <= start[0]
    assert hosts.client.link(hosts.server) == OK
    hosts.recover()


def test_in_the_middle_of_links(net: Network, peers: Peers) -> None:
    """Whatever step it hits: a definite status in time, and a link later."""
    hosts = Hosts(net, peers)
    assert hosts.client.link(hosts.server) == OK
    assert hosts.client.call("unlink", 1, hosts.server.address) == OK
    statuses = []
    for wait_ms in (0, 1, 2, 3, 5, 8, 12, 20):
        linking = hosts.client.begin("link", 1, hosts.server.address, 800)
        threading.Event().wait(wait_ms / 1000)
        hosts.part("cut")
        statuses.append(linking.result(TIMEOUT_S))
        assert statuses[-1] in {OK, TIMEOUT, LLMStatusCode.LLM_LINK_FAILED}
        if statuses[-1] == OK:
            assert hosts.client.call("unlink", 1, force=True) == OK
        hosts.meet("cut")
        until = time.monotonic() + TIMEOUT_S
        while (status := hosts.client.link(hosts.server, timeout=2_000)) != OK:
            assert status in {TIMEOUT, LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_PROCESSING_LINK}
            assert time.monotonic() < until
        hosts.recover()
        assert hosts.client.call("unlink", 1, hosts.server.address) == OK
    assert set(statuses) != {OK}


@both_ways
def test_at_a_lookup(net: Network, peers: Peers, how: str) -> None:
    """In message mode the owner is asked first: a timeout, and the key is still there for the next attempt."""
    hosts = Hosts(net, peers, enable_remote_cache_accessible=False)
    hosts.server.call("register_contiguous", "keyed", 2, 2, 512, keys=[CacheKey(1, 5)], seed=9)
    hosts.client.call("register_contiguous", "into", 2, 2, 512)
    assert hosts.client.link(hosts.server) == OK
    hosts.client.call(pull_keyed)
    before = hosts.client.memory("into")
    hosts.part(how)
    hosts.server.call(overwrite, "keyed", 0x11)
    begin = time.monotonic()
    error = expect(TIMEOUT, lambda: hosts.client.call(pull_keyed))
    assert time.monotonic() - begin < SYNC_MS / 1000 + LATE_S
    assert isinstance(error, LLMException)
    assert error.retryable
    assert all((now == then).all() for now, then in zip(hosts.client.memory("into"), before, strict=True))
    hosts.meet(how)
    hosts.recover()
    hosts.client.call(pull_keyed)
    assert all((tensor[GUARD : GUARD + 512] == 0x11).all() for tensor in hosts.client.memory("into"))


def pull_keyed(node: Node) -> None:
    """In the child."""
    node.manager.pull_cache(CacheKey(1, 5), node.caches["into"], 0)


def overwrite(node: Node, name: str, value: int, part: slice = slice(None)) -> None:
    """In the child: fill (a part of) every tensor."""
    for tensor in node.arenas[name].memory:
        tensor[GUARD:-GUARD][part] = value


def big_cache(node: Node, name: str, model_id: int | None, seed: int | None) -> None:
    """In the child: 64 MiB in one tensor."""
    node.register_blocks(name, 1, BLOCKS, BLOCK_BYTES, model_id=model_id, seed=seed)


def move_all(node: Node, method: str, cluster_id: int, model_id: int, name: str) -> tuple[LLMStatusCode, str, float]:
    """In the child: all blocks; status, text and seconds."""
    blocks = list(range(BLOCKS))
    begin, status, text = time.monotonic(), OK, ""
    try:
        layers = {"tensor_num_per_layer": 1}
        getattr(node.manager, method)(BlocksCacheKey(cluster_id, model_id), node.caches[name], blocks, blocks, **layers)
    except LLMException as error:
        status, text = error.status_code, str(error)
    return status, text, time.monotonic() - begin


def filled(node: Node, name: str, value: int) -> bool:
    """In the child."""
    return all(bool((tensor[GUARD:-GUARD] == value).all()) for tensor in node.arenas[name].memory)


def shape_all(wires: tuple[Wire, Wire], rate: str) -> None:
    """Both."""
    for wire in wires:
        wire.shape(rate)


@both_ways
@pytest.mark.parametrize("asking", ["client", "server"])
@pytest.mark.parametrize("method", ["pull_blocks", "push_blocks"])
def test_in_the_middle_of_a_transfer(net: Network, peers: Peers, how: str, method: str, asking: str) -> None:
    """A timeout. What is written to the destination afterwards stays, also when the hosts see each other again."""
    hosts = Hosts(net, peers)
    shape_all(hosts.wires, "200mbit")
    here, there = (hosts.client, hosts.server) if asking == "client" else (hosts.server, hosts.client)
    here.call(big_cache, "mine", None, 1)
    there.call(big_cache, "theirs", 7, 2)
    assert hosts.client.link(hosts.server) == OK
    moving = here.begin(move_all, method, there.cluster_id, 7, "mine")
    threading.Event().wait(0.3)
    hosts.part(how)
    status, text, seconds = moving.result(TIMEOUT_S)
    assert status == TIMEOUT, text
    assert seconds < SYNC_MS / 1000 + LATE_S
    target, name = (here, "mine") if method == "pull_blocks" else (there, "theirs")
    unsure = "did not confirm" in text
    assert unsure == (method == "push_blocks"), text
    if unsure:  # what the text says: not before it is unlinked; the owner can do that
        assert target.call("unlink", here.cluster_id, force=True) == OK
    target.call(overwrite, name, 0x55)
    hosts.meet(how)
    threading.Event().wait(2)  # whatever was on its way arrives
    assert target.call(filled, name, 0x55)
    hosts.recover()
    assert target.call(filled, name, 0x55)
    shape_all(hosts.wires, "10gbit")
    status, text, _ = here.call(move_all, method, there.cluster_id, 7, "mine")
    assert status == OK, text
    assert np.array_equal(here.memory("mine")[0], there.memory("theirs")[0])


@both_ways
def test_at_an_unlink(net: Network, peers: Peers, how: str) -> None:
    """Without force the link stays; with force it ends here, and a new one replaces what the peer still has."""
    hosts = Hosts(net, peers)
    assert hosts.client.link(hosts.server) == OK
    hosts.recover()
    hosts.part(how)
    begin = time.monotonic()
    status = hosts.client.call("unlink", 1, hosts.server.address, timeout=700)
    assert time.monotonic() - begin < 0.7 + LATE_S
    assert status in {TIMEOUT, LLMStatusCode.LLM_UNLINK_FAILED}
    assert hosts.client.call("unlink", 1, force=True, timeout=700) == OK
    expect(NOT_LINKED, lambda: hosts.client.call(pull_one, 1))
    hosts.meet(how)
    until = time.monotonic() + TIMEOUT_S
    while hosts.client.link(hosts.server, timeout=3_000) != OK:
        assert time.monotonic() < until
    hosts.recover()


@both_ways
def test_unlink_by_both_and_link_again(net: Network, peers: Peers, how: str) -> None:
    """Each ends its own end while they cannot see each other; then the other one links."""
    hosts = Hosts(net, peers)
    assert hosts.client.link(hosts.server) == OK
    hosts.part(how)
    for here, there in ((hosts.client, 1), (hosts.server, 2)):
        assert here.call("unlink", there, force=True, timeout=500) == OK
    hosts.meet(how)
    assert hosts.server.link(hosts.client) == OK
    hosts.recover()


def test_one_way_only(net: Network, peers: Peers) -> None:
    """What the server sends does not arrive, what the client sends does: a push lands, but is not known to."""
    hosts = Hosts(net, peers)
    assert hosts.client.link(hosts.server) == OK
    hosts.recover()
    hosts.wires[0].cut()
    for here, there in ((hosts.client, 1), (hosts.server, 2)):
        assert here.call(status_of_pull, there) == TIMEOUT
    hosts.wires[0].heal()
    hosts.recover()


def test_again_and_again(net: Network, peers: Peers) -> None:
    """Ten partitions while both pull: descriptors, threads and memory stay flat."""
    hosts = Hosts(net, peers, sync_kv_timeout=400)
    assert hosts.client.link(hosts.server) == OK
    start: list[tuple[int, int, int]] = []
    for round_ in range(10):
        hosts.part("cut")
        for here, there in ((hosts.client, 1), (hosts.server, 2)):
            assert here.call(status_of_pull, there) in FINE
        hosts.meet("cut")
        hosts.recover()
        if round_ == 2:
            start = [peer.call(counters) for peer in (hosts.client, hosts.server)]
    for peer, then in zip((hosts.client, hosts.server), start, strict=True):
        until = time.monotonic() + TIMEOUT_S
        while (now := peer.call(counters))[0] > then[0]:
            assert time.monotonic() < until, (now, then)
        assert now[1] <= then[1] + 4
        assert now[2] <= then[2] + 4096


def test_owner_that_unlinks_by_force_has_its_memory_for_itself(net: Network, peers: Peers) -> None:
    """A push is under way meanwhile: it fails, and not a byte of it comes after the call has returned."""
    hosts = Hosts(net, peers, sync_kv_timeout=20_000)
    shape_all(hosts.wires, "80mbit")
    hosts.client.call(big_cache, "mine", None, 1)
    hosts.server.call(big_cache, "theirs", 7, 2)
    assert hosts.client.link(hosts.server) == OK
    moving = hosts.client.begin(move_all, "push_blocks", 1, 7, "mine")
    threading.Event().wait(0.5)
    assert hosts.server.call("unlink", 2, force=True, timeout=500) == OK
    hosts.server.call(overwrite, "theirs", 0x55)
    status, text, _ = moving.result(TIMEOUT_S)
    assert status in FINE, text
    threading.Event().wait(1)
    assert hosts.server.call(filled, "theirs", 0x55)
