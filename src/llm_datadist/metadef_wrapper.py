"""The element type codes under the names of the original's native module."""

from __future__ import annotations

from llm_datadist.data_type import DataType

DT_FLOAT: int = DataType.DT_FLOAT.value
DT_FLOAT16: int = DataType.DT_FLOAT16.value
DT_BF16: int = DataType.DT_BF16.value
DT_INT8: int = DataType.DT_INT8.value
DT_INT16: int = DataType.DT_INT16.value
DT_UINT16: int = DataType.DT_UINT16.value
DT_UINT8: int = DataType.DT_UINT8.value
DT_INT32: int = DataType.DT_INT32.value
DT_INT64: int = DataType.DT_INT64.value
DT_UINT32: int = DataType.DT_UINT32.value
DT_UINT64: int = DataType.DT_UINT64.value
DT_BOOL: int = DataType.DT_BOOL.value
DT_DOUBLE: int = DataType.DT_DOUBLE.value
DT_STRING: int = DataType.DT_STRING.value
