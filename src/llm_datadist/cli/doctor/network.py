"""What TCP between hosts needs, and which devices there are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist.cli.doctor.findings import Finding, Group, Level
from llm_datadist.paths.nixl_options import INSTALL, rdma_devices

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llm_datadist.cli.doctor.system import System

_GROUP: Final = Group.NETWORK
_FAST_WINDOW: Final = 4 << 20
"""Bytes under way on one connection of 25 Gbit/s with a round trip of 1 ms, and a little more."""
_GOOD_WINDOW: Final = 16 << 20
_BACKLOG: Final = 512
"""What listeners ask for."""
_WINDOWS: Final = 3
"""Numbers in tcp_rmem: least, first, largest."""
_IPV6: Final = "/proc/net/if_inet6"


def loopback(system: System) -> Finding:
    """Connections at all."""
    trial = system.trials.loopback()
    if trial.ok:
        meaning = "Links between processes of this host can be made over 127.0.0.1."
        return Finding("loopback", _GROUP, Level.OK, "TCP over 127.0.0.1 works", meaning)
    return Finding(
        "loopback",
        _GROUP,
        Level.PROBLEM,
        trial.failed,
        "Every link begins with a TCP connection, also between processes of this host.",
        "ip link set lo up, and let firewall rules pass TCP on lo; see open-files, too",
    )


def buffers(system: System) -> Finding:
    """How much a connection may have under way."""
    receive, send = (_largest(system, f"/proc/sys/net/ipv4/{name}") for name in ("tcp_rmem", "tcp_wmem"))
    caps = [system.number(f"/proc/sys/net/core/{name}") for name in ("rmem_max", "wmem_max")]
    facts = {"tcp_rmem_max": receive, "tcp_wmem_max": send, "rmem_max": caps[0], "wmem_max": caps[1]}
    known = [value for value in (receive, send) if value is not None]
    if not known:
        meaning = "The kernel sizes the buffers of each connection up to net.ipv4.tcp_rmem and tcp_wmem."
        return Finding("socket-buffers", _GROUP, Level.OK, "unknown", meaning, facts=facts)
    seen = f"a connection grows to {_mib(receive)} received and {_mib(send)} sent"
    if min(known) >= _FAST_WINDOW:
        meaning = "Enough for fast networks of one data centre: the kernel sizes the buffers of each connection itself."
        return Finding("socket-buffers", _GROUP, Level.OK, seen, meaning, facts=facts)
    return Finding(
        "socket-buffers",
        _GROUP,
        Level.WARNING,
        seen,
        "One data connection to another host moves at most that much each round trip.",
        f'sysctl -w net.ipv4.tcp_rmem="4096 131072 {_GOOD_WINDOW}" net.ipv4.tcp_wmem="4096 65536 {_GOOD_WINDOW}"',
        facts,
    )


def _largest(system: System, path: str) -> int | None:
    numbers = system.numbers(path)
    return numbers[-1] if len(numbers) == _WINDOWS else None


def _mib(value: int | None) -> str:
    return "unknown" if value is None else f"{value / 2**20:.2g} MiB"


def backlog(system: System) -> Finding:
    """Connections that wait to be accepted."""
    count = system.number("/proc/sys/net/core/somaxconn")
    facts = {"somaxconn": count}
    if count is not None and count < _BACKLOG:
        return Finding(
            "listen-backlog",
            _GROUP,
            Level.NOTE,
            str(count),
            f"Listeners ask for {_BACKLOG}: where more peers link at the very same moment, some wait a second longer.",
            f"sysctl -w net.core.somaxconn={_BACKLOG}",
            facts,
        )
    meaning = "Many peers can link at the same moment."
    return Finding("listen-backlog", _GROUP, Level.OK, str(count or "unknown"), meaning, facts=facts)


def ipv6(system: System) -> Finding:
    """The other internet protocol."""
    there = bool(system.text(_IPV6))
    seen = "available" if there else "not available"
    meaning = "Peers may be named by IPv6 addresses." if there else "Name peers by IPv4 addresses."
    return Finding("ipv6", _GROUP, Level.OK, seen, meaning, facts={"available": there})


def rdma(system: System) -> Finding:
    """Devices for remote direct memory access."""
    found = system.names("/sys/class/infiniband")
    if not found:
        return _device("rdma", Level.OK, found, "TCP carries what goes between hosts.")
    active = rdma_devices(system.path("/sys/class/infiniband"))
    if not active:
        return _device("rdma", Level.NOTE, found, "No port of them is active: TCP carries what goes between hosts.")
    return _device("rdma", Level.OK, active, "The path nixl uses them between hosts that have NIXL.")


def nixl(system: System) -> Finding:
    """The library for RDMA and other fabrics."""
    trial = system.trials.nixl()
    active = rdma_devices(system.path("/sys/class/infiniband"))
    facts = {"works": trial.ok, "rdma": bool(active)}
    if trial.ok:
        use = "between hosts" if active else "only where LLMConfig.paths names it on both sides, for want of RDMA"
        return Finding("nixl", Group.DEVICES, Level.OK, "NIXL starts", f"The path nixl is used {use}.", facts=facts)
    if trial.conclusive:  # installed, but broken
        meaning = "The path nixl does not work; between hosts, tcp is used."
        return Finding("nixl", Group.DEVICES, Level.WARNING, trial.failed, meaning, INSTALL, facts)
    level = Level.NOTE if active else Level.OK
    meaning = "The RDMA devices are not used; between hosts, tcp is." if active else "Without RDMA it is not needed."
    return Finding("nixl", Group.DEVICES, level, trial.failed, meaning, INSTALL, facts)


def gpu(system: System) -> Finding:
    """Accelerators."""
    names = [*system.names("/proc/driver/nvidia/gpus"), *_matching(system.names("/dev"), ("davinci",))]
    if system.exists("/dev/kfd"):
        names.append("kfd")
    if not names:
        return _device("gpu", Level.OK, names, "Caches are in memory of the host.")
    return _device(
        "gpu", Level.NOTE, names, "Caches are registered by addresses of host memory: copy from the device to it first."
    )


def _matching(names: Iterable[str], starts: tuple[str, ...]) -> list[str]:
    """Numbered devices."""
    return [name for name in names if name.startswith(starts) and name[-1].isdecimal()]


def _device(name: str, level: Level, found: list[str], meaning: str) -> Finding:
    return Finding(name, Group.DEVICES, level, ", ".join(found) or "none", meaning, facts={"devices": found})
