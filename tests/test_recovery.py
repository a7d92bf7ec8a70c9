"""Peers come back: nobody who lives on is restarted, and none that is stuck delays another."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

import pytest

from expect import expect
from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.utils.deadline import Deadline
from peers import TIMEOUT_S, Node, Peer
from stopping import go_on, stop
from test_clients import link_by_table
from test_comms import OK as GROUP_OK
from test_comms import link_all, table
from test_faults import counters
from test_links import free_port, link_several, pull_one, pull_until_unlinked, with_caches
from until import MOST_S

if TYPE_CHECKING:
    from peers import Peers

OK = LLMStatusCode.LLM_SUCCESS
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK


def restarted(peers: Peers, old: Peer, **properties: object) -> Peer:
    """Kill a peer and start it again: same cluster id, same port."""
    assert old.address is not None
    old.process.kill()
    again = peers.make(old.cluster_id, listen_ip_info=f"{old.address[0]}:{old.address[1]}", **properties)
    with_caches(again)
    return again


@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
def test_dead_peers_are_linked_again_while_others_are_stuck(peers: Peers, paths: str) -> None:
    """One is stopped, one is a black hole: two that were killed are linked again before those have even timed out."""
    dead = [peers.make(number, paths=paths) for number in (1, 2)]
    stopped = peers.make(3, paths=paths)
    client = peers.make(9, paths=paths, listen=False, sync_kv_timeout=30_000)
    with_caches(*dead, stopped, client)
    assert client.link(stopped) == OK
    with socket.create_server(("127.0.0.1", 0)) as hole:
        for peer in dead:
            assert client.link(peer) == OK
        stop(stopped.process.pid)
        try:
            stuck = [
                client.begin("link", 8, hole.getsockname(), timeout=30_000),
                client.begin("unlink", 3, stopped.address, timeout=30_000),
            ]
            for peer in dead:
                again = restarted(peers, peer, paths=paths)
                assert client.call(pull_until_unlinked, peer.cluster_id) == NOT_LINKED
                assert client.link(again) == OK
                client.call(pull_one, peer.cluster_id)
                again.call(pull_one, 9)
            assert not any(future.done() for future in stuck)
        finally:
            go_on(stopped.process.pid)
        assert stuck[1].result(TIMEOUT_S) == OK
    assert stuck[0].result(TIMEOUT_S) == LLMStatusCode.LLM_LINK_FAILED


def test_one_call_links_all_that_can_be_linked(peers: Peers) -> None:
    """A black hole among them costs its own status alone."""
    good = [peers.make(number) for number in (1, 2)]
    client = peers.make(9, listen=False)
    with_caches(*good, client)
    with socket.create_server(("127.0.0.1", 0)) as hole:
        where = {1: good[0].address, 8: hole.getsockname(), 2: good[1].address}
        linking = client.begin(link_several, where, timeout=int(TIMEOUT_S * 1000))
        for number in (1, 2):
            client.call(pull_once_linked, number)
        assert not linking.done()
    # The hole has closed: nobody has to wait for the end of the time that the call may take.
    assert linking.result(TIMEOUT_S)[1] == [OK, LLMStatusCode.LLM_LINK_FAILED, OK]


def pull_once_linked(node: Node, cluster_id: int) -> None:
    """In the child: pull as soon as there is a link."""
    table = node.datadist._engine._core.table
    assert table.wait_for_link(cluster_id, Deadline.after(MOST_S)) is not None
    pull_one(node, cluster_id)


def test_failures_are_not_held_against_anybody(peers: Peers) -> None:
    """However often it was in vain, the next attempt is made, and made at once."""
    client = peers.make(9, listen=False)
    with_caches(client)
    port = free_port()
    for _ in range(10):
        assert client.call("link", 1, ("127.0.0.1", port)) == LLMStatusCode.LLM_LINK_FAILED
    server = peers.make(1, listen_ip_info=f"127.0.0.1:{port}")
    with_caches(server)
    assert client.link(server) == OK
    client.call(pull_one, 1)


def test_two_threads_pull_while_the_owner_comes_and_goes(peers: Peers) -> None:
    """Same cluster id and port, other process and memory, five times: errors only in between, and never old bytes."""
    server, client = peers.make(1), peers.make(9, listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    for _ in range(5):
        pulling = [client.begin(pull_until_unlinked, 1) for _ in range(2)]
        server = restarted(peers, server)
        assert [future.result(TIMEOUT_S) for future in pulling] == [NOT_LINKED] * 2
        assert client.link(server) == OK
        client.call(pull_one, 1)
        server.call(pull_one, 9)


def test_a_member_of_a_group_comes_late(peers: Peers) -> None:
    """``link`` tries again and again, at growing intervals, until the other one is there."""
    first = peers.make(20, listen=False, link_total_time=60)
    devices = [{"device_ip": "127.0.0.1", "device_port": str(free_port())} for _ in range(2)]
    ranks = {20: 0, 21: 1}
    late = peers.make(21, listen=False, link_total_time=60)
    with_caches(first, late)
    dialling = late.begin(link_by_table, "group", ranks, table(devices))
    expect(NOT_LINKED, lambda: late.call(pull_one, 20))
    assert first.call(link_by_table, "group", ranks, table(devices)) == GROUP_OK
    assert dialling.result(TIMEOUT_S) == GROUP_OK
    late.call(pull_one, 20)
    assert link_all([first, late], table(devices), "again") == [GROUP_OK] * 2


def cut_control_connection(node: Node, cluster_id: int) -> None:
    """In the child: as ``ss -K`` would."""
    link = node.datadist._engine._core.table.get(cluster_id)
    assert link is not None
    link.channel._sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
def test_a_connection_that_is_cut(peers: Peers, paths: str) -> None:
    """Both are told, both processes live on, and the next link is as good as the first."""
    server, client = peers.make(1, paths=paths), peers.make(9, paths=paths, listen=False)
    with_caches(server, client)
    for cutter, other in ((server, 9), (client, 1)):
        assert client.link(server) == OK
        cutter.call(cut_control_connection, other)
        assert client.call(pull_until_unlinked, 1) == NOT_LINKED
        assert server.call(pull_until_unlinked, 9) == NOT_LINKED
        error = expect(NOT_LINKED, lambda: client.call(pull_one, 1))
        assert "the link to cluster 1 ended" in str(error)
    assert client.link(server) == OK
    client.call(pull_one, 1)
    server.call(pull_one, 9)


ANSWERS = {
    "nothing, and closes": b"",
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a mebibyte of garbage": b"\xff" * (1 << 20),
    "a frame of 2 GiB": b"\x7f\xff\xff\xff" + bytes(100),
    "a frame that is no message": b"\x00\x00\x00\x04\xc1\xc1\xc1\xc1",
    "an empty frame": bytes(4),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_listeners_that_are_something_else(peers: Peers, answer: str) -> None:
    """LLM_LINK_FAILED, not the end of the process, and no memory for what was announced."""
    client = peers.make(9, listen=False)
    before = client.call(resident_kib)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(TIMEOUT_S)
        linking = client.begin("link", 1, listener.getsockname(), timeout=20_000)
        sock, _ = listener.accept()
        with sock:
            sock.recv(1)
            with contextlib.suppress(OSError):  # it may hang up before it has heard all
                sock.sendall(ANSWERS[answer])
        assert linking.result(TIMEOUT_S) == LLMStatusCode.LLM_LINK_FAILED
    assert client.call(resident_kib) < before + (64 << 10)


def resident_kib(node: Node) -> int:
    """In the child."""
    return counters(node)[2]


def storm(node: Node, address: tuple[str, int], work: str, seconds: float) -> set[LLMStatusCode]:
    """In the child: link, unlink or pull as fast as it goes; what became of it."""
    seen, end = set(), time.monotonic() + seconds
    while time.monotonic() < end:
        if work == "link":
            seen.add(node.link(1, address, 20_000))
        elif work == "unlink":
            seen.add(node.unlink(1, address, timeout=20_000))
        elif work == "force":
            seen.add(node.unlink(1, address, force=True, timeout=20_000))
        else:
            try:
                pull_one(node, 1)
                seen.add(OK)
            except LLMException as error:
                seen.add(error.status_code)
    return seen


@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
def test_threads_that_link_unlink_and_pull_at_once(peers: Peers, paths: str) -> None:
    """One status out of a few for each call, no deadlock; and afterwards it works as ever."""
    server, client = peers.make(1, paths=paths), peers.make(9, paths=paths, listen=False)
    with_caches(server, client)
    running = {
        work: [client.begin(storm, server.address, work, 2.0) for _ in range(count)]
        for work, count in (("link", 8), ("unlink", 3), ("force", 1), ("pull", 4))
    }
    seen = {work: set().union(*(each.result(TIMEOUT_S) for each in futures)) for work, futures in running.items()}
    code = LLMStatusCode
    assert seen["link"] <= {OK, code.LLM_ALREADY_LINK, code.LLM_PROCESSING_LINK, code.LLM_LINK_FAILED}
    assert seen["unlink"] <= {OK, code.LLM_UNLINK_FAILED}
    assert seen["force"] <= {OK}
    assert seen["pull"] <= {OK, NOT_LINKED, code.LLM_FAILED}
    assert client.call("unlink", 1, server.address, force=True) == OK
    assert client.link(server) == OK
    client.call(pull_one, 1)
    server.call(pull_one, 9)


@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
def test_64_pulls_at_once_all_end(peers: Peers, paths: str) -> None:
    """Each within its own deadline, and all of them well."""
    server, client = peers.make(1, paths=paths), peers.make(9, paths=paths, listen=False, sync_kv_timeout=60_000)
    with_caches(server, client)
    assert client.link(server) == OK
    for future in [client.begin(pull_one, 1) for _ in range(64)]:
        future.result(TIMEOUT_S)


def drop_slowly(node: Node) -> None:
    """In the child: all that follows a goodbye takes a while."""
    ender = node.datadist._engine._core.ender
    real = ender.drop
    ender.drop = lambda link, reason: (time.sleep(0.5), real(link, reason))


def test_who_was_unlinked_may_link_again_at_once(peers: Peers) -> None:
    """When ``unlink_clusters`` has returned on one side, the other one is not linked any more either."""
    one, other = peers.make(1), peers.make(2)
    with_caches(one, other)
    assert one.link(other) == OK
    other.call(drop_slowly)
    assert one.call("unlink", 2, other.address) == OK
    assert other.link(one) == OK
    other.call(pull_one, 1)
    one.call(pull_one, 2)
