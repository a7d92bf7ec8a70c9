"""What a benchmark run found: plain values that go to the table, to JSON and to the HTML report alike."""

from __future__ import annotations

import statistics
from enum import Enum

import msgspec


class Contestant(str, Enum):
    """Who moved the bytes."""

    OURS = "llm_datadist"
    """The public API with default options."""
    LIMIT_PROCESS_VM = "limit_process_vm"
    """Bare process_vm_readv/writev on the same spans, as many threads as we use, everything prepared beforehand."""
    LIMIT_SOCKETS = "limit_sockets"
    """Bare sendmsg/recvmsg on the same spans, as many connections as we use, everything prepared beforehand."""
    LIMIT_MEMCPY = "limit_memcpy"
    """One plain copy of as many bytes within a process."""
    NIXL = "nixl"
    """NIXL with its default UCX transports."""
    NIXL_TCP = "nixl_tcp"
    """NIXL restricted to UCX over TCP."""
    MOONCAKE_TCP = "mooncake_tcp"
    """Mooncake's transfer engine over TCP."""


class Order(str, Enum):
    """How block ids follow each other, on both sides."""

    SHUFFLED = "shuffled"
    SORTED = "sorted"
    """Neighbours in memory: one long run a tensor."""
    RUNS = "runs_of_8"
    """Shuffled runs of eight neighbours, as block allocators tend to give them."""


class Memory(str, Enum):
    """What the tensors lie in when they are registered."""

    HUGE = "huge"
    """Huge pages already (as large numpy arrays are)."""
    SMALL = "small"
    """4 KiB pages (as torch allocates)."""


class Case(msgspec.Struct, frozen=True):
    """What is moved in one timed call."""

    operation: str
    """Public call: pull_blocks, push_blocks, pull_cache, push_cache, transfer_cache_async."""
    path: str
    """process_vm, mapped, tcp."""
    tensors: int
    blocks: int
    """Blocks of each tensor that are moved; all that it has."""
    block_bytes: int
    order: Order = Order.SHUFFLED
    memory: Memory = Memory.HUGE
    model: str = ""
    """Name of the model whose shape this is; empty for a plain one."""

    @property
    def total_bytes(self) -> int:
        """Bytes that one call moves."""
        return self.tensors * self.blocks * self.block_bytes


class Throughput(msgspec.Struct, frozen=True):
    """Rounds of one contestant on one case; index i of all contestants of a case was measured in the same round."""

    case: Case
    contestant: Contestant
    seconds: list[float]
    """Of each round."""
    cpu_seconds: list[float]
    """Of each round, user and system, both processes."""

    @property
    def gb_per_s(self) -> float:
        """Median over the rounds, 10^9 bytes a second."""
        return self.case.total_bytes / statistics.median(self.seconds) / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        """Median over the rounds, CPU seconds for 10^9 bytes."""
        return statistics.median(self.cpu_seconds) / self.case.total_bytes * 1e9


class Latency(msgspec.Struct, frozen=True):
    """One small operation, many times."""

    case: Case
    contestant: Contestant
    seconds: list[float]
    """Of every call, in order."""

    def quantile(self, share: float) -> float:
        """Seconds that this share of the calls took at most."""
        return _quantile(self.seconds, share)

    def round_quantiles(self, share: float, rounds: int) -> list[float]:
        """The same of each round; all rounds made as many calls."""
        calls = len(self.seconds) // rounds
        return [_quantile(self.seconds[start : start + calls], share) for start in range(0, calls * rounds, calls)]


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Scale(msgspec.Struct, frozen=True):
    """How the cost of one thing grows with the number of another."""

    name: str
    """What is counted on the x axis: spans of one call, links that are up, tensors, ..."""
    unit: str
    """Of ``y``: ns a span, us a pull, ..."""
    x: list[int]
    y: list[float]


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured."""

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    python: str
    huge_pages: str
    """The active word of /sys/kernel/mm/transparent_hugepage/enabled."""


class Report(msgspec.Struct, frozen=True):
    """One run."""

    version: str
    """Of this library."""
    made_at: str
    """ISO 8601, UTC."""
    machine: Machine
    rounds: int
    throughputs: list[Throughput]
    latencies: list[Latency]
    scales: list[Scale]
    command: str = ""
    """What repeats it."""


class Ratio(msgspec.Struct, frozen=True):
    """We against somebody else, round by round."""

    median: float
    low: float
    high: float


def ratio(ours: Throughput, theirs: Throughput) -> Ratio:
    """Our throughput over theirs: ratio of the medians, and the extremes of the rounds."""
    each = [b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
    return Ratio(statistics.median(theirs.seconds) / statistics.median(ours.seconds), min(each), max(each))


def latency_ratio(ours: Latency, theirs: Latency, share: float, rounds: int) -> Ratio:
    """Our time over theirs at this quantile: ratio of the medians of the rounds, and the extremes of the rounds."""
    mine, others = ours.round_quantiles(share, rounds), theirs.round_quantiles(share, rounds)
    each = [a / b for a, b in zip(mine, others, strict=True)]
    return Ratio(statistics.median(mine) / statistics.median(others), min(each), max(each))
