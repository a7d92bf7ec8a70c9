"""Memory that processes of one host share: memfds of an owner, mapped by those who were given their descriptors."""

from __future__ import annotations

import fcntl
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llm_datadist.memory import huge_pages

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]


class NotSealedError(Exception):
    """A descriptor leads to something that must not be mapped."""


class Area(NamedTuple):
    """A whole memfd that its owner has mapped."""

    fd: int
    base: int
    """Address in the owner's process."""
    length: int
    """Bytes."""


def create(name: str, length: int) -> Area:
    """A new memfd, sealed against shrinking: zeroed memory, mapped at the boundary of a huge page.

    Raises:
        OSError: there is no such room.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, length)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return Area(fd, huge_pages.map_shared(fd, length), length)
    except BaseException:
        os.close(fd)
        raise


def release(area: Area) -> None:
    """Undo ``create``, once."""
    os.close(area.fd)
    huge_pages.unmap(area.base, area.length)


def check_sealed(fd: int, length: int, name: str) -> None:
    """Refuse what could be truncated under our eyes, which would end this process with SIGBUS.

    Raises:
        NotSealedError: it is no memfd of ``length`` bytes, or not sealed against shrinking.
    """
    facts = os.fstat(fd)
    seals = 0
    if stat.S_ISREG(facts.st_mode) and facts.st_size == length:
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:  # an ordinary file
            seals = 0
    if not seals & fcntl.F_SEAL_SHRINK:
        message = f"{name} is not a memfd of {length} bytes that is sealed against shrinking"
        raise NotSealedError(message)


class Mapping:
    """Areas of another process, mapped here for reading and writing. Forked children do not get them."""

    def __init__(self, areas: Iterable[Area]) -> None:
        """Map them; each ``fd`` is a descriptor of this process, which is not needed afterwards.

        Raises:
            NotSealedError: what a descriptor leads to is not fit to be mapped.
            OSError: it cannot be mapped.
        """
        self._here: list[tuple[int, int]] = []
        ordered = sorted(areas, key=lambda area: area.base)
        try:
            for area in ordered:
                check_sealed(area.fd, area.length, "a shared area")
                self._here.append((huge_pages.map_shared(area.fd, area.length), area.length))
                huge_pages.keep_from_forks(*self._here[-1])
        except BaseException:
            self.close()
            raise
        self._bases = np.array([area.base for area in ordered], dtype=np.uint64)
        self._lengths = np.array([area.length for area in ordered], dtype=np.uint64)
        self._starts = np.array([address for address, _ in self._here], dtype=np.uint64)

    @property
    def total(self) -> int:
        """Bytes of all areas."""
        return sum(length for _, length in self._here)

    def locate(self, addresses: U64, end: int) -> U64 | None:
        """Where these addresses of the owner are here; None unless all ``end`` bytes after each are in one area."""
        at = np.searchsorted(self._bases, addresses, side="right") - 1
        if len(at) and int(at.min()) < 0:
            return None
        offsets = addresses - self._bases[at]
        lengths = self._lengths[at]
        if (offsets > lengths).any() or (lengths - offsets < np.uint64(end)).any():
            return None
        located: U64 = self._starts[at] + offsets
        return located

    def close(self) -> None:
        """Unmap them; idempotent."""
        here, self._here = self._here, []
        for address, length in here:
            huge_pages.unmap(address, length)
