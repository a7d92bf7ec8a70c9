"""Connecting, and the first words over a new connection, before a channel or a path takes it over. Blocking."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from llm_datadist.net.address import resolve
from llm_datadist.net.forks import making, own
from llm_datadist.net.security import TlsError, tls_of
from llm_datadist.wire.framing import PREAMBLE_SIZE, Kind, ProtocolError, parse_preamble, preamble

if TYPE_CHECKING:
    from llm_datadist.net.address import Address
    from llm_datadist.net.tls import TlsContexts
    from llm_datadist.utils.deadline import Deadline

_SHORTEST_S: Final = 0.001
_TLS_READ: Final = 4096
_NO_TLS: Final = "it uses no TLS: set tls_cert, tls_key and tls_ca there, too, or on neither side"


def connect(address: Address, greeting: bytes, deadline: Deadline) -> socket.socket:
    """A blocking socket connected to ``address``, on which ``greeting`` has been sent.

    Raises:
        OSError: refused, unreachable, or (``TimeoutError``) not by the deadline.
        ValueError: ``address`` is not an IP literal.
    """
    family, sockaddr = resolve(address)
    with making:
        sock = own(socket.socket(family, socket.SOCK_STREAM))
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(max(deadline.remaining(), _SHORTEST_S))
        sock.connect(sockaddr)
        sock.sendall(greeting)
        sock.settimeout(None)
    except BaseException:
        sock.close()
        raise
    return sock


def dial(address: Address, kind: Kind, deadline: Deadline, tls: TlsContexts | None) -> socket.socket:
    """As ``connect``; the preamble has been sent, and with ``tls`` the handshake is over.

    Raises:
        TlsError: the peer uses no TLS, or the handshake failed.
        OSError, ValueError: as ``connect``.
    """
    sock = connect(address, preamble(kind, tls=tls is not None), deadline)
    if tls is None:
        return sock
    from llm_datadist.net.tls import secure  # noqa: PLC0415 - loads ssl

    try:
        try:
            agreed = parse_preamble(hear(sock, PREAMBLE_SIZE, deadline)).tls
        except EOFError as error:
            message = "it has closed the connection when it was asked for TLS; its log may say why"
            raise TlsError(message) from error
        except ProtocolError:
            agreed = False
        if not agreed:
            raise TlsError(_NO_TLS)
        return secure(sock, tls.connecting(), deadline)
    except BaseException:
        sock.close()
        raise


def tell(sock: socket.socket, data: bytes, deadline: Deadline) -> None:
    """Send everything.

    Raises:
        TlsError, OSError: it was not sent by the deadline.
    """
    tls = tls_of(sock)
    sock.settimeout(max(deadline.remaining(), _SHORTEST_S))
    sock.sendall(data if tls is None else tls.encrypt(data))
    sock.settimeout(None)


def send_first(sock: socket.socket, data: bytes) -> None:
    """Send a few bytes on a connection on which nothing has been sent: its buffer takes them without waiting.

    Raises:
        TlsError, OSError: they were not sent.
    """
    tls = tls_of(sock)
    sock.send(data if tls is None else tls.encrypt(data), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def hear(sock: socket.socket, size: int, deadline: Deadline) -> bytes:
    """The next ``size`` bytes.

    Raises:
        TlsError, OSError: they did not come by the deadline.
        EOFError: the peer has closed the connection.
    """
    tls = tls_of(sock)
    data = bytearray(size)
    room = memoryview(data)
    while room:
        done = 0 if tls is None else tls.read_into(room)
        if not done:
            sock.settimeout(max(deadline.remaining(), _SHORTEST_S))
            more = sock.recv(len(room) if tls is None else _TLS_READ)
            if not more:
                message = "the peer has closed the connection"
                raise EOFError(message)
            if tls is None:
                done = len(more)
                room[:done] = more
            else:
                tls.feed(more)
        room = room[done:]
    sock.settimeout(None)
    return bytes(data)
