"""A report as tables on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich import box
from rich.table import Table
from rich.text import Text

from llm_datadist.cli.bench.plots import QUANTILES
from llm_datadist.cli.bench.results import Contestant
from llm_datadist.cli.bench.units import format_count, format_number, format_seconds
from llm_datadist.cli.bench.views import NAMES, extremes, groups, latencies

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llm_datadist.cli.bench.results import Latency, Report, Scale, Throughput
    from llm_datadist.cli.bench.views import Group, Row

_NOTHING: Final = "-"
_MIN_FIRST: Final = 8
"""A terminal that is too narrow may cut figures, not what they belong to."""


NOTE: Final = (
    "GB/s: median of 10^9 bytes a second, through the public API. limit: bare system calls on the same bytes in the "
    "same rounds. ratio: GB/s to the limit. rounds: lowest..highest of a round."
)
"""Printed below the tables."""


def tables(report: Report) -> Iterator[Table]:
    """One table a kind of case, one for latencies, one a scale curve; none for what was not measured."""
    for group in groups(report.throughputs):
        yield _throughput(group)
    if report.latencies:
        yield _latency([one for _, found in latencies(report.latencies) for one in found])
    for scale in report.scales:
        yield _scale(scale)


def _throughput(group: Group) -> Table:
    bounds = {row.limit.contestant for row in group.rows if row.limit}
    others = [each for each in group.contestants if each not in bounds | {Contestant.OURS}]
    first = "shape" if group.is_model else "block"
    names = [NAMES[contestant] for contestant in others]
    table = _table(group.title, first, "GB/s", "rounds", "limit", "ratio", "rounds", "CPU s/GB", *names)
    for row in group.rows:
        table.add_row(row.label, *_ours(row), *(_speed(row.results.get(contestant)) for contestant in others))
    return table


def _ours(row: Row) -> list[str]:
    ours, share = row.ours, row.of_limit
    spread = extremes(ours) if ours else None
    return [
        _speed(ours),
        _range(spread.low, spread.high) if spread else "",
        _speed(row.limit),
        format_number(share.median) if share else _NOTHING,
        _range(share.low, share.high) if share else "",
        format_number(ours.cpu_s_per_gb) if ours else _NOTHING,
    ]


def _speed(result: Throughput | None) -> str:
    return format_number(result.gb_per_s) if result else _NOTHING


def _range(low: float, high: float) -> str:
    return f"{format_number(low)}..{format_number(high)}"


def _latency(found: Sequence[Latency]) -> Table:
    table = _table("latency", "call", "path", "who", "calls", *(name for _, name in QUANTILES))
    for each in found:
        quantiles = [format_seconds(each.quantile(share)) for share, _ in QUANTILES]
        calls = format_count(len(each.seconds))
        table.add_row(each.case.operation, each.case.path, NAMES[each.contestant], calls, *quantiles)
    return table


def _scale(scale: Scale) -> Table:
    table = _table(f"scale: {scale.unit}", scale.name, scale.unit)
    for x, y in sorted(zip(scale.x, scale.y, strict=True)):
        table.add_row(format_count(x), format_number(y))
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False
    )
    table.add_column(first, overflow="fold", min_width=_MIN_FIRST)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
