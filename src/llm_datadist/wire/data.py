"""Requests and replies on data connections: fixed headers and binary tables. Sans-I/O.

Request: header, then the spans as a product (``layout.spans``): for each tensor its region and a start in it, then for
each run its offset and length, all ``uint64``; then zeros to a multiple of 64 bytes; then for a write the bytes of all
spans in order. Reply: header, then a reason in UTF-8 if it was refused, else for a read the bytes. A write is answered
only after its last byte is in place. Requests may follow each other without waiting; they are answered in order.
Integers are little-endian.

What comes before bytes is always whole cache lines: the kernel copies them through pages that it fills one after the
other, and does so much more slowly if they do not begin with a line (2 cores, loopback: 4.8 against 7.5 GB/s).
"""

from __future__ import annotations

import enum
import hmac
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from llm_datadist.wire.auth import PROOF_BYTES, data_answer, data_proof
from llm_datadist.wire.framing import CACHE_LINE, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]

MAX_SPANS: Final = 1 << 13
"""Spans of one request, and so the most tensors and the most runs; longer transfers are several requests."""
MAX_TOTAL: Final = 1 << 30
"""Bytes of one request."""
MAX_REASON: Final = 4096
ROW_BYTES: Final = 16

_MAGIC: Final = 0x4C4C4451
_REQUEST: Final = struct.Struct("<IHHIIQQQ")
_REPLY: Final = struct.Struct("<IHHI52x")
_ROW: Final = struct.Struct("<QQ")
_GREETING: Final = struct.Struct("<16sQB7x32s")
REQUEST_BYTES: Final = _REQUEST.size
REPLY_BYTES: Final = _REPLY.size
GREETING_BYTES: Final = _GREETING.size
ANSWER_BYTES: Final = PROOF_BYTES
"""The listening side answers a greeting with its own proof; no request goes either way before that."""


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


_OPS: Final = {op.value: op for op in Op}
_RESULTS: Final = {result.value: result for result in Result}
_LIMIT: Final = 1 << 62
_BEYOND: Final = "a data request names a start, an offset or a length beyond 2^62"
_SUM: Final = "the spans of a data request do not add up to the bytes that it announces"


@dataclass(frozen=True, slots=True)
class Greeting:
    """First bytes after the preamble of a data connection: which link it belongs to."""

    link_token: bytes
    connection: int
    """Number of the connection in its link, unique per side that starts transfers on it."""
    serve: bool
    """Whether the listening side answers requests on it; else it asks and the connecting side answers."""
    proof: bytes
    """That its sender knows the key of the link."""

    @classmethod
    def make(cls, key: bytes, link_token: bytes, connection: int, *, serve: bool) -> Greeting:
        """The greeting of a link with this key."""
        return cls(link_token, connection, serve, data_proof(key, link_token, connection, serve=serve))

    def proves(self, key: bytes) -> bool:
        """Whether its sender knows the key of the link."""
        expected = data_proof(key, self.link_token, self.connection, serve=self.serve)
        return hmac.compare_digest(expected, self.proof)

    def answer(self, key: bytes) -> bytes:
        """What the listening side answers."""
        return data_answer(key, self.link_token, self.connection, serve=self.serve)

    def encode(self) -> bytes:
        """The bytes to send."""
        return _GREETING.pack(self.link_token, self.connection, self.serve, self.proof)

    @classmethod
    def decode(cls, data: bytes) -> Greeting:
        """Back from bytes.

        Raises:
            ProtocolError: too short or not a valid greeting.
        """
        if len(data) != GREETING_BYTES:
            message = f"a data greeting has {GREETING_BYTES} bytes, not {len(data)}"
            raise ProtocolError(message)
        token, connection, serve, proof = _GREETING.unpack(data)
        if serve not in (0, 1):
            message = f"a data greeting with role {serve}"
            raise ProtocolError(message)
        return cls(token, connection, bool(serve), proof)


