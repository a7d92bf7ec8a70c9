"""iovec arrays: cut, batched, shared out, and passed byte by byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llm_datadist.memory import iovec
from llm_datadist.memory.iovec import MAX_PIECE, Cursor
from llm_datadist.memory.syscalls import MAX_CALL_BYTES, MAX_IOVECS

if TYPE_CHECKING:
    from numpy.typing import NDArray

USUAL = settings(max_examples=300, deadline=None)
LENGTHS = st.one_of(
    st.integers(0, 5000),
    st.integers(MAX_PIECE // 3, MAX_PIECE),
    st.sampled_from([MAX_PIECE, MAX_PIECE - 1, MAX_PIECE // 2]),
)


def array(values: list[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def iovecs(entries: list[tuple[int, int]]) -> NDArray[np.uint64]:
    return np.array(entries, dtype=np.uint64).reshape(-1, 2)


def test_limits_fit_one_system_call() -> None:
    assert MAX_IOVECS == 1024
    assert MAX_PIECE <= MAX_CALL_BYTES < 2**31


def test_pair_is_an_array_of_struct_iovec() -> None:
    pairs = iovec.pair(np.array([1 << 63, 7], dtype=np.uint64), array([5, 1 << 40]))
    assert pairs.dtype == np.uint64
    assert pairs.flags.c_contiguous
    assert pairs.tolist() == [[1 << 63, 5], [7, 1 << 40]]
    assert pairs.tobytes()[:16] == (1 << 63).to_bytes(8, "little") + (5).to_bytes(8, "little")


# split_long


@pytest.mark.parametrize("lengths", [[], [0], [MAX_PIECE], [1, MAX_PIECE, 0]])
def test_split_long_has_nothing_to_do(lengths: list[int]) -> None:
    assert iovec.split_long(array(lengths)) is None


@USUAL
@given(
    lengths=st.lists(st.one_of(st.integers(1, 9), st.integers(1, 2**36)), min_size=1, max_size=6),
    long=st.sampled_from([MAX_PIECE + 1, 2 * MAX_PIECE, 64 * MAX_PIECE + 5]),
    at=st.integers(0, 5),
)
def test_split_long_cuts_into_full_pieces(lengths: list[int], long: int, at: int) -> None:
    lengths[at % len(lengths)] = long
    expected = [
        (min(MAX_PIECE, length - start), owner, start)
        for owner, length in enumerate(lengths)
        for start in range(0, length, MAX_PIECE)
    ]
    cut = iovec.split_long(array(lengths))
    assert cut is not None
    assert list(zip(*(column.tolist() for column in cut), strict=True)) == expected


# batches


@USUAL
@given(lengths=st.lists(LENGTHS, max_size=40), max_entries=st.integers(1, 9))
@example(lengths=[0, 0, 0], max_entries=2)
@example(lengths=[MAX_PIECE, 0, MAX_PIECE, 0], max_entries=9)
def test_batches_are_full_and_cover_everything_in_order(lengths: list[int], max_entries: int) -> None:
    position = 0
    for start, stop in iovec.batches(array(lengths), max_entries):
        assert start == position < stop
        assert stop - start <= max_entries
        assert sum(lengths[start:stop]) <= MAX_PIECE
        if stop < len(lengths):
            assert stop - start == max_entries or sum(lengths[start : stop + 1]) > MAX_PIECE
        position = stop
    assert position == len(lengths)


def test_batches_take_as_many_entries_as_a_call_does() -> None:
    assert list(iovec.batches(array([1] * 2500))) == [(0, 1024), (1024, 2048), (2048, 2500)]


# share


@USUAL
@given(lengths=st.lists(LENGTHS, max_size=40), parts=st.integers(1, 9))
def test_share_is_fair_and_covers_everything_in_order(lengths: list[int], parts: int) -> None:
    shares = iovec.share(array(lengths), parts)
    assert len(shares) <= parts
    assert [entry for start, stop in shares for entry in range(start, stop)] == list(range(len(lengths)))
    assert all(start < stop for start, stop in shares)
    fair = -(-sum(lengths) // parts) + max(lengths, default=0)
    assert all(sum(lengths[start:stop]) <= fair for start, stop in shares)


@pytest.mark.parametrize(
    ("given_lengths", "parts", "shares"),
    [
        ([4, 4, 4, 4], 2, [(0, 2), (2, 4)]),
        ([9, 9], 2, [(0, 1), (1, 2)]),
        ([7] * 8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ([6, 2, 2, 2], 2, [(0, 1), (1, 4)]),
        ([2, 2, 2, 6], 2, [(0, 3), (3, 4)]),
        ([1] * 6, 1, [(0, 6)]),
        ([10], 4, [(0, 1)]),
        ([], 4, []),
    ],
)
def test_share_is_even_where_it_can_be(given_lengths: list[int], parts: int, shares: list[tuple[int, int]]) -> None:
    assert iovec.share(array(given_lengths), parts) == shares


# Cursor


def left_of(entries: list[tuple[int, int]], done: int) -> list[tuple[int, int]]:
    """The entries without their first ``done`` bytes; the empty ones left out."""
    left = []
    for address, length in entries:
        skip = min(done, length)
        done -= skip
        if length > skip:
            left.append((address + skip, length - skip))
    return left


@USUAL
@given(
    lengths=st.lists(st.one_of(st.integers(0, 5), st.integers(0, 2**40)), min_size=1, max_size=8),
    steps=st.lists(st.floats(0, 1), max_size=12),
    top=st.booleans(),
)
def test_cursor_leaves_exactly_what_has_not_passed(lengths: list[int], steps: list[float], top: bool) -> None:
    base = 2**64 - 2**44 if top else 4096
    entries = [(base + (n << 40), length) for n, length in enumerate(lengths)]
    memory = iovecs(entries)
    cursor = Cursor(memory)
    total = sum(lengths)
    assert cursor.total == cursor.left == total
    done = 0
    for step in [*steps, 1.0]:
        count = int(step * cursor.left)
        cursor.advance(count)
        done += count
        assert (cursor.done, cursor.left) == (done, total - done)
        if not cursor.left:
            break
        address, count = cursor.window()
        assert address == memory.ctypes.data + 16 * cursor.index
        assert count == len(entries) - cursor.index
        remaining = [(int(a), int(b)) for a, b in memory[cursor.index :] if b]
        assert remaining == left_of(entries, done)
    assert cursor.left == 0


@pytest.mark.parametrize("total", range(1, 8))
def test_cursor_over_every_way_to_pass_a_few_bytes(total: int) -> None:
    """All compositions of the total as successive counts, over all entries that add up to it."""
    for shape in compositions(total):
        entries = [(100 * n, length) for n, length in enumerate(shape)]
        for counts in compositions(total):
            memory = iovecs(entries)
            cursor = Cursor(memory)
            done = 0
            for count in counts:
                cursor.advance(count)
                done += count
                remaining = [(int(a), int(b)) for a, b in memory[cursor.index :]] if cursor.left else []
                assert remaining == left_of(entries, done)


def compositions(total: int) -> list[list[int]]:
    """All lists of positive numbers with this sum."""
    if not total:
        return [[]]
    return [[first, *rest] for first in range(1, total + 1) for rest in compositions(total - first)]


def test_cursor_window_is_at_most_one_call() -> None:
    cursor = Cursor(iovecs([(0, 1)] * 3000))
    windows = []
    while cursor.left:
        windows.append(cursor.window()[1])
        cursor.advance(1000)
    assert windows == [1024, 1024, 1000]


def test_cursor_skips_entries_without_bytes() -> None:
    memory = iovecs([(0, 0), (10, 3), (20, 0), (30, 2)])
    cursor = Cursor(memory)
    cursor.advance(3)
    assert cursor.index == 3
    assert memory[3].tolist() == [30, 2]


def test_cursor_over_nothing() -> None:
    cursor = Cursor(iovecs([]))
    assert (cursor.total, cursor.left, cursor.done) == (0, 0, 0)
