"""Transfers as OpenTelemetry spans: ``datadist.observe(OtelSpans())``. Needs the extra ``otel``.

Both sides of a transfer are in one trace, whose id follows from that of the transfer: nothing else has to be carried
over. A span that is current where the transfer is called becomes a link of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opentelemetry import trace
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from llm_datadist.observe.events import SUCCESS

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer, TracerProvider

    from llm_datadist.observe.events import Served, Transfer

_NAME: Final = "llm_datadist"


class OtelSpans:
    """Makes a span of each transfer, with one child for each phase, and of each request that is served."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        """``provider`` is where spans go; None: the global one."""
        self._tracer: Tracer = trace.get_tracer(_NAME, tracer_provider=provider)

    def transfer(self, event: Transfer) -> None:
        """See ``Observer.transfer``."""
        caller = trace.get_current_span().get_span_context()
        span = self._tracer.start_span(
            event.operation,
            context=_trace_of(event.transfer_id),
            kind=SpanKind.CLIENT,
            links=[Link(caller)] if caller.is_valid else [],
            start_time=event.start_ns,
            attributes={
                "llm_datadist.transfer_id": f"{event.transfer_id:016x}",
                "llm_datadist.peer": str(event.peer),
                "llm_datadist.path": event.path,
                "llm_datadist.fallbacks": [str(each) for each in event.fallbacks],
                "llm_datadist.bytes": event.num_bytes,
                "llm_datadist.status": event.status,
            },
        )
        if event.status != SUCCESS:
            span.set_status(Status(StatusCode.ERROR, event.status))
        inside = trace.set_span_in_context(span)
        for step in event.steps:
            self._tracer.start_span(step.phase.value, context=inside, start_time=step.start_ns).end(step.end_ns)
        span.end(event.end_ns)

    def served(self, event: Served) -> None:
        """See ``Observer.served``."""
        span = self._tracer.start_span(
            f"serve {event.operation}",
            context=_trace_of(event.transfer_id),
            kind=SpanKind.SERVER,
            start_time=event.start_ns,
            attributes={
                "llm_datadist.transfer_id": f"{event.transfer_id:016x}",
                "llm_datadist.peer": str(event.peer),
                "llm_datadist.bytes": event.num_bytes,
                "llm_datadist.status": event.status,
            },
        )
        if event.status != "ok":
            span.set_status(Status(StatusCode.ERROR, event.status))
        span.end(event.end_ns)


def _trace_of(transfer_id: int) -> Context | None:
    """The context that all spans of a transfer, on both sides, are made in."""
    if not transfer_id:
        return None
    parent = SpanContext(
        trace_id=transfer_id << 64 | transfer_id,
        span_id=transfer_id,
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
    return trace.set_span_in_context(NonRecordingSpan(parent))
