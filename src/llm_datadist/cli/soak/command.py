"""``llm-datadist soak`` from options to exit code."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich import box
from rich.table import Table

from llm_datadist.cli.show import Show, open_console, print_problem
from llm_datadist.cli.soak.conduct import Soak
from llm_datadist.cli.soak.plan import Event, Operation
from llm_datadist.cli.soak.process import SoakError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from llm_datadist.cli.soak.conduct import Tally
    from llm_datadist.cli.soak.process import Usage

_NAME: Final = "soak"
_SAY_S: Final = 10.0
_MIN_ROUNDS: Final = 8
"""Fewer say nothing about what piles up."""
_SPARE_DESCRIPTORS: Final = 2
_SPARE_THREADS: Final = 16
"""Worker threads start when they are first needed, up to a bound; a leak is some a round."""
_SPARE_BYTES: Final = 16 << 20
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Trend:
    """One counter of the process that lives through all of it: medians of an early and a late part."""

    name: str
    early: float
    late: float
    spare: float

    @property
    def flat(self) -> bool:
        """Whether it does not grow."""
        return self.late <= self.early + self.spare


def trends(usages: Sequence[Usage]) -> list[Trend]:
    """What the counters do between the second and the last quarter of the rounds; the first one is for warming up."""
    quarter = len(usages) // 4
    early, late = usages[quarter : 2 * quarter], usages[-quarter:]
    counters = (
        ("descriptors", "descriptors", 1, _SPARE_DESCRIPTORS),
        ("threads", "threads", 1, _SPARE_THREADS),
        ("private MiB", "private_bytes", _MIB, _SPARE_BYTES / _MIB),
    )
    return [
        Trend(name, _median(early, field) / unit, _median(late, field) / unit, spare)
        for name, field, unit, spare in counters
    ]


def _median(usages: Sequence[Usage], field: str) -> float:
    return float(statistics.median(getattr(usage, field) for usage in usages))


def run(seconds: float, processes: int, seed: int) -> int:
    """Soak for so long and print what came of it.

    Returns:
        The exit code: 0 if every byte was right, nothing failed without a reason and nothing piled up, else 1.
    """
    out = open_console()
    show = Show(out, total=int(seconds))
    out.print(f"{processes} processes, seed {seed}", highlight=False)
    soak = Soak(processes, seed)
    problem: str | None = None
    try:
        with show.bar:
            show.say(f"process ids {', '.join(map(str, soak.pids))}")
            soak.start()
            _rounds(soak, show, seconds)
            soak.finish()
    except SoakError as error:
        problem = f"seed {seed}: {error}"
    finally:
        soak.kill()
    flat = _print_tables(out, soak.tally)
    if problem is not None:
        print_problem(_NAME, problem)
    elif not flat:
        print_problem(_NAME, "the first process uses more and more")
    return 0 if problem is None and flat else 1


def _rounds(soak: Soak, show: Show, seconds: float) -> None:
    begin = said = shown = time.monotonic()
    while (now := time.monotonic()) < begin + seconds:
        tally = soak.tally
        show.step(f"round {tally.rounds + 1}")
        soak.round()
        show.advance(int(now - begin) - int(shown - begin))
        shown = now
        if now - said >= _SAY_S:
            said = now
            show.say(_progress(tally, now - begin, seconds))


def _progress(tally: Tally, passed: float, seconds: float) -> str:
    usage = tally.usages[-1]
    return (
        f"{passed:.0f} of {seconds:.0f} s: {tally.rounds} rounds, {sum(tally.verified.values())} transfers verified, "
        f"{tally.compared / 1e9:.1f} GB compared, {tally.events[Event.KILL]} kills; descriptors {usage.descriptors}, "
        f"threads {usage.threads}, {usage.private_bytes / _MIB:.0f} MiB"
    )


def _print_tables(out: Console, tally: Tally) -> bool:
    operations = Table("operation", box=box.SIMPLE, pad_edge=False)
    for title in ("verified", "interrupted", "calls", "MB moved"):
        operations.add_column(title, justify="right")
    for operation in Operation:
        moved = f"{tally.bytes_moved[operation] / 1e6:,.1f}"
        counts = (tally.verified[operation], tally.interrupted[operation], tally.calls[operation])
        operations.add_row(operation.value, *(f"{count:,}" for count in counts), moved)
    events = Table("rounds", box=box.SIMPLE, pad_edge=False)
    events.add_column("count", justify="right")
    for event in Event:
        events.add_row(event.value, str(tally.events[event]))
    paths = ", ".join(f"{name} {count}" for name, count in sorted(tally.paths.items()))
    out.print(operations, events)
    out.print(f"calls by path: {paths or 'none'}", highlight=False)
    out.print(f"bytes compared: {tally.compared:,}", highlight=False)
    if tally.rounds < _MIN_ROUNDS:
        out.print(f"{tally.rounds} rounds: too few to tell whether anything piles up", highlight=False)
        return True
    counters = Table("the first process", box=box.SIMPLE, pad_edge=False)
    for title in ("early", "late", ""):
        counters.add_column(title, justify="right")
    found = trends(tally.usages)
    for trend in found:
        counters.add_row(trend.name, f"{trend.early:.0f}", f"{trend.late:.0f}", "flat" if trend.flat else "GROWS")
    out.print(counters)
    return all(trend.flat for trend in found)
