"""What an engine must have forgotten when nothing goes on any more. The only place that looks into the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.engine.link import LinkState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.engine.engine import Engine
    from simulation.cluster import Member


def leftovers(engine: Engine) -> Iterator[str]:
    """What is left in an engine at rest, though it should not."""
    core = engine._core
    links = core.table.all()
    tokens = {link.token for link in links}
    served = {token for token, _ in core.data_server._served}
    counts = {
        "links are pending": len(core.pending),
        "control connections too many": len(core.sessions) - len(links),
        "links are fading": len(core.ender.fading()),
        "attempts to link are going on": len(core.table._attempts),
        "regions are leased": len(core.regions._leases),
        "links that have ended are served": len(served - tokens),
        "links that have ended are remembered": len(set(core.data_server._given_up) - tokens),
        "transfers run": sum(len(link.running) for link in links),
        "requests wait for an answer": sum(len(link.channel._waiters) for link in links),
        "links are not LINKED": sum(link.state is not LinkState.LINKED for link in links),
        "holds of caches": sum(entry.pins + len(entry.holders) for entry in core.catalogue.all()),
    }
    yield from (f"{count} {what}" for what, count in counts.items() if count)


def has_table(engine: Engine) -> bool:
    """Whether an engine still has its region table, and the descriptors of that."""
    return engine._core.regions.fd >= 0


def link_of(engine: Engine, cluster_id: int) -> tuple[bytes, bytes] | None:
    """Token of the link to a cluster, and which life of it is at the other end."""
    link = engine._core.table.get(cluster_id)
    return None if link is None else (link.token, link.peer.identity.incarnation)


def disagreement(one: Member, other: Member) -> str | None:
    """How two members at rest see their link differently."""
    assert one.engine is not None
    assert other.engine is not None
    mine, theirs = link_of(one.engine, other.cluster_id), link_of(other.engine, one.cluster_id)
    if (mine is None) != (theirs is None):
        return f"the link of clusters {one.cluster_id} and {other.cluster_id} is up at one end only: {mine} {theirs}"
    if mine is None or theirs is None:
        return None
    if mine[0] != theirs[0]:
        return f"clusters {one.cluster_id} and {other.cluster_id} use different links"
    lives = one.engine._core.identity.incarnation, other.engine._core.identity.incarnation
    if (theirs[1], mine[1]) != lives:
        return f"clusters {one.cluster_id} and {other.cluster_id}: a link to an older life is up"
    return None
