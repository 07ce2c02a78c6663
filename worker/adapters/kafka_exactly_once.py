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
from worker.adapters.kafka_records import at, partition_at
from worker.adapters.kafka_refusals import Refusal, produce
from worker.adapters.kafka_settling import ASK_S, GroupMember
from worker.adapters.kafka_shares import Share, offsets_of, settled_by, share_of, without_transaction
from worker.adapters.kafka_topic_identity import TopicIdentity
from worker.adapters.kafka_topics import TopicLookup
from worker.errors import ConfigError, StreamFatal, StreamRetriable
from worker.ports import Finished, Output, Partition, PartitionSettlement, Settled

TRANSACTION_TIMEOUT_MS = 15_000
"""The coordinator aborts a transaction that is open for so long. Readers and whoever takes over the partitions wait for
an open transaction, so it is short; every step of a settlement has a shorter limit of its own."""

START_S = 5.0
"""How long the start waits for the transaction coordinator; the first settlement goes on trying."""

ABORT_S = 0.5
"""At least so long an abort may take, whatever the settlement's own limit; the next producer does it otherwise."""

RETURN_S = 1.0
"""So much later than its timeout a call of the client may return."""

LOOK_S = 0.25
"""Where acknowledgements take longer, it is looked every so often whether the transaction has failed meanwhile."""

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

DROPPED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._STATE})
"""What the client says of outputs that it did not take or send, or does not wait for, because of another's error."""


