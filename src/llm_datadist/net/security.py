"""What stands between a connection and a link: where it comes from, TLS, and how the two ends say so."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llm_datadist.net.address import resolve

if TYPE_CHECKING:
    from llm_datadist.net.tls import Tls

_ANY_PORT: Final = 9


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files."""

    cert: str
    key: str
    ca: str


class TlsError(Exception):
    """A TLS handshake failed, what came was altered, or the other side uses no TLS."""


def tls_of(sock: socket.socket) -> Tls | None:
    """The TLS state of a connection, if it has one."""
    state: Tls | None = getattr(sock, "tls", None)
    return state


def on_this_host(host: str) -> bool:
    """Whether an IP address is one of this host (of its network namespace), as the kernel routes it.

    Loopback addresses are; so are those whose packets would leave with the very same source address. Nothing is sent.
    """
    bare = ipaddress.ip_address(host.split("%", maxsplit=1)[0])
    if bare.is_loopback or bare.is_unspecified:
        return True
    family, where = resolve((host, _ANY_PORT))
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(where)
        return bool(sock.getsockname()[0] == where[0])
    return False


def from_this_host(sock: socket.socket) -> bool:
    """Whether the other end of a connection is on this host; False if it has gone already."""
    try:
        here, there = sock.getsockname()[0], sock.getpeername()[0]
    except OSError:
        return False
    return bool(here == there) or on_this_host(there)


def peer_host(sock: socket.socket) -> str:
    """Host at the other end of a connection, for people."""
    try:
        name = sock.getpeername()
    except OSError:
        return "somebody who has gone"
    return str(name[0]) if isinstance(name, tuple) else "a process of this host"
