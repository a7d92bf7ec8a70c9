"""Descriptions, caches, keys and small enums: every construction rule."""

from __future__ import annotations

import gc
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
    DataType,
    KvCache,
    LLMException,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
    data_type,
    metadef_wrapper,
)
from llm_datadist.cache import PushType, int_to_mem_status_dict, is_invalid_id, is_valid_id

MAX = 2**64 - 1
F16 = DataType.DT_FLOAT16

# ------------------------------------------------------------ enums and data types


@pytest.mark.parametrize(
    ("member", "number"),
    [
        (Placement.HOST, 0),
        (Placement.DEVICE, 1),
        (Memtype.MEM_TYPE_DEVICE, 0),
        (Memtype.MEM_TYPE_HOST, 1),
        (RegisterMemStatus.OK, 0),
        (RegisterMemStatus.PREPARING, 1),
        (RegisterMemStatus.FAILED, 2),
        (PushType.NO_CACHE_KEY, 0),
        (PushType.BLOCKS_CACHE_KEY, 1),
        (PushType.CACHE_KEY_BY_ID, 2),
    ],
)
def test_enum_values(member: Any, number: int) -> None:
    assert member.value == number
    assert str(member) == f"{member}" == f"{type(member).__name__}.{member.name}"


def test_only_placement_equals_its_number() -> None:
    assert Placement.HOST == 0
    assert Memtype.MEM_TYPE_DEVICE != 0
    assert RegisterMemStatus.OK != 0
    assert DataType.DT_FLOAT != 0
    assert int_to_mem_status_dict == dict(enumerate(RegisterMemStatus))


TYPES: list[tuple[str, int, int, Any]] = [
    ("DT_FLOAT", 0, 4, np.float32),
    ("DT_FLOAT16", 1, 2, np.float16),
    ("DT_BF16", 27, 2, np.float16),
    ("DT_INT8", 2, 1, np.int8),
    ("DT_INT16", 6, 2, np.int16),
    ("DT_UINT16", 7, 2, np.uint16),
    ("DT_UINT8", 4, 1, np.uint8),
    ("DT_INT32", 3, 4, np.int32),
    ("DT_INT64", 9, 8, np.int64),
    ("DT_UINT32", 8, 4, np.uint32),
    ("DT_UINT64", 10, 8, np.uint64),
    ("DT_BOOL", 12, 1, np.bool_),
    ("DT_DOUBLE", 11, 8, np.double),
    ("DT_STRING", 13, 16, np.bytes_),
]


@pytest.mark.parametrize(("name", "code", "size", "scalar"), TYPES)
def test_data_types(name: str, code: int, size: int, scalar: Any) -> None:
    member = DataType[name]
    assert member.value == getattr(metadef_wrapper, name) == data_type.python_dtype_2_dwrapper_dtype[member] == code
    assert data_type.get_python_dtype_from_wrapper_dtype(code) is member
    assert CacheDesc(1, [1], member).size == size
    assert data_type.dtype_to_np_dtype[member] is scalar
    assert data_type.np_dtype_to_dtype[np.dtype(scalar)] is (DataType.DT_FLOAT16 if name == "DT_BF16" else member)


def test_data_type_tables() -> None:
    assert {name for name, *_ in TYPES} == set(DataType.__members__)
    assert len(data_type.dtype_to_np_dtype) == 14
    assert data_type.valid_np_dtypes == list(data_type.dtype_to_np_dtype.values())
    assert len(data_type.np_dtype_to_dtype) == 13
    assert data_type.dtype_to_np_dtype is data_type.dtype_to_np_dtype
    expect(ValueError, lambda: data_type.get_python_dtype_from_wrapper_dtype(99))
    expect(AttributeError, lambda: data_type.no_such_table, match="has no attribute")  # type: ignore[attr-defined]


@pytest.mark.parametrize(("number", "valid"), [(0, True), (MAX - 1, True), (MAX, False), (-1, False)])
def test_valid_ids(number: int, valid: bool) -> None:
    assert is_valid_id(number) is valid
    assert is_invalid_id(number) is not valid


