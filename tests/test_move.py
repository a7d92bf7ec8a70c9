"""Copies: short counts resumed byte for byte, bad addresses as exceptions, and memmove where the kernel may not."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist.memory import iovec, move, syscalls
from llm_datadist.memory.iovec import MAX_PIECE, Side
from llm_datadist.memory.move import MemoryFaultError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]

PAGE = mmap.PAGESIZE
PID = os.getpid()
NOT_MAPPED = [0, 8, 4096, 1 << 47, 2**64 - PAGE]
"""Addresses that no process has: below mmap_min_addr, and beyond user space."""


class Memory:
    """A numpy buffer and iovec arrays into it."""

    def __init__(self, content: bytes) -> None:
        self.bytes = np.frombuffer(content, dtype=np.uint8).copy()
        self.base = self.bytes.ctypes.data

    def iovecs(self, spans: list[tuple[int, int]]) -> U64:
        return iovec.pair(
            self.addresses([at for at, _ in spans]), np.array([length for _, length in spans], dtype=np.int64)
        )

    def addresses(self, offsets: list[int]) -> U64:
        return np.array([self.base + at for at in offsets], dtype=np.uint64)

    def side(self, bases: list[int], offsets: list[int]) -> Side:
        """Ranges that start at ``offsets`` after every base, which is an offset itself."""
        return Side(self.addresses(bases), lengths(*offsets))


def lengths(*values: int) -> I64:
    return np.array(values, dtype=np.int64)


def entries(address: int, count: int) -> list[tuple[int, int]]:
    values = (ctypes.c_uint64 * (2 * count)).from_address(address)
    return [(values[2 * n], values[2 * n + 1]) for n in range(count)]


class ShortKernel:
    """A process_vm call that copies as much as it is told to, and then what it is told to fail with."""

    def __init__(self, counts: Iterator[int], failure: Exception | None = None) -> None:
        self.counts = counts
        self.failure = failure
        self.calls: list[tuple[int, int]] = []
        """(entries, bytes moved) of each call."""

    def __call__(self, pid: int, local: int, remote: int, count: int) -> int:
        assert pid == PID
        ours, theirs = entries(local, count), entries(remote, count)
        assert [length for _, length in ours] == [length for _, length in theirs]
        wanted = sum(length for _, length in ours)
        limit = next(self.counts, None)
        if limit is None:
            if self.failure is not None:
                raise self.failure
            limit = wanted
        moved = min(limit, wanted)
        left = moved
        for (to, length), (source, _) in zip(ours, theirs, strict=True):
            part = min(left, length)
            ctypes.memmove(to, source, part)
            left -= part
        self.calls.append((count, moved))
        return moved


def check(
    spans: list[tuple[int, int, int]], size: int, run: Callable[[Memory, Memory], object], source: bytes | None = None
) -> None:
    """Run something that copies ``(to, from, length)`` spans and compare with a byte loop."""
    source = source or bytes(n % 251 for n in range(size))
    ours, theirs = Memory(b"\xff" * size), Memory(source)
    run(ours, theirs)
    expected = bytearray(b"\xff" * size)
    for to, from_, length in spans:
        for byte in range(length):
            expected[to + byte] = source[from_ + byte]
    assert ours.bytes.tobytes() == bytes(expected)
    assert theirs.bytes.tobytes() == source


def move_with(kernel: move.VmCall, spans: list[tuple[int, int, int]]) -> Callable[[Memory, Memory], None]:
    def run(ours: Memory, theirs: Memory) -> None:
        local = ours.iovecs([(to, length) for to, _, length in spans])
        remote = theirs.iovecs([(from_, length) for _, from_, length in spans])
        move.move(kernel, PID, local, remote)

    return run


def compositions(total: int) -> list[list[int]]:
    """All lists of positive numbers with this sum."""
    if not total:
        return [[]]
    return [[first, *rest] for first in range(1, total + 1) for rest in compositions(total - first)]


SPANS = [(0, 20, 3), (5, 4, 1), (8, 11, 4)]


@pytest.mark.parametrize("counts", compositions(sum(length for *_, length in SPANS)), ids=str)
def test_every_pattern_of_short_counts(counts: list[int]) -> None:
    kernel = ShortKernel(iter(counts))
    check(SPANS, 32, move_with(kernel, SPANS))
    assert [moved for _, moved in kernel.calls] == counts


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4), st.integers(0, 60)), min_size=1, max_size=8),
    counts=st.lists(st.integers(1, 20), max_size=30),
)
def test_short_counts_of_any_size(pieces: list[tuple[int, int, int]], counts: list[int]) -> None:
    spans, at = [], 0
    for length, gap, from_ in pieces:
        spans.append((at + gap, from_, length))
        at += gap + length
    check(spans, 120, move_with(ShortKernel(iter(counts)), spans))


def test_a_call_that_moves_everything_is_the_only_one() -> None:
    spans = [(2 * n, 3 * n, 2) for n in range(1024)]
    kernel = ShortKernel(iter([]))
    check(spans, 3200, move_with(kernel, spans))
    assert kernel.calls == [(1024, 2048)]


def test_short_counts_among_as_many_entries_as_a_call_takes() -> None:
    spans = [(2 * n, 3 * n, 2) for n in range(1024)]
    kernel = ShortKernel(iter([2000, 1, 5, 3]))
    check(spans, 3200, move_with(kernel, spans))
    assert [moved for _, moved in kernel.calls] == [2000, 1, 5, 3, 2048 - 2009]


@pytest.mark.parametrize("code", [errno.EFAULT, errno.ENOMEM])
@pytest.mark.parametrize("counts", [[], [1], [3], [4, 1], [7]])
def test_a_fault_is_a_fault_at_any_point(code: int, counts: list[int]) -> None:
    ours, theirs = Memory(b"\xff" * 32), Memory(bytes(32))
    kernel = ShortKernel(iter(counts), OSError(code, "injected"))
    local, remote = ours.iovecs([(a, n) for a, _, n in SPANS]), theirs.iovecs([(b, n) for _, b, n in SPANS])
    with pytest.raises(MemoryFaultError, match="registered memory must stay mapped") as caught:
        move.move(kernel, PID, local, remote)
    assert isinstance(caught.value.__cause__, OSError)
    # The text names the entry at which it stopped, on both sides.
    done = sum(counts)
    entry = 0 if done < 3 else 1 if done < 4 else 2
    inside = done - [0, 3, 4][entry]
    to, from_, length = SPANS[entry]
    assert f"{length - inside} bytes at {ours.base + to + inside:#x} here" in str(caught.value)
    assert f"at {theirs.base + from_ + inside:#x} in process {PID}" in str(caught.value)


@pytest.mark.parametrize("code", [errno.ESRCH, errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL])
@pytest.mark.parametrize("counts", [[], [5]])
def test_other_errors_pass_as_they_are(code: int, counts: list[int]) -> None:
    ours, theirs = Memory(bytes(32)), Memory(bytes(32))
    failure = OSError(code, "injected")
    with pytest.raises(OSError, match="injected") as caught:
        move_with(ShortKernel(iter(counts), failure), SPANS)(ours, theirs)
    assert caught.value is failure


@pytest.mark.parametrize("counts", [[0, 0], [5, 0], [1, 1, 1, 0]])
def test_no_progress_is_a_fault_not_an_endless_loop(counts: list[int]) -> None:
    kernel = ShortKernel(iter(counts))
    with pytest.raises(MemoryFaultError, match=f"process {PID} gave no bytes"):
        move_with(kernel, SPANS)(Memory(bytes(32)), Memory(bytes(32)))
    assert [moved for _, moved in kernel.calls] == counts


# The real calls, on this process


@pytest.mark.parametrize("call", [syscalls.process_vm_readv, syscalls.process_vm_writev])
def test_the_kernel_moves_as_many_entries_as_one_call_takes(call: move.VmCall) -> None:
    writing = call is syscalls.process_vm_writev
    spans = [(3 * n, 4 * n, 3) for n in range(1024)]

    def run(ours: Memory, theirs: Memory) -> None:
        target, source = ours.iovecs([(a, n) for a, _, n in spans]), theirs.iovecs([(b, n) for _, b, n in spans])
        local, remote = (source, target) if writing else (target, source)
        move.move(call, PID, local, remote)

    check(spans, 4200, run)


class Guarded:
    """Two pages that can be used, one that cannot, two that can."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, 5 * PAGE)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.base = ctypes.addressof(anchor)
        del anchor
        self.hole = self.base + 2 * PAGE
        self._protect(0)
        self._map[:PAGE] = b"a" * PAGE

    def _protect(self, protection: int) -> None:
        mprotect = ctypes.CDLL(None, use_errno=True).mprotect
        mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert mprotect(self.hole, PAGE, protection) == 0

    def close(self) -> None:
        self._map.close()


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    memory = Guarded()
    yield memory
    memory.close()


