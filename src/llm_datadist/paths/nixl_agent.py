"""The NIXL agent of an engine: what of this process's memory NIXL knows, and the requests that are under way.

Made when a link first needs it. NIXL's objects end in a fixed order, before the interpreter does: requests, then what
is known of peers, then registrations, then the agent.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import secrets
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

from llm_datadist.memory.move import mapped
from llm_datadist.memory.regions import RegionError
from llm_datadist.paths.nixl_options import NixlOptions, NixlUnavailableError, load, rdma_devices
from llm_datadist.paths.nixl_requests import Requests
from llm_datadist.utils import log
from llm_datadist.utils.deadline import Deadline
from llm_datadist.wire.messages import Agent as AgentInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llm_datadist.memory.regions import RegionTable
    from llm_datadist.memory.shared import Area
    from llm_datadist.paths.nixl_remote import Remote

_WAKE_US: Final = 10_000
"""NIXL's own thread sleeps until something comes, but at most so long; 0 would keep a core busy."""
_SETTLE_S: Final = 0.5
_MERGE_S: Final = 1.0
_STAYS: Final = 0
"""No region: the user of a pool."""


class OverlapError(Exception):
    """Memory that is registered in part: NIXL finds what is registered only if nothing of it overlaps."""

    def __init__(self, begin: int, end: int) -> None:
        super().__init__(f"memory from {begin:#x} to {end:#x} overlaps what is registered")
        self.range: tuple[int, int] = (begin, end)


