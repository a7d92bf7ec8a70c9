"""What ping has found: plain values, shown to people and written as JSON alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llm_datadist import __version__
from llm_datadist.wire.messages import VERSION_MAX, VERSION_MIN

if TYPE_CHECKING:
    from llm_datadist.engine.visit import Visit
    from llm_datadist.paths.survey import PathFinding

SCHEMA: Final = 1
"""Version of the JSON form. New fields may come without a change of it."""


@dataclass(frozen=True, slots=True)
class Try:
    """One address that was tried."""

    address: str
    seconds: float
    """From the first packet to the end of both introductions, or to the failure."""
    status: str
    """Name of the status code that ``link_clusters`` would give for it."""
    cause: str | None = None
    fix: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the peer has answered and lets this side in."""
        return self.cause is None


@dataclass(frozen=True, slots=True)
class Found:
    """The peer, as it has introduced itself, and what a link to it would be like."""

    cluster_id: int
    pid: int
    same_host: bool
    protocol: int
    remote_accessible: bool
    authenticated: bool
    """Whether both sides have proved that they know the secret."""
    encrypted: bool
    """Whether TLS is used."""
    path: str | None
    """The path that a link would use: the first one that works."""
    paths: tuple[PathFinding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One ping."""

    schema: int = SCHEMA
    version: str = __version__
    """Of the library here."""
    protocols: tuple[int, int] = (VERSION_MIN, VERSION_MAX)
    """The oldest and the newest version of the protocol that this side speaks."""
    target: str
    ok: bool
    """Whether a link can be made, as far as this side can tell."""
    tried: tuple[Try, ...]
    peer: Found | None = None


def of_visit(target: str, tried: tuple[Try, ...], visit: Visit) -> Report:
    """The report on a peer that has answered."""
    works = [finding.name for finding in visit.paths if finding.works]
    found = Found(
        cluster_id=visit.peer.cluster_id,
        pid=visit.peer.pid,
        same_host=visit.same_host,
        protocol=visit.terms.version,
        remote_accessible=visit.terms.remote_accessible,
        authenticated=visit.terms.secret,
        encrypted=visit.terms.tls,
        path=works[0] if works else None,
        paths=visit.paths,
    )
    return Report(target=target, ok=bool(works), tried=tried, peer=found)
