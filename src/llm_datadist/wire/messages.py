"""The control messages: typed msgpack maps, so that fields can be added without breaking older peers. Sans-I/O.

Every message travels in an ``Envelope``. A request carries an id that its reply repeats in ``reply_to``.
"""

from __future__ import annotations

from typing import Annotated, Final, Union

import msgspec
from msgspec import Meta, Struct

from llm_datadist.wire.framing import CACHE_LINE, LENGTH_BYTES, ProtocolError

U64 = Annotated[int, Meta(ge=0)]  # msgpack itself ends at 2**64 - 1
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
I64 = Annotated[int, Meta(le=2**63 - 1)]  # msgpack itself begins at -2**63
Size = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(max_length=128)]
Token = Annotated[bytes, Meta(min_length=16, max_length=16)]
Nonce = Annotated[bytes, Meta(min_length=32, max_length=32)]

NONCE_BYTES: Final = 32
MAX_INTRODUCTION: Final = 32 << 10
"""Bytes of an encoded ``Hello`` or of the answer to it."""
MAX_NOTIFICATION: Final = 64 << 10
"""Bytes of a message of the application."""
MAX_AGENT_REGIONS: Final = 512
"""Whose keys are told at a time."""
MAX_AGENT_METADATA: Final = 1 << 20
VERSION_MIN: Final = 1
VERSION_MAX: Final = 1


class Identity(Struct, frozen=True, kw_only=True):
    """Who a process is: a cluster id, one life of it, and where it lives."""

    cluster_id: U64
    incarnation: Token
    boot_id: Name
    """Equal on both sides: the same running kernel."""
    pid_namespace: Size
    pid: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    start_time: Size
    """Of the process, in clock ticks since boot: a pid that is used again differs here."""
    user_namespace: Size = 0
    """0 is unknown."""


class Offer(Struct, frozen=True, kw_only=True):
    """What a peer needs in order to try the paths into this process."""

    probe_region: U64
    nonce: Annotated[bytes, Meta(min_length=16, max_length=256)]
    """Begin of the probe region: who reads it back has proved that its path works."""
    table_fd: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    """The memfd of the region table, useful to processes on this host only."""
    paths: Annotated[list[Name], Meta(max_length=32)]
    """The paths that this side permits, best first."""
    handover: Name | None = None
    """The abstract Unix socket at which linked processes on this host get the descriptors of shared memory, if any."""
    digest: Name | None = None
    """The digest of its memory that this side can tell, if any."""
    dumpable: bool = True
    """Whether the process lets others of its user look into it; only to explain why they cannot."""


class Greet(Struct, frozen=True, kw_only=True, tag="greet"):
    """The connecting side has a secret; see ``auth``. Answered by ``Challenge`` or ``Refuse``."""

    nonce: Nonce


class Challenge(Struct, frozen=True, kw_only=True, tag="challenge"):
    """The listening side has one, too."""

    nonce: Nonce


class Sealed(Struct, frozen=True, kw_only=True, tag="sealed"):
    """An introduction, with the proof that its sender knows the secret."""

    payload: Annotated[bytes, Meta(max_length=MAX_INTRODUCTION)]
    """``Hello``, or the answer to it, encoded in an ``Envelope`` of its own."""
    proof: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Hello(Struct, frozen=True, kw_only=True, tag="hello"):
    """The connecting side introduces itself."""

    versions: tuple[U32, U32]
    identity: Identity
    remote_accessible: bool
    timeout_ms: U32
    """How long this side will wait for the link."""
    offer: Offer
    comm: Name | None = None
    """Name of the rank-table link that this connection is for."""


class Welcome(Struct, frozen=True, kw_only=True, tag="welcome"):
    """The listening side agrees and introduces itself."""

    version: U32
    identity: Identity
    offer: Offer
    link_token: Token
    """Name of this link; data connections show it, with a proof if there is a secret."""


class Refuse(Struct, frozen=True, kw_only=True, tag="refuse"):
    """No: a status and a reason for people. Answers a request, or ends a handshake."""

    code: U32
    reason: Text


