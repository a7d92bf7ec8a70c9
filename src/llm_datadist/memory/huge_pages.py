"""Huge pages under memory that is copied between processes: in 4 KiB pages, half of a copy goes into finding them.

Everything here is advice. It changes no byte, names no address outside the ranges it is given, takes bounded time, and
where the kernel declines, the memory stays as it is. The interpreter lock is free while the kernel works. A range is a
pair of addresses: first byte, end.
"""

from __future__ import annotations

import bisect
import ctypes
import enum
import errno
import functools
import mmap
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llm_datadist.utils.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Range = tuple[int, int]

BASE_BUDGET_S: Final = 1.0
BUDGET_S_PER_GIB: Final = 0.5
"""One GiB of 4 KiB pages took 0.15 to 0.6 s to collapse, and longer to fault in before: the cost stays below that.

In a virtual machine whose host has yet to provide the memory that goes into huge pages it took 4 to 5.6 s."""

_SYSTEM: Final = Path("/sys/kernel/mm/transparent_hugepage")
_PIECE: Final = 32 << 20
"""Bytes of one system call: some 50 ms, after which the time is looked at."""
_FEW_HINTS: Final = 64
_MAX_MAPPINGS: Final = 32_000
"""A process has 65,530 in all."""

_MS_ASYNC: Final = 1
_MADV_DONTFORK: Final = 10
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_READ: Final = 22
_MADV_COLLAPSE: Final = 25
_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.madvise, _libc.msync):
    _call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


class Outcome(enum.Enum):
    """Why memory that was advised may not be in huge pages."""

    DONE = enum.auto()
    REFUSED = enum.auto()
    """Some of it was not touched yet (it gets huge pages when it is), or is of a kind that cannot have them."""
    UNMAPPED = enum.auto()
    """There is a hole in it: it was left alone from hole to hole."""
    NO_MEMORY = enum.auto()
    """There was no huge page left."""
    OUT_OF_TIME = enum.auto()
    UNDER_WAY = enum.auto()
    """The time was over, and the rest follows in the background."""
    UNSUPPORTED = enum.auto()
    """The kernel cannot do it on demand: it is older than 6.1, or built without huge pages."""


FINAL: Final = (Outcome.NO_MEMORY, Outcome.OUT_OF_TIME, Outcome.UNSUPPORTED)
"""After these, further attempts are of no use for now."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What became of a call of ``advise``."""

    whole: int
    """Bytes in whole huge pages within the ranges."""
    huge: int
    """Bytes of them that are known to be in huge pages now."""
    seconds: float
    outcome: Outcome
    """The last thing that went wrong, if anything did."""


