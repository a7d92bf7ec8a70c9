"""Another process on the same host, any memory: ``process_vm_readv`` and ``process_vm_writev``.

The peer is proved to be the process that introduced itself: same pid namespace, same start time, a pidfd that is still
alive after the last batch, and a nonce read back by the ladder's probe.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from llm_datadist.memory.move import DENIED
from llm_datadist.memory.regions import RegionError, RegionView
from llm_datadist.paths.base import PathDeniedError, PathFaultError, PathRejectedError, PeerGoneError, Transport
from llm_datadist.paths.one_sided import OneSidedPath, require_same_host
from llm_datadist.paths.permission import why_denied
from llm_datadist.utils import limits
from llm_datadist.utils.process import start_time

if TYPE_CHECKING:
    from llm_datadist.paths.base import Context, Path, Peer
    from llm_datadist.utils.deadline import Deadline


class ProcessVmPath(OneSidedPath):
    """Reaches into the peer's address space."""

    name = "process_vm"

    def __init__(self, peer: Peer, pidfd: int, view: RegionView, context: Context) -> None:
        super().__init__(peer.identity.pid, pidfd, view, context)
        self._peer = peer
        self._pidfd = pidfd

    def _was_the_peer(self) -> bool:
        # Pids are given out in a circle: one that no other process has now had none in the short time since the end.
        try:
            return start_time(self.pid) == self._peer.identity.start_time
        except OSError:
            return True

    def _ended(self) -> str:
        return f"the peer's process {self.pid} has ended"

    def _translated(self, error: OSError) -> Exception:
        if error.errno == errno.ESRCH:
            return PeerGoneError(self._ended())
        if error.errno in DENIED:
            return PathDeniedError(*why_denied(self._peer, error.errno))
        return PathFaultError(str(error))

    def close(self) -> None:
        """See ``Path.close``."""
        super().close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def describe(self) -> str:
        """See ``Path.describe``."""
        return f"process_vm_readv/writev with pid {self.pid}, up to {self._threads} threads"


class ProcessVm(Transport):
    """Finds the peer on this host and maps its region table."""

    name = "process_vm"

    def connect(self, peer: Peer, context: Context, deadline: Deadline) -> Path:
        """See ``Transport.connect``."""
        del deadline
        theirs = peer.identity
        require_same_host(theirs, context.identity)
        if theirs.pid_namespace != context.identity.pid_namespace:
            message = "the peer is in another pid namespace"
            hint = "share one pid namespace (docker: --pid=container:NAME, Kubernetes: shareProcessNamespace)"
            raise PathRejectedError(message, hint)
        pidfd = _pidfd(theirs.pid)
        try:
            return ProcessVmPath(peer, pidfd, _table(peer), context)
        except BaseException:
            os.close(pidfd)
            raise


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        reason, help_ = limits.explain(error)
        if error.errno in DENIED:
            help_ = "allow pidfd_open in the seccomp profile, or use a kernel from 5.3 on, which has it"
        message = f"cannot find process {pid}: {reason}"
        raise PathRejectedError(message, help_) from error


def _table(peer: Peer) -> RegionView:
    """The region table of the process that introduced itself, mapped here."""
    pid = peer.identity.pid
    try:
        if start_time(pid) != peer.identity.start_time:
            message = f"process {pid} is not the peer: it was started at another time"
            raise PathRejectedError(message)
        return RegionView.of_file(f"/proc/{pid}/fd/{peer.offer.table_fd}")
    except FileNotFoundError as error:
        message = f"process {pid} is hidden from this process in /proc, or has ended"
        hint = "run both processes as the same user, or mount /proc without hidepid"
        raise PathRejectedError(message, hint) from error
    except OSError as error:
        reason, help_ = why_denied(peer, error.errno) if error.errno in DENIED else limits.explain(error)
        message = f"cannot look into process {pid}: {reason}"
        raise PathRejectedError(message, help_) from error
    except RegionError as error:
        raise PathRejectedError(str(error)) from error
