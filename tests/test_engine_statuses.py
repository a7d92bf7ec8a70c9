"""The statuses that the engine gives, through the public API in loopback mode: one process plays every cluster."""

from __future__ import annotations

import ctypes
import socket
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from conftest import POOL, loopback_config
from expect import PI, expect

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.testing import loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from llm_datadist.cache_manager import CacheManager

MAX = 2**64 - 1
U8 = DataType.DT_UINT8
HOST, DEVICE = Placement.HOST, Placement.DEVICE
SUCCESS = LLMStatusCode.LLM_SUCCESS
NOT_EXIST = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
NOT_LINKED = LLMStatusCode.LLM_NOT_YET_LINK
NOT_ENABLED = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
OUT_OF_MEMORY = LLMStatusCode.LLM_OUT_OF_MEMORY
WAIT_MS = 10_000


def desc(num_tensors: int = 2, shape: Any = (4, 16), placement: Placement = DEVICE) -> CacheDesc:
    return CacheDesc(num_tensors, shape, U8, placement)


def tensors(count: int = 2, size: int = 64) -> list[NDArray[np.uint8]]:
    """Memory of different content per tensor and byte."""
    return [np.arange(size, dtype=np.uint8) + np.uint8(64 * (index % 4)) for index in range(count)]


def addrs(arrays: list[NDArray[np.uint8]]) -> list[int]:
    return [array.ctypes.data for array in arrays]


def view(cache: Cache, tensor: int = 0) -> NDArray[np.uint8]:
    """The bytes of one tensor, where they are."""
    raw = (ctypes.c_uint8 * cache.cache_desc.size).from_address(cache.tensor_addrs[tensor])
    return np.frombuffer(raw, dtype=np.uint8)


def cluster(cluster_id: int, remotes: int = 1) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info("127.0.0.1", 0)
    for port in range(remotes):
        info.append_remote_ip_info("127.0.0.1", 26000 + port)
    return info


@pytest.fixture
def plain() -> Iterator[LLMDataDist]:
    """Cluster 3 with remote access and without pools, not linked."""
    config = loopback_config(accessible=True)
    config.mem_pool_cfg = config.host_mem_pool_cfg = None
    with loopback():
        datadist = LLMDataDist(LLMRole.PROMPT, 3)
        datadist.init(config.generate_options())
        yield datadist
        datadist.finalize()


@pytest.fixture
def linked(loopback_datadist: LLMDataDist) -> CacheManager:
    """Remote access, linked to cluster 2."""
    assert loopback_datadist.link_clusters([cluster(2)]) == (SUCCESS, [SUCCESS])
    return loopback_datadist.cache_manager


@pytest.fixture
def messaging(loopback_message_datadist: LLMDataDist) -> CacheManager:
    """No remote access, linked to cluster 2."""
    assert loopback_message_datadist.link_clusters([cluster(2)]) == (SUCCESS, [SUCCESS])
    return loopback_message_datadist.cache_manager


# ------------------------------------------------------------ register, unregister


@pytest.mark.parametrize("method", ["register_cache", "register_blocks_cache"])
@pytest.mark.parametrize(
    ("shape", "given", "failure"),
    [
        ((0, 16), [4096, 8192], PI),
        ((4, -1), [4096, 8192], PI),
        ((1,) * 32, [4096, 8192], PI),
        ((4, 16), [4096, -1], TypeError),
        ((4, 16), [4096, 2**64], TypeError),
    ],
)
def test_register_rows_of_the_engine(plain: LLMDataDist, method: str, shape: Any, given: Any, failure: Any) -> None:
    expect(failure, lambda: getattr(plain.cache_manager, method)(desc(shape=shape), given))


def test_register_blocks_cache_rows_of_the_engine(plain: LLMDataDist) -> None:
    manager = plain.cache_manager
    expect(PI, lambda: manager.register_blocks_cache(desc(), [4096]))
    expect(PI, lambda: manager.register_blocks_cache(desc(), [4096, 0]))
    manager.register_blocks_cache(desc(), [4096, 0], remote_accessible=False)
    manager.register_cache(desc(shape=(1,) * 31), [1, 1])


