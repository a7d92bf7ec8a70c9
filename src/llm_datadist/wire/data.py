"""Requests and replies on data connections: fixed headers and binary span tables. Sans-I/O.

A data connection carries one request at a time. Request: header, then the span table (``region``, ``offset``,
``length``, three ``uint64`` a span), then for a write the bytes of all spans in order. Reply: header, then a reason
in UTF-8 if it was refused, else for a read the bytes. A write is answered only after its last byte is in place.
Integers are little-endian.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.wire.framing import ProtocolError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]

MAX_SPANS: Final = 1 << 14
"""Spans of one request; longer transfers are several requests."""
MAX_REASON: Final = 4096
SPAN_BYTES: Final = 24

_MAGIC: Final = 0x4C4C4451
_REQUEST: Final = struct.Struct("<IHHIIQQ")
_REPLY: Final = struct.Struct("<IHHI")
_GREETING: Final = struct.Struct("<16sQB7x")
REQUEST_BYTES: Final = _REQUEST.size
REPLY_BYTES: Final = _REPLY.size
GREETING_BYTES: Final = _GREETING.size


class Op(enum.IntEnum):
    """Direction, seen from the side that asks."""

    READ = 1
    WRITE = 2


class Result(enum.IntEnum):
    """Outcome of a data request. Anything but OK means: no byte was moved, the connection stays in step."""

    OK = 0
    STALE = 1
    """The caller's catalogue is out of date."""
    UNKNOWN_REGION = 2
    OUT_OF_RANGE = 3
    FAULT = 4
    """The owner's memory cannot be accessed."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """First bytes after the preamble of a data connection: which link it belongs to."""

    link_token: bytes
    connection: int
    """Number of the connection in its link, unique per side that starts transfers on it."""
    serve: bool
    """Whether the listening side answers requests on it; else it asks and the connecting side answers."""

    def encode(self) -> bytes:
        """The bytes to send."""
        return _GREETING.pack(self.link_token, self.connection, self.serve)

    @classmethod
    def decode(cls, data: bytes) -> Greeting:
        """Back from bytes.

        Raises:
            ProtocolError: too short or not a valid greeting.
        """
        if len(data) != GREETING_BYTES:
            message = f"a data greeting has {GREETING_BYTES} bytes, not {len(data)}"
            raise ProtocolError(message)
        token, connection, serve = _GREETING.unpack(data)
        if serve not in (0, 1):
            message = f"a data greeting with role {serve}"
            raise ProtocolError(message)
        return cls(token, connection, bool(serve))


@dataclass(frozen=True, slots=True)
class Request:
    """The header of a data request."""

    op: Op
    spans: int
    epoch: int
    """Epoch of the catalogue that the spans were planned with; 0 is "do not check"."""
    total: int
    """Bytes of all spans."""
    timeout_ms: int
    """How long the asker will wait: the owner gives up after that, too."""

    def encode(self) -> bytes:
        """The bytes to send."""
        return _REQUEST.pack(_MAGIC, self.op, 0, self.spans, self.timeout_ms, self.epoch, self.total)

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Request:
        """Back from bytes.

        Raises:
            ProtocolError: not a valid header.
        """
        if len(data) != REQUEST_BYTES:
            message = f"a data request header has {REQUEST_BYTES} bytes, not {len(data)}"
            raise ProtocolError(message)
        magic, op, _, spans, timeout_ms, epoch, total = _REQUEST.unpack(data)
        if magic != _MAGIC or op not in (Op.READ, Op.WRITE) or not 1 <= spans <= MAX_SPANS or total >= 1 << 63:
            message = f"malformed data request: {bytes(data)!r}"
            raise ProtocolError(message)
        return cls(Op(op), spans, epoch, total, timeout_ms)


def encode_spans(regions: U64, offsets: I64, lengths: I64) -> U64:
    """The span table of a request."""
    table = np.empty((len(regions), 3), dtype="<u8")
    table[:, 0], table[:, 1], table[:, 2] = regions, offsets, lengths
    return table


def decode_spans(table: U64, total: int) -> tuple[U64, I64, I64]:
    """Regions, offsets and lengths of a span table whose lengths must add up to ``total``.

    Raises:
        ProtocolError: values that no valid request has.
    """
    if (table[:, 1:] >= np.uint64(1 << 62)).any():
        message = "a data request names an offset or a length beyond 2^62"
        raise ProtocolError(message)
    lengths = table[:, 2].astype(np.int64)
    if sum(lengths.tolist()) != total:
        message = f"the spans of a data request do not add up to the {total} bytes that it announces"
        raise ProtocolError(message)
    return table[:, 0].copy(), table[:, 1].astype(np.int64), lengths


@dataclass(frozen=True, slots=True)
class Reply:
    """The header of a reply."""

    result: Result
    reason_bytes: int = 0

    def encode(self) -> bytes:
        """The bytes to send."""
        return _REPLY.pack(_MAGIC, self.result, 0, self.reason_bytes)

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Reply:
        """Back from bytes.

        Raises:
            ProtocolError: not a valid header.
        """
        if len(data) != REPLY_BYTES:
            message = f"a data reply header has {REPLY_BYTES} bytes, not {len(data)}"
            raise ProtocolError(message)
        magic, result, _, size = _REPLY.unpack(data)
        if magic != _MAGIC or result not in tuple(Result) or size > MAX_REASON:
            message = f"malformed data reply: {bytes(data)!r}"
            raise ProtocolError(message)
        return cls(Result(result), size)