@pytest.mark.parametrize("call", [syscalls.process_vm_readv, syscalls.process_vm_writev])
@pytest.mark.parametrize("remote_is_bad", [True, False])
@pytest.mark.parametrize("before", [0, 1, PAGE, 2 * PAGE])
def test_memory_without_access_raises(guarded: Guarded, call: move.VmCall, remote_is_bad: bool, before: int) -> None:
    good = Memory(b"g" * (4 * PAGE))
    bad = iovec.pair(np.array([guarded.base, guarded.hole - before], dtype=np.uint64), lengths(PAGE, before + PAGE))
    fine = good.iovecs([(0, PAGE), (PAGE, before + PAGE)])
    local, remote = (fine, bad) if remote_is_bad else (bad, fine)
    with pytest.raises(MemoryFaultError):
        move.move(call, PID, local, remote)


@pytest.mark.parametrize("address", NOT_MAPPED)
@pytest.mark.parametrize("destination_is_bad", [True, False])
def test_copy_to_or_from_nowhere_raises(address: int, destination_is_bad: bool) -> None:
    good = Memory(b"g" * 64)
    sides = [Side(np.array([address], dtype=np.uint64), lengths(0)), good.side([0], [0])]
    with pytest.raises(MemoryFaultError):
        move.copy(*(sides if destination_is_bad else sides[::-1]), lengths(8))
    assert good.bytes.tobytes() == b"g" * 64


