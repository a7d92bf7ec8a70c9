"""What is said where descriptors of shared memory are handed over: one packet each way. Sans-I/O.

The peer shows the token of its link, with a proof (``auth.handover_request``); the owner answers with a ``Handover``,
and with as many descriptors. The connection then stays open without a word: its end is that of one of the two
processes, or of the link.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from llm_datadist.wire.auth import PROOF_BYTES
from llm_datadist.wire.framing import ProtocolError

TOKEN_BYTES: Final = 16
REQUEST_BYTES: Final = TOKEN_BYTES + PROOF_BYTES
MAX_AREAS: Final = 8
MAX_BYTES: Final = 4096
Address = Annotated[int, Meta(ge=0)]  # msgpack itself ends at 2**64 - 1
Length = Annotated[int, Meta(ge=1, le=2**63 - 1)]


class SharedArea(Struct, frozen=True, kw_only=True):
    """A memfd of the owner."""

    base: Address
    """Where the owner has mapped it."""
    length: Length


class Handover(Struct, frozen=True, kw_only=True):
    """Names the descriptors that come with it, in order."""

    areas: Annotated[list[SharedArea], Meta(min_length=1, max_length=MAX_AREAS)]
    """First the region table, then those whose memory the paths may move."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Handover)


def encode(handover: Handover) -> bytes:
    """The packet that carries it."""
    return _encoder.encode(handover)


def decode(packet: bytes) -> Handover:
    """The message in a packet.

    Raises:
        ProtocolError: it is not a valid one.
    """
    try:
        return _decoder.decode(packet)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = f"malformed hand-over: {error}"
        raise ProtocolError(message) from error
