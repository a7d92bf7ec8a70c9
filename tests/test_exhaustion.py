"""Descriptors that run out.

A clear status whose text names the limit, its value and what to do; nothing is left behind; once there is more again,
everything goes on.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest

from confine_kit import logged, observed, set_limit
from exhaustion_kit import (
    LIMIT,
    POOL,
    Held,
    Start,
    check_nothing_left,
    feed,
    names_descriptors,
    starve,
    steady,
    try_to_start,
)
from llm_datadist import (
    LLMException,
    LLMStatusCode,
)
from peers import Node, Peer, Peers, close_off
from stopping import go_on, stop
from test_links import pull_one, with_caches

OK = LLMStatusCode.LLM_SUCCESS
FAILED = LLMStatusCode.LLM_FAILED


def start_starved(node: Node, spare: int, **properties: Any) -> Start:
    """In the child: with a few descriptors."""
    return try_to_start(node, lambda: starve(node, spare), lambda: feed(node), **properties)


def test_descriptors_at_the_start(peers: Peers) -> None:
    """However many are missing, it says so and leaves nothing behind, until it works."""
    peer = Peer(peers.process(), "node-1")
    properties = {"listen_ip_info": "127.0.0.1:0", "mem_pool_cfg": POOL, "paths": "mapped,tcp"}
    peer.call(start_starved, 64, **properties)  # what is loaded only once
    for spare in range(32):
        status, text, left = peer.call(start_starved, spare, **properties)
        assert left == Held(0, 0, 0), (spare, text)
        if status == OK:
            break
        assert status in {FAILED, LLMStatusCode.LLM_OUT_OF_MEMORY}, text
        assert names_descriptors(text), text
    assert status == OK
    assert spare > 5  # it really was too little before
    assert peer.init(1, **properties).address is not None


@pytest.mark.parametrize("paths", ["process_vm", "mapped", "tcp", "auto"])
@pytest.mark.parametrize("starved", ["client", "server"])
def test_descriptors_at_a_link(peers: Peers, paths: str, starved: str) -> None:
    """Too few at either side: a status and a reason, or a slower path and a warning; then it works again."""
    first = close_off if paths == "mapped" else None
    server, client = (
        observed(peers, number, peers.process(first), paths=paths, mem_pool_cfg=POOL) for number in (1, 2)
    )
    for peer in (server, client):
        peer.call("use_pool")
        peer.call(set_soft_limit, "RLIMIT_NOFILE", LIMIT * 2)
    with_caches(server, client)
    assert client.link(server) == OK  # once, so that everything is loaded and all threads run
    server.call(pull_one, 2)
    client.call(pull_one, 1)
    assert client.call("unlink", 1, server.address) == OK
    poor = client if starved == "client" else server
    before = [steady(peer) for peer in (server, client)]
    statuses = set()
    for spare in range(12):
        poor.call(starve, spare)
        try:
            status = client.link(server, timeout=1_000)
            said = "\n".join(client.call(logged) + server.call(logged))
            if status == OK:
                client.call(pull_one, 1)
                assert client.call("unlink", 1, server.address) == OK
            else:
                assert status in {LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_TIMEOUT}, said
                assert names_descriptors(said) or spare > 0, said
                assert "same user" not in said
            statuses.add(status)
        finally:
            poor.call(feed)
        for peer, start in zip((server, client), before, strict=True):
            check_nothing_left(peer, start)
    assert OK in statuses
    assert len(statuses) > 1
    assert client.link(server) == OK
    client.call(pull_one, 1)
    server.call(pull_one, 2)


def set_soft_limit(node: Node, name: str, value: int) -> None:
    """In the child."""
    set_limit(name, value)


def test_accepting_is_told_once(peers: Peers) -> None:
    """Without a descriptor the connection waits; one line in the log, however long it takes."""
    server, client = observed(peers, 1, peers.process()), peers.make(2, listen=False)
    with_caches(server, client)
    server.call(starve, 0)
    assert client.link(server, timeout=1_500) == LLMStatusCode.LLM_TIMEOUT
    server.call(feed)
    (said,) = server.call(logged)
    assert said.startswith(f"cannot accept connections on 127.0.0.1:{server.address[1]}: Too many open files")  # type: ignore[index]
    assert names_descriptors(said)
    assert client.link(server) == OK
    client.call(pull_one, 1)


def cut_data(node: Node) -> None:
    """In the child: the data connections on which this side asks break."""
    for link in node.datadist._engine._core.table.all():
        path = link.path(node.datadist._engine.deadline())
        for pool in (path._large, path._small):
            for asker in list(pool._idle):
                asker.sock.shutdown(socket.SHUT_RDWR)


def pull_status(node: Node, cluster_id: int) -> tuple[LLMStatusCode, str]:
    """In the child: of one pull."""
    try:
        pull_one(node, cluster_id)
    except LLMException as error:
        return error.status_code, str(error)
    return OK, ""


@pytest.mark.parametrize("asking", ["client", "server"])
def test_descriptors_for_a_data_connection(peers: Peers, asking: str) -> None:
    """One has to be replaced, and the side that opens it, always the client, has no descriptor left."""
    server, client = peers.make(1, paths="tcp"), peers.make(2, paths="tcp", listen=False, sync_kv_timeout=1_000)
    with_caches(server, client)
    assert client.link(server) == OK
    here, there = (client, server) if asking == "client" else (server, client)
    here.call(pull_one, there.cluster_id)
    stop(there.process.pid)
    try:
        status, _ = here.call(pull_status, there.cluster_id) if asking == "client" else (None, None)
    finally:
        go_on(there.process.pid)
    assert status in {None, LLMStatusCode.LLM_TIMEOUT}  # its connection is given up
    if asking == "server":
        here.call(cut_data)
    client.call(starve, 0)
    seen = []
    for _ in range(4):
        status, text = here.call(pull_status, there.cluster_id)
        seen.append(status)
        assert status in {OK, FAILED}, text
        assert status == OK or names_descriptors(text) or "try again" in text, text
    client.call(feed)
    assert FAILED in seen
    here.call(pull_one, there.cluster_id)
    there.call(pull_one, here.cluster_id)
