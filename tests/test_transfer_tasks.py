"""Transfers in the background: every way to wait for them, what they raise, and how they end."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import expect
from layerwise_kit import Ready, by_key, cache, engine_of
from layerwise_kit import start as begin_layers
from llm_datadist import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LLMException,
    LLMStatusCode,
    TransferTask,
    TransferWithCacheKeyConfig,
)
from llm_datadist.testing import Fault, FaultKind, Faults, faulty_path
from manager_kit import ACCESSIBLE, BY_BLOCKS, BY_ID, manager
from peers import GUARD, TIMEOUT_S, Node
from short_kit import BLOCKS, SOURCE, TARGET, blocks_of, make_pair, moved, same
from test_concurrency_forks import in_child
from test_exit import start
from waiting_kit import WAYS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peers import Peers

OK = LLMStatusCode.LLM_SUCCESS
TIMED_OUT = LLMStatusCode.LLM_TIMEOUT
RUNNING = 32
"""Tasks of one engine that run at a time."""


# Between two processes


def in_background(node: Node, method: str, way: str, cluster_id: int, *args: Any, **kwargs: Any) -> None:
    """In the child: begin a transfer of blocks and wait for its end."""
    key, cache = (0, TARGET) if method == "pull_blocks" else (1, SOURCE)
    begin = getattr(node.manager, f"{method}_async")
    assert WAYS[way](begin(BlocksCacheKey(cluster_id, key), node.caches[cache], *args, **kwargs)) is None


@pytest.mark.parametrize("path", ["process_vm", "tcp"])
def test_blocks(peers: Peers, path: str) -> None:
    client, server = make_pair(peers, path)
    src, dst = list(range(0, BLOCKS, 2)), list(range(1, BLOCKS, 2))
    for number, way in enumerate(WAYS):
        pairs = src[number::5], dst[number::5]
        before = blocks_of(client, TARGET)
        client.call(in_background, "pull_blocks", way, 2, *pairs)
        assert same(blocks_of(client, TARGET), moved(blocks_of(server, SOURCE), before, *pairs))
        before = blocks_of(server, TARGET)
        client.call(in_background, "push_blocks", way, 2, *pairs)
        assert same(blocks_of(server, TARGET), moved(blocks_of(client, SOURCE), before, *pairs))


def entries(node: Node, cluster_id: int, cache_id: int) -> None:
    """In the child: pull entry 2 of the peer to entry 0, and push entry 1 there to entry 3."""
    cache = node.caches["entries"]
    tasks = [
        node.manager.pull_cache_async(CacheKeyByIdAndIndex(cluster_id, cache_id, 2), cache, 0),
        node.manager.push_cache_async(CacheKeyByIdAndIndex(cluster_id, cache_id, 3), cache, 1),
    ]
    assert [task.result(TIMEOUT_S) for task in tasks] == [None, None]


def test_contiguous_caches(peers: Peers) -> None:
    server, client = peers.make(1), peers.make(2, listen=False)
    for peer in (server, client):
        cache_id = peer.call("register_contiguous", "entries", 2, 4, 700, seed=peer.cluster_id)
    assert client.link(server) == OK
    before = [peer.memory("entries") for peer in (server, client)]
    client.call(entries, 1, cache_id)
    for theirs, ours, old_theirs, old_ours in zip(
        server.memory("entries"), client.memory("entries"), *before, strict=True
    ):
        entry = [slice(GUARD + at * 700, GUARD + (at + 1) * 700) for at in range(4)]
        old_ours[entry[0]], old_theirs[entry[3]] = old_theirs[entry[2]], old_ours[entry[1]]
        assert (theirs == old_theirs).all()
        assert (ours == old_ours).all()


def layer_by_layer(node: Node, way: str, cluster_id: int, blocks: list[int]) -> LLMStatusCode:
    """In the child: send blocks to their places at the peer."""
    config = TransferWithCacheKeyConfig(BlocksCacheKey(cluster_id, 1), range(2), range(2))
    task = node.manager.transfer_cache_async(node.caches[SOURCE], Ready(), [config], blocks, blocks)
    status = WAYS[way](task)
    assert isinstance(status, LLMStatusCode)
    assert task.get_results() == [status]
    return status


def test_layer_by_layer(peers: Peers) -> None:
    """A failure is a result, as ever."""
    client, server = make_pair(peers, "process_vm")
    for number, way in enumerate(WAYS):
        before = blocks_of(server, TARGET)
        assert client.call(layer_by_layer, way, 2, [number, number + 9]) == OK
        blocks = [number, number + 9]
        assert same(blocks_of(server, TARGET), moved(blocks_of(client, SOURCE), before, blocks, blocks))
        assert client.call(layer_by_layer, way, 2, [BLOCKS]) == LLMStatusCode.LLM_PARAM_INVALID
    server.process.kill()
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: client.call(in_background, "push_blocks", "await", 2, [0], [0]))


def hundred(node: Node, cluster_id: int) -> None:
    """In the child: a task a pull, each of one block."""

    async def all_of_them() -> None:
        key, cache = BlocksCacheKey(cluster_id, 0), node.caches[TARGET]
        tasks = [node.manager.pull_blocks_async(key, cache, [at % BLOCKS], [at % BLOCKS]) for at in range(100)]
        await asyncio.wait_for(asyncio.gather(*tasks), TIMEOUT_S)

    asyncio.run(all_of_them())


@pytest.mark.parametrize("path", ["process_vm", "tcp"])
def test_a_hundred_at_once(peers: Peers, path: str) -> None:
    client, server = make_pair(peers, path)
    client.call(hundred, 2)
    assert same(blocks_of(client, TARGET), blocks_of(server, SOURCE))


# Within one process, where transfers can be stopped at any byte


class Pair:
    """Two linked nodes of this process, one with a cache "src", the other with "dst"."""

    def __init__(self, faults: Faults, **properties: Any) -> None:
        self.faults = faults
        self.owner, self.asker = Node(), Node()
        self.address = self.owner.init(1, listen_ip_info="127.0.0.1:0", **properties)
        self.asker.init(2, **properties)
        self.owner.register_blocks("src", 2, 8, 512, model_id=0, seed=1)
        self.asker.register_blocks("dst", 2, 8, 512)
        assert self.address is not None
        assert self.asker.link(1, self.address) == OK

    def begin(self, block: int = 0) -> TransferTask:
        """Pull a block to where it is there."""
        blocks = [block]
        task = self.asker.manager.pull_blocks_async(BlocksCacheKey(1, 0), self.asker.caches["dst"], blocks, blocks)
        blocks[0] = 1 << 40  # nobody looks at it any more
        assert isinstance(task, TransferTask)
        return task

    def stalled(self, block: int = 0) -> tuple[TransferTask, Fault]:
        """Such a pull that has come to a halt."""
        fault = self.faults.inject(Fault(FaultKind.STALL, at=100))
        task = self.begin(block)
        assert fault.wait(TIMEOUT_S)
        return task, fault

    def has(self, block: int, name: str = "dst") -> bool:
        """Whether it has come."""
        where = slice(GUARD + block * 512, GUARD + (block + 1) * 512)
        pairs = zip(self.owner.arenas["src"].memory, self.asker.arenas[name].memory, strict=True)
        return all(np.array_equal(there[where], here[where]) for there, here in pairs)

    def close(self) -> None:
        self.asker.finalize()
        self.owner.finalize()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with faulty_path("inprocess") as faults:
        made = Pair(faults)
        yield made
        made.close()


@pytest.fixture
def hasty() -> Iterator[Pair]:
    """As ``pair``; transfers have a second."""
    with faulty_path("inprocess") as faults:
        made = Pair(faults, sync_kv_timeout=1000)
        yield made
        made.close()


def test_it_goes_on_while_nobody_waits(pair: Pair) -> None:
    task, fault = pair.stalled()
    assert not task.done()
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        task.result(0.01)
    assert not pair.has(0)
    fault.release()
    assert task.result(TIMEOUT_S) is None
    assert task.done()
    assert pair.has(0)


def test_a_coroutine_that_is_cancelled_leaves_the_transfer_alone(pair: Pair) -> None:
    task, fault = pair.stalled()

    async def give_up() -> None:
        waiting = asyncio.ensure_future(task)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    assert not task.done()
    fault.release()
    task.result(TIMEOUT_S)
    assert pair.has(0)


@pytest.mark.parametrize("way", WAYS)
def test_it_raises_what_the_blocking_call_raises(pair: Pair, way: str) -> None:
    manager, cache = pair.asker.manager, pair.asker.caches["dst"]
    for arguments in (
        (BlocksCacheKey(1, 0), cache, [0], [99]),
        (BlocksCacheKey(1, 9), cache, [0], [0]),
        (BlocksCacheKey(7, 0), cache, [0], [0]),
    ):
        with pytest.raises(LLMException) as blocking:
            manager.pull_blocks(*arguments)
        with pytest.raises(type(blocking.value)) as background:
            WAYS[way](manager.pull_blocks_async(*arguments))
        one, other = blocking.value, background.value
        assert (one.status_code, one.phase, one.peer) == (other.status_code, other.phase, other.peer)
        assert str(one) == str(other)
    pair.faults.inject(Fault(FaultKind.CUT, at=700))
    error = expect(LLMStatusCode.LLM_FAILED, lambda: WAYS[way](pair.begin()))
    assert "cut after 700 bytes" in str(error)


def test_the_deadline_counts_from_the_call(hasty: Pair) -> None:
    """While all threads are busy, with callbacks that do not return soon, the time of those that wait goes by."""
    stalled = [hasty.stalled() for _ in range(RUNNING)]
    go_on, busy = threading.Event(), threading.Semaphore(0)
    for task, fault in stalled:
        task.add_done_callback(lambda: (busy.release(), go_on.wait(TIMEOUT_S)))
        fault.release()
    assert all(busy.acquire(timeout=TIMEOUT_S) for _ in stalled)
    late = hasty.begin(1)
    time.sleep(1)  # sync_kv_timeout
    assert not late.done()
    go_on.set()
    expect(TIMED_OUT, lambda: late.result(TIMEOUT_S))
    assert not hasty.has(1)


def test_those_that_wait_go_on_when_others_have_ended(pair: Pair) -> None:
    stalled = [pair.stalled() for _ in range(RUNNING)]
    waiting = pair.begin(1)
    assert not waiting.done()
    stalled[5][1].release()
    waiting.result(TIMEOUT_S)
    assert pair.has(1)
    for _, fault in stalled:
        fault.release()
    for task, _ in stalled:
        task.result(TIMEOUT_S)


@pytest.mark.parametrize("queued", [False, True])
def test_the_cache_is_in_use_from_the_call_on(pair: Pair, queued: bool) -> None:
    """Also while the task waits for its turn."""
    stalled = [pair.stalled() for _ in range(RUNNING if queued else 1)]
    task = stalled[0][0]
    name = "other" if queued else "dst"
    if queued:
        pair.asker.register_blocks("other", 2, 8, 512)
        task = pair.asker.manager.pull_blocks_async(BlocksCacheKey(1, 0), pair.asker.caches["other"], [0], [0])
    assert pair.asker.datadist._engine is not None
    entry = pair.asker.datadist._engine._core.catalogue.get(pair.asker.caches[name].cache_id)
    assert entry is not None
    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(pair.asker.manager.unregister_cache, entry.cache_id)
        end = time.monotonic() + TIMEOUT_S
        while not entry.hidden:
            assert time.monotonic() < end
        assert not gone.done()
        for _, fault in stalled:
            fault.release()
        gone.result(TIMEOUT_S)
    task.result(TIMEOUT_S)
    assert pair.has(0, name)


def test_finalize_ends_them_all(pair: Pair) -> None:
    """Those that run and those that wait; none is left hanging, and no byte comes later."""
    stalled = [pair.stalled()[0] for _ in range(RUNNING)]
    waiting = [pair.begin(1) for _ in range(50)]
    manager, cache = pair.asker.manager, pair.asker.caches["dst"]
    pair.asker.finalize()
    for task in (*stalled, *waiting):
        with pytest.raises(LLMException) as raised:
            task.result(TIMEOUT_S)
        assert raised.value.status_code in {LLMStatusCode.LLM_FAILED, LLMStatusCode.LLM_NOT_YET_LINK}
    pair.faults.calm()
    assert not pair.has(0)
    assert not pair.has(1)
    expect(LLMStatusCode.LLM_PARAM_INVALID, lambda: manager.pull_blocks_async(BlocksCacheKey(1, 0), cache, [0], [0]))


def test_no_thread_to_be_had(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call says so, and leaves nothing behind."""

    def refuse(_thread: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        error = expect(LLMStatusCode.LLM_FAILED, pair.begin, match="no thread could be started")
    assert isinstance(error, LLMException)
    assert error.retryable
    pair.begin().result(TIMEOUT_S)
    pair.asker.unregister("dst")


def test_the_end_of_the_link_ends_them(pair: Pair) -> None:
    task, _ = pair.stalled()
    pair.owner.finalize()
    expect(LLMStatusCode.LLM_NOT_YET_LINK, lambda: task.result(TIMEOUT_S))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # of Python 3.12
def test_a_forked_child_is_told(pair: Pair) -> None:
    task, fault = pair.stalled()
    synchronizer = Ready(lambda _layer: fault.released or fault_released.wait(TIMEOUT_S))
    fault_released = threading.Event()
    config = TransferWithCacheKeyConfig(BlocksCacheKey(1, 0), range(1), range(1))
    layers = pair.asker.manager.transfer_cache_async(pair.asker.caches["dst"], synchronizer, [config], [0], [0])
    waits = [task.result, task.done, task.fileno, lambda: task.add_done_callback(print), task.__await__().__next__]
    waits += [layers.done, layers.fileno, lambda: layers.add_done_callback(print), pair.begin]

    def told() -> int:
        for wait in waits:
            with pytest.raises(LLMException, match="process") as raised:
                wait()
            assert raised.value.status_code is LLMStatusCode.LLM_FAILED
        return len(waits)

    assert in_child(told) == str(len(waits))
    fault.release()
    fault_released.set()
    task.result(TIMEOUT_S)
    assert layers.synchronize(int(TIMEOUT_S * 1000)) == OK


def test_who_waits_sleeps(pair: Pair) -> None:
    """Nobody polls: the thread that waits is not woken until the end."""
    for way in ("block", "await", "callback", "descriptor"):
        task, fault = pair.stalled()
        counts: list[int] = []

        def wait(way: str = way, task: TransferTask = task, counts: list[int] = counts) -> None:
            counts.append(switches())
            WAYS[way](task)
            counts.append(switches())

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.5)  # what looks every millisecond would look 500 times
        fault.release()
        thread.join(TIMEOUT_S)
        assert counts[1] - counts[0] < 100, way


