"""Memory is taken back and links end while several threads make small transfers: no wrong byte, no late one, no hang.

A generation is a cache whose bytes all have the same value. Whoever takes one back poisons its memory at once: a
transfer that reports success must not have moved poison, and nothing may be written over it afterwards.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMException, LLMStatusCode
from peers import GUARD, POISON, TIMEOUT_S, Arena, Node, Peer, Peers
from short_kit import BLOCK_BYTES, BLOCKS, METHODS, MODELS, OK, PATHS, SOURCE, TARGET, TENSORS, sides_of

THREADS = 3
ROUNDS = 12
PROGRESS = 10
"""Successes of each thread before the next thing happens to it."""
NOT_EXIST, NOT_LINKED = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, LLMStatusCode.LLM_NOT_YET_LINK
INVALID, FAILED = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_FAILED
all_paths = pytest.mark.parametrize("path", PATHS)
both_methods = pytest.mark.parametrize("method", METHODS)


class Storm:
    """In the child: threads that transfer until they are told to stop."""

    def __init__(self, node: Node, method: str, cluster_id: int) -> None:
        self._node = node
        self._manager = node.manager
        self._method = method
        theirs, self._ours = sides_of(method)
        self._key = BlocksCacheKey(cluster_id, MODELS[theirs])
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._successes = [0] * THREADS
        self.statuses: set[LLMStatusCode] = set()
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(THREADS)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        rng = np.random.default_rng(number)
        newest = 0
        try:
            while not self._stop.is_set():
                cache, arena = self._node.caches[self._ours], self._node.arenas[self._ours]
                here = [4 * number + int(at) for at in rng.permutation(4)[:2]]
                there = [4 * number + int(at) for at in rng.permutation(4)[:2]]
                src, dst = (there, here) if self._method == "pull_blocks" else (here, there)
                try:
                    getattr(self._manager, self._method)(self._key, cache, src, dst)
                except LLMException as error:
                    self.statuses.add(error.status_code)
                    self._stop.wait(0.001)
                    continue
                if self._method == "pull_blocks":
                    newest = self._check(arena, here, newest)
                with self._changed:
                    self._successes[number] += 1
                    self._changed.notify_all()
        except BaseException as error:  # noqa: BLE001 - the test must hear of it
            self.wrong.append(repr(error))

    def _check(self, arena: Arena, blocks: list[int], newest: int) -> int:
        """All bytes are of one generation, and not of one before the last that was seen."""
        values = {
            value
            for tensor in arena.memory
            for value in tensor[GUARD:-GUARD].reshape(BLOCKS, -1)[blocks].reshape(-1).tolist()
        }
        if self._node.extra.get("going") is arena:
            return newest  # this side takes it back meanwhile, and poisons it
        if len(values) != 1 or values == {POISON} or min(values) < newest:
            self.wrong.append(f"{sorted(values)} after {newest}")
        return max(newest, *values)

    def await_progress(self) -> bool:
        """Wait until every thread has made some more transfers, or something is wrong."""
        with self._changed:
            wanted = [count + PROGRESS for count in self._successes]
            return self._changed.wait_for(
                lambda: bool(self.wrong) or all(a >= b for a, b in zip(self._successes, wanted, strict=True)), TIMEOUT_S
            )

    def end(self) -> tuple[set[LLMStatusCode], list[str]]:
        """Stop; the statuses of all failures, and what was wrong."""
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            if thread.is_alive():
                self.wrong.append("a transfer hangs")
        return self.statuses, self.wrong


def begin_storm(node: Node, method: str, cluster_id: int) -> None:
    """In the child."""
    node.extra["storm"] = Storm(node, method, cluster_id)


def await_progress(node: Node) -> bool:
    """In the child."""
    return bool(node.extra["storm"].await_progress())


def end_storm(node: Node) -> tuple[set[LLMStatusCode], list[str]]:
    """In the child."""
    ended: tuple[set[LLMStatusCode], list[str]] = node.extra["storm"].end()
    return ended


def new_generation(node: Node, name: str, value: int) -> None:
    """In the child: a cache of that value under the model id of its name."""
    arena = Arena(TENSORS, BLOCKS * BLOCK_BYTES, None)
    for tensor in arena.memory:
        tensor[GUARD:-GUARD] = value
    desc = CacheDesc(TENSORS, [BLOCKS, BLOCK_BYTES], DataType.DT_UINT8)
    key = BlocksCacheKey(node.datadist.cluster_id, MODELS[name])
    cache = node.manager.register_blocks_cache(desc, arena.addrs, key)
    node.arenas[name], node.caches[name] = arena, cache


def take_back(node: Node, name: str) -> None:
    """In the child: unregister, then poison at once. The name stays, for a handle that is no longer good."""
    node.extra["going"] = node.arenas[name]
    node.manager.unregister_cache(node.caches[name].cache_id)
    poison(node, name)


def poison(node: Node, name: str) -> None:
    """In the child: use the memory for something else."""
    for tensor in node.arenas[name].memory:
        tensor[:] = POISON
    node.extra.setdefault("taken back", []).append(node.arenas[name])


def still_poisoned(node: Node) -> bool:
    """In the child: nobody has written to anything that was taken back."""
    return all((tensor == POISON).all() for arena in node.extra["taken back"] for tensor in arena.memory)


def without_poison(node: Node, name: str) -> bool:
    """In the child: nobody has sent poison."""
    return not any((tensor[GUARD:-GUARD] == POISON).any() for tensor in node.arenas[name].memory)


def fill(node: Node, name: str, value: int) -> None:
    """In the child."""
    for tensor in node.arenas[name].memory:
        tensor[GUARD:-GUARD] = value


def is_full_of(node: Node, name: str, value: int) -> bool:
    """In the child."""
    return all((tensor[GUARD:-GUARD] == value).all() for tensor in node.arenas[name].memory)


def storm(peers: Peers, path: str, method: str) -> tuple[Peer, Peer]:
    """(client, server), linked; the client's threads transfer already."""
    server = peers.make(2, paths=path)
    process = server.process if path == "inprocess" else None
    client = peers.make(1, process=process, listen=False, paths=path)
    for peer in (client, server):
        for name in MODELS:
            peer.call(new_generation, name, 1)
    assert client.link(server) == OK
    client.call(begin_storm, method, 2)
    assert client.call(await_progress)
    return client, server


