"""The processes of ``gpu_check.py``: each has an engine, and caches in every kind of memory."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from gpu_memory import TENSORS, WAIT_S, BareNixl, Gpu, Host, random_bytes

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole, Placement

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PLACES: Final = ("host", "device")
BLOCKS: Final = 16
BLOCK_BYTES: Final = 32 << 10
MODELS: Final = {"blocks host": 0, "blocks device": 1, "bulk host": 2, "bulk device": 3}
BULK_BLOCKS: Final = {"64 KiB": 64 << 10, "1 MiB": 1 << 20}


@dataclass
class Member:
    """One of the two processes: an engine, and for each place its caches."""

    cluster_id: int
    host_only: bool
    bulk_bytes: int
    paths: str
    memory: dict[str, Host | Gpu] = field(default_factory=dict)
    caches: dict[str, Any] = field(default_factory=dict)
    nixl: dict[str, BareNixl] = field(default_factory=dict)

    def start(self, listen: str | None) -> tuple[str, int] | None:
        """Initialise it; the address at which it listens."""
        config = LLMConfig()
        config.enable_cache_manager = config.enable_remote_cache_accessible = True
        config.sync_kv_timeout = int(WAIT_S * 1000) // 2
        config.paths = self.paths
        if listen is not None:
            config.listen_ip_info = listen
        self.datadist = LLMDataDist(LLMRole.MIX, self.cluster_id)
        self.datadist.init(config.generate_options())
        self.manager = self.datadist.cache_manager
        for place in PLACES:
            self._make(f"blocks {place}", place, (BLOCKS, BLOCK_BYTES))
            self._make(f"entries {place}", place, (2, BLOCKS // 2 * BLOCK_BYTES))
            self._register_bulk(place, BULK_BLOCKS["1 MiB"])
        return self.datadist.listen_address

    def _make(self, name: str, place: str, shape: tuple[int, int]) -> None:
        if name not in self.memory:
            on_gpu = place == "device" and not self.host_only
            self.memory[name] = (Gpu if on_gpu else Host)(TENSORS, shape[0] * shape[1])
        placement = Placement.DEVICE if place == "device" else Placement.HOST
        desc, addresses = CacheDesc(TENSORS, list(shape), DataType.DT_UINT8, placement), self.memory[name].addresses
        if name.startswith("entries"):
            self.caches[name] = self.manager.register_cache(desc, addresses, remote_accessible=True)
        else:
            key = BlocksCacheKey(self.cluster_id, MODELS[name])
            self.caches[name] = self.manager.register_blocks_cache(desc, addresses, key, remote_accessible=True)

    def _register_bulk(self, place: str, block_bytes: int) -> None:
        self._make(f"bulk {place}", place, (self.bulk_bytes // TENSORS // block_bytes, block_bytes))

    def cut_bulk(self, block_bytes: int) -> None:
        """Register the bulk caches anew, with blocks of another size."""
        for place in PLACES:
            self.manager.unregister_cache(self.caches[f"bulk {place}"].cache_id)
            self._register_bulk(place, block_bytes)

    def cache_id(self, name: str) -> int:
        """For peers."""
        return int(self.caches[name].cache_id)

    def fill(self, name: str, seed: int) -> None:
        """Random bytes that the other process knows, too."""
        self.memory[name].store(random_bytes(seed, self.size_of(name)))

    def size_of(self, name: str) -> int:
        """Bytes of one tensor."""
        return int(self.caches[name].cache_desc.size)

    def differs(self, name: str, seed: int, source: int | None = None, runs: Any = ()) -> int:
        """How many bytes are not those of ``seed``, with runs (there, here, bytes) of those of seed ``source``."""
        expected = random_bytes(seed, self.size_of(name))
        if source is not None:
            theirs = random_bytes(source, self.size_of(name))
            for there, here, size in runs:
                expected[:, here : here + size] = theirs[:, there : there + size]
        return int((self.memory[name].load() != expected).sum())

    def open_nixl(self, place: str) -> tuple[bytes, str, list[int]]:
        """Make an agent of bare NIXL for a bulk cache; what the peer needs to know."""
        if place not in self.nixl:
            memory = self.memory[f"bulk {place}"]
            self.nixl[place] = BareNixl(f"{self.cluster_id} {place}", memory, self.bulk_bytes // TENSORS)
        return self.nixl[place].about()

    def stop(self) -> None:
        """End it."""
        self.datadist.finalize()


class Partner:
    """The other process, a ``Member`` that does what it is told."""

    def __init__(self, limit_s: float, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, limit_s, args), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, method: str, *args: Any) -> Any:
        """A method of the member there.

        Raises:
            RuntimeError: it failed, or took too long.
        """
        self._pipe.send((method, args))
        if not self._pipe.poll(WAIT_S):
            message = f"the other process does not answer {method}"
            raise RuntimeError(message)
        failed, value = self._pipe.recv()
        if failed:
            raise RuntimeError(value)
        return value

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError, EOFError, RuntimeError):
            self.call("stop")
        with contextlib.suppress(OSError):
            self._pipe.close()
        self._process.join(WAIT_S / 6)
        if self._process.is_alive():
            self._process.kill()


def _serve(pipe: Connection, limit_s: float, args: tuple[Any, ...]) -> None:
    faulthandler.dump_traceback_later(limit_s, exit=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    member = Member(*args)
    with contextlib.suppress(EOFError, OSError):
        while True:
            method, given = pipe.recv()
            try:
                answer = (False, getattr(member, method)(*given))
            except Exception as error:  # noqa: BLE001 - the other process reports it
                answer = (True, f"{type(error).__name__}: {error}")
            pipe.send(answer)
    os._exit(0)  # destructors of NIXL can end in a crash on a host without RDMA
