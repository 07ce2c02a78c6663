"""Names: alone knows what every event, attribute, span and metric is called, and what the metrics mean."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal


class Event(StrEnum):
    """What a log line is about."""

    STARTING = "worker.starting"
    WAITING = "worker.waiting"
    STARTED = "worker.started"
    STOPPING = "worker.stopping"
    STOPPED = "worker.stopped"
    UNCALIBRATED = "worker.uncalibrated"
    PARTITIONS_ASSIGNED = "partitions.assigned"
    PARTITIONS_FORGOTTEN = "partitions.forgotten"
    DECIDED = "ticket.decided"
    DEAD_LETTERED = "ticket.dead_lettered"
    FAILED = "ticket.failed"
    OUTPUT_REFUSED = "output.refused"
    SETTLING_FAILED = "settling.failed"
    ENGINE_UP = "engine.up"
    ENGINE_DOWN = "engine.down"
    BROKER_TROUBLE = "broker.trouble"
    BROKER_RECOVERED = "broker.recovered"
    CACHE_TROUBLE = "cache.trouble"
    LIBRARY = "library.message"
    LOG_LINES_DROPPED = "log.lines_dropped"


class Attribute:
    """What a log line, span or metric says besides its name. None holds ticket text, a message key or an address.

    Plain strings, because orjson takes no others as keys without losing its speed.
    """

    ACTION: Final = "action"
    BYTES: Final = "bytes"
    CACHED: Final = "cached"
    CALIBRATION: Final = "calibration"
    CATEGORY: Final = "category"
    CODE: Final = "code"
    COUNT: Final = "count"
    DECISION_ID: Final = "decision_id"
    DETAIL: Final = "detail"
    ENDPOINT: Final = "endpoint"
    ENGINE: Final = "engine"
    ERROR: Final = "error"
    LIBRARY: Final = "library"
    MODEL: Final = "model"
    OFFSET: Final = "offset"
    OUTCOME: Final = "outcome"
    PARTITION: Final = "partition"
    PARTITIONS: Final = "partitions"
    REASON: Final = "reason"
    RULE_SET: Final = "rule_set"
    SCORE_MS: Final = "score_ms"
    TEXT: Final = "text"
    """Only with ROUTER_LOG_TICKET_TEXT."""
    TOPIC: Final = "topic"
    TOTAL_MS: Final = "total_ms"
    TRACE: Final = "trace"


class SpanName(StrEnum):
    """One span for a sampled ticket, from being taken in to being decided."""

    TICKET = "ticket"


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric; `labels` in the order in which their values are given."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    description: str
    labels: tuple[str, ...] = ()


DECISIONS: Final = Metric(
    "ticket_router.decisions",
    "counter",
    "{ticket}",
    "Tickets decided",
    (Attribute.ACTION, Attribute.CATEGORY, Attribute.REASON),
)
DEAD_LETTERS: Final = Metric(
    "ticket_router.dead_letters", "counter", "{message}", "Messages that are no ticket", (Attribute.CODE,)
)
TICKET_FAILURES: Final = Metric(
    "ticket_router.ticket_failures", "counter", "{ticket}", "Tickets that met a bug of the worker", (Attribute.ERROR,)
)
REFUSED_OUTPUTS: Final = Metric(
    "ticket_router.refused_outputs",
    "counter",
    "{message}",
    "Outputs that the broker refused for good",
    (Attribute.CODE,),
)
CACHE_LOOKUPS: Final = Metric(
    "ticket_router.cache.lookups",
    "counter",
    "{key}",
    "Scores looked for in the cache: hits, misses, and those of the misses that were rejected",
    (Attribute.OUTCOME,),
)
CACHE_FAILURES: Final = Metric(
    "ticket_router.cache.failures",
    "counter",
    "{call}",
    "Calls to the cache that failed (errors) or were not made after failures (skipped)",
    (Attribute.OUTCOME,),
)
ENGINE_REQUESTS: Final = Metric(
    "ticket_router.engine.requests", "counter", "{request}", "Requests to the engine", (Attribute.OUTCOME,)
)
ENGINE_LATENCY: Final = Metric("ticket_router.engine.latency", "histogram", "s", "Time for one request to the engine")
TICKET_LATENCY: Final = Metric(
    "ticket_router.ticket.latency", "histogram", "s", "Time from being taken in to being decided"
)
SETTLE_LATENCY: Final = Metric(
    "ticket_router.settle.latency", "histogram", "s", "Time to produce and commit a settlement"
)
SETTLED: Final = Metric("ticket_router.settled", "counter", "{ticket}", "Tickets settled: produced and committed")
SETTLE_FAILURES: Final = Metric(
    "ticket_router.settle.failures", "counter", "{settlement}", "Settlements that had to be offered again"
)
IN_FLIGHT: Final = Metric("ticket_router.in_flight", "gauge", "{ticket}", "Tickets taken in and not yet settled")
IN_FLIGHT_BYTES: Final = Metric("ticket_router.in_flight.bytes", "gauge", "By", "Bytes of tickets in flight")
LAG: Final = Metric("ticket_router.lag", "gauge", "{message}", "Messages behind the end of the assigned partitions")
ENGINE_UP: Final = Metric("ticket_router.engine.up", "gauge", "1", "1 while an engine takes requests, else 0")
LOG_LINES_DROPPED: Final = Metric(
    "ticket_router.log.lines_dropped", "counter", "{line}", "Log lines given up because their sink was full or broken"
)

METRICS: Final = (
    DECISIONS,
    DEAD_LETTERS,
    TICKET_FAILURES,
    REFUSED_OUTPUTS,
    CACHE_LOOKUPS,
    CACHE_FAILURES,
    ENGINE_REQUESTS,
    ENGINE_LATENCY,
    TICKET_LATENCY,
    SETTLE_LATENCY,
    SETTLED,
    SETTLE_FAILURES,
    IN_FLIGHT,
    IN_FLIGHT_BYTES,
    LAG,
    ENGINE_UP,
    LOG_LINES_DROPPED,
)


def describe_metrics() -> str:
    """A Markdown table of every metric, as OpenTelemetry and as Prometheus name it."""
    rows = (
        f"| `{metric.name}` | `{prometheus_name(metric)}` | {metric.kind} | {metric.unit} "
        f"| {', '.join(f'`{label}`' for label in metric.labels)} | {metric.description} |\n"
        for metric in METRICS
    )
    return f"| OpenTelemetry | Prometheus | kind | unit | labels | meaning |\n{'| --- ' * 6}|\n{''.join(rows)}"


def prometheus_name(metric: Metric) -> str:
    """Dots to underscores, with the unit and `_total` where Prometheus wants them."""
    unit = "_seconds" if metric.unit == "s" else ""
    return metric.name.replace(".", "_") + unit + ("_total" if metric.kind == "counter" else "")
