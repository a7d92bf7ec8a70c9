"""Huge pages: which pages are advised, and what the kernel makes of it, on real memory."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist.memory import huge_pages
from llm_datadist.memory.huge_pages import Advice, Outcome, advise, join, total, whole_pages
from llm_datadist.memory.pool import MemoryPool
from paged_memory import PAGE, Paged, bytes_in_huge_pages, need_collapse, usual_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = usual_pages
SHIFT = 12
TIMEOUT_S = 30
MAPS = Path("/proc/self/maps")


@pytest.fixture
def memory() -> Paged:
    need_collapse()
    return Paged(6)


def outline(advice: Advice) -> tuple[int, int, Outcome]:
    """Whole pages, huge pages, outcome."""
    assert advice.seconds >= 0
    return advice.whole // PAGE, advice.huge // PAGE, advice.outcome


# Which pages


RANGES = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 40)).map(lambda each: (each[0], sum(each))), max_size=12
)


@given(ranges=RANGES, page=st.sampled_from([1, 2, 3, 8]))
def test_whole_pages_are_all_those_within_and_no_others(ranges: list[tuple[int, int]], page: int) -> None:
    covered = {byte for start, end in ranges for byte in range(start, end)}
    expected = {byte for first in range(0, 200, page) for byte in range(first, first + page)}
    expected = {byte for byte in expected if set(range(byte // page * page, byte // page * page + page)) <= covered}
    found = whole_pages(ranges, page)
    assert {byte for start, end in found for byte in range(start, end)} == expected
    assert total(found) == len(expected)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(found))
    assert {byte for start, end in join(ranges) for byte in range(start, end)} == covered


def test_there_are_none_without_huge_pages() -> None:
    assert whole_pages([(0, 1 << 30)], 0) == []


# Real memory


def test_memory_is_moved_into_huge_pages_and_keeps_its_content(memory: Paged) -> None:
    before = memory.bytes.copy()
    assert memory.huge == 0
    assert outline(advise([(memory.start, memory.end)])) == (6, 6, Outcome.DONE)
    assert memory.huge == 6
    assert np.array_equal(memory.bytes, before)
    assert outline(advise([(memory.start, memory.end)])) == (6, 6, Outcome.DONE)


def test_a_range_that_begins_and_ends_within_a_page(memory: Paged) -> None:
    before = memory.bytes.copy()
    assert outline(advise([(memory.start + 1, memory.end - 1)])) == (4, 4, Outcome.DONE)
    assert (memory.huge, memory.hinted) == (4, 4 * PAGE)
    assert np.array_equal(memory.bytes, before)


def test_tensors_side_by_side_lose_nothing_at_their_seams(memory: Paged) -> None:
    cuts = [memory.start, *(memory.start + PAGE // 3 * number + 7 for number in range(1, 17)), memory.end]
    tensors = list(itertools.pairwise(cuts))
    assert outline(advise(reversed(tensors))) == (6, 6, Outcome.DONE)
    assert memory.huge == 6


def test_a_gap_between_tensors_is_not_touched(memory: Paged) -> None:
    gap = memory.start + 2 * PAGE + PAGE // 2
    advice = advise([(memory.start, gap), (gap + 1, memory.end)])
    assert outline(advice) == (5, 5, Outcome.DONE)
    assert (memory.huge, memory.hinted) == (5, 5 * PAGE)


def test_a_range_without_a_whole_page(memory: Paged) -> None:
    assert outline(advise([(memory.start + 1, memory.start + 2 * PAGE - 1)])) == (0, 0, Outcome.DONE)
    assert outline(advise([])) == (0, 0, Outcome.DONE)
    assert (memory.huge, memory.hinted) == (0, 0)


def test_memory_that_is_not_in_use_gets_huge_pages_when_it_is(memory: Paged) -> None:
    fresh = Paged(4, filled=False)
    assert outline(advise([(fresh.start, fresh.end)])) == (4, 0, Outcome.REFUSED)
    assert (fresh.huge, fresh.hinted) == (0, 4 * PAGE)
    if huge_pages.switched_off():
        pytest.skip("transparent huge pages are switched off")
    fresh.bytes[:] = 1
    assert fresh.huge == 4


def test_what_is_in_use_is_moved_even_behind_what_is_not(memory: Paged) -> None:
    fresh = Paged(4, filled=False)
    fresh.bytes[PAGE] = fresh.bytes[3 * PAGE] = 1
    assert outline(advise([(fresh.start, fresh.end)])) == (4, 2, Outcome.REFUSED)
    assert fresh.huge == 2
    assert int(fresh.bytes.sum()) == 2


def test_unused_pages_are_filled_on_request(memory: Paged) -> None:
    fresh = Paged(4, filled=False)
    advise([(fresh.start, fresh.end)], populate=True)
    assert not fresh.bytes.any()
    assert fresh.hinted == 4 * PAGE


def test_without_time_there_is_only_the_hint(memory: Paged) -> None:
    assert outline(advise([(memory.start, memory.end)], budget_s=0)) == (6, 0, Outcome.OUT_OF_TIME)
    assert (memory.huge, memory.hinted) == (0, 6 * PAGE)


def mappings() -> int:
    return MAPS.read_text().count("\n")


@pytest.mark.parametrize(("few", "most", "hinted"), [(1, 0, 0), (2, 0, 5), (1, 1 << 20, 5)])
def test_no_hints_where_they_could_exhaust_the_mappings_of_a_process(
    memory: Paged, monkeypatch: pytest.MonkeyPatch, few: int, most: int, hinted: int
) -> None:
    """Two hints: given if two are few, or if there is room for more mappings."""
    monkeypatch.setattr(huge_pages, "_FEW_HINTS", few)
    monkeypatch.setattr(huge_pages, "_MAX_MAPPINGS", most)
    advise([(memory.start, memory.start + 2 * PAGE), (memory.start + 3 * PAGE, memory.end)], budget_s=0)
    assert memory.hinted == hinted * PAGE


def test_hints_of_many_calls_stop_in_time(memory: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
    many = Paged(40, filled=False)
    most = mappings() + 20
    monkeypatch.setattr(huge_pages, "_FEW_HINTS", 1)
    monkeypatch.setattr(huge_pages, "_MAX_MAPPINGS", most)
    for start in range(many.start, many.end, 4 * PAGE):
        advise([(start, start + PAGE), (start + 2 * PAGE, start + 3 * PAGE)], budget_s=0)
    assert 0 < many.hinted < 20 * PAGE
    assert mappings() <= most


def test_without_free_huge_pages_it_gives_up_and_hints(memory: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def madvise(where: tuple[int, int], advice: int) -> int:
        calls.append(advice)
        return errno.ENOMEM if advice == huge_pages._MADV_COLLAPSE and where != (0, 0) else 0

    monkeypatch.setattr(huge_pages, "_madvise", madvise)
    parts = [(memory.start, memory.start + 2 * PAGE), (memory.start + 3 * PAGE, memory.end)]
    assert outline(advise(parts)) == (5, 0, Outcome.NO_MEMORY)
    support, hint = huge_pages._MADV_COLLAPSE, huge_pages._MADV_HUGEPAGE
    assert calls == [support, hint, support, hint]


def test_unmapped_memory_is_left_alone(memory: Paged) -> None:
    before = MAPS.read_text()
    for start, end in [(1 << 30, 1 << 31), (0, 1 << 62), (1 << 63, (1 << 64) - 1)]:
        advice = advise([(start, end)])
        assert (advice.huge, advice.outcome) == (0, Outcome.UNMAPPED)
    assert (memory.huge, memory.hinted) == (0, 0)
    assert MAPS.read_text().count("\n") <= before.count("\n") + 1


def test_memory_with_a_hole_is_left_alone_but_not_its_neighbour(memory: Paged) -> None:
    other = Paged(2)
    memory.unmap(3, 1)
    advice = advise([(memory.start, memory.end), (other.start, other.end)])
    assert outline(advice) == (8, 2, Outcome.UNMAPPED)
    assert (memory.huge, memory.hinted, other.huge) == (0, 0, 2)


def test_read_only_memory(memory: Paged) -> None:
    before = memory.bytes.copy()
    memory.protect()
    advice = advise([(memory.start, memory.end)])
    assert np.array_equal(memory.bytes, before)
    assert (advice.outcome, memory.huge) == (Outcome.DONE, 6)
    memory.unprotect()
    memory.bytes[:] = 0
    assert not memory.bytes.any()


def test_a_file_is_not_changed(memory: Paged, tmp_path: Path) -> None:
    file = tmp_path / "tensor"
    content = np.random.default_rng(5).integers(0, 256, 7 * PAGE, dtype=np.uint8)
    content.tofile(file)
    fd = os.open(file, os.O_RDWR)
    try:
        mapped = Paged(4, filled=False, fd=fd)
    finally:
        os.close(fd)
    advice = advise([(mapped.start, mapped.end)])
    assert advice.outcome in (Outcome.REFUSED, Outcome.DONE)  # some file systems can do it
    assert np.array_equal(np.fromfile(file, dtype=np.uint8), content)


def test_a_process_that_must_not_have_huge_pages() -> None:
    code = (
        "import ctypes\n"
        "from paged_memory import Paged\n"
        "from llm_datadist.memory.huge_pages import advise\n"
        "assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0\n"  # PR_SET_THP_DISABLE
        "memory = Paged(2)\n"
        "advice = advise([(memory.start, memory.end)])\n"
        "print(advice.huge, advice.outcome.name, memory.huge)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, cwd=Path(__file__).parent
    )
    assert done.stdout.split() in (["0", "REFUSED", "0"], ["0", "UNSUPPORTED", "0"])


def test_writes_during_the_move_are_kept(memory: Paged) -> None:
    """A thread that counts in every word of the memory, all the while: no step is lost."""
    words = memory.bytes.view(np.uint64)
    words[:] = 0
    rounds, moved = [0], threading.Event()

    def count() -> None:
        while not moved.is_set() or rounds[0] < 3:
            np.add(words, 1, out=words)
            rounds[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    advice = advise([(memory.start, memory.end)])
    moved.set()
    counter.join(TIMEOUT_S)
    assert not counter.is_alive()
    assert set(np.unique(words).tolist()) == {rounds[0]}
    assert advice.outcome in (Outcome.DONE, Outcome.REFUSED)


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.tuples(st.integers(0, 4 * PAGE), st.integers(1, 2 * PAGE)), min_size=1, max_size=6))
def test_any_tensors(cuts: list[tuple[int, int]]) -> None:
    need_collapse()
    memory = Paged(4)
    before = memory.bytes.copy()
    tensors = [(memory.start + at, min(memory.start + at + size, memory.end)) for at, size in cuts]
    expected = total(whole_pages(tensors, PAGE))
    advice = advise(tensors)
    assert (advice.whole, advice.huge, memory.huge * PAGE, memory.hinted) == (expected,) * 4
    assert np.array_equal(memory.bytes, before)


# What the kernel counts


def test_usage_is_of_the_ranges_alone(memory: Paged) -> None:
    halves = [(memory.start, memory.start + 3 * PAGE), (memory.start + 4 * PAGE, memory.end)]
    advise(halves[:1])
    usage = huge_pages.usage(halves)
    assert usage is not None
    assert (usage.huge, usage.resident) == (3 * PAGE, 5 * PAGE)
    assert huge_pages.usage([]) == huge_pages.Usage(0, 0)
    assert huge_pages.usage([(1 << 30, 1 << 31)]) == huge_pages.Usage(0, 0)


# Shared mappings and pools


def test_a_shared_mapping_is_aligned_and_leaves_nothing_behind() -> None:
    for length in (1, mmap.PAGESIZE + 1, PAGE, PAGE + 1):
        fd = os.memfd_create("mapped")
        os.ftruncate(fd, length)
        address = huge_pages.map_shared(fd, length)
        assert address % PAGE == 0
        assert MAPS.read_text().count("memfd:mapped") == 1
        huge_pages.unmap(address, length)
        assert "memfd:mapped" not in MAPS.read_text()
        os.close(fd)


@pytest.mark.parametrize(("length", "fd"), [(0, 0), (1 << 62, 0), (1, -1)])
def test_what_cannot_be_mapped_leaves_nothing_behind(length: int, fd: int) -> None:
    before = MAPS.read_text().count("\n")
    with pytest.raises(OSError, match=f"mmap of {length}|mmap of {length + PAGE}"):
        huge_pages.map_shared(fd, length)
    assert MAPS.read_text().count("\n") <= before


@pytest.fixture
def pool() -> Iterator[MemoryPool]:
    need_collapse()
    made = MemoryPool(6 * PAGE + PAGE // 2, SHIFT)
    yield made
    made.close()


def in_pool(address: int) -> int:
    return sum(bytes_in_huge_pages(address, address + 1)) // PAGE


def test_pool_memory_gets_huge_pages_when_it_is_allocated(pool: MemoryPool) -> None:
    first = pool.allocate(PAGE // 2)
    assert first % PAGE == 0
    assert in_pool(first) == 0
    if outline(pool.advise([first]))[1] == 0:
        pytest.skip("this kernel has no huge pages for shared memory")
    assert in_pool(first) == 1
    second = pool.allocate(PAGE)
    assert outline(pool.advise([second])) == (1, 1, Outcome.DONE)  # the other page it lies in has been
    rest = pool.allocate(5 * PAGE)
    assert outline(pool.advise([rest])) == (4, 4, Outcome.DONE)  # the last half page cannot
    assert in_pool(first) == 6
    whole = np.ctypeslib.as_array((ctypes.c_uint8 * (6 * PAGE + PAGE // 2)).from_address(first))
    assert not whole.any()
    whole[:] = 7
    assert in_pool(first) == 6


def test_huge_pages_of_a_pool_stay_when_allocations_come_and_go(pool: MemoryPool) -> None:
    address = pool.allocate(2 * PAGE)
    pool.advise([address])
    before = in_pool(address)
    pool.free(address)
    assert pool.allocate(PAGE) == address
    assert outline(pool.advise([address])) == (0, 0, Outcome.DONE)
    assert in_pool(address) == before


def test_a_pool_goes_on_where_time_was_over(pool: MemoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    address = pool.allocate(2 * PAGE)
    monkeypatch.setattr(huge_pages, "BASE_BUDGET_S", -1e9)
    assert outline(pool.advise([address])) == (2, 0, Outcome.OUT_OF_TIME)
    monkeypatch.undo()
    assert pool.advise([address]).whole == 2 * PAGE
