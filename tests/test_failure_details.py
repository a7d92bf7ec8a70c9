"""What the exception of a failed transfer says is true: above all which blocks are whole."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheKey, LLMException, LLMStatusCode
from llm_datadist.engine import short
from llm_datadist.engine.service import CacheService
from llm_datadist.paths import one_sided, process_vm
from llm_datadist.paths.tcp_stream import Stream
from llm_datadist.wire import messages
from peers import GUARD, POISON, TIMEOUT_S, Node
from stopping import go_on, stop

if TYPE_CHECKING:
    from llm_datadist.observe.events import Served, Transfer
    from peers import Peer, Peers

OK = LLMStatusCode.LLM_SUCCESS
BLOCKS = 1000
BLOCK_BYTES = 16 << 10
SPARE = 2 * BLOCKS
"""Blocks of the destination: every other one is not named."""
SEED = 7


class Gate:
    """Lets the first calls pass, and holds the others until it is opened."""

    def __init__(self, passes: int) -> None:
        self._left = passes
        self._lock = threading.Lock()
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> None:
        with self._lock:
            self._left -= 1
            held = self._left < 0
        if held:
            self.reached.set()
            self.open.wait(TIMEOUT_S)


def hold_sends(node: Node) -> None:
    """In the child that serves over TCP: of each reply, the header and 40 % of the ranges are sent; then it hangs."""
    gate = node.extra["gate"] = Gate(0)
    send = Stream.send

    def begin(stream: Stream, memory: np.ndarray, deadline: Any) -> None:
        send(stream, memory[: 1 + len(memory) * 2 // 5].copy(), deadline)
        gate()
        send(stream, memory[1 + len(memory) * 2 // 5 :].copy(), deadline)

    Stream.send = begin  # type: ignore[method-assign]


def hold_copies(node: Node) -> None:
    """In the child that copies by itself: five parts are moved, then it waits."""
    gate = node.extra["gate"] = Gate(5)
    move = one_sided.move

    def late(*args: Any) -> None:
        gate()
        move(*args)

    one_sided.move = late


def wait_at_gate(node: Node) -> bool:
    """In the child."""
    return bool(node.extra["gate"].reached.wait(TIMEOUT_S))


def open_gate(node: Node) -> None:
    """In the child."""
    node.extra["gate"].open.set()


def names(tensors: int) -> dict[str, Any]:
    """Source blocks in disorder, with a repetition of a destination: the last pair counts."""
    sources = np.random.default_rng(tensors).permutation(BLOCKS)
    return {"src": [*sources.tolist(), 5], "dst": [*range(0, SPARE, 2), 4]}


def attempt(node: Node, method: str, tensors: int, cluster_id: int) -> LLMException:
    """In the child: the failure of a transfer between "mine" and the peer's cache."""
    blocks = names(tensors)
    return failure_of(node, method, cluster_id, blocks["src"], blocks["dst"], tensor_num_per_layer=1)


def failure_of(node: Node, method: str, cluster_id: int, *args: Any, **kwargs: Any) -> LLMException:
    """In the child."""
    try:
        getattr(node.manager, method)(BlocksCacheKey(cluster_id, 0), node.caches["mine"], *args, **kwargs)
    except LLMException as error:
        return error
    message = "it did not fail"
    raise AssertionError(message)


def pair(peers: Peers, tensors: int, **properties: Any) -> tuple[Peer, Peer]:
    """An owner with blocks to read, and one who is linked to it and has twice the room for them."""
    owner, client = peers.make(1, **properties), peers.make(2, listen=False, **properties)
    owner.call("register_blocks", "mine", tensors, BLOCKS, BLOCK_BYTES, model_id=0, seed=SEED)
    client.call("register_blocks", "mine", tensors, SPARE, BLOCK_BYTES)
    assert client.link(owner) == OK
    return owner, client


def check_blocks(error: LLMException, client: Peer, source: list[np.ndarray]) -> tuple[int, ...]:
    """What it calls finished has the right bytes, nothing is touched that was not named; the finished blocks."""
    assert error.finished_blocks is not None
    wanted = dict(zip(names(len(source))["dst"], names(len(source))["src"], strict=True))
    assert set(error.finished_blocks) <= set(wanted)
    for theirs, ours in zip(source, client.memory("mine"), strict=True):
        there = theirs[GUARD:-GUARD].reshape(BLOCKS, BLOCK_BYTES)
        here = ours[GUARD:-GUARD].reshape(SPARE, BLOCK_BYTES)
        assert (ours[:GUARD] == POISON).all()
        assert (ours[-GUARD:] == POISON).all()
        assert (here[1::2] == POISON).all()
        for block in error.finished_blocks:
            assert np.array_equal(here[block], there[wanted[block]]), block
    return error.finished_blocks


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize(("paths", "side"), [("tcp", "owner"), ("process_vm", "client")])
def test_owner_killed_in_the_middle_of_a_pull(peers: Peers, paths: str, side: str, tensors: int) -> None:
    """Of 1000 blocks some are there when the owner is killed: these, and only these, are called finished."""
    owner, client = pair(peers, tensors, paths=paths)
    source = owner.memory("mine")
    held = owner if side == "owner" else client
    held.call(hold_sends if side == "owner" else hold_copies)
    running = client.begin(attempt, "pull_blocks", tensors, 1)
    assert held.call(wait_at_gate)
    owner.process.kill()
    if side == "client":
        client.call(open_gate)
    error = running.result(TIMEOUT_S)
    finished = check_blocks(error, client, source)
    assert isinstance(error, ConnectionError) or error.status_code is LLMStatusCode.LLM_FAILED
    assert (error.peer, error.operation, error.path, error.phase) == (1, "pull_blocks", paths, "transfer")
    assert error.retryable
    assert error.quiescent
    assert error.bytes_done is not None
    assert 0 < error.bytes_done < tensors * BLOCKS * BLOCK_BYTES
    if tensors == 1:  # the second tensor comes after the first, so that no block has both halves before that
        assert error.bytes_done == len(finished) * BLOCK_BYTES


