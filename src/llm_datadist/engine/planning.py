"""What a pull or push moves: from two caches and a request to spans. Checks everything that can be checked."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist.engine.errors import invalid
from llm_datadist.engine.requests import CacheKind
from llm_datadist.layout import plan
from llm_datadist.layout.spans import LayoutError, Spans
from llm_datadist.memory.devices import Devices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from llm_datadist.engine.catalogue import CacheEntry
    from llm_datadist.engine.peer_catalogue import PeerCache
    from llm_datadist.engine.requests import PullRequest, PushRequest
    from llm_datadist.layout.spans import Runs

    I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockIds:
    """Block lists of both sides; None where a side is a batch entry."""

    local: I64 | None
    remote: I64 | None

    @classmethod
    def of(cls, local: Sequence[int] | None, remote: Sequence[int] | None) -> BlockIds:
        """From the caller's lists.

        Raises:
            TypeError: a negative index.
        """
        return cls(_ids(local), _ids(remote))


def _ids(blocks: Sequence[int] | None) -> I64 | None:
    if blocks is None:
        return None
    try:
        # Half the time of np.array, which looks at every element twice.
        ids = np.frombuffer(struct.pack(f"{len(blocks)}q", *blocks), dtype=np.int64)
    except struct.error:  # far out of range in any case: clip, and let the range check name it
        ids = np.array([max(-(2**63), min(int(block), 2**63 - 1)) for block in blocks], dtype=np.int64)
    if len(ids) and int(ids.min()) < 0:
        message = f"block index {min(blocks)} is negative: only support indices from 0 on"
        raise TypeError(message)
    return ids


def check_destination(local: CacheEntry, request: PullRequest) -> None:
    """What is wrong with a pull whatever the peer's cache looks like.

    Raises:
        LLMException: LLM_PARAM_INVALID.
    """
    name = f"local cache {local.cache_id}"
    if request.dst_blocks is not None and not local.has_blocks:
        raise invalid(request.operation, f"{name} is not a blocks cache")
    if request.dst_blocks is None and local.spec.kind is CacheKind.BLOCKS:
        raise invalid(request.operation, f"{name} is a blocks cache", hint="use pull_blocks")
    try:
        if request.dst_blocks is None:
            window = plan.entry(local.geometry, request.batch_index)
            plan.contiguous(window, window, _pull_size(local, request))
        given = request.src_layers is not None or request.dst_layers is not None
        tensors = plan.tensor_range(
            "local", local.spec.num_tensors, request.dst_layers, request.tensors_per_layer, given=given
        )
        if request.src_layers is not None and len(request.src_layers) * request.tensors_per_layer != len(tensors):
            message = (
                f"src_layer_range has {len(request.src_layers)} layers, but {len(tensors)} local tensors take part"
            )
            raise LayoutError(message)
    except LayoutError as error:
        raise invalid(request.operation, f"{name}: {error}") from error


def _pull_size(local: CacheEntry, request: PullRequest) -> int:
    return request.size if request.size > 0 else local.geometry.stride


def plan_pull(local: CacheEntry, remote: PeerCache, batch_index: int, request: PullRequest, ids: BlockIds) -> Spans:
    """The spans of a pull whose destination has passed ``check_destination``.

    Raises:
        LayoutError: the caches or the selection do not fit.
        KeyError: the peer's cache has no such batch entry.
    """
    given = request.src_layers is not None or request.dst_layers is not None
    per_layer = request.tensors_per_layer
    into = plan.tensor_range("local", local.spec.num_tensors, request.dst_layers, per_layer, given=given)
    outof = plan.tensor_range("remote", remote.num_tensors, request.src_layers, per_layer, given=False)
    if ids.local is not None and ids.remote is not None:
        _need_blocks(remote)
        runs = plan.blocks(local.geometry, remote.geometry, ids.local, ids.remote, into_local=True)
    else:
        if batch_index >= remote.batch_entries:
            message = f"batch index {batch_index} of cache {remote.cache_id}"
            raise KeyError(message)
        source = plan.entry(remote.geometry, batch_index)
        if ids.local is not None:
            runs = plan.into_blocks(source, local.geometry, ids.local, into_local=True)
        else:
            destination = plan.entry(local.geometry, request.batch_index)
            runs = plan.contiguous(destination, source, _pull_size(local, request))
    return _spread(runs, local, into, remote, outof)


def plan_push(local: CacheEntry, remote: PeerCache, batch_index: int, request: PushRequest, ids: BlockIds) -> Spans:
    """The spans of a push.

    Raises:
        LayoutError: the caches or the selection do not fit.
    """
    into = plan.tensor_range("remote", remote.num_tensors, request.dst_layers, request.tensors_per_layer, given=False)
    outof = source_tensors(local, request)
    if ids.remote is not None:
        _need_blocks(remote)
        stride = remote.geometry.stride
        if request.dst_block_size not in (0, stride):
            message = (
                f"dst_block_memory_size is {request.dst_block_size}, but the destination's blocks have {stride} bytes"
            )
            raise LayoutError(message)
        target = plan.Window(0, 0)
    else:
        if batch_index >= remote.batch_entries:
            message = f"destination batch index {batch_index} is outside [0, {remote.batch_entries})"
            raise LayoutError(message)
        target = plan.entry(remote.geometry, batch_index)
    runs = _push_runs(local, remote.geometry, target, request, ids)
    return _spread(runs, local, outof, remote, into)


def plan_to_addresses(local: CacheEntry, request: PushRequest, ids: BlockIds) -> Runs:
    """The byte runs of a push to raw addresses: remote offsets count from each address.

    Raises:
        LayoutError: the selection does not fit.
    """
    tensors, count = source_tensors(local, request), len(request.dst_addrs or ())
    if count != len(tensors):
        message = f"{count} destination addresses for {len(tensors)} tensors"
        raise LayoutError(message)
    stride = local.geometry.stride
    entries = int(ids.remote.max()) + 1 if ids.remote is not None else 1
    block = (request.dst_block_size or stride) if ids.remote is not None else stride
    return _push_runs(local, plan.Geometry(block * entries, entries), plan.Window(0, stride), request, ids)


def source_tensors(local: CacheEntry, request: PushRequest) -> range:
    """The local tensors that a push takes.

    Raises:
        LayoutError: layers outside the cache, or tensors that do not divide into layers.
    """
    return plan.tensor_range("local", local.spec.num_tensors, request.src_layers, request.tensors_per_layer, given=True)


def _push_runs(
    local: CacheEntry, remote: plan.Geometry, target: plan.Window, request: PushRequest, ids: BlockIds
) -> Runs:
    if ids.remote is not None and ids.local is not None:
        if not local.has_blocks:
            message = f"local cache {local.cache_id} is not a blocks cache"
            raise LayoutError(message)
        return plan.blocks(local.geometry, remote, ids.local, ids.remote, into_local=False)
    if request.batch_index >= local.batch_entries:
        message = f"source batch index {request.batch_index} is outside [0, {local.batch_entries})"
        raise LayoutError(message)
    source = plan.entry(local.geometry, request.batch_index)
    if ids.remote is not None:
        return plan.into_blocks(source, remote, ids.remote, into_local=False)
    return plan.contiguous(source, target, source.size)


def _need_blocks(remote: PeerCache) -> None:
    if not remote.has_blocks:
        message = f"remote cache {remote.cache_id} is not a blocks cache"
        raise LayoutError(message)


def _spread(runs: Runs, local: CacheEntry, here: range, remote: PeerCache, there: range) -> Spans:
    if len(here) != len(there):
        message = (
            f"numbers of tensors differ: {len(here)} of local cache {local.cache_id}, {len(there)} of the remote cache"
        )
        raise LayoutError(message)
    regions = remote.regions[there.start : there.stop]
    starts, devices = np.zeros(len(regions), dtype=np.int64), Devices(local.device, remote.device)
    return Spans(local.addrs[here.start : here.stop], regions, starts, runs, devices)
