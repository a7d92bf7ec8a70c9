"""Ways for a child process to lose rights: users, capabilities, namespaces, seccomp filters, limits.

What is named ``first`` runs before the child has threads; the rest is for a ``Node`` at any time.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import os
import pkgutil
import platform
import resource
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import llm_datadist
from llm_datadist.utils import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peers import Node, Peer, Peers, Process

NEW_USER, NEW_MOUNTS, NEW_PIDS = 0x10000000, 0x00020000, 0x20000000
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC = 1, 1
_SECCOMP_RET_ALLOW, _SECCOMP_RET_ERRNO = 0x7FFF0000, 0x00050000
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06

MACHINE = platform.machine()
"""The numbers of system calls are known for two."""
SYSTEM_CALLS = {
    "x86_64": {"process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319, "pidfd_open": 434, "sec": 317},
    "aarch64": {"process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279, "pidfd_open": 434, "sec": 277},
}.get(MACHINE, {})
BOTH = ("process_vm_readv", "process_vm_writev")

_libc = ctypes.CDLL(None, use_errno=True)


class _SockFprog(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_void_p))


def _check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def in_turn(*firsts: Callable[[], object]) -> Callable[[], object]:
    """One ``first`` that is several."""
    return functools.partial(_in_turn, firsts)


def _in_turn(firsts: Sequence[Callable[[], object]]) -> None:
    for first in firsts:
        first()


def set_dumpable(on: bool) -> None:
    """PR_SET_DUMPABLE."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(on), 0, 0, 0), "prctl")


def drop_capabilities() -> None:
    """Give up all privileges of root but its files."""
    dumpable = _libc.prctl(3, 0, 0, 0, 0) == 1
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    set_dumpable(dumpable)


def load_everything() -> None:
    """Import what is imported late: another user may not be allowed to read the files of the interpreter."""
    names = (
        each.name
        for each in pkgutil.walk_packages(llm_datadist.__path__, "llm_datadist.")
        if ".cli" not in each.name and ".integrations" not in each.name  # the latter import what is not installed here
    )
    for name in (*names, "short_kit", "test_links", "test_faults", "encodings.ascii", "encodings.idna"):
        if not name.endswith("__main__"):
            importlib.import_module(name)


def become(user: int, dumpable: bool = True) -> None:
    """Another user, without privileges; the kernel makes it not dumpable, which most programs undo by an exec."""
    load_everything()
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    set_dumpable(dumpable)


def enter_user_namespace() -> None:
    """As ``unshare -Ur``."""
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(NEW_USER), "unshare")
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="ascii")


def join_user_namespace(pid: int) -> None:
    """That of another process."""
    with Path(f"/proc/{pid}/ns/user").open("rb") as file:
        _check(_libc.setns(file.fileno(), NEW_USER), "setns")


def private_mounts() -> None:
    """A mount namespace of its own."""
    _check(_libc.unshare(NEW_MOUNTS), "unshare")
    _check(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")


def mount(kind: str, where: str, options: str = "") -> None:
    """Mount something over a directory, in a mount namespace of its own."""
    private_mounts()
    _check(_libc.mount(kind.encode(), where.encode(), kind.encode(), 0, options.encode()), f"mount {where}")


def refuse_calls(code: int, names: Sequence[str] = BOTH) -> None:
    """A seccomp filter for all threads of the process: these system calls fail with ``code`` from now on."""
    numbers = [SYSTEM_CALLS[name] for name in names]
    program = [(_LOAD_WORD, 0, 0, 0)]  # the number of the system call
    program += [(_JUMP_IF_EQUAL, len(numbers) - at, 0, number) for at, number in enumerate(numbers)]
    program += [(_RETURN, 0, 0, _SECCOMP_RET_ALLOW), (_RETURN, 0, 0, _SECCOMP_RET_ERRNO | code)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    filter_ = _SockFprog(len(program), ctypes.addressof(packed))
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _check(
        _libc.syscall(SYSTEM_CALLS["sec"], _SECCOMP_SET_MODE_FILTER, _SECCOMP_FILTER_FLAG_TSYNC, ctypes.byref(filter_)),
        "seccomp",
    )


def set_limit(name: str, value: int) -> None:
    """The soft limit of this process, for example of RLIMIT_NOFILE."""
    which = getattr(resource, name)
    resource.setrlimit(which, (value, resource.getrlimit(which)[1]))


def filter_now(node: Node, code: int, names: Sequence[str] = BOTH) -> None:
    """In the child: ``refuse_calls``."""
    refuse_calls(code, names)


class _Kept(logging.Handler):
    def __init__(self, kept: list[tuple[int, str]]) -> None:
        super().__init__(logging.DEBUG)
        self._kept = kept

    def emit(self, record: logging.LogRecord) -> None:
        self._kept.append((record.levelno, record.getMessage()))


def keep_log(node: Node) -> None:
    """In the child, before or after ``init``: remember what the library logs, warnings and worse."""
    logger = log.get_logger()
    node.extra["log"] = kept = []
    logger.addHandler(_Kept(kept))
    logger.setLevel(logging.WARNING)


def logged(node: Node) -> list[str]:
    """In the child: the messages since ``keep_log``, or since the last call."""
    kept, node.extra["log"][:] = [message for _, message in node.extra["log"]], []
    return kept


def observed(peers: Peers, cluster_id: int, process: Process, **properties: object) -> Peer:
    """A peer in a process, whose log is kept from the begin."""
    from peers import Peer  # noqa: PLC0415 - this module is imported by children that need no more of it

    peer = Peer(process, f"node-{cluster_id}")
    peer.call(keep_log)
    properties.setdefault("listen_ip_info", "127.0.0.1:0")
    return peer.init(cluster_id, **properties)
