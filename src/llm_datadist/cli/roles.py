"""The prefill and the decode process of the demo: the caches, the links and the calls of the library.

Each process has two LLMDataDist objects, because some calls need remote cache access and others need it off. Both know
the same memory.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    Cache,
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
    TransferWithCacheKeyConfig,
)
from llm_datadist.cli import kv
from llm_datadist.cli.models import BLOCK_TOKENS, round_up
from llm_datadist.cli.orders import Done, Moved, Ready
from llm_datadist.cli.plan import Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.cli.models import CacheShape
    from llm_datadist.cli.orders import Address
    from llm_datadist.cli.plan import BlockTable, Plan

PREFILL_ID: Final = 1
DECODE_ID: Final = 2
_LAYERWISE_MODEL_ID: Final = 1000
"""Added to the model id of a cache: names the same memory as ``transfer_cache_async`` sees it."""
_REQUEST_ID: Final = 1
_PAGE_SHIFT: Final = 16
_LINK_TIMEOUT_MS: Final = 10_000
_LOCALHOST: Final = "127.0.0.1"


class StepError(Exception):
    """The library did not do what it promises."""


class Ends:
    """What both processes have: the two LLMDataDist objects."""

    def __init__(self, plan: Plan, role: LLMRole, cluster_id: int, *, listen: bool, pool_bytes: int) -> None:
        self.plan = plan
        one_sided, messages = _config(plan, listen=listen), _config(plan, listen=listen)
        one_sided.enable_remote_cache_accessible = True
        if pool_bytes:
            messages.mem_pool_cfg = json.dumps({"memory_size": pool_bytes, "page_shift": _PAGE_SHIFT})
        self.one_sided: LLMDataDist = LLMDataDist(role, cluster_id)
        self.one_sided.init(one_sided.generate_options())
        self.messages: LLMDataDist = LLMDataDist(role, cluster_id)
        self.messages.init(messages.generate_options())

    def close(self) -> None:
        """Finalize both."""
        self.messages.finalize()
        self.one_sided.finalize()

    def register_parts(self, shape: CacheShape, addresses: list[int], blocks: int) -> Cache:
        """Make the same tensors known with two per layer: what has one tensor per layer appears as its halves."""
        part_blocks = blocks // shape.parts
        desc = CacheDesc(
            shape.num_tensors * shape.parts, [part_blocks, BLOCK_TOKENS, *shape.token_shape], DataType.DT_BF16
        )
        starts = [part * part_blocks * shape.block_bytes for part in range(shape.parts)]
        key = BlocksCacheKey(self.one_sided.cluster_id, _LAYERWISE_MODEL_ID + shape.model_id)
        parts = [address + start for address in addresses for start in starts]
        return self.one_sided.cache_manager.register_blocks_cache(desc, parts, key)

    def timed(self, datadist: LLMDataDist, peer: int, calls: list[Callable[[], None]]) -> Moved:
        """Make the calls, which together move everything once."""
        start = time.perf_counter()
        for call in calls:
            call()
        seconds = time.perf_counter() - start
        path = datadist.explain_link(peer).path
        return Moved(self.plan.source_bytes, seconds, path or "unknown")


class Prefill:
    """Owns the cache that all operations read."""

    def __init__(self, plan: Plan, report: kv.Report) -> None:
        pool = sum(
            shape.num_tensors * round_up(plan.blocks * shape.block_bytes, 1 << _PAGE_SHIFT)
            for shape in plan.model.caches
        )
        self._plan = plan
        self._ends = Ends(plan, LLMRole.PROMPT, PREFILL_ID, listen=True, pool_bytes=pool)
        self._report = report
        self._caches: list[tuple[CacheShape, Cache, Cache]] = []
        """Shape, the cache as blocks, the same with two tensors per layer."""

    def prepare(self) -> Ready:
        """Allocate every cache as a contiguous one, fill it, and register the same memory as blocks."""
        ends, blocks = self._ends, self._plan.blocks
        cache_ids = []
        for shape in self._plan.model.caches:
            desc = CacheDesc(shape.num_tensors, [1, blocks * BLOCK_TOKENS, *shape.token_shape], DataType.DT_BF16)
            key = CacheKey(PREFILL_ID, _REQUEST_ID, shape.model_id)
            contiguous = ends.messages.cache_manager.allocate_cache(desc, [key])
            cache_ids.append(contiguous.cache_id)
            memory = contiguous.tensor_addrs
            kv.fill(kv.tensors_at(memory, shape, blocks), self._plan.seed, shape, self._report)
            paged = _register_blocks(ends.one_sided, shape, memory, blocks)
            self._caches.append((shape, paged, ends.register_parts(shape, memory, blocks)))
        return Ready(ends.one_sided.listen_address, ends.messages.listen_address, tuple(cache_ids))

    def transfer(self, operation: Operation) -> Moved:
        """Push, or send layer by layer."""
        calls = [
            self._push(shape, paged) if operation is Operation.PUSH_BLOCKS else self._send_layers(shape, layered)
            for shape, paged, layered in self._caches
        ]
        return self._ends.timed(self._ends.one_sided, DECODE_ID, calls)

    def _push(self, shape: CacheShape, paged: Cache) -> Callable[[], None]:
        src, dst = _lists(self._plan.call_table(Operation.PUSH_BLOCKS, shape))
        manager, key = self._ends.one_sided.cache_manager, BlocksCacheKey(DECODE_ID, shape.model_id)
        return lambda: manager.push_blocks(key, paged, src, dst, tensor_num_per_layer=shape.tensors_per_layer)

    def _send_layers(self, shape: CacheShape, layered: Cache) -> Callable[[], None]:
        src, dst = _lists(self._plan.call_table(Operation.LAYER_WISE, shape))
        manager, layers = self._ends.one_sided.cache_manager, range(shape.num_layers)
        key = BlocksCacheKey(DECODE_ID, _LAYERWISE_MODEL_ID + shape.model_id)
        config = TransferWithCacheKeyConfig(key, layers, layers)
        timeout_ms = self._plan.timeout_ms

        def call() -> None:
            computed = ComputedLayers(timeout_ms / 1000)
            task = manager.transfer_cache_async(layered, computed, [config], src, dst)
            for _ in layers:
                computed.finish_layer()
            status = task.synchronize(timeout_ms)
            if status != LLMStatusCode.LLM_SUCCESS:
                message = f"the task of the {shape.name} cache ended with {status}"
                raise StepError(message)
            if computed.asked != list(layers):
                message = f"synchronize_layer was called for layers {computed.asked}, not once for each in order"
                raise StepError(message)

        return call

    def close(self) -> None:
        """Finalize; the memory is gone then."""
        self._ends.close()


class ComputedLayers(LayerSynchronizer):
    """Stands for a model that computes its layers one after the other while they are sent."""

    def __init__(self, wait_s: float) -> None:
        self.asked: list[int] = []
        """The layers the transfer waited for."""
        self._wait_s = wait_s
        self._finished = 0
        self._changed = threading.Condition()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Wait until the layer is computed."""
        del timeout_in_millis
        self.asked.append(layer_index)
        with self._changed:
            return self._changed.wait_for(lambda: self._finished > layer_index, self._wait_s)

    def finish_layer(self) -> None:
        """The next layer is computed."""
        with self._changed:
            self._finished += 1
            self._changed.notify_all()


