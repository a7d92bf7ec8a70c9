"""Registered memory: a table of regions that every path checks against before it touches a byte.

The table of an engine lives in a sealed memfd. A process on the same host that may read this process's memory maps it
and so always sees the present state without asking anybody: which regions are live, where they are, and the table's
epoch. Nothing else in this process learns raw addresses: across the network a span is (region, offset, length).

Layout, 32-byte rows of four ``uint64``: row 0 is the header (magic, epoch, state, capacity); row ``slot`` >= 1 is a
region (id, base address, size, access), id 0 meaning free. A region id is ``serial << 16 | slot`` and is never used
again. Bit 0 of the access tells whether peers may name the region; the other bits are 0 for host memory, else the
number of the GPU, from 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.memory import shared
from llm_datadist.memory.devices import memory_name
from llm_datadist.memory.shared import Area, NotSealedError, check_sealed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from llm_datadist.utils.deadline import Deadline

    U64 = NDArray[np.uint64]
    I64 = NDArray[np.int64]

MAGIC: Final = 0x5644_4B4C_4C4D_0001
CAPACITY: Final = 1 << 16
ROW_BYTES: Final = 32
ALIVE: Final = 1
NONCE_BYTES: Final = 64
PROBE_BYTES: Final = 64 << 10
"""Of the probe region: the nonce, and zeros, so that a path can be measured without touching a cache."""

_TABLE_BYTES: Final = CAPACITY * ROW_BYTES
_F_SEAL_FUTURE_WRITE: Final = 0x10
"""Only mappings that exist already may be written to (Linux 5.1)."""

_SLOT_MASK: Final = CAPACITY - 1
_EPOCH, _STATE = 1, 2
_ID, _BASE, _SIZE, _ACCESS = 0, 1, 2, 3
_REACHABLE: Final = 1
_WAIT_SLICE: Final = 0.25


class RegionError(Exception):
    """A span names memory that is not registered; nothing was moved."""


class UnknownRegionError(RegionError):
    """A region id that is not live: it was never registered, or has been unregistered."""


class DeviceRegionError(RegionError):
    """The region is in GPU memory, and whoever wants to use it can only touch host memory."""


class StaleEpochError(RegionError):
    """The table changed since the span was planned; look the cache up again."""


class RegionTable:
    """The regions of one engine; thread-safe."""

    def __init__(self) -> None:
        """An empty table.

        Raises:
            OSError: the system gives no descriptors or no memory.
        """
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        with contextlib.ExitStack() as undo:
            self._fd = os.memfd_create("llm-datadist-regions", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, self._fd)
            os.ftruncate(self._fd, _TABLE_BYTES)
            self._map = undo.enter_context(mmap.mmap(self._fd, _TABLE_BYTES))
            with contextlib.suppress(OSError):  # whoever gets the descriptor cannot change what we rely on
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
            self._probe = shared.create("llm-datadist-probe", PROBE_BYTES)
            undo.pop_all()
        self.rows: U64 = np.frombuffer(self._map, dtype=np.uint64).reshape(CAPACITY, 4)
        self.rows[0] = (MAGIC, 1, ALIVE, CAPACITY)
        self._words = memoryview(self.rows.reshape(-1).data)
        """The same words as plain ints: for a few of them far quicker than an array."""
        self.view: RegionView = RegionView(self.rows)
        """For everybody in this process: one of their own would keep the memory of a table that is closed."""
        self._serial = 0
        self._free: list[int] = []
        self._used = 0
        self._leases: dict[object, Sequence[int]] = {}
        self._waiters = 0
        self.nonce: bytes = secrets.token_bytes(NONCE_BYTES)
        """Begin of the probe region: a peer that reads it back has proved that its path works."""
        ctypes.memmove(self._probe.base, self.nonce, NONCE_BYTES)
        self.probe_region: int = self.add(self._probe.base, PROBE_BYTES)

    @property
    def areas(self) -> list[Area]:
        """The table, and the memory of the probe region, for processes that map them."""
        return [Area(self._fd, self.rows.ctypes.data, _TABLE_BYTES), self._probe]

    @property
    def fd(self) -> int:
        """The memfd, for peers on this host."""
        return self._fd

    @property
    def epoch(self) -> int:
        """Counts the changes after which an earlier look-up may be wrong (adding a region is not one)."""
        return int(self._words[_EPOCH])

    def invalidate(self) -> int:
        """Make every earlier look-up stale; the new epoch."""
        with self._lock:
            self.rows[0, _EPOCH] += np.uint64(1)
            return int(self.rows[0, _EPOCH])

    def add(self, base: int, size: int, *, reachable: bool = True, device: int | None = None) -> int:
        """Register ``size`` bytes at ``base``; the region's id. Memory is not touched.

        ``reachable`` tells whether spans of peers may name it, ``device`` in the memory of which GPU it is.
        """
        access = int(reachable) | (0 if device is None else device + 1) << 1
        with self._lock:
            if self._free:
                slot = self._free.pop()
            elif self._used + 1 < CAPACITY:
                self._used += 1
                slot = self._used
            else:
                message = f"all {CAPACITY - 1} region slots of this engine are in use; unregister caches first"
                raise RegionError(message)
            self._serial += 1
            region = self._serial << 16 | slot
            self.rows[slot, 1:] = (base, size, access)
            self.rows[slot, _ID] = region
            return region

    def remove(self, regions: Iterable[int]) -> None:
        """Take regions out: from now on no span may name them. Running uses are not waited for (``wait_unused``)."""
        with self._lock:
            for region in regions:
                slot = region & _SLOT_MASK
                if int(self.rows[slot, _ID]) == region:
                    self.rows[slot, _ID] = 0
                    self._free.append(slot)
            self.rows[0, _EPOCH] += np.uint64(1)

    def find(self, address: int, size: int) -> tuple[int, int] | None:
        """The reachable region that holds these bytes, as (region, offset); None if no single one does."""
        row = self._holding(address, size, reachable=True)
        return None if row is None else (int(row[_ID]), address - int(row[_BASE]))

    def around(self, address: int, size: int) -> tuple[int, int, int] | None:
        """A region that holds these bytes, as (region, base, size), also one that is not for peers."""
        row = self._holding(address, size, reachable=False)
        return None if row is None else (int(row[_ID]), int(row[_BASE]), int(row[_SIZE]))

    def at(self, address: int) -> list[int]:
        """All regions that hold this byte, also those that are not for peers."""
        with self._lock:
            rows = self.rows[1 : self._used + 1]
            starts, byte = rows[:, _BASE], np.uint64(address)
            live = (rows[:, _ID] != 0) & (starts <= byte) & (byte - starts < rows[:, _SIZE])
            found: list[int] = rows[live, _ID].tolist()
            return found

    def _holding(self, address: int, size: int, *, reachable: bool) -> U64 | None:
        if address + size >= 1 << 64:
            return None
        with self._lock:
            rows = self.rows[1 : self._used + 1]
            base, limit = rows[:, _BASE], rows[:, _BASE] + rows[:, _SIZE]
            end = np.uint64(address + size)
            live = rows[:, _ID] != 0
            if reachable:
                live &= rows[:, _ACCESS] & np.uint64(_REACHABLE) != 0
            hits = np.flatnonzero(live & (base <= np.uint64(address)) & (limit >= end))
            return rows[int(hits[0])].copy() if len(hits) else None

    @contextlib.contextmanager
    def lease(self, regions: Sequence[int]) -> Iterator[None]:
        """Hold regions while their memory is in use; ``wait_unused`` waits for it.

        Takes no lock: either this sees that a region has gone, or whoever has removed it sees the lease.

        Raises:
            UnknownRegionError: one of them is not live.
        """
        lease = object()
        self._leases[lease] = regions
        try:
            self._check_live(regions)
            yield
        finally:
            del self._leases[lease]  # at once: Ctrl-C may come with any call
            self._wake_waiters()

    def hold(self, lease: object, regions: Sequence[int]) -> None:
        """Begin a lease, which is an object that no other has; also if this raises, ``let_go`` must follow.

        Three times quicker than ``lease``, for threads that Ctrl-C does not interrupt.

        Raises:
            UnknownRegionError: one of them is not live.
        """
        self._leases[lease] = regions
        self._check_live(regions)

    def let_go(self, lease: object) -> None:
        """End a lease."""
        del self._leases[lease]
        self._wake_waiters()

    def _check_live(self, regions: Sequence[int]) -> None:
        for region in regions:
            if self._words[(region & _SLOT_MASK) * 4] != region or not region:
                raise _unknown(region)

    def _wake_waiters(self) -> None:
        if self._waiters:
            with self._lock:
                self._changed.notify_all()

    def wait_unused(self, regions: Iterable[int], deadline: Deadline) -> bool:
        """Wait until no lease on these regions is left; whether that happened in time."""
        wanted = set(regions)
        return self._wait(lambda: all(wanted.isdisjoint(leased) for leased in tuple(self._leases.values())), deadline)

    def wait_idle(self, deadline: Deadline) -> bool:
        """Wait until no lease is left at all; whether that happened in time."""
        return self._wait(lambda: not self._leases, deadline)

    def _wait(self, condition: Callable[[], bool], deadline: Deadline) -> bool:
        with self._lock:
            self._waiters += 1
            try:
                return self._changed.wait_for(condition, deadline.remaining())
            finally:
                self._waiters -= 1

    def stop(self) -> None:
        """Let no peer touch anything any more: the table is dead, all regions are gone. Idempotent."""
        with self._lock:
            self.rows[0, _STATE] = 0
            self.rows[1:, _ID] = 0

    def close(self) -> None:
        """Mark the table dead for peers that map it and give its memory back; idempotent."""
        with self._lock:
            if self._fd < 0:
                return
            self.rows[0, _STATE] = 0
            self.rows[1:, _ID] = 0
            self.rows = np.zeros((CAPACITY, 4), dtype=np.uint64)
            self._words = memoryview(self.rows.reshape(-1).data)
            self.view.close()
            os.close(self._fd)
            self._fd = -1
            shared.release(self._probe)
        with contextlib.suppress(BufferError):  # an in-process peer may still look at the rows
            self._map.close()


class RegionView:
    """Read-only sight of another engine's table: through its memfd, or directly in the same process."""

    def __init__(self, rows: U64, closer: mmap.mmap | None = None) -> None:
        self._rows = rows
        self._words = memoryview(rows.reshape(-1).data)
        self._map = closer

    @classmethod
    def of_file(cls, path: str) -> RegionView:
        """Map the table behind ``path`` (a memfd seen through /proc).

        Raises:
            OSError: it cannot be opened or mapped.
            RegionError: it is not a region table.
        """
        # Without O_NONBLOCK a descriptor that is a pipe would hold us up for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            return cls.of_descriptor(fd, path)
        finally:
            os.close(fd)

    @classmethod
    def of_descriptor(cls, fd: int, name: str) -> RegionView:
        """Map the table behind a descriptor, which is not needed afterwards.

        Raises:
            OSError: it cannot be mapped.
            RegionError: it is not a region table.
        """
        try:
            check_sealed(fd, _TABLE_BYTES, name)
        except NotSealedError as error:
            message = f"{name} is not a sealed region table"
            raise RegionError(message) from error
        mapped = mmap.mmap(fd, _TABLE_BYTES, prot=mmap.PROT_READ)
        rows: U64 = np.frombuffer(mapped, dtype=np.uint64).reshape(CAPACITY, 4)
        if int(rows[0, 0]) != MAGIC:
            message = f"{name} is not a region table"
            raise RegionError(message)
        return cls(rows, mapped)

    @property
    def alive(self) -> bool:
        """Whether the owner still serves its memory."""
        return bool(self._words[_STATE] == ALIVE)

    @property
    def epoch(self) -> int:
        """The owner's present epoch."""
        return int(self._words[_EPOCH])

    def bases(self, regions: U64, starts: I64, extent: tuple[int, int], *, devices: bool = False) -> U64:
        """Absolute addresses of ``starts`` in ``regions``, after which the bytes ``[low, high)`` are to be used.

        ``devices`` tells whether the caller can use GPU memory, too.

        Raises:
            UnknownRegionError: a region is not live.
            DeviceRegionError: a region is in GPU memory, and the caller cannot use that.
            RegionError: some of the bytes are outside their region, or the region is not for peers.
        """
        rows = self._rows[(regions & np.uint64(_SLOT_MASK)).astype(np.int64)]
        dead = (rows[:, _ID] != regions) | (regions == 0)
        if dead.any():
            raise _unknown(int(regions[int(np.argmax(dead))]))
        if (rows[:, _ACCESS] != _REACHABLE).any():
            for access in rows[:, _ACCESS].tolist():
                _check_access(access, devices=devices)
        sizes = rows[:, _SIZE].astype(np.int64)
        low, high = extent
        outside = (starts < 0) | (starts > sizes) | (high > sizes - starts)
        if low < 0 or outside.any():
            at = int(np.argmax(outside))
            raise _outside(int(starts[at]), extent, int(sizes[at]))
        addresses: U64 = rows[:, _BASE] + starts.astype(np.uint64)
        return addresses

    def device(self, region: int) -> int | None:
        """The GPU in whose memory a region is; None for host memory.

        Raises:
            UnknownRegionError: it is not live.
        """
        words, at = self._words, (region & _SLOT_MASK) * 4
        if words[at] != region or not region:
            raise _unknown(region)
        return _device(words[at + _ACCESS])

    def find(self, region: int, *, devices: bool = False) -> tuple[int, int]:
        """Address and size of a region; ``devices`` tells whether the caller can use GPU memory, too.

        Raises:
            UnknownRegionError: it is not live.
            DeviceRegionError: it is in GPU memory, and the caller cannot use that.
            RegionError: it is not for peers.
        """
        words, at = self._words, (region & _SLOT_MASK) * 4
        if words[at] != region or not region:
            raise _unknown(region)
        if words[at + _ACCESS] != _REACHABLE:
            _check_access(words[at + _ACCESS], devices=devices)
        return words[at + _BASE], words[at + _SIZE]

    def base(self, region: int, start: int, extent: tuple[int, int]) -> int:
        """``bases`` for one region, without arrays."""
        base, size = self.find(region)
        low, high = extent
        if start < 0 or low < 0 or start + high > size:
            raise _outside(start, extent, size)
        return base + start

    def edges(self, regions: Sequence[int]) -> list[int]:
        """Addresses of the first and the last byte of live regions."""
        words = self._words
        rows = [(region & _SLOT_MASK) * 4 for region in regions]
        return [edge for at in rows for edge in (words[at + _BASE], words[at + _BASE] + words[at + _SIZE] - 1)]

    def still_live(self, regions: U64) -> bool:
        """Whether all of these regions are registered right now."""
        return bool((self._rows[(regions & np.uint64(_SLOT_MASK)).astype(np.int64), _ID] == regions).all())

    def close(self) -> None:
        """Unmap it; idempotent."""
        self._rows = np.zeros((CAPACITY, 4), dtype=np.uint64)
        self._words = memoryview(self._rows.reshape(-1).data)
        if self._map is not None:
            with contextlib.suppress(BufferError):  # a transfer that is just ending may still hold the rows
                self._map.close()
            self._map = None


def _unknown(region: int) -> UnknownRegionError:
    """The error for a region that is not live."""
    return UnknownRegionError(f"region {region:#x} is not registered (any more)")


def _device(access: int) -> int | None:
    return (access >> 1) - 1 if access >> 1 else None


def _check_access(access: int, *, devices: bool) -> None:
    if not access & _REACHABLE:
        raise RegionError("the cache is not remote accessible")
    device = _device(access)
    if device is not None and not devices:
        message = f"the cache is in {memory_name(device)}, which cannot be reached this way"
        raise DeviceRegionError(message)


def _outside(start: int, extent: tuple[int, int], size: int) -> RegionError:
    return RegionError(f"bytes [{start + extent[0]}, {start + extent[1]}) reach outside their region of {size} bytes")
