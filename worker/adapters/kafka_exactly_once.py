"""How a settlement reaches Kafka exactly once: outputs and offsets in one transaction (KIP-98, KIP-447)."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from worker.adapters.kafka_client import (
    REFUSALS,
    TOPIC_REFUSALS,
    KafkaConfig,
    RationedLog,
    error_of,
    producer_properties,
)
from worker.adapters.kafka_refusals import Report, produce
from worker.adapters.kafka_settling import GroupMember
from worker.adapters.kafka_topics import TopicLookup
from worker.errors import ConfigError, StreamFatal, StreamRetriable
from worker.ports import Finished, Output, Partition, PartitionSettlement, RefusedOutput, Settled

TRANSACTION_TIMEOUT_MS = 15_000
"""The coordinator aborts a transaction that is open for so long. Readers and whoever takes over the partitions wait for
an open transaction, so it is short; every step of a settlement has a shorter limit of its own."""

START_S = 5.0
"""How long the start waits for the transaction coordinator; the first settlement goes on trying."""

ABORT_S = 0.5
"""At least so long an abort may take, whatever the settlement's own limit; the next producer does it otherwise."""

RETURN_S = 1.0
"""So much later than its timeout a call of the client may return."""

CLOSE_S = 2.0
"""How long closing may take to end a transaction that was left open."""

NOT_PERMITTED = frozenset(
    {
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.UNSUPPORTED_VERSION,
        KafkaError._UNSUPPORTED_FEATURE,
    }
)
"""Errors of `init_transactions` that waiting cannot cure."""


@dataclass(slots=True)
class _Share:
    """One partition's part of a transaction: the longest prefix that no refusal is known of."""

    partition: Partition
    finished: Sequence[Finished]
    next_offset: int
    obstacle: tuple[Finished, Output, KafkaError] | None
    committed: int | None
    """The offset that turned out to be committed, where the settlement still held entries before it."""


@dataclass(slots=True)
class _Reports:
    """What the brokers said of the outputs of one transaction."""

    failures: list[tuple[Finished, Output, KafkaError]] = field(default_factory=list)

    def on(self, finished: Finished, output: Output) -> Report:
        def report(error: KafkaError | None, _message: Message) -> None:
            if error is not None:
                self.failures.append((finished, output, error))

        return report

    def refusals(self) -> list[tuple[Finished, Output, KafkaError]]:
        return [failure for failure in self.failures if failure[2].code() in REFUSALS]


