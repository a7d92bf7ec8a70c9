"""Rank tables: who is where, whatever the order, and what is wrong with a table that does not tell."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llm_datadist.engine.ranktable import DEFAULT_PORT, RankTableError, addresses


def server(server_id: str, *devices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"server_id": server_id, "device": list(devices), **more}


def device(rank: Any, **more: Any) -> dict[str, Any]:
    return {"rank_id": rank, "device_id": "0", **more}


def table(*servers: Any) -> str:
    return json.dumps(
        {"server_count": str(len(servers)), "status": "completed", "version": "1.0", "server_list": servers}
    )


TWO_SERVERS = (
    server("10.0.0.1", device("0", device_ip="10.1.0.1"), device("1", device_id="1", device_ip="10.1.0.2")),
    server("10.0.0.2", device("2", device_id="3", device_ip="10.1.0.3"), host_ip="10.2.0.2"),
)


def test_each_member_is_found_by_its_rank() -> None:
    found = addresses(table(*TWO_SERVERS), {7: 0, 2**64 - 1: 2, 8: 1})
    assert found == {
        7: [("10.1.0.1", DEFAULT_PORT), ("10.0.0.1", DEFAULT_PORT)],
        2**64 - 1: [("10.2.0.2", DEFAULT_PORT + 3), ("10.1.0.3", DEFAULT_PORT + 3), ("10.0.0.2", DEFAULT_PORT + 3)],
        8: [("10.1.0.2", DEFAULT_PORT + 1), ("10.0.0.1", DEFAULT_PORT + 1)],
    }
    assert list(found) == [7, 2**64 - 1, 8]


def test_the_order_of_servers_and_devices_does_not_matter() -> None:
    """The two sides of vLLM list the devices in different order."""
    first = server("10.0.0.1", device("0"), device("1", device_id="1"))
    turned = server("10.0.0.1", device("1", device_id="1"), device("0"))
    other = server("10.0.0.9", device("2"))
    ranks = {1: 0, 2: 1, 3: 2}
    assert addresses(table(first, other), ranks) == addresses(table(other, turned), ranks)


def test_only_the_members_asked_for_need_addresses() -> None:
    nowhere = server("node-a", device("1"))
    assert addresses(table(server("127.0.0.1", device("0")), nowhere), {1: 0}) == {1: [("127.0.0.1", DEFAULT_PORT)]}
    assert addresses(table(nowhere), {}) == {}


def test_host_ip_then_device_ip_then_server_id_each_once() -> None:
    member = device("0", device_ip="10.1.0.1", device_port="5")
    assert addresses(table(server("10.0.0.1", member, host_ip="10.2.0.1")), {1: 0})[1] == [
        ("10.2.0.1", 5),
        ("10.1.0.1", 5),
        ("10.0.0.1", 5),
    ]
    same = server("10.0.0.1", device("0", device_ip="10.0.0.1"), host_ip="10.0.0.1")
    assert addresses(table(same), {1: 0})[1] == [("10.0.0.1", DEFAULT_PORT)]


@pytest.mark.parametrize("host", ["node-1", "", None, 5, "10.0.0.256", ["10.0.0.1"], "10.0.0.1:5"])
def test_what_is_no_ip_address_is_passed_over(host: object) -> None:
    member = server("127.0.0.1", device("0", device_ip=host), host_ip=host)
    assert addresses(table(member), {1: 0})[1] == [("127.0.0.1", DEFAULT_PORT)]


@pytest.mark.parametrize("host", ["::1", "2001:db8::5", "fe80::1%lo"])
def test_ipv6(host: str) -> None:
    assert addresses(table(server(host, device("0"))), {1: 0})[1] == [(host, DEFAULT_PORT)]


# Ports


@pytest.mark.parametrize(
    ("fields", "port"),
    [
        ({}, DEFAULT_PORT),
        ({"device_id": "7"}, DEFAULT_PORT + 7),
        ({"device_id": 7}, DEFAULT_PORT + 7),
        ({"device_port": "5000"}, 5000),
        ({"device_port": 5000, "port": "6000", "device_id": "7"}, 5000),
        ({"port": "6000", "device_id": "7"}, 6000),
        ({"port": 65535}, 65535),
        ({"device_port": "1"}, 1),
        ({"device_port": None, "device_id": "2"}, DEFAULT_PORT + 2),
    ],
)
def test_the_port_is_explicit_or_derived_from_the_device(fields: dict[str, Any], port: int) -> None:
    assert addresses(table(server("127.0.0.1", {"rank_id": "0", **fields})), {1: 0})[1] == [("127.0.0.1", port)]


def test_the_default_port_is_documented_as_this() -> None:
    assert DEFAULT_PORT == 26_400


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"device_port": 0}, "gives cluster 9 the port 0"),
        ({"device_port": "65536"}, "gives cluster 9 the port 65536"),
        ({"device_id": str(65_536 - DEFAULT_PORT)}, "gives cluster 9 the port 65536"),
        ({"device_port": "-1"}, "'-1' where a whole number belongs"),
        ({"device_port": "http"}, "'http' where a whole number belongs"),
        ({"device_port": ""}, "'' where a whole number belongs"),
        ({"device_port": 1.5}, "1.5 where a whole number belongs"),
        ({"device_port": True}, "True where a whole number belongs"),
        ({"device_port": "٣"}, "where a whole number belongs"),
        ({"device_id": "x"}, "'x' where a whole number belongs"),
        ({"device_id": None}, "None where a whole number belongs"),
        ({"device_id": [1]}, "where a whole number belongs"),
        ({"device_port": "9" * 5000}, "rank_table"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_ports_that_are_none(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(RankTableError, match=match):
        addresses(table(server("127.0.0.1", {"rank_id": "0", **fields})), {9: 0})


# Members


@pytest.mark.parametrize("rank", ["3", 3])
def test_ranks_are_text_or_numbers(rank: object) -> None:
    assert addresses(table(server("127.0.0.1", device(rank))), {1: 3})


@pytest.mark.parametrize("rank", [1, -1, 30])
def test_a_rank_that_is_not_in_the_table(rank: int) -> None:
    with pytest.raises(RankTableError, match=rf"no device with rank_id {rank} \(cluster 5\), only \['0', '3'\]"):
        addresses(table(server("127.0.0.1", device("0"), device("3"))), {5: rank})


def test_a_device_without_a_rank_is_nobody() -> None:
    with pytest.raises(RankTableError, match="no device with rank_id 0"):
        addresses(table(server("127.0.0.1", {"device_id": "0"})), {5: 0})


def test_a_member_without_any_address() -> None:
    with pytest.raises(RankTableError, match=r"no IP address for cluster 5 \(host_ip, device_ip or server_id\)"):
        addresses(table(server("node-a", device("0", device_ip="node-a"))), {5: 0})


# Not a rank table


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "rank_table is not JSON"),
        ("{", "rank_table is not JSON"),
        ("rank table", "rank_table is not JSON"),
        ("9" * 5000, "rank_table"),
        ("[" * 100_000, "rank_table is not JSON"),
        ("null", "rank_table has no server_list"),
        ("[]", "rank_table has no server_list"),
        ("5", "rank_table has no server_list"),
        ("{}", "rank_table has no server_list"),
        ('{"server_list": {}}', "rank_table has no server_list"),
        ('{"server_list": null}', "rank_table has no server_list"),
        ('{"server_list": [5]}', "server_list has no device list"),
        ('{"server_list": [{}]}', "server_list has no device list"),
        ('{"server_list": [{"device": {}}]}', "server_list has no device list"),
        ('{"server_list": [{"device": [null]}]}', "a device of rank_table is not an object"),
        ('{"server_list": [{"device": ["0"]}]}', "a device of rank_table is not an object"),
        ('{"server_list": []}', "no device with rank_id 0"),
        ('{"server_list": [{"device": []}]}', "no device with rank_id 0"),
    ],
    ids=lambda value: value[:40],
)
def test_what_is_not_a_rank_table(text: str, match: str) -> None:
    with pytest.raises(RankTableError, match=match):
        addresses(text, {1: 0})
