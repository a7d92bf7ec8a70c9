"""transfer_cache_async at work: order, results, and the task."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from expect import PI, expect
from fake_engine import FakeEngine
from llm_datadist import (
    LLMException,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.cache_manager import CacheManager
from llm_datadist.engine.requests import BlocksKey, IdKey, PushRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
from layerwise_kit import (
    FAILED,
    ID_KEY,
    SUCCESS,
    TIMEOUT,
    WAIT_MS,
    Ready,
    by_address,
    by_key,
    cache,
    engine_of,
    manager,
    start,
)

# ------------------------------------------------------------ transfer_cache_async: work


def run(
    subject: CacheManager, configs: Sequence[Any], synchronizer: Ready | None = None, **more: Any
) -> tuple[LLMStatusCode, list[LLMStatusCode | None]]:
    """Run to the end; the overall status and the results."""
    task = start(subject, transfer_configs=configs, layer_synchronizer=synchronizer or Ready(), **more)
    overall = task.synchronize(WAIT_MS)
    assert task.synchronize() is overall
    return overall, task.get_results(0)


@pytest.mark.parametrize("accessible", [True, False])
def test_no_config_is_a_success(accessible: bool) -> None:
    synchronizer = Ready()
    assert run(manager(accessible=accessible), (), synchronizer) == (SUCCESS, [])
    assert synchronizer.asked == []


def test_each_needed_layer_is_asked_once_and_sent_to_its_configs_in_order() -> None:
    subject, synchronizer = manager(accessible=True), Ready()
    configs = (by_key(range(2, 4), range(7, 9)), by_key(range(3), range(3), key=ID_KEY))
    assert run(subject, configs, synchronizer, src_cache=cache(10)) == (SUCCESS, [SUCCESS, SUCCESS])
    assert synchronizer.asked == [(layer, None) for layer in range(4)]
    base = {"operation": "transfer_cache_async", "cache_id": 5, "tensors_per_layer": 2}

    def to_blocks(layer: int, target: int) -> PushRequest:
        layers = {"src_layers": range(layer, layer + 1), "dst_layers": range(target, target + 1)}
        return PushRequest(**base, **layers, cluster_id=2, key=BlocksKey(4))

    def to_id(layer: int) -> PushRequest:
        layers = {"src_layers": range(layer, layer + 1), "dst_layers": range(layer, layer + 1)}
        return PushRequest(**base, **layers, cluster_id=3, key=IdKey(1, 2))

    assert engine_of(subject).requests("push") == [
        to_id(0),
        to_id(1),
        to_blocks(2, 7),
        to_id(2),
        to_blocks(3, 8),
    ]


def test_work_is_done_in_a_thread_of_its_own_that_is_no_daemon() -> None:
    synchronizer = Ready()
    run(manager(accessible=True), [by_key()], synchronizer)
    (thread,) = synchronizer.threads
    assert thread is not threading.current_thread()
    assert not thread.daemon


def test_layer_that_nobody_wants_is_not_asked() -> None:
    subject, synchronizer = manager(accessible=False), Ready()
    assert run(subject, [by_address(range(3, 4)), by_address(range(1))], synchronizer)[0] is SUCCESS
    assert [layer for layer, _ in synchronizer.asked] == [0, 3]
    assert [request.src_layers for request in engine_of(subject).requests("push")] == [range(1), range(3, 4)]


def test_addresses_go_with_their_layers() -> None:
    subject = manager(accessible=False)
    config = TransferConfig(9, [10, 11, 12, 13], range(2, 4), 3)
    run(subject, [config])
    requests = engine_of(subject).requests("push")
    assert [(each.cluster_id, each.key, each.batch_index) for each in requests] == [(9, None, 3)] * 2
    assert [(each.src_layers, each.dst_addrs) for each in requests] == [
        (range(2, 3), (10, 11)),
        (range(3, 4), (12, 13)),
    ]


def test_missing_ranges_mean_all_layers_and_the_config_is_not_changed() -> None:
    subject = manager(accessible=False)
    config = by_address(None, 8)
    run(subject, [config])
    assert config.src_layer_range is None
    assert [each.src_layers.start for each in engine_of(subject).requests("push")] == [0, 1, 2, 3]
    subject = manager(accessible=True)
    keyed = by_key(range(1, 3), None)
    run(subject, [keyed, by_key(None, range(5, 9)), by_key(None, None)])
    assert keyed.dst_layer_range is None
    assert [(each.src_layers.start, each.dst_layers.start) for each in engine_of(subject).requests("push")] == [
        (0, 5),
        (0, 0),
        (1, 1),
        (1, 6),
        (1, 1),
        (2, 2),
        (2, 7),
        (2, 2),
        (3, 8),
        (3, 3),
    ]


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ({}, (None, None, 0)),
        ({"src_block_indices": [], "dst_block_indices": (), "dst_block_memory_size": 0}, (None, None, 0)),
        ({"src_block_indices": [2, True], "dst_block_indices": (0, 7)}, ((2, 1), (0, 7), 0)),
        (
            {"src_block_indices": (2,), "dst_block_indices": [2**64 - 1], "dst_block_memory_size": 32},
            ((2,), (2**64 - 1,), 32),
        ),
        (
            {"src_block_indices": None, "dst_block_indices": [3], "dst_block_memory_size": 64},
            (None, (3,), 64),
        ),
    ],
)
@pytest.mark.parametrize("accessible", [True, False])
def test_block_arguments(accessible: bool, given: dict[str, Any], passed: Any) -> None:
    subject = manager(accessible=accessible)
    run(subject, [by_key(range(1), range(1)) if accessible else by_address()], **given)
    (request,) = engine_of(subject).requests("push")
    assert (request.src_blocks, request.dst_blocks, request.dst_block_size) == passed


def test_arguments_are_taken_as_they_are_at_the_call() -> None:
    subject = manager(accessible=False)
    begun, go = threading.Event(), threading.Event()

    def wait(_layer: int) -> bool:
        begun.set()
        return go.wait(WAIT_MS / 1000)

    config, targets = by_address(range(2), 4), [0]
    task = start(
        subject,
        transfer_configs=[config],
        layer_synchronizer=Ready(wait),
        src_block_indices=[1],
        dst_block_indices=targets,
    )
    assert begun.wait(WAIT_MS / 1000)
    config.dst_cluster_id, config.dst_addrs, config.src_layer_range = 77, [1], range(1)
    targets[0] = 9
    go.set()
    assert task.synchronize(WAIT_MS) is SUCCESS
    requests = engine_of(subject).requests("push")
    assert [(each.cluster_id, each.dst_addrs, each.dst_blocks) for each in requests] == [
        (2, (100, 101), (0,)),
        (2, (102, 103), (0,)),
    ]


# ------------------------------------------------------------ transfer_cache_async: results


def two_configs() -> list[TransferWithCacheKeyConfig]:
    """Layers 0 to 2 to cluster 2, layers 2 and 3 to cluster 3."""
    return [by_key(range(3), range(3)), by_key(range(2, 4), range(2, 4), key=ID_KEY)]


@pytest.mark.parametrize("falsy", [False, None, 0])
@pytest.mark.parametrize(
    ("layer", "results"), [(0, [PI, None]), (1, [PI, None]), (2, [PI, PI]), (3, [SUCCESS, PI]), (9, [SUCCESS, SUCCESS])]
)
def test_falsy_callback(falsy: Any, layer: int, results: list[Any]) -> None:
    synchronizer = Ready(lambda asked: falsy if asked == layer else "truthy")
    overall = SUCCESS if layer == 9 else PI
    assert run(manager(accessible=True), two_configs(), synchronizer) == (overall, results)
    assert [asked for asked, _ in synchronizer.asked] == list(range(min(layer, 3) + 1))


@pytest.mark.parametrize("error", [ValueError("a bug"), LLMException("no code"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize(("layer", "results"), [(0, [FAILED, None]), (2, [FAILED, FAILED]), (3, [SUCCESS, FAILED])])
def test_raising_callback(
    error: BaseException, layer: int, results: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(asked: int) -> bool:
        if asked == layer:
            raise error
        return True

    assert run(manager(accessible=True), two_configs(), Ready(answer)) == (FAILED, results)
    assert f"layer {layer} of transfer_cache_async failed" in capsys.readouterr().out


class FailingEngine(FakeEngine):
    """Fails the push of one layer to one cluster."""

    def __init__(self, cluster_id: int, layer: int, error: Exception) -> None:
        super().__init__()
        self._where = (cluster_id, range(layer, layer + 1))
        self._error = error

    def push(self, request: PushRequest) -> None:
        self._record("push", request)
        if (request.cluster_id, request.src_layers) == self._where:
            raise self._error


@pytest.mark.parametrize(
    ("cluster_id", "layer", "results", "sent"),
    [
        (2, 1, [TIMEOUT, None], [(2, 0), (2, 1)]),
        (2, 2, [TIMEOUT, None], [(2, 0), (2, 1), (2, 2)]),
        (3, 2, [SUCCESS, TIMEOUT], [(2, 0), (2, 1), (2, 2), (3, 2)]),
        (3, 3, [SUCCESS, TIMEOUT], [(2, 0), (2, 1), (2, 2), (3, 2), (3, 3)]),
    ],
)
def test_engine_failure_stops_everything(cluster_id: int, layer: int, results: list[Any], sent: list[Any]) -> None:
    engine = FailingEngine(cluster_id, layer, LLMException("late", status_code=TIMEOUT))
    subject = CacheManager(engine, {"llm.EnableRemoteCacheAccessible": "1"})  # type: ignore[arg-type]
    assert run(subject, two_configs()) == (TIMEOUT, results)
    assert [(each.cluster_id, each.src_layers.start) for each in engine.requests("push")] == sent


@pytest.mark.parametrize(
    ("error", "results"),
    [
        (LLMException("no code"), [SUCCESS, FAILED]),
        (TypeError("negative"), [SUCCESS, FAILED]),
    ],
)
def test_failure_without_a_status_is_failed_never_a_success(error: Exception, results: list[Any]) -> None:
    engine = FailingEngine(3, 2, error)
    subject = CacheManager(engine, {"llm.EnableRemoteCacheAccessible": "1"})  # type: ignore[arg-type]
    assert run(subject, two_configs()) == (FAILED, results)


def test_results_are_kept_per_config_even_for_one_cluster() -> None:
    engine = FailingEngine(2, 1, LLMException("late", status_code=TIMEOUT))
    subject = CacheManager(engine, {"llm.EnableRemoteCacheAccessible": "1"})  # type: ignore[arg-type]
    configs = [by_key(range(1), range(1)), by_key(range(2), range(2)), by_key(range(4), range(4))]
    assert run(subject, configs) == (TIMEOUT, [SUCCESS, TIMEOUT, None])


def test_what_is_sent_goes_to_the_peer_of_the_present_key() -> None:
    subject = manager(accessible=True)
    config = by_key(range(1), range(1))
    config.cache_key = ID_KEY
    assert run(subject, [config]) == (SUCCESS, [SUCCESS])
    assert [each.cluster_id for each in engine_of(subject).requests("push")] == [3]


def test_after_finalize_the_task_fails() -> None:
    subject = manager(accessible=True)
    subject.mark_finalized()
    assert run(subject, [by_key()]) == (PI, [PI])
    assert engine_of(subject).calls == []


# ------------------------------------------------------------ CacheTask


def test_running_task() -> None:
    go = threading.Event()
    synchronizer = Ready(lambda layer: go.wait(WAIT_MS / 1000))
    task = start(manager(accessible=True), transfer_configs=two_configs(), layer_synchronizer=synchronizer)
    for timeout in (0, 1):
        assert task.synchronize(timeout) is TIMEOUT
        assert task.get_results(timeout_in_millis=timeout) == [TIMEOUT, TIMEOUT]
    go.set()
    assert task.synchronize(timeout_in_millis=WAIT_MS) is SUCCESS
    assert task.get_results() == [SUCCESS, SUCCESS]
    results = task.get_results()
    results.clear()
    assert task.get_results() == [SUCCESS, SUCCESS]


@pytest.mark.parametrize("method", ["synchronize", "get_results"])
@pytest.mark.parametrize(
    ("timeout", "failure"), [("1", TypeError), (1.0, TypeError), (-1, ValueError), (2**32, ValueError)]
)
def test_timeouts_are_checked(method: str, timeout: Any, failure: type[Exception]) -> None:
    task = start(manager(accessible=True))
    assert task.synchronize(2**32 - 1) is SUCCESS
    expect(failure, lambda: getattr(task, method)(timeout))


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        message = "can't start new thread"
        raise RuntimeError(message)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    expect(FAILED, lambda: start(manager(accessible=True)), match="can't start new thread")
