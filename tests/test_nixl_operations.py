"""Every operation, in both modes and from both sides, over NIXL: shared memory and TCP of UCX, also between hosts."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from typing import TYPE_CHECKING, Any

import pytest

import test_matrix
from cli_kit import run
from confine_kit import in_turn
from hosts_kit import enter, network
from llm_datadist import LLMStatusCode
from nixl_kit import SHARED_MEMORY, TCP, TRANSPORTS, needs_nixl, process_with, use_ucx
from peers import Peers
from test_cli_demo import all_verified, table_rows
from test_links import explain, pull_one, with_caches
from test_matrix import Pair, sides

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hosts_kit import Wire
    from peers import Process

__all__ = ["sides"]
pytestmark = needs_nixl
OK = LLMStatusCode.LLM_SUCCESS


@pytest.fixture(
    scope="module",
    params=list(itertools.product(TRANSPORTS, (True, False))),
    ids=lambda each: f"{each[0]}-{'A' if each[1] else 'M'}",
)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Linked peers for one transport and mode."""
    transport, accessible = request.param
    properties: dict[str, Any] = {"paths": "nixl", "enable_remote_cache_accessible": accessible}
    with contextlib.closing(Peers()) as peers:
        server, client = (
            peers.make(cluster_id, process=process_with(peers, TRANSPORTS[transport]), **properties)
            for cluster_id in (2, 1)
        )
        assert client.link(server) == OK
        yield Pair(client, server, "nixl")


for name, test in vars(test_matrix).items():
    if name.startswith("test_"):
        globals()[name] = test


def test_both_sides_use_it(pair: Pair) -> None:
    assert pair.client.call("path", 2) == pair.server.call("path", 1) == "nixl"


def in_host(wire: Wire) -> Callable[[], object]:
    """In a child: that host, and TCP of UCX alone."""
    host = wire.host
    return in_turn(functools.partial(enter, host.name, str(host.boot_id)), functools.partial(use_ucx, TCP))


def elsewhere(wire: Wire) -> Callable[[], object]:
    """In a child: that host, and the loopback interface alone for UCX."""
    return in_turn(in_host(wire), loopback_only)


def loopback_only() -> None:
    """In a child."""
    os.environ["UCX_NET_DEVICES"] = "lo"


def test_hosts_between_which_it_does_not_work() -> None:
    """The link takes the next path, well before its own time is over."""
    with network() as net, contextlib.closing(Peers()) as peers:
        here, there = net.pair()
        properties: dict[str, Any] = {"paths": "nixl,tcp"}
        address = f"{there.address}:0"
        server = peers.make(1, process=peers.process(elsewhere(there)), listen_ip_info=address, **properties)
        client = peers.make(2, process=peers.process(elsewhere(here)), listen=False, **properties)
        with_caches(server, client)
        assert client.link(server) == OK
        client.call(pull_one, 1)
        server.call(pull_one, 2)
        report = client.call(explain, 1)
        assert report.path == "tcp"
        assert "NIXL does not reach the peer" in str(report)
        client.call("finalize")
        server.call("finalize")


def test_between_two_hosts() -> None:
    """Two network namespaces: NIXL where both name it, and tcp before it where nobody does, as there is no RDMA."""
    with network() as net, contextlib.closing(Peers()) as peers:
        here, there = net.pair()
        for ids, properties, path in (((1, 2), {"paths": "nixl,tcp"}, "nixl"), ((3, 4), {}, "tcp")):
            address = f"{there.address}:0"
            server = peers.make(ids[0], process=peers.process(in_host(there)), listen_ip_info=address, **properties)
            client = peers.make(ids[1], process=peers.process(in_host(here)), listen=False, **properties)
            with_caches(server, client)
            assert client.link(server) == OK
            client.call(pull_one, ids[0])
            server.call(pull_one, ids[1])
            report = client.call(explain, ids[0])
            assert report.path == path
            (found,) = [each for each in report.attempts if each.name == "nixl"]
            assert found.hint is None
            if path == "tcp":
                assert "no active RDMA device" in found.reason


@pytest.mark.parametrize("transport", TRANSPORTS.values(), ids=TRANSPORTS.keys())
def test_demo(transport: str) -> None:
    done = run("demo", "--model", "tiny", "--path", "nixl", UCX_TLS=transport)
    assert (done.returncode, done.stderr) == (0, "")
    assert table_rows(done.stdout) == all_verified("nixl", 1024)


@pytest.mark.parametrize("ending", ["finalize", "nothing"])
def test_processes_end_well(ending: str) -> None:
    """Both, also where nobody finalizes: NIXL's objects end before the interpreter does."""
    processes: list[Process] = []
    peers = Peers()
    try:
        server, client = (
            peers.make(cluster_id, process=process_with(peers, SHARED_MEMORY), paths="nixl") for cluster_id in (1, 2)
        )
        processes = [server.process, client.process]
        with_caches(server, client)
        assert client.link(server) == OK
        client.call(pull_one, 1)
        if ending == "finalize":
            client.call("finalize")
            server.call("finalize")
    finally:
        codes = [process.close() for process in processes]
    assert codes == [0, 0]
