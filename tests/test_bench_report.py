"""What a benchmark report looks like: the page is well-formed whatever the report says, and has every figure."""

from __future__ import annotations

import base64
import io
import itertools
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from llm_datadist.cli.bench.html import page
from llm_datadist.cli.bench.plots import QUANTILES
from llm_datadist.cli.bench.results import (
    Case,
    Contestant,
    Latency,
    Machine,
    Memory,
    Order,
    Report,
    Scale,
    Throughput,
    ratio,
)
from llm_datadist.cli.bench.table import tables
from llm_datadist.cli.bench.units import format_bytes, format_count, format_number, format_seconds
from llm_datadist.cli.bench.views import NAMES, extremes, groups, latencies

VOID = {"meta", "br", "hr", "img", "link", "input"}
SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert(1)</script> & \"quoted\" 'text' ]]> \x00\x1f é 漢"

text = st.text(max_size=30) | st.just(EVIL)
seconds = st.floats(1e-9, 1e4)
rounds = st.integers(1, 4)
cases = st.builds(
    Case,
    operation=st.sampled_from(["pull_blocks", "push_blocks", "transfer_cache_async"]),
    path=st.sampled_from(["process_vm", "mapped", "tcp"]),
    tensors=st.integers(1, 100),
    blocks=st.integers(1, 10_000),
    block_bytes=st.integers(1, 1 << 24),
    order=st.sampled_from(Order),
    memory=st.sampled_from(Memory),
    model=st.just("") | text,
)


@st.composite
def throughputs(draw, count):
    """Of one case, all with as many rounds."""
    case = draw(cases)
    who = draw(st.lists(st.sampled_from(Contestant), unique=True, max_size=4))
    each = st.lists(seconds, min_size=count, max_size=count)
    return [Throughput(case, contestant, draw(each), draw(each)) for contestant in who]


@st.composite
def reports(draw):
    """Any report that a run can make, with any text in it."""
    count = draw(rounds)
    latency = st.builds(Latency, cases, st.sampled_from(Contestant), st.lists(seconds, min_size=1, max_size=50))
    points = st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 1e6)), max_size=6)
    scale = st.builds(
        lambda name, unit, xy: Scale(name, unit, [x for x, _ in xy], [y for _, y in xy]), text, text, points
    )
    machine = st.builds(Machine, text, st.integers(1, 512), st.integers(0, 1 << 45), text, text, text)
    return Report(
        version=draw(text),
        made_at=draw(text),
        machine=draw(machine),
        rounds=count,
        throughputs=list(itertools.chain(*draw(st.lists(throughputs(count), max_size=4)))),
        latencies=draw(st.lists(latency, max_size=4)),
        scales=draw(st.lists(scale, max_size=3)),
        command=draw(text),
    )


