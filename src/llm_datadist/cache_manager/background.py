"""The same transfers without blocking the caller."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from llm_datadist.cache_manager.transfers import Transfers, has_work, with_notification
from llm_datadist.engine.requests import PushRequest
from llm_datadist.layerwise.ranges import NUM_TENSORS_PER_LAYER
from llm_datadist.status import LLMFailedError
from llm_datadist.utils.completion import Completion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.cache.keys import AnyKey, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
    from llm_datadist.cache.types import Cache
    from llm_datadist.engine.requests import PullRequest
    from llm_datadist.utils.deadline import Deadline


class TransferTask(Completion[None]):
    """A pull or push in the background. Its methods may be called from any thread, any number of times.

    ``result`` and ``await`` return None when all is in place, and raise what the blocking call would have raised. The
    transfer ends by ``LLMConfig.sync_kv_timeout``, counted from the call, whether anybody waits for it or not;
    ``LLMDataDist.finalize`` ends it, too. A TimeoutError of ``result(timeout_s)`` that is no LLMException says that it
    goes on; one that is (LLM_TIMEOUT) is how it has ended. In a forked child its methods raise LLM_FAILED.
    """

    def __init__(self, future: Future[None]) -> None:
        super().__init__(future, LLMFailedError)


class BackgroundTransfers(Transfers):
    """Every transfer as a task.

    Arguments are checked, and lists copied, in the call, which raises what is wrong with them; what is found later is
    in the task. From the call to the end of the task the local cache is in use, as during a blocking call. Up to 32
    tasks run at a time, the others wait for their turn.
    """

    def pull_cache_async(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> TransferTask:
        """Begin what :meth:`pull_cache` does: same arguments, same errors."""
        deadline = self._engine.deadline()
        return self._begin(self._pull_cache_request(cache_key, cache, batch_index, size, kwargs), deadline)

    def pull_blocks_async(
        self,
        src_cache_key: AnyKey,
        dst_cache: Cache,
        src_blocks: Sequence[int] | None = (),
        dst_blocks: Sequence[int] = (),
        **kwargs: Any,
    ) -> TransferTask:
        """Begin what :meth:`pull_blocks` does: same arguments, same errors."""
        deadline = self._engine.deadline()
        return self._begin(
            self._pull_blocks_request(src_cache_key, dst_cache, src_blocks, dst_blocks, kwargs), deadline
        )

    def push_cache_async(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = NUM_TENSORS_PER_LAYER,
        *,
        notify: bytes | None = None,
    ) -> TransferTask:
        """Begin what :meth:`push_cache` does: same arguments, same errors."""
        deadline = self._engine.deadline()
        request = self._push_cache_request(
            dst_cache_key, src_cache, src_batch_index, (src_layer_range, dst_layer_range), size, tensor_num_per_layer
        )
        return self._begin(with_notification(request, notify), deadline)

    def push_blocks_async(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: Sequence[int] | None = (),
        dst_blocks: Sequence[int] = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = NUM_TENSORS_PER_LAYER,
        *,
        notify: bytes | None = None,
    ) -> TransferTask:
        """Begin what :meth:`push_blocks` does: same arguments, same errors."""
        deadline = self._engine.deadline()
        request = self._push_blocks_request(
            dst_cache_key, src_cache, src_blocks, dst_blocks, (src_layer_range, dst_layer_range), tensor_num_per_layer
        )
        return self._begin(with_notification(request, notify), deadline)

    def _begin(self, request: PullRequest | PushRequest, deadline: Deadline) -> TransferTask:
        if isinstance(request, PushRequest) and not has_work(request):
            nothing: Future[None] = Future()
            nothing.set_result(None)
            return TransferTask(nothing)
        frozen = dataclasses.replace(
            request, src_blocks=_copy(request.src_blocks), dst_blocks=_copy(request.dst_blocks)
        )
        return TransferTask(self._live(request.operation).begin(frozen, deadline))


def _copy(blocks: Sequence[int] | None) -> Sequence[int] | None:
    """The caller may change its list now."""
    return None if blocks is None else tuple(blocks)
