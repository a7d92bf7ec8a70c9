"""The addresses at which an engine listens: its own, and those of rank-table links."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

from llm_datadist.net.listener import Listener

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from llm_datadist.net.address import Address
    from llm_datadist.net.loop import Loop
    from llm_datadist.net.tls import TlsContexts
    from llm_datadist.wire.data import Greeting


class Listeners:
    """Thread-safe. ``primary`` is the configured listen address; rendezvous addresses are counted."""

    def __init__(
        self,
        loop: Loop,
        on_control: Callable[[socket.socket], object],
        on_data: Callable[[socket.socket, Greeting], object],
        tls: TlsContexts | None = None,
    ) -> None:
        self._tls = tls
        self._loop = loop
        self._on_control = on_control
        self._on_data = on_data
        self._lock = threading.Lock()
        self._primary: Listener | None = None
        self._rendezvous: dict[Address, tuple[Listener, int]] = {}
        self._closed = False

    @property
    def primary(self) -> Address | None:
        """Where this engine listens, with the port that the system chose if 0 was asked for."""
        return self._primary.address if self._primary else None

    def switch(self, address: Address | None) -> None:
        """Listen at ``address`` instead of the present one; None: stop. On failure the present one stays.

        The same port as now changes nothing.

        Raises:
            OSError: it cannot be bound.
            ValueError: not an IP literal.
        """
        with self._lock:
            old = self._primary
            if address is not None and old is not None and old.address[1] == address[1]:
                return
            new = self._make(address) if address is not None else None
            self._primary = new
        if old is not None:
            old.close()

    def open(self, candidates: Sequence[Address]) -> list[Address]:
        """Listen at every candidate that is an address of this host: which one a peer reaches is not known here.

        Those to ``close`` are returned; the primary listener is not one of them.

        Raises:
            OSError: none can be bound, and there is no primary listener either.
        """
        failed = OSError(errno.EADDRNOTAVAIL, "no address")
        opened: list[Address] = []
        with self._lock:
            for address in dict.fromkeys(candidates):
                if self._primary is not None and self._primary.address == address:
                    continue
                try:
                    listener, count = self._rendezvous.get(address) or (self._make(address), 0)
                except OSError as error:
                    failed = error
                else:
                    self._rendezvous[address] = (listener, count + 1)
                    opened.append(address)
            if opened or self._primary is not None:
                return opened
        raise failed

    def close(self, addresses: Sequence[Address]) -> None:
        """Undo one ``open``."""
        unused: list[Listener] = []
        with self._lock:
            for address in addresses:
                if address not in self._rendezvous:  # closed with all others
                    continue
                listener, count = self._rendezvous.pop(address)
                if count > 1:
                    self._rendezvous[address] = (listener, count - 1)
                else:
                    unused.append(listener)
        for listener in unused:
            listener.close()

    def close_all(self) -> None:
        """Stop listening everywhere, for good; idempotent."""
        with self._lock:
            self._closed = True
            listeners = [listener for listener, _ in self._rendezvous.values()]
            if self._primary is not None:
                listeners.append(self._primary)
            self._primary, self._rendezvous = None, {}
        for listener in listeners:
            listener.close()

    def _make(self, address: Address) -> Listener:
        if self._closed:  # another thread has finalized the engine meanwhile
            raise OSError(errno.ESHUTDOWN, "this engine has been finalized")
        return Listener(address, self._loop, self._on_control, self._on_data, self._tls)
