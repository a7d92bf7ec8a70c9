"""What the checks may look at. Tests put a folder in the place of ``/`` and values in the place of calls."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from llm_datadist.cli.doctor import trials
from llm_datadist.utils import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llm_datadist.cli.doctor.trials import Trial
    from llm_datadist.memory.huge_pages import Advice


@dataclass(frozen=True, slots=True)
class Trials:
    """What is found out by doing it."""

    process_vm: Callable[[], Trial] = trials.process_vm
    memfd: Callable[[], Trial] = trials.memfd
    pidfd: Callable[[], Trial] = trials.pidfd
    handover: Callable[[], Trial] = trials.handover
    loopback: Callable[[], Trial] = trials.loopback
    options: Callable[[], Trial] = trials.options
    collapse: Callable[[], Advice] = trials.collapse
    nixl: Callable[[], Trial] = trials.nixl


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _space(path: str) -> tuple[int, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class System:
    """This machine, as this process sees it. What cannot be read is None, or empty."""

    root: Path = Path("/")
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    cores: Callable[[], int] = _cores
    space: Callable[[str], tuple[int, int] | None] = _space
    """Bytes in all, and free ones, of a file system."""
    version: Callable[[str], str | None] = _version
    """Of an installed package."""
    paths: Callable[[], str | None] = environment.paths
    """What the environment says of transfer paths."""
    trials: Trials = field(default_factory=Trials)
    python: str = platform.python_version()
    kernel: str = platform.release()

    def path(self, path: str) -> Path:
        """Where an absolute path lies."""
        return self.root / path.lstrip("/")

    def text(self, path: str) -> str | None:
        """Content of a file, without blanks around it."""
        try:
            return self.path(path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def numbers(self, path: str) -> list[int]:
        """The numbers in a file that has nothing else."""
        try:
            return [int(word) for word in (self.text(path) or "").split()]
        except ValueError:
            return []

    def number(self, path: str) -> int | None:
        """The first of them."""
        found = self.numbers(path)
        return found[0] if found else None

    def names(self, folder: str) -> list[str]:
        """What a folder holds, sorted."""
        try:
            return sorted(entry.name for entry in self.path(folder).iterdir())
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Whether there is such a file, as far as may be seen."""
        return os.path.lexists(self.path(path))

    def namespace(self, kind: str) -> str | None:
        """What ``/proc/self/ns`` says, such as ``pid:[4026531836]``."""
        try:
            return os.readlink(self.path(f"/proc/self/ns/{kind}"))  # noqa: PTH115 - a name, not a path
        except OSError:
            return None

    def status(self, field: str) -> str | None:
        """A line of ``/proc/self/status``."""
        for line in (self.text("/proc/self/status") or "").splitlines():
            name, _, value = line.partition(":")
            if name == field:
                return value.strip()
        return None

    def group_texts(self, controller: str, file: str, old_file: str) -> Iterator[str]:
        """A file of each control group that this process is in, of both versions, from its own to the root."""
        for line in (self.text("/proc/self/cgroup") or "0::/").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers and controller not in controllers.split(","):
                continue
            base = f"/sys/fs/cgroup/{controllers}" if controllers else "/sys/fs/cgroup"
            within = PurePosixPath(path.lstrip("/"))
            for place in (within, *within.parents):
                text = self.text(f"{base}/{place}/{old_file if controllers else file}")
                if text is not None:
                    yield text
