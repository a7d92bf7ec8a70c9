"""Huge pages, and room for caches."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from llm_datadist.cli.doctor.findings import Finding, Group, Level
from llm_datadist.cli.machine import MEMINFO, memory_bytes
from llm_datadist.memory.huge_pages import Outcome

if TYPE_CHECKING:
    from llm_datadist.cli.doctor.findings import Fact
    from llm_datadist.cli.doctor.system import System

_GROUP: Final = Group.MEMORY
_THP: Final = "/sys/kernel/mm/transparent_hugepage"
_DOCKER_SHM: Final = 64 << 20
_LITTLE: Final = 1 << 30
_SLOWER: Final = "copies between processes of this host run at half their speed or a little more"

_NOT_COLLAPSED: Final = {
    Outcome.UNSUPPORTED: (
        "the kernel does not know MADV_COLLAPSE",
        "Linux 6.1 or newer with huge pages, or register memory before it is first written",
    ),
    Outcome.NO_MEMORY: ("the system had no huge page left", "echo 1 > /proc/sys/vm/compact_memory"),
    Outcome.OUT_OF_TIME: (
        "it took longer than a second for 4 MiB",
        "run the doctor again when the machine is less busy",
    ),
}
_REFUSED: Final = (
    "the kernel refuses",
    "see THP_enabled in /proc/self/status: 0 is prctl(PR_SET_THP_DISABLE) by what started this process; leave it out",
)


def huge_pages(system: System) -> Finding:
    """Transparent huge pages when memory is first written."""
    found = re.search(r"\[(\w+)\]", system.text(f"{_THP}/enabled") or "")
    mode = found[1] if found else None
    facts: dict[str, Fact] = {"mode": mode, "page_bytes": system.number(f"{_THP}/hpage_pmd_size")}
    if mode in ("always", "madvise"):
        meaning = "Memory that is first written after it was registered comes in huge pages."
        return Finding("huge-pages", _GROUP, Level.OK, mode, meaning, facts=facts)
    return Finding(
        "huge-pages",
        _GROUP,
        Level.WARNING,
        "never" if mode else f"{_THP} cannot be read: the kernel has none, or hides them",
        f"Memory that is written after it was registered stays in 4 KiB pages: {_SLOWER}. "
        "Memory that is in use when it is registered can still be moved, see collapse.",
        f"echo madvise > {_THP}/enabled",
        facts,
    )


def collapse(system: System) -> Finding:
    """Moving memory that is in use into huge pages."""
    advice = system.trials.collapse()
    facts: dict[str, Fact] = {"outcome": advice.outcome.name.lower(), "bytes": advice.huge, "seconds": advice.seconds}
    if advice.outcome is Outcome.DONE:
        meaning = "Memory of caches is moved into huge pages when it is registered."
        return Finding("collapse", _GROUP, Level.OK, "MADV_COLLAPSE works", meaning, facts=facts)
    seen, fix = _NOT_COLLAPSED.get(advice.outcome, _REFUSED)
    return Finding(
        "collapse",
        _GROUP,
        Level.WARNING,
        seen,
        f"Memory that is in use when it is registered stays in 4 KiB pages: {_SLOWER}.",
        fix,
        facts,
    )


def hugetlb(system: System) -> Finding:
    """Pages that are set aside."""
    pages = system.number("/proc/sys/vm/nr_hugepages")
    if not pages:
        seen = "unknown" if pages is None else "no pages set aside"
        meaning = "None are needed: transparent huge pages serve."
        return Finding("hugetlb", _GROUP, Level.OK, seen, meaning, facts={"pages": pages})
    size = memory_bytes("Hugepagesize", system.path(str(MEMINFO))) or 0
    return Finding(
        "hugetlb",
        _GROUP,
        Level.NOTE,
        f"{pages} pages set aside, {_size(pages * size)}",
        "The library does not take memory from there; caches that you put there are registered like any other memory.",
        "sysctl -w vm.nr_hugepages=0 gives the memory back, if nothing else uses it",
        {"pages": pages, "page_bytes": size},
    )


def shared_memory(system: System) -> Finding:
    """``/dev/shm``, which inference engines use."""
    space = system.space("/dev/shm")  # noqa: S108 - asked for its size only
    if space is None:
        meaning = "The library does not need it: pools are memfds. Inference engines may."
        return Finding("dev-shm", _GROUP, Level.NOTE, "there is no /dev/shm", meaning, "mount -t tmpfs tmpfs /dev/shm")
    size, free = space
    facts = {"bytes": size, "free_bytes": free}
    seen = f"{_size(size)}, {_size(free)} free"
    if size <= _DOCKER_SHM:
        return Finding(
            "dev-shm",
            _GROUP,
            Level.NOTE,
            seen,
            "Enough for the library: pools are memfds, which it does not bound. Inference engines often need more.",
            "docker run --shm-size=16g",
            facts,
        )
    meaning = "The library does not use it: pools are memfds, which it does not bound."
    return Finding("dev-shm", _GROUP, Level.OK, seen, meaning, facts=facts)


def room(system: System) -> Finding:
    """Memory that caches can take."""
    available = memory_bytes("MemAvailable", system.path(str(MEMINFO)))
    texts = system.group_texts("memory", "memory.max", "memory.limit_in_bytes")
    limits = [int(text) for text in texts if text.isdecimal() and int(text) < 1 << 60]
    limit = min(limits, default=None)
    facts = {"available_bytes": available, "limit_bytes": limit}
    seen = f"{_size(available)} available" if available is not None else "unknown how much is available"
    if limit is not None:
        seen += f", control group limit {_size(limit)}"
    if min(value for value in (available, limit, 2 * _LITTLE) if value is not None) < _LITTLE:
        return Finding(
            "memory",
            _GROUP,
            Level.WARNING,
            seen,
            "Little room for caches and pools: a process that exceeds it is killed, or gets LLM_OUT_OF_MEMORY.",
            "end other programs, or raise the limit: docker run --memory=SIZE",
            facts,
        )
    return Finding("memory", _GROUP, Level.OK, seen, "Bounds caches and pools together.", facts=facts)


def _size(value: int) -> str:
    return f"{value / 2**30:.1f} GiB" if value >= 1 << 30 else f"{value / 2**20:.0f} MiB"
