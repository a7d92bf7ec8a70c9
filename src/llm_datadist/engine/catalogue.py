"""The caches of this engine: ids, keys, lifetimes, and the view of them that peers get.

Rules (sections 1.3 to 1.6 of the core specification): ids count from 1 and are never used again; key ``i`` of a cache
names batch entry ``i``; of two registered contiguous caches with one key the older keeps it, of two block caches with
one model id the newer gets it; an allocated cache lives until it was deallocated *and* its last key is gone.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Union

import numpy as np

from llm_datadist.engine.requests import BlocksKey, CacheKind, PrefixKey, RequestKey
from llm_datadist.layout.plan import Geometry
from llm_datadist.wire import messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from llm_datadist.engine.requests import CacheSpec, Key
    from llm_datadist.memory.huge_pages import Advice
    from llm_datadist.memory.regions import RegionTable
    from llm_datadist.utils.deadline import Deadline

    U64 = NDArray[np.uint64]

EntryKey = Union[RequestKey, PrefixKey]  # noqa: UP007 - an alias is evaluated, also by Python 3.10


class DuplicateKeyError(Exception):
    """A key is bound already, or twice in one call."""


@dataclass(eq=False, slots=True)
class CacheEntry:
    """One live cache."""

    cache_id: int
    spec: CacheSpec
    geometry: Geometry
    addrs: U64
    regions: U64
    accessible: bool
    owned: bool
    """Its memory came from a pool."""
    keys: dict[EntryKey, int] = field(default_factory=dict)
    """Key -> batch entry."""
    id_held: bool = True
    """Whether the owner still holds it by id (allocated caches: not deallocated yet)."""
    hidden: bool = False
    """Its memory is being taken back: no new transfer may use it."""
    pins: int = 0
    """Transfers that use it right now."""
    holders: set[object] = field(default_factory=set)
    """Small transfers that do."""
    pulled: dict[RequestKey, set[int]] = field(default_factory=dict)
    """Tensors that layer-wise pulls of a key have covered."""
    device: int | None = None
    """The GPU in whose memory all tensors are; None is host memory."""
    advice: Advice | None = None
    """What became of the huge pages under it; None if they are not wanted, or not possible."""

    @property
    def batch_entries(self) -> int:
        """Batch entries that can be addressed; a pure block cache counts as one (its first block)."""
        return 1 if self.spec.kind is CacheKind.BLOCKS else self.geometry.entries

    @property
    def has_blocks(self) -> bool:
        """Whether it can be addressed by block."""
        return self.spec.kind is not CacheKind.CONTIGUOUS


class Catalogue:
    """All caches of one engine; thread-safe.

    ``one_sided`` is the remote-accessible mode: there peers decide alone what they touch, so caches that are not remote
    accessible are closed to their spans.
    """

    def __init__(self, regions: RegionTable, *, one_sided: bool = True) -> None:
        self._regions = regions
        self._one_sided = one_sided
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._next_id = 1
        self._entries: dict[int, CacheEntry] = {}
        self._keys: dict[EntryKey, tuple[CacheEntry, int]] = {}
        self._blocks: dict[int, CacheEntry] = {}
        self._snapshot: messages.Catalogue | None = None

    def next_id(self) -> int:
        """A fresh cache id. A failing call burns it."""
        with self._lock:
            self._next_id += 1
            return self._next_id - 1

    def registered_addrs(self) -> int:
        """Addresses of all live registered (not allocated) caches."""
        with self._lock:
            return sum(len(entry.addrs) for entry in self._entries.values() if not entry.owned)

    def add(
        self,
        cache_id: int,
        spec: CacheSpec,
        addrs: U64,
        keys: Sequence[Key | None],
        *,
        accessible: bool,
        owned: bool,
        device: int | None = None,
    ) -> CacheEntry:
        """Enter a cache; ``keys[i]`` names its batch entry ``i``, None leaves it without one.

        ``device`` is the GPU in whose memory it is.

        Raises:
            DuplicateKeyError: an allocated cache with a key that is bound already.
            RegionError: there is no room in the region table.
        """
        geometry = geometry_of(spec)
        with self._lock:
            if owned:
                self._refuse_duplicates(keys)
            regions: list[int] = []
            try:
                regions.extend(
                    self._regions.add(
                        int(addr), geometry.tensor_size, reachable=accessible or not self._one_sided, device=device
                    )
                    for addr in addrs
                )
            except BaseException:
                self._regions.remove(regions)
                raise
            entry = CacheEntry(
                cache_id,
                spec,
                geometry,
                addrs,
                np.array(regions, dtype=np.uint64),
                accessible=accessible,
                owned=owned,
                device=device,
            )
            self._entries[cache_id] = entry
            for index, key in enumerate(keys):
                self._bind(entry, index, key)
            self._snapshot = None
            return entry

    def _refuse_duplicates(self, keys: Sequence[Key | None]) -> None:
        seen: set[Key] = set()
        for key in keys:
            if key is None:
                continue
            bound = key.model_id in self._blocks if isinstance(key, BlocksKey) else key in self._keys
            if bound or key in seen:
                message = f"{key} is {'given twice' if key in seen else 'bound to another cache already'}"
                raise DuplicateKeyError(message)
            seen.add(key)

    def _bind(self, entry: CacheEntry, index: int, key: Key | None) -> None:
        if isinstance(key, BlocksKey):
            if key.model_id in self._blocks:
                self._regions.invalidate()  # peers may have cached the older one
            self._blocks[key.model_id] = entry
        elif isinstance(key, (RequestKey, PrefixKey)) and key not in self._keys:
            self._keys[key] = (entry, index)
            entry.keys[key] = index

    def pin(self, cache_id: int) -> CacheEntry | None:
        """The cache with this id, held for a transfer until ``unpin``; None if there is none."""
        with self._lock:
            entry = self._entries.get(cache_id)
            if entry is None or entry.hidden:
                return None
            entry.pins += 1
            return entry

    def unpin(self, entry: CacheEntry) -> None:
        """End one hold of a transfer."""
        with self._lock:
            entry.pins -= 1
            self._changed.notify_all()

    def hold(self, entry: CacheEntry, holder: object) -> bool:
        """``pin`` a cache that is known already; False if it must not be used any more.

        Takes no lock: either this sees that the cache is hidden, or whoever has hidden it sees the holder.
        """
        entry.holders.add(holder)
        if entry.hidden:
            self.let_go(entry, holder)
            return False
        return True

    def let_go(self, entry: CacheEntry, holder: object) -> None:
        """Undo ``hold``."""
        entry.holders.discard(holder)
        if entry.hidden:
            with self._lock:
                self._changed.notify_all()

    def find(self, ref: messages.KeyRef) -> tuple[CacheEntry, int, RequestKey | None]:
        """What a peer names in message mode: pinned entry, batch index, and the key that a successful pull releases.

        Raises:
            KeyError: there is none.
        """
        with self._lock:
            entry, index = self._resolve(ref)
            entry.pins += 1
            released = None
            if entry.owned and not ref.blocks:
                keys = (key for key, at in entry.keys.items() if at == index and isinstance(key, RequestKey))
                released = next(keys, None)
            return entry, index, released

    def _resolve(self, ref: messages.KeyRef) -> tuple[CacheEntry, int]:
        if ref.blocks or (ref.cache_id is not None and ref.cache_id < 0):
            return self._blocks[ref.model_id], 0
        if ref.cache_id is not None:
            entry = self._entries[ref.cache_id]
            if entry.hidden:
                raise KeyError(ref.cache_id)
            if ref.batch_index >= entry.batch_entries:
                message = f"batch index {ref.batch_index} of cache {ref.cache_id}"
                raise KeyError(message)
            return entry, ref.batch_index
        if ref.prefix_id is not None:
            return self._keys[PrefixKey(ref.prefix_id, ref.model_id)]
        if ref.req_id is not None:
            return self._keys[RequestKey(ref.req_id, ref.model_id)]
        message = "empty key"
        raise KeyError(message)

    def remove_key(self, key: EntryKey) -> CacheEntry | None:
        """Forget a key of an allocated cache; the cache if that was its last hold, else None.

        Unknown keys and keys of registered caches are left alone.
        """
        with self._lock:
            found = self._keys.get(key)
            if found is None or not found[0].owned:
                return None
            entry = found[0]
            self._drop_key(entry, key)
            self._regions.invalidate()
            return self._doomed(entry)

    def consume(self, entry: CacheEntry, key: RequestKey, tensors: range) -> CacheEntry | None:
        """Note a successful pull of ``tensors`` by ``key``; once all are covered the key goes, as in ``remove_key``."""
        with self._lock:
            if key not in entry.keys:
                return None
            covered = entry.pulled.setdefault(key, set())
            covered.update(tensors)
            if len(covered) < entry.spec.num_tensors:
                return None
            self._drop_key(entry, key)
            self._regions.invalidate()
            return self._doomed(entry)

    def deallocate(self, cache_id: int) -> CacheEntry | None:
        """Give up the hold by id; the cache if that was its last hold, else None.

        Unknown and registered caches are left alone.
        """
        with self._lock:
            entry = self._entries.get(cache_id)
            if entry is None or not entry.owned:
                return None
            entry.id_held = False
            if entry.has_blocks:
                return entry
            return self._doomed(entry)

    def get(self, cache_id: int) -> CacheEntry | None:
        """The cache with this id."""
        with self._lock:
            return self._entries.get(cache_id)

    def all(self) -> list[CacheEntry]:
        """Every cache whose memory has not been given back."""
        with self._lock:
            return list(self._entries.values())

    def num_keys(self) -> int:
        """How many batch entries have a key."""
        return len(self._keys)

    def wait_unpinned_after_hiding(self, entry: CacheEntry, deadline: Deadline) -> bool:
        """Take a cache out of every look-up, then wait until no transfer of this process, or held for a peer, uses it.

        Returns whether that happened in time. Until ``forget``, ``get`` still finds it, so that the caller may try
        again.
        """
        with self._lock:
            entry.hidden = True
            for key in list(entry.keys):
                self._drop_key(entry, key)
            for model_id in [model for model, holder in self._blocks.items() if holder is entry]:
                del self._blocks[model_id]
            self._snapshot = None
            self._regions.invalidate()  # from here on peers must find a newer cache of the same name, or none
            return self._changed.wait_for(lambda: not entry.pins and not entry.holders, deadline.remaining())

    def forget(self, entry: CacheEntry) -> bool:
        """Drop a hidden cache for good; True for the one caller that did it, who may free its memory."""
        with self._lock:
            return self._entries.pop(entry.cache_id, None) is not None

    def _drop_key(self, entry: CacheEntry, key: EntryKey) -> None:
        entry.keys.pop(key, None)
        if isinstance(key, RequestKey):
            entry.pulled.pop(key, None)
        if self._keys.get(key, (None, 0))[0] is entry:
            del self._keys[key]
        self._snapshot = None

    def _doomed(self, entry: CacheEntry) -> CacheEntry | None:
        return entry if not entry.id_held and not entry.keys else None

    def snapshot(self) -> messages.Catalogue:
        """All caches and keys as peers see them in remote-accessible mode (prefix keys are not published)."""
        with self._lock:
            if self._snapshot is None or self._snapshot.epoch != self._regions.epoch:
                keys = [
                    messages.KeyInfo(
                        cache_id=entry.cache_id, model_id=key.model_id, req_id=key.req_id, batch_index=index
                    )
                    for key, (entry, index) in self._keys.items()
                    if isinstance(key, RequestKey)
                ]
                keys += [
                    messages.KeyInfo(cache_id=entry.cache_id, model_id=model) for model, entry in self._blocks.items()
                ]
                self._snapshot = messages.Catalogue(
                    epoch=self._regions.epoch,
                    caches=[info_of(entry) for entry in self._entries.values() if not entry.hidden],
                    keys=keys,
                )
            return self._snapshot


def geometry_of(spec: CacheSpec) -> Geometry:
    """The geometry of one tensor of a cache."""
    size = spec.item_size
    for dim in spec.shape:
        size *= dim
    return Geometry(size, spec.shape[0])


def info_of(entry: CacheEntry) -> messages.CacheInfo:
    """What a peer is told about a cache."""
    return messages.CacheInfo(
        cache_id=entry.cache_id,
        kind=entry.spec.kind.value,
        tensor_size=entry.geometry.tensor_size,
        entries=entry.geometry.entries,
        dtype=entry.spec.dtype,
        accessible=entry.accessible,
        regions=[int(region) for region in entry.regions],
        device=entry.device,
    )
