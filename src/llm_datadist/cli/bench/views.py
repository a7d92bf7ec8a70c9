"""A report in the order in which it is read: results of one case side by side, and cases of one kind together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from llm_datadist.cli.bench.results import Case, Contestant, Latency, Order, Ratio, Throughput, ratio
from llm_datadist.cli.bench.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

NAMES: Final = {
    Contestant.OURS: "llm-datadist",
    Contestant.LIMIT_PROCESS_VM: "bare process_vm",
    Contestant.LIMIT_SOCKETS: "bare sockets",
    Contestant.LIMIT_MEMCPY: "memcpy",
    Contestant.NIXL: "NIXL",
    Contestant.NIXL_TCP: "NIXL over TCP",
    Contestant.MOONCAKE_TCP: "Mooncake over TCP",
}
"""What readers call them, in the order in which they appear."""
LIMITS: Final = {
    "process_vm": Contestant.LIMIT_PROCESS_VM,
    "mapped": Contestant.LIMIT_MEMCPY,
    "tcp": Contestant.LIMIT_SOCKETS,
}
"""What no implementation of a path can be expected to beat."""
_ORDERS: Final = {
    Order.SHUFFLED: "shuffled blocks",
    Order.SORTED: "sorted blocks",
    Order.RUNS: "runs of 8 blocks",
}
_RANKS: Final = {contestant: rank for rank, contestant in enumerate(NAMES)}


@dataclass(frozen=True, slots=True)
class Extremes:
    """Slowest and fastest round, 10^9 bytes a second."""

    low: float
    high: float


def extremes(result: Throughput) -> Extremes:
    """How far the rounds are apart."""
    size = result.case.total_bytes / 1e9
    return Extremes(size / max(result.seconds), size / min(result.seconds))


@dataclass(frozen=True, slots=True)
class Row:
    """All results of one case."""

    case: Case
    results: dict[Contestant, Throughput]

    @property
    def label(self) -> str:
        """Tells it from the other rows of its group."""
        case = self.case
        size = format_bytes(case.block_bytes)
        return f"{case.model} {case.operation} ({case.tensors} x {size})" if case.model else size

    @property
    def ours(self) -> Throughput | None:
        """Of the library."""
        return self.results.get(Contestant.OURS)

    @property
    def limit(self) -> Throughput | None:
        """Of what bounds the case's path."""
        bound = LIMITS.get(self.case.path)
        return self.results.get(bound) if bound else None

    @property
    def of_limit(self) -> Ratio | None:
        """Ours against the limit, where both are known."""
        return ratio(self.ours, self.limit) if self.ours and self.limit else None


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that differ in block size only, or in model and operation only."""

    title: str
    is_model: bool
    rows: tuple[Row, ...]

    @property
    def is_curve(self) -> bool:
        """Whether it has several block sizes to draw a line through."""
        return not self.is_model and len({row.case.block_bytes for row in self.rows}) > 1

    @property
    def contestants(self) -> list[Contestant]:
        """All that have a result."""
        return sorted({each for row in self.rows for each in row.results}, key=_RANKS.__getitem__)


def groups(throughputs: Iterable[Throughput]) -> list[Group]:
    """Group results for tables and plots; groups in order of appearance, rows by block size."""
    by_case: dict[Case, list[dict[Contestant, Throughput]]] = {}
    for each in throughputs:
        results = by_case.setdefault(each.case, [{}])
        if each.contestant in results[-1]:  # measured once more: another row
            results.append({})
        results[-1][each.contestant] = each
    by_title: dict[tuple[str, bool], list[Row]] = {}
    for case, found in by_case.items():
        by_title.setdefault((_title(case), bool(case.model)), []).extend(Row(case, results) for results in found)
    return [
        Group(title, is_model, tuple(rows if is_model else sorted(rows, key=lambda row: row.case.block_bytes)))
        for (title, is_model), rows in by_title.items()
    ]


def latencies(found: Iterable[Latency]) -> list[tuple[str, list[Latency]]]:
    """Distributions of one case together, with a title; in order of appearance."""
    by_case: dict[Case, list[Latency]] = {}
    for each in found:
        by_case.setdefault(each.case, []).append(each)
    return [
        (_latency_title(case), sorted(each, key=lambda one: _RANKS[one.contestant])) for case, each in by_case.items()
    ]


def _title(case: Case) -> str:
    what = "model shapes" if case.model else case.operation
    return f"{what} over {case.path}, {_ORDERS[case.order]}, {case.memory.value} pages"


def _latency_title(case: Case) -> str:
    blocks = f"{case.blocks} {'block' if case.blocks == 1 else 'blocks'} of {format_bytes(case.block_bytes)}"
    return f"{case.operation} over {case.path}, {blocks} in {case.tensors} tensors, {case.memory.value} pages"
