"""Peers that stall, lie or fork, and settings at the edge: nobody else suffers, and nothing lands late."""

from __future__ import annotations

import mmap
import os
import secrets
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import expect
from llm_datadist import BlocksCacheKey, LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from llm_datadist.engine import Engine, EngineOptions, local
from llm_datadist.engine.requests import CacheKind, CacheSpec
from llm_datadist.memory import syscalls
from llm_datadist.memory.regions import CAPACITY, ROW_BYTES, RegionError, RegionTable, RegionView
from llm_datadist.net.loop import Loop
from llm_datadist.net.workers import Workers
from llm_datadist.observe.recorder import Recorder
from llm_datadist.paths.base import Context, PathTimeoutError
from llm_datadist.paths.tcp import TcpPath
from llm_datadist.paths.tcp_server import DataServer
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire import framing, messages
from peers import POISON, TIMEOUT_S, Node
from stopping import go_on, stop
from test_faults import BLOCKS, big_cache
from test_links import pull_one, pull_until_unlinked, with_caches

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from peers import Peer, Peers

OK = LLMStatusCode.LLM_SUCCESS


def pull_all_until_failure(node: Node, cluster_id: int) -> LLMStatusCode:
    """In the child."""
    blocks = list(range(BLOCKS))
    try:
        while True:
            node.manager.pull_blocks(BlocksCacheKey(cluster_id, 0), node.caches["mine"], blocks, blocks)
    except LLMException as error:
        return error.status_code


def pull_first(node: Node, cluster_id: int) -> None:
    """In the child."""
    node.manager.pull_blocks(BlocksCacheKey(cluster_id, 0), node.caches["mine"], [0], [0])


def test_a_stalled_peer_delays_nobody_else(peers: Peers) -> None:
    """Eight threads pull from a stopped peer over TCP, and a stopped reader is being served: others go on."""
    properties: dict[str, Any] = {"paths": "tcp", "sync_kv_timeout": 5000}
    stalled, healthy = peers.make(1, **properties), peers.make(2, **properties)
    client = peers.make(3, listen=False, **properties)
    readers = [peers.make(10 + number, listen=False, **properties) for number in range(2)]
    for peer in (stalled, healthy, client, *readers):
        peer.call(big_cache, "mine", 0)
    assert client.link(stalled) == OK
    for peer in (client, *readers):
        assert peer.link(healthy) == OK
    waiting = [client.begin(pull_all_until_failure, 1) for _ in range(8)]
    served = [reader.begin(pull_all_until_failure, 2) for reader in readers]
    stop(stalled.process.pid)
    for reader in readers:
        stop(reader.process.pid)
    try:
        for _ in range(20):
            client.call(pull_first, 2)
    finally:
        for peer in (stalled, *readers):
            go_on(peer.process.pid)
    healthy.call("finalize")
    stalled.call("finalize")
    for future in (*waiting, *served):
        assert future.result(TIMEOUT_S) in {LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_NOT_YET_LINK}


def hold_writes(node: Node) -> None:
    """In the child: every process_vm_writev is held before it begins, until ``release_writes``."""
    node.extra["entered"], node.extra["gate"] = threading.Event(), threading.Event()
    real = syscalls.process_vm_writev

    def held(pid: int, here: int, there: int, count: int) -> int:
        node.extra["entered"].set()
        node.extra["gate"].wait(TIMEOUT_S)
        return real(pid, here, there, count)

    syscalls.process_vm_writev = held


def wait_entered(node: Node) -> bool:
    """In the child."""
    return bool(node.extra["entered"].wait(TIMEOUT_S))


def release_writes(node: Node) -> None:
    """In the child."""
    node.extra["gate"].set()


def push_all(node: Node, cluster_id: int) -> None:
    """In the child."""
    blocks = list(range(BLOCKS))
    node.manager.push_blocks(BlocksCacheKey(cluster_id, 0), node.caches["mine"], blocks, blocks, tensor_num_per_layer=1)


def held_push(writer: Peer, owner: Peer) -> Future[Any]:
    """Link, and push to the owner's cache of model 0; the push is held on its way into the system call."""
    writer.call(big_cache, "mine", None)
    assert writer.link(owner) == OK
    writer.call(hold_writes)
    pushing = writer.begin(push_all, owner.cluster_id)
    assert writer.call(wait_entered)
    return pushing


