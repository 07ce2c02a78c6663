"""Spans: alone knows how a span of ours is made with OpenTelemetry's SDK; loaded only where spans leave the process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)
from opentelemetry.trace import Span as SdkSpan

from worker.telemetry.names import SpanName
from worker.telemetry.traces import TRACEPARENT, TRACESTATE, Parent, Span

MOST_LINKS: Final = 128
"""As many as the SDK keeps of a span by default."""

_KINDS: Final = {
    SpanName.CONSUME: SpanKind.CONSUMER,
    SpanName.BATCH: SpanKind.CLIENT,
    SpanName.PUBLISH: SpanKind.PRODUCER,
}


class OpenTelemetrySpans:
    """Makes the spans of tickets. `tracer` keeps every span that it is asked for."""

    def __init__(self, tracer: Tracer, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracer = tracer
        self._now_ns = now_ns

    def consume(self, parent: Parent | None) -> Span:
        """A ticket's span, below the message's and linked with it.

        OpenTelemetry's conventions for messaging ask for the link, and allow the parent where a span is about a single
        message: so the ticket shows in the trace of whoever sent it.
        """
        if parent is None:
            return self.start(SpanName.CONSUME)
        sent = SpanContext(
            parent.trace_id,
            parent.span_id,
            is_remote=True,
            trace_flags=TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT),
            trace_state=TraceState(parent.state),
        )
        return self.start(SpanName.CONSUME, NonRecordingSpan(sent), [sent])

    def start(
        self,
        name: SpanName,
        parent: SdkSpan | None = None,
        links: Sequence[SpanContext] = (),
        start_ns: int | None = None,
    ) -> _Span:
        """Below `parent`, or in a trace of its own."""
        context = Context() if parent is None else set_span_in_context(parent, Context())
        kind = _KINDS.get(name, SpanKind.INTERNAL)
        made = self._tracer.start_span(name, context, kind, links=[Link(link) for link in links], start_time=start_ns)
        return _Span(self, made)

    def now_ns(self) -> int:
        return self._now_ns()


class _Span:
    """A Span. What comes after its end is left unsaid, since the SDK would log each time that it came too late."""

    __slots__ = ("_made", "_spans")

    def __init__(self, spans: OpenTelemetrySpans, made: SdkSpan) -> None:
        self._spans = spans
        self._made = made

    def set(self, attribute: str, value: str | bool | float) -> None:
        if self._made.is_recording():
            self._made.set_attribute(attribute, value)

    def fail(self, error: BaseException) -> None:
        if self._made.is_recording():
            self._made.set_status(_failed(error))

    def child(self, name: SpanName) -> Span:
        return self._spans.start(name, self._made)

    def call(self, name: SpanName, asking: Sequence[Span]) -> Span:
        theirs = [span for span in asking if isinstance(span, _Span)][:MOST_LINKS]
        made = self._spans.start(name, None, [span._made.get_span_context() for span in theirs])
        for span in theirs:
            span._link(made)
        return made

    def link(self, other: Span) -> None:
        if isinstance(other, _Span):
            self._link(other)
            other._link(self)

    def _link(self, other: _Span) -> None:
        if self._made.is_recording():
            self._made.add_link(other._made.get_span_context())

    def past(self, name: SpanName, seconds: float, error: BaseException | None = None) -> None:
        now_ns = self._spans.now_ns()
        made = self._spans.start(name, self._made, start_ns=now_ns - int(seconds * 1e9))
        if error is not None:
            made.fail(error)
        made._made.end(now_ns)

    def context(self) -> tuple[tuple[str, str], ...]:
        if not self._made.is_recording():
            return ()
        own = self._made.get_span_context()
        parent = (TRACEPARENT, f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}")
        return (parent, (TRACESTATE, own.trace_state.to_header())) if own.trace_state else (parent,)

    def end(self) -> None:
        if self._made.is_recording():
            self._made.end()


def _failed(error: BaseException) -> Status:
    return Status(StatusCode.ERROR, type(error).__qualname__.removeprefix("_"))
