"""One ``LLMDataDist`` of a soak: a source cache with contents of a seed, and a target cache full of poison.

The same memory is known as a blocks cache and as a contiguous one, so that every operation fits.
"""

from __future__ import annotations

import functools
import json
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.cli import kv
from llm_datadist.cli.plan import BlockTable
from llm_datadist.cli.soak.orders import Done, Moved, Ready, Verified
from llm_datadist.cli.soak.plan import BATCH, BLOCKS, ENTRY_BLOCKS, NUM_LAYERS, Lane, Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist import Cache
    from llm_datadist.cache_manager import CacheManager
    from llm_datadist.cli.kv import U8, U32
    from llm_datadist.cli.soak.orders import Move, Verify
    from llm_datadist.cli.soak.plan import Place, Table

_SOURCE_MODEL: Final = 0
_TARGET_MODEL: Final = 1
_TIMEOUT_MS: Final = 20_000
_POOL_BYTES: Final = 64 << 20
_LOCALHOST: Final = "127.0.0.1"
_KEPT: Final = 64


class AllReady(LayerSynchronizer):
    """The layers have been computed already."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Send it."""
        del layer_index, timeout_in_millis
        return True


class Views:
    """Memory with contents, and the two caches that know it."""

    def __init__(
        self, datadist: LLMDataDist, place: Place, model_id: int, fill: Callable[[list[U8]], None], *, pool: bool
    ) -> None:
        self._manager = datadist.cache_manager
        shape = place.shape
        tensors, block_bytes = shape.num_tensors, shape.block_bytes
        blocks = CacheDesc(tensors, [BLOCKS, block_bytes], DataType.DT_UINT8)
        entries = CacheDesc(tensors, [BATCH, ENTRY_BLOCKS * block_bytes], DataType.DT_UINT8)
        self._allocated = self._manager.allocate_blocks_cache(blocks) if pool else None
        if self._allocated is not None:
            self.addrs: list[int] = list(self._allocated.tensor_addrs)
            self.tensors: list[U8] = kv.tensors_at(self.addrs, shape, BLOCKS)
        else:
            self.tensors = list(np.empty((tensors, BLOCKS, block_bytes), dtype=np.uint8))
            self.addrs = [int(tensor.ctypes.data) for tensor in self.tensors]
        fill(self.tensors)  # before anybody can know it
        accessible = place.lane is not Lane.MESSAGES
        key = BlocksCacheKey(place.cluster_id, model_id) if accessible else None
        keys = [] if accessible else [CacheKey(place.cluster_id, entry, model_id) for entry in range(BATCH)]
        self.blocks: Cache = self._manager.register_blocks_cache(blocks, self.addrs, key)
        self.entries: Cache = self._manager.register_cache(entries, self.addrs, keys)

    def close(self) -> None:
        """Take the memory back."""
        for cache in (self.entries, self.blocks):
            self._manager.unregister_cache(cache.cache_id)
        if self._allocated is not None:
            self._manager.deallocate_blocks_cache(self._allocated)


