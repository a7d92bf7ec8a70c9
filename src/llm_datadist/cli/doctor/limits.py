"""What this process may have, and on how many cores it runs."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Final

from llm_datadist.cli.doctor.findings import Finding, Group, Level

if TYPE_CHECKING:
    from llm_datadist.cli.doctor.system import System

_GROUP: Final = Group.LIMITS
_BASE_FILES: Final = 64
"""Descriptors of a process with an engine and no link: it has some 20, the program has its own."""
_LINK_FILES: Final = 8
"""Descriptors of a link: the control connection, and a path's own; over TCP 7 were seen."""
_MANY_LINKS: Final = 100
_FEW_THREADS: Final = 256
"""What an engine may start at the very most, with many peers at a time."""
_USUAL_MAPPINGS: Final = 65_530
_UNLIMITED: Final = resource.RLIM_INFINITY


def open_files(system: System) -> Finding:
    """Descriptors."""
    soft, hard = system.limit(resource.RLIMIT_NOFILE)
    links = max(0, soft - _BASE_FILES) // _LINK_FILES
    facts = {"soft": _fact(soft), "hard": _fact(hard), "links": None if soft == _UNLIMITED else links}
    seen = f"{_text(soft)} (hard limit {_text(hard)})"
    if soft == _UNLIMITED or links >= _MANY_LINKS:
        meaning = "Enough for links to many peers: one takes up to 8 descriptors."
        return Finding("open-files", _GROUP, Level.OK, seen, meaning, facts=facts)
    fix = "ulimit -n 65536 (docker run --ulimit nofile=65536, systemd: LimitNOFILE=65536)"
    if links:
        meaning = f"Enough for about {links} links: one takes up to 8 descriptors. Further ones are LLM_LINK_FAILED."
        return Finding("open-files", _GROUP, Level.WARNING, seen, meaning, fix, facts)
    meaning = "Not enough for an engine, a link and the program itself: links and engines fail."
    return Finding("open-files", _GROUP, Level.PROBLEM, seen, meaning, fix, facts)


def locked_memory(system: System) -> Finding:
    """Pinned memory."""
    soft, hard = system.limit(resource.RLIMIT_MEMLOCK)
    facts = {"soft": _fact(soft), "hard": _fact(hard)}
    rdma = bool(system.names("/sys/class/infiniband"))
    if soft == _UNLIMITED or not rdma:
        meaning = "No path of this version pins memory." if not rdma else "RDMA libraries can pin what they register."
        return Finding("locked-memory", _GROUP, Level.OK, _kib(soft), meaning, facts=facts)
    return Finding(
        "locked-memory",
        _GROUP,
        Level.NOTE,
        f"{_kib(soft)}, and there is an RDMA device",
        "No path of this version pins memory, but RDMA libraries beside it do and fail above the limit.",
        "ulimit -l unlimited (docker run --ulimit memlock=-1, systemd: LimitMEMLOCK=infinity)",
        facts,
    )


def threads(system: System) -> Finding:
    """Processes and threads."""
    soft, _ = system.limit(resource.RLIMIT_NPROC)
    texts = system.group_texts("pids", "pids.max", "pids.max")
    bounds = [int(text) for text in texts if text.isdecimal()] + ([] if soft == _UNLIMITED else [soft])
    least = min(bounds, default=None)
    facts = {"limit": _fact(soft), "least": least}
    if least is not None and least < _FEW_THREADS:
        return Finding(
            "threads",
            _GROUP,
            Level.WARNING,
            f"{least} processes and threads of this user, or in this control group",
            "An engine has one thread, and starts up to some 200 where many peers ask at a time.",
            "ulimit -u 4096 (docker run --pids-limit=4096)",
            facts,
        )
    seen = "unlimited" if least is None else str(least)
    return Finding("threads", _GROUP, Level.OK, seen, "Enough for the threads of an engine.", facts=facts)


def mappings(system: System) -> Finding:
    """How many pieces memory may be cut into."""
    count = system.number("/proc/sys/vm/max_map_count")
    facts = {"max_map_count": count}
    if count is not None and count < _USUAL_MAPPINGS:
        return Finding(
            "map-count",
            _GROUP,
            Level.WARNING,
            str(count),
            "Advice about huge pages may cut mappings in pieces, and the pools of every peer on this host are mapped.",
            f"sysctl -w vm.max_map_count={_USUAL_MAPPINGS}",
            facts,
        )
    meaning = "Enough for pools of many peers, and for advice about huge pages."
    return Finding("map-count", _GROUP, Level.OK, str(count or "unknown"), meaning, facts=facts)


def sizes(system: System) -> Finding:
    """Limits that bound pools and the mapping of a peer's."""
    limits = {
        "address space (ulimit -v)": system.limit(resource.RLIMIT_AS)[0],
        "file size (ulimit -f)": system.limit(resource.RLIMIT_FSIZE)[0],
    }
    bounded = [f"{name}: {value >> 20} MiB" for name, value in limits.items() if value != _UNLIMITED]
    facts = dict(zip(("address_space", "file_size"), map(_fact, limits.values()), strict=True))
    if not bounded:
        return Finding("sizes", _GROUP, Level.OK, "unlimited", "Pools may have any size.", facts=facts)
    return Finding(
        "sizes",
        _GROUP,
        Level.WARNING,
        "; ".join(bounded),
        "A pool is a file in memory that is mapped, here and by peers: larger ones fail with LLM_OUT_OF_MEMORY.",
        "ulimit -v unlimited -f unlimited",
        facts,
    )


def cores(system: System) -> Finding:
    """Cores, by affinity and quota."""
    count = system.cores()
    shares = [*_quotas(system), float(count)]
    share = min(shares)
    facts = {"cores": count, "share": share}
    seen = f"{count} {'core' if count == 1 else 'cores'}" + (f", quota {share:.2g}" if share < count else "")
    if share >= 2:  # noqa: PLR2004 - one for each side
        meaning = "Large transfers copy with up to four threads, one a core."
        return Finding("cores", Group.PROCESSORS, Level.OK, seen, meaning, facts=facts)
    return Finding(
        "cores",
        Group.PROCESSORS,
        Level.WARNING,
        seen,
        "Both sides of a transfer, and the model, take turns on one core: transfers work, but wait for each other.",
        "taskset -pc 0-3 PID (docker run --cpus=4 --cpuset-cpus=0-3, Kubernetes: resources.limits.cpu)",
        facts,
    )


def _quotas(system: System) -> list[float]:
    """Cores that control groups grant, of both versions."""
    found = []
    for text in system.group_texts("cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        if quota.isdecimal():
            found.append(int(quota) / (int(period) if period.isdecimal() else 100_000))
    return found


def _text(limit: int) -> str:
    return "unlimited" if limit == _UNLIMITED else str(limit)


def _kib(limit: int) -> str:
    return "unlimited" if limit == _UNLIMITED else f"{limit >> 10} KiB"


def _fact(limit: int) -> int | None:
    """A limit as JSON has it: None is unlimited."""
    return None if limit == _UNLIMITED else limit
