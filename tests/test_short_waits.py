"""Who takes memory back, or ends a link, waits for a small transfer that is held just before it moves its bytes."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import LLMStatusCode
from peers import POISON, TIMEOUT_S, Node, Peer, Peers
from short_kit import METHODS, MODELS, OK, PATHS, SOURCE, TARGET, Outcome, attempt, blocks_of, make_pair, same, sides_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from llm_datadist.paths.base import Shortcut
    from llm_datadist.utils.deadline import Deadline

A_MOMENT_S = 0.2
"""Who should wait and does not has come back by then, most of the time; a slow machine lets it pass, never fail."""
NOT_EXIST, NOT_LINKED = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, LLMStatusCode.LLM_NOT_YET_LINK
all_paths = pytest.mark.parametrize("path", PATHS)
both_methods = pytest.mark.parametrize("method", METHODS)


class Held:
    """In the child: a shortcut that waits at its beginning, when everything has been looked up already."""

    def __init__(self, real: Shortcut) -> None:
        self._real = real
        self.entered, self.gate = threading.Event(), threading.Event()

    def _wait(self) -> None:
        self.entered.set()
        assert self.gate.wait(TIMEOUT_S)

    def read(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline) -> None:
        self._wait()
        self._real.read(size, here, there, deadline)

    def write(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline) -> None:
        self._wait()
        self._real.write(size, here, there, deadline)


def hold(node: Node, method: str, cluster_id: int) -> None:
    """In the child: hold the next small transfers."""
    link = node.manager._engine._links.peek(cluster_id)
    theirs, ours = sides_of(method)
    key = (MODELS[theirs], node.caches[ours].cache_id)
    node.extra["held"] = Held(link.pairings[key].shortcut)
    link.pairings[key] = link.pairings[key]._replace(shortcut=node.extra["held"])


def entered(node: Node) -> bool:
    """In the child: wait until a transfer is held."""
    return bool(node.extra["held"].entered.wait(TIMEOUT_S))


def release(node: Node) -> None:
    """In the child."""
    node.extra["held"].gate.set()


def take_back(node: Node, name: str) -> None:
    """In the child: unregister, then use the memory for something else."""
    node.manager.unregister_cache(node.caches[name].cache_id)
    for tensor in node.arenas[name].memory:
        tensor[:] = POISON


def is_poison(peer: Peer, name: str) -> bool:
    return all((tensor == POISON).all() for tensor in peer.memory(name))


def start_held(client: Peer, method: str) -> Future[Any]:
    """A small transfer of the client that is about to move its bytes."""
    client.call(hold, method, 2)
    transfer = client.begin(attempt, method, 2, [1], [2])
    assert client.call(entered)
    return transfer


def expect_waiting(call: Future[Any]) -> None:
    assert not wait([call], A_MOMENT_S).done


@all_paths
@both_methods
def test_unregistering_the_own_cache_waits(peers: Peers, path: str, method: str) -> None:
    """Then the transfer has succeeded, with what was there before."""
    client, server = make_pair(peers, path)
    _, ours = sides_of(method)
    source = blocks_of(client, SOURCE)
    transfer = start_held(client, method)
    taking = client.begin(take_back, ours)
    expect_waiting(taking)
    client.call(release)
    assert transfer.result(TIMEOUT_S) == Outcome(None, None, "", short=True)
    taking.result(TIMEOUT_S)
    assert is_poison(client, ours)
    if method == "push_blocks":
        for target, origin in zip(blocks_of(server, TARGET), source, strict=True):
            assert (target[2] == origin[1]).all()


@all_paths
@both_methods
def test_unregistering_the_remote_cache_waits_or_refuses(peers: Peers, path: str, method: str) -> None:
    """Over TCP the owner knows better than the transfer, which has not asked yet; else it must wait."""
    client, server = make_pair(peers, path)
    theirs, _ = sides_of(method)
    before = client.memory(TARGET)
    transfer = start_held(client, method)
    taking = server.begin(take_back, theirs)
    if path == "tcp":
        taking.result(TIMEOUT_S)
    else:
        server.call("wait_until_hidden", theirs)
        expect_waiting(taking)
    client.call(release)
    outcome = transfer.result(TIMEOUT_S)
    assert (outcome.status, outcome.short) == (NOT_EXIST, False)
    taking.result(TIMEOUT_S)
    assert is_poison(server, theirs)
    if path == "tcp":
        assert same(client.memory(TARGET), before)


@all_paths
@both_methods
@pytest.mark.parametrize("who", ["client", "server"])
def test_unlinking_waits(peers: Peers, path: str, method: str, who: str) -> None:
    """In good order, from either side; the transfer succeeds, and the next one is refused."""
    client, server = make_pair(peers, path)
    here, there = (client, server) if who == "client" else (server, client)
    transfer = start_held(client, method)
    unlinking = here.begin("unlink", there.cluster_id, ("127.0.0.1", 1))
    expect_waiting(unlinking)
    client.call(release)
    assert transfer.result(TIMEOUT_S) == Outcome(None, None, "", short=True)
    assert unlinking.result(TIMEOUT_S) == OK
    assert client.call(attempt, method, 2, [1], [2]).status is NOT_LINKED


@all_paths
@both_methods
def test_finalizing_the_peer_waits_a_while(peers: Peers, path: str, method: str) -> None:
    """About a second; what was about to move then finds the peer gone."""
    client, server = make_pair(peers, path)
    transfer = start_held(client, method)
    finalizing = server.begin("finalize")
    expect_waiting(finalizing)
    finalizing.result(TIMEOUT_S)
    before = server.memory(TARGET)
    client.call(release)
    outcome = transfer.result(TIMEOUT_S)
    assert (outcome.error, outcome.status) == ("LLMException", NOT_LINKED)
    assert same(server.memory(TARGET), before)


@all_paths
def test_a_link_that_is_full_of_held_transfers_serves_others(peers: Peers, path: str) -> None:
    """Holding takes no lock: transfers of the other direction, and first ones, go on."""
    client, server = make_pair(peers, path)
    transfer = start_held(client, "pull_blocks")
    assert client.call(attempt, "push_blocks", 2, [1], [2]).short
    assert client.call(attempt, "pull_blocks", 2, [3], [4], forbid=True).error is None
    assert server.call(attempt, "pull_blocks", 1, [3], [4]).short
    client.call(release)
    assert transfer.result(TIMEOUT_S).short