class Member:
    """One place that is alive."""

    def __init__(self, place: Place, seed: int) -> None:
        self._place = place
        self._pool = place.lane is Lane.MAPPED
        self._seed = seed
        self._datadist = LLMDataDist(LLMRole.MIX, place.cluster_id)
        self._datadist.init(_config(place).generate_options())
        self._target = Views(self._datadist, place, _TARGET_MODEL, kv.poison, pool=self._pool)
        self._source = self._new_source()
        self._calls: dict[Operation, Callable[[Move], None]] = {
            Operation.PULL_BLOCKS: self._pull_blocks,
            Operation.PULL_FEW: self._pull_blocks,
            Operation.PUSH_BLOCKS: self._push_blocks,
            Operation.PULL_CACHE: self._pull_cache,
            Operation.PUSH_CACHE: self._push_cache,
            Operation.CACHE_TO_BLOCKS: self._cache_to_blocks,
            Operation.LAYER_WISE: self._layer_wise,
            Operation.COPY_BLOCKS: self._copy_blocks,
        }

    def _new_source(self) -> Views:
        def fill(tensors: list[U8]) -> None:
            kv.fill(tensors, self._seed, self._place.shape, _nothing)

        return Views(self._datadist, self._place, _SOURCE_MODEL, fill, pool=self._pool)

    def ready(self) -> Ready:
        """What peers need to know.

        Raises:
            RuntimeError: it does not listen.
        """
        address = self._datadist.listen_address
        if address is None:
            message = f"cluster {self._place.cluster_id} does not listen"
            raise RuntimeError(message)
        source, target = self._source.entries.cache_id, self._target.entries.cache_id
        return Ready(self._place, address, self._seed, source, target, tuple(self._target.addrs))

    def register(self, seed: int) -> Ready:
        """Other memory with other contents instead of the source cache."""
        self._source.close()
        self._seed = seed
        self._source = self._new_source()
        return self.ready()

    def link(self, peers: tuple[Ready, ...]) -> Done:
        """Link to others."""
        if peers:
            _, statuses = self._datadist.link_clusters([_info(peer) for peer in peers], _TIMEOUT_MS)
            self._check("link_clusters", statuses)
        return Done()

    def unlink(self, peers: tuple[Ready, ...], *, force: bool) -> Done:
        """Unlink from others."""
        if peers:
            _, statuses = self._datadist.unlink_clusters([_info(peer) for peer in peers], _TIMEOUT_MS, force)
            self._check("unlink_clusters", statuses)
        return Done()

    @staticmethod
    def _check(call: str, statuses: list[LLMStatusCode]) -> None:
        bad = [status for status in statuses if status != LLMStatusCode.LLM_SUCCESS]
        if bad:
            message = f"{call}: {', '.join(map(str, bad))}"
            raise LLMException(message, status_code=bad[0])

    def switch_role(self) -> Ready:
        """Another role, another port."""
        self._datadist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": f"{_LOCALHOST}:0"})
        return self.ready()

    def move(self, order: Move) -> Moved:
        """Make a transfer to or from a peer, again and again for a while."""
        transfer, shape = order.transfer, self._place.shape
        peer = order.target if transfer.operation.by_source else order.source
        end, times = time.monotonic() + order.for_s, 0
        while not times or time.monotonic() < end:
            self._calls[transfer.operation](order)
            times += 1
        path = self._datadist.explain_link(peer.place.cluster_id).path
        return Moved(times, times * len(transfer.table.src) * shape.num_tensors * shape.block_bytes, path or "unknown")

    @property
    def _manager(self) -> CacheManager:
        return self._datadist.cache_manager

    def _pull_blocks(self, order: Move) -> None:
        src, dst = _lists(order.transfer.table)
        self._manager.pull_blocks(_blocks_key(order.source, _SOURCE_MODEL), self._target.blocks, src, dst)

    def _push_blocks(self, order: Move) -> None:
        src, dst = _lists(order.transfer.table)
        self._manager.push_blocks(_blocks_key(order.target, _TARGET_MODEL), self._source.blocks, src, dst)

    def _pull_cache(self, order: Move) -> None:
        self._manager.pull_cache(self._entry_key(order), self._target.entries, order.transfer.entries[1])

    def _push_cache(self, order: Move) -> None:
        ours, theirs = order.transfer.entries
        key = CacheKeyByIdAndIndex(order.target.place.cluster_id, order.target.target_id, theirs)
        self._manager.push_cache(key, self._source.entries, ours)

    def _cache_to_blocks(self, order: Move) -> None:
        self._manager.pull_blocks(self._entry_key(order), self._target.blocks, (), list(order.transfer.table.dst))

    def _entry_key(self, order: Move) -> CacheKey | CacheKeyByIdAndIndex:
        entry, peer = order.transfer.entries[0], order.source
        if self._place.lane is Lane.MESSAGES:
            return CacheKey(peer.place.cluster_id, entry, _SOURCE_MODEL)
        return CacheKeyByIdAndIndex(peer.place.cluster_id, peer.entries_id, entry)

    def _layer_wise(self, order: Move) -> None:
        peer, layers = order.target, range(NUM_LAYERS)
        if self._place.lane is Lane.MESSAGES:
            entry = order.transfer.entries[0]
            start = entry * ENTRY_BLOCKS * self._place.shape.block_bytes
            addrs = [address + start for address in peer.target_addrs]
            to_entry = TransferConfig(peer.place.cluster_id, addrs, layers, entry)
            task = self._manager.transfer_cache_async(self._source.entries, AllReady(), [to_entry])
        else:
            src, dst = _lists(order.transfer.table)
            to_blocks = TransferWithCacheKeyConfig(_blocks_key(peer, _TARGET_MODEL), layers, layers)
            task = self._manager.transfer_cache_async(self._source.blocks, AllReady(), [to_blocks], src, dst)
        status = task.synchronize(2 * NUM_LAYERS * _TIMEOUT_MS)
        self._check("transfer_cache_async", [status])

    def _copy_blocks(self, order: Move) -> None:
        src, dst = _lists(order.transfer.table)
        half = len(src) // 2
        key = _blocks_key(order.source, _SOURCE_MODEL)
        self._manager.pull_blocks(key, self._target.blocks, src[:half], dst[:half])
        copies = {first: [second] for first, second in zip(dst[:half], dst[half:], strict=True)}
        self._manager.copy_blocks(self._target.blocks, copies)

    def verify(self, order: Verify) -> Verified:
        """Compare the whole target with what it should hold, and poison it again."""
        transfer, shape = order.transfer, self._place.shape
        table = BlockTable(np.array(transfer.table.src), np.array(transfer.table.dst))
        actual = kv.checksums(self._target.tensors, _nothing)
        if not order.complete:  # these may hold anything; all others must be poison
            _poison(self._target.tensors, transfer.table.dst)
            actual = kv.checksums(self._target.tensors, _nothing)
            table = BlockTable(np.empty(0, np.int64), np.empty(0, np.int64))
        problems: tuple[str, ...] = ()
        for seed in order.seeds:
            problems = kv.judge(shape, table, _expected(seed, transfer.source), actual).problems
            if not problems:
                break
        kv.poison(self._target.tensors)
        return Verified(shape.num_tensors * BLOCKS * shape.block_bytes, problems)

    def close(self) -> None:
        """Finalize."""
        self._datadist.finalize()


