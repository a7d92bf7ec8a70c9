"""Which plots a report has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist.cli.bench import axes
from llm_datadist.cli.bench.bars import Bar, BarPlot, Category
from llm_datadist.cli.bench.results import Contestant
from llm_datadist.cli.bench.svg import Plot, Point, Series
from llm_datadist.cli.bench.units import format_bytes, format_count, format_number, format_seconds
from llm_datadist.cli.bench.views import NAMES, Extremes, extremes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llm_datadist.cli.bench.results import Latency, Scale, Throughput
    from llm_datadist.cli.bench.views import Group

_MARKS: Final = {
    Contestant.OURS: "circle",
    Contestant.LIMIT_PROCESS_VM: "square",
    Contestant.LIMIT_SOCKETS: "square",
    Contestant.LIMIT_MEMCPY: "diamond",
    Contestant.NIXL: "triangle",
    Contestant.NIXL_TCP: "triangle",
    Contestant.MOONCAKE_TCP: "diamond",
}
QUANTILES: Final = ((0.5, "p50"), (0.99, "p99"), (0.999, "p99.9"))
"""The marked ones."""
_CURVE_STEP: Final = 1 / 60
"""Curves need no more points than this share of a power of ten."""


def throughput(group: Group) -> Plot:
    """GB/s against block size, with the spread."""
    series = []
    for contestant in group.contestants:
        found = _results(group, contestant)
        points = tuple(_speed_point(each, extremes(each)) for each in found)
        series.append(Series(NAMES[contestant], contestant.value, _MARKS[contestant], points))
    tops = [point.high for each in series for point in each.points if point.high is not None]
    return Plot(
        f"Throughput: {group.title}",
        "Gigabytes a second against block size, one line a contestant, bands from the slowest to the fastest round. "
        "The table below has the figures.",
        _block_axis(group),
        axes.linear("GB/s", tops),
        tuple(series),
    )


def cpu(group: Group) -> Plot:
    """CPU seconds per GB against block size."""
    series = []
    for contestant in group.contestants:
        found = _results(group, contestant)
        points = tuple(
            Point(
                each.case.block_bytes,
                each.cpu_s_per_gb,
                f"{format_bytes(each.case.block_bytes)}: {format_number(each.cpu_s_per_gb)} CPU seconds per GB",
            )
            for each in found
        )
        series.append(Series(NAMES[contestant], contestant.value, _MARKS[contestant], points))
    return Plot(
        f"CPU time: {group.title}",
        "CPU seconds that one gigabyte costs in both processes together, against block size. "
        "The table below has the figures.",
        _block_axis(group),
        axes.linear("CPU seconds per GB", [point.y for each in series for point in each.points]),
        tuple(series),
    )


def shapes(group: Group) -> BarPlot:
    """GB/s of what differs in more than its block size, such as the caches of models, with the spread."""
    categories = tuple(
        Category(row.label, tuple(_bar(row.results[each]) for each in group.contestants if each in row.results))
        for row in group.rows
    )
    tops = [bar.high for category in categories for bar in category.bars]
    return BarPlot(
        f"Throughput: {group.title}",
        "Gigabytes a second, one bar a contestant, strokes from the slowest to the fastest round. "
        "The table below has the figures.",
        axes.linear("GB/s", tops),
        categories,
    )


def latency(title: str, found: Sequence[Latency]) -> Plot:
    """Time of a call against the share of calls that took no longer."""
    return Plot(
        f"Latency: {title}",
        "Time of one call against the share of calls that took no longer, with p50, p99 and p99.9 marked. "
        "The table below has the figures.",
        axes.nines("share of calls that took at most so long", max(len(each.seconds) for each in found)),
        axes.times("time of one call", [second for each in found for second in each.seconds]),
        tuple(
            Series(
                NAMES[each.contestant],
                each.contestant.value,
                _MARKS[each.contestant],
                tuple(_quantile_points(each, labelled=number == 0)),
                tuple(_curve(each)),
            )
            for number, each in enumerate(found)
        ),
    )


def scale(found: Scale) -> Plot:
    """How a cost grows."""
    points = tuple(
        Point(x, y, f"{format_count(x)}: {format_number(y)} {found.unit}")
        for x, y in sorted(zip(found.x, found.y, strict=True))
    )
    return Plot(
        f"{found.unit} against {found.name}",
        f"{found.unit} against the number of {found.name}. The table below has the figures.",
        axes.measured(found.name, found.x, format_count),
        axes.linear(found.unit, found.y),
        (Series(NAMES[Contestant.OURS], Contestant.OURS.value, _MARKS[Contestant.OURS], points),),
    )


def _results(group: Group, contestant: Contestant) -> list[Throughput]:
    return [row.results[contestant] for row in group.rows if contestant in row.results]


def _block_axis(group: Group) -> axes.Axis:
    return axes.measured("block size", [row.case.block_bytes for row in group.rows], format_bytes)


def _speed_point(result: Throughput, spread: Extremes) -> Point:
    text = f"{format_bytes(result.case.block_bytes)}: {_speed(result, spread)}"
    return Point(result.case.block_bytes, result.gb_per_s, text, spread.low, spread.high)


def _speed(result: Throughput, spread: Extremes) -> str:
    rounds = f"{format_number(spread.low)} to {format_number(spread.high)}"
    return f"{format_number(result.gb_per_s)} GB/s ({rounds})"


def _bar(result: Throughput) -> Bar:
    text = f"{NAMES[result.contestant]} {format_number(result.gb_per_s)}"
    spread = extremes(result)
    return Bar(text, result.contestant.value, result.gb_per_s, spread.low, spread.high)


def _quantile_points(found: Latency, *, labelled: bool) -> Iterator[Point]:
    for share, name in QUANTILES:
        seconds = found.quantile(share)
        text = f"{name} {format_seconds(seconds)}"
        yield Point(share, seconds, text, label=text if labelled else "")


def _curve(found: Latency) -> Iterator[tuple[float, float]]:
    """(share, seconds) along the distribution, no denser than can be seen."""
    ordered = sorted(found.seconds)
    count, last = len(ordered), -1.0
    for rank, seconds in enumerate(ordered):
        share = rank / count
        place = axes.nines_place(share)
        if place - last >= _CURVE_STEP or rank == count - 1:
            yield share, seconds
            last = place
    if last < axes.nines_place(QUANTILES[-1][0]):
        yield QUANTILES[-1][0], ordered[-1]
