"""What a KV cache is: where it lies, its geometry, its addresses."""

from __future__ import annotations

import math
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Protocol

from llm_datadist.cache.shown import Shown
from llm_datadist.data_type import ITEM_SIZE, DataType
from llm_datadist.engine.requests import CacheSpec
from llm_datadist.status import LLMException, raise_if_false
from llm_datadist.utils import log, utils

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.engine.requests import CacheKind


class Placement(IntEnum):
    """Which memory a cache lies in. Note that :class:`Memtype` counts the other way round.

    In a process that uses CUDA, DEVICE is memory of one GPU, and registering checks it. Else both are host memory.
    """

    HOST = 0
    DEVICE = 1

    def __str__(self) -> str:
        return f"Placement.{self.name}"

    def __format__(self, spec: str) -> str:
        return int.__format__(self, spec) if spec else str(self)


class Memtype(Enum):
    """Kind of memory of a :class:`MemInfo`."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class RegisterMemStatus(Enum):
    """How far the memory exchange of ``LLMDataDist.link`` is; transfers work from OK on."""

    OK = 0
    PREPARING = 1
    FAILED = 2


class PushType(Enum):
    """How the destination of a push is named."""

    NO_CACHE_KEY = 0
    BLOCKS_CACHE_KEY = 1
    CACHE_KEY_BY_ID = 2


int_to_mem_status_dict: dict[int, RegisterMemStatus] = {each.value: each for each in RegisterMemStatus}


class MemInfo(Shown):
    """A piece of memory, for ``remap_registered_memory``."""

    _shown = ("mem_type", "addr", "size")

    def __init__(self, mem_type: Memtype, addr: int, size: int) -> None:
        utils.check_isinstance("mem_type", mem_type, Memtype)
        utils.check_isinstance("addr", addr, int)
        utils.check_isinstance("size", size, int)
        self._mem_type = mem_type
        self._addr = addr
        self._size = size

    @property
    def mem_type(self) -> Memtype:
        """Kind of memory."""
        return self._mem_type

    @property
    def addr(self) -> int:
        """First address."""
        return self._addr

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size


class CacheDesc(Shown):
    """The geometry of a cache: ``num_tensors`` equal tensors.

    Dimension 0 is the batch, or counts the blocks; ``batch_dim_index`` and ``seq_len_dim_index`` do not change what is
    transferred.

    Args:
        num_tensors: how many tensors, unsigned 32 bits.
        shape: list or tuple of int, the shape of each tensor. The object itself is kept.
        data_type: element type.
        placement: which memory the tensors lie in.
        batch_dim_index: dimension whose length is ``batch_size``.
        seq_len_dim_index: sequence dimension, -1 if there is none.
        kv_tensor_format: any text.

    Raises:
        TypeError: wrong type of an argument.
        ValueError: ``num_tensors``, ``seq_len_dim_index`` or a dimension does not fit its integer type.
        LLMException: LLM_PARAM_INVALID: one of the dimension indices names no dimension of ``shape``.
    """

    _shown = ("num_tensors", "shape", "data_type", "placement", "batch_dim", "seq_len_dim_index", "kv_tensor_format")

    def __init__(
        self,
        num_tensors: int,
        shape: Sequence[int],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: str | None = None,
    ) -> None:
        utils.check_uint32("num_tensors", num_tensors)
        utils.check_isinstance("shape", shape, (tuple, list), int)
        utils.check_isinstance("data_type", data_type, DataType)
        utils.check_isinstance("placement", placement, Placement)
        utils.check_isinstance("batch_dim_index", batch_dim_index, int)
        utils.check_int32("seq_len_dim_index", seq_len_dim_index)
        utils.check_isinstance("kv_tensor_format", kv_tensor_format, str)
        utils.require("shape", shape, "a list or tuple of int", TypeError)
        utils.require("batch_dim_index", batch_dim_index, "an int", TypeError)
        dims = len(shape)
        text = "{} {} names no dimension of shape {}"
        raise_if_false(0 <= batch_dim_index < dims, text, "batch_dim_index", batch_dim_index, shape)
        raise_if_false(-1 <= seq_len_dim_index < dims, text, "seq_len_dim_index", seq_len_dim_index, shape)
        utils.check_list_int64("shape", shape)
        self._num_tensors = num_tensors
        self._shape = shape
        self._data_type = data_type
        self._placement = placement
        self._batch_dim = batch_dim_index
        self._batch_size = shape[batch_dim_index]
        self._seq_len_dim_index = seq_len_dim_index
        self._kv_tensor_format = kv_tensor_format
        self._size: int | None = None

    @property
    def num_tensors(self) -> int:
        """How many tensors."""
        return self._num_tensors

    @property
    def shape(self) -> Sequence[int]:
        """Shape of each tensor: the list or tuple that was given."""
        return self._shape

    @property
    def data_type(self) -> DataType:
        """Element type."""
        return self._data_type

    @property
    def placement(self) -> Placement:
        """Which memory the tensors lie in."""
        return self._placement

    @property
    def batch_dim(self) -> int:
        """Index of the batch dimension."""
        return self._batch_dim

    @property
    def batch_size(self) -> int:
        """Length of the batch dimension when the object was made; ``update_dim`` does not change it."""
        return self._batch_size

    @property
    def seq_len_dim_index(self) -> int:
        """Index of the sequence dimension, or -1."""
        return self._seq_len_dim_index

    @property
    def kv_tensor_format(self) -> str | None:
        """The text given for it."""
        return self._kv_tensor_format

    @property
    def size(self) -> int:
        """Bytes of one tensor.

        Raises:
            LLMException: LLM_PARAM_INVALID: a dimension is not positive, or the size does not fit 63 bits.
        """
        if self._size is None:
            utils.require("data_type", self._data_type, "a DataType", AttributeError)
            size = math.prod(self._shape) * ITEM_SIZE[self._data_type]
            raise_if_false(
                min(self._shape) > 0 and size <= utils.INT64_MAX,
                "a tensor of shape {} has no size: each dimension must be positive, the bytes must fit 63 bits",
                self._shape,
            )
            self._size = size
        return self._size

    def update_dim(self, dim_index: int, dim_value: int) -> None:
        """Change one dimension, in the caller's own list.

        Raises:
            TypeError: the shape is a tuple.
            IndexError: there is no such dimension.
        """
        if not isinstance(self._shape, list):
            message = f"shape {self._shape!r} is a tuple and cannot be changed: make the CacheDesc with a list"
            raise TypeError(message)
        self._shape[dim_index] = dim_value
        self._size = None


class Cache(Shown):
    """A registered or allocated cache, as ``CacheManager`` returns it; dropping it frees nothing."""

    _shown = ("cache_id", "cache_desc", "is_blocks_cache", "tensor_addrs")

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        tensor_addrs: list[int],
        cache_manager: object,
        is_registered: bool,  # noqa: FBT001 - the original's signature
        is_blocks_cache: bool,  # noqa: FBT001 - the original's signature
    ) -> None:
        utils.check_int64("cache_id", cache_id)
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._tensor_addrs = tensor_addrs
        self._cache_manager = cache_manager
        self._is_registered = is_registered
        self._is_blocks_cache = is_blocks_cache

    @property
    def cache_id(self) -> int:
        """Number of the cache in its process, counted from 1 since ``init``; -1 for :meth:`create_cpu_cache`."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """The description it was made with."""
        return self._cache_desc

    @property
    def tensor_addrs(self) -> list[int]:
        """First address of each tensor; empty once the cache was deallocated."""
        return self._tensor_addrs

    @property
    def is_blocks_cache(self) -> bool:
        """Whether dimension 0 counts blocks (True) or batch entries (False)."""
        return self._is_blocks_cache

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int]) -> Cache:
        """Describe host memory as a blocks cache for ``CacheManager.swap_blocks``; nothing is registered.

        Raises:
            TypeError: wrong type of an argument; ``addrs`` must be a list of int.
            AttributeError: ``cache_desc`` is None.
            LLMException: LLM_PARAM_INVALID: placement is not HOST, or not one address per tensor.
        """
        _check_cpu_cache(cache_desc, addrs)
        return cls(-1, cache_desc, list(addrs), None, is_registered=False, is_blocks_cache=True)

    def mark_deallocated(self) -> None:
        """Forget the addresses: the memory is not the cache's any more."""
        self._tensor_addrs = []


