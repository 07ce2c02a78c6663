"""Which outputs Kafka will never take: what is known of a record before it is produced, and how a full queue is met."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from worker.adapters.kafka_client import SIZE_REFUSALS, TOPIC_REFUSALS, KafkaConfig, error_of
from worker.adapters.kafka_topics import TopicLookup
from worker.ports import Finished, Output, Partition

REFUSED_TOPIC_RETRY_S = 10.0
"""For so long a topic that was refused is not asked about again."""

REFUSED_RECORD_RETRY_S = 30.0
"""For so long records like one that was refused are not sent to its topic; then it may have been mended."""

RECORD_OVERHEAD_BYTES = 64
"""At most what a record needs besides key, value and headers (36 in message format 2, librdkafka 2.16), rounded up."""

WHATEVER_THE_RECORD = TOPIC_REFUSALS | {
    KafkaError.INVALID_TIMESTAMP,  # ours is always that of now
    KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
}
"""What a broker says to one record alone, and would say to all others for the topic."""

HEADER_OVERHEAD_BYTES = 10
"""At most two varints for the lengths of a header's name and value."""

ANY_PARTITION = -1
"""The client's default, as NOW is: the partitioner chooses."""

NOW = 0

Report = Callable[[KafkaError | None, Message], None]


class Refusal(NamedTuple):
    """An output that is not taken, of whom it is, and why."""

    finished: Finished
    output: Output
    error: KafkaError


class Foresight:
    """Tells of an output, before it is produced, that it would be refused; remembers what brokers said of topics."""

    def __init__(self, config: KafkaConfig, topics: TopicLookup, clock: Callable[[], float]) -> None:
        self._config = config
        self._topics = topics
        self._clock = clock
        self._existing: set[str] = set()
        self._refused_topics: dict[str, tuple[float, KafkaError]] = {}
        self._refused_records: dict[Partition, dict[int, tuple[Output, KafkaError]]] = {}
        self._too_large: dict[str, tuple[float, int, KafkaError]] = {}
        self._keyless: dict[str, tuple[float, KafkaError]] = {}

    def refusal(self, finished: Finished, until: float) -> tuple[Output, KafkaError] | None:
        """The first output that cannot be delivered now, and why; the error need not be a refusal for good."""
        if self._refused_records:
            delivery = finished.delivery
            known = self._refused_records.get(delivery.partition, {}).get(delivery.offset)
            if known is not None and known[0] in finished.outputs:  # else others took their place
                return known
        for output in finished.outputs:
            size = record_bytes(output)
            if size > self._config.max_output_bytes:
                text = f"{size} bytes, and max_output_bytes allows {self._config.max_output_bytes}"
                return output, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, text)
            if output.topic not in self._existing or self._too_large or self._keyless:
                error = self._topic_error(output.topic, until) or self._like_refused(output)
                if error is not None:
                    return output, error
        return None

    def learn(self, refusal: Refusal) -> None:
        """A broker refused this record, alone: so it would others like it, for a while, and this one always."""
        delivery, output, error = refusal.finished.delivery, refusal.output, refusal.error
        if error.code() in WHATEVER_THE_RECORD:
            self._refuse_topic(output.topic, error)
            return
        self._refused_records.setdefault(delivery.partition, {})[delivery.offset] = (output, error)
        until = self._clock() + REFUSED_RECORD_RETRY_S
        if error.code() in SIZE_REFUSALS:
            known_until, known, _ = self._too_large.get(output.topic, (0.0, 0, error))
            size = compressed_bytes(output)
            still = self._clock() < known_until
            self._too_large[output.topic] = (until, min(size, known) if still else size, error)
        elif error.code() == KafkaError.INVALID_RECORD and output.key is None:  # a compacted topic takes none of them
            self._keyless[output.topic] = (until, error)

    def forget(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self._refused_records.pop(partition, None)

    def settled(self, offsets: Mapping[Partition, int]) -> None:
        """What lies before these offsets is not asked about again."""
        for partition, records in self._refused_records.items():
            upto = offsets.get(partition, 0)
            for offset in [offset for offset in records if offset < upto]:
                del records[offset]

    def doubt(self, outputs: Iterable[Output]) -> None:
        """These were not acknowledged: for a topic that was deleted the client tries until it times out."""
        self._existing.difference_update(output.topic for output in outputs)

    def missing(self, topics: Iterable[str], until: float) -> KafkaError | None:
        """Asks whether one of these was taken away, since acknowledgements for it would be waited for in vain."""
        waiting = sorted(topics)
        self._existing.difference_update(waiting)
        for topic in waiting:
            error = self._topic_error(topic, until)
            if error is not None:  # either it is gone, or nobody answers for the others either
                return error if error.code() in TOPIC_REFUSALS else None
        return None

    def _refuse_topic(self, topic: str, error: KafkaError) -> None:
        """For a while, what is for this topic is refused without asking again."""
        self._existing.discard(topic)
        self._refused_topics[topic] = (self._clock() + REFUSED_TOPIC_RETRY_S, error)

    def _like_refused(self, output: Output) -> KafkaError | None:
        topic = output.topic
        if topic in self._too_large:
            until, size, error = self._too_large[topic]
            if self._clock() >= until:
                del self._too_large[topic]
            elif compressed_bytes(output) >= size:
                return error
        if output.key is None and topic in self._keyless:
            until, error = self._keyless[topic]
            if self._clock() < until:
                return error
            del self._keyless[topic]
        return None

    def _topic_error(self, topic: str, until: float) -> KafkaError | None:
        """A misspelt output topic is refused in one round trip, where the producer would wait 30 s or create it."""
        if topic in self._existing:
            return None
        refused_until, error = self._refused_topics.get(topic, (0.0, None))
        if error is not None and self._clock() < refused_until:
            return error
        try:
            found = self._topics.error(topic, max(0.1, min(5.0, until - self._clock())))
        except KafkaException as problem:
            return error_of(problem)
        if found is not None and found.code() in TOPIC_REFUSALS:
            self._refuse_topic(topic, found)
            return found
        self._existing.add(topic)
        return None


def produce(producer: Producer, output: Output, report: Report, until: float, clock: Callable[[], float]) -> None:
    """Hands one output to the client; where its queue is full, its callbacks make room. Raises KafkaException."""
    headers: list[tuple[str, str | bytes | None]] | None = list(output.headers) or None
    while True:
        try:
            # By position: reading the names would be a third of the call. They are partition, callback, its other name,
            # timestamp, headers.
            producer.produce(output.topic, output.value, output.key, ANY_PARTITION, report, None, NOW, headers)
            return
        except BufferError:
            if clock() >= until:
                raise KafkaException(KafkaError(KafkaError._QUEUE_FULL)) from None
            producer.poll(0.05)


def record_bytes(output: Output) -> int:
    """At most the size of the output as a record, uncompressed."""
    size = RECORD_OVERHEAD_BYTES + len(output.key or b"") + len(output.value or b"")
    for name, value in output.headers:
        size += HEADER_OVERHEAD_BYTES + len(name.encode()) + len(value or b"")
    return size


def compressed_bytes(output: Output) -> int:
    """To compare records by: brokers judge the compressed batch (lz4; this is the standard library's nearest)."""
    parts = [output.key or b"", output.value or b"", *(value or b"" for _, value in output.headers)]
    return len(zlib.compress(b"".join(parts), 1))