def test_same_address_twice_and_odd_addresses_are_accepted(plain: LLMDataDist) -> None:
    first = plain.cache_manager.register_cache(desc(), [1, 1])
    second = plain.cache_manager.register_cache(desc(), [1, 1])
    assert (first.cache_id, second.cache_id) == (1, 2)


def test_number_of_registered_addresses(plain: LLMDataDist) -> None:
    manager = plain.cache_manager
    manager.register_cache(desc(240), [4096] * 240)
    error = expect(PI, lambda: manager.register_blocks_cache(desc(1), [4096]), match="240")
    assert "max_registered_addrs" in str(error)
    manager.unregister_cache(1)
    manager.register_cache(desc(240), [4096] * 240)


def test_number_of_registered_addresses_can_be_raised() -> None:
    config = loopback_config(accessible=True)
    config.max_registered_addrs = 300
    with loopback():
        datadist = LLMDataDist(LLMRole.PROMPT, 3)
        datadist.init(config.generate_options())
        try:
            datadist.cache_manager.register_cache(desc(300), [4096] * 300)
            expect(PI, lambda: datadist.cache_manager.register_cache(desc(1), [4096]), match="300")
        finally:
            datadist.finalize()


@pytest.mark.parametrize("cache_id", [-1, 0, 1, 2**63 - 1])
def test_unregister_of_an_unknown_cache_succeeds(plain: LLMDataDist, cache_id: int) -> None:
    plain.cache_manager.unregister_cache(cache_id)


def test_one_blocks_cache_per_model_and_the_last_registered_wins(linked: CacheManager) -> None:
    old, new, target = tensors(), [array + np.uint8(7) for array in tensors()], tensors()
    linked.register_blocks_cache(desc(), addrs(old), BlocksCacheKey(77, 5))
    linked.register_blocks_cache(desc(), addrs(new), BlocksCacheKey(-1, 5))
    into = linked.register_blocks_cache(desc(), addrs(target))
    linked.pull_blocks(BlocksCacheKey(2, 5), into, [0], [3])
    assert all(np.array_equal(there[48:], source[:16]) for there, source in zip(target, new, strict=True))
    assert all(np.array_equal(there[:48], before[:48]) for there, before in zip(target, tensors(), strict=True))


def test_older_binding_of_a_registered_key_stays(messaging: CacheManager) -> None:
    old, new, target = tensors(), [array + np.uint8(7) for array in tensors()], tensors()
    messaging.register_cache(desc(), addrs(old), [CacheKey(1, 1), CacheKey(1, 2)])
    messaging.register_cache(desc(), addrs(new), [CacheKey(1, 2)])
    into = messaging.register_cache(desc(), addrs(target))
    messaging.pull_cache(CacheKey(2, 2), into)
    assert np.array_equal(target[0][:16], old[0][16:32])


# ------------------------------------------------------------ allocate, deallocate, keys


def test_allocate_rows_of_the_engine(messaging: CacheManager) -> None:
    keys = [CacheKey(1, number) for number in range(5)]
    expect(PI, lambda: messaging.allocate_cache(desc(), keys))
    expect(PI, lambda: messaging.allocate_cache(desc(), [keys[0], keys[0]]))
    messaging.allocate_cache(desc(), keys[:4])
    expect(PI, lambda: messaging.allocate_cache(desc(), keys[3:]))
    messaging.allocate_cache(desc(), [CacheKey(1, MAX), CacheKey(1, MAX)])
    expect(PI, lambda: messaging.allocate_cache(desc(shape=(4, 0))))
    expect(OUT_OF_MEMORY, lambda: messaging.allocate_cache(desc(1, (1, 2**24 + 1))))
    expect(OUT_OF_MEMORY, lambda: messaging.allocate_blocks_cache(desc(4, (1, 2**23))))
    messaging.allocate_blocks_cache(desc(1, (1, 2**23)))