class Confirm(Struct, frozen=True, kw_only=True, tag="confirm"):
    """The connecting side has a working path."""

    path: Name


class Ok(Struct, frozen=True, kw_only=True, tag="ok"):
    """Done."""


class CacheInfo(Struct, frozen=True, kw_only=True):
    """One cache as a peer may see it."""

    cache_id: I64
    kind: Name
    tensor_size: Positive
    entries: Positive
    """Length of dimension 0: batch entries or blocks."""
    dtype: Name
    accessible: bool
    regions: Annotated[list[U64], Meta(max_length=1 << 16)]
    """Region of each tensor."""
    device: U32 | None = None
    """The GPU in whose memory all tensors are; None is host memory."""


class KeyInfo(Struct, frozen=True, kw_only=True):
    """The key of batch entry ``batch_index``, or, with ``req_id`` None, the blocks key of the model."""

    cache_id: I64
    model_id: U64
    req_id: U64 | None = None
    batch_index: U32 = 0


class Fetch(Struct, frozen=True, kw_only=True, tag="fetch"):
    """Ask for the catalogue."""


class Catalogue(Struct, frozen=True, kw_only=True, tag="catalogue"):
    """All caches and keys, as of ``epoch``."""

    epoch: U64
    caches: Annotated[list[CacheInfo], Meta(max_length=1 << 16)]
    keys: Annotated[list[KeyInfo], Meta(max_length=1 << 20)]


class KeyRef(Struct, frozen=True, kw_only=True):
    """The source of a pull in message mode; exactly one of the three ways to name it."""

    model_id: U64 = 0
    req_id: U64 | None = None
    prefix_id: U64 | None = None
    cache_id: I64 | None = None
    batch_index: U32 = 0
    blocks: bool = False


class Lookup(Struct, frozen=True, kw_only=True, tag="lookup"):
    """Find a cache and hold it for a transfer (message mode)."""

    key: KeyRef
    timeout_ms: U32


class Found(Struct, frozen=True, kw_only=True, tag="found"):
    """The cache that a ``Lookup`` named; ``hold`` must be given back by ``Finish``."""

    hold: U64
    cache: CacheInfo
    batch_index: U32


class Finish(Struct, frozen=True, kw_only=True, tag="finish"):
    """End of a transfer that began with ``Lookup``; on success the source's tensors ``[start, stop)`` were copied."""

    hold: U64
    success: bool
    start: Size = 0
    stop: Size = 0


class Resolve(Struct, frozen=True, kw_only=True, tag="resolve"):
    """Which regions hold these addresses of the receiver (message mode, raw destination addresses)."""

    addresses: Annotated[list[U64], Meta(max_length=4096)]
    size: Positive
    """Bytes that must lie in one region, from each address on."""


class Resolved(Struct, frozen=True, kw_only=True, tag="resolved"):
    """Regions and offsets of the addresses of a ``Resolve``."""

    regions: Annotated[list[U64], Meta(max_length=1 << 16)]
    offsets: Annotated[list[Size], Meta(max_length=1 << 16)]
    device: U32 | None = None
    """The GPU in whose memory all of them are; None is host memory."""


class Drain(Struct, frozen=True, kw_only=True, tag="drain"):
    """Answer when every transfer that runs now has ended; memory is about to go away."""


class Ping(Struct, frozen=True, kw_only=True, tag="ping"):
    """Is the link with this token alive at your end? ``Ok`` or ``Refuse``."""

    link_token: Token


class Join(Struct, frozen=True, kw_only=True, tag="join"):
    """Enter a rank-table link over a connection that exists already."""

    comm: Name


class OpenData(Struct, frozen=True, kw_only=True, tag="open_data"):
    """Ask the connecting side of a link for data connections on which the listening side may start transfers."""

    count: Annotated[int, Meta(ge=1, le=64)]


class AskAgent(Struct, frozen=True, kw_only=True, tag="ask_agent"):
    """Tell how to reach your NIXL agent, and the keys of these regions. Answered by ``Agent`` or ``Refuse``."""

    backend: Name
    regions: Annotated[list[U64], Meta(max_length=MAX_AGENT_REGIONS)]
    on_devices: bool = False
    """Whether it is for a transfer in which GPU memory takes part."""


