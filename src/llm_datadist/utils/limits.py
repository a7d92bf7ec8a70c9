"""Limits of the system: which one was hit, its value, and how to raise it."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

_MAPPINGS_LEFT: Final = 64
"""So few below the limit are none: what failed may have needed several."""


class Limit(NamedTuple):
    """What a call failed of, for people."""

    reason: str
    """The system's words, with name and value of the limit if one was hit."""
    hint: str | None
    """How to raise it."""


def explain(error: BaseException) -> Limit:
    """What an error of the system is about."""
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if isinstance(error, MemoryError):
        find: Callable[[], Limit] | None = _memory
    elif isinstance(error, OSError):
        find = _LIMITS.get(error.errno)
    else:  # what Python makes of it when the system gives no thread
        find = _threads if "new thread" in reason else None
    found = find() if find else None
    return Limit(f"{reason} ({found.reason})", found.hint) if found else Limit(reason, None)


def with_hint(error: BaseException) -> str:
    """``explain`` in one sentence."""
    reason, hint = explain(error)
    return f"{reason}: {hint}" if hint else reason


def out_of_memory(error: BaseException) -> bool:
    """Whether memory, or the right to have more of it, is what was missing."""
    return isinstance(error, MemoryError) or getattr(error, "errno", None) in (errno.ENOMEM, errno.EFBIG, errno.ENOSPC)


def most_memory() -> int:
    """Bytes that this machine, or the container, has at all, swap included."""
    try:
        facts = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kib = {line.split(":")[0]: int(line.split()[1]) for line in facts}
        most = kib["MemTotal"] + kib.get("SwapTotal", 0) << 10
    except (OSError, KeyError, ValueError, IndexError):
        most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError):  # no such control group, or "max"
        most = min(most, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return most


def _descriptors() -> Limit:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Limit(
        f"this process may have {limit} descriptors, RLIMIT_NOFILE",
        "raise it with ulimit -n (systemd: LimitNOFILE=, docker: --ulimit nofile=)",
    )


def _all_descriptors() -> Limit:
    return Limit(f"this machine may have {_number('fs/file-max')} files open, fs.file-max", "raise it with sysctl")


def _file_size() -> Limit:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return Limit(
        f"this process may make files of {limit} bytes, RLIMIT_FSIZE, and shared memory is a file",
        "raise it with ulimit -f (systemd: LimitFSIZE=)",
    )


def _memory() -> Limit:
    most = _number("vm/max_map_count")
    if most and _mappings() + _MAPPINGS_LEFT >= most:
        hint = "raise it with sysctl vm.max_map_count, or register fewer, larger pieces of memory"
        return Limit(f"this process has nearly all of its {most} mappings, vm.max_map_count", hint)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        hint = "raise it with ulimit -v (systemd: LimitAS=), or use less memory"
        return Limit(f"this process may have {limit} bytes of address space, RLIMIT_AS", hint)
    return Limit("this machine, or the container, has no memory left", "free some, or give the container more")


def _threads() -> Limit:
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    of_user = "any number of" if limit == resource.RLIM_INFINITY else str(limit)
    return Limit(
        f"user {os.getuid()} may have {of_user} threads, RLIMIT_NPROC, this machine {_number('kernel/threads-max')}, "
        "and the container has a limit of its own, pids.max",
        "raise the one that was reached (ulimit -u, systemd: TasksMax=, docker: --pids-limit)",
    )


def _number(name: str) -> int:
    """A setting of the kernel; 0 if unknown."""
    try:
        return int(Path(f"/proc/sys/{name}").read_text(encoding="ascii"))
    except (OSError, ValueError, MemoryError):
        return 0


def _mappings() -> int:
    """How many this process has; 0 if unknown."""
    try:
        with Path("/proc/self/maps").open("rb") as lines:
            return sum(1 for _ in lines)
    except (OSError, MemoryError):
        return 0


_LIMITS: Final[dict[int | None, Callable[[], Limit]]] = {
    errno.EMFILE: _descriptors,
    errno.ENFILE: _all_descriptors,
    errno.EFBIG: _file_size,
    errno.ENOMEM: _memory,
}
