"""The machine that a command runs on."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Final

from llm_datadist.cli.bench.results import Machine

MEMINFO: Final = Path("/proc/meminfo")
_CPUINFO: Final = Path("/proc/cpuinfo")
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_UNKNOWN: Final = "unknown"


def memory_bytes(field: str, meminfo: Path = MEMINFO) -> int | None:
    """A field of /proc/meminfo such as ``MemAvailable``; None if the system does not tell."""
    found = re.search(rf"^{field}: +(\d+) kB$", _read(meminfo), re.MULTILINE)
    return int(found[1]) << 10 if found else None


def fingerprint() -> Machine:
    """What the speed of transfers depends on."""
    cpu = re.search(r"^model name\s*: (.+)$", _read(_CPUINFO), re.MULTILINE)
    huge_pages = re.search(r"\[(\w+)\]", _read(_HUGE_PAGES))
    return Machine(
        cpu=cpu[1].strip() if cpu else platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes("MemTotal") or 0,
        kernel=platform.release(),
        python=platform.python_version(),
        huge_pages=huge_pages[1] if huge_pages else _UNKNOWN,
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
