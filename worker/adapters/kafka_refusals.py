"""Which outputs Kafka will never take: what is known of a record before it is produced, and how a full queue is met."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from worker.adapters.kafka_client import TOPIC_REFUSALS, KafkaConfig, error_of
from worker.adapters.kafka_topics import TopicLookup
from worker.ports import Finished, Output

REFUSED_TOPIC_RETRY_S = 10.0
"""For so long a topic that was refused is not asked about again."""

RECORD_OVERHEAD_BYTES = 64
"""At most what a record needs besides key, value and headers (36 in message format 2, librdkafka 2.16), rounded up."""

HEADER_OVERHEAD_BYTES = 10
"""At most two varints for the lengths of a header's name and value."""

Report = Callable[[KafkaError | None, Message], None]


class Foresight:
    """Tells of an output, before it is produced, that it would be refused; remembers what brokers said of topics."""

    def __init__(self, config: KafkaConfig, topics: TopicLookup, clock: Callable[[], float]) -> None:
        self._config = config
        self._topics = topics
        self._clock = clock
        self._existing: set[str] = set()
        self._refused_topics: dict[str, tuple[float, KafkaError]] = {}

    def refusal(self, finished: Finished, until: float) -> tuple[Output, KafkaError] | None:
        """The first output that cannot be delivered now, and why; the error need not be a refusal for good."""
        for output in finished.outputs:
            size = record_bytes(output)
            if size > self._config.max_output_bytes:
                text = f"{size} bytes, and max_output_bytes allows {self._config.max_output_bytes}"
                return output, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, text)
            error = self._topic_error(output.topic, until)
            if error is not None:
                return output, error
        return None

    def refuse_topic(self, topic: str, error: KafkaError) -> None:
        """A broker said so: for a while, what is for this topic is refused without asking again."""
        self._existing.discard(topic)
        self._refused_topics[topic] = (self._clock() + REFUSED_TOPIC_RETRY_S, error)

    def doubt(self, outputs: Iterable[Output]) -> None:
        """These were not acknowledged: for a topic that was deleted the client tries until it times out."""
        self._existing.difference_update(output.topic for output in outputs)

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
            self.refuse_topic(topic, found)
            return found
        self._existing.add(topic)
        return None


def produce(producer: Producer, output: Output, report: Report, *, until: float, clock: Callable[[], float]) -> None:
    """Hands one output to the client; where its queue is full, its callbacks make room. Raises KafkaException."""
    while True:
        try:
            producer.produce(
                output.topic,
                value=output.value,
                key=output.key,
                headers=list(output.headers) or None,
                on_delivery=report,
            )
            return
        except BufferError:
            if clock() >= until:
                raise KafkaException(KafkaError(KafkaError._QUEUE_FULL)) from None
            producer.poll(0.05)


def record_bytes(output: Output) -> int:
    """At most the size of the output as a record, uncompressed."""
    headers = sum(HEADER_OVERHEAD_BYTES + len(name.encode()) + len(value or b"") for name, value in output.headers)
    return RECORD_OVERHEAD_BYTES + headers + len(output.key or b"") + len(output.value or b"")