def _config(place: Place) -> LLMConfig:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = place.lane is not Lane.MESSAGES
    config.allow_multiple_instances = True
    config.sync_kv_timeout = _TIMEOUT_MS
    config.paths = place.lane.value
    config.listen_ip_info = f"{_LOCALHOST}:0"
    if place.lane is Lane.MAPPED:
        config.mem_pool_cfg = json.dumps({"memory_size": _POOL_BYTES})
    return config


def _info(peer: Ready) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = peer.place.cluster_id
    info.append_local_ip_info(_LOCALHOST, 0)
    info.append_remote_ip_info(*peer.address)
    return info


def _blocks_key(peer: Ready, model_id: int) -> BlocksCacheKey:
    return BlocksCacheKey(peer.place.cluster_id, model_id)


def _lists(table: Table) -> tuple[list[int], list[int]]:
    return list(table.src), list(table.dst)


def _nothing(_bytes_done: int) -> None:
    """No progress is reported."""


def _poison(tensors: list[U8], blocks: tuple[int, ...]) -> None:
    for tensor in tensors:
        tensor[list(blocks)] = kv.POISON


@functools.lru_cache(_KEPT)
def _expected(seed: int, source: Place) -> U32:
    return kv.expected_checksums(seed, source.shape, BLOCKS, _nothing)
