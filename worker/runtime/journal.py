"""Journal: what the worker does, told to logs and metrics; never ticket text unless that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from worker.core.envelope import Envelope
from worker.core.ticket import Ticket
from worker.errors import InvalidTicket, StreamRetriable
from worker.ports import Delivery, Partition, RefusedOutput
from worker.telemetry import (
    CACHE_FAILURES,
    CACHE_LOOKUPS,
    DEAD_LETTERS,
    DECISIONS,
    ENGINE_LATENCY,
    ENGINE_REQUESTS,
    ENGINE_UP,
    IN_FLIGHT,
    IN_FLIGHT_BYTES,
    LAG,
    REFUSED_OUTPUTS,
    SETTLE_FAILURES,
    SETTLE_LATENCY,
    SETTLED,
    TICKET_FAILURES,
    TICKET_LATENCY,
    Attribute,
    Event,
    Metrics,
    get_logger,
)


class Watched(Protocol):
    """What gauges are read from."""

    @property
    def in_flight(self) -> int: ...

    @property
    def in_flight_bytes(self) -> int: ...

    @property
    def lag(self) -> int | None: ...


class Journal:
    """One line a decision at most; counts for everything. Neither blocks nor raises."""

    def __init__(self, metrics: Metrics, *, log_ticket_text: bool) -> None:
        self._metrics = metrics
        self._log = get_logger()
        self._log_ticket_text = log_ticket_text

    def watch(self, status: Callable[[], Watched], engine_is_up: Callable[[], bool]) -> None:
        """Gauges that are read when somebody asks for the metrics."""
        self._metrics.watch(IN_FLIGHT, lambda: status().in_flight)
        self._metrics.watch(IN_FLIGHT_BYTES, lambda: status().in_flight_bytes)
        self._metrics.watch(LAG, lambda: status().lag)
        self._metrics.watch(ENGINE_UP, lambda: float(engine_is_up()))

    def watch_cache(self, counters: dict[str, int]) -> None:
        """Counts that the cache keeps itself."""
        for metric, names in ((CACHE_LOOKUPS, ("hits", "misses", "rejected")), (CACHE_FAILURES, ("errors", "skipped"))):
            for name in names:
                self._metrics.watch(metric, partial(counters.__getitem__, name), name)

    def started(self, rule_set: str, calibration: str | None) -> None:
        self._log.info(Event.STARTED, **{Attribute.RULE_SET: rule_set, Attribute.CALIBRATION: calibration})

    def waiting(self, what: str) -> None:
        self._log.warning(Event.WAITING, **{Attribute.DETAIL: what})

    def uncalibrated(self, why: str) -> None:
        self._log.warning(Event.UNCALIBRATED, **{Attribute.DETAIL: why})

    def stopping(self) -> None:
        self._log.info(Event.STOPPING)

    def stopped(self, settled: int) -> None:
        self._log.info(Event.STOPPED, **{Attribute.COUNT: settled})

    def decided(self, delivery: Delivery, ticket: Ticket | None, envelope: Envelope) -> None:
        code = envelope.reasons[0].code
        self._metrics.add(DECISIONS, envelope.action, envelope.category or "", code)
        self._metrics.observe(TICKET_LATENCY, envelope.timings.total_ms / 1000)
        fields: dict[str, object] = {
            Attribute.DECISION_ID: envelope.decision_id,
            Attribute.ACTION: envelope.action,
            Attribute.CATEGORY: envelope.category,
            Attribute.REASON: code,
            Attribute.CACHED: envelope.cached,
            Attribute.TOTAL_MS: envelope.timings.total_ms,
            **_place(delivery),
        }
        if self._log_ticket_text and ticket is not None:
            fields[Attribute.TEXT] = ticket.text
        self._log.info(Event.DECIDED, **fields)

    def dead_lettered(self, delivery: Delivery, error: InvalidTicket) -> None:
        self._metrics.add(DEAD_LETTERS, error.code)
        self._log.warning(Event.DEAD_LETTERED, **{Attribute.REASON: error.code, **_place(delivery)})

    def failed(self, delivery: Delivery, error: Exception) -> None:
        self._metrics.add(TICKET_FAILURES, type(error).__name__)
        self._log.error(Event.FAILED, exc_info=error, **_place(delivery))

    def refused(self, refused: RefusedOutput) -> None:
        self._metrics.add(REFUSED_OUTPUTS, refused.code)
        fields: dict[str, object] = _place(refused.delivery)
        fields |= {Attribute.CODE: refused.code, Attribute.DETAIL: f"{refused.output.topic}: {refused.detail}"}
        self._log.error(Event.OUTPUT_REFUSED, **fields)

    def settling_failed(self, error: StreamRetriable) -> None:
        self._metrics.add(SETTLE_FAILURES)
        self._log.warning(Event.SETTLING_FAILED, **{Attribute.DETAIL: str(error)})

    def settled(self, deliveries: int, seconds: float) -> None:
        self._metrics.add(SETTLED, by=deliveries)
        self._metrics.observe(SETTLE_LATENCY, seconds)

    def assigned(self, partitions: Sequence[Partition]) -> None:
        self._log.info(Event.PARTITIONS_ASSIGNED, **{Attribute.PARTITIONS: _numbers(partitions)})

    def forgotten(self, partitions: Sequence[Partition]) -> None:
        self._log.info(Event.PARTITIONS_FORGOTTEN, **{Attribute.PARTITIONS: _numbers(partitions)})

    def trouble(self, what: str | None) -> None:
        if what is None:
            self._log.info(Event.BROKER_RECOVERED)
        else:
            self._log.error(Event.BROKER_TROUBLE, **{Attribute.DETAIL: what})

    def engine_changed(self, endpoint: str, up: bool, why: str) -> None:
        tell, event = (self._log.info, Event.ENGINE_UP) if up else (self._log.error, Event.ENGINE_DOWN)
        tell(event, **{Attribute.ENDPOINT: endpoint, Attribute.DETAIL: why})

    def engine_called(self, outcome: str, seconds: float) -> None:
        self._metrics.add(ENGINE_REQUESTS, outcome)
        self._metrics.observe(ENGINE_LATENCY, seconds)


def _place(delivery: Delivery) -> dict[str, object]:
    return {Attribute.PARTITION: delivery.partition.number, Attribute.OFFSET: delivery.offset}


def _numbers(partitions: Sequence[Partition]) -> list[int]:
    return sorted(partition.number for partition in partitions)
