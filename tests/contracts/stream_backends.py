"""The brokers that the stream contract runs on, behind one face: topics, raw messages, groups, and what they can do."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.servers.faulty_broker import FaultyBroker
from tests.servers.kafka import ApacheKafka
from tests.waiting import wait_for
from worker.adapters.kafka import KafkaConfig, KafkaStream
from worker.adapters.kafka_topics import create_topics
from worker.adapters.memory import MemoryBroker, MemoryStream
from worker.ports import Headers, Partition, TicketStream

QUIET = logging.getLogger("tests.kafka")
QUIET.addHandler(logging.NullHandler())
QUIET.propagate = False

SETTLE_TIMEOUT_S = 4.0


@dataclass(frozen=True, slots=True)
class Raw:
    """A message as it lies in a topic."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class Backend(Protocol):
    """One broker. Names of topics and groups are the test's own, since a broker may outlive it."""

    name: str
    commits_in_rebalances: bool
    """The mock cluster of librdkafka 2.16 answers REBALANCE_IN_PROGRESS instead."""

    def create_topic(self, topic: str, partitions: int, **settings: str) -> None: ...

    def produce(
        self, topic: str, partition: int, value: bytes | None, key: bytes | None = None, headers: Headers = ()
    ) -> None: ...

    def records(self, topic: str) -> Sequence[Raw]: ...

    def committed(self, group: str, topic: str) -> Mapping[int, int]: ...

    def stream(self, topic: str, group: str, **settings: Any) -> TicketStream: ...

    def stop_answering(self) -> None: ...

    def answer_again(self) -> None: ...

    def lose_member(self, stream: TicketStream) -> None:
        """The group takes the member for dead; it learns of it when it polls the next time."""


class MemoryBackend:
    name = "memory"
    commits_in_rebalances = True

    def __init__(self) -> None:
        self.broker = MemoryBroker({})

    def create_topic(self, topic: str, partitions: int, **settings: str) -> None:
        self.broker.create_topic(topic, partitions)

    def produce(
        self, topic: str, partition: int, value: bytes | None, key: bytes | None = None, headers: Headers = ()
    ) -> None:
        self.broker.produce(topic, key, value, headers, partition=partition)

    def records(self, topic: str) -> Sequence[Raw]:
        found = self.broker.records(topic)
        return [Raw(each.partition.number, each.offset, each.key, each.value, each.headers) for each in found]

    def committed(self, group: str, topic: str) -> Mapping[int, int]:
        return {p.number: offset for p, offset in self.broker.committed(group).items() if p.topic == topic}

    def stream(self, topic: str, group: str, **settings: Any) -> TicketStream:
        return MemoryStream(self.broker, topic, group)

    def stop_answering(self) -> None:
        self.broker.set_down(True)

    def answer_again(self) -> None:
        self.broker.set_down(False)

    def lose_member(self, stream: TicketStream) -> None:
        assert isinstance(stream, MemoryStream)
        self.broker.expel(stream)


