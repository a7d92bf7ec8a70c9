"""Python, the packages the library needs, and those it can use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist.cli.doctor.findings import Finding, Group, Level

if TYPE_CHECKING:
    from llm_datadist.cli.doctor.system import System

_GROUP: Final = Group.SOFTWARE
_NEEDED: Final = ("numpy", "msgspec")
_OPTIONAL: Final = (
    "torch",
    "xxhash",
    "nixl-cu12",
    "mooncake-transfer-engine",
    "prometheus-client",
    "opentelemetry-sdk",
    "typer",
    "rich",
    "pybind11",
)


def needed(system: System) -> Finding:
    """What the library cannot do without."""
    versions = {name: system.version(name) for name in _NEEDED}
    missing = [name for name, version in versions.items() if version is None]
    seen = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    facts = {"python": system.python, "kernel": system.kernel, **versions}
    if missing:
        meaning = "The library cannot be imported as a whole."
        fix = f"pip install {' '.join(missing)}"
        return Finding("packages", _GROUP, Level.PROBLEM, seen, meaning, fix, facts)
    return Finding("packages", _GROUP, Level.OK, f"Python {system.python}, {seen}", "All that it needs.", facts=facts)


def optional(system: System) -> Finding:
    """What it, or programs beside it, can use."""
    versions = {name: system.version(name) for name in _OPTIONAL}
    present = [f"{name} {version}" for name, version in versions.items() if version is not None]
    absent = [name for name, version in versions.items() if version is None]
    seen = f"{', '.join(present) or 'none'}; not installed: {', '.join(absent) or 'none'}"
    meaning = "Nothing here is needed for transfers."
    return Finding("optional-packages", _GROUP, Level.OK, seen, meaning, facts=versions)


def environment(system: System) -> Finding:
    """Variables that set options."""
    trial, paths = system.trials.options(), system.paths()
    facts = {"paths": paths}
    if trial.ok and paths in (None, "auto"):
        meaning = "What the environment sets is accepted."
        return Finding("environment", _GROUP, Level.OK, "environment variables are valid", meaning, facts=facts)
    if trial.ok:
        seen = f"LLM_DATADIST_PATHS={paths}"
        meaning = "Only these transfer paths are used, in this order, where the program does not say otherwise."
        return Finding("environment", _GROUP, Level.NOTE, seen, meaning, "unset LLM_DATADIST_PATHS", facts)
    meaning = "LLMDataDist.init fails with LLM_PARAM_INVALID wherever the option is not set otherwise."
    fix = "unset the variable, or correct it"
    return Finding("environment", _GROUP, Level.PROBLEM, trial.failed, meaning, fix, facts)
