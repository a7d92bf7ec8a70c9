"""The statuses that the engine gives for transfers, through the public API in loopback mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import PI, expect
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMDataDist,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llm_datadist.cache_manager import CacheManager
from loopback_kit import MAX, NOT_EXIST, NOT_LINKED, SUCCESS, WAIT_MS, addrs, cluster, desc, tensors, view

# ------------------------------------------------------------ pull


def caches(manager: CacheManager, num_tensors: int = 4) -> tuple[Cache, Cache, list[NDArray[np.uint8]]]:
    """A contiguous and a blocks destination, and the memory that keeps them alive."""
    memory = tensors(2 * num_tensors)
    contiguous = manager.register_cache(
        desc(num_tensors), addrs(memory[:num_tensors]), [CacheKey(2, 1), CacheKey(2, 2)]
    )
    blocks = manager.register_blocks_cache(desc(num_tensors), addrs(memory[num_tensors:]), BlocksCacheKey(2))
    return contiguous, blocks, memory


BY_ID = CacheKeyByIdAndIndex(2, 1)
BY_BLOCKS = BlocksCacheKey(2)

PULL_REFUSED: list[tuple[str, dict[str, Any], Any]] = [
    ("pull_cache", {"cache_key": CacheKeyByIdAndIndex(3, 1)}, PI),
    ("pull_cache", {"cache": Cache(99, desc(), [1, 2], None, True, False)}, NOT_EXIST),
    ("pull_cache", {"batch_index": 4}, PI),
    ("pull_cache", {"size": 17}, PI),
    ("pull_cache", {"src_layer_range": range(1), "dst_layer_range": range(2)}, PI),
    ("pull_cache", {"src_layer_range": range(3), "dst_layer_range": range(3)}, PI),
    ("pull_cache", {"src_layer_range": range(1)}, PI),
    ("pull_cache", {"dst_layer_range": range(1)}, PI),
    ("pull_cache", {"dst_layer_range": range(2, 3), "src_layer_range": range(1)}, PI),
    ("pull_cache", {"src_layer_range": range(2, 3), "dst_layer_range": range(1)}, PI),
    ("pull_cache", {"src_layer_range": range(1), "dst_layer_range": range(1), "tensor_num_per_layer": 3}, PI),
    ("pull_cache", {"cache_key": CacheKeyByIdAndIndex(5, 1)}, NOT_LINKED),
    ("pull_cache", {"cache_key": CacheKeyByIdAndIndex(2, 99)}, NOT_EXIST),
    ("pull_cache", {"cache_key": CacheKeyByIdAndIndex(2, 1, 4)}, NOT_EXIST),
    ("pull_blocks", {"src_cache_key": BlocksCacheKey(3)}, PI),
    ("pull_blocks", {"dst_cache": Cache(99, desc(), [1, 2], None, True, True)}, NOT_EXIST),
    ("pull_blocks", {"src_cache_key": BlocksCacheKey(5)}, NOT_LINKED),
    ("pull_blocks", {"src_cache_key": BlocksCacheKey(2, 9)}, NOT_EXIST),
    ("pull_blocks", {"src_blocks": [0, 1]}, PI),
    ("pull_blocks", {"dst_blocks": [0, 1]}, PI),
    ("pull_blocks", {"src_blocks": [4]}, PI),
    ("pull_blocks", {"dst_blocks": [4]}, PI),
    ("pull_blocks", {"src_blocks": [2**64]}, PI),
    ("pull_blocks", {"src_blocks": [-1]}, TypeError),
    ("pull_blocks", {"dst_blocks": [-1]}, TypeError),
    ("pull_blocks", {"src_cache_key": BY_ID, "src_blocks": [], "dst_blocks": [0, 1]}, PI),
    ("pull_blocks", {"src_cache_key": CacheKey(2, 99), "src_blocks": []}, NOT_EXIST),
    ("pull_blocks", {"dst_layer_range": range(3), "src_layer_range": range(3)}, PI),
]


@pytest.mark.parametrize("mode", ["linked", "messaging"])
@pytest.mark.parametrize(("method", "change", "failure"), PULL_REFUSED)
def test_pull_rows_of_the_engine(
    request: pytest.FixtureRequest, mode: str, method: str, change: dict[str, Any], failure: Any
) -> None:
    manager = request.getfixturevalue(mode)
    contiguous, blocks, memory = caches(manager)
    good: dict[str, Any] = {"cache_key": BY_ID, "cache": contiguous}
    if method == "pull_blocks":
        good = {"src_cache_key": BY_BLOCKS, "dst_cache": blocks, "src_blocks": [0], "dst_blocks": [1]}
    expect(failure, lambda: getattr(manager, method)(**{**good, **change}))
    assert all(np.array_equal(array, before) for array, before in zip(memory, tensors(8), strict=True))
    getattr(manager, method)(**good)


@pytest.mark.parametrize("mode", ["linked", "messaging"])
def test_pull_between_different_numbers_of_tensors_is_refused(request: pytest.FixtureRequest, mode: str) -> None:
    manager = request.getfixturevalue(mode)
    contiguous, blocks, memory = caches(manager)
    few = tensors(2)
    small = manager.register_cache(desc(2), addrs(few))
    small_blocks = manager.register_blocks_cache(desc(2), addrs(few))
    expect(PI, lambda: manager.pull_cache(BY_ID, small))
    expect(PI, lambda: manager.pull_blocks(BY_BLOCKS, small_blocks, [0], [1]))
    # with a source range as long as the local cache it fits
    manager.pull_cache(BY_ID, small, src_layer_range=range(1, 2))
    assert np.array_equal(few[0][:16], memory[2][:16])
    assert contiguous.cache_id == 1
    assert blocks.is_blocks_cache


@pytest.mark.parametrize("mode", ["linked", "messaging"])
def test_pull_of_one_tensor(request: pytest.FixtureRequest, mode: str) -> None:
    manager = request.getfixturevalue(mode)
    memory, target = tensors(1), tensors(1)
    manager.register_cache(desc(1), addrs(memory))
    into = manager.register_cache(desc(1), addrs(target))
    expect(PI, lambda: manager.pull_cache(BY_ID, into, src_layer_range=range(1), dst_layer_range=range(1)))
    manager.pull_cache(BY_ID, into, 2, 4)
    assert np.array_equal(target[0], np.concatenate([memory[0][:32], memory[0][:4], memory[0][36:]]))
    manager.pull_cache(BY_ID, into, tensor_num_per_layer=99)
    manager.pull_cache(BY_ID, into, src_layer_range=range(0), dst_layer_range=range(5, 5))


def test_not_accessible_caches_take_part_only_without_remote_access(
    linked: CacheManager, request: pytest.FixtureRequest
) -> None:
    memory = tensors()
    hidden = linked.register_blocks_cache(desc(), addrs(memory), BlocksCacheKey(2, 1), remote_accessible=False)
    shown = linked.register_blocks_cache(desc(), addrs(memory), BlocksCacheKey(2, 2))
    expect(PI, lambda: linked.pull_blocks(BlocksCacheKey(2, 1), shown, [0], [1]))
    expect(PI, lambda: linked.pull_blocks(BlocksCacheKey(2, 2), hidden, [0], [1]))
    expect(PI, lambda: linked.push_blocks(BlocksCacheKey(2, 1), shown, [0], [1]))
    expect(PI, lambda: linked.push_blocks(BlocksCacheKey(2, 2), hidden, [0], [1]))
    request.getfixturevalue("loopback_datadist").finalize()
    manager = request.getfixturevalue("messaging")
    hidden = manager.register_blocks_cache(desc(), addrs(memory), BlocksCacheKey(2, 1), remote_accessible=False)
    manager.pull_blocks(BlocksCacheKey(2, 1), hidden, [0], [1])


def test_prefix_keys_are_not_published(linked: CacheManager) -> None:
    linked.allocate_cache(desc(), [CacheKey(1, MAX, 0, 5), CacheKey(1, 6)])
    into = linked.register_blocks_cache(desc(shape=(8, 16)), addrs(tensors(2, 128)))
    expect(NOT_EXIST, lambda: linked.pull_blocks(CacheKey(2, MAX, 0, 5), into, [], [0]))
    for _ in range(2):  # and keys are not released with remote access
        linked.pull_blocks(CacheKey(2, 6), into, [], [0])


# ------------------------------------------------------------ push


PUSH_REFUSED: list[tuple[str, dict[str, Any], Any]] = [
    ("push_cache", {"src_cache": Cache(99, desc(), [1, 2], None, True, False)}, NOT_EXIST),
    ("push_cache", {"dst_cache_key": CacheKeyByIdAndIndex(5, 1)}, NOT_LINKED),
    ("push_cache", {"dst_cache_key": CacheKeyByIdAndIndex(2, 99)}, NOT_EXIST),
    ("push_cache", {"dst_cache_key": CacheKeyByIdAndIndex(2, 1, 4)}, PI),
    ("push_cache", {"src_batch_index": 4}, PI),
    ("push_cache", {"src_layer_range": range(2, 3), "dst_layer_range": range(1)}, PI),
    ("push_cache", {"src_layer_range": range(1), "dst_layer_range": range(2, 3)}, PI),
    ("push_cache", {"tensor_num_per_layer": 3}, PI),
    ("push_blocks", {"src_cache": Cache(99, desc(), [1, 2], None, True, True)}, NOT_EXIST),
    ("push_blocks", {"dst_cache_key": BlocksCacheKey(5)}, NOT_LINKED),
    ("push_blocks", {"dst_cache_key": BlocksCacheKey(2, 9)}, NOT_EXIST),
    ("push_blocks", {"src_blocks": []}, PI),
    ("push_blocks", {"src_blocks": None}, PI),
    ("push_blocks", {"src_blocks": [0, 1]}, PI),
    ("push_blocks", {"dst_blocks": [0, 1]}, PI),
    ("push_blocks", {"src_blocks": [4]}, PI),
    ("push_blocks", {"dst_blocks": [4]}, PI),
    ("push_blocks", {"src_blocks": [-1]}, TypeError),
    ("push_blocks", {"dst_blocks": [-1]}, TypeError),
    ("push_blocks", {"tensor_num_per_layer": 3}, PI),
]


@pytest.mark.parametrize(("method", "change", "failure"), PUSH_REFUSED)
def test_push_rows_of_the_engine(linked: CacheManager, method: str, change: dict[str, Any], failure: Any) -> None:
    contiguous, blocks, memory = caches(linked)
    good: dict[str, Any] = {"dst_cache_key": BY_ID, "src_cache": contiguous}
    if method == "push_blocks":
        good = {"dst_cache_key": BY_BLOCKS, "src_cache": blocks, "src_blocks": [0], "dst_blocks": [1]}
    expect(failure, lambda: getattr(linked, method)(**{**good, **change}))
    assert all(np.array_equal(array, before) for array, before in zip(memory, tensors(8), strict=True))
    getattr(linked, method)(**good)


def test_push_to_the_own_cluster_is_not_refused(loopback_datadist: LLMDataDist) -> None:
    manager = loopback_datadist.cache_manager
    loopback_datadist.link_clusters([cluster(3)])
    memory = tensors()
    cache = manager.register_blocks_cache(desc(), addrs(memory), BlocksCacheKey(3))
    manager.push_blocks(BlocksCacheKey(3), cache, [0], [2])
    assert np.array_equal(memory[1][32:48], memory[1][:16])


def test_push_to_cache_id_zero_falls_back_to_the_key_of_request_zero(linked: CacheManager) -> None:
    memory = tensors()
    source = linked.register_cache(desc(), addrs(memory))
    for cache_id in (0, -1):
        expect(NOT_EXIST, lambda cache_id=cache_id: linked.push_cache(CacheKeyByIdAndIndex(2, cache_id, 0), source))
    target = linked.allocate_cache(desc(), [CacheKey(9, 0)])
    linked.push_cache(CacheKeyByIdAndIndex(2, 0, 0), source)
    assert np.array_equal(view(target)[:16], memory[0][:16])


# ------------------------------------------------------------ transfer_cache_async


class Ready(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


def test_async_transfer_by_key(linked: CacheManager) -> None:
    contiguous, blocks, memory = caches(linked)
    target = tensors(4)
    into = linked.register_cache(desc(4), [array.ctypes.data for array in target])
    config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, into.cache_id, 3), range(1), range(1, 2), 1)
    task = linked.transfer_cache_async(contiguous, Ready(), [config])
    assert task.synchronize(WAIT_MS) is SUCCESS
    assert np.array_equal(target[2][48:], memory[0][16:32])
    assert np.array_equal(target[3][48:], memory[1][16:32])
    assert np.array_equal(target[0], tensors(4)[0])
    config = TransferWithCacheKeyConfig(BY_BLOCKS, range(2), range(2))
    task = linked.transfer_cache_async(blocks, Ready(), [config], [0], [3])
    assert task.synchronize(WAIT_MS) is SUCCESS
    assert np.array_equal(memory[4][48:], memory[4][:16])
    # without block lists block 0 goes to block 0
    other = linked.register_blocks_cache(desc(4), addrs(target), BlocksCacheKey(2, 8))
    config = TransferWithCacheKeyConfig(BlocksCacheKey(2, 8), range(1), range(1))
    assert linked.transfer_cache_async(blocks, Ready(), [config]).synchronize(WAIT_MS) is SUCCESS
    assert np.array_equal(target[0], np.concatenate([memory[4][:16], tensors(4)[0][16:]]))
    assert other.is_blocks_cache


def test_async_transfer_to_addresses(messaging: CacheManager) -> None:
    contiguous, blocks, memory = caches(messaging)
    target = tensors(4)
    messaging.register_cache(desc(4), addrs(target))
    configs = [TransferConfig(2, addrs(target[:2]), range(1, 2), 2), TransferConfig(2, addrs(target[2:]), range(1), 0)]
    task = messaging.transfer_cache_async(contiguous, Ready(), configs)
    assert task.get_results(WAIT_MS) == [SUCCESS, SUCCESS]
    assert np.array_equal(target[0][:16], memory[2][32:48])
    assert np.array_equal(target[3][:16], memory[1][:16])
    configs = [TransferConfig(2, addrs(target[:2]), range(1))]
    task = messaging.transfer_cache_async(blocks, Ready(), configs, [1, 2], [3, 0])
    assert task.synchronize(WAIT_MS) is SUCCESS
    assert np.array_equal(target[1][48:], memory[5][16:32])
    assert np.array_equal(target[1][:16], memory[5][32:48])
    task = messaging.transfer_cache_async(contiguous, Ready(), configs, None, [7, 1], 8)
    assert task.synchronize(WAIT_MS) is SUCCESS
    assert np.array_equal(target[1][56:], memory[1][:8])
    assert np.array_equal(target[1][8:16], memory[1][8:16])


ASYNC_FAILURES: list[tuple[dict[str, Any], Any]] = [
    ({"key": BlocksCacheKey(5)}, NOT_LINKED),
    ({"key": BlocksCacheKey(2, 9)}, NOT_EXIST),
    ({"key": CacheKeyByIdAndIndex(2, 99)}, NOT_EXIST),
    ({"dst": range(2, 4)}, PI),
    ({"src_block_indices": [4], "dst_block_indices": [0]}, PI),
    ({"src_block_indices": [0], "dst_block_indices": [4]}, PI),
    ({"src_block_indices": [0], "dst_block_indices": [1], "dst_block_memory_size": 8}, PI),
    ({"dst_block_indices": [0], "dst_block_memory_size": 8}, PI),
    ({"dst_block_indices": [0, 1], "dst_block_memory_size": 16}, PI),
    ({"src_cache": Cache(99, desc(4), [1, 2, 3, 4], None, True, True)}, NOT_EXIST),
]


@pytest.mark.parametrize(("change", "failure"), ASYNC_FAILURES)
def test_async_rows_of_the_engine_are_results(linked: CacheManager, change: dict[str, Any], failure: Any) -> None:
    _, blocks, memory = caches(linked)
    change = dict(change)
    config = TransferWithCacheKeyConfig(change.pop("key", BY_BLOCKS), range(2), change.pop("dst", range(2)))
    task = linked.transfer_cache_async(change.pop("src_cache", blocks), Ready(), [config], **change)
    assert task.synchronize(WAIT_MS) is failure
    assert task.get_results() == [failure]
    assert all(np.array_equal(array, before) for array, before in zip(memory, tensors(8), strict=True))


def test_async_batch_index_is_a_result(linked: CacheManager) -> None:
    contiguous, _, _ = caches(linked)
    config = TransferWithCacheKeyConfig(BY_ID, range(1), range(1), 4)
    assert linked.transfer_cache_async(contiguous, Ready(), [config]).synchronize(WAIT_MS) is PI