# ------------------------------------------------------------ CacheDesc


def test_cache_desc_defaults_and_properties() -> None:
    shape = [4, 16]
    desc = CacheDesc(2, shape, F16)
    assert (desc.num_tensors, desc.data_type, desc.placement) == (2, F16, Placement.DEVICE)
    assert desc.shape is shape
    assert (desc.batch_dim, desc.batch_size, desc.seq_len_dim_index, desc.kv_tensor_format) == (0, 4, -1, None)
    assert desc.size == 128
    other = CacheDesc(0, (0, -1, 7), F16, Placement.HOST, 2, 1, "NHD")
    assert (other.num_tensors, other.batch_dim, other.batch_size, other.seq_len_dim_index) == (0, 2, 7, 1)
    assert (other.placement, other.kv_tensor_format) == (Placement.HOST, "NHD")
    assert "num_tensors=2" in repr(desc)
    assert "[4, 16]" in repr(desc)


DESC: dict[str, Any] = {"num_tensors": 2, "shape": [4, 16], "data_type": F16}


@pytest.mark.parametrize(
    ("change", "failure"),
    [
        ({"num_tensors": None}, TypeError),
        ({"num_tensors": "2"}, TypeError),
        ({"num_tensors": 2.0}, TypeError),
        ({"num_tensors": -1}, ValueError),
        ({"num_tensors": 2**32}, ValueError),
        ({"shape": 4}, TypeError),
        ({"shape": "44"}, TypeError),
        ({"shape": range(2)}, TypeError),
        ({"shape": [4, 1.0]}, TypeError),
        ({"shape": [4, None]}, TypeError),
        ({"shape": None}, TypeError),
        ({"data_type": 1}, TypeError),
        ({"data_type": "DT_FLOAT16"}, TypeError),
        ({"placement": 1}, TypeError),
        ({"placement": Memtype.MEM_TYPE_HOST}, TypeError),
        ({"batch_dim_index": "0"}, TypeError),
        ({"batch_dim_index": None}, TypeError),
        ({"seq_len_dim_index": None}, TypeError),
        ({"seq_len_dim_index": 1.0}, TypeError),
        ({"seq_len_dim_index": 2**31}, ValueError),
        ({"kv_tensor_format": 1}, TypeError),
        ({"shape": []}, PI),
        ({"shape": ()}, PI),
        ({"batch_dim_index": 2}, PI),
        ({"batch_dim_index": -1}, PI),
        ({"seq_len_dim_index": 2}, PI),
        ({"seq_len_dim_index": -2}, PI),
        ({"shape": [4, 2**63]}, ValueError),
        # the order of the checks
        ({"num_tensors": -1, "shape": 4}, ValueError),
        ({"shape": 4, "data_type": 1}, TypeError),
        ({"seq_len_dim_index": 2**31, "kv_tensor_format": 1}, ValueError),
        ({"kv_tensor_format": 1, "batch_dim_index": 9}, TypeError),
        ({"batch_dim_index": 9, "shape": [2**63]}, PI),
    ],
)
def test_cache_desc_refuses(change: dict[str, Any], failure: Any) -> None:
    expect(failure, lambda: CacheDesc(**{**DESC, **change}))


@pytest.mark.parametrize("shape", [[0, 4], [4, -1], [2**31, 2**32], [2**62, 1]])
def test_size_that_does_not_exist(shape: list[int]) -> None:
    desc = CacheDesc(1, shape, F16)
    expect(PI, lambda: desc.size)


def test_missing_data_type_and_placement_fail_when_used() -> None:
    assert CacheDesc(1, [4], F16, None).placement is None  # type: ignore[arg-type]
    expect(AttributeError, lambda: CacheDesc(1, [4], None).size)  # type: ignore[arg-type]


