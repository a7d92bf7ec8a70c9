"""The other end of a path for the conformance checks: memory with guards around it, in this process or in a child.

The child takes calls as lines of JSON on its standard input, answers each with a line on its standard output, and ends
with its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec
import numpy as np

from llm_datadist.memory import shared
from llm_datadist.memory.regions import RegionTable
from llm_datadist.net.handover import HandoverServer
from llm_datadist.net.loop import Loop
from llm_datadist.net.workers import Workers
from llm_datadist.observe.recorder import Recorder
from llm_datadist.paths import inprocess
from llm_datadist.paths.nixl_agent import NixlHost
from llm_datadist.paths.nixl_options import NixlOptions
from llm_datadist.paths.tcp_server import DataServer
from llm_datadist.utils.deadline import Deadline
from llm_datadist.utils.process import boot_id, pid_namespace, start_time
from llm_datadist.wire.messages import Agent, Identity, Offer

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")
GUARD: Final = 192
"""Bytes around each region that belong to nobody, on both sides of it."""
POISON: Final = 0xEE
"""What they hold."""
TOKEN: Final = secrets.token_bytes(8)
"""First half of the secret of each link; a child gets that of its parent."""
WAIT_S: Final = 30.0
_ANSWER_S: Final = 2 * WAIT_S
_ROOM: Final = 1 << 30
_ALIGN: Final = 4096
_THREADS: Final = 16
_NUMBER: Final = 8
_PROGRAM: Final = "from llm_datadist.testing.owner import main; main()"


def pattern(seed: int, size: int) -> NDArray[np.uint8]:
    """Bytes that differ from one seed to another."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def identity() -> Identity:
    """Of this process."""
    return Identity(
        cluster_id=secrets.randbelow(1 << 32),
        incarnation=secrets.token_bytes(16),
        boot_id=boot_id(),
        pid_namespace=pid_namespace(),
        pid=os.getpid(),
        start_time=start_time(os.getpid()),
    )


class Introduction(msgspec.Struct):
    """How an owner introduces itself."""

    identity: Identity
    offer: Offer


class MemoryOwner(Protocol):
    """Memory that a path under test reaches. ``size`` bytes of a region lie between two guards of ``GUARD`` bytes."""

    def register(self, size: int, shift: int) -> int:
        """A new region of zeros, ``shift`` bytes after a page boundary; its number."""

    def fill(self, region: int, seed: int) -> None:
        """Put ``pattern(seed, size)`` into a region, also into one that is not registered any more."""

    def memory(self, region: int) -> bytes:
        """What a region holds, with its guards, also one that is not registered any more."""

    def unregister(self, region: int) -> None:
        """Take a region out of the table of those that peers may name."""

    def epoch(self) -> int:
        """The epoch of that table."""

    def invalidate(self) -> int:
        """Begin a new epoch."""


