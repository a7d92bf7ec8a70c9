"""Synchronizers, configs and calls on the fake engine, for the tests of layer-wise transfers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from fake_engine import FakeEngine
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKeyByIdAndIndex,
    CacheTask,
    DataType,
    LayerSynchronizer,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.cache_manager import CacheManager

if TYPE_CHECKING:
    from collections.abc import Callable
SUCCESS = LLMStatusCode.LLM_SUCCESS
FAILED = LLMStatusCode.LLM_FAILED
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
WAIT_MS = 10_000
"""Long enough never to pass in a healthy run."""
BLOCKS_KEY = BlocksCacheKey(2, 4)
ID_KEY = CacheKeyByIdAndIndex(3, 1, 2)


class Ready(LayerSynchronizer):
    """Every layer is ready; remembers what it was asked and where."""

    def __init__(self, answer: Callable[[int], Any] = lambda layer: True) -> None:
        self.asked: list[tuple[int, object]] = []
        self.threads: set[threading.Thread] = set()
        self._answer = answer

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.asked.append((layer_index, timeout_in_millis))
        self.threads.add(threading.current_thread())
        return self._answer(layer_index)


class Duck:
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


def manager(*, accessible: bool) -> CacheManager:
    options = {"llm.EnableRemoteCacheAccessible": "1" if accessible else "0"}
    return CacheManager(FakeEngine(), options)  # type: ignore[arg-type]


def engine_of(subject: CacheManager) -> FakeEngine:
    return subject._engine  # type: ignore[return-value]


def cache(num_tensors: int = 8, placement: Placement = Placement.DEVICE, *, blocks: bool = False) -> Cache:
    desc = CacheDesc(num_tensors, [4, 16], DataType.DT_FLOAT16, placement)
    return Cache(5, desc, list(range(1, num_tensors + 1)), None, True, blocks)


def by_key(
    layers: range | None = range(4), dst: range | None = range(4), *, key: Any = BLOCKS_KEY
) -> TransferWithCacheKeyConfig:
    config = TransferWithCacheKeyConfig(key, range(1), range(1))
    config.src_layer_range = layers
    config.dst_layer_range = dst
    return config


def by_address(layers: range | None = range(1), num_addrs: int = 2, **more: Any) -> TransferConfig:
    return TransferConfig(2, [100 + index for index in range(num_addrs)], layers, **more)


def start(subject: CacheManager, **change: Any) -> CacheTask:
    good: dict[str, Any] = {"src_cache": cache(), "layer_synchronizer": Ready(), "transfer_configs": []}
    return subject.transfer_cache_async(**{**good, **change})
