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
    if core.pending:
        yield f"{len(core.pending)} links are pending"
    if len(core.sessions) != len(links):
        yield f"{len(core.sessions)} control connections for {len(links)} links"
    if core.ender.fading():
        yield f"{len(core.ender.fading())} links are fading"
    if core.table._attempts:
        yield f"attempts to link are going on: {core.table._attempts}"
    if core.regions._leases:
        yield f"{len(core.regions._leases)} leases of regions"
    served = {token for token, _ in core.data_server._served} - tokens
    if served:
        yield f"data connections of {len(served)} links that have ended are served"
    given_up = set(core.data_server._given_up) - tokens
    if given_up:
        yield f"connections given up are remembered for {len(given_up)} links that have ended"
    for link in links:
        if link.running:
            yield f"{len(link.running)} transfers run over the link to cluster {link.cluster_id}"
        if link.channel._waiters:
            yield f"{len(link.channel._waiters)} requests wait for an answer of cluster {link.cluster_id}"
        if link.state is not LinkState.LINKED:
            yield f"the link to cluster {link.cluster_id} is {link.state.name}"
    for entry in core.catalogue.all():
        if entry.pins or entry.holders:
            yield f"cache {entry.cache_id} is held {entry.pins} and {len(entry.holders)} times"


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
