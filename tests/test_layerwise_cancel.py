"""Cancelling a layer-wise transfer: when it ends, how it tells, and that nothing moves afterwards."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from fake_engine import FakeEngine
from layerwise_kit import FAILED, ID_KEY, SUCCESS, TIMEOUT, WAIT_MS, Ready, by_key, engine_of, manager, start
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheTask,
    DataType,
    LayerSynchronizer,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from llm_datadist.cache_manager import CacheManager
from llm_datadist.status import LLMFailedError, LLMTimeoutError
from peers import GUARD, POISON, TIMEOUT_S, Node
from stopping import go_on, stop

if TYPE_CHECKING:
    from llm_datadist.engine.requests import PushRequest
    from peers import Peer, Peers

WAIT_S = WAIT_MS / 1000
OK = LLMStatusCode.LLM_SUCCESS
LAYERS = 4
BLOCKS = 64
BLOCK_BYTES = 64 << 10


class Held(Ready):
    """Its answer for one layer must be waited for."""

    def __init__(self, layer: int, answer: Any = True) -> None:
        super().__init__(self._wait)
        self._layer = layer
        self._answer_then = answer
        self.begun, self.go = threading.Event(), threading.Event()

    def _wait(self, layer: int) -> Any:
        if layer != self._layer:
            return True
        self.begun.set()
        assert self.go.wait(WAIT_S)
        if isinstance(self._answer_then, Exception):
            raise self._answer_then
        return self._answer_then


class HeldEngine(FakeEngine):
    """Its push of one layer to one cluster must be waited for, and may then fail."""

    def __init__(self, cluster_id: int, layer: int, error: Exception | None = None) -> None:
        super().__init__()
        self._where = (cluster_id, layer)
        self._error = error
        self.begun, self.go = threading.Event(), threading.Event()

    def push(self, request: PushRequest) -> None:
        self._record("push", request)
        if (request.cluster_id, request.src_layers.start) == self._where:
            self.begun.set()
            assert self.go.wait(WAIT_S)
            if self._error is not None:
                raise self._error


def two_configs() -> list[TransferWithCacheKeyConfig]:
    """Layers 0 to 2 to cluster 2, layers 2 and 3 to cluster 3."""
    return [by_key(range(3), range(3)), by_key(range(2, 4), range(2, 4), key=ID_KEY)]


def sent(engine: FakeEngine) -> list[tuple[int, int]]:
    return [(each.cluster_id, each.src_layers.start) for each in engine.requests("push")]


def join(synchronizer: Ready) -> None:
    """Return when the task's thread has ended."""
    for thread in synchronizer.threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("answer", [True, False, ValueError("a bug")])
def test_while_the_synchronizer_blocks(answer: Any) -> None:
    """It ends before ``cancel`` returns; when the call comes back, whatever it says, nothing is sent."""
    subject, synchronizer = manager(accessible=True), Held(1, answer)
    task = start(subject, transfer_configs=two_configs(), layer_synchronizer=synchronizer)
    assert synchronizer.begun.wait(WAIT_S)
    assert task.synchronize(0) is TIMEOUT
    assert not task.cancelled
    assert task.cancel()
    assert task.synchronize(0) is FAILED
    assert task.get_results(0) == [FAILED, FAILED]
    assert task.cancelled
    synchronizer.go.set()
    join(synchronizer)
    assert sent(engine_of(subject)) == [(2, 0)]
    assert [layer for layer, _ in synchronizer.asked] == [0, 1]
    assert task.get_results(0) == [FAILED, FAILED]
    for error in task.get_errors():
        assert type(error) is LLMFailedError
        assert "was cancelled" in str(error)
        assert error.layer is None


def test_while_a_layer_moves() -> None:
    """It goes on until the layer is there; then nothing follows, not even the same layer to the next config."""
    engine, synchronizer = HeldEngine(2, 2), Ready()
    subject = CacheManager(engine, {"llm.EnableRemoteCacheAccessible": "1"})  # type: ignore[arg-type]
    task = start(subject, transfer_configs=two_configs(), layer_synchronizer=synchronizer)
    assert engine.begun.wait(WAIT_S)
    assert task.cancel()
    assert task.cancel()
    assert task.synchronize(0) is TIMEOUT
    assert not task.cancelled
    engine.go.set()
    assert task.synchronize(WAIT_MS) is FAILED
    assert task.get_results(0) == [SUCCESS, FAILED]
    assert task.cancelled
    join(synchronizer)
    assert sent(engine) == [(2, 0), (2, 1), (2, 2)]
    assert [layer for layer, _ in synchronizer.asked] == [0, 1, 2]