class Checker(HTMLParser):
    """Demands that elements are closed in order; keeps the text, the ids, and what is loaded from where."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [found[name] or "" for name in ("href", "src", "xlink:href") if name in found]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.words)


def drawings(html: str) -> list[ET.Element]:
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def elements(drawing: ET.Element, kind: str) -> list[ET.Element]:
    """Those of a class."""
    return [each for each in drawing.iter() if kind in each.get("class", "").split()]


def figures(report: Report) -> set[str]:
    """Every number that a reader wants to find."""
    wanted = {format_number(y) for scale in report.scales for y in scale.y}
    wanted |= {format_count(x) for scale in report.scales for x in scale.x}
    for group in groups(report.throughputs):
        for row in group.rows:
            wanted.add(format_bytes(row.case.block_bytes))
            for each in row.results.values():
                spread = extremes(each)
                wanted |= {format_number(each.gb_per_s), format_number(each.cpu_s_per_gb), NAMES[each.contestant]}
                wanted.add(f"{format_number(spread.low)}..{format_number(spread.high)}")
            if row.ours and row.limit:
                share = ratio(row.ours, row.limit)
                wanted |= {format_number(share.median), f"{format_number(share.low)}..{format_number(share.high)}"}
    for _, found in latencies(report.latencies):
        wanted |= {format_seconds(each.quantile(share)) for each in found for share, _ in QUANTILES}
    return wanted


@given(reports())
@settings(max_examples=60, deadline=None)
def test_any_report_makes_a_well_formed_page_with_every_figure(report):
    html = page(report)
    html.encode("utf-8")
    checked = Checker(html)
    assert all(figure in checked.text for figure in figures(report))
    assert len(set(checked.ids)) == len(checked.ids)
    assert "script" not in checked.tags
    assert all(link.startswith("data:application/json;base64,") for link in checked.links)
    assert "http://" not in html.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "https://" not in html.replace(EVIL, "")
    for drawing in drawings(html):
        names = [drawing.find(f"{SVG}title"), drawing.find(f"{SVG}desc")]
        assert all(name is not None and name.text for name in names)
        assert drawing.get("aria-labelledby") == " ".join(name.get("id", "") for name in names if name is not None)
        assert "nan" not in ET.tostring(drawing, encoding="unicode").replace("nano", "")


def test_text_is_escaped():
    case = Case("pull_blocks", "tcp", 1, 1, 8, model=EVIL)
    machine = Machine(EVIL, 1, 1, EVIL, EVIL, EVIL)
    report = Report(EVIL, EVIL, machine, 1, [Throughput(case, Contestant.OURS, [1.0], [1.0])], [], [], EVIL)
    html = page(report)
    assert "<script" not in html
    shown = EVIL.translate({0: "\ufffd", 0x1F: "\ufffd"})
    assert Checker(html).text.count(shown) > 5
    assert len(drawings(html)) == 1


def test_nothing_measured():
    html = page(Report("1", "now", Machine("cpu", 1, 1, "k", "p", "h"), 5, [], [], []))
    assert "measured nothing" in Checker(html).text
    assert not drawings(html)


def example(rounds: int = 3) -> Report:
    """Two block sizes over process_vm, one over TCP, a model; with all that belongs to it."""

    def result(case: Case, who: Contestant, speed: float) -> Throughput:
        times = [case.total_bytes / 1e9 / (speed + 0.1 * number) for number in range(rounds)]
        return Throughput(case, who, times, [time / 2 for time in times])

    small = Case("pull_blocks", "process_vm", 2, 64, 4096)
    large = Case("pull_blocks", "process_vm", 2, 4, 1 << 20)
    tcp = Case("push_blocks", "tcp", 2, 4, 1 << 20)
    model = Case("pull_blocks", "tcp", 64, 16, 32 << 10, model="llama-3.1-8b")
    one = Case("pull_blocks", "process_vm", 2, 1, 32 << 10)
    return Report(
        "1.2.3",
        "2026-01-02T03:04:05Z",
        Machine("a processor", 8, 64 << 30, "6.1", "3.12.1", "madvise"),
        rounds,
        [
            result(large, Contestant.LIMIT_PROCESS_VM, 20),
            result(large, Contestant.OURS, 18),
            result(small, Contestant.OURS, 5),
            result(small, Contestant.LIMIT_PROCESS_VM, 6),
            result(small, Contestant.LIMIT_MEMCPY, 12),
            result(tcp, Contestant.OURS, 4),
            result(model, Contestant.OURS, 3),
        ],
        [Latency(one, Contestant.OURS, [(10 + number) * 1e-6 for number in range(100)])],
        [Scale("spans", "ns a span", [1000, 10_000], [31.5, 30.25])],
        "llm-datadist bench --quick",
    )


def test_rows_stand_in_the_order_of_block_sizes_beside_their_limit():
    first, _, model = groups(example().throughputs)
    assert [row.label for row in first.rows] == ["4 KiB", "1 MiB"]
    assert first.contestants == [Contestant.OURS, Contestant.LIMIT_PROCESS_VM, Contestant.LIMIT_MEMCPY]
    assert first.rows[0].of_limit.median == pytest.approx(5.1 / 6.1)
    assert first.is_curve
    assert model.is_model
    assert model.rows[0].label == "llama-3.1-8b pull_blocks (64 x 32 KiB)"
    assert model.rows[0].limit is None


def test_the_page_tells_how_to_read_and_repeat_it():
    shown = Checker(page(example())).text
    for words in ("llm-datadist bench --quick", "a processor", "6.1", "madvise", "2026-01-02T03:04:05Z", "1.2.3"):
        assert words in shown
    for kind in ("Higher is better", "CPU time: lower is better", "Lower and flatter is better", "Flat is good"):
        assert shown.count(kind) == 1


def test_plots_have_a_line_a_contestant_and_bars_where_there_is_nothing_to_connect():
    speed, cpu, tcp, model, latency, scale = drawings(page(example()))
    lines = {line.get("class") for line in elements(speed, "line")}
    assert lines == {"line limit_memcpy", "line limit_process_vm", "line llm_datadist"}
    assert len(elements(speed, "band")) == 3
    assert not elements(cpu, "band")
    assert len(elements(tcp, "bar")) == len(elements(model, "bar")) == 1
    assert [note.text for note in elements(latency, "note")] == ["p50 60.0 µs", "p99 109 µs", "p99.9 109 µs"]
    assert "spans" in "".join(scale.itertext())


def test_everything_drawn_lies_within_its_plot():
    for drawing in drawings(page(example())):
        _, _, width, height = map(float, drawing.get("viewBox", "").split())
        for path in drawing.iter(f"{SVG}path"):
            for command in re.findall(r"[ML](-?[\d.]+),(-?[\d.]+)", path.get("d", "")):
                x, y = map(float, command)
                assert 0 <= x <= width
                assert 0 <= y <= height


def test_the_page_holds_its_data_and_json_gives_the_report_back():
    report = example()
    (link,) = Checker(page(report)).links
    data = base64.b64decode(link.partition(",")[2])
    assert msgspec.json.decode(data, type=Report) == report


def printed(report: Report, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in tables(report):
        console.print(table)
    return console.file.getvalue()


def test_tables_on_the_terminal():
    shown = printed(example())
    assert re.search(r"4 KiB +5\.10 +5\.00\.\.5\.20 +6\.10 +0\.836 +0\.833\.\.0\.839 +0\.0980 +12\.1", shown)
    assert re.search(r"1 MiB +18\.1 .* 20\.1 +0\.900 .* -", shown)
    assert re.search(r"pull_blocks +process_vm +llm-datadist +100 +60\.0 µs +109 µs +109 µs", shown)
    assert re.search(r"10,000 +30\.2", shown)


@given(reports())
@settings(max_examples=30, deadline=None)
def test_any_report_can_be_printed(report):
    shown = printed(report, width=250)
    assert all(format_number(each.gb_per_s) in shown for each in report.throughputs)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0.00"), (0.9996, "1.00"), (0.0123456, "0.0123"), (12.345, "12.3"), (12345.6, "12,346"), (1e-7, "1.00e-07")],
)
def test_numbers_have_three_digits(value, shown):
    assert format_number(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(2e-9, "2.00 ns"), (0.9996e-3, "1,000 µs"), (1.5, "1.50 s"), (0, "0.00 ns")]
)
def test_times_have_a_fitting_unit(value, shown):
    assert format_seconds(value) == shown