def test_update_dim() -> None:
    shape = [4, 16]
    desc = CacheDesc(2, shape, F16)
    assert desc.size == 128
    desc.update_dim(0, 8)
    assert shape == [8, 16]
    assert desc.size == 256
    assert desc.batch_size == 4
    expect(IndexError, lambda: desc.update_dim(2, 1))
    expect(TypeError, lambda: CacheDesc(2, (4, 16), F16).update_dim(0, 8))


# ------------------------------------------------------------ Cache and KvCache


def host_desc(num_tensors: int = 2) -> CacheDesc:
    return CacheDesc(num_tensors, [4, 16], F16, Placement.HOST)


def test_cache_properties() -> None:
    desc = host_desc()
    cache = Cache(7, desc, [1, 2], None, True, False)
    assert (cache.cache_id, cache.tensor_addrs, cache.is_blocks_cache) == (7, [1, 2], False)
    assert cache.cache_desc is desc
    assert "cache_id=7" in repr(cache)
    for name in ("cache_id", "cache_desc", "tensor_addrs", "is_blocks_cache"):
        expect(AttributeError, lambda name=name: setattr(cache, name, 1))


@pytest.mark.parametrize(
    ("cache_id", "failure"), [("1", TypeError), (None, TypeError), (2**63, ValueError), (-(2**63) - 1, ValueError)]
)
def test_cache_id_is_checked(cache_id: Any, failure: type[Exception]) -> None:
    expect(failure, lambda: Cache(cache_id, host_desc(), [], None, True, False))


def test_create_cpu_cache() -> None:
    addrs = [64, 128]
    cache = Cache.create_cpu_cache(host_desc(), addrs)
    assert (cache.cache_id, cache.is_blocks_cache, cache.tensor_addrs) == (-1, True, addrs)


CPU_CACHE_REFUSED: list[tuple[Any, Any, Any]] = [
    ("desc", [1, 2], TypeError),
    (None, [1, 2], AttributeError),
    (host_desc(), (1, 2), TypeError),
    (host_desc(), [1, "2"], TypeError),
    (host_desc(), 1, TypeError),
    (host_desc(), None, TypeError),
    (CacheDesc(2, [4, 16], F16), [1, 2], PI),
    (CacheDesc(2, [4, 16], F16), [1], PI),
    (host_desc(), [1], PI),
    (host_desc(), [1, 2, 3], PI),
    (host_desc(), [], PI),
]


@pytest.mark.parametrize(("desc", "addrs", "failure"), CPU_CACHE_REFUSED)
@pytest.mark.parametrize("kind", [Cache, KvCache])
def test_create_cpu_cache_refuses(kind: Any, desc: Any, addrs: Any, failure: Any) -> None:
    expect(failure, lambda: kind.create_cpu_cache(desc, addrs))


class Manager:
    def __init__(self, *, initialized: bool = True, failure: Exception | None = None) -> None:
        self.initialized = initialized
        self.failure = failure
        self.deallocated: list[int] = []

    def is_initialized(self) -> bool:
        return self.initialized

    def deallocate_cache(self, cache: KvCache) -> None:
        self.deallocated.append(cache.cache_id)
        if self.failure:
            raise self.failure


def test_kv_cache_accepts_flat_and_nested_addresses() -> None:
    assert KvCache.create_cpu_cache(host_desc(), [1, 2]).per_device_tensor_addrs == [[1, 2]]
    cache = KvCache.create_cpu_cache(host_desc(), [[1, 2], [3, 4]])
    assert cache.per_device_tensor_addrs == [[1, 2], [3, 4]]
    assert cache.cache_id == -1
    expect(PI, lambda: KvCache.create_cpu_cache(host_desc(), [[1, 2], [3]]))
    expect(TypeError, lambda: KvCache.create_cpu_cache(host_desc(), [[1, 2], 3]))  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("manager", "deallocated"),
    [
        (Manager(), [5]),
        (Manager(initialized=False), []),
        (Manager(failure=LLMException("no", status_code=PI)), [5]),
    ],
)
def test_dropped_kv_cache_goes_back_to_its_manager(manager: Manager, deallocated: list[int]) -> None:
    cache = KvCache(5, host_desc(), [[1, 2]], manager)
    del cache
    gc.collect()
    assert manager.deallocated == deallocated