class Decode:
    """Receives; its memory is larger than what arrives, so that stray bytes show."""

    def __init__(self, plan: Plan, report: kv.Report) -> None:
        self._plan = plan
        self._ends = Ends(plan, LLMRole.DECODER, DECODE_ID, listen=False, pool_bytes=0)
        self._report = report
        self._caches: list[_Destination] = []

    def prepare(self) -> Done:
        """Get memory, make it known in every form, and compute what should arrive."""
        for shape in self._plan.model.caches:
            self._caches.append(_Destination(self._plan, self._ends, shape, self._report))
        return Done()

    def link(self, peer: Ready) -> Done:
        """Link both objects to those of the prefill process; the links work in both directions."""
        _link(self._ends.one_sided, peer.one_sided)
        _link(self._ends.messages, peer.messages)
        for cache, source_id in zip(self._caches, peer.cache_ids, strict=True):
            cache.source_id = source_id
        return Done()

    def poison(self) -> Done:
        """Make sure that only an operation can bring the right bytes."""
        for cache in self._caches:
            kv.poison(cache.tensors)
        return Done()

    def transfer(self, operation: Operation) -> Moved:
        """Pull."""
        datadist = self._ends.one_sided if operation is Operation.PULL_BLOCKS else self._ends.messages
        moved = self._ends.timed(datadist, PREFILL_ID, [cache.pull(operation) for cache in self._caches])
        if operation is Operation.PULL_CACHE:
            for cache in self._caches:
                cache.check_released()
        return moved

    def verify(self, operation: Operation) -> kv.Verified:
        """Compare every block with what the seed says."""
        found = kv.Verified(0, 0)
        for cache in self._caches:
            table = self._plan.tensor_table(operation, cache.shape)
            actual = kv.checksums(cache.tensors, self._report)
            found += kv.judge(cache.shape, table, cache.expected, actual)
        return found

    def close(self) -> None:
        """Finalize."""
        self._ends.close()


