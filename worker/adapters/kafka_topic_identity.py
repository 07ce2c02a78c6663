"""Whether the input topic is still the one that it was: a topic that is deleted and made anew keeps its name only."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient

from worker.adapters.kafka_client import KafkaConfig, RationedLog, shared_properties
from worker.adapters.kafka_records import metadata_of, partition_at
from worker.ports import Partition

ASK_EVERY_S = 5.0
ASK_S = 10.0
NONE = "A" * 22
"""The id, which is 0, from a broker that knows of none (before Apache Kafka 2.8)."""

NOTE = "ticket-router/1"
"""What begins the metadata of the worker's commits, with the version of what follows: the ids of topic and cluster."""

_NOTED = re.compile(rf"{NOTE} ([A-Za-z0-9_-]{{22}}) ([!-:<-~]{{1,100}});")
"""It states its end, since anything may follow it (`metadata_of`)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which log a topic's name stands for; both ids as Kafka's tools print them."""

    topic_id: str
    cluster_id: str

    @property
    def note(self) -> str:
        """For a commit's metadata: with an id of Kafka's own making, and the NUL that confluent-kafka adds, 63 bytes of
        the 4,096 that brokers take (offset.metadata.max.bytes)."""
        return f"{NOTE} {self.topic_id} {self.cluster_id};"

    @staticmethod
    def noted(metadata: str | None) -> Identity | None:
        """None for what is no such note: of an older worker, or of whoever set the offset."""
        stated = _NOTED.match(metadata or "")
        return None if stated is None else Identity(*stated.groups())

    @staticmethod
    def noted_with(committed: TopicPartition) -> Identity | None:
        """The same, of what a group has committed."""
        return Identity.noted(metadata_of(committed))

    def has_replaced(self, other: Identity | None) -> bool:
        """Whether offsets of `other` say nothing about this one. Those that were carried over from another cluster, as
        MirrorMaker does with their metadata, were translated on the way."""
        return other is not None and other.cluster_id == self.cluster_id and other.topic_id != self.topic_id


class TopicIdentity:
    """Asks for the topic's id now and then, without waiting for the answer, and remembers as which log each partition
    is read.

    librdkafka 2.16 goes on at its offset in the new topic: what lies before that would be passed over. The brokers
    forget a group's offsets when they delete a topic (Apache Kafka 4.3), but take what a member commits afterwards,
    while it has not seen that the topic is another one; and they keep the offsets where the group's coordinator is
    away meanwhile. So each commit carries a note of the log that it counts in.
    """

    def __init__(self, config: KafkaConfig, log: RationedLog, clock: Callable[[], float]) -> None:
        self._config = config
        self._log = log
        self._clock = clock
        self._admin: AdminClient | None = None
        self._cluster_id = ""
        self._answer: Future[Any] | None = None
        self._asked_at: float | None = None
        self._present: Identity | None = None
        self._read: dict[Partition, Identity | None] = {}
        self._noting = True

    def open(self, cluster_id: str, timeout_s: float) -> None:
        """Before anything is read, so that no log is taken for one that replaced it. Without a call, nothing is asked
        and nothing noted. Raises KafkaException where the client's properties are wrong."""
        properties: dict[str, Any] = {**shared_properties(self._config), "logger": self._log}
        self._admin = AdminClient(properties)
        self._cluster_id = cluster_id
        with suppress(KafkaException):  # it is asked again
            self.ask(timeout_s)

    def close(self) -> None:
        self._admin = self._answer = None

    @property
    def present(self) -> Identity | None:
        """By the last answer; None where nothing is known."""
        return self._present

    def ask(self, timeout_s: float) -> Identity | None:
        """Waits for the answer. None from brokers that know of no ids. Raises KafkaException."""
        if self._admin is None:
            return None
        self._answer = None  # what was asked before may be older
        self._asked_at = self._clock()
        asked = self._asked(self._admin, timeout_s)
        try:
            found = asked.result(timeout_s + 1.0)
        except FutureTimeoutError:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "the topic's id is not known")) from None
        return self._learn(found)

    def replaced(self) -> Sequence[Partition]:
        """Partitions that are read as a log which another has replaced; each is told of once. Does not wait."""
        admin, answer, now = self._admin, self._answer, self._clock()
        if admin is None:
            return ()
        admin.poll(0)  # lets old log lines go
        if answer is None:
            if self._asked_at is None or now - self._asked_at >= ASK_EVERY_S:
                self._asked_at = now
                self._answer = self._asked(admin, ASK_S)
        elif answer.done():
            self._answer = None
            with suppress(KafkaException):  # away, or not there just now
                self._learn(answer.result())
        present = self._present
        if present is None:
            return ()
        changed = [each for each, read in self._read.items() if read is not None and read.topic_id != present.topic_id]
        self._read = dict.fromkeys(self._read, present)
        return changed

    def hurry(self) -> None:
        """Something speaks for another log: the next question is due at once."""
        self._asked_at = None

    def begin(self, partitions: Iterable[Partition]) -> None:
        """These are read from now on, as what the topic is by the last answer."""
        self._read.update(dict.fromkeys(partitions, self._present))

    def forget(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self._read.pop(partition, None)

    def note(self, partition: Partition) -> str | None:
        """For the metadata of this partition's commits."""
        read = self._read.get(partition)
        return None if read is None or not self._noting else read.note

    def stop_noting(self) -> bool:
        """The brokers refuse commits for what is noted with them. False where nothing has been noted since."""
        if not self._noting:
            return False
        self._noting = False
        self._log.log(
            logging.WARNING,
            "offsets are committed without the id of their topic from here on: the brokers take fewer bytes than that "
            "with a commit. A worker that is started after %r was deleted and made anew may pass over tickets in it. "
            "Set offset.metadata.max.bytes on the brokers to 128 or more, and start this worker again",
            self._config.input_topic,
        )
        return True

    def counts_here(self, committed: TopicPartition) -> bool:
        """Whether an offset that the group has committed may be one of the log that is read."""
        read = self._read.get(partition_at(committed))
        return read is None or not read.has_replaced(Identity.noted_with(committed))

    def _asked(self, admin: AdminClient, timeout_s: float) -> Future[Any]:
        topic = self._config.input_topic
        return admin.describe_topics(TopicCollection([topic]), request_timeout=timeout_s)[topic]

    def _learn(self, found: Any) -> Identity | None:
        told = str(found.topic_id)
        if told == NONE:
            return None
        self._present = Identity(told.translate(str.maketrans("+/", "-_")), self._cluster_id)
        return self._present
