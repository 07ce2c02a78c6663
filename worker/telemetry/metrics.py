"""Metrics: alone knows how counts are kept between the moments when somebody reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

from worker.telemetry.names import METRICS, Metric, prometheus_name

Labels = tuple[str, ...]


class Sample(NamedTuple):
    """One value of a counter or gauge; `labels` as (name, value)."""

    metric: Metric
    labels: tuple[tuple[str, str], ...]
    value: float


class Histogram:
    """How many values lie in each bucket, the last being past all bounds, and their sum."""

    __slots__ = ("buckets", "counts", "sum")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def record(self, value: float) -> None:
        self.counts[bisect_left(self.buckets, value)] += 1
        self.sum += value


class Metrics:
    """Plain counts of one worker: adding is a dictionary increment, and readers pay for the rest.

    Written on one thread, read on any. Label values must come from closed lists (reason codes, categories), never from
    a ticket: each combination lives as long as the process.
    """

    def __init__(self) -> None:
        # Those without labels begin at 0: an increase can be told only from something that was there before.
        self._counts: dict[Metric, dict[Labels, float]] = {
            metric: {} if metric.labels else {(): 0.0} for metric in METRICS if metric.kind == "counter"
        }
        self.histograms: dict[Metric, Histogram] = {m: Histogram(m.buckets) for m in METRICS if m.kind == "histogram"}
        self._watched: dict[tuple[Metric, Labels], Callable[[], float | None]] = {}

    def add(self, metric: Metric, *labels: str, by: float = 1) -> None:
        """Counts up; one label value for each of `metric.labels`."""
        counts = self._counts[metric]
        counts[labels] = counts.get(labels, 0) + by

    def observe(self, metric: Metric, value: float) -> None:
        """Adds one value, in the metric's unit, to a histogram."""
        self.histograms[metric].record(value)

    def watch(self, metric: Metric, read: Callable[[], float | None], *labels: str) -> None:
        """Has a gauge, or a counter that somebody else keeps, read whenever metrics are. None leaves it out.

        `read` is called on any thread and must neither block nor raise.
        """
        self._watched[metric, labels] = read
        if metric in self._counts:
            self._counts[metric].pop(labels, None)

    def samples(self, metric: Metric) -> Iterator[Sample]:
        """The values of one counter or gauge now."""
        # list() copies in one step of the interpreter, so that the writing thread may go on.
        for labels, value in list(self._counts.get(metric, {}).items()):
            yield Sample(metric, _named(metric, labels), value)
        for (watched, labels), read in list(self._watched.items()):
            if watched is metric and (value_now := read()) is not None:
                yield Sample(metric, _named(metric, labels), value_now)

    def prometheus(self) -> str:
        """Everything in Prometheus' text format 0.0.4."""
        return "".join(line for metric in METRICS for line in self._lines(metric))

    def _lines(self, metric: Metric) -> Iterator[str]:
        name = prometheus_name(metric)
        yield f"# HELP {name} {metric.description}\n# TYPE {name} {metric.kind}\n"
        for sample in self.samples(metric):
            labels = ",".join(f'{label}="{_escaped(value)}"' for label, value in sample.labels)
            yield f"{name}{{{labels}}} {sample.value:.17g}\n" if labels else f"{name} {sample.value:.17g}\n"
        if metric.kind == "histogram":
            histogram = self.histograms[metric]
            total = 0
            for bound, count in zip((*histogram.buckets, "+Inf"), list(histogram.counts), strict=True):
                total += count
                yield f'{name}_bucket{{le="{bound}"}} {total}\n'
            yield f"{name}_sum {histogram.sum:.17g}\n{name}_count {total}\n"


def _named(metric: Metric, labels: Labels) -> tuple[tuple[str, str], ...]:
    return tuple(zip(metric.labels, labels, strict=True))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
