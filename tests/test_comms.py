"""Links by rank table."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from expect import expect
from llm_datadist import LLMStatusCode, RegisterMemStatus
from llm_datadist.utils.deadline import Deadline
from peers import TIMEOUT_S, Node, Peer
from test_clients import link_by_table, link_only, unlink_comm
from test_links import free_port, pull_one, with_caches
from until import until

if TYPE_CHECKING:
    from llm_datadist.engine.link import Link
    from peers import Peers

OK = RegisterMemStatus.OK
FAILED = RegisterMemStatus.FAILED


def table(devices: list[dict[str, Any]], **server: str) -> str:
    """A rank table of one server."""
    entries = [{"rank_id": str(rank), **device} for rank, device in enumerate(devices)]
    return json.dumps({"version": "1.0", "server_list": [{"server_id": "node-a", **server, "device": entries}]})


def link_all(members: list[Peer], rank_table: str, name: str = "group") -> list[RegisterMemStatus]:
    """Every member links; their final statuses."""
    ranks = {member.cluster_id: rank for rank, member in enumerate(members)}
    futures = [member.begin(link_by_table, name, ranks, rank_table) for member in members]
    return [future.result(TIMEOUT_S) for future in futures]


def status(node: Node) -> RegisterMemStatus:
    """In the child: of the last link."""
    return node.datadist.query_register_mem_status(node.extra["comm"])


def members_of(peers: Peers, count: int, **properties: Any) -> list[Peer]:
    """Peers that listen nowhere by themselves."""
    properties = {"listen": False, "link_total_time": 30, **properties}
    made = [peers.make(20 + rank, **properties) for rank in range(count)]
    with_caches(*made)
    return made


@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
def test_three_members_are_linked_pairwise(peers: Peers, paths: str) -> None:
    """Every pair can transfer, in both directions."""
    members = members_of(peers, 3, paths=paths)
    devices = [{"device_ip": "127.0.0.1", "device_id": "0", "device_port": str(free_port())} for _ in members]
    assert link_all(members, table(devices)) == [OK] * 3
    for one in members:
        for other in members:
            if one is not other:
                one.call(pull_one, other.cluster_id)
    for future in [member.begin(unlink_comm) for member in members]:
        future.result(TIMEOUT_S)
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: members[0].call(pull_one, members[1].cluster_id))


def end_all_at_once(node: Node) -> int:
    """In the child: unlink; no link ends before the end of the other has begun. How many deadlines they have had."""
    engine = node.datadist._engine
    assert engine is not None
    ender, together, deadlines = engine._core.ender, threading.Barrier(2, timeout=TIMEOUT_S), set[Deadline]()
    real = ender.end

    def end(link: Link, deadline: Deadline) -> None:
        together.wait()
        deadlines.add(deadline)
        real(link, deadline)

    ender.end = end  # type: ignore[method-assign]
    unlink_comm(node)
    return len(deadlines)


def test_members_are_unlinked_at_once(peers: Peers) -> None:
    """Were several stalled, each would take its time, one after the other."""
    members = members_of(peers, 3)
    devices = [{"device_ip": "127.0.0.1", "device_port": free_port()} for _ in members]
    assert link_all(members, table(devices)) == [OK] * 3
    assert members[0].call(end_all_at_once) == 1
    for other in members[1:]:
        expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda other=other: members[0].call(pull_one, other.cluster_id))


def test_port_follows_from_the_device_id(peers: Peers) -> None:
    """26400 + device_id, at the server's host_ip, also over IPv6."""
    for host in ("127.0.0.1", "::1"):
        members = members_of(peers, 2)
        devices = [{"device_id": str(free_port() - 26_400)} for _ in members]
        assert link_all(members, table(devices, host_ip=host)) == [OK] * 2
        members[0].call(pull_one, members[1].cluster_id)


def test_first_address_that_works_is_used(peers: Peers) -> None:
    """host_ip of another network, then device_ip."""
    members = members_of(peers, 2)
    devices = [{"device_ip": "127.0.0.1", "device_port": free_port()} for _ in members]
    assert link_all(members, table(devices, host_ip="192.0.2.1")) == [OK] * 2


def test_member_that_listens_already(peers: Peers) -> None:
    """Its configured address is the one in the table, so nothing else has to be opened."""
    first = peers.make(20, link_total_time=30)
    second = peers.make(21, listen=False, link_total_time=30)
    with_caches(first, second)
    assert first.address is not None
    devices = [{"device_ip": "127.0.0.1", "port": first.address[1]}, {"device_ip": "127.0.0.1"}]
    assert link_all([first, second], table(devices)) == [OK] * 2
    first.call(pull_one, 21)