class _KafkaBackend:
    """What the two brokers that speak Kafka's protocol share."""

    name = "kafka"
    commits_in_rebalances = True

    def __init__(self, bootstrap_servers: str, **settings: Any) -> None:
        self.bootstrap_servers = bootstrap_servers
        self._settings = settings
        self.forget_topics()

    def forget_topics(self) -> None:
        """As a producer that knows nothing yet, of a topic that was made anew least of all."""
        # One request at a time: what a topic that was just made refuses is sent again, and would come in another order.
        in_order = {"linger.ms": 0, "max.in.flight.requests.per.connection": 1}
        self._producer = Producer({"bootstrap.servers": self.bootstrap_servers, **in_order}, logger=QUIET)

    def config(self, topic: str, group: str, **settings: Any) -> KafkaConfig:
        chosen: dict[str, Any] = {
            "session_timeout_ms": 6_000,
            "settle_timeout_s": SETTLE_TIMEOUT_S,
            "release_timeout_s": SETTLE_TIMEOUT_S,
            **self._settings,
            **settings,
        }
        if chosen.get("group_protocol") != "consumer":
            chosen.setdefault("properties", {"heartbeat.interval.ms": 500})  # rebalances are noticed by heartbeats
        return KafkaConfig(self.bootstrap_servers, topic, group, **chosen)

    def stream(self, topic: str, group: str, **settings: Any) -> TicketStream:
        return KafkaStream(self.config(topic, group, **settings), QUIET)

    def produce(
        self, topic: str, partition: int, value: bytes | None, key: bytes | None = None, headers: Headers = ()
    ) -> None:
        """`delivered` makes sure of it."""
        self._producer.produce(topic, value=value, key=key, headers=list(headers), partition=partition)

    def delivered(self) -> None:
        assert self._producer.flush(30) == 0

    def records(self, topic: str) -> Sequence[Raw]:
        self.delivered()
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": "reader",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
            },
            logger=QUIET,
        )
        try:
            numbers = consumer.list_topics(topic, timeout=20).topics[topic].partitions
            found = []
            for number in sorted(numbers):
                consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING)])
                while (message := consumer.poll(20)) is not None:  # transactions leave offsets without a message
                    error = message.error()
                    if error is not None:
                        assert error.code() == KafkaError._PARTITION_EOF, error
                        break
                    found.append(_raw(message))
                assert message is not None, f"{topic}/{number} cannot be read to its end"
            return found
        finally:
            consumer.close()

    def committed(self, group: str, topic: str) -> Mapping[int, int]:
        consumer = Consumer({"bootstrap.servers": self.bootstrap_servers, "group.id": group}, logger=QUIET)
        try:
            numbers = consumer.list_topics(topic, timeout=20).topics[topic].partitions
            asked = [TopicPartition(topic, number) for number in numbers]
            return {at.partition: at.offset for at in consumer.committed(asked, timeout=20) if at.offset >= 0}
        finally:
            consumer.close()

    def lose_member(self, stream: TicketStream) -> None:
        """max.poll.interval.ms: the member has to be opened with `max_poll_interval_ms=6000`."""
        time.sleep(7.5)


class EmbeddedBackend(_KafkaBackend):
    name = "embedded"
    commits_in_rebalances = False

    def __init__(self, broker: FaultyBroker) -> None:
        super().__init__(broker.bootstrap_servers, assignment_strategy="range")
        self.broker = broker

    def create_topic(self, topic: str, partitions: int, **settings: str) -> None:
        self.broker.create_topic(topic, partitions)

    def stop_answering(self) -> None:
        self.broker.set_down(True)

    def answer_again(self) -> None:
        self.broker.set_down(False)


class ApacheBackend(_KafkaBackend):
    def __init__(self, server: ApacheKafka, name: str, **settings: Any) -> None:
        super().__init__(server.bootstrap_servers, **settings)
        self.name = name
        self.server = server

    def create_topic(self, topic: str, partitions: int, **settings: str) -> None:
        created = create_topics(self.config(topic, "none"), {topic: partitions}, 1, settings=settings)
        assert created == (topic,)

    def delete_topic(self, topic: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers}, logger=QUIET)
        admin.delete_topics([topic])[topic].result(30)
        # The controller has answered; the broker goes on taking messages until it has heard of it.
        wait_for(lambda: topic not in admin.list_topics(timeout=20).topics, "the topic to be gone")

    def produce_in_transactions(self, topic: str, values: Sequence[bytes]) -> None:
        """One each: every commit leaves a control record behind it."""
        settings = {"bootstrap.servers": self.bootstrap_servers, "transactional.id": f"{topic}-writer"}
        producer = Producer(settings, logger=QUIET)
        producer.init_transactions(30)
        for value in values:
            producer.begin_transaction()
            producer.produce(topic, value, partition=0)
            producer.commit_transaction(30)

    @contextmanager
    def open_transaction(self, topic: str, values: Sequence[bytes]) -> Iterator[None]:
        """Inside the block the values are written and not committed; at its end they are aborted."""
        settings = {"bootstrap.servers": self.bootstrap_servers, "transactional.id": f"{topic}-hanging"}
        producer = Producer(settings, logger=QUIET)
        producer.init_transactions(30)
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value, partition=0)
        assert producer.flush(30) == 0
        try:
            yield
        finally:
            producer.abort_transaction(30)

    def stop_answering(self) -> None:
        self.server.freeze()

    def answer_again(self) -> None:
        self.server.thaw()


def _raw(message: Any) -> Raw:
    headers = tuple(message.headers() or ())
    return Raw(message.partition(), message.offset(), message.key(), message.value(), headers)


def partitions(topic: str, *numbers: int) -> list[Partition]:
    return [Partition(topic, number) for number in numbers]
