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
    LISTENING = "http.listening"
    STOPPING = "worker.stopping"
    STOPPED = "worker.stopped"
    ABANDONED = "worker.abandoned"
    UNCALIBRATED = "worker.uncalibrated"
    PARTITIONS_ASSIGNED = "partitions.assigned"
    PARTITIONS_FORGOTTEN = "partitions.forgotten"
    DECIDED = "ticket.decided"
    DEAD_LETTERED = "ticket.dead_lettered"
    FAILED = "ticket.failed"
    OUTPUT_REFUSED = "output.refused"
    TICKETS_EXPIRED = "tickets.expired"
    LOG_STEPPED_BACK = "log.stepped_back"
    SETTLING_FAILED = "settling.failed"
    ENGINE_UP = "engine.up"
    ENGINE_DOWN = "engine.down"
    ENGINE_ROWS_MIXED_UP = "engine.rows_mixed_up"
    ENGINE_ROWS_IN_ORDER = "engine.rows_in_order"
    ENGINE_ROWS_UNWATCHED = "engine.rows_unwatched"
    BROKER_TROUBLE = "broker.trouble"
    BROKER_RECOVERED = "broker.recovered"
    STANDSTILL = "worker.standstill"
    MOVING_AGAIN = "worker.moving_again"
    CACHE_TROUBLE = "cache.trouble"
    CACHE_RECOVERED = "cache.recovered"
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
    ITEMS: Final = "items"
    LIBRARY: Final = "library"
    MODE: Final = "mode"
    MODEL: Final = "model"
    OFFSET: Final = "offset"
    OUTCOME: Final = "outcome"
    PARTITION: Final = "partition"
    PARTITIONS: Final = "partitions"
    PORT: Final = "port"
    REASON: Final = "reason"
    ROUTE: Final = "route"
    RULE_SET: Final = "rule_set"
    SCORE_MS: Final = "score_ms"
    SOURCE: Final = "source"
    STATUS: Final = "status"
    TEXT: Final = "text"
    """Only with ROUTER_LOG_TICKET_TEXT."""
    TOPIC: Final = "topic"
    TOTAL_MS: Final = "total_ms"
    TRACE: Final = "trace"
    TRACED: Final = "traced"
    """How many of them are traced."""
    VERSION: Final = "version"
    WHAT: Final = "what"

    # Of spans, by OpenTelemetry's conventions for messaging (1.45).
    MESSAGING_SYSTEM: Final = "messaging.system"
    MESSAGING_OPERATION: Final = "messaging.operation.type"
    MESSAGING_TOPIC: Final = "messaging.destination.name"
    MESSAGING_PARTITION: Final = "messaging.destination.partition.id"
    MESSAGING_OFFSET: Final = "messaging.kafka.offset"


class SpanName(StrEnum):
    """The spans of a sampled ticket."""

    CONSUME = "consume"
    """One ticket, from being taken in to being settled; the others but `batch` are below it."""
    CACHE = "cache"
    """Looking for its scores."""
    SCORE = "score"
    """Waiting for the engine: for the batch, for room, for retries."""
    BATCH = "batch"
    """One request to the engine, in a trace of its own, linked with the `score` of every traced ticket that waits for
    it; where none does when it begins, there is none."""
    DECIDE = "decide"
    """From scores to decision, second looks included; or an override rule."""
    PUBLISH = "publish"
    """One attempt to produce its messages and commit its offset."""


BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
BUCKETS_SHARE: Final = (0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""For shares and probabilities: close together near 1, where the thresholds are."""


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric; `labels` in the order in which their values are given."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = BUCKETS_S
    """Upper bounds, included, of a histogram."""


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
STEERING: Final = Metric(
    "ticket_router.steering",
    "counter",
    "{ticket}",
    "Tickets that would have routed and in which something addresses the router, by tenant and channel (the first 50) "
    "and by outcome: agreed, steered, unchecked",
    (Attribute.SOURCE, Attribute.OUTCOME),
)
TICKET_FAILURES: Final = Metric(
    "ticket_router.ticket_failures", "counter", "{ticket}", "Tickets that met a bug of the worker", (Attribute.ERROR,)
)
EXPIRED: Final = Metric(
    "ticket_router.expired_messages",
    "counter",
    "{message}",
    "Messages of the input topic that were deleted before they were read",
)
LOG_STEPPED_BACK: Final = Metric(
    "ticket_router.log_stepped_back",
    "counter",
    "{partition}",
    "Times that an input partition's offsets came again: a topic made anew, or an end lost with a broker",
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
    "Scores looked for in the cache: memory_hits (of the worker's own), redis_hits, misses, and those of the misses "
    "that were rejected",
    (Attribute.OUTCOME,),
)
CACHE_WAITS: Final = Metric(
    "ticket_router.cache.waits",
    "counter",
    "{key}",
    "Scores that another worker was making (waits), and how that ended: answered, takeovers of a lease that ended "
    "without, in_vain",
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
ENGINE_ROW_CHECKS: Final = Metric(
    "ticket_router.engine.row_checks",
    "counter",
    "{answer}",
    "Answers that held tickets with known scores: in_order, or mixed_up, where a row was another ticket's",
    (Attribute.ENDPOINT, Attribute.OUTCOME),
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
STANDSTILLS: Final = Metric(
    "ticket_router.standstills",
    "gauge",
    "{standstill}",
    "What should move and does not: partitions (intake, scoring, settling), the client, the assignment",
    (Attribute.WHAT,),
)
IN_FLIGHT: Final = Metric("ticket_router.in_flight", "gauge", "{ticket}", "Tickets taken in and not yet settled")
IN_FLIGHT_BYTES: Final = Metric("ticket_router.in_flight.bytes", "gauge", "By", "Bytes of tickets in flight")
OLDEST_AGE: Final = Metric(
    "ticket_router.oldest_ticket.age",
    "gauge",
    "s",
    "Time since the oldest ticket in flight was written, by its message's timestamp; 0 where none is in flight",
)
PARTITIONS: Final = Metric("ticket_router.partitions", "gauge", "{partition}", "Partitions assigned to this worker")
LAG: Final = Metric("ticket_router.lag", "gauge", "{message}", "Messages behind the end of the assigned partitions")
ENGINE_UP: Final = Metric("ticket_router.engine.up", "gauge", "1", "1 while an engine takes requests, else 0")
ENGINE_ENDPOINT_UP: Final = Metric(
    "ticket_router.engine.endpoint_up",
    "gauge",
    "1",
    "0 while the breaker of this endpoint is open, else 1",
    (Attribute.ENDPOINT,),
)
PROBABILITY: Final = Metric(
    "ticket_router.probability",
    "histogram",
    "1",
    "Calibrated probability that the category of a decision is right, of the decisions that state one",
    buckets=BUCKETS_SHARE,
)
LABEL_MASS: Final = Metric(
    "ticket_router.label_mass",
    "histogram",
    "1",
    "Total probability of all labels as the next token, of each scored ticket",
    buckets=BUCKETS_SHARE,
)
CALIBRATION_IN_FORCE: Final = Metric(
    "ticket_router.calibration.in_force",
    "gauge",
    "1",
    "1 while a calibration is in force, so that tickets can route; else 0, with the reason",
    (Attribute.REASON,),
)
CERTIFIED: Final = Metric(
    "ticket_router.certified",
    "gauge",
    "1",
    "1 for a category that can be routed to under the certificates in force, else 0",
    (Attribute.CATEGORY,),
)
MODE: Final = Metric(
    "ticket_router.mode",
    "gauge",
    "1",
    "1 for the mode that a category is in (shadow, assist, auto), an operator's brake included",
    (Attribute.CATEGORY, Attribute.MODE),
)
INFO: Final = Metric(
    "ticket_router.info",
    "gauge",
    "1",
    "1, labelled with what this worker runs: rule set, its version, and the digest of the calibration in force",
    (Attribute.RULE_SET, Attribute.VERSION, Attribute.CALIBRATION),
)
HTTP_REQUESTS: Final = Metric(
    "ticket_router.http.requests",
    "counter",
    "{request}",
    "Requests to `ticket-router serve`, by path and by the status of their answer",
    (Attribute.ROUTE, Attribute.STATUS),
)
HTTP_IN_FLIGHT: Final = Metric(
    "ticket_router.http.in_flight", "gauge", "{request}", "Requests that `ticket-router serve` is answering"
)
TRACES_REFUSED: Final = Metric(
    "ticket_router.traces.refused",
    "counter",
    "{ticket}",
    "Tickets whose message asked to be traced, beyond ROUTER_TRACE_FOLLOWED_PER_S: chance decided about them",
)
SPANS_LOST: Final = Metric(
    "ticket_router.spans.lost", "counter", "{span}", "Spans that the collector did not take, or not in time"
)
LOG_LINES_DROPPED: Final = Metric(
    "ticket_router.log.lines_dropped", "counter", "{line}", "Log lines given up because their sink was full or broken"
)

METRICS: Final = (
    DECISIONS,
    DEAD_LETTERS,
    STEERING,
    TICKET_FAILURES,
    EXPIRED,
    LOG_STEPPED_BACK,
    REFUSED_OUTPUTS,
    CACHE_LOOKUPS,
    CACHE_WAITS,
    CACHE_FAILURES,
    ENGINE_REQUESTS,
    ENGINE_ROW_CHECKS,
    ENGINE_LATENCY,
    TICKET_LATENCY,
    PROBABILITY,
    LABEL_MASS,
    SETTLE_LATENCY,
    SETTLED,
    SETTLE_FAILURES,
    STANDSTILLS,
    IN_FLIGHT,
    IN_FLIGHT_BYTES,
    OLDEST_AGE,
    PARTITIONS,
    LAG,
    ENGINE_UP,
    ENGINE_ENDPOINT_UP,
    CALIBRATION_IN_FORCE,
    CERTIFIED,
    MODE,
    INFO,
    HTTP_REQUESTS,
    HTTP_IN_FLIGHT,
    TRACES_REFUSED,
    SPANS_LOST,
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
