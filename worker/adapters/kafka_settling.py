"""How a settlement reaches Kafka at least once: outputs, their acknowledgements, then the offsets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

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
from worker.adapters.kafka_refusals import Foresight, Refusal, Report, produce
from worker.adapters.kafka_shares import refused_in
from worker.adapters.kafka_tight_topics import TightTopics
from worker.adapters.kafka_topic_identity import TopicIdentity
from worker.adapters.kafka_topics import TopicLookup
from worker.errors import StreamRetriable
from worker.ports import Output, Partition, PartitionSettlement, Settled

FATAL = (KafkaException, SystemError)
"""What `flush` and `poll` of a producer raise after a fatal error. confluent-kafka 2.16 sets the exception and goes on
calling delivery callbacks, in which the first call into the client then ends as a SystemError."""

ASK_S = 1.0
"""After so long without all acknowledgements it is asked whether the topics are there still: the client would wait."""

READ_BACKS = 3
"""How often, a tenth of a second apart, a commit is looked for before it counts as not made."""


class Settler(Protocol):
    """One way to settle: at least once here, exactly once in `kafka_exactly_once`."""

    def settle(self, partitions: Sequence[PartitionSettlement], timeout_s: float) -> Settled:
        """All partitions are of the current epoch. Raises StreamRetriable where nothing came of it."""

    def forget(self, partitions: Iterable[Partition]) -> None:
        """These partitions left: nothing that is known about them holds any longer."""

    def serve(self) -> None:
        """Run the producer's callbacks without waiting."""

    def commit_answered(self, error: KafkaError | None, partitions: Sequence[TopicPartition]) -> None:
        """The consumer's commit callback."""

    def close(self) -> bool:
        """Let go of the producer. False where a commit is unanswered: then the consumer's close would never return."""


