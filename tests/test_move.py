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
from llm_datadist.memory.iovec import MAX_PIECE
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


def move_with(
    kernel: ShortKernel, spans: list[tuple[int, int, int]], looks: list[None] | None = None
) -> Callable[[Memory, Memory], None]:
    def run(ours: Memory, theirs: Memory) -> None:
        local = ours.iovecs([(to, length) for to, _, length in spans])
        remote = theirs.iovecs([(from_, length) for _, from_, length in spans])
        move.move(kernel, PID, local, remote, lambda: (looks if looks is not None else []).append(None))

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


def test_many_entries_go_in_several_calls_with_a_look_before_each() -> None:
    spans = [(2 * n, 3 * n, 2) for n in range(2500)]
    looks: list[None] = []
    kernel = ShortKernel(iter([]))
    check(spans, 7600, move_with(kernel, spans, looks))
    assert [count for count, _ in kernel.calls] == [1024, 1024, 452]
    assert len(looks) == 3


def test_a_short_count_in_a_later_batch() -> None:
    spans = [(2 * n, 3 * n, 2) for n in range(1100)]
    kernel = ShortKernel(iter([2048, 1, 5, 3]))
    check(spans, 3400, move_with(kernel, spans))
    assert [moved for _, moved in kernel.calls] == [2048, 1, 5, 3, 152 - 9]


def test_a_checkpoint_that_raises_stops_before_the_next_batch() -> None:
    class StopError(Exception):
        pass

    looks = iter([None, StopError()])

    def look() -> None:
        if (error := next(looks)) is not None:
            raise error

    ours, theirs = Memory(b"\xff" * 4000), Memory(bytes(4000))
    spans = [(2 * n, 1) for n in range(1500)]
    kernel = ShortKernel(iter([]))
    with pytest.raises(StopError):
        move.move(kernel, PID, ours.iovecs(spans), theirs.iovecs(spans), look)
    assert [count for count, _ in kernel.calls] == [1024]
    assert (ours.bytes[: 2 * 1024 : 2] == 0).all()
    assert (ours.bytes[2 * 1024 :] == 255).all()


@pytest.mark.parametrize("code", [errno.EFAULT, errno.ENOMEM])
@pytest.mark.parametrize("counts", [[], [1], [3], [4, 1], [7]])
def test_a_fault_is_a_fault_at_any_point(code: int, counts: list[int]) -> None:
    ours, theirs = Memory(b"\xff" * 32), Memory(bytes(32))
    kernel = ShortKernel(iter(counts), OSError(code, "injected"))
    local, remote = ours.iovecs([(a, n) for a, _, n in SPANS]), theirs.iovecs([(b, n) for _, b, n in SPANS])
    with pytest.raises(MemoryFaultError, match="registered memory must stay mapped") as caught:
        move.move(kernel, PID, local, remote, lambda: None)
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
def test_the_kernel_moves_more_entries_than_one_call_takes(call: move.VmCall) -> None:
    writing = call is syscalls.process_vm_writev
    spans = [(3 * n, 4 * n, 3) for n in range(3000)]

    def run(ours: Memory, theirs: Memory) -> None:
        target, source = ours.iovecs([(a, n) for a, _, n in spans]), theirs.iovecs([(b, n) for _, b, n in spans])
        local, remote = (source, target) if writing else (target, source)
        move.move(call, PID, local, remote, lambda: None)

    check(spans, 12_000, run)


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
        move.move(call, PID, local, remote, lambda: None)


@pytest.mark.parametrize("address", NOT_MAPPED)
@pytest.mark.parametrize("destination_is_bad", [True, False])
def test_copy_to_or_from_nowhere_raises(address: int, destination_is_bad: bool) -> None:
    good = Memory(b"g" * 64)
    sides = [np.array([address], dtype=np.uint64), good.addresses([0])]
    with pytest.raises(MemoryFaultError):
        move.copy(*(sides if destination_is_bad else sides[::-1]), lengths(8))
    assert good.bytes.tobytes() == b"g" * 64


def test_copy_into_memory_that_is_only_readable_raises() -> None:
    constant = ctypes.create_string_buffer(b"keep", 4)
    with mmap.mmap(-1, PAGE, prot=mmap.PROT_READ) as mapped:
        at = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
        with pytest.raises(MemoryFaultError):
            move.copy(
                np.array([at], dtype=np.uint64), np.array([ctypes.addressof(constant)], dtype=np.uint64), lengths(4)
            )
        assert mapped[:4] == bytes(4)


def test_a_process_that_does_not_exist_is_an_os_error() -> None:
    with pytest.raises(ProcessLookupError):
        move.move(
            syscalls.process_vm_readv, 2**22 + 1, *(Memory(bytes(8)).iovecs([(0, 8)]) for _ in range(2)), lambda: None
        )


# copy


COPIES = [(0, 100, 7), (9, 3, 0), (9, 50, 1), (30, 0, 30)]


def copy_all(ours: Memory, theirs: Memory) -> None:
    to, from_, size = zip(*COPIES, strict=True)
    move.copy(ours.addresses(list(to)), theirs.addresses(list(from_)), lengths(*size))


def test_copy_by_the_kernel() -> None:
    check(COPIES, 128, copy_all)


@pytest.mark.parametrize("code", sorted(move.DENIED))
@pytest.mark.parametrize("counts", [[], [3]])
def test_copy_by_memmove_where_the_kernel_may_not(
    monkeypatch: pytest.MonkeyPatch, code: int, counts: list[int]
) -> None:
    kernel = ShortKernel(iter(counts), OSError(code, "injected"))
    monkeypatch.setattr(syscalls, "process_vm_readv", kernel)
    check(COPIES, 128, copy_all)
    assert len(kernel.calls) == len(counts)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.ENOSYS])
def test_denied_is_what_sandboxes_answer(code: int) -> None:
    assert code in move.DENIED


def test_copy_does_not_hide_other_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "process_vm_readv", ShortKernel(iter([]), OSError(errno.EIO, "injected")))
    ours = Memory(b"\xff" * 128)
    with pytest.raises(OSError, match="injected"):
        copy_all(ours, Memory(bytes(128)))
    assert ours.bytes.tobytes() == b"\xff" * 128


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
        ends = (np.array([at], dtype=np.uint64) for at in (at_target, at_source))
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
        move.copy(ours.addresses([0]), Memory(bytes(8)).addresses([0]), lengths(8), look)
    assert ours.bytes.tobytes() == b"\xff" * 8
