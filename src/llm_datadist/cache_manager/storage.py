"""Caches come and go: register, allocate, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.cache.keys import BlocksCacheKey, CacheKey, destination_key, nameless_key, naming_key
from llm_datadist.cache.types import (
    Cache,
    CacheDesc,
    MemInfo,
    Memtype,
    cache_spec,
    check_one_addr_per_tensor,
)
from llm_datadist.cache_manager.base import ManagerBase, check_blocks, check_contiguous
from llm_datadist.engine.requests import CacheKind
from llm_datadist.status import LLMStatusCode, raise_if_false, raise_if_true
from llm_datadist.utils import utils

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.engine.requests import Key


class Storage(ManagerBase):
    """Register, allocate and give back caches.

    Cache ids count from 1 since ``init``, in the order of the calls, registered and allocated caches together.
    """

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: Sequence[CacheKey] = (),
        remote_accessible: bool | None = None,  # noqa: FBT001 - the original's signature
    ) -> Cache:
        """Make memory of the caller known as a contiguous cache: dimension 0 of each tensor is the batch.

        The memory must stay valid until ``unregister_cache`` or ``finalize``. Its content is not touched now, but it is
        moved into huge pages, which takes at most a second and half a second a GiB (``LLMConfig.huge_pages``).
        In a process that uses CUDA it must be where the placement says: all tensors in host memory, or each in one
        allocation of the same GPU.

        Args:
            cache_desc: the geometry.
            addrs: list of int, the first address of each tensor.
            cache_keys: list or tuple; key i names batch entry i. If a key is in use, the older use stays.
            remote_accessible: whether peers may transfer from and to it. None: True for DEVICE, False for HOST.

        Returns:
            The cache. It can be reached over existing links, too.

        Raises:
            TypeError: wrong type of an argument, a tuple of addresses and a negative address included.
            AttributeError: ``cache_desc`` is None.
            LLMException: LLM_PARAM_INVALID: no address, a zero address, not one address per tensor, a dimension that is
                not positive, too many addresses registered, ``remote_accessible=True`` after ``LLMDataDist.link``, or
                memory that is not where the placement says.
        """
        utils.check_isinstance("cache_desc", cache_desc, CacheDesc)
        utils.check_isinstance("addrs", addrs, list, int)
        utils.check_isinstance("cache_keys", cache_keys, (tuple, list), CacheKey)
        self._check_remote_accessible(remote_accessible)
        _check_some_addrs(addrs)
        utils.require("cache_desc", cache_desc, "a CacheDesc")
        check_one_addr_per_tensor(cache_desc, addrs)
        raise_if_true(0 in addrs, "addrs must not contain the address 0, but is {}", addrs)
        utils.require("cache_keys", cache_keys, "a list or tuple of CacheKey", TypeError)
        keys = [naming_key(key) for key in cache_keys]
        return self._register("register_cache", cache_desc, CacheKind.CONTIGUOUS, addrs, keys, remote_accessible)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,  # noqa: FBT001 - the original's signature
    ) -> Cache:
        """Make memory of the caller known as a blocks cache: dimension 0 of each tensor counts the blocks.

        As :meth:`register_cache`, but named by model: a second cache with the same model id takes the name over.

        Args:
            cache_desc: the geometry.
            addrs: list of int, the first address of each tensor.
            blocks_cache_key: its name for peers; None if it needs none. The cluster id of the key does not matter.
            remote_accessible: whether peers may transfer from and to it. None: True for DEVICE, False for HOST.

        Raises:
            TypeError: wrong type of an argument, a tuple of addresses and a negative address included.
            AttributeError: ``cache_desc`` is None.
            LLMException: LLM_PARAM_INVALID: no address, not one address per tensor, a zero address in a cache that
                peers may reach, a dimension that is not positive, too many addresses registered,
                ``remote_accessible=True`` after ``LLMDataDist.link``, or memory that is not where the placement says.
        """
        utils.check_isinstance("cache_desc", cache_desc, CacheDesc)
        utils.check_isinstance("addrs", addrs, list, int)
        utils.check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        self._check_remote_accessible(remote_accessible)
        _check_some_addrs(addrs)
        utils.require("cache_desc", cache_desc, "a CacheDesc")
        keys = _blocks_keys(blocks_cache_key)
        return self._register("register_blocks_cache", cache_desc, CacheKind.BLOCKS, addrs, keys, remote_accessible)

    def unregister_cache(self, cache_id: int) -> None:
        """Forget a registered cache, its keys included; an unknown id is accepted.

        Once this returns no transfer touches its memory any more.

        Raises:
            TypeError: not an int; a Cache is none either.
            ValueError: does not fit signed 64 bits.
            LLMException: LLM_LINK_BUSY: transfers still use the memory after ``sync_kv_timeout`` (at least a second);
                keep it mapped and call again.
        """
        utils.check_int64("cache_id", cache_id)
        self._live("unregister_cache", LLMStatusCode.LLM_FAILED).unregister(int(cache_id))

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: Sequence[CacheKey] = ()) -> Cache:
        """Allocate a contiguous cache from the memory pool of its placement; peers may reach it.

        Its memory goes back to the pool once ``deallocate_cache`` was called and none of its keys is left: a key goes
        by ``remove_cache_key``, or when a peer has pulled it (without remote cache access). Pools are host memory: in a
        process that uses CUDA, allocate with ``Placement.HOST``, and register what is on the GPU.

        Args:
            cache_desc: the geometry.
            cache_keys: list or tuple; key i names batch entry i.

        Raises:
            TypeError: wrong type of an argument.
            AttributeError: ``cache_desc`` is None.
            LLMException: LLM_PARAM_INVALID: no tensors, no pool configured for the placement, DEVICE in a process that
                uses CUDA, more keys than batch entries, a key in use or given twice; LLM_OUT_OF_MEMORY: the pool has no
                room.
        """
        utils.check_isinstance("cache_desc", cache_desc, CacheDesc)
        utils.check_isinstance("cache_keys", cache_keys, (tuple, list), CacheKey)
        utils.require("cache_keys", cache_keys, "a list or tuple of CacheKey", TypeError)
        keys = [naming_key(key) for key in cache_keys]
        return self._allocate("allocate_cache", cache_desc, CacheKind.CONTIGUOUS, keys)

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> Cache:
        """Allocate a blocks cache from the memory pool of its placement; peers may reach it.

        Raises:
            TypeError: wrong type of an argument.
            AttributeError: ``cache_desc`` is None.
            LLMException: LLM_PARAM_INVALID: no tensors, no pool configured for the placement, or DEVICE in a process
                that uses CUDA; LLM_OUT_OF_MEMORY: the pool has no room.
        """
        utils.check_isinstance("cache_desc", cache_desc, CacheDesc)
        utils.check_isinstance("blocks_cache_key", blocks_cache_key, BlocksCacheKey)
        return self._allocate("allocate_blocks_cache", cache_desc, CacheKind.BLOCKS, _blocks_keys(blocks_cache_key))

    def deallocate_cache(self, cache: Cache) -> None:
        """Give an allocated contiguous cache back; ``cache.tensor_addrs`` is empty afterwards.

        Nothing else happens to a cache that is unknown, given back already, or merely registered.

        Raises:
            TypeError: not a Cache.
            AttributeError: None.
            LLMException: LLM_PARAM_INVALID: a blocks cache; LLM_FEATURE_NOT_ENABLED: no memory pool is configured.
        """
        utils.check_isinstance("cache", cache, Cache)
        check_contiguous("cache", cache)
        self._deallocate("deallocate_cache", cache)

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """As :meth:`deallocate_cache`, for a blocks cache; it is released at once."""
        utils.check_isinstance("cache", cache, Cache)
        check_blocks("cache", cache)
        self._deallocate("deallocate_blocks_cache", cache)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Take a key from an allocated cache; a key that is unknown or of a registered cache is accepted.

        Raises:
            TypeError: not a CacheKey.
            AttributeError: None.
            LLMException: LLM_FEATURE_NOT_ENABLED: no memory pool is configured.
        """
        utils.check_isinstance("cache_key", cache_key, CacheKey)
        utils.require("cache_key", cache_key, "a CacheKey")
        self._live("remove_cache_key").remove_key(naming_key(cache_key) or nameless_key(cache_key))

    def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """Accepted for device memory while a link exists; there is nothing to repair here.

        Raises:
            LLMException: LLM_PARAM_INVALID: not a MemInfo or a list of them, an empty list, not device memory, a zero
                address or no size; LLM_NOT_YET_LINK: there is no link.
        """
        infos = [mem_infos] if isinstance(mem_infos, MemInfo) else mem_infos
        raise_if_false(
            isinstance(infos, list) and infos and all(isinstance(each, MemInfo) for each in infos),
            "mem_infos must be a MemInfo or a list of MemInfo that is not empty, but is {!r}",
            mem_infos,
        )
        for info in infos:
            raise_if_false(
                info.mem_type == Memtype.MEM_TYPE_DEVICE and info.addr and info.size is not None and info.size > 0,
                "mem_infos must name device memory with an address other than 0 and a size of at least 1, but has {!r}",
                info,
            )
        self._live("remap_registered_memory").remap([(int(each.addr), int(each.size)) for each in infos])

    def _check_remote_accessible(self, remote_accessible: bool | None) -> None:  # noqa: FBT001 - checked, not obeyed
        utils.check_isinstance("remote_accessible", remote_accessible, bool)
        raise_if_true(
            self._is_call_linked and remote_accessible,
            "remote_accessible=True is refused after link(): register before linking, or leave remote_accessible out",
        )

    def _register(
        self,
        operation: str,
        desc: CacheDesc,
        kind: CacheKind,
        addrs: list[int],
        keys: Sequence[Key | None],
        accessible: bool | None,  # noqa: FBT001 - passed through
    ) -> Cache:
        spec = cache_spec(desc, kind)
        addrs = [int(addr) for addr in addrs]
        reachable = spec.on_device if accessible is None else accessible
        engine = self._live(operation, LLMStatusCode.LLM_FAILED)
        cache_id = engine.register(spec, addrs, keys, accessible=reachable)
        return Cache(cache_id, desc, addrs, self, is_registered=True, is_blocks_cache=kind is CacheKind.BLOCKS)

    def _allocate(self, operation: str, desc: CacheDesc, kind: CacheKind, keys: Sequence[Key | None]) -> Cache:
        utils.require("cache_desc", desc, "a CacheDesc")
        raise_if_false(desc.num_tensors > 0, "num_tensors of cache_desc must be at least 1, but is 0")
        spec = cache_spec(desc, kind)
        cache_id, addrs = self._live(operation, LLMStatusCode.LLM_FAILED).allocate(spec, keys)
        return Cache(cache_id, desc, list(addrs), self, is_registered=False, is_blocks_cache=kind is CacheKind.BLOCKS)

    def _deallocate(self, operation: str, cache: Cache) -> None:
        self._live(operation).deallocate(int(cache.cache_id))
        cache.mark_deallocated()


def _check_some_addrs(addrs: list[int]) -> None:
    utils.require("addrs", addrs, "a list of int", TypeError)
    raise_if_false(addrs, "addrs is empty: give one address per tensor")


def _blocks_keys(key: BlocksCacheKey | None) -> Sequence[Key]:
    return () if key is None else (destination_key(key),)
