"""Real peers for tests: child processes that each host one or more ``LLMDataDist``.

``Process`` runs functions of test modules in a child; ``Node`` is what they find there: an ``LLMDataDist`` with named
caches whose memory is surrounded by guard bytes. Every wait has a timeout.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from llm_datadist.utils.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerContext, SpawnContext

    from llm_datadist import Cache, CacheKey

GUARD = 4096
POISON = 0xEE
TIMEOUT_S = 60.0
_SPAWN = multiprocessing.get_context("spawn")


class Arena:
    """The memory of one cache: tensors of ``size`` bytes, each between two guards; in ``pool`` memory, if given."""

    def __init__(self, tensors: int, size: int, seed: int | None, pool: Cache | None = None) -> None:
        self.size = size
        self.pool = pool
        whole = size + 2 * GUARD
        addrs = [] if pool is None else pool.tensor_addrs
        self.memory = [array_at(addr, whole) for addr in addrs] or [np.empty(whole, np.uint8) for _ in range(tensors)]
        for tensor in self.memory:
            tensor[:] = POISON
        if seed is not None:
            rng = np.random.default_rng(seed)
            for tensor in self.memory:
                tensor[GUARD : GUARD + size] = rng.integers(0, 256, size, dtype=np.uint8)

    @property
    def addrs(self) -> list[int]:
        return [tensor.ctypes.data + GUARD for tensor in self.memory]


def array_at(address: int, size: int) -> np.ndarray:
    """The bytes at an address of this process."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=np.uint8)


class Node:
    """One ``LLMDataDist`` in a child process."""

    def __init__(self) -> None:
        self.datadist: LLMDataDist
        self.config: LLMConfig
        self.caches: dict[str, Cache] = {}
        self.arenas: dict[str, Arena] = {}
        self.extra: dict[str, Any] = {}

    def init(self, cluster_id: int, role: LLMRole = LLMRole.MIX, **properties: object) -> tuple[str, int] | None:
        """Initialise; ``properties`` are those of ``LLMConfig``. The listen address."""
        config = LLMConfig()
        config.device_id = 0
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True
        config.allow_multiple_instances = True
        config.sync_kv_timeout = 20_000
        for name, value in properties.items():
            setattr(config, name, value)
        self.config = config
        self.datadist = LLMDataDist(role, cluster_id)
        self.datadist.init(config.generate_options())
        return self.datadist.listen_address

    @property
    def manager(self) -> Any:
        return self.datadist.cache_manager

    def register_blocks(
        self,
        name: str,
        tensors: int,
        blocks: int,
        block_bytes: int,
        *,
        model_id: int | None = None,
        seed: int | None = None,
        **kwargs: object,
    ) -> int:
        """Register a blocks cache of its own memory; its id."""
        arena = self.arena(tensors, blocks * block_bytes, seed)
        key = None if model_id is None else BlocksCacheKey(self.datadist.cluster_id, model_id)
        desc = CacheDesc(tensors, [blocks, block_bytes], DataType.DT_UINT8)
        cache = self.manager.register_blocks_cache(desc, arena.addrs, key, **kwargs)
        return self._keep(name, cache, arena)

    def register_contiguous(
        self,
        name: str,
        tensors: int,
        batch: int,
        entry_bytes: int,
        *,
        keys: Sequence[CacheKey] = (),
        seed: int | None = None,
        placement: Placement = Placement.DEVICE,
        **kwargs: object,
    ) -> int:
        """Register a contiguous cache of its own memory; its id."""
        arena = self.arena(tensors, batch * entry_bytes, seed)
        desc = CacheDesc(tensors, [batch, entry_bytes], DataType.DT_UINT8, placement)
        cache = self.manager.register_cache(desc, arena.addrs, list(keys), **kwargs)
        return self._keep(name, cache, arena)

    def arena(self, tensors: int, size: int, seed: int | None) -> Arena:
        """Memory for a cache: of the pool, if there is one and ``use_pool`` is set."""
        if not self.extra.get("use_pool"):
            return Arena(tensors, size, seed)
        desc = CacheDesc(tensors, [size + 2 * GUARD], DataType.DT_UINT8)
        return Arena(tensors, size, seed, self.manager.allocate_cache(desc))

    def use_pool(self, on: bool = True) -> None:
        """Take the memory of caches that are registered from now on from the pool, or from anywhere."""
        self.extra["use_pool"] = on

    def _keep(self, name: str, cache: Cache, arena: Arena) -> int:
        if name in self.caches:
            self.unregister(name)
        self.caches[name], self.arenas[name] = cache, arena
        return cache.cache_id

    def unregister(self, name: str) -> None:
        """Unregister a cache and drop its memory."""
        self.manager.unregister_cache(self.caches.pop(name).cache_id)
        pool = self.arenas.pop(name).pool
        if pool is not None:
            self.manager.deallocate_cache(pool)

    def wait_until_hidden(self, name: str) -> None:
        """Return once a cache that is just being unregistered cannot be found any more; it may still be waited for."""
        regions, address = self.datadist._engine._core.regions, self.addrs(name)[0]  # type: ignore[union-attr]
        end = Deadline.after(TIMEOUT_S)
        while regions.find(address, 1) is not None:
            assert not end.expired()

    def memory(self, name: str) -> list[np.ndarray]:
        """Copies of a cache's tensors, guards included."""
        return [tensor.copy() for tensor in self.arenas[name].memory]

    def addrs(self, name: str) -> list[int]:
        """Addresses of a cache's tensors."""
        return self.arenas[name].addrs

    def cluster(self, cluster_id: int, address: tuple[str, int] | None) -> LLMClusterInfo:
        """The cluster info of a peer."""
        info = LLMClusterInfo()
        info.remote_cluster_id = cluster_id
        info.append_local_ip_info("127.0.0.1", 0)
        if address is not None:
            info.append_remote_ip_info(*address)
        return info

    def link(self, cluster_id: int, address: tuple[str, int], timeout: int = 10_000) -> LLMStatusCode:
        """``link_clusters`` with one peer; its status."""
        return self.datadist.link_clusters([self.cluster(cluster_id, address)], timeout)[1][0]

    def unlink(
        self, cluster_id: int, address: tuple[str, int] | None = None, *, force: bool = False, timeout: int = 10_000
    ) -> LLMStatusCode:
        """``unlink_clusters`` with one peer; its status."""
        return self.datadist.unlink_clusters([self.cluster(cluster_id, address)], timeout, force)[1][0]

    def path(self, cluster_id: int) -> str | None:
        """The path to a peer."""
        return self.datadist.explain_link(cluster_id).path

    def finalize(self) -> None:
        """Finalize."""
        self.datadist.finalize()


