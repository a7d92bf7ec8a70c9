"""What ``explain_link`` tells of a link, beyond its path: terms, connections, threads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from llm_datadist import LLMStatusCode
from loopback_kit import cluster
from peers import Node
from security_kit import protection, pull, with_caches

if TYPE_CHECKING:
    from llm_datadist import LLMDataDist
    from llm_datadist.engine import LinkReport
    from peers import Peers

SCREEN = 25


def explain(node: Node, cluster_id: int) -> tuple[LinkReport, str]:
    """In the child."""
    report = node.datadist.explain_link(cluster_id)
    return report, str(report)


@pytest.mark.parametrize("kind", ["nothing", "secret", "tls", "secret and tls"])
@pytest.mark.parametrize("accessible", [True, False])
def test_terms_are_the_same_on_both_sides(peers: Peers, kind: str, accessible: bool) -> None:
    options = {"enable_remote_cache_accessible": accessible, **protection(kind)}
    server = peers.make(1, **options)
    client = peers.make(2, heartbeat_interval_ms=0, **options)
    assert client.link(server) == LLMStatusCode.LLM_SUCCESS
    for peer, other, heartbeat in ((client, 1, "no heartbeats"), (server, 2, "heartbeat after 10 s of silence")):
        report, shown = peer.call(explain, other)
        terms = report.terms
        assert (terms.version, terms.remote_accessible) == (1, accessible)
        assert (terms.secret, terms.tls) == ("secret" in kind, "tls" in kind)
        assert heartbeat in shown
        assert ("remote-accessible mode" if accessible else "message mode") in shown
        words = {"nothing": "neither secret nor TLS", "secret": "secret,", "tls": "TLS,"}.get(kind, "secret and TLS,")
        assert f"protocol 1, {words}" in shown


def test_connections_and_threads(peers: Peers) -> None:
    """Over TCP each side asks on its own connections; on one host none are needed."""
    server, client = peers.make(1), peers.make(2)
    with_caches(server, client)
    for paths, connections in (("tcp", 3), ("process_vm", 0)):
        client.call("init", 2, listen_ip_info="127.0.0.1:0", paths=paths)
        client.call("register_blocks", "dst", 2, 64, 1 << 16)
        assert client.link(server) == LLMStatusCode.LLM_SUCCESS
        client.call(pull, 1, [0])
        for peer, other in ((client, 1), (server, 2)):
            report, shown = peer.call(explain, other)
            assert (report.connections, report.served) == (connections, connections)
            assert report.copy_threads == min(4, len(os.sched_getaffinity(0)))
            assert f"{connections} data connections to the peer, {connections} from it, up to " in shown
            assert len(shown.splitlines()) <= SCREEN
        client.call("finalize")
        client.call(Node.__init__)


def test_within_the_process_there_is_nothing_to_agree_on(loopback_datadist: LLMDataDist) -> None:
    loopback_datadist.link_clusters([cluster(2)])
    report = loopback_datadist.explain_link(2)
    assert (report.terms, report.connections, report.served) == (None, 0, 0)
    assert "data connections" not in str(report)
