"""Bytes on a connection: an 8-byte preamble, then length-prefixed frames. Sans-I/O.

Preamble: ``b"LLMD"``, kind (``C`` control, ``D`` data), format, 1 if all that follows is TLS (else 0), a zero byte. A
stranger (HTTP, garbage) is thus known from its first bytes. Before TLS the listening side sends a preamble back: the
same one, or without TLS if it has none. Control frames: ``uint32`` length (network order), then that many bytes of
msgpack. Nothing longer than the limit in force is ever buffered.
"""

from __future__ import annotations

import enum
import struct
from typing import Final, NamedTuple

PREAMBLE_SIZE: Final = 8
MAX_GREETING: Final = 64 << 10
"""Longest frame before the peer has introduced itself."""
MAX_CONTROL_FRAME: Final = 16 << 20
"""Longest frame of an established control connection (a catalogue of many thousand tensors)."""

_MAGIC: Final = b"LLMD"
_FORMAT: Final = 1
_LENGTH: Final = struct.Struct("!I")
LENGTH_BYTES: Final = _LENGTH.size
CACHE_LINE: Final = 64
"""Bytes of one, on the processors that matter."""


class ProtocolError(Exception):
    """The other side does not speak this protocol; the connection is of no further use."""


class Kind(enum.Enum):
    """What a connection is for."""

    CONTROL = b"C"
    DATA = b"D"


class Preamble(NamedTuple):
    """What the first bytes of a connection tell."""

    kind: Kind
    tls: bool
    """Whether all that follows is TLS."""


def preamble(kind: Kind, *, tls: bool = False) -> bytes:
    """The first bytes on a connection of this kind, sent by the side that connects."""
    return _MAGIC + kind.value + bytes([_FORMAT, tls, 0])


def parse_preamble(data: bytes | bytearray | memoryview) -> Preamble:
    """What a preamble announces.

    Raises:
        ProtocolError: it is not one, or of a format that this version does not know.
    """
    head = bytes(data)
    if len(head) < PREAMBLE_SIZE or head[:4] != _MAGIC:
        message = f"not an llm-datadist connection: it starts with {head!r}"
        raise ProtocolError(message)
    if head[5] != _FORMAT:
        message = f"connection format {head[5]} is not supported, this side speaks format {_FORMAT}"
        raise ProtocolError(message)
    if head[6] > 1:
        message = f"connection security {head[6]} is not supported, this side knows 0 (none) and 1 (TLS)"
        raise ProtocolError(message)
    try:
        return Preamble(Kind(head[4:5]), bool(head[6]))
    except ValueError:
        message = f"unknown connection kind {head[4:5]!r}"
        raise ProtocolError(message) from None


def frame(payload: bytes) -> bytes:
    """One frame with this payload.

    Raises:
        ProtocolError: it is longer than the peer would accept.
    """
    if len(payload) > MAX_CONTROL_FRAME:
        message = f"a control frame of {len(payload)} bytes exceeds the limit of {MAX_CONTROL_FRAME}"
        raise ProtocolError(message)
    return _LENGTH.pack(len(payload)) + payload


class FrameDecoder:
    """Turns received bytes into payloads; ``limit`` is the longest frame that is accepted."""

    def __init__(self, limit: int = MAX_GREETING) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads completed by ``data``.

        Raises:
            ProtocolError: a frame announces more than ``limit`` bytes.
        """
        self._buffer += data
        payloads = []
        at = 0
        while len(self._buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, at)
            if length > self.limit:
                message = f"a frame announces {length} bytes, the limit is {self.limit}"
                raise ProtocolError(message)
            end = at + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payloads.append(bytes(self._buffer[at + _LENGTH.size : end]))
            at = end
        del self._buffer[:at]
        return payloads
