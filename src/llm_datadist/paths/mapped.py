"""Another process on the same host, memory of its pools: mapped here, and copied within this process.

For where the system keeps processes out of each other's memory (``process_vm``). The peer hands over the descriptors of
its region table and its pools once (``net/handover.py``), and has no part in what follows. The connection over which
they came stays open: its end is that of the peer's process, whatever pid namespace that is in.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist.memory.move import DENIED, move_unchecked
from llm_datadist.memory.regions import RegionError, RegionView
from llm_datadist.memory.shared import Mapping, NotSealedError
from llm_datadist.net.handover import fetch
from llm_datadist.paths.base import OutOfReachError, PathFaultError, PathRejectedError, Transport
from llm_datadist.paths.one_sided import OneSidedPath, require_same_host
from llm_datadist.utils import limits
from llm_datadist.wire.framing import ProtocolError

if TYPE_CHECKING:
    import socket

    from numpy.typing import NDArray

    from llm_datadist.layout.spans import Spans
    from llm_datadist.net.handover import Parcel
    from llm_datadist.paths.base import Context, Path, Peer
    from llm_datadist.utils.deadline import Deadline

    U64 = NDArray[np.uint64]


class MappedPath(OneSidedPath):
    """Copies between registered memory and the peer's memory as it is mapped here."""

    name = "mapped"
    reaches_all = False

    def __init__(self, connection: socket.socket, view: RegionView, mapping: Mapping, context: Context) -> None:
        super().__init__(os.getpid(), connection.fileno(), view, context)
        self._connection = connection
        self._mapping = mapping

    def find(self, region: int) -> tuple[int, int]:
        """See ``OneSidedPath.find``."""
        address, size = super().find(region)
        return int(self._located(np.array([address], dtype=np.uint64), size)[0]), size

    def _bases(self, spans: Spans) -> U64:
        return self._located(super()._bases(spans), spans.runs.extent[1])

    def _located(self, addresses: U64, end: int) -> U64:
        located = self._mapping.locate(addresses, end)
        if located is None:
            message = "this memory of the peer is not from its pools"
            raise OutOfReachError(message)
        return located

    def _copy(self, here: U64, there: U64, *, writing: bool) -> None:
        # The kernel copies, so that an address of ours which is not mapped is an error; where it may not, memmove does.
        try:
            super()._copy(here, there, writing=writing)
        except OSError as error:
            if error.errno not in DENIED:
                raise
            target, source = (there, here) if writing else (here, there)
            move_unchecked(target, source)

    def _ended(self) -> str:
        return "the peer's process has ended, or the link at its end"

    def _translated(self, error: OSError) -> Exception:
        return PathFaultError(str(error))

    def close(self) -> None:
        """See ``Path.close``."""
        super().close()
        self._connection.close()
        self._mapping.close()

    def describe(self) -> str:
        """See ``Path.describe``."""
        size = self._mapping.total / (1 << 20)
        return f"for memory of the peer's pools, {size:,.1f} MiB mapped here, up to {self._threads} threads"


class Mapped(Transport):
    """Gets the peer's descriptors and maps its memory."""

    name = "mapped"

    def connect(self, peer: Peer, context: Context, deadline: Deadline) -> Path:
        """See ``Transport.connect``."""
        require_same_host(peer.identity, context.identity)
        if peer.offer.handover is None:
            message = "the peer has no memory pool"
            raise PathRejectedError(message, "set LLMConfig.mem_pool_cfg there and allocate its caches")
        try:
            parcel = fetch(peer.offer.handover, context.token, deadline)
        except ConnectionRefusedError as error:
            message = "the peer's socket for shared memory cannot be seen from here"
            hint = "share one network namespace (docker: --network=container:NAME; containers of one pod do)"
            raise PathRejectedError(message, hint) from error
        except BlockingIOError as error:
            message = "cannot get the peer's shared memory: it did not answer in time"
            raise PathRejectedError(message) from error
        except OSError as error:
            reason, help_ = limits.explain(error)
            message = f"cannot get the peer's shared memory: {reason}"
            raise PathRejectedError(message, help_) from error
        except ProtocolError as error:
            message = f"cannot get the peer's shared memory: {error}"
            raise PathRejectedError(message, "run both processes as the same user") from error
        try:
            return _mapped(parcel, context)
        except (OSError, RegionError, NotSealedError) as error:
            reason, help_ = limits.explain(error)
            message = f"cannot map the peer's shared memory: {reason}"
            raise PathRejectedError(message, help_) from error
        finally:
            parcel.close_descriptors()


def _mapped(parcel: Parcel, context: Context) -> MappedPath:
    with contextlib.ExitStack() as undo:
        undo.callback(parcel.connection.close)
        view = RegionView.of_descriptor(parcel.areas[0].fd, "what the peer handed over")
        undo.callback(view.close)
        mapping = Mapping(parcel.areas[1:])
        undo.pop_all()
    return MappedPath(parcel.connection, view, mapping, context)
