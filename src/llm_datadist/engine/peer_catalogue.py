"""What this side knows of a peer's caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist.engine.requests import BlocksKey, CacheKind, IdKey, RequestKey
from llm_datadist.layout.plan import Geometry

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llm_datadist.engine.requests import Key
    from llm_datadist.wire import messages

    U64 = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PeerCache:
    """One cache of the peer."""

    cache_id: int
    kind: CacheKind
    geometry: Geometry
    accessible: bool
    regions: U64
    dtype: str
    device: int | None
    """The GPU in whose memory it is; None is host memory."""

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        return len(self.regions)

    @property
    def batch_entries(self) -> int:
        """Batch entries that can be addressed; a pure block cache counts as one (its first block)."""
        return 1 if self.kind is CacheKind.BLOCKS else self.geometry.entries

    @property
    def has_blocks(self) -> bool:
        """Whether it can be addressed by block."""
        return self.kind is not CacheKind.CONTIGUOUS


def peer_cache(info: messages.CacheInfo) -> PeerCache:
    """From the wire form.

    Raises:
        ValueError: not a cache that this version understands.
    """
    if info.tensor_size % info.entries:
        message = f"cache {info.cache_id} of {info.tensor_size} bytes does not divide into {info.entries} entries"
        raise ValueError(message)
    return PeerCache(
        cache_id=info.cache_id,
        kind=CacheKind(info.kind),
        geometry=Geometry(info.tensor_size, info.entries),
        accessible=info.accessible,
        regions=np.array(info.regions, dtype=np.uint64),
        dtype=info.dtype,
        device=info.device,
    )


class PeerCatalogue:
    """A snapshot of a peer's catalogue (remote-accessible mode)."""

    def __init__(self, snapshot: messages.Catalogue) -> None:
        self.epoch: int = snapshot.epoch
        self._caches = {info.cache_id: peer_cache(info) for info in snapshot.caches}
        self._requests = {
            (info.model_id, info.req_id): (info.cache_id, info.batch_index)
            for info in snapshot.keys
            if info.req_id is not None
        }
        self._blocks = {info.model_id: info.cache_id for info in snapshot.keys if info.req_id is None}

    @property
    def on_devices(self) -> bool:
        """Whether some cache is in GPU memory."""
        return any(cache.device is not None for cache in self._caches.values())

    def find(self, key: Key, *, pull: bool) -> tuple[PeerCache, int]:
        """Cache and batch index that a key names.

        An ``IdKey`` with an id below 1 falls back to a key, as in the original: pulls to the block cache of model 0,
        pushes to request 0 of model 0.

        Raises:
            KeyError: there is none.
        """
        if isinstance(key, IdKey):
            if key.cache_id > 0:
                return self._caches[key.cache_id], key.batch_index
            key = BlocksKey(0) if pull else RequestKey(0, 0)
        if isinstance(key, BlocksKey):
            return self._caches[self._blocks[key.model_id]], 0
        if isinstance(key, RequestKey):
            cache_id, batch_index = self._requests[key.model_id, key.req_id]
            return self._caches[cache_id], batch_index
        message = "prefix keys are not published in remote-accessible mode"
        raise KeyError(message)
