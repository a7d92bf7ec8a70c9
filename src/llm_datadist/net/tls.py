"""TLS 1.3 with certificates of both sides: bytes in, bytes out, and sockets that carry its state.

Import it where TLS is used only: it loads the ``ssl`` module.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import TYPE_CHECKING, Final, cast

from llm_datadist.net.forks import making, own
from llm_datadist.net.security import TlsError

if TYPE_CHECKING:
    from llm_datadist.net.security import TlsFiles
    from llm_datadist.utils.deadline import Deadline

_READ_BYTES: Final = 64 << 10
_SHORTEST_S: Final = 0.001
WORN_BYTES: Final = 1 << 37
"""After so many bytes with one key a connection is replaced: AES-GCM is good for 2^24.5 records, about 2^38.5 bytes."""


class TlsContexts:
    """What this side shows, and whom it trusts: every certificate of its CA, of either role."""

    def __init__(self, files: TlsFiles) -> None:
        """Load the files.

        Raises:
            ValueError: one of them cannot be used; the text names it.
        """
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, files)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, files)
        self._server.num_tickets = 0  # nothing is resumed: each connection proves anew

    def connecting(self) -> Tls:
        """The state of a new connection that this side opens."""
        return Tls(self._client, server_side=False)

    def listening(self) -> Tls:
        """The state of a new connection that this side has accepted."""
        return Tls(self._server, server_side=True)


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False  # peers are known by addresses; membership of the CA is what counts
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(files.ca)
    except (OSError, ValueError) as error:
        message = f"the CA certificates {files.ca!r} cannot be used: {_reason(error)}"
        raise ValueError(message) from error
    try:
        context.load_cert_chain(files.cert, files.key, _no_password)
    except (OSError, ValueError) as error:
        message = f"the certificate {files.cert!r} with the key {files.key!r} cannot be used: {_reason(error)}"
        raise ValueError(message) from error
    return context


def _no_password() -> str:
    """Never ask on the terminal."""
    message = "the key is encrypted: use one without a password, readable by its owner only"
    raise ValueError(message)


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of the other side is not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)


class Tls:
    """The TLS state of one connection, without I/O. For one thread at a time."""

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._moved = 0

    @property
    def worn(self) -> bool:
        """Whether the connection has moved so much that another one should take its place."""
        return self._moved >= WORN_BYTES

    def shake_hands(self) -> bool:
        """Go on with the handshake as far as what came allows; whether it is over.

        Raises:
            TlsError: it failed; ``outgoing`` has the alert for the other side.
        """
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise TlsError(_reason(error)) from error
        return True

    def feed(self, data: bytes | memoryview) -> None:
        """Bytes have come."""
        self._moved += len(data)
        self._incoming.write(data)

    def outgoing(self) -> bytes:
        """Bytes to send."""
        data = self._outgoing.read()
        self._moved += len(data)
        return data

    def encrypt(self, data: bytes | memoryview) -> bytes:
        """The bytes to send for these.

        Raises:
            TlsError: the connection is of no further use.
        """
        if not data:
            return b""
        try:
            self._object.write(data)
        except ssl.SSLError as error:
            raise TlsError(_reason(error)) from error
        return self.outgoing()

    def read_into(self, room: memoryview) -> int:
        """As much of what came as is complete and fits; 0 if more must come first.

        Raises:
            TlsError: it was altered, or the other side has ended the connection.
        """
        done = 0
        try:
            while done < len(room):
                count = cast("int", self._object.read(len(room) - done, room[done:]))
                if not count:
                    message = "the other side has ended it"
                    raise TlsError(message)
                done += count
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise TlsError(_reason(error)) from error
        return done

    def read(self) -> bytes:
        """All of what came that is complete.

        Raises:
            TlsError: as for ``read_into``.
        """
        room = memoryview(bytearray(_READ_BYTES))
        parts = []
        while done := self.read_into(room):
            parts.append(bytes(room[:done]))
        return b"".join(parts)


class TlsSocket(socket.socket):
    """A connection whose handshake is over. Its own methods move ciphertext: what is said goes through ``tls``."""

    tls: Tls

    @classmethod
    def adopt(cls, sock: socket.socket, tls: Tls) -> TlsSocket:
        """Take over a socket, which must not be used any more."""
        timeout = sock.gettimeout()
        with making:
            made = cls(fileno=sock.detach())
            own(made)
        made.settimeout(timeout)
        made.tls = tls
        return made


def secure(sock: socket.socket, tls: Tls, deadline: Deadline) -> TlsSocket:
    """Make the handshake over a connected socket; blocks.

    Raises:
        TlsError: it failed.
        OSError: the connection was lost, or (``TimeoutError``) nothing came by the deadline.
    """
    try:
        while not tls.shake_hands():
            sock.settimeout(max(deadline.remaining(), _SHORTEST_S))
            sock.sendall(tls.outgoing())
            data = sock.recv(_READ_BYTES)
            if not data:
                message = "the peer has closed the connection in the middle of the handshake"
                raise TlsError(message)
            tls.feed(data)
    except TlsError:
        with contextlib.suppress(OSError):
            sock.sendall(tls.outgoing())  # an alert, if there is one
        raise
    sock.settimeout(max(deadline.remaining(), _SHORTEST_S))
    sock.sendall(tls.outgoing())
    sock.settimeout(None)
    return TlsSocket.adopt(sock, tls)
