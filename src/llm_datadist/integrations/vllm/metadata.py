"""What goes between the two halves of the connector, as vLLM carries it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from llm_datadist.integrations.vllm.bases import KVConnectorHandshakeMetadata, KVConnectorMetadata

if TYPE_CHECKING:
    from llm_datadist.integrations.vllm.orders import Hold, Load, Open, Part, Renewal
    from llm_datadist.integrations.vllm.params import Facts, Remote, Worker


@dataclasses.dataclass(frozen=True)
class Address(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler once it has registered its cache."""

    worker: Worker
    facts: Facts


@dataclasses.dataclass
class Orders(KVConnectorMetadata):
    """One step."""

    may_wait: bool = True
    """Whether the step computes nothing, and nothing that computes waits for its end."""
    opened: list[Open] = dataclasses.field(default_factory=list)
    closed: list[str] = dataclasses.field(default_factory=list)
    """Requests that will not be read after all."""
    holds: list[Hold] = dataclasses.field(default_factory=list)
    loads: list[Load] = dataclasses.field(default_factory=list)
    cancelled: list[str] = dataclasses.field(default_factory=list)
    """Requests with a load, aborted meanwhile."""
    releases: list[Remote] = dataclasses.field(default_factory=list)
    """Leases of requests that need nothing, or were aborted."""
    renewals: list[Renewal] = dataclasses.field(default_factory=list)
    links: list[Remote] = dataclasses.field(default_factory=list)
    """Engines from which something will be read soon."""
    parts: list[Part] = dataclasses.field(default_factory=list)
    dropped: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Push transfers that end without their last part, and why."""
