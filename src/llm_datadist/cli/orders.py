"""What the parent of the demo and its two processes say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from llm_datadist.cli.kv import Verified

if TYPE_CHECKING:
    from llm_datadist.cli.plan import Operation

    Address: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Get memory and fill it, answered by Ready; or compute what should arrive, answered by Done."""


@dataclass(frozen=True, slots=True)
class Link:
    """Link to the prefill process; answered by Done."""

    peer: Ready


@dataclass(frozen=True, slots=True)
class Poison:
    """Overwrite the destination; answered by Done."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Carry out an operation; answered by Moved."""

    operation: Operation


@dataclass(frozen=True, slots=True)
class Verify:
    """Check what an operation brought; answered by Verified."""

    operation: Operation


@dataclass(frozen=True, slots=True)
class Stop:
    """Finalize and end; not answered."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Work done since the last one; precedes the answer."""

    bytes_done: int


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing more to say."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The prefill process is prepared."""

    one_sided: Address | None
    """Where the object with remote cache access listens."""
    messages: Address | None
    """Where the other one listens."""
    cache_ids: tuple[int, ...]
    """Numbers of the contiguous caches, in the order of the model."""


@dataclass(frozen=True, slots=True)
class Moved:
    """An operation returned."""

    bytes_moved: int
    seconds: float
    path: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The order could not be carried out."""

    reason: str


Order: TypeAlias = Prepare | Link | Poison | Transfer | Verify | Stop
Answer: TypeAlias = Done | Ready | Moved | Verified | Failed
