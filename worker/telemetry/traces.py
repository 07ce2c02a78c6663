"""Traces: alone knows which tickets are traced, and how a trace passes from a message to the messages made of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from worker.errors import ConfigError
from worker.ports import Headers
from worker.telemetry.names import SpanName

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
DEFAULT_RATIO: Final = 0.01
"""Without OTEL_TRACES_SAMPLER: a span costs about as much as everything else that is done for a ticket."""

_SAMPLED: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]([0-9a-f])(?:-.*)?")
_PROPAGATOR: Final = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class Sampling:
    """Which tickets are traced: as their message says where `follow_parent`, else by chance."""

    ratio: float
    follow_parent: bool = True

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Sampling:
        """From OTEL_TRACES_SAMPLER and OTEL_TRACES_SAMPLER_ARG. Raises ConfigError."""
        name = environ.get("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        follow_parent, kind = name.startswith("parentbased_"), name.removeprefix("parentbased_")
        try:
            given = float(environ.get("OTEL_TRACES_SAMPLER_ARG") or DEFAULT_RATIO)
            ratio = {"always_on": 1.0, "always_off": 0.0, "traceidratio": given}[kind]
        except (KeyError, ValueError) as error:
            raise ConfigError(
                "OTEL_TRACES_SAMPLER must be always_on, always_off, traceidratio, or one of these behind "
                "`parentbased_`, and OTEL_TRACES_SAMPLER_ARG a number"
            ) from error
        if not 0.0 <= ratio <= 1.0:
            raise ConfigError("OTEL_TRACES_SAMPLER_ARG must be between 0 and 1")
        return cls(ratio, follow_parent)


class TicketSpan:
    """The span of one sampled ticket."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def set(self, attribute: str, value: str | bool | float) -> None:
        """`attribute` is one of `Attribute`."""
        self._span.set_attribute(attribute, value)

    def fail(self, error: BaseException) -> None:
        """Says the type only: a message may quote the ticket."""
        self._span.set_status(Status(StatusCode.ERROR, type(error).__qualname__))

    def carry(self, headers: Headers) -> Headers:
        """The headers for a message that was made of this ticket: its trace goes on in them."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(self._span))
        kept = tuple(header for header in headers if header[0] not in (TRACEPARENT, TRACESTATE))
        return kept + tuple((name, value.encode()) for name, value in carrier.items())

    def end(self) -> None:
        self._span.end()


class Tracing(Protocol):
    """Whether and how tickets are traced."""

    def begin(self, headers: Headers) -> TicketSpan | None:
        """A span for the ticket that came with these headers; None, at next to no cost, where it is not sampled."""


class NoTracing:
    """Traces nothing. A trace that a message brings along passes on with its other headers."""

    def begin(self, headers: Headers) -> TicketSpan | None:
        return None


class SampledTracing:
    """Decides before a span exists, which costs a hundredth of what a span costs that is then thrown away."""

    def __init__(self, tracer: Tracer, sampling: Sampling, chance: Callable[[], float]) -> None:
        """`tracer` keeps every span that it is asked for; `chance` is uniform in [0, 1)."""
        self._tracer = tracer
        self._sampling = sampling
        self._chance = chance

    def begin(self, headers: Headers) -> TicketSpan | None:
        parent: bytes | None = None
        for name, value in headers:
            if name == TRACEPARENT and value is not None:
                parent = value
        match = _SAMPLED.fullmatch(parent) if parent is not None else None
        if match is not None and self._sampling.follow_parent:
            if not int(match[1], 16) & 1:
                return None
        elif self._chance() >= self._sampling.ratio:
            return None
        carrier = {name: value.decode("ascii", "replace") for name, value in headers if value and name in _W3C}
        context = _PROPAGATOR.extract(carrier)
        return TicketSpan(self._tracer.start_span(SpanName.TICKET, context, SpanKind.CONSUMER))


_W3C: Final = frozenset({TRACEPARENT, TRACESTATE})
