"""Forks of a process with a live engine: the child gets errors, may have an engine of its own, and harms nobody."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, LayerSynchronizer, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from llm_datadist import TransferWithCacheKeyConfig as WithKey
from llm_datadist.net import dial
from llm_datadist.net.forks import own
from llm_datadist.utils.deadline import Deadline
from peers import GUARD, TIMEOUT_S, Node, Peers
from test_exit import hold_finalize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OK, FAILED = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_FAILED
PATHS = ("process_vm", "tcp")
FORKS = 10
BLOCKS, BLOCK_BYTES = 16, 4096
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python 3.12


def in_child(work: Callable[[], object], meanwhile: Callable[[], object] = lambda: None) -> str:
    """What ``work`` returns in a forked child, as text, or its traceback; the child ends at once."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(work())
        except BaseException:  # noqa: BLE001 - the parent tells
            text = traceback.format_exc()
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    meanwhile()
    with os.fdopen(reader, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], TIMEOUT_S)
        if not ready:
            os.kill(pid, signal.SIGKILL)
        text = pipe.read().decode()
    os.waitpid(pid, 0)
    assert ready, "the child hangs"
    return text


@pytest.fixture
def node() -> Iterator[Node]:
    """Cluster 1 with a blocks cache."""
    made = Node()
    made.init(1, listen_ip_info="127.0.0.1:0", allow_multiple_instances=False)
    made.register_blocks("mine", 2, BLOCKS, BLOCK_BYTES, model_id=0, seed=1)
    yield made
    made.finalize()


