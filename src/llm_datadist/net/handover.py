"""Descriptors of shared memory for peers on the same host, over an abstract Unix socket.

Both sides make sure that the other one runs as the same user, or as root, before they say anything.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import secrets
import socket
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from llm_datadist.memory.shared import Area
from llm_datadist.net.channel import set_timeouts
from llm_datadist.net.forks import making, own
from llm_datadist.net.listener import Acceptor
from llm_datadist.net.loop import READ
from llm_datadist.utils import limits, log
from llm_datadist.wire.framing import ProtocolError
from llm_datadist.wire.handover import (
    MAX_AREAS,
    MAX_BYTES,
    REQUEST_BYTES,
    TOKEN_BYTES,
    Handover,
    SharedArea,
    decode,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from llm_datadist.net.loop import Loop
    from llm_datadist.utils.deadline import Deadline

_CREDENTIALS: Final = struct.Struct("iII")
_FLAGS: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class HandoverServer(Acceptor):
    """The owner's end. A peer gets the descriptors once for each link to which it proves to belong."""

    def __init__(self, areas: Sequence[Area], loop: Loop, known: Callable[[bytes], bool]) -> None:
        """Listen under a random name.

        ``known`` tells whether a request (``auth.handover_request``) is that of a link; it is called on the loop's
        thread.

        Raises:
            OSError: the system gives no such socket.
        """
        self.name: str = f"llm-datadist-{secrets.token_hex(16)}"
        self._known = known
        self._packet = encode(Handover(areas=[SharedArea(base=area.base, length=area.length) for area in areas]))
        self._descriptors = array.array("i", [area.fd for area in areas])
        self._given: dict[bytes, socket.socket] = {}
        with making:
            sock = own(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        super().__init__(sock, _address(self.name), self.name, loop)

    def give_up(self, token: bytes) -> None:
        """The link has ended: close its connection, if there is one."""
        self._loop.call_soon(lambda: self._end(token))

    def _close_on_loop(self) -> None:
        super()._close_on_loop()
        for token in list(self._given):
            self._end(token)

    def _admits(self, sock: socket.socket) -> bool:
        user = _user_of(sock)
        if user in _trusted():
            return True
        log.warn_rarely(f"{self._name} {user}", "connection to %s dropped: it came from user %d", self._name, user)
        return False

    def _wants(self, said: bytearray) -> int:
        del said  # a packet comes whole; one that is too long is no request
        return REQUEST_BYTES + 1

    def _understand(self, sock: socket.socket, said: bytearray) -> None:
        request = bytes(said)
        token = request[:TOKEN_BYTES]
        if not self._known(request) or token in self._given:
            message = "not the proof of a link that has not got its descriptors yet"
            raise ProtocolError(message)
        self._let_go(sock)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, self._descriptors)
        try:
            sock.sendmsg([self._packet], [rights], _FLAGS)
        except OSError as error:
            log.warn("cannot hand over descriptors: %s", limits.with_hint(error))
            sock.close()
            return
        self._given[token] = sock
        self._loop.watch(sock, READ, lambda _events: self._end(token))

    def _end(self, token: bytes) -> None:
        sock = self._given.pop(token, None)
        if sock is not None:
            self._loop.unwatch(sock)
            sock.close()


class Parcel(NamedTuple):
    """What came over a hand-over connection."""

    connection: socket.socket
    """Becomes readable when the owner's process, or the link, has ended."""
    areas: list[Area]
    """Their ``fd`` are descriptors of this process."""

    def close_descriptors(self) -> None:
        """Close the descriptors of the areas."""
        _close(area.fd for area in self.areas)


def fetch(name: str, request: bytes, deadline: Deadline) -> Parcel:
    """Get the descriptors of the owner that listens under ``name``, with the request of the link.

    Raises:
        OSError: nobody listens there, or nothing came by the deadline.
        ProtocolError: the owner runs as somebody else, refused, or sent something else.
    """
    with making:
        sock = own(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    try:
        set_timeouts(sock, deadline.remaining())  # a full backlog is waited for, too
        sock.connect(_address(name))
        user = _user_of(sock)
        if user not in _trusted():
            message = f"the peer runs as user {user}, this process as {os.geteuid()}"
            raise ProtocolError(message)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused already, as is seen below
            sock.send(request, socket.MSG_NOSIGNAL)
        set_timeouts(sock, deadline.remaining())
        return Parcel(sock, _receive(sock))
    except BaseException:
        sock.close()
        raise


def _receive(sock: socket.socket) -> list[Area]:
    room = socket.CMSG_SPACE(MAX_AREAS * array.array("i").itemsize)
    try:
        packet, ancillary, flags, _ = sock.recvmsg(MAX_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        packet, ancillary, flags = b"", [], 0
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    try:
        if not packet:
            message = "the peer refused: it runs as another user, or does not know the link (any more)"
            raise ProtocolError(message)
        announced = decode(packet).areas
        if flags & socket.MSG_CTRUNC and len(descriptors) < len(announced):  # the kernel could not install them all
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(descriptors) != len(announced):
            message = f"{len(announced)} descriptors were announced, {len(descriptors)} came"
            raise ProtocolError(message)
    except BaseException:
        _close(descriptors)
        raise
    return [Area(fd, area.base, area.length) for fd, area in zip(descriptors, announced, strict=True)]


def _close(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        with contextlib.suppress(OSError):
            os.close(fd)


def _address(name: str) -> bytes:
    """In the abstract namespace: nothing to delete, and nobody can put anything else in its place."""
    return b"\0" + name.encode()


def _user_of(sock: socket.socket) -> int:
    """The user who runs the process at the other end."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(credentials)[1]
    return user


def _trusted() -> tuple[int, int]:
    """This user, and root."""
    return os.geteuid(), 0
