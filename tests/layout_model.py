"""A naive model of transfers, byte by byte as specified, and how to apply the library's arrays to memory.

Sources hold a different value at every byte and destinations hold ``UNTOUCHED``, which no source has: a byte that comes
from the wrong place, or lands in the wrong place, cannot go unseen.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_datadist.layout.spans import Runs, Spans

UNTOUCHED = 255
LARGEST = 250
"""Bytes of the largest source whose bytes all differ."""


@dataclass(frozen=True)
class Tensor:
    """The geometry of one tensor: ``entries`` times ``stride`` bytes, and ``rest`` bytes that belong to no entry."""

    entries: int
    stride: int
    rest: int = 0

    @property
    def size(self) -> int:
        return self.entries * self.stride + self.rest


def source_bytes(size: int) -> bytes:
    """``size`` different bytes."""
    assert size <= LARGEST
    return bytes(range(size))


def target_bytes(size: int) -> bytearray:
    """``size`` bytes that nobody has written."""
    return bytearray([UNTOUCHED]) * size


def copy_entry(source: bytes, source_at: int, target: bytearray, target_at: int, size: int) -> None:
    """The first ``size`` bytes of one batch entry to another."""
    for byte in range(size):
        target[target_at + byte] = source[source_at + byte]


def copy_blocks(source: bytes, target: bytearray, stride: int, pairs: list[tuple[int, int]]) -> None:
    """Block pairs (source, destination) in list order, so of two with one destination the last one stays."""
    for source_block, target_block in pairs:
        for byte in range(stride):
            target[target_block * stride + byte] = source[source_block * stride + byte]


def copy_pieces(entry: bytes, target: bytearray, block_size: int, blocks: list[int]) -> None:
    """Piece ``i`` of a batch entry to block ``blocks[i]``; of two pieces for one block only the last one counts."""
    for piece, block in enumerate(blocks):
        if block in blocks[piece + 1 :]:
            continue
        for byte in range(block_size):
            if piece * block_size + byte < len(entry):
                target[block * block_size + byte] = entry[piece * block_size + byte]


def apply(runs: Runs, source: bytes, target_size: int, *, into_local: bool) -> bytearray:
    """What the runs make of an untouched destination; fails if they leave a tensor or write a byte twice."""
    target = target_bytes(target_size)
    written = bytearray(target_size)
    sides = (runs.remote, runs.local) if into_local else (runs.local, runs.remote)
    for source_at, target_at, length in zip(*(side.tolist() for side in sides), runs.lengths.tolist(), strict=True):
        assert length > 0
        assert 0 <= source_at <= source_at + length <= len(source)
        assert 0 <= target_at <= target_at + length <= target_size
        assert not any(written[target_at : target_at + length])
        written[target_at : target_at + length] = b"\1" * length
        target[target_at : target_at + length] = source[source_at : source_at + length]
    return target


def assert_merged(runs: Runs) -> None:
    """No two neighbours are adjacent on both sides, in either direction."""
    rows = list(zip(runs.local.tolist(), runs.remote.tolist(), runs.lengths.tolist(), strict=True))
    for (local, remote, length), (next_local, next_remote, next_length) in itertools.pairwise(rows):
        assert (local + length, remote + length) != (next_local, next_remote)
        assert (next_local + next_length, next_remote + next_length) != (local, remote)


def span_rows(spans: Spans) -> list[tuple[int, int, int, int]]:
    """(local address, region, offset in it, length) of each span, tensor by tensor, as whole numbers."""
    runs = list(zip(spans.runs.local.tolist(), spans.runs.remote.tolist(), spans.runs.lengths.tolist(), strict=True))
    tensors = zip(spans.bases.tolist(), spans.regions.tolist(), spans.starts.tolist(), strict=True)
    return [
        (base + local, region, start + remote, length)
        for base, region, start in tensors
        for local, remote, length in runs
    ]


def read(spans: Spans, memory: bytearray, base: int, regions: dict[int, bytes]) -> None:
    """Apply spans as a read: from the peer's regions into local ``memory`` that starts at address ``base``."""
    for address, region, offset, length in span_rows(spans):
        source = regions[region]
        at = address - base
        assert 0 <= offset <= offset + length <= len(source)
        assert 0 <= at <= at + length <= len(memory)
        assert set(memory[at : at + length]) <= {UNTOUCHED}
        memory[at : at + length] = source[offset : offset + length]
