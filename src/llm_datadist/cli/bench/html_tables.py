"""The tables of the HTML page: the very figures of each plot."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from llm_datadist.cli.bench.markup import Child, tag
from llm_datadist.cli.bench.plots import QUANTILES
from llm_datadist.cli.bench.units import format_count, format_number, format_seconds
from llm_datadist.cli.bench.views import NAMES, extremes, groups, latencies

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from xml.etree.ElementTree import Element

    from llm_datadist.cli.bench.results import Contestant, Latency, Ratio, Report, Scale, Throughput
    from llm_datadist.cli.bench.views import Group, Row

_NOTHING: Final = "-"


def glance(report: Report) -> Element | None:
    """The best of each group and the latencies of the library; None if there are neither."""
    rows = [row for group in groups(report.throughputs) if (row := _best(group))]
    rows += [_typical(title, found) for title, found in latencies(report.latencies)]
    return _table("What", ["Result", "Remarks"], rows, class_="words") if rows else None


def _best(group: Group) -> list[Child] | None:
    rows = [(row, row.ours) for row in group.rows]
    found = [(ours.gb_per_s, row) for row, ours in rows if ours]
    if not found:
        return None
    speed, best = max(found, key=lambda each: each[0])
    remarks = [f"at {best.label}"]
    ratios = [each.median for row in group.rows if (each := row.of_limit)]
    if ratios:
        ends = dict.fromkeys((format_number(min(ratios)), format_number(max(ratios))))
        remarks.append(f"{' to '.join(ends)} of the limit")
    return [group.title, tag("strong", f"{format_number(speed)} GB/s"), "; ".join(remarks)]


def _typical(title: str, found: Sequence[Latency]) -> list[Child]:
    first, *others = found
    remarks = [f"p50; p99 {format_seconds(first.quantile(0.99))}"]
    remarks += [f"p50 of {NAMES[each.contestant]} {format_seconds(each.quantile(0.5))}" for each in others]
    return [title, tag("strong", format_seconds(first.quantile(0.5))), "; ".join(remarks)]


def throughput_table(group: Group) -> Element:
    """All contestants beside each other, one row a case; how far the first is from its limit right behind it."""
    shown = group.contestants
    heads = [
        tag("tr", _head("Shape" if group.is_model else "Block size", rowspan="2"), *_over(shown)),
        tag("tr", *(_head(text) for _ in shown for text in ("GB/s", "CPU s/GB"))),
    ]
    rows = [_cells([row.label, *_throughput_cells(row, shown)]) for row in group.rows]
    return _framed(heads, rows)


def _over(shown: Sequence[Contestant]) -> list[Element]:
    first, *others = (_head(NAMES[contestant], colspan="2") for contestant in shown)
    return [first, _head("Of limit", rowspan="2"), *others]


def _throughput_cells(row: Row, shown: Sequence[Contestant]) -> Iterable[Child]:
    first, *others = (_speed_and_cpu(row.results.get(contestant)) for contestant in shown)
    yield from first
    yield _share(row.of_limit)
    yield from itertools.chain(*others)


def _speed_and_cpu(result: Throughput | None) -> tuple[Child, Child]:
    return (_speed(result), format_number(result.cpu_s_per_gb)) if result else (_NOTHING, _NOTHING)


def _speed(result: Throughput) -> Element:
    spread = extremes(result)
    return _with_range(format_number(result.gb_per_s), spread.low, spread.high)


def _share(share: Ratio | None) -> Child:
    return _NOTHING if share is None else _with_range(format_number(share.median), share.low, share.high)


def _with_range(text: str, low: float, high: float) -> Element:
    return tag("span", text, " ", tag("small", f"{format_number(low)}..{format_number(high)}"))


def latency_table(found: Sequence[Latency]) -> Element:
    """Quantiles, one row a contestant."""
    rows = [
        [
            NAMES[each.contestant],
            format_count(len(each.seconds)),
            *(format_seconds(each.quantile(share)) for share, _ in QUANTILES),
            format_seconds(min(each.seconds)),
            format_seconds(max(each.seconds)),
        ]
        for each in found
    ]
    return _table("who", ["calls", *(name for _, name in QUANTILES), "fastest", "slowest"], rows)


def scale_table(found: Scale) -> Element:
    """Two columns."""
    rows = [[format_count(x), format_number(y)] for x, y in sorted(zip(found.x, found.y, strict=True))]
    return _table(found.name, [found.unit], rows)


def machine_table(report: Report) -> Element:
    """Everything that the figures depend on."""
    machine = report.machine
    facts = [
        ("Processor", machine.cpu),
        ("Cores", format_count(machine.cores)),
        ("Memory", f"{format_number(machine.memory_bytes / 2**30)} GiB"),
        ("Kernel", machine.kernel),
        ("Transparent huge pages", machine.huge_pages),
        ("Python", machine.python),
        ("llm-datadist", report.version),
        ("Measured at", report.made_at),
        ("Rounds", format_count(report.rounds)),
    ]
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in facts]
    return tag("div", tag("table", tag("tbody", *rows), class_="facts"), class_="scroll")


def _table(first: str, columns: Sequence[str], rows: Iterable[Sequence[Child]], **attributes: str) -> Element:
    heads = [tag("tr", _head(first), *(_head(column) for column in columns))]
    return _framed(heads, [_cells(row) for row in rows], **attributes)


def _framed(heads: Sequence[Element], rows: Sequence[Element], **attributes: str) -> Element:
    """Wide tables scroll by themselves, also by keyboard."""
    table = tag("table", tag("thead", *heads), tag("tbody", *rows), **attributes)
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label="Figures")


def _head(text: str, **attributes: str) -> Element:
    return tag("th", text, scope="colgroup" if "colspan" in attributes else "col", **attributes)


def _cells(row: Sequence[Child]) -> Element:
    first, *others = row
    return tag("tr", tag("th", first, scope="row"), *(tag("td", each) for each in others))
