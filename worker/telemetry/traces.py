"""Traces: alone knows which tickets are traced, which span is the current one, and how a trace passes from a message to
the messages and requests that are made of it.

OpenTelemetry is not known here: it is loaded only where spans leave the process (`spans.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from worker.errors import ConfigError
from worker.ports import Headers
from worker.telemetry.names import Attribute, SpanName

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
DEFAULT_RATIO: Final = 0.01
"""Without OTEL_TRACES_SAMPLER: a span costs about as much as everything else that is done for a ticket."""
MOST_STATE_BYTES: Final = 512
"""Of a tracestate, which W3C Trace Context (3.3.1.5) asks everybody to pass on; a longer one is dropped."""
MOST_PARENT_BYTES: Final = 512
"""A later version of traceparent may be longer than the 55 bytes of version 00."""

_PARENT: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[ -~]*)?")
_MEMBER: Final = re.compile(
    r"[ \t]*((?:[a-z][_0-9a-z\-*/]{0,255}|[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13}))="
    r"([ -+\--<>-~]{0,255}[!-+\--<>-~])[ \t]*"
)


class Span(Protocol):
    """One open span. Neither blocks nor raises, whatever becomes of the export."""

    def set(self, attribute: str, value: str | bool | float) -> None:
        """`attribute` is one of `Attribute`."""

    def fail(self, error: BaseException) -> None:
        """Says the type only: a message may quote the ticket."""

    def child(self, name: SpanName) -> Span:
        """A span below this one, from now on."""

    def call(self, name: SpanName, asking: Sequence[Span]) -> Span:
        """A span in a trace of its own, for what is done for several at once, linked with them both ways."""

    def link(self, other: Span) -> None:
        """Links both with each other."""

    def past(self, name: SpanName, seconds: float, error: BaseException | None = None) -> None:
        """A span below this one that ended now and took so long."""

    def context(self) -> tuple[tuple[str, str], ...]:
        """`traceparent`, and `tracestate` where there is one; () after the end."""

    def end(self) -> None: ...


_current: ContextVar[Span | None] = ContextVar("ticket_router.span", default=None)


class Step:
    """A part of the current span's work; this one, of no span, is nothing."""

    __slots__ = ()

    def set(self, attribute: str, value: str | bool | float) -> None:
        """As Span.set."""

    def link(self, span: Span) -> None:
        """As Span.link."""

    def drop(self) -> None:
        """It was nothing after all: no span tells of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None


class _OpenStep(Step):
    __slots__ = ("_kept", "_span", "_token")

    def __init__(self, span: Span) -> None:
        self._span = span
        self._kept = True
        self._token: Token[Span | None] | None = None

    def set(self, attribute: str, value: str | bool | float) -> None:
        self._span.set(attribute, value)

    def link(self, span: Span) -> None:
        self._span.link(span)

    def drop(self) -> None:
        self._kept = False

    def __enter__(self) -> Self:
        self._token = _current.set(self._span)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            _current.reset(self._token)
        if error is not None:
            self._span.fail(error)
        if self._kept:  # a span that never ends is never exported
            self._span.end()


class _Within(_OpenStep):
    __slots__ = ()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            _current.reset(self._token)


_NO_STEP: Final = Step()


def current_span() -> Span | None:
    """That of the ticket that is being worked on, where it is traced."""
    return _current.get()


def within(span: Span | None) -> Step:
    """Inside the block, and in tasks that are started there, this span is the current one. It does not end there."""
    return _NO_STEP if span is None else _Within(span)


def step(name: SpanName) -> Step:
    """Inside the block a span below the current one is the current one; nothing where there is none."""
    span = _current.get()
    return _NO_STEP if span is None else _OpenStep(span.child(name))


def engine_call(asking: Sequence[Span], items: int) -> Step:
    """One request of so many items to the engine, for the traced tickets among those that wait for it."""
    if not asking:
        return _NO_STEP
    made = _OpenStep(asking[0].call(SpanName.BATCH, asking))
    made.set(Attribute.ITEMS, items)
    made.set(Attribute.TRACED, len(asking))
    return made


def mark(attribute: str, value: str | bool | float) -> None:
    """Says something of the current span, where there is one."""
    span = _current.get()
    if span is not None:
        span.set(attribute, value)


def traceparent() -> str | None:
    """For a request that is made inside the current span. The vendors' tracestate is nothing for an engine."""
    span = _current.get()
    context = () if span is None else span.context()
    return context[0][1] if context else None


