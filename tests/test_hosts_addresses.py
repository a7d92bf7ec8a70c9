"""Hosts with several addresses, of IPv6 alone, and with addresses that mean something on one cable only."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from confine_kit import keep_log, logged
from hosts_kit import Host, Network, network, process_in
from llm_datadist import LLMStatusCode, RegisterMemStatus
from peers import TIMEOUT_S, Peer, Peers
from test_clients import link_by_table, unlink_comm
from test_links import explain, pull_one, with_caches
from until import until

if TYPE_CHECKING:
    from collections.abc import Iterator

OK = LLMStatusCode.LLM_SUCCESS


@pytest.fixture
def net() -> Iterator[Network]:
    """A network for one test."""
    with network() as made:
        yield made


def check_both_ways(server: Peer, client: Peer) -> None:
    """A pull in each direction."""
    client.call(pull_one, server.cluster_id)
    server.call(pull_one, client.cluster_id)


def test_listening_everywhere(net: Network, peers: Peers) -> None:
    """Two cables, one of which leads nowhere: all connections of a link go where the client went."""
    host = net.host("server")
    dead, alive = net.wire(host, "eth0"), net.wire(host, "eth1")
    dead.cut()
    client_wire = net.wire(net.host("client"))
    server = peers.make(1, process=process_in(peers, host), listen_ip_info="0.0.0.0:0")
    client = peers.make(2, process=process_in(peers, client_wire.host), listen=False)
    with_caches(server, client)
    assert server.address is not None
    port = server.address[1]
    begin = time.monotonic()
    assert client.call("link", 1, (dead.address, port), 500) == LLMStatusCode.LLM_TIMEOUT
    assert time.monotonic() - begin < 2
    assert client.call("link", 1, (alive.address, port)) == OK
    check_both_ways(server, client)


def rank_table(addresses: list[dict[str, str]]) -> str:
    """One server a member."""
    servers = [
        {
            "server_id": f"s{rank}",
            "host_ip": each["host_ip"],
            "device": [
                {"device_id": "0", "rank_id": str(rank), "device_ip": each["device_ip"], "device_port": "26400"}
            ],
        }
        for rank, each in enumerate(addresses)
    ]
    return json.dumps({"version": "1.0", "server_list": servers})


@pytest.mark.parametrize("dead", ["host_ip", "device_ip"])
def test_rank_table_of_which_one_address_leads_somewhere(net: Network, peers: Peers, dead: str) -> None:
    """Whichever of a member's addresses works is found, the other one notwithstanding."""
    first, second = net.host("a"), net.host("b")
    wires = {"host_ip": net.wire(first, "eth0"), "device_ip": net.wire(first, "eth1")}
    wires[dead].cut()
    there = net.wire(second).address
    entries = [{key: wire.address for key, wire in wires.items()}, {"host_ip": there, "device_ip": there}]
    made = [
        peers.make(number, process=process_in(peers, host), listen=False, link_total_time=30)
        for number, host in enumerate((first, second), 1)
    ]
    with_caches(*made)
    ranks = {peer.cluster_id: rank for rank, peer in enumerate(made)}
    futures = [peer.begin(link_by_table, "group", ranks, rank_table(entries)) for peer in made]
    assert [future.result(TIMEOUT_S * 2) for future in futures] == [RegisterMemStatus.OK] * 2
    check_both_ways(*made)
    if dead == "host_ip":  # else finalize ends it
        for future in [peer.begin(unlink_comm) for peer in made]:
            future.result(TIMEOUT_S)
    for peer in made:
        peer.call("finalize")


def test_rank_table_of_which_no_address_leads_anywhere(net: Network, peers: Peers) -> None:
    """FAILED within link_total_time, and the log names every address that was tried."""
    host, other = net.host("a"), net.host("b")
    lost, here = net.wire(host), net.wire(other)
    lost.cut()
    entries = [
        {"host_ip": lost.address, "device_ip": "192.0.2.7"},
        {"host_ip": here.address, "device_ip": here.address},
    ]
    peer = peers.make(2, process=process_in(peers, other), listen=False, link_total_time=2)
    peer.call(keep_log)
    assert peer.call(link_by_table, "group", {1: 0, 2: 1}, rank_table(entries)) == RegisterMemStatus.FAILED
    said = "\n".join(peer.call(logged))
    assert f"cluster 1 at {lost.address}:26400, 192.0.2.7:26400: " in said


def link_local(host: Host, interface: str) -> str:
    """Its address on one cable, with the scope, once it may be used."""

    def usable() -> str:
        (line,) = host.ip("-6", "-o", "address", "show", "dev", interface, "scope", "link").splitlines()
        return "" if "tentative" in line else line.split()[3].split("/")[0]

    return f"{until(usable)}%{interface}"


def test_ipv6_between_hosts(net: Network, peers: Peers) -> None:
    """Global addresses over the router."""
    here, there = net.pair()
    server = peers.make(1, process=process_in(peers, there.host), listen_ip_info=f"[{there.address6}]:0")
    client = peers.make(2, process=process_in(peers, here.host), listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    assert client.call(explain, 1).peer_address == f"[{there.address6}]:{server.address[1]}"  # type: ignore[index]
    check_both_ways(server, client)


def test_ipv6_of_one_cable(net: Network, peers: Peers) -> None:
    """Link-local addresses need the interface, which has another name at each end; without it there is no way."""
    wire = net.wire(net.host("client"))
    listen = link_local(net.router, wire.outside)
    link_local(wire.host, wire.inside)
    server = peers.make(1, process=process_in(peers, net.router), listen_ip_info=f"[{listen}]:0")
    client = peers.make(2, process=process_in(peers, wire.host), listen=False)
    with_caches(server, client)
    assert server.address is not None
    bare, port = listen.split("%")[0], server.address[1]
    assert client.call("link", 1, (bare, port)) == LLMStatusCode.LLM_LINK_FAILED
    assert client.call("link", 1, (f"{bare}%nowhere", port)) == LLMStatusCode.LLM_PARAM_INVALID
    assert client.call("link", 1, (f"{bare}%{wire.inside}", port)) == OK
    assert client.call(explain, 1).path == "tcp"
    check_both_ways(server, client)


@pytest.mark.parametrize("paths", ["auto", "tcp"])
def test_only_the_loopback_of_ipv6(net: Network, peers: Peers, paths: str) -> None:
    """A host without a cable and without 127.0.0.1."""
    host = net.host("alone")
    host.ip("address", "del", "127.0.0.1/8", "dev", "lo")
    properties: dict[str, Any] = {"paths": paths}
    server = peers.make(1, process=process_in(peers, host), listen_ip_info="[::1]:0", **properties)
    client = peers.make(2, process=process_in(peers, host), listen_ip_info="[::1]:0", **properties)
    with_caches(server, client)
    assert client.link(server) == OK
    check_both_ways(server, client)