def let_fail(writer: Peer, pushing: Future[Any]) -> None:
    """Let a push that was held go on to its end, which comes too late to be a success."""
    writer.call(release_writes)
    with pytest.raises(LLMException):
        pushing.result(TIMEOUT_S)


def unregister_mine(node: Node) -> LLMStatusCode:
    """In the child: unregister, keeping the memory; the status."""
    try:
        node.manager.unregister_cache(node.caches["mine"].cache_id)
    except LLMException as error:
        return error.status_code
    node.arenas["mine"].memory[0][:] = POISON
    return OK


def untouched(node: Node) -> bool:
    """In the child."""
    return bool((node.arenas["mine"].memory[0] == POISON).all())


@pytest.mark.parametrize("force", [False, True])
def test_unregister_waits_for_a_writer_that_was_held_up(peers: Peers, force: bool) -> None:
    """Also when the link has been unlinked by force: busy until the writer has ended, and safe after that."""
    owner, writer = peers.make(1, sync_kv_timeout=100), peers.make(2, listen=False)
    owner.call(big_cache, "mine", 0)
    pushing = held_push(writer, owner)
    if force:
        assert owner.call("unlink", 2, force=True) == OK
    assert owner.call(unregister_mine) == LLMStatusCode.LLM_LINK_BUSY
    let_fail(writer, pushing)
    assert owner.call(unregister_mine) == OK
    assert owner.call(untouched)


def fork_a_sleeper(node: Node) -> int:
    """In the child: a grandchild that does nothing for a minute; its pid."""
    import warnings  # noqa: PLC0415

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12
        child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return child


def test_forked_children_keep_no_link_alive(peers: Peers) -> None:
    """P forks a worker and is killed: D notices, and P can be restarted on the same port."""
    server, client = peers.make(1, paths="tcp"), peers.make(2, paths="tcp", listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    sleeper = server.call(fork_a_sleeper)
    try:
        os.kill(server.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, server.process.pid, os.WEXITED | os.WNOWAIT)
        assert client.call(pull_until_unlinked, 1) == LLMStatusCode.LLM_NOT_YET_LINK
        assert server.address is not None
        again = peers.make(1, paths="tcp", listen_ip_info=f"127.0.0.1:{server.address[1]}")
        with_caches(again)
        assert client.link(again) == OK
        client.call(pull_one, 1)
    finally:
        os.kill(sleeper, signal.SIGKILL)


def test_a_hello_alone_ends_no_link(peers: Peers) -> None:
    """A stranger says it is the linked cluster, and nothing more: the live link goes on."""
    server, client = peers.make(1), peers.make(2, listen=False)
    with_caches(server, client)
    assert client.link(server) == OK
    identity = messages.Identity(
        cluster_id=2, incarnation=secrets.token_bytes(16), boot_id="x", pid_namespace=0, pid=1, start_time=1
    )
    offer = messages.Offer(probe_region=1, nonce=b"n" * 16, table_fd=0, paths=["tcp"])
    hello = messages.Hello(versions=(1, 1), identity=identity, remote_accessible=True, timeout_ms=5000, offer=offer)
    assert server.address is not None
    with socket.create_connection(server.address, TIMEOUT_S) as stranger:
        stranger.sendall(framing.preamble(framing.Kind.CONTROL))
        stranger.sendall(framing.frame(messages.encode(messages.Envelope(body=hello, id=1))))
        assert b"welcome" in stranger.recv(4096)
        client.call(pull_one, 1)
        server.call(pull_one, 2)


def test_signals_do_not_disturb_tcp_transfers(peers: Peers) -> None:
    """A handler that does nothing, five hundred times a second."""
    server = peers.make(1, paths="tcp")
    server.call("register_blocks", "src", 2, 64, 1 << 18, model_id=0, seed=1)
    config = LLMConfig()
    config.enable_cache_manager = config.enable_remote_cache_accessible = True
    config.paths, config.sync_kv_timeout = "tcp", 20_000
    node = Node()
    node.datadist = LLMDataDist(LLMRole.MIX, 2)
    node.datadist.init(config.generate_options())
    before = signal.signal(signal.SIGALRM, lambda _number, _frame: None)
    try:
        node.register_blocks("dst", 2, 64, 1 << 18)
        assert server.address is not None
        assert node.link(1, server.address) == OK
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        for _ in range(20):
            blocks = list(range(64))
            node.manager.pull_blocks(BlocksCacheKey(1, 0), node.caches["dst"], blocks, blocks)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        node.datadist.finalize()


def test_timers_of_any_length_leave_the_loop_alive() -> None:
    """A month is more milliseconds than the system call takes."""
    loop = Loop("test-long-timer")
    loop.call_later(30 * 86_400, lambda: None).cancel()
    loop.call_later(30 * 86_400, lambda: None)
    done = threading.Event()
    for _ in range(3):
        done.clear()
        loop.call_soon(done.set)
        assert done.wait(TIMEOUT_S)
    loop.close()


def test_a_connection_that_was_given_up_is_not_served_when_it_arrives() -> None:
    """The fence has answered for it already."""
    table, loop, workers = RegionTable(), Loop("test-fence"), Workers("test-fence", 1)
    server = DataServer(table, loop, workers, Recorder())
    done = threading.Event()
    server.give_up(b"t" * 16, [5], done.set)
    assert done.wait(TIMEOUT_S)
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    server.add(b"t" * 16, 5, theirs, 0)
    ours.settimeout(TIMEOUT_S)
    assert ours.recv(1) == b""
    ours.close()
    server.close()
    workers.close()
    loop.close()
    table.close()


def test_nothing_follows_a_write_that_may_still_land() -> None:
    """Until the peer has confirmed that it stopped the earlier one."""
    answers = [False, True]
    table = RegionTable()
    context = Context(
        identity=None,  # type: ignore[arg-type]
        regions=table,
        copiers=Workers("test-unfenced", 1),
        copy_threads=1,
        open_data=lambda _count, _deadline: [],
        fence=lambda numbers, _deadline: numbers == [7] and answers.pop(0),
        token=b"",
    )
    path = TcpPath(context)
    path._unfenced.add(7)
    with pytest.raises(PathTimeoutError, match="has not confirmed"):
        path._settle(Deadline.after(TIMEOUT_S))
    path._settle(Deadline.after(TIMEOUT_S))
    path._settle(Deadline.after(TIMEOUT_S))
    assert answers == []
    table.close()


def test_tables_that_could_be_truncated_or_block_are_refused(tmp_path: Path) -> None:
    """A memfd without seals would end this process with SIGBUS; a pipe would block it."""
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, CAPACITY * ROW_BYTES)
    with mmap.mmap(fd, CAPACITY * ROW_BYTES) as memory:
        memory[:8] = np.uint64(0x5644_4B4C_4C4D_0001).tobytes()
        with pytest.raises(RegionError, match="not a sealed region table"):
            RegionView.of_file(f"/proc/self/fd/{fd}")
    os.close(fd)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(RegionError, match="not a sealed region table"):
        RegionView.of_file(str(pipe))


