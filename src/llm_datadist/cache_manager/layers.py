"""Send a cache layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.cache.types import Cache, Placement
from llm_datadist.cache_manager.base import ManagerBase
from llm_datadist.layerwise.configs import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.layerwise.ranges import NUM_TENSORS_PER_LAYER
from llm_datadist.layerwise.task import OPERATION, BlockLists, CacheTask, LayerTransfer, plan_config
from llm_datadist.status import raise_if_true
from llm_datadist.utils import utils

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.layerwise.configs import AnyConfig


class LayerTransfers(ManagerBase):
    """Send caches to linked peers while they are being computed."""

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Sequence[AnyConfig],
        src_block_indices: Sequence[int] | None = None,
        dst_block_indices: Sequence[int] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Start to send a cache layer by layer (two tensors each), every layer as soon as it is ready.

        A thread goes through the local layers in ascending order. For a layer that some config wants it calls
        ``layer_synchronizer.synchronize_layer(layer, None)`` once, then sends the layer to these configs in list order.
        The first failure ends the task. Arguments are taken as they are now; the configs are not changed.

        Args:
            src_cache: local cache on DEVICE, with an even number of tensors.
            layer_synchronizer: tells when a layer is ready.
            transfer_configs: list or tuple of destinations: TransferWithCacheKeyConfig with remote cache access,
                TransferConfig without it. May be empty.
            src_block_indices: the local blocks, in a blocks cache. Without them, batch entry ``src_batch_index`` of the
                config is sent (of a blocks cache: block 0).
            dst_block_indices: the peer's blocks, if its cache is a blocks cache; as many as local blocks, or, without
                local blocks, one for each piece of the local entry.
            dst_block_memory_size: bytes of one of the peer's blocks. None and 0 mean the local block size; needed when
                only ``dst_block_indices`` is given.

        Returns:
            The task to wait for.

        Raises:
            TypeError: wrong type of an argument.
            ValueError: a number does not fit its integer type.
            LLMException: LLM_PARAM_INVALID: a cache on HOST or with an odd number of tensors, block arguments that do
                not fit each other, or a config that does not fit the cache. What is found later is a result of the
                task.
        """
        utils.check_isinstance("src_cache", src_cache, Cache, allow_none=False)
        raise_if_true(src_cache.cache_desc.placement == Placement.HOST, "src_cache must be on DEVICE, but is on HOST")
        blocks = _block_lists(src_block_indices, dst_block_indices, dst_block_memory_size)
        utils.check_isinstance("layer_synchronizer", layer_synchronizer, LayerSynchronizer, allow_none=False)
        kind = TransferWithCacheKeyConfig if self._accessible else TransferConfig
        utils.check_isinstance("transfer_configs", transfer_configs, (list, tuple), kind, allow_none=False)
        raise_if_true(
            blocks.dst is None and blocks.dst_size,
            "dst_block_memory_size {} is only for dst_block_indices: give both or none",
            blocks.dst_size,
        )
        raise_if_true(
            src_cache.cache_desc.num_tensors % NUM_TENSORS_PER_LAYER,
            "src_cache must have an even number of tensors (K and V of each layer), but has {}",
            src_cache.cache_desc.num_tensors,
        )
        plans = [plan_config(src_cache, config, blocks) for config in transfer_configs]
        raise_if_true(
            self._strict and self._accessible and any(plan.request.src_layers.start for plan in plans),
            "src_layer_range must begin with layer 0, as in the original (LLMConfig.strict_constraints is set)",
        )
        transfer = LayerTransfer(layer_synchronizer, plans, lambda request: self._live(OPERATION).push(request))
        transfer.start()
        return CacheTask(transfer)


def _block_lists(
    src_block_indices: Sequence[int] | None, dst_block_indices: Sequence[int] | None, dst_block_memory_size: int | None
) -> BlockLists:
    """The block arguments of transfer_cache_async, checked against each other."""
    dst, src = (
        _block_indices("dst_block_indices", dst_block_indices),
        _block_indices("src_block_indices", src_block_indices),
    )
    if dst_block_memory_size is not None:
        utils.check_uint64("dst_block_memory_size", dst_block_memory_size)
    raise_if_true(src and not dst, "src_block_indices needs dst_block_indices: give one for each source block")
    raise_if_true(
        src and dst and len(src) != len(dst),
        "src_block_indices has {} blocks, dst_block_indices {}: give as many",
        len(src or ()),
        len(dst or ()),
    )
    raise_if_true(
        dst and not src and not dst_block_memory_size,
        "dst_block_indices without src_block_indices needs dst_block_memory_size, the bytes of one destination block",
    )
    return BlockLists(src, dst, int(dst_block_memory_size or 0))


def _block_indices(name: str, indices: Sequence[int] | None) -> tuple[int, ...] | None:
    blocks = utils.int_list(name, indices)
    if not blocks:
        return None
    if min(blocks) < 0 or max(blocks) > utils.UINT64_MAX:
        utils.check_list_uint64(name, blocks)
    return tuple(blocks)
