"""An environment of its own for every peer, made when it is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).resolve().parents[2]
_INSTALL_S: Final = 600
_PROBE_S: Final = 60
_BASE: Final = ("numpy", "msgspec")
"""What the project needs to be importable there."""


class SetupError(Exception):
    """A peer cannot be installed here; the message says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What to install, without dependencies, which would bring gigabytes that are not needed."""

    name: str
    packages: tuple[str, ...]
    module: str
    """Imports if everything is there."""
    debian: tuple[str, ...] = ()
    """System libraries that its wheel expects."""


NIXL: Final = Peer("nixl", ("nixl-cu12==1.5.1",), "nixl_cu12._api")
# The wheel for machines without CUDA has the same engine; the other one does not even load without a driver.
MOONCAKE: Final = Peer(
    "mooncake",
    ("mooncake-transfer-engine-non-cuda==0.3.13",),
    "mooncake.engine",
    ("libibverbs1", "librdmacm1", "ibverbs-providers", "libnuma1", "libcurl4"),
)


def ready(peer: Peer, cache: Path) -> Path:
    """The Python of the peer's environment below ``cache``.

    Raises:
        SetupError: it cannot be made.
    """
    home = (cache / peer.name).resolve()
    python = home / "bin" / "python"
    stamp = home / "installed.txt"
    wanted = "\n".join((*_BASE, *peer.packages, str(PROJECT)))
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(home, ignore_errors=True)
        _do(f"make an environment for {peer.name}", sys.executable, "-m", "venv", str(home))
        pip = (str(python), "-m", "pip", "install", "-q", "--no-deps")
        _do(f"install {' '.join(peer.packages)}", *pip, *_BASE, *peer.packages)
        _do("install this project", *pip, "-e", str(PROJECT))
        stamp.write_text(wanted, encoding="utf-8")
    if problem := _cannot_import(python, peer):
        _install_libraries(peer, problem)
        if problem := _cannot_import(python, peer):
            raise SetupError(problem)
    return python


def _cannot_import(python: Path, peer: Peer) -> str:
    """Why its module cannot be imported; empty if it can."""
    found = subprocess.run(  # noqa: S603 - our own environment's Python
        [python, "-c", f"import {peer.module}, llm_datadist"],
        capture_output=True,
        text=True,
        timeout=_PROBE_S,
        check=False,
    )
    return found.stderr.strip().rpartition("\n")[2] if found.returncode else ""


def _install_libraries(peer: Peer, problem: str) -> None:
    if not peer.debian or os.geteuid() or shutil.which("apt-get") is None:
        hint = f"; it needs the Debian packages {' '.join(peer.debian)}" if peer.debian else ""
        message = f"{problem}{hint}"
        raise SetupError(message)
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    _do("read the list of Debian packages", "apt-get", "update", "-q")
    _do(f"install {' '.join(peer.debian)}", "apt-get", "install", "-y", "-q", *peer.debian)


def _do(what: str, *command: str) -> None:
    sys.stderr.write(f"{what} ...\n")
    try:
        subprocess.run(  # noqa: S603 - the commands of this module
            command, capture_output=True, text=True, timeout=_INSTALL_S, check=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"cannot {what}: {error}"
        raise SetupError(message) from error
    except subprocess.CalledProcessError as error:
        message = f"cannot {what}: {error.stderr.strip().rpartition(chr(10))[2]}"
        raise SetupError(message) from error
