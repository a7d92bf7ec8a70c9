"""Another process on the same host, any memory: ``process_vm_readv`` and ``process_vm_writev``.

Needs nothing from the peer's interpreter. The peer's region table is mapped from its memfd, so every transfer is
checked against what is registered at that very moment, and the peer is proved to be the process that introduced
itself: same pid namespace, same start time, a pidfd that is still alive after the last batch, and a nonce read back
by the ladder's probe.
"""

from __future__ import annotations

import errno
import os
import select
from typing import TYPE_CHECKING, Final

from llm_datadist.memory import iovec, syscalls
from llm_datadist.memory.move import DENIED, MemoryFaultError, move
from llm_datadist.memory.regions import RegionError, RegionView, StaleEpochError, distinct
from llm_datadist.paths.base import (
    Path,
    PathDeniedError,
    PathFaultError,
    PathRejectedError,
    PeerGoneError,
    Transport,
)
from llm_datadist.paths.parallel import Checkpoint, run
from llm_datadist.utils.process import start_time

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist.layout.spans import Spans
    from llm_datadist.memory.move import VmCall
    from llm_datadist.paths.base import Context, Peer
    from llm_datadist.utils.deadline import Deadline

    U64 = NDArray[np.uint64]

PARALLEL_BYTES: Final = 1 << 20
"""Below this, handing a part to another thread costs more than it saves."""
_PTRACE_HINT: Final = (
    "run both processes as the same user in the same user namespace, or grant CAP_SYS_PTRACE (docker: --cap-add "
    "SYS_PTRACE), or set kernel.yama.ptrace_scope=0"
)


class ProcessVmPath(Path):
    """Copies with the process_vm calls, in parallel when it is worth it."""

    name = "process_vm"

    def __init__(self, pid: int, pidfd: int, view: RegionView, context: Context) -> None:
        self._pid = pid
        self._pidfd = pidfd
        self._view = view
        self._copiers = context.copiers
        self._threads = context.copy_threads
        self._aborted = False

    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.read``."""
        self._move(syscalls.process_vm_readv, spans, deadline, epoch)

    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.write``."""
        self._move(syscalls.process_vm_writev, spans, deadline, epoch)

    def _move(self, call: VmCall, spans: Spans, deadline: Deadline, epoch: int) -> None:
        view = self._view
        self._check_alive()
        if epoch not in (0, view.epoch):
            message = f"planned with epoch {epoch}, now {view.epoch}"
            raise StaleEpochError(message)
        spans = spans.cut()
        remote = iovec.pair(view.addresses(spans.regions, spans.offsets, spans.lengths), spans.lengths)
        local = iovec.pair(spans.local, spans.lengths)
        checkpoint = Checkpoint(deadline)
        regions = distinct(spans.regions)
        writing = call is syscalls.process_vm_writev

        def look() -> None:
            checkpoint()
            if self._aborted:
                message = "the link was closed"
                raise PeerGoneError(message)
            # Memory that is being taken back must not be written to; a read of it is found out afterwards.
            if writing and not view.still_live(regions):
                message = "the destination was unregistered"
                raise StaleEpochError(message)

        threads = self._threads if spans.total >= PARALLEL_BYTES else 1
        shares = iovec.share(spans.lengths, threads)
        parts = [lambda a=a, b=b: move(call, self._pid, local[a:b], remote[a:b], look) for a, b in shares]
        try:
            run(parts, self._copiers, checkpoint)
        except MemoryFaultError as error:
            self._check_alive()
            self._check_live(regions)
            raise PathFaultError(str(error)) from error
        except OSError as error:
            self._translate(error)
        self._check_alive()
        self._check_live(regions)

    def _check_alive(self) -> None:
        poll = select.poll()
        try:
            poll.register(self._pidfd, select.POLLIN)
            ended = bool(poll.poll(0))
        except (OSError, ValueError):
            message = "the link was closed"
            raise PeerGoneError(message) from None
        if ended or not self._view.alive:
            message = f"the peer's process {self._pid} has ended" if ended else "the peer has been finalized"
            raise PeerGoneError(message)

    def _check_live(self, regions: U64) -> None:
        if not self._view.still_live(regions):
            message = "a cache was unregistered during the transfer"
            raise StaleEpochError(message)

    def _translate(self, error: OSError) -> None:
        if error.errno == errno.ESRCH:
            message = f"the peer's process {self._pid} has ended"
            raise PeerGoneError(message) from error
        if error.errno in DENIED:
            message = f"{error.strerror}: {_PTRACE_HINT}"
            raise PathDeniedError(message) from error
        raise PathFaultError(str(error)) from error

    def close(self) -> None:
        """See ``Path.close``."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._view.close()

    def abort(self) -> None:
        """See ``Path.abort``: a batch takes milliseconds, and none follows."""
        self._aborted = True

    def describe(self) -> str:
        """See ``Path.describe``."""
        return f"process_vm_readv/writev with pid {self._pid}, up to {self._threads} threads"


class ProcessVm(Transport):
    """Finds the peer on this host and maps its region table."""

    name = "process_vm"

    def connect(self, peer: Peer, context: Context, deadline: Deadline) -> Path:
        """See ``Transport.connect``."""
        del deadline
        theirs, ours = peer.identity, context.identity
        if not ours.boot_id or theirs.boot_id != ours.boot_id:
            message = "the peer is on another host"
            raise PathRejectedError(message)
        if theirs.pid_namespace != ours.pid_namespace:
            message = "the peer is in another pid namespace"
            hint = "share one pid namespace (docker: --pid=container:NAME, Kubernetes: shareProcessNamespace)"
            raise PathRejectedError(message, hint)
        try:
            pidfd = os.pidfd_open(theirs.pid)
        except OSError as error:
            message = f"cannot find process {theirs.pid}: {error.strerror}"
            raise PathRejectedError(message) from error
        try:
            if start_time(theirs.pid) != theirs.start_time:
                message = f"process {theirs.pid} is not the peer: it was started at another time"
                raise PathRejectedError(message)
            view = RegionView.of_file(f"/proc/{theirs.pid}/fd/{peer.offer.table_fd}")
        except OSError as error:
            os.close(pidfd)
            message = f"cannot look into process {theirs.pid}: {error.strerror}"
            raise PathRejectedError(message, _PTRACE_HINT if error.errno in DENIED else None) from error
        except (RegionError, PathRejectedError) as error:
            os.close(pidfd)
            raise PathRejectedError(str(error)) from error
        return ProcessVmPath(theirs.pid, pidfd, view, context)
