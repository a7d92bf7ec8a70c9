"""How far a transfer came that failed: which of its bytes are surely in place, and which blocks that makes whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llm_datadist.layout.spans import Runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llm_datadist.memory.iovec import Part

    I64 = NDArray[np.int64]


class Progress:
    """The parts of some spans that are surely in place. Any thread may mark parts; none is marked twice.

    A path marks what it has moved as it goes; the arithmetic is done only when somebody asks, after a failure.
    """

    __slots__ = ("_parts", "_runs", "_tensors")

    def __init__(self, tensors: int, runs: Runs) -> None:
        """Of the spans "every one of ``runs`` in every one of ``tensors`` tensors", nothing is in place yet."""
        self._tensors = tensors
        self._runs = runs
        self._parts: list[Part] = []

    def mark(self, part: Part) -> None:
        """All of a part is in place."""
        self._parts.append(part)

    def mark_begin(self, part: Part, size: int) -> None:
        """The first ``size`` bytes of a part, in the order of its spans, are in place; a run that is cut off is not."""
        tensors, runs = part
        first, last, _ = tensors.indices(self._tensors)
        start, stop, _ = runs.indices(len(self._runs))
        ends = np.cumsum(self._runs.lengths[start:stop])
        if not len(ends) or not ends[-1]:
            return
        whole, rest = divmod(size, int(ends[-1]))
        middle = min(first + whole, last)
        if middle > first:
            self.mark((slice(first, middle), slice(start, stop)))
        some = int(np.searchsorted(ends, rest, side="right"))
        if some and middle < last:
            self.mark((slice(middle, middle + 1), slice(start, start + some)))

    @property
    def bytes_done(self) -> int:
        """Bytes in place, at least."""
        return sum(
            len(range(*tensors.indices(self._tensors))) * self._runs[runs].total for tensors, runs in self._parts
        )

    def pending(self) -> Runs:
        """The runs that are not in place in every tensor."""
        seen = np.zeros(len(self._runs), dtype=np.int64)
        for tensors, runs in self._parts:
            seen[runs] += len(range(*tensors.indices(self._tensors)))
        left = seen < self._tensors
        return Runs(self._runs.local[left], self._runs.remote[left], self._runs.lengths[left])

    def finished_blocks(self, ids: I64, size: int, *, local: bool) -> tuple[int, ...]:
        """Which of the destination blocks ``ids``, of ``size`` bytes, are whole in every tensor; ascending.

        ``local`` tells the side on which the destination is. Of several pairs with one destination only the last one is
        among the runs, so that runs do not overlap there.
        """
        pending = self.pending()
        begins = pending.local if local else pending.remote
        order = np.argsort(begins)
        begins, ends = begins[order], (begins + pending.lengths)[order]
        blocks = np.unique(ids)
        # Of the runs that begin before the end of a block, the last one reaches furthest.
        before = np.searchsorted(begins, (blocks + 1) * size)
        reach = np.concatenate([np.zeros(1, dtype=np.int64), ends])[before]
        return tuple(blocks[reach <= blocks * size].tolist())
