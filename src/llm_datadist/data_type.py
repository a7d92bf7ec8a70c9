"""Element types of a cache.

The numpy tables ``dtype_to_np_dtype``, ``valid_np_dtypes`` and ``np_dtype_to_dtype`` are made when one of them is first
touched, so that importing the package does not import numpy.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    dtype_to_np_dtype: dict[DataType, type[np.generic]]
    """DataType -> numpy scalar type; bfloat16 is float16 there, which has its size but not its meaning."""
    valid_np_dtypes: list[type[np.generic]]
    """The values of ``dtype_to_np_dtype``."""
    np_dtype_to_dtype: dict[np.dtype[Any], DataType]
    """numpy dtype -> DataType; float16 is DT_FLOAT16."""


class DataType(Enum):
    """Element type of a cache; the values are the type codes of the original's graph engine."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_BF16 = 27
    DT_INT8 = 2
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT8 = 4
    DT_INT32 = 3
    DT_INT64 = 9
    DT_UINT32 = 8
    DT_UINT64 = 10
    DT_BOOL = 12
    DT_DOUBLE = 11
    DT_STRING = 13


ITEM_SIZE: dict[DataType, int] = {
    DataType.DT_FLOAT: 4,
    DataType.DT_FLOAT16: 2,
    DataType.DT_BF16: 2,
    DataType.DT_INT8: 1,
    DataType.DT_INT16: 2,
    DataType.DT_UINT16: 2,
    DataType.DT_UINT8: 1,
    DataType.DT_INT32: 4,
    DataType.DT_INT64: 8,
    DataType.DT_UINT32: 4,
    DataType.DT_UINT64: 8,
    DataType.DT_BOOL: 1,
    DataType.DT_DOUBLE: 8,
    DataType.DT_STRING: 16,
}
"""Bytes of one element."""

python_dtype_2_dwrapper_dtype: dict[DataType, int] = {each: each.value for each in DataType}
"""DataType -> type code (the ``DT_*`` integers of ``metadef_wrapper``)."""


def get_python_dtype_from_wrapper_dtype(code: int) -> DataType:
    """The DataType of a type code.

    Raises:
        ValueError: no DataType has this code.
    """
    return DataType(code)


_NUMPY_TABLES = frozenset({"dtype_to_np_dtype", "valid_np_dtypes", "np_dtype_to_dtype"})


def __getattr__(name: str) -> object:
    if name not in _NUMPY_TABLES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    globals().update(_numpy_tables())
    return globals()[name]


def _numpy_tables() -> dict[str, object]:
    import numpy as np  # noqa: PLC0415 - only who asks for the tables pays for numpy

    to_numpy: dict[DataType, type[np.generic]] = {
        DataType.DT_FLOAT: np.float32,
        DataType.DT_FLOAT16: np.float16,
        DataType.DT_BF16: np.float16,
        DataType.DT_INT8: np.int8,
        DataType.DT_INT16: np.int16,
        DataType.DT_UINT16: np.uint16,
        DataType.DT_UINT8: np.uint8,
        DataType.DT_INT32: np.int32,
        DataType.DT_INT64: np.int64,
        DataType.DT_UINT32: np.uint32,
        DataType.DT_UINT64: np.uint64,
        DataType.DT_BOOL: np.bool_,
        DataType.DT_DOUBLE: np.double,
        DataType.DT_STRING: np.bytes_,
    }
    from_numpy = {np.dtype(scalar): each for each, scalar in to_numpy.items() if each is not DataType.DT_BF16}
    return {
        "dtype_to_np_dtype": to_numpy,
        "valid_np_dtypes": list(to_numpy.values()),
        "np_dtype_to_dtype": from_numpy,
    }
