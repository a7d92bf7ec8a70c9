"""A report as one HTML page that needs nothing else: plots, the figures beside them, the machine, the raw data."""

from __future__ import annotations

import base64
import itertools
from importlib import resources
from typing import TYPE_CHECKING, Final

import msgspec

from llm_datadist.cli.bench import bars, plots, svg
from llm_datadist.cli.bench.html_tables import glance, latency_table, machine_table, scale_table, throughput_table
from llm_datadist.cli.bench.markup import document, tag
from llm_datadist.cli.bench.views import groups, latencies

if TYPE_CHECKING:
    from collections.abc import Iterator
    from xml.etree.ElementTree import Element

    from llm_datadist.cli.bench.results import Report
    from llm_datadist.cli.bench.views import Group

_STYLE: Final = "report.css"
_READ_THROUGHPUT: Final = (
    "Higher is better. The solid line is the library through its public API with default options. The dashed line is "
    "the limit: the same bytes moved by bare system calls with everything prepared beforehand, measured in turns with "
    "the library in the same rounds. Lines and bars are medians, bands and strokes reach from the slowest to the "
    "fastest round. The column “of limit” has the median throughput of the library over that of the limit, and behind "
    "it the lowest and the highest ratio of a round."
)
_READ_CPU: Final = (
    "CPU time: lower is better. User and system time of both processes together for each 10⁹ bytes that were moved."
)
_READ_LATENCY: Final = (
    "Lower and flatter is better. The further right, the rarer the call: half of all calls took at most the time at "
    "50 %, all but one in a thousand at most the time at 99.9 %."
)
_READ_SCALE: Final = "Flat is good: the cost of one does not depend on how many there are."
_UNIT_NOTE: Final = "GB are 10⁹ bytes, KiB and MiB are powers of two."


def page(report: Report) -> str:
    """The text of the page. All text of the report is escaped, whatever it is."""
    identifiers = (f"plot-{number}" for number in itertools.count(1))
    title = f"llm-datadist {report.version}: how fast this machine moves KV cache"
    sections = [
        _summary(report),
        *_throughput_sections(report, identifiers),
        *_latency_sections(report, identifiers),
        *_scale_sections(report, identifiers),
        _repeat(report),
    ]
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", resources.files(__package__).joinpath(_STYLE).read_text(encoding="utf-8")),
    )
    header = tag("header", tag("h1", title), tag("p", _subtitle(report), class_="muted"))
    return document(tag("html", head, tag("body", tag("main", header, *sections)), lang="en"))


def _subtitle(report: Report) -> str:
    machine = report.machine
    return f"{report.made_at} · {machine.cpu}, {machine.cores} cores, kernel {machine.kernel} · {_rounds(report)}"


def _rounds(report: Report) -> str:
    return f"{report.rounds} {'round' if report.rounds == 1 else 'rounds'}"


def _summary(report: Report) -> Element:
    findings = glance(report)
    if findings is None:
        return tag("section", tag("h2", "At a glance"), tag("p", "This run measured nothing."))
    return tag("section", tag("h2", "At a glance"), findings, tag("p", _UNIT_NOTE, class_="muted"))


def _throughput_sections(report: Report, identifiers: Iterator[str]) -> Iterator[Element]:
    for number, group in enumerate(groups(report.throughputs)):
        how_to_read = [tag("p", _READ_THROUGHPUT), tag("p", _READ_CPU)] if number == 0 else []
        yield tag(
            "section",
            tag("h2", f"Throughput: {group.title}"),
            *how_to_read,
            tag("div", *_throughput_figures(group, identifiers), class_="figures"),
            throughput_table(group),
        )


def _throughput_figures(group: Group, identifiers: Iterator[str]) -> Iterator[Element]:
    if group.is_curve:
        yield _figure(svg.draw(plots.throughput(group), next(identifiers)))
        yield _figure(svg.draw(plots.cpu(group), next(identifiers)))
    else:
        yield _figure(bars.draw(plots.shapes(group), next(identifiers)))


def _latency_sections(report: Report, identifiers: Iterator[str]) -> Iterator[Element]:
    parts = [
        _part(title, svg.draw(plots.latency(title, found), next(identifiers)), latency_table(found))
        for title, found in latencies(report.latencies)
    ]
    if parts:
        yield tag("section", tag("h2", "Latency"), tag("p", _READ_LATENCY), tag("div", *parts, class_="figures"))


def _scale_sections(report: Report, identifiers: Iterator[str]) -> Iterator[Element]:
    parts = [
        _part(plot.title, svg.draw(plot, next(identifiers)), scale_table(found))
        for found in report.scales
        for plot in [plots.scale(found)]
    ]
    if parts:
        yield tag("section", tag("h2", "Scale"), tag("p", _READ_SCALE), tag("div", *parts, class_="figures"))


def _part(title: str, drawing: Element, table: Element) -> Element:
    return tag("div", tag("h3", title), _figure(drawing), table)


def _figure(drawing: Element) -> Element:
    return tag("figure", drawing)


def _repeat(report: Report) -> Element:
    again = [
        tag("p", "The same measurement on another machine, or on this one later:"),
        tag("pre", tag("code", report.command)),
    ]
    data = base64.b64encode(msgspec.json.encode(report)).decode("ascii")
    return tag(
        "section",
        tag("h2", "Machine, and how to repeat it"),
        machine_table(report),
        *(again if report.command else ()),
        tag(
            "p",
            "Compare ratios to the limit rather than GB/s: another load on the machine slows both alike. The ",
            tag("a", "raw data of this page", href=f"data:application/json;base64,{data}", download="report.json"),
            " is what --json writes: every round and every call.",
        ),
    )
