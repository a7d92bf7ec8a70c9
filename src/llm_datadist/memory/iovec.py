"""Arrays of ``struct iovec`` built with numpy: split, batched, advanced after short counts.

An iovec array is a C-contiguous ``uint64`` array of shape ``(n, 2)``: address, length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from llm_datadist.memory.syscalls import MAX_IOVECS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeAlias

    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]
    Part: TypeAlias = tuple[slice, slice]
    """Which bases, and which of the byte ranges after each of them."""

MAX_PIECE: Final = 64 << 20
"""Bytes of the longest entry, and of one batch: what may pass between two looks at the deadline."""


def pair(addresses: U64, lengths: I64) -> U64:
    """The iovec array of these addresses and lengths."""
    iovecs = np.empty((len(addresses), 2), dtype=np.uint64)
    iovecs[:, 0] = addresses
    iovecs[:, 1] = lengths
    return iovecs


def product(bases: U64, offsets: I64, lengths: I64) -> U64:
    """The iovec array of the same byte ranges after every base: base by base, range by range."""
    iovecs = np.empty((len(bases), len(offsets), 2), dtype=np.uint64)
    np.add(bases[:, None], offsets.view(np.uint64), out=iovecs[:, :, 0])
    iovecs[:, :, 1] = lengths
    return iovecs.reshape(-1, 2)


class Side(NamedTuple):
    """One side of a copy: the same byte ranges after every base address."""

    bases: U64
    offsets: I64

    def iovecs(self, lengths: I64, part: Part = (slice(None), slice(None))) -> U64:
        """The iovec array of a part, or of all."""
        bases, ranges = part
        return product(self.bases[bases], self.offsets[ranges], lengths[ranges])


def parts(bases: int, lengths: I64, max_entries: int = MAX_IOVECS, max_bytes: int = MAX_PIECE) -> Iterator[Part]:
    """Cut the product of ``bases`` and byte ranges into parts of at most so many entries and bytes, in order.

    A range longer than ``max_bytes`` is a part of its own.
    """
    count, total = len(lengths), int(lengths.sum())
    if count <= max_entries and total <= max_bytes:
        step = min(max_entries // max(count, 1), max_bytes // max(total, 1))
        for first in range(0, bases, step):
            yield slice(first, first + step), slice(0, count)
        return
    pieces = [slice(start, stop) for start, stop in batches(lengths, max_entries, max_bytes)]
    for at in range(bases):
        for piece in pieces:
            yield slice(at, at + 1), piece


def split_long(lengths: I64) -> tuple[I64, I64, I64] | None:
    """How to cut entries so that none is longer than ``MAX_PIECE``; None if none is.

    Returns, for each piece: its length, the index of the entry it comes from, and its distance from that entry's start.
    """
    if not len(lengths) or int(lengths.max()) <= MAX_PIECE:
        return None
    pieces = -(-lengths // MAX_PIECE)
    owner = np.repeat(np.arange(len(lengths)), pieces)
    ordinal = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = ordinal * MAX_PIECE
    return np.minimum(lengths[owner] - start, MAX_PIECE), owner, start


def batches(lengths: I64, max_entries: int = MAX_IOVECS, max_bytes: int = MAX_PIECE) -> Iterator[tuple[int, int]]:
    """Cut entries into runs ``[start, stop)`` of at most ``max_entries`` entries and ``max_bytes`` bytes.

    A longer entry is a run of its own.
    """
    count = len(lengths)
    ends = np.cumsum(lengths)
    start = 0
    done = 0
    while start < count:
        stop = int(np.searchsorted(ends, done + max_bytes, side="right"))
        stop = max(start + 1, min(stop, start + max_entries, count))
        yield start, stop
        start = stop
        done = int(ends[stop - 1])


class Cursor:
    """A position in one iovec array that a partially successful call moves forward.

    Consumed entries are skipped and a partly consumed one is shortened in place, so the array is used up by it.
    """

    def __init__(self, iovecs: U64) -> None:
        self._iovecs = iovecs
        self._ends = np.cumsum(iovecs[:, 1].astype(np.int64))
        self._index = 0
        self._done = 0
        self.total: int = int(self._ends[-1]) if len(iovecs) else 0

    @property
    def done(self) -> int:
        """Bytes passed."""
        return self._done

    @property
    def index(self) -> int:
        """The entry in which the next byte lies."""
        return self._index

    @property
    def left(self) -> int:
        """Bytes still to pass."""
        return self.total - self._done

    def window(self) -> tuple[int, int]:
        """Address of the next entry and how many entries are left."""
        return self._iovecs.ctypes.data + 16 * self._index, len(self._iovecs) - self._index

    def advance(self, count: int) -> None:
        """Pass ``count`` bytes."""
        self._done += count
        index = int(np.searchsorted(self._ends, self._done, side="right"))
        if index < len(self._iovecs):
            left = int(self._ends[index]) - self._done
            entry = self._iovecs[index]
            entry[0] += entry[1] - np.uint64(left)
            entry[1] = left
        self._index = index
