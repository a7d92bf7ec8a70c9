"""IP literals and ports: one place that knows IPv4, IPv6 and scope ids."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final, Union

SockAddr = Union[tuple[str, int], tuple[str, int, int, int]]  # noqa: UP007 - an alias is evaluated, also by Python 3.10
Address = tuple[str, int]
_MAX_INDEX_DIGITS: Final = 9  # an interface index is far below 2**32


def resolve(address: Address) -> tuple[socket.AddressFamily, SockAddr]:
    """Family and socket address of an (ip literal, port); scope ids (``fe80::1%eth0``) are kept.

    Raises:
        ValueError: not an IP literal, or no such scope.
    """
    host, port = address
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        message = f"{host!r} is not an IPv4 or IPv6 address"
        raise ValueError(message) from None
    if isinstance(parsed, ipaddress.IPv4Address):
        return socket.AF_INET, (host, port)
    scope = parsed.scope_id
    if scope is None:
        index = 0
    elif scope.isascii() and scope.isdigit() and len(scope) <= _MAX_INDEX_DIGITS:
        index = int(scope)
    else:
        try:
            index = socket.if_nametoindex(scope)
        except (OSError, ValueError):
            message = f"{host!r} names the network interface {scope!r}, which does not exist"
            raise ValueError(message) from None
    return socket.AF_INET6, (host.split("%")[0], port, 0, index)


def text(address: SockAddr | Address) -> str:
    """``ip:port`` for people; IPv6 in brackets."""
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
