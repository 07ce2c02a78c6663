"""Journal: what the worker does, told to logs and metrics; never ticket text unless that was asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from worker.core.envelope import Envelope
from worker.core.policy import Calibration, NoCalibration, can_route
from worker.core.rules import RuleSet
from worker.core.steering import Checked
from worker.core.ticket import Ticket
from worker.errors import InvalidTicket, StreamRetriable
from worker.ports import Delivery, Gap, Partition, RefusedOutput
from worker.runtime.rationing import Rationed
from worker.runtime.sources import Sources
from worker.runtime.watchdog import Standstill, What
from worker.telemetry import (
    CACHE_FAILURES,
    CACHE_LOOKUPS,
    CACHE_WAITS,
    CALIBRATION_IN_FORCE,
    CERTIFIED,
    DEAD_LETTERS,
    DECISIONS,
    ENGINE_ENDPOINT_UP,
    ENGINE_LATENCY,
    ENGINE_REQUESTS,
    ENGINE_ROW_CHECKS,
    ENGINE_UP,
    EXPIRED,
    HTTP_IN_FLIGHT,
    HTTP_REQUESTS,
    IN_FLIGHT,
    IN_FLIGHT_BYTES,
    INFO,
    LABEL_MASS,
    LAG,
    LOG_STEPPED_BACK,
    MODE,
    OLDEST_AGE,
    PARTITIONS,
    PROBABILITY,
    REFUSED_OUTPUTS,
    SETTLE_FAILURES,
    SETTLE_LATENCY,
    SETTLED,
    STANDSTILLS,
    STEERING,
    TICKET_FAILURES,
    TICKET_LATENCY,
    Attribute,
    Event,
    Metrics,
    get_logger,
)

REFUSALS_EVERY_S = 30.0
"""Between two lines about one topic that refuses for one reason: about as long as such a topic is then left alone."""


class Watched(Protocol):
    """What gauges are read from."""

    @property
    def standstills(self) -> tuple[Standstill, ...]: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def in_flight_bytes(self) -> int: ...

    @property
    def lag(self) -> int | None: ...

    @property
    def assigned(self) -> int: ...

    @property
    def oldest_age_s(self) -> float: ...


class Journal:
    """One line a decision at most; counts for everything. Neither blocks nor raises."""

    def __init__(self, metrics: Metrics, *, log_ticket_text: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` in seconds, monotonic."""
        self._metrics = metrics
        self._log = get_logger().bind()  # the logger itself: what stands in for it until then looks it up every time
        self._log_ticket_text = log_ticket_text
        self._alarms: dict[str, str | None] = {}
        self._sources = Sources()
        self._waits = False
        self._refusals = Rationed[Mapping[str, object]](clock, REFUSALS_EVERY_S)

    def watch(self, status: Callable[[], Watched], engine_is_up: Callable[[], bool]) -> None:
        """Gauges that are read when somebody asks for the metrics."""
        for what in What:
            self._metrics.watch(STANDSTILLS, partial(_standing_still, status, what), what)
        self._metrics.watch(IN_FLIGHT, lambda: status().in_flight)
        self._metrics.watch(IN_FLIGHT_BYTES, lambda: status().in_flight_bytes)
        self._metrics.watch(LAG, lambda: status().lag)
        self._metrics.watch(PARTITIONS, lambda: status().assigned)
        self._metrics.watch(OLDEST_AGE, lambda: status().oldest_age_s)
        self._metrics.watch(ENGINE_UP, lambda: float(engine_is_up()))

    def watch_endpoints(self, names: Sequence[str], is_up: Callable[[str], bool]) -> None:
        """The breaker of each endpoint."""
        for name in names:
            self._metrics.watch(ENGINE_ENDPOINT_UP, partial(_as_number, is_up, name), name)

    def belongs_to(self, rule_set: RuleSet) -> None:
        """Whose process this is. Said from the start on, so that one that waits for its engine counts for its rule set;
        what it runs is said by `runs`."""
        self._waits = True
        self._metrics.watch(INFO, lambda: 1.0 if self._waits else None, rule_set.id, str(rule_set.rules.version), "")

    def runs(self, rule_set: RuleSet, calibration: Calibration | NoCalibration) -> None:
        """What decides in this worker; it stays the same until the worker ends."""
        if isinstance(calibration, Calibration):
            code, digest = "", calibration.artefact.digest
        else:
            code, digest = calibration.reason.code, ""
        self._metrics.watch(CALIBRATION_IN_FORCE, partial(float, not code), code)
        self._waits = False
        self._metrics.watch(INFO, partial(float, 1), rule_set.id, str(rule_set.rules.version), digest)
        for routable in rule_set.categories.routable:
            self._metrics.watch(MODE, partial(float, 1), routable.id, rule_set.mode_of(routable.id))
        for category in rule_set.categories.ids:
            self._metrics.watch(CERTIFIED, partial(float, can_route(category, rule_set, calibration)), category)

    def watch_cache(self, memory: Mapping[str, int], redis: Mapping[str, int], waits: Mapping[str, int]) -> None:
        """Counts that the caches keep themselves; empty for one that there is not. What is missed counts once."""
        last = redis or memory
        lookups = [("memory_hits", memory, "hits"), ("redis_hits", redis, "hits"), ("misses", last, "misses")]
        watched = [(CACHE_LOOKUPS, *row) for row in (*lookups, ("rejected", redis, "rejected"))]
        watched += [(CACHE_FAILURES, name, redis, name) for name in ("errors", "skipped")]
        watched += [(CACHE_WAITS, name, waits, name) for name in waits if redis]
        for metric, outcome, counters, name in watched:
            if counters:
                self._metrics.watch(metric, partial(counters.__getitem__, name), outcome)

    def started(self, rule_set: str, calibration: str | None) -> None:
        self._log.info(Event.STARTED, **{Attribute.RULE_SET: rule_set, Attribute.CALIBRATION: calibration})

    def starting(self, what: str) -> None:
        """What a process does that is not up yet: the first that is heard of it, as a model may take minutes."""
        self._log.info(Event.WAITING, **{Attribute.DETAIL: what})

    def waiting(self, what: str, *, for_partitions: bool = True) -> None:
        """`for_partitions`: whether this process will join a group once it has what it waits for."""
        # Until there is a worker to watch, alerts must see the engine down and not nothing.
        for metric in (ENGINE_UP, PARTITIONS) if for_partitions else (ENGINE_UP,):
            self._metrics.watch(metric, partial(float, 0))
        self._log.warning(Event.WAITING, **{Attribute.DETAIL: what})

    def listening(self, port: int) -> None:
        self._log.info(Event.LISTENING, **{Attribute.PORT: port})

    def watch_requests(self, in_flight: Callable[[], int], engine_is_up: Callable[[], bool]) -> None:
        """The gauges of a server that answers over HTTP."""
        self._metrics.watch(HTTP_IN_FLIGHT, in_flight)
        self._metrics.watch(ENGINE_UP, lambda: float(engine_is_up()))

    def answered(self, route: str, status: int) -> None:
        self._metrics.add(HTTP_REQUESTS, route, str(status))

    def request_failed(self, error: Exception) -> None:
        """A bug met while answering; what was sent is not told."""
        self._metrics.add(TICKET_FAILURES, type(error).__name__)
        self._log.error(Event.FAILED, exc_info=error)

    def uncalibrated(self, why: str) -> None:
        self._log.warning(Event.UNCALIBRATED, **{Attribute.DETAIL: why})

    def ends(self) -> None:
        """In whichever way: what was kept to be told later is told now."""
        self._tell_refusals(all_of_them=True)

    def stopping(self) -> None:
        self._log.info(Event.STOPPING)

    def stopped(self, settled: int) -> None:
        self._log.info(Event.STOPPED, **{Attribute.COUNT: settled})

    def abandoned(self) -> None:
        """By a second signal: nothing was waited for."""
        self.ends()
        self._log.warning(Event.ABANDONED)

    def decided(self, delivery: Delivery, ticket: Ticket | None, envelope: Envelope) -> None:
        code = envelope.reasons[0].code
        self._metrics.add(DECISIONS, envelope.action, envelope.category or "", code)
        self._metrics.observe(TICKET_LATENCY, envelope.timings.total_ms / 1000)
        if envelope.probability is not None:
            self._metrics.observe(PROBABILITY, envelope.probability)
        if envelope.label_mass is not None:
            self._metrics.observe(LABEL_MASS, envelope.label_mass)
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

    def checked(self, ticket: Ticket, outcome: Checked) -> None:
        """A ticket that would have routed, and in which something addresses the router."""
        self._metrics.add(STEERING, self._sources.name(ticket.tenant, ticket.channel), outcome)

    def dead_lettered(self, delivery: Delivery, error: InvalidTicket) -> None:
        self._metrics.add(DEAD_LETTERS, error.code)
        self._log.warning(Event.DEAD_LETTERED, **{Attribute.REASON: error.code, **_place(delivery)})

    def failed(self, delivery: Delivery, error: Exception) -> None:
        self._metrics.add(TICKET_FAILURES, type(error).__name__)
        self._log.error(Event.FAILED, exc_info=error, **_place(delivery))

    def refused(self, refused: RefusedOutput) -> None:
        """Counts each. A topic that refuses everything is told of now and then, with how many a line stands for."""
        self._metrics.add(REFUSED_OUTPUTS, refused.code)
        topic, code = refused.output.topic, refused.code
        fields: dict[str, object] = _place(refused.delivery)
        fields |= {Attribute.CODE: code, Attribute.DETAIL: f"{topic}: {refused.detail}"}
        if self._refusals.is_first((topic, code), fields):
            self._log.error(Event.OUTPUT_REFUSED, **fields, **{Attribute.COUNT: 1})

    def _tell_refusals(self, *, all_of_them: bool = False) -> None:
        for fields, count in self._refusals.due(all_of_it=all_of_them):
            self._log.error(Event.OUTPUT_REFUSED, **fields, **{Attribute.COUNT: count})

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

    def gap(self, gap: Gap) -> None:
        place = f"{gap.partition.topic} [{gap.partition.number}]"
        if gap.stepped_back:
            self._metrics.add(LOG_STEPPED_BACK)
            detail = f"{place}: offset {gap.found} comes again after {gap.expected - 1}; all from there on is decided"
            self._log.error(Event.LOG_STEPPED_BACK, **{Attribute.DETAIL: detail})
        else:
            self._metrics.add(EXPIRED, by=gap.expired)
            detail = f"{place}: offsets {gap.expected} to {gap.found - 1} were deleted before they were read"
            self._log.error(Event.TICKETS_EXPIRED, **{Attribute.DETAIL: detail, Attribute.COUNT: gap.expired})

    def trouble(self, what: str | None) -> None:
        if what is None:
            self._log.info(Event.BROKER_RECOVERED)
        else:
            self._log.error(Event.BROKER_TROUBLE, **{Attribute.DETAIL: what})

    def cache_trouble(self, what: str | None) -> None:
        """What is wrong with the shared cache; None when it is over."""
        if what is None:
            self._log.info(Event.CACHE_RECOVERED)
        else:
            self._log.warning(Event.CACHE_TROUBLE, **{Attribute.DETAIL: what})

    def watched(self, before: Sequence[Standstill], now: Sequence[Standstill]) -> None:
        """Says what came to a standstill since, and what moves again; and what was held back until now."""
        self._tell_refusals()
        known, found = {_what(each) for each in before}, {_what(each) for each in now}
        for each in now:
            if _what(each) not in known:
                self._log.error(Event.STANDSTILL, **{Attribute.WHAT: each.what, Attribute.DETAIL: each.sentence})
        for each in before:
            if _what(each) not in found:
                fields: dict[str, object] = {Attribute.WHAT: each.what}
                if each.partition is not None:
                    fields[Attribute.PARTITION] = each.partition.number
                self._log.info(Event.MOVING_AGAIN, **fields)

    def engine_changed(self, endpoint: str, up: bool, why: str) -> None:
        tell, event = (self._log.info, Event.ENGINE_UP) if up else (self._log.error, Event.ENGINE_DOWN)
        tell(event, **{Attribute.ENDPOINT: endpoint, Attribute.DETAIL: why})

    def rows_checked(self, endpoint: str, in_order: bool, alarm: str | None) -> None:
        """Counts every check; says when an alarm begins and when it ends."""
        self._metrics.add(ENGINE_ROW_CHECKS, endpoint, "in_order" if in_order else "mixed_up")
        before, self._alarms[endpoint] = self._alarms.get(endpoint), alarm
        if alarm is not None and before is None:
            self._log.error(Event.ENGINE_ROWS_MIXED_UP, **{Attribute.ENDPOINT: endpoint, Attribute.DETAIL: alarm})
        elif alarm is None and before is not None:
            self._log.info(Event.ENGINE_ROWS_IN_ORDER, **{Attribute.ENDPOINT: endpoint})

    def rows_unwatched(self, why: str) -> None:
        self._log.warning(Event.ENGINE_ROWS_UNWATCHED, **{Attribute.DETAIL: why})

    def engine_called(self, outcome: str, seconds: float) -> None:
        self._metrics.add(ENGINE_REQUESTS, outcome)
        self._metrics.observe(ENGINE_LATENCY, seconds)


def _as_number(is_up: Callable[[str], bool], name: str) -> float:
    return float(is_up(name))


def _place(delivery: Delivery) -> dict[str, object]:
    return {Attribute.PARTITION: delivery.partition.number, Attribute.OFFSET: delivery.offset}


def _numbers(partitions: Sequence[Partition]) -> list[int]:
    return sorted(partition.number for partition in partitions)


def _what(standstill: Standstill) -> tuple[What, Partition | None]:
    return standstill.what, standstill.partition


def _standing_still(status: Callable[[], Watched], what: What) -> float:
    return float(sum(each.what is what for each in status().standstills))
