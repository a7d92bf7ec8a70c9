"""Huge pages through the public API: what registering and allocating does to memory, and what is told of it."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import llm_datadist.engine.engine
from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from llm_datadist.memory import huge_pages
from llm_datadist.memory.huge_pages import Advice, Outcome
from loopback_kit import SUCCESS
from paged_memory import PAGE, Paged, need_collapse, usual_pages

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist import LLMDataDist
    from peers import Node, Peers

pytestmark = usual_pages
BLOCK = 32 << 10
PAGES = 8
TIMEOUT_S = 30


def desc(tensors: int, size: int) -> CacheDesc:
    return CacheDesc(tensors, [size // BLOCK, BLOCK], DataType.DT_UINT8)


def register(node: Node, tensors: int = 2, kind: str = "blocks") -> tuple[int, int, bool, str]:
    """Register 4 KiB-page memory cut into tensors: huge pages before and after, content kept, report."""
    memory = node.extra["memory"] = Paged(PAGES)
    content = memory.bytes.copy()
    before = memory.huge
    size = memory.size // tensors
    addrs = list(range(memory.start, memory.end, size))
    if kind == "blocks":
        cache = node.manager.register_blocks_cache(desc(tensors, size), addrs, BlocksCacheKey(1, 0))
    else:
        cache = node.manager.register_cache(desc(tensors, size), addrs)
    node.caches["cache"] = cache
    return before, memory.huge, bool(np.array_equal(memory.bytes, content)), str(node.datadist.explain_memory())


def content(node: Node) -> np.ndarray:
    return node.extra["memory"].bytes.copy()


def pull(node: Node, blocks: list[int]) -> None:
    node.manager.pull_blocks(BlocksCacheKey(1, 0), node.caches["cache"], blocks, blocks[::-1])


def allocate(node: Node, size: int) -> tuple[int, bool, float, str]:
    """Allocate one tensor: bytes in huge pages, whether it is zero, seconds, report."""
    cache = node.manager.allocate_blocks_cache(desc(1, size), BlocksCacheKey(1, 1))
    start = cache.tensor_addrs[0]
    usage = huge_pages.usage([(start, start + size)])
    assert usage is not None
    view = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(start))
    report = node.datadist.explain_memory()
    return usage.huge, not view.any(), report.seconds, str(report)


@pytest.mark.parametrize("kind", ["blocks", "contiguous"])
@pytest.mark.parametrize("tensors", [1, 2, 64])
def test_registered_memory_is_in_huge_pages(peers: Peers, kind: str, tensors: int) -> None:
    need_collapse()
    before, after, kept, report = peers.make(1).call(register, tensors, kind)
    assert (before, after, kept) == (0, PAGES, True)
    megabytes = PAGES * PAGE / (1 << 20)
    assert report.startswith(
        f"memory of caches: {tensors} tensors, {megabytes:.1f} MiB, 100% in huge pages, which took"
    )
    assert "\n" not in report


@pytest.mark.parametrize("how", ["option", "environment"])
def test_turned_off(peers: Peers, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "environment":
        monkeypatch.setenv("LLM_DATADIST_HUGE_PAGES", "0")
    peer = peers.make(1, **({"huge_pages": False} if how == "option" else {}))
    before, after, kept, report = peer.call(register)
    assert (before, after, kept) == (0, 0, True)
    assert "0% in huge pages" in report
    assert "turned off for this engine [turn LLMConfig.huge_pages (llm.HugePages" in report


def test_what_is_pulled_between_huge_pages_is_right(peers: Peers) -> None:
    owner, reader = peers.make(1), peers.make(2)
    for peer in (owner, reader):
        peer.call(register)
    assert reader.link(owner) == SUCCESS
    blocks = np.random.default_rng(1).permutation(PAGES * PAGE // 2 // BLOCK).tolist()
    reader.call(pull, blocks)
    source, target = (peer.call(content).reshape(2, -1, BLOCK) for peer in (owner, reader))
    assert np.array_equal(target[:, blocks[::-1]], source[:, blocks])


@pytest.mark.parametrize("wanted", [True, False])
def test_allocated_memory_is_zero_and_in_huge_pages(peers: Peers, wanted: bool) -> None:
    need_collapse()
    pool = f'{{"memory_size": {PAGES * PAGE}}}'
    huge, zero, seconds, report = peers.make(1, mem_pool_cfg=pool, huge_pages=wanted).call(allocate, PAGES * PAGE)
    assert zero
    if not wanted:
        assert seconds == 0
        assert "turned off" in report or huge == PAGES * PAGE  # the system may do it by itself
    elif huge == 0:
        pytest.skip("this kernel has no huge pages for shared memory")
    else:
        assert huge == PAGES * PAGE
        assert "100% in huge pages" in report


# What is told


def report_of(datadist: LLMDataDist, *addrs: int, size: int) -> str:
    datadist.cache_manager.register_blocks_cache(desc(len(addrs), size), list(addrs))
    return str(datadist.explain_memory())


def test_without_caches(plain: LLMDataDist) -> None:
    report = plain.explain_memory()
    assert str(report) == "memory of caches: 0 tensors, 0.0 MiB, 0% in huge pages, which took 0.00 s"
    assert report.causes == ()


def test_small_tensors(plain: LLMDataDist) -> None:
    memory = Paged(1)
    text = report_of(plain, memory.start + BLOCK, size=BLOCK)
    assert "1 tensors, 0.0 MiB, 0% in huge pages" in text
    assert "do not fill a huge page [put tensors next to each other" in text


def test_memory_that_is_not_in_use(plain: LLMDataDist) -> None:
    need_collapse()
    memory = Paged(2, filled=False)
    text = report_of(plain, memory.start, size=memory.size)
    wanted = "echo madvise" if huge_pages.switched_off() else "they get huge pages when they are written"
    assert wanted in text


def test_a_bogus_address_is_registered_as_ever(plain: LLMDataDist) -> None:
    need_collapse()
    text = report_of(plain, 1 << 30, size=4 * PAGE)
    assert "not mapped [map it before" in text


def test_memory_is_counted_until_it_is_unregistered(plain: LLMDataDist) -> None:
    memory = Paged(2)
    manager = plain.cache_manager
    caches = [manager.register_blocks_cache(desc(1, memory.size), [memory.start]) for _ in range(2)]
    report = plain.explain_memory()
    assert (report.tensors, report.size, report.whole) == (2, memory.size, memory.size)
    for cache in caches:
        manager.unregister_cache(cache.cache_id)
    assert plain.explain_memory().tensors == 0


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Outcome.REFUSED, "the kernel refused: the memory is mapped from a file"),
        (Outcome.NO_MEMORY, "echo 1 > /proc/sys/vm/compact_memory"),
        (Outcome.UNSUPPORTED, "Linux 6.1 can"),
    ],
)
def test_causes(plain: LLMDataDist, monkeypatch: pytest.MonkeyPatch, outcome: Outcome, text: str) -> None:
    memory = Paged(2)
    stand_in(monkeypatch, lambda _ranges: Advice(memory.size, 0, 0.25, outcome))
    report = report_of(plain, memory.start, size=memory.size)
    assert "0% in huge pages, which took 0.25 s" in report
    assert text in report


def test_where_the_kernel_does_not_count(plain: LLMDataDist, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Paged(2)
    stand_in(monkeypatch, lambda _ranges: Advice(memory.size, PAGE, 0.25, Outcome.REFUSED))
    monkeypatch.setattr(huge_pages, "usage", lambda _ranges: None)
    assert "50% in huge pages" in report_of(plain, memory.start, size=memory.size)


def stand_in(monkeypatch: pytest.MonkeyPatch, advise: Callable[[Any], Advice]) -> None:
    monkeypatch.setattr(llm_datadist.engine.engine, "advise", advise)


def test_others_work_while_memory_is_moved(plain: LLMDataDist, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first registration hangs in its advice; a second one, a look and an unregistration do not wait for it."""
    memory = Paged(2)
    began, go_on = threading.Event(), threading.Event()

    def advise(ranges: Any) -> Advice:
        if threading.current_thread() is slow:
            began.set()
            assert go_on.wait(TIMEOUT_S)
        return huge_pages.advise(ranges)

    stand_in(monkeypatch, advise)
    slow = threading.Thread(target=report_of, args=(plain, memory.start), kwargs={"size": memory.size})
    slow.start()
    try:
        assert began.wait(TIMEOUT_S)
        cache = plain.cache_manager.register_blocks_cache(desc(1, memory.size), [memory.start])
        assert plain.explain_memory().tensors == 1
        plain.cache_manager.unregister_cache(cache.cache_id)
    finally:
        go_on.set()
        slow.join(TIMEOUT_S)
    assert plain.explain_memory().tensors == 1