@functools.cache
def page_size() -> int:
    """Bytes of a huge page; 0 if the kernel has none."""
    try:
        return int((_SYSTEM / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def switched_off() -> bool:
    """Whether the system gives no huge page to memory that is touched for the first time, hint or not."""
    try:
        return "[never]" in (_SYSTEM / "enabled").read_text()
    except OSError:
        return True


def join(ranges: Iterable[Range]) -> list[Range]:
    """The same bytes in as few ranges as possible, sorted."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def whole_pages(ranges: Iterable[Range], page: int) -> list[Range]:
    """All aligned pages of ``page`` bytes within the union of the ranges, in few, sorted ranges; none if it is 0."""
    if not page:
        return []
    inner = ((-(-start // page) * page, end // page * page) for start, end in join(ranges))
    return [(start, end) for start, end in inner if start < end]


def total(ranges: Iterable[Range]) -> int:
    """Bytes in all ranges together; they must not overlap."""
    return sum(end - start for start, end in ranges)


def advise(ranges: Iterable[Range], *, populate: bool = False, budget_s: float | None = None) -> Advice:
    """Put huge pages under the ranges, as far as they fit in: now where the memory is in use, else when it is touched.

    Takes ``budget_s`` seconds, or a second and half a second a GiB, and at most one more piece of 32 MiB. What time
    does not suffice for (OUT_OF_TIME) is left to ``pieces`` and ``collapse``, or to the kernel's own daemon. A piece
    that is in huge pages already costs some 7 us.
    Never raises.

    Args:
        ranges: they may overlap, touch, and name memory that is not mapped.
        populate: fill huge pages that are not in use yet, too. Shared memory needs it: most systems give it no huge
            page when it is touched.
        budget_s: 0 only hints.
    """
    began = time.monotonic()
    page = page_size()
    stretches = whole_pages(ranges, page)
    whole, huge = total(stretches), 0
    seconds = BASE_BUDGET_S + BUDGET_S_PER_GIB * whole / (1 << 30) if budget_s is None else budget_s
    deadline = Deadline.after(seconds)
    supported = page and not _madvise((0, 0), _MADV_COLLAPSE)
    outcome = Outcome.DONE if supported else Outcome.UNSUPPORTED
    hinting = _room_for_hints(len(stretches))
    for stretch in stretches:
        if _has_hole(stretch):
            outcome = Outcome.UNMAPPED if outcome is Outcome.DONE else outcome
            continue
        if hinting:
            _madvise(stretch, _MADV_HUGEPAGE)
        if outcome not in FINAL:
            done, problem = _collapse(stretch, deadline, populate=populate)
            huge += done
            outcome = outcome if problem is Outcome.DONE else problem
    return Advice(whole, huge, time.monotonic() - began, outcome)


def _room_for_hints(count: int) -> bool:
    """Whether so many hints leave the process enough mappings: each may cut one in three, and that is not undone."""
    if count <= _FEW_HINTS:
        return True
    try:
        with Path("/proc/self/maps").open("rb") as lines:
            mappings = sum(1 for _ in lines)
    except OSError:
        return False
    return mappings + 2 * count <= _MAX_MAPPINGS


def _collapse(stretch: Range, deadline: Deadline, *, populate: bool) -> tuple[int, Outcome]:
    """Collapse piece by piece until the deadline; bytes known to be in huge pages, and what went wrong."""
    huge, outcome = 0, Outcome.DONE
    for piece in pieces([stretch], _PIECE):
        if deadline.expired():
            return huge, Outcome.OUT_OF_TIME
        done, problem = collapse(piece, populate=populate)
        huge += done
        if problem in FINAL:
            return huge, problem
        outcome = outcome if problem is Outcome.DONE else problem
    return huge, outcome


def pieces(ranges: Iterable[Range], size: int) -> Iterator[Range]:
    """All whole huge pages within the ranges, in pieces of at most ``size`` bytes, or of one page."""
    page = page_size()
    step = max(page, size // page * page) if page else size
    for start, end in whole_pages(ranges, page):
        for at in range(start, end, step):
            yield at, min(at + step, end)


def collapse(piece: Range, *, populate: bool = False) -> tuple[int, Outcome]:
    """Move whole pages that are in use into huge pages; bytes known to be in huge pages, and what went wrong."""
    page = page_size()
    if _has_hole(piece):
        return 0, Outcome.UNMAPPED
    pages = [(start, start + page) for start in range(*piece, page)]
    if populate:
        for start, _ in pages:
            _madvise((start, start + 1), _MADV_POPULATE_READ)
    problem = _madvise(piece, _MADV_COLLAPSE)
    if not problem:
        return piece[1] - piece[0], Outcome.DONE
    if problem in (errno.ENOMEM, errno.EBUSY):  # each further attempt could make the kernel look for long
        return 0, Outcome.NO_MEMORY
    # A page that is not in use ends the call, and those behind it were not looked at.
    done = page * [_madvise(each, _MADV_COLLAPSE) for each in pages].count(0)
    return done, Outcome.DONE if done == piece[1] - piece[0] else Outcome.REFUSED


def _has_hole(where: Range) -> bool:
    return bool(_libc.msync(where[0], where[1] - where[0], _MS_ASYNC))  # does nothing, but fails where there is one


def _madvise(where: Range, advice: int) -> int:
    """``madvise``; 0 or the error number."""
    return ctypes.get_errno() if _libc.madvise(where[0], where[1] - where[0], advice) else 0


def map_shared(fd: int, length: int) -> int:
    """Map ``length`` bytes of a file for reading and writing, shared; the address.

    It is a multiple of the huge page size: where address and offset are not in step, no huge page can be mapped, not
    even one that the file has already.

    Raises:
        OSError: it cannot be mapped.
    """
    align = page_size() or mmap.PAGESIZE
    reserved = _mmap(None, length + align, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-reserved // align) * align
    try:
        _mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        unmap(reserved, length + align)
        raise
    end = -(-(address + length) // mmap.PAGESIZE) * mmap.PAGESIZE
    unmap(reserved, address - reserved)
    unmap(end, reserved + length + align - end)
    return address


def keep_from_forks(address: int, length: int) -> None:
    """Let children that are forked later go without this mapping: they would keep its memory in use."""
    _madvise((address, address + length), _MADV_DONTFORK)


def unmap(address: int, length: int) -> None:
    """Undo ``map_shared``."""
    if length > 0:
        _libc.munmap(address, length)


def _mmap(address: int | None, length: int, protection: int, flags: int, fd: int) -> int:
    mapped: int | None = _libc.mmap(address, length, protection, flags, fd, 0)
    if mapped is None or mapped == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {length} bytes: {os.strerror(code)}")
    return mapped


@dataclass(frozen=True, slots=True)
class Usage:
    """How memory is backed at the moment, in bytes."""

    resident: int
    huge: int


_MAPPING: Final = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) ")
_COUNTERS: Final = {b"Rss": "resident", b"AnonHugePages": "huge", b"ShmemPmdMapped": "huge", b"FilePmdMapped": "huge"}


def usage(ranges: Iterable[Range]) -> Usage | None:
    """How the ranges are backed, as the kernel counts it; None if it does not say.

    Of a mapping that lies only partly within the ranges the counted bytes are taken to be those within, as far as they
    fit. Takes some milliseconds for each thousand mappings of the process, and more where they are large.
    """
    spans = join(ranges)
    sums = {"resident": 0, "huge": 0}
    try:
        with Path("/proc/self/smaps").open("rb") as lines:
            room: dict[str, int] = {}
            for line in lines:
                mapping = _MAPPING.match(line)
                if mapping:
                    room = dict.fromkeys(sums, _overlap(spans, int(mapping[1], 16), int(mapping[2], 16)))
                    continue
                name, _, value = line.partition(b":")
                counter = _COUNTERS.get(name)
                if counter and room.get(counter):
                    counted = min(int(value.split()[0]) << 10, room[counter])
                    room[counter] -= counted
                    sums[counter] += counted
    except OSError:
        return None
    return Usage(**sums)


def _overlap(spans: list[Range], start: int, end: int) -> int:
    """Bytes of [start, end) within joined ranges."""
    size, at = 0, bisect.bisect(spans, start, key=lambda span: span[1])
    while at < len(spans) and spans[at][0] < end:
        size += min(spans[at][1], end) - max(spans[at][0], start)
        at += 1
    return size