def test_local_copies_hold_their_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is not given back while copy_cache works on it."""
    options = {"llm.Role": "Mix", "llm.MemPoolConfig": '{"memory_size": 1048576}', "llm.SyncKvCacheWaitTime": "100"}
    engine = Engine(1, EngineOptions.parse(options))
    spec = CacheSpec(1, (2, 4096), 1, "DT_UINT8", on_device=True, kind=CacheKind.CONTIGUOUS)
    cache_id, _ = engine.allocate(spec, [])
    entered, gate = threading.Event(), threading.Event()

    def held(*_args: object) -> None:
        entered.set()
        assert gate.wait(TIMEOUT_S)

    monkeypatch.setattr(local, "copy_cache", held)
    copying = threading.Thread(target=engine.copy_cache, args=(cache_id, cache_id, 1, 0, 0, -1))
    copying.start()
    assert entered.wait(TIMEOUT_S)
    expect(LLMStatusCode.LLM_LINK_BUSY, lambda: engine.deallocate(cache_id))
    gate.set()
    copying.join(TIMEOUT_S)
    engine.deallocate(cache_id)
    engine.close()


def test_exit_does_not_wait_for_stalled_readers(peers: Peers) -> None:
    """P ends although a stopped reader's request is being served."""
    server, client = peers.make(1, paths="tcp"), peers.make(2, paths="tcp", listen=False, sync_kv_timeout=60_000)
    for peer in (server, client):
        peer.call(big_cache, "mine", 0)
    assert client.link(server) == OK
    client.begin(pull_all_until_failure, 1)
    stop(client.process.pid)
    begin = time.monotonic()
    try:
        assert server.process.close() == 0
    finally:
        go_on(client.process.pid)
    assert time.monotonic() - begin < 20
