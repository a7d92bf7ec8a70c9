"""``NativeEngine``: the C++ class ``LlmDataDist``, in Python terms.

Arguments are ints, str, lists and buffers; results are integer statuses. Checks come in the order in which the C++
API documents them. What the caller says about a cache besides its id is not consulted: the registered descriptor is.
"""

from __future__ import annotations

import atexit
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from llm_datadist.engine import Engine
from llm_datadist.engine.requests import IdKey, PeerAddress, PullRequest, PushRequest, RequestKey
from llm_datadist.native import selections
from llm_datadist.native.descriptors import cache_spec, check_shape
from llm_datadist.native.options import check_comm_res, engine_options, is_ip, listen_address, role_name
from llm_datadist.native.statuses import (
    FAILED,
    FEATURE_NOT_ENABLED,
    KV_CACHE_NOT_EXIST,
    PARAM_INVALID,
    SUCCESS,
    RefusedError,
    failed,
    refuse,
    status,
)
from llm_datadist.utils import log

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llm_datadist.engine.requests import CacheSpec
    from llm_datadist.native.selections import Range

    Cluster = tuple[int, Sequence[tuple[str, int]], Sequence[tuple[str, int]]]
    """Cluster id, local addresses, remote addresses."""

ALL = (-1, -1)


class _Known(NamedTuple):
    """A cache as it was registered or allocated."""

    spec: CacheSpec
    addrs: tuple[int, ...]
    owned: bool


_live: weakref.WeakSet[NativeEngine] = weakref.WeakSet()


