"""What cannot be read anywhere: it is tried, with the calls that transfers use."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from llm_datadist.engine.options import EngineOptions
from llm_datadist.memory import huge_pages, shared, syscalls
from llm_datadist.memory.regions import RegionTable
from llm_datadist.paths.nixl_options import installed
from llm_datadist.status import LLMException

if TYPE_CHECKING:
    from typing import IO

    from llm_datadist.memory.huge_pages import Advice

NONCE_BYTES: Final = 32
_CHILD_S: Final = 20.0
_CONNECT_S: Final = 5.0
_NIXL_S: Final = 60.0
_COLLAPSE_BYTES: Final = 4 << 20
_FAILED: Final = "a process that was started for the trial"


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of something that was tried."""

    failed: str = ""
    """What did not work; empty if all did."""
    code: int = 0
    """The ``errno`` it failed with, if any."""
    conclusive: bool = True
    """Whether what failed is what was to be tried, and not the means to try it."""

    @property
    def ok(self) -> bool:
        """Whether it works."""
        return not self.failed


class Iovec(ctypes.Structure):
    """``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def process_vm() -> Trial:
    """Whether two processes reach into each other as ``process_vm`` needs it.

    A child reads a nonce from this process, writes another one, and opens a memfd of it; then this process reads the
    child's. What a parent may do to its child says little about peers, what a child may do to its parent says more.
    """
    nonce, answer = ctypes.create_string_buffer(secrets.token_bytes(NONCE_BYTES), NONCE_BYTES), _room()
    try:
        table = os.memfd_create("llm-datadist-doctor", os.MFD_CLOEXEC)
    except OSError as error:
        return _trial("no memfd can be made", error, conclusive=False)
    places = (os.getpid(), ctypes.addressof(nonce), ctypes.addressof(answer), table)
    try:
        with subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "llm_datadist.cli.doctor.child", *map(str, places)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as child:
            try:
                return _judge(child, nonce.raw, answer)
            finally:
                child.kill()
    except OSError as error:
        return _trial("no process can be started", error, conclusive=False)
    finally:
        os.close(table)


def _judge(child: subprocess.Popen[bytes], nonce: bytes, answer: ctypes.Array[ctypes.c_char]) -> Trial:
    try:
        told: dict[str, Any] = json.loads(_line(cast("IO[bytes]", child.stdout)))
    except ValueError:
        return Trial(f"{_FAILED} ended without a word, or said nothing for {_CHILD_S:.0f} s", conclusive=False)
    if told["failed"]:
        return Trial(f"{_FAILED} could not {told['failed']} its parent", told["code"])
    if answer.raw != nonce[::-1]:
        return Trial(f"{_FAILED} read other bytes than there are")
    copy = _room()
    try:
        reach(syscalls.process_vm_readv, child.pid, copy, told["address"])
    except OSError as error:
        return _trial(f"this process could not read {_FAILED}", error)
    return Trial() if copy.raw == nonce else Trial(f"this process read other bytes than {_FAILED} has")


def _line(stream: IO[bytes]) -> bytes:
    """One line, or as much as came in time."""
    data, end = b"", time.monotonic() + _CHILD_S
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not data.endswith(b"\n") and selector.select(max(0.0, end - time.monotonic())):
            more = os.read(stream.fileno(), 4096)
            if not more:
                break
            data += more
    return data


def reach(call: Any, pid: int, ours: ctypes.Array[ctypes.c_char], theirs: int) -> None:
    """Read all of ``ours`` from address ``theirs`` of a process, or write it there.

    Raises:
        OSError: the kernel refuses.
    """
    here, there = Iovec(ctypes.addressof(ours), len(ours)), Iovec(theirs, len(ours))
    call(pid, ctypes.addressof(here), ctypes.addressof(there), 1)


def _room() -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(NONCE_BYTES)


def _trial(what: str, error: OSError, *, conclusive: bool = True) -> Trial:
    return Trial(f"{what}: {error.strerror or error}", error.errno or 0, conclusive)


def nixl() -> Trial:
    """Whether NIXL starts, and ends, in a process of its own: what is wrong with it may be a crash."""
    if installed() is None:
        return Trial("NIXL is not installed", conclusive=False)
    command = [sys.executable, "-m", "llm_datadist.cli.doctor.nixl_child"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NIXL_S, check=False)  # noqa: S603 - ours
    except subprocess.TimeoutExpired:
        return Trial(f"a process that uses NIXL does not end within {_NIXL_S:.0f} s")
    except OSError as error:
        return _trial("NIXL cannot be tried, as no process can be started", error, conclusive=False)
    if done.stdout:
        return Trial(done.stdout)
    if done.returncode < 0:
        return Trial(f"a process that uses NIXL is ended by signal {-done.returncode}")
    return Trial(f"a process that uses NIXL ends with {done.returncode}") if done.returncode else Trial()


def memfd() -> Trial:
    """Whether the region table, which every engine has, can be made: memfds, and seals on them."""
    try:
        RegionTable().close()
    except OSError as error:
        return _trial("memfd_create, or sealing what it made, fails", error)
    return Trial()


def pidfd() -> Trial:
    """Whether the end of a process can be noticed."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return _trial("pidfd_open fails", error)
    return Trial()


def handover() -> Trial:
    """Whether a descriptor can be handed over a Unix socket in the abstract namespace, as ``mapped`` does."""
    try:
        area = shared.create("llm-datadist-doctor", mmap.PAGESIZE)
        try:
            with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
                server.bind(f"\0llm-datadist-doctor-{secrets.token_hex(8)}")
                server.listen()
                client.settimeout(_CONNECT_S)
                client.connect(server.getsockname())
                socket.send_fds(client, [b"x"], [area.fd])
                accepted, _ = server.accept()
                with accepted:
                    _, descriptors, _, _ = socket.recv_fds(accepted, 1, 1)
                    for descriptor in descriptors:
                        os.close(descriptor)
        finally:
            shared.release(area)
    except OSError as error:
        return _trial("handing a memfd over a Unix socket fails", error)
    return Trial() if descriptors else Trial("a descriptor that was handed over a Unix socket did not arrive")


def loopback() -> Trial:
    """Whether a TCP connection to this machine itself works."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(_CONNECT_S)
            with socket.create_connection(server.getsockname(), timeout=_CONNECT_S):
                server.accept()[0].close()
    except OSError as error:
        return _trial("a TCP connection over 127.0.0.1 fails", error)
    return Trial()


def options() -> Trial:
    """Whether the engine accepts what the environment sets."""
    try:
        EngineOptions.parse({"llm.Role": "Mix"})
    except LLMException as error:
        return Trial(str(error))
    return Trial()


def collapse() -> Advice:
    """Whether memory that is in use is moved into huge pages."""
    with mmap.mmap(-1, _COLLAPSE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"\1" * _COLLAPSE_BYTES)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return huge_pages.advise([(start, start + _COLLAPSE_BYTES)])
