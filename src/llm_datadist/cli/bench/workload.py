"""What one run of the command measures."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from llm_datadist.cli.bench import cases
from llm_datadist.cli.bench.results import Case, Contestant, Order
from llm_datadist.cli.bench.units import format_bytes, parse_bytes
from llm_datadist.cli.models import BLOCK_TOKENS, MODELS, ModelName

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from llm_datadist.cli.models import CacheShape

BESIDE: Final[Mapping[str, tuple[Contestant, ...]]] = {
    "process_vm": (Contestant.OURS, Contestant.LIMIT_PROCESS_VM, Contestant.LIMIT_MEMCPY),
    "tcp": (Contestant.OURS, Contestant.LIMIT_SOCKETS),
}
"""Who is measured in the same rounds, by path: the library first, the limit of the path second."""
_TENSORS: Final = 2
"""K and V of one layer."""
_SMALL_BYTES: Final = 32 << 10
_SCALED_BYTES: Final = 64 << 10
_MODEL_BLOCK_TOKENS: Final = {ModelName.DEEPSEEK_R1: 128}
"""Engines give latent caches larger blocks, since a token has little in them; here 128 KiB and 16 KiB a layer."""


class Operation(str, Enum):
    """The public calls."""

    PULL_BLOCKS = "pull_blocks"
    PUSH_BLOCKS = "push_blocks"
    PULL_CACHE = "pull_cache"
    PUSH_CACHE = "push_cache"
    LAYER_WISE = "transfer_cache_async"


class Kind(str, Enum):
    """What is found out."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    SCALE = "scale"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured where the user does not say."""

    operations: tuple[Operation, ...]
    block_sizes: str
    total_mib: int
    rounds: int
    calls: int
    """Of a small operation, each round."""
    spans: tuple[int, ...]
    links: tuple[int, ...]
    tensors: tuple[int, ...]


FULL: Final = Effort(
    operations=(Operation.PULL_BLOCKS, Operation.PUSH_BLOCKS),
    block_sizes="4KiB,16KiB,64KiB,256KiB,1MiB,16MiB",
    total_mib=256,
    rounds=5,
    calls=1000,
    spans=(1_000, 10_000, 100_000, 1_000_000),
    links=(1, 8, 64, 512),
    tensors=(1, 8, 64, 512),
)
QUICK: Final = Effort(
    operations=(Operation.PULL_BLOCKS,),
    block_sizes="16KiB,256KiB,4MiB",
    total_mib=32,
    rounds=3,
    calls=300,
    spans=(1_000, 10_000, 100_000),
    links=(1, 8, 64),
    tensors=(1, 8, 64),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """One run."""

    effort: Effort
    paths: tuple[str, ...]
    """``process_vm`` or ``tcp``; ``auto`` until it is known which of them that is."""
    operations: tuple[Operation, ...]
    block_sizes: tuple[int, ...]
    orders: tuple[Order, ...]
    total_bytes: int
    """That one call moves, rounded to whole blocks."""
    rounds: int
    models: tuple[ModelName, ...]
    """Whose shapes are moved; none: plain tensors with ``block_sizes``."""
    kinds: tuple[Kind, ...]

    def throughput_cases(self, path: str) -> list[Case]:
        """Large transfers over one path, none twice."""
        found = self._model_cases(path) if self.models else self._plain_cases(path)
        return list(dict.fromkeys(found))

    def _plain_cases(self, path: str) -> Iterator[Case]:
        for operation in self.operations:
            if operation.value in cases.WHOLE:
                yield Case(operation.value, path, _TENSORS, 1, _whole_words(self.total_bytes // _TENSORS), Order.SORTED)
                continue
            for order in self.orders:
                for size in self.block_sizes:
                    blocks = max(1, self.total_bytes // (_TENSORS * size))
                    yield Case(operation.value, path, _TENSORS, blocks, size, order)

    def _model_cases(self, path: str) -> Iterator[Case]:
        for model in self.models:
            for operation in self.operations:
                for order in (Order.SORTED,) if operation.value in cases.WHOLE else self.orders:
                    yield from self._cache_cases(model, operation, path, order)

    def _cache_cases(self, model: ModelName, operation: Operation, path: str, order: Order) -> Iterator[Case]:
        """One for each cache of a model, with as many blocks as let all of them together reach ``total_bytes``."""
        shapes = MODELS[model].caches
        sizes = [_block_bytes(model, shape) for shape in shapes]
        a_block = sum(size * shape.num_tensors for size, shape in zip(sizes, shapes, strict=True))
        blocks = max(1, self.total_bytes // a_block)
        for size, shape in zip(sizes, shapes, strict=True):
            name = model.value if len(shapes) == 1 else f"{model.value} {shape.name}"
            # A layer-wise transfer counts two tensors a layer: a single one goes as its halves.
            parts = shape.parts if operation is Operation.LAYER_WISE else 1
            tensors, part_blocks = shape.num_tensors * parts, max(1, blocks // parts)
            yield Case(operation.value, path, tensors, part_blocks, size, order, model=name)

    def latency_cases(self, path: str) -> list[Case]:
        """One block of one layer over one path, none twice."""
        return list(dict.fromkeys(_small_case(operation, path) for operation in self.operations))

    def tensor_cases(self) -> list[Case]:
        """As many bytes in ever more tensors, over the first path."""
        return [
            Case(
                "pull_blocks", self.paths[0], count, max(1, self.total_bytes // (count * _SCALED_BYTES)), _SCALED_BYTES
            )
            for count in self.effort.tensors
        ]

    @property
    def memory_bytes(self) -> int:
        """That all processes together need at most: source and destination of each contestant."""
        if Kind.THROUGHPUT not in self.kinds:
            return 2 * self.total_bytes
        sides = {path: 2 * len(BESIDE[path]) + 1 for path in self.paths}  # memcpy has one more
        return max(sides[case.path] * case.total_bytes for path in self.paths for case in self.throughput_cases(path))

    @property
    def command(self) -> str:
        """What measures the same again."""
        words = ["llm-datadist", "bench"]
        if self.effort is QUICK:
            words.append("--quick")
        for option, values in (
            ("--path", self.paths),
            ("--operation", self.operations),
            ("--order", self.orders),
            ("--model", self.models),
            ("--measure", self.kinds),
        ):
            for value in values:
                words += [option, value.value if isinstance(value, Enum) else value]
        if not self.models:
            words += ["--blocks", ",".join(format_bytes(size).replace(" ", "") for size in self.block_sizes)]
        words += ["--total", str(self.total_bytes >> 20), "--rounds", str(self.rounds)]
        return shlex.join(words)


def parse_block_sizes(text: str) -> tuple[int, ...]:
    """Block sizes in bytes from text such as ``4KiB,1MiB``.

    Raises:
        ValueError: there is none, or one that cannot be measured.
    """
    sizes = tuple(parse_bytes(word) for word in text.split(","))
    for size in sizes:
        cases.check(Case("pull_blocks", "process_vm", 1, 1, size))
    return sizes


def small_pull(path: str) -> Case:
    """One block of one layer."""
    return _small_case(Operation.PULL_BLOCKS, path)


def _small_case(operation: Operation, path: str) -> Case:
    return Case(operation.value, path, _TENSORS, 1, _SMALL_BYTES, Order.SORTED)  # a single block knows no order


def _block_bytes(model: ModelName, shape: CacheShape) -> int:
    return shape.block_bytes // BLOCK_TOKENS * _MODEL_BLOCK_TOKENS.get(model, BLOCK_TOKENS)


def _whole_words(count: int) -> int:
    return max(1, count // cases.WORD_BYTES) * cases.WORD_BYTES
