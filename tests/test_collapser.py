"""Huge pages that registering had no time for: they follow in the background, and nobody's memory is touched after."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import llm_datadist.engine.engine
from llm_datadist import CacheDesc, DataType, LLMRole
from llm_datadist.engine import collapser
from llm_datadist.memory import huge_pages
from llm_datadist.memory.huge_pages import Advice, Outcome
from llm_datadist.memory.pool import MemoryPool
from llm_datadist.net.workers import NoThreadError, Workers
from loopback_kit import loopback_config, started
from paged_memory import PAGE, Paged, need_collapse, usual_pages
from until import until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llm_datadist import Cache, LLMDataDist

pytestmark = usual_pages
BLOCK = 32 << 10
PAGES = 6
TIMEOUT_S = 30
UNDER_WAY = "being moved in the background [nothing to do"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Paged:
    """Registering it has no time for huge pages; in the background it goes page by page."""
    need_collapse()
    monkeypatch.setattr(llm_datadist.engine.engine, "advise", lambda ranges: huge_pages.advise(ranges, budget_s=0))
    monkeypatch.setattr(collapser, "_PIECE", PAGE)
    return Paged(PAGES)


class Gate:
    """Lets the background move a number of pages, and then holds it in the middle of the next one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.moved = 0
        self._free = free
        self.reached, self.open = threading.Event(), threading.Event()
        self._collapse: Callable[[huge_pages.Range], tuple[int, Outcome]] = huge_pages.collapse
        monkeypatch.setattr(huge_pages, "collapse", self._gated)

    def _gated(self, piece: huge_pages.Range) -> tuple[int, Outcome]:
        if self.moved == self._free:
            self.reached.set()
            assert self.open.wait(TIMEOUT_S)
        self.moved += 1
        return self._collapse(piece)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        try:
            assert self.reached.wait(TIMEOUT_S)
            yield
        finally:
            self.open.set()


def register(datadist: LLMDataDist, memory: Paged) -> Cache:
    desc = CacheDesc(1, [memory.size // BLOCK, BLOCK], DataType.DT_UINT8)
    return datadist.cache_manager.register_blocks_cache(desc, [memory.start])


def test_the_rest_follows_and_the_content_stays(plain: LLMDataDist, memory: Paged) -> None:
    before = memory.bytes.copy()
    register(plain, memory)
    until(lambda: not plain.explain_memory().causes)
    assert memory.huge == PAGES
    assert memory.hinted == memory.size
    assert np.array_equal(memory.bytes, before)
    assert "100% in huge pages" in str(plain.explain_memory())


def test_it_is_told_while_it_goes_on(plain: LLMDataDist, memory: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, 2)
    register(plain, memory)
    with gate.held():
        assert memory.huge == 2
        report = str(plain.explain_memory())
        assert "33% in huge pages" in report
        assert UNDER_WAY in report
    until(lambda: not plain.explain_memory().causes)


@pytest.mark.parametrize("how", ["unregister", "finalize"])
def test_memory_is_given_back_when_nothing_is_moved_any_more(
    memory: Paged, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate = Gate(monkeypatch, 2)
    config = loopback_config(accessible=True)
    config.mem_pool_cfg = config.host_mem_pool_cfg = None
    with started(config, LLMRole.PROMPT) as datadist:
        cache = register(datadist, memory)
        moved: list[int] = []

        def end() -> None:
            if how == "unregister":
                datadist.cache_manager.unregister_cache(cache.cache_id)
            else:
                datadist.finalize()
            moved.append(gate.moved)

        ending = threading.Thread(target=end)
        with gate.held():
            ending.start()
            ending.join(0.1)
            assert ending.is_alive()
        ending.join(TIMEOUT_S)
        assert moved == [3]
    assert (gate.moved, memory.huge) == (3, 3)


def test_a_problem_that_lasts_ends_it(plain: LLMDataDist, memory: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[huge_pages.Range] = []

    def collapse(piece: huge_pages.Range) -> tuple[int, Outcome]:
        tried.append(piece)
        return 0, Outcome.NO_MEMORY

    monkeypatch.setattr(huge_pages, "collapse", collapse)
    register(plain, memory)
    until(lambda: "compact_memory" in str(plain.explain_memory()))
    assert tried == [(memory.start, memory.start + PAGE)]


def test_a_page_that_is_refused_does_not_end_it(plain: LLMDataDist, memory: Paged) -> None:
    fresh = Paged(PAGES, filled=False)
    fresh.bytes[0] = fresh.bytes[-1] = 1
    register(plain, fresh)
    until(lambda: fresh.huge == 2)
    until(lambda: UNDER_WAY not in str(plain.explain_memory()))
    assert (fresh.huge, int(fresh.bytes.sum())) == (2, 2)


def test_memory_that_is_unmapped_meanwhile(plain: LLMDataDist, memory: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, 1)
    register(plain, memory)
    with gate.held():
        memory.unmap(3 * PAGE // 4096, 1)
    until(lambda: "not mapped [map it before" in str(plain.explain_memory()))
    assert (gate.moved, memory.huge) == (PAGES, PAGES - 1)


def test_several_caches(plain: LLMDataDist, memory: Paged) -> None:
    others = [memory, Paged(1), Paged(2)]
    for each in others:
        register(plain, each)
    until(lambda: not plain.explain_memory().causes)
    assert [each.huge for each in others] == [PAGES, 1, 2]


def test_without_a_thread_it_is_left(plain: LLMDataDist, memory: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: object) -> None:
        raise NoThreadError

    monkeypatch.setattr(Workers, "submit", submit)
    register(plain, memory)
    assert "register or allocate again to go on" in str(plain.explain_memory())
    assert memory.huge == 0


def test_a_pool_goes_on_with_the_next_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryPool, "advise", lambda *_: Advice(PAGE, 0, 0.25, Outcome.OUT_OF_TIME))
    monkeypatch.setattr(huge_pages, "usage", lambda _ranges: None)
    with started(loopback_config(accessible=True), LLMRole.PROMPT) as datadist:
        datadist.cache_manager.allocate_blocks_cache(CacheDesc(1, [PAGE // BLOCK, BLOCK], DataType.DT_UINT8))
        assert "register or allocate again to go on" in str(datadist.explain_memory())
