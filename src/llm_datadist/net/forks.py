"""What a forked child must not keep: our sockets, whose other ends would never learn that the parent has died."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import socket

making: Final = threading.RLock()
"""Held from the making of a socket until it is owned: no child is forked in between, which would keep it."""
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def own(sock: socket.socket) -> socket.socket:
    """Close this socket in children that are forked later; the socket."""
    _sockets.add(sock)
    return sock


def _close_all() -> None:
    making.release()
    for sock in list(_sockets):
        with contextlib.suppress(OSError):
            sock.close()


os.register_at_fork(before=making.acquire, after_in_parent=making.release, after_in_child=_close_all)
