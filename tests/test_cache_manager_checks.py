"""CacheManager without transfers: every row of its validation tables, and what reaches the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from expect import PI, expect
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    MemInfo,
    Memtype,
)
from llm_datadist.engine.requests import (
    INVALID_ID,
    BlocksKey,
    CacheKind,
    CacheSpec,
    PrefixKey,
    RequestKey,
)
from llm_datadist.status import exception_for
from manager_kit import (
    ACCESSIBLE,
    BY_BLOCKS,
    BY_ID,
    DEVICE,
    FAILED,
    HOST,
    accessible_manager,
    blocks,
    check_row,
    contiguous,
    desc,
    engine_of,
    host_blocks,
    manager,
    message_manager,
)

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
    engine_of(subject).failures["deallocate"] = exception_for(FAILED, "no")
    expect(FAILED, lambda: subject.deallocate_cache(cache))
    assert cache.tensor_addrs == [4096, 8192]


def test_cpu_cache_can_be_deallocated() -> None:
    subject = message_manager()
    subject.deallocate_blocks_cache(Cache.create_cpu_cache(desc(placement=HOST), [4096, 8192]))
    assert engine_of(subject).calls == [("deallocate", (-1,))]


@pytest.mark.parametrize(
    ("key", "failure"),
    [(None, AttributeError), (BlocksCacheKey(1), TypeError), (CacheKeyByIdAndIndex(1, 2), TypeError)],
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
    *[
        ({name: wrong}, failure)
        for name in ("dst", "src")
        for wrong, failure in ((5, TypeError), (None, AttributeError))
    ],
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
    check_row(
        message_manager(), lambda m: m.copy_cache(**{"dst": contiguous(), "src": contiguous(), **change}), failure
    )


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


# ------------------------------------------------------------ after finalize


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
