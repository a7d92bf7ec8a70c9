"""Another process on the same host, any memory: ``process_vm_readv`` and ``process_vm_writev``.

Needs nothing from the peer's interpreter. The peer's region table is mapped from its memfd, so every transfer is
checked against what is registered at that very moment, and the peer is proved to be the process that introduced
itself: same pid namespace, same start time, a pidfd that is still alive after the last batch, and a nonce read back
by the ladder's probe.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import struct
import threading
from typing import TYPE_CHECKING, Final

from llm_datadist.memory import iovec, syscalls
from llm_datadist.memory.move import DENIED, MemoryFaultError, move
from llm_datadist.memory.regions import RegionError, RegionView, StaleEpochError
from llm_datadist.paths.base import (
    FEW,
    Path,
    PathDeniedError,
    PathFaultError,
    PathRejectedError,
    PeerGoneError,
    Shortcut,
    Transport,
)
from llm_datadist.paths.parallel import Checkpoint, run
from llm_datadist.utils.process import start_time

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist.layout.spans import Spans
    from llm_datadist.memory.move import VmCall
    from llm_datadist.paths.base import Context, Peer, TensorPairs
    from llm_datadist.utils.deadline import Deadline

    U64 = NDArray[np.uint64]

PARALLEL_BYTES: Final = 1 << 20
"""Below this, handing a part to another thread costs more than it saves."""
_PARTS_PER_THREAD: Final = 8
"""So many, so that no thread has much left to do when the others have finished."""
_PTRACE_HINT: Final = (
    "run both processes as the same user in the same user namespace, or grant CAP_SYS_PTRACE (docker: --cap-add "
    "SYS_PTRACE), or set kernel.yama.ptrace_scope=0"
)


class _Scratch(threading.local):
    """Room for the iovecs of a small transfer, for each thread."""

    def __init__(self) -> None:
        self.here, self.there = (ctypes.create_string_buffer(16 * FEW) for _ in range(2))
        self.here_at, self.there_at = (ctypes.c_void_p(ctypes.addressof(room)) for room in (self.here, self.there))


_scratch: Final = _Scratch()
_PACK_INTO: Final = [struct.Struct(f"{words}Q").pack_into for words in range(2 * FEW + 1)]
_COUNTS: Final = [ctypes.c_ulong(count) for count in range(FEW + 1)]


def _poll_for_end(pidfd: int) -> select.poll:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return poll


class ProcessVmPath(Path):
    """Copies with the process_vm calls, in parallel when it is worth it."""

    name = "process_vm"

    def __init__(self, pid: int, pidfd: int, view: RegionView, context: Context) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self.view = view
        self._copiers = context.copiers
        self._threads = context.copy_threads
        self.aborted = False
        self._poll = _poll_for_end(pidfd).poll

    def read(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.read``."""
        self._move(syscalls.process_vm_readv, spans, deadline, epoch)

    def write(self, spans: Spans, deadline: Deadline, epoch: int = 0) -> None:
        """See ``Path.write``."""
        self._move(syscalls.process_vm_writev, spans, deadline, epoch)

    def shortcut(self, pairs: TensorPairs) -> Shortcut:
        """See ``Path.shortcut``."""
        return _OneCall(self, pairs)

    def _move(self, call: VmCall, spans: Spans, deadline: Deadline, epoch: int) -> None:
        view = self.view
        self.check_alive()
        self._check_epoch(epoch)
        spans = spans.cut()
        lengths, regions, here = spans.runs.lengths, spans.regions, spans.here
        there = iovec.Side(view.bases(regions, spans.starts, spans.runs.extent), spans.runs.remote)
        checkpoint = Checkpoint(deadline)
        writing = call is syscalls.process_vm_writev
        threads = self._threads if spans.total >= PARALLEL_BYTES else 1
        piece = min(iovec.MAX_PIECE, max(PARALLEL_BYTES, spans.total // (threads * _PARTS_PER_THREAD)))
        parts = iter(list(iovec.parts(len(regions), lengths, max_bytes=piece)))

        def work() -> None:
            for part in parts:  # shared: each thread takes the next one
                checkpoint()
                if self.aborted:
                    message = "the link was closed"
                    raise PeerGoneError(message)
                # Memory that is being taken back must not be written to; a read of it is found out afterwards.
                if writing:
                    self._check_live(regions)
                move(call, self.pid, here.iovecs(lengths, part), there.iovecs(lengths, part))

        try:
            run([work] * threads, self._copiers, checkpoint)
        except MemoryFaultError as error:
            self.check_alive()
            self._check_live(regions)
            raise PathFaultError(str(error)) from error
        except OSError as error:
            self._translate(error)
        self.check_alive()
        self._check_live(regions)

    def check_alive(self) -> None:
        """Raise PeerGoneError unless the peer's process lives, and serves its memory."""
        try:
            ended = bool(self._poll(0))
        except RuntimeError:  # another thread is in it at this very moment
            ended = bool(_poll_for_end(self._pidfd).poll(0))
        if ended or not self.view.alive:
            message = f"the peer's process {self.pid} has ended" if ended else "the peer has been finalized"
            raise PeerGoneError(message)

    def _check_epoch(self, epoch: int) -> None:
        now = self.view.epoch
        if epoch not in (0, now):
            message = f"planned with epoch {epoch}, now {now}"
            raise StaleEpochError(message)

    def _check_live(self, regions: U64) -> None:
        if not self.view.still_live(regions):
            message = "a cache was unregistered during the transfer"
            raise StaleEpochError(message)

    def _translate(self, error: OSError) -> None:
        if error.errno == errno.ESRCH:
            message = f"the peer's process {self.pid} has ended"
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
        self.view.close()

    def abort(self) -> None:
        """See ``Path.abort``: a batch takes milliseconds, and none follows."""
        self.aborted = True

    def describe(self) -> str:
        """See ``Path.describe``."""
        return f"process_vm_readv/writev with pid {self.pid}, up to {self._threads} threads"


class _OneCall(Shortcut):
    """One system call, with addresses that are valid as long as the peer's epoch is the same.

    Where anything at all is unusual the long way does it, perhaps once more, and tells why.
    """

    def __init__(self, path: ProcessVmPath, pairs: TensorPairs) -> None:
        super().__init__(path, pairs)
        self._vm = path
        self._pid, self._epoch = ctypes.c_int(path.pid), pairs.epoch
        found = [path.view.find(region) for region in pairs.regions]
        self._sides = [(near, far) for near, (far, _) in zip(pairs.bases, found, strict=True)]
        self._room = min(size for _, size in found)

    def read(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline) -> None:
        """See ``Shortcut.read``."""
        if not self._move(syscalls.bare_process_vm_readv, size, here, there, deadline):
            super().read(size, here, there, deadline)

    def write(self, size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline) -> None:
        """See ``Shortcut.write``."""
        self._vm.check_alive()  # a process that has taken over the pid must not be written to
        if not self._move(syscalls.bare_process_vm_writev, size, here, there, deadline):
            super().write(size, here, there, deadline)

    def _move(
        self, call: Callable[..., int], size: int, here: Sequence[int], there: Sequence[int], deadline: Deadline
    ) -> bool:
        vm, view = self._vm, self._vm.view
        if view.epoch != self._epoch or deadline.expired():
            return False
        sides, last = self._sides, self._room - size
        ours: list[int] = []
        theirs: list[int] = []
        for local, remote in zip(here, there, strict=True):
            near_at, far_at = local * size, remote * size
            if not 0 <= far_at <= last:
                return False
            for near, far in sides:
                ours += (near + near_at, size)
                theirs += (far + far_at, size)
        words, scratch = len(ours), _scratch
        pack_into, count = _PACK_INTO[words], _COUNTS[words // 2]
        pack_into(scratch.here, 0, *ours)
        pack_into(scratch.there, 0, *theirs)
        done = call(self._pid, scratch.here_at, count, scratch.there_at, count, _COUNTS[0])
        if done != size * words // 2 or vm.aborted:
            return False
        vm.check_alive()
        return view.epoch == self._epoch


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
