"""Measures what ``goals`` asks for; every section adds rows to a table and what it found to a report."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import goals

from llm_datadist.cli.bench import driver, scales
from llm_datadist.cli.bench.driver import BenchError, Program
from llm_datadist.cli.bench.results import (
    Case,
    Contestant,
    Latency,
    Memory,
    Ratio,
    Scale,
    Throughput,
    latency_ratio,
    ratio,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from goals import Race

_CALLS: Final = 500
"""Small operations of each round."""
_CALLS_P99: Final = 2000
_TRIES: Final = 4
_STEADY: Final = 0.05
_LIMITS: Final = {"process_vm": Contestant.LIMIT_PROCESS_VM, "tcp": Contestant.LIMIT_SOCKETS}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    what: str
    needed: str
    seen: str
    ok: bool | None
    """None: nothing is needed, or it cannot be measured here."""


@dataclass
class Table:
    """What is measured with, and what has been measured."""

    programs: dict[Contestant, Program]
    absent: Mapping[Contestant, str]
    """Peers that cannot be installed here, and why."""
    plan: driver.Plan
    total_bytes: int
    on_step: driver.OnStep
    rows: list[Row] = field(default_factory=list)
    throughputs: list[Throughput] = field(default_factory=list)
    latencies: list[Latency] = field(default_factory=list)
    scales: list[Scale] = field(default_factory=list)

    def least(self, what: str, seen: Ratio, needed: float, detail: str = "") -> None:
        """Add a row: the ratio must be at least so much."""
        self.rows.append(Row(what, f">= {needed:g}x", _text(seen) + detail, seen.median >= needed))

    def most(self, what: str, seen: Ratio, needed: float, detail: str = "") -> None:
        """Add a row: the ratio must be at most so much."""
        self.rows.append(Row(what, f"<= {needed:g}x", _text(seen) + detail, seen.median <= needed))

    def run(self, case: Case, programs: Sequence[Program]) -> list[Throughput]:
        """Measure and keep."""
        found = driver.run([case], programs, self.plan, self.on_step)
        self.throughputs += found
        return found

    def latency(self, case: Case, programs: Sequence[Program], calls: int) -> list[Latency]:
        """Measure and keep."""
        found = driver.latency([case], programs, self.plan, calls, self.on_step)
        self.latencies += found
        return found


def _text(seen: Ratio) -> str:
    return f"{seen.median:.2f}x ({seen.low:.2f}..{seen.high:.2f})"


def same_host(table: Table) -> None:
    """Pulls and pushes between processes of this host, against NIXL and the bare calls; CPU time."""
    for race in goals.SAME_HOST:
        _race(table, race)


def tcp(table: Table) -> None:
    """Pulls over TCP, against NIXL, Mooncake and bare sockets."""
    for race in goals.TCP:
        _race(table, race)


def _race(table: Table, race: Race) -> None:
    """Measure with all that can; one that fails is named and left out."""
    case = race.case(table.total_bytes)
    missing = {each: reason for each, reason in table.absent.items() if each in race.at_least}
    while True:
        rivals = [each for each in race.at_least if each not in missing]
        try:
            ours, *others = table.run(case, [Program.ours(), *(table.programs[each] for each in rivals)])
            break
        except BenchError as error:
            if error.contestant not in rivals:
                raise
            missing[error.contestant] = str(error)
    found = {each.contestant: each for each in others}
    for contestant, needed in race.at_least.items():
        what = f"{_name(case)} against {goals.NAMES[contestant]}"
        if contestant in missing:
            table.rows.append(Row(what, f">= {needed:g}x", f"not measured: {missing[contestant]}", ok=None))
            continue
        other = found[contestant]
        detail = f": {ours.gb_per_s:.2f} against {other.gb_per_s:.2f} GB/s"
        table.least(what, ratio(ours, other), needed, detail)
    if Contestant.NIXL in found and _counts_cpu(case):
        _cpu(table, ours, found[Contestant.NIXL])


def _counts_cpu(case: Case) -> bool:
    return case.operation == "pull_blocks" and case.block_bytes == goals.CPU_BLOCK_BYTES


def _cpu(table: Table, ours: Throughput, nixl: Throughput) -> None:
    each = [a / b for a, b in zip(ours.cpu_seconds, nixl.cpu_seconds, strict=True)]
    seen = Ratio(ours.cpu_s_per_gb / nixl.cpu_s_per_gb, min(each), max(each))
    detail = f": {ours.cpu_s_per_gb:.3f} against {nixl.cpu_s_per_gb:.3f} s/GB"
    table.most(f"{_name(ours.case)}, CPU time against NIXL", seen, goals.MAX_CPU, detail)


def small(table: Table) -> None:
    """The latency of a small pull, against NIXL."""
    for path, rival in goals.SMALL.items():
        what = f"pull of 1 block x 2 tensors of 32 KiB, {_way(path)}, p50 against {goals.NAMES[rival]}"
        if rival in table.absent:
            reason = f"not measured: {table.absent[rival]}"
            table.rows.append(Row(what, f"<= {goals.MAX_LATENCY:g}x", reason, ok=None))
            continue
        ours, other = table.latency(scales.small(path), [Program.ours(), table.programs[rival]], _CALLS)
        detail = f": {ours.quantile(0.5) * 1e6:.1f} against {other.quantile(0.5) * 1e6:.1f} us"
        table.most(what, latency_ratio(ours, other, 0.5, table.plan.rounds), goals.MAX_LATENCY, detail)


def busy_owner(table: Table) -> None:
    """What is left while the main thread of the owner is in a pure Python loop."""
    for path, (block_bytes, needed) in goals.BUSY.items():
        case = goals.Race("pull_blocks", path, block_bytes, {}).case(table.total_bytes)
        limit = _LIMITS[path]
        programs = [
            Program.ours(),
            Program.limit(limit),
            Program.ours("--busy-owner"),
            Program.limit(limit, "--busy-owner"),
        ]
        idle, idle_limit, busy, busy_limit = table.run(case, programs)
        detail = f"; {goals.NAMES[limit]} {_text(ratio(busy_limit, idle_limit))}"
        what = f"{_name(case)}, throughput with a busy owner against an idle one"
        table.least(what, ratio(busy, idle), needed, detail)
    block_bytes, needed = goals.BUSY["process_vm"]
    case = goals.Race("pull_blocks", "process_vm", block_bytes, {}).case(table.total_bytes)
    idle, busy = table.run(case, [Program.ours("--apart"), Program.ours("--apart", "--busy-owner")])
    table.least(f"{_name(case)}, the same with owner and caller on different cores", ratio(busy, idle), needed)
    idle_small, busy_small = table.latency(
        scales.small("process_vm"), [Program.ours(), Program.ours("--busy-owner")], _CALLS_P99
    )
    seen = latency_ratio(busy_small, idle_small, 0.99, table.plan.rounds)
    detail = f": {busy_small.quantile(0.99) * 1e6:.1f} against {idle_small.quantile(0.99) * 1e6:.1f} us"
    what = "pull of 1 block x 2 tensors of 32 KiB, same host, p99 with a busy owner against an idle one"
    table.most(what, seen, goals.MAX_BUSY_P99, detail)


def planning(table: Table) -> None:
    """What the library costs above the system calls, a span."""
    scale = scales.planning(scales.SPAN_COUNTS, table.plan.rounds)
    table.scales.append(scale)
    growth = max(later / min(scale.y[:place]) for place, later in enumerate(scale.y) if place)
    seen = ", ".join(f"{ns:.0f} at {count:,}" for count, ns in zip(scale.x, scale.y, strict=True))
    ok = scale.y[-1] <= goals.MAX_NS_A_SPAN and growth <= goals.MAX_GROWTH
    needed = f"<= {goals.MAX_NS_A_SPAN:g} ns a span at the most, growth <= {goals.MAX_GROWTH:g}x"
    table.rows.append(Row("planning cost of a pull of 64 tensors, ns a span", needed, seen, ok))


def links(table: Table) -> None:
    """The latency of a small pull while many links are up."""
    found = scales.links(scales.LINK_COUNTS, table.plan, _CALLS, table.on_step)
    table.latencies += [found[0], found[-1]]
    p50 = [statistics.median(each.round_quantiles(0.5, table.plan.rounds)) * 1e6 for each in found]
    table.scales.append(Scale("links that are up", "us a small pull, p50", list(scales.LINK_COUNTS), p50))
    detail = f": {p50[-1]:.1f} against {p50[0]:.1f} us"
    seen = latency_ratio(found[-1], found[0], 0.5, table.plan.rounds)
    what = f"pull of 1 block x 2 tensors of 32 KiB, p50 with {scales.LINK_COUNTS[-1]} links up against 1"
    table.most(what, seen, goals.MAX_LINKS_LATENCY, detail)


def layer_wise(table: Table) -> None:
    """A layer-wise push behind a model that computes each layer for as long as its transfer takes."""
    tensors = 2 * goals.LAYERS
    blocks = max(1, table.total_bytes // tensors // goals.LAYER_BLOCK_BYTES)
    case = Case("transfer_cache_async", "process_vm", tensors, blocks, goals.LAYER_BLOCK_BYTES)
    (alone,) = table.run(case, [Program.ours()])
    for _ in range(_TRIES):
        layer_s = statistics.median(alone.seconds) / goals.LAYERS
        programs = [Program.ours(), Program.ours("--layer-seconds", repr(layer_s))]
        alone, behind = driver.run([case], programs, table.plan, table.on_step)
        if abs(statistics.median(alone.seconds) / goals.LAYERS / layer_s - 1) <= _STEADY:
            break  # else the machine is not as fast any more as when the transfer of a layer was timed
    ideal_s = (goals.LAYERS + 1) * layer_s
    each = [seconds / ideal_s for seconds in behind.seconds]
    seen = Ratio(statistics.median(each), min(each), max(each))
    what = f"layer-wise push of {goals.LAYERS} layers against computing them (as long as their transfer) + one layer"
    table.most(
        what,
        seen,
        goals.MAX_LAYERWISE,
        f": {statistics.median(behind.seconds) * 1e3:.1f} against {ideal_s * 1e3:.1f} ms",
    )


SECTIONS: Final[dict[str, Callable[[Table], None]]] = {
    "same-host": same_host,
    "tcp": tcp,
    "small": small,
    "busy-owner": busy_owner,
    "planning": planning,
    "links": links,
    "layer-wise": layer_wise,
}


def measure(table: Table, sections: Sequence[str]) -> None:
    """Measure these sections; one that fails is a row that says so."""
    for name in sections:
        try:
            SECTIONS[name](table)
        except BenchError as error:
            table.rows.append(Row(name, "", f"failed: {error}", ok=False))


def _name(case: Case) -> str:
    pages = ", 4 KiB pages when registered" if case.memory is Memory.SMALL else ""
    return f"{case.operation}, {_way(case.path)}, {case.block_bytes >> 10} KiB blocks{pages}"


def _way(path: str) -> str:
    return "over TCP" if path == "tcp" else "same host"
