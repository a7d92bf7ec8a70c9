"""Several processes in one: the real engines, on tasks, virtual sockets and a virtual clock.

While a world is installed, the modules of the library find these instead of ``threading``, ``socket``, ``time`` and so
on. What a module takes from the system and is not simulated fails at once, with its name.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import importlib
import os
import queue
import secrets
import selectors
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from llm_datadist.memory import regions, syscalls
from llm_datadist.utils.process import start_time
from simulation.calls import Selector, SocketCalls
from simulation.network import FIRST_FD, Bell, Ending, Network, Socket
from simulation.scheduler import Scheduler
from simulation.threads import Primitives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from simulation.scheduler import Task

_ROOMS = ("engine", "net", "paths", "utils.deadline", "utils.process", "utils.turn", "memory.regions", "memory.pool")


class Process:
    """One operating system process."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.pid = world.next_pid()
        self.alive = True
        self.end_fd = os.eventfd(0)
        """Readable once it has ended."""
        self.endings: list[Ending] = []
        """The pidfds of it."""
        self._world = world

    def __str__(self) -> str:
        return self.name

    def run(self, name: str, call: Callable[[], object]) -> Task:
        """Start a thread in it."""
        return self._world.scheduler.spawn(self, name, call)

    def kill(self) -> None:
        """End it at once."""
        if self.alive:
            self.alive = False
            os.eventfd_write(self.end_fd, 1)
            for ending in self.endings:
                ending.changed()
            for task in list(self._world.scheduler.tasks):
                if task.host is self:
                    self._world.scheduler.kill(task)
            self._world.network.end(self)


class World:
    """Processes, their network and their clock."""

    def __init__(self, seed: int) -> None:
        self.scheduler = Scheduler(seed)
        self.primitives = Primitives(self.scheduler)
        self.network = Network(self.scheduler)
        self.processes: dict[int, Process] = {}
        self._pid = 100_000
        self.watcher = self.process("watcher")
        """Looks on, and never dies."""

    def next_pid(self) -> int:
        self._pid += 1
        return self._pid

    def process(self, name: str) -> Process:
        """Start a process without threads."""
        process = Process(self, name)
        self.processes[process.pid] = process
        return process

    def living(self, pid: int) -> Process | None:
        """The process with this number, if it runs."""
        process = self.processes.get(pid)
        return process if process is not None and process.alive else None

    def close(self) -> None:
        """End everything."""
        for process in self.processes.values():
            process.kill()
            os.close(process.end_fd)
        self.scheduler.close()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Let the library run in this world."""
        primitives, network = self.primitives, self.network
        shims: dict[int, Any] = {
            id(threading): primitives.threading,
            id(queue): primitives.queue,
            id(time): primitives.time,
            id(secrets): primitives.secrets,
            id(concurrent.futures.Future): primitives.Future,
            id(socket): _Sockets(network),
            id(selectors): _Selectors(network),
            id(os): _System(self),
            id(start_time): self._start_time,
        }
        with contextlib.ExitStack() as undo:
            for module in _modules():
                for name, value in list(vars(module).items()):
                    if id(value) in shims:
                        undo.callback(setattr, module, name, value)
                        setattr(module, name, shims[id(value)])
            for module_name, name, value in self._single_names():
                module = importlib.import_module(f"llm_datadist.{module_name}")
                undo.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, value)
            yield

    def _single_names(self) -> list[tuple[str, str, Any]]:
        return [
            ("paths.tcp_stream", "syscalls", SocketCalls(self.network)),
            ("paths.one_sided", "syscalls", _MemoryCalls(self)),
            ("paths.process_vm", "RegionView", _Views(self)),
        ]

    def _start_time(self, pid: int) -> int:
        if self.living(pid) is None:
            raise FileNotFoundError(2, "No such file or directory", f"/proc/{pid}/stat")
        return pid * 3


def _modules() -> list[Any]:
    return [
        module
        for name, module in sorted(sys.modules.items())
        if any(name == f"llm_datadist.{room}" or name.startswith(f"llm_datadist.{room}.") for room in _ROOMS)
    ]


class _Sockets:
    """``socket``."""

    if_nametoindex = staticmethod(socket.if_nametoindex)

    def __init__(self, network: Network) -> None:
        self._network = network

    def socket(self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> Socket:
        return Socket(self._network, family, kind)

    def __getattr__(self, name: str) -> Any:
        if not name.isupper():
            message = f"socket.{name} is not simulated"
            raise AttributeError(message)
        return getattr(socket, name)


class _Selectors:
    """``selectors``."""

    EVENT_READ, EVENT_WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

    def __init__(self, network: Network) -> None:
        self.DefaultSelector = lambda: Selector(network)


class _System:
    """``os``."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def getpid(self) -> int:
        pid: int = self._world.scheduler.current.host.pid
        return pid

    def sched_getaffinity(self, _pid: int) -> set[int]:
        return {0, 1}

    def eventfd(self, _count: int, _flags: int = 0) -> int:
        return Bell(self._world.network).fd

    def _bell(self, fd: int) -> Bell:
        bell = self._world.network.descriptors.get(fd)
        if not isinstance(bell, Bell):
            raise OSError(9, "Bad file descriptor")
        return bell

    def eventfd_write(self, fd: int, _value: int) -> None:
        if not self._world.scheduler.current.killed:
            self._world.scheduler.preempt()
            self._bell(fd).ring()

    def eventfd_read(self, fd: int) -> int:
        bell = self._bell(fd)
        if not bell.count:
            raise BlockingIOError
        count, bell.count = bell.count, 0
        return count

    def close(self, fd: int) -> None:
        if fd < FIRST_FD:
            self._world.network.descriptors.pop(fd, None)
            os.close(fd)
        elif self._world.network.descriptors.pop(fd, None) is None and not self._world.scheduler.current.killed:
            raise OSError(9, "Bad file descriptor")

    def pidfd_open(self, pid: int) -> int:
        process = self._world.living(pid)
        if process is None:
            raise ProcessLookupError(3, "No such process")
        pidfd = os.dup(process.end_fd)
        return Ending(self._world.network, pidfd, process).fd


