"""What a case means in bytes: which block goes where, the memory it lies in, and what must arrive.

Both processes of every contestant derive this from the case and a seed alone, so all contestants move the same spans in
the same order.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.cli.bench.results import Memory, Order

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from llm_datadist.cli.bench.results import Case

    I64 = NDArray[np.int64]
    U64 = NDArray[np.uint64]

PULLS: Final = frozenset({"pull_blocks", "pull_cache"})
PUSHES: Final = frozenset({"push_blocks", "push_cache", "transfer_cache_async"})
WHOLE: Final = frozenset({"pull_cache", "push_cache"})
"""Operations that move contiguous tensors and so know no order of blocks."""
WORD_BYTES: Final = 8
_HUGE_PAGE: Final = 2 << 20
_RUN_BLOCKS: Final = 8
_PIECE_WORDS: Final = 1 << 19
_POISON: Final = 0xEE
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
"""Multiplying by an odd number maps no two words to one value."""


def check(case: Case) -> None:
    """Refuse what cannot be measured.

    Raises:
        ValueError: names the field, its value and what it may be.
    """
    if case.operation not in PULLS | PUSHES:
        message = f"operation is {case.operation!r}: use one of {', '.join(sorted(PULLS | PUSHES))}"
        raise ValueError(message)
    for name, value in (("tensors", case.tensors), ("blocks", case.blocks)):
        if value < 1:
            message = f"{name} is {value}: use at least 1"
            raise ValueError(message)
    if case.block_bytes < 1 or case.block_bytes % WORD_BYTES:
        message = f"block_bytes is {case.block_bytes}: use a positive multiple of {WORD_BYTES}"
        raise ValueError(message)
    if case.operation in WHOLE and case.order is not Order.SORTED:
        message = (
            f"order is {case.order.value} for {case.operation}, which moves whole tensors: use {Order.SORTED.value}"
        )
        raise ValueError(message)


def describe(case: Case) -> str:
    """The case in a few words."""
    size = f"{case.block_bytes >> 10} KiB" if case.block_bytes % 1024 == 0 else f"{case.block_bytes} bytes"
    return (
        f"{case.operation} over {case.path}, {case.tensors} tensors x {case.blocks} blocks of {size}, "
        f"{case.order.value}, {case.memory.value} pages"
    )


def pulls(case: Case) -> bool:
    """Whether bytes flow from the owner of the remote memory to the process that calls; else the other way."""
    return case.operation in PULLS


@dataclass(frozen=True, slots=True)
class Selection:
    """Block ``local[i]`` of the caller and block ``remote[i]`` of the owner hold the same bytes afterwards."""

    local: I64
    remote: I64

    @classmethod
    def of(cls, case: Case, seed: int) -> Selection:
        """All blocks, in the case's order; the two sides are shuffled independently of each other."""
        rng = np.random.default_rng(seed)
        return cls(_ids(case, rng), _ids(case, rng))

    @classmethod
    def identity(cls, case: Case) -> Selection:
        """Block i to block i."""
        ids = np.arange(case.blocks, dtype=np.int64)
        return cls(ids, ids)


def _ids(case: Case, rng: np.random.Generator) -> I64:
    ids = np.arange(case.blocks, dtype=np.int64)
    if case.order is Order.SORTED:
        return ids
    if case.order is Order.SHUFFLED:
        return rng.permutation(ids)
    runs = np.split(ids, np.arange(_RUN_BLOCKS, case.blocks, _RUN_BLOCKS))
    return np.concatenate([runs[place] for place in rng.permutation(len(runs))])


@dataclass(frozen=True, slots=True)
class Spans:
    """Pieces of memory that hold the same bytes afterwards: addresses in both processes, lengths in bytes."""

    local: I64
    remote: I64
    lengths: I64

    @classmethod
    def of(cls, case: Case, selection: Selection, local: Sequence[int], remote: Sequence[int]) -> Spans:
        """One span for each block of each tensor, tensor by tensor; ``local`` and ``remote`` are tensor addresses."""
        return cls(
            _addresses(local, selection.local, case.block_bytes),
            _addresses(remote, selection.remote, case.block_bytes),
            np.full(case.tensors * case.blocks, case.block_bytes, dtype=np.int64),
        )


def _addresses(tensors: Sequence[int], ids: I64, block_bytes: int) -> I64:
    return (np.array(tensors, dtype=np.int64)[:, None] + ids[None, :] * block_bytes).reshape(-1)


class Tensors:
    """The memory of one side: every tensor is a private mapping of its own, touched, in the pages the case asks for.

    Each starts at a huge page boundary, so that large tensors can consist of huge pages entirely.
    """

    def __init__(self, case: Case) -> None:
        size = case.blocks * case.block_bytes
        self._arrays = [_tensor(size, case.memory).reshape(case.blocks, -1) for _ in range(case.tensors)]
        self.poison()

    @property
    def addresses(self) -> list[int]:
        """Of each tensor."""
        return [int(array.ctypes.data) for array in self._arrays]

    def poison(self) -> None:
        """Overwrite everything with what no transfer brings."""
        for array in self._arrays:
            array.view(np.uint8).fill(_POISON)

    def fill(self, seed: int) -> None:
        """Write the pattern: every word tells its tensor, block, offset and the seed."""
        for rows, expected in self._pieces(np.arange(len(self._arrays[0])), seed):
            rows[:] = expected

    def poisoned(self) -> bool:
        """Whether nothing has been written since ``poison``."""
        return all(bool((array.view(np.uint8) == _POISON).all()) for array in self._arrays)

    def copy_from(self, other: Tensors) -> None:
        """Copy all memory of another side of the same case that is in this process."""
        for array, source in zip(self._arrays, other._arrays, strict=True):
            np.copyto(array, source)

    def wrong(self, sources: I64, into: I64, seed: int) -> int:
        """Bytes that are not what they must be when block ``sources[i]`` of the pattern was moved to ``into[i]``."""
        places = np.empty_like(into)
        places[into] = sources
        pieces = self._pieces(places, seed)
        return sum(int(np.count_nonzero(rows.view(np.uint8) != expected.view(np.uint8))) for rows, expected in pieces)

    def _pieces(self, blocks: I64, seed: int) -> Iterator[tuple[U64, U64]]:
        """All memory in pieces, each with the pattern of blocks ``blocks`` of the same tensor."""
        words = self._arrays[0].shape[1]
        offsets = np.arange(words, dtype=np.uint64)
        step = max(1, _PIECE_WORDS // words)
        for number, array in enumerate(self._arrays):
            for start in range(0, len(array), step):
                first = (blocks[start : start + step].astype(np.uint64) + np.uint64(number * len(array))) * np.uint64(
                    words
                )
                yield array[start : start + step], (first[:, None] + offsets[None, :]) * _ODD + np.uint64(seed)


def _tensor(size: int, memory: Memory) -> U64:
    slack = _HUGE_PAGE if size >= _HUGE_PAGE else 0
    pages = mmap.mmap(-1, size + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if memory is Memory.HUGE:
        with contextlib.suppress(OSError):  # a kernel without huge pages: then these are the best it has
            pages.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(pages, dtype=np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE if slack else 0
    return whole[start : start + size].view(np.uint64)
