"""Move caches between this process and a peer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from llm_datadist.cache.keys import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    destination_key,
    is_valid_id,
    peer_of,
    source_key,
)
from llm_datadist.cache.types import Cache
from llm_datadist.cache_manager.base import (
    ManagerBase,
    check_blocks,
    check_contiguous,
    check_size,
    check_tensors_per_layer,
)
from llm_datadist.engine.requests import PullRequest, PushRequest
from llm_datadist.layerwise.ranges import (
    NUM_TENSORS_PER_LAYER,
    check_equal_length,
    check_layer_range,
    optional_layer_range,
)
from llm_datadist.status import raise_if_false, raise_if_true
from llm_datadist.utils import utils

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from llm_datadist.cache.keys import AnyKey
    from llm_datadist.utils.deadline import Deadline

    ShortTransfer: TypeAlias = Callable[[int, int, int, list[int], list[int], Deadline], bool]


class Transfers(ManagerBase):
    """Pull from and push to linked peers, each call within ``LLMConfig.sync_kv_timeout``.

    When a call returns, every byte is in place. When it raises, no byte of the destination changes any more, unless the
    exception's ``quiescent`` is False; its ``finished_blocks`` are complete.
    """

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Raise LLM_PARAM_INVALID unless exactly one of ``req_id`` and ``prefix_id`` is set."""
        raise_if_false(
            is_valid_id(cache_key.req_id) != is_valid_id(cache_key.prefix_id),
            "exactly one of req_id and prefix_id must be set (not 2**64 - 1) in {!r}",
            cache_key,
        )

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """Copy a batch entry of a peer's contiguous cache into a batch entry of a local one, in each tensor.

        Without remote cache access a successful pull by request id releases that key of an allocated cache at the peer.

        Args:
            cache_key: the peer and its entry; with remote cache access only a CacheKeyByIdAndIndex.
            cache: local contiguous cache.
            batch_index: local batch entry.
            size: bytes of each tensor, from the start of both entries; -1 for a whole local entry.
            **kwargs: ``src_layer_range`` and ``dst_layer_range``, each a range with step 1; None or an empty range is
                all layers. ``tensor_num_per_layer``, default 2; matters only with a range. ``notify``: bytes, at most
                64 KiB, that the peer gets (``LLMDataDist.get_notifies``) once all is in place, and only then. Other
                names are ignored.

        Raises:
            TypeError: wrong type of an argument.
            ValueError: a number does not fit its integer type.
            AttributeError: ``cache_key`` or ``cache`` is None.
            LLMException: LLM_PARAM_INVALID: a wrong kind of cache or key, size, range, or sizes that do not fit at one
                of the ends; LLM_NOT_YET_LINK: no link to the peer; LLM_KV_CACHE_NOT_EXIST: no such cache at one of the
                ends; LLM_TIMEOUT. With ``notify`` also what ``LLMDataDist.send_notify`` raises, with the phase
                "confirm": the bytes are in place.
        """
        request = self._pull_cache_request(cache_key, cache, batch_index, size, kwargs)
        self._live("pull_cache").pull(request)

    def _pull_cache_request(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int,
        size: int,
        kwargs: dict[str, Any],
    ) -> PullRequest:
        kinds = (CacheKeyByIdAndIndex,) if self._accessible else (CacheKey, CacheKeyByIdAndIndex)
        utils.check_isinstance("cache_key", cache_key, kinds)
        utils.check_isinstance("cache", cache, Cache)
        utils.check_uint32("batch_index", batch_index)
        utils.check_int64("size", size)
        check_contiguous("cache", cache)
        check_size(size)
        per_layer = _tensors_per_layer(kwargs)
        if isinstance(cache_key, CacheKey):
            self.check_cache_key(cache_key)
        utils.require("cache_key", cache_key, "a CacheKey or CacheKeyByIdAndIndex")
        src_layers, dst_layers = _pull_layers(kwargs)
        return PullRequest(
            operation="pull_cache",
            cluster_id=peer_of(cache_key),
            key=source_key(cache_key),
            cache_id=int(cache.cache_id),
            batch_index=int(batch_index),
            size=int(size),
            src_layers=src_layers,
            dst_layers=dst_layers,
            tensors_per_layer=per_layer,
            notify=_notification(kwargs.get("notify")),
        )

    def pull_blocks(
        self,
        src_cache_key: AnyKey,
        dst_cache: Cache,
        src_blocks: Sequence[int] | None = (),
        dst_blocks: Sequence[int] = (),
        **kwargs: Any,
    ) -> None:
        """Copy blocks, or the slices of a batch entry, of a peer's cache into blocks of a local one, in each tensor.

        With a BlocksCacheKey, the peer's block ``src_blocks[i]`` goes to the local block ``dst_blocks[i]``. With
        another key, the peer's batch entry is cut into pieces of the local block size, and piece i goes to
        ``dst_blocks[i]``. If a destination block is named twice, the last pair counts.

        Args:
            src_cache_key: the peer and its cache.
            dst_cache: local blocks cache.
            src_blocks: list or tuple of int, the peer's blocks; empty unless the key is a BlocksCacheKey.
            dst_blocks: list or tuple of int, the local blocks.
            **kwargs: as in :meth:`pull_cache`.

        Raises:
            TypeError: wrong type of an argument (a ``range`` of blocks is one), or a negative block.
            ValueError: a number does not fit its integer type.
            AttributeError: ``src_cache_key`` or ``dst_cache`` is None.
            LLMException: LLM_PARAM_INVALID: a contiguous local cache, block lists that do not fit the key, each other
                or the caches, or a wrong range; LLM_NOT_YET_LINK: no link to the peer; LLM_KV_CACHE_NOT_EXIST: no such
                cache at one of the ends; LLM_TIMEOUT.
        """
        engine = self._engine
        deadline = engine.deadline()
        if not kwargs and self._short(engine.short.pull, src_cache_key, dst_cache, dst_blocks, src_blocks, deadline):
            return
        request = self._pull_blocks_request(src_cache_key, dst_cache, src_blocks, dst_blocks, kwargs)
        self._live("pull_blocks").pull(request, deadline)

    def _pull_blocks_request(
        self,
        src_cache_key: AnyKey,
        dst_cache: Cache,
        src_blocks: Sequence[int] | None,
        dst_blocks: Sequence[int],
        kwargs: dict[str, Any],
    ) -> PullRequest:
        utils.check_isinstance("src_cache_key", src_cache_key, (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey))
        utils.check_isinstance("dst_cache", dst_cache, Cache)
        source_blocks = utils.int_list("src_blocks", src_blocks)
        target_blocks = utils.int_list("dst_blocks", dst_blocks)
        check_blocks("dst_cache", dst_cache)
        _check_some_blocks("dst_blocks", target_blocks)
        per_layer = _tensors_per_layer(kwargs)
        by_blocks = isinstance(src_cache_key, BlocksCacheKey)
        if by_blocks:
            _check_some_blocks("src_blocks", source_blocks)
        else:
            self._check_no_blocks(src_cache_key, source_blocks)
        utils.require("src_cache_key", src_cache_key, "a key of the peer's cache")
        src_layers, dst_layers = _pull_layers(kwargs)
        return PullRequest(
            operation="pull_blocks",
            cluster_id=peer_of(src_cache_key),
            key=source_key(src_cache_key),
            cache_id=int(dst_cache.cache_id),
            src_blocks=source_blocks if by_blocks else None,
            dst_blocks=target_blocks,
            src_layers=src_layers,
            dst_layers=dst_layers,
            tensors_per_layer=per_layer,
            notify=_notification(kwargs.get("notify")),
        )

    def push_cache(
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
    ) -> None:
        """Copy a batch entry of a local contiguous cache into a batch entry of a peer's cache, in each tensor.

        Needs remote cache access on both sides. A cache with fewer tensors than ``tensor_num_per_layer`` has no layer:
        without ranges nothing is sent, and the call succeeds.

        Args:
            dst_cache_key: the peer and its entry.
            src_cache: local contiguous cache.
            src_batch_index: local batch entry.
            src_layer_range: local layers, a range with step 1 that is not empty; None for all layers of ``src_cache``.
            dst_layer_range: the peer's layers, as many; None for as many as ``src_cache`` has.
            size: only -1, the whole entry.
            tensor_num_per_layer: tensors of one layer; must divide the number of tensors.
            notify: as in :meth:`pull_cache`.

        Raises:
            TypeError: wrong type of an argument.
            ValueError: a number does not fit its integer type.
            LLMException: LLM_PARAM_INVALID: remote cache access is off, a blocks cache, another size, a wrong range, or
                sizes that do not fit at one of the ends; LLM_NOT_YET_LINK: no link to the peer; LLM_KV_CACHE_NOT_EXIST:
                no such cache at one of the ends; LLM_TIMEOUT.
        """
        request = self._push_cache_request(
            dst_cache_key, src_cache, src_batch_index, (src_layer_range, dst_layer_range), size, tensor_num_per_layer
        )
        self._push(request, notify, self._engine.deadline())

    def _push_cache_request(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int,
        ranges: tuple[range | None, range | None],
        size: int,
        tensor_num_per_layer: int,
    ) -> PushRequest:
        self._check_push_allowed("push_cache")
        utils.check_isinstance("dst_cache_key", dst_cache_key, CacheKeyByIdAndIndex, allow_none=False)
        utils.check_isinstance("src_cache", src_cache, Cache, allow_none=False)
        utils.check_uint32("src_batch_index", src_batch_index)
        check_contiguous("src_cache", src_cache)
        check_tensors_per_layer(tensor_num_per_layer)
        src_layers, dst_layers = _push_layers(src_cache, *ranges, tensor_num_per_layer)
        utils.check_int64("size", size)
        raise_if_false(size == -1, "size of push_cache can only be -1 (the whole entry), but is {}", size)
        if not src_layers:
            self._check_no_layer("push_cache", src_cache)
        return PushRequest(
            operation="push_cache",
            cluster_id=peer_of(dst_cache_key),
            key=destination_key(dst_cache_key),
            cache_id=int(src_cache.cache_id),
            src_layers=src_layers,
            dst_layers=dst_layers,
            tensors_per_layer=int(tensor_num_per_layer),
            batch_index=int(src_batch_index),
        )

    def push_blocks(
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
    ) -> None:
        """Copy blocks of a local cache into blocks of a peer's cache, in each tensor.

        Needs remote cache access on both sides. The local block ``src_blocks[i]`` goes to the peer's block
        ``dst_blocks[i]``; if a destination block is named twice, the last pair counts. A cache with fewer tensors than
        ``tensor_num_per_layer`` has no layer: without ranges nothing is sent, and the call succeeds.

        Args:
            dst_cache_key: the peer and its cache.
            src_cache: local blocks cache.
            src_blocks: list or tuple of int, the local blocks.
            dst_blocks: list or tuple of int, the peer's blocks; as many.
            src_layer_range: local layers, a range with step 1 that is not empty; None for all layers of ``src_cache``.
            dst_layer_range: the peer's layers, as many; None for as many as ``src_cache`` has.
            tensor_num_per_layer: tensors of one layer; must divide the number of tensors.
            notify: as in :meth:`pull_cache`.

        Raises:
            TypeError: wrong type of an argument (a ``range`` of blocks is one), or a negative block.
            ValueError: a number does not fit its integer type.
            AttributeError: ``dst_cache_key`` or ``src_cache`` is None.
            LLMException: LLM_PARAM_INVALID: remote cache access is off, a contiguous cache, block lists that do not fit
                each other or the caches, or a wrong range; LLM_NOT_YET_LINK: no link to the peer;
                LLM_KV_CACHE_NOT_EXIST: no such cache at one of the ends; LLM_TIMEOUT.
        """
        engine = self._engine
        deadline = engine.deadline()
        plain = notify is None and src_layer_range is dst_layer_range is None
        whole = plain and tensor_num_per_layer == NUM_TENSORS_PER_LAYER
        if (
            whole
            and type(tensor_num_per_layer) is int
            and self._short(engine.short.push, dst_cache_key, src_cache, src_blocks, dst_blocks, deadline)
        ):
            return
        request = self._push_blocks_request(
            dst_cache_key, src_cache, src_blocks, dst_blocks, (src_layer_range, dst_layer_range), tensor_num_per_layer
        )
        self._push(request, notify, deadline)

    def _push_blocks_request(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: Sequence[int] | None,
        dst_blocks: Sequence[int],
        ranges: tuple[range | None, range | None],
        tensor_num_per_layer: int,
    ) -> PushRequest:
        self._check_push_allowed("push_blocks")
        utils.check_isinstance("dst_cache_key", dst_cache_key, BlocksCacheKey)
        utils.check_isinstance("src_cache", src_cache, Cache)
        source_blocks = utils.int_list("src_blocks", src_blocks)
        target_blocks = utils.int_list("dst_blocks", dst_blocks)
        check_blocks("src_cache", src_cache)
        _check_some_blocks("dst_blocks", target_blocks)
        check_tensors_per_layer(tensor_num_per_layer)
        src_layers, dst_layers = _push_layers(src_cache, *ranges, tensor_num_per_layer)
        utils.require("dst_cache_key", dst_cache_key, "a BlocksCacheKey")
        if not src_layers:
            self._check_no_layer("push_blocks", src_cache)
        return PushRequest(
            operation="push_blocks",
            cluster_id=peer_of(dst_cache_key),
            key=destination_key(dst_cache_key),
            cache_id=int(src_cache.cache_id),
            src_layers=src_layers,
            dst_layers=dst_layers,
            tensors_per_layer=int(tensor_num_per_layer),
            src_blocks=source_blocks or (),
            dst_blocks=target_blocks,
        )

    def _push(self, request: PushRequest, notify: bytes | None, deadline: Deadline) -> None:
        request = with_notification(request, notify)
        if has_work(request):
            self._live(request.operation).push(request, deadline)

    def _short(
        self, transfer: ShortTransfer, key: object, cache: object, local: object, remote: object, deadline: Deadline
    ) -> bool:
        """Try the short way of block transfers, which knows what fits; False if nothing was moved, nor refused.

        It gets copies of the lists: what it has checked must not change before it is used.
        """
        return (
            type(local) is list
            and type(remote) is list
            and type(key) is BlocksCacheKey
            and type(cache) is Cache
            and cache.is_blocks_cache
            and self._initialized
            and transfer(key.cluster_id, key.model_id, cache.cache_id, local[:], remote[:], deadline)
        )

    def _check_no_blocks(self, key: AnyKey, src_blocks: Sequence[int] | None) -> None:
        if isinstance(key, CacheKey):
            self.check_cache_key(key)
        utils.require("src_blocks", src_blocks, "an empty list, or leave it out", TypeError)
        raise_if_true(src_blocks, "src_blocks is only for a BlocksCacheKey, but the key is {!r}", key)

    def _check_no_layer(self, operation: str, cache: Cache) -> None:
        raise_if_true(
            self._strict,
            "{} of a cache of {} tensors moves nothing, not even one layer (LLMConfig.strict_constraints is set)",
            operation,
            cache.cache_desc.num_tensors,
        )

    def _check_push_allowed(self, operation: str) -> None:
        raise_if_false(
            self._accessible,
            "{} needs remote cache access: set LLMConfig.{} = True on both sides before init",
            operation,
            "enable_remote_cache_accessible",
        )


