"""Links to other hosts need a secret, certificates, or an option that permits them without."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from expect import expect
from hosts_kit import network, process_in
from llm_datadist import LLMStatusCode, RegisterMemStatus
from llm_datadist.net.security import on_this_host
from llm_datadist.wire import framing
from llm_datadist.wire.data import Greeting
from llm_datadist.wire.framing import Kind
from net_helpers import WAIT_S, ended
from security_kit import BLOCKS, log_lines, protection, pull, push, same, watch_log, with_caches
from test_comms import link_all, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hosts_kit import Wire
    from peers import Node, Peer, Peers, Process

    Hosts = tuple[Wire, Wire]

OK, FAILED = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_LINK_FAILED
REMEDIES = ("LLM_DATADIST_SECRET_FILE", "tls_cert", "LLM_DATADIST_ALLOW_INSECURE_REMOTE=1")
OPEN = {"allow_insecure_remote": True}


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with network() as made:
        yield made.pair()


def process(peers: Peers, wire: Wire) -> Process:
    """A child in a host that permits nothing by its environment."""
    return process_in(peers, wire.host, permit=False)


def pair(peers: Peers, hosts: Hosts, theirs: Any, ours: Any, *, six: bool = False) -> tuple[Peer, Peer]:
    """Cluster 1 listens on the one host, cluster 2 connects from the other one."""
    here, there = hosts
    listen = f"[{here.address6}]:0" if six else f"{here.address}:0"
    server = peers.make(1, process=process(peers, here), listen_ip_info=listen, **theirs)
    client = peers.make(2, process=process(peers, there), listen=False, **ours)
    for peer in (server, client):
        peer.call(watch_log)
    return server, client


@pytest.mark.parametrize("kind", ["secret", "tls", "secret and tls", "open"])
@pytest.mark.parametrize("six", [False, True])
def test_protected_or_permitted_links_work(peers: Peers, hosts: Hosts, kind: str, six: bool) -> None:
    options = OPEN if kind == "open" else protection(kind)
    server, client = pair(peers, hosts, options, options, six=six)
    with_caches(server, client)
    assert client.link(server) == OK
    every = list(range(BLOCKS))
    client.call(pull, 1, every)
    assert same(client.memory("dst"), server.memory("src"))
    server.call(push, 2, every)
    assert same(client.memory("dst"), server.memory("src"))
    assert server.call(log_lines) == client.call(log_lines) == []


def test_the_connecting_side_refuses_before_it_says_anything(peers: Peers, hosts: Hosts) -> None:
    server, client = pair(peers, hosts, OPEN, {})
    assert client.link(server) == FAILED
    lines = client.call(log_lines, "ERROR")
    assert len(lines) == 1
    assert all(remedy in lines[0] for remedy in REMEDIES)
    assert server.call(log_lines) == []


def test_the_listening_side_refuses_whatever_the_peer_permits(peers: Peers, hosts: Hosts) -> None:
    server, client = pair(peers, hosts, {}, OPEN)
    assert client.link(server) == FAILED
    for lines in (client.call(log_lines, "ERROR"), server.call(log_lines)):
        assert len(lines) == 1
        assert all(remedy in lines[0] for remedy in REMEDIES)
    assert "from another host" in server.call(log_lines)[0]
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: server.call("path", 2))


def knock_on_data(_node: Node, address: tuple[str, int]) -> bool:
    """In the child: whether a data connection is dropped."""
    with socket.create_connection(address, WAIT_S) as sock:
        greeting = Greeting.make(b"", b"?" * 16, 1, serve=True)
        sock.sendall(framing.preamble(Kind.DATA) + greeting.encode())
        return ended(sock)


def test_data_connections_of_other_hosts_are_dropped_too(peers: Peers, hosts: Hosts) -> None:
    server, client = pair(peers, hosts, {}, {})
    assert client.call(knock_on_data, server.address)
    assert ["from another host" in line for line in server.call(log_lines)] == [True]


def test_a_host_reaches_itself_at_any_of_its_addresses(peers: Peers, hosts: Hosts) -> None:
    here, _ = hosts
    for number, listen in ((1, f"{here.address}:0"), (2, f"[{here.address6}]:0"), (3, "127.0.0.1:0")):
        server = peers.make(number, process=process(peers, here), listen_ip_info=listen)
        client = peers.make(10 + number, process=process(peers, here), listen=False)
        assert client.link(server) == OK


def test_rank_tables_between_hosts(peers: Peers, hosts: Hosts) -> None:
    """With a secret they work; without, the group fails and tells why."""
    for port, secret, wanted in ((26500, {"secret": "of sixteen bytes or more"}, "OK"), (26501, {}, "FAILED")):
        options = {"listen": False, "link_total_time": 30 if secret else 2, **secret}
        members = [peers.make(20 + rank, process=process(peers, host), **options) for rank, host in enumerate(hosts)]
        for member in members:
            member.call(watch_log)
        devices = [{"device_ip": host.address, "device_port": port} for host in hosts]
        assert link_all(members, table(devices)) == [RegisterMemStatus[wanted]] * 2
        if not secret:
            assert all(remedy in members[1].call(log_lines, "ERROR")[-1] for remedy in REMEDIES)


# Which addresses are those of this host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1"])
def test_addresses_of_this_host(host: str) -> None:
    assert on_this_host(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "8.8.8.8", "2001:db8::1", "fe80::1%lo", "255.255.255.255", "224.0.0.1"])
def test_addresses_of_others(host: str) -> None:
    assert not on_this_host(host)
