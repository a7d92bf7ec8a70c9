"""A data connection with TLS: the bytes go through a buffer of this process, where they are encrypted and decrypted.

Between the buffer and registered memory the kernel copies (``memory.move``), so that memory which is not mapped any
more is an error here, too, and many small ranges cost one system call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.memory import iovec
from llm_datadist.memory.move import MemoryFaultError, copy
from llm_datadist.memory.syscalls import MAX_IOVECS
from llm_datadist.net.security import TlsError
from llm_datadist.paths.base import ConnectionLostError, PathFaultError
from llm_datadist.paths.tcp_stream import Stream, iovec_of

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from llm_datadist.net.tls import Tls
    from llm_datadist.utils.deadline import Deadline

    U64 = NDArray[np.uint64]

_CHUNK: Final = 256 << 10
"""Encrypted and sent at once: fits into the processor's cache."""
_NOTHING: Final = memoryview(b"")


class TlsStream(Stream):
    """See ``Stream``; the inherited methods move ciphertext."""

    def __init__(self, sock: socket.socket, tls: Tls) -> None:
        super().__init__(sock)
        self._tls = tls
        self._sealed, self._clear = (np.empty(_CHUNK, dtype=np.uint8).data for _ in range(2))

    @property
    def worn(self) -> bool:
        """See ``Stream.worn``."""
        return self._tls.worn

    def post(self, data: bytes) -> None:
        """See ``Stream.post``."""
        super().post(self._encrypted(data))

    def send_bytes(self, data: bytes | memoryview, deadline: Deadline) -> None:
        """See ``Stream.send_bytes``."""
        super().send_bytes(self._encrypted(data), deadline)

    def send(self, memory: U64, deadline: Deadline) -> None:
        """See ``Stream.send``."""
        for piece in _pieces(memory):
            room = self._clear[: int(piece[:, 1].sum())]
            _copy(room, piece, into=False)
            self.send_bytes(room, deadline)

    def receive(self, memory: U64, deadline: Deadline, begin: memoryview = _NOTHING) -> None:
        """See ``Stream.receive``."""
        for piece in _pieces(memory):
            room = self._clear[: int(piece[:, 1].sum())]
            done = min(len(begin), len(room))
            room[:done], begin = begin[:done], begin[done:]
            while done < len(room):
                done += self.receive_into(room[done:], deadline)
            _copy(room, piece, into=True)

    def send_few(self, words: Sequence[int], total: int, deadline: Deadline) -> None:
        """See ``Stream.send_few``."""
        del total
        self.send(np.array(words, dtype=np.uint64).reshape(-1, 2), deadline)

    def receive_few(self, words: Sequence[int], total: int, deadline: Deadline) -> None:
        """See ``Stream.receive_few``."""
        del total
        self.receive(np.array(words, dtype=np.uint64).reshape(-1, 2), deadline)

    def receive_into(self, room: memoryview, deadline: Deadline) -> int:
        """See ``Stream.receive_into``."""
        while not (done := self._decrypted(room)):
            self._tls.feed(self._sealed[: super().receive_into(self._sealed, deadline)])
        return done

    def spin_into(self, room: memoryview) -> int:
        """See ``Stream.spin_into``."""
        done = self._decrypted(room)
        if not done:
            self._tls.feed(self._sealed[: super().spin_into(self._sealed)])
            done = self._decrypted(room)
        return done

    def _encrypted(self, data: bytes | memoryview) -> bytes:
        try:
            return self._tls.encrypt(data)
        except TlsError as error:
            raise _lost(error) from error

    def _decrypted(self, room: memoryview) -> int:
        try:
            return self._tls.read_into(room)
        except TlsError as error:
            raise _lost(error) from error


def _lost(error: TlsError) -> ConnectionLostError:
    return ConnectionLostError(f"data connection lost, TLS: {error}")


def _pieces(memory: U64) -> Iterator[U64]:
    """Parts of an iovec array, in order, that fill the buffer."""
    cursor = iovec.Cursor(memory)
    while cursor.left:
        rest = memory[cursor.index : cursor.index + MAX_IOVECS]
        ends = np.cumsum(rest[:, 1].astype(np.int64))
        count = int(np.searchsorted(ends, _CHUNK)) + 1
        piece = rest[:count].copy()
        size = int(ends[min(count, len(ends)) - 1])
        if size > _CHUNK:
            piece[-1, 1] -= np.uint64(size - _CHUNK)
            size = _CHUNK
        yield piece
        cursor.advance(size)


def _copy(room: memoryview, memory: U64, *, into: bool) -> None:
    """Between the buffer and the ranges of an iovec array of the same size."""
    lengths = memory[:, 1].astype(np.int64)
    buffer = iovec.Side(iovec_of(room)[:, 0], np.cumsum(lengths) - lengths)
    ranges = iovec.Side(np.zeros(1, dtype=np.uint64), memory[:, 0].view(np.int64))
    try:
        copy(*(ranges, buffer) if into else (buffer, ranges), lengths)
    except MemoryFaultError as error:
        raise PathFaultError(str(error)) from error
