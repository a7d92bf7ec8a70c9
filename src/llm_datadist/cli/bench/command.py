"""``llm-datadist bench`` from options to exit code: measure one thing after the other, show it, write it."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Final

import msgspec

from llm_datadist.cli.bench import driver, scales
from llm_datadist.cli.bench.driver import BenchError, Program
from llm_datadist.cli.bench.html import page
from llm_datadist.cli.bench.results import Case, Contestant, Latency, Report, Scale, Throughput
from llm_datadist.cli.bench.table import NOTE, tables
from llm_datadist.cli.bench.units import format_bytes, format_number, format_seconds
from llm_datadist.cli.bench.views import NAMES, Row
from llm_datadist.cli.bench.workload import BESIDE, Kind, small_pull
from llm_datadist.cli.machine import MEMINFO, fingerprint, memory_bytes
from llm_datadist.cli.plan import PathName
from llm_datadist.cli.show import Show, open_console, print_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rich.console import Console

    from llm_datadist.cli.bench.driver import Step
    from llm_datadist.cli.bench.workload import Workload

_NAME: Final = "bench"
_HEADROOM_BYTES: Final = 512 << 20
_PROBE: Final = Case("pull_blocks", "process_vm", tensors=1, blocks=1, block_bytes=4096)
_PLANNED_PATH: Final = "process_vm"
"""Whose system calls can be left out, to see what planning costs."""
_CLOCK_DIGITS: Final = 9
"""Times of single calls are kept in whole nanoseconds: the clock is no finer."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files to write."""

    json: Path | None = None
    html: Path | None = None

    def write(self, report: Report) -> None:
        """Write what is wanted.

        Raises:
            OSError: the system refuses.
        """
        if self.json is not None:
            self.json.write_bytes(msgspec.json.encode(report) + b"\n")
        if self.html is not None:
            self.html.write_text(page(report), encoding="utf-8")


def run(workload: Workload, outputs: Outputs) -> int:
    """Measure, print tables, write files.

    Returns:
        The exit code: 0 if everything is measured and written, else 1.
    """
    out = open_console()
    made_at = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
    measured = Measured()
    try:
        workload = replace(workload, paths=resolved(workload.paths))
        check_memory(workload)
        show = Show(out, steps(workload))
        with show.bar:
            measured.measure(workload, show)
    except (BenchError, RuntimeError) as error:
        _print(out, measured.report(workload, made_at))
        print_problem(_NAME, str(error))
        return 1
    report = measured.report(workload, made_at)
    _print(out, report)
    try:
        outputs.write(report)
    except OSError as error:
        print_problem(_NAME, f"cannot write {error.filename}: {error.strerror}")
        return 1
    return 0


def _print(out: Console, report: Report) -> None:
    for table in tables(report):
        out.print(table)
        out.print()
    if report.throughputs:
        out.print(NOTE, highlight=False)


def resolved(paths: Sequence[str]) -> tuple[str, ...]:
    """Each path once, ``auto`` replaced by the fastest that works between two processes of this host."""
    return tuple(dict.fromkeys(_fastest() if path == PathName.AUTO.value else path for path in paths))


def _fastest() -> str:
    try:
        driver.latency([_PROBE], [Program.ours()], driver.Plan(rounds=1), calls=1)
    except BenchError as error:
        print_problem(_NAME, f"not measuring {_PROBE.path}, which does not work here: {error}")
        return PathName.TCP.value
    return _PROBE.path


def check_memory(workload: Workload, meminfo: Path = MEMINFO) -> None:
    """Refuse what does not fit this machine, before it is started.

    Raises:
        BenchError: too little memory is available.
    """
    available = memory_bytes("MemAvailable", meminfo)
    needed = workload.memory_bytes + _HEADROOM_BYTES
    if available is not None and needed > available:
        message = (
            f"all processes together need {needed / 2**30:.1f} GiB of memory, but only {available / 2**30:.1f} GiB are "
            "available: use a smaller --total or smaller --blocks"
        )
        raise BenchError(message)


def steps(workload: Workload) -> int:
    """Pieces of work, as the driver counts them."""
    runs = 0
    if Kind.THROUGHPUT in workload.kinds:
        runs += sum(len(workload.throughput_cases(path)) * len(BESIDE[path]) for path in workload.paths)
    if Kind.LATENCY in workload.kinds:
        runs += sum(len(workload.latency_cases(path)) * 2 for path in workload.paths)
    if Kind.SCALE in workload.kinds:
        runs += len(workload.effort.links) + len(workload.effort.tensors)
    return runs * (workload.rounds + 1)


