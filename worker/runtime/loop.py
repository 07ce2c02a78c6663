"""Worker: admits deliveries, fans them out, completes them, drains; the state machine between stream and router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from worker.core.policy import escalate_unscored, reason
from worker.core.rules import RuleSet
from worker.core.ticket import Ticket, parse_ticket
from worker.errors import InvalidTicket, StreamFatal, StreamRetriable
from worker.ports import Delivery, Output, Partition, Paused, RefusedOutput, Settled, Settlement, TicketStream
from worker.runtime.endpoints import EnginePool
from worker.runtime.journal import Journal
from worker.runtime.offsets import OffsetTracker
from worker.runtime.outputs import Outputs
from worker.runtime.router import Routed, Router
from worker.runtime.stream_thread import Demand, StreamThread
from worker.telemetry import Attribute, TicketSpan, Tracing

MAX_RECORDS = 500


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the worker. Bytes are those of keys and values as received."""

    max_in_flight: int = 256
    max_in_flight_bytes: int = 64 * 1024 * 1024
    max_ticket_bytes: int = 500_000
    settle_interval_s: float = 0.2
    drain_s: float = 20.0
    revoke_s: float = 3.0
    """How long a partition that is being revoked waits for its tickets in flight."""


@dataclass(frozen=True, slots=True)
class Status:
    """The worker's condition at one moment."""

    assigned: int
    in_flight: int
    in_flight_bytes: int
    settled: int
    """Deliveries settled since the start."""
    lag: int | None
    engine_up: bool
    engine_trouble: str | None
    broker_trouble: str | None
    draining: bool

    @property
    def ready(self) -> bool:
        """Tickets are being consumed, or would be if there were any."""
        return self.assigned > 0 and self.engine_up and self.broker_trouble is None and not self.draining


