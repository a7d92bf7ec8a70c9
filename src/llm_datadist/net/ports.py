"""Why an address cannot be listened at, and who has its port."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llm_datadist.net.address import text
from llm_datadist.utils import limits
from llm_datadist.utils.limits import Limit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.net.address import Address

_LISTENING: Final = "0A"
_SEARCH_S: Final = 0.5


def why_not(address: Address, error: OSError) -> Limit:
    """What is in the way of listening at ``address``, and what to do about it."""
    reason, hint = limits.explain(error)
    if error.errno == errno.EADDRINUSE:
        owner = _owner(address[1])
        reason = f"{reason} ({owner})" if owner else reason
        hint = "choose another port (0 takes a free one) or end the process that uses it"
    elif error.errno == errno.EACCES:
        first = _first_free_for_all()
        reason = f"{reason} (ports below {first} are for privileged processes)"
        hint = f"choose a port from {first} on, or grant CAP_NET_BIND_SERVICE"
    elif error.errno == errno.EADDRNOTAVAIL:
        hint = "choose an address that a network interface of this host has"
    return Limit(f"cannot listen at {text(address)}: {reason}", hint)


def _first_free_for_all() -> int:
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text(encoding="ascii"))
    return 1024


def _owner(port: int) -> str | None:
    """Who listens at a port of this network namespace, as far as this process may see it."""
    sockets = dict(_listening(port))
    if not sockets:
        return None
    wanted = {f"socket:[{inode}]" for inode in sockets}
    until = time.monotonic() + _SEARCH_S
    others = (each for each in Path("/proc").iterdir() if each.name.isdigit())
    for process in (Path("/proc/self"), *others):
        if time.monotonic() > until:
            break
        with contextlib.suppress(OSError):  # not ours to look into, or gone
            if any(os.readlink(fd) in wanted for fd in (process / "fd").iterdir()):  # noqa: PTH115 - far quicker
                if process.name == "self":
                    return "this process listens there"
                name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
                return f"process {process.name} ({name}) listens there"
    return f"a process of user {next(iter(sockets.values()))} listens there"


def _listening(port: int) -> Iterator[tuple[int, int]]:
    """(inode, user) of all sockets that listen at a port."""
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rsplit(":", 1)[1], 16) == port:
                yield int(fields[9]), int(fields[7])