def test_copy_into_memory_that_is_only_readable_raises() -> None:
    constant = ctypes.create_string_buffer(b"keep", 4)
    source = ctypes.addressof(constant)
    with mmap.mmap(-1, PAGE, prot=mmap.PROT_READ) as mapped:
        at = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        with pytest.raises(MemoryFaultError):
            move.copy(*(Side(np.array([base], dtype=np.uint64), lengths(0)) for base in (at, source)), lengths(4))
        assert mapped[:4] == bytes(4)


def test_a_process_that_does_not_exist_is_an_os_error() -> None:
    with pytest.raises(ProcessLookupError):
        move.move(syscalls.process_vm_readv, 2**22 + 1, *(Memory(bytes(8)).iovecs([(0, 8)]) for _ in range(2)))


# copy


RANGES = [(0, 100, 7), (9, 3, 0), (9, 50, 1), (30, 0, 30)]
BASES = [(0, 0), (200, 128), (64, 256)]
COPIES = [(to + here, from_ + there, size) for here, there in BASES for to, from_, size in RANGES]


def copy_all(ours: Memory, theirs: Memory) -> None:
    to, from_, size = zip(*RANGES, strict=True)
    here, there = zip(*BASES, strict=True)
    move.copy(ours.side(list(here), list(to)), theirs.side(list(there), list(from_)), lengths(*size))


def test_copy_by_the_kernel() -> None:
    check(COPIES, 400, copy_all)


@pytest.mark.parametrize("code", sorted(move.DENIED))
@pytest.mark.parametrize("counts", [[], [3]])
def test_copy_by_memmove_where_the_kernel_may_not(
    monkeypatch: pytest.MonkeyPatch, code: int, counts: list[int]
) -> None:
    kernel = ShortKernel(iter(counts), OSError(code, "injected"))
    monkeypatch.setattr(syscalls, "process_vm_readv", kernel)
    check(COPIES, 400, copy_all)
    assert len(kernel.calls) == len(counts)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.ENOSYS])
def test_denied_is_what_sandboxes_answer(code: int) -> None:
    assert code in move.DENIED


def test_copy_does_not_hide_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "process_vm_readv", ShortKernel(iter([]), OSError(errno.EIO, "injected")))
    ours = Memory(b"\xff" * 400)
    with pytest.raises(OSError, match="injected"):
        copy_all(ours, Memory(bytes(400)))
    assert ours.bytes.tobytes() == b"\xff" * 400


@settings(max_examples=200, deadline=None)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 60)), min_size=1, max_size=8),
    sources=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    denied=st.booleans(),
)
def test_copy_moves_the_same_ranges_after_every_base(
    ranges: list[tuple[int, int, int]], sources: list[int], denied: bool
) -> None:
    offsets, at = [], 0
    for length, gap, _ in ranges:
        offsets.append(at + gap)
        at += gap + length
    targets = [at * n for n in range(len(sources))]
    spans = [
        (target + to, source + from_, length)
        for target, source in zip(targets, sources, strict=True)
        for to, (length, _, from_) in zip(offsets, ranges, strict=True)
    ]

    def run(ours: Memory, theirs: Memory) -> None:
        sides = ours.side(targets, offsets), theirs.side(sources, [from_ for *_, from_ in ranges])
        with pytest.MonkeyPatch.context() as patch:
            if denied:
                kernel = ShortKernel(iter([]), OSError(errno.EPERM, "injected"))
                patch.setattr(syscalls, "process_vm_readv", kernel)
            move.copy(*sides, lengths(*(length for length, *_ in ranges)))

    check(spans, 140 + at * len(sources), run)