class Measured:
    """What has been found so far, also when something fails in between."""

    def __init__(self) -> None:
        self.throughputs: list[Throughput] = []
        self.latencies: list[Latency] = []
        self.scales: list[Scale] = []

    def report(self, workload: Workload, made_at: str) -> Report:
        """All of it, and where it was measured."""
        return Report(
            version=metadata.version("llm-datadist"),
            made_at=made_at,
            machine=fingerprint(),
            rounds=workload.rounds,
            throughputs=self.throughputs,
            latencies=self.latencies,
            scales=self.scales,
            command=workload.command,
        )

    def measure(self, workload: Workload, show: Show) -> None:
        """Measure everything.

        Raises:
            BenchError: see ``driver.run``.
            RuntimeError: see ``scales.planning``.
        """
        plan = driver.Plan(rounds=workload.rounds)
        if Kind.THROUGHPUT in workload.kinds:
            for path in workload.paths:
                self._throughput(workload.throughput_cases(path), plan, show)
        if Kind.LATENCY in workload.kinds:
            for path in workload.paths:
                self._latency(workload.latency_cases(path), workload.effort.calls, plan, show)
        if Kind.SCALE in workload.kinds:
            self._scale(workload, plan, show)

    def _throughput(self, measured: Sequence[Case], plan: driver.Plan, show: Show) -> None:
        for case in measured:
            show.step(_short(case))
            found = driver.run([case], _programs(BESIDE[case.path]), plan, _advance(show))
            self.throughputs += found
            show.say(_throughput_line(Row(case, {each.contestant: each for each in found})))

    def _latency(self, measured: Sequence[Case], calls: int, plan: driver.Plan, show: Show) -> None:
        for case in measured:
            show.step(f"latency of {_short(case)}")
            for found in driver.latency([case], _programs(BESIDE[case.path][:2]), plan, calls, _advance(show)):
                seconds = [round(each, _CLOCK_DIGITS) for each in found.seconds]
                self.latencies.append(Latency(case, found.contestant, seconds))
                show.say(f"latency of {_short(case)}: {NAMES[found.contestant]} {format_seconds(found.quantile(0.5))}")

    def _scale(self, workload: Workload, plan: driver.Plan, show: Show) -> None:
        effort, path = workload.effort, workload.paths[0]
        if _PLANNED_PATH in workload.paths:
            show.step("planning")
            self._add_scale(scales.planning(effort.spans, plan.rounds), show)
        show.step("links")
        with_links = [Program.ours("--links", str(count)) for count in effort.links]
        pulls = driver.latency([small_pull(path)], with_links, plan, effort.calls, _advance(show))
        medians = [each.quantile(0.5) * 1e6 for each in pulls]
        self._add_scale(Scale(f"links that are up, over {path}", "µs a small pull", list(effort.links), medians), show)
        show.step("tensors")
        found = driver.run(workload.tensor_cases(), _programs([Contestant.OURS]), plan, _advance(show))
        speeds = [each.gb_per_s for each in found]
        self._add_scale(Scale(f"tensors, over {path}", "GB/s of pull_blocks", list(effort.tensors), speeds), show)

    def _add_scale(self, scale: Scale, show: Show) -> None:
        self.scales.append(scale)
        figures = ", ".join(f"{x:,}: {format_number(y)}" for x, y in zip(scale.x, scale.y, strict=True))
        show.say(f"{scale.unit} by {scale.name}: {figures}")


def _programs(contestants: Sequence[Contestant]) -> list[Program]:
    return [Program.ours() if each is Contestant.OURS else Program.limit(each) for each in contestants]


def _advance(show: Show) -> Callable[[Step], None]:
    return lambda _: show.advance(1)


def _short(case: Case) -> str:
    model = f"{case.model} " if case.model else ""
    return f"{model}{case.operation} {case.path} {format_bytes(case.block_bytes)}"


def _throughput_line(row: Row) -> str:
    ours, share = row.ours, row.of_limit
    speed = f"{format_number(ours.gb_per_s)} GB/s" if ours else ""
    ratio = f", {format_number(share.median)} of the limit" if share else ""
    return f"{_short(row.case)}: {speed}{ratio}"