@dataclass(frozen=True, slots=True)
class Parent:
    """The trace context that a message brings along."""

    trace_id: int
    span_id: int
    sampled: bool
    state: tuple[tuple[str, str], ...] = ()


def parent_in(headers: Headers) -> Parent | None:
    """What the last `traceparent` says, as Kafka's clients read repeated headers; None where it says nothing valid."""
    value = _last(headers, TRACEPARENT)
    if value is None or len(value) > MOST_PARENT_BYTES:
        return None
    match = _PARENT.fullmatch(value)
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == b"ff" or (version == b"00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return Parent(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & 1))


def state_in(headers: Headers) -> tuple[tuple[str, str], ...]:
    """The members of the last `tracestate`; () where it is not valid as a whole, or too long."""
    value = _last(headers, TRACESTATE)
    if value is None or len(value) > MOST_STATE_BYTES or not value.isascii():
        return ()
    found: dict[str, str] = {}
    for member in value.decode("ascii").split(","):
        if not member.strip(" \t"):
            continue
        match = _MEMBER.fullmatch(member)
        if match is None or match[1] in found:
            return ()
        found[match[1]] = match[2]
    return tuple(found.items()) if len(found) <= 32 else ()


def carried(headers: Headers, span: Span) -> Headers:
    """The headers for a message that is made inside this span: its trace goes on in them, everything else is kept."""
    kept = tuple(header for header in headers if header[0] not in _W3C)
    return kept + tuple((name, value.encode()) for name, value in span.context())


def passed_on(headers: Headers) -> Headers:
    """The trace context alone, for a record about a message: one valid traceparent, and a tracestate of its length."""
    if not headers or parent_in(headers) is None:
        return ()
    state = _last(headers, TRACESTATE) if state_in(headers) else None
    found: Headers = ((TRACEPARENT, _last(headers, TRACEPARENT)),)
    return found if state is None else (*found, (TRACESTATE, state))


def _last(headers: Headers, wanted: str) -> bytes | None:
    found: bytes | None = None
    for name, value in headers:
        if name == wanted and value is not None:
            found = value
    return found


_W3C: Final = frozenset({TRACEPARENT, TRACESTATE})


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


class Followed:
    """How many messages may still have themselves traced: `per_s` a second, and as many at once.

    Whoever may write a ticket through an instrumented form may also write `sampled` into its trace context: without a
    limit that would make every ticket cost as much as a traced one.
    """

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._clock = clock
        self._left = self._most = max(1.0, per_s) if per_s else 0.0
        self._at = clock()
        self.refused = 0

    def one_more(self) -> bool:
        """Takes one, or counts a refusal."""
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._left >= 1.0:
            self._left -= 1.0
            return True
        self.refused += 1
        return False


class Tracing(Protocol):
    """Whether and how tickets are traced."""

    def begin(self, headers: Headers) -> Span | None:
        """A span for the ticket that came with these headers; None, at next to no cost, where it is not sampled."""


class NoTracing:
    """Traces nothing. A trace that a message brings along passes on with its other headers."""

    def begin(self, headers: Headers) -> Span | None:
        return None


class SampledTracing:
    """Decides before a span exists, which costs a hundredth of what a span costs that is then thrown away."""

    def __init__(
        self,
        start: Callable[[Parent | None], Span],
        sampling: Sampling,
        chance: Callable[[], float],
        followed: Followed,
    ) -> None:
        """`start` makes the span of a ticket; `chance` is uniform in [0, 1)."""
        self._start = start
        self._sampling = sampling
        self._chance = chance
        self._followed = followed

    def begin(self, headers: Headers) -> Span | None:
        parent = parent_in(headers) if headers else None
        asks = False
        if parent is not None and self._sampling.follow_parent:
            if not parent.sampled:
                return None
            asks = self._followed.one_more()
        if not asks and self._chance() >= self._sampling.ratio:
            return None
        if parent is not None and (state := state_in(headers)):
            parent = Parent(parent.trace_id, parent.span_id, parent.sampled, state)
        return self._start(parent)
