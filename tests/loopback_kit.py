"""Memory, descriptions and cluster addresses for the tests in loopback mode."""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist import (
    Cache,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

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


POOL = '{"memory_size": 16777216}'


def loopback_config(*, accessible: bool) -> LLMConfig:
    """Options of an object with both pools."""
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = accessible
    config.sync_kv_timeout = 3000
    config.mem_pool_cfg = POOL
    config.host_mem_pool_cfg = POOL
    return config


@contextlib.contextmanager
def started(config: LLMConfig, role: LLMRole = LLMRole.MIX) -> Iterator[LLMDataDist]:
    """Cluster 3 in loopback mode."""
    from llm_datadist.testing import loopback  # noqa: PLC0415 - others here do without the engine

    with loopback():
        datadist = LLMDataDist(role, 3)
        datadist.init(config.generate_options())
        try:
            yield datadist
        finally:
            datadist.finalize()
