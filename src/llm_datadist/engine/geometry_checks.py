"""Which geometries and addresses a cache may have, whoever provides its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist.engine.catalogue import geometry_of
from llm_datadist.engine.errors import invalid
from llm_datadist.layout.plan import MAX_TENSOR_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.engine.requests import CacheSpec

_MAX_DIMS: Final = 31
_UINT64: Final = 1 << 64


def check_spec(spec: CacheSpec, operation: str) -> None:
    """Raise LLMException, LLM_PARAM_INVALID, unless a cache may have this geometry."""
    if not 1 <= len(spec.shape) <= _MAX_DIMS:
        raise invalid(operation, f"shape has {len(spec.shape)} dimensions, 1 to {_MAX_DIMS} are supported")
    if min(spec.shape) <= 0:
        raise invalid(operation, f"shape {list(spec.shape)} has a dimension that is not positive")
    if geometry_of(spec).tensor_size >= 1 << MAX_TENSOR_BITS:
        raise invalid(operation, f"a tensor of shape {list(spec.shape)} is too large")


def check_addresses(addrs: Sequence[int]) -> None:
    """Raise TypeError unless all are addresses."""
    for addr in addrs:
        if not 0 <= addr < _UINT64:
            message = f"address {addr} is not a 64-bit address: only support 0 to 2**64-1"
            raise TypeError(message)


def check_room(addrs: Sequence[int], size: int, operation: str, *, accessible: bool) -> None:
    """Raise LLMException, LLM_PARAM_INVALID, unless tensors of ``size`` bytes can be at these addresses."""
    for addr in addrs:
        if (addr == 0 and accessible) or addr + size > _UINT64:
            raise invalid(operation, f"address {addr:#x} cannot hold a tensor of {size} bytes")
