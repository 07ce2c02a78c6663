"""Metrics page: alone knows how a worker's /metrics is read back, and that whatever answers there may be hostile."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from worker.core.printable import printable
from worker.errors import InvalidAnswer
from worker.telemetry import INFO, METRICS, Metric
from worker.telemetry.names import prometheus_name

Labels = tuple[str, ...]
Buckets = tuple[tuple[float, float], ...]
"""Upper bounds, rising, the last being infinite, and how many values lie at or below each."""

MOST_SAMPLES: Final = 20_000
MOST_CHARACTERS: Final = 80
"""Of a label's value."""

_LINE: Final = re.compile(r'([a-z_]+)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})? (\S+)(?: \d+)?')
_LABEL: Final = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)",?')
_ESCAPES: Final = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


@dataclass(frozen=True, slots=True)
class Page:
    """One look at one worker; `at` in seconds of the caller's clock."""

    at: float
    values: Mapping[Metric, Mapping[Labels, float]]
    """Counters and gauges, by the values of `Metric.labels`."""
    buckets: Mapping[Metric, Buckets]

    def value(self, metric: Metric, *labels: str) -> float | None:
        """Of one series; None where it is not there."""
        return self.values.get(metric, {}).get(labels)


def read_page(text: str, at: float) -> Page:
    """What of the page is known here. Raises InvalidAnswer where it is no worker's."""
    names = {prometheus_name(metric): metric for metric in METRICS}
    bucket_names = {f"{name}_bucket": metric for name, metric in names.items() if metric.kind == "histogram"}
    values: dict[Metric, dict[Labels, float]] = {}
    buckets: dict[Metric, dict[float, float]] = {}
    known = False
    for name, labels, value in _samples(text):
        if (metric := names.get(name)) is not None and metric.kind != "histogram":
            values.setdefault(metric, {})[tuple(labels.get(label, "") for label in metric.labels)] = value
        elif (metric := bucket_names.get(name)) is not None and (bound := _number(labels.get("le", ""))) is not None:
            buckets.setdefault(metric, {})[bound] = value
        known = known or name.startswith(prometheus_name(INFO).rpartition("_")[0])
    if not known:
        raise InvalidAnswer("what answers there is no worker's metrics page")
    ordered = {metric: tuple(sorted(found.items())) for metric, found in buckets.items()}
    return Page(at, values, {metric: rows for metric, rows in ordered.items() if math.isinf(rows[-1][0])})


def _samples(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Name, labels and value of every line that is a sample. Nothing that a terminal would obey is left in a label."""
    seen = 0
    for line in text.split("\n"):
        match = _LINE.fullmatch(line) if line[:1] != "#" else None
        if match is None or (value := _number(match[3])) is None or math.isinf(value):
            continue
        seen += 1
        if seen > MOST_SAMPLES:
            return
        yield match[1], {name: _readable(said) for name, said in _LABEL.findall(match[2] or "")}, value


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


def _readable(value: str) -> str:
    return printable(re.sub(r'\\[\\"n]', lambda found: _ESCAPES[found[0]], value))[:MOST_CHARACTERS]
