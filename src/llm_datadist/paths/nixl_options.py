"""What NIXL is told, and whether it may be used here: nothing in this module imports it."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llm_datadist.utils import environment

DEFAULT_BACKEND: Final = "UCX"
PACKAGES: Final = ("nixl_cu12", "nixl_cu13", "nixl")
"""Where its bindings are looked for."""
INSTALL: Final = "pip install 'llm-datadist[nixl]' (without its CUDA libraries: pip install --no-deps nixl-cu12)"
_DEVICES: Final = Path("/sys/class/infiniband")


class NixlUnavailableError(Exception):
    """NIXL cannot be used; ``hint`` says what would help, if anything."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class NixlOptions:
    """How an engine uses NIXL."""

    backend: str = DEFAULT_BACKEND
    params: tuple[tuple[str, str], ...] = ()
    """Of the backend, as NIXL takes them."""
    wanted: bool = False
    """Whether the user has named the path, so that it is used without RDMA, too."""
    encrypted: bool = False
    """Whether the links are encrypted, which NIXL does not do."""

    def objection(self, *, on_devices: bool = False) -> str | None:
        """Why NIXL is not used by itself, although the path is permitted; None if it is.

        ``on_devices`` is for transfers in which GPU memory takes part: nothing else reaches that.
        """
        if self.wanted:
            return None
        if self.encrypted:
            return "TLS is configured, and NIXL does not encrypt; it is used if LLMConfig.paths names it on both sides"
        if not on_devices and not rdma_devices():
            reason = "this host has no active RDMA device, and without one tcp is faster"
            how = "" if installed() else f"; NIXL is not installed, either: {INSTALL}"
            return f"{reason}; it is used if LLMConfig.paths names it on both sides{how}"
        return None


def rdma_devices(root: Path = _DEVICES) -> list[str]:
    """RDMA devices of this host with an active port, sorted."""
    found = []
    for state in root.glob("*/ports/*/state"):
        try:
            if "ACTIVE" in state.read_text():
                found.append(state.parts[-4])
        except OSError:  # gone meanwhile, or not for us
            continue
    return sorted(set(found))


def installed() -> str | None:
    """The package that holds NIXL; it is looked for, but not imported."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), None)


def load(options: NixlOptions) -> Any:
    """The bindings of NIXL, imported now.

    Raises:
        NixlUnavailableError: it is not installed, or broken.
    """
    package = installed()
    if package is None:
        message = "NIXL is not installed"
        raise NixlUnavailableError(message, INSTALL)
    environment.prepare_ucx(rdma=bool(rdma_devices()), tcp=options.wanted)
    try:
        return importlib.import_module(f"{package}._bindings")
    except Exception as error:
        message = f"NIXL is installed ({package}), but cannot be loaded: {error}"
        raise NixlUnavailableError(message, f"install it anew: {INSTALL}") from error
