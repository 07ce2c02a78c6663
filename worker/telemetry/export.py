"""Export: alone knows when and how spans and metrics leave the process, and that they never hold it up."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from worker.telemetry.histograms import exporter_with_histograms
from worker.telemetry.metrics import Metrics
from worker.telemetry.names import METRICS, SPANS_LOST, TRACES_REFUSED, Metric
from worker.telemetry.traces import Followed, NoTracing, SampledTracing, Sampling, Tracing

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    from worker.telemetry.span_queue import SpanQueue

SCOPE: Final = "ticket_router"
FOLLOWED_PER_S: Final = 10.0
EXPORT_TIMEOUT_S: Final = 2.0
"""For one export, where OTEL_EXPORTER_OTLP_TIMEOUT says nothing; the SDK's own 10 s could hold up the end."""


class Export:
    """What `start_export` started; `tracing` is where spans begin."""

    def __init__(
        self,
        tracing: Tracing,
        spans: tuple[TracerProvider, _Ending] | None = None,
        metrics: MeterProvider | None = None,
    ) -> None:
        self.tracing = tracing
        self._spans = spans
        self._metrics = metrics

    def close(self, timeout_s: float) -> None:
        """Sends what is left, for about `timeout_s` and at most one more export each; blocks. Never raises."""
        if self._spans is not None:
            provider, ending = self._spans
            ending.after(timeout_s)
            provider.shutdown()
        if self._metrics is not None:
            with contextlib.suppress(Exception):  # the SDK raises a bare Exception for a collector that is away
                self._metrics.shutdown(timeout_millis=timeout_s * 1000)


class _Ending:
    """Wraps a span exporter so that a shutdown ends: the SDK's own would go on with every batch that is queued."""

    def __init__(self, exporter: SpanExporter, clock: Callable[[], float]) -> None:
        self._exporter = exporter
        self._clock = clock
        self._until = math.inf
        self.lost = 0

    def after(self, timeout_s: float) -> None:
        self._until = self._clock() + timeout_s

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        from opentelemetry.sdk.trace.export import SpanExportResult

        found = self._exporter.export(spans) if self._clock() < self._until else SpanExportResult.FAILURE
        if found is not SpanExportResult.SUCCESS:
            self.lost += len(spans)
        return found

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def start_export(
    environ: Mapping[str, str],
    metrics: Metrics,
    *,
    resource: Mapping[str, str],
    clock: Callable[[], float],
    chance: Callable[[], float],
    followed_per_s: float = FOLLOWED_PER_S,
) -> Export:
    """Spans and metrics over OTLP HTTP where OpenTelemetry's variables ask for it, else nothing, at no cost.

    `clock` is monotonic, in seconds; `chance` uniform in [0, 1). `followed_per_s` messages a second are traced because
    they say so. Starts the SDK's threads. Raises ConfigError.
    """
    spans = None
    tracing: Tracing = NoTracing()
    if _wanted(environ, "TRACES"):
        from worker.telemetry.spans import OpenTelemetrySpans

        sampling = Sampling.from_environment(environ)
        provider, ending, queue = _spans(environ, resource, clock)
        spans = provider, ending
        followed = Followed(followed_per_s, clock)
        start = OpenTelemetrySpans(provider.get_tracer(SCOPE)).consume
        tracing = SampledTracing(start, sampling, chance, followed)
        metrics.watch(TRACES_REFUSED, lambda: followed.refused)
        metrics.watch(SPANS_LOST, lambda: ending.lost + queue.left_out)
    measured = _metrics(environ, metrics, resource) if _wanted(environ, "METRICS") else None
    return Export(tracing, spans, measured)


def _wanted(environ: Mapping[str, str], signal: str) -> bool:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environ.get(f"OTEL_{signal}_EXPORTER", "otlp") == "none":
        return False
    return bool(environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT"))


def _timeout_s(environ: Mapping[str, str], signal: str) -> float | None:
    """None leaves it to the exporter, which reads the variables itself."""
    names = ("OTEL_EXPORTER_OTLP_TIMEOUT", f"OTEL_EXPORTER_OTLP_{signal}_TIMEOUT")
    return None if any(environ.get(name) for name in names) else EXPORT_TIMEOUT_S


def _spans(
    environ: Mapping[str, str], resource: Mapping[str, str], clock: Callable[[], float]
) -> tuple[TracerProvider, _Ending, SpanQueue]:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    from worker.telemetry.span_queue import MOST_WAITING, SpanQueue

    ending = _Ending(OTLPSpanExporter(timeout=_timeout_s(environ, "TRACES")), clock)
    provider = TracerProvider(ALWAYS_ON, Resource.create(dict(resource)), shutdown_on_exit=False)
    said = environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "").strip()
    most = int(said) if said.isascii() and said.isdigit() else MOST_WAITING  # garbage counts as unset, by the standard
    queue = SpanQueue(ending, most)  # type: ignore[arg-type] # by duck type: imported late
    provider.add_span_processor(queue)
    return provider, ending, queue


def _metrics(environ: Mapping[str, str], metrics: Metrics, resource: Mapping[str, str]) -> MeterProvider:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    reader = PeriodicExportingMetricReader(exporter_with_histograms(metrics, _timeout_s(environ, "METRICS")))
    provider = MeterProvider([reader], Resource.create(dict(resource)), shutdown_on_exit=False)
    bridge(metrics, provider.get_meter(SCOPE))
    return provider


def bridge(metrics: Metrics, meter: Meter) -> None:
    """Has OpenTelemetry read the counts when it exports, which costs nothing when they are counted. Not histograms."""
    for metric in METRICS:
        if metric.kind == "counter":
            meter.create_observable_counter(metric.name, [_reader(metrics, metric)], metric.unit, metric.description)
        elif metric.kind == "gauge":
            meter.create_observable_gauge(metric.name, [_reader(metrics, metric)], metric.unit, metric.description)


def _reader(metrics: Metrics, metric: Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
    from opentelemetry.metrics import Observation

    return lambda _: [Observation(sample.value, dict(sample.labels)) for sample in metrics.samples(metric)]