class NativeEngine:
    """One cluster member, driven from C++. Every method but ``finalize`` may be called from any thread at any time."""

    def __init__(self, cluster_id: int, role: int) -> None:
        self._cluster_id = cluster_id
        self._role = role
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._options: dict[str, str] = {}
        self._caches: dict[int, _Known] = {}

    # ------------------------------------------------------------ life

    @status("Initialize")
    def initialize(self, options: Mapping[str, str]) -> None:
        """Start; does nothing when started already."""
        with self._lock:
            if self._engine is not None:
                return
            parsed = engine_options(self._role, options)
            self._caches = {}
            self._options = dict(options)
            self._engine = Engine(self._cluster_id, parsed)
            _live.add(self)

    def finalize(self) -> None:
        """Stop; does nothing when not started."""
        with self._lock:
            engine, self._engine = self._engine, None
            self._caches = {}
        _live.discard(self)
        if engine is None:
            log.warn("[Finalize] cluster %d is not initialized", self._cluster_id)
            return
        try:
            engine.close()
        except BaseException as error:  # noqa: BLE001 - nothing may pass into C++
            failed("Finalize", error)
        # The parts of an engine know each other: without this its maps and descriptors would go some time later.
        del engine
        gc.collect()

    @status("SetRole")
    def set_role(self, role: int, options: Mapping[str, str]) -> None:
        """Take a role; listen where the options say, or stop listening."""
        engine = self._running()
        role_name(role)
        engine.switch_role(listen_address(options))
        self._role = role

    def listen_address(self) -> tuple[str, int] | None:
        """Where it listens, with the port that the system chose if 0 was asked for."""
        engine = self._engine
        return engine.listen_address if engine is not None else None

    def explain(self, cluster_id: int) -> str:
        """Which path leads to a cluster, and why; the reason if it is not linked."""
        try:
            return str(self._running().explain(cluster_id))
        except Exception as error:  # noqa: BLE001 - nothing may pass into C++
            return str(error)

    # ------------------------------------------------------------ links

    def link(self, clusters: Sequence[Cluster], timeout_ms: int) -> tuple[int, list[int] | None]:
        """Link clusters; the overall status, and one a cluster, or None where the call as a whole is refused."""
        try:
            engine = self._running()
            peers = self._peers(clusters, timeout_ms, listening=engine.listen_address is not None)
            try:
                check_comm_res(self._options)
            except RefusedError as error:
                return failed("LinkLlmClusters", error), [error.code] * len(peers)
            return _overall(engine.link_clusters(peers, timeout_ms))
        except BaseException as error:  # noqa: BLE001 - nothing may pass into C++
            return failed("LinkLlmClusters", error), None

    def unlink(self, clusters: Sequence[Cluster], timeout_ms: int, force: int) -> tuple[int, list[int] | None]:
        """Unlink clusters; results as ``link``."""
        try:
            engine = self._running()
            peers = self._peers(clusters, timeout_ms, listening=True)
            return _overall(engine.unlink_clusters(peers, timeout_ms, force=bool(force)))
        except BaseException as error:  # noqa: BLE001 - nothing may pass into C++
            return failed("UnlinkLlmClusters", error), None

    def _peers(self, clusters: Sequence[Cluster], timeout_ms: int, *, listening: bool) -> list[PeerAddress]:
        if timeout_ms <= 0:
            reason = f"timeout_in_millis is {timeout_ms}: it must be at least 1"
            raise refuse(reason)
        for cluster_id, local, remote in clusters:
            for ip, _ in (*local, *remote):
                if not is_ip(ip):
                    reason = f"ip {ip!r} of cluster {cluster_id} is not an IPv4 or IPv6 literal"
                    raise refuse(reason)
        if not clusters:
            raise refuse("clusters is empty: name at least one")
        return [
            PeerAddress(cluster_id, tuple((ip, port) for ip, port in remote), 1 if listening else len(local))
            for cluster_id, local, remote in clusters
        ]

    # ------------------------------------------------------------ caches

    def register(
        self, placement: int, num_tensors: int, data_type: int, shape: Sequence[int], addrs: Sequence[int]
    ) -> tuple[int, int]:
        """Register memory; status and cache id."""
        try:
            engine = self._running()
            if not addrs or len(addrs) != num_tensors or 0 in addrs:
                reason = f"{len(addrs)} addresses for {num_tensors} tensors: give one for each, none of them 0"
                raise refuse(reason)
            spec = cache_spec(placement, num_tensors, data_type, shape)
            cache_id = engine.register(spec, addrs, [], accessible=True)
            self._caches[cache_id] = _Known(spec, tuple(addrs), owned=False)
        except BaseException as error:  # noqa: BLE001 - nothing may pass into C++
            return failed("RegisterKvCache", error), -1
        return SUCCESS, cache_id

    @status("UnregisterKvCache")
    def unregister(self, cache_id: int) -> None:
        """Forget a cache; its memory is the caller's again afterwards."""
        self._running().unregister(cache_id)
        self._caches.pop(cache_id, None)

    def allocate(
        self, placement: int, num_tensors: int, data_type: int, shape: Sequence[int]
    ) -> tuple[int, int, list[int]]:
        """Make a cache of pool memory; status, cache id and addresses."""
        try:
            engine = self._pooled()
            check_shape(shape)
            if num_tensors <= 0:
                raise refuse("num_tensors is 0: a cache has at least one tensor")
            spec = cache_spec(placement, num_tensors, data_type, shape)
            cache_id, addrs = engine.allocate(spec, [])
            self._caches[cache_id] = _Known(spec, tuple(addrs), owned=True)
        except BaseException as error:  # noqa: BLE001 - nothing may pass into C++
            return failed("AllocateCache", error), -1, []
        return SUCCESS, cache_id, addrs

    @status("DeallocateCache")
    def deallocate(self, cache_id: int) -> None:
        """Give an allocated cache back; other ids are left alone."""
        engine = self._pooled()
        known = self._caches.get(cache_id)
        if known is not None and known.owned:
            self._caches.pop(cache_id, None)
        engine.deallocate(cache_id)

    # ------------------------------------------------------------ transfers

    @status("PullKvCache")
    def pull_cache(
        self,
        source: tuple[int, int, int],
        cache_id: int,
        batch_index: int,
        size: int,
        src_range: Range = ALL,
        dst_range: Range = ALL,
        per_layer: int = 2,
    ) -> None:
        """Copy a batch entry of a peer's cache; ``source`` is (cluster, cache id, batch index)."""
        engine = self._running()
        if size != -1 and size <= 0:
            reason = f"size is {size}: give the bytes of each tensor, or -1 for a whole batch entry"
            raise refuse(reason)
        selections.check_ranges(src_range, dst_range, per_layer, equal=False)
        src_layers, dst_layers = selections.layers(src_range, dst_range) or (None, None)
        cluster_id, remote_id, remote_batch = source
        key = IdKey(remote_id, remote_batch) if remote_id > 0 else RequestKey(0, 0)
        engine.pull(
            PullRequest(
                "PullKvCache",
                cluster_id,
                key,
                cache_id,
                batch_index,
                size,
                src_layers=src_layers,
                dst_layers=dst_layers,
                tensors_per_layer=per_layer,
            )
        )

    @status("PullKvBlocks")
    def pull_blocks(
        self,
        source: tuple[int, int, int],
        cache_id: int,
        src_blocks: Any,
        dst_blocks: Any,
        src_range: Range = ALL,
        dst_range: Range = ALL,
        per_layer: int = 2,
    ) -> None:
        """Copy blocks of a peer's cache; block lists are buffers of uint64 or sequences of int."""
        engine = self._running()
        cluster_id, remote_id, remote_batch = source
        _check_no_batch("src_cache_index", remote_batch)
        selections.check_ranges(src_range, dst_range, per_layer, equal=False)
        selections.check_block_lists(src_blocks, dst_blocks)
        src_layers, dst_layers = selections.layers(src_range, dst_range) or (None, None)
        outof, into = selections.block_ids(src_blocks), selections.block_ids(dst_blocks)
        deadline = engine.deadline()
        plain = src_layers is None and remote_id > 0
        if plain and engine.short.pull(cluster_id, ~remote_id, cache_id, into, outof, deadline):
            return
        engine.pull(
            PullRequest(
                "PullKvBlocks",
                cluster_id,
                IdKey(remote_id) if remote_id > 0 else RequestKey(0, 0),
                cache_id,
                src_blocks=outof,
                dst_blocks=into,
                src_layers=src_layers,
                dst_layers=dst_layers,
                tensors_per_layer=per_layer,
            ),
            deadline,
        )

    @status("PushKvCache")
    def push_cache(
        self,
        cache_id: int,
        target: tuple[int, int, int],
        batch_index: int,
        size: int,
        src_range: Range = ALL,
        dst_range: Range = ALL,
        per_layer: int = 2,
    ) -> None:
        """Copy a batch entry to a peer's cache; ``target`` is (cluster, cache id, batch index)."""
        engine = self._running()
        if size != -1:
            reason = f"size is {size}: only -1, a whole batch entry, is supported"
            raise refuse(reason)
        selections.check_ranges(src_range, dst_range, per_layer, equal=True)
        src_layers, dst_layers = self._push_layers(cache_id, src_range, dst_range, per_layer)
        cluster_id, remote_id, remote_batch = target
        engine.push(
            PushRequest(
                "PushKvCache",
                cluster_id,
                IdKey(remote_id, remote_batch),
                cache_id,
                src_layers,
                dst_layers,
                per_layer,
                batch_index,
            )
        )

    @status("PushKvBlocks")
    def push_blocks(
        self,
        cache_id: int,
        target: tuple[int, int, int],
        src_blocks: Any,
        dst_blocks: Any,
        src_range: Range = ALL,
        dst_range: Range = ALL,
        per_layer: int = 2,
    ) -> None:
        """Copy blocks to a peer's cache; block lists are buffers of uint64 or sequences of int."""
        engine = self._running()
        selections.check_block_lists(src_blocks, dst_blocks)
        cluster_id, remote_id, remote_batch = target
        _check_no_batch("dst_cache_index", remote_batch)
        selections.check_ranges(src_range, dst_range, per_layer, equal=True)
        src_layers, dst_layers = self._push_layers(cache_id, src_range, dst_range, per_layer)
        engine.push(
            PushRequest(
                "PushKvBlocks",
                cluster_id,
                IdKey(remote_id),
                cache_id,
                src_layers,
                dst_layers,
                per_layer,
                src_blocks=selections.block_ids(src_blocks),
                dst_blocks=selections.block_ids(dst_blocks),
            )
        )

    def _push_layers(self, cache_id: int, src_range: Range, dst_range: Range, per_layer: int) -> tuple[range, range]:
        spec = self._cache(cache_id).spec
        if not spec.on_device:
            reason = f"cache {cache_id} is registered as kHost: only kDevice caches are pushed, let the peer pull it"
            raise refuse(reason)
        # A last layer that is not full is counted, so that the engine refuses it.
        every = range(-(-spec.num_tensors // per_layer))
        return selections.layers(src_range, dst_range) or (every, every)

    # ------------------------------------------------------------ local copies

    @status("CopyKvCache")
    def copy_cache(self, src_id: int, dst_id: int, src_batch: int, dst_batch: int, offset: int, size: int) -> None:
        """Copy within this process, from batch entry to batch entry."""
        self._pooled().copy_cache(dst_id, src_id, dst_batch, src_batch, offset, size)

    @status("CopyKvBlocks")
    def copy_blocks(
        self, src_id: int, dst_id: int, src_blocks: Sequence[int], dst_blocks_list: Sequence[Sequence[int]]
    ) -> None:
        """Copy within this process: block ``src_blocks[i]`` to every block of ``dst_blocks_list[i]``."""
        engine = self._pooled()
        source, target = self._cache(src_id).spec, self._cache(dst_id).spec
        if len(src_blocks) != len(dst_blocks_list):
            reason = f"{len(src_blocks)} source blocks for {len(dst_blocks_list)} lists of destination blocks"
            raise refuse(reason)
        pairs = [(src, dst) for src, targets in zip(src_blocks, dst_blocks_list, strict=True) for dst in targets]
        if src_id == dst_id:
            engine.copy_blocks(src_id, pairs)
            return
        if source.num_tensors != target.num_tensors:
            reason = f"cache {src_id} has {source.num_tensors} tensors, cache {dst_id} {target.num_tensors}"
            raise refuse(reason)
        block, other = _block_size(source), _block_size(target)
        if block != other:
            reason = f"blocks of cache {src_id} have {block} bytes, those of cache {dst_id} {other}"
            raise refuse(reason, FAILED)
        if any(src >= source.shape[0] or dst >= target.shape[0] for src, dst in pairs):
            reason = f"a block is outside [0, {source.shape[0]}) of the source or [0, {target.shape[0]}) of the target"
            raise refuse(reason)
        engine.swap_blocks(self._cache(src_id).addrs, self._cache(dst_id).addrs, block, pairs)

    # ------------------------------------------------------------ helpers

    def _running(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise refuse("it is not initialized (never, or Finalize was called): call Initialize first", FAILED)
        return engine

    def _pooled(self) -> Engine:
        engine = self._engine
        if engine is None or not (engine.options.device_pool or engine.options.host_pool):
            reason = "there is no memory pool: give Initialize the option llm.MemPoolConfig or llm.HostMemPoolConfig"
            raise refuse(reason, FEATURE_NOT_ENABLED)
        return engine

    def _cache(self, cache_id: int) -> _Known:
        known = self._caches.get(cache_id)
        if known is None:
            reason = f"there is no local cache {cache_id}"
            raise refuse(reason, KV_CACHE_NOT_EXIST)
        return known


def _block_size(spec: CacheSpec) -> int:
    size = spec.item_size
    for dim in spec.shape[1:]:
        size *= dim
    return size


def _check_no_batch(name: str, batch_index: int) -> None:
    if batch_index:
        reason = f"batch_index of {name} is {batch_index}: it must be 0 where blocks are named"
        raise refuse(reason)


def _overall(statuses: Sequence[int]) -> tuple[int, list[int]]:
    """The last status that is no success, and all of them."""
    rets = [int(each) for each in statuses]
    return next((each for each in reversed(rets) if each != SUCCESS), SUCCESS if rets else PARAM_INVALID), rets


@atexit.register
def _finalize_all() -> None:
    """Say goodbye to peers if the program forgot to; runs where the program ends the interpreter."""
    for engine in list(_live):
        engine.finalize()
