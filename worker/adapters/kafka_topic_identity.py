"""Whether the input topic is still the one that it was: a topic that is deleted and made anew keeps its name only."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from worker.adapters.kafka_client import KafkaConfig, RationedLog, shared_properties

ASK_EVERY_S = 5.0
ASK_S = 10.0
NONE = "A" * 22
"""The id, which is 0, from a broker that knows of none (before Apache Kafka 2.8, and the mock cluster)."""


class TopicIdentity:
    """Asks for the topic's id now and then, without waiting for the answer.

    librdkafka 2.16 goes on at its offset in the new topic: what lies before that would be passed over."""

    def __init__(self, config: KafkaConfig, log: RationedLog, clock: Callable[[], float]) -> None:
        self._topic = config.input_topic
        self._clock = clock
        properties: dict[str, Any] = {**shared_properties(config), "logger": log}
        self._admin = AdminClient(properties)
        self._answer: Future[Any] | None = None
        self._asked_at: float | None = None
        self._id: str | None = None

    def has_changed(self) -> bool:
        """Since the last answer. False where nothing new is known."""
        self._admin.poll(0)  # lets old log lines go
        answer, now = self._answer, self._clock()
        if answer is None:
            if self._asked_at is None or now - self._asked_at >= ASK_EVERY_S:
                self._asked_at = now
                asked = self._admin.describe_topics(TopicCollection([self._topic]), request_timeout=ASK_S)
                self._answer = asked[self._topic]
            return False
        if not answer.done():
            return False
        self._answer = None
        try:
            found = str(answer.result().topic_id)
        except KafkaException:  # away, or not there just now
            return False
        if found == NONE:
            return False
        before, self._id = self._id, found
        return before is not None and before != self._id
