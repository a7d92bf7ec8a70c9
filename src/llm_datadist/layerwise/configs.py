"""What the caller gives to a layer-wise transfer: when a layer is ready, and where it goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeAlias

from llm_datadist.cache.keys import BlocksCacheKey, CacheKeyByIdAndIndex
from llm_datadist.cache.shown import Shown
from llm_datadist.layerwise.ranges import check_equal_length, check_layer_range
from llm_datadist.status import raise_if_true
from llm_datadist.utils import utils

if TYPE_CHECKING:
    from collections.abc import Sequence

TransferKey: TypeAlias = BlocksCacheKey | CacheKeyByIdAndIndex


class LayerSynchronizer(ABC):
    """Tells a layer-wise transfer when a layer may be sent: derive from it and implement ``synchronize_layer``."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        """Wait until the layer is computed.

        Called in the worker thread of the transfer, once for each layer that some config wants, in ascending order.

        Args:
            layer_index: index of the local layer.
            timeout_in_millis: always None.

        Returns:
            True to send the layer; False (or anything falsy) stops the whole task with LLM_PARAM_INVALID. Raising
            stops it with LLM_FAILED.
        """


class TransferConfig(Shown):
    """Destination of a layer-wise transfer by raw addresses; for use without remote cache access.

    Args:
        dst_cluster_id: the peer, unsigned 64 bits.
        dst_addrs: list or tuple of the peer's tensor addresses, two for each layer of ``src_layer_range``.
        src_layer_range: local layers to send; None sends all.
        src_batch_index: local batch entry.

    Raises:
        TypeError: wrong type of an argument.
        ValueError: a number does not fit its integer type.
        LLMException: LLM_PARAM_INVALID: ``src_layer_range`` is empty or negative, or its step is not 1.
    """

    _shown = ("dst_cluster_id", "dst_addrs", "src_layer_range", "src_batch_index")

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: Sequence[int],
        src_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        self.dst_cluster_id: int = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index
        self.dst_layer_range: range | None = None

    @property
    def dst_cluster_id(self) -> int:
        """The peer."""
        return self._dst_cluster_id

    @dst_cluster_id.setter
    def dst_cluster_id(self, value: int) -> None:
        utils.check_uint64("dst_cluster_id", value)
        self._dst_cluster_id = value

    @property
    def dst_addrs(self) -> Sequence[int]:
        """The peer's tensor addresses."""
        return self._dst_addrs

    @dst_addrs.setter
    def dst_addrs(self, value: Sequence[int]) -> None:
        utils.check_isinstance("dst_addrs", value, (list, tuple), int, allow_none=False)
        utils.check_list_uint64("dst_addrs", value)
        self._dst_addrs = value

    @property
    def src_layer_range(self) -> range | None:
        """Local layers to send; None sends all."""
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, value: range | None) -> None:
        if value is not None:
            check_layer_range("src_layer_range", value)
        self._src_layer_range = value

    @property
    def src_batch_index(self) -> int:
        """Local batch entry."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, value: int) -> None:
        utils.check_uint32("src_batch_index", value)
        self._src_batch_index = value


class TransferWithCacheKeyConfig(Shown):
    """Destination of a layer-wise transfer by key; for use with remote cache access.

    Args:
        cache_key: the peer's cache.
        src_layer_range: local layers to send.
        dst_layer_range: the peer's layers to send them to, in the same order; as many.
        src_batch_index: local batch entry; 0 with a BlocksCacheKey.

    Raises:
        TypeError: wrong type of an argument; None is refused.
        ValueError: ``src_batch_index`` does not fit unsigned 32 bits.
        LLMException: LLM_PARAM_INVALID: a range is empty or negative or has a step, the lengths differ, or
            ``src_batch_index`` is not 0 with a BlocksCacheKey.
    """

    _shown = ("cache_key", "src_layer_range", "dst_layer_range", "src_batch_index")

    def __init__(
        self,
        cache_key: TransferKey,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_batch_index: int = 0,
    ) -> None:
        utils.require("cache_key", cache_key, "a BlocksCacheKey or CacheKeyByIdAndIndex", TypeError)
        self.cache_key = cache_key
        utils.require("src_layer_range", src_layer_range, "a range", TypeError)
        self.src_layer_range = src_layer_range
        utils.require("dst_layer_range", dst_layer_range, "a range", TypeError)
        self.dst_layer_range = dst_layer_range
        check_equal_length(src_layer_range, dst_layer_range)
        utils.check_uint32("src_batch_index", src_batch_index)
        self.src_batch_index = src_batch_index
        self.dst_cluster_id: int = cache_key.cluster_id
        """Cluster id of the key given first; what is sent goes to the peer of the present ``cache_key``."""

    @property
    def cache_key(self) -> TransferKey | None:
        """The peer's cache; None can be set but not transferred to."""
        return self._cache_key

    @cache_key.setter
    def cache_key(self, value: TransferKey | None) -> None:
        utils.check_isinstance("cache_key", value, (BlocksCacheKey, CacheKeyByIdAndIndex))
        self._cache_key = value

    @property
    def src_layer_range(self) -> range | None:
        """Local layers to send; None sends all."""
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, value: range | None) -> None:
        if value is not None:
            check_layer_range("src_layer_range", value)
        self._src_layer_range = value

    @property
    def dst_layer_range(self) -> range | None:
        """The peer's layers; None means the same layers as the local ones."""
        return self._dst_layer_range

    @dst_layer_range.setter
    def dst_layer_range(self, value: range | None) -> None:
        if value is not None:
            check_layer_range("dst_layer_range", value)
        self._dst_layer_range = value

    @property
    def src_batch_index(self) -> int:
        """Local batch entry."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, value: int) -> None:
        raise_if_true(
            isinstance(self._cache_key, BlocksCacheKey) and value != 0,
            "src_batch_index must be 0 with a BlocksCacheKey, but is {!r}",
            value,
        )
        utils.check_uint32("src_batch_index", value)
        self._src_batch_index = value


AnyConfig: TypeAlias = TransferConfig | TransferWithCacheKeyConfig