def test_while_the_last_layer_moves() -> None:
    """Then it is complete, and was not cancelled."""
    engine = HeldEngine(3, 3)
    subject = CacheManager(engine, {"llm.EnableRemoteCacheAccessible": "1"})  # type: ignore[arg-type]
    task = start(subject, transfer_configs=two_configs())
    assert engine.begun.wait(WAIT_S)
    task.cancel()
    engine.go.set()
    assert task.synchronize(WAIT_MS) is SUCCESS
    assert task.get_results(0) == [SUCCESS, SUCCESS]
    assert task.get_errors() == [None, None]
    assert not task.cancelled
    assert not task.cancel()


def test_while_a_layer_moves_that_fails() -> None:
    """The failure counts: it may say more than that the task was cancelled."""
    engine = HeldEngine(2, 1, LLMTimeoutError("late", peer=2, quiescent=False, finished_blocks=(3,)))
    subject = CacheManager(engine, {"llm.EnableRemoteCacheAccessible": "1"})  # type: ignore[arg-type]
    task = start(subject, transfer_configs=two_configs())
    assert engine.begun.wait(WAIT_S)
    task.cancel()
    engine.go.set()
    assert task.synchronize(WAIT_MS) is TIMEOUT
    assert task.get_results(0) == [TIMEOUT, None]
    assert not task.cancelled
    error, other = task.get_errors()
    assert isinstance(error, LLMTimeoutError)
    assert (error.layer, error.peer, error.quiescent, error.finished_blocks) == (1, 2, False, (3,))
    assert error.__traceback__ is None
    assert error.__context__ is None
    assert other is None


def test_from_within_the_synchronizer() -> None:
    tasks: list[CacheTask] = []
    made = threading.Event()

    def answer(layer: int) -> bool:
        assert made.wait(WAIT_S)
        if layer == 1:
            assert tasks[0].cancel()
        return True

    subject, synchronizer = manager(accessible=True), Ready(answer)
    tasks.append(start(subject, transfer_configs=two_configs(), layer_synchronizer=synchronizer))
    made.set()
    assert tasks[0].synchronize(WAIT_MS) is FAILED
    join(synchronizer)
    assert sent(engine_of(subject)) == [(2, 0)]


@pytest.mark.parametrize("answer", [True, False])
def test_after_the_end(answer: bool) -> None:
    """It changes nothing."""
    task = start(manager(accessible=True), transfer_configs=two_configs(), layer_synchronizer=Ready(lambda _: answer))
    before = (task.synchronize(WAIT_MS), task.get_results())
    assert not task.cancel()
    assert not task.cancelled
    assert (task.synchronize(0), task.get_results(0)) == before


