"""Layer ranges and block lists as C++ gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from llm_datadist.native.statuses import refuse

if TYPE_CHECKING:
    from collections.abc import Sequence

Range = tuple[int, int]
"""First and last layer, both included; a first one of -1 is "not given"."""

_INT64_MAX: Final = np.uint64(2**63 - 1)
_BLOCK_BYTES: Final = 8
_SHORT: Final = 64


def check_ranges(src: Range, dst: Range, per_layer: int, *, equal: bool) -> None:
    """Check a ``KvCacheExtParam``.

    Raises:
        RefusedError: LLM_PARAM_INVALID.
    """
    for name, (first, last) in (("src_layer_range", src), ("dst_layer_range", dst)):
        if first < -1 or last < first:
            reason = f"{name} {{{first}, {last}}}: layers count from 0, the last is not before the first, -1 is all"
            raise refuse(reason)
    if per_layer <= 0:
        reason = f"tensor_num_per_layer is {per_layer}: it must be at least 1"
        raise refuse(reason)
    if equal and src[1] - src[0] != dst[1] - dst[0]:
        reason = f"src_layer_range {src} and dst_layer_range {dst} differ in length"
        raise refuse(reason)


def layers(src: Range, dst: Range) -> tuple[range, range] | None:
    """The two ranges of layers; a side that is not given is the same as the other. None: neither is given."""
    if src[0] < 0 and dst[0] < 0:
        return None
    source, target = (src if src[0] >= 0 else dst), (dst if dst[0] >= 0 else src)
    return range(source[0], source[1] + 1), range(target[0], target[1] + 1)


def block_ids(blocks: Any) -> Sequence[int]:
    """Block indices from a buffer of unsigned 64-bit numbers, or from a sequence of ints.

    In an array, numbers beyond signed 64 bits become the largest signed one, which no cache has either.
    """
    if not isinstance(blocks, (bytes, bytearray, memoryview)):
        return cast("Sequence[int]", blocks)
    if len(blocks) <= _SHORT * _BLOCK_BYTES:  # numpy's calls cost more than a few numbers
        return memoryview(blocks).cast("B").cast("Q").tolist()
    unsigned = np.frombuffer(blocks, dtype=np.uint64)
    return cast("Sequence[int]", np.minimum(unsigned, _INT64_MAX).astype(np.int64))


def count(blocks: Any) -> int:
    """How many block indices there are."""
    if isinstance(blocks, memoryview):
        return blocks.nbytes // _BLOCK_BYTES
    return len(blocks) // _BLOCK_BYTES if isinstance(blocks, (bytes, bytearray)) else len(blocks)


def check_block_lists(src_blocks: Any, dst_blocks: Any) -> None:
    """See that there are blocks, as many on both sides.

    Raises:
        RefusedError: LLM_PARAM_INVALID.
    """
    source, target = count(src_blocks), count(dst_blocks)
    if not source:
        raise refuse("src_blocks is empty: name at least one block")
    if source != target:
        reason = f"src_blocks has {source} blocks, dst_blocks {target}: give as many"
        raise refuse(reason)
