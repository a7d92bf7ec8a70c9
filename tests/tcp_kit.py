"""The owner's end of data connections without an engine, and connections to it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist.memory.regions import RegionTable
from llm_datadist.net.loop import Loop
from llm_datadist.net.workers import Workers
from llm_datadist.observe.recorder import Recorder
from llm_datadist.paths.base import Context
from llm_datadist.paths.tcp_server import DataServer
from net_helpers import WAIT_S, tcp_pair

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from llm_datadist.utils.deadline import Deadline

TOKEN = b"t" * 16
WORKERS = 4


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
