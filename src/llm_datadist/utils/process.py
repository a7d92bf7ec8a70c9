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
