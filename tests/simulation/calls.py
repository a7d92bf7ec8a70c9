"""Selectors and system calls on the descriptors of tasks."""

from __future__ import annotations

import ctypes
import errno
import selectors
import socket
from typing import TYPE_CHECKING, Any

from llm_datadist.memory import syscalls

if TYPE_CHECKING:
    from simulation.network import Network, Socket, Watched

_WAITALL = int(socket.MSG_WAITALL)  # an enum is slow


class Selector:
    """``selectors.DefaultSelector``."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._keys: dict[int, selectors.SelectorKey] = {}
        self._things: dict[int, Watched] = {}

    def __enter__(self) -> Selector:  # noqa: PYI034 - Self is of Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fd(self, thing: Any) -> int:
        fd = thing if isinstance(thing, int) else thing.fileno()
        if fd < 0:
            fd = next((key.fd for key in self._keys.values() if key.fileobj is thing), -1)
        if fd < 0:
            raise ValueError("a socket that is closed")
        return fd

    def register(self, thing: Any, events: int, data: Any = None) -> None:
        fd = self._fd(thing)
        if fd in self._keys:
            raise KeyError(fd)
        self._keys[fd] = selectors.SelectorKey(thing, fd, events, data)
        self._things[fd] = self._network.descriptors[fd]

    def modify(self, thing: Any, events: int, data: Any = None) -> None:
        fd = self._fd(thing)
        key = self._keys[fd]
        if key.events != events and self._things[fd] is not self._network.descriptors.get(fd):
            raise FileNotFoundError(errno.ENOENT, "the kernel watches another file by this number")
        self._keys[fd] = key._replace(events=events, data=data)

    def unregister(self, thing: Any) -> None:
        fd = self._fd(thing)
        del self._keys[fd]
        self._things.pop(fd)

    def get_map(self) -> dict[int, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        scheduler = self._network.scheduler
        scheduler.preempt()
        deadline = None if timeout is None else scheduler.now + timeout
        while True:
            ready = [(key, events) for fd, key in self._keys.items() if (events := self._ready(fd) & key.events)]
            if ready or (deadline is not None and deadline <= scheduler.now):
                scheduler.rng.shuffle(ready)
                return ready
            for thing in self._things.values():
                thing.waiting.append(scheduler.current)
            scheduler.park(deadline)
            for thing in self._things.values():
                if scheduler.current in thing.waiting:
                    thing.waiting.remove(scheduler.current)

    def _ready(self, fd: int) -> int:
        thing = self._things[fd]
        return thing.events() if self._network.descriptors.get(fd) is thing else 0

    def close(self) -> None:
        self._keys.clear()
        self._things.clear()


class SocketCalls:
    """The vectored calls of ``memory.syscalls`` on sockets."""

    Message = syscalls.Message

    def __init__(self, network: Network) -> None:
        self._network = network

    def receive(self, fd: int, address: int, size: int, flags: int) -> int:
        data = self._network.find(fd).recv(size, flags)
        ctypes.memmove(address, data, len(data))
        return len(data)

    def receive_iovecs(self, fd: int, iovecs: int, count: int, flags: int) -> int:
        sock = self._network.find(fd)
        with sock.one_call(socket.SO_RCVTIMEO):
            return self._receive_all(sock, iovecs, count, flags)

    def receive_message(self, fd: int, message: int, flags: int) -> int:
        header = syscalls.Message.from_address(message)
        return self.receive_iovecs(fd, header.iov, header.iovlen, flags)

    def _receive_all(self, sock: Socket, iovecs: int, count: int, flags: int) -> int:
        done = 0
        for address, size in _ranges(iovecs, count):
            at = 0
            while at < size:
                try:
                    data = sock.recv(size - at, int(flags) & ~_WAITALL)
                except OSError:
                    if done:
                        return done
                    raise
                if not data:
                    return done
                ctypes.memmove(address + at, data, len(data))
                at, done = at + len(data), done + len(data)
        return done

    def send_iovecs(self, fd: int, iovecs: int, count: int, flags: int) -> int:
        sock = self._network.find(fd)
        with sock.one_call(socket.SO_SNDTIMEO):
            return self._send_all(sock, iovecs, count, flags)

    def send_message(self, fd: int, message: int, flags: int) -> int:
        header = syscalls.Message.from_address(message)
        return self.send_iovecs(fd, header.iov, header.iovlen, flags)

    def _send_all(self, sock: Socket, iovecs: int, count: int, flags: int) -> int:
        done = 0
        for address, size in _ranges(iovecs, count):
            at = 0
            while at < size:
                try:
                    sent = sock.send(ctypes.string_at(address + at, size - at), flags)
                except OSError:
                    if done:
                        return done
                    raise
                at, done = at + sent, done + sent
        return done


def _ranges(iovecs: int, count: int) -> list[tuple[int, int]]:
    words = (ctypes.c_uint64 * (2 * count)).from_address(iovecs)
    return list(zip(words[::2], words[1::2], strict=True))
