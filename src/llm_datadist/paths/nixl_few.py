"""The short way of small transfers over NIXL: lists of blocks that NIXL knows already, and one request that chooses."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.memory.move import peeker
from llm_datadist.paths.base import FEW, ConnectionLostError, Shortcut
from llm_datadist.paths.nixl_flight import Flight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llm_datadist.paths.base import TensorPairs
    from llm_datadist.paths.nixl import NixlPath
    from llm_datadist.utils.deadline import Deadline

_MOST_SIZES: Final = 4
"""Of blocks, that are prepared."""
_SHORT_BYTES: Final = 4 << 20
"""Below this, one request is enough."""


@dataclass(eq=False)
class _Blocks:
    """All blocks of one size of all tensors, on both sides, as NIXL knows them, as long as anybody refers to them."""

    size: int
    versions: tuple[int, int]
    """Of what is registered here, and of the connection to the peer."""
    here: int
    """The list of NIXL."""
    ours: int
    """Blocks of each tensor in it."""
    there: int
    theirs: int
    starts: tuple[list[int], list[int]]
    """Number of the first block of each tensor, here and there."""


class OneRequest(Shortcut):
    """One request. Its addresses are valid as long as the peer's epoch is the same.

    Where anything at all is unusual the long way does it, perhaps once more, and tells why.
    """

    def __init__(self, path: NixlPath, pairs: TensorPairs) -> None:
        super().__init__(path, pairs)
        self._nixl = path
        self._blocks: dict[int, _Blocks] = {}
        """By size."""
        self._lock = threading.Lock()
        self._tensors = range(len(pairs.bases))
        self._peek: Callable[[], int] | None = None
        """How many local tensors begin where there is memory: what NIXL does where there is none may be a crash."""

    def read(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline) -> None:
        """See ``Shortcut.read``."""
        if not self._move(size, here, there, deadline, writing=False):
            super().read(size, here, there, deadline)

    def write(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline) -> None:
        """See ``Shortcut.write``."""
        if not self._move(size, here, there, deadline, writing=True):
            super().write(size, here, there, deadline)

    def _move(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline, *, writing: bool) -> bool:
        path, tensors = self._nixl, self._tensors
        spans = len(here) * len(tensors)
        if spans > FEW or size * spans >= _SHORT_BYTES or path.aborted or deadline.expired():
            return False
        look = path.remote.borrow()
        if look is None:
            return False
        with Flight(path, look, deadline) as flight:
            flight.bases = self._pairs.bases
            blocks = self._prepared(size)
            if blocks is None or not (0 <= min(here) <= max(here) < blocks.ours) or min(there) < 0:
                return False
            if max(there) >= blocks.theirs or not look.is_in(self._pairs.epoch, flight.run):
                return False
            if self._peek is not None and self._peek() != len(tensors):
                return False
            near, far = blocks.starts
            ours = [start + block for block in here for start in near]
            theirs = [start + block for block in there for start in far]
            try:
                flight.run(path.agent.requests.choose(blocks.here, ours, blocks.there, theirs, writing=writing))
            except ConnectionLostError as error:
                if writing:
                    error.quiescent = False  # what was under way may still arrive there
                raise
            # What a write has put there has been the peer's all the time: it gives no memory back before the link is
            # idle. What a read has brought could be anything, had this process been stopped for very long.
            return writing or look.is_in(self._pairs.epoch, flight.run)

    def _prepared(self, size: int) -> _Blocks | None:
        """The blocks of this size; None before a transfer has come the long way.

        Memory of these tensors is neither registered nor let go of meanwhile, but other memory is, and then another
        thread may exchange the blocks while this one uses those that it has.
        """
        path, blocks = self._nixl, self._blocks.get(size)
        versions = (path.agent.version, path.remote.connection)
        if blocks is not None and blocks.versions == versions:
            return blocks
        with self._lock:
            for old in [each.size for each in self._blocks.values() if each.versions != versions]:
                del self._blocks[old]
            if size not in self._blocks and len(self._blocks) < _MOST_SIZES:
                made = self._prepare(size, versions)
                if made is not None:
                    self._blocks[size] = made
            return self._blocks.get(size)

    def _prepare(self, size: int, versions: tuple[int, int]) -> _Blocks | None:
        (bases, regions, epoch, _), path = self._pairs, self._nixl
        found = path.remote.found(regions, epoch)
        if found is None:
            return None
        ours, theirs = path.agent.reach(bases) // size, min(length for _, length in found) // size
        if not ours or not theirs:
            return None
        requests = path.agent.requests
        here = requests.prepare(None, _rows(bases, size, ours))
        try:
            there = requests.prepare(path.remote.name, _rows([far for far, _ in found], size, theirs))
        except ConnectionLostError:
            requests.discard(here)
            raise
        starts = [tensor * ours for tensor in self._tensors], [tensor * theirs for tensor in self._tensors]
        blocks = _Blocks(size, versions, here, ours, there, theirs, starts)
        for each in (here, there):
            weakref.finalize(blocks, requests.discard, each).atexit = False
        peek = peeker(bases)
        if peek() == len(bases):  # else the system does not let us look
            self._peek = peek
        return blocks


def _rows(bases: Sequence[int], size: int, count: int) -> object:
    rows = np.zeros((len(bases), 5), dtype=np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 3], rows[:, 4] = bases, size, size, count
    return rows