def test_copy_of_more_than_a_call_takes_looks_before_each() -> None:
    looks: list[None] = []
    spans = [(2000 * base + 2 * n, 5 * n, 2) for base in range(5) for n in range(500)]

    def run(ours: Memory, theirs: Memory) -> None:
        target = ours.side([2000 * base for base in range(5)], [2 * n for n in range(500)])
        source = theirs.side([0] * 5, [5 * n for n in range(500)])
        move.copy(target, source, lengths(*[2] * 500), lambda: looks.append(None))

    check(spans, 10_000, run)
    assert len(looks) == 3  # two bases fit one call


def test_a_checkpoint_that_raises_stops_before_the_next_call() -> None:
    class StopError(Exception):
        pass

    looks = iter([None, StopError()])

    def look() -> None:
        if (error := next(looks)) is not None:
            raise error

    ours, theirs = Memory(b"\xff" * 4000), Memory(bytes(4000))
    offsets = [2 * n for n in range(1500)]
    with pytest.raises(StopError):
        move.copy(ours.side([0], offsets), theirs.side([0], offsets), lengths(*[1] * 1500), look)
    assert (ours.bytes[: 2 * 1024 : 2] == 0).all()
    assert (ours.bytes[2 * 1024 :] == 255).all()


@pytest.mark.parametrize("denied", [False, True])
def test_copy_of_a_span_longer_than_a_piece(monkeypatch: pytest.MonkeyPatch, denied: bool) -> None:
    size = MAX_PIECE + 3 * PAGE + 5
    looks: list[None] = []
    if denied:
        monkeypatch.setattr(syscalls, "process_vm_readv", ShortKernel(iter([]), OSError(errno.EPERM, "injected")))
    with mmap.mmap(-1, size + PAGE) as source, mmap.mmap(-1, size + PAGE) as target:
        for at in (0, MAX_PIECE - 1, MAX_PIECE, size - 1):
            source[at] = 1 + at % 250
        source[size] = 77
        at_source, at_target = (np.frombuffer(each, dtype=np.uint8).ctypes.data for each in (source, target))
        ends = (Side(np.array([at], dtype=np.uint64), lengths(0)) for at in (at_target, at_source))
        move.copy(*ends, lengths(size), lambda: looks.append(None))
        assert [target[at] for at in (0, MAX_PIECE - 1, MAX_PIECE, size - 1, size)] == [
            *(1 + at % 250 for at in (0, MAX_PIECE - 1, MAX_PIECE, size - 1)),
            0,
        ]
    assert len(looks) >= 2


def test_copy_stops_when_the_checkpoint_raises() -> None:
    def look() -> None:
        raise TimeoutError

    ours = Memory(b"\xff" * 8)
    with pytest.raises(TimeoutError):
        move.copy(ours.side([0], [0]), Memory(bytes(8)).side([0], [0]), lengths(8), look)
    assert ours.bytes.tobytes() == b"\xff" * 8


# scatter and mapped


@settings(max_examples=200, deadline=None)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=8), part=st.floats(0.01, 1)
)
def test_scatter_fills_the_first_ranges_and_no_byte_more(ranges: list[tuple[int, int]], part: float) -> None:
    spans, at = [], 0
    for length, gap in ranges:
        spans.append((at + gap, length))
        at += gap + length
    data = bytes(range(1, 1 + sum(length for _, length in spans)))
    data = data[: max(1, int(part * len(data)))]
    if not data:
        return
    memory, expected = Memory(b"\xff" * 128), bytearray(b"\xff" * 128)
    order = iter(data)
    for start, length in spans:
        for byte, value in zip(range(length), order, strict=False):
            expected[start + byte] = value
    move.scatter(memoryview(data), memory.iovecs(spans))
    assert memory.bytes.tobytes() == bytes(expected)


def test_scatter_into_nowhere_raises() -> None:
    memory = np.array([[4096, 8]], dtype=np.uint64)
    with pytest.raises(MemoryFaultError):
        move.scatter(memoryview(b"12345678"), memory)


def test_mapped_tells_memory_that_can_be_read(guarded: Guarded) -> None:
    good = [guarded.base, guarded.base + 2 * PAGE - 1, guarded.base + 3 * PAGE]
    assert move.mapped([])
    assert move.mapped(good)
    assert move.mapped(good * 1000)
    for bad in (*NOT_MAPPED, guarded.hole, guarded.hole + PAGE - 1):
        assert not move.mapped([bad])
        assert not move.mapped([*good * 1000, bad])
        assert not move.mapped([*good[:1] * 1023, bad, *good])


@pytest.mark.parametrize("code", sorted(move.DENIED))
def test_mapped_gives_the_benefit_of_the_doubt_where_it_may_not_look(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def denied(*_: object) -> int:
        raise OSError(code, "injected")

    monkeypatch.setattr(syscalls, "peek", denied)
    assert move.mapped([4096])