class _MemoryCalls:
    """The process_vm calls: they find the memory of a process only while it lives, and others run meanwhile."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pid = ctypes.c_int(os.getpid())

    def process_vm_readv(self, pid: int, local: int, remote: int, count: int) -> int:
        return self._move(syscalls.process_vm_readv, pid, local, remote, count)

    def process_vm_writev(self, pid: int, local: int, remote: int, count: int) -> int:
        return self._move(syscalls.process_vm_writev, pid, local, remote, count)

    def _move(self, call: Callable[[int, int, int, int], int], pid: int, local: int, remote: int, count: int) -> int:
        scheduler = self._world.scheduler
        scheduler.preempt()
        if self._world.living(pid) is None:
            raise ProcessLookupError(3, "No such process")
        if count > 1 and scheduler.rng.random() < 0.3:
            count = scheduler.rng.randrange(1, count)
        done = call(os.getpid(), local, remote, count)
        scheduler.preempt()
        return done

    def bare_process_vm_readv(self, *arguments: Any) -> int:
        return self._bare(syscalls.bare_process_vm_readv, *arguments)

    def bare_process_vm_writev(self, *arguments: Any) -> int:
        return self._bare(syscalls.bare_process_vm_writev, *arguments)

    def _bare(self, call: Callable[..., int], pid: Any, *arguments: Any) -> int:
        scheduler = self._world.scheduler
        scheduler.preempt()
        done = call(self._pid, *arguments) if self._world.living(pid.value) is not None else -1
        scheduler.preempt()
        return done


class _Views:
    """Maps the region table of another process."""

    def __init__(self, world: World) -> None:
        self._world = world

    def of_file(self, path: str) -> regions.RegionView:
        _, _, pid, _, fd = path.split("/")
        if self._world.living(int(pid)) is None:
            raise FileNotFoundError(2, "No such file or directory", path)
        return regions.RegionView.of_file(f"/proc/self/fd/{fd}")
