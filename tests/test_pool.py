"""The memory pool: first fit in whole pages, no overlap, everything comes back."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist.memory.pool import MemoryPool, PoolExhaustedError

if TYPE_CHECKING:
    from collections.abc import Iterator

SHIFT = 12
PAGE = 1 << SHIFT
PAGES = 16
FDS = Path("/proc/self/fd")


@pytest.fixture
def pool() -> Iterator[MemoryPool]:
    made = MemoryPool(PAGES * PAGE, SHIFT)
    yield made
    made.close()


def test_first_fit(pool: MemoryPool) -> None:
    a, b, c, d = (pool.allocate(PAGE * pages) for pages in (1, 3, 2, 1))
    assert [b - a, c - a, d - a] == [PAGE, 4 * PAGE, 6 * PAGE]
    pool.free(b)
    pool.free(a)
    assert pool.allocate(5 * PAGE) == d + PAGE  # the gap of four pages is too small
    assert pool.allocate(2 * PAGE) == a
    assert pool.allocate(2 * PAGE) == a + 2 * PAGE


@pytest.mark.parametrize(("size", "pages"), [(1, 1), (PAGE - 1, 1), (PAGE, 1), (PAGE + 1, 2), (16 * PAGE, 16)])
def test_sizes_are_rounded_up_to_whole_pages(pool: MemoryPool, size: int, pages: int) -> None:
    address = pool.allocate(size)
    assert pool.free_bytes == (PAGES - pages) * PAGE
    pool.free(address)
    assert pool.free_bytes == PAGES * PAGE


def test_a_pool_is_whole_pages_of_its_size() -> None:
    pool = MemoryPool(3 * PAGE + PAGE - 1, SHIFT)
    assert pool.free_bytes == 3 * PAGE
    pool.allocate(3 * PAGE)
    pool.close()


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_free_neighbours_become_one_run(pool: MemoryPool, order: tuple[int, ...]) -> None:
    parts = [pool.allocate(PAGE * pages) for pages in (5, 6, 5)]
    for index in order:
        pool.free(parts[index])
    assert pool.allocate(PAGES * PAGE) == parts[0]


def test_exhaustion_says_what_is_there_and_takes_nothing(pool: MemoryPool) -> None:
    parts = [pool.allocate(PAGE * 4) for _ in range(4)]
    with pytest.raises(
        PoolExhaustedError, match=r"no free run of 4096 bytes .* of 65536 bytes \(longest free run: 0\)"
    ):
        pool.allocate(1)
    pool.free(parts[0])
    pool.free(parts[2])
    assert pool.free_bytes == 8 * PAGE
    with pytest.raises(PoolExhaustedError, match=r"no free run of 20480 bytes .*longest free run: 16384.*memory_size"):
        pool.allocate(5 * PAGE)
    assert pool.free_bytes == 8 * PAGE
    assert pool.allocate(4 * PAGE) == parts[0]


def test_a_refused_size_larger_than_everything(pool: MemoryPool) -> None:
    with pytest.raises(PoolExhaustedError):
        pool.allocate(2**62)
    assert pool.allocate(PAGES * PAGE)


def test_memory_is_zero_and_really_there(pool: MemoryPool) -> None:
    address = pool.allocate(PAGES * PAGE)
    assert ctypes.string_at(address, PAGES * PAGE) == bytes(PAGES * PAGE)
    ctypes.memset(address, 0x5A, PAGES * PAGE)
    assert ctypes.string_at(address + PAGES * PAGE - 4, 4) == b"ZZZZ"


def test_an_address_that_was_not_given_is_not_taken(pool: MemoryPool) -> None:
    address = pool.allocate(2 * PAGE)
    for wrong in (address + PAGE, address + 8 * PAGE):
        with pytest.raises(KeyError):
            pool.free(wrong)
    pool.free(address)
    with pytest.raises(KeyError):
        pool.free(address)
    assert pool.free_bytes == PAGES * PAGE


def test_close_is_idempotent_and_gives_the_file_back() -> None:
    before = len(list(FDS.iterdir()))
    pool = MemoryPool(PAGES * PAGE, SHIFT)
    pool.allocate(PAGE)
    pool.close()
    pool.close()
    assert len(list(FDS.iterdir())) == before


@pytest.mark.parametrize("size", [0, PAGE - 1])
def test_a_pool_without_a_page_is_refused_and_leaks_nothing(size: int) -> None:
    before = len(list(FDS.iterdir()))
    with pytest.raises(OSError, match="mmap of 0 bytes"):
        MemoryPool(size, SHIFT)
    assert len(list(FDS.iterdir())) == before


def test_the_memory_cannot_be_cut_under_a_peer() -> None:
    pool = MemoryPool(PAGES * PAGE, SHIFT)
    (fd,) = (fd for fd in FDS.iterdir() if "llm-datadist-pool" in target_of(fd))
    with pytest.raises(PermissionError):
        os.ftruncate(int(fd.name), PAGE)
    pool.close()


def target_of(fd: Path) -> str:
    """What a descriptor of this process is; listing them opens one that is gone by now."""
    try:
        return str(fd.readlink())
    except FileNotFoundError:
        return ""


@settings(max_examples=300, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.integers(1, 9 * PAGE).map(lambda size: ("take", size)), st.integers(0, 30).map(lambda n: ("give", n))
        ),
        max_size=40,
    )
)
def test_against_a_list_of_pages(steps: list[tuple[str, int]]) -> None:
    """First fit over a list of page owners; every difference is a failure."""
    pool = MemoryPool(PAGES * PAGE, SHIFT)
    base = pool.allocate(1)
    pool.free(base)
    owners: list[int | None] = [None] * PAGES
    taken: list[tuple[int, int]] = []  # (address, pages)
    try:
        for number, (step, value) in enumerate(steps):
            if step == "give" and taken:
                address, pages = taken.pop(value % len(taken))
                pool.free(address)
                first = (address - base) // PAGE
                owners[first : first + pages] = [None] * pages
            elif step == "take":
                pages = -(-value // PAGE)
                fits = [n for n in range(PAGES - pages + 1) if owners[n : n + pages] == [None] * pages]
                if fits:
                    address = pool.allocate(value)
                    assert address == base + fits[0] * PAGE
                    owners[fits[0] : fits[0] + pages] = [number] * pages
                    taken.append((address, pages))
                else:
                    with pytest.raises(PoolExhaustedError):
                        pool.allocate(value)
            assert pool.free_bytes == owners.count(None) * PAGE
        for address, _ in taken:
            pool.free(address)
        assert pool.allocate(PAGES * PAGE) == base
    finally:
        pool.close()


def test_threads_never_get_the_same_page(pool: MemoryPool) -> None:
    clashes: list[int] = []

    def use(mark: int) -> None:
        for _ in range(200):
            address = pool.allocate(2 * PAGE)
            ctypes.memset(address, mark, 2 * PAGE)
            if ctypes.string_at(address, 2 * PAGE) != bytes([mark]) * (2 * PAGE):
                clashes.append(address)
            pool.free(address)

    threads = [threading.Thread(target=use, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert clashes == []
    assert pool.free_bytes == PAGES * PAGE
