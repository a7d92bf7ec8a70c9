"""Eight threads in each of two processes call everything that is public, until one side finalizes, and beyond."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.utils.deadline import Deadline
from peers import GUARD, POISON, TIMEOUT_S, Node, Peers
from storm_kit import BLOCK_BYTES, BLOCKS, DOCUMENTED, LANDING, TENSORS, THREADS, Storm
from test_links import pull_one, with_caches

S = LLMStatusCode
OK = S.LLM_SUCCESS
LINKERS, LINKS = 16, 12
MOST_CALLS = 500
POOL = '{"memory_size": 33554432, "page_shift": 12}'


Left = tuple[list[str], int]


def left(node: Node) -> Left:
    """In the child: descriptors of the process by kind, and how many threads of engines."""
    gc.collect()
    kinds = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one with which we look
            kinds.append(str(entry.readlink()).partition(":")[0])
    return sorted(kinds), sum("datadist" in thread.name for thread in threading.enumerate())


def settles_at(node: Node, wanted: Left) -> Left:
    """In the child: what is left, as soon as it is what is wanted, or at last."""
    deadline, pause = Deadline.after(TIMEOUT_S / 2), threading.Event()
    while (found := left(node)) != wanted and not deadline.expired():
        pause.wait(0.01)
    return found


def init_again(node: Node) -> tuple[str, int] | None:
    """In the child: the same object with the same options."""
    node.datadist.init(node.config.generate_options())
    return node.datadist.listen_address


def begin(node: Node, other: int, address: tuple[str, int], use_pool: bool) -> None:
    """In the child: a landing cache for the peer's threads, and the own threads."""
    node.use_pool(use_pool)
    node.register_blocks("landing", TENSORS, THREADS * BLOCKS, BLOCK_BYTES, model_id=LANDING)
    node.extra["storm"] = Storm(node, other, address, use_pool=use_pool)


def wait_halfway(node: Node) -> bool:
    """In the child."""
    return bool(node.extra["storm"].wait_halfway())


def go_on(node: Node) -> None:
    """In the child."""
    node.extra["storm"].go_on.set()


def finalize(node: Node) -> None:
    """In the child."""
    node.extra["storm"].finalize()


def end(node: Node) -> tuple[dict[tuple[str, str], int], list[str]]:
    """In the child."""
    outcome: tuple[dict[tuple[str, str], int], list[str]] = node.extra.pop("storm").end()
    return outcome


def guards_hold(node: Node) -> bool:
    """In the child."""
    memory = node.arenas["landing"].memory
    return all((edge == POISON).all() for tensor in memory for edge in (tensor[:GUARD], tensor[-GUARD:]))


@pytest.mark.parametrize("path", ["process_vm", "mapped", "tcp"])
def test_everything_at_once(peers: Peers, path: str) -> None:
    """Every outcome is a documented one, every byte is right, no call hangs, and nothing is left."""
    pool = {"mem_pool_cfg": POOL} if path == "mapped" else {}
    one, two = (peers.make(number, paths=path, **pool) for number in (1, 2))
    sides = ((one, two), (two, one))
    before = {}
    for peer, _ in sides:
        peer.call("finalize")
        before[peer] = peer.call(left)
        peer.address = peer.call(init_again)
    for peer, other in sides:
        peer.call(begin, other.cluster_id, other.address, path == "mapped")
    for peer, _ in sides:
        assert peer.call(wait_halfway)
    for peer, _ in sides:
        peer.call(go_on)
    one.call(finalize)
    found: dict[str, int] = {}
    for peer, _ in sides:
        outcomes, wrong = peer.call(end)
        assert not wrong, wrong[:5]
        for (call, outcome), count in outcomes.items():
            found[call] = found.get(call, 0) + count * (outcome == str(OK))
    assert all(found[call] for call in DOCUMENTED), found
    assert two.call(guards_hold)
    two.call("finalize")
    for peer, _ in sides:
        assert peer.call(settles_at, before[peer]) == before[peer]


class Linkers:
    """In the child: threads that link one cluster while others unlink it and pull from it."""

    def __init__(self, node: Node, other: int, address: tuple[str, int]) -> None:
        self._node, self._other = node, other
        self._info = node.cluster(other, address)
        self.statuses: set[LLMStatusCode] = set()
        self.made: list[tuple[float, float]] = []
        """Begin and end of each call that made a link."""
        self.ended: list[tuple[float, float]] = []
        """Begin and end of each call that unlinked."""
        self.unlinked: set[LLMStatusCode] = set()
        self.pulled: set[LLMStatusCode] = set()
        self._stop = threading.Event()
        works = [*[self._link] * LINKERS, *[self._unlink] * 2, *[self._pull] * 2]
        self.threads = [threading.Thread(target=work, daemon=True) for work in works]

    def _link(self) -> None:
        for _ in range(MOST_CALLS):
            if len(self.made) >= LINKS:
                return
            begin = time.monotonic()
            status = self._node.datadist.link_clusters([self._info], 10_000)[1][0]
            self.statuses.add(status)
            if status is OK:
                self.made.append((begin, time.monotonic()))
            else:
                self._stop.wait(0.005)

    def _unlink(self) -> None:
        while not self._stop.wait(0.01):
            begin = time.monotonic()
            self.unlinked.add(self._node.datadist.unlink_clusters([self._info], 10_000, True)[1][0])
            self.ended.append((begin, time.monotonic()))

    def _pull(self) -> None:
        while not self._stop.is_set():
            try:
                pull_one(self._node, self._other)
            except LLMException as error:
                self.pulled.add(error.status_code)
                self._stop.wait(0.001)
            else:
                self.pulled.add(OK)

    def run(self) -> list[threading.Thread]:
        """Let the linkers make all their calls; the threads that hang."""
        for thread in self.threads:
            thread.start()
        for thread in self.threads[:LINKERS]:
            thread.join(TIMEOUT_S)
        self._stop.set()
        for thread in self.threads[LINKERS:]:
            thread.join(TIMEOUT_S)
        return [thread for thread in self.threads if thread.is_alive()]


def storm_of_links(node: Node, other: int, address: tuple[str, int]) -> tuple[Any, ...]:
    """In the child: statuses of links, unlinks and pulls, how many hang, how many made a link, and while one was up."""
    linkers = Linkers(node, other, address)
    hanging = linkers.run()
    twice = 0
    made = sorted(linkers.made, key=lambda call: call[1])
    for (begin, _), (_, end) in itertools.pairwise(made):
        twice += not any(start < end and stop > begin for start, stop in linkers.ended)
    return linkers.statuses, linkers.unlinked, linkers.pulled, len(hanging), len(made), twice


@pytest.mark.parametrize("path", ["process_vm", "tcp"])
def test_threads_that_link_and_unlink_the_same_cluster(peers: Peers, path: str) -> None:
    """Exactly one makes the link at a time, the others are told; pulls get their bytes or LLM_NOT_YET_LINK."""
    server, client = peers.make(1, paths=path), peers.make(2, paths=path, listen=False)
    with_caches(server, client)
    statuses, unlinked, pulled, hanging, made, twice = client.call(storm_of_links, 1, server.address)
    assert (hanging, twice) == (0, 0)
    assert made >= LINKS
    assert unlinked == {OK}
    assert statuses <= {OK, S.LLM_ALREADY_LINK, S.LLM_PROCESSING_LINK, S.LLM_LINK_FAILED}, statuses
    assert pulled <= {OK, S.LLM_NOT_YET_LINK, S.LLM_FAILED}, pulled
    assert client.call("unlink", 1, force=True) == OK
    assert client.link(server) == OK
    client.call(pull_one, 1)
