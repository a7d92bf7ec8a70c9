"""Arguments and results of the link calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.configs import LLMClusterInfo, ip_text
from llm_datadist.engine.requests import PeerAddress
from llm_datadist.status import LLMStatusCode, raise_if_false
from llm_datadist.utils import utils

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llm_datadist.configs.addresses import Address

_MAX_COMM_NAME = 128
_MAX_RANKS = 4
_MIN_RANKS = 2


def check_clusters(clusters: Sequence[LLMClusterInfo], timeout: int) -> None:
    """Check what link_clusters and unlink_clusters have in common: the timeout, then the types of the clusters."""
    utils.check_int32("timeout", timeout)
    raise_if_false(timeout > 0, "timeout must be at least 1 ms, but is {}", timeout)
    utils.check_isinstance("clusters", clusters, (list, tuple), LLMClusterInfo, allow_none=False)


def peer_address(cluster: LLMClusterInfo, *, with_locals: bool) -> PeerAddress:
    """The engine's view of a cluster.

    Raises:
        TypeError: no ``remote_cluster_id``, or an address that is none.
    """
    utils.require("remote_cluster_id", cluster.remote_cluster_id, "the cluster id of the peer", TypeError)
    return PeerAddress(
        cluster_id=int(cluster.remote_cluster_id or 0),
        remotes=_literals(cluster.remote_ip_info_list),
        num_locals=len(_literals(cluster.local_ip_info_list)) if with_locals else 0,
    )


def _literals(addresses: Sequence[Address]) -> tuple[tuple[str, int], ...]:
    return tuple((ip_text(ip), int(port)) for ip, port in addresses)


def overall(statuses: list[LLMStatusCode]) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
    """The statuses of the clusters with the overall one before: the last that is no success, if any."""
    if not statuses:
        return LLMStatusCode.LLM_PARAM_INVALID, []
    result = LLMStatusCode.LLM_SUCCESS
    for status in statuses:
        result = status or result  # success is 0
    return result, statuses


def check_link_arguments(comm_name: str, cluster_rank_info: dict[int, int], rank_table: str | None) -> None:
    """Check the arguments of ``LLMDataDist.link``, in the order of its page."""
    utils.check_isinstance("comm_name", comm_name, str, allow_none=False)
    raise_if_false(comm_name, "comm_name is empty: give the link a name")
    raise_if_false(
        len(comm_name) < _MAX_COMM_NAME,
        "comm_name has {} characters, but must have fewer than {}",
        len(comm_name),
        _MAX_COMM_NAME,
    )
    utils.check_isinstance("cluster_rank_info", cluster_rank_info, dict)
    utils.check_dict("cluster_rank_info", cluster_rank_info, int, int)
    text = "cluster_rank_info has {} members, but must have {} to {}"
    size = len(cluster_rank_info)
    raise_if_false(size <= _MAX_RANKS, text, size, _MIN_RANKS, _MAX_RANKS)
    for cluster_id, rank in cluster_rank_info.items():
        utils.check_uint64("cluster id in cluster_rank_info", cluster_id)
        utils.check_uint32(f"rank of cluster {cluster_id}", rank)
    utils.check_isinstance("rank_table", rank_table, str)
    raise_if_false(size >= _MIN_RANKS, text, size, _MIN_RANKS, _MAX_RANKS)
    _check_rank_order(cluster_rank_info)


def _check_rank_order(cluster_rank_info: Mapping[int, int]) -> None:
    ranks = list(cluster_rank_info.values())
    raise_if_false(
        ranks == sorted(ranks),
        "cluster_rank_info must list its members by ascending rank, but is {}",
        cluster_rank_info,
    )
