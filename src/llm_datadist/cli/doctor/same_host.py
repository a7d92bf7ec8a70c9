"""Whether processes of this host reach each other's memory, and what stands in their way."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from llm_datadist.cli.doctor.findings import Finding, Group, Level

if TYPE_CHECKING:
    from llm_datadist.cli.doctor.system import System

_GROUP: Final = Group.SAME_HOST
_FIRST_PID_NAMESPACE: Final = "pid:[4026531836]"
_FIRST_USER_NAMESPACE: Final = "user:[4026531837]"
_YAMA: Final = "/proc/sys/kernel/yama/ptrace_scope"
_YAMA_FOR_GOOD: Final = 3
_CONTAINER_MARKS: Final = ("docker", "kubepods", "containerd", "libpod", "lxc", "crio")
_SECCOMP: Final = {"0": "off", "1": "strict", "2": "a filter"}
_ALLOW_TRACING: Final = (
    "docker run --cap-add SYS_PTRACE (Kubernetes: securityContext: {capabilities: {add: [SYS_PTRACE]}})"
)
_SYSCTL: Final = "sysctl -w kernel.yama.ptrace_scope=0"


def process_vm(system: System) -> Finding:
    """Two processes reach into each other."""
    trial = system.trials.process_vm()
    facts = {"works": trial.ok, "errno": errno.errorcode.get(trial.code)}
    if trial.ok:
        return Finding(
            "process-vm",
            _GROUP,
            Level.OK,
            "two processes read and write each other's memory",
            "Transfers on this host copy once, at memory speed, whatever memory the caches are in.",
            facts=facts,
        )
    if not trial.conclusive:
        return Finding(
            "process-vm",
            _GROUP,
            Level.WARNING,
            f"could not be tried: {trial.failed}",
            "It is not known whether the path process_vm works; if not, only caches from a pool move at memory speed.",
            "let this user start the Python interpreter that runs the doctor, and see open-files and memfd",
            {"works": None, "errno": facts["errno"]},
        )
    reason = f": {errno.errorcode.get(trial.code, trial.code)}" if trial.code else ""
    return Finding(
        "process-vm",
        _GROUP,
        Level.PROBLEM,
        f"{trial.failed}{reason}",
        "The path process_vm does not work: on this host only caches that were allocated from a pool move at memory "
        "speed (path mapped), all others go over TCP.",
        _permit(system, trial.code),
        facts,
    )


def _permit(system: System, code: int) -> str:
    """What may lift a refusal, the likeliest first."""
    if code == errno.ENOSYS:
        return f"{_ALLOW_TRACING} lets the calls pass; or a kernel with CONFIG_CROSS_MEMORY_ATTACH"
    ways = []
    scope = system.number(_YAMA)
    if scope:
        ways.append("reboot without kernel.yama.ptrace_scope=3" if scope == _YAMA_FOR_GOOD else _SYSCTL)
    if system.status("Seccomp") == "2" or _container_marks(system):
        ways.append(_ALLOW_TRACING)
    ways.append("run both processes as the same user, neither of them with PR_SET_DUMPABLE=0")
    return "; or ".join(ways)


def ptrace_scope(system: System) -> Finding:
    """Yama's restriction of who may look into whom."""
    scope = system.number(_YAMA)
    facts = {"ptrace_scope": scope}
    if not scope:
        seen = "not restricted by Yama" if scope is None else "kernel.yama.ptrace_scope is 0"
        meaning = "Processes of one user may look into each other."
        return Finding("ptrace-scope", _GROUP, Level.OK, seen, meaning, facts=facts)
    return Finding(
        "ptrace-scope",
        _GROUP,
        Level.NOTE,
        f"kernel.yama.ptrace_scope is {scope}",
        "Only processes with CAP_SYS_PTRACE use the path process_vm; see process-vm for whether this one does.",
        "it stays until the next boot" if scope == _YAMA_FOR_GOOD else _SYSCTL,
        facts,
    )


def seccomp(system: System) -> Finding:
    """A filter of system calls, as container engines install it."""
    mode = system.status("Seccomp")
    facts = {"mode": mode}
    if mode != "2":
        meaning = "No system call is filtered." if mode == "0" else "A filter would show as system calls that fail."
        return Finding("seccomp", _GROUP, Level.OK, _SECCOMP.get(mode or "", "unknown"), meaning, facts=facts)
    return Finding(
        "seccomp",
        _GROUP,
        Level.NOTE,
        "system calls are filtered",
        "Profiles may refuse process_vm_*, memfd_create or pidfd_open; the findings on these tell about this one.",
        f"if one of them is refused: {_ALLOW_TRACING}",
        facts,
    )


