"""Histograms for OTLP: alone knows how counts in buckets become OpenTelemetry's data points, when they are sent.

The SDK has no observable histogram, and its own costs several microseconds for every value. Here a value costs what
`Metrics.observe` costs, and the rest is paid once for each export.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from worker.telemetry.metrics import Metrics
from worker.telemetry.names import METRICS, Metric

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import Metric as Point
    from opentelemetry.sdk.metrics.export import MetricsData


def exporter_with_histograms(metrics: Metrics, timeout_s: float | None) -> OTLPMetricExporter:
    """OTLP over HTTP, as the SDK's, adding the histograms of `metrics` to whatever it sends.

    They are cumulative or deltas as OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE says.
    """
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics import Histogram as HistogramKind
    from opentelemetry.sdk.metrics.export import AggregationTemporality, MetricExportResult

    class Exporter(OTLPMetricExporter):
        def __init__(self) -> None:
            super().__init__(timeout=timeout_s)
            delta = (self._preferred_temporality or {}).get(HistogramKind) is AggregationTemporality.DELTA
            self._histograms = _Histograms(metrics, delta=delta)

        def export(
            self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **more: Any
        ) -> MetricExportResult:
            return super().export(self._histograms.added_to(metrics_data), timeout_millis, **more)

    return Exporter()


class _Histograms:
    def __init__(self, metrics: Metrics, *, delta: bool) -> None:
        self._metrics = metrics
        self._delta = delta
        self._sent: dict[Metric, tuple[list[int], float]] = {}
        self._since_ns: int | None = None

    def added_to(self, data: MetricsData) -> MetricsData:
        """`data` as the SDK collected it, whose time holds for the histograms too. Nothing collected: nothing added."""
        scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics]
        times = [point for scope in scopes for metric in scope.metrics for point in metric.data.data_points]
        if not times:
            return data
        now_ns = max(point.time_unix_nano for point in times)
        since_ns = self._since_ns if self._since_ns is not None else now_ns
        points = [self._point(metric, since_ns, now_ns) for metric in METRICS if metric.kind == "histogram"]
        if self._delta or self._since_ns is None:
            self._since_ns = now_ns
        first, *rest = data.resource_metrics
        scope, *others = first.scope_metrics
        extended = replace(scope, metrics=[*scope.metrics, *points])
        return replace(data, resource_metrics=[replace(first, scope_metrics=[extended, *others]), *rest])

    def _point(self, metric: Metric, since_ns: int, now_ns: int) -> Point:
        from opentelemetry.sdk.metrics.export import AggregationTemporality, Histogram, HistogramDataPoint
        from opentelemetry.sdk.metrics.export import Metric as Point

        histogram = self._metrics.histograms[metric]
        counts, total = list(histogram.counts), histogram.sum
        if self._delta:
            counts_before, total_before = self._sent.get(metric, ([0] * len(counts), 0.0))
            self._sent[metric] = counts, total
            counts = [now - before for now, before in zip(counts, counts_before, strict=True)]
            total -= total_before
        point = HistogramDataPoint(
            attributes={},
            start_time_unix_nano=since_ns,
            time_unix_nano=now_ns,
            count=sum(counts),
            sum=total,
            bucket_counts=counts,
            explicit_bounds=metric.buckets,
            min=None,  # type: ignore[arg-type] # optional in OTLP, and not kept
            max=None,  # type: ignore[arg-type]
        )
        temporality = AggregationTemporality.DELTA if self._delta else AggregationTemporality.CUMULATIVE
        return Point(metric.name, metric.description, metric.unit, Histogram([point], temporality))
