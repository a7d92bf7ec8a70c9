"""A data connection with TLS: the bytes go through a buffer of this process, where they are encrypted and decrypted.

Between the buffer and registered memory the kernel copies (``memory.move``), so that memory which is not mapped any
more is an error here, too, and many small ranges cost one system call.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.memory import iovec
from llm_datadist.memory.move import MemoryFaultError, copy, copy_one
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
_RECORD: Final = 17 << 10
"""Bytes of the longest record and more: what TLS may hold back of what has come, because it is not complete."""
_LONG: Final = 64 << 10
"""A range of this length goes through the buffer by itself."""
_NOTHING: Final = memoryview(b"")


class TlsStream(Stream):
    """See ``Stream``; the inherited methods move ciphertext."""

    def __init__(self, sock: socket.socket, tls: Tls) -> None:
        super().__init__(sock)
        self._tls = tls
        self._sealed, self._clear = (np.empty(_CHUNK, dtype=np.uint8).data for _ in range(2))

    def beside_peer(self) -> contextlib.AbstractContextManager[None]:
        """Anywhere: each end has much to compute, and does best on a core of its own."""
        return contextlib.nullcontext()

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
        for piece, size in _pieces(memory):
            room = self._clear[:size]
            _copy(room, piece, into=False)
            self.send_bytes(room, deadline)

    def receive(self, memory: U64, deadline: Deadline, begin: memoryview = _NOTHING) -> None:
        """See ``Stream.receive``."""
        for piece, size in _pieces(memory):
            room = self._clear[:size]
            done = min(len(begin), size)
            room[:done], begin = begin[:done], begin[done:]
            while done < size:
                got = self._decrypted(room[done:])
                if not got:
                    self._await(size - done - _RECORD, deadline)
                done += got
            _copy(room, piece, into=True)

    def send_few(self, words: Sequence[int], total: int, deadline: Deadline) -> None:
        """See ``Stream.send_few``."""
        del total
        self.send(np.array(words, dtype=np.uint64).reshape(-1, 2), deadline)

    def receive_few(self, words: Sequence[int], total: int, deadline: Deadline) -> None:
        """See ``Stream.receive_few``."""
        del total
        self.receive(np.array(words, dtype=np.uint64).reshape(-1, 2), deadline)

    def _await(self, least: int, deadline: Deadline) -> None:
        """Receive at least so many bytes of ciphertext, which must be on their way, with few system calls."""
        if least <= 0:
            self._tls.feed(self._sealed[: super().receive_into(self._sealed, deadline)])
            return
        super().receive(iovec_of(self._sealed[:least]), deadline)
        self._tls.feed(self._sealed[:least])

    def receive_into(self, room: memoryview, deadline: Deadline) -> int:
        """See ``Stream.receive_into``."""
        while not (done := self._decrypted(room)):
            self._await(0, deadline)
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


def _pieces(memory: U64) -> Iterator[tuple[U64, int]]:
    """Parts of an iovec array, in order, that fit into the buffer, and their sizes."""
    at = 0
    while at < len(memory):
        address, length = memory[at].tolist()
        if length >= _LONG:
            for offset in range(0, length, _CHUNK):
                size = min(_CHUNK, length - offset)
                yield np.array([[address + offset, size]], dtype=np.uint64), size
            at += 1
            continue
        ends = np.cumsum(memory[at : at + MAX_IOVECS, 1].astype(np.int64))
        count = int(np.searchsorted(ends, _CHUNK, side="right"))
        if size := int(ends[count - 1]):
            yield memory[at : at + count], size
        at += count


def _copy(room: memoryview, memory: U64, *, into: bool) -> None:
    """Between the buffer and the ranges of an iovec array of the same size."""
    buffer = iovec_of(room)
    try:
        if len(memory) == 1:
            copy_one(*(memory, buffer) if into else (buffer, memory))
            return
        lengths = memory[:, 1].astype(np.int64)
        packed = iovec.Side(buffer[:, 0], np.cumsum(lengths) - lengths)
        ranges = iovec.Side(np.zeros(1, dtype=np.uint64), memory[:, 0].view(np.int64))
        copy(*(ranges, packed) if into else (packed, ranges), lengths)
    except MemoryFaultError as error:
        raise PathFaultError(str(error)) from error