# ------------------------------------------------------------ keys


@pytest.mark.parametrize(
    ("args", "kwargs", "values"),
    [
        ((1, 2), {}, (1, 2, 0, MAX)),
        ((1, 2, 3, 4), {}, (1, 2, 3, 4)),
        ((), {"cluster_id": 1, "req_id": 2, "model_id": 3, "prefix_id": 4}, (1, 2, 3, 4)),
        ((), {"prompt_cluster_id": 1, "req_id": 2}, (1, 2, 0, MAX)),
        ((1,), {"req_id": MAX, "prefix_id": 0}, (1, MAX, 0, 0)),
        ((), {"cluster_id": 1, "prompt_cluster_id": 9, "req_id": 2}, (1, 2, 0, MAX)),
        ((1,), {"cluster_id": 9, "req_id": 2}, (1, 2, 0, MAX)),
        ((1,), {"prompt_cluster_id": 9, "req_id": 2}, (1, 2, 0, MAX)),
        ((MAX, MAX, MAX, MAX), {}, (MAX, MAX, MAX, MAX)),
    ],
)
def test_cache_key(args: tuple[int, ...], kwargs: dict[str, int], values: tuple[int, ...]) -> None:
    key = CacheKey(*args, **kwargs)
    assert (key.cluster_id, key.req_id, key.model_id, key.prefix_id) == values
    assert key.prompt_cluster_id == key.cluster_id
    assert f"req_id={key.req_id}" in repr(key)


@pytest.mark.parametrize(
    ("args", "kwargs", "failure", "match"),
    [
        ((1, 2, 3, 4, 5), {}, PI, "at most 4"),
        ((1, 2, 3), {"prefix_id": 4, "cluster_id": 1}, PI, "at most 4"),
        ((), {}, PI, "cluster_id is required"),
        ((), {"req_id": 1}, PI, "cluster_id is required"),
        ((1,), {}, PI, "req_id is required"),
        ((), {"cluster_id": 1}, PI, "req_id is required"),
        ((), {"prompt_cluster_id": 1, "model_id": 2}, PI, "req_id is required"),
        ((1, 2), {"other": 3}, PI, "Unsupported"),
        ((), {"other": 3}, PI, "cluster_id is required"),
        ((1,), {"other": 3}, PI, "req_id is required"),
        ((None, 2), {}, TypeError, "cluster_id only support"),
        (("1", 2), {}, TypeError, "cluster_id only support"),
        ((1, "2"), {}, TypeError, "req_id only support"),
        ((1, 2, 1.0), {}, TypeError, "model_id only support"),
        ((1, 2, 3, None), {}, TypeError, "prefix_id only support"),
        ((-1, 2), {}, ValueError, "cluster_id"),
        ((1, MAX + 1), {}, ValueError, "req_id"),
        ((1, 2, -1), {}, ValueError, "model_id"),
        ((1, 2, 3, -1), {}, ValueError, "prefix_id"),
        ((-1, "2"), {}, ValueError, "cluster_id"),
    ],
)
def test_cache_key_refuses(args: Any, kwargs: Any, failure: Any, match: str) -> None:
    expect(failure, lambda: CacheKey(*args, **kwargs), match=match)


@pytest.mark.parametrize(
    ("args", "kwargs", "values"),
    [
        ((1,), {}, (1, 0)),
        ((1, 2), {}, (1, 2)),
        ((), {"cluster_id": 1, "model_id": 2}, (1, 2)),
        ((), {"prompt_cluster_id": 1, "model_id": 2}, (1, 2)),
        ((), {"cluster_id": 1, "prompt_cluster_id": 9}, (1, 0)),
        ((1,), {"cluster_id": 9}, (1, 0)),
        ((-1, -2), {}, (-1, -2)),
        ((None, None), {}, (None, None)),
    ],
)
def test_blocks_cache_key(args: Any, kwargs: Any, values: tuple[Any, Any]) -> None:
    key = BlocksCacheKey(*args, **kwargs)
    assert (key.cluster_id, key.model_id) == values
    assert key.prompt_cluster_id == key.cluster_id
    assert f"model_id={key.model_id}" in repr(key)


