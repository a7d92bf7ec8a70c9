"""Another process on the same host, any memory: ``process_vm_readv`` and ``process_vm_writev``.

The peer is proved to be the process that introduced itself: same pid namespace, same start time, a pidfd that is still
alive after the last batch, and a nonce read back by the ladder's probe.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

from llm_datadist.memory.move import DENIED
from llm_datadist.memory.regions import RegionError, RegionView
from llm_datadist.paths.base import PathDeniedError, PathFaultError, PathRejectedError, PeerGoneError, Transport
from llm_datadist.paths.one_sided import OneSidedPath, same_host
from llm_datadist.utils.process import start_time

if TYPE_CHECKING:
    from llm_datadist.paths.base import Context, Path, Peer
    from llm_datadist.utils.deadline import Deadline

_PTRACE_HINT: Final = (
    "run both processes as the same user in the same user namespace, or grant CAP_SYS_PTRACE (docker: --cap-add "
    "SYS_PTRACE), or set kernel.yama.ptrace_scope=0"
)


class ProcessVmPath(OneSidedPath):
    """Reaches into the peer's address space."""

    name = "process_vm"

    def __init__(self, pid: int, pidfd: int, started: int, view: RegionView, context: Context) -> None:
        super().__init__(pid, pidfd, view, context)
        self._pidfd = pidfd
        self._started = started

    def _was_the_peer(self) -> bool:
        # Pids are given out in a circle: one that no other process has now had none in the short time since the end.
        try:
            return start_time(self.pid) == self._started
        except OSError:
            return True

    def _ended(self) -> str:
        return f"the peer's process {self.pid} has ended"

    def _translated(self, error: OSError) -> Exception:
        if error.errno == errno.ESRCH:
            return PeerGoneError(self._ended())
        if error.errno in DENIED:
            return PathDeniedError(f"{error.strerror}: {_PTRACE_HINT}")
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
        theirs, ours = peer.identity, context.identity
        if not same_host(theirs, ours):
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
        return ProcessVmPath(theirs.pid, pidfd, theirs.start_time, view, context)
