"""Configuration of the original's older mode; kept so that imports work, not used."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ClusterConfig:
    """One cluster of the older mode."""

    cluster_id: int = 0
    listen_ip_info: str = ""


@dataclass(frozen=True)
class EngineConfig:
    """Engine options of the older mode."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    options: dict[str, str] = field(default_factory=dict)
