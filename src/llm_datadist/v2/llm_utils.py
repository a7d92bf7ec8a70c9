"""Module path of the original for small helpers."""

from __future__ import annotations

from llm_datadist.cache import is_invalid_id, is_valid_id
from llm_datadist.configs import parse_listen_ip_info
from llm_datadist.layerwise import layer_range_to_tensor_indices

__all__ = ["is_invalid_id", "is_valid_id", "layer_range_to_tensor_indices", "parse_listen_ip_info"]