def has_work(request: PushRequest) -> bool:
    """Whether there is anything to do: a cache without a whole layer has nothing to send."""
    return bool(request.src_layers) or request.notify is not None


def with_notification(request: PushRequest, notify: bytes | None) -> PushRequest:
    """The same push, with a message."""
    return request if notify is None else dataclasses.replace(request, notify=_notification(notify))


def _notification(value: object) -> bytes | None:
    utils.check_isinstance("notify", value, bytes)
    return value  # type: ignore[return-value]


def _tensors_per_layer(kwargs: dict[str, Any]) -> int:
    value = kwargs.get("tensor_num_per_layer", NUM_TENSORS_PER_LAYER)
    check_tensors_per_layer(value)
    return int(value)


def _pull_layers(kwargs: dict[str, Any]) -> tuple[range | None, range | None]:
    return (
        optional_layer_range("src_layer_range", kwargs.get("src_layer_range")),
        optional_layer_range("dst_layer_range", kwargs.get("dst_layer_range")),
    )


def _push_layers(
    cache: Cache, src_layer_range: range | None, dst_layer_range: range | None, per_layer: int
) -> tuple[range, range]:
    """The layers of a push, equally many; each range that is not given is all layers of the local cache."""
    for name, given in (("src_layer_range", src_layer_range), ("dst_layer_range", dst_layer_range)):
        if given is not None:
            check_layer_range(name, given)
    every = range(cache.cache_desc.num_tensors // per_layer)
    source = every if src_layer_range is None else src_layer_range
    target = every if dst_layer_range is None else dst_layer_range
    check_equal_length(source, target)
    return source, target


def _check_some_blocks(name: str, blocks: Sequence[int] | None) -> None:
    utils.require(name, blocks, "a list or tuple of int", TypeError)
    raise_if_false(blocks, "{} is empty: name at least one block", name)
