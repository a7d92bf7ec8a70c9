"""What workers tell each other, as notifications of the transfer library."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from llm_datadist.integrations.vllm.params import Facts  # noqa: TC001 - msgspec resolves it

if TYPE_CHECKING:
    from typing import TypeAlias


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Decode to prefill: one of ``readers`` does not need the blocks of a request any more."""

    request: str
    readers: int


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Decode to prefill: these requests still wait; keep their blocks."""

    requests: tuple[str, ...]
    """Of a push, the transfers."""


class Register(msgspec.Struct, frozen=True, tag="register"):
    """Decode to prefill, push: where one of ``readers`` wants the KV of a transfer."""

    transfer: str
    readers: int
    facts: Facts
    """Of the decode engine."""
    rank: int
    """In it."""
    first: int
    """The first token that is wanted."""
    tokens: int
    """The first one that is not."""
    blocks: tuple[tuple[int, ...], ...]
    """For each KV group the blocks at the decode engine; 0 where none is wanted."""
    digest: str = ""
    """Of the prompt; nothing is pushed for another one."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Decode to prefill, push: write nothing more for this one of ``readers``, and confirm."""

    transfer: str
    readers: int


class Written(msgspec.Struct, frozen=True, tag="written"):
    """Prefill to decode, push: everything that was wanted is in place."""

    transfer: str


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """Prefill to decode, push: nothing more will be written, and not everything was."""

    transfer: str
    reason: str


if TYPE_CHECKING:
    Message: TypeAlias = Done | Renew | Register | Cancel | Written | Stopped

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Done | Renew | Register | Cancel | Written | Stopped
)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """As bytes of a notification."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message | None:
    """A message; None if it is none."""
    try:
        return _decoder.decode(data)
    except msgspec.MsgspecError:
        return None
