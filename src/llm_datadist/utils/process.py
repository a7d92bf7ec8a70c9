"""Facts about processes, from /proc."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


def start_time(pid: int) -> int:
    """When a process was started, in clock ticks since boot.

    Raises:
        OSError: there is no such process, or it is hidden from us.
    """
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    # The second field is the command in parentheses and may itself contain blanks and parentheses.
    return int(stat[stat.rindex(")") + 2 :].split()[19])


@cache
def boot_id() -> str:
    """Identifies the running kernel; empty if unknown, which equals nobody's."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """Inode of this process's pid namespace; 0 if unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 - a number, not a path
    except OSError:
        return 0


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
