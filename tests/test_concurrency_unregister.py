"""Memory that is taken back at the worst moment: between the copy of a small transfer and its last look at the peer."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist.memory import syscalls
from llm_datadist.utils.deadline import Deadline
from peers import GUARD, TIMEOUT_S, Node, Peer, Peers, close_off
from short_kit import BLOCK_BYTES, BLOCKS, METHODS, MODELS, OK, TENSORS, attempt, sides_of, warm, watch

if TYPE_CHECKING:
    from concurrent.futures import Future

NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
CALLS = {"pull_blocks": "bare_process_vm_readv", "push_blocks": "bare_process_vm_writev"}


def make_pair(peers: Peers, path: str) -> tuple[Peer, Peer]:
    """(client, server), linked and warm; over mapped with memory from pools."""
    first, properties = None, {"paths": path, "mem_pool_cfg": '{"memory_size": 4194304, "page_shift": 12}'}
    if path == "mapped":
        first = close_off
    server, client = (
        peers.make(number, process=peers.process(first), listen=number == 2, **properties) for number in (2, 1)
    )
    for peer in (client, server):
        peer.call("use_pool", path == "mapped")
        peer.call(watch)
        for name, model_id in MODELS.items():
            seed = 10 * peer.cluster_id + model_id
            peer.call("register_blocks", name, TENSORS, BLOCKS, BLOCK_BYTES, model_id=model_id, seed=seed)
    assert client.link(server) == OK
    warm(client, server)
    return client, server


def hold_after_the_copy(node: Node, method: str) -> None:
    """In the child: the next small transfer is held between its system call and what follows, until ``go_on``."""
    node.extra["copied"], node.extra["gate"] = threading.Event(), threading.Event()
    name = CALLS[method]
    real = getattr(syscalls, name)

    def held(*args: Any) -> int:
        setattr(syscalls, name, real)
        done: int = real(*args)
        node.extra["copied"].set()
        assert node.extra["gate"].wait(TIMEOUT_S)
        return done

    setattr(syscalls, name, held)


def wait_copied(node: Node) -> bool:
    """In the child."""
    return bool(node.extra["copied"].wait(TIMEOUT_S))


def epoch_of(node: Node, cluster_id: int) -> int:
    """In the child: the peer's epoch, as its table says."""
    return int(node.manager._engine._core.table.get(cluster_id)._route.path.view.epoch)


def wait_epoch(node: Node, cluster_id: int, old: int) -> bool:
    """In the child: wait until the peer has another epoch."""
    deadline, pause = Deadline.after(TIMEOUT_S), threading.Event()
    while epoch_of(node, cluster_id) == old:
        if deadline.expired():
            return False
        pause.wait(0.001)
    return True


def go_on(node: Node) -> None:
    """In the child."""
    node.extra["gate"].set()


def take_back_meanwhile(
    client: Peer, server: Peer, method: str, newer: bool
) -> tuple[Future[Any], Future[Any], list[Any]]:
    """A small transfer during which the peer takes its cache back, perhaps after it has made a newer one.

    Futures of the transfer and of the peer; and the memory that is taken back, as it was before.
    """
    theirs, _ = sides_of(method)
    old, before = client.call(epoch_of, 2), server.memory(theirs)
    client.call(hold_after_the_copy, method)
    moving = client.begin(attempt, method, 2, [1], [2])
    assert client.call(wait_copied)
    if newer:
        server.call(keep_the_old_one, theirs)
        server.call("register_blocks", theirs, TENSORS, BLOCKS, BLOCK_BYTES, model_id=MODELS[theirs], seed=99)
    taking_back = server.begin("unregister", "old" if newer else theirs)
    assert client.call(wait_epoch, 2, old)
    return moving, taking_back, before


def keep_the_old_one(node: Node, name: str) -> None:
    """In the child: under another name."""
    node.caches["old"], node.arenas["old"] = node.caches.pop(name), node.arenas.pop(name)


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["process_vm", "mapped"])
def test_what_was_copied_from_a_cache_that_has_gone_does_not_count(
    peers: Peers, path: str, method: str, newer: bool
) -> None:
    """The peer may have used the memory for something else while the kernel copied: the transfer is done anew."""
    client, server = make_pair(peers, path)
    theirs, ours = sides_of(method)
    moving, taking_back, _ = take_back_meanwhile(client, server, method, newer)
    assert not taking_back.done()  # the transfer still runs
    client.call(go_on)
    outcome = moving.result(TIMEOUT_S)
    taking_back.result(TIMEOUT_S)
    if not newer:
        assert (outcome.error, outcome.status) == ("LLMException", NOT_EXIST), outcome
        return
    assert (outcome.error, outcome.short) == (None, False), outcome
    local, remote = (
        [tensor[GUARD:-GUARD].reshape(BLOCKS, -1) for tensor in peer.memory(name)]
        for peer, name in ((client, ours), (server, theirs))
    )
    for here, there in zip(local, remote, strict=True):
        pair = (there[1], here[2]) if method == "pull_blocks" else (here[1], there[2])
        assert (pair[0] == pair[1]).all()
