"""What must end a pairing of caches that the short way knows: nothing moves by knowledge that has become wrong."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
import warnings
from typing import Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMStatusCode
from llm_datadist.engine.link import Link
from llm_datadist.memory import syscalls
from peers import TIMEOUT_S, Node, Peer, Peers
from short_kit import (
    BLOCK_BYTES,
    BLOCKS,
    METHODS,
    MODELS,
    OK,
    PATHS,
    SOURCE,
    TARGET,
    TENSORS,
    Outcome,
    attempt,
    blocks_of,
    forget,
    make_pair,
    moved,
    same,
    sides_of,
    warm,
    watch,
    with_caches,
)

PI = LLMStatusCode.LLM_PARAM_INVALID
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
both_methods = pytest.mark.parametrize("method", METHODS)
all_paths = pytest.mark.parametrize("path", PATHS)
SHORT, LONG = (Outcome(None, None, "", short) for short in (True, False))


def refused(peer: Peer, method: str, cluster_id: int, status: LLMStatusCode, **kwargs: Any) -> Outcome:
    """The call fails with this status, now and when it is tried again."""
    for _ in range(2):
        outcome: Outcome = peer.call(attempt, method, cluster_id, [1], [2], **kwargs)
        assert (outcome.error, outcome.status) == ("LLMException", status), outcome
    return outcome


def check_move(
    here: Peer, there: Peer, method: str, expected: Outcome, *, source: str = SOURCE, target: str = TARGET
) -> None:
    """The call succeeds as expected and puts the right bytes in place; ``source`` and ``target`` name caches."""
    giver, taker = (there, here) if method == "pull_blocks" else (here, there)
    before, bytes_ = blocks_of(taker, target), blocks_of(giver, source)
    assert here.call(attempt, method, there.cluster_id, [1, 9, 4], [8, 0, 3]) == expected
    assert same(blocks_of(taker, target), moved(bytes_, before, [1, 9, 4], [8, 0, 3]))


def renew(peer: Peer, name: str, tensors: int = TENSORS, blocks: int = BLOCKS, **kwargs: object) -> str:
    """A newer cache takes the model id of an older one, which stays registered; the name of the newer one."""
    new = f"newer {name}"
    peer.call("register_blocks", new, tensors, blocks, BLOCK_BYTES, model_id=MODELS[name], seed=99, **kwargs)
    return new


@all_paths
def test_the_local_cache_is_unregistered(peers: Peers, path: str) -> None:
    client, server = make_pair(peers, path)
    for method in METHODS:
        theirs, ours = sides_of(method)
        before = client.memory(ours), server.memory(theirs)
        client.call(forget, ours)
        outcome = refused(client, method, 2, NOT_EXIST)
        assert "there is no local cache" in outcome.text
        assert same(client.memory(ours), before[0])
        assert same(server.memory(theirs), before[1])


@all_paths
def test_the_remote_cache_is_unregistered(peers: Peers, path: str) -> None:
    client, server = make_pair(peers, path)
    for method in METHODS:
        theirs, ours = sides_of(method)
        before = client.memory(ours), server.memory(theirs)
        server.call(forget, theirs)
        refused(client, method, 2, NOT_EXIST)
        assert same(client.memory(ours), before[0])
        assert same(server.memory(theirs), before[1])
        new = renew(server, theirs)
        check_move(client, server, method, LONG, **{theirs: new})
        check_move(client, server, method, SHORT, **{theirs: new})


@all_paths
def test_a_newer_cache_takes_the_model_id(peers: Peers, path: str) -> None:
    """The bytes come from, or go to, the newer one; once that is gone there is none."""
    client, server = make_pair(peers, path)
    for method in METHODS:
        theirs, _ = sides_of(method)
        old = server.memory(theirs)
        new = renew(server, theirs)
        check_move(client, server, method, LONG, **{theirs: new})
        check_move(client, server, method, SHORT, **{theirs: new})
        assert same(server.memory(theirs), old)
        server.call(forget, new)
        refused(client, method, 2, NOT_EXIST)


def pairings(node: Node, cluster_id: int) -> int:
    """In the child: how many it keeps for a peer."""
    return len(node.manager._engine._core.table.get(cluster_id).pairings)


@all_paths
@both_methods
def test_pairings_do_not_outlive_their_caches(peers: Peers, path: str, method: str) -> None:
    client, _ = make_pair(peers, path)
    ours = sides_of(method)[1]
    before = client.call(pairings, 2)
    for _ in range(3):
        client.call(renew_unnamed, ours)
        assert client.call(attempt, method, 2, [1], [2]) == LONG
        assert client.call(attempt, method, 2, [1], [2]) == SHORT
        assert client.call(pairings, 2) == before
    client.call("unregister", ours)
    assert client.call(pairings, 2) == before - 1


def renew_unnamed(node: Node, name: str) -> None:
    """In the child: another cache for the name, after the one before has gone."""
    node.unregister(name)
    node.register_blocks(name, TENSORS, BLOCKS, BLOCK_BYTES, seed=5)


def use(node: Node, name: str) -> None:
    """In the child: what a transfer to a slow peer does to a cache."""
    node.extra["used"] = node.manager._engine._core.catalogue.pin(node.caches[name].cache_id)


def is_hidden(node: Node) -> bool:
    """In the child: whether the cache in use is being taken back."""
    return bool(node.extra["used"].hidden)


def end_use(node: Node) -> None:
    """In the child."""
    node.manager._engine._core.catalogue.unpin(node.extra["used"])


@all_paths
@both_methods
def test_a_newer_cache_is_found_while_the_older_one_is_taken_back(peers: Peers, path: str, method: str) -> None:
    """A transfer of the owner still uses the older one, so that unregistering it waits."""
    client, server = make_pair(peers, path)
    theirs = sides_of(method)[0]
    server.call(use, theirs)
    going = server.begin(forget, theirs)
    until = time.monotonic() + TIMEOUT_S
    while not server.call(is_hidden):
        assert time.monotonic() < until
    server.call("register_blocks", "newer", TENSORS, BLOCKS, BLOCK_BYTES, model_id=MODELS[theirs], seed=99)
    names = {"source": "newer"} if method == "pull_blocks" else {"target": "newer"}
    check_move(client, server, method, LONG, **names)
    check_move(client, server, method, SHORT, **names)
    assert not going.done()
    server.call(end_use)
    going.result(TIMEOUT_S)
    client.call(attempt, method, 2, [1], [2])
    check_move(client, server, method, SHORT, **names)


@all_paths
@pytest.mark.parametrize("shape", [{"blocks": 2}, {"tensors": 2}], ids=["blocks", "tensors"])
def test_the_newer_cache_does_not_fit(peers: Peers, path: str, shape: dict[str, int]) -> None:
    client, server = make_pair(peers, path)
    for method in METHODS:
        new = renew(server, sides_of(method)[0], **shape)  # type: ignore[arg-type]
        before = client.memory(TARGET), server.memory(new)
        for _ in range(2):
            outcome = client.call(attempt, method, 2, [2], [2])
            assert (outcome.error, outcome.status, outcome.short) == ("LLMException", PI, False)
        assert same(client.memory(TARGET), before[0])
        assert same(server.memory(new), before[1])


@all_paths
def test_the_peer_is_finalized(peers: Peers, path: str) -> None:
    client, server = make_pair(peers, path)
    server.call("finalize")
    for method in METHODS:
        refused(client, method, 2, NOT_LINKED)


@pytest.mark.parametrize("path", ["process_vm", "tcp"])
@both_methods
def test_the_peer_is_killed_and_started_again(peers: Peers, path: str, method: str) -> None:
    client, server = make_pair(peers, path)
    before = client.memory(TARGET)
    server.process.kill()
    outcome = client.call(attempt, method, 2, [1], [2])
    assert outcome.status in {NOT_LINKED, LLMStatusCode.LLM_FAILED}
    assert client.call("unlink", 2, force=True) == OK
    refused(client, method, 2, NOT_LINKED)
    assert same(client.memory(TARGET), before)
    assert server.address is not None
    again = peers.make(2, paths=path, listen_ip_info=f"127.0.0.1:{server.address[1]}")
    again.call(watch)
    for name, model_id in MODELS.items():
        again.call("register_blocks", name, TENSORS, BLOCKS, BLOCK_BYTES, model_id=model_id, seed=70 + model_id)
    assert client.link(again) == OK
    check_move(client, again, method, LONG)
    check_move(client, again, method, SHORT)


@all_paths
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("who", ["client", "server"])
def test_unlink_and_link_again(peers: Peers, path: str, force: bool, who: str) -> None:
    client, server = make_pair(peers, path)
    here, there = (client, server) if who == "client" else (server, client)
    address = None if force else ("127.0.0.1", 1)
    assert here.call("unlink", there.cluster_id, address, force=force) == OK
    for method in METHODS:
        refused(here, method, there.cluster_id, NOT_LINKED)
    if not force:
        for method in METHODS:
            refused(there, method, here.cluster_id, NOT_LINKED)
    assert there.call("unlink", here.cluster_id, force=True) == OK
    assert client.link(server) == OK
    for method in METHODS:
        check_move(client, server, method, LONG)
        check_move(client, server, method, SHORT)
        check_move(server, client, method, LONG)
        check_move(server, client, method, SHORT)


def deny(node: Node) -> None:
    """In the child: the system permits the process_vm calls no longer."""

    def fail(*_args: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    syscalls.bare_process_vm_readv = syscalls.bare_process_vm_writev = lambda *_args: -1
    syscalls.process_vm_readv = syscalls.process_vm_writev = fail


@both_methods
def test_the_path_is_denied(peers: Peers, method: str) -> None:
    """The transfer in hand goes over the next path, and so do all later ones."""
    client, server = make_pair(peers, "process_vm,tcp")
    assert client.call("path", 2) == "process_vm"
    client.call(deny)
    check_move(client, server, method, LONG)
    assert client.call("path", 2) == "tcp"
    for each in METHODS:
        check_move(client, server, each, SHORT if each == method else LONG)
        check_move(client, server, each, SHORT)


@all_paths
@pytest.mark.parametrize("closed", ["here", "there"])
def test_caches_that_are_not_for_peers(peers: Peers, path: str, closed: str) -> None:
    """Such a cache never becomes half of a pairing, nor does it inherit one."""
    client, server = make_pair(peers, path)
    for method in METHODS:
        theirs, ours = sides_of(method)
        peer, name = (client, ours) if closed == "here" else (server, theirs)
        private = renew(peer, name, remote_accessible=False)
        touched = theirs if closed == "here" else private
        before = server.memory(touched)
        outcome = refused(client, method, 2, PI, cache=private if closed == "here" else None)
        assert "not remote accessible" in outcome.text
        assert same(server.memory(touched), before)


@all_paths
def test_message_mode_has_no_pairings(peers: Peers, path: str) -> None:
    """There the owner is asked each time."""
    properties: dict[str, object] = {"paths": path, "enable_remote_cache_accessible": False}
    server = peers.make(2, **properties)
    client = peers.make(1, process=server.process if path == "inprocess" else None, listen=False, **properties)
    with_caches(client, server)
    assert client.link(server) == OK
    for _ in range(3):
        check_move(client, server, "pull_blocks", LONG)
    refused(client, "push_blocks", 2, PI)
    server.call(forget, SOURCE)
    refused(client, "pull_blocks", 2, NOT_EXIST)


@all_paths
def test_the_own_engine_is_finalized(peers: Peers, path: str) -> None:
    client, _ = make_pair(peers, path)
    client.call(finalize_but_keep_the_manager)
    for method in METHODS:
        outcome = refused(client, method, 2, PI)
        assert "finalized" in outcome.text


def finalize_but_keep_the_manager(node: Node) -> None:
    """In the child: the object forgets its manager, the user may not have."""
    manager = node.manager
    node.datadist.finalize()

    class Shell:
        cache_manager = manager

    node.datadist = Shell()  # type: ignore[assignment]


@pytest.mark.parametrize("path", ["process_vm", "tcp"])
def test_a_forked_child(peers: Peers, path: str) -> None:
    """It gets an error, and the link of its parent goes on."""
    client, server = make_pair(peers, path)
    before = client.memory(TARGET), server.memory(TARGET)
    for method in METHODS:
        outcome = client.call(attempt_in_fork, method)
        assert outcome.startswith("LLM_FAILED")
        assert "fork" in outcome
    assert same(client.memory(TARGET), before[0])
    assert same(server.memory(TARGET), before[1])
    for each in METHODS:
        check_move(client, server, each, SHORT)


def attempt_in_fork(node: Node, method: str) -> str:
    """In the child: the call in a grandchild; status and text."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12
        child = os.fork()
    if child == 0:
        outcome = attempt(node, method, 2, [1], [2])
        os.write(writer, f"{outcome.status.name if outcome.status else None} {outcome.text}".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text


@all_paths
@pytest.mark.parametrize("tensors", [1, 3])
def test_an_odd_number_of_tensors_can_be_pulled_but_has_no_layers_to_push(
    peers: Peers, path: str, tensors: int
) -> None:
    """A pull makes the pairing known; a push of the same two caches is as if it were not."""
    client, server = make_pair(peers, path)
    for peer in (client, server):
        for name, model_id in MODELS.items():
            peer.call("register_blocks", name, tensors, BLOCKS, BLOCK_BYTES, model_id=model_id, seed=peer.cluster_id)
    check_move(client, server, "pull_blocks", LONG)
    check_move(client, server, "pull_blocks", SHORT)
    pull = {"cache": SOURCE, "model_id": MODELS[TARGET]}
    assert [client.call(attempt, "pull_blocks", 2, [1], [2], **pull) for _ in range(2)] == [LONG, SHORT]
    before = server.memory(TARGET)
    for _ in range(2):
        outcome = client.call(attempt, "push_blocks", 2, [1], [2])
        assert (outcome.status, outcome.short) == (None if tensors == 1 else PI, False)
    assert same(server.memory(TARGET), before)


@all_paths
@both_methods
def test_a_transfer_that_has_succeeded_says_so_though_its_link_ends(peers: Peers, path: str, method: str) -> None:
    """The bytes are in place; that the link has gone a moment later does not make that an error."""
    client, _ = make_pair(peers, path)
    client.call(unlink_after_the_next_transfer)
    assert client.call(attempt, method, 2, [1], [2], forbid=True) == LONG
    assert client.call(unlinked)


def unlink_after_the_next_transfer(node: Node) -> None:
    """In the child: the link is ended by force as soon as no transfer runs over it."""
    real, once = Link.end, threading.Lock()
    node.extra["unlinked"] = False

    def end(self: Link, ticket: object) -> None:
        real(self, ticket)
        if self.cluster_id == 2 and once.acquire(blocking=False):
            node.extra["unlinked"] = node.unlink(2, force=True) is OK

    Link.end = end  # type: ignore[method-assign]


def unlinked(node: Node) -> bool:
    """In the child."""
    return bool(node.extra["unlinked"])


@all_paths
def test_what_does_not_concern_a_pairing_does_not_end_it(peers: Peers, path: str) -> None:
    client, server = make_pair(peers, path)
    for peer in (client, server):
        peer.call("register_blocks", "more", TENSORS, BLOCKS, BLOCK_BYTES, model_id=3)
    for method in METHODS:
        for here, there in ((client, server), (server, client)):
            check_move(here, there, method, SHORT)


@pytest.mark.parametrize("path", ["process_vm", "tcp"])
def test_two_peers_are_told_apart(peers: Peers, path: str) -> None:
    """Same model ids, same local caches; when one ends, the other goes on."""
    client, one = make_pair(peers, path)
    two = peers.make(3, paths=path)
    with_caches(two)
    assert client.link(two) == OK
    warm(client, two)
    for method in METHODS:
        check_move(client, one, method, SHORT)
        check_move(client, two, method, SHORT)
    one.process.kill()
    for method in METHODS:
        check_move(client, two, method, SHORT)


@all_paths
def test_a_deadline_that_has_passed(peers: Peers, path: str) -> None:
    """An error, whatever the path."""
    client, server = make_pair(peers, path)
    for method in METHODS:
        client.call(set_timeout, 0.0)
        outcome = client.call(attempt, method, 2, [1], [2])
        assert outcome.status is LLMStatusCode.LLM_TIMEOUT
        client.call(set_timeout, TIMEOUT_S)
        check_move(client, server, method, SHORT)


def set_timeout(node: Node, seconds: float) -> None:
    """In the child: the deadline of the transfers that begin from now on."""
    node.manager._engine._timeout_s = seconds


def register_pages(node: Node, name: str) -> None:
    """In the child: a cache in pages of its own, which can be made inaccessible."""
    size = -(-BLOCKS * BLOCK_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, TENSORS * size)
    base = np.frombuffer(pages, dtype=np.uint8).ctypes.data
    addrs = [base + n * size for n in range(TENSORS)]
    desc = CacheDesc(TENSORS, [BLOCKS, BLOCK_BYTES], DataType.DT_UINT8)
    key = BlocksCacheKey(node.datadist.cluster_id, MODELS[name])
    node.caches[name] = node.manager.register_blocks_cache(desc, addrs, key)
    node.extra[name] = pages, base


def protect(node: Node, name: str, protection: int) -> None:
    """In the child: ``mprotect`` of all pages of such a cache."""
    pages, base = node.extra[name]
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert mprotect(base, len(pages), protection) == 0


@all_paths
@both_methods
@pytest.mark.parametrize("where", ["here", "there"])
def test_memory_that_cannot_be_accessed_any_more(peers: Peers, path: str, method: str, where: str) -> None:
    """An error as from a first transfer, no crash; and when it can be accessed again everything works."""
    client, server = make_pair(peers, path)
    theirs, ours = sides_of(method)
    client.call(register_pages, ours)
    server.call(register_pages, theirs)
    assert [client.call(attempt, method, 2, [1], [2]) for _ in range(2)] == [LONG, SHORT]
    owner, name = (client, ours) if where == "here" else (server, theirs)
    owner.call(protect, name, 0)
    for forbid in (True, False, False):
        outcome = client.call(attempt, method, 2, [1], [2], forbid=forbid)
        assert (outcome.error, outcome.status) == ("LLMException", LLMStatusCode.LLM_FAILED)
        assert "mapped" in outcome.text
    owner.call(protect, name, mmap.PROT_READ | mmap.PROT_WRITE)
    assert client.call(attempt, method, 2, [1], [2]) in (LONG, SHORT)
    assert client.call(attempt, method, 2, [1], [2]) == SHORT


CYCLES = 50


@all_paths
def test_pairings_of_caches_that_are_gone_are_not_kept(peers: Peers, path: str) -> None:
    """A link may live for weeks, and caches come and go."""
    client, server = make_pair(peers, path)
    for side in (client, server):
        start = client.call(pairings, 2)
        for _ in range(CYCLES):
            name = TARGET if side is client else SOURCE
            side.call("register_blocks", name, TENSORS, BLOCKS, BLOCK_BYTES, model_id=MODELS[name])
            assert client.call(attempt, "pull_blocks", 2, [1], [2]) == LONG
        assert client.call(pairings, 2) < start + CYCLES // 2