@dataclass(slots=True)
class _Reports:
    """What the brokers said of the outputs of one transaction."""

    failures: list[Refusal] = field(default_factory=list)

    def note(self, finished: Finished, output: Output, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self.failures.append(Refusal(finished, output, error))

    def refusals(self) -> list[Refusal]:
        return [failure for failure in self.failures if failure.error.code() in REFUSALS]


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
        identity: TopicIdentity,
        log: RationedLog,
        on_error: Callable[[KafkaError], None],
        clock: Callable[[], float],
        random_part: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        """Raises ConfigError where the brokers do not let this client use transactions."""
        super().__init__(config, consumer, topics, identity, log, on_error, clock)
        self._random_part = random_part
        self._id = self._new_id()
        self._producer: Producer | None = None
        self._initialised = False
        self._open = False
        self._in_doubt: dict[Partition, int] = {}
        self._committed: dict[Partition, int] = {}
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
        while True:
            self._initialise(deadline)
            self._resolve_doubt(deadline)
            shares = [
                share_of(each, self._committed.get(each.partition, -1), self._foresight, deadline)
                for each in partitions
            ]
            offsets = offsets_of(shares, self._committed)
            settled = settled_by(shares, offsets)
            if not offsets:
                return without_transaction(settled, shares)
            reports = _Reports()
            try:
                self._transact(shares, offsets, reports, deadline)
                return settled
            except KafkaException as problem:
                error = error_of(problem)
                self._end_badly(error, reports, deadline)
                if self._learn(reports, error, deadline) and self._clock() < deadline:
                    continue  # without what was refused
                raise StreamRetriable(_why(error, reports)) from problem

    def forget(self, partitions: Iterable[Partition]) -> None:
        leaving = list(partitions)
        self._foresight.forget(leaving)
        for partition in leaving:
            self._committed.pop(partition, None)
            self._in_doubt.pop(partition, None)

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

    # -- the transaction -------------------------------------------------------------------------------------------

    def _transact(
        self, shares: Sequence[Share], offsets: dict[Partition, int], reports: _Reports, deadline: float
    ) -> None:
        """Raises KafkaException; the transaction is then open, in doubt or about to be aborted."""
        producer, membership = self._running(), self._membership()
        producer.begin_transaction()
        self._open = True
        self._tight.begin()
        for share in shares:
            self._send(producer, share.finished, reports, deadline)
        # Before the offsets are sent: they would be sent after a pause of retry.backoff.ms otherwise (2.16).
        self._flush(producer, reports, deadline)
        positions = [self._place(partition, offset) for partition, offset in offsets.items()]
        if positions:
            self._insist(partial(_send_offsets, producer, positions, membership), deadline)
        self._in_doubt = offsets
        self._insist(producer.commit_transaction, deadline)
        self._open = False
        self._in_doubt = {}
        self._committed.update(offsets)
        self._foresight.settled(offsets)

    def _send(self, producer: Producer, entries: Sequence[Finished], reports: _Reports, deadline: float) -> None:
        tight, any_tight, note, clock = self._tight, self._tight.any, reports.note, self._clock
        for finished in entries:
            for output in finished.outputs:
                if any_tight and tight.no_room(output):
                    self._flush(producer, reports, deadline)
                tight.sent(output)
                try:
                    produce(producer, output, partial(note, finished, output), deadline, clock)
                except KafkaException as problem:
                    reports.failures.append(Refusal(finished, output, error_of(problem)))
                    _raise_if_failed(producer)
                    raise

    def _flush(self, producer: Producer, reports: _Reports, deadline: float) -> None:
        asks_at = self._clock() + ASK_S
        while (left := producer.flush(max(0.0, min(LOOK_S, deadline - self._clock())))) and not reports.failures:
            _raise_if_failed(producer)
            if self._clock() >= deadline:
                break
            if self._clock() >= asks_at:
                if missing := self._foresight.missing(self._tight.waiting, deadline):
                    raise KafkaException(missing)
                asks_at = self._clock() + ASK_S
        if reports.failures:
            if all(failure.error.code() in DROPPED for failure in reports.failures):
                _raise_if_failed(producer)
            raise KafkaException(reports.failures[0].error)
        if left:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"{left} outputs were not acknowledged in time"))
        self._tight.flushed()

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

    def _end_badly(self, error: KafkaError, reports: _Reports, deadline: float) -> None:
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
            # The client counts on from a refused batch, and would fail the next one to the same partition (2.16).
            if reports.refusals():
                self._producer = None
                self._initialised = False

    def _learn(self, reports: _Reports, error: KafkaError, deadline: float) -> bool:
        """From a failed transaction: which record, topic or note is to blame. True where the next one can do better.

        A broker refuses a batch for its largest record, and the client drops what else was queued: so less is sent to
        that topic at a time, until the one to blame is alone.
        """
        self._foresight.doubt(failure.output for failure in reports.failures)
        refusals = reports.refusals()
        for refusal in refusals[:1]:
            if refusal.error.code() in TOPIC_REFUSALS or self._tight.refused(refusal.output.topic):
                self._foresight.learn(refusal)
        if error.fatal():
            return False
        if error.code() == KafkaError.OFFSET_METADATA_TOO_LARGE:
            return self._identity.stop_noting()
        if not refusals and error.code() in TOPIC_REFUSALS:  # of which topic, the transaction does not say
            foreseen = (self._foresight.refusal(failure.finished, deadline) for failure in reports.failures)
            return any(found is not None and found[1].code() in REFUSALS for found in foreseen)
        return bool(refusals)

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
        asked = [at(partition) for partition in self._in_doubt]
        try:
            found = self._consumer.committed(asked, timeout=max(0.5, deadline - self._clock()))
        except KafkaException as problem:
            raise StreamRetriable(
                f"it is not known yet whether the last transaction was committed: {error_of(problem).str()}"
            ) from problem
        if failed := [each.error for each in found if each.error]:
            raise StreamRetriable(f"it is not known yet whether the last transaction was committed: {failed[0]}")
        for each in found:
            partition = partition_at(each)
            if self._confirms(each, self._in_doubt[partition]):
                self._committed[partition] = each.offset
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


def _raise_if_failed(producer: Producer) -> None:
    """Raises KafkaException where the open transaction can only be aborted. `flush` does not tell: it waits out its
    time, and outputs are dropped without the reason. Any call that the transaction's state forbids names it (2.16)."""
    try:
        producer.begin_transaction()
    except KafkaException as problem:
        error = error_of(problem)
        if error.fatal() or error.txn_requires_abort():
            raise


def _why(error: KafkaError, reports: _Reports) -> str:
    """Never an output that was only dropped with another, as long as anything better is known."""
    for _, output, failure in reports.failures:
        if failure.code() not in DROPPED:
            return f"output to topic {output.topic!r} was not acknowledged: {failure.name()}: {failure.str()}"
    return f"the transaction was not committed: {error.name()}: {error.str()}"
