"""Listening and connecting: sockets in, nothing known about links."""

from __future__ import annotations

import abc
import contextlib
import functools
import socket
import threading
from typing import TYPE_CHECKING, Final

from llm_datadist.net.address import resolve, text
from llm_datadist.net.forks import making, own
from llm_datadist.net.loop import READ
from llm_datadist.net.security import TlsError, peer_host
from llm_datadist.net.waiting import share_of_descriptors
from llm_datadist.utils import limits, log
from llm_datadist.wire import framing
from llm_datadist.wire.data import GREETING_BYTES, Greeting
from llm_datadist.wire.framing import Kind, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.net.address import Address, SockAddr
    from llm_datadist.net.loop import Loop, Timer
    from llm_datadist.net.tls import Tls, TlsContexts

_BACKLOG: Final = 512
_MAX_STRANGERS: Final = 512
_PATIENCE_S: Final = 10.0
"""How long a connection may take to say what it is for."""
_PAUSE_S: Final = 0.2
_TLS_READ: Final = 16 << 10
_GREETED_BYTES: Final = framing.PREAMBLE_SIZE + GREETING_BYTES
_CLOSE_S: Final = 2.0


class _Stranger:
    """A connection that has not said yet what it is for."""

    def __init__(self, patience: Timer) -> None:
        self.said = bytearray()
        self.patience = patience


