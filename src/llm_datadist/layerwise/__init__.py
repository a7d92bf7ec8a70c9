"""Layer ranges, and the layer-wise transfer that sends each layer as soon as it was computed."""

from __future__ import annotations

from llm_datadist.layerwise.configs import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.layerwise.ranges import check_layer_range, layer_range_to_tensor_indices
from llm_datadist.layerwise.task import CacheTask

__all__ = [
    "CacheTask",
    "LayerSynchronizer",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "check_layer_range",
    "layer_range_to_tensor_indices",
]
