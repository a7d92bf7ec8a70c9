"""Memory of caches against several users at once, in one engine."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from expect import expect
from llm_datadist import LLMStatusCode
from llm_datadist.engine import Engine, EngineOptions
from llm_datadist.engine.requests import CacheKind, CacheSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 30
SPEC = CacheSpec(2, (4, 4096), 1, "DT_UINT8", on_device=True, kind=CacheKind.CONTIGUOUS)
POOL = '{"memory_size": 1048576, "page_shift": 12}'


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine with a pool and a short timeout."""
    options = {"llm.Role": "Mix", "llm.MemPoolConfig": POOL, "llm.SyncKvCacheWaitTime": "100"}
    made = Engine(1, EngineOptions.parse(options))
    yield made
    made.close()


def test_two_deallocations_at_once_free_the_memory_once(engine: Engine) -> None:
    """Both wait for the same transfer to end; the pool gets the pages back once."""
    cache_id, _ = engine.allocate(SPEC, [])
    catalogue = engine._core.catalogue
    held = catalogue.pin(cache_id)
    assert held is not None
    errors: list[BaseException] = []

    def deallocate() -> None:
        try:
            engine.deallocate(cache_id)
        except BaseException as error:  # noqa: BLE001 - looked at below
            errors.append(error)

    threads = [threading.Thread(target=deallocate) for _ in range(2)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + TIMEOUT_S
    while len(catalogue._changed._waiters) < 2:  # type: ignore[attr-defined]
        assert time.monotonic() < until
    catalogue.unpin(held)
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert errors == []
    whole = [engine.allocate(SPEC, [])[1] for _ in range(32)]
    assert len({addr for addrs in whole for addr in addrs}) == 64
    expect(LLMStatusCode.LLM_OUT_OF_MEMORY, lambda: engine.allocate(SPEC, []))


def test_memory_in_use_is_not_given_back(engine: Engine) -> None:
    """LLM_LINK_BUSY after the synchronous timeout; a second call succeeds once the transfer has ended."""
    cache_id, _ = engine.allocate(SPEC, [])
    catalogue = engine._core.catalogue
    held = catalogue.pin(cache_id)
    assert held is not None
    error = expect(LLMStatusCode.LLM_LINK_BUSY, lambda: engine.deallocate(cache_id))
    assert "still in use" in str(error)
    catalogue.unpin(held)
    engine.deallocate(cache_id)
    for _ in range(32):
        engine.allocate(SPEC, [])