class Owner:
    """A ``MemoryOwner`` on which all paths of this library can be connected: a region table and what serves it."""

    def __init__(self, token: bytes = TOKEN) -> None:
        """Start the threads, and listen on the loopback interface."""
        self.table: RegionTable = RegionTable()
        self._area = shared.create("llm-datadist-conformance", _ROOM)
        self._used = 0
        self._places: dict[int, tuple[int, int]] = {}
        self._token = token
        self._loop = Loop("conformance-owner")
        self._workers = Workers("conformance-serve", _THREADS)
        self._server = DataServer(self.table, self._loop, self._workers, Recorder())
        self._handover = HandoverServer(
            [*self.table.areas, self._area], self._loop, lambda given: given.startswith(token)
        )
        self._nixl = NixlHost(NixlOptions(wanted=True), self.table, [self._area])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._accepting = threading.Thread(target=self._accept, name="conformance-accept", daemon=True)
        self._accepting.start()
        self.identity: Identity = identity()
        inprocess.publish(self.identity.incarnation, self.table)

    def introduce(self, paths: list[str]) -> Introduction:
        """What a peer gets to know."""
        offer = Offer(
            probe_region=self.table.probe_region,
            nonce=self.table.nonce,
            table_fd=self.table.fd,
            paths=paths,
            handover=self._handover.name,
        )
        return Introduction(self.identity, offer)

    def port(self) -> int:
        """Where data connections are served: who connects says a number of eight bytes first."""
        return int(self._listener.getsockname()[1])

    def register(self, size: int, shift: int) -> int:
        """See ``MemoryOwner``."""
        base = self._area.base + self._used + GUARD + shift
        self._used += -(-(size + 2 * GUARD + shift) // _ALIGN) * _ALIGN
        if self._used > _ROOM:
            message = f"the checks use more than {_ROOM} bytes"
            raise MemoryError(message)
        region = self.table.add(base, size)
        self._places[region] = base, size
        self._whole(region)[:GUARD] = self._whole(region)[-GUARD:] = POISON
        return region

    def _whole(self, region: int) -> NDArray[np.uint8]:
        base, size = self._places[region]
        whole = size + 2 * GUARD
        return np.frombuffer(memoryview((ctypes.c_uint8 * whole).from_address(base - GUARD)), dtype=np.uint8)

    def fill(self, region: int, seed: int) -> None:
        """See ``MemoryOwner``."""
        self._whole(region)[GUARD:-GUARD] = pattern(seed, self._places[region][1])

    def memory(self, region: int) -> bytes:
        """See ``MemoryOwner``."""
        return self._whole(region).tobytes()

    def unregister(self, region: int) -> None:
        """See ``MemoryOwner``; returns when no request is being served from it."""
        self.table.remove([region])
        if not self.table.wait_unused([region], Deadline.after(WAIT_S)):
            message = f"requests of peers still use the region after {WAIT_S} s"
            raise TimeoutError(message)

    def epoch(self) -> int:
        """See ``MemoryOwner``."""
        return self.table.epoch

    def invalidate(self) -> int:
        """See ``MemoryOwner``."""
        return self.table.invalidate()

    def fence(self, numbers: list[int]) -> bool:
        """Stop using these data connections; whether that is over in time."""
        done = threading.Event()
        self._server.give_up(self._token, numbers, done.set)
        return done.wait(WAIT_S)

    def tell_agent(self, regions: list[int]) -> Agent:
        """What a peer needs in order to reach these regions over NIXL."""
        return self._nixl.agent().tell(regions)

    def stop(self) -> None:
        """Serve nobody any more."""
        self.table.stop()
        self._server.close()

    def close(self) -> None:
        """End everything; idempotent."""
        inprocess.withdraw(self.identity.incarnation)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(WAIT_S)
        self._handover.close()
        self._server.close()
        self._nixl.close()
        self.table.wait_idle(Deadline.after(WAIT_S))
        self._workers.close()
        self._loop.close()
        self.table.close()
        shared.release(self._area)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.settimeout(WAIT_S)
                number = int.from_bytes(sock.recv(_NUMBER, socket.MSG_WAITALL), "big")
                sock.settimeout(None)
                self._server.add(self._token, number, sock, 0)


class _Call(msgspec.Struct, array_like=True):
    method: str
    args: list[Any]


class OwnerProcess:
    """An ``Owner`` in a child process. Thread-safe."""

    def __init__(self) -> None:
        """Start it.

        Calls of its methods raise EOFError when it has ended, TimeoutError when it does not answer.

        Raises:
            OSError: the system does not allow it.
        """
        self._lock = threading.Lock()
        self._child = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-c", _PROGRAM, TOKEN.hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def _call(self, kind: type[T], method: str, *args: object) -> T:
        with self._lock:
            ask, answers = _pipes(self._child)
            with contextlib.suppress(BrokenPipeError):
                ask.write(msgspec.json.encode(_Call(method, list(args))) + b"\n")
                ask.flush()
            if not _readable(answers):
                message = f"the owner's process does not answer {method} within {_ANSWER_S} s"
                raise TimeoutError(message)
            line = answers.readline()
        if not line:
            message = f"the owner's process has ended with {self._child.wait()} during {method}"
            raise EOFError(message)
        return msgspec.json.decode(line, type=kind)

    def introduce(self, paths: list[str]) -> Introduction:
        """See ``Owner.introduce``."""
        return self._call(Introduction, "introduce", paths)

    def port(self) -> int:
        """See ``Owner.port``."""
        return self._call(int, "port")

    def register(self, size: int, shift: int) -> int:
        """See ``MemoryOwner``."""
        return self._call(int, "register", size, shift)

    def fill(self, region: int, seed: int) -> None:
        """See ``MemoryOwner``."""
        self._call(type(None), "fill", region, seed)

    def memory(self, region: int) -> bytes:
        """See ``MemoryOwner``."""
        return self._call(bytes, "memory", region)

    def unregister(self, region: int) -> None:
        """See ``MemoryOwner``."""
        self._call(type(None), "unregister", region)

    def epoch(self) -> int:
        """See ``MemoryOwner``."""
        return self._call(int, "epoch")

    def invalidate(self) -> int:
        """See ``MemoryOwner``."""
        return self._call(int, "invalidate")

    def fence(self, numbers: list[int]) -> bool:
        """See ``Owner.fence``; a process that has ended has stopped."""
        try:
            return self._call(bool, "fence", numbers)
        except EOFError:
            return True

    def tell_agent(self, regions: list[int]) -> Agent:
        """See ``Owner.tell_agent``."""
        return self._call(Agent, "tell_agent", regions)

    def stop(self) -> None:
        """Kill it."""
        self._child.kill()
        self._child.wait(WAIT_S)

    def close(self) -> None:
        """End it; idempotent."""
        for pipe in _pipes(self._child):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            self._child.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.stop()


def _readable(pipe: IO[bytes]) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    return bool(poll.poll(_ANSWER_S * 1000))


def _pipes(child: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    if child.stdin is None or child.stdout is None:
        message = "the child was started without pipes"
        raise ValueError(message)
    return child.stdin, child.stdout


def main() -> None:
    """Serve the calls of a parent until its end."""
    owner = Owner(bytes.fromhex(sys.argv[1]))
    for line in sys.stdin.buffer:
        call = msgspec.json.decode(line, type=_Call)
        sys.stdout.buffer.write(msgspec.json.encode(getattr(owner, call.method)(*call.args)) + b"\n")
        sys.stdout.buffer.flush()
    owner.close()