class Agent(Struct, frozen=True, kw_only=True, tag="agent"):
    """A NIXL agent, and as many of the regions as are registered."""

    name: Name
    metadata: Annotated[bytes, Meta(max_length=MAX_AGENT_METADATA)]
    """As NIXL packs it: the connection, the keys of the region table and of these regions, as far as in host memory."""
    device_metadata: Annotated[bytes, Meta(max_length=MAX_AGENT_METADATA)] = b""
    """The same of those in GPU memory, if there are any."""
    table: U64
    """Address of the region table."""
    generation: U64
    """Counts the registrations that have gone: keys of an older one may be wrong."""
    regions: Annotated[list[U64], Meta(max_length=MAX_AGENT_REGIONS)]
    """Those whose keys are told."""
    ranges: Annotated[list[tuple[U64, U64]], Meta(max_length=MAX_AGENT_REGIONS)]
    """Of each of them, from where to where memory is registered with its key: more than the region, perhaps."""


class Fence(Struct, frozen=True, kw_only=True, tag="fence"):
    """Answer when no request on these data connections can touch your memory any more; they are being given up."""

    connections: Annotated[list[U64], Meta(max_length=4096)]


class Digest(Struct, frozen=True, kw_only=True, tag="digest"):
    """Tell the digest of some of your memory."""

    spans: Annotated[bytes, Meta(max_length=1 << 18)]
    """Header and tables of the data request that would read it (``wire.data``): their limits hold here, too."""


class Digested(Struct, frozen=True, kw_only=True, tag="digested"):
    """The digest that a ``Digest`` asked for."""

    value: U64


class Notify(Struct, frozen=True, kw_only=True, tag="notify"):
    """A message of the application for the peer's; ``Ok`` when it is kept there, ``Refuse`` if there is no room."""

    message: Annotated[bytes, Meta(max_length=MAX_NOTIFICATION)]


class Bye(Struct, frozen=True, kw_only=True, tag="bye"):
    """The link ends in good order. Answer when no transfer of yours over it runs any more."""

    reason: Text = ""


Body = Union[  # noqa: UP007 - an alias is evaluated, also by Python 3.10
    Greet,
    Challenge,
    Sealed,
    Hello,
    Welcome,
    Refuse,
    Confirm,
    Ok,
    Fetch,
    Catalogue,
    Lookup,
    Found,
    Finish,
    Resolve,
    Resolved,
    Drain,
    Ping,
    Join,
    OpenData,
    AskAgent,
    Agent,
    Fence,
    Digest,
    Digested,
    Notify,
    Bye,
]


class Envelope(Struct, frozen=True, kw_only=True):
    """One message on a control connection."""

    body: Body
    id: U64 = 0
    """Set on requests: the reply repeats it."""
    reply_to: U64 = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


_FIELDS: Final = 0x80 + len(Envelope.__struct_fields__)
_PAD: Final = b"\xa3pad\xc4"
"""One more field, which the reader ignores: a name, and the type of short binary data, whose length is to follow."""


def encode(envelope: Envelope) -> bytes:
    """The payload of the frame that carries this message.

    The frame is whole cache lines: the kernel puts what a thread sends, on whatever connection, one behind the other,
    and copies the bytes of its next transfer much more slowly if they do not begin with a line (``wire.data``).
    """
    fields = _encoder.encode(envelope)
    padding = -(LENGTH_BYTES + len(fields) + len(_PAD) + 1) % CACHE_LINE
    return b"".join((bytes((_FIELDS + 1,)), fields[1:], _PAD, bytes((padding,)), bytes(padding)))


def decode(payload: bytes) -> Envelope:
    """The message in a payload.

    Raises:
        ProtocolError: it is not a valid message.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        message = f"malformed control message: {error}"
        raise ProtocolError(message) from error


def agree_on_version(theirs: tuple[int, int]) -> int | None:
    """The newest protocol version that both sides speak; None if there is none."""
    newest = min(VERSION_MAX, theirs[1])
    return newest if newest >= max(VERSION_MIN, theirs[0]) else None
