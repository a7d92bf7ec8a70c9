"""Both ends of a path, as the conformance checks need them."""

from __future__ import annotations

import abc
import contextlib
import itertools
import os
import secrets
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from llm_datadist.memory.regions import RegionTable
from llm_datadist.net.workers import Workers
from llm_datadist.paths.base import Context, PathError, PathTimeoutError, Peer, PeerGoneError
from llm_datadist.paths.nixl_agent import NixlHost
from llm_datadist.paths.nixl_options import NixlOptions
from llm_datadist.testing.owner import TOKEN, WAIT_S, Owner, OwnerProcess, identity
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire.messages import AskAgent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.paths.base import Path, Transport
    from llm_datadist.testing.owner import MemoryOwner
    from llm_datadist.wire.messages import Body

_COPIERS: Final = 4
_FEWEST_THREADS: Final = 2


class PathEnds(abc.ABC):
    """A way to make paths to one owner of memory. Write one for a path that ``ends_of`` cannot connect."""

    owner: MemoryOwner
    """The other end, in the same or in another process."""

    @abc.abstractmethod
    def connect(self) -> Path:
        """A new path to the owner."""

    @abc.abstractmethod
    def register_here(self, address: int, size: int) -> None:
        """Memory of this process that will be read and written; it stays mapped until the checks are over."""

    @abc.abstractmethod
    def stop_owner(self) -> None:
        """End the owner in the middle of everything, as ``kill -9`` does; nothing of it is used afterwards."""


class _TransportEnds(PathEnds):
    def __init__(self, transport: Transport, owner: Owner | OwnerProcess) -> None:
        self.owner: Owner | OwnerProcess = owner
        self._transport = transport
        self._port = owner.port()
        self._numbers = itertools.count(1)
        self._regions = RegionTable()
        self._copiers = Workers("conformance-copy", _COPIERS)
        self._nixl = NixlHost(NixlOptions(wanted=True), self._regions)
        self._context = Context(
            identity=identity(),
            regions=self._regions,
            copiers=self._copiers,
            copy_threads=max(_FEWEST_THREADS, min(_COPIERS, len(os.sched_getaffinity(0)))),
            open_data=self._open_data,
            fence=lambda numbers, _deadline: owner.fence(numbers),
            token=TOKEN,
            ask=self._ask,
            nixl=self._nixl,
        )

    def connect(self) -> Path:
        """See ``PathEnds``."""
        owner = self.owner.introduce([self._transport.name])
        peer = Peer(owner.identity, owner.offer)
        context = replace(self._context, token=TOKEN + secrets.token_bytes(8))
        return self._transport.connect(peer, context, Deadline.after(WAIT_S))

    def register_here(self, address: int, size: int) -> None:
        """See ``PathEnds``."""
        self._regions.add(address, size)

    def stop_owner(self) -> None:
        """See ``PathEnds``."""
        self.owner.stop()

    def close(self) -> None:
        """Give everything back."""
        self._nixl.close()
        self.owner.close()
        self._copiers.close()
        self._regions.close()

    def _ask(self, body: Body, deadline: Deadline) -> Body:
        del deadline
        if not isinstance(body, AskAgent):
            message = f"an owner without a control connection does not answer {type(body).__name__}"
            raise PathError(message)
        try:
            return self.owner.tell_agent(body.regions)
        except EOFError as error:
            raise PeerGoneError(str(error)) from error

    def _open_data(self, count: int, deadline: Deadline) -> list[tuple[int, socket.socket]]:
        opened = []
        try:
            for _ in range(count):
                number = next(self._numbers)
                sock = socket.create_connection(("127.0.0.1", self._port), deadline.remaining())
                opened.append((number, sock))
                sock.settimeout(None)
                sock.sendall(number.to_bytes(8, "big"))
        except OSError as error:
            for _, sock in opened:
                sock.close()
            message = f"no data connection: {error}"
            raise (PathTimeoutError if deadline.expired() else PathError)(message) from error
        return opened


@contextlib.contextmanager
def ends_of(transport: Transport, *, same_process: bool = False) -> Iterator[PathEnds]:
    """Both ends for a transport that needs no more of a peer than ``Peer`` and ``Context`` offer.

    The owner is a child process, or lives in this one. It is on the same host, has a region table and a memory pool in
    which all regions lie, and serves data connections (``Context.open_data``) as an engine does.

    Raises:
        PathRejectedError: from ``connect``, if the transport does not work on this machine.
    """
    owner = Owner() if same_process else OwnerProcess()
    ends = _TransportEnds(transport, owner)
    try:
        yield ends
    finally:
        ends.close()
