"""Topics as logs: write records, and read whole topics without joining a group; for the demo, export and audits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from worker.adapters.kafka_client import advice_for, error_of
from worker.adapters.kafka_records import headers_of, offset_of, partition_at, partition_of, timestamp_of
from worker.adapters.kafka_topics import most_telling
from worker.core.envelope import Headers
from worker.errors import ConfigError, StreamRetriable
from worker.ports import Output, Partition

POLL_S = 0.2
BY_KEY = -1
"""RD_KAFKA_PARTITION_UA: the client chooses the partition."""
READER_GROUP = "ticket-router.reader"
ASK_S = 30.0
"""How long a question to the brokers may take. Offsets that an open transaction holds are told when it has ended."""
COORDINATOR_MOVES = frozenset(
    {
        KafkaError.NOT_COORDINATOR,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    }
)
"""Of the group's offsets, for a moment: after a broker's start the client may ask one that has just given them up."""

ClientProperties = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Record:
    """One message of a topic."""

    partition: Partition
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int
    """-1 where there is none."""


class TopicWriter:
    """Writes records, in order, and answers for their delivery."""

    def __init__(self, bootstrap_servers: str, properties: ClientProperties | None = None) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._failures: list[str] = []
        self._producer = Producer(
            {
                **(properties or {}),
                "bootstrap.servers": bootstrap_servers,
                "enable.idempotence": True,
                "linger.ms": 5,
                "logger": _SILENT,
            }
        )

    def write(self, output: Output, partition: int | None = None) -> None:
        """Queues one record, for this partition or by its key; waits where the queue is full.

        Raises ConfigError where the client takes it for no record at all, such as one that is too large.
        """
        while True:
            try:
                self._producer.produce(
                    output.topic,
                    key=output.key,
                    value=output.value,
                    headers=list(output.headers),
                    on_delivery=self._delivered,
                    partition=BY_KEY if partition is None else partition,
                )
            except BufferError:
                self._producer.poll(POLL_S)
            except KafkaException as error:
                raise ConfigError(f"topic '{output.topic}' takes no such record: {error.args[0].str()}") from error
            else:
                self._producer.poll(0)
                return

    def flush(self, timeout_s: float) -> None:
        """Until everything is acknowledged. Raises StreamRetriable where something is not."""
        left = self._producer.flush(timeout_s)
        if left or self._failures:
            failures, self._failures = self._failures, []
            what = failures[0] if failures else f"{left} records not acknowledged after {timeout_s:g} s"
            raise StreamRetriable(f"writing to the topic on {self._bootstrap_servers} failed: {what}")

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failures.append(f"{message.topic()}: {error.str()}")


class TopicReader:
    """Reads topics from their beginning; `records` ends at the ends as they were when it was called."""

    def __init__(
        self, bootstrap_servers: str, properties: ClientProperties | None = None, group_id: str = READER_GROUP
    ) -> None:
        """`group_id` names the group whose offsets `committed` tells; it is never joined."""
        self._bootstrap_servers, self._properties = bootstrap_servers, properties or {}
        self._reasons: list[KafkaError] = []
        self._consumer = Consumer(
            {
                **(properties or {}),
                "bootstrap.servers": bootstrap_servers,
                "group.id": group_id,  # demanded by the client; nothing is ever committed under it
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "queued.max.messages.kbytes": 16384,
                "error_cb": self._reasons.append,
                "logger": _SILENT,
            }
        )

    def records(
        self, topics: Sequence[str], *, since_ms: int | None = None, timeout_s: float = 30.0
    ) -> Iterator[Record]:
        """Every record of these topics, or from the first that is not older than `since_ms`; in order in a partition.

        Raises ConfigError for a topic that does not exist, StreamRetriable where nothing comes for `timeout_s`.
        """
        partitions = [p for topic in topics for p in self._partitions(topic)]
        if since_ms is not None:
            partitions = self._since(partitions, since_ms)
        yield from self._read(partitions, lambda ended: len(ended) == len(partitions), timeout_s)

    def follow(self, topics: Sequence[str], enough: Callable[[], bool], *, timeout_s: float) -> Iterator[Record]:
        """Records until `enough` says so. Raises ConfigError, StreamRetriable after `timeout_s` without a record."""
        yield from self._read([p for t in topics for p in self._partitions(t)], lambda _: enough(), timeout_s)

    def committed(self, topic: str) -> Mapping[Partition, int]:
        """The group's next offsets, where it has any. Raises ConfigError, StreamRetriable."""
        until = time.monotonic() + ASK_S
        while True:
            try:
                found = self._consumer.committed(self._partitions(topic), timeout=ASK_S)
                break
            except KafkaException as error:
                if error.args[0].code() not in COORDINATOR_MOVES or time.monotonic() > until:
                    raise StreamRetriable(f"the group's offsets are not known: {error.args[0].str()}") from error
                time.sleep(POLL_S)
        return {partition_at(at): at.offset for at in found if at.offset >= 0}

    def begins(self, topics: Sequence[str]) -> Mapping[Partition, int]:
        """The first offset of each partition that is still there. Raises ConfigError, StreamRetriable."""
        return self._edges(topics, OFFSET_BEGINNING)

    def ends(self, topics: Sequence[str]) -> Mapping[Partition, int]:
        """Behind the last offset of each partition that can be read. Raises ConfigError, StreamRetriable."""
        return self._edges(topics, OFFSET_END)

    def close(self) -> None:
        self._consumer.close()

    def _edges(self, topics: Sequence[str], which: int) -> Mapping[Partition, int]:
        asked = [TopicPartition(at.topic, at.partition, which) for topic in topics for at in self._partitions(topic)]
        try:
            told = self._consumer.offsets_for_times(asked, timeout=ASK_S)
        except KafkaException as error:
            raise StreamRetriable(f"offsets are not known: {error.args[0].str()}") from error
        for at in told:
            if at.error:
                raise StreamRetriable(f"offsets of {at.topic} [{at.partition}] are not known: {at.error.str()}")
        return {partition_at(at): at.offset for at in told}

    def _since(self, partitions: Sequence[TopicPartition], since_ms: int) -> list[TopicPartition]:
        # Below zero Kafka means something else than a time.
        asked = [TopicPartition(at.topic, at.partition, max(0, since_ms)) for at in partitions]
        try:
            return list(self._consumer.offsets_for_times(asked, timeout=ASK_S))  # the end, where all is older
        except KafkaException as error:
            raise StreamRetriable(f"offsets by time are not known: {error.args[0].str()}") from error

    def _partitions(self, topic: str) -> list[TopicPartition]:
        try:
            metadata = self._consumer.list_topics(topic, timeout=10).topics[topic]
        except KafkaException as problem:
            self._consumer.poll(0)  # fills the reasons
            error = most_telling([error_of(problem), *self._reasons])
            raise ConfigError(self._unreadable(topic, error)) from problem
        if metadata.error is not None:
            raise ConfigError(self._unreadable(topic, metadata.error))
        return [TopicPartition(topic, number, OFFSET_BEGINNING) for number in metadata.partitions]

    def _unreadable(self, topic: str, error: KafkaError) -> str:
        absent = error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
        what = "`ticket-router topics --create` makes it" if absent else advice_for(self._properties, error)
        return f"topic '{topic}' on {self._bootstrap_servers} cannot be read: {error.str()}. {what}"

    def _read(
        self,
        partitions: list[TopicPartition],
        finished: Callable[[set[Partition]], bool],
        timeout_s: float,
    ) -> Iterator[Record]:
        self._consumer.assign(partitions)
        ended: set[Partition] = set()
        quiet_since = time.monotonic()
        try:
            while not finished(ended):
                for message in self._consumer.consume(500, POLL_S):
                    error = message.error()
                    if error is None:
                        quiet_since = time.monotonic()
                        yield _record(message)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        quiet_since = time.monotonic()
                        ended.add(partition_of(message))
                    elif error.fatal() or not error.retriable():
                        raise StreamRetriable(f"reading failed: {error.str()}")
                if time.monotonic() - quiet_since > timeout_s:
                    raise StreamRetriable(f"no record came for {timeout_s:g} s")
        finally:
            self._consumer.unassign()


def _record(message: Message) -> Record:
    return Record(
        partition_of(message),
        offset_of(message),
        message.key(),
        message.value(),
        headers_of(message),
        timestamp_of(message),
    )


class _Silent:
    """The client logs to standard error unless it is given a logger; what matters is raised."""

    def log(self, *_: object) -> None: ...


_SILENT = _Silent()
