"""The connector, which lets a test see what lies in the pages of a request."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from llm_datadist.integrations.vllm import LLMDataDistConnector

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class WatchedConnector(LLMDataDistConnector):
    """For an engine whose scheduler and worker are in one process."""

    caches: ClassVar[dict[str, torch.Tensor]] = {}
    num_blocks: ClassVar[int] = 0
    blocks: ClassVar[tuple[list[int], ...]] = ()
    """Of the request that ended last, by KV group."""
    loaded: ClassVar[int] = 0
    """Tokens whose KV the last request got from another engine."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        WatchedConnector.caches = kv_caches
        super().register_kv_caches(kv_caches)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        WatchedConnector.loaded += num_external_tokens  # it is called again, with 0, once they are there
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        WatchedConnector.blocks = block_ids
        return super().request_finished_all_groups(request, block_ids)

    @classmethod
    def pages(cls, count: int) -> dict[str, list[str]]:
        """Digests of the first ``count`` blocks of that request in every layer."""
        (blocks,) = cls.blocks
        return {
            name: [_digest(cache, cls.num_blocks, at) for at in blocks[:count]] for name, cache in cls.caches.items()
        }


def _digest(cache: torch.Tensor, num_blocks: int, block: int) -> str:
    page = cache.select(cache.shape.index(num_blocks), block).contiguous()
    assert page.count_nonzero()
    return hashlib.sha256(page.view(torch.uint8).numpy().tobytes()).hexdigest()
