"""From two geometries and a selection to byte runs. Pure arithmetic: no I/O, no state, no peers.

"Local" is the side of this process, "remote" the peer's. Whether bytes flow in or out does not matter here, except that
of two pairs with the same destination the last one counts, so the caller names the destination side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.layout.spans import LayoutError, Runs, merge

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]


MAX_TENSOR_BITS: Final = 62
"""Tensors are smaller than 2 to this power, so that sums of two offsets stay in signed 64 bits."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """One tensor of a cache: ``entries`` equal parts along dimension 0."""

    tensor_size: int
    """Bytes of one tensor."""
    entries: int
    """Batch entries or blocks."""

    @property
    def stride(self) -> int:
        """Bytes of one batch entry or block."""
        return self.tensor_size // self.entries


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a tensor: where one batch entry starts and how long it is."""

    offset: int
    size: int


def entry(geometry: Geometry, index: int) -> Window:
    """The window of one batch entry.

    Raises:
        LayoutError: there is no such entry.
    """
    if not 0 <= index < geometry.entries:
        message = f"batch index {index} is outside [0, {geometry.entries})"
        raise LayoutError(message)
    return Window(index * geometry.stride, geometry.stride)


def contiguous(local: Window, remote: Window, size: int) -> Runs:
    """The first ``size`` bytes of two batch entries.

    Raises:
        LayoutError: one of the entries is shorter.
    """
    if size < 0:
        message = f"{size} bytes cannot be moved"
        raise LayoutError(message)
    for side, window in (("local", local), ("remote", remote)):
        if size > window.size:
            message = f"{size} bytes do not fit the {side} batch entry of {window.size} bytes"
            raise LayoutError(message)
    return Runs(*(np.array([value], dtype=np.int64) for value in (local.offset, remote.offset, size)))


def blocks(local: Geometry, remote: Geometry, local_ids: I64, remote_ids: I64, *, into_local: bool) -> Runs:
    """Block pairs in list order.

    Raises:
        LayoutError: lists of different length, an index out of range, or different block sizes.
    """
    if local.stride != remote.stride:
        message = f"block sizes differ: {local.stride} bytes here, {remote.stride} bytes at the peer"
        raise LayoutError(message)
    if len(local_ids) != len(remote_ids):
        message = f"block lists differ in length: {len(local_ids)} local and {len(remote_ids)} remote blocks"
        raise LayoutError(message)
    _check_ids("local", local_ids, local)
    _check_ids("remote", remote_ids, remote)
    keep = last_of_each(local_ids if into_local else remote_ids, (local if into_local else remote).entries)
    if keep is not None:
        local_ids, remote_ids = local_ids[keep], remote_ids[keep]
    stride = local.stride
    lengths = np.full(len(local_ids), stride, dtype=np.int64)
    return merge(local_ids * stride, remote_ids * stride, lengths)


def into_blocks(source: Window, destination: Geometry, ids: I64, *, into_local: bool) -> Runs:
    """Cut a batch entry into block-sized pieces; piece ``i`` goes to block ``ids[i]``. The last piece may be short.

    ``into_local`` tells which side the blocks are on; the entry is on the other one.

    Raises:
        LayoutError: a block out of range, more blocks than pieces, or a block longer than the entry.
    """
    size = destination.stride
    if size > source.size:
        message = f"a block of {size} bytes is larger than the batch entry of {source.size} bytes"
        raise LayoutError(message)
    pieces = -(-source.size // size)
    if len(ids) > pieces:
        message = (
            f"{len(ids)} blocks given, but the batch entry of {source.size} bytes has {pieces} pieces of {size} bytes"
        )
        raise LayoutError(message)
    _check_ids("destination", ids, destination)
    start = np.arange(len(ids), dtype=np.int64) * size
    lengths = np.minimum(size, source.size - start)
    keep = last_of_each(ids, destination.entries)
    if keep is not None:
        ids, start, lengths = ids[keep], start[keep], lengths[keep]
    there, here = ids * size, source.offset + start
    return merge(there, here, lengths) if into_local else merge(here, there, lengths)


def last_of_each(ids: I64, entries: int) -> I64 | None:
    """Positions, in order, of the last occurrence of each id; None when no id occurs twice."""
    if len(ids) < 2:  # noqa: PLR2004 - a single id cannot repeat
        return None
    # A table as long as the cache beats sorting unless only few blocks of a large cache are named.
    if entries <= 16 * len(ids):
        last = np.full(entries, -1, dtype=np.int64)
        last[ids] = np.arange(len(ids))
        keep = last[ids] == np.arange(len(ids))
        return None if keep.all() else np.flatnonzero(keep)
    _, first_from_end = np.unique(ids[::-1], return_index=True)
    if len(first_from_end) == len(ids):
        return None
    return np.sort(len(ids) - 1 - first_from_end)


def _check_ids(side: str, ids: I64, geometry: Geometry) -> None:
    if geometry.tensor_size >= 1 << MAX_TENSOR_BITS:
        message = f"a tensor of {geometry.tensor_size} bytes is beyond 64-bit arithmetic"
        raise LayoutError(message)
    entries = geometry.entries
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < entries):
        bad = ids[(ids < 0) | (ids >= entries)][0]
        message = f"{side} block index {int(bad)} is outside [0, {entries})"
        raise LayoutError(message)


def tensor_range(side: str, num_tensors: int, layers: range | None, per_layer: int, *, given: bool) -> range:
    """The tensors of a layer range; without one, all.

    Layer ``i`` is the tensors ``[i * per_layer, (i + 1) * per_layer)``. ``given`` tells whether layers were selected
    on any side: then the tensors must divide into layers.

    Raises:
        LayoutError: a range outside the cache, or tensors that do not divide into layers.
    """
    if given and num_tensors % per_layer:
        message = f"the {num_tensors} tensors of the {side} cache do not divide into layers of {per_layer}"
        raise LayoutError(message)
    if layers is None:
        return range(num_tensors)
    start, stop = layers.start * per_layer, layers.stop * per_layer
    if start < 0 or stop > num_tensors:
        message = (
            f"layers [{layers.start}, {layers.stop}) of {per_layer} tensors are outside the {side} cache of "
            f"{num_tensors} tensors"
        )
        raise LayoutError(message)
    return range(start, stop)
