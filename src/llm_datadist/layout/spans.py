"""Spans: which bytes move.

The same runs move in every pair of tensors, so spans are kept as what they are, a product: as many numbers as there are
tensors plus as many as there are runs. Whatever is checked or planned costs that much, not one step a span.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist.memory import iovec
from llm_datadist.memory.devices import HOST_ONLY

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llm_datadist.memory.devices import Devices
    from llm_datadist.memory.iovec import Part

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]


class LayoutError(ValueError):
    """The two sides do not fit each other, or an index is out of range; nothing may be moved."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Byte ranges inside one tensor pair, the same for every tensor: local offset, remote offset, length."""

    local: I64
    remote: I64
    lengths: I64

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, part: slice) -> Runs:
        return Runs(self.local[part], self.remote[part], self.lengths[part])

    @property
    def total(self) -> int:
        """Bytes of all runs."""
        return int(self.lengths.sum())

    @property
    def extent(self) -> tuple[int, int]:
        """Lowest offset and highest end on the remote side."""
        if not len(self.lengths):
            return 0, 0
        return int(self.remote.min()), int((self.remote + self.lengths).max())

    def cut(self) -> Runs:
        """The same bytes in runs of at most ``iovec.MAX_PIECE``."""
        cut = iovec.split_long(self.lengths)
        if cut is None:
            return self
        lengths, owner, start = cut
        return Runs(self.local[owner] + start, self.remote[owner] + start, lengths)


@dataclass(frozen=True, slots=True)
class Spans:
    """What one transfer moves: every run in every tensor pair, tensor by tensor.

    Run ``j`` of tensor ``i`` is at ``bases[i] + runs.local[j]`` in this process, and at ``starts[i] + runs.remote[j]``
    in region ``regions[i]`` of the peer.
    """

    bases: U64
    """Absolute address of each local tensor."""
    regions: U64
    """Region of the peer in which its counterpart lies."""
    starts: I64
    """Where in that region, bytes."""
    runs: Runs
    devices: Devices = HOST_ONLY
    """In which memory all of either side is."""

    @property
    def total(self) -> int:
        """Bytes of all spans."""
        return len(self.bases) * self.runs.total

    def __len__(self) -> int:
        return len(self.bases) * len(self.runs)

    def __getitem__(self, part: Part) -> Spans:
        tensors, runs = part
        return Spans(self.bases[tensors], self.regions[tensors], self.starts[tensors], self.runs[runs], self.devices)

    @property
    def here(self) -> iovec.Side:
        """The local side."""
        return iovec.Side(self.bases, self.runs.local)

    @classmethod
    def single(cls, address: int, region: int, size: int) -> Spans:
        """``size`` bytes here and at the start of a region."""
        local, regions = np.array([[address], [region]], dtype=np.uint64)
        zero = np.zeros(1, dtype=np.int64)
        return cls(local, regions, zero, Runs(zero, zero, np.array([size], dtype=np.int64)))

    def cut(self) -> Spans:
        """The same bytes in spans of at most ``iovec.MAX_PIECE``."""
        runs = self.runs.cut()
        return self if runs is self.runs else Spans(self.bases, self.regions, self.starts, runs, self.devices)


def merge(local: I64, remote: I64, lengths: I64) -> Runs:
    """Join neighbours in list order that are adjacent on both sides; drop empty ones.

    Neighbours may also go down: allocators hand out blocks in the order in which they were freed, often the last first.
    """
    if not lengths.all():
        keep = lengths > 0
        local, remote, lengths = local[keep], remote[keep], lengths[keep]
    runs = _join(Runs(local, remote, lengths))
    while len(joined := _join(runs[::-1])) < len(runs):
        runs = _join(joined[::-1])
    return runs


def _join(runs: Runs) -> Runs:
    """Join those that begin where the one before ends."""
    if len(runs) < 2:  # noqa: PLR2004 - nothing to join
        return runs
    local, remote, lengths = runs.local, runs.remote, runs.lengths
    heads = np.empty(len(lengths), dtype=bool)
    heads[0] = True
    np.not_equal(local[1:], local[:-1] + lengths[:-1], out=heads[1:])
    heads[1:] |= remote[1:] != remote[:-1] + lengths[:-1]
    if heads.all():
        return runs
    starts = np.flatnonzero(heads)
    return Runs(local[starts], remote[starts], np.add.reduceat(lengths, starts))
