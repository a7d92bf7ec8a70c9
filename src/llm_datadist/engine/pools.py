"""Memory pools of an engine: one for device placement, one for host placement. Both are ordinary host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.engine.errors import failure, invalid
from llm_datadist.memory.pool import MemoryPool, PoolExhaustedError
from llm_datadist.status import LLMStatusCode
from llm_datadist.utils import limits

if TYPE_CHECKING:
    from llm_datadist.engine.options import EngineOptions, PoolOptions
    from llm_datadist.memory.huge_pages import Advice
    from llm_datadist.memory.shared import Area


class Pools:
    """Allocates the tensors of caches."""

    def __init__(self, options: EngineOptions) -> None:
        """Reserve the configured pools.

        Raises:
            LLMException: LLM_OUT_OF_MEMORY.
        """
        self._pools: dict[bool, MemoryPool] = {}
        for on_device, config in ((True, options.device_pool), (False, options.host_pool)):
            if config is not None:
                self._pools[on_device] = self._reserve(config)

    def _reserve(self, config: PoolOptions) -> MemoryPool:
        cause: Exception | None = None
        why = limits.Limit(f"this machine has {limits.most_memory()} bytes", "make memory_size smaller")
        if config.size_bytes <= limits.most_memory():  # more would be found out only when it is used
            try:
                return MemoryPool(config.size_bytes, config.page_shift)
            except (OSError, MemoryError, ValueError, OverflowError) as error:
                cause, why = error, limits.explain(error)
        self.close()
        context = f"cannot reserve a memory pool of {config.size_bytes} bytes: {why.reason}"
        raise failure(LLMStatusCode.LLM_OUT_OF_MEMORY, "init", context, hint=why.hint) from cause

    def __bool__(self) -> bool:
        return bool(self._pools)

    @property
    def areas(self) -> list[Area]:
        """The memory of all pools, for processes that map it."""
        return [pool.area for pool in self._pools.values()]

    def allocate(self, *, on_device: bool, size: int, count: int) -> list[int]:
        """Addresses of ``count`` tensors of ``size`` bytes.

        Raises:
            LLMException: LLM_PARAM_INVALID without such a pool, LLM_OUT_OF_MEMORY if it is exhausted (nothing is
            taken then).
        """
        pool = self._pools.get(on_device)
        if pool is None:
            option = "mem_pool_cfg" if on_device else "host_mem_pool_cfg"
            raise invalid(
                "allocate_cache", "there is no memory pool for this placement", hint=f"set LLMConfig.{option}"
            )
        taken: list[int] = []
        try:
            while len(taken) < count:
                taken.append(pool.allocate(size))
        except PoolExhaustedError as error:
            for address in taken:
                pool.free(address)
            raise failure(LLMStatusCode.LLM_OUT_OF_MEMORY, "allocate_cache", str(error), retryable=True) from error
        return taken

    def advise(self, *, on_device: bool, addresses: list[int]) -> Advice:
        """See ``MemoryPool.advise``."""
        return self._pools[on_device].advise(addresses)

    def free(self, *, on_device: bool, addresses: list[int]) -> None:
        """Give tensors back."""
        for address in addresses:
            self._pools[on_device].free(address)

    def close(self) -> None:
        """Give the pools back; idempotent."""
        for pool in self._pools.values():
            pool.close()
        self._pools = {}
