"""What the scheduler's half of the connector has the workers do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import TypeAlias

    from llm_datadist.integrations.vllm.params import Remote

    Blocks: TypeAlias = tuple[tuple[int, ...], ...]
    """For each KV group a request's blocks, that of its first token first; 0 where there is none, or none is wanted."""


@dataclasses.dataclass(frozen=True)
class Load:
    """Get the KV of a request's tokens ``first`` to ``tokens`` (exclusive)."""

    request: str
    remote: Remote
    first: int
    tokens: int
    blocks: Blocks
    transfer: str = ""
    """Wait for a push under this id; pull if empty."""
    digest: str = ""
    """Of the prompt, for a push."""
    error: str = ""
    """Report a failure instead, for this reason."""
    reported: bool = True
    """Whether the scheduler waits for the end."""


@dataclasses.dataclass(frozen=True)
class Renewal:
    """A request whose KV another engine keeps still waits here."""

    remote: Remote
    name: str
    """By which that engine knows it: the request of its lease, or the transfer of a push."""
    seconds: float
    """How long it is kept if nobody asks."""


@dataclasses.dataclass(frozen=True)
class Open:
    """A request that a decode engine will read has begun: show ``generation`` in ``slot``."""

    request: str
    slot: int
    generation: int


@dataclasses.dataclass(frozen=True)
class Hold:
    """A request has ended, and its blocks are kept: until they were read or written, or for some time."""

    request: str
    seconds: float
    transfer: str = ""


@dataclasses.dataclass(frozen=True)
class Part:
    """This step makes a request's tokens up to ``tokens`` final; push those from ``first`` on, layer by layer."""

    request: str
    transfer: str
    first: int
    tokens: int
    last: bool
    blocks: Blocks
    digest: str = ""
    """Of the prompt."""
