"""Eight threads in each of two processes call everything that is public, until one side finalizes, and beyond."""

from __future__ import annotations

import contextlib
import gc
import threading
from pathlib import Path

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist.utils.deadline import Deadline
from peers import GUARD, POISON, TIMEOUT_S, Node, Peers
from storm_kit import BLOCK_BYTES, BLOCKS, DOCUMENTED, LANDING, TENSORS, THREADS, Storm

S = LLMStatusCode
OK = S.LLM_SUCCESS
LINKERS, LINKS = 16, 12
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