class Registrations:
    """Memory of this process that NIXL may touch. The caller has a lock.

    Regions that lie in a memory pool are registered with the whole pool, once, and those that lie in another one with
    that.
    """

    def __init__(self, bindings: Any, agent: Any, backend: int, regions: RegionTable, areas: Sequence[Area]) -> None:
        self._bindings = bindings
        self._agent = agent
        self._backend = backend
        self._table = regions
        self._areas = [(area.base, area.base + area.length) for area in areas]
        self._users: dict[tuple[int, int], set[int]] = {}
        """Regions in each range that is registered, or ``_STAYS``."""
        self._range_of: dict[int, tuple[int, int]] = {}
        self._devices: dict[tuple[int, int], int] = {}
        """The GPU of each range that is not in host memory. Addresses of GPUs are not used in host memory."""
        self.generation: int = 1
        """Counts what has gone, where that makes keys wrong that peers know: those of RDMA devices."""
        self._keyed = bool(rdma_devices())

    def of_region(self, region: int) -> tuple[int, int] | None:
        """Register the memory of a region; from where to where; None if it is not live.

        Raises:
            NixlUnavailableError: NIXL does not take it.
        """
        known = self._range_of.get(region)
        if known is not None:
            return known
        try:
            base, size = self._table.view.find(region, devices=True)
            return self._enter(region, base, size)
        except RegionError:
            return None

    def around(self, address: int, size: int) -> tuple[int, int] | None:
        """Register the region that holds these bytes; from where to where; None if there is none."""
        found = self._table.around(address, size)
        if found is None:
            return None
        region, base, length = found
        return self._range_of.get(region) or self._enter(region, base, length)

    def _enter(self, region: int, base: int, size: int) -> tuple[int, int]:
        end = base + size
        in_pool = next(((low, high) for low, high in self._areas if low <= base and end <= high), None)
        begin_end = in_pool or (base, end)
        touched = [each for each in self._users if each[0] < begin_end[1] and begin_end[0] < each[1]]
        if len(touched) == 1 and touched[0][0] <= begin_end[0] and begin_end[1] <= touched[0][1]:
            begin_end = touched[0]
        elif touched:
            raise OverlapError(*begin_end)
        else:
            self._register_whole(*begin_end, self._table.view.device(region))
            self._users[begin_end] = set()
        self._users[begin_end].add(_STAYS if in_pool else region)
        self._range_of[region] = begin_end
        return begin_end

    def merge(self, begin: int, end: int) -> None:
        """Register one range in place of all that overlap this one. Nothing of them is in use.

        Raises:
            NixlUnavailableError: NIXL does not take it; what was registered before is so again.
        """
        touched = {each: self._devices.get(each) for each in self._users if each[0] < end and begin < each[1]}
        begin, end = min(begin, *(each[0] for each in touched)), max(end, *(each[1] for each in touched))
        device = next((each for each in touched.values() if each is not None), None)
        self.generation += self._keyed
        for each in touched:
            self.deregister(*each)
        try:
            self._register_whole(begin, end, device)
        except NixlUnavailableError:
            for each, its_device in touched.items():
                with contextlib.suppress(NixlUnavailableError):
                    self._register_whole(*each, its_device)
            raise
        self._users[begin, end] = set().union(*(self._users.pop(each) for each in touched))
        for region, begin_end in self._range_of.items():
            if begin_end in touched:
                self._range_of[region] = begin, end

    def _register_whole(self, begin: int, end: int, device: int | None) -> None:
        if device is not None:
            self._devices[begin, end] = device
        elif not mapped([begin, end - 1]):  # what NIXL does there is a crash
            message = f"registered memory from {begin:#x} to {end:#x} is not mapped (any more)"
            raise NixlUnavailableError(message, "keep the memory of a cache mapped until it has been unregistered")
        self.register(begin, end)

    def register(self, base: int, end: int) -> None:
        """Register any memory.

        Raises:
            NixlUnavailableError: NIXL does not take it.
        """
        try:
            self._agent.registerMem(self.descriptors([(base, end)]), [self._backend])
        except Exception as error:
            message = f"NIXL does not register {end - base} bytes at {base:#x}: {error}"
            hint = "see the limit on locked memory (ulimit -l), and what NIXL says with NIXL_LOG_LEVEL=INFO"
            device = self._devices.pop((base, end), None)
            if device is not None:
                message = f"NIXL does not register {end - base} bytes at {base:#x} in memory of GPU {device}: {error}"
                hint = "install the NIXL for this CUDA driver (nixl-cu12, nixl-cu13); NIXL_LOG_LEVEL=INFO shows more"
            raise NixlUnavailableError(message, hint) from error

    def deregister(self, base: int, end: int) -> None:
        """Undo ``register``."""
        try:
            self._agent.deregisterMem(self.descriptors([(base, end)]), [self._backend])
            self._devices.pop((base, end), None)
        except Exception as error:  # noqa: BLE001 - there is no way to have it back, and no harm that we can undo
            log.error("NIXL does not let go of %d bytes at %#x: keep them mapped (%s)", end - base, base, error)

    def descriptors(self, ranges: Sequence[tuple[int, int]]) -> Any:
        """Those of NIXL for memory to be registered, all of it in host memory, or all of it on GPUs."""
        on_devices = any(each in self._devices for each in ranges)
        kind = self._bindings.VRAM_SEG if on_devices else self._bindings.DRAM_SEG
        items = [(base, end - base, self._devices.get((base, end), 0), "") for base, end in ranges]
        return self._bindings.nixlRegDList(kind, items)

    def apart(self, ranges: Iterable[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Those in host memory, and those on GPUs; sorted."""
        ordered = sorted(ranges)
        return [each for each in ordered if each not in self._devices], [
            each for each in ordered if each in self._devices
        ]

    def forget(self, regions: Sequence[int]) -> bool:
        """These regions have gone, and nobody uses them; whether NIXL knew any."""
        known = [region for region in regions if region in self._range_of]
        for region in known:
            begin_end = self._range_of.pop(region)
            users = self._users[begin_end]
            users.discard(region)
            if not users:
                del self._users[begin_end]
                self.generation += self._keyed
                self.deregister(*begin_end)
        return bool(known)

    def close(self) -> None:
        """Let all memory go."""
        for begin_end in self._users:
            self.deregister(*begin_end)
        self._users, self._range_of, self._agent = {}, {}, None


class Agent:
    """One NIXL agent. Thread-safe."""

    def __init__(self, options: NixlOptions, regions: RegionTable, areas: Sequence[Area]) -> None:
        """Load NIXL and its backend.

        Raises:
            NixlUnavailableError: with the reason.
        """
        self.bindings: Any = load(options)
        self.name: str = f"llm-datadist-{secrets.token_hex(8)}"
        self.backend_name: str = options.backend
        self._pid = os.getpid()
        self.lock: threading.RLock = threading.RLock()
        self._regions = regions
        try:
            self.native: Any = self.bindings.nixlAgent(self.name, _config(self.bindings))
            self.backend: int = self.native.createBackend(options.backend, dict(options.params))
        except Exception as error:
            message = f"NIXL cannot start its backend {options.backend}: {error}"
            hint = "see LLMConfig.nixl_backend and nixl_params, and what NIXL says with NIXL_LOG_LEVEL=INFO"
            raise NixlUnavailableError(message, hint) from error
        self.registrations: Registrations = Registrations(self.bindings, self.native, self.backend, regions, areas)
        table = regions.areas[0]
        self._table = (table.base, table.base + table.length)
        self.registrations.register(*self._table)
        self.requests: Requests = Requests(self)
        self.remotes: dict[str, Remote] = {}
        """By the names of their agents."""
        self._reach: dict[int, int] = {}
        """How far memory is registered from an address on: of tensors that have been used."""
        self.version: int = 1
        """Another one: what was registered may be so no longer."""
        self._closed = False
        _agents.add(self)

    def tell(self, wanted: Sequence[int]) -> AgentInfo:
        """What a peer needs in order to reach these regions, as far as they are live.

        Raises:
            NixlUnavailableError: with the reason.
        """
        deadline = Deadline.after(_MERGE_S)
        while True:
            try:
                return self._tell(wanted)
            except OverlapError as overlap:
                if not self.merge(overlap, deadline):
                    message = f"{overlap}, which is in use"
                    raise NixlUnavailableError(message, "register the larger cache first") from overlap

    def _tell(self, wanted: Sequence[int]) -> AgentInfo:
        with self.lock:
            self._check_open()
            found = {region: self.registrations.of_region(region) for region in wanted}
            told = {region: begin_end for region, begin_end in found.items() if begin_end is not None}
            on_host, on_devices = self.registrations.apart(set(told.values()) - {self._table})
            return AgentInfo(
                name=self.name,
                metadata=self._keys([self._table, *on_host]),
                device_metadata=self._keys(on_devices) if on_devices else b"",
                table=self._table[0],
                generation=self.registrations.generation,
                regions=list(told),
                ranges=list(told.values()),
            )

    def _keys(self, ranges: Sequence[tuple[int, int]]) -> bytes:
        keys: bytes = self.native.getLocalPartialMD(
            self.registrations.descriptors(ranges),
            True,  # noqa: FBT003 - not ours
            [self.backend],
        )
        return keys

    def covers(self, base: int, begin: int, end: int) -> bool:
        """Make sure that the bytes ``[begin, end)`` of a tensor at ``base`` are registered; False if it is no region's.

        Raises:
            NixlUnavailableError: NIXL does not take them.
            OverlapError: see there; ``merge`` helps.
        """
        if self._reach.get(base, 0) >= end:
            return True
        with self.lock:
            self._check_open()
            found = self.registrations.around(begin, end - begin)
            if found is None:
                return False
            if found[0] <= base:
                self._reach[base] = found[1]
            return True

    def merge(self, overlap: OverlapError, deadline: Deadline) -> bool:
        """See ``Registrations.merge``; waits until no transfer of this side runs. False if that took too long.

        Raises:
            NixlUnavailableError: NIXL does not take it, or the engine has been finalized.
        """
        paused: set[Remote] = set()
        with contextlib.ExitStack() as undo:
            while True:
                with self.lock:
                    self._check_open()
                    left = [remote for remote in self.remotes.values() if remote not in paused]
                    if not left:
                        self._changed()
                        self.registrations.merge(*overlap.range)
                        return True
                for remote in left:
                    if not remote.pause(deadline):
                        return False
                    undo.callback(remote.resume)
                    paused.add(remote)

    def _check_open(self) -> None:
        if self._closed:
            message = "this engine has been finalized"
            raise NixlUnavailableError(message)

    def _changed(self) -> None:
        self._reach = {}
        self.version += 1

    def reach(self, bases: Sequence[int]) -> int:
        """How many bytes from each of these addresses on are registered, at least; only of tensors that were used."""
        return min(self._reach.get(base, base) - base for base in bases)

    def forget(self, regions: Sequence[int]) -> None:
        """These regions have gone, and nobody uses them any more."""
        with self.lock:
            if not self._closed and self.registrations.forget(regions):
                self._changed()

    def close(self) -> None:
        """End it; idempotent. What NIXL has not finished by then stays with it, and the memory has to stay mapped."""
        if os.getpid() != self._pid:
            return
        with self.lock:
            if self._closed:
                return
            self._closed = True
        quiet = self.requests.settle(Deadline.after(_SETTLE_S))
        for remote in list(self.remotes.values()):
            remote.close()
        if not quiet or self.remotes:
            log.error("NIXL has not finished all transfers after finalize: keep registered memory mapped")
            _keep(self.native)
            return
        self.registrations.deregister(*self._table)
        self.registrations.close()
        self.requests.close()
        self.native = None  # the last reference: its thread and its sockets end now


class NixlHost:
    """The agent of an engine, if it needs one."""

    def __init__(self, options: NixlOptions, regions: RegionTable, areas: Sequence[Area] = ()) -> None:
        self.options = options
        self._regions = regions
        self._areas = areas
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._failed: NixlUnavailableError | None = None
        self._closed = False

    def agent(self) -> Agent:
        """The agent, made now if there is none.

        Raises:
            NixlUnavailableError: with the reason. It is not tried again.
        """
        with self._lock:
            if self._closed:
                message = "this engine has been finalized"
                raise NixlUnavailableError(message)
            if self._failed is not None:  # a new one: each raise adds to the traceback of an exception
                raise NixlUnavailableError(str(self._failed), self._failed.hint)
            if self._agent is None:
                try:
                    self._agent = Agent(self.options, self._regions, self._areas)
                except NixlUnavailableError as error:
                    self._failed = NixlUnavailableError(str(error), error.hint)
                    raise
            return self._agent

    def forget(self, regions: Sequence[int]) -> None:
        """See ``Agent.forget``."""
        agent = self._agent
        if agent is not None:
            agent.forget(regions)

    def close(self) -> None:
        """See ``Agent.close``."""
        with self._lock:
            self._closed = True
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.close()


def _config(bindings: Any) -> Any:
    config = bindings.nixlAgentConfig()
    config.useProgThread = True  # a peer that connects, or uses TCP, is answered by it
    config.useListenThread = False
    config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
    config.pthrDelay = _WAKE_US
    config.captureTelemetry = False
    return config


_agents: Final[weakref.WeakSet[Agent]] = weakref.WeakSet()


def _keep(native: Any) -> None:
    """Let an object of NIXL never be destroyed: its memory is in use, or it is the parent's."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(native))


def _forked() -> None:
    for agent in _agents:
        if agent.native is not None:
            _keep(agent.native)
    _agents.clear()


def _at_exit() -> None:
    """An engine that nobody has finalized: NIXL must not run into the end of the process."""
    for agent in list(_agents):
        agent.close()


os.register_at_fork(after_in_child=_forked)
atexit.register(_at_exit)