def close_off() -> None:
    """In a child, before it has threads: let no other process look into it, and give up all privileges to do that."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capset(header, (ctypes.c_uint32 * 6)()) == 0, os.strerror(ctypes.get_errno())
    assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE


class Process:
    """A child process with named nodes. Calls run in threads of the child, so they may overlap.

    ``first`` is run in it before anything else. ``context`` says how it is started; children of a fork server begin at
    once.
    """

    def __init__(
        self, first: Callable[[], object] | None = None, context: SpawnContext | ForkServerContext = _SPAWN
    ) -> None:
        ours, theirs = context.Pipe()
        self._pipe = ours
        self.child = context.Process(target=_serve, args=(theirs, first), daemon=True)
        self.child.start()
        theirs.close()
        self._ids = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._receive, daemon=True).start()

    @property
    def pid(self) -> int:
        assert self.child.pid is not None
        return self.child.pid

    def begin(self, node: str, function: Callable[..., Any] | str, *args: object, **kwargs: object) -> Future[Any]:
        """Start ``function(node, ...)`` (or the node's method of that name) in the child."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._ids)
            self._waiting[number] = future
            self._pipe.send((number, node, function, args, kwargs))
        return future

    def call(self, node: str, function: Callable[..., Any] | str, *args: object, **kwargs: object) -> Any:
        """Run ``function(node, ...)`` in the child; its result, or its exception."""
        return self.begin(node, function, *args, **kwargs).result(TIMEOUT_S)

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, failed, value = self._pipe.recv()
                with self._lock:
                    future = self._waiting.pop(number)
                if failed:
                    future.set_exception(value)
                else:
                    future.set_result(value)
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        for future in waiting:
            future.set_exception(EOFError("the child process ended"))

    def kill(self) -> None:
        """Kill -9, and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.child.join(TIMEOUT_S)

    def close(self) -> int | None:
        """End it in good order; its exit code."""
        with contextlib.suppress(OSError, BrokenPipeError):
            self._pipe.send(None)
        self.child.join(TIMEOUT_S)
        if self.child.is_alive():
            self.kill()
        self._pipe.close()
        return self.child.exitcode


def _serve(pipe: Connection, first: Callable[[], object] | None) -> None:
    faulthandler.enable()
    if first is not None:
        first()
    nodes: dict[str, Node] = {}
    lock = threading.Lock()

    def run(number: int, name: str, function: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Any) -> None:
        with lock:
            node = nodes.setdefault(name, Node())
        try:
            call = getattr(node, function) if isinstance(function, str) else lambda *a, **k: function(node, *a, **k)
            answer = (number, False, call(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the parent gets it
            answer = (number, True, error)
        with lock:
            pipe.send(answer)

    with contextlib.suppress(EOFError):
        while (message := pipe.recv()) is not None:
            threading.Thread(target=run, args=message, daemon=True).start()


class Peer:
    """One node of a child process, seen from the test."""

    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.cluster_id = 0
        self.address: tuple[str, int] | None = None

    def init(self, cluster_id: int, **properties: object) -> Peer:
        """Initialise it; see ``Node.init``."""
        self.cluster_id = cluster_id
        self.address = self.call("init", cluster_id, **properties)
        return self

    def call(self, function: Callable[..., Any] | str, *args: object, **kwargs: object) -> Any:
        """Run something there; its result, or its exception."""
        return self.process.call(self.name, function, *args, **kwargs)

    def begin(self, function: Callable[..., Any] | str, *args: object, **kwargs: object) -> Future[Any]:
        """Start something there."""
        return self.process.begin(self.name, function, *args, **kwargs)

    def link(self, other: Peer, **kwargs: object) -> LLMStatusCode:
        """Link to another peer, which listens."""
        status: LLMStatusCode = self.call("link", other.cluster_id, other.address, **kwargs)
        return status

    def memory(self, name: str) -> list[np.ndarray]:
        """Copies of a cache's tensors, guards included."""
        copies: list[np.ndarray] = self.call("memory", name)
        return copies


class Peers:
    """Makes peers in child processes and ends the processes."""

    def __init__(self) -> None:
        self._processes: list[Process] = []

    def process(self, first: Callable[[], object] | None = None) -> Process:
        """A child process without a node; see ``Process``."""
        self._processes.append(Process(first))
        return self._processes[-1]

    def make(
        self, cluster_id: int, *, process: Process | None = None, listen: bool = True, **properties: object
    ) -> Peer:
        """A peer in a process of its own, or as one more node of ``process``."""
        if listen:
            properties.setdefault("listen_ip_info", "127.0.0.1:0")
        return Peer(process or self.process(), f"node-{cluster_id}").init(cluster_id, **properties)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.close()
