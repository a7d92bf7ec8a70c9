"""How two caches differ, for the one who pairs caches that do not fit each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist.engine.errors import invalid
from llm_datadist.utils import log

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.engine.catalogue import CacheEntry
    from llm_datadist.engine.link import PeerLink
    from llm_datadist.engine.peer_catalogue import PeerCache
    from llm_datadist.engine.requests import PullRequest, PushRequest
    from llm_datadist.layout.spans import LayoutError
    from llm_datadist.status import LLMException

_MOST_NOTED: Final = 1024


def misfit(
    request: PullRequest | PushRequest, local: CacheEntry, remote: PeerCache, error: LayoutError
) -> LLMException:
    """The exception for a transfer between caches, or parts of them, that do not fit; it lists all that differs."""
    found = "; ".join(differences(local, remote))
    pair = f"local cache {local.cache_id} and cache {remote.cache_id} of cluster {request.cluster_id}"
    listed = f" ({pair} differ: {found})" if found else ""
    return invalid(request.operation, f"{error}{listed}", peer=request.cluster_id)


def differences(local: CacheEntry, remote: PeerCache) -> Iterator[str]:
    """Each fact in which two caches differ, with both values. Many a difference is legal, as far as it is not moved."""
    here, there = local.geometry, remote.geometry
    facts: tuple[tuple[str, object, object], ...] = (
        ("kind", local.spec.kind.value, remote.kind.value),
        ("data type", local.spec.dtype, remote.dtype),
        ("number of tensors", local.spec.num_tensors, remote.num_tensors),
        ("bytes of a block or batch entry", here.stride, there.stride),
        ("number of blocks or batch entries", here.entries, there.entries),
        ("bytes of a tensor", here.tensor_size, there.tensor_size),
    )
    return (f"{name} {ours} here, {theirs} there" for name, ours, theirs in facts if ours != theirs)


def note_data_types(link: PeerLink, local: CacheEntry, remote: PeerCache) -> None:
    """Say once that the data types of two caches differ: as in the original bytes are copied as they are."""
    pair = (remote.cache_id, local.cache_id)
    if remote.dtype != local.spec.dtype and pair not in link.noted:
        if len(link.noted) >= _MOST_NOTED:
            link.noted.clear()
        link.noted.add(pair)
        log.warn(
            "local cache %d holds %s, cache %d of cluster %d %s: bytes are copied as they are, without conversion",
            local.cache_id,
            local.spec.dtype,
            remote.cache_id,
            link.cluster_id,
            remote.dtype,
        )