def test_missing_member_fails_in_time(peers: Peers) -> None:
    """PREPARING becomes FAILED within link_total_time, whether this side waits or connects."""
    for rank in (0, 1):
        member = members_of(peers, 1, link_total_time=1)[0]
        devices = [{"device_ip": "127.0.0.1", "device_port": free_port()} for _ in range(2)]
        ranks = {member.cluster_id: 0, 99: 1} if rank == 0 else {98: 0, member.cluster_id: 1}
        begin = time.monotonic()
        assert member.call(link_by_table, "group", ranks, table(devices)) == FAILED
        assert time.monotonic() - begin < 10
        member.call(unlink_comm)
        expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda member=member: member.call(status))


def test_modes_that_differ_fail_on_both_sides(peers: Peers) -> None:
    """At once, not after link_total_time."""
    one = members_of(peers, 1, link_total_time=50)[0]
    two = peers.make(21, listen=False, link_total_time=50, enable_remote_cache_accessible=False)
    devices = [{"device_ip": "127.0.0.1", "device_port": free_port()} for _ in range(2)]
    begin = time.monotonic()
    assert link_all([one, two], table(devices)) == [FAILED] * 2
    assert time.monotonic() - begin < 20


def test_lost_member_makes_it_failed(peers: Peers) -> None:
    """Also after it has been OK; after unlink and a new link it works again."""
    one, two = members_of(peers, 2)
    devices = [{"device_ip": "127.0.0.1", "device_port": free_port()} for _ in range(2)]
    assert link_all([one, two], table(devices)) == [OK] * 2
    two.process.kill()
    until(lambda: one.call(status) == FAILED)
    one.call(unlink_comm)
    again = peers.make(21, listen=False, link_total_time=30)
    with_caches(again)
    assert link_all([one, again], table(devices)) == [OK] * 2
    one.call(pull_one, 21)


def test_groups_share_a_link(peers: Peers) -> None:
    """The link ends with the last group that uses it, unless link_clusters made it."""
    one, two = members_of(peers, 2)
    devices = [{"device_ip": "127.0.0.1", "device_port": free_port()} for _ in range(2)]
    for name in ("a", "b"):
        assert link_all([one, two], table(devices), name) == [OK] * 2
    for member in (one, two):
        member.call(unlink_comm)
    one.call(pull_one, 21)
    third = peers.make(22, link_total_time=30)
    with_caches(third)
    assert one.link(third) == LLMStatusCode.LLM_SUCCESS
    assert link_all([one, third], table(devices), "c") == [OK] * 2
    for future in [member.begin(unlink_comm) for member in (one, third)]:
        future.result(TIMEOUT_S)
    one.call(pull_one, 22)
    third.call(pull_one, 20)


def test_tables_that_do_not_fit(peers: Peers) -> None:
    """LLM_PARAM_INVALID with the reason; a failing call leaves nothing behind."""
    member = members_of(peers, 1)[0]
    ranks = {20: 0, 21: 1}
    for bad in (None, "", "{", "{}", table([{}, {}]), table([{"device_ip": "127.0.0.1"}])):
        expect(LLMStatusCode.LLM_PARAM_INVALID, lambda bad=bad: member.call(link_only, "x", ranks, bad))
    good = table([{"device_ip": "127.0.0.1", "device_port": free_port()}] * 2)
    expect(LLMStatusCode.LLM_PARAM_INVALID, lambda: member.call(link_only, "x", {7: 0, 8: 1}, good))
    far = table([{"device_ip": "192.0.2.1"}] * 2)
    expect(LLMStatusCode.LLM_LINK_FAILED, lambda: member.call(link_only, "x", ranks, far))


def test_no_rank_tables_with_hixl(peers: Peers) -> None:
    """As in the original."""
    member = peers.make(20, local_comm_res="", transfer_backend="hixl")
    good = table([{"device_ip": "127.0.0.1"}] * 2)
    expect(LLMStatusCode.LLM_FEATURE_NOT_ENABLED, lambda: member.call(link_only, "x", {20: 0, 21: 1}, good))


def test_finalize_ends_rank_table_links_on_the_side_that_listens(peers: Peers) -> None:
    """While one is still being made, and when it is there."""
    for complete in (False, True):
        members = members_of(peers, 2)
        devices = [{"device_ip": "127.0.0.1", "device_port": free_port()} for _ in members]
        if complete:
            assert link_all(members, table(devices)) == [OK] * 2
        else:
            members[0].call(link_only, "group", {20: 0, 21: 1}, table(devices))
        members[0].call("finalize")