class Kept:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []

    def transfer(self, event: Transfer) -> None:
        """See ``Observer``."""
        self.transfers.append(event)

    def served(self, event: Served) -> None:
        """See ``Observer``."""


def attempt_again(node: Node, tensors: int) -> tuple[LLMException, list[Transfer]]:
    """In the child: the failure of a pull between caches that are known to fit; it must go the short way.

    And what observers are told of it.
    """

    def long_way(*_args: Any) -> None:
        message = "it went the long way"
        raise AssertionError(message)

    node.manager._pull_blocks_request = long_way
    short.MOST_BLOCKS = 2 * BLOCKS
    blocks = names(tensors)
    sources = dict(zip(blocks["dst"], blocks["src"], strict=True))
    kept = Kept()
    node.datadist.observe(kept)
    return failure_of(node, "pull_blocks", 1, list(sources.values()), list(sources)), kept.transfers


@pytest.mark.parametrize("tensors", [1, 2])
@pytest.mark.parametrize(("paths", "side"), [("tcp", "owner"), ("process_vm", "client")])
def test_a_later_pull_tells_what_is_finished_too(peers: Peers, paths: str, side: str, tensors: int) -> None:
    """The same between caches that have been found to fit each other."""
    owner, client = pair(peers, tensors, paths=paths)
    source = owner.memory("mine")
    client.call(pull_one)
    held = owner if side == "owner" else client
    held.call(hold_sends if side == "owner" else hold_copies)
    running = client.begin(attempt_again, tensors)
    assert held.call(wait_at_gate)
    owner.process.kill()
    if side == "client":
        client.call(open_gate)
    error, (event,) = running.result(TIMEOUT_S)
    finished = check_blocks(error, client, source)
    assert (error.peer, error.operation, error.path, error.phase) == (1, "pull_blocks", paths, "transfer")
    assert (event.status, event.path) == (error.status_code.name, paths)
    assert event.num_bytes == tensors * BLOCKS * BLOCK_BYTES
    assert error.bytes_done is not None
    assert 0 < error.bytes_done < tensors * BLOCKS * BLOCK_BYTES
    if tensors == 1:
        assert error.bytes_done == len(finished) * BLOCK_BYTES


def test_owner_stalls_in_the_middle_of_a_pull(peers: Peers) -> None:
    """The same for a timeout; the link goes on."""
    owner, client = pair(peers, 1, paths="tcp", sync_kv_timeout=1500)
    source = owner.memory("mine")
    owner.call(hold_sends)
    error: LLMException = client.begin(attempt, "pull_blocks", 1, 1).result(TIMEOUT_S)
    assert isinstance(error, TimeoutError)
    assert error.status_code is LLMStatusCode.LLM_TIMEOUT
    finished = check_blocks(error, client, source)
    assert 0 < len(finished) < BLOCKS
    assert error.bytes_done == len(finished) * BLOCK_BYTES
    owner.call(open_gate)
    client.call(pull_one)


def pull_one(node: Node) -> None:
    """In the child."""
    node.manager.pull_blocks(BlocksCacheKey(1, 0), node.caches["mine"], [0], [0])


def hold_receives(node: Node) -> None:
    """In the child that is written to over TCP: the first request is stored, the others hang before their last byte."""
    gate = node.extra["gate"] = Gate(1)
    receive = Stream.receive

    def late(stream: Stream, memory: np.ndarray, deadline: Any, begin: memoryview) -> None:
        gate()
        receive(stream, memory, deadline, begin)

    Stream.receive = late  # type: ignore[method-assign]