class Worker:
    """Everything between one stream and one router. `run` returns after an orderly drain."""

    def __init__(
        self,
        *,
        stream: TicketStream,
        router: Router,
        pool: EnginePool,
        rule_set: RuleSet,
        outputs: Outputs,
        limits: Limits,
        journal: Journal,
        tracing: Tracing,
        clock: Callable[[], float],
        now: Callable[[], datetime],
    ) -> None:
        self._stream = stream
        self._router = router
        self._pool = pool
        self._rule_set = rule_set
        self._outputs = outputs
        self._limits = limits
        self._journal = journal
        self._tracing = tracing
        self._clock = clock
        self._now = now
        self._tracker = OffsetTracker()
        self._tasks: dict[Partition, set[asyncio.Task[None]]] = {}
        self._stopping = asyncio.Event()
        self._nothing_in_flight = asyncio.Event()
        self._nothing_in_flight.set()
        self._full = False
        self._crowded: frozenset[Partition] = frozenset()
        self._settled = 0
        self._lag: int | None = None
        self._trouble: str | None = None

    async def run(self) -> None:
        """Consume until `stop`. Raises ConfigError, StreamFatal; tickets then stay uncommitted for another worker."""
        thread = StreamThread(
            self._stream,
            self,
            asyncio.get_running_loop(),
            settle_interval_s=self._limits.settle_interval_s,
            revoke_s=self._limits.revoke_s,
            clock=self._clock,
        )
        await thread.start()
        stopping = asyncio.create_task(self._stopping.wait())
        ended = asyncio.create_task(thread.wait())
        try:
            await asyncio.wait([stopping, ended], return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                await self._drain(ended)
            thread.leave()
            await ended
        finally:
            stopping.cancel()
            thread.leave()
            self._cancel(tuple(self._tasks))

    def stop(self) -> None:
        """Take no more tickets, finish what is in flight (at most `drain_s`), settle, leave."""
        self._stopping.set()

    def status(self) -> Status:
        return Status(
            assigned=len(self._tracker.held()),
            in_flight=self._tracker.in_flight,
            in_flight_bytes=self._tracker.bytes_in_flight,
            settled=self._settled,
            lag=self._lag,
            engine_up=self._pool.is_up,
            engine_trouble=self._pool.trouble,
            broker_trouble=self._trouble,
            draining=self._stopping.is_set(),
        )

    async def _drain(self, ended: asyncio.Task[None]) -> None:
        nothing_left = asyncio.create_task(self._nothing_in_flight.wait())
        await asyncio.wait([nothing_left, ended], timeout=self._limits.drain_s, return_when=asyncio.FIRST_COMPLETED)
        nothing_left.cancel()

    # -- what the stream's thread asks (LoopSide) ------------------------------------------------------------------

    def admit(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            if self._tracker.track(delivery):
                task = asyncio.create_task(self._handle(delivery))
                group = self._tasks.setdefault(delivery.partition, set())
                group.add(task)
                task.add_done_callback(group.discard)
        self._mark_idleness()

    def demand(self) -> Demand:
        """Pause when full, resume at half: pausing costs the client a refetch, so it must not flutter."""
        limits = self._limits
        held = self._tracker.held()
        in_flight, size = self._tracker.in_flight, self._tracker.bytes_in_flight
        room = limits.max_in_flight - in_flight
        room_bytes = (limits.max_in_flight_bytes - size) // limits.max_ticket_bytes  # as if each were the largest
        if room < 1 or room_bytes < 1:
            self._full = True
        elif in_flight <= limits.max_in_flight // 2 and size <= limits.max_in_flight_bytes // 2:
            self._full = False
        self._crowded = self._crowded_partitions(held)
        return Demand(
            max_records=max(1, min(MAX_RECORDS, room, room_bytes)),
            paused=Paused(everything=self._full or self._stopping.is_set(), partitions=self._crowded),
        )

    def _crowded_partitions(self, held: Mapping[Partition, int]) -> frozenset[Partition]:
        """Partitions that hold more than their share: one hot or stuck partition must leave room for the others."""
        if len(held) < 2:
            return frozenset()
        most = max(1, self._limits.max_in_flight // 2)
        return frozenset(
            partition
            for partition, count in held.items()
            if count >= most or (partition in self._crowded and count > most // 2)
        )

    def ready(self) -> Settlement:
        return self._tracker.ready()

    def settled(self, settlement: Settlement, settled: Settled, seconds: float) -> None:
        count = self._tracker.settled(settlement, settled.committed)
        self._settled += count
        self._mark_idleness()
        if count:
            self._journal.settled(count, seconds)
        by_delivery: dict[tuple[Partition, int], list[RefusedOutput]] = {}
        for refused in settled.refused:
            self._journal.refused(refused)
            by_delivery.setdefault((refused.delivery.partition, refused.delivery.offset), []).append(refused)
        offered = {
            (part.partition, item.delivery.offset): item.outputs
            for part in settlement.partitions
            for item in part.finished
        }
        for where, group in by_delivery.items():
            instead = self._outputs.instead_of(group, offered[where], self._timestamp())
            if instead is None:
                raise StreamFatal(
                    f"topic '{self._rule_set.dead_letter_topic}' refuses even a pointer to the ticket at "
                    f"{where[0].topic}/{where[0].number}/{where[1]} ({group[0].code}); nothing was committed past it"
                )
            self._tracker.complete(group[0].delivery, instead)

    def settling_failed(self, error: StreamRetriable) -> None:
        self._journal.settling_failed(error)

    def assigned(self, epochs: Mapping[Partition, int]) -> None:
        self._cancel(tuple(epochs))
        self._tracker.assign(epochs)
        self._journal.assigned(tuple(epochs))

    async def drained(self, partitions: Sequence[Partition]) -> Settlement:
        # On the way out the drain has had its time already; only what is finished is still settled.
        allowed_s = 0.0 if self._stopping.is_set() else self._limits.revoke_s
        tasks = [task for partition in partitions for task in self._tasks.get(partition, ())]
        if tasks:
            await asyncio.wait(tasks, timeout=allowed_s)
        return self._tracker.ready(partitions)

    def forget(self, partitions: Sequence[Partition]) -> None:
        self._cancel(partitions)
        self._tracker.forget(partitions)
        self._mark_idleness()
        self._journal.forgotten(partitions)

    def observe(self, lag: int | None, trouble: str | None) -> None:
        self._lag = lag
        if trouble != self._trouble:
            self._trouble = trouble
            self._journal.trouble(trouble)

    # -- one ticket ------------------------------------------------------------------------------------------------

    async def _handle(self, delivery: Delivery) -> None:
        span = self._tracing.begin(delivery.headers)
        try:
            outputs = await self._outcome(delivery, span)
        except Exception as error:  # noqa: BLE001 - a bug must cost a ticket its automation, never its delivery
            self._journal.failed(delivery, error)
            if span is not None:
                span.fail(error)
            why = reason("internal_error", detail=type(error).__name__)
            outputs = self._publish(delivery, None, Routed(escalate_unscored(self._rule_set, why)), 0.0, span)
        finally:
            if span is not None:
                span.end()
        self._tracker.complete(delivery, outputs)

    async def _outcome(self, delivery: Delivery, span: TicketSpan | None) -> tuple[Output, ...]:
        started = self._clock()
        try:
            ticket = parse_ticket(delivery.value, self._rule_set.rules.intake, self._limits.max_ticket_bytes)
        except InvalidTicket as error:
            self._journal.dead_lettered(delivery, error)
            return self._outputs.dead_letter(delivery, error)
        routed = await self._router.route(ticket)
        return self._publish(delivery, ticket, routed, self._clock() - started, span)

    def _publish(
        self, delivery: Delivery, ticket: Ticket | None, routed: Routed, total_s: float, span: TicketSpan | None
    ) -> tuple[Output, ...]:
        envelope = self._outputs.envelope(delivery, ticket, routed, self._timestamp(), total_s)
        self._journal.decided(delivery, ticket, envelope)
        if span is None:
            return self._outputs.decided(delivery, envelope)
        span.set(Attribute.ACTION, envelope.action)
        span.set(Attribute.REASON, envelope.reasons[0].code)
        span.set(Attribute.DECISION_ID, envelope.decision_id)
        return self._outputs.decided(replace(delivery, headers=span.carry(delivery.headers)), envelope)

    def _mark_idleness(self) -> None:
        if self._tracker.in_flight:
            self._nothing_in_flight.clear()
        else:
            self._nothing_in_flight.set()

    def _timestamp(self) -> str:
        return self._now().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def _cancel(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            for task in self._tasks.pop(partition, set()):
                task.cancel()