class Acceptor(abc.ABC):
    """Accepts connections on one socket and learns what each is for.

    A connection that says nothing for ten seconds is dropped, and of too many such strangers the oldest goes first.
    """

    def __init__(self, sock: socket.socket, where: SockAddr | bytes, name: str, loop: Loop) -> None:
        """Bind and listen; ``name`` is the address for people.

        Raises:
            OSError: the address cannot be bound; the socket is closed then.
        """
        self._sock = sock
        self._name = name
        self._loop = loop
        self._strangers: dict[socket.socket, _Stranger] = {}
        self._most_strangers = share_of_descriptors(_MAX_STRANGERS)
        self._starved = False
        """Whether it has been said that connections cannot be accepted at the moment."""
        try:
            sock.settimeout(0)
            sock.bind(where)
            sock.listen(_BACKLOG)
        except BaseException:
            sock.close()
            raise
        loop.call_soon(self._watch)

    def close(self) -> None:
        """Stop listening at once (the address is free when this returns) and drop strangers; idempotent."""
        done = threading.Event()
        self._loop.call_soon(self._close_on_loop)
        self._loop.call_soon(done.set)
        if not self._loop.in_loop():
            done.wait(_CLOSE_S)

    @abc.abstractmethod
    def _wants(self, said: bytearray) -> int:
        """How many bytes to receive of a stranger who has ``said`` this already."""

    @abc.abstractmethod
    def _understand(self, sock: socket.socket, said: bytearray) -> None:
        """A stranger has said more: ``_let_go`` once it is known what the connection is for.

        Raises:
            ProtocolError: it does not belong here; it is dropped.
        """

    def _admits(self, sock: socket.socket) -> bool:
        """Whether this connection may say anything."""
        del sock
        return True

    def _close_on_loop(self) -> None:
        self._loop.unwatch(self._sock)
        self._sock.close()
        for sock in list(self._strangers):
            self._drop(sock)

    def _watch(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.watch(self._sock, READ, lambda _events: self._accept())

    def _accept(self) -> None:
        while True:
            try:
                with making:
                    sock = own(self._sock.accept()[0])
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors, say: leave the connection in the backlog and try again in a moment.
                if self._sock.fileno() >= 0:
                    if not self._starved:
                        log.error("cannot accept connections on %s: %s", self._name, limits.with_hint(error))
                    self._starved = True
                    self._loop.unwatch(self._sock)
                    self._loop.call_later(_PAUSE_S, self._watch)
                return
            self._starved = False
            if not self._admits(sock):
                sock.close()
                continue
            if len(self._strangers) >= self._most_strangers:
                self._drop(next(iter(self._strangers)))
            sock.settimeout(0)
            patience = self._loop.call_later(_PATIENCE_S, functools.partial(self._drop, sock))
            self._strangers[sock] = _Stranger(patience)
            self._loop.watch(sock, READ, functools.partial(self._hear, sock))

    def _hear(self, sock: socket.socket, _events: int) -> None:
        stranger = self._strangers.get(sock)
        if stranger is None:
            return
        said = stranger.said
        try:
            more = sock.recv(self._wants(said))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            more = b""
        said += more
        if not more:
            self._drop(sock)
            return
        try:
            self._understand(sock, said)
        except ProtocolError as error:
            self._complain(sock, str(error))
            self._drop(sock)

    def _complain(self, sock: socket.socket, reason: str) -> None:
        where = peer_host(sock)
        log.warn_rarely(f"{self._name} {where}", "connection to %s from %s dropped: %s", self._name, where, reason)

    def _let_go(self, sock: socket.socket) -> None:
        """It is a stranger no longer."""
        self._strangers.pop(sock).patience.cancel()
        self._loop.unwatch(sock)
        sock.settimeout(None)

    def _drop(self, sock: socket.socket) -> None:
        stranger = self._strangers.pop(sock, None)
        if stranger is not None:
            stranger.patience.cancel()
            self._loop.unwatch(sock)
            sock.close()


class Listener(Acceptor):
    """Accepts connections on one address and sorts them by their preamble.

    ``on_control(sock)`` and ``on_data(sock, greeting)`` are called on the loop's thread and own the socket from then
    on. With ``tls``, those that ask for TLS are ``TlsSocket``s whose handshake is over; whether one without it is
    wanted is for the callbacks to say.
    """

    def __init__(
        self,
        address: Address,
        loop: Loop,
        on_control: Callable[[socket.socket], object],
        on_data: Callable[[socket.socket, Greeting], object],
        tls: TlsContexts | None = None,
    ) -> None:
        """Bind and listen.

        Raises:
            OSError: the address cannot be bound.
            ValueError: it is not an IP literal.
        """
        family, sockaddr = resolve(address)
        self._on_control = on_control
        self._on_data = on_data
        self._tls = tls
        with making:
            sock = own(socket.socket(family, socket.SOCK_STREAM))
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        except BaseException:
            sock.close()
            raise
        super().__init__(sock, sockaddr, text(address), loop)
        self.address: Address = (address[0], int(sock.getsockname()[1]))
        self._name = text(self.address)

    def _wants(self, said: bytearray) -> int:
        whole = framing.PREAMBLE_SIZE if len(said) < framing.PREAMBLE_SIZE else _GREETED_BYTES
        return whole - len(said)

    def _understand(self, sock: socket.socket, said: bytearray) -> None:
        if len(said) < framing.PREAMBLE_SIZE:
            return
        kind, wants_tls = framing.parse_preamble(said[: framing.PREAMBLE_SIZE])
        if wants_tls:
            self._begin_tls(sock, kind)
        elif kind is Kind.CONTROL:
            self._let_go(sock)
            self._on_control(sock)
        elif len(said) == _GREETED_BYTES:
            greeting = Greeting.decode(bytes(said[framing.PREAMBLE_SIZE :]))
            self._let_go(sock)
            self._on_data(sock, greeting)

    def _begin_tls(self, sock: socket.socket, kind: Kind) -> None:
        answer = framing.preamble(kind, tls=self._tls is not None)
        with contextlib.suppress(OSError):
            sock.send(answer, socket.MSG_NOSIGNAL)
        if self._tls is None:
            message = (
                "it asks for TLS, which this side does not use: set tls_cert, tls_key, tls_ca on both sides or neither"
            )
            raise ProtocolError(message)
        self._loop.watch(sock, READ, functools.partial(self._shake_hands, sock, kind, self._tls.listening()))

    def _shake_hands(self, sock: socket.socket, kind: Kind, tls: Tls, _events: int) -> None:
        """It is a stranger still: the limits of number and time go on."""
        try:
            data = sock.recv(_TLS_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._drop(sock)
            return
        try:
            tls.feed(data)
            over = tls.shake_hands()
            self._send(sock, tls.outgoing())
            if over:
                self._welcome(sock, kind, tls)
        except (TlsError, ProtocolError) as error:
            self._complain(sock, f"TLS: {error}")
            self._send(sock, tls.outgoing())
            self._turn_away(sock)

    def _welcome(self, sock: socket.socket, kind: Kind, tls: Tls) -> None:
        from llm_datadist.net.tls import TlsSocket  # noqa: PLC0415 - loads ssl

        if kind is Kind.CONTROL:
            self._let_go(sock)
            self._on_control(TlsSocket.adopt(sock, tls))
            return
        said = self._strangers[sock].said
        room = memoryview(bytearray(_GREETED_BYTES - len(said)))
        said += room[: tls.read_into(room)]
        if len(said) == _GREETED_BYTES:
            greeting = Greeting.decode(bytes(said[framing.PREAMBLE_SIZE :]))
            self._let_go(sock)
            self._on_data(TlsSocket.adopt(sock, tls), greeting)

    def _send(self, sock: socket.socket, data: bytes) -> None:
        """A flight of a handshake: less than the buffer of a new connection."""
        with contextlib.suppress(OSError):
            if data:
                sock.send(data, socket.MSG_NOSIGNAL)

    def _turn_away(self, sock: socket.socket) -> None:
        """Let it read the alert: were it closed with bytes unread, the kernel would throw the alert away."""

        def ignore(_events: int) -> None:
            try:
                if sock.recv(_TLS_READ):
                    return
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                pass
            self._drop(sock)

        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        self._loop.watch(sock, READ, ignore)
