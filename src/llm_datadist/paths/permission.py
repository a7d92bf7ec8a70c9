"""Why the kernel keeps this process out of another one's memory, and what would let it in.

The kernel only says EPERM. What it looks at can be found out one by one: own seccomp filter, user namespaces, users,
whether the other process is dumpable, its capabilities, the Yama security module.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from llm_datadist.memory import syscalls
from llm_datadist.memory.move import DENIED
from llm_datadist.utils.process import Status, status_of, user_namespace

if TYPE_CHECKING:
    from llm_datadist.paths.base import Peer

_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_CAP_SYS_PTRACE: Final = 19
_GRANT: Final = "grant CAP_SYS_PTRACE to this process (docker: --cap-add SYS_PTRACE)"


class Denial(NamedTuple):
    """One cause, and what to do about it."""

    cause: str
    remedy: str


def why_denied(peer: Peer, code: int) -> Denial:
    """Why the kernel answered ``code``, one of ``DENIED``, when this process reached for the peer's memory.

    A guess where the kernel gives no facts: then it names what is left.
    """
    return (
        _filtered()
        or _other_namespace(peer)
        or _by_status(peer)
        or _yama(peer.identity.pid)
        or Denial(
            f"the kernel refuses it ({os.strerror(code)}) and does not say why: perhaps a security module such as "
            "AppArmor or SELinux",
            f"{_GRANT}, or run both processes in one container as the same user",
        )
    )


def _filtered() -> Denial | None:
    """Whether this process may not use the calls at all: on itself, everything else is permitted."""
    for name in ("process_vm_readv", "process_vm_writev"):
        code = _tried_on_itself(name)
        if code not in DENIED:
            continue
        status = status_of("self")
        if code == errno.ENOSYS and not (status and status.seccomp):
            return Denial(f"this kernel has no {name}", "use a kernel with CONFIG_CROSS_MEMORY_ATTACH")
        return Denial(
            f"a seccomp filter of this process refuses {name} ({os.strerror(code)})",
            "allow process_vm_readv and process_vm_writev in its seccomp profile (docker's default profile does with "
            "--cap-add SYS_PTRACE; --security-opt seccomp=PROFILE sets another one)",
        )
    return None


def _tried_on_itself(name: str) -> int:
    """The error number of copying a byte within this process; 0 if that works."""
    here, there = ctypes.c_char(), ctypes.c_char()
    local, remote = ((ctypes.c_uint64 * 2)(ctypes.addressof(byte), 1) for byte in (here, there))
    try:
        getattr(syscalls, name)(os.getpid(), ctypes.addressof(local), ctypes.addressof(remote), 1)
    except OSError as error:
        return error.errno or 0
    return 0


def _other_namespace(peer: Peer) -> Denial | None:
    ours, theirs = user_namespace(), peer.identity.user_namespace
    if not ours or not theirs or ours == theirs:
        return None
    return Denial(
        "the peer is in another user namespace",
        "run both in one user namespace (docker: --userns=host, podman: --userns=container:NAME), or this process in "
        "a parent namespace of the peer's with CAP_SYS_PTRACE",
    )


def _by_status(peer: Peer) -> Denial | None:
    """What follows from the users and the capabilities of both, as /proc tells them."""
    ours, theirs = status_of("self"), status_of(str(peer.identity.pid))
    if ours is None or theirs is None:
        return None
    if ours.effective >> _CAP_SYS_PTRACE & 1:  # then none of these matters
        return None
    for what, mine, other in (("user", ours.uids, theirs.uids), ("group", ours.gids, theirs.gids)):
        if {mine[0]} != set(other[:3]):
            return Denial(
                f"the peer runs as another {what}: {_several(other)}, this process as {mine[0]}",
                f"run both processes as the same user and group, or {_GRANT}",
            )
    if not peer.offer.dumpable or _hidden(peer.identity.pid, theirs):
        return Denial(
            "the peer is not dumpable (PR_SET_DUMPABLE is 0, as after setuid or exec of a file it may not read)",
            f"let the peer call prctl(PR_SET_DUMPABLE, 1) before it starts, or {_GRANT}",
        )
    if theirs.permitted & ~ours.effective:
        return Denial(
            "the peer has capabilities that this process has not",
            f"give both processes the same capabilities, or {_GRANT}",
        )
    return None


def _several(ids: tuple[int, ...]) -> str:
    """Real, effective and saved one, as far as they differ."""
    return " ".join(map(str, sorted(set(ids[:3]))))


def _hidden(pid: int, theirs: Status) -> bool:
    """Whether the kernel treats a process as not dumpable: its files in /proc belong to root instead of its user."""
    try:
        return Path(f"/proc/{pid}/stat").stat().st_uid != theirs.uids[1]
    except OSError:
        return False


def _yama(pid: int) -> Denial | None:
    try:
        scope = int(_YAMA.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    if scope <= 0:
        return None
    if scope == 1:
        return Denial(
            "kernel.yama.ptrace_scope is 1: only its parents may look into a process",
            f"let the peer (pid {pid}) call prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY), or {_GRANT}, or set "
            "kernel.yama.ptrace_scope=0",
        )
    remedy = _GRANT if scope == 2 else "set it to 0 at boot: it cannot be lowered any more"  # noqa: PLR2004
    return Denial(f"kernel.yama.ptrace_scope is {scope}: no process may look into another one", remedy)