class Request(NamedTuple):
    """The header of a data request."""

    op: Op
    tensors: int
    runs: int
    epoch: int
    """Epoch of the catalogue that the spans were planned with; 0 is "do not check"."""
    total: int
    """Bytes of all spans."""
    timeout_ms: int
    """How long the asker will wait: the owner gives up after that, too."""
    transfer_id: int = 0
    """Names the transfer in what both sides say of it; 0 if it has no name."""

    @property
    def spans(self) -> int:
        """Number of spans."""
        return self.tensors * self.runs

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables that follow."""
        return ROW_BYTES * (self.tensors + self.runs)

    @property
    def padding(self) -> int:
        """Zeros that follow the tables."""
        return -(REQUEST_BYTES + self.table_bytes) % CACHE_LINE

    def encode(self) -> bytes:
        """The bytes to send."""
        sizes = self.tensors, self.runs, self.timeout_ms
        return _REQUEST.pack(_MAGIC, self.op, *sizes, self.epoch, self.total, self.transfer_id)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Request:
        """Back from bytes.

        Raises:
            ProtocolError: not a valid header.
        """
        if len(data) != REQUEST_BYTES:
            message = f"a data request header has {REQUEST_BYTES} bytes, not {len(data)}"
            raise ProtocolError(message)
        magic, op, tensors, runs, timeout_ms, epoch, total, transfer_id = _REQUEST.unpack(data)
        if magic != _MAGIC or op not in _OPS or not 0 < tensors * runs <= MAX_SPANS or total > MAX_TOTAL:
            message = f"malformed data request: {bytes(data)!r}"
            raise ProtocolError(message)
        return cls(_OPS[op], tensors, runs, epoch, total, timeout_ms, transfer_id)


def encode_spans(regions: U64, starts: I64, offsets: I64, lengths: I64) -> bytes:
    """The tables of a request."""
    table = np.empty((len(regions) + len(offsets), 2), dtype="<u8")
    table[: len(regions), 0], table[: len(regions), 1] = regions, starts
    table[len(regions) :, 0], table[len(regions) :, 1] = offsets, lengths
    return table.tobytes()


def decode_spans(data: memoryview, request: Request) -> tuple[U64, I64, I64, I64]:
    """Regions and starts of the tensors, offsets and lengths of the runs, from the tables of a request.

    Raises:
        ProtocolError: values that no valid request has.
    """
    table: U64 = np.frombuffer(data, dtype="<u8").reshape(-1, 2)
    tensors, runs = table[: request.tensors], table[request.tensors :]
    if (tensors[:, 1] >= np.uint64(_LIMIT)).any() or (runs >= np.uint64(_LIMIT)).any():
        raise ProtocolError(_BEYOND)
    lengths = runs[:, 1].astype(np.int64)
    if request.tensors * sum(lengths.tolist()) != request.total:
        raise ProtocolError(_SUM)
    return tensors[:, 0].copy(), tensors[:, 1].astype(np.int64), runs[:, 0].astype(np.int64), lengths


def decode_whole(data: bytes) -> tuple[Request, tuple[U64, I64, I64, I64]]:
    """Header and tables of a request that arrives as a whole, as ``decode_spans``.

    Raises:
        ProtocolError: not a valid request.
    """
    request = Request.decode(memoryview(data)[:REQUEST_BYTES])
    tables = memoryview(data)[REQUEST_BYTES:]
    if len(tables) != request.table_bytes:
        message = f"the tables of a request have {len(tables)} bytes instead of {request.table_bytes}"
        raise ProtocolError(message)
    return request, decode_spans(tables, request)


def encode_few(request: Request, regions: Sequence[int], offsets: Sequence[int], length: int) -> bytes:
    """A whole request of few spans, padding included: runs of equal length from the starts of regions."""
    words = [word for region in regions for word in (region, 0)]
    words += [word for offset in offsets for word in (offset, length)]
    return request.encode() + struct.pack(f"<{len(words)}Q{request.padding}x", *words)


def decode_few(data: memoryview, request: Request) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Tensors as (region, start) and runs as (offset, length), as ``decode_spans``."""
    rows = list(_ROW.iter_unpack(data))
    tensors, runs = rows[: request.tensors], rows[request.tensors :]
    lengths = [length for _, length in runs]
    if max([*lengths, *[start for _, start in tensors], *[offset for offset, _ in runs]]) >= _LIMIT:
        raise ProtocolError(_BEYOND)
    if request.tensors * sum(lengths) != request.total:
        raise ProtocolError(_SUM)
    return tensors, runs


class Reply(NamedTuple):
    """The header of a reply."""

    result: Result
    reason_bytes: int = 0

    def encode(self) -> bytes:
        """The bytes to send."""
        return _REPLY.pack(_MAGIC, self.result, 0, self.reason_bytes)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Reply:
        """Back from bytes.

        Raises:
            ProtocolError: not a valid header.
        """
        if len(data) != REPLY_BYTES:
            message = f"a data reply header has {REPLY_BYTES} bytes, not {len(data)}"
            raise ProtocolError(message)
        magic, result, _, size = _REPLY.unpack(data)
        if magic != _MAGIC or result not in _RESULTS or size > MAX_REASON:
            message = f"malformed data reply: {bytes(data)!r}"
            raise ProtocolError(message)
        return cls(_RESULTS[result], size)