def test_peer_that_does_not_confirm_that_it_has_stopped(peers: Peers) -> None:
    """A push whose second half hangs at the peer: the first half is finished, and it is said that all is not quiet."""
    owner, client = peers.make(1, paths="tcp", sync_kv_timeout=6000), peers.make(2, listen=False, paths="tcp")
    owner, client = client, owner  # the one who listens pushes
    owner.call("register_blocks", "mine", 1, SPARE, BLOCK_BYTES, model_id=0)
    client.call("register_blocks", "mine", 1, BLOCKS, BLOCK_BYTES, seed=SEED)
    assert owner.link(client) == OK
    owner.call(hold_receives)
    error: LLMException = client.begin(attempt, "push_blocks", 1, 2).result(TIMEOUT_S)
    assert isinstance(error, TimeoutError)
    assert not error.quiescent
    finished = check_blocks(error, owner, client.memory("mine"))
    assert 0 < len(finished) < BLOCKS
    owner.call(open_gate)


def another_start_time(_node: Node) -> None:
    """In the child: another process has the pid of every peer now."""
    process_vm.start_time = lambda _pid: 0


def test_what_may_have_come_from_another_process_is_not_believed(peers: Peers) -> None:
    """The owner dies and its pid is taken over in the middle of a pull: nothing is said of what was read."""
    owner, client = pair(peers, 1, paths="process_vm")
    client.call(hold_copies)
    client.call(another_start_time)
    running = client.begin(attempt, "pull_blocks", 1, 1)
    assert client.call(wait_at_gate)
    owner.process.kill()
    client.call(open_gate)
    error: LLMException = running.result(TIMEOUT_S)
    assert isinstance(error, ConnectionError)
    assert error.finished_blocks is error.bytes_done is None


def open_gate_late(node: Node, seconds: float) -> None:
    """In the child: when a deadline that runs has surely passed."""
    threading.Event().wait(seconds)
    open_gate(node)


def test_what_was_unregistered_meanwhile_is_not_believed(peers: Peers) -> None:
    """The memory that was read may have held something else."""
    owner, client = pair(peers, 1, paths="process_vm", sync_kv_timeout=1500)
    client.call(hold_copies)
    running = client.begin(attempt, "pull_blocks", 1, 1)
    assert client.call(wait_at_gate)
    taken = owner.begin("unregister", "mine")
    owner.call("wait_until_hidden", "mine")
    client.call(open_gate_late, 1.6)
    error: LLMException = running.result(TIMEOUT_S)
    assert isinstance(error, TimeoutError)
    assert error.finished_blocks is error.bytes_done is None
    taken.result(TIMEOUT_S)


def refuse_to_finish(_node: Node) -> None:
    """In the child: in message mode it says that it has held the source for too long."""

    def refuse(*_: object) -> messages.Refuse:
        return messages.Refuse(code=int(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST), reason="held too long")

    CacheService.finish = refuse  # type: ignore[method-assign]


def pull_by_key(node: Node) -> LLMException:
    """In the child."""
    with pytest.raises(LookupError) as caught:
        node.manager.pull_blocks(CacheKey(1, 5), node.caches["mine"], [], [3, 1])
    assert isinstance(caught.value, LLMException)
    return caught.value


def test_everything_is_there_when_the_end_is_not_confirmed(peers: Peers) -> None:
    """Message mode: the bytes have come, but the owner does not agree that it is done."""
    owner = peers.make(1, enable_remote_cache_accessible=False)
    client = peers.make(2, enable_remote_cache_accessible=False, listen=False)
    owner.call("register_contiguous", "src", 1, 1, 2 * BLOCK_BYTES, keys=[CacheKey(1, 5)], seed=SEED)
    client.call("register_blocks", "mine", 1, 4, BLOCK_BYTES)
    assert client.link(owner) == OK
    owner.call(refuse_to_finish)
    error = client.call(pull_by_key)
    assert (error.phase, error.peer) == ("confirm", 1)
    assert "cluster 1: held too long" in str(error)
    here = client.memory("mine")[0][GUARD:-GUARD].reshape(4, BLOCK_BYTES)
    assert np.array_equal(here[[3, 1]].ravel(), owner.memory("src")[0][GUARD:-GUARD])
    assert (here[[0, 2]] == POISON).all()


def test_a_stopped_owner_is_looked_up_in_vain(peers: Peers) -> None:
    """Message mode: nothing was moved."""
    owner = peers.make(1, enable_remote_cache_accessible=False)
    client = peers.make(2, enable_remote_cache_accessible=False, listen=False, sync_kv_timeout=300)
    client.call("register_blocks", "mine", 1, 4, BLOCK_BYTES)
    assert client.link(owner) == OK
    stop(owner.process.pid)
    try:
        error = client.call(pull_in_vain)
    finally:
        go_on(owner.process.pid)
    assert (error.phase, error.peer, error.retryable, error.quiescent) == ("lookup", 1, True, True)
    assert (client.memory("mine")[0] == POISON).all()


def pull_in_vain(node: Node) -> LLMException:
    """In the child."""
    with pytest.raises(TimeoutError) as caught:
        node.manager.pull_blocks(CacheKey(1, 5), node.caches["mine"], [], [0])
    assert isinstance(caught.value, LLMException)
    return caught.value
