"""A control connection: messages both ways, requests with replies, never blocking its peer or its owner."""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Final

from llm_datadist.net.loop import READ, WRITE, guarded
from llm_datadist.net.security import TlsError, peer_host, tls_of
from llm_datadist.utils import log
from llm_datadist.wire import framing, messages
from llm_datadist.wire.framing import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.net.loop import Loop
    from llm_datadist.net.tls import Tls
    from llm_datadist.utils.deadline import Deadline
    from llm_datadist.wire.messages import Body

_READ_SIZE: Final = 256 << 10
_MAX_OUTBOX: Final = 4 * framing.MAX_CONTROL_FRAME
_SEND_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL  # an embedding program may not ignore SIGPIPE
_KEEPALIVE_S: Final = 10
_USER_TIMEOUT_MS: Final = 60_000


class ChannelClosedError(Exception):
    """The connection is gone; the text says why."""


class ReplyTimeoutError(Exception):
    """No reply came in time. The connection may still be fine."""


class _Waiter:
    __slots__ = ("body", "event")

    def __init__(self) -> None:
        self.event = threading.Event()
        self.body: Body | None = None


class Channel:
    """One control connection, watched by a loop.

    ``on_message(channel, body, request_id)`` is called on the loop's thread for everything that is not a reply;
    ``request_id`` is 0 for messages that expect none. ``on_close(channel, reason)`` is called once, on the loop's
    thread.

    Who must not let the peer see the end of the connection before some work has ended says ``hold``, and ``hang_up``
    after that; so the end that one side sees means that the other side's work has ended. ``on_over`` is called once,
    on the loop's thread, when this side has hung up and, if it waits for that, so has the peer.
    """

    def __init__(self, sock: socket.socket, loop: Loop) -> None:
        self._sock = sock
        self._tls = tls_of(sock)
        """Used under the lock, so that what is encrypted is sent in the same order."""
        self._loop = loop
        self._lock = threading.Lock()
        self._decoder = framing.FrameDecoder()
        self._outbox = bytearray()
        self._watching_writes = False
        self._waiters: dict[int, _Waiter] = {}
        self._ids = itertools.count(1)
        self._close_reason: str | None = None
        self._held = False
        self._over = threading.Event()
        self._lingering = False
        self._left_loop = False
        self.heard_at: float = time.monotonic()
        """When anything last came from the peer."""
        self.on_over: Callable[[], object] = lambda: None
        self.on_message: Callable[[Channel, Body, int], object] = lambda _channel, _body, _id: None
        self.on_close: Callable[[Channel, str], object] = lambda _channel, _reason: None
        self.remote_address: tuple[str, int] = _peer_of(sock)
        """(ip, port) of the other end."""
        sock.settimeout(None)  # calls here say MSG_DONTWAIT themselves
        _tune(sock)

    @property
    def closed(self) -> bool:
        """Whether the connection is gone."""
        return self._close_reason is not None

    @property
    def remote_host(self) -> str:
        """Host of the other end, for people."""
        return peer_host(self._sock)

    @property
    def over(self) -> bool:
        """Whether the peer has hung up, or nobody waits for it to do so."""
        return self._over.is_set()

    def wait_over(self, deadline: Deadline) -> bool:
        """Wait until the peer has hung up; whether that happened in time."""
        return self._over.wait(deadline.remaining())

    def start(self) -> None:
        """Begin to watch the connection; set the callbacks first."""
        self._loop.call_soon(self._watch)
        if self._tls is not None:
            self._loop.call_soon(lambda: self._understand(b""))  # what came with the end of the handshake

    def trust(self) -> None:
        """The peer has introduced itself: accept long frames."""
        self._decoder.limit = framing.MAX_CONTROL_FRAME

    def hold(self) -> None:
        """From now on the peer sees the end of the connection only after ``hang_up``."""
        self._held = True

    def send(self, body: Body, *, reply_to: int = 0, answered: bool = False) -> None:
        """Send a message that expects no reply, or one that is ``answered`` but whose answer nobody reads.

        Raises:
            ChannelClosedError: the connection is gone.
        """
        self._send(messages.Envelope(body=body, id=next(self._ids) if answered else 0, reply_to=reply_to))

    def request(self, body: Body, deadline: Deadline) -> Body:
        """Send a request and wait for its reply.

        Raises:
            ChannelClosedError: the connection is gone.
            ReplyTimeoutError: no reply by the deadline.
        """
        waiter = _Waiter()
        request_id = next(self._ids)
        with self._lock:
            self._waiters[request_id] = waiter
        try:
            self._send(messages.Envelope(body=body, id=request_id))
            answered = waiter.event.wait(deadline.remaining())
        finally:
            with self._lock:
                self._waiters.pop(request_id, None)
        if waiter.body is not None:
            return waiter.body
        if answered or self._close_reason is not None:
            raise ChannelClosedError(self._close_reason or "closed")
        message = f"no reply to {type(body).__name__} in time"
        raise ReplyTimeoutError(message)

    def reply(self, body: Body, request_id: int) -> None:
        """Answer a request; if the asker is gone, nobody needs the answer."""
        with contextlib.suppress(ChannelClosedError):
            self.send(body, reply_to=request_id)

    def close(self, reason: str) -> None:
        """Close the connection once what was sent is on its way; idempotent, returns at once."""
        with self._lock:
            if self._close_reason is not None:
                return
            self._close_reason = reason
            waiters = list(self._waiters.values())
            with contextlib.suppress(OSError):
                if self._outbox:
                    self._sock.send(self._outbox, _SEND_FLAGS)
                if not self._held:
                    self._sock.shutdown(socket.SHUT_RDWR)
            held = self._held
        for waiter in waiters:
            waiter.event.set()
        self._loop.call_soon(functools.partial(self._closed_on_loop, held=held))

    def hang_up(self, *, wait: bool) -> None:
        """After ``close``: let the peer see the end; if told to ``wait``, go on until it has hung up, too."""
        if self._loop.ended:  # a last transfer outlives the engine
            self._left_loop = True
            self._hang_up(wait=False)
        else:
            self._loop.call_soon(functools.partial(self._hang_up, wait=wait))

    def abandon(self) -> None:
        """After ``close``: wait for the peer no longer."""
        self._over.set()
        self._loop.call_soon(self._stop_lingering)

    def _send(self, envelope: messages.Envelope) -> None:
        data = framing.frame(messages.encode(envelope))
        overflow = False
        with self._lock:
            if self._close_reason is not None:
                raise ChannelClosedError(self._close_reason)
            if self._tls is not None:
                try:
                    data = self._tls.encrypt(data)
                except TlsError as error:
                    # The loop has read why, as a rule, and is about to close the connection with that reason.
                    self._loop.call_soon(functools.partial(self.close, f"TLS: {error}"))
                    data = b""
            if not self._outbox:
                try:
                    data = data[self._sock.send(data, _SEND_FLAGS) :]
                except BlockingIOError:
                    pass
                except OSError:
                    # The loop sees the broken connection and closes it with the right reason.
                    data = b""
            self._outbox += data
            overflow = len(self._outbox) > _MAX_OUTBOX
            flush = bool(self._outbox) and not self._watching_writes
        if overflow:
            self.close("the peer does not read its control messages")
        elif flush:
            self._loop.call_soon(self._watch)

    def _watch(self) -> None:
        if self._loop.ended:  # nobody would ever read a reply
            self.close("this engine has been finalized")
        with self._lock:
            if self._close_reason is not None:
                return
            self._watching_writes = bool(self._outbox)
            watched = self._loop.watch(self._sock, READ | WRITE if self._watching_writes else READ, self._ready)
        if not watched:
            self.close("this engine has been finalized")

    def _ready(self, events: int) -> None:
        if events & WRITE:
            self._flush()
        if events & READ:
            self._receive()

    def _flush(self) -> None:
        with self._lock:
            if self._close_reason is not None:
                return
            with contextlib.suppress(BlockingIOError, OSError):
                del self._outbox[: self._sock.send(self._outbox, _SEND_FLAGS)]
        self._watch()

    def _receive(self) -> None:
        try:
            data = self._sock.recv(_READ_SIZE, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._over.set()
            self.close(f"connection lost: {error.strerror}")
            return
        if not data:
            self._over.set()
            self.close("the peer closed the connection")
            return
        self.heard_at = time.monotonic()
        self._understand(data)

    def _understand(self, data: bytes) -> None:
        try:
            if self._tls is not None:
                data = self._decrypt(self._tls, data)
            for payload in self._decoder.feed(data):
                envelope = messages.decode(payload)
                guarded(functools.partial(self._dispatch, envelope))
        except ProtocolError as error:
            host = self.remote_host
            log.warn_rarely(f"control {host}", "control connection of %s closed: %s", host, error)
            self.close(str(error))
        except TlsError as error:
            self.close(f"TLS: {error}")

    def _decrypt(self, tls: Tls, data: bytes) -> bytes:
        with self._lock:
            tls.feed(data)
            plain = tls.read()
            answer = tls.outgoing()  # of TLS itself, when the peer has changed its key
            self._outbox += answer
        if answer:
            self._watch()
        return plain

    def _dispatch(self, envelope: messages.Envelope) -> None:
        if envelope.reply_to:
            with self._lock:
                waiter = self._waiters.pop(envelope.reply_to, None)
            if waiter is not None:
                waiter.body = envelope.body
                waiter.event.set()
        elif not self.closed:
            self.on_message(self, envelope.body, envelope.id)

    def _closed_on_loop(self, *, held: bool) -> None:
        self._loop.unwatch(self._sock)
        self._left_loop = True
        if not held:
            self._over.set()
            self._sock.close()
        self.on_close(self, self._close_reason or "closed")
        if not held:  # nothing lingers, even if somebody has held it meanwhile
            self.on_over()

    def _hang_up(self, *, wait: bool) -> None:
        if not self._left_loop:  # another thread closes it at this very moment
            self.hang_up(wait=wait)
        elif self._sock.fileno() >= 0 and not self._lingering:
            self._lingering = True
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)
            waits = wait and not self.over and self._loop.watch(self._sock, READ, lambda _events: self._linger())
            if not waits:
                self._stop_lingering()

    def _linger(self) -> None:
        """Read what nobody needs any more, until the peer hangs up."""
        try:
            more = self._sock.recv(_READ_SIZE, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            more = b""
        if not more:
            self._stop_lingering()

    def _stop_lingering(self) -> None:
        if self._lingering:
            self._lingering = False
            self._loop.unwatch(self._sock)
            self._sock.close()
            self._over.set()
            self.on_over()


def _peer_of(sock: socket.socket) -> tuple[str, int]:
    try:
        name = sock.getpeername()
    except OSError:  # it is gone already; the loop will find that out
        return "unknown", 0
    return str(name[0]), int(name[1])


def _tune(sock: socket.socket) -> None:
    """Small messages at once; a host that vanished is noticed within about a minute."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def set_timeouts(sock: socket.socket, seconds: float) -> None:
    """Let blocking calls on ``sock`` end after ``seconds``, in the kernel: also those made through ctypes."""
    whole = max(seconds, 0.001)  # zero would mean "for ever"
    value = struct.pack("ll", int(whole), int(whole % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
