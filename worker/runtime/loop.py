"""Worker: admits deliveries, fans them out, completes them, drains; the state machine between stream and router."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime

from worker.core.rules import RuleSet
from worker.core.ticket import Ticket, parse_ticket
from worker.errors import InvalidTicket, StreamFatal, StreamRetriable, TooManyDeadLetters
from worker.ports import Delivery, Gap, Partition, Paused, RefusedOutput, Settled, Settlement, TicketStream
from worker.runtime.dead_letter_guard import DeadLetterGuard
from worker.runtime.endpoints import EnginePool, degraded
from worker.runtime.journal import Journal
from worker.runtime.offsets import OffsetTracker
from worker.runtime.outputs import Outputs
from worker.runtime.publisher import TOGETHER, Publisher
from worker.runtime.router import Router
from worker.runtime.stream_thread import Demand, StreamThread
from worker.runtime.ticket_spans import TicketSpans, say_dead_letter
from worker.runtime.watchdog import Sight, Standstill, Watchdog
from worker.telemetry import Span, Tracing, within

MAX_RECORDS = 500
BRIEFLY_S = 0.5
"""So long a full worker takes nothing before it pauses its partitions: what the client has fetched of a paused one it
throws away, and fetches again."""
SLOWLY = 256
"""So many tickets in flight are enough for an engine of which nothing is known yet."""
WATCH_S = 1.0
SHOWN = 3
"""So many sentences fit the line of /readyz; /status has them all."""


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
    ticket_deadline_s: float = 60.0
    """That of the router, which ends a ticket in order: before it nothing counts as stalled."""
    stalled_s: float = 120.0
    """So long something that should move may stand still before the worker is not ready any more."""
    unassigned_s: float = 60.0
    """The same for having no partition at all."""
    dead_letter_limit: float = 0.0
    """The share of dead letters that ends the worker; 0 is none."""


@dataclass(frozen=True, slots=True)
class Status:
    """The worker's condition at one moment."""

    assigned: int
    in_flight: int
    in_flight_bytes: int
    settled: int
    """Deliveries settled since the start."""
    lag: int | None
    """Messages behind the end of all assigned partitions; None where that is not known of every one."""
    lags: Mapping[str, int | None]
    """The same for each, by `topic/number`."""
    engine_up: bool
    engine_trouble: str | None
    engine_alarm: str | None
    """Which engines have mixed up rows and are not trusted again yet."""
    broker_trouble: str | None
    standstills: tuple[Standstill, ...]
    """What should have moved by now."""
    draining: bool

    oldest_age_s: float
    """Since the oldest ticket in flight was written, by its message's timestamp; 0 where none is in flight."""

    @property
    def ready(self) -> bool:
        """Tickets are being consumed, or would be if there were any."""
        well = self.engine_up and self.broker_trouble is None and not self.standstills
        return self.assigned > 0 and well and not self.draining

    def why_not(self) -> str:
        """Why it is not ready, in one line."""
        if self.draining:
            return "draining"
        if self.broker_trouble is not None:
            return f"broker: {self.broker_trouble}"
        if self.standstills:
            return "; ".join(each.sentence for each in self.standstills[:SHOWN])
        if not self.engine_up:
            return f"engine is down, tickets wait: {self.engine_trouble}"
        return "no partitions assigned"

    def degraded(self) -> str | None:
        """What is wrong while it is ready: engines that are out beside others, or not trusted."""
        return degraded(self.engine_trouble, self.engine_alarm)

    def shown(self) -> Mapping[str, object]:
        """Everything, as the health port shows it."""
        own = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**own, "standstills": [each.sentence for each in self.standstills]}


_Tasks = dict[int, asyncio.Task[None]]
"""Those of one partition under one assignment, by offset."""


