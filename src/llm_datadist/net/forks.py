"""What a forked child must not keep: our sockets, whose other ends would never learn that the parent has died."""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def own(sock: socket.socket) -> socket.socket:
    """Close this socket in children that are forked later; the socket."""
    _sockets.add(sock)
    return sock


def _close_all() -> None:
    for sock in list(_sockets):
        with contextlib.suppress(OSError):
            sock.close()


os.register_at_fork(after_in_child=_close_all)
