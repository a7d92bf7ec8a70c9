"""What C++ says about a cache, as the engine's ``CacheSpec``."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final

from llm_datadist.engine.requests import CacheKind, CacheSpec
from llm_datadist.native.statuses import refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

HOST: Final = 0
DEVICE: Final = 1
_MAX_DIMS: Final = 31
_BYTE: Final = 8

_BITS: Final = {
    0: ("DT_FLOAT", 32),
    1: ("DT_FLOAT16", 16),
    2: ("DT_INT8", 8),
    3: ("DT_INT32", 32),
    4: ("DT_UINT8", 8),
    6: ("DT_INT16", 16),
    7: ("DT_UINT16", 16),
    8: ("DT_UINT32", 32),
    9: ("DT_INT64", 64),
    10: ("DT_UINT64", 64),
    11: ("DT_DOUBLE", 64),
    12: ("DT_BOOL", 8),
    13: ("DT_STRING", 128),
    14: ("DT_DUAL_SUB_INT8", 8),
    15: ("DT_DUAL_SUB_UINT8", 8),
    16: ("DT_COMPLEX64", 64),
    17: ("DT_COMPLEX128", 128),
    18: ("DT_QINT8", 8),
    19: ("DT_QINT16", 16),
    20: ("DT_QINT32", 32),
    21: ("DT_QUINT8", 8),
    22: ("DT_QUINT16", 16),
    24: ("DT_STRING_REF", 128),
    25: ("DT_DUAL", 40),
    27: ("DT_BF16", 16),
    29: ("DT_INT4", 4),
    30: ("DT_UINT1", 1),
    31: ("DT_INT2", 2),
    32: ("DT_UINT2", 2),
    33: ("DT_COMPLEX32", 32),
    34: ("DT_HIFLOAT8", 8),
    35: ("DT_FLOAT8_E5M2", 8),
    36: ("DT_FLOAT8_E4M3FN", 8),
    37: ("DT_FLOAT8_E8M0", 8),
    38: ("DT_FLOAT6_E3M2", 6),
    39: ("DT_FLOAT6_E2M3", 6),
    40: ("DT_FLOAT4_E2M1", 4),
    41: ("DT_FLOAT4_E1M2", 4),
}
"""Type code -> name and bits of one element; RESOURCE, VARIANT and UNDEFINED are no data."""


def check_shape(shape: Sequence[int]) -> None:
    """See that there are 1 to 31 dimensions.

    Raises:
        RefusedError: LLM_PARAM_INVALID.
    """
    if not 1 <= len(shape) <= _MAX_DIMS:
        reason = f"the shape has {len(shape)} dimensions, 1 to {_MAX_DIMS} are supported"
        raise refuse(reason)


def cache_spec(placement: int, num_tensors: int, data_type: int, shape: Sequence[int]) -> CacheSpec:
    """The spec of a cache that can be addressed by batch entry and by block.

    Elements smaller than a byte are packed; a batch entry must still be whole bytes.

    Raises:
        RefusedError: LLM_PARAM_INVALID: placement, type, a dimension, or entries that are not whole bytes.
    """
    if placement not in (HOST, DEVICE):
        reason = f"placement {placement} is neither 0 (host) nor 1 (device)"
        raise refuse(reason)
    if data_type not in _BITS:
        reason = f"data type {data_type} is not supported: it has no size"
        raise refuse(reason)
    check_shape(shape)
    name, bits = _BITS[data_type]
    size, dims = bits // _BYTE, tuple(shape)
    if bits % _BYTE:
        size, dims = 1, _packed(dims, bits, name)
    return CacheSpec(num_tensors, dims, size, name, placement == DEVICE, CacheKind.MIXED)


def _packed(shape: tuple[int, ...], bits: int, name: str) -> tuple[int, ...]:
    """(entries, bytes of an entry); dimensions that are not positive are left for the engine to refuse."""
    if min(shape) <= 0:
        return shape
    entry = prod(shape[1:]) * bits
    if entry % _BYTE and shape[0] > 1:
        reason = f"a batch entry of shape {list(shape[1:])} and type {name} is not a whole number of bytes"
        raise refuse(reason)
    return shape[0], -(-entry // _BYTE)