def switches() -> int:
    """How often this thread has gone to sleep."""
    status = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text(encoding="ascii")
    return int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status, re.MULTILINE)[0])


@pytest.mark.parametrize("paths", ["auto", "tcp"])
@pytest.mark.parametrize(
    ("ending", "code"), [("pass", 0), ("sys.exit(3)", 3), ("one.finalize()", 0), ("os._exit(4)", 4)]
)
def test_the_interpreter_ends_while_they_run(ending: str, code: int, paths: str) -> None:
    begin = (
        "blocks, key = list(range(8)), BlocksCacheKey(2, 0)\n"
        "begin = lambda: one.cache_manager.pull_blocks_async(key, cache_one, blocks, blocks)\n"
        "tasks = [begin() for _ in range(200)]\n"
    )
    with start(begin + ending, paths) as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, errors
    assert not re.search("Error|Fatal|Exception ignored", errors), errors


# Checks, on an engine that does nothing

BAD: list[tuple[str, dict[str, Any]]] = [
    ("pull_blocks", {"src_blocks": range(2)}),
    ("pull_blocks", {"src_cache_key": None}),
    ("pull_blocks", {"dst_blocks": []}),
    ("pull_blocks", {"notify": "text"}),
    ("push_blocks", {"dst_blocks": [0.5]}),
    ("push_blocks", {"src_layer_range": range(2), "dst_layer_range": range(1)}),
    ("push_blocks", {"notify": bytearray(1)}),
    ("pull_cache", {"batch_index": -1}),
    ("pull_cache", {"size": 0}),
    ("pull_cache", {"notify": 1}),
    ("push_cache", {"size": 7}),
    ("push_cache", {"src_cache": None}),
    ("push_cache", {"notify": "text"}),
]