def test_many_threads_at_once() -> None:
    """All are told the same, while a waiting thread is woken."""
    subject, synchronizer = manager(accessible=True), Held(0)
    task = start(subject, transfer_configs=two_configs(), layer_synchronizer=synchronizer)
    assert synchronizer.begun.wait(WAIT_S)
    told: list[Any] = []
    threads = [threading.Thread(target=lambda: told.append(task.synchronize(WAIT_MS)))]
    threads += [threading.Thread(target=lambda: told.append(task.cancel())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(told, key=int) == [*[True] * 8, FAILED]
    synchronizer.go.set()
    join(synchronizer)
    assert sent(engine_of(subject)) == []


@pytest.mark.parametrize("round_", range(20))
def test_nothing_changes_after_the_end(linked: CacheManager, round_: int) -> None:
    """Cancelled at any moment while one-MiB layers are copied: what is there at the end stays as it is."""
    size, layers = 1 << 20, 12
    source = [np.full(size, 1 + index, dtype=np.uint8) for index in range(2 * layers)]
    target = [np.zeros(size, dtype=np.uint8) for _ in range(2 * layers)]
    shape = CacheDesc(2 * layers, (4, size // 4), DataType.DT_UINT8)
    linked.register_blocks_cache(shape, [each.ctypes.data for each in target], BlocksCacheKey(2, 1))
    ours = linked.register_blocks_cache(shape, [each.ctypes.data for each in source])
    reached = threading.Event()
    synchronizer = Ready(lambda layer: layer < round_ % layers or reached.set() or True)
    config = TransferWithCacheKeyConfig(BlocksCacheKey(2, 1), range(layers), range(layers))
    task = linked.transfer_cache_async(ours, synchronizer, [config], [0, 1, 2, 3], [0, 1, 2, 3])
    assert reached.wait(WAIT_S)
    task.cancel()
    status = task.synchronize(WAIT_MS)
    assert status in {SUCCESS, FAILED}
    assert task.cancelled == (status is FAILED)
    then = [tensor.copy() for tensor in target]
    join(synchronizer)
    assert all(map(np.array_equal, target, then))
    whole = [bool((tensor == 1 + index).all()) for index, tensor in enumerate(target)]
    assert all(there or not target[index].any() for index, there in enumerate(whole))
    assert whole[::2] == whole[1::2]
    assert whole[::2] == sorted(whole[::2], reverse=True)


# ------------------------------------------------------------ real memory


class Steps(LayerSynchronizer):
    """Every layer is ready; cancels the task when asked for one of them."""

    def __init__(self, cancel_at: int | None) -> None:
        self.made = threading.Event()
        self.task: CacheTask
        self._cancel_at = cancel_at

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        assert self.made.wait(TIMEOUT_S)
        if layer_index == self._cancel_at:
            self.task.cancel()
        return True


def begin_transfer(node: Node, cluster_id: int, cancel_at: int | None) -> None:
    """In the child."""
    steps = Steps(cancel_at)
    config = TransferWithCacheKeyConfig(BlocksCacheKey(cluster_id, 0), range(LAYERS), range(LAYERS))
    blocks = list(range(BLOCKS))
    node.extra["task"] = steps.task = node.manager.transfer_cache_async(
        node.caches["mine"], steps, [config], blocks, blocks
    )
    steps.made.set()


def end_of_transfer(node: Node) -> tuple[LLMStatusCode, bool]:
    """In the child."""
    task = node.extra["task"]
    return task.synchronize(int(TIMEOUT_S * 1000)), task.cancelled


def cancel(node: Node) -> bool:
    """In the child."""
    return bool(node.extra["task"].cancel())


def pair(peers: Peers, paths: str) -> tuple[Peer, Peer]:
    """A decoder with room, and a prefiller that is linked to it."""
    decoder, prefiller = peers.make(1, paths=paths), peers.make(2, paths=paths, listen=False)
    decoder.call("register_blocks", "mine", 2 * LAYERS, BLOCKS, BLOCK_BYTES, model_id=0)
    prefiller.call("register_blocks", "mine", 2 * LAYERS, BLOCKS, BLOCK_BYTES, seed=5)
    assert prefiller.link(decoder) == OK
    return decoder, prefiller


def arrived(decoder: Peer, prefiller: Peer) -> list[bool]:
    """Of each tensor whether it is all there; else nothing of it is."""
    told = []
    for ours, theirs in zip(decoder.memory("mine"), prefiller.memory("mine"), strict=True):
        there = np.array_equal(ours, theirs)
        assert there or (ours == POISON).all()
        assert (ours[:GUARD] == POISON).all()
        told.append(there)
    return told


@pytest.mark.parametrize("paths", ["process_vm", "tcp"])
@pytest.mark.parametrize("layer", [0, 2])
def test_whole_layers_arrive_or_nothing_of_them(peers: Peers, paths: str, layer: int) -> None:
    decoder, prefiller = pair(peers, paths)
    prefiller.call(begin_transfer, 1, layer)
    assert prefiller.call(end_of_transfer) == (FAILED, True)
    assert arrived(decoder, prefiller) == [True] * 2 * layer + [False] * 2 * (LAYERS - layer)


def test_while_a_layer_is_on_its_way_to_a_stopped_peer(peers: Peers) -> None:
    """The layer is still stored when the peer goes on; what follows it is not."""
    decoder, prefiller = pair(peers, "tcp")
    stop(decoder.process.pid)
    try:
        prefiller.call(begin_transfer, 1, None)
        assert prefiller.call(cancel)
    finally:
        go_on(decoder.process.pid)
    assert prefiller.call(end_of_transfer) == (FAILED, True)
    there = arrived(decoder, prefiller)
    assert not any(there[2:])
    assert there[0] == there[1]  # cancelled before the first layer was begun, or while it was on its way
