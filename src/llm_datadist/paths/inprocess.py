"""Both ends in one process: the kernel or memmove copies."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from llm_datadist.memory.iovec import Side
from llm_datadist.memory.move import MemoryFaultError, copy
from llm_datadist.memory.regions import StaleEpochError
from llm_datadist.paths.base import Path, PathFaultError, PathRejectedError, PeerGoneError, Transport
from llm_datadist.paths.parallel import Checkpoint

if TYPE_CHECKING:
    from llm_datadist.layout.spans import Spans
    from llm_datadist.memory.regions import RegionTable
    from llm_datadist.paths.base import Context, Peer
    from llm_datadist.utils.deadline import Deadline

_tables: dict[bytes, RegionTable] = {}
_tables_lock = threading.Lock()


def _forget() -> None:
    """In a forked child: its copies of the parent's memory are not what the parent's tables tell of."""
    global _tables_lock  # noqa: PLW0603 - another thread of the parent may hold the old one for ever
    _tables_lock = threading.Lock()
    _tables.clear()


os.register_at_fork(after_in_child=_forget)


def publish(incarnation: bytes, table: RegionTable) -> None:
    """Make an engine of this process reachable for the others in it."""
    with _tables_lock:
        _tables[incarnation] = table


def withdraw(incarnation: bytes) -> None:
    """Undo ``publish``; idempotent."""
    with _tables_lock:
        _tables.pop(incarnation, None)


class InProcessPath(Path):
    """Copies between two engines of this process."""

    name = "inprocess"

    def __init__(self, table: RegionTable) -> None:
        self._table = table

    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.read``."""
        self._copy(spans, deadline, epoch, into_local=True)

    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.write``."""
        self._copy(spans, deadline, epoch, into_local=False)

    def _copy(self, spans: Spans, deadline: Deadline, epoch: int, *, into_local: bool) -> None:
        view = self._table.view
        if not view.alive:
            message = "the other engine in this process has been finalized"
            raise PeerGoneError(message)
        with self._table.lease(spans.regions.tolist()):
            if epoch not in (0, view.epoch):
                message = f"planned with epoch {epoch}, now {view.epoch}"
                raise StaleEpochError(message)
            runs = spans.runs
            there = Side(view.bases(spans.regions, spans.starts, runs.extent), runs.remote)
            target, source = (spans.here, there) if into_local else (there, spans.here)
            try:
                copy(target, source, runs.lengths, Checkpoint(deadline))
            except MemoryFaultError as error:
                raise PathFaultError(str(error)) from error

    def close(self) -> None:
        """Nothing to give up."""

    def abort(self) -> None:
        """Nothing to interrupt: a copy ends by itself."""

    def describe(self) -> str:
        """See ``Path.describe``."""
        return "copies within this process"


class InProcess(Transport):
    """Finds the other engine in this process."""

    name = "inprocess"

    def connect(self, peer: Peer, context: Context, deadline: Deadline) -> Path:
        """See ``Transport.connect``."""
        del context, deadline
        with _tables_lock:
            table = _tables.get(peer.identity.incarnation)
        if table is None:
            message = "the peer is another process"
            raise PathRejectedError(message)
        return InProcessPath(table)
