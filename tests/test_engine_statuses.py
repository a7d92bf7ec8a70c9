"""The statuses that the engine gives for caches, links and options, through the public API."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from expect import PI, expect
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
)
from llm_datadist.testing import loopback

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.cache_manager import CacheManager
from loopback_kit import (
    DEVICE,
    HOST,
    MAX,
    NOT_ENABLED,
    NOT_EXIST,
    NOT_LINKED,
    OUT_OF_MEMORY,
    POOL,
    SUCCESS,
    addrs,
    cluster,
    desc,
    loopback_config,
    tensors,
    view,
)

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


@pytest.mark.parametrize("items", [24, 5000])
def test_copy_blocks_reads_before_it_writes(messaging: CacheManager, items: int) -> None:
    memory = [np.repeat(np.arange(4, dtype=np.uint8), items) for _ in range(2)]
    cache = messaging.register_blocks_cache(desc(shape=[4, items]), addrs(memory))
    messaging.copy_blocks(cache, {0: [1], 1: [2], 2: [3]})
    for array in memory:
        assert np.array_equal(array, np.repeat(np.array([0, 0, 1, 2], dtype=np.uint8), items))


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
