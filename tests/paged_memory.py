"""Real memory in 4 KiB pages, and what the kernel says of it, for the tests of huge pages."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist.memory import huge_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 2 << 20
usual_pages = pytest.mark.skipif(huge_pages.page_size() != PAGE, reason="the kernel has no huge pages of 2 MiB")
NOHUGEPAGE = 15
_with_holes: list[Paged] = []
_libc = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Paged:
    """``pages`` times the size of a huge page, aligned to it, in small pages of random content.

    There are as many small pages before and behind it, so that advice that goes too far is seen.
    """

    def __init__(self, pages: int, *, filled: bool = True, fd: int = -1) -> None:
        self.size = pages * PAGE
        length = self.size + 3 * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd < 0 else mmap.MAP_SHARED
        self._map = mmap.mmap(fd, length, flags=flags)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.start = -(-first // PAGE) * PAGE + PAGE
        self.end = self.start + self.size
        _libc.madvise(first, length, NOHUGEPAGE)
        everything = np.frombuffer(self._map, dtype=np.uint8)
        if filled:
            everything[:] = np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)
        self.bytes = everything[self.start - first :][: self.size]
        self.around = first, first + length

    def protect(self) -> None:
        """Make it read-only."""
        assert _libc.mprotect(self.start, self.size, mmap.PROT_READ) == 0

    def unprotect(self) -> None:
        """Make it writable again."""
        assert _libc.mprotect(self.start, self.size, mmap.PROT_READ | mmap.PROT_WRITE) == 0

    def unmap(self, first: int, pages: int) -> None:
        """Make a hole of small pages; the numbers count small pages."""
        _with_holes.append(self)  # its end would unmap what is in the hole by then
        huge_pages.unmap(self.start + first * mmap.PAGESIZE, pages * mmap.PAGESIZE)

    @property
    def huge(self) -> int:
        """Huge pages in it, and around it: there must be none of these."""
        return sum(bytes_in_huge_pages(*self.around)) // PAGE

    @property
    def hinted(self) -> int:
        """Bytes that the kernel was asked to give huge pages, in it and around it."""
        return sum(size for size, flags in _flags(*self.around) if "hg" in flags)


def _smaps(start: int, end: int) -> Iterator[tuple[int, dict[str, str]]]:
    """Size and counters of each mapping that touches the range."""
    text = Path("/proc/self/smaps").read_text()
    for block in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)[1:]:
        head, *lines = block.splitlines()
        low, high = (int(part, 16) for part in head.split()[0].split("-"))
        if low < end and high > start:
            yield high - low, {name: value for name, _, value in (line.partition(":") for line in lines)}


def bytes_in_huge_pages(start: int, end: int) -> list[int]:
    """Of each mapping that touches the range."""
    names = "AnonHugePages", "ShmemPmdMapped", "FilePmdMapped"
    return [sum(int(lines[name].split()[0]) << 10 for name in names) for _, lines in _smaps(start, end)]


def _flags(start: int, end: int) -> list[tuple[int, list[str]]]:
    return [(size, lines["VmFlags"].split()) for size, lines in _smaps(start, end)]


def need_collapse() -> None:
    """Skip the test where the kernel does not move memory into huge pages on demand."""
    memory = Paged(1)
    if not huge_pages.advise([(memory.start, memory.end)]).huge:
        pytest.skip("this kernel does not move memory into huge pages on demand")