class _Deallocator(Protocol):
    def is_initialized(self) -> bool: ...
    def deallocate_cache(self, cache: KvCache) -> None: ...


class KvCache(Shown):
    """Cache of the original's older API, which has one address list per device. Gives itself back when dropped."""

    _shown = ("cache_id", "cache_desc", "per_device_tensor_addrs")

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        per_device_tensor_addrs: list[list[int]],
        kv_cache_manager: _Deallocator | None = None,
    ) -> None:
        self._kv_cache_manager = kv_cache_manager
        self.cache_id = cache_id
        self.cache_desc = cache_desc
        self.per_device_tensor_addrs = per_device_tensor_addrs

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int] | list[list[int]]) -> KvCache:
        """Describe host memory, given as the addresses of one device or as a list of such lists.

        Raises:
            TypeError: wrong type of an argument.
            AttributeError: ``cache_desc`` is None.
            LLMException: LLM_PARAM_INVALID: placement is not HOST, or not one address per tensor.
        """
        utils.check_isinstance("addrs", addrs, list, (int, list), allow_none=False)
        nested = [each for each in addrs if isinstance(each, list)]
        per_device = nested if nested and len(nested) == len(addrs) else [addrs]
        for each in per_device:
            _check_cpu_cache(cache_desc, each)  # type: ignore[arg-type]
        return cls(-1, cache_desc, [list(each) for each in per_device])  # type: ignore[arg-type]

    def __del__(self) -> None:
        manager = getattr(self, "_kv_cache_manager", None)
        if manager is not None and manager.is_initialized():
            try:
                manager.deallocate_cache(self)
            except LLMException as error:
                log.warn("deallocating dropped KvCache %d failed: %s", self.cache_id, error)


