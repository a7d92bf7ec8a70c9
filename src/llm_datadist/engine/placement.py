"""Where the memory of a cache is, and whether that is where its placement says.

Without CUDA in the process both placements are host memory, kept apart as the API says. In a process that uses CUDA
``Placement.DEVICE`` is memory of one GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.engine.errors import failure, invalid
from llm_datadist.memory import devices
from llm_datadist.memory.devices import DeviceMemoryError, memory_name
from llm_datadist.status import LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.engine.catalogue import CacheEntry


def device_of(operation: str, addrs: Sequence[int], size: int, *, on_device: bool) -> int | None:
    """The GPU in whose memory tensors of ``size`` bytes are that shall be a cache; None for host memory.

    ``on_device`` is the placement of the cache.

    Raises:
        LLMException: LLM_PARAM_INVALID: the placement says otherwise, the tensors are in several memories, one of them
            is not in one allocation.
    """
    if not devices.loaded():
        return None
    found: list[int | None] = []
    for index, addr in enumerate(addrs):
        try:
            found.append(devices.device_of(addr, size))
        except DeviceMemoryError as error:
            raise invalid(operation, f"{_tensor(index, addr, size)}: {error}", hint=error.hint) from error
        if found[index] != found[0]:
            context = (
                f"{_tensor(0, addrs[0], size)} is in {memory_name(found[0])}, "
                f"but {_tensor(index, addr, size)} in {memory_name(found[index])}"
            )
            raise invalid(operation, context, hint="register one cache for each memory")
    device = found[0] if found else None
    if device is not None and not on_device:
        context = f"placement is HOST, but {_tensor(0, addrs[0], size)} is in {memory_name(device)}"
        raise invalid(operation, context, hint="register it with Placement.DEVICE")
    if found and device is None and on_device and devices.in_use():
        context = f"placement is DEVICE and this process uses CUDA, but {_tensor(0, addrs[0], size)} is in host memory"
        hint = "register it with Placement.HOST and remote_accessible=True, or allocate it on a GPU"
        raise invalid(operation, context, hint=hint)
    return device


def _tensor(index: int, addr: int, size: int) -> str:
    return f"tensor {index} ({size} bytes at {addr:#x})"


def check_allocation(operation: str, *, on_device: bool) -> None:
    """Pools are host memory.

    Raises:
        LLMException: LLM_PARAM_INVALID: the placement means GPU memory.
    """
    if on_device and devices.in_use():
        context = "placement is DEVICE and this process uses CUDA, but memory pools are host memory"
        hint = "allocate it on the GPU with your framework and register it, or allocate it with Placement.HOST"
        raise invalid(operation, context, hint=hint)


def require_host(operation: str, *entries: CacheEntry) -> None:
    """Copies within a process are made by the host's kernel.

    Raises:
        LLMException: LLM_FEATURE_NOT_ENABLED: one of the caches is in GPU memory.
    """
    for entry in entries:
        if entry.device is not None:
            raise _host_only(operation, f"cache {entry.cache_id} is in {memory_name(entry.device)}")


def require_host_addresses(operation: str, addrs: Sequence[int], size: int) -> None:
    """As ``require_host``, for ``size`` bytes at each of these addresses."""
    if not devices.loaded():
        return
    for addr in addrs:
        try:
            device = devices.device_of(addr, size)
        except DeviceMemoryError as error:
            raise _host_only(operation, f"{size} bytes at {addr:#x}: {error}") from error
        if device is not None:
            raise _host_only(operation, f"{size} bytes at {addr:#x} are in {memory_name(device)}")


def _host_only(operation: str, context: str) -> Exception:
    hint = "copy with the framework that owns the memory, for example torch.Tensor.copy_"
    code = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    return failure(code, operation, f"{context}, and only host memory is copied here", phase="check", hint=hint)