def expect_end(client: Peer, *statuses: LLMStatusCode) -> None:
    """The storm ends with nothing wrong, and no failures but these."""
    seen, wrong = client.call(end_storm)
    assert not wrong, wrong
    assert seen <= set(statuses), seen


@all_paths
@both_methods
def test_the_peer_takes_its_caches_back(peers: Peers, path: str, method: str) -> None:
    client, server = storm(peers, path, method)
    theirs, _ = sides_of(method)
    for generation in range(2, ROUNDS):
        server.call(take_back, theirs)
        server.call(new_generation, theirs, generation)
        assert client.call(await_progress)
    expect_end(client, NOT_EXIST)
    assert server.call(still_poisoned)


@all_paths
@both_methods
def test_newer_caches_replace_older_ones_before_those_are_taken_back(peers: Peers, path: str, method: str) -> None:
    """No transfer fails: there is a cache all the time."""
    client, server = storm(peers, path, method)
    theirs, _ = sides_of(method)
    for generation in range(2, ROUNDS):
        server.call(replace, theirs, generation)
        assert client.call(await_progress)
    expect_end(client)
    assert server.call(still_poisoned)


def replace(node: Node, name: str, value: int) -> None:
    """In the child: register the newer cache, then take the older one back."""
    arena, cache = node.arenas[name], node.caches[name]
    new_generation(node, name, value)
    newer = node.arenas[name], node.caches[name]
    node.arenas[name], node.caches[name] = arena, cache
    take_back(node, name)
    node.arenas[name], node.caches[name] = newer


@all_paths
@both_methods
def test_the_own_cache_is_taken_back(peers: Peers, path: str, method: str) -> None:
    client, server = storm(peers, path, method)
    _, ours = sides_of(method)
    for generation in range(2, ROUNDS):
        client.call(take_back, ours)
        client.call(new_generation, ours, generation)
        assert client.call(await_progress)
    expect_end(client, NOT_EXIST)
    assert client.call(still_poisoned)
    assert server.call(without_poison, TARGET)


@all_paths
@both_methods
@pytest.mark.parametrize("who", ["client", "server"])
@pytest.mark.parametrize("force", [False, True])
def test_links_end_and_begin_again(peers: Peers, path: str, method: str, who: str, force: bool) -> None:
    client, server = storm(peers, path, method)
    here, there = (client, server) if who == "client" else (server, client)
    address = None if force else ("127.0.0.1", 1)
    for _ in range(ROUNDS // 3):
        assert here.call("unlink", there.cluster_id, address, force=force) == OK
        if method == "push_blocks" and (who == "client" or not force):
            server.call(fill, TARGET, 0x55)
            assert there.call("unlink", here.cluster_id, force=True) == OK
            assert server.call(is_full_of, TARGET, 0x55)
        else:
            assert there.call("unlink", here.cluster_id, force=True) == OK
        assert client.link(server) == OK
        assert client.call(await_progress)
    expect_end(client, NOT_LINKED, *([FAILED] if force else []))
    assert server.call(without_poison, TARGET)


@all_paths
@both_methods
def test_the_peer_is_finalized(peers: Peers, path: str, method: str) -> None:
    client, server = storm(peers, path, method)
    server.call("finalize")
    server.call(poison, TARGET)
    server.call(poison, SOURCE)
    expect_end(client, NOT_LINKED)
    assert server.call(still_poisoned)


@all_paths
@both_methods
def test_the_own_engine_is_finalized(peers: Peers, path: str, method: str) -> None:
    client, server = storm(peers, path, method)
    client.call(finalize_and_poison)
    expect_end(client, INVALID, NOT_LINKED, FAILED)
    assert client.call(still_poisoned)
    assert server.call(without_poison, TARGET)


def finalize_and_poison(node: Node) -> None:
    """In the child."""
    node.extra["going"] = node.arenas[TARGET]
    node.finalize()
    poison(node, TARGET)
    poison(node, SOURCE)