def test_a_child_of_a_process_that_is_just_finalizing_may_finalize_too(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does nothing there, and does not wait for a thread that is not there."""
    entered, gate = hold_finalize(node, monkeypatch)
    ending = threading.Thread(target=node.datadist.finalize)
    ending.start()
    assert entered.wait(TIMEOUT_S)
    assert in_child(node.datadist.finalize) == "None"
    gate.set()
    ending.join(TIMEOUT_S)
    assert not ending.is_alive()


class Never(LayerSynchronizer):
    """Waits until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.gate.wait(TIMEOUT_S)
        return False


def test_every_call_of_a_child_says_that_it_does_not_work_there(node: Node) -> None:
    datadist, manager, cache = node.datadist, node.manager, node.caches["mine"]
    key, layers = BlocksCacheKey(2, 0), WithKey(BlocksCacheKey(2, 0), range(1), range(1))
    synchronizer = Never()
    task = manager.transfer_cache_async(cache, synchronizer, [layers], [0], [0])
    peer = node.cluster(2, ("127.0.0.1", 1))
    calls: dict[str, Callable[[], object]] = {
        "link_clusters": lambda: datadist.link_clusters([peer], 1000),
        "unlink_clusters": lambda: datadist.unlink_clusters([peer], 1000),
        "switch_role": lambda: datadist.switch_role(LLMRole.PROMPT),
        "explain_link": lambda: datadist.explain_link(2),
        "explain_memory": datadist.explain_memory,
        "link": lambda: datadist.link("name", {1: 0, 2: 1}, "{}"),
        "unlink": lambda: datadist.unlink(1),
        "query_register_mem_status": lambda: datadist.query_register_mem_status(1),
        "register_blocks_cache": lambda: manager.register_blocks_cache(cache.cache_desc, cache.tensor_addrs),
        "unregister_cache": lambda: manager.unregister_cache(1),
        "pull_blocks": lambda: manager.pull_blocks(key, cache, [0], [0]),
        "push_blocks": lambda: manager.push_blocks(key, cache, [0], [0]),
        "copy_blocks": lambda: manager.copy_blocks(cache, {0: [1]}),
        "synchronize": task.synchronize,
        "get_results": task.get_results,
    }

    def all_calls() -> str:
        wrong = []
        for name, call in calls.items():
            try:
                wrong.append(f"{name}: {call()}")
            except LLMException as error:
                if error.status_code is not FAILED or str(os.getpid()) not in str(error):
                    wrong.append(f"{name}: {error}")
        datadist.finalize()
        return "; ".join(wrong)

    assert in_child(all_calls) == ""
    synchronizer.gate.set()
    assert task.synchronize(20_000) == LLMStatusCode.LLM_PARAM_INVALID
    manager.copy_blocks(cache, {0: [1]})


@pytest.mark.parametrize("paths", ["auto", *PATHS])
def test_a_child_with_an_engine_of_its_own_gets_the_bytes_of_its_parent(node: Node, paths: str) -> None:
    """As they are now, not as they were at the fork, of which the child has a copy; and writes reach the parent."""
    source = node.arenas["mine"].memory
    changed, writer = os.pipe()

    def pull_and_push() -> str:
        os.read(changed, 1)
        own = Node()
        own.init(2, paths=paths, allow_multiple_instances=False)
        own.register_blocks("into", 2, BLOCKS, BLOCK_BYTES)
        assert node.datadist.listen_address is not None
        assert own.link(1, node.datadist.listen_address) == OK
        own.manager.pull_blocks(BlocksCacheKey(1, 0), own.caches["into"], [1], [2])
        got = {int(value) for tensor in own.memory("into") for value in tensor[GUARD:-GUARD][2 * BLOCK_BYTES :][:9]}
        for tensor in own.arenas["into"].memory:
            tensor[GUARD:-GUARD] = 88
        own.manager.push_blocks(BlocksCacheKey(1, 0), own.caches["into"], [0], [3])
        path = own.path(1)
        own.finalize()
        return f"{got} {path}"

    def change() -> None:
        for tensor in source:
            tensor[GUARD:-GUARD] = 77
        os.write(writer, b".")

    text = in_child(pull_and_push, change)
    assert text == f"{{77}} {'process_vm' if paths == 'auto' else paths}"
    for tensor in source:
        blocks = tensor[GUARD:-GUARD].reshape(BLOCKS, -1)
        assert (blocks[3] == 88).all()
        assert (np.delete(blocks, 3, axis=0) == 77).all()
    for end in (changed, writer):
        os.close(end)


def test_a_child_that_ends_in_good_order_leaves_the_parent_alone(node: Node) -> None:
    """Its exit handlers run, as in a worker of ``multiprocessing`` or after ``sys.exit``."""
    context = multiprocessing.get_context("fork")
    for target in (sys.exit, node.finalize, threading.active_count):
        child = context.Process(target=target)
        child.start()
        child.join(TIMEOUT_S)
        assert child.exitcode == 0
    pid = os.fork()
    if pid == 0:
        import atexit  # noqa: PLC0415

        atexit._run_exitfuncs()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert LLMDataDist.llm_engine_instance is node.datadist
    node.unregister("mine")


def pull_until(stop: threading.Event, node: Node, cluster_id: int, name: str, wrong: list[str]) -> None:
    """Pull and look at the bytes; a few times more than that."""
    blocks = list(range(BLOCKS if name == "large" else 1))
    size, count = len(blocks) * BLOCK_BYTES, 0
    while not stop.is_set() or count < FORKS:
        for tensor in node.arenas[name].memory:
            tensor[GUARD:-GUARD] = 0
        try:
            node.manager.pull_blocks(BlocksCacheKey(cluster_id, 0), node.caches[name], blocks, blocks)
        except LLMException as error:
            wrong.append(str(error))
            return
        if not all((tensor[GUARD : GUARD + size] == 55).all() for tensor in node.arenas[name].memory):
            wrong.append(f"{name}: wrong bytes")
        count += 1


def fork_while_pulling(node: Node, cluster_id: int) -> list[str]:
    """In the child: two threads pull while it forks; what was wrong. The grandchildren live until all is over."""
    wrong: list[str] = []
    stop = threading.Event()
    threads = [
        threading.Thread(target=pull_until, args=(stop, node, cluster_id, name, wrong)) for name in ("small", "large")
    ]
    for thread in threads:
        thread.start()
    children = [fork_a_sleeper() for _ in range(FORKS)]
    for pid in children:
        shared = sockets(pid) & sockets(os.getpid()) - node.extra["before"]
        wrong += [f"{pid} keeps {shared}"] if shared else []
    stop.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
        if thread.is_alive():
            wrong.append("a pull hangs")
    end_all(node, children)
    return wrong


def sockets(pid: int) -> set[str]:
    """The sockets that a process has."""
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one with which we look
            found.add(str(entry.readlink()))
    return {name for name in found if name.startswith("socket:")}


def fork_a_sleeper() -> int:
    """A child that does nothing; its pid, once it has got so far."""
    import warnings  # noqa: PLC0415

    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12
        pid = os.fork()
    if pid == 0:
        os.write(writer, b".")
        signal.pause()
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == b"."
    os.close(reader)
    return pid


def remember_sockets(node: Node) -> None:
    """In the child: the sockets of the test itself."""
    node.extra["before"] = sockets(os.getpid())


def fill(node: Node, name: str, value: int) -> None:
    """In the child."""
    for tensor in node.arenas[name].memory:
        tensor[GUARD:-GUARD] = value


@pytest.mark.parametrize("path", [*PATHS, "mapped"])
def test_forks_during_transfers(peers: Peers, path: str) -> None:
    """Of the side that pulls and of the owner: no transfer fails, no byte is wrong, no child keeps a socket."""
    properties: dict[str, Any] = {"paths": path, "mem_pool_cfg": '{"memory_size": 16777216}'}
    owner, reader = peers.process(), peers.process()
    for process in (owner, reader):
        process.call("node", remember_sockets)
    for process, cluster_id in ((owner, 1), (reader, 2)):
        process.call("node", "init", cluster_id, listen_ip_info="127.0.0.1:0", **properties)
        process.call("node", "use_pool", path == "mapped")
        for name in ("small", "large"):
            process.call("node", "register_blocks", name, 2, BLOCKS, BLOCK_BYTES, model_id=0)
    owner.call("node", fill, "large", 55)
    address = owner.call("node", listen_address)
    assert reader.call("node", "link", 1, address) == OK
    assert reader.call("node", "path", 1) == path
    running = reader.begin("node", fork_while_pulling, 1)
    sleepers = [owner.call("node", fork_one) for _ in range(FORKS)]
    try:
        assert running.result(TIMEOUT_S) == []
        assert reader.call("node", "unlink", 1, address) == OK
    finally:
        owner.call("node", end_all, sleepers)


def fork_one(node: Node) -> int:
    """In the child."""
    return fork_a_sleeper()


def end_all(node: Node, pids: list[int]) -> None:
    """In the child."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def listen_address(node: Node) -> tuple[str, int] | None:
    """In the child."""
    return node.datadist.listen_address


def test_no_child_is_forked_while_a_socket_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made, gate, forked = threading.Event(), threading.Event(), threading.Event()
    kept: list[set[str]] = []

    def held(sock: socket.socket) -> socket.socket:
        made.set()
        assert gate.wait(TIMEOUT_S)
        return own(sock)

    def fork() -> None:
        before = sockets(os.getpid())
        pid = fork_a_sleeper()
        forked.set()
        kept.append(sockets(pid) & (before - others))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    others = sockets(os.getpid())
    monkeypatch.setattr(dial, "own", held)
    with socket.create_server(("127.0.0.1", 0)) as server:
        others |= sockets(os.getpid())
        address = ("127.0.0.1", server.getsockname()[1])
        connecting = threading.Thread(target=lambda: dial.connect(address, b"", Deadline.after(TIMEOUT_S)).close())
        connecting.start()
        assert made.wait(TIMEOUT_S)
        forking = threading.Thread(target=fork)
        forking.start()
        assert not forked.wait(0.2)
        gate.set()
        for thread in (connecting, forking):
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
    assert kept == [set()]
