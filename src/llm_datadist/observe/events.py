"""What is told about: transfers of this process, and requests that it has served for peers."""

from __future__ import annotations

import enum
from typing import Final, Protocol

from msgspec import Struct

SUCCESS: Final = "LLM_SUCCESS"
"""The status of a transfer that has succeeded."""


class Phase(enum.Enum):
    """What a transfer does at a time. One may come several times: a plan that was out of date is made again."""

    LOOKUP = "lookup"
    """Find the peer's cache: in its catalogue, or by asking it."""
    PLAN = "plan"
    """Turn caches and selection into spans of bytes."""
    QUEUE = "queue"
    """Wait for a free data connection."""
    COPY = "copy"
    """Move the bytes."""
    CONFIRM = "confirm"
    """Settle with the peer: hold given back, digests compared."""


class Step(Struct, frozen=True):
    """One phase of one transfer. Times are in nanoseconds since the epoch."""

    phase: Phase
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e9


class FallbackReason(enum.Enum):
    """Why a transfer left a path for another one."""

    DENIED = "denied"
    """The system does not permit it any more; the link does not try that path again."""
    OUT_OF_REACH = "out_of_reach"
    """It does not reach that memory; other transfers go on with it."""


class Fallback(Struct, frozen=True):
    """A path that a transfer has left before it moved its bytes over another one."""

    path: str
    reason: FallbackReason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason.value}"


class Transfer(Struct, frozen=True):
    """A pull or push of this process that has ended."""

    transfer_id: int
    """The same on both sides; 64 bits."""
    operation: str
    """Name of the public call."""
    peer: int
    """Cluster id."""
    path: str
    """Name of the path that moved the bytes; empty if it did not get that far."""
    status: str
    """Name of the status code, ``LLM_SUCCESS`` or that of the failure."""
    num_bytes: int
    """Bytes of all spans; 0 if it did not get as far as to know."""
    start_ns: int
    end_ns: int
    steps: tuple[Step, ...]
    fallbacks: tuple[Fallback, ...] = ()
    """Paths that were tried before ``path``, in this order."""

    @property
    def seconds(self) -> float:
        """From the call to its end."""
        return (self.end_ns - self.start_ns) / 1e9


class Served(Struct, frozen=True):
    """A request of a peer that this process has answered over a data connection."""

    transfer_id: int
    """That of the peer's transfer; 0 if the peer did not say."""
    operation: str
    """``"read"`` or ``"write"``, seen from the peer."""
    peer: int
    status: str
    """``"ok"`` or why it was refused."""
    num_bytes: int
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        """From its first byte to the last one of the answer."""
        return (self.end_ns - self.start_ns) / 1e9


class Observer(Protocol):
    """Is told what has happened, on the thread on which it happened: return soon, raise nothing."""

    def transfer(self, event: Transfer) -> None:
        """A transfer of this process has ended."""

    def served(self, event: Served) -> None:
        """A request of a peer has been answered."""
