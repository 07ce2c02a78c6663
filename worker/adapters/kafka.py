"""The ticket stream on Kafka: membership of the group, what is assigned and paused, what librdkafka says meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from worker.adapters.kafka_bounded import returns_within
from worker.adapters.kafka_client import (
    BrokerTrouble,
    KafkaConfig,
    RationedLog,
    consumer_properties,
    error_of,
    unusable,
)
from worker.adapters.kafka_exactly_once import ExactlyOnce
from worker.adapters.kafka_gaps import Gaps
from worker.adapters.kafka_lag import Lag
from worker.adapters.kafka_records import at, headers_of, offset_of, partition_at, partition_of, timestamp_of
from worker.adapters.kafka_settling import AtLeastOnce, Settler
from worker.adapters.kafka_starts import Starts
from worker.adapters.kafka_topic_identity import TopicIdentity
from worker.adapters.kafka_topics import MOCK_CLUSTER, TopicLookup
from worker.errors import ConfigError, StreamFatal, StreamRetriable
from worker.ports import (
    AssignmentListener,
    Delivery,
    Gap,
    Partition,
    PartitionSettlement,
    Paused,
    Settled,
    Settlement,
)

__all__ = ["KafkaConfig", "KafkaStream"]

NEEDS_KIP_848 = "group_protocol 'consumer' needs Apache Kafka 4.1 or later; 'classic' works with all"

NO_TRANSACTIONS = (
    "exactly-once delivery is not possible on the embedded broker: it shows aborted transactions to readers and keeps "
    "no offsets of committed ones (librdkafka 2.16). Set ROUTER_DELIVERY=at_least_once, or use Apache Kafka"
)

PROBE_EVERY_S = 2.0
"""How often brokers in trouble are asked whether they are back."""

PROBE_S = 0.5

IDENTITY_S = 2.0
"""So long the start waits for the input topic's id, which comes in milliseconds; later it is asked for again."""

CLOSE_S = 4.0
"""How long leaving the group may take."""

HOPELESS_S = 1.0
"""How long leaving may go on trying to settle where the last attempt failed."""

UNASSIGNED_AFTER_S = 20.0
"""With KIP-848: so long without a word from the group is trouble (an older broker is silent for ever)."""