@dataclass(slots=True)
class _Taken:
    """A delivery that was read."""

    delivery: Delivery
    ticket: Ticket | Exception
    """An InvalidTicket where the bytes are none; any other exception is a bug."""
    started: float
    span: Span | None


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
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._stream = stream
        self._router = router
        self._pool = pool
        self._rule_set = rule_set
        self._outputs = outputs
        self._limits = limits
        self._journal = journal
        self._spans = TicketSpans(tracing)
        self._clock = clock
        self._now = now
        self._sleep = sleep
        self._tracker = OffsetTracker()
        self._publisher = Publisher(
            rule_set=rule_set,
            outputs=outputs,
            journal=journal,
            spans=self._spans,
            now=now,
            complete=self._tracker.complete,
        )
        self._watchdog = Watchdog(
            stalled_s=limits.stalled_s,
            unassigned_s=limits.unassigned_s,
            ticket_deadline_s=limits.ticket_deadline_s,
        )
        self._guard = DeadLetterGuard(limits.dead_letter_limit)
        self._tasks: dict[Partition, _Tasks] = {}
        self._stopping = asyncio.Event()
        self._nothing_in_flight = asyncio.Event()
        self._nothing_in_flight.set()
        self._full = False
        self._full_since = 0.0
        self._per_second = 0.0
        self._crowded: frozenset[Partition] = frozenset()
        self._paused = Paused()
        self._asked = 0
        self._settled = 0
        self._lags: Mapping[Partition, int | None] = {}
        self._trouble: str | None = None

    async def run(self) -> None:
        """Consume until `stop`. Raises ConfigError, StreamFatal, TooManyDeadLetters; what was not settled then stays
        uncommitted, for another worker."""
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
        watching = asyncio.create_task(self._watch_over())
        try:
            await asyncio.wait([stopping, ended, watching], return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()  # raises: the watch ends by itself only by a fault
            if stopping.done() and self._guard.verdict is None:
                await self._drain(ended)
            thread.leave()
            await ended
            if self._guard.verdict is not None:
                raise TooManyDeadLetters(self._guard.verdict)
        finally:
            stopping.cancel()
            watching.cancel()
            thread.leave()
            self._cancel(tuple(self._tasks))
            self._publisher.flush()
            self._spans.close()

    def stop(self) -> None:
        """Take no more tickets, finish what is in flight (at most `drain_s`), settle, leave."""
        self._stopping.set()

    def status(self) -> Status:
        return Status(
            assigned=len(self._tracker.held()),
            in_flight=self._tracker.in_flight,
            in_flight_bytes=self._tracker.bytes_in_flight,
            settled=self._settled,
            lag=self._lag(),
            lags={f"{partition.topic}/{partition.number}": lag for partition, lag in self._lags.items()},
            engine_up=self._pool.is_up,
            engine_trouble=self._pool.trouble,
            engine_alarm=self._pool.alarm,
            broker_trouble=self._trouble,
            standstills=self._watchdog.standstills,
            draining=self._stopping.is_set(),
            oldest_age_s=self._oldest_age_s(),
        )

    def _oldest_age_s(self) -> float:
        written_ms = self._tracker.oldest_timestamp_ms()
        return 0.0 if written_ms is None else max(0.0, self._now().timestamp() - written_ms / 1000)

    async def _drain(self, ended: asyncio.Task[None]) -> None:
        nothing_left = asyncio.create_task(self._nothing_in_flight.wait())
        await asyncio.wait([nothing_left, ended], timeout=self._limits.drain_s, return_when=asyncio.FIRST_COMPLETED)
        nothing_left.cancel()

    def _lag(self) -> int | None:
        behind = 0
        for partition in self._tracker.held():
            lag = self._lags.get(partition)
            if lag is None:
                return None
            behind += lag
        return behind

    async def _watch_over(self) -> None:
        settled = 0
        while True:
            await self._sleep(WATCH_S)
            if self._stopping.is_set():
                continue  # whoever drains owes nothing
            self._per_second += 0.3 * ((self._settled - settled) / WATCH_S - self._per_second)
            settled = self._settled
            before = self._watchdog.standstills
            sight = Sight(self._tracker.progress(), self._lags, self._paused, self._asked, self._pool.is_up)
            self._watchdog.look(self._clock(), sight)
            self._journal.watched(before, self._watchdog.standstills)

    # -- what the stream's thread asks (LoopSide) ------------------------------------------------------------------

    def admit(self, deliveries: Sequence[Delivery]) -> None:
        for start in range(0, len(deliveries), TOGETHER):
            tracked = [each for each in deliveries[start : start + TOGETHER] if self._tracker.track(each)]
            for taken in [self._take(delivery) for delivery in tracked]:
                self._begin(taken)
        self._mark_idleness()

    def demand(self) -> Demand:
        """Pause when full, resume at half: pausing costs the client a refetch, so it must not flutter."""
        limits = self._limits
        held = self._tracker.held()
        in_flight, size = self._tracker.in_flight, self._tracker.bytes_in_flight
        most = self._most_in_flight()
        room = most - in_flight
        room_bytes = (limits.max_in_flight_bytes - size) // limits.max_ticket_bytes  # as if each were the largest
        if room < 1 or room_bytes < 1:
            if not self._full:
                self._full_since = self._clock()
            self._full = True
        elif in_flight <= most // 2 and size <= limits.max_in_flight_bytes // 2:
            self._full = False
        briefly = self._full and self._clock() - self._full_since < BRIEFLY_S and not self._stopping.is_set()
        self._crowded = self._crowded_partitions(held)
        self._paused = Paused(
            everything=(self._full and not briefly) or self._stopping.is_set(), partitions=self._crowded
        )
        self._asked += 1
        finished = in_flight - self._tracker.open_deliveries()
        return Demand(
            max_records=0 if briefly else max(1, min(MAX_RECORDS, room, room_bytes)),
            paused=self._paused,
            settle=finished >= max(1, most // 2),
        )

    def _most_in_flight(self) -> int:
        """No more than get through in a quarter of a ticket's deadline: with a slow engine they would wait in vain."""
        in_time = int(self._per_second * self._limits.ticket_deadline_s / 4)
        return min(self._limits.max_in_flight, max(SLOWLY, in_time))

    def _crowded_partitions(self, held: Mapping[Partition, int]) -> frozenset[Partition]:
        """Partitions that hold more than their share: one hot or stuck partition must leave room for the others."""
        if len(held) < 2:
            return frozenset()
        most = max(1, self._most_in_flight() // 2)
        return frozenset(
            partition
            for partition, count in held.items()
            if count >= most or (partition in self._crowded and count > most // 2)
        )

    def ready(self) -> Settlement:
        self._publisher.flush()
        return self._allowed(self._tracker.ready())

    def settled(self, settlement: Settlement, settled: Settled, seconds: float) -> None:
        count = self._tracker.settled(settlement, settled.committed)
        self._spans.settled(settlement, settled.committed, seconds)
        self._settled += count
        self._mark_idleness()
        if count:
            self._journal.settled(count, seconds)
        by_delivery: dict[tuple[Partition, int], list[RefusedOutput]] = {}
        for refused in settled.refused:
            self._journal.refused(refused)
            by_delivery.setdefault((refused.delivery.partition, refused.delivery.offset), []).append(refused)
        if not by_delivery:
            return
        offered = {
            (part.partition, item.delivery.offset): item.outputs
            for part in settlement.partitions
            for item in part.finished
        }
        for where, group in by_delivery.items():
            first = replace(group[0], delivery=self._spans.carrying(group[0].delivery))
            instead = self._outputs.instead_of([first, *group[1:]], offered[where], self._publisher.timestamp())
            if instead is None:
                raise StreamFatal(
                    f"topic '{self._rule_set.dead_letter_topic}' refuses even a pointer to the ticket at "
                    f"{where[0].topic}/{where[0].number}/{where[1]} ({group[0].code}); nothing was committed past it"
                )
            dead = self._rule_set.dead_letter_topic
            already = any(refused.output.topic == dead for refused in group)  # then only a pointer takes its place
            if not already and any(output.topic == dead for output in instead):
                self._judged(group[0].delivery, "undeliverable")
            self._tracker.complete(group[0].delivery, instead)

    def settling_failed(self, settlement: Settlement, error: StreamRetriable, seconds: float) -> None:
        self._spans.failed(settlement, error, seconds)
        self._journal.settling_failed(error)

    def assigned(self, epochs: Mapping[Partition, int]) -> None:
        self._cancel(tuple(epochs))
        self._publisher.flush()
        self._spans.forget(tuple(epochs))
        self._tracker.assign(epochs)
        self._journal.assigned(tuple(epochs))

    async def drained(self, partitions: Sequence[Partition]) -> Settlement:
        # On the way out the drain has had its time already; only what is finished is still settled.
        allowed_s = 0.0 if self._stopping.is_set() else self._limits.revoke_s
        tasks = [task for partition in partitions for task in self._tasks.get(partition, {}).values()]
        if tasks:
            await asyncio.wait(tasks, timeout=allowed_s)
        self._publisher.flush()
        return self._allowed(self._tracker.ready(partitions))

    def forget(self, partitions: Sequence[Partition], committed: Mapping[Partition, int] | None = None) -> None:
        self._cancel(partitions)
        self._publisher.flush()
        self._spans.forget(partitions, committed)
        self._tracker.forget(partitions)
        self._mark_idleness()
        self._journal.forgotten(partitions)

    def gap(self, gap: Gap) -> None:
        self._journal.gap(gap)

    def observe(self, lags: Mapping[Partition, int | None], trouble: str | None) -> None:
        self._lags = lags
        if trouble != self._trouble:
            self._trouble = trouble
            self._journal.trouble(trouble)

    # -- one ticket ------------------------------------------------------------------------------------------------

    def _take(self, delivery: Delivery) -> _Taken:
        started = self._clock()
        span = self._spans.begin(delivery)
        try:
            return _Taken(delivery, self._ticket(delivery), started, span)
        except Exception as error:  # noqa: BLE001 - a bug must cost a ticket its automation, never its delivery
            return _Taken(delivery, error, started, span)

    def _begin(self, taken: _Taken) -> None:
        """Ends at once what nobody has to be asked about; the rest becomes a task."""
        delivery, ticket, span = taken.delivery, taken.ticket, taken.span
        try:
            if isinstance(ticket, InvalidTicket):
                outputs = self._outputs.dead_letter(self._spans.carrying(delivery), ticket)
                if span is not None:
                    say_dead_letter(span, ticket.code)
                self._journal.dead_lettered(delivery, ticket)  # what fails before goes to people, and is told as that
                self._tracker.complete(delivery, outputs)
            elif isinstance(ticket, Exception):
                self._publisher.failed(delivery, ticket, span)
            else:
                with within(span):
                    self._route(taken, ticket)
        except Exception as error:  # noqa: BLE001 - as above
            self._publisher.failed(delivery, error, span)

    def _route(self, taken: _Taken, ticket: Ticket) -> None:
        delivery, routed = taken.delivery, self._router.without_asking(ticket)
        if routed is not None:
            self._publisher.decided(delivery, ticket, routed, self._clock() - taken.started, taken.span)
            return
        tasks = self._tasks.get(delivery.partition)
        if tasks is None:
            tasks = self._tasks[delivery.partition] = {}
        tasks[delivery.offset] = asyncio.create_task(self._ask(taken, ticket, tasks))

    async def _ask(self, taken: _Taken, ticket: Ticket, tasks: _Tasks) -> None:
        """`tasks` are those of the partition, this one among them."""
        try:
            routed = await self._router.ask(ticket)
        except Exception as error:  # noqa: BLE001 - as above
            self._publisher.failed(taken.delivery, error, taken.span)
        else:
            self._publisher.decided(taken.delivery, ticket, routed, self._clock() - taken.started, taken.span)
        finally:
            tasks.pop(taken.delivery.offset, None)  # a done callback would be a turn of the loop more

    def _ticket(self, delivery: Delivery) -> Ticket | InvalidTicket:
        try:
            rules = self._rule_set
            ticket = parse_ticket(
                delivery.value, rules.rules.intake, self._limits.max_ticket_bytes, rules.categories.prompt.canonicalise
            )
        except InvalidTicket as error:
            self._judged(delivery, error.code)
            return error
        self._judged(delivery, None)
        return ticket

    def _judged(self, delivery: Delivery, code: str | None) -> None:
        self._guard.judged(delivery, code, self._clock())
        if self._guard.verdict is not None:
            self._stopping.set()

    def _allowed(self, settlement: Settlement) -> Settlement:
        return self._guard.without_held(settlement, self._rule_set.dead_letter_topic, self._clock())

    def _mark_idleness(self) -> None:
        if self._tracker.in_flight:
            self._nothing_in_flight.clear()
        else:
            self._nothing_in_flight.set()

    def _cancel(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            for task in self._tasks.pop(partition, {}).values():
                task.cancel()
