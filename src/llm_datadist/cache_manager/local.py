"""Copies within this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.cache.types import Cache, Placement
from llm_datadist.cache_manager.base import ManagerBase, check_blocks, check_contiguous, check_size
from llm_datadist.status import raise_if_false, raise_if_true
from llm_datadist.utils import utils

if TYPE_CHECKING:
    from collections.abc import Mapping


class LocalCopies(ManagerBase):
    """Copy between caches of this process; no link is needed."""

    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy part of a batch entry of each tensor of one contiguous cache to the same part of an entry of another.

        Args:
            dst: destination.
            src: source.
            dst_batch_index: batch entry of the destination.
            src_batch_index: batch entry of the source.
            offset: bytes into both entries.
            size: bytes; -1 for the rest of the source entry.
            req_id: unsigned 64 bits; accepted, not used.

        Raises:
            TypeError: wrong type of an argument.
            ValueError: a number does not fit its integer type.
            AttributeError: ``dst`` or ``src`` is None.
            LLMException: LLM_PARAM_INVALID: a blocks cache, a size of 0 or below -1, different numbers of tensors, a
                part outside an entry; LLM_KV_CACHE_NOT_EXIST: a cache is not registered or allocated any more.
        """
        utils.check_isinstance("dst", dst, Cache)
        utils.check_isinstance("src", src, Cache)
        utils.check_uint32("dst_batch_index", dst_batch_index)
        utils.check_uint32("src_batch_index", src_batch_index)
        utils.check_uint64("offset", offset)
        utils.check_int64("size", size)
        check_contiguous("src", src)
        check_contiguous("dst", dst)
        check_size(size)
        if req_id is not None:
            utils.check_uint64("req_id", req_id)
        numbers = (dst.cache_id, src.cache_id, dst_batch_index, src_batch_index, offset, size)
        self._live("copy_cache").copy_cache(*map(int, numbers))

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks within a blocks cache, in all its tensors.

        Args:
            cache: the cache.
            copy_block_info: from a block to the list of blocks that become copies of it.

        Raises:
            TypeError: wrong type of an argument (the values must be lists), or a negative block.
            AttributeError: an argument is None.
            LLMException: LLM_PARAM_INVALID: a contiguous cache, or a block it does not have; LLM_KV_CACHE_NOT_EXIST:
                the cache is not registered or allocated any more.
        """
        utils.check_isinstance("cache", cache, Cache)
        utils.check_isinstance("copy_block_info", copy_block_info, dict)
        utils.check_dict("copy_block_info", copy_block_info, int, list, int)
        check_blocks("cache", cache)
        pairs = [(int(src), int(dst)) for src, targets in copy_block_info.items() for dst in targets]
        negative = next((pair for pair in pairs if min(pair) < 0), None)
        if negative is not None:
            message = f"copy_block_info must not have negative blocks, but copies {negative[0]} to {negative[1]}"
            raise TypeError(message)
        self._live("copy_blocks").copy_blocks(int(cache.cache_id), pairs)

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks between a HOST and a DEVICE blocks cache, in all their tensors.

        Only the addresses of the caches are used, so a cache of ``Cache.create_cpu_cache`` will do.

        Args:
            src_cache: source.
            dst_cache: destination; blocks of the same size, as many tensors.
            src_to_dst: from a source block to a destination block.

        Raises:
            TypeError: wrong type of an argument, a key or a value.
            AttributeError: an argument is None.
            LLMException: LLM_PARAM_INVALID: a contiguous cache, different block sizes or numbers of tensors, a block
                out of range, both caches in the same placement, or a cache that was deallocated.
        """
        utils.check_isinstance("src_cache", src_cache, Cache)
        utils.check_isinstance("dst_cache", dst_cache, Cache)
        check_blocks("src_cache", src_cache)
        check_blocks("dst_cache", dst_cache)
        utils.check_isinstance("src_to_dst", src_to_dst, dict, int)
        block_size = _check_same_geometry(src_cache, dst_cache)
        utils.require("src_to_dst", src_to_dst, "a dict from source to destination block")
        _check_pairs(src_to_dst, src_cache.cache_desc.batch_size, dst_cache.cache_desc.batch_size)
        placements = {src_cache.cache_desc.placement, dst_cache.cache_desc.placement}
        raise_if_false(
            placements == {Placement.HOST, Placement.DEVICE},
            "swap_blocks goes from HOST to DEVICE or back, but src_cache is on {} and dst_cache on {}",
            src_cache.cache_desc.placement,
            dst_cache.cache_desc.placement,
        )
        for name, cache in (("src_cache", src_cache), ("dst_cache", dst_cache)):
            raise_if_false(
                len(cache.tensor_addrs) == cache.cache_desc.num_tensors, "{} was deallocated: {!r}", name, cache
            )
        pairs = [(int(src), int(dst)) for src, dst in src_to_dst.items()]
        self._live("swap_blocks").swap_blocks(src_cache.tensor_addrs, dst_cache.tensor_addrs, block_size, pairs)


def _check_same_geometry(src_cache: Cache, dst_cache: Cache) -> int:
    """The block size of two caches whose blocks are of one size."""
    src, dst = src_cache.cache_desc, dst_cache.cache_desc
    sizes = src.size // src.batch_size, dst.size // dst.batch_size
    raise_if_false(
        sizes[0] == sizes[1], "blocks of src_cache have {} bytes, those of dst_cache {}: make them equal", *sizes
    )
    raise_if_false(
        src.num_tensors == dst.num_tensors,
        "src_cache has {} tensors and dst_cache {}: make them equal",
        src.num_tensors,
        dst.num_tensors,
    )
    return sizes[0]


def _check_pairs(src_to_dst: Mapping[int, int], num_src: int, num_dst: int) -> None:
    targets = list(src_to_dst.values())
    utils.check_isinstance("values of src_to_dst", targets, list, int)
    for side, blocks, num_blocks in (("source", list(src_to_dst), num_src), ("destination", targets, num_dst)):
        outside = [block for block in blocks if not 0 <= block < num_blocks]
        raise_if_true(outside, "{} blocks {} are outside [0, {})", side, outside, num_blocks)