@pytest.mark.parametrize(
    ("args", "kwargs", "failure", "match"),
    [
        ((1, 2, 3), {}, PI, "at most 2"),
        ((1, 2), {"model_id": 3}, PI, "at most 2"),
        ((), {}, PI, "cluster_id is required"),
        ((), {"model_id": 1}, PI, "cluster_id is required"),
        ((1,), {"other": 3}, PI, "Unsupported"),
        (("1",), {}, TypeError, "cluster_id only support"),
        ((1, 2.0), {}, TypeError, "model_id only support"),
    ],
)
def test_blocks_cache_key_refuses(args: Any, kwargs: Any, failure: Any, match: str) -> None:
    expect(failure, lambda: BlocksCacheKey(*args, **kwargs), match=match)


def test_cache_key_by_id_and_index() -> None:
    key = CacheKeyByIdAndIndex(MAX, -1)
    assert (key.cluster_id, key.cache_id, key.batch_index) == (MAX, -1, 0)
    key = CacheKeyByIdAndIndex(cluster_id=1, cache_id=2, batch_index=3)
    assert (key.cluster_id, key.cache_id, key.batch_index) == (1, 2, 3)
    assert not hasattr(key, "prompt_cluster_id")
    assert "cache_id=2" in repr(key)


@pytest.mark.parametrize(
    ("args", "failure"),
    [
        ((None, 1), TypeError),
        (("1", 1), TypeError),
        ((-1, 1), ValueError),
        ((MAX + 1, 1), ValueError),
        ((1, "1"), TypeError),
        ((1, None), TypeError),
        ((1, 2**63), ValueError),
        ((1, 1, None), TypeError),
        ((1, 1, "0"), TypeError),
        ((1, 1, -1), ValueError),
        ((1, 1, 2**32), ValueError),
        ((1,), TypeError),
    ],
)
def test_cache_key_by_id_and_index_refuses(args: Any, failure: type[Exception]) -> None:
    expect(failure, lambda: CacheKeyByIdAndIndex(*args))


def test_cache_key_by_id_and_index_has_no_legacy_keyword() -> None:
    expect(TypeError, lambda: CacheKeyByIdAndIndex(prompt_cluster_id=1, cache_id=1))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "make",
    [
        lambda: CacheKey(1, 2),
        lambda: BlocksCacheKey(1),
        lambda: CacheKeyByIdAndIndex(1, 2),
        lambda: CacheDesc(1, [1], F16),
        lambda: Cache(1, host_desc(), [], None, True, True),
        lambda: MemInfo(Memtype.MEM_TYPE_DEVICE, 1, 1),
    ],
)
def test_equality_is_identity(make: Any) -> None:
    first, second = make(), make()
    assert first != second
    assert first == first  # noqa: PLR0124 - identity
    assert len({first, second}) == 2


# ------------------------------------------------------------ MemInfo


def test_mem_info() -> None:
    info = MemInfo(Memtype.MEM_TYPE_HOST, -1, 2**70)
    assert (info.mem_type, info.addr, info.size) == (Memtype.MEM_TYPE_HOST, -1, 2**70)
    assert MemInfo(None, None, None).addr is None  # type: ignore[arg-type]
    assert "size=" in repr(info)
    for name in ("mem_type", "addr", "size"):
        expect(AttributeError, lambda name=name: setattr(info, name, 1))


@pytest.mark.parametrize(
    "args", [(0, 1, 1), (Placement.DEVICE, 1, 1), (Memtype.MEM_TYPE_HOST, "1", 1), (Memtype.MEM_TYPE_HOST, 1, 1.0)]
)
def test_mem_info_refuses(args: Any) -> None:
    expect(TypeError, lambda: MemInfo(*args), match="only support")
