"""Facts about processes, from /proc."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

_PR_GET_DUMPABLE: Final = 3


def start_time(pid: int) -> int:
    """When a process was started, in clock ticks since boot.

    Raises:
        OSError: there is no such process, or it is hidden from us.
    """
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    # The second field is the command in parentheses and may itself contain blanks and parentheses.
    return int(stat[stat.rindex(")") + 2 :].split()[19])


def own_start_time() -> int:
    """``start_time`` of this process; 0 where there is no /proc."""
    try:
        return start_time(os.getpid())
    except OSError:
        return 0


@cache
def boot_id() -> str:
    """Identifies the running kernel; empty if unknown, which equals nobody's."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """Inode of this process's pid namespace; 0 if unknown."""
    return _namespace("pid")


def user_namespace() -> int:
    """Inode of this process's user namespace; 0 if unknown."""
    return _namespace("user")


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino  # noqa: PTH116 - a number, not a path
    except OSError:
        return 0


def dumpable() -> bool:
    """Whether other processes of the same user may look into this one, as far as that depends on PR_SET_DUMPABLE."""
    return bool(ctypes.CDLL(None).prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 1)


class Status(NamedTuple):
    """What /proc/PID/status tells of the rights of a process."""

    uids: tuple[int, ...]
    """Real, effective, saved, file system."""
    gids: tuple[int, ...]
    permitted: int
    """Capabilities, one bit each."""
    effective: int
    seccomp: int
    """0: no filter."""


def status_of(pid: str) -> Status | None:
    """The rights of a process, or of "self"; None if it is hidden from us."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
        facts = dict(line.split(":", 1) for line in lines if ":" in line)
        uids, gids = (tuple(map(int, facts[name].split())) for name in ("Uid", "Gid"))
        permitted, effective = (int(facts[name], 16) for name in ("CapPrm", "CapEff"))
        return Status(uids, gids, permitted, effective, int(facts.get("Seccomp", "0")))
    except (OSError, KeyError, ValueError):
        return None


class OtherProcess:
    """Another process of this pid namespace, never mixed up with a later one of the same pid."""

    def __init__(self, pid: int, started: int) -> None:
        """Hold on to the process ``pid`` that was started at ``started``, see ``start_time``.

        Raises:
            OSError: there is no such process (any more), or it cannot be seen.
        """
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        try:
            if start_time(pid) != started:
                message = f"process {pid} was started at another time"
                raise ProcessLookupError(message)
        except BaseException:
            os.close(self._pidfd)
            raise

    def fileno(self) -> int:
        """A descriptor that becomes readable when the process ends; -1 after ``close``."""
        return self._pidfd

    def stopped(self) -> bool:
        """Whether it is stopped, by SIGSTOP or a debugger."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        return stat[stat.rindex(")") + 2] in "Tt"

    def close(self) -> None:
        """Let go of it; idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