def privileges(system: System) -> Finding:
    """Whether this process can gain any."""
    value = system.status("NoNewPrivs")
    on = value == "1"
    seen = {"1": "no-new-privs is set", "0": "no-new-privs is not set"}.get(value or "", "no-new-privs is unknown")
    meaning = (
        "File capabilities (setcap on the interpreter) have no effect: grant capabilities to the container."
        if on
        else "Nothing about transfers depends on it."
    )
    fix = (
        "docker run --security-opt no-new-privileges=false (Kubernetes: allowPrivilegeEscalation: true)" if on else None
    )
    return Finding("no-new-privs", _GROUP, Level.NOTE if on else Level.OK, seen, meaning, fix, {"set": on})


def memfd(system: System) -> Finding:
    """Memory files with seals."""
    trial = system.trials.memfd()
    if trial.ok:
        meaning = "Every engine keeps its table of registered memory in one, pools are made of them."
        return Finding("memfd", _GROUP, Level.OK, "memfds can be made and sealed", meaning)
    return Finding(
        "memfd",
        _GROUP,
        Level.PROBLEM,
        trial.failed,
        "No engine starts: it keeps its table of registered memory in a memfd.",
        "ulimit -f unlimited, and a seccomp profile that lets memfd_create pass",
    )


def pidfd(system: System) -> Finding:
    """Handles of processes."""
    trial = system.trials.pidfd()
    if trial.ok:
        return Finding("pidfd", _GROUP, Level.OK, "pidfd_open works", "The end of a peer is noticed at once.")
    return Finding(
        "pidfd",
        _GROUP,
        Level.PROBLEM,
        trial.failed,
        "The path process_vm is not used: the end of a peer could not be noticed.",
        f"Linux 5.3 or newer, and a seccomp profile that lets pidfd_open pass: {_ALLOW_TRACING}",
    )


def handover(system: System) -> Finding:
    """Descriptors over Unix sockets."""
    trial = system.trials.handover()
    if trial.ok:
        meaning = "The path mapped works with peers in the same network namespace, without permission to trace."
        return Finding("handover", _GROUP, Level.OK, "descriptors pass over Unix sockets", meaning)
    return Finding(
        "handover",
        _GROUP,
        Level.PROBLEM,
        trial.failed,
        "The path mapped does not work: a pool cannot be handed to a peer.",
        "allow Unix sockets (AppArmor, SELinux and seccomp profiles may refuse them), and see open-files",
    )


def boot_id(system: System) -> Finding:
    """How peers recognise that they are on one host."""
    if system.text("/proc/sys/kernel/random/boot_id"):
        return Finding("boot-id", _GROUP, Level.OK, "readable", "Peers recognise that they run on the same host.")
    return Finding(
        "boot-id",
        _GROUP,
        Level.PROBLEM,
        "/proc/sys/kernel/random/boot_id cannot be read",
        "Peers cannot tell that they run on the same host: everything goes over TCP.",
        "mount -t proc proc /proc",
    )


def namespaces(system: System) -> Finding:
    """Which processes can be peers over ``process_vm``."""
    pid, user = system.namespace("pid"), system.namespace("user")
    facts = {"pid": pid, "user": user}
    if pid is None:
        return Finding(
            "namespaces",
            _GROUP,
            Level.WARNING,
            "/proc/self/ns cannot be read",
            "Peers take each other to be in the same pid namespace; where they are not, the probe of process_vm fails.",
            "mount -t proc proc /proc",
            facts,
        )
    own = [
        name
        for name, at, first in (("pid", pid, _FIRST_PID_NAMESPACE), ("user", user, _FIRST_USER_NAMESPACE))
        if at not in (None, first)
    ]
    if not own:
        meaning = "All processes of the host that share it can be peers over process_vm."
        return Finding("namespaces", _GROUP, Level.OK, "those of the host", meaning, facts=facts)
    return Finding(
        "namespaces",
        _GROUP,
        Level.NOTE,
        f"not those of the host: {' and '.join(own)} ({pid}, {user})",
        "The path process_vm reaches peers in the same pid and user namespace only: run the doctor there and compare. "
        "Other peers on this host need pools (path mapped).",
        "docker run --pid=container:NAME (Kubernetes: shareProcessNamespace: true)",
        facts,
    )


def container(system: System) -> Finding:
    """Hints that this is a container."""
    marks = _container_marks(system)
    facts = {"hints": marks}
    if not marks:
        return Finding("container", _GROUP, Level.OK, "no hint of one", "Nothing to share.", facts=facts)
    return Finding(
        "container",
        _GROUP,
        Level.NOTE,
        f"hints of a container: {', '.join(marks)}",
        "Peers in other containers of this host: process_vm needs a shared pid namespace and permission to trace, "
        "mapped the same user and a shared network namespace.",
        "docker run --pid=container:NAME --network=container:NAME --cap-add SYS_PTRACE (Kubernetes: one pod, "
        "shareProcessNamespace: true)",
        facts,
    )


def _container_marks(system: System) -> list[str]:
    files = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")
    groups = system.text("/proc/self/cgroup") or ""
    return [file for file in files if system.exists(file)] + [
        f"{mark} in /proc/self/cgroup" for mark in _CONTAINER_MARKS if mark in groups
    ]