class GroupMember:
    """What both ways to settle stand on: the clients of this process, and its membership of the group."""

    def __init__(
        self,
        config: KafkaConfig,
        consumer: Consumer,
        topics: TopicLookup,
        identity: TopicIdentity,
        log: RationedLog,
        on_error: Callable[[KafkaError], None],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._consumer = consumer
        self._foresight = Foresight(config, topics, clock)
        self._tight = TightTopics(clock)
        self._identity = identity
        self._log = log
        self._on_error = on_error
        self._clock = clock
        self._polled_at = clock()

    def _note_poll(self) -> None:
        """The stream is about to poll, which is what keeps a member in its group."""
        self._polled_at = self._clock()

    def _membership(self) -> Any:
        """The group's metadata as of now, which the brokers check when offsets arrive. Raises StreamRetriable.

        They would not check those of a member that the group took for dead and that knows it: without a member id they
        pass for a client's outside any group (Kafka 4.3), and a KIP-848 group without members takes any.
        """
        membership = self._consumer.consumer_group_metadata()
        silent_ms = (self._clock() - self._polled_at) * 1_000
        if not self._consumer.memberid() or silent_ms >= self._config.max_poll_interval_ms:
            raise StreamRetriable(f"this worker is no member of group {self._config.group_id!r} any more")
        return membership

    def _place(self, partition: Partition, offset: int) -> TopicPartition:
        """For a commit, with a note of the topic that the offset counts in."""
        return at(partition, offset, self._identity.note(partition))

    def _confirms(self, committed: TopicPartition, offset: int) -> bool:
        """Whether what the group has committed is this offset or a later one, and not one of an earlier topic."""
        return not committed.error and committed.offset >= offset and self._identity.counts_here(committed)


class _Progress:
    """One partition of a settlement on its way: what is unacknowledged, and where its first failure is."""

    def __init__(self, settlement: PartitionSettlement, start: int) -> None:
        self.settlement = settlement
        self.start = start
        self.attempt = 0
        self.open = [0] * len(settlement.finished)
        self.failures: dict[int, tuple[Output, int, str, str]] = {}
        self.rejected = False
        """Whether a broker, or the client on its way there, failed an output of this attempt."""
        self.unsent_from = len(settlement.finished)

    def acknowledged(self) -> int:
        """Index of the first entry that is not wholly acknowledged."""
        for index in range(self.start, self.unsent_from):
            if self.open[index] or index in self.failures:
                return index
        return self.unsent_from

    def offset_after(self, index: int) -> int:
        """The offset to commit where all entries before `index` are acknowledged."""
        finished = self.settlement.finished
        return finished[index].delivery.offset if index < len(finished) else self.settlement.next_offset

    def fail(self, index: int, output: Output, error: KafkaError) -> None:
        self.failures.setdefault(index, (output, error.code(), error.name(), error.str()))

    def refusal(self) -> Refusal | None:
        """What its first open entry was refused for, if it was."""
        first = self.acknowledged()
        if first not in self.failures or self.failures[first][1] not in REFUSALS:
            return None
        output, code, _, text = self.failures[first]
        return Refusal(self.settlement.finished[first], output, KafkaError(code, text))

    def sent_again(self, index: int) -> None:
        """What is known from `index` on is void: those entries are to be sent once more, in order."""
        self.attempt += 1  # reports that still arrive belong to the attempt before
        self.start = self.unsent_from = index
        self.rejected = False
        for later in range(index, len(self.open)):
            self.open[later] = 0
            self.failures.pop(later, None)


class AtLeastOnce(GroupMember):
    """An idempotent producer, then one commit of what was acknowledged.

    librdkafka 2.16's synchronous commit never returns while the group's coordinator is away. So commits are sent
    asynchronously and read back with `committed`, which takes a timeout; the coordinator answers both in order.
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
    ) -> None:
        super().__init__(config, consumer, topics, identity, log, on_error, clock)
        self._producer_failed = False
        self._producer = self._new_producer()
        self._acknowledged: dict[Partition, int] = {}
        self._unanswered_commits = 0
        self._notes_taken = False
        """Whether the coordinator has confirmed a commit with a note in it."""

    def settle(self, partitions: Sequence[PartitionSettlement], timeout_s: float) -> Settled:
        deadline = self._clock() + timeout_s
        self._membership()  # first: what it produced now, another member will produce too
        if self._producer_failed:
            self._producer = self._new_producer()
            self._producer_failed = False
        sending = [_Progress(partition, self._first_unsent(partition)) for partition in partitions]
        self._tight.begin()
        for progress in sending:
            self._send(progress, sending, deadline)
        self._flush_group(sending, deadline)
        self._purge()
        self._find_the_refused(sending, deadline)
        refused = tuple(refused_in(each for progress in sending for each in self._refusals(progress, deadline)))
        targets = {}
        for progress in sending:
            first = progress.acknowledged()
            for finished in progress.settlement.finished[first : first + 1]:
                self._foresight.doubt(finished.outputs)
            offset = progress.offset_after(first)
            self._acknowledged[progress.settlement.partition] = offset
            if first > 0:
                targets[progress.settlement.partition] = offset
        committed = self._commit(targets, max(1.0, deadline - self._clock()))
        self._foresight.settled(committed)
        if sending and not committed and not refused:
            raise StreamRetriable(self._why_nothing(sending))
        return Settled(committed, refused)

    def forget(self, partitions: Iterable[Partition]) -> None:
        leaving = list(partitions)
        self._foresight.forget(leaving)
        for partition in leaving:
            self._acknowledged.pop(partition, None)

    def serve(self) -> None:
        self._note_poll()
        self._serve(0)

    def commit_answered(self, error: KafkaError | None, partitions: Sequence[TopicPartition]) -> None:
        self._unanswered_commits = max(0, self._unanswered_commits - 1)
        failures = [failed for failed in [error, *(partition.error for partition in partitions)] if failed]
        if any(failed.code() == KafkaError.OFFSET_METADATA_TOO_LARGE for failed in failures):
            self._identity.stop_noting()  # which says so
        errors = {str(each) for each in failures if each.code() != KafkaError.OFFSET_METADATA_TOO_LARGE}
        if errors:
            self._log.log(logging.WARNING, "commit refused: %s", "; ".join(sorted(errors)))

    def close(self) -> bool:
        self._purge()
        return self._unanswered_commits == 0

    def _first_unsent(self, settlement: PartitionSettlement) -> int:
        """Entries acknowledged earlier whose commit failed are not produced again."""
        acknowledged = self._acknowledged.get(settlement.partition, -1)
        for index, finished in enumerate(settlement.finished):
            if finished.delivery.offset >= acknowledged:
                return index
        return len(settlement.finished)

    def _send(self, progress: _Progress, sending: Sequence[_Progress], deadline: float) -> None:
        """Hands outputs to the client in order, up to the first entry that is known beforehand to fail."""
        for index, finished in enumerate(progress.settlement.finished[progress.start :], progress.start):
            full = any(self._tight.no_room(output) for output in finished.outputs)
            if full and not self._flush_group(sending, deadline):
                progress.unsent_from = index
                return
            if not self._send_entry(progress, index, deadline):
                progress.unsent_from = index + 1
                return

    def _send_entry(self, progress: _Progress, index: int, deadline: float) -> bool:
        finished = progress.settlement.finished[index]
        foreseen = self._foresight.refusal(finished, deadline)
        if foreseen is not None:
            progress.fail(index, *foreseen)
            return False
        for output in finished.outputs:
            progress.open[index] += 1
            self._tight.sent(output)
            try:
                produce(self._producer, output, _report(progress, index, output), deadline, self._clock)
            except KafkaException as problem:
                progress.open[index] -= 1
                progress.rejected = True
                progress.fail(index, output, error_of(problem))
                self._producer_failed = self._producer_failed or error_of(problem).fatal()
                return False
        return True

    def _find_the_refused(self, sending: Iterable[_Progress], deadline: float) -> None:
        """A broker refuses a batch for one record: whoever was not alone in it is sent again, by itself."""
        alone: dict[str, bool] = {}
        for progress in sending:
            refusal = progress.refusal()
            if refusal is None or not progress.rejected:  # what was foreseen tells nothing new, such as until when
                continue
            topic = refusal.output.topic
            if topic not in alone:
                alone[topic] = refusal.error.code() in TOPIC_REFUSALS or self._tight.refused(topic)
            if alone[topic]:
                self._foresight.learn(refusal)
            elif self._foresight.refusal(refusal.finished, deadline) is None:
                self._send_one_by_one(progress, progress.acknowledged(), deadline)

    def _send_one_by_one(self, progress: _Progress, first: int, deadline: float) -> None:
        progress.sent_again(first)
        for index in range(first, len(progress.settlement.finished)):
            if self._clock() >= deadline:
                return
            self._tight.begin()
            progress.unsent_from = index + 1
            if not self._send_entry(progress, index, deadline):
                return
            self._flush(deadline)
            if progress.acknowledged() <= index:
                self._purge()
                refusal = progress.refusal()
                if refusal is not None:
                    self._foresight.learn(refusal)
                return
            self._tight.flushed()

    def _flush_group(self, sending: Iterable[_Progress], deadline: float) -> bool:
        """Whether everything that was sent is acknowledged."""
        self._flush(deadline)
        taken = not any(progress.rejected or any(progress.open) for progress in sending)
        if taken:
            self._tight.flushed()
        return taken

    def _flush(self, deadline: float) -> None:
        try:
            left = self._producer.flush(max(0.0, min(ASK_S, deadline - self._clock())))
            if left and self._foresight.missing(self._tight.waiting, deadline) is None:
                self._producer.flush(max(0.0, deadline - self._clock()))
        except FATAL as problem:
            self._give_up_producer(problem)

    def _serve(self, timeout_s: float) -> None:
        try:
            self._producer.poll(timeout_s)
        except FATAL as problem:
            self._give_up_producer(problem)

    def _purge(self) -> None:
        """After the deadline nothing may linger and be delivered behind the back of the next attempt.

        What is in flight may still arrive; it is reported as failed and produced again.
        """
        if len(self._producer):
            self._producer.purge()
            self._flush(self._clock() + 1.0)

    def _refusals(self, progress: _Progress, deadline: float) -> Iterator[Refusal]:
        """The one that this partition stopped at, and what is known behind it: they are replaced all at once."""
        found = progress.refusal()
        if found is None:
            return
        yield found
        for finished in progress.settlement.finished[progress.acknowledged() + 1 :]:
            foreseen = self._foresight.refusal(finished, deadline)
            if foreseen is None:
                continue
            if foreseen[1].code() not in REFUSALS:
                return
            yield Refusal(finished, *foreseen)

    def _commit(self, targets: dict[Partition, int], timeout_s: float) -> dict[Partition, int]:
        """Those of the targets that the coordinator confirms."""
        if not targets:
            return {}
        deadline = self._clock() + timeout_s
        noting = any(self._identity.note(partition) for partition in targets)
        noted = [self._place(partition, offset) for partition, offset in targets.items()]
        try:
            confirmed = self._confirmed(targets, noted, timeout_s)
            if confirmed:
                self._notes_taken = self._notes_taken or noting
            elif noting and not self._notes_taken and self._clock() < deadline:
                # Perhaps the broker takes no notes: why it refused a commit, the client tells in the next poll only.
                bare = [at(partition, offset) for partition, offset in targets.items()]
                confirmed = self._confirmed(targets, bare, deadline - self._clock())
        except KafkaException as problem:
            self._log.log(logging.WARNING, "commit unconfirmed: %s", error_of(problem))
            return {}
        return confirmed

    def _confirmed(
        self, targets: dict[Partition, int], places: list[TopicPartition], timeout_s: float
    ) -> dict[Partition, int]:
        """Commits these places, and reads back which targets are reached. Raises KafkaException, StreamRetriable."""
        self._membership()
        asked = [at(partition) for partition in targets]
        self._consumer.commit(offsets=places, asynchronous=True)
        self._unanswered_commits += 1
        confirmed: dict[Partition, int] = {}
        for _ in range(READ_BACKS):
            found = self._consumer.committed(asked, timeout=timeout_s)
            self._unanswered_commits = 0
            answers = {partition_at(each): each for each in found}
            confirmed = {p: offset for p, offset in targets.items() if self._confirms(answers[p], offset)}
            if len(confirmed) == len(targets):
                break
            self._serve(0.1)  # the client may be sending the commit to another coordinator
        return confirmed

    def _why_nothing(self, sending: Iterable[_Progress]) -> str:
        for progress in sending:
            failure = progress.failures.get(progress.acknowledged())
            if failure is not None:
                output, _, name, text = failure
                return f"output to topic {output.topic!r} was not acknowledged: {name}: {text}"
        return "outputs were acknowledged, but the group's coordinator did not confirm the commit"

    def _new_producer(self) -> Producer:
        return Producer({**producer_properties(self._config), "error_cb": self._on_error}, logger=self._log)

    def _give_up_producer(self, problem: BaseException) -> None:
        """An idempotent producer that lost its place: only a new one helps. What it did not deliver stays open."""
        self._producer_failed = True
        self._log.log(logging.WARNING, "a new producer is needed: %s", problem)


def _report(progress: _Progress, index: int, output: Output) -> Report:
    attempt = progress.attempt

    def report(error: KafkaError | None, _message: Message) -> None:
        if attempt != progress.attempt:
            return
        if error is not None:  # first: where this raises (see FATAL), the output must go on counting as open
            progress.rejected = True
            progress.fail(index, output, error)
        progress.open[index] -= 1

    return report
