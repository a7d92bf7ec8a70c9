"""One peer, as programs name it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.configs.addresses import trans_str_ip
from llm_datadist.configs.role import LLMRole
from llm_datadist.utils import utils

if TYPE_CHECKING:
    from llm_datadist.configs.addresses import Address


class LLMClusterInfo:
    """One peer, for ``link_clusters`` and ``unlink_clusters``."""

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | int | None = None
        self._local_ip_info_list: list[Address] = []
        self._remote_ip_info_list: list[Address] = []

    @property
    def remote_cluster_id(self) -> int | None:
        """Cluster id of the peer, unsigned 64 bits; must be set. TypeError or ValueError when it is not one."""
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, value: int) -> None:
        utils.check_uint64("remote_cluster_id", value)
        self._remote_cluster_id = value

    @property
    def remote_role_type(self) -> LLMRole | int | None:
        """Role of the peer; accepted, not used. TypeError unless LLMRole, int or None."""
        return self._remote_role_type

    @remote_role_type.setter
    def remote_role_type(self, value: LLMRole | int | None) -> None:
        utils.check_isinstance("remote_role_type", value, (LLMRole, int))
        self._remote_role_type = value

    @property
    def local_ip_info_list(self) -> list[Address]:
        """The live list of (ip, port) of this side: ip as :func:`trans_str_ip` gives it."""
        return self._local_ip_info_list

    @property
    def remote_ip_info_list(self) -> list[Address]:
        """The live list of (ip, port) of the peer: ip as :func:`trans_str_ip` gives it."""
        return self._remote_ip_info_list

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address of this side; see :meth:`append_remote_ip_info`. Port 0 is usual."""
        self._local_ip_info_list.append(_address(ip, port))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Add an address the peer listens on.

        Args:
            ip: an IPv4 or IPv6 literal, or the little-endian int of an IPv4 address.
            port: 0 to 65535.

        Raises:
            TypeError: wrong type of ip or port.
            ValueError: port out of range.
            RuntimeError: ip is text but no IP literal.
        """
        self._remote_ip_info_list.append(_address(ip, port))


def _address(ip: str | int, port: int) -> Address:
    utils.check_isinstance("ip", ip, (str, int))
    utils.check_uint16("port", port)
    return trans_str_ip(ip), port