def arguments(method: str) -> dict[str, Any]:
    """Good ones."""
    here, there = ("dst", "src") if method.startswith("pull") else ("src", "dst")
    if method.endswith("blocks"):
        key, lists = BY_BLOCKS, {"src_blocks": [0], "dst_blocks": [1]}
        return {f"{there}_cache_key": key, f"{here}_cache": cache(8, blocks=True), **lists}
    names = ("cache_key", "cache") if method == "pull_cache" else ("dst_cache_key", "src_cache")
    return dict(zip(names, (BY_ID, cache(8)), strict=True))


@pytest.mark.parametrize(("method", "change"), BAD)
def test_arguments_are_checked_in_the_call(method: str, change: dict[str, Any]) -> None:
    subject = manager(**ACCESSIBLE)
    errors = []
    for name in (method, f"{method}_async"):
        with pytest.raises((TypeError, ValueError, AttributeError, LLMException)) as raised:
            getattr(subject, name)(**{**arguments(method), **change})
        errors.append((raised.type, str(raised.value)))
    assert errors[0] == errors[1]
    assert engine_of(subject).calls == []


@pytest.mark.parametrize("method", ["pull_blocks", "push_blocks", "pull_cache", "push_cache"])
@pytest.mark.parametrize("notify", [None, b"done"])
def test_the_request_is_that_of_the_blocking_call(method: str, notify: bytes | None) -> None:
    subject = manager(**ACCESSIBLE)
    more = {} if notify is None else {"notify": notify}
    getattr(subject, method)(**arguments(method), **more)
    assert getattr(subject, f"{method}_async")(**arguments(method), **more).result(0) is None
    (kind, (blocking, *_)), (begin, (background, *_)) = engine_of(subject).calls
    assert (kind, begin) == (method[:4], "begin")
    fields = [dataclasses.asdict(request) for request in (blocking, background)]
    for each in fields:
        each["src_blocks"], each["dst_blocks"] = list(each["src_blocks"] or ()), list(each["dst_blocks"] or ())
    assert fields[0] == fields[1]
    assert background.notify == notify


@pytest.mark.parametrize("cancel", [False, True])
def test_a_callback_of_a_layer_wise_task_is_called_without_its_lock(cancel: bool) -> None:
    """It may wait for others that look at the task."""
    ready, seen = threading.Event(), []
    task = begin_layers(
        manager(**ACCESSIBLE),
        transfer_configs=[by_key()],
        layer_synchronizer=Ready(lambda _layer: ready.wait(TIMEOUT_S)),
    )

    def look() -> None:
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(lambda: (task.done(), task.get_errors())).result(TIMEOUT_S)[0])

    task.add_done_callback(look)
    assert not task.done()
    if cancel:
        assert task.cancel()
        assert seen == [True]
    ready.set()
    assert WAYS["callback"](task) is (LLMStatusCode.LLM_FAILED if cancel else OK)
    assert seen == [True]
    task.add_done_callback(look)
    assert seen == [True, True]


def test_a_push_of_nothing_has_ended_already() -> None:
    subject = manager(**ACCESSIBLE)
    assert subject.push_blocks_async(BY_BLOCKS, cache(1, blocks=True), [0], [1]).result(0) is None
    assert engine_of(subject).calls == []
