"""The bytes of the caches: seeded content, poison, and proof that every block arrived.

The content of a block follows from the seed and its place alone, so the receiver knows it without asking the sender.
"""

from __future__ import annotations

import ctypes
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from llm_datadist.cli.models import CacheShape
    from llm_datadist.cli.plan import BlockTable

    U8: TypeAlias = NDArray[np.uint8]
    U32: TypeAlias = NDArray[np.uint32]
    Report: TypeAlias = Callable[[int], None]

POISON: Final = 0xA5
"""Every byte of a destination before an operation."""
_COUNTER_BYTES: Final = 32  # what the generator makes from one counter value
_PIECE_BYTES: Final = 4 << 20


def content(seed: int, cache: CacheShape, tensor: int, first: int, count: int) -> U8:
    """The blocks ``first`` to ``first + count - 1`` of a tensor, one per row."""
    start = first * cache.block_bytes // _COUNTER_BYTES
    generator = np.random.Philox(
        key=np.array([seed, 0], dtype=np.uint64),
        counter=np.array([start, tensor, cache.model_id, 0], dtype=np.uint64),
    )
    words = generator.random_raw(count * cache.block_bytes // np.dtype(np.uint64).itemsize)
    return words.view(np.uint8).reshape(count, cache.block_bytes)


def tensors_at(addresses: Sequence[int], cache: CacheShape, blocks: int) -> list[U8]:
    """Memory as tensors with one block per row; it must outlive them."""
    kind = ctypes.c_uint8 * (blocks * cache.block_bytes)
    return [np.ctypeslib.as_array(kind.from_address(each)).reshape(blocks, -1) for each in addresses]


def fill(tensors: Sequence[U8], seed: int, cache: CacheShape, report: Report) -> None:
    """Write the seeded content."""
    for number, tensor in enumerate(tensors):
        for first, count in _pieces(len(tensor), cache):
            tensor[first : first + count] = content(seed, cache, number, first, count)
            report(count * cache.block_bytes)


def poison(tensors: Sequence[U8]) -> None:
    """Overwrite everything with what no operation brings."""
    for tensor in tensors:
        tensor.fill(POISON)


def expected_checksums(seed: int, cache: CacheShape, blocks: int, report: Report) -> U32:
    """What :func:`checksums` gives for tensors that were filled from this seed."""
    rows = np.empty((cache.num_tensors, blocks), dtype=np.uint32)
    for number, row in enumerate(rows):
        for first, count in _pieces(blocks, cache):
            row[first : first + count] = _checksums(content(seed, cache, number, first, count))
            report(count * cache.block_bytes)
    return rows


def checksums(tensors: Sequence[U8], report: Report) -> U32:
    """The checksum of every block, one row per tensor."""
    rows = np.empty((len(tensors), len(tensors[0])), dtype=np.uint32)
    for row, tensor in zip(rows, tensors, strict=True):
        row[:] = _checksums(tensor)
        report(tensor.nbytes)
    return rows


def _checksums(blocks: U8) -> list[int]:
    return [zlib.crc32(block) for block in blocks]


def _pieces(blocks: int, cache: CacheShape) -> Iterator[tuple[int, int]]:
    """(first block, count) of pieces that keep the scratch memory small."""
    step = max(1, _PIECE_BYTES // cache.block_bytes)
    return ((first, min(step, blocks - first)) for first in range(0, blocks, step))


@dataclass(frozen=True, slots=True)
class Verified:
    """What the receiver found after an operation."""

    blocks_ok: int
    """Destination blocks that hold the right bytes."""
    blocks_total: int
    """Destination blocks of the operation."""
    problems: tuple[str, ...] = ()
    """The first wrong block of each cache, in words."""

    def __add__(self, other: Verified) -> Verified:
        return Verified(
            self.blocks_ok + other.blocks_ok,
            self.blocks_total + other.blocks_total,
            self.problems + other.problems,
        )


def judge(cache: CacheShape, table: BlockTable, expected: U32, actual: U32) -> Verified:
    """Compare the checksums of a destination with those of the source blocks; what is not in the table holds poison.

    Args:
        cache: whose tensors they are.
        table: which source block is where in the destination.
        expected: of the source, [tensor, source block].
        actual: of the destination, [tensor, destination block].
    """
    poisoned = zlib.crc32(bytes([POISON]) * cache.block_bytes)
    wanted = np.full(actual.shape, poisoned, dtype=np.uint32)
    wanted[:, table.dst] = expected[:, table.src]
    wrong = actual != wanted
    total = cache.num_tensors * len(table.dst)
    lost = int(np.count_nonzero(wrong[:, table.dst]))
    if not wrong.any():
        return Verified(total, total)
    tensor, block = (int(each[0]) for each in np.nonzero(wrong))
    where = f"block {block} of tensor {tensor} of the {cache.name} cache"
    source = np.flatnonzero(table.dst == block)
    if not len(source):
        problem = f"{where} is not part of the operation, but was overwritten"
    elif actual[tensor, block] == poisoned:
        problem = f"{where} was never written"
    else:
        problem = f"{where} does not hold the bytes of block {int(table.src[source[0]])} of the prefill process"
    return Verified(total - lost, total, (f"{problem} ({int(np.count_nonzero(wrong))} wrong blocks in this cache)",))
