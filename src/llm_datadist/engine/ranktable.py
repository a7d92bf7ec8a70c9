"""Rank tables of ``link``: where each member of a group can be reached.

A member is the ``device`` entry whose ``rank_id`` is its rank, wherever it stands in the table. It is reached at the
first of ``host_ip`` of its server, its own ``device_ip``, ``server_id`` of its server that is an IP address and
works, on the port of its device entry (``device_port``, or ``port``), else on ``DEFAULT_PORT + device_id``.
"""

from __future__ import annotations

import ipaddress
import json
from typing import TYPE_CHECKING, Final

from llm_datadist.utils.numbers import small_number

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from llm_datadist.net.address import Address

DEFAULT_PORT: Final = 26_400
_MAX_PORT: Final = 65_535


class RankTableError(ValueError):
    """The table does not tell how to reach a member."""


def addresses(rank_table: str, ranks: Mapping[int, int]) -> dict[int, list[Address]]:
    """For each cluster of ``ranks`` (cluster id -> rank): the addresses at which it can be reached, best first.

    Raises:
        RankTableError: not a rank table, or a member is missing or has no usable address.
    """
    try:
        table = json.loads(rank_table)
    except (ValueError, RecursionError) as error:
        message = f"rank_table is not JSON: {error}"
        raise RankTableError(message) from error
    members = {str(device.get("rank_id")): (server, device) for server, device in _devices(table)}
    found = {}
    for cluster_id, rank in ranks.items():
        if str(rank) not in members:
            message = f"rank_table has no device with rank_id {rank} (cluster {cluster_id}), only {sorted(members)}"
            raise RankTableError(message)
        server, device = members[str(rank)]
        found[cluster_id] = _member(cluster_id, server, device)
    return found


def _devices(table: object) -> Iterator[tuple[Mapping[str, object], Mapping[str, object]]]:
    servers = table.get("server_list") if isinstance(table, dict) else None
    if not isinstance(servers, list):
        message = "rank_table has no server_list"
        raise RankTableError(message)
    for server in servers:
        devices = server.get("device") if isinstance(server, dict) else None
        if not isinstance(devices, list):
            message = "an entry of rank_table's server_list has no device list"
            raise RankTableError(message)
        for device in devices:
            if not isinstance(device, dict):
                message = "a device of rank_table is not an object"
                raise RankTableError(message)
            yield server, device


def _member(cluster_id: int, server: Mapping[str, object], device: Mapping[str, object]) -> list[Address]:
    hosts = []
    for text in (server.get("host_ip"), device.get("device_ip"), server.get("server_id")):
        host = str(text)
        try:
            ipaddress.ip_address(host)
        except ValueError:
            continue
        if host not in hosts:
            hosts.append(host)
    if not hosts:
        message = f"rank_table names no IP address for cluster {cluster_id} (host_ip, device_ip or server_id)"
        raise RankTableError(message)
    explicit = device.get("device_port", device.get("port"))
    port = _number(explicit) if explicit is not None else DEFAULT_PORT + _number(device.get("device_id", 0))
    if not 0 < port <= _MAX_PORT:
        message = f"rank_table gives cluster {cluster_id} the port {port}"
        raise RankTableError(message)
    return [(host, port) for host in hosts]


def _number(value: object) -> int:
    number = small_number(str(value))
    if number is None:
        message = f"rank_table has {value!r} where a whole number belongs"
        raise RankTableError(message)
    return number
