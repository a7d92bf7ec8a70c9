"""The owner's end of data connections without an engine, and connections to it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist.layout.spans import Runs, Spans
from llm_datadist.memory.regions import RegionTable
from llm_datadist.net.loop import Loop
from llm_datadist.net.workers import Workers
from llm_datadist.observe.recorder import Recorder
from llm_datadist.paths.base import Context
from llm_datadist.paths.tcp_server import DataServer
from llm_datadist.wire.data import Op
from net_helpers import WAIT_S, soon, tcp_pair

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from llm_datadist.paths.tcp import TcpPath
    from llm_datadist.utils.deadline import Deadline

TOKEN = b"t" * 16
WORKERS = 4
TENSORS = 5
SIZE = 400
"""Of each tensor, in bytes."""


class Owner:
    """Regions of memory in this process, served to whoever connects."""

    def __init__(self) -> None:
        self.table = RegionTable()
        self.loop = Loop("test-owner")
        self.serve_workers = Workers("test-serve", WORKERS)
        self.copy_workers = Workers("test-copy", WORKERS)
        self.server = DataServer(self.table, self.loop, self.serve_workers, Recorder())
        self.fenced: list[int] = []
        """Connections that askers have asked to be stopped, in order."""
        self._numbers = itertools.count(1)

    def add(self, memory: np.ndarray) -> int:
        """Register a buffer; its region."""
        return self.table.add(memory.ctypes.data, memory.nbytes)

    def connect(self) -> tuple[int, socket.socket]:
        """A connection that is served: its number and the asking end."""
        number = next(self._numbers)
        ours, theirs = tcp_pair()
        self.server.add(TOKEN, number, theirs, 0)
        return number, ours

    def context(self) -> Context:
        """What a path needs that asks this owner."""

        def open_data(count: int, _deadline: Deadline) -> list[tuple[int, socket.socket]]:
            return [self.connect() for _ in range(count)]

        return Context(
            identity=None,  # type: ignore[arg-type]
            regions=self.table,
            copiers=self.copy_workers,
            copy_threads=2,
            open_data=open_data,
            fence=self._fence,
            token=TOKEN,
        )

    def _fence(self, numbers: list[int], _deadline: Deadline) -> bool:
        done = threading.Event()
        self.fenced += numbers
        self.server.give_up(TOKEN, numbers, done.set)
        return done.wait(WAIT_S)

    def close(self) -> None:
        """End everything."""
        self.server.close()
        for workers in (self.serve_workers, self.copy_workers):
            workers.close()
        self.loop.close()
        self.table.close()


@contextlib.contextmanager
def owner() -> Iterator[Owner]:
    """An owner that is closed afterwards."""
    made = Owner()
    try:
        yield made
    finally:
        made.close()


def memory(count: int, size: int, seed: int | None = None) -> list[np.ndarray]:
    """Buffers of random bytes, or of zeros."""
    if seed is None:
        return [np.zeros(size, dtype=np.uint8) for _ in range(count)]
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, dtype=np.uint8) for _ in range(count)]


class Both:
    """Memory of both sides: what spans move between, and what they should make of it."""

    def __init__(self, made: Owner, tensors: int = TENSORS, size: int = SIZE) -> None:
        self.here, self.there = memory(tensors, size, seed=1), memory(tensors, size, seed=2)
        self.regions = [made.add(buffer) for buffer in self.there]
        self._made = made

    def spans(self, runs: list[tuple[int, int, int]], regions: list[int] | None = None) -> Spans:
        """The runs (here, there, length) in every tensor."""
        columns = [np.array(column, dtype=np.int64) for column in zip(*runs, strict=True)]
        return Spans(
            bases=np.array([buffer.ctypes.data for buffer in self.here], dtype=np.uint64),
            regions=np.array(regions or self.regions, dtype=np.uint64),
            starts=np.zeros(len(self.here), dtype=np.int64),
            runs=Runs(*columns),
        )

    def move(self, path: TcpPath, op: Op, spans: Spans, epoch: int = 0) -> None:
        (path.read if op is Op.READ else path.write)(spans, soon(), epoch)

    def check_move(self, path: TcpPath, op: Op, runs: list[tuple[int, int, int]], epoch: int = 0) -> None:
        """Move, and compare every byte of both sides."""
        here, there = ([buffer.copy() for buffer in side] for side in (self.here, self.there))
        self.move(path, op, self.spans(runs), epoch)
        for ours, theirs in zip(here, there, strict=True):
            for at, other, length in runs:
                if op is Op.READ:
                    ours[at : at + length] = theirs[other : other + length]
                else:
                    theirs[other : other + length] = ours[at : at + length]
        assert all((a == b).all() for a, b in zip(self.here, here, strict=True))
        assert all((a == b).all() for a, b in zip(self.there, there, strict=True))

    def close(self) -> None:
        self._made.table.remove(self.regions)
