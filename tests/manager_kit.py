"""Managers on the fake engine, caches and keys, for the tests of argument checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from expect import expect
from fake_engine import FakeEngine
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMStatusCode,
    Placement,
)
from llm_datadist.cache_manager import CacheManager
from llm_datadist.engine.requests import (
    INVALID_ID,
)

if TYPE_CHECKING:
    from collections.abc import Callable
F16 = DataType.DT_FLOAT16
HOST, DEVICE = Placement.HOST, Placement.DEVICE
FAILED = LLMStatusCode.LLM_FAILED
ACCESSIBLE = {"llm.EnableRemoteCacheAccessible": "1"}


BY_ID = CacheKeyByIdAndIndex(2, 1, 3)
BY_REQUEST = CacheKey(2, 7, 1)
BY_PREFIX = CacheKey(2, INVALID_ID, 1, 8)
BY_BLOCKS = BlocksCacheKey(2, 4)


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


def some_addrs(given: CacheDesc) -> list[int]:
    return [4096 * (index + 1) for index in range(given.num_tensors)]


def contiguous(**more: Any) -> Cache:
    given = desc(**more)
    return Cache(5, given, some_addrs(given), None, True, False)


def blocks(**more: Any) -> Cache:
    given = desc(**more)
    return Cache(6, given, some_addrs(given), None, True, True)


def check_row(subject: CacheManager, call: Callable[[CacheManager], object], failure: Any) -> None:
    """A failing row: the exact failure, and nothing reached the engine."""
    expect(failure, lambda: call(subject))
    assert engine_of(subject).calls == []


def host_blocks(**more: Any) -> Cache:
    return blocks(placement=HOST, **more)
