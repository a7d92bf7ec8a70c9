"""Copies between caches of this process. No peer, no link."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llm_datadist.engine.errors import failure, invalid
from llm_datadist.engine.planning import BlockIds
from llm_datadist.layout import plan
from llm_datadist.layout.spans import LayoutError, Runs
from llm_datadist.memory.iovec import Side
from llm_datadist.memory.move import MemoryFaultError, copy
from llm_datadist.status import LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from llm_datadist.engine.catalogue import CacheEntry

    U64 = NDArray[np.uint64]


def copy_cache(
    source: CacheEntry, target: CacheEntry, source_batch: int, target_batch: int, offset: int, size: int
) -> None:
    """Copy ``size`` bytes at ``offset`` of a batch entry to another, in all tensors; -1 is to the end of the source.

    Raises:
        LLMException: LLM_PARAM_INVALID, or LLM_FAILED if memory is not mapped.
    """
    if source.spec.num_tensors != target.spec.num_tensors:
        context = f"the source has {source.spec.num_tensors} tensors, the target {target.spec.num_tensors}"
        raise invalid("copy_cache", context)
    if size == -1:
        size = source.geometry.stride - offset
    try:
        windows = plan.entry(source.geometry, source_batch), plan.entry(target.geometry, target_batch)
        for window in windows:
            if offset and offset >= window.size:
                message = f"offset {offset} is outside a batch entry of {window.size} bytes"
                raise LayoutError(message)
        here, there = (plan.Window(window.offset + offset, window.size - offset) for window in windows)
        runs = plan.contiguous(here, there, size)
    except LayoutError as error:
        raise invalid("copy_cache", str(error)) from error
    _copy("copy_cache", runs, source.addrs, target.addrs)


def copy_blocks(entry: CacheEntry, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks within a cache: (source, target) pairs; of two with one target the last counts.

    A block that is both source and target is read before it is written, whatever the order of the pairs.

    Raises:
        LLMException: LLM_PARAM_INVALID, or LLM_FAILED if memory is not mapped.
        TypeError: a negative index.
    """
    ids = BlockIds.of([source for source, _ in pairs], [target for _, target in pairs])
    if ids.local is None or ids.remote is None or not pairs:
        return
    try:
        runs = plan.blocks(entry.geometry, entry.geometry, ids.local, ids.remote, into_local=False)
    except LayoutError as error:
        raise invalid("copy_blocks", str(error)) from error
    if np.intersect1d(ids.local, ids.remote).size:
        _copy_staged(runs, entry.addrs)
    else:
        _copy("copy_blocks", runs, entry.addrs, entry.addrs)


def swap_blocks(
    sources: Sequence[int], targets: Sequence[int], block_size: int, pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy blocks between two sets of tensors given by address: (source, target) pairs.

    Raises:
        LLMException: LLM_FAILED if memory is not mapped.
    """
    if not pairs:
        return
    ids = BlockIds.of([source for source, _ in pairs], [target for _, target in pairs])
    if ids.local is None or ids.remote is None:
        return
    sides = [
        plan.Geometry(block_size * entries, entries)
        for entries in (int(ids.local.max()) + 1, int(ids.remote.max()) + 1)
    ]
    runs = plan.blocks(sides[0], sides[1], ids.local, ids.remote, into_local=False)
    _copy("swap_blocks", runs, np.array(sources, dtype=np.uint64), np.array(targets, dtype=np.uint64))


def _copy_staged(runs: Runs, tensors: U64) -> None:
    """Copy runs whose sources and targets overlap, by way of a buffer."""
    buffer = np.empty(int(runs.lengths.sum()), dtype=np.uint8)
    base = np.array([buffer.ctypes.data], dtype=np.uint64)
    at = np.cumsum(runs.lengths) - runs.lengths
    for tensor in tensors[:, None]:
        _copy("copy_blocks", Runs(runs.local, at, runs.lengths), tensor, base)
        _copy("copy_blocks", Runs(at, runs.remote, runs.lengths), base, tensor)


def _copy(operation: str, runs: Runs, sources: U64, targets: U64) -> None:
    try:
        copy(Side(targets, runs.remote), Side(sources, runs.local), runs.lengths)
    except MemoryFaultError as error:
        raise failure(LLMStatusCode.LLM_FAILED, operation, str(error), phase="transfer") from error
