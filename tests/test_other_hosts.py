"""Links to other hosts need a secret, certificates, or an option that permits them without."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from expect import expect
from llm_datadist import LLMStatusCode, RegisterMemStatus
from llm_datadist.net.security import on_this_host
from llm_datadist.wire import framing
from llm_datadist.wire.data import Greeting
from llm_datadist.wire.framing import Kind
from net_helpers import WAIT_S, ended
from security_kit import BLOCKS, log_lines, protection, pull, push, same, watch_log, with_caches
from test_comms import link_all, table
from two_hosts_kit import two_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers import Node, Peer, Peers
    from two_hosts_kit import Host

OK, FAILED = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_LINK_FAILED
REMEDIES = ("LLM_DATADIST_SECRET_FILE", "tls_cert", "LLM_DATADIST_ALLOW_INSECURE_REMOTE=1")
OPEN = {"allow_insecure_remote": True}


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as made:
        yield made


def pair(peers: Peers, hosts: tuple[Host, Host], theirs: Any, ours: Any, ip: str | None = None) -> tuple[Peer, Peer]:
    """Cluster 1 listens on the one host, cluster 2 connects from the other one."""
    here, there = hosts
    where = ip or here.ip
    listen = f"[{where}]:0" if ":" in where else f"{where}:0"
    server = peers.make(1, process=peers.process(here.enter), listen_ip_info=listen, **theirs)
    client = peers.make(2, process=peers.process(there.enter), listen=False, **ours)
    for peer in (server, client):
        peer.call(watch_log)
    return server, client


@pytest.mark.parametrize("kind", ["secret", "tls", "secret and tls", "open"])
@pytest.mark.parametrize("ip", ["10.77.0.1", "fd00:77::1"])
def test_protected_or_permitted_links_work(peers: Peers, hosts: tuple[Host, Host], kind: str, ip: str) -> None:
    options = OPEN if kind == "open" else protection(kind)
    server, client = pair(peers, hosts, options, options, ip)
    with_caches(server, client)
    assert client.link(server) == OK
    every = list(range(BLOCKS))
    client.call(pull, 1, every)
    assert same(client.memory("dst"), server.memory("src"))
    server.call(push, 2, every)
    assert same(client.memory("dst"), server.memory("src"))
    assert server.call(log_lines) == client.call(log_lines) == []


def test_the_connecting_side_refuses_before_it_says_anything(peers: Peers, hosts: tuple[Host, Host]) -> None:
    server, client = pair(peers, hosts, OPEN, {})
    assert client.link(server) == FAILED
    lines = client.call(log_lines, "ERROR")
    assert len(lines) == 1
    assert all(remedy in lines[0] for remedy in REMEDIES)
    assert server.call(log_lines) == []


def test_the_listening_side_refuses_whatever_the_peer_permits(peers: Peers, hosts: tuple[Host, Host]) -> None:
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


def test_data_connections_of_other_hosts_are_dropped_too(peers: Peers, hosts: tuple[Host, Host]) -> None:
    server, client = pair(peers, hosts, {}, {})
    assert client.call(knock_on_data, server.address)
    assert ["from another host" in line for line in server.call(log_lines)] == [True]


def test_a_host_reaches_itself_at_any_of_its_addresses(peers: Peers, hosts: tuple[Host, Host]) -> None:
    here, _ = hosts
    for number, listen in ((1, f"{here.ip}:0"), (2, "[fd00:77::1]:0"), (3, "127.0.0.1:0")):
        server = peers.make(number, process=peers.process(here.enter), listen_ip_info=listen)
        client = peers.make(10 + number, process=peers.process(here.enter), listen=False)
        assert client.link(server) == OK


def test_rank_tables_between_hosts(peers: Peers, hosts: tuple[Host, Host]) -> None:
    """With a secret they work; without, the group fails and tells why."""
    for port, secret, wanted in ((26500, {"secret": "of sixteen bytes or more"}, "OK"), (26501, {}, "FAILED")):
        options = {"listen": False, "link_total_time": 30 if secret else 2, **secret}
        members = [
            peers.make(20 + rank, process=peers.process(host.enter), **options) for rank, host in enumerate(hosts)
        ]
        for member in members:
            member.call(watch_log)
        devices = [{"device_ip": host.ip, "device_port": port} for host in hosts]
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
