"""What one run of the demo does: sizes, order of operations, which block goes where. Both processes derive it alike."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist.cli.models import MODELS, CacheShape, Model, ModelName, round_up

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]

_MIN_TIMEOUT_MS: Final = 30_000
_SLOWEST_BYTES_PER_MS: Final = 50_000
_SPARE_SHARE: Final = 16


class PathName(str, Enum):
    """The transfer paths that can lead from one process to another."""

    AUTO = "auto"
    PROCESS_VM = "process_vm"
    NIXL = "nixl"
    TCP = "tcp"


class Role(str, Enum):
    """The two processes."""

    PREFILL = "prefill"
    DECODE = "decode"


class Operation(str, Enum):
    """What the demo does, in this order; the value is what the table shows."""

    PULL_BLOCKS = "pull_blocks"
    PUSH_BLOCKS = "push_blocks"
    LAYER_WISE = "transfer_cache_async"
    PULL_CACHE = "pull_cache"
    CACHE_TO_BLOCKS = "pull_blocks (cache)"

    @property
    def actor(self) -> Role:
        """The process that makes the call. Bytes always go from prefill to decode."""
        return Role.PREFILL if self in {Operation.PUSH_BLOCKS, Operation.LAYER_WISE} else Role.DECODE


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Which source block goes to which destination block: ``src[i]`` to ``dst[i]``, no block twice."""

    src: I64
    dst: I64


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of the demo."""

    model_name: ModelName
    tokens: int
    path: PathName
    seed: int

    @property
    def model(self) -> Model:
        """The geometry."""
        return MODELS[self.model_name]

    @property
    def blocks(self) -> int:
        """Blocks of each tensor of the prefill process."""
        return self.model.blocks_for(self.tokens)

    @property
    def capacity(self) -> int:
        """Blocks of each tensor of the decode process: some more, to see that these stay untouched."""
        return self.blocks + round_up(max(1, self.blocks // _SPARE_SHARE), self.model.block_multiple)

    @property
    def source_bytes(self) -> int:
        """Bytes that every operation moves: all the prefill process holds."""
        return self.blocks * self.model.block_bytes

    @property
    def destination_bytes(self) -> int:
        """Bytes that the decode process holds."""
        return self.capacity * self.model.block_bytes

    @property
    def timeout_ms(self) -> int:
        """``sync_kv_timeout``: enough for all bytes over a slow path."""
        return min(max(_MIN_TIMEOUT_MS, self.source_bytes // _SLOWEST_BYTES_PER_MS), 2**31 - 1)

    def call_table(self, operation: Operation, cache: CacheShape) -> BlockTable:
        """The block lists that the call gets; for a layer-wise transfer they count blocks of one part of a tensor."""
        parts = _parts(operation, cache)
        blocks, capacity = self.blocks // parts, self.capacity // parts
        order = np.arange(blocks, dtype=np.int64)
        if operation is Operation.PULL_CACHE:
            return BlockTable(order, order)
        rng = np.random.default_rng([self.seed, list(Operation).index(operation), cache.model_id])
        src = order if operation is Operation.CACHE_TO_BLOCKS else rng.permutation(order)
        return BlockTable(src, rng.permutation(np.arange(capacity, dtype=np.int64))[:blocks])

    def tensor_table(self, operation: Operation, cache: CacheShape) -> BlockTable:
        """Where each block of a whole tensor goes."""
        table, parts = self.call_table(operation, cache), _parts(operation, cache)
        starts = np.arange(parts, dtype=np.int64)[:, np.newaxis]
        return BlockTable(
            (starts * (self.blocks // parts) + table.src).ravel(),
            (starts * (self.capacity // parts) + table.dst).ravel(),
        )


def _parts(operation: Operation, cache: CacheShape) -> int:
    return cache.parts if operation is Operation.LAYER_WISE else 1
