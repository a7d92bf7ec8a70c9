"""Metrics and traces: what observers are told, what they make of it."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from llm_datadist.observe import (
    Fallback,
    FallbackReason,
    Family,
    Histogram,
    Kind,
    Metrics,
    Phase,
    Recorder,
    Sample,
    Served,
    Step,
    TraceFile,
    Transfer,
    TransferLog,
)
from llm_datadist.observe.events import SUCCESS
from llm_datadist.observe.metrics import SECONDS_BOUNDS
from llm_datadist.observe.otel import OtelSpans
from llm_datadist.observe.prometheus import Collector
from llm_datadist.observe.trace_file import MAX_EVENTS, join
from llm_datadist.status import LLMException, LLMStatusCode
from llm_datadist.utils.deadline import Deadline
from loopback_kit import loopback_config, started
from net_helpers import logged
from test_interruptions import STEPS, at_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llm_datadist import LLMDataDist

MS = 10**6
EVENTS = 4
"""Of a trace, for one ``transfer()``: itself, its two steps, its connection with the other side."""
LEFT = (Fallback("mapped", FallbackReason.OUT_OF_REACH), Fallback("process_vm", FallbackReason.DENIED))
BOARD = Path(__file__).parents[1] / "deploy" / "grafana" / "llm-datadist.json"


def transfer(start_ns: int = 10**18, took_ns: int = 5 * MS, **changes: object) -> Transfer:
    copy = Step(Phase.COPY, start_ns + MS, start_ns + took_ns)
    fields = {
        "transfer_id": 7,
        "operation": "pull_blocks",
        "peer": 3,
        "path": "tcp",
        "status": "LLM_SUCCESS",
        "num_bytes": 4096,
        "start_ns": start_ns,
        "end_ns": start_ns + took_ns,
        "steps": (Step(Phase.PLAN, start_ns, start_ns + MS), copy),
    }
    return Transfer(**{**fields, **changes})  # type: ignore[arg-type]


def served(start_ns: int = 10**18, **changes: object) -> Served:
    fields = {
        "transfer_id": 7,
        "operation": "read",
        "peer": 2,
        "status": "ok",
        "num_bytes": 4096,
        "start_ns": start_ns + MS,
        "end_ns": start_ns + 4 * MS,
    }
    return Served(**{**fields, **changes})  # type: ignore[arg-type]


def family(metrics: Metrics, name: str) -> Family:
    return next(each for each in metrics.families() if each.name == f"llm_datadist_{name}")


@contextlib.contextmanager
def loopback_engine() -> Iterator[LLMDataDist]:
    config = loopback_config(accessible=True)
    config.metrics = True
    with started(config) as datadist:
        yield datadist


class Kept:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self.requests: list[Served] = []

    def transfer(self, event: Transfer) -> None:
        self.transfers.append(event)

    def served(self, event: Served) -> None:
        self.requests.append(event)


class TestRecorder:
    def test_a_watched_transfer_is_told_with_its_steps(self) -> None:
        recorder, kept = Recorder(), Kept()
        recorder.add(kept)
        with recorder.watch(Deadline.after(9, 9), "push_blocks", 4) as watch:
            watch.enter(Phase.PLAN)
            watch.enter(Phase.COPY)
            watch.over("mapped", 77)
        (event,) = kept.transfers
        assert (event.transfer_id, event.operation, event.peer) == (9, "push_blocks", 4)
        assert (event.path, event.num_bytes, event.status) == ("mapped", 77, "LLM_SUCCESS")
        plan, copy = event.steps
        assert (plan.phase, copy.phase) == (Phase.PLAN, Phase.COPY)
        assert event.start_ns <= plan.start_ns <= plan.end_ns == copy.start_ns <= copy.end_ns == event.end_ns

    def test_time_in_the_queue_is_a_step_of_its_own(self) -> None:
        recorder, kept = Recorder(), Kept()
        recorder.add(kept)
        deadline = Deadline.after(9, 9)
        with recorder.watch(deadline, "pull_blocks", 4) as watch:
            watch.enter(Phase.COPY)
            deadline.queued_s = 1e-9
        (event,) = kept.transfers
        queue, copy = event.steps
        assert (queue.phase, copy.phase) == (Phase.QUEUE, Phase.COPY)
        assert queue.end_ns - queue.start_ns == 1
        assert queue.end_ns == copy.start_ns

    @pytest.mark.parametrize(
        ("error", "status"),
        [
            (LLMException("no", status_code=LLMStatusCode.LLM_TIMEOUT), "LLM_TIMEOUT"),
            (TypeError("no"), "LLM_FAILED"),
            (KeyboardInterrupt(), "LLM_FAILED"),
        ],
    )
    def test_a_failure_is_told_and_goes_on(self, error: BaseException, status: str) -> None:
        recorder, kept = Recorder(), Kept()
        recorder.add(kept)
        watch = recorder.watch(Deadline.after(1), "pull_cache", 4)
        watch.enter(Phase.LOOKUP)
        with pytest.raises(type(error)), watch:
            raise error
        assert [event.status for event in kept.transfers] == [status]

    def test_without_observers_nothing_is_measured(self) -> None:
        recorder = Recorder()
        assert not recorder.active
        assert recorder.watch(Deadline.after(1), "pull_cache", 4) is recorder.watch(Deadline.after(1), "push_cache", 5)
        with recorder.watch(Deadline.after(1), "pull_cache", 4) as watch:
            assert not watch.active

    def test_an_observer_that_fails_harms_nobody(self) -> None:
        class Broken:
            def transfer(self, event: Transfer) -> None:
                raise RuntimeError(event)

            served = transfer

        recorder, kept = Recorder(), Kept()
        recorder.add(Broken())  # type: ignore[arg-type]
        recorder.add(kept)
        recorder.transfer(transfer())
        recorder.served(served())
        assert len(kept.transfers) == len(kept.requests) == 1

    def test_a_small_transfer_is_told_as_one_copy(self) -> None:
        recorder, kept = Recorder(), Kept()
        recorder.add(Metrics())
        recorder.add(kept)
        before = time.time_ns()
        recorder.short("pull_blocks", 4, "tcp", Deadline.after(9, 9), time.monotonic_ns() - MS, num_bytes=77)
        (event,) = kept.transfers
        assert (event.transfer_id, event.operation, event.peer) == (9, "pull_blocks", 4)
        assert (event.path, event.num_bytes, event.status) == ("tcp", 77, "LLM_SUCCESS")
        assert event.steps == (Step(Phase.COPY, event.start_ns, event.end_ns),)
        assert event.end_ns - event.start_ns >= MS
        assert abs(event.end_ns - before) < 60_000 * MS

    def test_a_short_one_may_have_queued_too(self) -> None:
        recorder, kept, metrics = Recorder(), Kept(), Metrics()
        recorder.add(metrics)
        recorder.add(kept)
        deadline = Deadline.after(9, 9)
        deadline.queued_s = MS / 1e9
        recorder.short("pull_blocks", 4, "tcp", deadline, time.monotonic_ns() - 2 * MS, num_bytes=77)
        (event,) = kept.transfers
        queue, copy = event.steps
        assert (queue.phase, copy.phase) == (Phase.QUEUE, Phase.COPY)
        assert (queue.start_ns, queue.end_ns - queue.start_ns) == (event.start_ns, MS)
        assert (queue.end_ns, copy.end_ns) == (copy.start_ns, event.end_ns)
        assert family(metrics, "transfers").value(operation="pull_blocks", path="tcp", status=SUCCESS) == 1
        phases = family(metrics, "transfer_phase_duration_seconds")
        counts = [phases.value(operation="pull_blocks", phase=phase).count for phase in ("queue", "copy")]
        assert counts == [1, 1]

    def test_a_small_transfer_counts_as_any_other(self) -> None:
        class ByEvents(Metrics):
            """Is told of events, as every observer but ``Metrics`` itself."""

        recorder, plain, by_events = Recorder(), Metrics(), ByEvents()
        recorder.add(plain)
        recorder.add(by_events)
        for operation, status in (("pull_blocks", SUCCESS), ("pull_blocks", "LLM_TIMEOUT"), ("push_blocks", SUCCESS)):
            begun_ns = time.monotonic_ns() - MS
            recorder.short(operation, 4, "tcp", Deadline.after(9, 9), begun_ns, status, num_bytes=77)
        assert plain.families() == by_events.families()
        assert family(plain, "transfers").value(operation="pull_blocks", path="tcp", status=SUCCESS) == 1
        recorder.transfer(transfer())
        copies = family(plain, "transfer_phase_duration_seconds").value(operation="pull_blocks", phase="copy")
        assert isinstance(copies, Histogram)
        assert copies.count == 3

    def test_who_was_removed_is_told_no_more(self) -> None:
        recorder, kept = Recorder(), Kept()
        recorder.add(kept)
        recorder.remove(kept)
        recorder.remove(kept)
        recorder.transfer(transfer())
        assert not kept.transfers


class TestMetrics:
    def test_counts_and_bytes_by_operation_path_and_status(self) -> None:
        metrics = Metrics()
        for event in (transfer(), transfer(), transfer(status="LLM_TIMEOUT"), transfer(operation="push_cache")):
            metrics.transfer(event)
        transfers = family(metrics, "transfers")
        assert transfers.value(operation="pull_blocks", path="tcp", status="LLM_SUCCESS") == 2
        assert transfers.value(operation="pull_blocks", path="tcp", status="LLM_TIMEOUT") == 1
        assert transfers.value(operation="pull_blocks", path="mapped", status="LLM_TIMEOUT") is None
        assert family(metrics, "transferred_bytes").value(operation="pull_blocks", path="tcp") == 2 * 4096

    def test_phases(self) -> None:
        metrics = Metrics()
        metrics.transfer(transfer(took_ns=5 * MS))
        copy = family(metrics, "transfer_phase_duration_seconds").value(operation="pull_blocks", phase="copy")
        assert isinstance(copy, Histogram)
        assert (copy.count, copy.total) == (1, pytest.approx(0.004))

    def test_paths_that_were_left(self) -> None:
        metrics = Metrics()
        for left in (LEFT, LEFT[:1], ()):
            metrics.transfer(transfer(fallbacks=left))
        left = family(metrics, "fallbacks")
        assert left.value(path="mapped", reason="out_of_reach") == 2
        assert left.value(path="process_vm", reason="denied") == 1
        assert left.value(path="mapped", reason="denied") is None

    def test_requests_of_peers(self) -> None:
        metrics = Metrics()
        metrics.served(served())
        metrics.served(served(status="stale"))
        assert family(metrics, "served_requests").value(operation="read", status="stale") == 1
        assert family(metrics, "served_bytes").value(operation="read") == 4096

    @pytest.mark.parametrize("size", ["small", "large"])
    def test_a_signal_handler_may_transfer_while_one_is_counted(self, size: str) -> None:
        for step in range(1, STEPS):
            metrics = Metrics()

            def count(metrics: Metrics = metrics) -> None:
                if size == "small":
                    metrics.copied("pull_blocks", "tcp", SUCCESS, 4096, MS)
                else:
                    metrics.transfer(transfer())

            if not at_step(step, count, count):
                break
            way = {"operation": "pull_blocks", "path": "tcp"}
            assert family(metrics, "transfers").value(**way, status=SUCCESS) == 2
            assert family(metrics, "transferred_bytes").value(**way) == 2 * 4096
            copies = family(metrics, "transfer_phase_duration_seconds").value(operation="pull_blocks", phase="copy")
            assert isinstance(copies, Histogram)
            assert copies.count == 2
        assert 1 < step < STEPS - 1

    def test_a_signal_handler_may_transfer_while_metrics_are_read(self) -> None:
        for step in range(1, STEPS):
            metrics = Metrics()
            metrics.transfer(transfer(steps=transfer().steps[:1]))
            if not at_step(step, lambda metrics=metrics: metrics.transfer(transfer()), metrics.families):
                break
            assert family(metrics, "transfers").samples[0].value == 2
        assert 1 < step < STEPS - 1

    @given(st.lists(st.integers(0, 20 * 10**9)))
    def test_every_duration_is_in_the_bucket_of_its_bound(self, nanoseconds: Sequence[int]) -> None:
        metrics = Metrics()
        for took in nanoseconds:
            metrics.transfer(transfer(start_ns=0, took_ns=took, steps=()))
        seen = family(metrics, "transfer_duration_seconds").value(operation="pull_blocks", path="tcp")
        if not nanoseconds:
            assert seen is None
            return
        assert isinstance(seen, Histogram)
        assert seen.total == pytest.approx(sum(nanoseconds) / 1e9)
        upto = 0
        for count, bound in zip(seen.counts, (*SECONDS_BOUNDS, float("inf")), strict=True):
            upto += count
            assert upto == sum(took / 1e9 <= bound for took in nanoseconds)


class Exported:
    """Stands for an ``LLMDataDist``."""

    def __init__(self, cluster_id: int, *extra: Family) -> None:
        self.cluster_id = cluster_id
        self._metrics = Metrics()
        self._metrics.transfer(transfer())
        self._metrics.served(served())
        self._extra = extra

    def metrics(self) -> tuple[Family, ...]:
        return (*self._metrics.families(), *self._extra)


class TestPrometheus:
    @pytest.fixture
    def text(self) -> str:
        links = Family("llm_datadist_links", "Links.", Kind.GAUGE, ("state",), (Sample(("linked",), 2),))
        registry = CollectorRegistry()
        registry.register(Collector(Exported(1, links), Exported(2)))
        return generate_latest(registry).decode()

    def test_what_it_says(self, text: str) -> None:
        samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for metric in text_string_to_metric_families(text)
            for sample in metric.samples
        }
        way = {("cluster", "2"), ("operation", "pull_blocks"), ("path", "tcp")}

        def read(name: str, *labels: tuple[str, str]) -> float:
            return samples[f"llm_datadist_{name}", frozenset({*way, *labels})]

        assert read("transfers_total", ("status", "LLM_SUCCESS")) == 1
        assert read("transfer_duration_seconds_count") == 1
        assert read("transfer_duration_seconds_bucket", ("le", "0.0025")) == 0
        assert read("transfer_duration_seconds_bucket", ("le", "0.005")) == 1
        assert samples["llm_datadist_links", frozenset({("cluster", "1"), ("state", "linked")})] == 2

    def test_it_follows_the_conventions(self, text: str) -> None:
        """What ``promtool check metrics`` looks for."""
        metrics = list(text_string_to_metric_families(text))
        assert metrics
        for metric in metrics:
            assert re.fullmatch(r"llm_datadist_[a-z][a-z0-9_]*", metric.name)
            assert metric.documentation.endswith(".")
            assert metric.type in ("counter", "gauge", "histogram")
            assert not re.search(r"_(ms|us|ns|milliseconds|kb|mb|total|count|sum|bucket)$", metric.name)
            assert metric.type != "histogram" or metric.name.endswith("_seconds")
            for sample in metric.samples:
                assert (metric.type == "counter") == sample.name.endswith("_total")
                assert "le" not in sample.labels or metric.type == "histogram"
        names = [metric.name for metric in metrics]
        assert len(names) == len(set(names))


def test_the_page_names_every_metric() -> None:
    with loopback_engine() as datadist:
        names = {each.name + "_total" * (each.kind is Kind.COUNTER) for each in datadist.metrics()}
    page = (BOARD.parents[2] / "docs" / "observing.md").read_text(encoding="utf-8")
    assert names == set(re.findall(r"`(llm_datadist_\w+)`", page))


def test_the_board_asks_for_metrics_that_exist() -> None:
    with loopback_engine() as datadist:
        names = {each.name for each in datadist.metrics()}
    asked = set(re.findall(r"llm_datadist_[a-z_]+", BOARD.read_text(encoding="utf-8")))
    assert asked
    assert {re.sub(r"_(total|bucket|sum|count)$", "", each) for each in asked} <= names


def test_the_log_has_a_line_for_each() -> None:
    with logged() as records:
        TransferLog().transfer(transfer())
        TransferLog().transfer(transfer(fallbacks=LEFT))
        TransferLog().transfer(transfer(path="", status="LLM_TIMEOUT", steps=()))
        TransferLog().served(served())
    name = f"transfer {7:016x}"
    left = ", not over mapped (out_of_reach), not over process_vm (denied)"
    assert [record.getMessage() for record in records] == [
        f"{name}: pull_blocks, cluster 3, over tcp: LLM_SUCCESS, 4096 bytes in 5.000 ms (plan 1.000, copy 4.000)",
        f"{name}: pull_blocks, cluster 3, over tcp{left}: LLM_SUCCESS, 4096 bytes in 5.000 ms (plan 1.000, copy 4.000)",
        f"{name}: pull_blocks, cluster 3, over no path: LLM_TIMEOUT, 4096 bytes in 5.000 ms ()",
        f"{name}: served a read of cluster 2: ok, 4096 bytes in 3.000 ms",
    ]


class TestTraceFile:
    def test_both_sides_in_one_file(self, tmp_path: Path) -> None:
        asker, owner = TraceFile("decode"), TraceFile("prefill")
        asker.transfer(transfer())
        owner.served(served())
        for name, each in (("a", asker), ("b", owner)):
            each.write(tmp_path / name)
        join([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
        events = json.loads((tmp_path / "both").read_text())["traceEvents"]
        slices = {event["name"]: event for event in events if event["ph"] == "X"}
        assert set(slices) == {"pull_blocks", "plan", "copy", "serve read"}
        assert slices["plan"]["dur"] + slices["copy"]["dur"] == slices["pull_blocks"]["dur"]
        assert slices["serve read"]["args"]["transfer_id"] == slices["pull_blocks"]["args"]["transfer_id"]
        flows = {event["ph"]: event["id"] for event in events if event["ph"] in "sf"}
        assert flows == {"s": f"{7:016x}", "f": f"{7:016x}"}
        assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"decode", "prefill"}

    def test_what_is_no_trace_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_text("[1]")
        with pytest.raises(ValueError, match="x is not a trace"):
            join([tmp_path / "x"], tmp_path / "y")

    def test_too_many_events_are_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert MAX_EVENTS >= 100_000
        monkeypatch.setattr("llm_datadist.observe.trace_file.MAX_EVENTS", 5)
        trace = TraceFile("x")
        trace.transfer(transfer())
        trace.transfer(transfer())
        assert trace.dropped == 4

    @pytest.mark.parametrize("most", [MAX_EVENTS, 0], ids=["kept", "dropped"])
    def test_a_signal_handler_may_transfer_while_one_is_kept(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
    ) -> None:
        monkeypatch.setattr("llm_datadist.observe.trace_file.MAX_EVENTS", most)
        for step in range(1, STEPS):
            trace = TraceFile("x")

            def record(trace: TraceFile = trace) -> None:
                trace.transfer(transfer())

            if not at_step(step, record, record):
                break
            assert self.kept(trace, tmp_path / "x") + trace.dropped == 2 * EVENTS
        assert 1 < step < STEPS - 1

    def test_a_signal_handler_may_transfer_while_a_trace_is_written(self, tmp_path: Path) -> None:
        for step in range(1, STEPS):
            trace = TraceFile("x")
            write = functools.partial(trace.write, tmp_path / "x")
            if not at_step(step, lambda trace=trace: trace.transfer(transfer()), write):
                break
            assert self.kept(trace, tmp_path / "x") == EVENTS
        assert 1 < step < STEPS - 1

    @staticmethod
    def kept(trace: TraceFile, path: Path) -> int:
        trace.write(path)
        return len(json.loads(path.read_text())["traceEvents"]) - 1  # the first names the process


class TestOtel:
    def test_both_sides_are_one_trace(self) -> None:
        kept = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(kept))
        spans = OtelSpans(provider)
        with provider.get_tracer("caller").start_as_current_span("request") as caller:
            spans.transfer(transfer())
        spans.served(served(status="stale"))
        found = {span.name: span for span in kept.get_finished_spans()}
        pull, serve = found["pull_blocks"], found["serve read"]
        assert pull.context.trace_id == serve.context.trace_id == found["copy"].context.trace_id
        assert found["copy"].parent.span_id == pull.context.span_id
        assert [link.context.span_id for link in pull.links] == [caller.get_span_context().span_id]
        assert (pull.kind, serve.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
        assert (pull.status.status_code, serve.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
        assert (pull.start_time, pull.end_time) == (transfer().start_ns, transfer().end_ns)