@pytest.mark.parametrize("method", ["allocate_cache", "allocate_blocks_cache"])
@pytest.mark.parametrize(("pool", "placement"), [("mem_pool_cfg", HOST), ("host_mem_pool_cfg", DEVICE)])
def test_allocate_needs_the_pool_of_its_placement(method: str, pool: str, placement: Placement) -> None:
    config = loopback_config(accessible=False)
    config.mem_pool_cfg = config.host_mem_pool_cfg = None
    setattr(config, pool, POOL)
    with loopback():
        datadist = LLMDataDist(LLMRole.PROMPT, 3)
        datadist.init(config.generate_options())
        try:
            allocate = getattr(datadist.cache_manager, method)
            expect(PI, lambda: allocate(desc(placement=placement)), match="pool")
            assert allocate(desc(placement=HOST if placement is DEVICE else DEVICE)).tensor_addrs
        finally:
            datadist.finalize()


def test_without_any_pool(plain: LLMDataDist) -> None:
    manager = plain.cache_manager
    contiguous, blocks = manager.register_cache(desc(), [1, 2]), manager.register_blocks_cache(desc(), [1, 2])
    expect(PI, lambda: manager.allocate_cache(desc()))
    expect(PI, lambda: manager.allocate_blocks_cache(desc(placement=HOST)))
    expect(NOT_ENABLED, lambda: manager.deallocate_cache(contiguous))
    expect(NOT_ENABLED, lambda: manager.deallocate_blocks_cache(blocks))
    expect(NOT_ENABLED, lambda: manager.remove_cache_key(CacheKey(1, 2)))
    assert contiguous.tensor_addrs == [1, 2]


def test_deallocate_of_what_is_not_allocated_succeeds(messaging: CacheManager) -> None:
    memory = tensors()
    registered = messaging.register_cache(desc(), addrs(memory))
    allocated = messaging.allocate_blocks_cache(desc())
    for _ in range(2):
        messaging.deallocate_cache(registered)
        messaging.deallocate_blocks_cache(allocated)
    messaging.deallocate_blocks_cache(Cache.create_cpu_cache(desc(placement=HOST), addrs(memory)))
    assert registered.tensor_addrs == allocated.tensor_addrs == []
    into = messaging.register_cache(desc(), addrs(tensors()))
    messaging.pull_cache(CacheKeyByIdAndIndex(2, registered.cache_id), into)


def test_remove_cache_key_of_what_is_not_allocated_succeeds(messaging: CacheManager) -> None:
    key = CacheKey(2, 1)
    memory = tensors()
    messaging.register_cache(desc(), addrs(memory), [key])
    into = messaging.register_cache(desc(), addrs(tensors()))
    messaging.remove_cache_key(key)
    messaging.remove_cache_key(CacheKey(2, 99))
    messaging.remove_cache_key(CacheKey(2, MAX))
    messaging.pull_cache(key, into)


