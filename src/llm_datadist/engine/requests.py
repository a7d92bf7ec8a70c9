"""What the public floor asks of the engine: plain frozen values, already type-checked.

The public classes (``CacheDesc``, ``CacheKey``, ...) keep the original's shape; these keep the meaning.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from collections.abc import Sequence

INVALID_ID = 2**64 - 1
"""An id that is "not set" (section 3.4 of the API specification)."""


class CacheKind(enum.Enum):
    """How a cache may be addressed."""

    CONTIGUOUS = "contiguous"
    """By batch entry: dimension 0 is the batch."""
    BLOCKS = "blocks"
    """By block: dimension 0 counts the blocks."""
    MIXED = "mixed"
    """Both ways, with the same stride (what the C++ API registers)."""


class MemStatus(enum.Enum):
    """Progress of a rank-table link."""

    OK = 0
    PREPARING = 1
    FAILED = 2


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The geometry of a cache: ``num_tensors`` equal tensors of ``shape``."""

    num_tensors: int
    shape: tuple[int, ...]
    item_size: int
    """Bytes of one element."""
    dtype: str
    on_device: bool
    kind: CacheKind


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Names one batch entry of a contiguous cache by request id."""

    req_id: int
    model_id: int = 0


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """Names one batch entry of a contiguous cache by prefix id; never released by a pull."""

    prefix_id: int
    model_id: int = 0


@dataclass(frozen=True, slots=True)
class BlocksKey:
    """Names a block pool; one per model id."""

    model_id: int = 0


@dataclass(frozen=True, slots=True)
class IdKey:
    """Names a batch entry by cache id; ids below the first valid one fall back to a key lookup (section 10.5)."""

    cache_id: int
    batch_index: int = 0


Key = Union[RequestKey, PrefixKey, BlocksKey, IdKey]  # noqa: UP007 - an alias is evaluated, also by Python 3.10


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Copy from a peer's cache into a local one."""

    operation: str
    """Name of the public call, for messages."""
    cluster_id: int
    """The peer that owns the source."""
    key: Key
    """The source cache."""
    cache_id: int
    """The local destination cache."""
    batch_index: int = 0
    """Destination batch entry (contiguous destinations)."""
    size: int = -1
    """Bytes per tensor; -1 is one local batch entry (contiguous destinations)."""
    src_blocks: Sequence[int] | None = None
    """Remote block indices; None unless blocks are pulled into blocks."""
    dst_blocks: Sequence[int] | None = None
    """Local block indices; None for a contiguous destination."""
    src_layers: range | None = None
    """Remote layers; None is "not given"."""
    dst_layers: range | None = None
    """Local layers; None is "not given"."""
    tensors_per_layer: int = 2
    notify: bytes | None = None
    """For the peer, once the bytes are in place."""


@dataclass(frozen=True, slots=True)
class PushRequest:
    """Copy from a local cache into a peer's cache, or to raw addresses of the peer."""

    operation: str
    cluster_id: int
    """The peer that owns the destination."""
    key: BlocksKey | IdKey | None
    """The destination cache; None when ``dst_addrs`` gives addresses instead."""
    cache_id: int
    """The local source cache."""
    src_layers: range
    """Empty: nothing is moved."""
    dst_layers: range
    """As long as ``src_layers``; ignored with ``dst_addrs``."""
    tensors_per_layer: int = 2
    batch_index: int = 0
    """Source batch entry (contiguous sources)."""
    src_blocks: Sequence[int] | None = None
    """Local block indices; None for a contiguous source."""
    dst_blocks: Sequence[int] | None = None
    """Remote block indices; None for a contiguous destination."""
    dst_block_size: int = 0
    """Bytes of one destination block; 0 is "as the destination cache says", or the source's block size."""
    dst_addrs: Sequence[int] | None = None
    """Raw destination addresses, one per tensor of ``src_layers`` (message mode only)."""
    notify: bytes | None = None
    """For the peer, once the bytes are in place."""


@dataclass(frozen=True, slots=True)
class Notification:
    """A message that a peer has sent, by ``send_notify`` or with a transfer."""

    cluster_id: int
    """Who sent it."""
    message: bytes


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """One entry of ``link_clusters`` / ``unlink_clusters``."""

    cluster_id: int
    remotes: tuple[tuple[str, int], ...]
    """(ip, port) of the peer's listener; ip is a literal, IPv4 or IPv6."""
    num_locals: int = 0
    """How many local addresses the caller named; only counted."""