class _Destination:
    """One cache of the decode process."""

    def __init__(self, plan: Plan, ends: Ends, shape: CacheShape, report: kv.Report) -> None:
        self.shape = shape
        self.source_id = 0
        """Number of the contiguous source cache; known once linked."""
        self._plan = plan
        self._one_sided = ends.one_sided.cache_manager
        self._messages = ends.messages.cache_manager
        memory = np.empty((shape.num_tensors, plan.capacity, shape.block_bytes), dtype=np.uint8)
        self.tensors = list(memory)
        kv.poison(self.tensors)  # gets the memory from the system now, not within the first operation
        addresses = [int(tensor.ctypes.data) for tensor in memory]
        self.expected = kv.expected_checksums(plan.seed, shape, plan.blocks, report)
        self._paged = _register_blocks(ends.one_sided, shape, addresses, plan.capacity)
        ends.register_parts(shape, addresses, plan.capacity)
        self._paged_by_message = _register_blocks(ends.messages, shape, addresses, plan.capacity)
        desc = CacheDesc(shape.num_tensors, [1, plan.blocks * BLOCK_TOKENS, *shape.token_shape], DataType.DT_BF16)
        self._contiguous = self._messages.register_cache(desc, addresses)

    def pull(self, operation: Operation) -> Callable[[], None]:
        """The call that brings this cache."""
        src, dst = _lists(self._plan.call_table(operation, self.shape))
        model_id = self.shape.model_id
        if operation is Operation.PULL_BLOCKS:
            return lambda: self._one_sided.pull_blocks(BlocksCacheKey(PREFILL_ID, model_id), self._paged, src, dst)
        if operation is Operation.PULL_CACHE:
            return self._pull_by_request
        key = CacheKeyByIdAndIndex(PREFILL_ID, self.source_id, 0)  # the key of the request is gone by now
        return lambda: self._messages.pull_blocks(key, self._paged_by_message, (), dst)

    def _pull_by_request(self) -> None:
        self._messages.pull_cache(CacheKey(PREFILL_ID, _REQUEST_ID, self.shape.model_id), self._contiguous)

    def check_released(self) -> None:
        """The pull by request must have released the key: pull once more.

        Raises:
            StepError: it has not.
        """
        try:
            self._pull_by_request()
        except LLMException as error:
            if error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
                return
            raise
        message = f"the key of the {self.shape.name} cache is still there after a pull, which must release it"
        raise StepError(message)


def _config(plan: Plan, *, listen: bool) -> LLMConfig:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = False
    config.allow_multiple_instances = True
    config.sync_kv_timeout = plan.timeout_ms
    config.paths = plan.path.value
    if listen:
        config.listen_ip_info = f"{_LOCALHOST}:0"
    # Each object knows every tensor twice, once perhaps as two parts.
    config.max_registered_addrs = max(config.max_registered_addrs, 3 * plan.model.num_tensors)
    return config


def _register_blocks(datadist: LLMDataDist, shape: CacheShape, addresses: list[int], blocks: int) -> Cache:
    """Make tensors known as a blocks cache, named by the model id of its shape."""
    desc = CacheDesc(shape.num_tensors, [blocks, BLOCK_TOKENS, *shape.token_shape], DataType.DT_BF16)
    key = BlocksCacheKey(datadist.cluster_id, shape.model_id)
    return datadist.cache_manager.register_blocks_cache(desc, addresses, key)


def _link(datadist: LLMDataDist, address: Address | None) -> None:
    if address is None:
        message = "the prefill process does not listen"
        raise StepError(message)
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PREFILL_ID
    cluster.append_local_ip_info(_LOCALHOST, 0)
    cluster.append_remote_ip_info(*address)
    status, _ = datadist.link_clusters([cluster], _LINK_TIMEOUT_MS)
    if status != LLMStatusCode.LLM_SUCCESS:
        message = f"linking to the prefill process at {address[0]}:{address[1]} ended with {status}"
        raise StepError(message)


def _lists(table: BlockTable) -> tuple[list[int], list[int]]:
    return table.src.tolist(), table.dst.tolist()
