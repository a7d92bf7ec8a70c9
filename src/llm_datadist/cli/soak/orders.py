"""What the parent of a soak and its processes say to each other. Orders are numbered and carried out at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from llm_datadist.cli.soak.plan import Place, Transfer

    Address: TypeAlias = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Start:
    """Initialise the object of a place, with contents of this seed; answered by Ready."""

    place: Place
    seed: int


@dataclass(frozen=True, slots=True)
class Register:
    """Take the source cache of a place back and register another one with contents of this seed: Ready."""

    place: Place
    seed: int


@dataclass(frozen=True, slots=True)
class Link:
    """Link a place to others; answered by Done."""

    place: Place
    peers: tuple[Ready, ...]


@dataclass(frozen=True, slots=True)
class Unlink:
    """Unlink a place from others; answered by Done."""

    place: Place
    peers: tuple[Ready, ...]
    force: bool


@dataclass(frozen=True, slots=True)
class SwitchRole:
    """Listen somewhere else; answered by Ready."""

    place: Place


@dataclass(frozen=True, slots=True)
class Move:
    """Make a transfer again and again; answered by Moved, or by Refused at the first that fails."""

    transfer: Transfer
    source: Ready
    target: Ready
    for_s: float
    """So long; once at least."""


@dataclass(frozen=True, slots=True)
class Verify:
    """Look at a target and poison it again; answered by Verified."""

    transfer: Transfer
    seeds: tuple[int, ...]
    """The source had the contents of one of these."""
    complete: bool
    """Whether the transfer succeeded; else its destination blocks may hold anything, the others must be untouched."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A place as its peers need to know it."""

    place: Place
    address: Address
    seed: int
    entries_id: int
    """The cache id of the contiguous view of the source."""
    target_id: int
    """The same of the target."""
    target_addrs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """Nothing more to say."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A transfer succeeded, each time."""

    times: int
    bytes_moved: int
    path: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found: bytes that were compared, and what is wrong."""

    compared: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The library said no."""

    status: str
    """Name of the status code."""
    reason: str


Order: TypeAlias = "Start | Register | Link | Unlink | SwitchRole | Move | Verify"
Answer: TypeAlias = "Ready | Done | Moved | Verified | Refused"


@dataclass(frozen=True, slots=True)
class Numbered:
    """An order or its answer; ``crash`` is set instead of an answer if something else went wrong."""

    number: int
    content: Order | Answer | None
    crash: str | None = None
