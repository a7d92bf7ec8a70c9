"""Every operation, in both modes and from both sides, between two hosts: the matrix of one host over a real network."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

import test_matrix
from hosts_kit import network, process_in
from llm_datadist import LLMStatusCode
from peers import Peers
from test_links import explain
from test_matrix import Pair, sides

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["sides"]


@pytest.fixture(scope="module", params=(True, False), ids=("A", "M"))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Linked peers on two hosts."""
    properties: dict[str, Any] = {"enable_remote_cache_accessible": request.param}
    with network() as net, contextlib.closing(Peers()) as peers:
        here, there = net.pair()
        server = peers.make(2, process=process_in(peers, there.host), listen_ip_info=f"{there.address}:0", **properties)
        client = peers.make(1, process=process_in(peers, here.host), listen=False, **properties)
        assert client.link(server) == LLMStatusCode.LLM_SUCCESS
        yield Pair(client, server, "tcp")


for name, test in vars(test_matrix).items():
    if name.startswith("test_"):
        globals()[name] = test


def test_the_paths_within_a_host_are_not_for_them(pair: Pair) -> None:
    """And no warning: nothing can be done about it."""
    reasons = {attempt.name: attempt for attempt in pair.client.call(explain, 2).attempts}
    for name in ("process_vm", "mapped"):
        assert reasons[name].reason == "the peer is on another host"
        assert reasons[name].hint is None
