"""CacheManager: every row of its validation tables, and what reaches the engine when all is well."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from expect import PI, expect
from fake_engine import FakeEngine

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMException,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
)
from llm_datadist.cache_manager import CacheManager
from llm_datadist.engine.requests import (
    INVALID_ID,
    BlocksKey,
    CacheKind,
    CacheSpec,
    IdKey,
    PrefixKey,
    PullRequest,
    PushRequest,
    RequestKey,
)

if TYPE_CHECKING:
    from collections.abc import Callable

F16 = DataType.DT_FLOAT16
HOST, DEVICE = Placement.HOST, Placement.DEVICE
FAILED = LLMStatusCode.LLM_FAILED
ACCESSIBLE = {"llm.EnableRemoteCacheAccessible": "1"}


class Index(IntEnum):
    TWO = 2


def manager(**options: str) -> CacheManager:
    return CacheManager(FakeEngine(), options)  # type: ignore[arg-type]


def message_manager() -> CacheManager:
    return manager()


def accessible_manager() -> CacheManager:
    return manager(**ACCESSIBLE)


def engine_of(subject: CacheManager) -> FakeEngine:
    return subject._engine  # type: ignore[return-value]


def desc(num_tensors: int = 2, shape: Any = (4, 16), placement: Any = DEVICE, **more: Any) -> CacheDesc:
    return CacheDesc(num_tensors, shape, F16, placement, **more)


def contiguous(**more: Any) -> Cache:
    return Cache(5, desc(**more), [4096, 8192], None, True, False)


def blocks(**more: Any) -> Cache:
    return Cache(6, desc(**more), [4096, 8192], None, True, True)


def check_row(subject: CacheManager, call: Callable[[CacheManager], object], failure: Any) -> None:
    """A failing row: the exact failure, and nothing reached the engine."""
    expect(failure, lambda: call(subject))
    assert engine_of(subject).calls == []


# ------------------------------------------------------------ register


REGISTER: dict[str, Any] = {"cache_desc": desc(), "addrs": [4096, 8192]}

REGISTER_REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"cache_desc": "desc"}, TypeError),
    ({"cache_desc": None}, AttributeError),
    ({"addrs": (4096, 8192)}, TypeError),
    ({"addrs": [4096, "8192"]}, TypeError),
    ({"addrs": [4096, 8192.0]}, TypeError),
    ({"addrs": [4096, np.int64(8192)]}, TypeError),
    ({"addrs": 4096}, TypeError),
    ({"addrs": None}, TypeError),
    ({"cache_keys": CacheKey(1, 2)}, TypeError),
    ({"cache_keys": [BlocksCacheKey(1)]}, TypeError),
    ({"cache_keys": [CacheKeyByIdAndIndex(1, 2)]}, TypeError),
    ({"cache_keys": {CacheKey(1, 2)}}, TypeError),
    ({"cache_keys": [None]}, TypeError),
    ({"cache_keys": None}, TypeError),
    ({"remote_accessible": 1}, TypeError),
    ({"remote_accessible": "True"}, TypeError),
    ({"addrs": []}, PI),
    ({"addrs": [4096]}, PI),
    ({"addrs": [4096, 8192, 12288]}, PI),
    ({"addrs": [4096, 0]}, PI),
    ({"addrs": [False, 4096]}, PI),
    # order of the checks
    ({"cache_desc": "desc", "addrs": []}, TypeError),
    ({"cache_desc": None, "addrs": []}, PI),
    ({"addrs": [], "cache_keys": [BlocksCacheKey(1)]}, TypeError),
    ({"addrs": [], "cache_keys": None}, PI),
    ({"addrs": [0], "remote_accessible": 1}, TypeError),
    ({"cache_desc": CacheDesc(2, [4], None)}, AttributeError),  # type: ignore[arg-type]
    ({"cache_desc": desc(placement=None)}, AttributeError),
]


@pytest.mark.parametrize(("change", "failure"), REGISTER_REFUSED)
def test_register_cache_refuses(change: dict[str, Any], failure: Any) -> None:
    check_row(accessible_manager(), lambda m: m.register_cache(**{**REGISTER, **change}), failure)


REGISTER_BLOCKS_REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"cache_desc": "desc"}, TypeError),
    ({"cache_desc": None}, AttributeError),
    ({"addrs": (4096, 8192)}, TypeError),
    ({"addrs": [4096, "8192"]}, TypeError),
    ({"addrs": None}, TypeError),
    ({"addrs": []}, PI),
    ({"blocks_cache_key": CacheKey(1, 2)}, TypeError),
    ({"blocks_cache_key": [BlocksCacheKey(1)]}, TypeError),
    ({"blocks_cache_key": BlocksCacheKey(1, -1)}, TypeError),
    ({"blocks_cache_key": BlocksCacheKey(1, None)}, TypeError),
    ({"remote_accessible": 1}, TypeError),
]


@pytest.mark.parametrize(("change", "failure"), REGISTER_BLOCKS_REFUSED)
def test_register_blocks_cache_refuses(change: dict[str, Any], failure: Any) -> None:
    check_row(accessible_manager(), lambda m: m.register_blocks_cache(**{**REGISTER, **change}), failure)


def test_register_cache_passes_everything_on() -> None:
    subject = message_manager()
    given = desc(shape=[4, 16])
    keys = [CacheKey(9, 1), CacheKey(9, INVALID_ID, 3), CacheKey(9, INVALID_ID, 3, 7), CacheKey(9, 2, 4)]
    cache = subject.register_cache(given, [4096, 8192], keys)
    spec = CacheSpec(2, (4, 16), 2, "DT_FLOAT16", on_device=True, kind=CacheKind.CONTIGUOUS)
    named = [RequestKey(1), None, PrefixKey(7, 3), RequestKey(2, 4)]
    assert engine_of(subject).calls == [("register", (spec, [4096, 8192], named, True))]
    assert (cache.cache_id, cache.tensor_addrs, cache.is_blocks_cache) == (1, [4096, 8192], False)
    assert cache.cache_desc is given


def test_register_blocks_cache_leaves_addresses_to_the_engine_and_the_desc_alone() -> None:
    subject = message_manager()
    given = desc(shape=[4, 16])
    before = dict(vars(given))
    cache = subject.register_blocks_cache(given, [0], BlocksCacheKey(-1, 7))
    spec = CacheSpec(2, (4, 16), 2, "DT_FLOAT16", on_device=True, kind=CacheKind.BLOCKS)
    assert engine_of(subject).calls == [("register", (spec, [0], (BlocksKey(7),), True))]
    assert cache.is_blocks_cache
    assert vars(given) == before
    again = subject.register_cache(given, [4096, 8192])
    assert not again.is_blocks_cache
    assert engine_of(subject).calls[1][1][0].kind is CacheKind.CONTIGUOUS
    subject.register_blocks_cache(given, [4096, 8192])
    assert engine_of(subject).calls[2][1][2] == ()


@pytest.mark.parametrize("method", ["register_cache", "register_blocks_cache"])
@pytest.mark.parametrize(
    ("placement", "asked", "effective"),
    [
        (DEVICE, None, True),
        (HOST, None, False),
        (DEVICE, False, False),
        (HOST, True, True),
        (DEVICE, True, True),
        (HOST, False, False),
    ],
)
def test_remote_accessible_default(method: str, placement: Any, asked: Any, effective: bool) -> None:
    for options in ({}, ACCESSIBLE):
        subject = manager(**options)
        getattr(subject, method)(desc(placement=placement), [4096, 8192], remote_accessible=asked)
        assert engine_of(subject).calls[0][1][3] is effective


@pytest.mark.parametrize("method", ["register_cache", "register_blocks_cache"])
def test_after_link_only_explicit_remote_access_is_refused(method: str) -> None:
    subject = accessible_manager()
    subject.set_is_call_linked()
    register = getattr(subject, method)
    expect(PI, lambda: register(desc(), [], remote_accessible=True), match="after link")
    expect(TypeError, lambda: register(desc(), [], remote_accessible=1))
    register(desc(), [4096, 8192])
    register(desc(), [4096, 8192], remote_accessible=False)
    assert [args[3] for _, args in engine_of(subject).calls] == [True, False]


def test_ids_count_registered_and_allocated_caches_together() -> None:
    subject = message_manager()
    ids = [
        subject.register_cache(desc(), [1, 2]).cache_id,
        subject.allocate_cache(desc()).cache_id,
        subject.register_blocks_cache(desc(), [1, 2]).cache_id,
        subject.allocate_blocks_cache(desc()).cache_id,
    ]
    assert ids == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("cache_id", "failure"),
    [(None, TypeError), ("1", TypeError), (1.0, TypeError), (contiguous(), TypeError), (2**63, ValueError)],
)
def test_unregister_cache_refuses(cache_id: Any, failure: Any) -> None:
    check_row(message_manager(), lambda m: m.unregister_cache(cache_id), failure)


@pytest.mark.parametrize("cache_id", [-1, 0, 77])
def test_unregister_cache_passes_ids_on(cache_id: int) -> None:
    subject = message_manager()
    assert subject.unregister_cache(cache_id) is None
    assert engine_of(subject).calls == [("unregister", (cache_id,))]


# ------------------------------------------------------------ allocate and deallocate


ALLOCATE_REFUSED: list[tuple[str, dict[str, Any], Any]] = [
    *[
        (method, change, failure)
        for method in ("allocate_cache", "allocate_blocks_cache")
        for change, failure in (
            ({"cache_desc": "desc"}, TypeError),
            ({"cache_desc": None}, AttributeError),
            ({"cache_desc": desc(0)}, PI),
            ({"cache_desc": desc(placement=None)}, AttributeError),
        )
    ],
    ("allocate_cache", {"cache_keys": CacheKey(1, 2)}, TypeError),
    ("allocate_cache", {"cache_keys": [BlocksCacheKey(1)]}, TypeError),
    ("allocate_cache", {"cache_keys": None}, TypeError),
    ("allocate_blocks_cache", {"blocks_cache_key": CacheKey(1, 2)}, TypeError),
    ("allocate_blocks_cache", {"blocks_cache_key": [BlocksCacheKey(1)]}, TypeError),
]


@pytest.mark.parametrize(("method", "change", "failure"), ALLOCATE_REFUSED)
def test_allocate_refuses(method: str, change: dict[str, Any], failure: Any) -> None:
    check_row(message_manager(), lambda m: getattr(m, method)(**{"cache_desc": desc(), **change}), failure)


def test_allocate_passes_everything_on() -> None:
    subject = message_manager()
    cache = subject.allocate_cache(desc(placement=HOST), (CacheKey(1, 2), CacheKey(1, INVALID_ID)))
    spec = CacheSpec(2, (4, 16), 2, "DT_FLOAT16", on_device=False, kind=CacheKind.CONTIGUOUS)
    assert engine_of(subject).calls == [("allocate", (spec, [RequestKey(2), None]))]
    assert (cache.cache_id, cache.tensor_addrs, cache.is_blocks_cache) == (1, [4096, 8192], False)
    cache = subject.allocate_blocks_cache(desc(), BlocksCacheKey(1, 3))
    assert engine_of(subject).calls[1][1][0].kind is CacheKind.BLOCKS
    assert engine_of(subject).calls[1][1][1] == (BlocksKey(3),)
    assert cache.is_blocks_cache


DEALLOCATE = [("deallocate_cache", contiguous, blocks), ("deallocate_blocks_cache", blocks, contiguous)]


@pytest.mark.parametrize(("method", "right", "wrong"), DEALLOCATE)
def test_deallocate(method: str, right: Any, wrong: Any) -> None:
    for bad, failure in ((5, TypeError), (None, AttributeError), (wrong(), PI)):
        check_row(message_manager(), lambda m, bad=bad: getattr(m, method)(bad), failure)
    subject, cache = message_manager(), right()
    assert getattr(subject, method)(cache) is None
    assert engine_of(subject).calls == [("deallocate", (cache.cache_id,))]
    assert cache.tensor_addrs == []


def test_failed_deallocate_keeps_the_addresses() -> None:
    subject, cache = message_manager(), contiguous()
    engine_of(subject).failures["deallocate"] = LLMException("no", status_code=FAILED)
    expect(FAILED, lambda: subject.deallocate_cache(cache))
    assert cache.tensor_addrs == [4096, 8192]


def test_cpu_cache_can_be_deallocated() -> None:
    subject = message_manager()
    subject.deallocate_blocks_cache(Cache.create_cpu_cache(desc(placement=HOST), [4096, 8192]))
    assert engine_of(subject).calls == [("deallocate", (-1,))]


@pytest.mark.parametrize(
    ("key", "failure"), [(None, AttributeError), (BlocksCacheKey(1), TypeError), (CacheKeyByIdAndIndex(1, 2), TypeError)]
)
def test_remove_cache_key_refuses(key: Any, failure: Any) -> None:
    check_row(message_manager(), lambda m: m.remove_cache_key(key), failure)


def test_remove_cache_key() -> None:
    subject = message_manager()
    subject.remove_cache_key(CacheKey(1, 2, 3))
    subject.remove_cache_key(CacheKey(1, 2, 3, 4))
    subject.remove_cache_key(CacheKey(1, INVALID_ID))
    assert engine_of(subject).requests("remove_key") == [RequestKey(2, 3), PrefixKey(4, 3), RequestKey(INVALID_ID)]


# ------------------------------------------------------------ copies in this process


COPY_REFUSED: list[tuple[dict[str, Any], Any]] = [
    *[({name: wrong}, failure) for name in ("dst", "src") for wrong, failure in ((5, TypeError), (None, AttributeError))],
    ({"dst": blocks()}, PI),
    ({"src": blocks()}, PI),
    *[
        ({name: wrong}, failure)
        for name in ("dst_batch_index", "src_batch_index")
        for wrong, failure in ((None, TypeError), ("0", TypeError), (-1, ValueError), (2**32, ValueError))
    ],
    *[({"offset": wrong}, failure) for wrong, failure in ((None, TypeError), (-1, ValueError), (2**64, ValueError))],
    *[({"size": wrong}, failure) for wrong, failure in ((None, TypeError), (1.0, TypeError), (2**63, ValueError))],
    ({"size": 0}, PI),
    ({"size": -2}, PI),
    *[({"req_id": wrong}, failure) for wrong, failure in (("1", TypeError), (-1, ValueError), (2**64, ValueError))],
    # order of the checks
    ({"src": blocks(), "size": 2**63}, ValueError),
    ({"src": None, "dst": blocks()}, AttributeError),
    ({"src": blocks(), "dst": None}, PI),
    ({"size": 0, "req_id": "1"}, PI),
]


@pytest.mark.parametrize(("change", "failure"), COPY_REFUSED)
def test_copy_cache_refuses(change: dict[str, Any], failure: Any) -> None:
    check_row(message_manager(), lambda m: m.copy_cache(**{"dst": contiguous(), "src": contiguous(), **change}), failure)


def test_copy_cache_passes_everything_on() -> None:
    subject = message_manager()
    subject.copy_cache(contiguous(), contiguous())
    other = Cache(8, desc(), [1, 2], None, True, False)
    subject.copy_cache(contiguous(), other, 1, 2, 3, 4, 5)
    assert engine_of(subject).calls == [("copy_cache", (5, 5, 0, 0, 0, -1)), ("copy_cache", (5, 8, 1, 2, 3, 4))]


COPY_BLOCKS_REFUSED: list[tuple[Any, Any, Any]] = [
    (5, {0: [1]}, TypeError),
    (None, {0: [1]}, AttributeError),
    (blocks(), [(0, 1)], TypeError),
    (blocks(), None, AttributeError),
    (blocks(), {"0": [1]}, TypeError),
    (blocks(), {0: (1,)}, TypeError),
    (blocks(), {0: 1}, TypeError),
    (blocks(), {0: None}, TypeError),
    (blocks(), {0: ["1"]}, TypeError),
    (blocks(), {-1: [1]}, TypeError),
    (blocks(), {0: [1, -1]}, TypeError),
    (contiguous(), {0: [1]}, PI),
    (contiguous(), {0: (1,)}, TypeError),
]


@pytest.mark.parametrize(("cache", "info", "failure"), COPY_BLOCKS_REFUSED)
def test_copy_blocks_refuses(cache: Any, info: Any, failure: Any) -> None:
    check_row(message_manager(), lambda m: m.copy_blocks(cache, info), failure)


def test_copy_blocks_passes_pairs_on() -> None:
    subject = message_manager()
    subject.copy_blocks(blocks(), {0: [1, 2], 3: [], True: [0]})
    subject.copy_blocks(blocks(), {})
    assert engine_of(subject).calls == [
        ("copy_blocks", (6, [(0, 1), (0, 2), (1, 0)])),
        ("copy_blocks", (6, [])),
    ]


def deallocated() -> Cache:
    cache = blocks()
    cache.mark_deallocated()
    return cache


def host_blocks(**more: Any) -> Cache:
    return blocks(placement=HOST, **more)


SWAP_REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"src_cache": 5}, TypeError),
    ({"dst_cache": 5}, TypeError),
    ({"src_cache": None}, AttributeError),
    ({"dst_cache": None}, AttributeError),
    ({"src_cache": contiguous()}, PI),
    ({"dst_cache": contiguous(placement=HOST)}, PI),
    ({"src_to_dst": [(0, 1)]}, TypeError),
    ({"src_to_dst": {"0": 1}}, TypeError),
    ({"src_to_dst": {0: "1"}}, TypeError),
    ({"src_to_dst": {0: None}}, TypeError),
    ({"src_to_dst": None}, AttributeError),
    ({"dst_cache": host_blocks(shape=(4, 8))}, PI),
    ({"dst_cache": host_blocks(num_tensors=3)}, PI),
    ({"src_to_dst": {4: 0}}, PI),
    ({"src_to_dst": {-1: 0}}, PI),
    ({"src_to_dst": {0: 4}}, PI),
    ({"src_to_dst": {0: -1}}, PI),
    ({"dst_cache": blocks()}, PI),
    ({"src_cache": host_blocks()}, PI),
    ({"src_cache": deallocated()}, PI),
    # order of the checks
    ({"dst_cache": blocks(shape=(4, 8)), "src_to_dst": {"0": 1}}, TypeError),
    ({"dst_cache": host_blocks(shape=(4, 8)), "src_to_dst": None}, PI),
    ({"dst_cache": blocks(), "src_to_dst": {0: "1"}}, TypeError),
]


@pytest.mark.parametrize(("change", "failure"), SWAP_REFUSED)
def test_swap_blocks_refuses(change: dict[str, Any], failure: Any) -> None:
    good = {"src_cache": blocks(), "dst_cache": host_blocks(), "src_to_dst": {0: 1}}
    check_row(message_manager(), lambda m: m.swap_blocks(**{**good, **change}), failure)


def test_swap_blocks_passes_addresses_on() -> None:
    subject = message_manager()
    cpu = Cache.create_cpu_cache(desc(placement=HOST, shape=(8, 16)), [100, 200])
    subject.swap_blocks(blocks(), cpu, {0: 7, 3: True})
    subject.swap_blocks(cpu, blocks(), {})
    assert engine_of(subject).calls == [
        ("swap_blocks", ([4096, 8192], [100, 200], 32, [(0, 7), (3, 1)])),
        ("swap_blocks", ([100, 200], [4096, 8192], 32, [])),
    ]


# ------------------------------------------------------------ remap


def device_memory(addr: Any = 4096, size: Any = 1) -> MemInfo:
    return MemInfo(Memtype.MEM_TYPE_DEVICE, addr, size)


@pytest.mark.parametrize(
    "infos",
    [
        "mem",
        None,
        (device_memory(),),
        [device_memory(), "mem"],
        [None],
        [],
        MemInfo(Memtype.MEM_TYPE_HOST, 4096, 1),
        MemInfo(None, 4096, 1),  # type: ignore[arg-type]
        device_memory(addr=0),
        device_memory(addr=None),
        device_memory(size=0),
        device_memory(size=-1),
        device_memory(size=None),
        [device_memory(), device_memory(size=0)],
    ],
)
def test_remap_registered_memory_refuses_with_a_status(infos: Any) -> None:
    check_row(message_manager(), lambda m: m.remap_registered_memory(infos), PI)


def test_remap_registered_memory() -> None:
    subject = message_manager()
    subject.remap_registered_memory(device_memory())
    subject.remap_registered_memory([device_memory(), device_memory(8192, 2)])
    assert engine_of(subject).requests("remap") == [[(4096, 1)], [(4096, 1), (8192, 2)]]


# ------------------------------------------------------------ pull_cache


BY_ID = CacheKeyByIdAndIndex(2, 1, 3)
BY_REQUEST = CacheKey(2, 7, 1)
BY_PREFIX = CacheKey(2, INVALID_ID, 1, 8)

PER_LAYER_REFUSED: list[tuple[Any, Any]] = [
    (None, TypeError),
    ("2", TypeError),
    (1.0, TypeError),
    (-1, ValueError),
    (2**32, ValueError),
    (0, PI),
]
PULL_RANGES_REFUSED: list[tuple[Any, Any]] = [
    (1, TypeError),
    ([0, 1], TypeError),
    ("range", TypeError),
    (range(0, 4, 2), PI),
    (range(0, 0, 2), PI),
    (range(3, 0, -1), PI),
    (range(-1, 2), PI),
    (range(2**32, 2**32 + 1), ValueError),
    (range(2**32 + 1), ValueError),
]
PULL_KWARGS_REFUSED: list[tuple[dict[str, Any], Any]] = [
    *[({"tensor_num_per_layer": wrong}, failure) for wrong, failure in PER_LAYER_REFUSED],
    *[
        ({name: wrong}, failure)
        for name in ("src_layer_range", "dst_layer_range")
        for wrong, failure in PULL_RANGES_REFUSED
    ],
    ({"tensor_num_per_layer": 0, "src_layer_range": 1}, PI),
]
PULL_CACHE_REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"cache_key": "key"}, TypeError),
    ({"cache_key": BlocksCacheKey(2)}, TypeError),
    ({"cache_key": None}, AttributeError),
    ({"cache": 5}, TypeError),
    ({"cache": None}, AttributeError),
    ({"batch_index": None}, TypeError),
    ({"batch_index": "0"}, TypeError),
    ({"batch_index": -1}, ValueError),
    ({"batch_index": 2**32}, ValueError),
    ({"size": None}, TypeError),
    ({"size": 1.0}, TypeError),
    ({"size": 2**63}, ValueError),
    ({"cache": blocks()}, PI),
    ({"size": 0}, PI),
    ({"size": -2}, PI),
    *PULL_KWARGS_REFUSED,
    # order of the checks
    ({"cache_key": "key", "cache": None}, TypeError),
    ({"cache": blocks(), "size": 2**63}, ValueError),
    ({"cache": blocks(), "tensor_num_per_layer": "2"}, PI),
    ({"cache": None, "size": 0}, AttributeError),
    ({"cache_key": None, "size": 0}, PI),
]


@pytest.mark.parametrize("make", [message_manager, accessible_manager])
@pytest.mark.parametrize(("change", "failure"), PULL_CACHE_REFUSED)
def test_pull_cache_refuses(make: Any, change: dict[str, Any], failure: Any) -> None:
    check_row(make(), lambda m: m.pull_cache(**{"cache_key": BY_ID, "cache": contiguous(), **change}), failure)


ONE_ID_REFUSED = [CacheKey(2, INVALID_ID), CacheKey(2, 7, 0, 8)]


@pytest.mark.parametrize("key", ONE_ID_REFUSED)
def test_pull_needs_exactly_one_id_in_a_cache_key(key: CacheKey) -> None:
    check_row(message_manager(), lambda m: m.pull_cache(key, contiguous()), PI)
    check_row(message_manager(), lambda m: m.pull_blocks(key, blocks(), [], [1]), PI)
    expect(PI, lambda: CacheManager.check_cache_key(key))
    # order: after tensor_num_per_layer, before the ranges
    check_row(message_manager(), lambda m: m.pull_cache(key, contiguous(), tensor_num_per_layer="2"), TypeError)
    check_row(message_manager(), lambda m: m.pull_cache(key, contiguous(), src_layer_range=1), PI)


@pytest.mark.parametrize("key", [BY_REQUEST, BY_PREFIX])
def test_check_cache_key_accepts(key: CacheKey) -> None:
    assert CacheManager.check_cache_key(key) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize("key", [BY_REQUEST, BY_PREFIX, BlocksCacheKey(2)])
def test_pull_cache_with_remote_access_takes_only_ids(key: Any) -> None:
    check_row(accessible_manager(), lambda m: m.pull_cache(key, contiguous()), TypeError)


@pytest.mark.parametrize(
    ("key", "meaning"), [(BY_REQUEST, RequestKey(7, 1)), (BY_PREFIX, PrefixKey(8, 1)), (BY_ID, IdKey(1, 3))]
)
def test_pull_cache_passes_everything_on(key: Any, meaning: Any) -> None:
    subject = message_manager()
    assert subject.pull_cache(key, contiguous()) is None
    subject.pull_cache(
        key, contiguous(), 1, 64, src_layer_range=range(1), dst_layer_range=range(1, 2), tensor_num_per_layer=1, other=1
    )
    subject.pull_cache(key, contiguous(), src_layer_range=range(3, 3), dst_layer_range=None, tensor_num_per_layer=99)
    base = {"operation": "pull_cache", "cluster_id": 2, "key": meaning, "cache_id": 5}
    ranged = {"src_layers": range(1), "dst_layers": range(1, 2), "tensors_per_layer": 1}
    assert engine_of(subject).requests("pull") == [
        PullRequest(**base),
        PullRequest(**base, batch_index=1, size=64, **ranged),
        PullRequest(**base, tensors_per_layer=99),
    ]


# ------------------------------------------------------------ pull_blocks


BY_BLOCKS = BlocksCacheKey(2, 4)
LISTS_REFUSED: list[Any] = [range(2), {1}, "1", 1, ["1"], [1.0], [None], [np.int64(1)], np.array([1])]

PULL_BLOCKS_REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"src_cache_key": "key"}, TypeError),
    ({"src_cache_key": None, "src_blocks": []}, AttributeError),
    ({"dst_cache": 5}, TypeError),
    ({"dst_cache": None}, AttributeError),
    *[({name: wrong}, TypeError) for name in ("src_blocks", "dst_blocks") for wrong in LISTS_REFUSED],
    ({"dst_cache": contiguous()}, PI),
    ({"dst_blocks": []}, PI),
    ({"dst_blocks": ()}, PI),
    ({"dst_blocks": None}, TypeError),
    ({"src_blocks": []}, PI),
    ({"src_blocks": None}, TypeError),
    ({"src_cache_key": BY_REQUEST}, PI),
    ({"src_cache_key": BY_ID}, PI),
    ({"src_cache_key": BY_REQUEST, "src_blocks": None}, TypeError),
    ({"src_cache_key": BY_ID, "src_blocks": None}, TypeError),
    *PULL_KWARGS_REFUSED,
    # ids of a BlocksCacheKey are looked at when it is used
    ({"src_cache_key": BlocksCacheKey(-1)}, TypeError),
    ({"src_cache_key": BlocksCacheKey(None)}, TypeError),
    ({"src_cache_key": BlocksCacheKey(2, -1)}, TypeError),
    # order of the checks
    ({"dst_cache": contiguous(), "src_blocks": range(2)}, TypeError),
    ({"dst_cache": None, "dst_blocks": []}, AttributeError),
    ({"dst_blocks": [], "tensor_num_per_layer": "2"}, PI),
    ({"src_blocks": [], "tensor_num_per_layer": "2"}, TypeError),
    ({"src_blocks": [], "src_layer_range": 1}, PI),
]


@pytest.mark.parametrize("make", [message_manager, accessible_manager])
@pytest.mark.parametrize(("change", "failure"), PULL_BLOCKS_REFUSED)
def test_pull_blocks_refuses(make: Any, change: dict[str, Any], failure: Any) -> None:
    good = {"src_cache_key": BY_BLOCKS, "dst_cache": blocks(), "src_blocks": [0], "dst_blocks": [1]}
    check_row(make(), lambda m: m.pull_blocks(**{**good, **change}), failure)


@pytest.mark.parametrize("make", [message_manager, accessible_manager])
def test_pull_blocks_passes_everything_on(make: Any) -> None:
    subject = make()
    assert subject.pull_blocks(BY_BLOCKS, blocks(), [0, 3], (2, 1)) is None
    subject.pull_blocks(
        BY_BLOCKS, blocks(), (True, Index.TWO), [0, 1], src_layer_range=range(1), tensor_num_per_layer=1, other=1
    )
    subject.pull_blocks(BY_REQUEST, blocks(), dst_blocks=[3])
    subject.pull_blocks(BY_PREFIX, blocks(), [], [3])
    subject.pull_blocks(BY_ID, blocks(), (), [3])
    base = {"operation": "pull_blocks", "cluster_id": 2, "cache_id": 6}
    requests = engine_of(subject).requests("pull")
    assert requests == [
        PullRequest(**base, key=BlocksKey(4), src_blocks=[0, 3], dst_blocks=(2, 1)),
        PullRequest(
            **base, key=BlocksKey(4), src_blocks=[1, 2], dst_blocks=[0, 1], src_layers=range(1), tensors_per_layer=1
        ),
        PullRequest(**base, key=RequestKey(7, 1), dst_blocks=[3]),
        PullRequest(**base, key=PrefixKey(8, 1), dst_blocks=[3]),
        PullRequest(**base, key=IdKey(1, 3), dst_blocks=[3]),
    ]
    assert {type(each) for each in requests[1].src_blocks} == {int}


# ------------------------------------------------------------ push_cache


PUSH_RANGES_REFUSED: list[tuple[dict[str, Any], Any]] = [
    *[
        ({name: wrong}, failure)
        for name in ("src_layer_range", "dst_layer_range")
        for wrong, failure in (
            (1, TypeError),
            ([0], TypeError),
            (range(0, 1, 2), PI),
            (range(0), PI),
            (range(-1, 1), PI),
            (range(2, 1), PI),
        )
    ],
    ({"src_layer_range": range(2), "dst_layer_range": range(1)}, PI),
    ({"src_layer_range": range(2)}, PI),
    ({"dst_layer_range": range(2)}, PI),
    ({"tensor_num_per_layer": 99, "src_layer_range": range(1)}, PI),
]
PUSH_COMMON_REFUSED: list[tuple[dict[str, Any], Any]] = [
    *[({"tensor_num_per_layer": wrong}, failure) for wrong, failure in PER_LAYER_REFUSED],
    *PUSH_RANGES_REFUSED,
    ({"tensor_num_per_layer": 0, "src_layer_range": 1}, PI),
]
PUSH_CACHE_REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"dst_cache_key": "key"}, TypeError),
    ({"dst_cache_key": BY_BLOCKS}, TypeError),
    ({"dst_cache_key": BY_REQUEST}, TypeError),
    ({"dst_cache_key": None}, TypeError),
    ({"src_cache": 5}, TypeError),
    ({"src_cache": None}, TypeError),
    ({"src_batch_index": None}, TypeError),
    ({"src_batch_index": "0"}, TypeError),
    ({"src_batch_index": -1}, ValueError),
    ({"src_batch_index": 2**32}, ValueError),
    ({"src_cache": blocks()}, PI),
    *PUSH_COMMON_REFUSED,
    ({"size": None}, TypeError),
    ({"size": "1"}, TypeError),
    ({"size": 2**63}, ValueError),
    ({"size": 64}, PI),
    ({"size": 0}, PI),
    # order of the checks
    ({"src_cache": blocks(), "src_batch_index": -1}, ValueError),
    ({"src_cache": blocks(), "tensor_num_per_layer": "2"}, PI),
    ({"src_layer_range": range(2), "size": "1"}, PI),
    ({"src_cache": contiguous(num_tensors=1), "size": 64}, PI),
]


@pytest.mark.parametrize(("change", "failure"), PUSH_CACHE_REFUSED)
def test_push_cache_refuses(change: dict[str, Any], failure: Any) -> None:
    good = {"dst_cache_key": BY_ID, "src_cache": contiguous()}
    check_row(accessible_manager(), lambda m: m.push_cache(**{**good, **change}), failure)


@pytest.mark.parametrize("method", ["push_cache", "push_blocks"])
def test_push_needs_remote_access_before_anything_else(method: str) -> None:
    for arguments in ((None, None), ("key", 5), (BY_ID, contiguous())):
        check_row(message_manager(), lambda m, arguments=arguments: getattr(m, method)(*arguments), PI)


def test_push_cache_passes_everything_on_in_one_request() -> None:
    subject = accessible_manager()
    cache = contiguous(num_tensors=6)
    assert subject.push_cache(BY_ID, cache) is None
    subject.push_cache(BY_ID, cache, 1, range(1, 3), range(4, 6), -1, 1)
    subject.push_cache(BY_ID, cache, dst_layer_range=range(7, 9), tensor_num_per_layer=3)
    base = {"operation": "push_cache", "cluster_id": 2, "key": IdKey(1, 3), "cache_id": 5}
    assert engine_of(subject).requests("push") == [
        PushRequest(**base, src_layers=range(3), dst_layers=range(3)),
        PushRequest(**base, src_layers=range(1, 3), dst_layers=range(4, 6), batch_index=1, tensors_per_layer=1),
        PushRequest(**base, src_layers=range(2), dst_layers=range(7, 9), tensors_per_layer=3),
    ]


def test_push_of_no_layer_succeeds_without_the_engine() -> None:
    subject = accessible_manager()
    subject.push_cache(BY_ID, contiguous(num_tensors=1))
    subject.push_blocks(BY_BLOCKS, blocks(num_tensors=1), [0], [1])
    subject.push_blocks(BY_BLOCKS, blocks(num_tensors=1), None, [1, 2])
    assert engine_of(subject).calls == []


# ------------------------------------------------------------ push_blocks


PUSH_BLOCKS_REFUSED: list[tuple[dict[str, Any], Any]] = [
    ({"dst_cache_key": "key"}, TypeError),
    ({"dst_cache_key": BY_ID}, TypeError),
    ({"dst_cache_key": None}, AttributeError),
    ({"src_cache": 5}, TypeError),
    ({"src_cache": None}, AttributeError),
    *[({name: wrong}, TypeError) for name in ("src_blocks", "dst_blocks") for wrong in LISTS_REFUSED],
    ({"src_cache": contiguous()}, PI),
    ({"dst_blocks": []}, PI),
    ({"dst_blocks": None}, TypeError),
    *PUSH_COMMON_REFUSED,
    ({"dst_cache_key": BlocksCacheKey(-1)}, TypeError),
    ({"dst_cache_key": BlocksCacheKey(2, None)}, TypeError),
    # order of the checks
    ({"src_cache": contiguous(), "src_blocks": range(2)}, TypeError),
    ({"src_cache": None, "dst_blocks": []}, AttributeError),
    ({"dst_cache_key": None, "dst_blocks": []}, PI),
    ({"dst_cache_key": None, "src_layer_range": 1}, TypeError),
]


@pytest.mark.parametrize(("change", "failure"), PUSH_BLOCKS_REFUSED)
def test_push_blocks_refuses(change: dict[str, Any], failure: Any) -> None:
    good = {"dst_cache_key": BY_BLOCKS, "src_cache": blocks(), "src_blocks": [0], "dst_blocks": [1]}
    check_row(accessible_manager(), lambda m: m.push_blocks(**{**good, **change}), failure)


def test_push_blocks_passes_everything_on() -> None:
    subject = accessible_manager()
    assert subject.push_blocks(BY_BLOCKS, blocks(), [0, 1], (2, 3)) is None
    subject.push_blocks(BY_BLOCKS, blocks(), [0], [2], range(1, 2), range(1), 1)
    subject.push_blocks(BY_BLOCKS, blocks(), None, [2])
    base = {"operation": "push_blocks", "cluster_id": 2, "key": BlocksKey(4), "cache_id": 6}
    assert engine_of(subject).requests("push") == [
        PushRequest(**base, src_layers=range(1), dst_layers=range(1), src_blocks=[0, 1], dst_blocks=(2, 3)),
        PushRequest(
            **base, src_layers=range(1, 2), dst_layers=range(1), src_blocks=[0], dst_blocks=[2], tensors_per_layer=1
        ),
        PushRequest(**base, src_layers=range(1), dst_layers=range(1), src_blocks=(), dst_blocks=[2]),
    ]


# ------------------------------------------------------------ engine failures, and after finalize


@pytest.mark.parametrize("failure", [LLMException("no", status_code=LLMStatusCode.LLM_TIMEOUT), TypeError("negative")])
def test_engine_failures_reach_the_caller_as_they_are(failure: Exception) -> None:
    subject = accessible_manager()
    engine_of(subject).failures = {"pull": failure, "push": failure}
    for call in (
        lambda: subject.pull_cache(BY_ID, contiguous()),
        lambda: subject.pull_blocks(BY_BLOCKS, blocks(), [0], [1]),
        lambda: subject.push_cache(BY_ID, contiguous()),
        lambda: subject.push_blocks(BY_BLOCKS, blocks(), [0], [1]),
    ):
        with pytest.raises(type(failure)) as caught:
            call()
        assert caught.value is failure


AFTER_FINALIZE: list[tuple[Any, Any]] = [
    (lambda m: m.register_cache(desc(), [1, 2]), FAILED),
    (lambda m: m.register_blocks_cache(desc(), [1, 2]), FAILED),
    (lambda m: m.allocate_cache(desc()), FAILED),
    (lambda m: m.allocate_blocks_cache(desc()), FAILED),
    (lambda m: m.unregister_cache(1), FAILED),
    (lambda m: m.deallocate_cache(contiguous()), PI),
    (lambda m: m.deallocate_blocks_cache(blocks()), PI),
    (lambda m: m.remove_cache_key(CacheKey(1, 2)), PI),
    (lambda m: m.copy_cache(contiguous(), contiguous()), PI),
    (lambda m: m.copy_blocks(blocks(), {0: [1]}), PI),
    (lambda m: m.swap_blocks(blocks(), host_blocks(), {0: 1}), PI),
    (lambda m: m.remap_registered_memory(device_memory()), PI),
    (lambda m: m.pull_cache(BY_ID, contiguous()), PI),
    (lambda m: m.pull_blocks(BY_BLOCKS, blocks(), [0], [1]), PI),
    (lambda m: m.push_cache(BY_ID, contiguous()), PI),
    (lambda m: m.push_blocks(BY_BLOCKS, blocks(), [0], [1]), PI),
    # the checks of the arguments still come first
    (lambda m: m.register_cache(desc(), (1, 2)), TypeError),
    (lambda m: m.pull_cache("key", contiguous()), TypeError),
]


@pytest.mark.parametrize(("call", "failure"), AFTER_FINALIZE)
def test_after_finalize(call: Any, failure: Any) -> None:
    subject = accessible_manager()
    subject.mark_finalized()
    check_row(subject, call, failure)
