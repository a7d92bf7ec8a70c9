"""Options of the connector, from ``kv_connector_extra_config``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from llm_datadist import LLMConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

MODES: Final = ("pull", "push")
_OURS: Final = (
    "listen_ip_info",
    "enable_cache_manager",
    "enable_remote_cache_accessible",
    "allow_multiple_instances",
    "sync_kv_timeout",
)

_LONGEST: Final = 10_000_000
_TIMES: Final = (
    ("lease_seconds", (int, float), "a positive number"),
    ("push_timeout_seconds", (int, float), "a positive number"),
    ("transfer_timeout_ms", (int,), "a positive integer"),
    ("link_timeout_ms", (int,), "a positive integer"),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """How the connector works; every field is a key of ``kv_connector_extra_config``."""

    mode: str = "pull"
    """"pull": the decode engine reads after prefill. "push": the prefill engine writes each layer when it is done."""
    host: str = "127.0.0.1"
    """IP address of this machine on which workers listen, and which they tell their peers."""
    port: int = 0
    """Of the first worker, the others follow, those of other data-parallel engines too; 0: the system chooses."""
    lease_seconds: float = 30.0
    """How long a prefill engine keeps blocks that nobody has read, and for which nobody has asked again."""
    transfer_timeout_ms: int = 10_000
    """For moving the KV of one request."""
    link_timeout_ms: int = 10_000
    """For reaching the workers of another engine."""
    push_timeout_seconds: float = 600.0
    """How long a decode engine waits for a push."""
    populate: bool = True
    """Have the system provide the memory of the whole KV cache at start, instead of in the middle of transfers."""
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Properties of ``LLMConfig``: ``{"secret_file": "/run/kv.secret"}``, ``{"paths": "tcp"}``."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Options:
        """Check what a user wrote; keys of others are not looked at.

        Raises:
            ValueError: a value is wrong; the text names key, value and remedy.
        """
        made = cls(**{field.name: given[field.name] for field in dataclasses.fields(cls) if field.name in given})
        made._check()
        return made

    def _check(self) -> None:
        if self.mode not in MODES:
            raise _wrong("mode", self.mode, "'pull' or 'push'")
        if not isinstance(self.host, str) or not self.host:
            raise _wrong("host", self.host, "an IP address of this machine")
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port < 1 << 16:
            raise _wrong("port", self.port, "a port, or 0")
        for name, kinds, wanted in _TIMES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < _LONGEST:
                raise _wrong(name, value, f"{wanted} of less than {_LONGEST:,}")
        if not isinstance(self.populate, bool):
            raise _wrong("populate", self.populate, "true or false")
        if not isinstance(self.config, dict):
            raise _wrong("config", self.config, "an object with properties of LLMConfig")
        for name in self.config:
            if name in _OURS or not hasattr(LLMConfig, str(name)):
                raise _wrong("config", name, "names of LLMConfig properties that the connector does not set itself")

    def generate(self, number: int, tensors: int) -> dict[str, str]:
        """Options of the transfer library for the worker with this number, which registers so many tensors."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        config = LLMConfig()
        config.listen_ip_info = f"{host}:{self.port + number if self.port else 0}"
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True
        config.allow_multiple_instances = True
        config.sync_kv_timeout = self.transfer_timeout_ms
        config.max_registered_addrs = max(240, 2 * tensors)
        for name, value in self.config.items():
            setattr(config, name, value)
        return config.generate_options()


def _wrong(key: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"kv_connector_extra_config[{key!r}] is {value!r}, but must be {wanted}")
