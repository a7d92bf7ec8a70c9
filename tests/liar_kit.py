"""A small peer of our own making: says on a control connection whatever a test wants, true or not."""

from __future__ import annotations

import os
import secrets
import socket
from typing import Any

import msgspec

from llm_datadist.memory.regions import RegionTable
from llm_datadist.utils.process import boot_id, pid_namespace, start_time
from llm_datadist.wire import framing, messages
from net_helpers import WAIT_S


class Liar:
    """One process's worth of identity and memory, true until changed, and one control connection."""

    def __init__(self, cluster_id: int, paths: tuple[str, ...] = ("process_vm",)) -> None:
        self.table = RegionTable()
        self.identity = messages.Identity(
            cluster_id=cluster_id,
            incarnation=secrets.token_bytes(16),
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            pid=os.getpid(),
            start_time=start_time(os.getpid()),
        )
        self.offer = messages.Offer(
            probe_region=self.table.probe_region, nonce=self.table.nonce, table_fd=self.table.fd, paths=list(paths)
        )
        self.remote_accessible = True
        self.sock: socket.socket | None = None
        self._decoder = framing.FrameDecoder(framing.MAX_CONTROL_FRAME)
        self._heard: list[messages.Envelope] = []

    def close(self) -> None:
        """End it."""
        if self.sock is not None:
            self.sock.close()
        self.table.close()

    def pretend(self, **facts: Any) -> Liar:
        """Change facts of the identity."""
        self.identity = msgspec.structs.replace(self.identity, **facts)
        return self

    def offers(self, **facts: Any) -> Liar:
        """Change facts of the offer."""
        self.offer = msgspec.structs.replace(self.offer, **facts)
        return self

    def forget(self) -> None:
        """Begin another connection as if there had been none."""
        self._decoder = framing.FrameDecoder(framing.MAX_CONTROL_FRAME)
        self._heard.clear()

    def connect(self, address: tuple[str, int]) -> None:
        """Open the control connection."""
        self.sock = socket.create_connection(address, WAIT_S)
        self.sock.sendall(framing.preamble(framing.Kind.CONTROL))

    def accept(self, server: socket.socket) -> messages.Envelope:
        """Wait for a control connection; the ``Hello`` on it."""
        if self.sock is not None:
            self.sock.close()
        server.settimeout(WAIT_S)
        self.sock, _ = server.accept()
        self.sock.settimeout(WAIT_S)
        assert self.sock.recv(framing.PREAMBLE_SIZE, socket.MSG_WAITALL) == framing.preamble(framing.Kind.CONTROL)
        return self.hear()

    def say(self, body: messages.Body, number: int = 0, reply_to: int = 0) -> None:
        """Send a message."""
        assert self.sock is not None
        envelope = messages.Envelope(body=body, id=number, reply_to=reply_to)
        self.sock.sendall(framing.frame(messages.encode(envelope)))

    def hear(self) -> messages.Envelope:
        """The next message."""
        assert self.sock is not None
        while not self._heard:
            data = self.sock.recv(1 << 16)
            assert data, "the connection was closed"
            self._heard += map(messages.decode, self._decoder.feed(data))
        return self._heard.pop(0)

    def reply(self, number: int) -> messages.Body:
        """The reply to a request of ours; requests of the other side meanwhile are not answered."""
        while True:
            envelope = self.hear()
            if envelope.reply_to == number:
                return envelope.body

    def hello(self, timeout_ms: int = 5000) -> messages.Hello:
        """The introduction."""
        return messages.Hello(
            versions=(messages.VERSION_MIN, messages.VERSION_MAX),
            identity=self.identity,
            remote_accessible=self.remote_accessible,
            timeout_ms=timeout_ms,
            offer=self.offer,
        )

    def introduce(self, address: tuple[str, int], timeout_ms: int = 5000) -> messages.Body:
        """Connect and say hello; the answer."""
        self.connect(address)
        self.say(self.hello(timeout_ms), 1)
        return self.reply(1)

    def link(self, address: tuple[str, int]) -> messages.Body:
        """Go through the whole handshake as the connecting side; the last answer."""
        answer = self.introduce(address)
        if not isinstance(answer, messages.Welcome):
            return answer
        self.say(messages.Confirm(path="process_vm"), 2)
        return self.reply(2)

    def welcome(self, hello: messages.Envelope) -> None:
        """Answer a ``Hello``."""
        self.say(
            messages.Welcome(
                version=messages.VERSION_MAX,
                identity=self.identity,
                offer=self.offer,
                link_token=secrets.token_bytes(16),
            ),
            reply_to=hello.id,
        )
