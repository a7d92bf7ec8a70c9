"""The KV caches of real models: how many tensors, and how large a block of each is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

BLOCK_TOKENS: Final = 16
"""Tokens in one block of a paged KV cache."""
ITEM_BYTES: Final = 2
"""Bytes of one bf16 element."""
LAYERWISE_TENSORS: Final = 2
"""Tensors of one layer, as ``transfer_cache_async`` counts."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """One cache of a model: equal tensors that differ only in what they hold."""

    name: str
    model_id: int
    """Tells the caches of one process apart."""
    num_layers: int
    tensors_per_layer: int
    """2 for K and V, 1 for a latent tensor."""
    token_shape: tuple[int, ...]
    """Elements that one token has in one tensor."""

    @property
    def num_tensors(self) -> int:
        """Tensors of all layers."""
        return self.num_layers * self.tensors_per_layer

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one tensor."""
        return BLOCK_TOKENS * math.prod(self.token_shape) * ITEM_BYTES

    @property
    def parts(self) -> int:
        """Pieces into which a layer-wise transfer cuts each tensor, so that every layer has two of them."""
        return LAYERWISE_TENSORS // self.tensors_per_layer


@dataclass(frozen=True, slots=True)
class Model:
    """The caches that one token of a model fills."""

    caches: tuple[CacheShape, ...]

    @property
    def num_tensors(self) -> int:
        """Tensors of all caches."""
        return sum(cache.num_tensors for cache in self.caches)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all tensors of all caches."""
        return sum(cache.num_tensors * cache.block_bytes for cache in self.caches)

    @property
    def block_multiple(self) -> int:
        """Block counts must divide by this, for every tensor to divide into its parts."""
        return math.lcm(*(cache.parts for cache in self.caches))

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens, rounded up to what the caches can be divided into."""
        return round_up(-(-tokens // BLOCK_TOKENS), self.block_multiple)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below the number."""
    return -(-number // multiple) * multiple


class ModelName(str, Enum):
    """The models that ``--model`` knows."""

    LLAMA_3_1_8B = "llama-3.1-8b"
    QWEN3_8B = "qwen3-8b"
    DEEPSEEK_R1 = "deepseek-r1"
    TINY = "tiny"


def _grouped_query(num_layers: int, num_heads: int, head_dim: int) -> Model:
    return Model((CacheShape("kv", 0, num_layers, 2, (num_heads, head_dim)),))


def _multi_head_latent(num_layers: int, latent: int, rope: int) -> Model:
    return Model((CacheShape("latent", 0, num_layers, 1, (latent,)), CacheShape("rope", 1, num_layers, 1, (rope,))))


MODELS: Final[dict[ModelName, Model]] = {
    ModelName.LLAMA_3_1_8B: _grouped_query(num_layers=32, num_heads=8, head_dim=128),
    ModelName.QWEN3_8B: _grouped_query(num_layers=36, num_heads=8, head_dim=128),
    ModelName.DEEPSEEK_R1: _multi_head_latent(num_layers=61, latent=512, rope=64),
    ModelName.TINY: _grouped_query(num_layers=2, num_heads=2, head_dim=32),
}
