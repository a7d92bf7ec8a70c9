"""What the network tests share: a loop that must end, records of the log, and sockets that are closed."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from typing import TYPE_CHECKING

from llm_datadist.net.loop import Loop
from llm_datadist.utils import log
from llm_datadist.utils.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 20.0
"""Longer than anything takes here, on a machine however busy: who waits this long has found a failure."""


@contextlib.contextmanager
def running_loop(name: str = "test-loop") -> Iterator[Loop]:
    """A loop whose thread must have ended afterwards."""
    loop = Loop(name)
    try:
        yield loop
    finally:
        loop.close()
        loop._thread.join(WAIT_S)
    assert not loop._thread.is_alive()


def settle(loop: Loop) -> None:
    """Return when the loop has done everything that was queued."""
    done = threading.Event()
    loop.call_soon(done.set)
    assert done.wait(WAIT_S)


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.seen: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record)


@contextlib.contextmanager
def logged(level: int = logging.DEBUG) -> Iterator[list[logging.LogRecord]]:
    """The records that the library logs meanwhile."""
    logger = log.get_logger()
    handler, before = _Records(), logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield handler.seen
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected TCP sockets: the one that connected, and the one that was accepted."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        connecting = socket.create_connection(server.getsockname(), timeout=WAIT_S)
        accepted, _ = server.accept()
    connecting.settimeout(None)  # a channel wants blocking sockets
    accepted.settimeout(None)
    return connecting, accepted


def receive(sock: socket.socket, size: int) -> bytes:
    """Exactly this many bytes, or fewer at the end of the stream."""
    sock.settimeout(WAIT_S)
    data = b""
    while len(data) < size:
        try:
            more = sock.recv(size - len(data))
        except ConnectionResetError:
            break
        if not more:
            break
        data += more
    return data


def ended(sock: socket.socket) -> bool:
    """Whether the other side closes this connection without another byte."""
    return receive(sock, 1) == b""


def soon() -> Deadline:
    """A deadline that only a failure reaches."""
    return Deadline.after(WAIT_S)