class KafkaStream:
    """TicketStream on confluent-kafka 2.16: one consumer, one producer, every call on the calling thread."""

    def __init__(
        self, config: KafkaConfig, logger: logging.Logger, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._log = RationedLog(logger, clock)
        self._trouble = BrokerTrouble(config, clock)
        self._eager = config.group_protocol == "classic" and config.assignment_strategy != "cooperative-sticky"
        self._listener: AssignmentListener | None = None
        self._consumer: Consumer | None = None
        self._settler: Settler | None = None
        self._topics: TopicLookup | None = None
        self._epochs: dict[Partition, int] = {}
        self._last_epoch = 0
        self._paused = Paused()
        self._held: set[Partition] = set()
        self._lag: Lag | None = None
        self._identity = TopicIdentity(config, self._log, clock)
        self._starts = Starts(self._identity, clock, self._log)
        self._gaps = Gaps()
        self._probed_at = 0.0
        self._opened_at = 0.0
        self._heard_of_group = False
        self._settling_problem: str | None = None
        self._callback_error: BaseException | None = None

    def open(self, listener: AssignmentListener) -> None:
        properties = consumer_properties(self._config)
        properties["error_cb"] = self._on_error
        properties["on_commit"] = self._on_commit
        try:
            topics = TopicLookup(self._config, self._log, self._clock)
            self._topics = topics
            topics.require_readable(self._config)
            if not topics.cluster_id.startswith(MOCK_CLUSTER):  # which knows of no topic ids
                self._identity.open(topics.cluster_id, IDENTITY_S)
            elif self._config.delivery == "exactly_once":
                raise ConfigError(NO_TRANSACTIONS)
            consumer = Consumer(properties, logger=self._log)
            way = ExactlyOnce if self._config.delivery == "exactly_once" else AtLeastOnce
            settler = way(self._config, consumer, topics, self._identity, self._log, self._on_error, self._clock)
        except KafkaException as problem:
            raise unusable(problem) from problem
        self._listener, self._consumer, self._settler = listener, consumer, settler
        self._lag = Lag(consumer, self._clock)
        self._opened_at = self._clock()
        consumer.subscribe(
            [self._config.input_topic],
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )

    def poll(self, max_records: int, timeout_s: float) -> Sequence[Delivery]:
        consumer, settler = self._opened()
        settler.serve()
        if self._starts.serve(consumer):
            self._note_starts()
            self._apply_pauses()
        self._begin_anew(consumer, self._identity.replaced())
        # `consume` waits until it has all it was asked for: one record ends the wait, the rest is what lies ready.
        try:
            deliveries = self._deliveries(consumer, consumer.consume(1, timeout_s))
            if deliveries and max_records > 1 and self._callback_error is None:
                deliveries += self._deliveries(consumer, consumer.consume(max_records - 1, 0))
        except KafkaException as problem:  # confluent-kafka raises the consumer's fatal errors
            raise self._fatal(error_of(problem)) from problem
        if self._callback_error is not None:
            raised, self._callback_error = self._callback_error, None
            raise raised
        if deliveries:
            self._trouble.working()
        elif self._trouble.suspected:
            self._probe()
        return deliveries

    def set_paused(self, paused: Paused) -> None:
        self._paused = paused
        self._apply_pauses()

    def settle(self, settlement: Settlement) -> Settled:
        _, settler = self._opened()
        return self._settle(settler, settlement, self._config.settle_timeout_s)

    def assignment(self) -> Mapping[Partition, int]:
        return dict(self._epochs)

    def lag(self) -> Mapping[Partition, int | None]:
        self._opened()
        return self._lag.behind(self._epochs) if self._lag is not None else {}

    def trouble(self) -> str | None:
        silent_s = self._clock() - self._opened_at
        if self._config.group_protocol == "consumer" and not self._heard_of_group and silent_s > UNASSIGNED_AFTER_S:
            return f"group {self._config.group_id!r} has not answered for {silent_s:.0f} s: {NEEDS_KIP_848}"
        return self._trouble.sentence() or self._settling_problem or self._starts.trouble()

    def close(self) -> None:
        topics, self._topics = self._topics, None
        self._identity.close()
        if self._consumer is None or self._settler is None:
            if topics is not None:
                topics.close()
            return
        consumer, settler = self._consumer, self._settler
        leaving = list(self._epochs)
        if leaving:
            # Not from librdkafka's own callback in close(): there, committed() is never answered (2.16).
            hopeless = self._settling_problem is not None
            self._release(settler, leaving, HOPELESS_S if hopeless else self._config.release_timeout_s)
        self._consumer = self._settler = self._lag = None
        if topics is not None:
            topics.close()
        # While a commit is unanswered close() would wait for it for ever: dropping the consumer ends it within
        # socket.timeout.ms, and the group notices by the session timeout. What else it may wait for, nobody knows.
        if settler.close() and not returns_within(consumer.close, CLOSE_S, "close-consumer"):
            self._log.log(logging.WARNING, "the group is left by its session timeout: the client does not let go")

    def _opened(self) -> tuple[Consumer, Settler]:
        if self._consumer is None or self._settler is None:
            raise StreamFatal("the Kafka stream is not open")
        return self._consumer, self._settler

    def _deliveries(self, consumer: Consumer, messages: Sequence[Message]) -> list[Delivery]:
        deliveries = []
        for message in messages:
            error = message.error()
            if error is not None:
                self._on_message_error(error)
                continue
            partition = partition_of(message)
            epoch = self._epochs.get(partition)
            if epoch is None:
                continue
            offset = offset_of(message)
            gap = self._gaps.before(partition, offset, consumer)
            if gap is not None:
                epoch = self._after(gap, epoch)
            # By position: names would double what it costs to make one.
            headers, timestamp_ms = headers_of(message), timestamp_of(message)
            deliveries.append(Delivery(partition, offset, epoch, message.key(), message.value(), headers, timestamp_ms))
        return deliveries

    def _after(self, gap: Gap, epoch: int) -> int:
        """The epoch under which this partition is read from here on."""
        if self._listener is not None:
            self._listener.gap(gap)
        if not gap.stepped_back:
            return epoch
        # What is in flight, and what is known to be settled, belongs to a log that is no more.
        self._forget([gap.partition])
        self._last_epoch += 1
        self._epochs[gap.partition] = self._last_epoch
        self._gaps.begin({gap.partition: gap.found + 1})
        self._identity.begin([gap.partition])
        self._identity.hurry()
        if self._lag is not None:
            self._lag.committed({gap.partition: gap.found})
        if self._listener is not None:
            self._listener.lost([gap.partition])
            self._listener.assigned({gap.partition: self._last_epoch})
        self._apply_pauses()
        return self._last_epoch

    def _begin_anew(self, consumer: Consumer, partitions: Sequence[Partition]) -> None:
        """At the beginning of the topic that has taken the place of the other."""
        for partition in partitions:
            expected = self._gaps.expected(partition)
            if expected:
                self._after(Gap(partition, expected, 0), self._epochs[partition])
                self._gaps.begin({partition: 0})
            consumer.seek(at(partition, OFFSET_BEGINNING))

    def _on_message_error(self, error: KafkaError) -> None:
        if error.fatal() or error.code() == KafkaError._FATAL:
            raise self._fatal(error)
        self._trouble.report(error)
        self._log.log(logging.WARNING, "consumer: %s: %s", error.name(), error.str())

    def _fatal(self, error: KafkaError) -> StreamFatal:
        hint = f"; {NEEDS_KIP_848}" if self._config.group_protocol == "consumer" else ""
        return StreamFatal(f"Kafka consumer of {self._config.input_topic!r}: {error.str()}{hint}")

    def _on_error(self, error: KafkaError) -> None:
        self._trouble.report(error)

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        if self._settler is not None:
            self._settler.commit_answered(error, partitions)

    def _probe(self) -> None:
        now = self._clock()
        if self._topics is None or now - self._probed_at < PROBE_EVERY_S:
            return
        try:
            if self._topics.error(self._config.input_topic, PROBE_S) is None:
                self._trouble.answered()
        except KafkaException:
            pass  # still away
        self._probed_at = self._clock()

    def _settle(self, settler: Settler, settlement: Settlement, timeout_s: float) -> Settled:
        current: list[PartitionSettlement] = [
            part for part in settlement.partitions if self._epochs.get(part.partition) == part.epoch
        ]
        if not current:
            return Settled()
        if self._trouble.unreachable:
            self._probe()
            if self._trouble.unreachable:  # waiting out the timeout would only keep this thread from its other duties
                raise StreamRetriable(f"no broker answers: {self._trouble.reason}")
        try:
            settled = settler.settle(current, timeout_s)
        except StreamRetriable as problem:
            self._settling_problem = f"nothing can be settled: {problem}"
            raise
        self._settling_problem = None
        if self._lag is not None:
            self._lag.committed(settled.committed)
        return settled

    def _release(self, settler: Settler, partitions: Sequence[Partition], timeout_s: float) -> None:
        listener = self._listener
        if listener is None:
            return
        settled = Settled()
        try:
            settled = self._settle(settler, listener.revoking(partitions), timeout_s)
        except StreamRetriable as problem:
            self._log.log(logging.WARNING, "released without settling: %s", problem)
        self._forget(partitions)
        listener.released(partitions, settled)

    def _forget(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            self._epochs.pop(partition, None)
        self._starts.forget(partitions)
        self._gaps.forget(partitions)
        self._identity.forget(partitions)
        if self._lag is not None:
            self._lag.forget(partitions)
        if self._settler is not None:
            self._settler.forget(partitions)

    def _on_assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        """Assigns by itself, because only then can the new partitions be paused before they deliver."""
        self._heard_of_group = True
        try:
            starts = self._starts.of(consumer, assigned)
            if self._eager:
                consumer.assign(starts)
            else:
                consumer.incremental_assign(starts)
            epochs = {}
            for partition in map(partition_at, assigned):
                self._last_epoch += 1
                epochs[partition] = self._last_epoch
            self._gaps.forget(epochs)
            self._note_starts()
            self._epochs.update(epochs)
            self._apply_pauses()
            self._trouble.working()
            if epochs:
                # What an old epoch could not settle is offered no more; what still can be is tried again soon.
                self._settling_problem = None
                if self._listener is not None:
                    self._listener.assigned(epochs)
        except BaseException as problem:  # noqa: BLE001  # raised by poll: inside librdkafka it would drop messages
            self._callback_error = problem

    def _note_starts(self) -> None:
        found = self._starts.begun()
        self._identity.begin(found)
        if self._listener is not None:
            for gap in self._starts.replaced():
                self._listener.gap(gap)
        self._gaps.begin({partition: offset for partition, offset in found.items() if offset is not None})
        if self._lag is not None:
            self._lag.committed({partition: offset or 0 for partition, offset in found.items()})

    def _on_revoke(self, _consumer: Consumer, revoked: list[TopicPartition]) -> None:
        """confluent-kafka unassigns them when this returns."""
        partitions = list(map(partition_at, revoked))
        leaving = [partition for partition in partitions if partition in self._epochs]
        if not leaving or self._settler is None:
            return
        try:
            self._release(self._settler, leaving, self._config.release_timeout_s)
        except BaseException as problem:  # noqa: BLE001  # as in _on_assign
            self._callback_error = problem

    def _on_lost(self, _consumer: Consumer, lost: list[TopicPartition]) -> None:
        partitions = list(map(partition_at, lost))
        leaving = [partition for partition in partitions if partition in self._epochs]
        self._forget(leaving)
        try:
            if leaving and self._listener is not None:
                self._listener.lost(leaving)
        except BaseException as problem:  # noqa: BLE001  # as in _on_assign
            self._callback_error = problem

    def _apply_pauses(self) -> None:
        """A partition that comes back may still be held from before (eager protocols), so all are compared."""
        if self._consumer is None:
            return
        wanted = {p for p in self._epochs if self._paused.everything or p in self._paused.partitions}
        wanted |= self._starts.waiting
        to_pause = [at(partition) for partition in wanted - self._held]
        to_resume = [at(partition) for partition in self._held.intersection(self._epochs) - wanted]
        if to_pause:
            self._consumer.pause(to_pause)
        if to_resume:
            self._consumer.resume(to_resume)
        # What is not assigned just now stays held: the client remembers its pause until it comes back.
        self._held = wanted | self._held.difference(self._epochs)
