"""Spans: which bytes move, as arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist.memory import iovec

if TYPE_CHECKING:
    from numpy.typing import NDArray

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


@dataclass(frozen=True, slots=True)
class Spans:
    """What one transfer moves. All arrays have one entry a span; a span lies in one region on the remote side."""

    local: U64
    """Absolute address in this process."""
    regions: U64
    """Region of the peer."""
    offsets: I64
    """Offset in that region, bytes."""
    lengths: I64
    """Bytes."""

    @property
    def total(self) -> int:
        """Bytes of all spans."""
        return int(self.lengths.sum())

    def cut(self) -> Spans:
        """The same bytes in spans of at most ``iovec.MAX_PIECE``."""
        cut = iovec.split_long(self.lengths)
        if cut is None:
            return self
        lengths, owner, start = cut
        return Spans(
            local=self.local[owner] + start.astype(np.uint64),
            regions=self.regions[owner],
            offsets=self.offsets[owner] + start,
            lengths=lengths,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, part: slice) -> Spans:
        return Spans(self.local[part], self.regions[part], self.offsets[part], self.lengths[part])


def merge(local: I64, remote: I64, lengths: I64) -> Runs:
    """Join neighbours in list order that are adjacent on both sides; drop empty ones."""
    if not lengths.all():
        keep = lengths > 0
        local, remote, lengths = local[keep], remote[keep], lengths[keep]
    if len(lengths) < 2:  # noqa: PLR2004 - nothing to join
        return Runs(local, remote, lengths)
    ends_local, ends_remote = local[:-1] + lengths[:-1], remote[:-1] + lengths[:-1]
    heads = np.empty(len(lengths), dtype=bool)
    heads[0] = True
    np.not_equal(local[1:], ends_local, out=heads[1:])
    heads[1:] |= remote[1:] != ends_remote
    if heads.all():
        return Runs(local, remote, lengths)
    starts = np.flatnonzero(heads)
    return Runs(local[starts], remote[starts], np.add.reduceat(lengths, starts))


def spread(runs: Runs, local_bases: U64, remote_regions: U64) -> Spans:
    """The runs in every tensor pair, tensor by tensor.

    ``local_bases`` are the addresses of the local tensors, ``remote_regions`` the regions of their counterparts,
    pairwise.
    """
    tensors, count = len(local_bases), len(runs.lengths)
    local = (local_bases[:, None] + runs.local.astype(np.uint64)[None, :]).reshape(-1)
    return Spans(
        local=local,
        regions=np.repeat(remote_regions, count),
        offsets=np.tile(runs.remote, tensors),
        lengths=np.tile(runs.lengths, tensors),
    )