class ExactlyOnce(GroupMember):
    """A transactional producer. A settlement is visible to readers with isolation.level=read_committed as a whole, with
    the offsets that follow from it, or not at all.

    `transactional.id` has a random part for each process, so that workers with the same settings never fence each
    other; what keeps a worker out whose partitions have moved is the group's generation, sent along with the offsets.
    A producer that failed is followed by one with the same id: its `init_transactions` ends what the one before
    left open. Where it is unknown whether a transaction was committed, the group's offsets tell.
    """

    def __init__(
        self,
        config: KafkaConfig,
        consumer: Consumer,
        topics: TopicLookup,
        log: RationedLog,
        on_error: Callable[[KafkaError], None],
        clock: Callable[[], float],
        random_part: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """Raises ConfigError where the brokers do not let this client use transactions."""
        super().__init__(config, consumer, topics, log, on_error, clock)
        self._random_part = random_part
        self._id = self._new_id()
        self._producer: Producer | None = None
        self._initialised = False
        self._open = False
        self._in_doubt: dict[Partition, int] = {}
        self._committed: dict[Partition, int] = {}
        self._learned: dict[tuple[Partition, int], tuple[Output, KafkaError]] = {}
        self._apart: set[str] = set()
        try:
            self._start_producer(clock() + START_S)
        except KafkaException as problem:
            error = error_of(problem)
            if error.code() in NOT_PERMITTED:
                raise ConfigError(
                    f"exactly-once delivery is not possible on {config.bootstrap_servers}: {error.str()}. Permit this "
                    f"client to write with transactional ids that begin with {config.group_id!r}, or set the delivery "
                    "to at_least_once"
                ) from problem
            log.log(logging.WARNING, "waiting for the transaction coordinator: %s", error)

    def settle(self, partitions: Sequence[PartitionSettlement], timeout_s: float) -> Settled:
        deadline = self._clock() + timeout_s
        self._initialise(deadline)
        self._resolve_doubt(deadline)
        while True:
            shares = [self._share(settlement, deadline) for settlement in partitions]
            settled = self._settled_by(shares)
            if not self._offsets(shares):
                return _without_transaction(settled, shares)
            reports = _Reports()
            try:
                self._transact(shares, reports, deadline)
                return settled
            except KafkaException as problem:
                error = error_of(problem)
                self._end_badly(error, deadline)
                if self._learn(reports, error) and self._clock() < deadline and self._initialised:
                    continue  # without what was refused
                raise StreamRetriable(_why(error, reports)) from problem

    def forget(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self._committed.pop(partition, None)
            self._in_doubt.pop(partition, None)
            for known in [known for known in self._learned if known[0] == partition]:
                del self._learned[known]

    def serve(self) -> None:
        self._note_poll()
        if self._producer is not None:
            self._producer.poll(0)

    def commit_answered(self, error: KafkaError | None, partitions: Sequence[TopicPartition]) -> None:
        """The consumer commits nothing by itself."""

    def close(self) -> bool:
        if self._open:  # what is left open would hold up readers and the next owner until it times out
            try:
                self._initialise(self._clock() + CLOSE_S)
            except StreamRetriable as problem:
                self._log.log(logging.WARNING, "a transaction is left to its timeout: %s", problem)
        self._producer = None
        self._initialised = False
        return True

    # -- what goes into a transaction ------------------------------------------------------------------------------

    def _share(self, settlement: PartitionSettlement, deadline: float) -> _Share:
        partition = settlement.partition
        known = self._committed.get(partition, -1)
        finished = [each for each in settlement.finished if each.delivery.offset >= known]
        news = known if len(finished) < len(settlement.finished) else None
        for index, each in enumerate(finished):
            found = self._learned.get((partition, each.delivery.offset))
            if found is None or found[0] not in each.outputs:  # others took their place
                found = self._foresight.refusal(each, deadline)
            if found is not None:
                return _Share(partition, finished[:index], each.delivery.offset, (each, *found), news)
        return _Share(partition, finished, settlement.next_offset, None, news)

    def _offsets(self, shares: Sequence[_Share]) -> dict[Partition, int]:
        """Those that move: an offset that stays where it was is not sent."""
        return {
            share.partition: share.next_offset
            for share in shares
            if (share.finished or share.obstacle is None)
            and share.next_offset > self._committed.get(share.partition, -1)
        }

    def _settled_by(self, shares: Sequence[_Share]) -> Settled:
        """What this settlement amounts to once its transaction is committed."""
        committed = {share.partition: share.committed for share in shares if share.committed is not None}
        committed.update(self._offsets(shares))
        refused = []
        for share in shares:
            if share.obstacle is not None and share.obstacle[2].code() in REFUSALS:
                finished, output, error = share.obstacle
                detail = f"topic {output.topic!r}: {error.str()}"
                refused.append(RefusedOutput(finished.delivery, output, error.name(), detail))
        return Settled(committed, tuple(refused))

    # -- the transaction -------------------------------------------------------------------------------------------

    def _transact(self, shares: Sequence[_Share], reports: _Reports, deadline: float) -> None:
        """Raises KafkaException; the transaction is then open, in doubt or about to be aborted."""
        producer, membership = self._running(), self._membership()
        producer.begin_transaction()
        self._open = True
        for share in shares:
            for finished in share.finished:
                for output in finished.outputs:
                    self._send(producer, finished, output, reports, deadline)
                    if output.topic in self._apart:
                        self._flush(producer, reports, deadline)
        # Before the offsets are sent: they would be sent after a pause of retry.backoff.ms otherwise (2.16).
        self._flush(producer, reports, deadline)
        offsets = self._offsets(shares)
        positions = [TopicPartition(at.topic, at.number, offset) for at, offset in offsets.items()]
        if positions:
            self._insist(partial(_send_offsets, producer, positions, membership), deadline)
        self._in_doubt = offsets
        self._insist(producer.commit_transaction, deadline)
        self._open = False
        self._in_doubt = {}
        self._committed.update(offsets)
        self._apart.clear()
        for partition, offset in [known for known in self._learned if known[1] < offsets.get(known[0], 0)]:
            del self._learned[partition, offset]

    def _send(self, producer: Producer, finished: Finished, output: Output, reports: _Reports, deadline: float) -> None:
        try:
            produce(producer, output, reports.on(finished, output), until=deadline, clock=self._clock)
        except KafkaException as problem:
            reports.failures.append((finished, output, error_of(problem)))
            raise

    def _flush(self, producer: Producer, reports: _Reports, deadline: float) -> None:
        left = producer.flush(max(0.0, deadline - self._clock()))
        if reports.failures:
            raise KafkaException(reports.failures[0][2])
        if left:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{left} outputs were not acknowledged in time"))

    def _insist(self, call: Callable[[float], None], deadline: float) -> None:
        """Again while the client says that it may be tried again. At the deadline its last error is raised."""
        while True:
            try:
                call(max(0.2, deadline - self._clock()))
                return
            except KafkaException as problem:
                error = error_of(problem)
                if not error.retriable() or error.fatal() or error.txn_requires_abort() or self._clock() >= deadline:
                    raise
                self._running().poll(0.05)

    def _end_badly(self, error: KafkaError, deadline: float) -> None:
        """Aborts what was begun; where that does not work, the producer is given up and the next one does it."""
        until = max(deadline, self._clock() + ABORT_S)
        if error.fatal() or (self._in_doubt and not error.txn_requires_abort()):
            self._give_up(error)
            return
        try:
            self._insist(self._running().abort_transaction, until)
        except KafkaException as problem:
            self._give_up(error_of(problem))
        else:
            self._open = False
            self._in_doubt = {}

    def _learn(self, reports: _Reports, error: KafkaError) -> bool:
        """From a failed transaction: which record or topic is to blame. True where the next one can do better.

        A broker refuses a batch for its largest record, and the client drops what else was queued: so what is for
        these topics is sent once more record by record, and the first that fails then is to blame.
        """
        self._foresight.doubt(output for _, output, _ in reports.failures)
        refusals = reports.refusals()
        for finished, output, refusal in refusals[:1]:
            delivery = finished.delivery
            if refusal.code() in TOPIC_REFUSALS:
                self._foresight.refuse_topic(output.topic, refusal)
            elif output.topic in self._apart:
                self._learned[delivery.partition, delivery.offset] = (output, refusal)
            else:
                self._apart.add(output.topic)
        return bool(refusals) and not error.fatal()

    # -- the producer ----------------------------------------------------------------------------------------------

    def _initialise(self, deadline: float) -> None:
        try:
            self._start_producer(deadline)
        except KafkaException as problem:
            text = error_of(problem).str()
            raise StreamRetriable(f"the transaction coordinator does not take this worker: {text}") from problem

    def _start_producer(self, deadline: float) -> None:
        """A producer that may begin a transaction; whatever one before it left open is ended by this."""
        if self._initialised:
            return
        if self._producer is None:
            properties = producer_properties(self._config)
            properties["message.timeout.ms"] = min(properties["message.timeout.ms"], TRANSACTION_TIMEOUT_MS)
            properties["transactional.id"] = self._id
            properties["transaction.timeout.ms"] = TRANSACTION_TIMEOUT_MS
            # What was acknowledged, `flush` says of all together: a call for each would be a tenth of settling's cost.
            properties["delivery.report.only.error"] = True
            properties["error_cb"] = self._on_error
            self._producer = Producer(properties, logger=self._log)
        try:
            self._insist(self._producer.init_transactions, deadline)
        except KafkaException as problem:
            if not error_of(problem).retriable():
                self._producer = None
                self._id = self._new_id()  # should this one be the reason
            raise
        self._initialised = True
        self._open = False

    def _resolve_doubt(self, deadline: float) -> None:
        """Asks the group whether a transaction was committed whose end is unknown; the answer waits for that end."""
        if not self._in_doubt:
            return
        asked = [TopicPartition(partition.topic, partition.number) for partition in self._in_doubt]
        try:
            found = self._consumer.committed(asked, timeout=max(0.5, deadline - self._clock()))
        except KafkaException as problem:
            raise StreamRetriable(
                f"it is not known yet whether the last transaction was committed: {error_of(problem).str()}"
            ) from problem
        if failed := [at.error for at in found if at.error]:
            raise StreamRetriable(f"it is not known yet whether the last transaction was committed: {failed[0]}")
        for at in found:
            partition = Partition(at.topic, at.partition)
            if at.offset >= self._in_doubt[partition]:
                self._committed[partition] = at.offset
        self._in_doubt = {}

    def _give_up(self, error: KafkaError) -> None:
        self._log.log(logging.WARNING, "a new transactional producer follows: %s: %s", error.name(), error.str())
        self._producer = None
        self._initialised = False

    def _running(self) -> Producer:
        if self._producer is None:
            raise StreamFatal("the transactional producer is closed")
        return self._producer

    def _new_id(self) -> str:
        return f"{self._config.group_id}-{self._random_part()}"


def _send_offsets(producer: Producer, positions: list[TopicPartition], membership: Any, timeout_s: float) -> None:
    """With a limit that holds. Where the broker is killed meanwhile, librdkafka 2.16 never returns from this call, not
    even when the broker is back: then the call is left behind with its producer, which the next one fences.
    """
    answer: Future[None] = Future()

    def send() -> None:
        try:
            producer.send_offsets_to_transaction(positions, membership, timeout_s)
        except Exception as problem:  # noqa: BLE001  # raised where it is waited for
            answer.set_exception(problem)
        else:
            answer.set_result(None)

    threading.Thread(target=send, name="send-offsets", daemon=True).start()  # noqa: TID251  # as said above
    try:
        answer.result(timeout_s + RETURN_S)
    except TimeoutError:
        error = KafkaError(KafkaError._TIMED_OUT, "the client does not return from sending offsets", fatal=True)
        raise KafkaException(error) from None


def _without_transaction(settled: Settled, shares: Sequence[_Share]) -> Settled:
    """Nothing can be added to what is committed already."""
    if settled.committed or settled.refused:
        return settled
    for share in shares:
        if share.obstacle is not None:
            _, output, error = share.obstacle
            raise StreamRetriable(f"output to topic {output.topic!r} cannot be produced now: {error.str()}")
    return settled


def _why(error: KafkaError, reports: _Reports) -> str:
    for _, output, failure in reports.failures[:1]:
        return f"output to topic {output.topic!r} was not acknowledged: {failure.name()}: {failure.str()}"
    return f"the transaction was not committed: {error.name()}: {error.str()}"
