"""iovec arrays: built, cut, batched, and passed byte by byte."""

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


@USUAL
@given(
    bases=st.lists(st.integers(0, 2**64 - 1), max_size=6),
    ranges=st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)), max_size=6),
)
def test_product_is_every_range_after_every_base(bases: list[int], ranges: list[tuple[int, int]]) -> None:
    offsets, lengths = ([each[side] for each in ranges] for side in (0, 1))
    made = iovec.product(np.array(bases, dtype=np.uint64), array(offsets), array(lengths))
    assert made.dtype == np.uint64
    assert made.flags.c_contiguous
    assert made.shape == (len(bases) * len(ranges), 2)
    assert made.tolist() == [[(base + at) % 2**64, length] for base in bases for at, length in ranges]


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
@given(
    lengths=st.lists(LENGTHS, max_size=40),
    max_entries=st.integers(1, 9),
    max_bytes=st.sampled_from([MAX_PIECE, MAX_PIECE // 3, 4000, 1]),
)
@example(lengths=[0, 0, 0], max_entries=2, max_bytes=MAX_PIECE)
@example(lengths=[MAX_PIECE, 0, MAX_PIECE, 0], max_entries=9, max_bytes=MAX_PIECE)
@example(lengths=[0, 2, 0], max_entries=9, max_bytes=1)
def test_batches_are_full_and_cover_everything_in_order(lengths: list[int], max_entries: int, max_bytes: int) -> None:
    position = 0
    for start, stop in iovec.batches(array(lengths), max_entries, max_bytes):
        assert start == position < stop
        assert stop - start <= max_entries
        assert sum(lengths[start:stop]) <= max_bytes or stop - start == 1
        if stop < len(lengths):
            assert stop - start == max_entries or sum(lengths[start : stop + 1]) > max_bytes
        position = stop
    assert position == len(lengths)


def test_batches_take_as_many_entries_as_a_call_does() -> None:
    assert list(iovec.batches(array([1] * 2500))) == [(0, 1024), (1024, 2048), (2048, 2500)]


# parts


def rows(bases: int, count: int, part: iovec.Part) -> list[tuple[int, int]]:
    """(base, range) of each entry of a part."""
    tensors, ranges = part
    return [(base, at) for base in range(bases)[tensors] for at in range(count)[ranges]]


@USUAL
@given(
    bases=st.integers(0, 12),
    lengths=st.lists(LENGTHS, max_size=12),
    max_entries=st.integers(1, 40),
    max_bytes=st.sampled_from([MAX_PIECE, MAX_PIECE // 3, 4000, 1]),
)
@example(bases=3, lengths=[0], max_entries=1, max_bytes=1)
@example(bases=3, lengths=[2], max_entries=9, max_bytes=1)
def test_parts_cover_the_product_in_order_within_both_limits(
    bases: int, lengths: list[int], max_entries: int, max_bytes: int
) -> None:
    seen: list[tuple[int, int]] = []
    for part in iovec.parts(bases, array(lengths), max_entries, max_bytes):
        entries = rows(bases, len(lengths), part)
        assert len(entries) <= max_entries
        assert sum(lengths[at] for _, at in entries) <= max_bytes or len(entries) == 1
        seen += entries
    assert seen == [(base, at) for base in range(bases) for at in range(len(lengths))]


@pytest.mark.parametrize(
    ("bases", "lengths", "max_entries", "max_bytes", "counts"),
    [
        (64, [10] * 16, 1024, MAX_PIECE, [1024]),
        (65, [10] * 16, 1024, MAX_PIECE, [1024, 16]),
        (5, [10] * 500, 1024, MAX_PIECE, [1000, 1000, 500]),
        (2, [10] * 1500, 1024, MAX_PIECE, [1024, 476, 1024, 476]),
        (4, [10] * 2, 1024, 40, [4, 4]),
        (2, [10] * 4, 1024, 20, [2, 2, 2, 2]),
        (2, [50, 1, 1], 1024, 20, [1, 2, 1, 2]),
    ],
)
def test_parts_are_as_large_as_they_can_be(
    bases: int, lengths: list[int], max_entries: int, max_bytes: int, counts: list[int]
) -> None:
    made = iovec.parts(bases, array(lengths), max_entries, max_bytes)
    assert [len(rows(bases, len(lengths), part)) for part in made] == counts


@USUAL
@given(
    bases=st.lists(st.integers(0, 2**63), min_size=1, max_size=6),
    ranges=st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 5000)), min_size=1, max_size=6),
    max_entries=st.integers(1, 12),
)
def test_the_iovecs_of_all_parts_are_those_of_the_whole(
    bases: list[int], ranges: list[tuple[int, int]], max_entries: int
) -> None:
    offsets, lengths = (array([each[side] for each in ranges]) for side in (0, 1))
    side = iovec.Side(np.array(bases, dtype=np.uint64), offsets)
    pieces = [side.iovecs(lengths, part) for part in iovec.parts(len(bases), lengths, max_entries)]
    assert np.concatenate(pieces).tolist() == side.iovecs(lengths).tolist()


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


def test_cursor_window_is_all_that_is_left() -> None:
    cursor = Cursor(iovecs([(0, 1)] * 3000))
    windows = []
    while cursor.left:
        windows.append(cursor.window()[1])
        cursor.advance(1000)
    assert windows == [3000, 2000, 1000]


def test_cursor_skips_entries_without_bytes() -> None:
    memory = iovecs([(0, 0), (10, 3), (20, 0), (30, 2)])
    cursor = Cursor(memory)
    cursor.advance(3)
    assert cursor.index == 3
    assert memory[3].tolist() == [30, 2]


def test_cursor_over_nothing() -> None:
    cursor = Cursor(iovecs([]))
    assert (cursor.total, cursor.left, cursor.done) == (0, 0, 0)
