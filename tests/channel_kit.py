"""Both ends of a control connection, watched."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from llm_datadist.net.channel import Channel
from net_helpers import WAIT_S, settle, tcp_pair

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

    from llm_datadist.net.loop import Loop
    from llm_datadist.wire.messages import Body


class End:
    """One end of a connection, and what became of it."""

    def __init__(self, sock: socket.socket, loop: Loop) -> None:
        self.loop = loop
        self.messages: list[tuple[Body, int]] = []
        self.arrived = threading.Event()
        self.reasons: list[str] = []
        self.closed = threading.Event()
        self.on_loop: set[bool] = set()
        self.channel = Channel(sock, loop)
        self.channel.on_message = self._message
        self.channel.on_close = self._closed

    def _message(self, channel: Channel, body: Body, request_id: int) -> None:
        assert channel is self.channel
        self.on_loop.add(self.loop.in_loop())
        self.messages.append((body, request_id))
        self.arrived.set()

    def _closed(self, channel: Channel, reason: str) -> None:
        assert channel is self.channel
        self.on_loop.add(self.loop.in_loop())
        self.reasons.append(reason)
        self.closed.set()

    def start(self) -> End:
        self.channel.start()
        return self

    def reason(self) -> str:
        """Why it was closed, exactly once."""
        assert self.closed.wait(WAIT_S)
        settle(self.loop)
        assert len(self.reasons) == 1
        return self.reasons[0]

    def wait_for(self, count: int) -> list[tuple[Body, int]]:
        """The first ``count`` messages."""
        while len(self.messages) < count:
            self.arrived.clear()
            if len(self.messages) < count:
                assert self.arrived.wait(WAIT_S)
        return self.messages[:count]


@contextlib.contextmanager
def watched_ends(loop: Loop) -> Iterator[tuple[End, End]]:
    """Two ends of one connection; nothing is answered."""
    left, right = (End(sock, loop).start() for sock in tcp_pair())
    yield left, right
    for end in (left, right):
        end.channel.close("end of the test")
        end.reason()