def _check_cpu_cache(cache_desc: CacheDesc, addrs: list[int]) -> None:
    utils.check_isinstance("cache_desc", cache_desc, CacheDesc)
    utils.check_isinstance("addrs", addrs, list, int)
    utils.require("cache_desc", cache_desc, "a CacheDesc")
    utils.require("addrs", addrs, "a list of int", TypeError)
    raise_if_false(
        cache_desc.placement == Placement.HOST,
        "placement of a CPU cache must be Placement.HOST, but is {!r}",
        cache_desc.placement,
    )
    check_one_addr_per_tensor(cache_desc, addrs)


def check_one_addr_per_tensor(cache_desc: CacheDesc, addrs: Sequence[int]) -> None:
    """Raise LLM_PARAM_INVALID unless there are as many addresses as tensors."""
    raise_if_false(
        len(addrs) == cache_desc.num_tensors,
        "addrs has {} addresses, but cache_desc has {} tensors: give one address per tensor",
        len(addrs),
        cache_desc.num_tensors,
    )


def cache_spec(desc: CacheDesc, kind: CacheKind) -> CacheSpec:
    """The engine's view of a description, taken now: a later ``update_dim`` does not reach it."""
    utils.require("data_type of cache_desc", desc.data_type, "a DataType")
    utils.require("placement of cache_desc", desc.placement, "a Placement")
    return CacheSpec(
        num_tensors=int(desc.num_tensors),
        shape=tuple(int(dim) for dim in desc.shape),
        item_size=ITEM_SIZE[desc.data_type],
        dtype=desc.data_type.name,
        on_device=desc.placement == Placement.DEVICE,
        kind=kind,
    )
