"""What the doctor says: plain values, shown to people and written as JSON alike."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA: Final = 1
"""Version of the JSON form. New findings, groups and facts may come without a change of it."""

Fact: TypeAlias = "str | int | float | bool | list[str] | None"


class Level(str, Enum):
    """How bad it is, the worst first."""

    PROBLEM = "problem"
    """Transfers, or a path between processes of this host, do not work."""
    WARNING = "warning"
    """Transfers work, but slower than they could, or only up to some number of them."""
    NOTE = "note"
    """Good to know."""
    OK = "ok"


class Group(str, Enum):
    """What a finding is about."""

    SAME_HOST = "same host"
    MEMORY = "memory"
    LIMITS = "limits"
    PROCESSORS = "processors"
    NETWORK = "network"
    DEVICES = "devices"
    SOFTWARE = "software"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at."""

    name: str
    """Never changes; for programs."""
    group: Group
    level: Level
    seen: str
    """What is so."""
    meaning: str
    """What that means for transfers."""
    fix: str | None = None
    """The command, or the configuration, that changes it."""
    facts: Mapping[str, Fact] = field(default_factory=dict)
    """The values behind ``seen``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All findings about one machine, the worst first."""

    schema: int = SCHEMA
    version: str
    """Of the library."""
    kernel: str
    python: str
    ok: bool
    """Whether there is no problem."""
    findings: tuple[Finding, ...]

    @classmethod
    def of(cls, findings: list[Finding], *, version: str, kernel: str, python: str) -> Report:
        """Put the worst first; otherwise the order stays."""
        order = list(Level)
        ranked = tuple(sorted(findings, key=lambda finding: order.index(finding.level)))
        ok = all(finding.level is not Level.PROBLEM for finding in ranked)
        return cls(version=version, kernel=kernel, python=python, ok=ok, findings=ranked)

    def counts(self) -> dict[Level, int]:
        """How many findings there are of each level."""
        counted = Counter(finding.level for finding in self.findings)
        return {level: counted[level] for level in Level}