def test_allocated_cache_lives_until_it_is_deallocated_and_has_no_key(messaging: CacheManager) -> None:
    size = 2**23  # two tensors fill the pool
    keys = [CacheKey(2, 1), CacheKey(2, MAX, 0, 5)]
    cache = messaging.allocate_cache(desc(2, (4, size // 4)), keys)
    messaging.deallocate_cache(cache)
    expect(OUT_OF_MEMORY, lambda: messaging.allocate_cache(desc(1, (1, size))))
    messaging.remove_cache_key(keys[0])
    expect(OUT_OF_MEMORY, lambda: messaging.allocate_cache(desc(1, (1, size))))
    messaging.remove_cache_key(keys[1])
    assert messaging.allocate_cache(desc(2, (1, size))).cache_id > cache.cache_id


def test_pulled_request_key_is_released_once(messaging: CacheManager) -> None:
    keys = [CacheKey(2, 1), CacheKey(2, MAX, 0, 5)]
    cache = messaging.allocate_cache(desc(), keys)
    view(cache)[:] = np.arange(64)
    target = tensors()
    into = messaging.register_cache(desc(), addrs(target))
    messaging.pull_cache(keys[0], into, 3)
    assert np.array_equal(target[0][48:], np.arange(16))
    expect(NOT_EXIST, lambda: messaging.pull_cache(keys[0], into))
    for _ in range(2):
        messaging.pull_cache(keys[1], into)
    assert np.array_equal(target[0][:16], np.arange(16, 32))


# ------------------------------------------------------------ copies in this process


def test_copy_cache_rows_of_the_engine(messaging: CacheManager) -> None:
    source, target = tensors(), tensors()
    src = messaging.register_cache(desc(), addrs(source))
    dst = messaging.register_cache(desc(placement=HOST), addrs(target))
    other = messaging.register_cache(desc(1), addrs(tensors(1)))
    small = messaging.register_cache(desc(shape=(8, 8)), addrs(tensors()))
    gone = Cache(99, desc(), [1, 2], None, True, False)
    expect(NOT_EXIST, lambda: messaging.copy_cache(gone, src))
    expect(NOT_EXIST, lambda: messaging.copy_cache(dst, gone))
    for change in (
        {"dst": other},
        {"dst_batch_index": 4},
        {"src_batch_index": 4},
        {"offset": 16},
        {"dst": small, "offset": 8},
        {"size": 17},
        {"offset": 4, "size": 13},
        {"dst": small},
    ):
        expect(PI, lambda change=change: messaging.copy_cache(**{"dst": dst, "src": src, **change}))
    assert np.array_equal(target[0], tensors()[0])
    messaging.copy_cache(dst, src, 1, 2, 4, 8)
    assert np.array_equal(target[1][20:28], source[1][36:44])
    messaging.copy_cache(dst, src, 3, 0)
    assert np.array_equal(target[0][48:], source[0][:16])


def test_copy_blocks_rows_of_the_engine(messaging: CacheManager) -> None:
    memory = tensors()
    cache = messaging.register_blocks_cache(desc(), addrs(memory))
    expect(PI, lambda: messaging.copy_blocks(cache, {4: [0]}))
    expect(PI, lambda: messaging.copy_blocks(cache, {0: [1, 4]}))
    expect(NOT_EXIST, lambda: messaging.copy_blocks(Cache(99, desc(), [1, 2], None, True, True), {0: [1]}))
    assert np.array_equal(memory[0], tensors()[0])
    messaging.copy_blocks(cache, {})
    messaging.copy_blocks(cache, {0: [1, 3]})
    for array, before in zip(memory, tensors(), strict=True):
        assert np.array_equal(array, np.concatenate([before[:16], before[:16], before[32:48], before[:16]]))


def test_swap_blocks_moves_bytes_both_ways(messaging: CacheManager) -> None:
    device = messaging.allocate_blocks_cache(desc())
    view(device, 1)[:] = np.arange(64)
    memory = tensors()
    cpu = Cache.create_cpu_cache(desc(placement=HOST), addrs(memory))
    messaging.swap_blocks(device, cpu, {0: 3, 1: 0})
    assert np.array_equal(memory[1][48:], np.arange(16))
    assert np.array_equal(memory[1][:16], np.arange(16, 32))
    messaging.swap_blocks(cpu, device, {3: 2})
    assert np.array_equal(view(device, 1)[32:48], np.arange(16))


def test_remap_needs_a_link(plain: LLMDataDist) -> None:
    info = MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, 1)
    expect(NOT_LINKED, lambda: plain.cache_manager.remap_registered_memory(info))
    plain.link_clusters([cluster(2)])
    plain.cache_manager.remap_registered_memory(info)
    plain.cache_manager.remap_registered_memory([info, info])


# ------------------------------------------------------------ links


def test_link_rows_of_the_engine(loopback_datadist: LLMDataDist) -> None:
    expect(PI, lambda: loopback_datadist.link("link", {1: 0, 2: 1}, "{}"))
    assert loopback_datadist.link("link", {3: 0, 2: 1}, "{}") == 1
    assert loopback_datadist.link("link", {3: 0, 4: 1}, None) == 2
    assert loopback_datadist.query_register_mem_status(1) is RegisterMemStatus.OK
    for number in (0, 3, MAX):
        expect(NOT_LINKED, lambda number=number: loopback_datadist.query_register_mem_status(number))
        expect(NOT_LINKED, lambda number=number: loopback_datadist.unlink(number))
    loopback_datadist.unlink(1)
    expect(NOT_LINKED, lambda: loopback_datadist.unlink(1))


def test_link_and_cache_ids_start_at_one_after_each_init(loopback_datadist: LLMDataDist) -> None:
    for _ in range(2):
        assert loopback_datadist.link("link", {3: 0, 2: 1}, "{}") == 1
        assert loopback_datadist.cache_manager.register_cache(desc(), [1, 2]).cache_id == 1
        assert loopback_datadist.cache_manager.allocate_cache(desc()).cache_id == 2
        loopback_datadist.finalize()
        loopback_datadist.init(loopback_config(accessible=True).generate_options())


def test_cluster_statuses_of_the_engine(loopback_datadist: LLMDataDist) -> None:
    already = LLMStatusCode.LLM_ALREADY_LINK
    link, unlink = loopback_datadist.link_clusters, loopback_datadist.unlink_clusters
    assert link([cluster(2, remotes=0), cluster(4), cluster(5, remotes=2)]) == (PI, [PI, SUCCESS, PI])
    assert link([cluster(4), cluster(5)]) == (already, [already, SUCCESS])
    assert unlink([cluster(4, remotes=0)]) == (PI, [PI])
    assert unlink([cluster(4, remotes=0), cluster(77, remotes=2)], force=True) == (SUCCESS, [SUCCESS, SUCCESS])
    assert unlink([cluster(77)]) == (SUCCESS, [SUCCESS])
    assert link([cluster(4)]) == (SUCCESS, [SUCCESS])


def test_switch_role_needs_that_there_is_no_link(loopback_datadist: LLMDataDist) -> None:
    loopback_datadist.link_clusters([cluster(2)])
    expect(LLMStatusCode.LLM_EXIST_LINK, lambda: loopback_datadist.switch_role(LLMRole.DECODER))
    loopback_datadist.unlink_clusters([cluster(2)])
    loopback_datadist.switch_role(LLMRole.DECODER, {"llm.listenIpInfo": "127.0.0.1:26009"})
    loopback_datadist.switch_role(LLMRole.DECODER)


def test_explain_link(loopback_datadist: LLMDataDist) -> None:
    expect(NOT_LINKED, lambda: loopback_datadist.explain_link(2))
    loopback_datadist.link_clusters([cluster(2)])
    assert "2" in str(loopback_datadist.explain_link(2))


# ------------------------------------------------------------ pull


def caches(manager: CacheManager, num_tensors: int = 4) -> tuple[Cache, Cache, list[NDArray[np.uint8]]]:
    """A contiguous and a blocks destination, and the memory that keeps them alive."""
    memory = tensors(2 * num_tensors)
    contiguous = manager.register_cache(desc(num_tensors), addrs(memory[:num_tensors]), [CacheKey(2, 1), CacheKey(2, 2)])
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


# ------------------------------------------------------------ options of init


OPTIONS_REFUSED: list[tuple[str, str, Any]] = [
    ("ge.exec.deviceId", "0;1", PI),
    ("ge.exec.deviceId", "x", PI),
    ("llm.TransferBackend", "other", PI),
    ("llm.TransferBackend", "", PI),
    ("llm.EnableRemoteCacheAccessible", "2", PI),
    ("llm.EnableRemoteCacheAccessible", "", PI),
    ("llm.SyncKvCacheWaitTime", "1.5", PI),
    ("llm.SyncKvCacheWaitTime", "-1", PI),
    *[
        (key, wrong, PI)
        for key in ("llm.MemPoolConfig", "llm.HostMemPoolConfig")
        for wrong in (
            "no json",
            "[]",
            "{}",
            '{"memory_size": "65536"}',
            '{"memory_size": -1}',
            '{"memory_size": 65536, "page_shift": 9}',
            '{"memory_size": 65536, "page_shift": 31}',
            '{"memory_size": 65535}',
            '{"memory_size": 65536, "page_shift": 17}',
        )
    ],
    ("llm.LinkTotalTime", str(2**31), PI),
    ("llm.LinkRetryCount", "0", PI),
    ("llm.LinkRetryCount", "101", PI),
    ("llm.RdmaTrafficClass", "-1", PI),
    ("llm.RdmaServiceLevel", str(2**32), PI),
    ("llm.MaxRegisteredAddrs", "0", PI),
    ("llm.Paths", "no_such_path", PI),
    ("some.option", 1, TypeError),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("key", "value", "failure"), OPTIONS_REFUSED)
def test_option_rows_of_the_engine(key: str, value: Any, failure: Any) -> None:
    options = {"llm.EnableCacheManager": "1", "llm.listenIpInfo": "127.0.0.1:0", key: value}
    with loopback():
        datadist = LLMDataDist(LLMRole.PROMPT, 3)
        expect(failure, lambda: datadist.init(options))
        assert LLMDataDist.llm_engine_instance is None


HIXL_REFUSED: list[tuple[str, str]] = [
    ("llm.RdmaTrafficClass", "6"),
    ("llm.RdmaTrafficClass", "256"),
    ("llm.RdmaServiceLevel", "8"),
    ("llm.GlobalResourceConfig", "no json"),
]


def hixl_options(**more: str) -> dict[str, str]:
    return {"llm.LocalCommRes": "", "llm.TransferBackend": "hixl", "llm.listenIpInfo": "127.0.0.1:0", **more}


@pytest.mark.parametrize(("key", "value"), HIXL_REFUSED)
def test_option_rows_of_backend_hixl(key: str, value: str) -> None:
    with loopback():
        datadist = LLMDataDist(LLMRole.PROMPT, 3)
        expect(PI, lambda: datadist.init(hixl_options(**{key: value})))


def test_backend_hixl_has_no_rank_table_links() -> None:
    with loopback():
        datadist = LLMDataDist(LLMRole.PROMPT, 3)
        datadist.init(hixl_options())
        try:
            expect(NOT_ENABLED, lambda: datadist.link("link", {3: 0, 2: 1}, "{}"))
        finally:
            datadist.finalize()


# ------------------------------------------------------------ without loopback: sockets


@pytest.fixture
def networked() -> Iterator[LLMDataDist]:
    """Cluster 3, listening on a port of its own."""
    config = loopback_config(accessible=True)
    config.listen_ip_info = "127.0.0.1:0"
    datadist = LLMDataDist(LLMRole.PROMPT, 3)
    datadist.init(config.generate_options())
    yield datadist
    datadist.finalize()


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A socket whose queue takes connections that nobody ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def peer_at(port: int) -> LLMClusterInfo:
    info = cluster(2, remotes=0)
    info.append_remote_ip_info("127.0.0.1", port)
    return info


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_listen_address_is_the_real_one(networked: LLMDataDist) -> None:
    address = networked.listen_address
    assert address is not None
    assert address[0] == "127.0.0.1"
    assert address[1] > 0
    networked.switch_role(LLMRole.DECODER)
    assert networked.listen_address is None


def test_nobody_listens_at_the_peers_address(networked: LLMDataDist) -> None:
    failed = LLMStatusCode.LLM_LINK_FAILED
    assert networked.link_clusters([peer_at(free_port())], 3000) == (failed, [failed])
    assert networked.unlink_clusters([peer_at(free_port())], 3000) == (SUCCESS, [SUCCESS])


def test_peer_that_does_not_answer(networked: LLMDataDist, silent: socket.socket) -> None:
    late = LLMStatusCode.LLM_TIMEOUT
    assert networked.link_clusters([peer_at(silent.getsockname()[1])], 300) == (late, [late])


def test_address_that_cannot_be_listened_on(silent: socket.socket) -> None:
    datadist = LLMDataDist(LLMRole.PROMPT, 3)
    config = loopback_config(accessible=True)
    for address, failure in (
        (f"127.0.0.1:{silent.getsockname()[1]}", LLMStatusCode.LLM_FAILED),
        ("203.0.113.1:0", LLMStatusCode.LLM_FAILED),
        ("no address:0", PI),
    ):
        config.listen_ip_info = address
        expect(failure, lambda: datadist.init(config.generate_options()), match="listen")
    config.listen_ip_info = "127.0.0.1:0"
    datadist.init(config.generate_options())
    datadist.finalize()


def test_backend_hixl_keeps_its_listen_address() -> None:
    datadist = LLMDataDist(LLMRole.PROMPT, 3)
    datadist.init(hixl_options())
    try:
        address = datadist.listen_address
        datadist.switch_role(LLMRole.DECODER)
        datadist.switch_role(LLMRole.DECODER, {"llm.listenIpInfo": "127.0.0.1:0"})
        other = {"llm.listenIpInfo": f"127.0.0.1:{free_port()}"}
        expect(NOT_ENABLED, lambda: datadist.switch_role(LLMRole.PROMPT, other))
        assert datadist.listen_address == address
    finally:
        datadist.finalize()
