"""Arrays of ``struct iovec`` built with numpy: split, batched, advanced after short counts.

An iovec array is a C-contiguous ``uint64`` array of shape ``(n, 2)``: address, length.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.memory.syscalls import MAX_IOVECS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]

MAX_PIECE: Final = 64 << 20
"""Bytes of the longest entry, and of one batch: what may pass between two looks at the deadline."""


def pair(addresses: U64, lengths: I64) -> U64:
    """The iovec array of these addresses and lengths."""
    iovecs = np.empty((len(addresses), 2), dtype=np.uint64)
    iovecs[:, 0] = addresses
    iovecs[:, 1] = lengths
    return iovecs


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


def batches(lengths: I64, max_entries: int = MAX_IOVECS) -> Iterator[tuple[int, int]]:
    """Cut entries into runs ``[start, stop)`` of at most ``max_entries`` entries and ``MAX_PIECE`` bytes.

    No entry may be longer than that (``split_long``).
    """
    count = len(lengths)
    ends = np.cumsum(lengths)
    start = 0
    done = 0
    while start < count:
        stop = int(np.searchsorted(ends, done + MAX_PIECE, side="right"))
        stop = min(stop, start + max_entries, count)
        yield start, stop
        start = stop
        done = int(ends[stop - 1])


def share(lengths: I64, parts: int) -> list[tuple[int, int]]:
    """Cut entries into at most ``parts`` runs of about the same number of bytes."""
    if parts == 1:
        return [(0, len(lengths))] if len(lengths) else []
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    marks = np.array([int(bounds[-1]) * part // parts for part in range(1, parts)], dtype=np.int64)
    above = np.searchsorted(bounds, marks)
    below = np.maximum(above - 1, 0)
    nearest = np.where(bounds[above] - marks <= marks - bounds[below], above, below)
    cuts = [0, *nearest.tolist(), len(lengths)]
    return [(a, b) for a, b in itertools.pairwise(cuts) if a < b]


class Cursor:
    """A position in one iovec array that a partially successful call moves forward.

    Consumed entries are skipped and a partly consumed one is shortened in place, so the array is used up by it.
    """

    def __init__(self, iovecs: U64) -> None:
        self._iovecs = iovecs
        self._ends = np.cumsum(iovecs[:, 1].astype(np.int64))
        self._index = 0
        self._done = 0
        self.total = int(self._ends[-1]) if len(iovecs) else 0

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
        """Address of the next entry and how many entries one call may take."""
        return self._iovecs.ctypes.data + 16 * self._index, min(MAX_IOVECS, len(self._iovecs) - self._index)

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
